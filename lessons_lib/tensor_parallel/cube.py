"""3D tensor parallelism: X, W and Y on three faces of a cube of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from jaxtyping import Float
from torch import Tensor

from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh, gather_reduce_scatter, reduce_scatter_gather
from lessons_lib.tensor_parallel.scheme import blocks
from lessons_lib.timeline import ring_traffic


class Cube:
    """Rank (i, j, k) multiplies block (i, k) of X by block (k, j) of W: its term of block (i, j) of Y.

    >>> Cube().traffic(B=8, D=8, F=16, sizes={"i": 2, "j": 2, "k": 2})
    {'forward': 40, 'backward': 64}

    No block lies whole on a rank. The q ranks along j share X_ik, those along i share W_kj, those along k
    share Y_ij; each keeps a part of the rows.

        forward     Y_ij  = sum over k  X_ik W_kj       all-gather X along j and W along i;
                                                        reduce-scatter Y along k
        backward    dX_ik = sum over j  dY_ij W_kj.T    all-gather dY along k and W along i;
                                                        reduce-scatter dX along j
                    dW_kj = sum over i  X_ik.T dY_ij    all-gather X along j; reduce-scatter dW along i

    Layouts: Y lies as X does with j and k exchanged. So the next layer exchanges them, too, and its Y lies
    as this one's X:

    >>> [f"{scheme.X} times {scheme.W} gives {scheme.Y}" for scheme in (Cube(), Cube().exchanged())]
    ['B@i@j D@k times D@k@i F@j gives B@i@k F@j', 'B@i@k D@j times D@j@i F@k gives B@i@j F@k']

    Traffic per rank: (q-1)/q^3 (B D + D F + B F) forward, (q-1)/q^3 (2 B D + 2 D F + B F) backward, which
    gathers X and W again: it starts from what a rank stores. :class:`CubeKept` does not.
    Memory kept for backward per rank: 1/q^3 of X and of W. Working memory: 1/q^2 of each of the two that are
    multiplied, and of the product.
    The three axes need not have one size. Raises RefusedError, through its layouts, where the mesh does not
    divide a size: q^2 the rows of X and of W, q the columns.
    Source: Agarwal et al. 1995; Bian et al. 2021 (Colossal-AI's 3D), whose groups are called input (j),
    weight (i) and output (k), and exchanged by a global switch.
    """

    def __init__(self, i: str = "i", j: str = "j", k: str = "k") -> None:
        self.i, self.j, self.k = i, j, k
        self.axes = tuple(sorted((i, j, k)))
        self.X = Layout(f"B@{i}@{j} D@{k}")
        self.W = Layout(f"D@{k}@{i} F@{j}")
        self.Y = Layout(f"B@{i}@{k} F@{j}")

    def exchanged(self) -> Cube:
        """The scheme of the layer behind this one: j and k have changed places."""
        return type(self)(self.i, self.k, self.j)

    def forward(
        self, x: Float[Tensor, "b d"], w: Float[Tensor, "d_w f"], mesh: Mesh
    ) -> Float[Tensor, "b_y f"]:
        x_ik, w_kj = mesh[self.j].all_gather(x, 0), mesh[self.i].all_gather(w, 0)
        return mesh[self.k].reduce_scatter(x_ik @ w_kj, 0)

    def backward(
        self, dy: Float[Tensor, "b_y f"], x: Float[Tensor, "b d"], w: Float[Tensor, "d_w f"], mesh: Mesh
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "d_w f"]]:
        dy_ij = mesh[self.k].all_gather(dy, 0)
        dx = mesh[self.j].reduce_scatter(dy_ij @ mesh[self.i].all_gather(w, 0).T, 0)
        dw = mesh[self.i].reduce_scatter(mesh[self.j].all_gather(x, 0).T @ dy_ij, 0)
        return dx, dw

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        x, w, y = self._sent(B, D, F, sizes)
        return {"forward": x + w + y, "backward": 2 * x + 2 * w + y}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        (x, w, y), (x_ik, w_kj, y_ij) = blocks(self, B, D, F, sizes), self._gathered(B, D, F, sizes)
        rest, gathered = x + w + y, x_ik + w_kj + y_ij
        backward = rest + x + gathered + max(0, w - x_ik)
        return {"rest": rest, "kept": x + w, "forward": rest + gathered, "backward": backward}

    def _gathered(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Elements of X_ik, W_kj and Y_ij."""
        x, w, y = blocks(self, B, D, F, sizes)
        return x * sizes[self.j], w * sizes[self.i], y * sizes[self.k]

    def _sent(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> list[int | Fraction]:
        """Elements each rank sends to gather X_ik and W_kj, and to reduce-scatter Y_ij."""
        axes = (self.j, self.i, self.k)
        return [
            ring_traffic("all_gather", n, sizes[axis])
            for n, axis in zip(self._gathered(B, D, F, sizes), axes, strict=True)
        ]


class CubeKept(Cube):
    """3D that keeps the gathered blocks: fewer bytes, q times the memory.

    >>> CubeKept().traffic(B=8, D=8, F=16, sizes={"i": 2, "j": 2, "k": 2})
    {'forward': 40, 'backward': 40}

    Autograd keeps X_ik and W_kj, as they were multiplied, and each gather is undone by a reduce-scatter.
    Traffic per rank: (q-1)/q^3 (B D + D F + B F), forward and again backward.
    Memory kept for backward per rank: 1/q^2 of X and of W. Colossal-AI's code keeps as much; the 1/q^3 of its
    table holds at rest.
    """

    def differentiable(
        self, x: Float[Tensor, "b d"], w: Float[Tensor, "d_w f"], mesh: Mesh
    ) -> Float[Tensor, "b_y f"]:
        x_ik = gather_reduce_scatter(x, mesh[self.j])
        w_kj = gather_reduce_scatter(w, mesh[self.i])
        return reduce_scatter_gather(x_ik @ w_kj, mesh[self.k])

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        once = sum(self._sent(B, D, F, sizes))
        return {"forward": once, "backward": once}

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        x_ik, w_kj, y_ij = self._gathered(B, D, F, sizes)
        memory = super().memory(B, D, F, sizes)
        both_gradients = memory["rest"] + 2 * (x_ik + w_kj) + y_ij
        return memory | {"kept": memory["kept"] + x_ik + w_kj, "backward": both_gradients}
