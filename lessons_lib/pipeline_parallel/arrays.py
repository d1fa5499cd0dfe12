"""The simulation of large schedules in numpy, all ranks at a time."""

from __future__ import annotations

from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

from lessons_lib.pipeline_parallel.actions import Schedule
from lessons_lib.pipeline_parallel.results import Arrivals, Numbering, Simulated
from lessons_lib.pipeline_parallel.rules import RULES
from lessons_lib.pipeline_parallel.times import Ticks

LARGE = 50_000  # actions; for fewer, importing numpy takes longer than it saves
NEVER = 2**62  # ticks


def suits(schedule: Schedule, ticks: Ticks) -> bool:
    """Whether :func:`in_arrays` is worth it and can do it: no overlapped pairs, no queues for links."""
    longest = max(chain(*ticks.durations.values())) + ticks.send
    return (
        schedule.n_actions > LARGE
        and not ticks.on_link
        and schedule.n_actions * longest < NEVER
        and all(len(action) == 3 for row in schedule.rows for action in row)
    )


def in_arrays(schedule: Schedule, ticks: Ticks) -> Simulated:
    """The same as :func:`.simulate.one_by_one`.

    In a step, every rank whose next action has what it needs does it. There are about 2 (m + p) steps, and
    each takes the same few operations on arrays of p numbers.
    """
    import numpy as np

    numbering = Numbering(schedule.n_stages, schedule.n_microbatches)
    nobody, always = numbering.size, numbering.size + 1  # what nobody awaits; what is there at all times
    whole = all(isinstance(time, int) for time in chain(*ticks.durations.values(), [ticks.send]))
    there: Any = np.full(numbering.size + 2, NEVER, np.int64 if whole else np.float64)
    there[always] = 0
    for at_once in numbering.from_the_start():
        there[at_once] = 0

    # What every action needs and makes, rank after rank.
    actions = list(chain.from_iterable(schedule.rows))
    kinds = np.fromiter(map(ord, map(itemgetter(0), actions)), np.uint8, len(actions))
    stages, ks = (np.fromiter(map(itemgetter(n), actions), np.int64, len(actions)) for n in (1, 2))
    at = stages * schedule.n_microbatches + ks
    own, neighbour = np.full_like(at, always), np.full_like(at, always)
    makes = [np.full_like(at, nobody), np.full_like(at, nobody)]
    takes, under_way = (np.zeros(len(actions), there.dtype) for _ in range(2))
    homes = np.asarray(numbering.homes(schedule)) if ticks.send else None
    ranks = np.repeat(np.arange(schedule.n_ranks), [len(row) for row in schedule.rows])
    for kind in RULES:
        of_kind = kinds == ord(kind)
        offsets = numbering.offsets(kind)
        if offsets.own is not None:
            own[of_kind] = at[of_kind] + offsets.own
        if offsets.neighbour is not None:
            neighbour[of_kind] = at[of_kind] + offsets.neighbour
        for column, (made, onward) in zip(makes, offsets.makes, strict=False):
            column[of_kind] = at[of_kind] + made
            if homes is not None and onward:
                to = homes[at[of_kind] + onward + schedule.n_microbatches]
                under_way[of_kind] = np.where((to == ranks[of_kind]) | (to < 0), 0, ticks.send)
        takes[of_kind] = np.asarray(ticks.durations[kind])[stages[of_kind]]

    bounds = list(accumulate(map(len, schedule.rows), initial=0))
    going = np.flatnonzero(np.diff(bounds))  # ranks that are not done
    following, end_of_row = np.array(bounds[:-1]), np.array(bounds[1:])
    now = np.zeros(schedule.n_ranks, there.dtype)
    starts, ends = np.empty_like(takes), np.empty_like(takes)
    while len(going):
        action = following[going]
        start = np.maximum(now[going], there[neighbour[action]])
        can = (start < NEVER) & (there[own[action]] < NEVER)
        if not can.any():
            break
        rank, action, start = going[can], action[can], start[can]
        end = start + takes[action]
        starts[action], ends[action], now[rank] = start, end, end
        there[makes[0][action]] = end + under_way[action]
        there[makes[1][action]] = end
        following[rank] += 1
        going = going[following[going] < end_of_row[going]]

    def of_ranks(times: Any) -> list[memoryview]:  # whose elements are plain numbers
        return [memoryview(times[a:b]) for a, b in zip(bounds, following, strict=False)]

    return of_ranks(starts), of_ranks(ends), Arrivals(numbering, memoryview(there))
