"""Tensor parallelism: one linear layer, computed by several ranks that each hold blocks of it.

``SCHEMES`` maps the name of a scheme to the scheme; ``TensorParallelLinear`` makes a module of any of them.

>>> SCHEMES["row"].W
Layout("D@tp F")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.tensor_parallel.column import Column
    from lessons_lib.tensor_parallel.linear import TensorParallelLinear, tensor_parallel_linear
    from lessons_lib.tensor_parallel.row import Row
    from lessons_lib.tensor_parallel.schemes import SCHEMES, Scheme

__all__ = ["SCHEMES", "Column", "Row", "Scheme", "TensorParallelLinear", "tensor_parallel_linear"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "SCHEMES": ".schemes",
        "Column": ".column",
        "Row": ".row",
        "Scheme": ".schemes",
        "TensorParallelLinear": ".linear",
        "tensor_parallel_linear": ".linear",
    },
)
