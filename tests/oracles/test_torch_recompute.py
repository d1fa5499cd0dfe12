"""torch.utils.checkpoint recomputes what it must, under data, sharded and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lessons_lib import run
from tests.oracles.serial import (
    FSDP_ALARM,
    STEPS,
    Named,
    Net,
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
    whole,
)

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings(FSDP_ALARM)]

Parallelise = Callable[[Net], nn.Module]
DROPOUT = 0.3


def recompute(model: Net, preserve_rng_state: bool = True) -> None:
    """Keep of every block its input alone."""
    for block in model.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


def recompute_with_other_masks(model: Net) -> None:
    recompute(model, preserve_rng_state=False)


def recompute_detached(model: Net) -> None:
    """What a checkpoint must not do: cut the graph at its input."""
    recompute(model)
    block = model.blocks[1]
    inner = block.forward
    block.forward = lambda x: x + (inner(x.detach()) - x.detach())


def replicate(model: Net) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.001)


def shard(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh)
    return model


def drop(model: Net) -> None:
    for block in model.blocks:
        block.dropout.p = DROPOUT


def cut(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, mesh, styles)


def trained(parallelise: Parallelise, recompute: Callable[[Net], None]) -> Named:
    """Every rank draws dropout masks of its own."""
    model = randomised(Net())
    drop(model)
    recompute(model)
    parallel = parallelise(model)
    torch.manual_seed(dist.get_rank())
    train(parallel, sgd(model.parameters()), mine, range(STEPS))
    return outcome(model)


def serially_trained_with_dropout(n_ranks: int) -> Named:
    model = randomised(Net())
    drop(model)
    optimizer = sgd(model.parameters())
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(n_ranks)]
    with torch.random.fork_rng():
        for step in range(STEPS):
            optimizer.zero_grad()
            tokens, targets = (x.chunk(n_ranks) for x in batch(step))
            for rank in range(n_ranks):
                torch.set_rng_state(states[rank])
                (mean_loss(model(tokens[rank]), targets[rank]) / n_ranks).backward()
                states[rank] = torch.get_rng_state()
            optimizer.step()
    return outcome(model)


@pytest.mark.parametrize("parallelise", [replicate, shard])
def test_recompute_with_dropout(parallelise: Parallelise, transport: str) -> None:
    values = run(trained, parallelise, recompute, ranks=3, transport=transport).values
    assert_every_rank_has(serially_trained_with_dropout(3), values)


def trained_whole(parallelise: Parallelise) -> Named:
    """Every rank has the whole batch; no dropout."""
    model = randomised(Net())
    recompute(model)
    train(parallelise(model), sgd(model.parameters()), whole, range(STEPS))
    return outcome(model)


def test_recompute_with_communication_inside(transport: str) -> None:
    values = run(trained_whole, cut, ranks=2, transport=transport).values
    assert_every_rank_has(serially_trained(sgd), values)


@pytest.mark.parametrize("parallelise", [replicate, shard])
@pytest.mark.parametrize("wrong", [recompute_with_other_masks, recompute_detached])
def test_wrong_recompute_is_caught(parallelise: Parallelise, wrong: Callable[[Net], None]) -> None:
    with caught():
        assert_every_rank_has(
            serially_trained_with_dropout(3), run(trained, parallelise, wrong, ranks=3).values
        )
