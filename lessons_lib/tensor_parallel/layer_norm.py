"""LayerNorm where the model width is cut: the statistics of a row lie on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh, copy_sum, sum_sum
from lessons_lib.timeline import ring_traffic


def layer_norm(
    x: Float[Tensor, "*rows d"],
    weight: Float[Tensor, " d"],
    bias: Float[Tensor, " d"],
    layout: Layout,
    mesh: Mesh,
    eps: float = 1e-5,
) -> Float[Tensor, "*rows d"]:
    """Normalise every row of X over all of its D, of which this rank holds a part, differentiably.

        mean = sum over ranks (sum of x) / D
        var  = sum over ranks (sum of (x - mean)^2) / D
        y    = (x - mean) / sqrt(var + eps) * weight + bias

    Both sums are used by every rank for columns of its own, so each gradient of a sum is the sum of all
    ranks' gradients: ``sum_sum``, all-reduces both ways. The mean goes first and the deviations second; one
    all-reduce of the sums of x and x^2 would save a round and, for a mean far from 0, lose the variance.

    Layouts: x and y as ``layout`` says, weight and bias as its last dim. Where the rows are cut over an axis,
    the gradients of weight and bias are sums over this rank's rows, which ``copy_sum`` adds up.
    Traffic per rank: :func:`layer_norm_traffic`.
    Source: Xu et al. 2021 (Optimus), section 3.2.5, with the mean and the deviations in two rounds.
    """
    *rows_cut, columns = layout.cuts
    D = x.shape[-1]
    for axis in columns:
        D *= mesh.sizes[axis]

    def over_columns(total: Tensor) -> Tensor:
        for axis in columns:
            total = sum_sum(total, mesh[axis])
        return total / D

    for cut in rows_cut:
        for axis in cut:
            weight, bias = copy_sum(weight, mesh[axis]), copy_sum(bias, mesh[axis])
    if not columns:  # a row lies on one rank: torch's own kernel keeps only x and two numbers a row
        return functional.layer_norm(x, (D,), weight, bias, eps)
    deviation = x - over_columns(x.sum(-1, keepdim=True))
    variance = over_columns(deviation.square().sum(-1, keepdim=True))
    return deviation * torch.rsqrt(variance + eps) * weight + bias


def layer_norm_traffic(B: int, D: int, layout: Layout, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
    """Elements each rank sends, by the ring convention; the mean where ranks differ.

    >>> layer_norm_traffic(8, 16, Layout("B@row D@col"), {"row": 2, "col": 2})
    {'forward': 8, 'backward': 24}

    Forward an all-reduce of two numbers per row and axis that cuts D; backward the same, and an all-reduce
    of the gradients of weight and bias per axis that cuts the rows.
    """
    rows, columns = layout.cuts
    b, d = layout.local_shape((B, D), sizes)
    statistics = sum(2 * ring_traffic("all_reduce", b, sizes[axis]) for axis in columns)
    parameters = sum(2 * ring_traffic("all_reduce", d, sizes[axis]) for axis in rows)
    return {"forward": statistics, "backward": statistics + parameters}


class ParallelLayerNorm(nn.Module):
    """An ``nn.LayerNorm`` whose input lies as ``layout`` says; each rank holds its part of weight and bias.

    >>> from lessons_lib import run
    >>> def step():
    ...     layout, mesh = Layout("B@row D@col"), Mesh(row=2, col=2)
    ...     norm = ParallelLayerNorm.from_layer_norm(nn.LayerNorm(6), layout, mesh)
    ...     return tuple(norm.weight.shape), str(norm)
    >>> run(step, ranks=4).values[0]
    ((3,), 'ParallelLayerNorm(B@row D@col)')
    """

    def __init__(
        self, weight: Float[Tensor, " d"], bias: Float[Tensor, " d"], layout: Layout, mesh: Mesh, eps: float
    ) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.layout, self.mesh, self.eps = layout, mesh, eps

    @classmethod
    def from_layer_norm(cls, norm: nn.LayerNorm, layout: Layout, mesh: Mesh) -> ParallelLayerNorm:
        """Cut a serial LayerNorm, of which every rank has a copy. No communication.

        Raises RefusedError, in the layout's words, if the mesh does not divide the width.
        """
        columns = layout.last()
        weight, bias = (columns.shard(p.detach(), mesh) for p in (norm.weight, norm.bias))
        return cls(weight, bias, layout, mesh, norm.eps)

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        if x.shape[-1] != len(self.weight):
            raise RefusedError(
                f"a norm whose input lies as {self.layout!r} has {len(self.weight)} columns of it on each "
                f"rank of {self.mesh!r}; rank {self.mesh.rank} was given shape {tuple(x.shape)}. "
                f"Is it whole? {self.layout!r}.shard(X, mesh) cuts it."
            )
        return layer_norm(x, self.weight, self.bias, self.layout, self.mesh, self.eps)

    def extra_repr(self) -> str:
        return str(self.layout)
