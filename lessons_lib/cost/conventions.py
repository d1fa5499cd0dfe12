"""Ways to count the elements of a collective, and the published cost tables that follow from them.

The same program has a different cost in every paper, because each counts a collective in its own way. Here a
convention is a small function of a collective's kind, its whole buffer and the size of its group, and a
table is a run's events under a convention: :func:`priced`.

>>> [convention("broadcast", 12, 4) for convention in (ring, hops, tree)]
[9, 36, 24]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

from lessons_lib.errors import RefusedError
from lessons_lib.timeline import Event, ring_traffic

Number = int | Fraction
Convention = Callable[[str, int, int], Number]


def ring(kind: str, n_elements: int, n_ranks: int) -> Number:
    """What a rank sends by the ring, the mean over ranks: this project's convention."""
    return ring_traffic(kind, n_elements, n_ranks)


def hops(kind: str, n_elements: int, n_ranks: int) -> Number:
    """Broadcasts and reduces in p-1 hops one after another, none overlapping: the time of a chain that is
    not pipelined, in elements. All else by the ring. Colossal-AI's table counts so.
    """
    if kind in ("broadcast", "reduce"):
        return (n_ranks - 1) * n_elements
    return ring(kind, n_elements, n_ranks)


def tree(kind: str, n_elements: int, n_ranks: int) -> Number:
    """Broadcasts and reduces in log2 p rounds of a tree. All else by the ring. Optimus counts so."""
    if kind in ("broadcast", "reduce"):
        n_rounds = math.log2(n_ranks)
        if not n_rounds.is_integer():
            raise RefusedError(
                f"a tree of {n_ranks} ranks has no whole number of rounds; Optimus' formulas hold for powers "
                f"of two. Try {2 ** math.floor(n_rounds)} or {2 ** math.ceil(n_rounds)} ranks in a group."
            )
        return int(n_rounds) * n_elements
    return ring(kind, n_elements, n_ranks)


def priced(events: Iterable[Event], convention: Convention, n_ranks: int) -> Fraction:
    """Elements of all collectives under a convention, the mean over ranks."""
    prices = (convention(event.kind, event.n_elements, len(event.members)) for event in events)
    return Fraction(sum(prices), n_ranks)


# ---- Colossal-AI's table: one linear, forward and backward, where X, W and Y have one element each


def published_1d(p: int) -> Fraction:
    """
    >>> published_1d(4)
    Fraction(3, 2)
    """
    return Fraction(2 * (p - 1), p)


def published_2d(q: int) -> Fraction:
    """Hops.

    >>> published_2d(2)
    Fraction(3, 1)
    """
    return Fraction(6 * (q - 1), q)


def published_2_5d(q: int, d: int) -> Fraction:
    """Hops, and without the all-reduce of dW over depth, which ring counts as 2 (d-1)/d W/q^2 on top.

    >>> [float(published_2_5d(q, d)) for q, d in ((2, 1), (2, 2), (4, 1), (4, 2), (3, 2))]
    [3.0, 2.25, 4.5, 3.375, 3.0]
    """
    return Fraction(3 * (q - 1) * (d + 1), d * q)


def published_3d(q: int) -> Fraction:
    """The ring, with gathered blocks kept for backward: "3D kept" here.

    >>> published_3d(2)
    Fraction(3, 4)
    """
    return Fraction(6 * (q - 1), q**3)


# ---- Optimus' formulas: a transformer layer, (forward, backward with recomputation), in elements


def megatron_by_optimus(p: int, tokens: int, h: int) -> tuple[Fraction, Fraction]:
    """Two all-reduces of b s h forward; backward two more, and forward once more.

    >>> megatron_by_optimus(4, tokens=2, h=1)
    (Fraction(6, 1), Fraction(12, 1))
    """
    forward = Fraction(4 * (p - 1) * tokens * h, p)
    return forward, 2 * forward


def optimus(q: int, tokens: int, h: int) -> tuple[Fraction, Fraction]:
    """log2(p) / (2 sqrt p) (7 b s h + 12 h^2), where sqrt p = q; three times that backward. Trees.

    >>> optimus(2, tokens=2, h=1)
    (Fraction(13, 1), Fraction(39, 1))
    """
    forward = Fraction(int(math.log2(q)) * (7 * tokens * h + 12 * h * h), q)
    return forward, 3 * forward
