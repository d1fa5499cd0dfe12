"""Whether a schedule can be run, and if not, which action is the first that is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel.actions import KINDS, Action, Pair, Schedule
from lessons_lib.pipeline_parallel.rules import Result, makes, needs


@dataclass(frozen=True)
class Fault:
    """The first action of a schedule that is wrong.

    ``action`` is ``rows[rank][index]``, or, where a row ends too early, what is missing there. ``waits_for``
    is the result that it waits for in vain, if it does.
    """

    rank: int
    index: int
    action: Action | Pair
    why: str
    waits_for: Result | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}, action {self.index}, {self.action}: {self.why}"


class IllegalScheduleError(RefusedError):
    """A schedule cannot be run as it stands. ``fault`` is the first action that is wrong."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


def check(schedule: Schedule) -> None:
    """Refuse a schedule that cannot be run, or that leaves work undone.

    >>> F, B = "F", "B"
    >>> check(Schedule.of("mine", [[(F, 0, 0), (B, 0, 0), (F, 0, 1), (B, 0, 1)],
    ...                            [(F, 1, 0), (F, 1, 1), (B, 1, 0), (B, 1, 1)]]))
    Traceback (most recent call last):
    lessons_lib.pipeline_parallel.legality.IllegalScheduleError: Schedule 'mine' is not legal: rank 0,
    action 1, 0B0: it waits for the input gradient of micro-batch 0 on stage 1, which rank 1 makes by 1B0, its
    action 2; but before that rank 1 comes to 1F1, its action 1, which waits for the output of micro-batch 1
    on stage 0, which rank 0 makes by 0F1, its action 2, only after 0B0.
    """
    fault = first_fault(schedule)
    if fault:
        raise IllegalScheduleError(f"Schedule {schedule.name!r} is not legal: {fault}.", fault)


def first_fault(schedule: Schedule) -> Fault | None:
    """Find the first action that is wrong, or ``None``.

    First what is wrong by itself: the same twice, or on another rank than its stage. Then all ranks go as far
    as they can. Where they come to a standstill, those are at fault that wait for what nobody makes, or in a
    circle for each other or for themselves; the first of them is the one that would be reached first if every
    action took one unit of time. Last what is left undone.
    """
    return _wrong_by_itself(schedule) or _Standstill(schedule).fault() or _undone(schedule)


Place = tuple[int, int, Action | Pair, Action]  # rank, index, action, and one of its parts


def _places(schedule: Schedule) -> Iterator[Place]:
    """Everything that is done, by index: what may be done first comes first."""
    for index in range(max(map(len, schedule.rows))):
        for rank, row in enumerate(schedule.rows):
            if index < len(row):
                for part in row[index].parts:
                    yield rank, index, row[index], part


def _wrong_by_itself(schedule: Schedule) -> Fault | None:
    n_stages, m = schedule.n_stages, schedule.n_microbatches
    homes: dict[tuple[int, int], int] = {}  # of a stage for a micro-batch: the rank with its F
    for rank, _, _, (kind, stage, k) in _places(schedule):
        if kind == "F":
            homes.setdefault((stage, k), rank)
    made: dict[Result, str] = {}
    for rank, index, action, part in _places(schedule):
        kind, stage, k = part
        if kind not in KINDS or not (0 <= stage < n_stages and 0 <= k < m):
            there_is = f"kinds {', '.join(KINDS)}, stages 0 to {n_stages - 1} and micro-batches 0 to {m - 1}"
            return Fault(rank, index, action, f"there is no such thing; the schedule has {there_is}")
        home = homes.get((stage, k), rank)
        if home != rank:
            why = f"stage {stage} of micro-batch {k} is on rank {home}, which has its forward"
            return Fault(rank, index, action, why)
        for result in makes(part):
            if result in made:
                return Fault(rank, index, action, f"the {result} was already made by {made[result]}")
            made[result] = f"rank {rank}, action {index}"
    return None


class _Standstill:
    """Where all ranks are when none can go on.

    ``at`` is each rank's next action, ``now`` when it is reached, ``waits_for`` what it lacks.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.rows = schedule.rows
        self.at, self.now = ([0] * schedule.n_ranks for _ in range(2))
        there: dict[Result, int] = {}  # when it was made
        waiting: dict[Result, list[int]] = {}
        going = list(range(schedule.n_ranks))
        while going:
            rank = going.pop()
            while self.at[rank] < len(self.rows[rank]):
                parts = self.rows[rank][self.at[rank]].parts
                needed = [result for part in parts for result in needs(part, schedule.n_stages)]
                missing = next((result for result in needed if result not in there), None)
                if missing:
                    waiting.setdefault(missing, []).append(rank)
                    break
                self.now[rank] = 1 + max([self.now[rank], *(there[result] for result in needed)])
                self.at[rank] += 1
                for result in (result for part in parts for result in makes(part)):
                    there[result] = self.now[rank]
                    going += waiting.pop(result, [])
        self.waits_for = {rank: result for result, ranks in waiting.items() for rank in ranks}

    @cached_property
    def makers(self) -> dict[Result, tuple[int, int]]:
        """Rank and index of the action that would make a result."""
        return {
            result: (rank, index)
            for rank in self.waits_for
            for index in range(self.at[rank], len(self.rows[rank]))
            for part in self.rows[rank][index].parts
            for result in makes(part)
        }

    def fault(self) -> Fault | None:
        at_fault = [rank for rank in self.waits_for if self._waits_in_a_circle(rank)]
        if not at_fault:
            return None
        rank = min(at_fault, key=lambda rank: (self.now[rank], rank))
        index = self.at[rank]
        return Fault(rank, index, self.rows[rank][index], self._why(rank), self.waits_for[rank])

    def _waits_in_a_circle(self, rank: int) -> bool:
        """Whether whom ``rank`` waits for, whom that one waits for, ... is itself; or it waits for nobody."""
        here, steps = rank, 0
        while self.waits_for[here] in self.makers and steps < len(self.waits_for):
            here, _ = self.makers[self.waits_for[here]]
            steps += 1
            if here == rank:
                return True
        return steps == 0

    def _why(self, rank: int) -> str:
        """The circle of waiting that begins and ends at ``rank``, in words."""
        clauses, here = [f"it waits for the {self.waits_for[rank]}"], rank
        while self.waits_for[here] in self.makers:
            there, index = self.makers[self.waits_for[here]]
            stands_at = self.at[there]
            by = f"which rank {there} makes by {self.rows[there][index]}, its action {index}"
            if there == rank:
                clauses.append(f"{by}, only after {self.rows[there][stands_at]}")
                break
            if index > stands_at:
                first = f"{self.rows[there][stands_at]}, its action {stands_at}"
                by += f"; but before that rank {there} comes to {first}"
            clauses.append(f"{by}, which waits for the {self.waits_for[there]}")
            here = there
        else:
            clauses.append("which nobody makes")
        left_out = len(clauses[3:-1])
        if left_out > 2:
            last = f"the last of which waits for the {self.waits_for[here]}"
            clauses[3:-1] = [f"and so on for {left_out} more ranks, {last}"]
        return ", ".join(clauses)


def _undone(schedule: Schedule) -> Fault | None:
    """The first result that nobody makes, of those that every stage makes of every micro-batch."""
    parts = [part for *_, part in _places(schedule)]
    made = {result for part in parts for result in makes(part)}
    trains = any(part.kind != "F" for part in parts)
    expected = {"y": "F", "dx": "I", "dw": "W"} if trains else {"y": "F"}
    for k in range(schedule.n_microbatches):
        for stage in range(schedule.n_stages):
            for what, kind in expected.items():
                if Result(what, stage, k) not in made:
                    rank = next(rank for rank, _, _, part in _places(schedule) if part.stage == stage)
                    why = f"it is missing: nobody makes the {Result(what, stage, k)}"
                    return Fault(rank, len(schedule.rows[rank]), Action(kind, stage, k), why)
    return None


def first_early(
    schedule: Schedule, starts: Sequence[Sequence[Any]], ends: Sequence[Sequence[Any]]
) -> Fault | None:
    """Find the first action that starts while its rank is busy, or before what it needs is there.

    For times that do not come from :func:`.simulate`: a drawing, a simulator of one's own, a measurement.
    ``starts`` and ``ends`` hold the times of every action of every rank.
    """
    made = {result: ends[rank][index] for rank, index, _, part in _places(schedule) for result in makes(part)}
    in_order = sorted(_places(schedule), key=lambda place: (starts[place[0]][place[1]], place[:2]))
    for rank, index, action, part in in_order:
        start = starts[rank][index]
        if index and ends[rank][index - 1] > start:
            why = f"it starts at {start}, and the rank is busy until {ends[rank][index - 1]}"
            return Fault(rank, index, action, why)
        for result in needs(part, schedule.n_stages):
            if result not in made:
                return Fault(rank, index, action, f"nobody makes the {result}", result)
            if made[result] > start:
                why = f"it starts at {start}, and the {result} is there at {made[result]}"
                return Fault(rank, index, action, why, result)
    return None
