"""The trace: bytes by the ring convention as whole numbers, who did what where, a timeline that adds up."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import Mesh, compute, region, run
from lessons_lib.errors import DeadlockError, RankError, RefusedError, UnfinishedWarning
from lessons_lib.machines import Machine
from lessons_lib.spmd.trace import Trace
from lessons_lib.timeline import COLLECTIVES, Timeline, elements_sent, ring_traffic


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


# ---- bytes ----


def closed_form(kind: str, n: int, p: int) -> int:
    """Elements all ranks together send, from METHODS.md 0; ``n`` is the whole buffer."""
    return {
        "all_reduce": 2 * (p - 1) * n,
        "all_gather": (p - 1) * n,
        "reduce_scatter": (p - 1) * n,
        "all_to_all": (p - 1) * n,
        "broadcast": (p - 1) * n,
        "reduce": (p - 1) * n,
        "barrier": 0,
    }[kind]


@given(
    st.sampled_from(
        ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "barrier"]
    ),
    st.integers(0, 1000),
    st.integers(1, 17),
    st.data(),
)
def test_the_sum_over_ranks_is_the_closed_form_for_every_size(
    kind: str, n: int, p: int, choice: st.DataObject
) -> None:
    root = choice.draw(st.integers(0, p - 1))
    sent = [elements_sent(kind, n, p, rank, root) for rank in range(p)]
    assert sum(sent) == closed_form(kind, n, p)
    assert ring_traffic(kind, n, p) == Fraction(closed_form(kind, n, p), p)
    assert min(sent) >= 0
    if kind not in ("broadcast", "reduce"):
        assert max(sent) - min(sent) <= (2 if kind == "all_reduce" else 1)
        if n % p == 0:
            assert len(set(sent)) == 1


def ring(kind: str, n: int, p: int) -> list[int]:
    """Elements every rank sends, by playing the algorithm of Patarasuk and Yuan chunk by chunk."""
    chunks = [len(chunk) for chunk in torch.arange(n).tensor_split(p)]
    sent = [0] * p
    for step in range(p - 1):
        for rank in range(p):
            if kind in ("reduce_scatter", "all_reduce"):  # chunk r comes to rest on rank r
                sent[rank] += chunks[(rank - 1 - step) % p]
            if kind in ("all_gather", "all_reduce"):  # which starts with its own
                sent[rank] += chunks[(rank - step) % p]
    return sent


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.integers(0, 200), st.integers(1, 9)
)
def test_each_rank_sends_what_the_ring_algorithm_makes_it_send(kind: str, n: int, p: int) -> None:
    assert [elements_sent(kind, n, p, rank) for rank in range(p)] == ring(kind, n, p)


@given(st.integers(0, 200), st.integers(2, 9), st.data())
def test_chains_and_straight_ways_by_hand(n: int, p: int, choice: st.DataObject) -> None:
    root = choice.draw(st.integers(0, p - 1))
    chunks = [len(chunk) for chunk in torch.arange(n).tensor_split(p)]

    def sent(kind: str) -> list[int]:
        return [elements_sent(kind, n, p, rank, root) for rank in range(p)]

    last = (root - 1) % p  # of the chain root, root + 1, ...
    assert sent("broadcast") == [0 if rank == last else n for rank in range(p)]
    assert sent("reduce") == [0 if rank == root else n for rank in range(p)]
    assert sent("gather") == [0 if rank == root else chunks[rank] for rank in range(p)]
    assert sent("scatter") == [n - chunks[root] if rank == root else 0 for rank in range(p)]
    assert sent("all_to_all") == [n - chunks[rank] for rank in range(p)]


def test_an_unknown_kind_has_no_convention() -> None:
    with pytest.raises(RefusedError, match="no ring convention for 'gossip'; known: all_reduce, all_gather"):
        elements_sent("gossip", 1, 2, 0)


def same_rows(n: int) -> list[torch.Tensor]:
    return [torch.ones(n) for _ in range(size())]


CALLS: dict[str, tuple[str, Callable[[int], Any], Callable[[int, int], int]]] = {
    # name: kind, call with n elements, whole buffer for n elements on p ranks
    "all_reduce": ("all_reduce", lambda n: dist.all_reduce(torch.ones(n)), lambda n, p: n),
    "broadcast": ("broadcast", lambda n: dist.broadcast(torch.ones(n), size() - 1), lambda n, p: n),
    "reduce": ("reduce", lambda n: dist.reduce(torch.ones(n), size() - 1), lambda n, p: n),
    "all_gather": ("all_gather", lambda n: dist.all_gather(same_rows(n), torch.ones(n)), lambda n, p: n * p),
    "all_gather_single": (
        "all_gather",
        lambda n: dist.all_gather_single(torch.ones(n * size()), torch.ones(n)),
        lambda n, p: n * p,
    ),
    "reduce_scatter": (
        "reduce_scatter",
        lambda n: dist.reduce_scatter(torch.ones(n), same_rows(n)),
        lambda n, p: n * p,
    ),
    "reduce_scatter_single": (
        "reduce_scatter",
        lambda n: dist.reduce_scatter_single(torch.ones(n), torch.ones(n * size())),
        lambda n, p: n * p,
    ),
    "all_to_all": (
        "all_to_all",
        lambda n: dist.all_to_all(same_rows(n), same_rows(n)),
        lambda n, p: n * p,
    ),
    "all_to_all_single": (
        "all_to_all",
        lambda n: dist.all_to_all_single(torch.ones(n * size()), torch.ones(n * size())),
        lambda n, p: n * p,
    ),
    "barrier": ("barrier", lambda n: dist.barrier(), lambda n, p: 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_counted_bytes_are_the_ring_convention(name: str) -> None:
    kind, call, whole = CALLS[name]
    for ranks, n in itertools.product((1, 2, 3, 4), (1, 7, 12)):
        trace = run(lambda n: call(n), n, ranks=ranks).trace
        sent = [trace.bytes_sent(rank) for rank in range(ranks)]
        buffer = whole(n, ranks)
        assert sent == [4 * elements_sent(kind, buffer, ranks, rank, ranks - 1) for rank in range(ranks)]
        assert sum(sent) == 4 * closed_form(kind, buffer, ranks)
        (row,) = trace.traffic.rows
        assert (row.kind, row.group, row.calls, row.bytes_sent) == (kind, "world", (1,) * ranks, tuple(sent))


@pytest.mark.parametrize(
    "dtype, itemsize",
    [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.bool, 1), (torch.complex128, 16)],
)
def test_bytes_count_the_size_of_an_element(dtype: torch.dtype, itemsize: int) -> None:
    def step() -> None:
        dist.all_reduce(torch.ones(12, dtype=dtype))
        dist.send(torch.ones(5, dtype=dtype), 1) if me() == 0 else None
        dist.recv(torch.ones(5, dtype=dtype), 0) if me() == 1 else None

    trace = run(step, ranks=3).trace
    assert [trace.bytes_sent(rank) for rank in range(3)] == [itemsize * n for n in (16 + 5, 16, 16)]
    if not dtype.is_complex:  # torch sends complex numbers as pairs of real ones
        assert {event.dtype for event in trace.events} == {str(dtype).removeprefix("torch.")}


def test_gather_and_scatter_go_straight_to_and_from_the_root() -> None:
    def step() -> None:
        dist.gather(torch.ones(5), same_rows(5) if me() == 1 else None, dst=1)
        dist.scatter(torch.ones(6), same_rows(6) if me() == 2 else None, src=2)

    trace = run(step, ranks=3).trace
    assert [[event.bytes_sent for event in trace.collectives(rank)] for rank in range(3)] == [
        [20, 0],
        [0, 0],
        [20, 48],
    ]


def test_one_rank_sends_nothing() -> None:
    """S71: volume counters are 0."""

    def step() -> None:
        group = Mesh(tp=1)["tp"]
        x = torch.ones(4)
        group.all_reduce(x), group.all_gather(x, 0), group.reduce_scatter(x, 0), group.broadcast(x, 0)
        group.reduce(x, 0), group.all_to_all(x, 0, 0), group.shift(x, 1)
        group.barrier()

    trace = run(step, ranks=1).trace
    assert trace.bytes_sent(0) == 0 and len(trace.events) == 7


def test_traffic_tells_groups_apart() -> None:
    def step() -> None:
        mesh = Mesh(row=2, col=3)
        x = torch.ones(6)
        mesh["row"].all_reduce(x)
        mesh["col"].all_reduce(x)
        mesh["col"].all_reduce(x)
        dist.all_reduce(x)

    result = run(step, ranks=6)
    rows = {(row.kind, row.group): (row.calls, row.bytes_sent) for row in result.trace.traffic.rows}
    assert rows == {
        ("all_reduce", "row"): ((1,) * 6, (24,) * 6),
        ("all_reduce", "col"): ((2,) * 6, (64,) * 6),
        ("all_reduce", "world"): ((1,) * 6, (40,) * 6),
    }
    assert [result.trace.traffic.bytes_sent(rank) for rank in range(6)] == [128] * 6


def test_distributed_data_parallel_is_seen() -> None:
    """One all-reduce of every gradient once, in the buckets of DDP, during backward."""

    def step() -> int:
        model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 5)).double()
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        parallel = DistributedDataParallel(model)
        with region("step"):
            loss = parallel(torch.ones(3, 6, dtype=torch.float64)).sum()
            with region("backward"):
                loss.backward()
        return n_parameters

    result = run(step, ranks=3)
    n = result.values[0]
    assert n == 125
    for rank in range(3):
        reduces = [e for e in result.trace.collectives(rank, "backward") if e.kind == "all_reduce"]
        assert sum(event.n_elements for event in reduces) == n
        assert all(event.region == "step/backward" for event in reduces)
        assert {event.where.source for event in reduces} == {"loss.backward()"}
    total = sum(result.trace.bytes_sent(rank, "backward") for rank in range(3))
    assert total == 8 * 2 * 2 * n


# ---- events ----


def test_an_event_says_everything_about_one_communication() -> None:
    def step() -> None:
        mesh = Mesh(dp=2, tp=2)
        with region("forward"):
            mesh["tp"].all_reduce(torch.ones(2, 3))
            mesh["tp"].all_reduce(torch.ones(4))
        if me() == 2:
            dist.send(torch.ones(3).double(), 0)
        if me() == 0:
            dist.recv(torch.ones(3).double(), 2)

    result = run(step, ranks=4)
    first, second = result.trace.collectives(3)
    assert (first.kind, first.group, first.members, first.sequence) == ("all_reduce", "tp", (2, 3), 1)
    assert (first.shape, first.dtype, first.n_elements, first.bytes_sent) == ((2, 3), "float32", 6, 24)
    assert (first.region, first.peer, first.rank, first.is_collective) == ("forward", None, 3, True)
    assert (second.sequence, second.shape) == (2, (4,))
    assert first.where.source == 'mesh["tp"].all_reduce(torch.ones(2, 3))'
    assert (first.where.file, first.where.function) == ("tests/test_trace.py", "step")
    assert second.where.line == first.where.line + 1
    assert str(first.where) == f"tests/test_trace.py, line {first.where.line}, in step: {first.where.source}"
    sent = next(event for event in result.trace.events if event.kind == "send")
    received = next(event for event in result.trace.events if event.kind == "recv")
    assert (sent.rank, sent.peer, sent.bytes_sent, sent.group) == (2, 0, 24, "world")
    assert (received.rank, received.peer, received.bytes_sent, received.n_elements) == (0, 2, 0, 3)
    assert not sent.is_collective and sent.dtype == "float64" and sent.region == ""
    assert "dist.send" in sent.where.source and "dist.recv" in received.where.source
    assert all(event.issued_s <= event.done_s < math.inf for event in result.trace.events)


def test_every_call_of_torch_points_at_the_line_that_made_it() -> None:
    def step() -> None:
        for _, call, _ in CALLS.values():
            call(4)  # the lines are those of CALLS

    for event in run(step, ranks=2).trace.events:
        assert event.where.function == "<lambda>" and "dist." in event.where.source, event


def test_lines_of_deprecated_names_are_the_learners_too() -> None:
    def step() -> None:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_gather_into_tensor(torch.ones(2 * size()), torch.ones(2))

    (source,) = {event.where.source for event in run(step, ranks=2).trace.events}
    assert source.startswith("dist.all_gather_into_tensor")


def test_regions_nest_and_end_with_their_block() -> None:
    def step() -> None:
        x = torch.ones(6)
        dist.all_reduce(x)
        with region("layer 1"):
            dist.all_reduce(x)
            with region("backward"):
                dist.all_reduce(x)
            dist.all_reduce(x)
        try:
            with region("fails"):
                raise KeyError
        except KeyError:
            dist.all_reduce(x)

    trace = run(step, ranks=3).trace
    expected = ["", "layer 1", "layer 1/backward", "layer 1", ""]
    for rank in range(3):
        assert [event.region for event in trace.collectives(rank)] == expected
        assert trace.bytes_sent(rank) == 5 * 32
        assert trace.bytes_sent(rank, "layer 1") == 3 * 32
        assert trace.bytes_sent(rank, "backward") == 32
        assert trace.bytes_sent(rank, "layer") == 0 == trace.bytes_sent(rank, "fails")
        assert len(trace.collectives(rank, "layer 1")) == 3


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_was_not_there_is_refused(rank: int) -> None:
    trace = run(dist.barrier, ranks=3).trace
    for ask in (trace.bytes_sent, trace.collectives):
        with pytest.raises(RefusedError, match=rf"rank {rank} is none of this run's 3 ranks \(0 to 2\)"):
            ask(rank)


def test_a_trace_keeps_no_data_and_belongs_to_one_run() -> None:
    first = run(lambda: dist.all_reduce(torch.ones(3)), ranks=2)
    second = run(lambda: None, ranks=2)
    assert len(first.trace.events) == 2 and second.trace.events == ()
    assert second.trace.traffic.rows == () and second.trace.timeline.messages == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.trace.events = ()  # type: ignore[misc]


# ---- time ----


def test_waiting_is_charged_to_those_who_came_early() -> None:
    def step() -> None:
        if me() == 1:
            time.sleep(0.05)
        dist.barrier()

    trace = run(step, ranks=3).trace
    early, late, other = (trace.collectives(rank)[0] for rank in range(3))
    assert late.waited_s == 0 and late.issued_s >= 0.05
    for event in (early, other):
        assert 0.04 < event.waited_s <= late.issued_s and event.done_s == late.done_s == late.issued_s


def test_ranks_run_side_by_side_on_their_clocks() -> None:
    """Four ranks that sleep 20 ms one after the other are 20 ms, not 80, on the time axis."""

    def step() -> None:
        time.sleep(0.02)
        dist.barrier()

    result = run(step, ranks=4)
    assert result.seconds > 0.08
    assert 0.02 <= result.trace.timeline.makespan < 0.06


def test_a_send_costs_its_rank_no_time() -> None:
    def step() -> None:
        if me() == 0:
            dist.send(torch.ones(1), 1)
        else:
            time.sleep(0.03)
            dist.recv(torch.ones(1), 0)

    result = run(step, ranks=2)
    sent, received = sorted(result.trace.events, key=lambda event: event.kind == "recv")
    assert sent.waited_s == 0 and received.waited_s == 0 and received.done_s >= 0.03
    assert result.trace.ended_s[0] < 0.03 <= result.trace.ended_s[1]


def check_lanes(timeline: Timeline, trace: Trace) -> None:
    """On each lane, work and waiting follow each other from 0 to the end without gap or overlap."""
    for rank in range(timeline.n_ranks):
        lane = sorted(
            (span for span in timeline.spans if span.rank == rank and span.kind in ("compute", "wait")),
            key=lambda span: span.start,
        )
        assert all(0 <= span.start < span.end < math.inf for span in lane)
        assert not lane or lane[0].start == 0
        for before, after in itertools.pairwise(lane):
            assert before.end == after.start, (before, after)
        assert not lane or lane[-1].end >= trace.ended_s[rank] - 1e-9
        waited = sum(span.end - span.start for span in lane if span.kind == "wait")
        told = sum(event.waited_s for event in trace.events if event.rank == rank)
        assert math.isinf(told) or waited == pytest.approx(told, abs=1e-9)
    marks = [span for span in timeline.spans if span.kind not in ("compute", "wait")]
    done = [event for event in trace.events if math.isfinite(event.done_s)]
    assert sorted((m.rank, m.start, m.kind) for m in marks) == sorted(
        (e.rank, e.done_s, e.kind) for e in done
    )
    assert all(mark.end == mark.start for mark in marks)


def test_lanes_are_filled_once_also_when_results_are_awaited_out_of_order() -> None:
    def step() -> None:
        works = []
        for number, late in enumerate((2, 0, 1), start=1):
            if me() == late:
                compute(number * 1e-3)
            works.append(dist.all_reduce(torch.ones(2), async_op=True))
        for work in reversed(works):
            assert work is not None
            work.wait()

    trace = run(step, ranks=3, machine=Machine("free")).trace
    assert sum(event.waited_s > 0 for event in trace.events) >= 2
    check_lanes(trace.timeline, trace)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.0004]), st.booleans()), max_size=6),
    st.randoms(use_true_random=False),
)
def test_lanes_add_up_in_any_program(steps: list[tuple[int, float, bool]], shuffle: Any) -> None:
    order = list(range(len(steps)))
    shuffle.shuffle(order)

    def step() -> None:
        works: list[Any] = []
        for lazy, pause, is_async in steps:
            if me() == lazy:
                time.sleep(pause)
            works.append(dist.all_reduce(torch.ones(2), async_op=is_async))
        for index in order:
            if works[index] is not None:
                works[index].wait()

    result = run(step, ranks=3)
    check_lanes(result.trace.timeline, result.trace)


def test_a_failed_run_has_a_timeline_too() -> None:
    def deadlock() -> None:
        dist.barrier()
        if me() != 1:
            time.sleep(0.001)
            dist.all_reduce(torch.ones(1))

    with pytest.raises(DeadlockError) as stuck:
        run(deadlock, ranks=3)
    trace = stuck.value.run.trace
    check_lanes(trace.timeline, trace)
    waits = [span for span in trace.timeline.spans if "for ever" in span.label]
    assert sorted(span.rank for span in waits) == [0, 2]

    def raises() -> None:
        dist.all_reduce(torch.ones(1))
        if me() == 2:
            raise ValueError
        dist.barrier()

    with pytest.raises(RankError) as failed:
        run(raises, ranks=3)
    trace = failed.value.run.trace
    check_lanes(trace.timeline, trace)
    assert [len(trace.collectives(rank)) for rank in range(3)] == [1, 1, 1]


# ---- messages ----


def arrows(trace: Trace) -> list[tuple[int, int, str]]:
    return [(m.source, m.destination, m.label.split(" from ")[0]) for m in trace.timeline.messages]


def test_a_message_is_paired_with_its_send_also_when_tags_come_out_of_order() -> None:
    def step() -> None:
        if me() == 0:
            works = [dist.isend(torch.ones(n), 1, tag=n) for n in (1, 2, 3)]
            for work in works:
                assert work is not None
                work.wait()
        else:
            for n in (3, 1, 2):
                dist.recv(torch.ones(n), 0, tag=n)

    trace = run(step, ranks=2).trace
    assert arrows(trace) == [(0, 1, "12 bytes"), (0, 1, "4 bytes"), (0, 1, "8 bytes")]
    by_bytes = {event.bytes_sent: event for event in trace.events if event.kind == "send"}
    received = [event for event in trace.events if event.kind == "recv"]
    for message, event in zip(trace.timeline.messages, received, strict=True):
        assert message.sent == by_bytes[4 * event.n_elements].issued_s
        assert message.received == event.done_s >= message.sent


def test_messages_of_two_groups_of_the_same_ranks_are_told_apart() -> None:
    def step() -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        if me() == 0:
            a, b = dist.isend(torch.ones(1), 1, group=first), dist.isend(torch.ones(2), 1, group=second)
            assert a is not None and b is not None
            a.wait(), b.wait()
        else:
            dist.recv(torch.ones(2), 0, group=second)
            dist.recv(torch.ones(1), 0, group=first)

    assert arrows(run(step, ranks=2).trace) == [(0, 1, "8 bytes"), (0, 1, "4 bytes")]


def test_any_source_is_resolved_to_who_sent() -> None:
    def step() -> None:
        if me():
            dist.send(torch.ones(me()), 0)
        else:
            dist.recv(torch.ones(2), 2)
            dist.recv(torch.ones(1))

    trace = run(step, ranks=3).trace
    assert sorted(arrows(trace)) == [(1, 0, "4 bytes"), (2, 0, "8 bytes")]


def test_a_message_nobody_receives_has_no_arrow() -> None:
    def step() -> None:
        if me() == 0:
            dist.isend(torch.ones(3), 1)
        else:
            dist.irecv(torch.ones(3), 0)  # meets, and is never awaited

    with pytest.warns(UnfinishedWarning, match=r"rank 1 called recv.*from rank 0"):
        trace = run(step, ranks=2).trace
    assert arrows(trace) == [] and len(trace.events) == 2
    check_lanes(trace.timeline, trace)


def test_every_kind_in_a_trace_is_one_the_records_know() -> None:
    def step() -> None:
        for _, call, _ in CALLS.values():
            call(2)
        Mesh(tp=2)["tp"].shift(torch.ones(1), 1)

    kinds = {event.kind for event in run(step, ranks=2).trace.events}
    assert kinds - {"send", "recv"} <= set(COLLECTIVES) and {"send", "recv"} <= kinds
