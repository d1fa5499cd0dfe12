"""Our schedules are torch's, and torch's runtime trains by ours.

torch keeps a schedule as a grid with ``None`` where a rank is thought to wait. Those of GPipe, the
interleaved schedules and DualPipeV are padded by a rule of thumb, so it is not the columns that are compared:
the order of every rank's actions is, and when they start if every action takes one slot. The columns of ZB-V
and of LoopedBFS are exact, and are compared too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from lessons_lib import run
from lessons_lib.pipeline_parallel import (
    Pair,
    Schedule,
    Times,
    breadth_first,
    dualpipe_v,
    first_fault,
    gpipe,
    interleaved,
    one_f_one_b,
    read_csv,
    simulate,
    write_csv,
    zb_h1,
    zb_h2,
    zb_v,
)
from lessons_lib.pipeline_parallel.text import read_csv_slots
from tests.oracles.serial import STEPS, Named, assert_every_rank_has, caught, outcome, sgd
from tests.oracles.test_torch_pipelining import CPU, chain, feed, serially_trained, together

pytestmark = pytest.mark.oracle

ONE_SLOT = Times(F=1, I=1, W=1, B=1, FB=1)
N_MICROBATCHES = 8


def grid_of_torch(name: str, p: int, m: int, stages: Callable[[int], list[int]]) -> str:
    """The grid of one of torch's schedules as its CSV, made on p ranks; the layers do not matter."""

    def dump() -> str:
        mine = stages(dist.get_rank())
        n_stages = p * len(mine)
        built = [PipelineStage(nn.Linear(1, 1), index, n_stages, CPU) for index in mine]
        schedule_class = getattr(pipelining, name)
        if name in ("ScheduleGPipe", "Schedule1F1B"):
            order = schedule_class(built[0], m)._get_pipeline_order()
        else:
            order = schedule_class(built, m, loss_fn=F.mse_loss).pipeline_order
        cells = ([str(action) if action else "" for action in order[rank]] for rank in range(p))
        return "\n".join(",".join(cell for cell in row if "REDUCE_GRAD" not in cell) for row in cells)

    values = run(dump, ranks=p).values
    assert len(set(values)) == 1
    return values[0]


def loop(p: int, v: int) -> Callable[[int], list[int]]:
    return lambda rank: [c * p + rank for c in range(v)]


def fold(p: int) -> Callable[[int], list[int]]:
    return lambda rank: [rank, 2 * p - 1 - rank]


def starts(schedule: Schedule) -> list[list[int]]:
    return [list(row) for row in simulate(schedule, ONE_SLOT).starts]


SAME_ORDER = [
    *(("ScheduleGPipe", p, m, loop(p, 1), gpipe(p, m)) for p, m in ((4, 6), (3, 2), (2, 8))),
    *(
        ("ScheduleInterleaved1F1B", p, m, loop(p, v), interleaved(p, m, v))
        for p, m, v in ((4, 8, 1), (4, 8, 2), (3, 9, 3), (2, 2, 4))
    ),
    *(("ScheduleInterleavedZeroBubble", p, m, loop(p, 1), zb_h1(p, m)) for p, m in ((4, 8), (3, 6), (2, 4))),
    *(("ScheduleZBVZeroBubble", p, m, fold(p), zb_v(p, m)) for p, m in ((4, 8), (3, 5), (2, 6))),
    *(("ScheduleDualPipeV", p, m, fold(p), dualpipe_v(p, m)) for p, m in ((4, 10), (3, 6), (2, 4), (5, 13))),
]


@pytest.mark.parametrize("name, p, m, stages, ours", SAME_ORDER)
def test_the_order_and_the_start_of_every_action_are_torchs(
    name: str, p: int, m: int, stages: Callable[[int], list[int]], ours: Schedule
) -> None:
    theirs = read_csv(grid_of_torch(name, p, m, stages))
    assert theirs.rows == ours.rows
    assert starts(theirs) == starts(ours)


@pytest.mark.parametrize("p, m, v", [(4, 8, 1), (4, 8, 2), (3, 5, 3)])
def test_looped_bfs_starts_at_the_same_times_with_its_backwards_in_reverse(p: int, m: int, v: int) -> None:
    theirs = read_csv(grid_of_torch("ScheduleLoopedBFS", p, m, loop(p, v)))
    ours = breadth_first(p, m, v)
    assert starts(theirs) == starts(ours)
    for row, own in zip(theirs.rows, ours.rows, strict=True):
        turned = [a if a.kind == "F" else a._replace(microbatch=m - 1 - a.microbatch) for a in row]  # type: ignore[union-attr]
        assert tuple(turned) == own


@pytest.mark.parametrize(
    "name, p, m, stages",
    [
        ("ScheduleZBVZeroBubble", 4, 8, fold(4)),
        ("ScheduleZBVZeroBubble", 3, 6, fold(3)),
        ("ScheduleLoopedBFS", 4, 8, loop(4, 2)),
        ("ScheduleLoopedBFS", 3, 7, loop(3, 1)),
    ],
)
def test_where_torchs_columns_are_exact_they_are_the_starts(
    name: str, p: int, m: int, stages: Callable[[int], list[int]]
) -> None:
    text = grid_of_torch(name, p, m, stages)
    columns = [[at for at, action in enumerate(row) if action] for row in read_csv_slots(text)]
    assert columns == starts(read_csv(text))


def test_torchs_grid_of_1f1b_is_off_by_one_on_the_last_rank() -> None:
    """A known fault of torch 2.13's inspection grid, not of what it runs: F begins with micro-batch 1."""
    theirs = read_csv(grid_of_torch("Schedule1F1B", 4, 8, loop(4, 1)))
    ours = one_f_one_b(4, 8)
    assert theirs.rows[:3] == ours.rows[:3]
    assert [str(action) for action in theirs.rows[3][:4]] == ["3F1", "3B0", "3F2", "3B1"]
    turned = tuple(a._replace(microbatch=a.microbatch - 1) if a.kind == "F" else a for a in theirs.rows[3])  # type: ignore[union-attr]
    assert turned == ours.rows[3]
    fault = first_fault(theirs)
    assert fault is not None and (fault.rank, str(fault.action)) == (3, "3B0")  # its forward is not there


@pytest.mark.parametrize("p, m, v", [(4, 8, 2), (2, 6, 3)])
def test_torchs_schedules_that_we_do_not_make_are_legal(p: int, m: int, v: int) -> None:
    theirs = read_csv(grid_of_torch("ScheduleInterleavedZeroBubble", p, m, loop(p, v)))
    assert first_fault(theirs) is None


# ---- torch's runtime runs what we write

OURS = {
    "gpipe": gpipe(4, N_MICROBATCHES),
    "1f1b": one_f_one_b(4, N_MICROBATCHES),
    "zb-h1": zb_h1(4, N_MICROBATCHES),
    "zb-h2": zb_h2(4, N_MICROBATCHES),
    "interleaved": interleaved(2, N_MICROBATCHES, 2),
    "breadth-first": breadth_first(2, N_MICROBATCHES, 2),
    "zb-v": zb_v(2, N_MICROBATCHES),
    "dualpipe-v": dualpipe_v(2, N_MICROBATCHES),
}


def trained_by(schedule: Schedule, steps: int) -> Named:
    """The outcome of this rank's stages, trained by torch in our order."""
    mine = nn.ModuleDict({str(index): chain()[index] for index in schedule.stages[dist.get_rank()]})
    stages = [PipelineStage(module, int(index), schedule.n_stages, CPU) for index, module in mine.items()]
    runtime: Any = _PipelineScheduleRuntime(stages, schedule.n_microbatches, loss_fn=F.mse_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(write_csv(schedule))
        runtime._load_csv(str(path), format="compute_only")
    optimizer = sgd(mine.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        feed(runtime, stages, step)
        optimizer.step()
    return outcome(mine)


@pytest.mark.parametrize("name", OURS)
def test_torchs_runtime_trains_by_our_schedules(name: str) -> None:
    schedule = OURS[name]
    values = run(trained_by, schedule, STEPS, ranks=schedule.n_ranks).values
    assert_every_rank_has(serially_trained(chain(), STEPS), [together(values)])


def test_a_schedule_that_forgets_a_micro_batch_is_caught() -> None:
    """Its rows without the last micro-batch: torch refuses it, or trains something else."""
    whole = OURS["gpipe"]
    rows = [[a for a in row if not isinstance(a, Pair) and a.microbatch < 7] for row in whole.rows]
    short = Schedule("short", tuple(map(tuple, rows)), 4, N_MICROBATCHES)
    assert first_fault(short) is not None
    with pytest.raises(AssertionError, match=r"Got 7 .* microbatches for stage 0, expected 8"):
        run(trained_by, short, 1, ranks=4)
    with caught():
        assert_every_rank_has(
            serially_trained(chain(), 2), [together(run(trained_by, whole, 1, ranks=4).values)]
        )
