"""Tensor parallelism: one linear layer, computed by several ranks that each hold blocks of it.

``SCHEMES`` maps the name of a scheme to the scheme; ``TensorParallelLinear`` makes a module of any of them.

>>> SCHEMES["row"].W
Layout("D@tp F")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.tensor_parallel.cannon import Cannon
    from lessons_lib.tensor_parallel.column import Column
    from lessons_lib.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
    from lessons_lib.tensor_parallel.cube import Cube, CubeKept
    from lessons_lib.tensor_parallel.dropout import ParallelDropout, RandomStreams
    from lessons_lib.tensor_parallel.layer_norm import ParallelLayerNorm
    from lessons_lib.tensor_parallel.linear import TensorParallelLinear, tensor_parallel_linear
    from lessons_lib.tensor_parallel.row import Row
    from lessons_lib.tensor_parallel.scheme import PricedScheme, Scheme
    from lessons_lib.tensor_parallel.schemes import SCHEMES, VARIANTS
    from lessons_lib.tensor_parallel.summa import Summa
    from lessons_lib.tensor_parallel.tesseract import Tesseract
    from lessons_lib.tensor_parallel.vocabulary import (
        VOCABULARIES,
        ParallelPositionEmbedding,
        VocabParallelEmbedding,
        VocabParallelHead,
        Vocabulary,
        padded,
    )

__all__ = [
    "SCHEMES",
    "VARIANTS",
    "VOCABULARIES",
    "Cannon",
    "Column",
    "Cube",
    "CubeKept",
    "ParallelDropout",
    "ParallelLayerNorm",
    "ParallelPositionEmbedding",
    "PricedScheme",
    "RandomStreams",
    "Row",
    "Scheme",
    "Summa",
    "TensorParallelLinear",
    "Tesseract",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "Vocabulary",
    "padded",
    "tensor_parallel_linear",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "SCHEMES": ".schemes",
        "VARIANTS": ".schemes",
        "Cannon": ".cannon",
        "Column": ".column",
        "Cube": ".cube",
        "CubeKept": ".cube",
        "Row": ".row",
        "ParallelDropout": ".dropout",
        "ParallelLayerNorm": ".layer_norm",
        "RandomStreams": ".dropout",
        "PricedScheme": ".scheme",
        "Scheme": ".scheme",
        "Summa": ".summa",
        "Tesseract": ".tesseract",
        "TensorParallelLinear": ".linear",
        "tensor_parallel_linear": ".linear",
        "VOCABULARIES": ".vocabulary",
        "ParallelPositionEmbedding": ".vocabulary",
        "VocabParallelCrossEntropy": ".cross_entropy",
        "VocabParallelEmbedding": ".vocabulary",
        "VocabParallelHead": ".vocabulary",
        "Vocabulary": ".vocabulary",
        "padded": ".vocabulary",
    },
)
