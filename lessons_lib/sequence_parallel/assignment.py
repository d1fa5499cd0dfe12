"""Which tokens a rank holds, and how much work that gives it.

With a causal mask, token i looks at the i + 1 tokens up to itself: equal shares of tokens are not equal
shares of work. An assignment says which of S tokens each of P ranks holds; everything that depends on where a
token stands (masks, position embeddings, labels) follows it.
"""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from typing import Protocol, runtime_checkable

from lessons_lib.errors import RefusedError


@runtime_checkable
class Assignment(Protocol):
    """A way to deal S tokens out to P ranks, each exactly once and to all equally many."""

    pieces_per_rank: int  # a rank's tokens come in so many runs, each in ascending order

    def positions(self, S: int, P: int, rank: int) -> list[int]:
        """The places in the sequence of the tokens that ``rank`` holds, in the order in which it holds them.

        Raises RefusedError, the same on every rank, where S cannot be dealt out equally.
        """


class Contiguous:
    """Rank r holds the r-th piece of the sequence. The last rank works most, the others wait for it.

    >>> [Contiguous().positions(8, 4, rank) for rank in range(4)]
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    pieces_per_rank = 1

    def positions(self, S: int, P: int, rank: int) -> list[int]:
        s = share(S, P, self.pieces_per_rank)
        return list(range(rank * s, (rank + 1) * s))


class Zigzag:
    """2 P pieces, of which rank r holds the r-th from the front and the r-th from the back.

    >>> [Zigzag().positions(8, 4, rank) for rank in range(4)]
    [[0, 7], [1, 6], [2, 5], [3, 4]]

    All work equally much, in every step of a ring. Source: zhuzilin/ring-flash-attention, issue 2.
    """

    pieces_per_rank = 2

    def positions(self, S: int, P: int, rank: int) -> list[int]:
        piece = share(S, P, self.pieces_per_rank) // 2
        front, back = rank * piece, (2 * P - 1 - rank) * piece
        return [*range(front, front + piece), *range(back, back + piece)]


class Striped:
    """Every P-th token, beginning with token r.

    >>> [Striped().positions(8, 4, rank) for rank in range(4)]
    [[0, 4], [1, 5], [2, 6], [3, 7]]

    Nearly balanced: of two ranks, the one whose stripe begins later sees one key more in each row.
    Source: Brandon et al. 2023 (Striped Attention), section 3.
    """

    pieces_per_rank = 1

    def positions(self, S: int, P: int, rank: int) -> list[int]:
        share(S, P, self.pieces_per_rank)
        return list(range(rank, S, P))


def share(S: int, P: int, pieces_per_rank: int = 1) -> int:
    """How many of S tokens each of P ranks holds, in equal pieces.

    >>> share(3000, P=4)
    750
    >>> share(32769, P=8, pieces_per_rank=2)
    Traceback (most recent call last):
    ...
    lessons_lib.errors.RefusedError: S=32769 tokens cannot be cut into 16 equal pieces, 2 for each of 8 \
ranks. Try S=32768, or pad the sequence to S=32784 with tokens of a document of their own, without targets.
    """
    n_pieces = P * pieces_per_rank
    if S < 1 or S % n_pieces:
        below, above = S // n_pieces * n_pieces, (S // n_pieces + 1) * n_pieces
        raise RefusedError(
            f"S={S} tokens cannot be cut into {n_pieces} equal pieces, {pieces_per_rank} for each of "
            f"{P} ranks. Try S={below or above}, or pad the sequence to S={above} with tokens of a document "
            "of their own, without targets."
        )
    return S // P


def pairs(assignment: Assignment, S: int, P: int, causal: bool = True) -> list[list[int]]:
    """Count who looks at how much: for each step of a ring and each rank, its pairs of a query and a key it
    sees.

    In step t, rank r has the keys of rank r - t.

    >>> pairs(Contiguous(), S=8, P=4)
    [[3, 3, 3, 3], [0, 4, 4, 4], [0, 0, 4, 4], [0, 0, 0, 4]]
    >>> [sum(steps) for steps in zip(*pairs(Contiguous(), S=8, P=4))]
    [3, 7, 11, 15]
    >>> [sum(steps) for steps in zip(*pairs(Zigzag(), S=8, P=4))]
    [9, 9, 9, 9]
    """
    held = [assignment.positions(S, P, rank) for rank in range(P)]
    ascending = [sorted(positions) for positions in held]

    def seen(queries: list[int], keys: list[int]) -> int:
        return sum(bisect_right(keys, query) for query in queries) if causal else len(queries) * len(keys)

    return [[seen(held[rank], ascending[(rank - step) % P]) for rank in range(P)] for step in range(P)]


def busy(pairs_by_step: list[list[int]]) -> Fraction:
    """The share of the ranks' time that is work, where a step lasts as long as its slowest rank.

    >>> for assignment in (Contiguous(), Striped(), Zigzag()):
    ...     print(type(assignment).__name__, f"{float(100 * busy(pairs(assignment, S=16, P=4))):.1f} %")
    Contiguous 58.6 %
    Striped 85.0 %
    Zigzag 100.0 %

    A causal mask over contiguous pieces leaves P / (2P - 1) of it, the more tokens the nearer: about half.
    """
    work = sum(map(sum, pairs_by_step))
    time = sum(map(max, pairs_by_step)) * len(pairs_by_step[0])
    return Fraction(work, time)
