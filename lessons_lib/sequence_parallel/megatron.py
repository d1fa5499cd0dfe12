"""Megatron's sequence parallelism: 1D tensor parallelism that leaves no whole stream behind.

1D keeps the residual stream, and all that norms and dropout make of it, whole on every rank. Here it is cut
over the same ranks along the sequence, S, and each all-reduce of 1D is stopped halfway: a row layer ends with
a reduce-scatter, and the all-gather that is the other half stands before the next column layer. Between the
two, every rank works on tokens of its own.

Source: Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models), section 4.2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from fractions import Fraction

from jaxtyping import Float
from torch import Tensor, nn

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh, gather_reduce_scatter
from lessons_lib.models.gpt import Block
from lessons_lib.tensor_parallel.dropout import ParallelDropout
from lessons_lib.tensor_parallel.layer_norm import ParallelLayerNorm, layer_norm_traffic
from lessons_lib.tensor_parallel.linear import TensorParallelLinear
from lessons_lib.tensor_parallel.scheme import PricedScheme, Scheme, blocks
from lessons_lib.timeline import ring_traffic


class SequenceColumn:
    """Cut the columns of W, and take an input whose rows are cut: gather them, and gather them again.

    >>> SequenceColumn().traffic(B=6, D=4, F=10, sizes={"tp": 2})
    {'forward': 12, 'backward': 24}

    Equations: rank r holds rows r of X, and block r of the columns of W and of Y.

        forward     Y_r  = X W_r                           all-gather X
        backward    dX   = sum over ranks dY_r W_r.T       reduce-scatter: a rank keeps its rows
                    dW_r = X.T dY_r                        all-gather X again

    Layouts: ``X`` cut over ``tp`` by its rows, ``W`` and ``Y`` by their last dim, as in the column-parallel
    layer. Rows are counted sequence first, all sequences' tokens of one position side by side (``rows``), so
    who cuts the rows cuts the sequence.
    Traffic per rank, ring algorithm: (p-1)/p B D elements forward, 2 (p-1)/p B D backward.
    Memory kept for backward per rank: x, B/p D elements, and w, D F/p.
    Raises, through its layouts: RefusedError where p does not divide B, or F.
    Source: Korthikanti et al. 2022, section 4.2.2, operator g; keeping only x and gathering again is said at
    its end. They hide that gather behind the product for dX.
    """

    axes: tuple[str, ...] = ("tp",)
    rows = "S"  # the first of a row's two dims: [B, S, D] is flattened to rows as [S, B, D] is
    X = Layout("B@tp D")
    W = Layout("D F@tp")
    Y = Layout("B F@tp")

    def forward(self, x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh) -> Float[Tensor, "b_y f"]:
        return mesh["tp"].all_gather(x, 0) @ w

    def backward(
        self, dy: Float[Tensor, "b_y f"], x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "d f"]]:
        dx = mesh["tp"].reduce_scatter(dy @ w.T, 0)
        dw = mesh["tp"].all_gather(x, 0).T @ dy
        return dx, dw

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        gather = ring_traffic("all_gather", B * D, sizes["tp"])
        return {"forward": gather, "backward": 2 * gather}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        x, w, y = blocks(self, B, D, F, sizes)
        rest, gathered = x + w + y, B * D
        return {"rest": rest, "kept": x + w, "forward": rest + gathered, "backward": rest + x + gathered + w}


class SequenceColumnKept(SequenceColumn):
    """The same with one gather less, and the whole input kept: "no extra communication", at its price.

    >>> SequenceColumnKept().traffic(B=6, D=4, F=10, sizes={"tp": 2})
    {'forward': 12, 'backward': 12}

    Traffic per rank: (p-1)/p B D, forward and again backward: as much as the column-parallel layer.
    Memory kept for backward per rank: X whole, B D elements, and w.
    """

    def differentiable(
        self, x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh
    ) -> Float[Tensor, "b_y f"]:
        return gather_reduce_scatter(x, mesh["tp"]) @ w

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        gather = ring_traffic("all_gather", B * D, sizes["tp"])
        return {"forward": gather, "backward": gather}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        memory, whole = super().memory(B, D, F, sizes), B * D
        _, w, _ = blocks(self, B, D, F, sizes)
        both_gradients = memory["rest"] + 2 * whole + w
        return memory | {"kept": memory["kept"] + whole, "backward": both_gradients}


class SequenceRow:
    """Cut the rows of W, and leave an output whose rows are cut: each rank gets the finished sum of its own.

    >>> SequenceRow().traffic(B=6, D=4, F=10, sizes={"tp": 2})
    {'forward': 30, 'backward': 30}

    Equations: rank r holds block r of the columns of X and of the rows of W, and in the end rows r of Y.

        forward     Y    = sum over ranks X_r W_r          reduce-scatter: a rank keeps its rows
        backward    dX_r = dY W_r.T                        all-gather dY, once for both
                    dW_r = X_r.T dY

    Layouts: ``X`` cut over ``tp`` by its last dim, ``W`` by its first, ``Y`` by its rows, counted as in
    :class:`SequenceColumn`. A bias is added to Y, so to each row on one rank; its gradient there is a sum
    over the rank's own rows, and has to be summed over the ranks.
    Traffic per rank, ring algorithm: (p-1)/p B F elements forward, and again backward.
    Memory kept for backward per rank: x, B D/p elements, and w, D/p F.
    Raises, through its layouts: RefusedError where p does not divide B, or D.
    Source: Korthikanti et al. 2022, section 4.2.2, the conjugate of g.
    """

    axes: tuple[str, ...] = ("tp",)
    rows = SequenceColumn.rows
    X = Layout("B D@tp")
    W = Layout("D@tp F")
    Y = Layout("B@tp F")

    def forward(self, x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh) -> Float[Tensor, "b_y f"]:
        return mesh["tp"].reduce_scatter(x @ w, 0)

    def backward(
        self, dy: Float[Tensor, "b_y f"], x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "d f"]]:
        whole_dy = mesh["tp"].all_gather(dy, 0)
        dx = whole_dy @ w.T
        dw = x.T @ whole_dy
        return dx, dw

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        half = ring_traffic("reduce_scatter", B * F, sizes["tp"])
        return {"forward": half, "backward": half}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        x, w, y = blocks(self, B, D, F, sizes)
        rest, whole = x + w + y, B * F
        return {"rest": rest, "kept": x + w, "forward": rest + whole, "backward": rest + whole + x + w}


SEQUENCE_SCHEMES: dict[str, PricedScheme] = {
    "sequence column": SequenceColumn(),
    "sequence column kept": SequenceColumnKept(),
    "sequence row": SequenceRow(),
}
"""In place of 1D's "column" and "row", where the stream is cut along the sequence."""

STREAM = Layout("B S@tp D")
"""The residual stream between the branches, and whatever norms and dropout make of it."""


class SequenceParallelBlock(Block):
    """A block of the GPT, of which a rank holds a part: of the stream along S, inside branches along heads.

    >>> import torch
    >>> from lessons_lib import run
    >>> from lessons_lib.models.gpt import GPTConfig
    >>> def step():
    ...     mesh, config = Mesh(tp=2), GPTConfig(L=1, H=4, D=8)
    ...     x = STREAM.shard(torch.randn(3, 6, config.D), mesh)
    ...     return tuple(SequenceParallelBlock(Block(config), 6, mesh)(x).shape)
    >>> run(step, ranks=2).values
    [(3, 3, 8), (3, 3, 8)]

    Every rank gives a copy of the same serial block, which stays as it is, and the length S of the sequences.
    ``column`` is the scheme of the two layers that begin a branch: gather again, or keep. Parameters have the
    serial names. Norms, and biases of row layers, are whole on every rank and see its tokens alone: their
    gradients are sums over the ranks, and no means.

    Layouts: x and the result as ``STREAM`` says; between a column and a row layer ``B S F@tp``.
    Traffic per rank: ``traffic``.
    Raises RefusedError, before any communication, where p does not divide S, D or F, or the heads; and if x
    is not this rank's part of S: a whole x would pass for a part of sequences p times as long.
    """

    def __init__(
        self, block: Block, S: int, mesh: Mesh, column: Scheme = SEQUENCE_SCHEMES["sequence column"]
    ) -> None:
        nn.Module.__init__(self)
        self.S, self.mesh = S, mesh
        (self.s,) = Layout("S@tp").local_shape((S,), mesh.sizes)
        for name, module in copy.deepcopy(block).named_children():
            self.add_module(name, module)
        group = (self.attention.n_sharing + 2) * self.attention.K  # of heads, which stays together
        Layout("heads@tp").local_shape((self.attention.qkv.out_features // group,), mesh.sizes)
        schemes = column, SEQUENCE_SCHEMES["sequence row"]
        for branch in (self.attention, self.mlp):
            for name, scheme in zip(branch.branch, schemes, strict=True):
                setattr(branch, name, TensorParallelLinear.from_linear(getattr(branch, name), scheme, mesh))
        for name in ("attention_norm", "mlp_norm"):
            setattr(self, name, ParallelLayerNorm.from_layer_norm(getattr(self, name), STREAM, mesh))
        self.dropout = ParallelDropout(self.dropout.p, STREAM, mesh)

    def forward(self, x: Float[Tensor, "B s D"]) -> Float[Tensor, "B s D"]:
        if x.shape[-2] != self.s:
            raise RefusedError(
                f"a block whose stream is cut along S={self.S} over tp={self.mesh.sizes['tp']} takes "
                f"{self.s} positions on each rank, {STREAM!r}; rank {self.mesh.rank} was given shape "
                f"{tuple(x.shape)}, which holds {x.shape[-2]}. Is it whole? STREAM.shard(x, mesh) takes this "
                "rank's part of a tensor, and split_gather of one that has a gradient."
            )
        return super().forward(x)

    def traffic(self, B: int) -> dict[str, int | Fraction]:
        """Elements each rank sends for B sequences, ``{"forward": n, "backward": n}``: all of its layers'."""
        sizes, rows = self.mesh.sizes, B * self.S
        bills = []
        for layer in self.modules():
            if isinstance(layer, ParallelLayerNorm):
                bills.append(layer_norm_traffic(rows, layer.weight.numel(), Layout("B@tp D"), sizes))
            if isinstance(layer, TensorParallelLinear):
                bills.append(layer.scheme.traffic(rows, layer.D, layer.F, sizes))
                if layer.bias is not None and layer.scheme.Y.dim("B"):
                    sums = ring_traffic("all_reduce", layer.bias.numel(), sizes["tp"])
                    bills.append({"forward": 0, "backward": sums})
        return {way: sum(bill[way] for bill in bills) for way in ("forward", "backward")}
