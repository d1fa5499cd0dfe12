"""2.5D tensor parallelism (Tesseract): d square grids with the same weights, each with rows of its own."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from jaxtyping import Float
from torch import Tensor

from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel.scheme import blocks
from lessons_lib.tensor_parallel.summa import Summa
from lessons_lib.timeline import ring_traffic


class Tesseract:
    """SUMMA in each of d layers of a q x q x d grid; the layers meet for the gradient of W, and only there.

    >>> Tesseract().traffic(B=12, D=4, F=10, sizes={"depth": 3, "row": 2, "col": 2})
    {'forward': 14, 'backward': Fraction(124, 3)}

    Equations, with layer k of the rows of X:

        forward     Y_k  = X_k W                        SUMMA in layer k
        backward    dX_k = dY_k W.T                     SUMMA in layer k
                    dW   = sum over k  X_k.T dY_k       SUMMA in layer k, then an all-reduce over depth

    The last sum is data parallelism: a layer sees its own rows only, and W is a copy on all layers. Without
    it every number is plausible, and dW wrong as soon as layers see different rows.

    Layouts: the rows of X and Y are cut over depth, then over the grid's rows; W does not know depth.
    Traffic per rank: (q-1)/q^2 (B D/d + D F) forward, twice that and 2 (d-1)/d D F/q^2 backward.
    Memory kept for backward per rank: x, B D/(d q^2) elements, and w, D F/q^2, whatever d.
    d = 1 is 2D. d = q has the ranks of 3D and is another algorithm.
    Raises RefusedError where the grids are not square, or, through the layouts, where q or d q does not
    divide a size.
    Source: Wang et al. 2021 (Tesseract), section 3. Colossal-AI's published table, and its code, leave the
    sum over depth out.
    """

    axes: tuple[str, ...] = ("depth", "row", "col")
    X = Layout("B@depth@row D@col")
    W = Layout("D@row F@col")
    Y = Layout("B@depth@row F@col")
    layer = Summa()

    def forward(self, x: Float[Tensor, "b d"], w: Float[Tensor, "d_w f"], mesh: Mesh) -> Float[Tensor, "b f"]:
        return self.layer.forward(x, w, mesh)

    def backward(
        self, dy: Float[Tensor, "b f"], x: Float[Tensor, "b d"], w: Float[Tensor, "d_w f"], mesh: Mesh
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "d_w f"]]:
        dx, dw = self.layer.backward(dy, x, w, mesh)
        return dx, mesh["depth"].all_reduce(dw)

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        layer = self.layer.traffic(B // sizes["depth"], D, F, sizes)
        _, w, _ = blocks(self, B, D, F, sizes)
        over_depth = ring_traffic("all_reduce", w, sizes["depth"])
        return {"forward": layer["forward"], "backward": layer["backward"] + over_depth}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        layer = self.layer.memory(B // sizes["depth"], D, F, sizes)
        x, w, _ = blocks(self, B, D, F, sizes)
        over_depth = layer["rest"] + x + 2 * w  # dW: this layer's, and the sum
        return layer | {"backward": max(layer["backward"], over_depth)}
