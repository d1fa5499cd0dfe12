"""FLOPs against formulas, memory against bytes added up by hand."""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lessons_lib import Mesh, region, run
from lessons_lib.errors import RankError, RefusedError

TRANSPORTS = ("threads", "processes")


@pytest.fixture(scope="module", autouse=True)
def _steps_travel_by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def flops(step: Callable[[], Any], region: str | None = None) -> int:
    return run(step, ranks=1, record="flops").trace.flops_of(0, region)


def peak(step: Callable[..., Any], *args: Any) -> int:
    return run(step, *args, ranks=1, record="memory").trace.peak_bytes(0)


def live(step: Callable[..., Any], *args: Any) -> list[int]:
    """The curve of live bytes, from change to change."""
    return [n_bytes for _, n_bytes in run(step, *args, ranks=1, record="memory").trace.live_bytes[0]]


# ---- FLOPs ----

B, D, FF, H, S, K = 5, 6, 7, 2, 8, 4


def test_products_are_two_flops_per_pair() -> None:
    assert flops(lambda: torch.ones(B, D) @ torch.ones(D, FF)) == 2 * B * D * FF
    assert flops(lambda: torch.ones(3, B, D) @ torch.ones(3, D, FF)) == 3 * 2 * B * D * FF
    assert flops(lambda: torch.addmm(torch.ones(FF), torch.ones(B, D), torch.ones(D, FF))) == 2 * B * D * FF
    assert flops(lambda: torch.einsum("bd,df->bf", torch.ones(B, D), torch.ones(D, FF))) == 2 * B * D * FF
    assert (
        flops(lambda: F.linear(torch.ones(S, B, D), torch.ones(FF, D), torch.ones(FF))) == 2 * S * B * D * FF
    )
    assert flops(lambda: torch.ones(B, D).exp().sum()) == 0


def test_backward_of_a_linear_is_two_products_more() -> None:
    def step(needs_dx: bool) -> None:
        linear, x = nn.Linear(D, FF), torch.ones(B, D, requires_grad=needs_dx)
        with region("forward"):
            y = linear(x)
        with region("backward"):
            y.sum().backward()

    for needs_dx in (False, True):
        trace = run(step, needs_dx, ranks=2, record=("flops",)).trace
        for rank in range(2):
            assert trace.flops_of(rank, "forward") == 2 * B * D * FF
            assert trace.flops_of(rank, "backward") == (1 + needs_dx) * 2 * B * D * FF
            assert trace.flops_of(rank) == (2 + needs_dx) * 2 * B * D * FF


def test_attention_is_counted_whole_forward_and_backward() -> None:
    """Forward: scores and values. Backward makes the scores again, and four products: 2.5 times as much."""

    def step(causal: bool) -> None:
        q, k, v = (torch.ones(B, H, S, K, requires_grad=True) for _ in range(3))
        with region("forward"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        with region("backward"):
            y.sum().backward()

    for causal in (False, True):
        trace = run(step, causal, ranks=1, record="flops").trace
        product = 2 * B * H * S * S * K
        assert (trace.flops_of(0, "forward"), trace.flops_of(0, "backward")) == (2 * product, 5 * product)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_rank_counts_its_own(transport: str) -> None:
    def step() -> None:
        rank = dist.get_rank()
        x = torch.ones(B * (rank + 1), D) @ torch.ones(D, FF)
        dist.all_reduce(torch.ones(4))
        x.sum()

    trace = run(step, ranks=3, transport=transport, record=("flops", "memory")).trace
    assert [trace.flops_of(rank) for rank in range(3)] == [2 * B * (rank + 1) * D * FF for rank in range(3)]
    sizes = [B * (rank + 1) * (D + FF) + D * FF for rank in range(3)]
    assert [trace.peak_bytes(rank) for rank in range(3)] == [4 * n for n in sizes]


def test_what_was_not_recorded_is_said() -> None:
    trace = run(lambda: None, ranks=1).trace
    with pytest.raises(RefusedError, match=r"FLOPs were not recorded. Try run\(..., record=\"flops\"\)"):
        trace.flops_of(0)
    with pytest.raises(RefusedError, match=r"Memory was not recorded. Try run\(..., record=\"memory\"\)"):
        trace.peak_bytes(0)
    counted = run(lambda: None, ranks=2, record=("flops", "memory")).trace
    for rank in (-1, 2):
        for ask in (counted.flops_of, counted.peak_bytes):
            with pytest.raises(RefusedError, match=rf"rank {rank} is none of this run's 2 ranks"):
                ask(rank)
    with pytest.raises(RefusedError, match=r"record='time': what can be recorded is 'flops' and 'memory'"):
        run(lambda: None, ranks=1, record="time")


# ---- memory ----


def test_a_storage_counts_once_however_many_views_it_has_and_until_the_last_is_gone() -> None:
    def step() -> None:
        x = torch.ones(100)
        views = [x[10:20], x.view(10, 10).t(), x.detach(), x.as_strided((5,), (2,))]
        del x
        y = torch.zeros(10)
        del views
        gc.collect()
        y.add_(1)

    assert live(step) == [0, 400, 440, 40, 0] or live(step) == [400, 440, 40, 0]


def test_memory_that_grows_or_is_let_go_in_place() -> None:
    def step() -> None:
        x = torch.ones(10)
        x.resize_(100)
        x.untyped_storage().resize_(0)  # as FSDP does
        torch.ones(5)
        x.untyped_storage().resize_(80)

    assert live(step) == [0, 40, 400, 0, 20, 0, 80, 0]
    assert "resize_" not in vars(torch.UntypedStorage)


def test_arguments_count_from_the_start() -> None:
    x, model, buffer = torch.ones(100), nn.Linear(3, 4), torch.ones(7)

    def step(x: Tensor, again: Tensor, model: nn.Module) -> None:
        del x, again, model
        buffer.sum()
        if buffer[0] < 0:
            print(later)

    curve = live(step, x, x, model)
    later = 0  # not yet set when the function travels
    assert curve[:3] and max(curve[:4]) == 4 * (100 + 12 + 4 + 7)


def test_the_peak_of_an_mlp_by_hand() -> None:
    """x -> linear -> tanh -> linear -> sum, no biases; what backward needs is kept until it has been used."""
    n, d, f = 32, 64, 128

    def step(x: Tensor, up: Tensor, down: Tensor) -> None:
        h = torch.tanh(x @ up)
        (h @ down).sum().backward()

    x = torch.ones(n, d)
    up, down = (torch.ones(d, f, requires_grad=True), torch.ones(f, d, requires_grad=True))
    weights, inputs = 2 * d * f, n * d
    hidden = n * f
    # before tanh: x @ up, gone once tanh is done; y, gone once it is summed
    forward = max(inputs + weights + 2 * hidden, inputs + weights + hidden + n * d)
    # gradients of the sum (an expanded number), of down, of h, of what tanh got, of up
    after_down = inputs + weights + hidden + d * f + hidden
    after_tanh = inputs + weights + hidden + d * f + hidden + hidden
    after_up = inputs + weights + hidden + d * f + hidden + d * f  # h is a variable of the function
    assert max(forward, after_down, after_tanh, after_up) == after_up
    assert peak(step, x, up, down) == 4 * (after_up + 2)  # the sum, its gradient


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buffers_of_communication_are_charged_once_to_who_made_them(transport: str) -> None:
    def step() -> None:
        x = torch.ones(1000)
        dist.all_reduce(x)
        parts = [torch.empty(1000) for _ in range(2)]
        dist.all_gather(parts, x)
        dist.barrier()

    trace = run(step, ranks=2, transport=transport, record="memory").trace
    assert [trace.peak_bytes(rank) for rank in range(2)] == [12_000] * 2


def test_a_group_collective_makes_its_result_and_no_more() -> None:
    def step() -> Tensor:
        group, x = Mesh(tp=2)["tp"], torch.ones(1000)
        return group.all_reduce(x)

    trace = run(step, ranks=2, record="memory").trace
    assert [trace.peak_bytes(rank) for rank in range(2)] == [8_000] * 2


def test_memory_and_flops_of_what_torch_shards_are_those_of_the_shards() -> None:
    """A DTensor has the shape of the whole, and the memory and the work of its shard."""

    def step() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.ones(8, 60), mesh, [Replicate()])
        w = DTensor.from_local(torch.ones(60, 50), mesh, [Shard(1)])
        y = x @ w
        assert y.shape == (8, 100) and y.to_local().shape == (8, 50)

    trace = run(step, ranks=2, record=("flops", "memory")).trace
    for rank in range(2):
        assert trace.flops_of(rank) == 2 * 8 * 60 * 50
        assert 0 <= trace.peak_bytes(rank) - 4 * (8 * 60 + 60 * 50 + 8 * 50) < 100  # and what the mesh needs


def test_what_fsdp_frees_is_not_counted() -> None:
    """Of eight layers, each gathered for its product alone, no more than two are whole at a time."""
    whole, mark = 4 * 100 * 100, 4 * 777

    def step() -> None:
        mesh = init_device_mesh("cpu", (2,))
        layers = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
        for layer in (*layers, layers):
            fully_shard(layer, mesh=mesh)
        torch.ones(777)
        with torch.no_grad():
            layers(torch.ones(1, 100))

    for curve in run(step, ranks=2, record="memory").trace.live_bytes:
        sizes = [n_bytes for _, n_bytes in curve]
        jumps = [after - before for before, after in itertools.pairwise(sizes)]
        forward = sizes[jumps.index(mark) + 2 :]
        assert forward[0] == pytest.approx(4 * whole, rel=0.01)  # half of each
        # whole: a layer, what it is gathered into, and the layer before it until the next has been gathered
        assert max(forward) < 4 * whole + 3.1 * whole
        assert forward[-1] == pytest.approx(4 * whole, rel=0.01)


def test_a_run_that_fails_has_counted() -> None:
    def step() -> None:
        torch.ones(10, 10) @ torch.ones(10, 10)
        raise ValueError

    for transport in TRANSPORTS:
        with pytest.raises(RankError) as caught:
            run(step, ranks=1, transport=transport, record=("flops", "memory"))
        assert caught.value.run.trace.flops_of(0) == 2000 and caught.value.run.trace.peak_bytes(0) == 1200


# ---- what it costs ----


@pytest.mark.slow
def test_recording_costs_less_than_half_of_the_step() -> None:
    """The goal is 1.5 times at d = 256; the bench measures it. Here, only that it has not got out of hand."""

    def steps(n: int) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        x, times = torch.randn(512, 256), []
        for _ in range(n):
            began = time.perf_counter()
            model(x).square().mean().backward()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    ratios = []
    for _ in range(3):
        plain = run(steps, 15, ranks=1).values[0]
        ratios.append(run(steps, 15, ranks=1, record=("flops", "memory")).values[0] / plain)
    print("FLOPs and memory, times the plain step:", [f"{ratio:.2f}" for ratio in ratios])
    assert min(ratios) < 2
