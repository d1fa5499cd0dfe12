"""The results of a schedule as numbers, so that they can stand in a list or an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lessons_lib.pipeline_parallel.actions import Schedule
from lessons_lib.pipeline_parallel.rules import RULES, Result

AWAITED = ("y", "dx", "dw")  # nobody waits for new weights
TRAVELS = {rule.neighbour: -rule.towards for rule in RULES.values() if rule.neighbour}  # y onward, dx back


class Offsets(NamedTuple):
    """A rule of :mod:`.rules` in numbers: to each, ``stage * m + k`` of the action is added."""

    own: int | None
    neighbour: int | None
    makes: tuple[tuple[int, int], ...]  # what it makes, and how far off in ``homes`` that is needed


@dataclass(frozen=True)
class Numbering:
    """Number the results: all y, all dx, all dw, each by stage and then by micro-batch.

    >>> numbering = Numbering(n_stages=4, m=10)
    >>> numbering[Result("y", 0, 3)], numbering[Result("y", 1, 3)], numbering[Result("dx", 0, 3)]
    (13, 23, 73)

    There is one stage more at each end: what the first stage needs of the stage before, and the last of the
    stage after, is there from the start.
    """

    n_stages: int
    m: int

    @property
    def size(self) -> int:
        return len(AWAITED) * self._of_each

    @property
    def _of_each(self) -> int:
        return (self.n_stages + 2) * self.m

    def __getitem__(self, result: Result) -> int:
        return self._offset(result.what) + result.stage * self.m + result.microbatch

    def _offset(self, what: str, towards: int = 0) -> int:
        return AWAITED.index(what) * self._of_each + (1 + towards) * self.m

    def from_the_start(self) -> list[slice]:
        """Where the results of the stages beyond both ends are."""
        before, after = self._offset("y", -1), self._offset("dx", self.n_stages)
        return [slice(at, at + self.m) for at in (before, after)]

    def offsets(self, kind: str) -> Offsets:
        rule = RULES[kind]
        return Offsets(
            self._offset(rule.own) if rule.own else None,
            self._offset(rule.neighbour, rule.towards) if rule.neighbour else None,
            tuple(
                (self._offset(what), TRAVELS.get(what, 0) * self.m) for what in rule.makes if what in AWAITED
            ),
        )

    def homes(self, schedule: Schedule) -> list[int]:
        """The rank that has a stage for a micro-batch, at ``(1 + stage) * m + k``; -1 beyond the ends."""
        homes = [-1] * self._of_each
        for rank, row in enumerate(schedule.rows):
            for action in row:
                for kind, stage, k in action.parts:
                    if kind == "F":
                        homes[(1 + stage) * self.m + k] = rank
        return homes


@dataclass(frozen=True)
class Arrivals:
    """When each result was there for the rank that needs it, in ticks."""

    numbering: Numbering
    there: Any  # by number

    def __getitem__(self, result: Result) -> Any:
        return self.there[self.numbering[result]]


# For each rank the starts and the ends of its actions, as far as it got; and when results arrived.
Simulated = tuple[Sequence[Sequence[Any]], Sequence[Sequence[Any]], Arrivals]
