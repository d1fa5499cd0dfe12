"""Replicas take the serial step, whoever has how many tokens; in buckets, with overlap; wrong versions."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam
from torch.utils.data import DistributedSampler

from lessons_lib import Mesh, region, run
from lessons_lib.data_parallel import (
    Bucketed,
    LossScaler,
    clip,
    mean_over_ranks,
    reduce_each,
    rows_of_rank,
    total,
)
from lessons_lib.data_parallel.replicated import fill_buckets
from lessons_lib.errors import RefusedError
from lessons_lib.machines import Link, Machine
from tests.serial_training import OPTIMIZERS, STEPS, Net, Sometimes, assert_same, batch, serially_trained

FLOAT64_BYTES = 8
N_PARAMETERS = sum(p.numel() for p in Net().parameters())


class Each:
    """``reduce_each``, in the words of ``Bucketed``."""

    def __init__(self, model, group):
        self.reduce = partial(reduce_each, model, group)


WAYS = {
    "each": Each,
    "buckets": partial(Bucketed, bucket_bytes=200),
    "one bucket": Bucketed,
    "a bucket for each": partial(Bucketed, bucket_bytes=1),
}


def share(losses, group):
    """This rank's share of the mean: divided once, by all ranks' tokens."""
    with region("count"):
        return losses.sum() / total(losses.numel(), group)


def trained(way, make_optimizer, share=share, n_rows=13):
    group, model = Mesh(dp=dist.get_world_size())["dp"], Net()
    replicas, optimizer = way(model, group), make_optimizer(model.parameters())
    found = {}
    for step in range(STEPS):
        tokens, targets = (rows_of_rank(x, group) for x in batch(step, n_rows))
        optimizer.zero_grad()
        loss = share(model.losses(tokens, targets), group)
        with region("step"):
            loss.backward()
            replicas.reduce()
        if step in (0, STEPS - 1):
            found |= {f"gradient {step} of {name}": p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return found | {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "way, optimizer, ranks",
    [
        ("each", "adam", 2),
        ("buckets", "sgd", 2),
        ("buckets", "momentum", 3),
        ("buckets", "adam", 4),
        ("buckets", "adamw", 8),
        ("one bucket", "adam", 3),
        ("a bucket for each", "adamw", 4),
    ],
)
def test_replicas_take_the_serial_steps(way, optimizer, ranks):
    """Gradients first and last, and every parameter, on every rank; 13 rows are dealt out, unevenly."""
    result = run(trained, WAYS[way], OPTIMIZERS[optimizer], ranks=ranks)
    assert_same(serially_trained(OPTIMIZERS[optimizer]), result.values)
    sent = sum(result.trace.bytes_sent(rank, "step") for rank in range(ranks))
    assert sent == STEPS * FLOAT64_BYTES * 2 * (ranks - 1) * N_PARAMETERS


@pytest.mark.parametrize("way", ["each", "buckets"])
def test_a_rank_without_tokens_takes_part(way):
    """Two rows on three ranks: the last has none, and a mean of nothing is not a number."""
    make = OPTIMIZERS["sgd"]
    assert_same(
        serially_trained(make, n_rows=2), run(partial(trained, WAYS[way], make, n_rows=2), ranks=3).values
    )


@pytest.mark.parametrize("way", ["each", "buckets"])
def test_a_rank_that_does_no_backward_sends_zeros(way):
    def step():
        model, group = Net(), Mesh(dp=3)["dp"]
        replicas = WAYS[way](model, group)
        if group.rank != 1:
            tokens, targets = batch(0, n_rows=2)[:, [group.rank // 2]]
            (model.losses(tokens, targets).sum() / 6).backward()
        replicas.reduce()
        return {name: p.grad for name, p in model.named_parameters()}

    model = Net()
    model.losses(*batch(0, n_rows=2)).mean().backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, run(step, ranks=3).values)


# ---- who divides


def mean_of_means(losses, group):
    return losses.mean() / group.size


def not_divided(losses, group):
    return losses.sum()


def averaged_twice(losses, group):
    return share(losses, group) / group.size


WRONG = [mean_of_means, not_divided, averaged_twice]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_division_is_caught(wrong):
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(
            serially_trained(OPTIMIZERS["sgd"]),
            run(partial(trained, WAYS["buckets"], OPTIMIZERS["sgd"], wrong), ranks=3).values,
        )


@pytest.mark.parametrize("wrong", [not_divided, averaged_twice])
def test_adam_hides_a_factor_and_sgd_shows_it(wrong):
    """F1. After ten steps of Adam the weights differ by less than its eps; the gradients by the factor."""
    hidden = partial(Adam, lr=0.02)
    found = run(partial(trained, WAYS["buckets"], hidden, wrong), ranks=2).values[0]
    expected = serially_trained(hidden)
    worst = max((found[n] - x).norm() / x.norm() for n, x in expected.items() if "gradient" not in n)
    assert worst < 1e-5
    factor = {not_divided: 13 * 3, averaged_twice: 1 / 2}[wrong]
    for name, x in expected.items():
        if name.startswith("gradient 0"):
            assert ((found[name] / factor - x).norm() / x.norm()).item() < 1e-10


def two_and_six(combine):
    """S12: 2 tokens with mean loss 1, and 6 with mean loss 3; the gradients are those of a weight."""

    def step():
        group, weight = Mesh(dp=2)["dp"], torch.ones((), dtype=torch.float64, requires_grad=True)
        losses = weight * torch.tensor([[1.0] * 2, [3.0] * 6][group.rank], dtype=torch.float64)
        loss = combine(losses, group)
        loss.backward()
        return group.all_reduce(loss.detach()).item(), group.all_reduce(weight.grad).item()

    return run(step, ranks=2).values


def test_two_tokens_here_and_six_there():
    assert two_and_six(share) == [(2.5, 2.5)] * 2
    assert two_and_six(mean_of_means) == [(2.0, 2.0)] * 2


@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
def test_a_metric_counts_every_sample_once(ranks):
    """S45: ten samples, the first is wrong. A sampler that fills up draws two of them again."""

    def accuracies():
        group, right = Mesh(dp=ranks)["dp"], torch.arange(10) > 0
        sampler = DistributedSampler(range(10), num_replicas=ranks, rank=group.rank, shuffle=False)
        filled = right[list(sampler)].double()
        mine = rows_of_rank(right, group).double()
        return mean_over_ranks(mine, group), mean_over_ranks(filled, group), total(len(filled), group)

    for ours, filled, drawn in run(accuracies, ranks=ranks).values:
        assert ours == 9 / 10
        if ranks == 4:
            assert (filled, drawn) == (10 / 12, 12)


# ---- buckets


@pytest.mark.parametrize("bucket_bytes", [1, 100, 333, 10_000])
def test_buckets_are_few_and_hold_everything_once(bucket_bytes):
    parameters = list(Net().parameters())
    buckets = fill_buckets(parameters, bucket_bytes)
    assert [p for bucket in buckets for p in bucket] == parameters[::-1]
    n_bytes = sum(p.nbytes for p in parameters)
    assert len(buckets) <= n_bytes // bucket_bytes + 1


def test_a_bucket_has_one_dtype():
    mixed = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.half, torch.float, torch.float)]
    assert [len(bucket) for bucket in fill_buckets(mixed, 1000)] == [2, 1]


def test_buckets_go_in_one_order_whoever_uses_what():
    """The middle bucket, which one rank does not fill, holds up those behind it on that rank alone."""

    def step():
        group = Mesh(dp=2)["dp"]
        model = Sometimes(used=group.rank == 0)
        replicas = Bucketed(model, group, bucket_bytes=1)
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        replicas.reduce()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = {}
    for used in (True, False):
        model = Sometimes(used)
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        for name, p in model.named_parameters():
            expected[name] = expected.get(name, 0) + (0 if p.grad is None else p.grad)
    assert_same(expected, run(step, ranks=2).values)


def in_microbatches(how, ranks=2, n_microbatches=3):
    """The gradients of one batch in several micro-batches, and the collectives this took."""

    def step():
        model, group = Net(), Mesh(dp=ranks)["dp"]
        replicas = Bucketed(model, group, bucket_bytes=200)
        tokens, targets = (rows_of_rank(x, group) for x in batch(0))
        pieces = list(zip(tokens.split(2), targets.split(2), strict=True))

        def backward(piece):
            (model.losses(*piece).sum() / batch(0)[1].numel()).backward()

        how(replicas, backward, pieces)
        replicas.reduce()
        return {name: p.grad for name, p in model.named_parameters()}

    return run(step, ranks=ranks)


def held_back(replicas, backward, pieces):
    for piece in pieces[:-1]:
        with replicas.accumulating():
            backward(piece)
    with region("last"):
        backward(pieces[-1])


def test_accumulation_sends_once():
    model = Net()
    model.losses(*batch(0)).mean().backward()
    result = in_microbatches(held_back)
    assert_same({name: p.grad for name, p in model.named_parameters()}, result.values)
    n_buckets = len(fill_buckets(list(Net().parameters()), 200))
    for rank in range(2):
        kinds = [event.kind for event in result.trace.collectives(rank)]
        assert kinds == ["all_reduce"] * n_buckets
        assert len(result.trace.collectives(rank, "last")) == n_buckets


def test_a_second_backward_is_refused():
    def forgotten(replicas, backward, pieces):
        for piece in pieces:
            backward(piece)

    with pytest.raises(RefusedError, match=r"every micro-batch but the last into `with replicas\.accum"):
        in_microbatches(forgotten)


def test_a_bucket_needs_a_size():
    with pytest.raises(RefusedError, match=r"bucket_bytes=0: a bucket holds one byte or more"):
        run(lambda: Bucketed(Net(), Mesh(dp=1)["dp"], bucket_bytes=0), ranks=1)


# ---- overlap, on the virtual clock

WIDTH, N_LAYERS, FLOPS = 16, 6, 1e6
PRODUCT = 2 * WIDTH * WIDTH / FLOPS  # seconds for a row
LAYER_BYTES = WIDTH * WIDTH * FLOAT64_BYTES
MACHINE = Machine("slow", flops_per_s=FLOPS, in_node=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e6))
EVERYONE = (0, 1, 2, 3)
EACH_S = MACHINE.collective_s("all_reduce", LAYER_BYTES, EVERYONE)


def timed(way, n_rows):
    def step():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_LAYERS))).double()
        replicas = way(model, Mesh(dp=4)["dp"])
        model(torch.ones(n_rows, WIDTH, dtype=torch.float64)).sum().backward()
        with region("after backward"):
            replicas.reduce()

    return run(step, ranks=4, machine=MACHINE).trace


def compute_s(n_rows):
    return (3 * N_LAYERS - 1) * PRODUCT * n_rows  # nobody asks for the gradient of the data


@pytest.mark.parametrize("n_rows", [2, 8])
def test_buckets_travel_while_backward_goes_on(n_rows):
    """Naive, the times of backward and of the all-reduces add up, to the last digit. In buckets, what is
    slower hides the other: the network has to wait for the first layer, or the ranks for the last bucket.
    """
    naive = timed(Each, n_rows)
    bucketed = timed(partial(Bucketed, bucket_bytes=LAYER_BYTES), n_rows)
    assert naive.timeline.makespan == pytest.approx(compute_s(n_rows) + N_LAYERS * EACH_S, rel=1e-12)
    waits_for_network = (N_LAYERS + 2) * PRODUCT * n_rows + N_LAYERS * EACH_S
    waits_for_ranks = compute_s(n_rows) + EACH_S
    assert (waits_for_network > waits_for_ranks) == (n_rows == 2), "one of each"
    expected = max(waits_for_network, waits_for_ranks)
    assert bucketed.timeline.makespan == pytest.approx(expected, rel=1e-12)
    assert len(bucketed.collectives(0, "after backward")) == 0, "all were sent during backward"
    assert len(naive.collectives(0, "after backward")) == N_LAYERS
    assert bucketed.bytes_sent(0) == naive.bytes_sent(0)


def test_one_bucket_hides_nothing():
    whole_s = MACHINE.collective_s("all_reduce", N_LAYERS * LAYER_BYTES, EVERYONE)
    assert timed(Bucketed, 2).timeline.makespan == pytest.approx(compute_s(2) + whole_s, rel=1e-12)


# ---- clipping and scaling, of which ranks hold parts


@pytest.mark.parametrize("norm, most, factor", [(5.0, 1.0, 0.2), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0)])
def test_the_factor_that_clips(norm, most, factor):
    assert clip(norm, most) == factor


@pytest.mark.parametrize("wrong", [dict(scale=0.0), dict(scale=float("inf")), dict(growth_interval=0)])
def test_a_scaler_needs_a_scale(wrong):
    with pytest.raises(
        RefusedError, match=r"LossScaler\(scale=.*, growth_interval=\d+\): the scale is above 0"
    ):
        LossScaler(**wrong)


def test_the_package_lists_its_names():
    import lessons_lib.data_parallel as package

    assert sorted(dir(package)) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=re.escape("has no attribute 'zero_4'")):
        package.zero_4  # noqa: B018


def test_sgd_is_what_shows_a_factor():
    """What the other tests rest on: the optimizers here let a wrong factor show."""
    for name, make in OPTIMIZERS.items():
        right, wrong = Net(), Net()
        for model, factor in ((right, 1.0), (wrong, 2.0)):
            optimizer = make(model.parameters())
            (factor * model.losses(*batch(0)).mean()).backward()
            optimizer.step()
        assert not torch.allclose(right.head.weight, wrong.head.weight, rtol=1e-4), name
