"""ZeroRedundancyOptimizer takes the serial optimizer's steps, and every rank holds its share of the state."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from lessons_lib import run
from tests.oracles.serial import (
    STEPS,
    Named,
    Net,
    assert_every_rank_has,
    caught,
    mine,
    outcome,
    randomised,
    train,
    whole,
)

with warnings.catch_warnings():  # torch 2.13 warns of the torch.jit.script that other modules there use
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.oracle

LR, EPS = 0.02, 1e-3  # eps so large that a gradient wrong by a factor shows
MOMENTS = ("exp_avg", "exp_avg_sq")


def moments(optimizer: Adam | ZeroRedundancyOptimizer, model: nn.Module) -> Named:
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    return {f"{moment} of {names[i]}": state[i][moment] for i in state for moment in MOMENTS}


def serially_trained() -> tuple[Named, Named]:
    """The outcome, and Adam's moments."""
    model = randomised(Net())
    optimizer = Adam(model.parameters(), lr=LR, eps=EPS)
    train(model, optimizer, whole, range(STEPS))
    return outcome(model), moments(optimizer, model)


def trained(parameters_as_bucket_view: bool) -> tuple[Named, Named, int]:
    """The outcome, Adam's moments as rank 0 collects them, and how many elements of them this rank holds."""
    model = randomised(Net())
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), Adam, parameters_as_bucket_view=parameters_as_bucket_view, lr=LR, eps=EPS
    )
    train(parallel, optimizer, mine, range(STEPS))
    held = sum(
        value.numel()
        for state in optimizer.optim.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
    optimizer.consolidate_state_dict(to=0)
    return outcome(model), moments(optimizer, model) if dist.get_rank() == 0 else {}, held


@pytest.mark.parametrize("parameters_as_bucket_view, ranks", [(False, 2), (True, 3)])
def test_training(parameters_as_bucket_view: bool, ranks: int, transport: str) -> None:
    expected, expected_moments = serially_trained()
    values = run(trained, parameters_as_bucket_view, ranks=ranks, transport=transport).values
    assert_every_rank_has(expected, [found for found, _, _ in values])
    assert_every_rank_has(expected_moments, [values[0][1]])
    held = [elements for _, _, elements in values]
    n_elements = 2 * sum(parameter.numel() for parameter in Net().parameters())
    assert sum(held) == n_elements and max(held) < n_elements


def trained_without_gradient_sync() -> Named:
    model = randomised(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=LR, eps=EPS)
    train(model, optimizer, mine, range(STEPS))
    return outcome(model)


def trained_with_gradients_summed() -> Named:
    model = randomised(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=LR, eps=EPS)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    train(model, optimizer, mine, range(STEPS))
    return outcome(model)


def trained_with_another_rate_on_a_rank() -> Named:
    """A learning rate that only rank 0 has scheduled: its shard takes other steps."""
    model = randomised(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=LR, eps=EPS)
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["lr"] = LR / 2
    train(DistributedDataParallel(model), optimizer, mine, range(STEPS))
    return outcome(model)


@pytest.mark.parametrize(
    "wrong",
    [trained_without_gradient_sync, trained_with_gradients_summed, trained_with_another_rate_on_a_rank],
)
def test_wrong_steps_are_caught(wrong: Callable[[], Named]) -> None:
    with caught():
        assert_every_rank_has(serially_trained()[0], run(wrong, ranks=3).values)
