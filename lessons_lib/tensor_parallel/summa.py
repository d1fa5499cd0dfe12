"""2D tensor parallelism by SUMMA: every matrix is cut both ways over a square grid."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from jaxtyping import Float
from torch import Tensor

from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel.panels import panels, reduce_each
from lessons_lib.tensor_parallel.scheme import blocks


class Summa:
    """Rank (i, j) of a q x q grid owns block (i, j) of X, of W and of Y, and no rank ever more.

    >>> Summa().traffic(B=6, D=4, F=10, sizes={"row": 2, "col": 2})
    {'forward': 16, 'backward': 32}

    Equations, each a sum of q steps l; blocks in capitals belong to the rank at (row, column):

        forward     Y_ij  = sum over l  X_il W_lj       X_il comes along row i, W_lj along column j
        backward    dX_il = sum over j  dY_ij W_lj.T    W_lj comes along column j; the sum goes to column l
                    dW_lj = sum over i  X_il.T dY_ij    X_il comes along row i; the sum goes to row l

    A grid row holds the ranks that differ in their column, so along a row runs ``mesh["col"]``.

    Layouts: the same for all three, so layers follow each other in any number.
    Traffic per rank, broadcasts and reduces as pipelined chains: (q-1)/q^2 (B D + D F) forward, which are
    q-1 blocks of X and of W, and twice that backward.
    Memory kept for backward per rank: x, B D/q^2 elements, and w, D F/q^2. Working memory: two panels each
    of X and W forward; backward two of one and two terms of a gradient at a time.
    Raises RefusedError where the grid is not square, or, through the layouts, where q does not divide a size.
    Source: van de Geijn and Watts 1997 (SUMMA); Xu et al. 2021 (Optimus), section 3.
    """

    axes: tuple[str, ...] = ("row", "col")
    X = Layout("B@row D@col")
    W = Layout("D@row F@col")
    Y = Layout("B@row F@col")

    def forward(self, x: Float[Tensor, "b d"], w: Float[Tensor, "d_w f"], mesh: Mesh) -> Float[Tensor, "b f"]:
        y = x.new_zeros(x.shape[0], w.shape[1])
        for x_l, w_l in zip(panels(x, mesh["col"]), panels(w, mesh["row"]), strict=True):
            y.addmm_(x_l, w_l)
        return y

    def backward(
        self, dy: Float[Tensor, "b f"], x: Float[Tensor, "b d"], w: Float[Tensor, "d_w f"], mesh: Mesh
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "d_w f"]]:
        dx = reduce_each((dy @ w_l.T for w_l in panels(w, mesh["row"])), mesh["col"])
        dw = reduce_each((x_l.T @ dy for x_l in panels(x, mesh["col"])), mesh["row"])
        return dx, dw

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        x, w, _ = blocks(self, B, D, F, sizes)
        sent = (sizes["row"] - 1) * (x + w)
        return {"forward": sent, "backward": 2 * sent}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        x, w, y = blocks(self, B, D, F, sizes)
        rest, q = x + w + y, sizes["row"]
        panels, terms = min(2, q - 1), min(3, q)  # buffers; terms under way, and the sum that stays
        for_dx, for_dw = panels * w + terms * x, x + panels * x + terms * w
        forward, backward = rest + panels * (x + w), rest + max(for_dx, for_dw)
        return {"rest": rest, "kept": x + w, "forward": forward, "backward": backward}
