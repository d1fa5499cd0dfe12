"""A ladder of schedule puzzles: say what every rank does in which order, and be done early.

>>> from lessons_lib.pipeline_parallel import PUZZLES
>>> PUZZLES[1]
Puzzle 1, Two ranks. Three micro-batches pass two ranks, forward and back. A backward takes two forwards.
rank 0 has stage 0; rank 1 has stage 1.
3 micro-batches; F 1, B 2. Best known: done at 12 (nobody can be earlier).

An answer is a grid as text, a :class:`.Schedule`, or a function of (p, m) that makes one:

>>> print(PUZZLES[1].play('''0F0 0B0 0F1 0B1 0F2 0B2
...                          1F0 1B0 1F1 1B1 1F2 1B2'''))
Legal. Done at 18; the best known is done at 12.
Stands still 50 % of the time; peak 1, 1 micro-batches; 6 messages.
A pause to begin with: 3 on rank 0 before 0B0, which waits for 1B0.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel.actions import Action, Pair, Schedule
from lessons_lib.pipeline_parallel.legality import Fault, first_fault
from lessons_lib.pipeline_parallel.rules import legal_next, makes, needs
from lessons_lib.pipeline_parallel.simulate import simulate
from lessons_lib.pipeline_parallel.text import read_grid
from lessons_lib.pipeline_parallel.timeline import PipelineTimeline
from lessons_lib.pipeline_parallel.times import Number, Times, neat
from lessons_lib.views.pipeline_words import number_text

if TYPE_CHECKING:
    from lessons_lib.pipeline_parallel.puzzle_ranks import OnRanks
    from lessons_lib.views.svg import Figure

Answer = str | Schedule | Iterable[Iterable[Any]] | Callable[[int, int], Any]


@dataclass(frozen=True, repr=False)
class Puzzle:
    """One task: stages on ranks, micro-batches, times, and what a rank may keep.

    ``cap`` holds for each rank the most micro-batches of a whole rank that it may keep at once, from F to the
    end of W; it is empty where memory does not matter.
    """

    number: int
    name: str
    question: str
    stages: list[list[int]]  # of each rank
    m: int
    kinds: str  # FB, or FIW where the backward is split
    times: Times
    cap: list[int]
    hints: list[str]
    solution: Schedule = field(repr=False)  # with the best score that is known

    @property
    def p(self) -> int:
        return len(self.stages)

    @property
    def n_stages(self) -> int:
        return sum(map(len, self.stages))

    @cached_property
    def best_known(self) -> Number:
        """When the best schedule that is known is done."""
        return simulate(self.solution, self.times).makespan

    @cached_property
    def at_least(self) -> Number:
        """When any schedule is done at the earliest: nobody can beat this, and maybe nobody can reach it.

        The largest of: one micro-batch forward and back; and, for every rank, the time until its first input
        is there, all its work, and what must follow its last backward on the way to the first stage.
        """
        durations, home = self.times.durations(self.n_stages), self._home
        back = "B" if "B" in self.kinds else "I"
        before: list[Number] = [0]  # of each stage: when it can start at the earliest,
        after: list[Number] = [0]  # and what must follow its last backward
        for stage in range(1, self.n_stages):
            hop = self.times.send if home[stage] != home[stage - 1] else 0
            before.append(before[-1] + durations["F"][stage - 1] + hop)
            after.append(after[-1] + durations[back][stage - 1] + hop)
        last_w = 0 if back == "B" else durations["W"][0]
        last = self.n_stages - 1
        bounds = [before[last] + durations["F"][last] + durations[back][last] + after[last] + last_w]
        for own in self.stages:
            first = min(before[stage] for stage in own)
            awaited, all_work = (
                self.m * sum(durations[kind][stage] for kind in kinds for stage in own)
                for kinds in ("F" + back, self.kinds)
            )
            bounds.append(first + awaited + min(after[stage] for stage in own) + last_w)
            bounds.append(first + all_work)
        return neat(Fraction(max(bounds)))

    def play(self, answer: Answer) -> Attempt:
        """Judge an answer: is it legal, within the memory, and how early is it done?"""
        schedule = self.read(answer)
        fault = self._off_the_board(schedule) or first_fault(schedule)
        if fault is None or fault.index == len(schedule.rows[fault.rank]):  # it is only not whole
            fault = self._unfinished(schedule)
        return Attempt(self, schedule, fault, None if fault else simulate(schedule, self.times))

    def read(self, answer: Answer) -> Schedule:
        """The schedule that an answer means."""
        given: Any = answer(self.p, self.m) if callable(answer) else answer
        if given is None:
            raise RefusedError(f"puzzle {self.number}: the answer is None. Does your function return rows?")
        name = f"puzzle {self.number}, mine"
        if isinstance(given, str):
            given = read_grid(given, name)
        schedule: Schedule = given if isinstance(given, Schedule) else Schedule.of(name, given)
        if schedule.n_ranks != self.p:
            rows = f"{schedule.n_ranks} row{'s' * (schedule.n_ranks > 1)}"
            raise RefusedError(
                f"puzzle {self.number} has {self.p} ranks, and the answer has {rows}: write one row for each "
                f"rank, such as\n{self.start}"
            )
        return schedule

    @property
    def start(self) -> str:
        """A legal answer, and mostly a slow one: one micro-batch after the other."""
        back = "B" if "B" in self.kinds else "IW"
        rows = [
            [
                Action(kind, stage, k)
                for k in range(self.m)
                for kinds, order in (("F", own), (back, own[::-1]))
                for stage in order
                for kind in kinds
            ]
            for own in self.stages
        ]
        return "\n".join(" ".join(map(str, row)) for row in rows)

    def next(self, so_far: str = "") -> str:
        """What every rank can do next, after all have done their rows ``so_far``.

        >>> from lessons_lib.pipeline_parallel import PUZZLES
        >>> print(PUZZLES[1].next('''0F0
        ...                          1F0'''))
        rank 0: 0F1 0F2
        rank 1: 1B0
        """
        rows = self._rows(so_far)
        found = legal_next(rows, self.stages, self.m, self.kinds)
        return "\n".join(
            f"rank {rank}: {' '.join(map(str, actions)) or 'nothing, it must wait'}"
            for rank, actions in enumerate(found)
        )

    def why_not(self, action: str, so_far: str = "") -> str:
        """Why an action cannot come next, after all ranks have done their rows ``so_far``.

        >>> from lessons_lib.pipeline_parallel import PUZZLES
        >>> PUZZLES[1].why_not("0B0", so_far="0F0")
        '0B0 waits for the input gradient of micro-batch 0 on stage 1, which 1B0 makes.'
        """
        if len(action.split()) != 1:
            raise RefusedError(f"why_not({action!r}): ask about one action at a time, such as '0F0'.")
        ((wanted,),) = read_grid(action).rows
        rows = self._rows(so_far)
        if fault := self._not_here(wanted.parts):
            return f"{action}: {fault}."
        there = {result for row in rows for done in row for part in done.parts for result in makes(part)}
        made = {made: part for part in self._everything() for made in makes(part)}
        for part in wanted.parts:
            if not there.isdisjoint(makes(part)):
                return f"{part} was already done."
            for result in needs(part, self.n_stages):
                if result not in there:
                    return f"{action} waits for the {result}, which {made[result]} makes."
        return f"{action} can come next."

    def hint(self, step: int = 1) -> str:
        """The first, second or third hint; each says more than the one before."""
        if not 1 <= step <= len(self.hints):
            raise RefusedError(f"hint({step}): there are hints 1 to {len(self.hints)}.")
        return self.hints[step - 1]

    def _rows(self, so_far: str) -> list[list[Action | Pair]]:
        rows: list[list[Action | Pair]] = (
            [list(row) for row in read_grid(so_far).rows] if so_far.strip(" .\n") else []
        )
        return rows + [[] for _ in range(self.p - len(rows))]

    @cached_property
    def _home(self) -> dict[int, int]:
        return {stage: rank for rank, own in enumerate(self.stages) for stage in own}

    def _everything(self) -> list[Action]:
        stages, micro_batches = range(self.n_stages), range(self.m)
        return [Action(kind, stage, k) for kind in self.kinds for stage in stages for k in micro_batches]

    def _not_here(self, parts: Iterable[Action], rank: int | None = None) -> str:
        """Why an action is none of this puzzle's."""
        for kind, stage, k in parts:
            if kind not in self.kinds:
                return f"this puzzle is played with {', '.join(self.kinds)}"
            if stage not in self._home or k >= self.m:
                return f"this puzzle has stages 0 to {self.n_stages - 1} and micro-batches 0 to {self.m - 1}"
            if rank is not None and self._home[stage] != rank:
                return f"stage {stage} is on rank {self._home[stage]}"
        return ""

    def _off_the_board(self, schedule: Schedule) -> Fault | None:
        for rank, row in enumerate(schedule.rows):
            for index, action in enumerate(row):
                if why := self._not_here(action.parts, rank):
                    return Fault(rank, index, action, why)
        return None

    def _unfinished(self, schedule: Schedule) -> Fault | None:
        done = {part for row in schedule.rows for action in row for part in action.parts}
        for action in self._everything():
            if action not in done:
                rank = self._home[action.stage]
                return Fault(rank, len(schedule.rows[rank]), action, "it is missing")
        return None

    def __repr__(self) -> str:
        where = "; ".join(
            f"rank {rank} has stage{'s' * (len(own) > 1)} {' and '.join(map(str, own))}"
            for rank, own in enumerate(self.stages)
        )
        durations = self.times.durations(self.n_stages)
        times = [f"{kind} {_per_stage(durations[kind])}" for kind in self.kinds]
        if self.times.send:
            times.append(f"a message {number_text(self.times.send)}")
        sure = " (nobody can be earlier)" if self.best_known == self.at_least else ""
        return (
            f"Puzzle {self.number}, {self.name}. {self.question}\n{where}.\n{self.m} micro-batches; "
            f"{', '.join(times)}.{self._cap_text} Best known: done at {number_text(self.best_known)}{sure}."
        )

    @property
    def _cap_text(self) -> str:
        """What a rank may keep, from when to when, and what a micro-batch on one of its stages counts."""
        if not self.cap:
            return ""
        if len(set(self.cap)) == 1:
            text = f" A rank may keep {self.cap[0]} micro-batches"
        else:
            text = f" The ranks may keep {_list(self.cap)} micro-batches"
        n_own = len(self.stages[0])
        part = f"; on one of its {n_own} stages it counts 1/{n_own}" if n_own > 1 else ""
        return f"{text}, each from its F to its {self.kinds[-1]}{part}."


@dataclass(frozen=True, repr=False)
class Attempt:
    """What became of an answer. In a notebook it shows itself: the timeline and the score."""

    puzzle: Puzzle
    schedule: Schedule
    fault: Fault | None  # the first action that is wrong
    timeline: PipelineTimeline | None  # of a legal schedule

    @property
    def legal(self) -> bool:
        return self.fault is None

    @cached_property
    def too_much(self) -> list[int]:
        """The ranks that keep more than they may."""
        if self.timeline is None:
            return []
        peaks = self.timeline.peak_in_flight()
        return [rank for rank, cap in enumerate(self.puzzle.cap) if peaks[rank] > cap]

    @property
    def score(self) -> int:
        """0: not legal. 1: legal. 2: within the memory. 3: as early as the best that is known, or earlier."""
        if self.timeline is None:
            return 0
        if self.too_much:
            return 1
        return 3 if self.timeline.makespan <= self.puzzle.best_known else 2

    def __str__(self) -> str:
        if self.timeline is None:
            return f"Not legal: {self.fault}."
        peaks, cap, best = self.timeline.peak_in_flight(), self.puzzle.cap, self.puzzle.best_known
        verdict = "Legal."
        if self.too_much:
            keeps = (f"rank {rank} keeps {number_text(peaks[rank])} of {cap[rank]}" for rank in self.too_much)
            verdict = f"Legal, but too large: {', '.join(keeps)} micro-batches."
            compared = ", which does not count"
        elif self.timeline.makespan == best:
            compared = "; the best that is known"
        elif self.timeline.makespan < best:
            compared = "; earlier than any that was known: tell us"
        else:
            compared = f"; the best known is done at {number_text(best)}"
        still = f"{float(self.timeline.bubble):.0%}".replace("%", " %")
        lines = [
            f"{verdict} Done at {number_text(self.timeline.makespan)}{compared}.",
            f"Stands still {still} of the time; peak {_list(peaks)} micro-batches; "
            f"{len(self.timeline.messages)} messages.",
        ]
        if self.score == 2 and self.pause:
            lines.append(f"A pause to begin with: {self.pause}.")
        return "\n".join(lines)

    __repr__ = __str__

    @cached_property
    def pause(self) -> str:
        """The longest pause on the chain that decides the end; of the busiest rank, if it has one there."""
        if self.timeline is None:
            return ""
        starts, ends, rows = self.timeline.starts, self.timeline.ends, self.schedule.rows
        work = self.timeline.work
        found: list[tuple[bool, Any, str]] = []
        for (other, at), (rank, index) in pairwise(self.timeline.critical_path):
            if other != rank and index and (pause := starts[rank][index] - ends[rank][index - 1]):
                length = number_text(self.timeline.time(pause))
                waits = f"before {rows[rank][index]}, which waits for {rows[other][at]}"
                found.append((work[rank] == max(work), pause, f"{length} on rank {rank} {waits}"))
        return max(found, key=lambda one: one[:2], default=(False, 0, ""))[2]

    def execute(self) -> OnRanks:
        """Train real stages by the schedule, one rank for each of the puzzle's, and compare with serial."""
        from lessons_lib.pipeline_parallel.puzzle_ranks import train_stages

        if self.timeline is None:
            raise RefusedError(f"puzzle {self.puzzle.number}: {self} Mend that first.")
        return train_stages(self.puzzle, self.schedule)

    def picture(self, **options: Any) -> Figure | None:
        return None if self.timeline is None else self.timeline.picture(**options)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        print(self)
        if self.timeline is not None:
            display(self.picture(critical_path=True))


def _list(numbers: Iterable[Any]) -> str:
    return ", ".join(map(number_text, numbers))


def _per_stage(times: list[Number]) -> str:
    return number_text(times[0]) if len(set(times)) == 1 else f"{_list(times)} by stage"


def _puzzle(number: int, entry: Mapping[str, Any]) -> Puzzle:
    times: dict[str, Any] = {
        name: [neat(Fraction(time)) for time in given] if isinstance(given, list) else neat(Fraction(given))
        for name, given in entry.get("times", {}).items()
    }
    return Puzzle(
        number=number,
        name=entry["name"],
        question=" ".join(entry["question"].split()),
        stages=entry["stages"],
        m=entry["m"],
        kinds=entry["kinds"],
        times=Times(**times),
        cap=entry.get("cap", []),
        hints=[" ".join(hint.split()) for hint in entry["hints"]],
        solution=read_grid(entry["solution"], name=f"puzzle {number}, solution"),
    )


@cache
def _read() -> dict[int, Puzzle]:
    text = files(__package__).joinpath("puzzles.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["puzzle"]
    return {number: _puzzle(number, entry) for number, entry in enumerate(entries, start=1)}


PUZZLES: dict[int, Puzzle] = _read()
