"""What we execute and what torch executes by the same schedule, on the same ranks, is the same training."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from lessons_lib import Mesh, run
from lessons_lib.pipeline_parallel import Schedule, cut_batch, execute
from tests.oracles.serial import STEPS, Named, assert_every_rank_has, caught, outcome, sgd
from tests.oracles.test_torch_pipelining import batch, chain, together
from tests.oracles.test_torch_schedules import OURS, trained_by

pytestmark = pytest.mark.oracle


def squares(Y: Tensor, T: Tensor) -> Tensor:
    return (Y - T).square().sum()


def executed(schedule: Schedule, steps: int, lr_times: float = 1.0) -> Named:
    """The outcome of this rank's stages, trained by ours."""
    model, group = chain(), Mesh(pp=dist.get_world_size())["pp"]
    mine = nn.ModuleDict({str(number): model[number] for number in schedule.stages[group.rank]})
    stages = {int(number): module for number, module in mine.items()}
    optimizer = sgd(mine.parameters())
    for group_of in optimizer.param_groups:
        group_of["lr"] *= lr_times
    for step in range(steps):
        optimizer.zero_grad()
        execute(schedule, stages, cut_batch(*batch(step), schedule.n_microbatches), squares, group)
        optimizer.step()
    return outcome(mine)


@pytest.mark.parametrize(
    "name, transport",
    [*((name, "threads") for name in OURS), ("1f1b", "processes"), ("zb-v", "processes")],
)
def test_torch_and_we_train_alike(name: str, transport: str) -> None:
    """Weights after all steps and the last gradients; in the zero-bubble schedules torch splits B, too."""
    schedule = OURS[name]
    ours, theirs = (
        run(train, schedule, STEPS, ranks=schedule.n_ranks, transport=transport).values
        for train in (executed, trained_by)
    )
    assert_every_rank_has(together(theirs), [together(ours)])


def test_another_step_size_is_caught() -> None:
    ours, theirs = (run(train, OURS["1f1b"], 2, ranks=4).values for train in (executed, trained_by))
    assert_every_rank_has(together(theirs), [together(ours)])
    other = run(executed, OURS["1f1b"], 2, 1.001, ranks=4).values
    with caught():
        assert_every_rank_has(together(theirs), [together(other)])
