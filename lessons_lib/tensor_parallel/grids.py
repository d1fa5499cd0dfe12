"""How many ranks a scheme can be run on, and as which mesh."""

from __future__ import annotations

import warnings
from math import isqrt

from lessons_lib.errors import RefusedError


def grid(scheme: str, n_ranks: int, depth: int = 1) -> dict[str, int]:
    """Sizes of the mesh on which a scheme uses ``n_ranks`` ranks.

    >>> grid("2d", 9), grid("3d", 8), grid("2.5d", 18, depth=2)
    ({'row': 3, 'col': 3}, {'i': 2, 'j': 2, 'k': 2}, {'depth': 2, 'row': 3, 'col': 3})
    >>> grid("2d", 8)
    Traceback (most recent call last):
    ...
    lessons_lib.errors.RefusedError: 2d needs q x q ranks, and 8 is not that. Nearest: 4 (2 x 2) or 9 (3 x 3).

    2.5D takes ``depth`` square grids. More of them than a grid has rows are allowed, and warned of: such
    ranks hold as much of W as fewer would, and send more for it.
    """
    if scheme in ("column", "row"):
        return {"tp": n_ranks}
    if scheme == "2d":
        q = _root(scheme, n_ranks, 2, "q x q")
        return {"row": q, "col": q}
    if scheme == "3d":
        q = _root(scheme, n_ranks, 3, "q x q x q")
        return {"i": q, "j": q, "k": q}
    if scheme == "2.5d":
        if depth < 1 or n_ranks % depth or isqrt(n_ranks // depth) ** 2 * depth != n_ranks:
            fitting = [d for d in range(1, n_ranks + 1) if _is_square_times(n_ranks, d)]
            words = ", ".join(f"depth={d} (q={isqrt(n_ranks // d)})" for d in fitting)
            raise RefusedError(
                f"2.5d needs depth x q x q ranks, and {n_ranks} is not {depth} squares. "
                f"With {n_ranks} ranks: {words}."
            )
        q = isqrt(n_ranks // depth)
        if depth > q:
            warnings.warn(
                f"2.5d with depth={depth} and q={q}: more layers than a grid has rows. W takes 1/{q * q} on "
                f"each rank, whatever the depth; {q * q * q} ranks would do for depth={q}.",
                stacklevel=2,
            )
        return {"depth": depth, "row": q, "col": q}
    raise RefusedError(f"no scheme is called {scheme!r}; there are column, row, 2d, 2.5d, 3d.")


def _is_square_times(n: int, d: int) -> bool:
    return n % d == 0 and isqrt(n // d) ** 2 == n // d


def _root(scheme: str, n_ranks: int, power: int, words: str) -> int:
    """The q with q**power == n_ranks."""
    q = 1
    while (q + 1) ** power <= n_ranks:
        q += 1
    if q**power != n_ranks:
        nearest = " or ".join(f"{n**power} ({' x '.join([str(n)] * power)})" for n in (q, q + 1))
        raise RefusedError(f"{scheme} needs {words} ranks, and {n_ranks} is not that. Nearest: {nearest}.")
    return q
