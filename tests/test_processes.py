"""Process ranks do what thread ranks do, say it in the same words, and end when they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import Mesh, region, run
from lessons_lib.errors import DeadlockError, MismatchError, RankError, RefusedError, RunTimeoutError
from lessons_lib.spmd import processes

ROOT = Path(__file__).parents[1]
Step = Callable[[], Any]


def me() -> int:
    return dist.get_rank()


def on_processes(step: Step, ranks: int = 3, **options: Any) -> Any:
    return run(step, ranks=ranks, transport="processes", **options)


def every_sort_of_communication() -> list[Any]:
    mesh = Mesh(row=2, col=2)
    x = torch.arange(8.0, dtype=torch.float64).reshape(4, 2) + 10 * me()
    with region("sums"):
        results = [mesh["row"].all_reduce(x), mesh["col"].reduce_scatter(x.T, 1)]
    results += [mesh["col"].all_gather(x[:, 1], 0), mesh["row"].broadcast(x[::2], 1)]
    results += [mesh["row"].all_to_all(x, 0, 1), mesh["col"].shift(x, 1)]
    dist.barrier()
    if me() == 0:
        dist.send(x, 3)
    elif me() == 3:
        dist.recv(x, 0)
    return [result.tolist() for result in [*results, x]]


def test_values_and_records_are_those_of_thread_ranks() -> None:
    ours, theirs = run(every_sort_of_communication, ranks=4), on_processes(every_sort_of_communication, 4)
    assert ours.values == theirs.values and theirs.transport == "processes"

    def records(result: Any, rank: int) -> list[Any]:
        return [
            (
                e.kind,
                e.group,
                e.members,
                e.sequence,
                e.shape,
                e.dtype,
                e.bytes_sent,
                e.peer,
                e.region,
                e.where,
            )
            for e in result.trace.events
            if e.rank == rank
        ]

    for rank in range(4):
        assert records(ours, rank) == records(theirs, rank)


def test_ranks_share_nothing_and_start_alike() -> None:
    seen: list[int] = []

    def step() -> Any:
        seen.append(me())
        return seen, os.getpid(), torch.rand(1).item(), os.environ["RANK"], os.environ["WORLD_SIZE"]

    values = on_processes(step).values
    assert [value[0] for value in values] == [[0], [1], [2]] and seen == []
    assert len({value[1] for value in values} | {os.getpid()}) == 4
    assert {value[2] for value in values} == {run(lambda: torch.rand(1).item(), ranks=1).values[0]}
    assert [value[3:] for value in values] == [(str(rank), "3") for rank in range(3)]


def skipped() -> None:
    if me() != 2:
        dist.all_reduce(torch.ones(3))


def all_send_first() -> None:
    x = torch.ones(3)
    dist.send(x, (me() + 1) % 3)
    dist.recv(x, (me() - 1) % 3)


def other_shape() -> None:
    dist.all_reduce(torch.ones(3 + (me() == 1)))


def other_operation() -> None:
    dist.all_reduce(torch.ones(3)) if me() else dist.reduce(torch.ones(3), 0)


def other_size() -> None:
    dist.send(torch.ones(3), 1) if me() == 0 else dist.recv(torch.ones(4), 0) if me() == 1 else None


@pytest.mark.parametrize(
    "step, kind",
    [
        (skipped, DeadlockError),
        (all_send_first, DeadlockError),
        (other_shape, MismatchError),
        (other_operation, MismatchError),
        (other_size, MismatchError),
    ],
)
def test_what_cannot_go_on_is_told_in_the_words_of_thread_ranks(step: Step, kind: type[Exception]) -> None:
    with pytest.raises(kind) as ours:
        run(step, ranks=3)
    on_processes(me)  # the zygote is up: what follows is timed
    began = time.perf_counter()
    with pytest.raises(kind) as theirs:
        on_processes(step)
    assert time.perf_counter() - began < 4  # `make bench` measures it

    def sentences(error: Exception) -> list[str]:
        """The report without the list of ranks: a process may be stopped before it has posted its side."""
        lines = str(error).splitlines()
        return [lines[0], *(line for line in lines if line.startswith(("Why: ", "Try: ")))]

    assert sentences(theirs.value) == sentences(ours.value)
    assert "tests/test_processes.py, line " in str(theirs.value)


def raises() -> None:
    if me() == 1:
        raise KeyError("lr")
    dist.barrier()


def dies() -> None:
    if me() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exits() -> None:
    if me() == 1:
        os._exit(5)
    dist.barrier()


def leaves() -> None:
    if me() == 1:
        sys.exit(3)
    dist.barrier()


@pytest.mark.parametrize(
    "step, sentence",
    [
        (raises, "rank 1 raised KeyError: 'lr'\n      tests/test_processes.py, line "),
        (dies, "rank 1 was killed by signal 9 (SIGKILL)"),
        (exits, "rank 1 ended its process with exit code 5"),
        (leaves, "rank 1 called sys.exit(3)"),
    ],
)
def test_the_rank_at_fault_is_named_first(step: Step, sentence: str) -> None:
    with pytest.raises(RankError) as caught:
        on_processes(step)
    assert str(caught.value).startswith(sentence), str(caught.value)
    assert caught.value.rank == 1 and caught.value.run.ranks == 3
    assert on_processes(me).values == [0, 1, 2]


def test_a_run_that_takes_too_long_says_where_its_ranks_are() -> None:
    with pytest.raises(RunTimeoutError, match=r"ranks 0 to 2 were running\n.*time\.sleep\(60\)"):
        on_processes(lambda: time.sleep(60), timeout_s=0.5)


def test_prints_arrive_in_whole_labelled_lines(capfd: pytest.CaptureFixture[str]) -> None:
    on_processes(lambda: print(f"one of {me()}\ntwo of {me()}"))
    lines = capfd.readouterr().out.splitlines()
    for rank in range(3):
        assert [line for line in lines if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] one of {rank}",
            f"[rank {rank}] two of {rank}",
        ]


def test_data_parallel_gives_the_serial_gradient() -> None:
    def step() -> torch.Tensor:
        model = nn.Linear(3, 2, dtype=torch.float64)
        nn.init.ones_(model.weight)
        x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) * (me() + 1)
        DistributedDataParallel(model)(x).square().sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    ours, theirs = run(step, ranks=2).values, on_processes(step, 2).values
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)


def test_nothing_stays_behind() -> None:
    on_processes(me)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        on_processes(me)
    deadline = time.perf_counter() + 5
    while {c.pid for c in psutil.Process().children(recursive=True)} - before:
        assert time.perf_counter() < deadline, "rank processes are left"
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= files + 1


def test_a_killed_kernel_takes_its_ranks_with_it() -> None:
    program = (
        "import os, time, torch.distributed as dist\n"
        "from lessons_lib import run\n"
        "def step():\n"
        "    print('pid', os.getpid(), flush=True)\n"
        "    dist.barrier()\n"
        "    time.sleep(60)\n"
        "run(step, ranks=2, transport='processes')\n"
    )
    kernel = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert kernel.stdout is not None
    pids = [int(kernel.stdout.readline().split()[-1]) for _ in range(2)]
    children = [child.pid for child in psutil.Process(kernel.pid).children(recursive=True)]
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    deadline = time.perf_counter() + 5
    while any(psutil.pid_exists(pid) for pid in {*pids, *children}):
        assert time.perf_counter() < deadline, "rank processes have outlived their kernel"
        time.sleep(0.05)


def test_a_script_on_standard_input_without_a_main_guard_runs_once() -> None:
    program = (
        "import torch.distributed as dist\n"
        "from lessons_lib import run\n"
        "print('started', run(lambda: dist.get_rank(), ranks=2, transport='processes').values)\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == "started [0, 1]\n", done.stderr


def test_too_many_ranks_are_refused_with_advice() -> None:
    with pytest.raises(RefusedError, match=r"this machine carries .* processes; thread ranks"):
        on_processes(me, ranks=100_000)
    assert processes.backend_for(2) == ("nccl" if torch.cuda.device_count() >= 2 else "gloo")


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert processes.threads_per_rank(10_000) == 1
    assert processes.threads_per_rank(1) == processes.available_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert processes.threads_per_rank(8) == 3
