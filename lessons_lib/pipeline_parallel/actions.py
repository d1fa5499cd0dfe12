"""Schedules as data: for every rank a row of actions.

An action is ``(kind, stage, microbatch)``. Kinds: ``F`` forward; ``B`` backward, which is ``I``, the gradient
of the input, and ``W``, the gradient of the weights, in one; ``U`` an update of the weights; and ``FB``, a
forward and a backward that overlap. No time stands in a schedule. An action starts when its rank has done the
one before and what it needs is there (:mod:`.rules`); when that is, :func:`.simulate` finds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from lessons_lib.errors import RefusedError

KINDS = ("F", "B", "I", "W", "U")


class Action(NamedTuple):
    """One thing that a rank does.

    >>> action = Action("F", stage=2, microbatch=5)
    >>> print(action, action.kind, action.parts)
    2F5 F (Action(kind='F', stage=2, microbatch=5),)
    """

    kind: str
    stage: int
    microbatch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a backward of two micro-batches, one hiding the communication of the other.

    >>> pair = Pair(Action("F", 0, 9), Action("B", 7, 2))
    >>> print(pair, pair.kind)
    0F9&7B2 FB
    """

    forward: Action
    backward: Action

    @property
    def kind(self) -> str:
        return "FB"

    @property
    def parts(self) -> tuple[Action, ...]:
        return self

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


Row = tuple[Action | Pair, ...]


@dataclass(frozen=True, repr=False)
class Schedule:
    """What every rank does, in order.

    >>> from lessons_lib.pipeline_parallel import gpipe
    >>> print(gpipe(2, 3))
    rank 0  0F0 0F1 0F2  .   .  0B0 0B1 0B2
    rank 1   .  1F0 1F1 1F2 1B0 1B1 1B2  .
    >>> gpipe(2, 3).rows[1][0]
    Action(kind='F', stage=1, microbatch=0)

    ``versions`` says, where weights are updated on the way, which version of them each micro-batch uses, on
    every stage; where it is empty, each forward takes the newest.
    """

    name: str
    rows: tuple[Row, ...]  # for each rank
    n_stages: int
    n_microbatches: int
    versions: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, rows: Iterable[Iterable[Any]]) -> Schedule:
        """Make a schedule of rows written by hand; an action may be a plain tuple.

        >>> print(Schedule.of("mine", [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]))
        rank 0  0F0  .   .  0B0
        rank 1   .  1F0 1B0  .
        """
        whole = tuple(tuple(_action(action, rank) for action in row) for rank, row in enumerate(rows))
        parts = [part for row in whole for action in row for part in action.parts]
        if not parts:
            raise RefusedError(
                f"schedule {name!r} has no action; write for each rank a list such as [('F', 0, 0)]."
            )
        n_stages = 1 + max(part.stage for part in parts)
        return cls(name, whole, n_stages, 1 + max(part.microbatch for part in parts))

    @property
    def n_ranks(self) -> int:
        return len(self.rows)

    @property
    def n_actions(self) -> int:
        return sum(map(len, self.rows))

    @cached_property
    def stages(self) -> list[list[int]]:
        """For each rank its stages, its chunks in order.

        >>> from lessons_lib.pipeline_parallel import interleaved, zb_v
        >>> interleaved(2, 2, 3).stages, zb_v(2, 3).stages
        ([[0, 2, 4], [1, 3, 5]], [[0, 3], [1, 2]])
        """
        return [sorted({part.stage for action in row for part in action.parts}) for row in self.rows]

    @cached_property
    def entrances(self) -> list[int]:
        """The ranks with stage 0, where micro-batches enter: one, or two where they go in both directions.

        >>> from lessons_lib.pipeline_parallel import chimera, gpipe
        >>> gpipe(4, 4).entrances, chimera(4, 4).entrances
        ([0], [0, 3])
        """
        return [rank for rank, stages in enumerate(self.stages) if 0 in stages]

    @property
    def n_chunks(self) -> int:
        """Stages of a rank, v; of two copies of the model, counted in one."""
        return max(map(len, self.stages)) // len(self.entrances)

    @property
    def chunk_names(self) -> list[str]:
        """What to call them.

        >>> from lessons_lib.pipeline_parallel import chimera, interleaved
        >>> interleaved(2, 2).chunk_names, chimera(4, 4).chunk_names
        (['chunk a', 'chunk b'], ['entered at rank 0', 'entered at rank 3'])
        """
        if len(self.entrances) > 1:
            return [f"entered at rank {rank}" for rank in self.entrances]
        return [f"chunk {chr(ord('a') + at)}" for at in range(self.n_chunks)]

    def chunk(self, rank: int, part: Action) -> int:
        """Which of its rank's chunks an action is done for; or, of two directions, which one.

        >>> from lessons_lib.pipeline_parallel import chimera, interleaved
        >>> interleaved(2, 2).chunk(1, Action("F", 3, 0)), chimera(4, 4).chunk(0, Action("F", 3, 2))
        (1, 1)
        """
        if len(self.entrances) > 1:
            return self.entrances.index(self._entrance_of[part.microbatch])
        return self.stages[rank].index(part.stage)

    @cached_property
    def _entrance_of(self) -> dict[int, int]:
        actions = ((rank, action) for rank in self.entrances for action in self.rows[rank])
        parts = ((rank, part) for rank, action in actions for part in action.parts)
        return {part.microbatch: rank for rank, part in parts if part[:2] == ("F", 0)}

    def __str__(self) -> str:
        from lessons_lib.pipeline_parallel.text import write_grid

        return write_grid(self)

    def __repr__(self) -> str:
        sizes = f"p={self.n_ranks}, m={self.n_microbatches}"
        stages = "" if self.n_stages == self.n_ranks else f", {self.n_stages} stages"
        return f"<{self.name}: {sizes}{stages}, {self.n_actions} actions>"


def _action(given: Any, rank: int) -> Action | Pair:
    """An action from a tuple, with its form checked."""
    match given:
        case (str(kind), int(stage), int(k)) if kind in KINDS and stage >= 0 and k >= 0:
            return Action(kind, stage, k)
        case (("F", *_) as forward, ("B", *_) as backward):
            return Pair(*_action(forward, rank).parts, *_action(backward, rank).parts)
    raise RefusedError(
        f"rank {rank}: {given!r} is no action. An action is (kind, stage, micro-batch), its kind one of "
        f"{', '.join(KINDS)}, its numbers from 0, such as ('F', 0, 3); an overlapped pair is (F, B)."
    )
