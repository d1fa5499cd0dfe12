"""Every schedule of torch.distributed.pipelining gives the serial gradients; and skip links (S50)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils.checkpoint import checkpoint

from lessons_lib import run
from tests.oracles.serial import (
    STEPS,
    Named,
    assert_every_rank_has,
    caught,
    outcome,
    randomised,
    sgd,
)

pytestmark = pytest.mark.oracle

WIDTHS = (3, 5, 7, 4, 6)  # between the stages
N_STAGES, N_MICROBATCHES, B = 4, 8, 24
SCHEDULES = [name for name in pipelining.__all__ if name.startswith("Schedule")]
IN_A_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # rank 0 has the first stage and the last
CPU = torch.device("cpu")


class Stage(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def chain() -> nn.Sequential:
    """The serial model."""
    return randomised(nn.Sequential(*map(Stage, WIDTHS, WIDTHS[1:])))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    X = torch.randn(B, WIDTHS[0], generator=generator, dtype=torch.float64)
    Y = torch.randn(B, WIDTHS[-1], generator=generator, dtype=torch.float64)
    return X, Y


def serially_trained(model: nn.Module, steps: int) -> Named:
    optimizer = sgd(model.parameters())
    for step in range(steps):
        X, Y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()
        optimizer.step()
    return outcome(model)


def stages_of(name: str) -> list[int]:
    """The stages of this rank: four ranks have one each, two ranks two."""
    rank = dist.get_rank()
    if issubclass(getattr(pipelining, name), PipelineScheduleSingle):
        return [rank]
    return [rank, N_STAGES - 1 - rank if name in IN_A_V else rank + N_STAGES // 2]


def schedule_of(name: str, stages: Sequence[Any], **options: Any) -> Any:
    schedule = getattr(pipelining, name)
    single = issubclass(schedule, PipelineScheduleSingle)
    return schedule(stages[0] if single else stages, N_MICROBATCHES, loss_fn=F.mse_loss, **options)


def feed(schedule: Any, stages: Sequence[Any], step: int) -> list[Tensor]:
    """Run a schedule on the batch of a step; return the losses of the micro-batches, where they are known."""
    X, Y = batch(step)
    losses: list[Tensor] = []
    inputs = [X] if any(stage.is_first for stage in stages) else []
    asked = {"target": Y, "losses": losses} if any(stage.is_last for stage in stages) else {}
    schedule.step(*inputs, **asked)
    return losses


def trained(
    name: str,
    steps: int = STEPS,
    *,
    recompute: bool = False,
    scale_grads: bool = True,
    zero_grad: bool = True,
) -> Named:
    """The outcome of this rank's stages."""
    mine = nn.ModuleDict({str(index): chain()[index] for index in stages_of(name)})
    if recompute:
        for module in mine.values():
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    stages = [PipelineStage(module, int(index), N_STAGES, CPU) for index, module in mine.items()]
    schedule = schedule_of(name, stages, scale_grads=scale_grads)
    optimizer = sgd(mine.parameters())
    for step in range(steps):
        if zero_grad:
            optimizer.zero_grad()
        feed(schedule, stages, step)
        optimizer.step()
    return outcome(mine)


def ranks_of(name: str) -> int:
    return N_STAGES if issubclass(getattr(pipelining, name), PipelineScheduleSingle) else N_STAGES // 2


def together(values: Sequence[Named]) -> Named:
    """What all ranks hold: no two of them the same stage."""
    union = {name: value for named in values for name, value in named.items()}
    assert len(union) == sum(map(len, values))
    return union


@pytest.mark.parametrize("name", SCHEDULES)
def test_training(name: str, transport: str) -> None:
    values = run(trained, name, ranks=ranks_of(name), transport=transport).values
    assert_every_rank_has(serially_trained(chain(), STEPS), [together(values)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_training_with_recompute(name: str) -> None:
    values = run(lambda: trained(name, recompute=True), ranks=ranks_of(name)).values
    assert_every_rank_has(serially_trained(chain(), STEPS), [together(values)])


def test_all_schedules_are_tested() -> None:
    assert len(SCHEDULES) >= 7 and set(IN_A_V) < set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"scale_grads": False}, id="loss not divided"),
        pytest.param({"zero_grad": False}, id="gradients not reset"),
    ],
)
def test_wrong_training_is_caught(name: str, wrong: dict[str, bool]) -> None:
    values = run(lambda: trained(name, 2, **wrong), ranks=ranks_of(name)).values
    with caught():
        assert_every_rank_has(serially_trained(chain(), 2), [together(values)])


# ---- a link that skips a stage ----


class Skipping(nn.Module):
    """The second of its four layers is bypassed by what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 7)
        self.c, self.d = nn.Linear(5 + 7, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first))
        return self.d(torch.tanh(self.c(torch.cat([first, second], 1))))


def skipped(name: str, steps: int) -> Named:
    X, _ = batch(0)
    whole = pipeline(
        randomised(Skipping()),
        mb_args=(X[: B // N_MICROBATCHES],),
        split_spec=dict.fromkeys(("b", "c", "d"), SplitPoint.BEGINNING),
    )
    stages: list[Any] = [whole.build_stage(index, CPU) for index in stages_of(name)]
    schedule = schedule_of(name, stages)
    mine = nn.ModuleList(stage.submod for stage in stages)
    optimizer = sgd(mine.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        feed(schedule, stages, step)
        optimizer.step()
    return {name: value for stage in stages for name, value in outcome(stage.submod).items()}


# torch's tracer copies a tree of its own in a way that torch deprecates.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_link_that_skips_a_stage(name: str, transport: str) -> None:
    values = run(skipped, name, 20, ranks=ranks_of(name), transport=transport).values
    assert_every_rank_has(serially_trained(randomised(Skipping()), 20), [together(values)])
