"""torch.distributed.checkpoint: what sharded ranks save, another number of ranks loads and trains on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from lessons_lib import run
from tests.oracles.serial import (
    FSDP_ALARM,
    STEPS,
    Named,
    Net,
    adam,
    assert_every_rank_has,
    caught,
    mine,
    outcome,
    randomised,
    serially_trained,
    train,
)

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings(FSDP_ALARM)]

SAVED_AFTER = 4


def sharded(seed: int) -> tuple[Net, Optimizer]:
    model = randomised(Net(), seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh)
    return model, adam(model.parameters())


def save(folder: Path) -> None:
    model, optimizer = sharded(seed=0)
    train(model, optimizer, mine, range(SAVED_AFTER))
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"weights": weights, "moments": moments}, checkpoint_id=folder)


def load(folder: Path) -> Named:
    """From other weights, which a load must replace."""
    model, optimizer = sharded(seed=1)
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.load({"weights": weights, "moments": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(model, optimizer, mine, range(SAVED_AFTER, STEPS))
    return outcome(model)


def load_weights_alone(folder: Path) -> Named:
    model, optimizer = sharded(seed=1)
    weights, _ = get_state_dict(model, optimizer)
    checkpoint.load({"weights": weights}, checkpoint_id=folder)
    model.load_state_dict(weights)
    train(model, optimizer, mine, range(SAVED_AFTER, STEPS))
    return outcome(model)


def load_and_start_over(folder: Path) -> Named:
    model, optimizer = sharded(seed=1)
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.load({"weights": weights, "moments": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(model, optimizer, mine, range(STEPS - SAVED_AFTER))
    return outcome(model)


@pytest.mark.parametrize("before, after", [(4, 3), (2, 3), (3, 1)])
def test_saved_on_some_ranks_and_loaded_on_others(
    before: int, after: int, transport: str, tmp_path: Path
) -> None:
    run(save, tmp_path, ranks=before, transport=transport)
    values = run(load, tmp_path, ranks=after, transport=transport).values
    assert_every_rank_has(serially_trained(adam), values)


@pytest.mark.parametrize("wrong", [load_weights_alone, load_and_start_over])
def test_a_wrong_load_is_caught(wrong: Callable[[Path], Named], tmp_path: Path) -> None:
    run(save, tmp_path, ranks=2)
    with caught():
        assert_every_rank_has(serially_trained(adam), run(wrong, tmp_path, ranks=3).values)
