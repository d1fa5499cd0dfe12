"""The parallel styles of DTensor give the serial gradients, on a mesh of one axis and of two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from lessons_lib import run
from lessons_lib.errors import RankError
from tests.oracles.serial import (
    FSDP_ALARM,
    STEPS,
    D,
    Named,
    Net,
    assert_every_rank_has,
    caught,
    outcome,
    randomised,
    serially_trained,
    sgd,
    train,
    whole,
)

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings(FSDP_ALARM)]

Styles = Callable[[], dict[str, ParallelStyle]]
SEQUENCE = Shard(1)  # of [B S D]


def columns_and_rows() -> dict[str, ParallelStyle]:
    return {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_parallel() -> dict[str, ParallelStyle]:
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=SEQUENCE),
        "blocks.*.down": RowwiseParallel(output_layouts=SEQUENCE),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate()),
    }


def without_the_rows_sum() -> dict[str, ParallelStyle]:
    """Every rank goes on with its own partial sum."""
    return columns_and_rows() | {"blocks.*.down": RowwiseParallel(output_layouts=Partial())}


def without_the_norms_sum() -> dict[str, ParallelStyle]:
    """Every rank keeps the norms' gradients of its own part of the sequence."""
    styles = sequence_parallel()
    return {name: style for name, style in styles.items() if "norm" not in name}


def trained(styles: Styles) -> tuple[Named, tuple[int, ...]]:
    """The outcome, and the shape of a shard."""
    model = randomised(Net())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, styles())
    train(model, sgd(model.parameters()), whole, range(STEPS))
    return outcome(model), local_shape(model.blocks[1].up.weight)


def local_shape(parameter: Tensor) -> tuple[int, ...]:
    assert isinstance(parameter, DTensor)
    return tuple(parameter.to_local().shape)


@pytest.mark.parametrize("styles", [columns_and_rows, sequence_parallel])
@pytest.mark.parametrize("ranks, rows", [(2, 8), (4, 4)])
def test_training(styles: Styles, ranks: int, rows: int, transport: str) -> None:
    values = run(trained, styles, ranks=ranks, transport=transport).values
    assert_every_rank_has(serially_trained(sgd), [value for value, _ in values])
    assert [shape for _, shape in values] == [(rows, D)] * ranks


@pytest.mark.parametrize("wrong", [without_the_rows_sum, without_the_norms_sum])
def test_wrong_styles_are_caught(wrong: Styles) -> None:
    values = run(trained, wrong, ranks=2).values
    with caught():
        assert_every_rank_has(serially_trained(sgd), [value for value, _ in values])


SHARED_OPERATIONS = pytest.param(
    "threads",
    marks=pytest.mark.xfail(
        raises=RankError,
        strict=True,
        reason="loss_parallel changes a table of DTensor's that all threads share; the first rank to leave "
        "takes the operations away from the others",
    ),
)


def trained_on_shards_of_logits() -> Named:
    model = randomised(Net())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    head = ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, sequence_parallel() | {"head": head})
    with loss_parallel():
        train(model, sgd(model.parameters()), whole, range(STEPS))
    return outcome(model)


@pytest.mark.parametrize("transport", [SHARED_OPERATIONS, "processes"])
def test_a_loss_on_shards_of_logits(transport: str) -> None:
    values = run(trained_on_shards_of_logits, ranks=2, transport=transport).values
    assert_every_rank_has(serially_trained(sgd), values)


def trained_on_two_axes() -> tuple[Named, tuple[int, ...]]:
    model = randomised(Net())
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], sequence_parallel())
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh["dp"])
    train(model, sgd(model.parameters()), lambda x: x.chunk(3)[mesh.get_local_rank("dp")], range(STEPS))
    return outcome(model), local_shape(model.blocks[1].up.weight)


def test_fully_sharded_and_tensor_parallel(transport: str) -> None:
    values = run(trained_on_two_axes, ranks=6, transport=transport).values
    assert_every_rank_has(serially_trained(sgd), [value for value, _ in values])
    assert [shape for _, shape in values] == [(3, D)] * 4 + [(2, D)] * 2  # of 8
