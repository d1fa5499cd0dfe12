"""Column-parallel linear layer (1D): every rank owns some of the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from jaxtyping import Float
from torch import Tensor

from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel.scheme import blocks
from lessons_lib.timeline import ring_traffic


class Column:
    """Cut the columns of W: ranks compute different outputs from the same input.

    >>> Column().traffic(B=6, D=4, F=10, sizes={"tp": 2})
    {'forward': 0, 'backward': 24}

    Equations: every rank holds all of X and block r of the columns of W and Y.

        forward     Y_r = X W_r                         no communication
        backward    dX  = sum over ranks dY_r W_r.T     all-reduce: each W_r saw all of X
                    dW_r = X.T dY_r

    Layouts: ``X`` whole on every rank, ``W`` and ``Y`` cut over ``tp`` by their last dim.
    Traffic per rank, ring algorithm: 0 elements forward, 2 (p-1)/p B D backward.
    Memory kept for backward per rank: x, B D elements, and w, D F/p. Being whole, x does not shrink with p.
    Raises, through its layouts: RefusedError where p does not divide F.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3, operator f; they write Y = XA.
    """

    axes: tuple[str, ...] = ("tp",)
    X = Layout("B D")
    W = Layout("D F@tp")
    Y = Layout("B F@tp")

    def forward(self, x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh) -> Float[Tensor, "b f"]:
        return x @ w

    def backward(
        self, dy: Float[Tensor, "b f"], x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "d f"]]:
        dx = mesh["tp"].all_reduce(dy @ w.T)
        dw = x.T @ dy
        return dx, dw

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        return {"forward": 0, "backward": ring_traffic("all_reduce", B * D, sizes["tp"])}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        x, w, y = blocks(self, B, D, F, sizes)
        rest = x + w + y
        backward = rest + x + max(x, w)  # dX: a term, and the sum
        return {"rest": rest, "kept": x + w, "forward": rest, "backward": backward}
