"""What an action needs and what it makes: the rules that everything about pipelines follows.

An action makes results, and needs others: of its own stage, made before by its own rank, or of the stage
before or after, which may be on another rank.

    action  makes            needs on its own stage    needs from a neighbour
    F       y                                          y of the stage before
    I       dx               y                         dx of the stage after
    W       dw               dx
    B       dx and dw        y                         dx of the stage after
    U       the new weights  dw

``dx`` is the gradient of a stage's input, so it is what the stage before needs; the last stage makes its own
from the loss. Whatever checks, simulates or runs a schedule asks this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lessons_lib.pipeline_parallel.actions import Action, Pair


class Rule(NamedTuple):
    """What an action of one kind makes and needs, as in the table."""

    makes: tuple[str, ...]
    own: str  # a result of its own stage; "" where it needs none
    neighbour: str  # a result of the stage before or after; "" where it needs none
    towards: int = 0  # which neighbour: -1 the stage before, +1 the stage after


RULES = {
    "F": Rule(makes=("y",), own="", neighbour="y", towards=-1),
    "I": Rule(makes=("dx",), own="y", neighbour="dx", towards=+1),
    "W": Rule(makes=("dw",), own="dx", neighbour=""),
    "B": Rule(makes=("dx", "dw"), own="y", neighbour="dx", towards=+1),
    "U": Rule(makes=("weights",), own="dw", neighbour=""),
}
WORDS = {"y": "output", "dx": "input gradient", "dw": "weight gradient", "weights": "updated weights"}


class Result(NamedTuple):
    """What an action makes.

    >>> print(Result("dx", stage=2, microbatch=5))
    input gradient of micro-batch 5 on stage 2
    """

    what: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{WORDS[self.what]} of micro-batch {self.microbatch} on stage {self.stage}"


def needs(action: Action, n_stages: int) -> list[Result]:
    """List what must be there before ``action`` can start.

    >>> needs(Action("B", 1, 5), n_stages=4)
    [Result(what='y', stage=1, microbatch=5), Result(what='dx', stage=2, microbatch=5)]
    >>> needs(Action("F", 0, 5), n_stages=4), needs(Action("B", 3, 5), n_stages=4)      # the ends
    ([], [Result(what='y', stage=3, microbatch=5)])
    """
    rule, stage, k = RULES[action.kind], action.stage, action.microbatch
    found = [Result(rule.own, stage, k)] if rule.own else []
    if rule.neighbour and 0 <= stage + rule.towards < n_stages:
        found.append(Result(rule.neighbour, stage + rule.towards, k))
    return found


def makes(action: Action) -> list[Result]:
    """List what is there once ``action`` is done.

    >>> [result.what for result in makes(Action("B", 1, 5))]
    ['dx', 'dw']
    """
    return [Result(what, action.stage, action.microbatch) for what in RULES[action.kind].makes]


def legal_next(
    rows: Sequence[Iterable[Action | Pair]],
    stages: Sequence[Sequence[int]],
    n_microbatches: int,
    kinds: str = "FB",
) -> list[list[Action]]:
    """List for each rank what it can do next, after all ranks have done their ``rows``.

    >>> rows = [[Action("F", 0, 0)], []]
    >>> [[str(action) for action in actions] for actions in legal_next(rows, [[0], [1]], n_microbatches=2)]
    [['0F1'], ['1F0']]

    ``stages`` are those of each rank. ``kinds`` are the kinds of action the puzzle is played with.
    """
    n_stages = 1 + max(stage for own in stages for stage in own)
    there = {made for row in rows for action in row for part in action.parts for made in makes(part)}
    return [
        [
            action
            for k in range(n_microbatches)
            for stage in own
            for action in (Action(kind, stage, k) for kind in kinds)
            if there.isdisjoint(makes(action)) and there.issuperset(needs(action, n_stages))
        ]
        for own in stages
    ]
