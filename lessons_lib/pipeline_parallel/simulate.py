"""When everything in a schedule happens, if actions and messages take a given time."""

from __future__ import annotations

from typing import Any

from lessons_lib.pipeline_parallel.actions import Schedule
from lessons_lib.pipeline_parallel.arrays import in_arrays, suits
from lessons_lib.pipeline_parallel.legality import check
from lessons_lib.pipeline_parallel.results import Arrivals, Numbering, Simulated
from lessons_lib.pipeline_parallel.rules import RULES
from lessons_lib.pipeline_parallel.timeline import PipelineTimeline
from lessons_lib.pipeline_parallel.times import Ticks, Times


def simulate(schedule: Schedule, times: Times = Times()) -> PipelineTimeline:
    """Find when every action starts and ends: as soon as its rank is free and what it needs is there.

    >>> from fractions import Fraction
    >>> from lessons_lib.pipeline_parallel import one_f_one_b, zb_h1
    >>> simulate(one_f_one_b(4, 8)).makespan, simulate(zb_h1(4, 8)).makespan
    (33, 27)
    >>> simulate(one_f_one_b(4, 8), Times(send=Fraction(1, 10))).makespan
    Fraction(173, 5)

    Ranks compute and send at once: a message costs its sender nothing. Whole and rational times are added up
    exactly, as whole numbers of ticks. The cost is linear in the number of actions.
    Raises IllegalScheduleError, with the first action that is wrong, where it comes to a standstill.
    """
    ticks = Ticks.of(times, schedule.n_stages)
    found = in_arrays(schedule, ticks) if suits(schedule, ticks) else one_by_one(schedule, ticks)
    starts, ends, arrivals = found
    if any(len(done) < len(row) for done, row in zip(ends, schedule.rows, strict=True)):
        check(schedule)  # says why
    return PipelineTimeline(schedule, starts, ends, ticks.length, arrivals, times.message_bytes, "simulated")


def one_by_one(schedule: Schedule, ticks: Ticks) -> Simulated:
    """Let each rank go on as long as it can; what it then waits for wakes it."""
    rows, m, durations = schedule.rows, schedule.n_microbatches, ticks.durations
    numbering = Numbering(schedule.n_stages, m)
    offsets = {kind: numbering.offsets(kind) for kind in RULES}
    homes = numbering.homes(schedule) if ticks.send or ticks.on_link else None
    there: list[Any] = [None] * numbering.size
    for at_once in numbering.from_the_start():
        there[at_once] = [0] * m
    link_free: dict[tuple[int, int], Any] = {}

    starts: list[list[Any]] = [[] for _ in rows]
    ends: list[list[Any]] = [[] for _ in rows]
    waiting: dict[int, int] = {}  # which rank waits for a result
    going = list(range(len(rows)))
    while going:
        rank = going.pop()
        row, start_of, end_of = rows[rank], starts[rank], ends[rank]
        end = end_of[-1] if end_of else 0
        missing = None
        for index in range(len(end_of), len(row)):
            action = row[index]
            start = end
            for kind, stage, k in action.parts:
                own, neighbour, _ = offsets[kind]
                at = stage * m + k
                if own is not None and there[own + at] is None:
                    missing = own + at
                elif neighbour is not None:
                    came = there[neighbour + at]
                    if came is None:
                        missing = neighbour + at
                    elif came > start:
                        start = came
            if missing is not None:
                waiting[missing] = rank
                break
            if action.kind in durations:
                end = start + durations[action.kind][stage]
            else:
                end = start + sum(durations[kind][stage] for kind, stage, _ in action.parts)
            start_of.append(start)
            end_of.append(end)
            for kind, stage, k in action.parts:
                at = stage * m + k
                for made, onward in offsets[kind].makes:
                    came = end
                    if homes is not None and onward:
                        to = homes[m + at + onward]
                        if to not in (rank, -1):
                            came = max(end, link_free.get((rank, to), 0)) + ticks.on_link
                            link_free[rank, to] = came
                            came += ticks.send
                    there[made + at] = came
                    if made + at in waiting:
                        going.append(waiting.pop(made + at))
    return starts, ends, Arrivals(numbering, there)
