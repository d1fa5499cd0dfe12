"""Cannon's algorithm, a variant of 2D: blocks move on by one place at a time, and nobody broadcasts."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from jaxtyping import Float
from torch import Tensor

from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel.scheme import blocks
from lessons_lib.tensor_parallel.summa import Summa


class Cannon(Summa):
    """The layouts of SUMMA; in step t rank (i, j) has the blocks l = i + j + t (modulo q).

    >>> Cannon().traffic(B=6, D=4, F=10, sizes={"row": 2, "col": 2})
    {'forward': Fraction(24, 1), 'backward': Fraction(48, 1)}

    Equations, with l = i + j + t in step t of q:

        forward     Y_ij  = sum over t  X_il W_lj       X moves left, W moves up
        backward    dX_il = sum over t  dY_ij W_lj.T    W moves up, and the sum moves left
                    dW_lj = sum over t  X_il.T dY_ij    X moves left, and the sum moves up

    First X is shifted by i places along row i, and W by j along column j; in the end the sums are shifted
    home. Row 0 and column 0 need no such shift, so ranks differ in what they send.
    Traffic per rank, the mean: (q - 1/q) blocks of X and of W forward, twice that backward: more than SUMMA's
    chains, and every message goes to a neighbour.
    Working memory: the moved block and the one that arrives, for X and for W.
    Raises RefusedError where the grid is not square.
    Source: Cannon 1969; the backward, in which sums travel, follows from the same alignment.
    """

    def forward(self, x: Float[Tensor, "b d"], w: Float[Tensor, "d_w f"], mesh: Mesh) -> Float[Tensor, "b f"]:
        row, col = mesh["row"], mesh["col"]
        x, w = col.shift(x, -row.rank), row.shift(w, -col.rank)
        y = x @ w
        for _ in range(col.size - 1):
            x, w = col.shift(x, -1), row.shift(w, -1)
            y.addmm_(x, w)
        return y

    def backward(
        self, dy: Float[Tensor, "b f"], x: Float[Tensor, "b d"], w: Float[Tensor, "d_w f"], mesh: Mesh
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "d_w f"]]:
        row, col = mesh["row"], mesh["col"]
        w = row.shift(w, -col.rank)
        dx = dy @ w.T
        for _ in range(col.size - 1):
            w, dx = row.shift(w, -1), col.shift(dx, -1)
            dx.addmm_(dy, w.T)
        x = col.shift(x, -row.rank)
        dw = x.T @ dy
        for _ in range(col.size - 1):
            x, dw = col.shift(x, -1), row.shift(dw, -1)
            dw.addmm_(x.T, dy)
        return col.shift(dx, row.rank - 1), row.shift(dw, col.rank - 1)

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        x, w, _ = blocks(self, B, D, F, sizes)
        q = sizes["row"]
        sent = (q - Fraction(1, q)) * (x + w)
        return {"forward": sent, "backward": 2 * sent}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        x, w, y = blocks(self, B, D, F, sizes)
        rest, moving = x + w + y, 1 + (sizes["row"] > 1)  # blocks that moved here, and that arrive
        forward, backward = rest + moving * (x + w), rest + 3 * (x + w)
        return {"rest": rest, "kept": x + w, "forward": forward, "backward": backward}
