"""What a tensor-parallel scheme is, and the table of those there are."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel.column import Column
from lessons_lib.tensor_parallel.row import Row


@runtime_checkable
class Scheme(Protocol):
    """One way to compute Y = X W, with X [B, D] and W [D, F], on ranks that hold blocks of all three.

    The three layouts are the whole description of who holds what: slicing a serial layer, checking sizes,
    comparing with the serial layer, memory and pictures all follow from them. A bias is not the scheme's
    business, nor is autograd: :mod:`lessons_lib.tensor_parallel.linear` adds both, once for all schemes.

    >>> {name: f"{scheme.X} times {scheme.W} gives {scheme.Y}" for name, scheme in SCHEMES.items()}
    {'column': 'B D times D F@tp gives B F@tp', 'row': 'B D@tp times D@tp F gives B F'}
    """

    axes: tuple[str, ...]  # the mesh axes it communicates over
    X: Layout
    W: Layout
    Y: Layout

    def forward(self, x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh) -> Float[Tensor, "b f"]:
        """Return this rank's block of Y."""

    def backward(
        self, dy: Float[Tensor, "b f"], x: Float[Tensor, "b d"], w: Float[Tensor, "d f"], mesh: Mesh
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "d f"]]:
        """Return this rank's blocks of dX and dW."""

    def traffic(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
        """Return the elements each rank sends, ``{"forward": n, "backward": n}``, by the ring convention.

        Where sizes do not divide, ranks differ by a chunk, and this is their mean.
        """


SCHEMES: dict[str, Scheme] = {"column": Column(), "row": Row()}
