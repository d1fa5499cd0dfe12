"""Replicas and ZeRO beside DDP, ZeroRedundancyOptimizer and FSDP2: on the same ranks, in the same program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from lessons_lib import Mesh, region, run
from lessons_lib.data_parallel import Bucketed, Zero, reduce_each
from tests.oracles.serial import (
    FSDP_ALARM,
    STEPS,
    Named,
    Net,
    assert_every_rank_has,
    batch,
    mean_loss,
    mine,
    outcome,
    randomised,
    serially_trained,
    train,
)

with warnings.catch_warnings():  # torch 2.13 warns of the torch.jit.script that other modules there use
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings(FSDP_ALARM)]

ADAM = partial(Adam, lr=0.02, eps=1e-3)  # so large that a gradient wrong by a factor shows
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


def replicas(way: Callable[[nn.Module, object], Callable[[], None]]) -> Named:
    model, group = randomised(Net()), Mesh(dp=dist.get_world_size())["dp"]
    optimizer, reduce = ADAM(model.parameters()), way(model, group)
    for step in range(STEPS):
        tokens, targets = (mine(x) for x in batch(step))
        optimizer.zero_grad()
        (mean_loss(model(tokens), targets) / group.size).backward()  # ranks have equally many tokens
        reduce()
        optimizer.step()
    return outcome(model)


def each(model: nn.Module, group: object) -> Callable[[], None]:
    return partial(reduce_each, model, group)


def buckets(model: nn.Module, group: object) -> Callable[[], None]:
    return Bucketed(model, group, bucket_bytes=1000).reduce  # type: ignore[arg-type]


def ddp() -> Named:
    model = randomised(Net())
    train(DistributedDataParallel(model, bucket_cap_mb=0.001), ADAM(model.parameters()), mine, range(STEPS))
    return outcome(model)


def ours(stage: int, make_optimizer: Callable[..., object]) -> Named:
    model, group = randomised(Net()), Mesh(dp=dist.get_world_size())["dp"]
    zero = Zero(model, stage, group, make_optimizer)  # type: ignore[arg-type]
    for step in range(STEPS):
        tokens, targets = (mine(x) for x in batch(step))
        zero.zero_grad()
        (mean_loss(model(tokens), targets) / group.size).backward()
        zero.step()
    gradients = {f"gradient of {name}": g for name, g in zero.whole_gradients().items()}
    return zero.whole_parameters() | gradients


def zero_redundancy() -> Named:
    model = randomised(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.02, eps=1e-3)
    train(DistributedDataParallel(model), optimizer, mine, range(STEPS))
    return outcome(model)


def fsdp2(make_optimizer: Callable[..., object]) -> Named:
    model = randomised(Net())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    train(model, make_optimizer(model.parameters()), mine, range(STEPS))  # type: ignore[arg-type]
    return outcome(model)


def both(one: Callable[[], Named], other: Callable[[], Named]) -> tuple[Named, Named]:
    with region("ours"):
        mine = one()
    with region("theirs"):
        return mine, other()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "one, other, make_optimizer",
    [
        (partial(replicas, each), ddp, ADAM),
        (partial(replicas, buckets), ddp, ADAM),
        (partial(ours, 0, ADAM), ddp, ADAM),
        (partial(ours, 1, ADAM), zero_redundancy, ADAM),
        (partial(ours, 2, MOMENTUM), partial(fsdp2, MOMENTUM), MOMENTUM),
        (partial(ours, 3, MOMENTUM), partial(fsdp2, MOMENTUM), MOMENTUM),
        (partial(ours, 3, ADAM), partial(fsdp2, ADAM), ADAM),
    ],
)
def test_the_same_steps(
    one: Callable[[], Named],
    other: Callable[[], Named],
    make_optimizer: Callable[..., object],
    ranks: int,
    transport: str,
) -> None:
    """Every gradient and parameter after ten steps, theirs, ours, and the serial model's."""
    values = run(both, one, other, ranks=ranks, transport=transport).values
    expected = serially_trained(make_optimizer)  # type: ignore[arg-type]
    for side in range(2):
        assert_every_rank_has(expected, [value[side] for value in values])


@pytest.mark.parametrize("factor, error", [("world / total", 0.0), ("1 / mine", 0.2)])
def test_unequal_token_counts_under_ddp(factor: str, error: float) -> None:
    """S12: 2 tokens with mean loss 1, and 6 with mean loss 3. DDP averages over ranks, so each rank's sum
    takes world / total; its own mean gives the mean of the means, 2.0 for 2.5."""

    def body() -> float:
        rank = dist.get_rank()
        model = nn.Linear(1, 1, bias=False).double()
        parallel = DistributedDataParallel(model)
        n, loss = [(2, 1.0), (6, 3.0)][rank]
        losses = parallel(torch.full((n, 1), loss, dtype=torch.float64))
        (losses.sum() * (2 / 8 if factor == "world / total" else 1 / n)).backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()

    for found in run(body, ranks=2).values:
        assert abs(1 - found / 2.5) == pytest.approx(error)


def sent(result: object, side: str) -> int:
    return sum(result.trace.bytes_sent(rank, side) for rank in range(4))  # type: ignore[attr-defined]


def one_step(model: nn.Module, parallel: nn.Module, share: float, finish: Callable[[], object]) -> None:
    tokens, targets = (mine(x) for x in batch(0))
    (mean_loss(parallel(tokens), targets) * share).backward()
    finish()


def test_bytes_beside_theirs() -> None:
    """DDP sends what replicas send. ZeRO 1 sends no more than that, ZeroRedundancyOptimizer half more, as it
    sums whole gradients first. FSDP2 pads each parameter, and keeps what its root has gathered."""

    def body() -> None:
        world = Mesh(dp=4)["dp"]
        sides: dict[str, Callable[[], None]] = {}

        def step_of(stage: int) -> None:
            model = randomised(Net())
            zero = Zero(model, stage, world, ADAM)  # type: ignore[arg-type]
            with region(f"zero {stage}"):
                one_step(model, model, 1 / 4, zero.step)

        def bucketed() -> None:
            model = randomised(Net())
            reduce = Bucketed(model, world).reduce
            with region("buckets"):
                one_step(model, model, 1 / 4, reduce)

        def theirs_ddp() -> None:
            parallel = DistributedDataParallel(randomised(Net()))
            with region("ddp"):
                one_step(parallel, parallel, 1.0, lambda: None)

        def redundancy() -> None:
            model = randomised(Net())
            parallel = DistributedDataParallel(model)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.1)
            with region("redundancy"):
                one_step(model, parallel, 1.0, optimizer.step)

        def fsdp() -> None:
            model = randomised(Net())
            mesh = init_device_mesh("cpu", (4,))
            for unit in [*model.blocks, model]:
                fully_shard(unit, mesh=mesh, reshard_after_forward=True)
            with region("fsdp"):
                one_step(model, model, 1.0, lambda: None)

        sides = {"b": bucketed, "d": theirs_ddp, "r": redundancy, "f": fsdp}
        for side in sides.values():
            side()
        for stage in (1, 3):
            step_of(stage)

    result = run(body, ranks=4)
    n_bytes = 8 * sum(p.numel() for p in Net().parameters())
    assert sent(result, "buckets") == sent(result, "ddp") == 2 * 3 * n_bytes
    assert sent(result, "zero 1") < 2 * 3 * (n_bytes + 8 * 3 * 6)  # the padding of six units
    assert sent(result, "redundancy") == 3 * 3 * n_bytes
    root = 8 * sum(p.numel() for name, p in Net().named_parameters() if not name.startswith("blocks"))
    assert sent(result, "fsdp") >= 3 * (3 * n_bytes - root)
    assert sent(result, "zero 3") < 3 * 3 * (n_bytes + 8 * 3 * 6)
