"""fully_shard gives the serial gradients, and every rank holds its share alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lessons_lib import run
from tests.oracles.serial import (
    FSDP_ALARM,
    STEPS,
    MakeOptimizer,
    Named,
    Net,
    adam,
    assert_every_rank_has,
    batch,
    caught,
    mean_loss,
    mine,
    outcome,
    randomised,
    serially_trained,
    sgd,
    train,
)

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings(FSDP_ALARM)]

Shard = Callable[[Net], None]


def shard(model: Net) -> None:
    shard_units(model, init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)


def shard_once(model: Net) -> None:
    shard_units(model, init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)


def two_replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replica", "shard"))


def shard_replicas(model: Net) -> None:
    shard_units(model, two_replicas(), reshard_after_forward=True)


def shard_units(model: Net, mesh: DeviceMesh, reshard_after_forward: bool) -> None:
    """Every block is a unit of its own, and so is the rest."""
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)


def shard_without_dividing(model: Net) -> None:
    shard(model)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)


def shard_replicas_without_sync(model: Net) -> None:
    shard_units(model, two_replicas()["shard"], reshard_after_forward=True)


def trained(shard: Shard, make_optimizer: MakeOptimizer) -> tuple[Named, int]:
    """The outcome, and how many elements this rank holds."""
    model = randomised(Net())
    shard(model)
    train(model, make_optimizer(model.parameters()), mine, range(STEPS))
    held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    return outcome(model), held


@pytest.mark.parametrize(
    "shard, ranks, n_copies, make_optimizer",
    [
        (shard, 2, 1, adam),
        (shard, 3, 1, sgd),
        (shard_once, 2, 1, sgd),
        (shard_once, 3, 1, adam),
        (shard_replicas, 6, 2, adam),
    ],
)
def test_training(
    shard: Shard, ranks: int, n_copies: int, make_optimizer: MakeOptimizer, transport: str
) -> None:
    outcomes, held = zip(
        *run(trained, shard, make_optimizer, ranks=ranks, transport=transport).values, strict=True
    )
    assert_every_rank_has(serially_trained(make_optimizer), outcomes)
    n_elements = sum(parameter.numel() for parameter in Net().parameters())
    assert sum(held) == n_copies * n_elements and max(held) < n_elements


@pytest.mark.parametrize("wrong, ranks", [(shard_without_dividing, 3), (shard_replicas_without_sync, 4)])
def test_wrong_sharding_is_caught(wrong: Shard, ranks: int) -> None:
    outcomes = [value for value, _ in run(trained, wrong, sgd, ranks=ranks).values]
    with caught():
        assert_every_rank_has(serially_trained(sgd), outcomes)


def accumulated(n_microbatches: int) -> Named:
    """Gradients of several micro-batches, reduced with the last."""
    model = randomised(Net())
    shard(model)
    assert isinstance(model, FSDPModule)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = (mine(x).chunk(n_microbatches) for x in batch(step))
        for microbatch in range(n_microbatches):
            model.set_requires_gradient_sync(microbatch == n_microbatches - 1)
            (mean_loss(model(tokens[microbatch]), targets[microbatch]) / n_microbatches).backward()
        optimizer.step()
    return outcome(model)


def test_accumulation(transport: str) -> None:
    values = run(accumulated, 2, ranks=3, transport=transport).values
    assert_every_rank_has(serially_trained(sgd), values)
