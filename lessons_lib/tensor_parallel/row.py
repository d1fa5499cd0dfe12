"""Row-parallel linear layer (1D): every rank owns some of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from jaxtyping import Float
from torch import Tensor

from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel.scheme import blocks
from lessons_lib.timeline import ring_traffic


class Row:
    """Cut the rows of W: ranks compute parts of the sum that makes every output.

    >>> Row().traffic(B=6, D=4, F=10, sizes={"tp": 2})
    {'forward': 60, 'backward': 0}

    Equations: rank r holds block r of the columns of X and of the rows of W, and in the end all of Y.

        forward     Y    = sum over ranks X_r W_r       all-reduce: an output needs all inputs
        backward    dX_r = dY W_r.T                     no communication: every rank has all of dY
                    dW_r = X_r.T dY

    Layouts: ``X`` cut over ``tp`` by its last dim, ``W`` by its first, ``Y`` whole on every rank. X lies as
    the column-parallel layer leaves its Y: a column and a row layer with anything elementwise between them
    make a pair that communicates once forward and once backward.
    Traffic per rank, ring algorithm: 2 (p-1)/p B F elements forward, 0 backward.
    Memory kept for backward per rank: x, B D/p elements, and w, D/p F.
    Raises, through its layouts: RefusedError where p does not divide D.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3, operator g.
    """

    axes: tuple[str, ...] = ("tp",)
    X = Layout("B D@tp")
    W = Layout("D@tp F")
    Y = Layout("B F")

    def forward(self, x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh) -> Float[Tensor, "b f"]:
        return mesh["tp"].all_reduce(x @ w)

    def backward(
        self, dy: Float[Tensor, "b f"], x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "d f"]]:
        dx = dy @ w.T
        dw = x.T @ dy
        return dx, dw

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        return {"forward": ring_traffic("all_reduce", B * F, sizes["tp"]), "backward": 0}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        x, w, y = blocks(self, B, D, F, sizes)
        rest = x + w + y
        forward = rest + y  # Y: a term, and the sum
        return {"rest": rest, "kept": x + w, "forward": forward, "backward": rest + x + w}
