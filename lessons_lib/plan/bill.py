"""What a rank's part of a model sends, by formula: module by module."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from torch import nn

from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel import (
    ParallelLayerNorm,
    ParallelPositionEmbedding,
    TensorParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from lessons_lib.tensor_parallel.cross_entropy import loss_traffic
from lessons_lib.tensor_parallel.layer_norm import layer_norm_traffic
from lessons_lib.tensor_parallel.vocabulary import position_layout, position_traffic
from lessons_lib.timeline import ring_traffic

Bill = dict[str, int | Fraction]


def traffic(model: nn.Module, n_tokens: int, mesh: Mesh) -> Bill:
    """Return the elements a rank sends in one forward and one backward pass over ``n_tokens``, by formula.

    The sum over the modules of ``model``, by the ring convention; where sizes do not divide, the ranks' mean.
    All parameters are trained, and nothing is recomputed.
    """
    total: Bill = {"forward": 0, "backward": 0}
    for module in model.modules():
        for direction, n in module_traffic(module, n_tokens, mesh.sizes).items():
            total[direction] += n
    return total


def module_traffic(module: nn.Module, n_tokens: int, sizes: Mapping[str, int]) -> Bill:
    """The same of one module, without those inside it."""
    if isinstance(module, TensorParallelLinear):
        sent = module.scheme.traffic(n_tokens, module.D, module.F, sizes)
        if module.bias is not None:  # where rows are cut, its gradient is summed over them
            summed = [
                ring_traffic("all_reduce", len(module.bias), sizes[a]) for a in module.scheme.Y.dim("B")
            ]
            sent = {**sent, "backward": sent["backward"] + sum(summed)}
        return sent
    if isinstance(module, ParallelLayerNorm):
        (D,) = module.layout.last().global_shape(module.weight.shape, sizes)
        return layer_norm_traffic(n_tokens, D, _rows(module), sizes)
    if isinstance(module, ParallelPositionEmbedding):
        S, D = position_layout(module.stream).global_shape(module.weight.shape, sizes)
        return position_traffic(S, D, module.stream, sizes)
    if isinstance(module, VocabParallelEmbedding | VocabParallelHead):
        V, D = module.vocabulary.table.global_shape(module.weight.shape, sizes)
        if isinstance(module, VocabParallelHead):
            return module.vocabulary.head_traffic(n_tokens, V, D, sizes)
        return module.vocabulary.embedding_traffic(n_tokens, V, D, sizes)
    if isinstance(module, VocabParallelCrossEntropy):
        return loss_traffic(n_tokens, module.vocabulary, sizes)
    return {"forward": 0, "backward": 0}


def _rows(norm: ParallelLayerNorm) -> Layout:
    """The layout of a norm's input as rows: what cuts B or S cuts the rows."""
    *rows, columns = norm.layout.cuts
    return Layout.of({"B": [axis for cut in rows for axis in cut], "D": columns})
