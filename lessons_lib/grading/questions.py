"""Questions with a number for an answer, about what earlier lessons said.

Numbers are drawn, and answers computed by the library's own formulas, so that no answer is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from lessons_lib.grading.exercise import Draw
from lessons_lib.layout import Layout, coordinates
from lessons_lib.rings import _doubling
from lessons_lib.spmd.doctor import find_cycle
from lessons_lib.tensor_parallel import SCHEMES
from lessons_lib.timeline import elements_sent, ring_traffic

TOLERANCE = 0.005  # of an answer, so that rounding is forgiven


@dataclass(frozen=True)
class Question:
    """A question, its answer, and how to find it."""

    name: str
    text: str
    answer: float
    how: str

    @property
    def lesson(self) -> str:
        return self.name[:2]

    def accepts(self, number: float) -> bool:
        return abs(number - self.answer) <= TOLERANCE * abs(self.answer)


Made = tuple[str, float, str]  # text, answer, how


def _all_reduce_bytes(draw: Draw) -> Made:
    p, n = draw.random.choice((2, 4, 8)), 1000 * draw.between(1, 9)
    answer = 4 * float(ring_traffic("all_reduce", n, p))
    return (
        f"{p} ranks add up {n:,} numbers of 4 bytes with an all-reduce. How many bytes does each send?",
        answer,
        f"2 (p-1)/p of the tensor: 2 x {p - 1}/{p} x {4 * n:,} bytes",
    )


def _rank_of_place(draw: Draw) -> Made:
    sizes = {"row": draw.between(2, 3), "col": draw.between(3, 5)}
    row, col = draw.between(1, sizes["row"] - 1), draw.between(0, sizes["col"] - 1)
    answer = coordinates(sizes).index({"row": row, "col": col})
    return (
        f"In Mesh(row={sizes['row']}, col={sizes['col']}), which rank is at row={row}, col={col}?",
        answer,
        f"the last axis is the fastest: {row} x {sizes['col']} + {col}",
    )


def _elements_of_block(draw: Draw) -> Made:
    sizes = {"row": 2, "col": draw.between(2, 4)}
    D, F = draw.between(3, 9), sizes["col"] * draw.between(2, 5)
    answer = prod(Layout("D F@col").local_shape((D, F), sizes))
    return (
        f"W has {D} x {F} elements and lies as D F@col on Mesh(row=2, col={sizes['col']}). "
        "How many of them does a rank hold?",
        answer,
        f"F is cut over col, and row has copies: {D} x {F}/{sizes['col']}",
    )


def _reduce_scatter_bytes(draw: Draw) -> Made:
    p, n = draw.random.choice((2, 4, 5, 8)), 40 * draw.between(2, 20)
    return (
        f"{p} ranks reduce-scatter {n:,} numbers of 8 bytes. How many bytes does each send?",
        8 * float(ring_traffic("reduce_scatter", n, p)),
        f"all chunks but its own: {p - 1}/{p} x {8 * n:,} bytes",
    )


def _chunk_sizes(draw: Draw) -> Made:
    p = draw.between(3, 5)
    n, rank = draw.indivisible(2 * p + 1, 6 * p, p), draw.between(0, p - 1)
    return (
        f"A ring of {p} ranks gathers {n} numbers, cut as tensor_split cuts. How many does rank {rank} send?",
        elements_sent("all_gather", n, p, rank),
        f"all chunks but that of its right neighbour, rank {(rank + 1) % p}",
    )


def _tree_rounds(draw: Draw) -> Made:
    p = draw.between(5, 40)
    return (
        f"After how many rounds has a tree brought a tensor from one rank to all {p}?",
        len(_doubling(p)),
        "every round doubles those that have it: the logarithm of p to base 2, rounded up",
    )


def _who_waits(draw: Draw) -> Made:
    n, p = draw.between(3, 5), draw.between(6, 8)
    waits: dict[int, tuple[int, ...]] = {rank: ((rank + 1) % n,) for rank in range(n)}
    waits |= {rank: (draw.between(0, n - 1),) for rank in range(n, p)}
    text = ", ".join(f"{rank} for {whom[0]}" for rank, whom in waits.items())
    return (
        f"Ranks wait for each other: {text}. How many of them are in the cycle?",
        len(find_cycle(waits)),
        "follow the waiting until a rank comes back; the others only wait for somebody in the cycle",
    )


def _average_of_averages(draw: Draw) -> Made:
    counts = draw.different(1, 9, 2)
    means = [float(number) for number in draw.different(1, 20, 2)]
    answer = sum(n * mean for n, mean in zip(counts, means, strict=True)) / sum(counts)
    return (
        f"Rank 0 has {counts[0]} scores, whose mean is {means[0]:g}, and rank 1 has {counts[1]}, whose "
        f"mean is {means[1]:g}. What is the mean of all scores?",
        answer,
        "sums and counts add up, averages do not: "
        f"({counts[0]} x {means[0]:g} + {counts[1]} x {means[1]:g}) / {sum(counts)}",
    )


def _linear_traffic(name: str, direction: str) -> Callable[[Draw], Made]:
    def make(draw: Draw) -> Made:
        p = draw.random.choice((2, 4))
        B, D, F = 4 * draw.between(1, 3), 4 * draw.between(2, 5), 4 * draw.between(6, 9)
        answer = float(SCHEMES[name].traffic(B, D, F, {"tp": p})[direction])
        what = "dX" if direction == "backward" else "Y"
        size = f"{B} x {D if direction == 'backward' else F}"
        return (
            f"A {name}-parallel linear on {p} ranks, B={B}, D={D}, F={F}: "
            f"how many elements does each rank send in the {direction}?",
            answer,
            f"{what} is a sum over ranks, an all-reduce of {size}: 2 x {p - 1}/{p} of it"
            if answer
            else "every rank has all it needs",
        )

    return make


def _row_block(draw: Draw) -> Made:
    p = draw.between(2, 4)
    D, F = p * draw.between(3, 6), draw.between(5, 9)
    return (
        f"W has D={D} rows and F={F} columns and is cut for a row-parallel linear on {p} ranks. "
        "How many elements does a rank hold?",
        prod(SCHEMES["row"].W.local_shape((D, F), {"tp": p})),
        f"its rows are cut: {D}/{p} x {F}",
    )


QUESTIONS: dict[str, Callable[[Draw], Made]] = {  # the first two digits are the lesson's
    "00-all-reduce-bytes": _all_reduce_bytes,
    "00-rank-of-place": _rank_of_place,
    "00-elements-of-block": _elements_of_block,
    "01-reduce-scatter-bytes": _reduce_scatter_bytes,
    "01-chunk-sizes": _chunk_sizes,
    "01-tree-rounds": _tree_rounds,
    "02-who-waits": _who_waits,
    "02-average-of-averages": _average_of_averages,
    "08-column-backward": _linear_traffic("column", "backward"),
    "08-row-forward": _linear_traffic("row", "forward"),
    "08-row-block": _row_block,
}


def ask(name: str, draw: Draw) -> Question:
    """Make a question of this name, with numbers that are drawn.

    >>> question = ask("01-tree-rounds", Draw(1))
    >>> question.text, question.answer, question.accepts(question.answer)
    ('After how many rounds has a tree brought a tensor from one rank to all 13?', 4, True)
    """
    text, answer, how = QUESTIONS[name](draw)
    return Question(name, text, answer, how)
