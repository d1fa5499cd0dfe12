"""What a launch costs, as ratios against what people would use instead, measured in one run.

    make bench                     everything that takes seconds
    python tests/bench.py --all    also 64 processes started by spawn, which takes minutes

Absolute times depend on the machine and on what else it does; the ratio and the spread are the
result. "goal" is what this project asks of itself on 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from lessons_lib import Mesh, run
from lessons_lib.errors import DeadlockError
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.rank_group import RankGroup
from lessons_lib.tensor_parallel import SCHEMES, TensorParallelLinear
from lessons_lib.timeline import Where


def work() -> float:
    """What a first cell does on every rank."""
    x = torch.full((8,), float(dist.get_rank()))
    dist.all_reduce(x)
    return x.sum().item()


def _process(rank: int, n_ranks: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=n_ranks)
    work()
    dist.destroy_process_group()


def start_processes(method: str, n_ranks: int) -> None:
    """The same work on processes, as the documentation of torch.multiprocessing shows it."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _process, args=(n_ranks, f"{folder}/rendezvous"), nprocs=n_ranks, start_method=method
        )


def run_threads(n_ranks: int) -> None:
    assert run(lambda: work(), ranks=n_ranks).values == [8 * sum(range(n_ranks))] * n_ranks


def run_mesh(n_ranks: int) -> None:
    rows = {8: 2, 64: 8}[n_ranks]
    run(lambda: Mesh(row=rows, col=n_ranks // rows)["col"].all_reduce(torch.ones(8)), ranks=n_ranks)


def run_processes(n_ranks: int) -> None:
    result = run(lambda: work(), ranks=n_ranks, transport="processes")
    assert result.values == [8 * sum(range(n_ranks))] * n_ranks


def deadlock(transport: str) -> None:
    def skipped() -> None:
        if dist.get_rank() != 2:
            dist.barrier()

    try:
        run(skipped, ranks=8, transport=transport)
    except DeadlockError:
        return
    raise AssertionError("no deadlock was reported")


def all_reduces(n_bytes: int, repeats: int) -> float:
    """Median seconds of an all-reduce, on rank 0."""
    x = torch.ones(n_bytes // 4)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _plain_gloo(rank: int, n_ranks: int, rendezvous: str, n_bytes: int, repeats: int, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=n_ranks)
    seconds = all_reduces(n_bytes, repeats)
    if rank == 0:
        with open(results, "w") as file:
            file.write(repr(seconds))
    dist.destroy_process_group()


def plain_gloo(n_ranks: int, n_bytes: int, repeats: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (n_ranks, f"{folder}/rendezvous", n_bytes, repeats, f"{folder}/seconds")
        multiprocessing.start_processes(_plain_gloo, args=arguments, nprocs=n_ranks, start_method="fork")
        with open(f"{folder}/seconds") as file:
            return float(file.read())


NOWHERE = Where("", 0, "")


def not_written_down(
    group: RankGroup, kind: str, sequence: int, *_: Any, root: Any = None, **__: Any
) -> Operation:
    """In place of ``RankGroup._operation``: no shapes, no bytes, no line, no record."""
    return Operation(
        group.owner.number, kind, "", group.members, sequence, (), (), 0, 0, 0, 0.0, NOWHERE, "", root=root
    )


def mlp_step(D: int, record: tuple[str, ...] = ()) -> float:
    """Seconds of forward and backward of a column and a row layer on two thread ranks, without the launch."""

    def steps(n_steps: int) -> None:
        mesh = Mesh(tp=2)
        up = TensorParallelLinear.from_linear(torch.nn.Linear(D, 4 * D), SCHEMES["column"], mesh)
        down = TensorParallelLinear.from_linear(torch.nn.Linear(4 * D, D), SCHEMES["row"], mesh)
        x = torch.randn(1024, D)
        for _ in range(n_steps):
            down(torch.nn.functional.gelu(up(x))).square().mean().backward()

    return (run(steps, 20, ranks=2, record=record).seconds - run(steps, 0, ranks=2).seconds) / 20


def untraced_mlp_step(D: int) -> float:
    with mock.patch.object(RankGroup, "_operation", not_written_down):
        return mlp_step(D)


def import_in_new_process(statement: str) -> None:
    subprocess.run([sys.executable, "-c", statement], check=True)


def seconds(action: Callable[[], object], repeats: int, warm_up: int = 1) -> list[float]:
    for _ in range(warm_up):
        action()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return times


def text(times: list[float]) -> str:
    low, middle, high = (1000 * time for time in (min(times), statistics.median(times), max(times)))
    return f"{middle:9.1f} ms ({low:.1f} to {high:.1f}, n={len(times)})"


def report(what: str, times: list[float], goal_ms: float | None = None) -> None:
    reached = ""
    if goal_ms is not None:
        reached = (
            f"   goal {goal_ms:g} ms: {'reached' if statistics.median(times) * 1000 <= goal_ms else 'MISSED'}"
        )
    print(f"{what:44}{text(times):42}{reached}", flush=True)


def ratio(what: str, times: list[float], ours: list[float], goal: float | None = None) -> None:
    factor = statistics.median(times) / statistics.median(ours)
    reached = "" if goal is None else f"   goal {goal:.3g} times: {'reached' if factor >= goal else 'MISSED'}"
    number = f"{factor:,.0f}" if factor >= 10 else f"{factor:.2f}"
    print(f"  {what:42}{text(times):42}   {number} times ours{reached}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="also start 64 processes by spawn")
    options = parser.parse_args()

    for n_ranks, goal in ((2, None), (8, 10), (64, 60)):
        ours = seconds(lambda n=n_ranks: run_threads(n), repeats=20, warm_up=3)
        report(f"launch {n_ranks} thread ranks", ours, goal)
        ratio("fork with gloo", seconds(lambda n=n_ranks: start_processes("fork", n), 3), ours)
        if n_ranks < 64 or options.all:
            spawned = seconds(lambda n=n_ranks: start_processes("spawn", n), repeats=3, warm_up=0)
            ratio("torch.multiprocessing.spawn with gloo", spawned, ours, 600 if n_ranks == 8 else None)
            if n_ranks == 8:
                spawned_8 = spawned
    for n_ranks, goal in ((8, 20), (64, 200)):
        report(
            f"launch {n_ranks} thread ranks and a Mesh", seconds(lambda n=n_ranks: run_mesh(n), 10, 2), goal
        )
    processes = seconds(lambda: run_processes(8), repeats=10, warm_up=2)
    report("launch 8 process ranks", processes)
    ratio("fork with gloo", seconds(lambda: start_processes("fork", 8), 5), processes, 1 / 1.5)
    ratio("torch.multiprocessing.spawn with gloo", spawned_8, processes, 30)
    report("deadlock of 8 thread ranks, launch to report", seconds(lambda: deadlock("threads"), 10, 2), 300)
    report("deadlock of 8 process ranks", seconds(lambda: deadlock("processes"), 5, 1), 1500)
    for n_bytes, repeats in ((4_096, 100), (4_194_304, 20)):
        for transport in ("threads", "processes"):
            values = [
                run(all_reduces, n_bytes, repeats, ranks=4, transport=transport).values[0] for _ in range(3)
            ]
            report(f"all_reduce of {n_bytes:,} bytes, 4 {transport}", values)
        ratio("plain gloo on 4 processes", [plain_gloo(4, n_bytes, repeats) for _ in range(3)], values)
    for D, record, goal in ((128, (), 1.1), (256, ("flops", "memory"), 1.5)):
        pairs = [(mlp_step(D, record), untraced_mlp_step(D)) for _ in range(9)]
        traced, plain = map(list, zip(*pairs, strict=True))
        what = " and ".join(record) or "communication"
        report(f"a step of an MLP at d={D}, recording {what}", traced)
        factor = statistics.median(traced) / statistics.median(plain)
        reached = "reached" if factor <= goal else "MISSED"
        print(f"  {'the same, not recorded':42}{text(plain):42}  {factor:.2f} times   goal {goal}: {reached}")
    empty = seconds(lambda: import_in_new_process("pass"), 5)
    report("a Python that does nothing", empty)
    report(
        "a Python that imports lessons_lib",
        seconds(lambda: import_in_new_process("import lessons_lib"), 5),
        300,
    )
    report("a Python that imports torch", seconds(lambda: import_in_new_process("import torch"), 3))


if __name__ == "__main__":
    main()
