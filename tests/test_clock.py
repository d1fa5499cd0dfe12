"""Virtual time: exact, and the same on thread ranks and on process ranks."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import compute, region, run
from lessons_lib.errors import RefusedError
from lessons_lib.machines import Link, Machine, machine
from lessons_lib.spmd.clock import Clock, WallClock, standing_still
from lessons_lib.spmd.trace import Trace
from tests.test_doctor import programs

TRANSPORTS = ("threads", "processes")
SLOW_ON_PROCESSES = ("threads", pytest.param("processes", marks=pytest.mark.slow))
FREE = Machine("free")
GRID = Machine(
    "two boxes",
    flops_per_s=2.0**30,
    n_nodes=2,
    gpus_per_node=2,
    in_node=Link(0.25, 64.0),
    between_nodes=Link(1.0, 16.0),
)


@pytest.fixture(scope="module", autouse=True)
def _steps_travel_by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def done(trace: Trace, rank: int) -> list[float]:
    return [event.done_s for event in trace.events if event.rank == rank]


# ---- the clock itself ----


@given(st.lists(st.tuples(st.sampled_from(["advance", "catch_up"]), st.integers(0, 20))))
def test_a_clock_that_stands_still_is_moved_and_never_back(moves: list[tuple[str, int]]) -> None:
    clock, expected = Clock(standing_still), 0
    for name, seconds in moves:
        getattr(clock, name)(seconds)
        expected = expected + seconds if name == "advance" else max(expected, seconds)
        assert clock.now() == expected


def test_a_clock_runs_while_its_rank_does() -> None:
    time = [10.0]
    clock = Clock(lambda: time[0])
    time[0] += 2
    with clock.halted():
        time[0] += 100
        with clock.halted():
            time[0] += 100
        time[0] += 100
    time[0] += 1
    assert clock.now() == 3
    clock.halt()
    with clock.halted():
        time[0] += 5
    time[0] += 5
    assert clock.now() == 3
    clock.resume()
    clock.resume()
    time[0] += 1
    assert clock.now() == 4


def test_the_wall_clock_does_not_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    time = [10.0]
    monkeypatch.setattr("lessons_lib.spmd.clock.time.perf_counter", lambda: time[0])
    clock = WallClock(lambda: time[0])
    clock.begin(8.0)
    with clock.halted():
        time[0] += 5
    clock.catch_up(100.0)
    assert clock.now() == 7


def test_compute_needs_a_machine_and_no_negative_time() -> None:
    with pytest.raises(RefusedError, match=r"compute\(1\) moves a virtual clock, and this run's is measured"):
        run(lambda: compute(1), ranks=1)
    with pytest.raises(RefusedError, match=r"compute\(-1\): give 0 seconds or more"):
        run(lambda: compute(-1), ranks=1, machine=FREE)
    compute(1)  # without ranks: nothing


# ---- programs ----


def gpipe(m: int, forward_s: float, backward_s: float) -> None:
    x = torch.ones(2)
    first, last = me() == 0, me() == size() - 1
    for _ in range(m):
        if not first:
            dist.recv(x, me() - 1)
        compute(forward_s)
        if not last:
            dist.send(x, me() + 1)
    for _ in range(m):
        if not last:
            dist.recv(x, me() + 1)
        compute(backward_s)
        if not first:
            dist.send(x, me() - 1)


@pytest.mark.parametrize("transport", SLOW_ON_PROCESSES)
@pytest.mark.parametrize("p, m", [(1, 3), (2, 1), (3, 4), (4, 40)])
def test_gpipe_takes_what_the_formula_says(transport: str, p: int, m: int) -> None:
    forward_s, backward_s = 0.25, 0.5
    result = run(gpipe, m, forward_s, backward_s, ranks=p, transport=transport, machine=FREE)
    timeline = result.trace.timeline
    assert timeline.makespan == (m + p - 1) * (forward_s + backward_s)
    assert timeline.clock == "virtual (free)" and result.trace.clock == timeline.clock
    assert [timeline.end_of(0), result.trace.ended_s[0]] == [timeline.makespan] * 2
    if p > 1:
        busy = m * (forward_s + backward_s)
        waited = [sum(e.waited_s for e in result.trace.events if e.rank == rank) for rank in range(p)]
        assert waited[0] == timeline.makespan - busy
        assert Fraction(waited[0]) / Fraction(timeline.makespan) == Fraction(p - 1, m + p - 1)


def under_way() -> None:
    """Two sums of 64 bytes one after the other on the link, beside 3 seconds of work and then 1 more."""
    x, y = torch.ones(16), torch.ones(16)
    works: list[Any] = [dist.all_reduce(x, async_op=True)]
    compute(1.0 + me())
    works.append(dist.all_reduce(y, async_op=True))
    compute(1.0)
    for work in works:
        work.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_asynchronous_communication_runs_beside_the_work(transport: str) -> None:
    """An all-reduce of 64 bytes on 2 ranks: 2 rounds of 0.25 s, and 64 bytes at 64 bytes/s: 1.5 s."""
    trace = run(under_way, ranks=2, transport=transport, machine=GRID).trace
    assert done(trace, 0) == done(trace, 1) == [1.5, 3.5]  # the second begins when rank 1 comes, at 2
    first, second = trace.collectives(0)
    assert (first.issued_s, first.waited_s, second.issued_s, second.waited_s) == (0, 0, 1, 1.5)
    assert [e.waited_s for e in trace.collectives(1)] == [0, 0.5]
    assert trace.timeline.makespan == 3.5


def one_after_the_other() -> None:
    works: list[Any] = [dist.all_reduce(torch.ones(16), async_op=True) for _ in range(40)]
    for work in reversed(works):
        work.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_link_carries_one_collective_at_a_time(transport: str) -> None:
    trace = run(one_after_the_other, ranks=2, transport=transport, machine=GRID).trace
    assert done(trace, 1) == [1.5 * (k + 1) for k in range(40)]
    assert trace.timeline.makespan == 60


def several_groups() -> None:
    """Rank 0 begins a sum with each neighbour, and the first one's partner comes last."""
    groups = [dist.new_group(members) for members in ([0, 1], [0, 2], [0, 1])]
    compute((0.0, 5.0, 1.0)[me()])
    works: list[Any] = []
    for group, others in zip(groups, (1, 2, 1), strict=True):
        if me() in (0, others):
            works.append(dist.all_reduce(torch.ones(16), group=group, async_op=True))
    for work in works:
        work.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_group_has_a_channel_of_its_own(transport: str) -> None:
    """Neither that of the same ranks nor that of the rank that comes late holds up another."""
    box = Machine("box", in_node=Link(0.25, 64.0))  # 1.5 s for 64 bytes on two ranks
    trace = run(several_groups, ranks=3, transport=transport, machine=box).trace
    assert [done(trace, rank) for rank in range(3)] == [[6.5, 2.5, 6.5], [6.5, 6.5], [2.5]]
    assert trace.timeline.makespan == 6.5


def uneven_all_to_all() -> None:
    sizes = [[4, 8], [40, 4]]
    inputs = [torch.ones(n) for n in sizes[me()]]
    dist.all_to_all([torch.empty(sizes[source][me()]) for source in range(2)], inputs)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_uneven_all_to_all_takes_as_long_as_the_rank_with_the_most(transport: str) -> None:
    trace = run(uneven_all_to_all, ranks=2, transport=transport, machine=GRID).trace
    assert done(trace, 0) == done(trace, 1) == [0.25 + 44 * 4 / 2 / 64]


def at_times(groups: list[tuple[int, ...]], program: list[list[tuple[Any, ...]]], pace: int) -> None:
    """A program of the doctor's, with work of some length before every step."""
    made: list[Any] = [*(dist.new_group(list(members)) for members in groups), None]  # [-1] is the world
    works: list[Any] = []
    for number, (kind, which, _, *rest) in enumerate(program[me()]):
        compute((number * pace + 3 * me()) % 7 / 4)
        x = torch.ones(16)
        if kind == "send":
            dist.send(x, which, tag=rest[0])
        elif kind == "isend":
            works.append(dist.isend(x, which, tag=rest[0]))
        elif kind == "recv":
            dist.recv(x, which, tag=rest[0])
        elif kind == "barrier":
            works.append(dist.barrier(group=made[which], async_op=rest[1]))
        elif kind == "broadcast":
            works.append(dist.broadcast(x, rest[0], group=made[which], async_op=rest[1]))
        else:
            works.append(dist.all_reduce(x, group=made[which], async_op=rest[1]))
    for work in works[:: -1 if pace % 2 else 1]:
        if work is not None:
            work.wait()


@pytest.mark.slow
@settings(max_examples=15)
@given(programs(), st.integers(1, 6))
def test_any_program_takes_the_same_time_on_threads_and_on_processes(drawn: Any, pace: int) -> None:
    """To the last digit, for every event: several groups, links of two kinds, anything under way."""
    n_ranks, *program = drawn
    two_boxes = replace(GRID, gpus_per_node=3)
    traces = [
        run(at_times, *program, pace, ranks=n_ranks, transport=t, machine=two_boxes).trace for t in TRANSPORTS
    ]
    records = [
        [
            [(e.kind, e.issued_s, e.done_s, e.waited_s) for e in trace.events if e.rank == rank]
            for rank in range(n_ranks)
        ]
        for trace in traces
    ]
    assert records[0] == records[1] and traces[0].ended_s == traces[1].ended_s


def between_boxes() -> list[float]:
    x = torch.ones(16)
    for members in ([0, 1], [1, 2]):
        group = dist.new_group(members)
        if me() in members:
            dist.all_reduce(x, group=group)
    dist.barrier()
    if me() in (0, 3):
        dist.send(x, 1 if me() == 0 else 2)
    else:
        dist.recv(x, 0 if me() == 1 else 3)
    if me() == 1:
        work = dist.isend(x, 2)
        compute(0.125)
        assert work is not None
        work.wait()
    elif me() == 2:
        dist.recv(x)
    return []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_links_inside_and_between_boxes(transport: str) -> None:
    trace = run(between_boxes, ranks=4, transport=transport, machine=GRID).trace
    across = 1.5 + 2 * 1.0 + 64 / 16  # after the sum in the box, two rounds and 64 bytes
    met = across + 6 * 1.0  # a barrier of four: six rounds without bytes
    inside = met + 0.25 + 1.0
    assert done(trace, 0) == [1.5, met, met]
    assert done(trace, 1) == [1.5, across, met, inside, inside]
    assert done(trace, 2) == [across, met, inside, inside + 1.0 + 4.0]
    assert trace.ended_s[1] == inside + 0.125 and trace.ended_s[2] == trace.timeline.makespan
    for message in trace.timeline.messages:
        assert message.sent < message.received
    assert {(message.source, message.destination) for message in trace.timeline.messages} == {
        (0, 1),
        (3, 2),
        (1, 2),
    }


def data_parallel(bucket_cap_mb: float, d: int) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(d, d, bias=False) for _ in range(4)))
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    x = torch.randn(8, d)
    for name in ("warm-up", "step"):  # torch makes the buckets anew after the first
        with region(name):
            parallel(x).sum().backward()
    return sum(parameter.numel() for parameter in model.parameters())


def step_s(trace: Trace, rank: int) -> tuple[float, int]:
    """Seconds of the second step, and its number of buckets."""
    sums = [e for e in trace.collectives(rank) if e.kind == "all_reduce" and e.n_elements > 1]
    before = max(e.done_s for e in sums if e.region == "warm-up")
    return trace.ended_s[rank] - before, sum(e.region == "step" for e in sums)


@pytest.mark.parametrize("transport", SLOW_ON_PROCESSES)
def test_the_buckets_of_data_parallel_overlap_with_backward(transport: str) -> None:
    """One bucket is summed after backward, several while it goes on."""
    d = 64
    box = Machine("box", flops_per_s=2.0**22, in_node=Link(0.0, 2.0**18))
    seconds = {}
    for cap_mb in (25.0, 0.01):
        result = run(data_parallel, cap_mb, d, ranks=2, transport=transport, machine=box)
        assert result.values == [4 * d * d] * 2
        (seconds[cap_mb], n_buckets), other = (step_s(result.trace, rank) for rank in range(2))
        assert other == (seconds[cap_mb], n_buckets) and n_buckets == (1 if cap_mb == 25.0 else 4)
    linear_s = 2 * 8 * d * d / box.flops_per_s  # one product
    sum_s = 4 * d * d / 2.0**18  # of one weight on two ranks
    work_s = 4 * linear_s + 7 * linear_s  # the first layer needs no gradient of its input
    # torch also tells all ranks of its new buckets, in a few bytes
    assert seconds[25.0] == pytest.approx(work_s + 4 * sum_s, rel=1e-3)
    # the last layer's gradient comes after two products of backward; from then on the sums wait for nothing
    assert seconds[0.01] == pytest.approx(
        max(work_s + sum_s, 4 * linear_s + 1 * linear_s + 4 * sum_s), rel=0.05
    )
    assert max(work_s, 4 * sum_s) < seconds[0.01] < seconds[25.0]


@pytest.mark.parametrize("transport", SLOW_ON_PROCESSES)
def test_a_named_machine(transport: str) -> None:
    def product() -> None:
        x = torch.ones(256, 256)
        x @ x
        dist.all_reduce(x)

    trace = run(product, ranks=2, transport=transport, machine="2xH100").trace
    h100 = machine("2xH100")
    expected = 2 * 256**3 / 989e12 + h100.collective_s("all_reduce", 4 * 256**2, (0, 1))
    assert trace.ended_s == pytest.approx([expected] * 2) and trace.clock == "virtual (2xH100)"


# ---- export ----


@pytest.mark.parametrize("transport", SLOW_ON_PROCESSES)
def test_the_export_for_perfetto_has_every_span_message_and_byte(transport: str, tmp_path: Path) -> None:
    def step() -> None:
        with region('a "name"'):
            gpipe(3, 0.25, 0.5)
        dist.all_reduce(torch.ones(8))

    trace = run(step, ranks=3, transport=transport, machine=FREE, record="memory").trace
    trace.save_chrome(tmp_path / "trace.json")
    saved = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    events, timeline = saved["traceEvents"], trace.timeline
    assert Counter(event["ph"] for event in events) == {
        "M": 3 * 3,
        "X": len(timeline.spans),
        "s": len(timeline.messages),
        "f": len(timeline.messages),
        "C": sum(map(len, trace.live_bytes)),
    }
    assert len(timeline.messages) == 2 * 2 * 3 and trace.live_bytes[0]
    spans = [event for event in events if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == 1e6 * timeline.makespan
    for rank in range(3):
        mine = sorted((e["ts"], e["dur"]) for e in spans if e["pid"] == rank and e["tid"] == 0)
        for (start, duration), (following, _) in itertools.pairwise(mine):
            assert start + duration <= following  # Perfetto refuses spans that overlap
    ids = Counter(event["id"] for event in events if event["ph"] in "sf")
    assert set(ids.values()) == {2}
