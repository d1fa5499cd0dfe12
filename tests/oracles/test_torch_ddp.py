"""DistributedDataParallel gives the serial gradients: buckets, accumulation, unused weights, uneven data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import run
from lessons_lib.errors import DeadlockError, RankError, UnfinishedWarning
from tests.oracles.serial import (
    STEPS,
    B,
    D,
    Named,
    Net,
    V,
    assert_every_rank_has,
    batch,
    caught,
    gradients,
    mean_loss,
    mine,
    outcome,
    randomised,
    serially_trained,
    sgd,
    train,
)

pytestmark = pytest.mark.oracle

SMALL_MB = 0.001  # a bucket for every few parameters
Parallelise = Callable[[nn.Module], nn.Module]


def replicated(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=SMALL_MB)


def replicated_with_views(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=True)


def replicated_in_one_bucket(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=25)


def replicated_statically(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=SMALL_MB, static_graph=True)


def trained(parallelise: Parallelise) -> Named:
    model = randomised(Net(), seed=dist.get_rank())  # rank 0's weights are to become everybody's
    train(parallelise(model), sgd(model.parameters()), mine, range(STEPS))
    return outcome(model)


@pytest.mark.parametrize(
    "parallelise, ranks",
    [(replicated, 2), (replicated_with_views, 3), (replicated_in_one_bucket, 3), (replicated_statically, 3)],
)
def test_training(parallelise: Parallelise, ranks: int, transport: str) -> None:
    values = run(trained, parallelise, ranks=ranks, transport=transport).values
    assert_every_rank_has(serially_trained(sgd), values)


def test_training_without_gradient_sync_is_caught() -> None:
    with caught():
        assert_every_rank_has(serially_trained(sgd), run(trained, lambda model: model, ranks=3).values)


# ---- accumulation ----

N_MICROBATCHES = 2


def accumulated(divisor: int, silent: int) -> Named:
    """Gradients of several micro-batches, the first ``silent`` of them without communication."""
    model = randomised(Net())
    parallel = replicated(model)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = (mine(x).chunk(N_MICROBATCHES) for x in batch(step))
        for microbatch in range(N_MICROBATCHES):
            with parallel.no_sync() if microbatch < silent else nullcontext():
                loss = mean_loss(parallel(tokens[microbatch]), targets[microbatch])
                (loss / divisor).backward()
        optimizer.step()
    return outcome(model)


def test_accumulation(transport: str) -> None:
    values = run(accumulated, N_MICROBATCHES, N_MICROBATCHES - 1, ranks=3, transport=transport).values
    assert_every_rank_has(serially_trained(sgd), values)


@pytest.mark.parametrize(
    "divisor, silent",
    [
        pytest.param(1, N_MICROBATCHES - 1, id="loss not divided"),
        pytest.param(N_MICROBATCHES, N_MICROBATCHES, id="never synchronised"),
    ],
)
def test_wrong_accumulation_is_caught(divisor: int, silent: int) -> None:
    with caught():
        assert_every_rank_has(serially_trained(sgd), run(accumulated, divisor, silent, ranks=3).values)


# ---- unused parameters ----


class Routed(nn.Module):
    """Two ways through, and a third that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(D, V) for _ in range(3))

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.ways[way](x)


def routed_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(B, D, generator=generator, dtype=torch.float64)
    y = torch.randn(B, V, generator=generator, dtype=torch.float64)
    return (module(x, way=min(rank, 1)) * y).sum()


def routed(find_unused_parameters: bool) -> Named:
    model = randomised(Routed())
    parallel = DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
    for step in range(STEPS):
        routed_loss(parallel, dist.get_rank(), step).backward()
    return gradients(model)


def test_parameters_that_a_rank_does_not_use(transport: str) -> None:
    model = randomised(Routed())
    for step in range(STEPS):
        (sum(routed_loss(model, rank, step) for rank in range(3)) / 3).backward()
    expected = gradients(model)
    assert len(expected) == 4
    assert_every_rank_has(expected, run(routed, True, ranks=3, transport=transport).values)


def test_unused_parameters_that_are_not_looked_for_are_refused(transport: str) -> None:
    with pytest.raises(RankError, match="find_unused_parameters=True"):
        run(routed, False, ranks=3, transport=transport)


# ---- uneven inputs ----

N_BATCHES = (3, 5, 2)  # of each rank


def joined(by_all: bool) -> Named:
    model = randomised(Net())
    parallel = replicated(model)
    with parallel.join(divide_by_initial_world_size=by_all):
        train(parallel, sgd(model.parameters()), mine, range(N_BATCHES[dist.get_rank()]))
    return {name: weight.detach() for name, weight in model.named_parameters()}


def not_joined() -> None:
    model = randomised(Net())
    train(replicated(model), sgd(model.parameters()), mine, range(N_BATCHES[dist.get_rank()]))


def joined_serially(by_all: bool) -> Named:
    """``by_all``: gradients are divided by all ranks, also those that have no data left."""
    model = randomised(Net())
    optimizer = sgd(model.parameters())
    for step in range(max(N_BATCHES)):
        optimizer.zero_grad()
        tokens, targets = (x.chunk(3) for x in batch(step))
        divisor = 3 if by_all else sum(step < n for n in N_BATCHES)
        for rank in range(3):
            if step < N_BATCHES[rank]:
                (mean_loss(model(tokens[rank]), targets[rank]) / divisor).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("by_all", [True, False])
def test_uneven_inputs(transport: str, by_all: bool) -> None:
    # Ranks that are not done say so by an all-reduce whose handle torch drops.
    with pytest.warns(UnfinishedWarning, match=r"all_reduce\(float32\[1\]\)"):
        values = run(joined, by_all, ranks=3, transport=transport, timeout_s=60).values
    assert_every_rank_has(joined_serially(by_all), values)


def test_uneven_inputs_without_join_are_a_deadlock(transport: str) -> None:
    with pytest.raises(DeadlockError, match="rank 2"):
        run(not_joined, ranks=3, transport=transport)
