"""Where all ranks of a recorded run stood, moment by moment.

A moment is when some rank begins or ceases to wait, comes to where others wait for it, or ends. What is
waited for follows from the records of the communications; at the end of a deadlock it is what the deadlock
was proved by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lessons_lib.errors import DeadlockError, RefusedError, RunError
from lessons_lib.spmd.doctor import find_cycle
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.result import Run
from lessons_lib.spmd.trace import Trace
from lessons_lib.timeline import Event, Waiting, ranks_text
from lessons_lib.views.waits import Standstill

MOST_MOMENTS = 500  # the last of a run: there it stood still


def moments(run: Run | RunError) -> list[Standstill]:
    """Where the ranks of a run, or of the run that an error came from, stood at every moment.

    >>> import torch.distributed as dist
    >>> from lessons_lib import run
    >>> try:
    ...     run(lambda: dist.get_rank() == 0 or dist.barrier(), ranks=3)
    ... except DeadlockError as error:
    ...     first, *_, last = moments(error)
    >>> first.waiting, [(each.rank, each.missing) for each in last.waiting], last.ended
    ((), [(1, (0,)), (2, (0,))], {0: 'returned True'})
    """
    result = run.run if isinstance(run, RunError) else run
    if not isinstance(result, Run):
        raise RefusedError(
            f"got {type(run).__name__}: give the result of run(...), or the error that it raised: "
            "try: run(step, ranks=4), except RunError as error: wait_explorer(error)."
        )
    trace = result.trace
    waits = list(_waits(trace))
    ends, issued = _ends(result, waits), _issued(trace)
    arrivals = [_arrivals(each.event, issued) for each in waits]
    times = {0.0, *ends.values(), *(time for each in waits for time in (each.since, each.until))}
    stand = {
        (each.event.rank, each.event.issued_s) for each in waits
    }  # who comes and waits, is a moment then
    for each, arrival in zip(waits, arrivals, strict=True):
        times |= {t for o, t in arrival.items() if each.since < t < each.until and (o, t) not in stand}
    stood = []
    for time in sorted(times - {math.inf})[-MOST_MOMENTS:]:
        waiting = [
            Waiting(
                each.event.rank,
                call_text(each.event),
                each.event.group,
                each.event.sequence,
                tuple(rank for rank, arrived in arrival.items() if arrived > time),
                each.event.where,
            )
            for each, arrival in zip(waits, arrivals, strict=True)
            if each.since <= time < each.until
        ]
        ended = {rank: result.endings[rank] for rank, end in sorted(ends.items()) if end <= time}
        stood.append(standstill(result.ranks, waiting, ended))
    if isinstance(result.error, DeadlockError):  # proved, and not only read from the records
        stood[-1] = standstill(result.ranks, result.error.waiting, stood[-1].ended)
    return [each for at, each in enumerate(stood) if not at or each != stood[at - 1]]


def standstill(
    n_ranks: int, waiting: list[Waiting] | tuple[Waiting, ...], ended: Mapping[int, str]
) -> Standstill:
    in_order = tuple(sorted(waiting, key=lambda each: each.rank))
    return Standstill(n_ranks, in_order, ended, tuple(find_cycle({w.rank: w.missing for w in in_order})))


def change(before: Standstill, after: Standstill) -> str:
    """What happened between two moments.

    >>> here = Standstill(3, (), {}), Standstill(3, (), {1: "returned 3"})
    >>> change(*here)
    'rank 1 returned 3'
    """
    stood, stands = ({each.rank: each for each in moment.waiting} for moment in (before, after))
    parts = [f"rank {rank} {said}" for rank, said in after.ended.items() if rank not in before.ended]
    for rank, each in stands.items():
        if rank not in stood or stood[rank].operation != each.operation:
            whom = f" for {ranks_text(each.missing)}" if each.missing else ""
            parts.append(f"rank {rank} begins to wait{whom}")
    on = [rank for rank in stood if rank not in stands and rank not in after.ended]
    parts += [f"{ranks_text(on)} {'goes' if len(on) == 1 else 'go'} on"] if on else []
    awaited = [{rank for each in moment.waiting for rank in each.missing} for moment in (before, after)]
    came = sorted(awaited[0] - awaited[1])
    return "; ".join(parts) or (
        f"{ranks_text(came)} {'has' if len(came) == 1 else 'have'} come" if came else ""
    )


def call_text(event: Event) -> str:
    """What was called, in the doctor's words: ``send(float32[1]) to rank 4``."""
    tensors = ((event.shape,), (event.dtype,)) if event.dtype else ((), ())
    operation = Operation(
        rank=event.rank,
        kind=event.kind,
        group=event.group,
        members=event.members,
        sequence=event.sequence,
        shapes=tensors[0],
        dtypes=tensors[1],
        n_elements=event.n_elements,
        n_bytes=0,
        bytes_sent=event.bytes_sent,
        issued_s=event.issued_s,
        where=event.where,
        region=event.region,
        peer=event.peer,
    )
    return str(operation)


class Wait(NamedTuple):
    event: Event
    since: float
    until: float


def _waits(trace: Trace) -> Iterator[Wait]:
    """When ranks stood still in which communication."""
    free_since = [0.0] * trace.n_ranks
    for event in sorted(trace.events, key=lambda each: (each.done_s, each.issued_s)):
        if event.waited_s > 0:
            since = event.issued_s if math.isinf(event.waited_s) else event.done_s - event.waited_s
            since = max(since, free_since[event.rank])
            yield Wait(event, since, event.done_s)
            free_since[event.rank] = event.done_s


def _ends(result: Run, waits: list[Wait]) -> dict[int, float]:
    """When ranks ended that did not stand still when the run was stopped."""
    stuck = {each.event.rank for each in waits if math.isinf(each.until)}
    ended = enumerate(result.trace.ended_s)
    return {rank: time for rank, time in ended if rank not in stuck and result.endings[rank] != "stopped"}


Side = tuple[object, ...]  # what tells a rank's side of a communication from all others


def _issued(trace: Trace) -> dict[Side, float]:
    """When every rank issued its side of what."""
    issued: dict[Side, float] = {}
    for each in trace.events:
        kind, peer = ("collective", None) if each.is_collective else (each.kind, each.peer)
        issued[kind, each.group, each.members, each.sequence, each.rank, peer] = each.issued_s
    return issued


def _arrivals(event: Event, issued: Mapping[Side, float]) -> dict[int, float]:
    """When the other ranks of a communication issued their side of it; infinite if they never did."""
    if event.is_collective:
        kind, mine, others = "collective", None, event.members
    else:
        kind, mine = ("recv" if event.kind == "send" else "send"), event.rank
        others = event.members if event.peer is None else (event.peer,)
    where = kind, event.group, event.members, event.sequence
    return {o: issued.get((*where, o, mine), math.inf) for o in others if o != event.rank}
