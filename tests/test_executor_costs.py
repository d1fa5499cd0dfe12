"""What executing a pipeline takes: time, messages, memory, FLOPs; beside what the schedule says."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from lessons_lib import Mesh, compute, run
from lessons_lib.machines import Link, Machine
from lessons_lib.pipeline_parallel import (
    Times,
    chimera,
    cut_batch,
    dualpipe,
    execute,
    first_early,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)
from lessons_lib.pipeline_parallel.program import program_of
from lessons_lib.timeline import COLLECTIVES
from tests.executed_stages import WIDTHS, chain, data, squares, trained

FREE = Machine("free")


def named(schedule):
    return f"{schedule.name} p={schedule.n_ranks} m={schedule.n_microbatches}"


def n_rows_of(schedule):
    return 2 * schedule.n_microbatches + 1


# ---- time


@pytest.mark.parametrize(
    "schedule",
    [
        gpipe(4, 5),
        one_f_one_b(4, 6),
        interleaved(2, 4, 2),
        zb_h1(3, 5),
        zb_v(2, 4),
        dualpipe(2, 6),
        chimera(4, 4),
    ],
    ids=named,
)
def test_on_a_virtual_clock_the_timeline_is_the_simulated_one(schedule):
    """Given what each stage takes and what a message takes, in seconds that are exact in floats."""
    durations = [1 + stage % 3 for stage in range(schedule.n_stages)]
    times = Times(F=durations, I=[2 * each for each in durations], W=0.5, send=0.25)
    machine = Machine("slow links", in_node=Link(latency_s=0.25))

    def step():
        group = Mesh(pp=schedule.n_ranks)["pp"]
        compute(100.0)  # when a step begins is not told
        every = chain(schedule.n_stages)
        stages = {number: every[number] for number in schedule.stages[group.rank]}
        batch = cut_batch(*data(schedule.n_stages, n_rows_of(schedule)), schedule.n_microbatches)
        return execute(schedule, stages, batch, squares, group, times=times).timeline

    expected = simulate(schedule, times)
    for found in run(step, ranks=schedule.n_ranks, machine=machine).values:
        assert found.schedule == schedule and found.clock == "virtual"
        for row, own in zip(expected.starts, found.starts, strict=True):
            assert [float(expected.time(start)) for start in row] == own
        for row, own in zip(expected.ends, found.ends, strict=True):
            assert [float(expected.time(end)) for end in row] == own
        assert [(m.source, m.sent, m.destination, m.received) for m in found.messages] == [
            (m.source, m.sent, m.destination, m.received) for m in expected.messages
        ]


class Taking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, F, B):
        ctx.B = B
        compute(F)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        compute(ctx.B)
        return dy, None, None


class Timed(nn.Module):
    """A stage that says itself how long it takes."""

    def __init__(self, F, B):
        super().__init__()
        self.linear, self.F, self.B = nn.Linear(2, 2), F, B

    def forward(self, x):
        return Taking.apply(self.linear(x), self.F, self.B)


def test_stages_that_say_themselves_how_long_they_take():
    F, B = [1.0, 3.0, 2.0], [2.5, 1.5, 4.0]

    def step():
        group = Mesh(pp=3)["pp"]
        stages = {group.rank: Timed(F[group.rank], B[group.rank])}
        batch = cut_batch(torch.ones(5, 2), torch.zeros(5, 2), 5)
        return execute(one_f_one_b(3, 5), stages, batch, squares, group).timeline

    expected = simulate(one_f_one_b(3, 5), Times(F=F, B=B))
    for found in run(step, ranks=3, machine=FREE).values:
        assert found.starts == [list(row) for row in expected.starts]
        assert found.ends == [list(row) for row in expected.ends]


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zb_v(2, 4), dualpipe(2, 4)], ids=named)
def test_a_measured_timeline_keeps_to_the_rules(schedule):
    def step():
        group = Mesh(pp=schedule.n_ranks)["pp"]
        every = chain(schedule.n_stages)
        stages = {number: every[number] for number in schedule.stages[group.rank]}
        batch = cut_batch(*data(schedule.n_stages, 9), schedule.n_microbatches)
        return execute(schedule, stages, batch, squares, group).timeline

    for found in run(step, ranks=schedule.n_ranks).values:
        assert found.clock == "measured" and 0 < found.makespan < 10 and min(map(min, found.starts)) == 0
        assert first_early(schedule, found.starts, found.ends) is None
        assert len(found.critical_path) > 1 and found.picture().svg


# ---- what is sent


@pytest.mark.parametrize(
    "schedule", [gpipe(4, 6), interleaved(2, 4, 2), zb_v(2, 6), dualpipe(4, 8)], ids=named
)
def test_two_messages_per_micro_batch_and_border(schedule):
    """An output and an input gradient for every micro-batch and border; 80 bytes once for each shape."""
    trace = run(trained, schedule, 3 * schedule.n_microbatches, 1, ranks=schedule.n_ranks).trace
    sent = [event for event in trace.events if event.kind == "send" and event.region == ""]
    program = program_of(schedule)
    expected = []
    for result, (taker, _) in program.takers.items():
        maker, _ = program.makers[result]
        width = WIDTHS[(result.stage + (result.what == "y")) % len(WIDTHS)]
        expected += [(maker, taker, 3 * width * 8)] if maker != taker else []
    assert sorted((event.rank, event.peer, event.bytes_sent) for event in sent) == sorted(expected)
    assert len(expected) == len(simulate(schedule).messages)
    borders = {(result.stage, program.makers[result][0]) for result in program.takers if result.what == "y"}
    announced = [
        event.bytes_sent for event in trace.events if event.kind == "send" and event.region == "shapes"
    ]
    across = [border for border in borders if any(m.source == border[1] for m in simulate(schedule).messages)]
    assert set(announced) == {80} and len(announced) <= len(across)
    assert {event.kind for event in trace.events if event.kind in COLLECTIVES} == {"all_gather"}


def test_two_ranks_that_hold_the_same_stages_send_their_gradients_once():
    """As in an all-reduce of two."""
    trace = run(trained, chimera(2, 2), 5, 1, ranks=2).trace
    n_bytes = 8 * sum(p.numel() for stage in chain(2) for p in stage.parameters())
    assert [trace.bytes_sent(rank, "join") for rank in range(2)] == [n_bytes, n_bytes]


def test_gpipe_sends_2m_messages_over_a_border():
    trace = run(trained, gpipe(2, 5), 11, 1, ranks=2).trace
    sent = [event.bytes_sent for event in trace.events if event.kind == "send" and event.region == ""]
    assert len(sent) == 2 * 5 and sum(sent) == 2 * 11 * WIDTHS[1] * 8


# ---- memory


D, ROWS = 64, 250
UNIT = ROWS * D * 4  # bytes of what goes over a border
WEIGHTS = (D * D + D) * 4  # of one linear layer


def pipeline_memory(schedule, n_rows=None):
    """Stages of two linear layers: a micro-batch keeps x, the first tanh and y; between I and W x, the first
    tanh and both gradients of outputs."""

    def step():
        group = Mesh(pp=schedule.n_ranks)["pp"]
        layers = (nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh())
        stages = {number: nn.Sequential(*layers) for number in schedule.stages[group.rank]}
        for parameter in nn.ModuleList(stages.values()).parameters():
            parameter.grad = torch.zeros_like(parameter)
        X = torch.ones(n_rows or ROWS * schedule.n_microbatches, D)
        execute(schedule, stages, cut_batch(X, X, schedule.n_microbatches), squares, group)

    trace = run(step, ranks=schedule.n_ranks, record="memory").trace
    batch = (n_rows or ROWS * schedule.n_microbatches) * D * 4
    return [trace.peak_bytes(rank) - batch for rank in range(schedule.n_ranks)]


KEPT = {"mb": 3 * UNIT, "mw": 4 * UNIT}


def on_their_way(schedule, rank, index):
    """Input gradients that ``rank`` has sent before an action and does not know to have arrived.

    It knows by what the rank before has sent later, and it has needed.
    """
    makers, takers = program_of(schedule).makers, program_of(schedule).takers
    between = {"y": (rank - 1, rank), "dx": (rank, rank - 1)}  # this rank and the one before
    exchanged = [r for r in takers if (makers[r][0], takers[r][0]) == between[r.what]]
    heard = [makers[r][1] for r in exchanged if r.what == "y" and takers[r][1] <= index]
    sent = [r for r in exchanged if r.what == "dx" and makers[r][1] < index]
    return sum(takers[r][1] > max(heard) for r in sent)


def working(kind):
    """What an action needs for itself while it runs, beyond what is kept of its micro-batch then.

    F: a product before its tanh. B: the gradient that came and two on the way down, without y, and one dW.
    I: the same and one more, since the gradients of outputs stay. W: one dW.
    """
    return {"F": UNIT, "B": 2 * UNIT + WEIGHTS, "I": 3 * UNIT, "W": WEIGHTS}[kind]


@pytest.mark.parametrize(
    "schedule", [gpipe(4, 6), one_f_one_b(4, 6), one_f_one_b(4, 12), zb_h1(4, 8), zb_h2(4, 8)], ids=named
)
def test_peak_memory_is_the_schedules_peak_and_what_one_action_needs(schedule):
    """On the ranks between the first, whose inputs are the batch's, and the last, which has the loss."""
    found = pipeline_memory(schedule)
    states = 4 * WEIGHTS  # two layers, and their gradients
    peak = simulate(schedule).peak_in_flight(**KEPT)
    for rank in (1, 2):
        needed = 0
        in_flight = 0
        for index, action in enumerate(schedule.rows[rank]):
            in_flight += {"F": KEPT["mb"]}.get(action.kind, 0)
            sent = on_their_way(schedule, rank, index) * UNIT
            needed = max(needed, in_flight + sent + working(action.kind))
            after = {"B": -KEPT["mb"], "I": KEPT["mw"] - KEPT["mb"], "W": -KEPT["mw"]}
            in_flight += after.get(action.kind, 0)
        assert found[rank] - states == needed
        assert peak[rank] < needed <= peak[rank] + 5 * UNIT


@pytest.mark.parametrize("make", [zb_h1, pytest.param(one_f_one_b, marks=pytest.mark.slow)])
def test_more_micro_batches_of_the_same_batch_never_take_more_memory(make):
    """S72: p=4 and m = 4, 8, 16, 32: if it rose, weight gradients would be kept once per micro-batch."""
    peaks = [pipeline_memory(make(4, m), n_rows=640) for m in (4, 8, 16, 32)]
    for fewer, more in pairwise(peaks):
        assert all(b <= a for a, b in zip(fewer, more, strict=True))
    assert peaks[-1][0] < peaks[0][0]


# ---- FLOPs


def test_a_split_backward_is_as_much_work():
    flops = [
        [run(trained, schedule, 8, 1, ranks=3, record="flops").trace.flops_of(rank) for rank in range(3)]
        for schedule in (one_f_one_b(3, 4), zb_h1(3, 4))
    ]
    assert flops[0] == flops[1] and min(flops[0]) > 0
