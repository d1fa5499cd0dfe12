"""What each rank must know to carry out its row of a schedule; all of it follows from the rules.

Who makes a result and who needs it, and when, is what :mod:`.rules` says of the actions. So no rank has to be
told where its messages go: all ranks read the same schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from lessons_lib.pipeline_parallel.actions import Schedule
from lessons_lib.pipeline_parallel.legality import check
from lessons_lib.pipeline_parallel.results import Numbering
from lessons_lib.pipeline_parallel.rules import Result, makes, needs
from lessons_lib.pipeline_parallel.versions import weight_versions

Place = tuple[int, int]  # rank and index of an action


@dataclass(frozen=True)
class Program:
    """A legal schedule, looked up from the other side: by result.

    >>> from lessons_lib.pipeline_parallel import one_f_one_b
    >>> program = program_of(one_f_one_b(2, 3))
    >>> program.makers[Result("y", 0, 1)], program.takers[Result("y", 0, 1)]     # 0F1 and 1F1
    ((0, 1), (1, 2))

    ``takers`` are the actions of the stage before or after; what stays on its own stage is not in it.
    ``split`` are the stages and micro-batches whose backward is in two.
    """

    schedule: Schedule
    makers: dict[Result, Place]
    takers: dict[Result, Place]
    split: frozenset[tuple[int, int]]

    def tag(self, result: Result) -> int:
        """The number by which a message is known: no other of this schedule has it."""
        return self._numbering[result]

    @property
    def n_tags(self) -> int:
        return self._numbering.size

    @cached_property
    def _numbering(self) -> Numbering:
        return Numbering(self.schedule.n_stages, self.schedule.n_microbatches)

    @cached_property
    def homes(self) -> list[tuple[int, ...]]:
        """For each stage the ranks that have it: one, or two where micro-batches go in both directions."""
        return [
            tuple(rank for rank, stages in enumerate(self.schedule.stages) if stage in stages)
            for stage in range(self.schedule.n_stages)
        ]

    @cached_property
    def updates(self) -> bool:
        """Whether weights are updated on the way."""
        return any(action.kind == "U" for row in self.schedule.rows for action in row)

    @cached_property
    def trains(self) -> bool:
        return any(result.what == "dw" for result in self.makers)

    @cached_property
    def together(self) -> list[range]:
        """The micro-batches whose gradients are added up before an update; all, if there is none.

        >>> from lessons_lib.pipeline_parallel import gpipe, pipedream_2bw
        >>> program_of(gpipe(2, 4)).together, program_of(pipedream_2bw(2, 2, 3)).together
        ([range(0, 4)], [range(0, 2), range(2, 4), range(4, 6)])
        """
        m = self.schedule.n_microbatches
        ends = sorted(
            {
                part.microbatch + 1
                for action in self.schedule.rows[0]
                for part in action.parts
                if part.kind == "U"
            }
            | {m}
        )
        return [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    @cached_property
    def versions(self) -> list[tuple[int, ...]]:
        """For each rank the version of its weights that each micro-batch uses."""
        return [rank.used for rank in weight_versions(self.schedule)]


@lru_cache(maxsize=32)
def program_of(schedule: Schedule) -> Program:
    """Look through a schedule once; refuse one that is not legal."""
    check(schedule)
    makers: dict[Result, Place] = {}
    takers: dict[Result, Place] = {}
    split = set()
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            for part in action.parts:
                makers |= dict.fromkeys(makes(part), (rank, index))
                for result in needs(part, schedule.n_stages):
                    if result.stage != part.stage:
                        takers[result] = rank, index
                if part.kind == "I":
                    split.add((part.stage, part.microbatch))
    return Program(schedule, makers, takers, frozenset(split))
