"""Virtual time, FLOPs and memory: exact where they can be, on threads and on processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import compute, region, run
from lessons_lib.errors import RefusedError
from lessons_lib.machines import GPUS, Link, Machine, machine

TRANSPORTS = pytest.mark.parametrize("transport", ["threads", "processes"])


def gpipe(n_microbatches: int, forward_s: float, backward_s: float) -> None:
    """A pipeline in which every stage takes the same time."""
    rank, last, x = dist.get_rank(), dist.get_world_size() - 1, torch.zeros(1)
    for _ in range(n_microbatches):
        if rank > 0:
            dist.recv(x, rank - 1)
        compute(forward_s)
        if rank < last:
            dist.send(x, rank + 1)
    for _ in range(n_microbatches):
        if rank < last:
            dist.recv(x, rank + 1)
        compute(backward_s)
        if rank > 0:
            dist.send(x, rank - 1)


@TRANSPORTS
@pytest.mark.parametrize("p, m", [(2, 3), (4, 8), (3, 1)])
def test_a_toy_pipeline_takes_the_textbooks_time(p: int, m: int, transport: str) -> None:
    result = run(gpipe, m, 1.0, 2.0, ranks=p, machine=Machine("free"), transport=transport)
    assert result.trace.timeline.makespan == (m + p - 1) * 3.0
    assert result.trace.timeline.clock == "virtual (free)"


@TRANSPORTS
def test_collectives_cost_what_the_ring_says_and_hide_behind_work(transport: str) -> None:
    box = Machine("box", in_node=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9))

    def step(work_s: float) -> None:
        handle = dist.all_reduce(torch.ones(1000), async_op=True)
        compute(work_s)
        assert handle is not None
        handle.wait()

    alone = 6e-6 + 2 * 3 / 4 * 4000 / 1e9
    for work_s in (0.0, alone / 2, 2 * alone):
        result = run(step, work_s, ranks=4, machine=box, transport=transport)
        assert result.trace.timeline.makespan == pytest.approx(max(work_s, alone), rel=1e-12)


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    two = Machine("two", n_nodes=2, gpus_per_node=2, in_node=Link(1.0, 1e9), between_nodes=Link(10.0, 1e9))
    assert two.collective_s("all_gather", 0, (0, 1)) == 1.0
    assert two.collective_s("all_gather", 0, (1, 2)) == 10.0
    assert two.collective_s("all_reduce", 0, (0, 1, 2, 3)) == 60.0
    assert two.collective_s("barrier", 0, (3,)) == 0.0


def test_named_machines() -> None:
    for name, (flops_per_s, memory_bytes, *_) in GPUS.items():
        box = machine(f"2x4x{name}")
        assert (box.n_gpus, box.flops_per_s, box.memory_bytes) == (8, flops_per_s, memory_bytes)
        assert box.link(0, 3) == box.in_node and box.link(3, 4) == box.between_nodes
    for wrong in ("H100", "8xH1000", "0xH100", "8 x H100", "8xh100"):
        with pytest.raises(RefusedError, match="known GPUs: V100, A100"):
            machine(wrong)
    with pytest.raises(RefusedError, match="a GPU for every rank"):
        run(lambda: None, ranks=3, machine="2xH100")


def test_buckets_of_data_parallel_overlap_with_backward() -> None:
    slow = Machine("slow", flops_per_s=1e9, in_node=Link(0.0, 1e8))

    def step(bucket_mb: float) -> None:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        for _ in range(2):  # torch cuts its buckets after the first step
            parallel(torch.randn(64, 256)).sum().backward()

    def seconds(bucket_mb: float) -> float:
        return run(step, bucket_mb, ranks=2, machine=slow).trace.timeline.makespan

    one_bucket = 4 * 8 * 256 * 256 / 1e8  # all gradients at the end; of four buckets, three hide behind work
    assert seconds(100.0) - seconds(0.3) == pytest.approx(3 / 4 * one_bucket, rel=1e-4)


def test_compute_needs_a_virtual_clock_and_no_ranks_at_all() -> None:
    compute(1.0)
    with pytest.raises(RefusedError, match=r"compute\(1\.0\) moves a virtual clock.*machine="):
        run(lambda: compute(1.0), ranks=2)
    with pytest.raises(RefusedError, match="0 seconds or more"):
        run(lambda: compute(-1.0), ranks=2, machine=Machine("free"))


@TRANSPORTS
def test_flops_and_memory_are_counted(transport: str) -> None:
    def step() -> None:
        with region("forward"):
            a, b = torch.randn(64, 32, requires_grad=True), torch.randn(32, 16)
            y = a @ b
        with region("backward"):
            y.sum().backward()

    trace = run(step, ranks=2, record=("flops", "memory"), transport=transport).trace
    product = 2 * 64 * 32 * 16
    for rank in range(2):
        assert trace.flops_of(rank) == 2 * product  # b needs no gradient
        assert trace.flops_of(rank, "forward") == product
        held = 4 * (64 * 32 + 32 * 16 + 64 * 16)
        assert trace.peak_bytes(rank) == held + 4 * 64 * 32 + 4 * 2  # the gradient of a, the sum and its own
        assert trace.live_bytes[rank][-1][1] == 0


def test_memory_counts_views_once_and_arguments_from_the_start() -> None:
    whole = torch.zeros(1000)

    def step(given: torch.Tensor) -> int:
        views = [given[:500], given.view(10, 100), given[::2]]
        return len(views)

    trace = run(step, whole, ranks=2, record="memory").trace
    assert [trace.peak_bytes(rank) for rank in range(2)] == [4000, 4000]


def test_what_was_not_recorded_is_refused() -> None:
    trace = run(lambda: None, ranks=1).trace
    with pytest.raises(ValueError, match=r'record=\("flops",\)'):
        trace.flops_of(0)
    with pytest.raises(ValueError, match=r'record=\("memory",\)'):
        trace.peak_bytes(0)
    with pytest.raises(RefusedError, match="what can be recorded is 'flops' and 'memory'"):
        run(lambda: None, ranks=1, record="time")


def test_the_trace_opens_in_perfetto(tmp_path: Path) -> None:
    result = run(gpipe, 2, 1.0, 1.0, ranks=2, machine=Machine("free"))
    result.trace.save_chrome(tmp_path / "trace.json")
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    by_phase = {phase: [e for e in events if e["ph"] == phase] for phase in "MXsf"}
    assert len(by_phase["X"]) == len(result.trace.timeline.spans)
    assert len(by_phase["s"]) == len(by_phase["f"]) == len(result.trace.timeline.messages) == 4
    assert max(e["ts"] + e["dur"] for e in by_phase["X"]) == pytest.approx(6e6)
