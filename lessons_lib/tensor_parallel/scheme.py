"""What a tensor-parallel scheme is."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh


@runtime_checkable
class Scheme(Protocol):
    """One way to compute Y = X W, with X [B, D] and W [D, F], on ranks that hold blocks of all three.

    The three layouts are the whole description of who holds what: slicing a serial layer, checking sizes,
    comparing with the serial layer, memory and pictures all follow from them. A bias is not the scheme's
    business, nor is autograd: :mod:`lessons_lib.tensor_parallel.linear` adds both, once for all schemes.

    >>> from lessons_lib.tensor_parallel import SCHEMES
    >>> {name: f"{scheme.X} times {scheme.W} gives {scheme.Y}" for name, scheme in SCHEMES.items()}
    {'column': 'B D times D F@tp gives B F@tp', 'row': 'B D@tp times D@tp F gives B F',
     '2d': 'B@row D@col times D@row F@col gives B@row F@col',
     '2.5d': 'B@depth@row D@col times D@row F@col gives B@depth@row F@col',
     '3d': 'B@i@j D@k times D@k@i F@j gives B@i@k F@j'}
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


@runtime_checkable
class PricedScheme(Scheme, Protocol):
    """A scheme that also says what it takes in memory, as all of the library's do."""

    def memory(self, B: int, D: int, F: int, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the elements the fullest rank holds.

        ``"rest"``: its blocks of X, W and Y. ``"kept"``, from forward to backward: those of X and W, and what
        was gathered and not let go. ``"forward"`` and ``"backward"``: the peak of ``forward``, which makes Y,
        and of ``backward``, which holds X, W and dY and makes dX and dW.
        """


def blocks(scheme: Scheme, B: int, D: int, F: int, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """Elements of one rank's blocks of X, W and Y.

    >>> from lessons_lib.tensor_parallel import SCHEMES
    >>> blocks(SCHEMES["2d"], B=6, D=4, F=10, sizes={"row": 2, "col": 2})
    (6, 10, 15)
    """
    return (
        scheme.X.n_local((B, D), sizes),
        scheme.W.n_local((D, F), sizes),
        scheme.Y.n_local((B, F), sizes),
    )


def check_grid(scheme: Scheme, sizes: Mapping[str, int]) -> None:
    """Refuse a mesh on which blocks of X do not meet their blocks of W.

    D is summed over, so where X and W cut it over different axes, these must have one size:

    >>> from lessons_lib.tensor_parallel import SCHEMES
    >>> check_grid(SCHEMES["2d"], {"row": 2, "col": 3})
    Traceback (most recent call last):
    ...
    lessons_lib.errors.RefusedError: Summa multiplies Layout("B@row D@col") by Layout("D@row F@col"): \
dim D is cut over col=3 in X and over row=2 in W, and these must be equal. Try row=2, col=2 or row=3, col=3.
    """
    for x_axis, w_axis in zip(scheme.X.dim("D"), scheme.W.dim("D"), strict=False):
        if x_axis not in sizes or w_axis not in sizes:
            continue  # which the layouts refuse
        x_size, w_size = sizes[x_axis], sizes[w_axis]
        if x_size != w_size:
            nearest = " or ".join(f"{w_axis}={q}, {x_axis}={q}" for q in sorted((x_size, w_size)))
            raise RefusedError(
                f"{type(scheme).__name__} multiplies {scheme.X!r} by {scheme.W!r}: dim D is cut over "
                f"{x_axis}={x_size} in X and over {w_axis}={w_size} in W, and these must be equal. "
                f"Try {nearest}."
            )
