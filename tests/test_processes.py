"""Process ranks: what thread ranks do, in processes that can crash and be killed and leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import math
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jupyter_client.manager import start_new_kernel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import Mesh, region
from lessons_lib import run as run_anywhere
from lessons_lib.errors import (
    DeadlockError,
    MismatchError,
    OrderWarning,
    PeerLostError,
    RankError,
    RefusedError,
    RunError,
    RunTimeoutError,
    UnfinishedWarning,
)
from lessons_lib.spmd import by_value, network, output, processes, stuck
from lessons_lib.spmd.board import ENDED, RUNNING, Board, Posted, Poster
from lessons_lib.spmd.clock import WallClock
from lessons_lib.spmd.library import LibraryGroup, LibraryRank
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.process_rank import Account
from lessons_lib.timeline import Where
from tests import test_collectives, test_doctor, test_trace
from tests.cells import executed, failed, printed
from tests.test_collectives import COLLECTIVES, DTYPES, data, same
from tests.test_doctor import DEADLOCKS, MISMATCHES, batched, even_odd, with_isend

ROOT = Path(__file__).parents[1]
SOON_S = 1.5  # from the launch to the report

run = partial(run_anywhere, transport="processes", timeout_s=60)
Step = Callable[[], Any]


@pytest.fixture(scope="module", autouse=True)
def _steps_travel_by_value() -> Iterator[None]:
    """As those of a notebook do: a rank that imported a test file would import pytest first."""
    modules = [sys.modules[__name__], test_collectives, test_doctor, test_trace]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


def all_of(cases: Iterable[str], fast: set[str]) -> list[Any]:
    """Every case; those that are not named as fast belong to the slow tests."""
    assert fast <= set(cases)
    return [pytest.param(case, marks=() if case in fast else pytest.mark.slow) for case in cases]


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def one() -> Tensor:
    return torch.ones(1)


def all_ranks_sum() -> int:
    x = torch.tensor(me() + 1)
    dist.all_reduce(x)
    return int(x)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], within_s: float) -> bool:
    """Whether these processes end in time."""
    until = time.perf_counter() + within_s
    while time.perf_counter() < until:
        if not any(map(lives, pids)):
            return True
        time.sleep(0.02)
    return False


def rank_processes() -> list[int]:
    """Rank processes of this one: the children of its zygote."""
    return [
        child.pid for zygote in processes._zygote for child in psutil.Process(zygote.process.pid).children()
    ]


# ---- values ----


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_values_come_in_rank_order_and_each_rank_is_a_process(ranks: int) -> None:
    def step(offset: int) -> tuple[int, ...]:
        return me() + offset, size(), all_ranks_sum(), os.getpid()

    result = run(step, 10, ranks=ranks)
    total = ranks * (ranks + 1) // 2
    assert [value[:3] for value in result.values] == [(10 + rank, ranks, total) for rank in range(ranks)]
    assert len({os.getpid(), *(value[3] for value in result.values)}) == ranks + 1
    assert result.transport == "processes" and result.trace.clock == "measured" and result.picture().alt
    assert not dist.is_initialized() and gone([value[3] for value in result.values], 2)


def test_what_goes_there_and_comes_back_is_a_copy() -> None:
    numbers, x, model = [1], torch.zeros(2), nn.Linear(2, 2)

    def step(numbers: list[int], again: list[int]) -> tuple[Any, ...]:
        numbers.append(me())
        x.add_(me())
        if me() == 2:
            sys.exit(0)
        return numbers, again is numbers, x, model.weight, (x * model.weight).sum()

    first, second, third = run(step, numbers, numbers, ranks=3).values
    assert third is None and numbers == [1] and x.tolist() == [0, 0]
    for rank, value in enumerate((first, second)):
        assert value[0] == [1, rank] and value[1] and value[2].tolist() == [rank, rank]
        assert torch.equal(value[3], model.weight) and value[4].requires_grad


def test_ranks_start_as_thread_ranks_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Random numbers, default dtype, environment, working directory, threads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_NOTEBOOK", "1")
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OF_THE_NOTEBOOK"

    def step() -> tuple[Any, ...]:
        draws = (torch.rand(2).tolist(), float(np.random.randn()), random.random(), torch.ones(1).dtype)
        return *draws, os.getcwd(), [os.environ[name] for name in names], torch.is_grad_enabled()

    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            values = run(step, ranks=2, seed=5).values
            assert values == run_anywhere(step, ranks=2, seed=5).values
    finally:
        torch.set_default_dtype(torch.float32)
    assert values[1][3:] == (torch.float64, str(tmp_path), ["1", "1", "2", "2", "1"], True)


def test_threads_per_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S25: the cores shared out, as pinning and control groups allow; or what the user has set."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processes, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert processes.available_cores() == 12
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("950000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert processes.available_cores() == 9
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert processes.available_cores() == 9
    (tmp_path / "cpu.max").write_text("600000 100000\n")
    assert processes.available_cores() == 6
    assert [processes.threads_per_rank(n) for n in (1, 2, 4, 8)] == [6, 3, 1, 1]

    def step() -> tuple[int, float]:
        x = torch.ones(300, 300)
        return torch.get_num_threads(), (x @ x).sum().item()  # a team of threads after a fork

    assert run(step, ranks=2).values == [(3, 27e6)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert run(step, ranks=2).values == [(2, 27e6)] * 2
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert processes.available_cores() == 1


def test_what_cannot_travel_back_is_an_error_of_the_rank() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            return int, ("not a number",)

    def step(which: int) -> Any:
        return (threading.Lock() if which else Stubborn()) if me() == 1 else me()

    with pytest.raises(
        TypeError, match=r"rank 1 .*what the rank returned cannot travel back.*lock"
    ) as caught:
        run(step, 1, ranks=2)
    assert isinstance(caught.value, RankError) and caught.value.rank == 1
    with pytest.raises(TypeError, match=r"rank 1 .*cannot be made again in the notebook.*not a number"):
        run(step, 0, ranks=2)


def test_a_rank_starts_no_ranks() -> None:
    def step() -> None:
        from lessons_lib import run
        from lessons_lib.spmd.current import current

        assert current().number == me()
        thread = threading.Thread(target=lambda: seen.append(current().number))
        seen: list[int] = []
        thread.start()
        thread.join()
        assert seen == [me()]
        if me() == 1:
            run(len, "abc", ranks=2)

    with pytest.raises(RefusedError, match=r"run inside rank 1 of a run: ranks cannot start ranks"):
        run(step, ranks=2)


@pytest.mark.parametrize("n_cores", [2, 3])
def test_too_many_ranks_are_refused_with_advice(n_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "available_cores", lambda: n_cores)
    most = 16 * n_cores
    with pytest.raises(
        RefusedError, match=rf"carries {most} processes; thread ranks.*go further. Try ranks=8"
    ):
        run(me, ranks=most + 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_many_ranks_on_few_cores(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """S80: as many as two cores carry."""
    monkeypatch.setattr(processes, "available_cores", lambda: 2)
    assert run(all_ranks_sum, ranks=ranks).values == [ranks * (ranks + 1) // 2] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_more_ranks_take_their_share_of_the_cores_and_no_more(transport: str) -> None:
    """S25: eight ranks do eight times the work, in not much more than eight times the time of one core."""

    def step() -> float:
        x, norm = torch.ones(500, 500), nn.LayerNorm(500)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(200):
            norm(x)
        return time.perf_counter() - began

    def seconds(ranks: int) -> float:
        return min(max(run_anywhere(step, ranks=ranks, transport=transport).values) for _ in range(3))

    one = seconds(1)
    for ranks in (2, 4, 8):
        assert seconds(ranks) < 3 * ranks * one


def test_ranks_are_no_copies_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """S03: a GPU that the kernel has touched cannot be used in its forks; ranks are not those."""
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(sys, "mark_of_the_kernel", True, raising=False)
    assert torch.cuda.is_initialized()

    def step() -> list[bool]:
        touched = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
        return [touched, hasattr(sys, "mark_of_the_kernel")]

    assert run(step, ranks=2).values == [[False, False]] * 2
    assert run_anywhere(all_ranks_sum, ranks=2).values == [3, 3]


@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_the_function_itself_is_asked_for(transport: str) -> None:
    """S46."""
    with pytest.raises(RefusedError, match=r"got None, which is what it returned.*run\(step, ranks=4\)"):
        run_anywhere(print("trained"), ranks=2, transport=transport)  # type: ignore[func-returns-value, arg-type]


@pytest.mark.parametrize("n_gpus, backend", [(0, "gloo"), (3, "gloo"), (4, "nccl"), (8, "nccl")])
def test_nccl_only_with_a_gpu_for_every_rank(
    n_gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    assert processes.backend_for(4) == backend


def test_each_tensor_goes_to_the_library_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nccl too, what lies on CPUs is gloo's, also in a torchrun launch; and so is a barrier."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(network, "_nccl_group", lambda *_: "nccl's group")
    native = network.connected("nccl", dist.HashStore(), "world", 0, 1)
    assert native["cpu"].name() == "gloo" and native["cuda"] == "nccl's group"
    assert network.connected("gloo", dist.HashStore(), "world", 0, 1).keys() == {"cpu"}
    owner = LibraryRank(0, 1, None, WallClock())
    group = LibraryGroup(owner, "0", "world", (0,), native | {"meta": "another's"})
    assert group.library_of([torch.ones(1)]) is group.library_of([]) is native["cpu"]
    assert group.library_of([torch.ones(1, device="meta")]) == "another's"


# ---- deadlocks and mismatches: the words of thread ranks ----


def report(step: Step, ranks: int, kind: type[RunError], within_s: float = SOON_S) -> str:
    """The report of a run that must fail, checked for what every report has."""
    took = []
    for _ in range(3):  # the machine may be busy with something else
        began = time.perf_counter()
        with pytest.raises(kind) as caught:
            run(step, ranks=ranks)
        took.append(time.perf_counter() - began)
        if took[-1] < within_s:
            break
    assert min(took) < within_s
    error, text = caught.value, str(caught.value)
    assert error.run.ranks == ranks and error.run.error is error and len(error.run.values) == ranks
    assert error.run.picture().alt and "lessons_lib/" not in text and "site-packages" not in text
    assert re.search(r"tests/test_\w+\.py, line \d+, in ", text)
    return text


@pytest.mark.parametrize(
    "name",
    all_of(
        DEADLOCKS,
        {"an early return", "both send first", "crossed collectives on a mesh", "different tags"},
    ),
)
def test_a_deadlock_is_proved_and_explained(name: str) -> None:
    step, ranks, sentences = DEADLOCKS[name]
    text = report(step, ranks, DeadlockError)
    for sentence in sentences:
        assert sentence in text, text


@pytest.mark.parametrize(
    "name",
    all_of(
        MISMATCHES,
        {
            "operation, before all are there",
            "shape",
            "what an all-to-all sends and expects",
            "size of a message",
        },
    ),
)
def test_a_mismatch_is_explained(name: str) -> None:
    step, ranks, sentences = MISMATCHES[name]
    text = report(step, ranks, MismatchError)
    if name.startswith("what an all-to-all"):  # whoever comes last finds what does not fit it
        sentences = ["into a buffer of float32[", sentences[-1]]
    for sentence in sentences:
        assert sentence in text, text


@pytest.mark.slow
def test_64_megabytes_both_ways_are_a_deadlock_and_flow_if_one_receives_first() -> None:
    """S49; with one element, which slips through elsewhere, see test_doctor.py."""

    def step(first: bool) -> float:
        x, y = torch.full((16_000_000,), me() + 1.0), torch.empty(16_000_000)
        for sends in (True, False) if first or me() == 0 else (False, True):
            dist.send(x, 1 - me()) if sends else dist.recv(y, 1 - me())
        return y[-1].item()

    text = report(partial(step, True), 2, DeadlockError, within_s=4)
    with pytest.raises(DeadlockError) as caught:
        run_anywhere(step, True, ranks=2)
    for each in (text, str(caught.value)):
        assert (
            "rank 0 waits for rank 1 in send(float32[16000000]) to rank 1" in each and "0 -> 1 -> 0" in each
        )
    assert run(step, False, ranks=2).values == run_anywhere(step, False, ranks=2).values == [2, 1]


@pytest.mark.parametrize("step", [even_odd, with_isend, batched])
def test_rings_that_do_not_block_themselves_pass(step: Step) -> None:
    assert run(step, ranks=4).values == [3, 0, 1, 2]


def skipped_broadcast() -> None:
    dist.broadcast(one(), 0) if me() != 2 else None


def skipped_new_group() -> None:
    if me() == 0:
        dist.new_group([0, 1])


def many_before() -> None:
    """More operations under way than anybody looks at, and as many tags."""
    works: list[Any] = []
    for number in range(100 if me() == 0 else 0):
        works += [dist.all_reduce(one(), async_op=True), dist.isend(one(), 1, tag=number)]
    for work in works:
        work.wait()


def asks_for_ever() -> None:
    if me() == 0:
        work = dist.irecv(one(), 1)
        while not work.is_completed():
            pass


def futures_of_nobody() -> None:
    if me() == 0:
        work = dist.all_reduce(one(), async_op=True)
        assert work is not None
        work.get_future().wait()


def unequal_backward() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    if me() == 0:
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    "step, ranks, sentence",
    [
        (skipped_broadcast, 3, "ranks 0 and 1 wait for rank 2 in broadcast(float32[1], root=0), #1 on world"),
        (skipped_new_group, 2, "rank 0 waits for rank 1 in new_group(), #1 on the group of ranks 0 and 1"),
        (many_before, 2, "rank 0 waits for rank 1 in all_reduce(float32[1]), #1 on world"),
        (asks_for_ever, 2, "rank 0 waits for rank 1 in recv(float32[1]) from rank 1"),
        (futures_of_nobody, 2, "rank 0 waits for rank 1 in all_reduce"),
        (unequal_backward, 2, "in unequal_backward: model(torch.ones(1, 2)).sum().backward()"),
    ],
)
def test_deadlocks_that_a_library_would_hide(step: Step, ranks: int, sentence: str) -> None:
    text = report(step, ranks, DeadlockError, within_s=2)
    assert sentence in text and "rank" in text.split("Why: ")[1], text


def test_who_waits_is_data_and_what_others_returned_is_kept() -> None:
    def step() -> int:
        if me() < 2:
            dist.recv(one(), 1 - me())
        else:
            dist.send(one(), 3) if me() == 2 else dist.recv(one(), 2)
        return me()

    with pytest.raises(DeadlockError, match="ranks 0 and 1 of 4 wait") as caught:
        run(step, ranks=4)
    result = caught.value.run
    assert result.values == [None, None, 2, 3] and [each.rank for each in caught.value.waiting] == [0, 1]
    assert [result.trace.bytes_sent(rank) for rank in range(4)] == [0, 0, 4, 0]  # no byte of what never was
    assert [math.isinf(e.waited_s) for e in result.trace.events if e.rank < 2] == [True, True]
    assert "for ever" in " ".join(span.label for span in result.trace.timeline.spans)


def test_messages_from_anyone_are_no_deadlock_and_keep_their_order() -> None:
    """Also while other ranks still wait in a send that is received later."""

    def step() -> list[tuple[int, float]]:
        if me():
            dist.send(torch.tensor([1.0]), 0)
            dist.send(torch.tensor([2.0]), 0)
            dist.barrier()
            return []
        got = []
        for _ in range(4):
            x = one()
            source = dist.recv(x)
            got.append((source, x.item()))
            time.sleep(0.15)  # the launcher looks at the board meanwhile
        dist.barrier()
        return got

    got = run(step, ranks=3).values[0]
    assert [n for source, n in got if source == 1] == [n for source, n in got if source == 2] == [1, 2]


def test_what_is_left_unfinished_is_told() -> None:
    def left() -> None:
        dist.all_reduce(one(), async_op=True)

    def never_joined() -> None:
        if me() == 0:
            dist.all_reduce(one(), async_op=True)

    def never_received() -> None:
        if me() == 0:
            dist.isend(one(), 1)

    for step, sentence in (
        (left, "rank 1 called all_reduce.*never waited for it: its tensor still holds the old numbers"),
        (never_joined, "rank 0 called all_reduce.*and the other side never came"),
        (never_received, r"rank 0 called send\(float32\[1\]\) to rank 1 .*and the other side never came"),
    ):
        with pytest.warns(UnfinishedWarning, match=sentence):
            run(step, ranks=2)


def test_a_rank_that_communicates_while_it_cleans_up_keeps_its_own_error() -> None:
    def step(disagree: bool) -> None:
        try:
            if me() == 1:
                raise ValueError("the reason")
            if disagree:
                all_ranks_sum()
        finally:
            if me() == 1:
                dist.barrier()

    for disagree, kind in ((False, "Deadlock"), (True, "Mismatch")):
        with pytest.raises(RunError, match=rf"^rank 1 raised ValueError: the reason\n(.|\n)*\n{kind}: "):
            run(step, disagree, ranks=3)


def cleans_up(how: str) -> None:
    stuck.PATIENCE_S = 0.4  # in the process of a rank, too
    raises = me() == 1
    try:
        if raises:
            raise ValueError("the reason")
        dist.barrier()
    finally:
        if raises and how == "blocks":
            threading.Event().wait(6)
        if raises and how == "takes a while":
            time.sleep(0.2)
        while raises and how == "computes":
            pass


@pytest.mark.parametrize("transport", ["threads", "processes"])
@pytest.mark.parametrize("how", ["blocks", "takes a while"])
def test_clean_up_that_blocks_does_not_hold_up_the_run(
    transport: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stuck, "PATIENCE_S", 0.4)
    began = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"^rank 1 raised ValueError: the reason\n(.|\n)*in cleans_up: "
    ) as e:
        run_anywhere(cleans_up, how, ranks=3, transport=transport)
    assert time.perf_counter() - began < 4 and isinstance(e.value, RankError) and e.value.rank == 1
    text = str(e.value)
    assert re.search(r"rank(s 0 and 2 wait for rank| 0 waits for ranks) 1", text), text
    if transport == "threads":
        left = "rank 1 could not be stopped: busy in native code, or catching every exception."
        assert text.endswith(left) == (how == "blocks")


@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_a_timeout_in_clean_up_opens_with_the_exception_in_flight(transport: str) -> None:
    with pytest.raises(RunTimeoutError) as caught:
        run_anywhere(cleans_up, "computes", ranks=2, transport=transport, timeout_s=0.3)
    first, then = str(caught.value).split("\nCleaning up after that, rank 1 came to no end.\n\n")
    assert first.startswith("rank 1 raised ValueError: the reason\n") and "in cleans_up: raise" in first
    assert then.startswith("The run took longer than its timeout_s=0.3 and was stopped.")
    assert re.search(r"rank 1 was running\n +tests/test_processes.py, line \d+, in cleans_up: ", then)


# ---- collectives called in swapped order ----


def swapped() -> None:
    def sum_a() -> None:
        dist.all_reduce(torch.ones(3))

    def sum_b() -> None:
        dist.all_reduce(torch.zeros(3))

    for _ in range(2):
        for call in (sum_b, sum_a) if me() == 1 else (sum_a, sum_b):
            call()


def rotating_root() -> None:
    for step in range(2 * size()):
        if me() == step % size():
            dist.broadcast(torch.ones(3), step % size())
        else:
            dist.broadcast(torch.empty(3), step % size())


def branches() -> None:
    for _ in range(3):
        if me() == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.all_reduce(torch.zeros(3))


def other_shapes() -> None:
    for n in (3, 4):
        dist.all_reduce(torch.ones(n)) if me() else dist.all_reduce(torch.zeros(n))


@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_equal_collectives_in_swapped_order_are_asked_about(transport: str) -> None:
    with pytest.warns(OrderWarning) as caught:
        result = run_anywhere(swapped, ranks=3, transport=transport)
    (question,) = result.questions
    assert question == str(caught[0].message)
    a, b = (e.where.line for e in result.trace.collectives(0)[:2])
    assert question.startswith(
        "Is this order meant? #1 and #2 on world are both all_reduce(float32[3]), called by ranks 0 and 2 "
        f"from line {a} and then from line {b}, but by rank 1 from line {b} and then from line {a}. If these"
    ), question
    assert question.count("dist.all_reduce(") == 2 and result.notes == ()
    for legal in (rotating_root, branches, other_shapes):
        assert run_anywhere(legal, ranks=3, transport=transport).questions == ()


# ---- ranks that fail ----


def fails(how: str) -> None:
    if me() != 1:
        dist.all_reduce(torch.ones(2))
        return
    match how:
        case "raise":
            raise FileNotFoundError(2, "no such corpus", "text.txt")
        case "exit":
            sys.exit(3)
        case "_exit":
            os._exit(5)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segmentation fault":
            ctypes.string_at(0)
        case "thread":
            threading.Thread(target=os._exit, args=(7,)).start()
            dist.all_reduce(torch.ones(2))
            time.sleep(5)


FAILURES = {
    "raise": (FileNotFoundError, r"rank 1 raised FileNotFoundError: \[Errno 2\] no such corpus: 'text.txt'"),
    "exit": (RankError, r"rank 1 called sys.exit\(3\)"),
    "_exit": (ChildProcessError, "rank 1 ended its process with exit code 5"),
    "kill": (ChildProcessError, r"rank 1 was killed by signal 9 \(SIGKILL\)"),
    "segmentation fault": (ChildProcessError, r"rank 1 was killed by signal 11 \(SIGSEGV\)"),
    "thread": (ChildProcessError, "rank 1 ended its process with exit code 7"),
}


@pytest.mark.parametrize("how", all_of(FAILURES, {"raise", "exit", "kill"}))
def test_the_rank_that_failed_is_named_first_and_nobody_is_left(how: str) -> None:
    """S05: the connection errors of the others are their consequence."""
    kind, headline = FAILURES[how]
    began = time.perf_counter()
    with pytest.raises(kind, match=f"^{headline}") as caught:
        run(fails, how, ranks=4)
    assert time.perf_counter() - began < 3 and gone(rank_processes(), 2)
    assert isinstance(caught.value, RankError) and caught.value.rank == 1
    text = str(caught.value)
    assert "broke off" not in text and "Connection" not in text
    if how != "thread":
        assert re.search(r"ranks 0, 2 and 3 wait for rank 1 in all_reduce\(float32\[2\]\), #1 on world", text)
    if how == "raise":
        assert re.search(r"tests/test_processes.py, line \d+, in fails: raise FileNotFoundError", text)
        assert isinstance(caught.value.cause, FileNotFoundError) and caught.value.cause.errno == 2
    assert run(all_ranks_sum, ranks=2).values == [3, 3]


def test_a_rank_that_notices_the_end_of_another_first_is_not_the_cause(tmp_path: Path) -> None:
    """Whatever comes first: its connection error, or the end of the connection of the rank that died."""
    board, pipes = Board(tmp_path, 2), [Pipe() for _ in range(2)]
    ranks = [(pipes[0][0], processes.Process(0, 0)), (pipes[1][0], processes.Process(0, -signal.SIGKILL))]
    lost = PeerLostError("all_reduce(float32[1]), #1 on world broke off: Connection closed by peer")
    pipes[0][1].send_bytes(pickle.dumps(("raised", by_value.dumps(lost), f"rank 0 raised {lost}", Account())))
    death = threading.Timer(0.3, pipes[1][1].close)
    death.start()
    ended = processes.Watch(board, ranks, None).until_the_end()
    death.join()
    assert str(ended.failure).startswith("rank 1 was killed by signal 9 (SIGKILL)")
    for ours, theirs in pipes:
        ours.close(), theirs.close()
    board.close()


def test_of_several_that_raise_the_first_rank_is_told() -> None:
    def step(first: int) -> None:
        if me() < first:
            dist.barrier()
        raise KeyError(f"of rank {me()}")

    for first in (0, 2):
        with pytest.raises(KeyError) as caught:
            run(step, first, ranks=4)
        assert str(caught.value).startswith(f"rank {first} raised KeyError: 'of rank {first}'")
        assert str(caught.value).count("raised") == 1


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Demanding(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ExceptionGroup("many", [ValueError(1)]), r"ExceptionGroup: many \(1 sub-exception\)"),
        (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "UnicodeDecodeError: 'utf-8' codec"),
        (lambda: Demanding(reason="because"), "Demanding: because"),
        (Unprintable, r"Unprintable: \(its text cannot be shown: __str__ raised RuntimeError\)"),
        (lambda: KeyboardInterrupt("mine"), "KeyboardInterrupt: mine"),
        (lambda: ValueError(threading.Lock()), "ValueError: <unlocked _thread.lock"),
    ],
)
def test_every_kind_of_exception_travels(make: Callable[[], BaseException], message: str) -> None:
    def step() -> None:
        raise make()

    with pytest.raises(RankError, match=f"rank 0 raised {message}") as caught:
        run(step, ranks=2)
    if "lock" in message:  # which cannot be copied
        assert isinstance(caught.value.cause, RuntimeError)
    else:
        assert type(caught.value.cause) is type(make())
    if isinstance(caught.value.cause, Demanding):
        assert caught.value.cause.reason == "because" and isinstance(caught.value, Demanding)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_messages_and_output_of_5_megabytes(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    """S78: no pipe fills up."""

    def step(raises: bool) -> None:
        if me() == 1 and raises:
            raise ValueError("x" * 5_000_000)
        if me() == 1:
            sys.stderr.write("y" * 5_000_000)
            sys.exit(1)

    with pytest.raises(ValueError, match=r"message cut, 4,996,000 more characters") as caught:
        run_anywhere(step, True, ranks=2, transport=transport)
    assert len(str(caught.value)) < 6_000
    with pytest.raises(RankError, match=r"rank 1 called sys.exit\(1\)"):
        run_anywhere(step, False, ranks=2, transport=transport)
    assert "(line cut, 4,998,000 more characters)" in capsys.readouterr().err


def test_timeout_names_who_ran_and_who_waited_and_who_does_not_answer() -> None:
    def step() -> None:
        if me() == 1:
            while True:  # never comes to the barrier
                pass
        if me() == 2:
            ctypes.PyDLL(None).sleep(30)  # keeps Python's lock
        dist.barrier()

    began = time.perf_counter()
    with pytest.raises(RunTimeoutError, match=r"longer than its timeout_s=0\.3 and was stopped") as caught:
        run(step, ranks=3, timeout_s=0.3)
    assert time.perf_counter() - began < 3.5 and gone(rank_processes(), 2)
    text = str(caught.value)
    assert re.search(r"rank 1 was running\n +tests/test_\w+.py, line \d+, in step: (while True|pass)", text)
    assert "rank 0 waits for ranks 1 and 2 in barrier(), #1 on world (ranks 1 and 2 still on the way)" in text
    assert text.endswith("\nrank 2 did not answer: busy in native code.")


# ---- output ----


def test_prints_come_at_once_in_whole_labelled_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MOST_PER_RANK", 5_000)
    times: list[tuple[float, str]] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            times.append((time.perf_counter(), text))
            return super().write(text)

    def step() -> float:
        for line in range(3):
            print("line", line, end="")
            dist.barrier()  # others print in the middle of this rank's line
            print(" of", me())
        print("warned", file=sys.stderr)
        if me() == 1:
            for _ in range(100):
                print("y" * 99)
        dist.barrier()
        time.sleep(0.2)
        print("unfinished", end="")
        return time.perf_counter()

    stream, errors = Stream(), Stream()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(errors):
        ended = run(step, ranks=3).values
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\[rank [012]\] ", line) for line in lines)
    for rank in (0, 2):
        mine = [line[9:] for line in lines if line.startswith(f"[rank {rank}]")]
        assert mine == [f"line {n} of {rank}" for n in range(3)] + ["unfinished"]
    assert any("[rank 1] ... " in line and "more characters not shown" in line for line in lines)
    assert sorted(errors.getvalue().splitlines()) == [f"[rank {rank}] warned" for rank in range(3)]
    assert next(at for at, text in times if "line 2 of 0" in text) < min(ended) - 0.1


def test_a_stream_that_breaks_ends_the_run() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    with contextlib.redirect_stdout(Broken()), pytest.raises(BrokenPipeError):
        run(lambda: print("lost"), ranks=2)
    assert gone(rank_processes(), 2)


# ---- what ranks compute ----


def every_collective() -> list[Any]:
    """Every collective with every dtype, and with memory that does not lie in the order of the values."""
    results: list[Any] = []
    for collective, _ in COLLECTIVES.values():
        results += [collective(data(me(), 12, 2, dtype=dtype)) for dtype in (*DTYPES, torch.int16)]
        results += [collective(data(me(), 5, 6).t()), collective(data(me(), 6, 10)[:, ::2])]
    for kind in ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single, stacked"):
        results += [COLLECTIVES[kind][0](data(me(), *shape)) for shape in ((), (0,), (2, 0, 3))]
    return results


def every_reduction() -> list[Any]:
    results: list[Any] = []
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        op = getattr(dist.ReduceOp, name)
        for dtype in DTYPES:
            if name.startswith("B") and (dtype.is_floating_point or dtype.is_complex):
                continue
            if (name == "AVG" and dtype == torch.bool) or (dtype.is_complex and name in ("MIN", "MAX")):
                continue
            x, y, z, w = (data(me(), 6, dtype=dtype) for _ in range(4))
            if not dtype.is_complex or name in ("SUM", "AVG"):  # torch refuses the others
                dist.all_reduce(x, op)
                dist.reduce(y, 1, op)
            part, single = w.new_empty(2), w.new_empty(2)
            dist.reduce_scatter(part, list(z.chunk(3)), op)
            dist.reduce_scatter_single(single, w, op)
            results += [x, y, part, single]
    return results


def views() -> Tensor:
    """A collective writes into a view, and nothing beside it changes."""
    x = torch.full((4, 4), -1.0)
    x[:, 1] = me() + 1
    dist.all_reduce(x[:, 1])
    dist.all_gather(list(x[2:, 2:].unbind(1))[:1] * 1 + [torch.empty(2)] * (size() - 1), x[:2, 1] * 0 + me())
    if me() == 0:
        dist.send(x[:, 1], 1)
    elif me() == 1:
        dist.recv(x[0], 0)
    return x


def uneven_all_to_all() -> list[Any]:
    inputs = [data(me(), me() + 2 * to, seed=to) for to in range(size())]
    outputs = [torch.empty(source + 2 * me()).double() for source in range(size())]
    dist.all_to_all(outputs, inputs)
    flat = torch.cat(outputs)
    sizes = [len(x) for x in outputs], [len(x) for x in inputs]
    dist.all_to_all_single(flat, torch.cat(inputs), *sizes)
    rows = torch.empty(sum(sizes[0]), 2, dtype=torch.int16)
    sent = torch.cat([data(me(), n, 2, dtype=torch.int16) for n in sizes[1]])
    dist.all_to_all_single(rows, sent, *sizes)
    return [*outputs, flat, rows]


def handles() -> list[Any]:
    left, right = (me() - 1) % size(), (me() + 1) % size()
    x, y, z = torch.tensor([me() + 1.0]), torch.zeros(1), torch.zeros(2, 2)
    parts = [torch.zeros(1) for _ in range(size())]
    works: list[Any] = [
        dist.all_reduce(x, async_op=True),
        dist.all_gather(parts, torch.tensor([me() + 1.0]), async_op=True),
        dist.irecv(y, left),
        dist.isend(torch.tensor([me() + 1.0]), right),
    ]
    for work in reversed(works):
        work.wait()
        work.wait()  # twice is once
    operations = [
        dist.P2POp(dist.irecv, z[0], left),
        dist.P2POp(dist.irecv, z[1], right),
        dist.P2POp(dist.isend, torch.tensor([10.0 + me(), 1]), left),
        dist.P2POp(dist.isend, torch.tensor([20.0 + me(), 2]), right),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    w = torch.tensor([me() + 1.0])
    future = dist.all_reduce(w, async_op=True).get_future()  # type: ignore[union-attr]
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    polled = torch.zeros(1)
    receive, send = dist.irecv(polled, left), dist.isend(w, right)
    assert receive is not None and send is not None
    while not receive.is_completed():
        pass
    send.wait()
    return [x, y, z, parts, doubled, polled, [work.is_completed() for work in works]]


def objects() -> list[Any]:
    gathered: list[Any] = [None] * size()
    dist.all_gather_object(gathered, {"rank": me(), "text": "x" * me()})
    shown = [("a", 1), None] if me() == 1 else [None, None]
    dist.broadcast_object_list(shown, src=1)
    return [gathered, shown]


def meshes() -> list[Tensor]:
    mesh = Mesh(row=2, col=2)
    x = torch.arange(4.0) + 10 * me()
    with region("all"):
        row, col = mesh["row"], mesh["col"]
        with region("sums"):
            sums = [row.all_reduce(x), col.reduce_scatter(x, 0)]
        return [*sums, col.all_gather(x, 0), row.all_to_all(x, 0, 0), col.shift(x, 1), row.broadcast(x, 1)]


def groups() -> list[Any]:
    even, odd = dist.new_group([0, 2]), dist.new_group([1])
    again = dist.new_group([0, 2])
    x = torch.tensor([float(me())])
    if me() != 1:
        dist.all_reduce(x, group=even)
        dist.broadcast(x, 2, group=again)
        dist.send(x, 2, group=again) if me() == 0 else dist.recv(x, 0, group=again)
    else:
        dist.all_reduce(x, group=odd)
    return [x]


def from_anyone() -> list[Any]:
    got: list[Any] = []
    if me() == 1:
        for number in range(3):
            dist.send(torch.tensor([float(number)]), 0)
    if me() == 0:
        for source in (1, None, 1):
            x = torch.zeros(1)
            got.append((dist.recv(x, source), x.item()))
    return got


PROGRAMS: dict[str, tuple[Step, int]] = {
    "every collective": (every_collective, 3),
    "every collective, alone": (every_collective, 1),
    "every reduction": (every_reduction, 3),
    "views": (views, 3),
    "uneven all-to-all": (uneven_all_to_all, 3),
    "handles": (handles, 3),
    "objects": (objects, 3),
    "meshes": (meshes, 4),
    "groups": (groups, 3),
    "from anyone": (from_anyone, 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_records_are_those_of_thread_ranks(name: str) -> None:
    """S47, S67: what gloo cannot do is done all the same; and every event says the same."""
    step, ranks = PROGRAMS[name]
    threads, ours = run_anywhere(step, ranks=ranks), run(step, ranks=ranks)
    for rank in range(ranks):
        expected, found = threads.values[rank], ours.values[rank]
        assert len(expected) == len(found)
        for index, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert same(a, b), (rank, index, a, b)
        records = [
            [
                (e.kind, e.group, e.members, e.sequence, e.shape, e.dtype, e.n_elements, e.bytes_sent, e.peer,
                 e.region, e.where)
                for e in each.trace.events
                if e.rank == rank
            ]
            for each in (threads, ours)
        ]  # fmt: skip
        assert records[0] == records[1]
    assert ours.trace.traffic.rows and set(ours.trace.traffic.rows) == set(threads.trace.traffic.rows)
    assert sorted(test_trace.arrows(ours.trace)) == sorted(test_trace.arrows(threads.trace))
    test_trace.check_lanes(ours.trace.timeline, ours.trace)
    assert all(e.issued_s <= e.done_s < math.inf for e in ours.trace.events)
    assert all(message.sent <= message.received for message in ours.trace.timeline.messages)


def test_what_cannot_be_done_names_operation_dtype_and_backend() -> None:
    def step() -> None:
        dist.all_gather([torch.empty(3, dtype=torch.int64)] * 2, torch.ones(2, dtype=torch.int64))

    with pytest.raises(RuntimeError, match=r"gloo cannot do all_gather\(int64\[2\]\), #1 on world: "):
        run(step, ranks=2)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_what_torch_builds_on_ranks() -> None:
    """DistributedDataParallel, FSDP2 and DTensor, once each; the oracle suite has more."""

    def problem() -> tuple[MLP, Tensor]:
        torch.manual_seed(3)
        return MLP().double(), torch.randn(4, 6).double()

    def gradients(model: nn.Module) -> list[Tensor]:
        found = [parameter.grad for parameter in model.parameters()]
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in found if g is not None]

    def step() -> list[list[Tensor]]:
        mesh, mine = init_device_mesh("cpu", (2,)), slice(2 * me(), 2 * me() + 2)
        model, X = problem()
        replica = DistributedDataParallel(model, bucket_cap_mb=0.0001)
        F.mse_loss(replica(X[mine]), X[mine, :5]).backward()
        sharded, _ = problem()
        for layer in (sharded.up, sharded.down, sharded):
            fully_shard(layer, mesh=mesh)
        F.mse_loss(sharded(X[mine]), X[mine, :5]).backward()
        product = distribute_tensor(X, mesh, [Shard(0)]) @ distribute_tensor(X.t(), mesh, [Shard(1)])
        return [gradients(model), gradients(sharded), [product.full_tensor()]]

    model, X = problem()
    F.mse_loss(model(X), X[:, :5]).backward()
    for data_parallel, sharded, (product,) in run(step, ranks=2).values:
        for found in (data_parallel, sharded):
            assert len(found) == 4
            for a, b in zip(found, gradients(model), strict=True):
                assert (a - b).norm() / b.norm() < 1e-12
        assert torch.allclose(product, X @ X.t())


# ---- nothing stays behind ----


@pytest.mark.slow
def test_a_hundred_runs_leak_no_process_no_file_no_folder_no_object_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that fail, whose errors hold what was done."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[weakref.ref[Any]] = []

    def step(number: int) -> Tensor:
        x = torch.ones(32_768)
        dist.all_reduce(x)
        match number % 10:
            case 1:
                raise ValueError("on purpose")
            case 2 if me():
                os.kill(os.getpid(), signal.SIGKILL)
            case 2 | 3:
                dist.recv(x, 1 - me())  # whose sender is dead, or receives too
        return x

    def many(n: int) -> None:
        for number in range(n):
            try:
                result = run(step, number, ranks=2, record="memory")
            except (ValueError, ChildProcessError, DeadlockError) as error:
                seen.extend((weakref.ref(error), weakref.ref(error.run)))  # type: ignore[union-attr]
            else:
                seen.append(weakref.ref(result))

    def left() -> tuple[int, ...]:
        zygote = psutil.Process(processes._zygote[0].process.pid)
        return (
            threading.active_count(),
            psutil.Process().num_fds(),
            zygote.num_fds(),
            len(list(tmp_path.iterdir())),
        )

    def all_told() -> bool:
        until = time.perf_counter() + 2
        while processes._zygote[0]._living and time.perf_counter() < until:
            time.sleep(0.01)
        return not processes._zygote[0]._living and not rank_processes()

    many(5)
    assert all_told()
    before, memory = left(), psutil.Process().memory_info().rss
    many(100)
    assert all_told() and left() == before
    gc.collect()
    assert len(seen) == 138 and not any(reference() for reference in seen)
    assert psutil.Process().memory_info().rss - memory < 20 * 2**20


@pytest.mark.slow
def test_the_process_that_forks_may_die() -> None:
    run(me, ranks=1)
    zygote = processes._zygote[0]
    zygote.process.kill()
    zygote.process.wait()
    assert run(all_ranks_sum, ranks=2).values == [3, 3]
    assert processes._zygote[0] is not zygote


def test_runs_from_several_threads() -> None:
    values: list[Any] = []
    threads = [
        threading.Thread(target=lambda: values.append(run(all_ranks_sum, ranks=2).values)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [[3, 3]] * 3


@pytest.mark.slow
def test_ranks_started_one_by_one() -> None:
    """As on systems that cannot fork: every rank is a new Python, and knows nothing of this one's main.

    S02, S16: functions, lambdas, tensors and classes get there; with a file for a store, and by numbered
    addresses.
    """
    weight, scale = torch.arange(3.0), lambda x: x * weight

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    def step() -> tuple[int, int, list[float], int, set[str]]:
        found = addresses() - {"00000000"}
        return me(), all_ranks_sum(), scale(2.0).tolist(), Point(me()).x, found

    def launch() -> processes.Ended:
        packed = by_value.pack(step, ())
        return processes.launch(
            2, packed, seed=0, machine=None, record=(), timeout_s=60, start=processes.spawned
        )

    assert launch().values == [(rank, 3, [0, 2, 4], rank, {"0100007F"}) for rank in range(2)]


# A program without a main guard, read from standard input. It prints a line when it is to be interrupted.
PROGRAM = """
import os, sys, time, torch, torch.distributed as dist
from lessons_lib import run

class Point:
    def __init__(self, x): self.x = x

def step():
    return Point(dist.get_rank())

print("started", flush=True)
for _ in range(3):
    points = run(step, ranks=2, transport="processes").values
    print([p.x for p in points], all(isinstance(p, Point) for p in points), flush=True)

def loops():
    if dist.get_rank() == 0:
        print("READY", os.getppid(), flush=True)
    if dist.get_rank() == 1:
        dist.barrier()
    while True:
        pass

began = time.perf_counter()
try:
    run(loops, ranks=2, transport="processes")
except KeyboardInterrupt as error:
    after = run(step, ranks=2, transport="processes").values
    print("INTERRUPTED", repr(str(error)), [p.x for p in after], flush=True)
"""


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the process ended without {text!r}")


@pytest.mark.slow
def test_two_programs_at_once_from_standard_input_and_interrupted() -> None:
    """S01, S15, S46: no port to share, no main module to run again, and Ctrl-C is the program's alone."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for program in programs:
            assert program.stdin is not None
            program.stdin.write(PROGRAM)
            program.stdin.close()
        for program in programs:
            assert read_until(program, "started") == "started\n"  # once, not in every rank
            assert [read_until(program, "[") for _ in range(3)] == ["[0, 1] True\n"] * 3
            zygote = int(read_until(program, "READY").split()[-1])
            ranks = psutil.Process(zygote).children()
            assert len(ranks) == 2
            time.sleep(0.1)
            began = time.perf_counter()
            program.send_signal(signal.SIGINT)
            line = read_until(program, "INTERRUPTED")
            assert time.perf_counter() - began < 3 and line.endswith(" [0, 1]\n")
            assert "the ranks were stopped" in line and "rank 0 was running" in line and "in loops" in line
            assert "rank 1 waits for rank 0 in barrier(), #1 on world (rank 0 still on the way)" in line
            assert program.wait(10) == 0 and gone([zygote, *(rank.pid for rank in ranks)], 5)
    finally:
        for program in programs:
            program.kill()
            program.wait()
            assert program.stdout is not None
            program.stdout.close()


KILLED = """
import ctypes, os, torch, torch.distributed as dist
from lessons_lib import run

def step():
    if dist.get_rank() == 0:
        print("PIDS", os.getppid(), os.environ["TMPDIR"], flush=True)
        while True: pass
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(60)   # keeps Python's lock: no thread of this rank can notice anything
    dist.all_reduce(torch.ones(1))

run(step, ranks=4, transport="processes")
"""


@pytest.mark.slow
def test_a_kernel_that_is_killed_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    kernel = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        zygote = int(read_until(kernel, "PIDS").split()[3])
        pids = [zygote, *(child.pid for child in psutil.Process(zygote).children())]
        assert len(pids) == 5 and len(list(tmp_path.glob("ranks-*"))) == 1
        time.sleep(0.2)
        kernel.kill()
        assert gone(pids, 5) and not list(tmp_path.glob("ranks-*"))
    finally:
        kernel.kill()
        kernel.wait()
        assert kernel.stdout is not None
        kernel.stdout.close()


LOOPS = """
import os, torch.distributed as dist
from lessons_lib import run
def step():
    print("PIDS", os.getppid(), os.getpid(), flush=True)
    dist.barrier()
    while True: pass
run(step, ranks=2, transport="processes")
"""


@pytest.mark.slow
def test_a_kernel_that_is_restarted_leaves_no_process_and_its_next_run_works(tmp_path: Path) -> None:
    """S15."""
    manager, client = start_new_kernel(
        kernel_name="python3", cwd=str(ROOT), env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    try:
        client.execute(LOOPS)
        told = ""
        while told.count("PIDS") < 2:
            message = client.get_iopub_msg(timeout=30)
            told += message["content"].get("text", "")
        pids = [int(pid) for line in re.findall(r"PIDS (\d+ \d+)", told) for pid in line.split()]
        assert len(set(pids)) == 3 and all(map(lives, pids))
        manager.shutdown_wait_time = 0.5  # until it is killed
        manager.restart_kernel(now=False)
        assert gone(pids, 5) and not list(tmp_path.glob("ranks-*"))
        client.wait_for_ready(timeout=30)
        following = LOOPS.replace("    while True: pass\n", "").replace("PIDS", "AGAIN")
        assert (
            client.execute_interactive(following, timeout=30, output_hook=lambda _: None)["content"]["status"]
            == "ok"
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


# ---- the network ----


def addresses() -> set[str]:
    """What the sockets of this process are bound or connected to, as the system writes it."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
            sockets |= {match[1]} if match else set()
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in sockets:
                found |= {fields[1].split(":")[0], fields[2].split(":")[0]}
    return found


def test_only_the_loopback_interface_is_used() -> None:
    def step() -> set[str]:
        dist.barrier(group=dist.new_group([0, 1, 2]))
        return addresses()

    for found in run(step, ranks=3).values:
        assert found == {"0100007F"} or found == {"0100007F", "00000000"}, found  # 127.0.0.1; of a listener
    assert not addresses() & {"00000000"}


ISOLATED = """
import ctypes, fcntl, os, pathlib, select, socket, struct, subprocess, tempfile, time
from lessons_lib import run
from lessons_lib.errors import RunError
import torch, torch.distributed as dist

def step():
    x = torch.tensor([dist.get_rank() + 1.])
    dist.all_reduce(x)
    return x.item()

# Whoever looks a name up opens one of these files, which are this program's own.
libc = ctypes.CDLL(None, use_errno=True)
opened = libc.inotify_init()
for name in ("/etc/hosts", "/etc/resolv.conf", "/etc/host.conf"):
    mine = tempfile.NamedTemporaryFile(delete=False).name
    if os.path.exists(name):
        if name == "/etc/hosts":
            pathlib.Path(mine).write_text("127.0.1.1 no-such-host.invalid\\n::1 localhost\\n")
        assert libc.mount(mine.encode(), name.encode(), None, 4096, None) == 0   # MS_BIND
        assert libc.inotify_add_watch(opened, name.encode(), 0x20) > 0           # IN_OPEN

def looked_up():
    found = bool(select.select([opened], [], [], 0)[0])
    if found:
        os.read(opened, 65536)
    return found

for path in pathlib.Path("/proc/sys/net/ipv6/conf").glob("*/disable_ipv6"):
    path.write_text("1")
socket.sethostname("no-such-host.invalid")
began = time.perf_counter()
try:
    run(step, ranks=2, transport="processes")
except RunError as error:
    print("BLOCKED", time.perf_counter() - began < 30, str(error).splitlines(), run(step, ranks=2).values)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:   # ip link set lo up
    fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
looked_up()
print("OPEN", run(step, ranks=2, transport="processes").values, looked_up())
socket.getaddrinfo("no-such-host.invalid", 1)
print("CONTROL", looked_up())
"""


@pytest.mark.slow
def test_no_network_no_host_name_no_loopback() -> None:
    """S07, S81: on a host with nothing but the loopback interface, without IPv6, whose name is 127.0.1.1 and
    whose localhost is ::1: no name is looked up, so none of it matters."""
    isolate = ["unshare", "--net", "--uts", "--mount", "--user", "--map-root-user"]
    if subprocess.run([*isolate, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let us make a network namespace")
    done = subprocess.run(
        [*isolate, sys.executable, "-c", ISOLATED], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    blocked, opened, control = done.stdout.splitlines()
    assert opened == "OPEN [3.0, 3.0] False" and control == "CONTROL True", done.stderr
    assert blocked.startswith("BLOCKED True") and blocked.endswith("[3.0, 3.0]")
    assert "cannot connect through the loopback interface, 127.0.0.1: " in blocked, blocked


@pytest.mark.slow
def test_ranks_that_cannot_connect_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __reduce__(self) -> Any:
            return time.sleep, (20,)

    monkeypatch.setattr(processes, "CONNECT_S", -1.5)
    with pytest.raises(
        RunError, match=r"ranks 0 and 1 did not get ready within 0\.5 s.*127\.0\.0\.1.*Thread ranks"
    ):
        run(lambda x: None, Slow(), ranks=2)
    assert gone(rank_processes(), 2)


def test_a_run_whose_ranks_do_not_start_is_looked_at_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(n_ranks: int) -> processes.Ranks:
        raise RunError("no rank was started within 60 s")

    monkeypatch.setattr(processes, "default_start", lambda: nobody)
    with pytest.raises(RunError, match="no rank was started within 60 s") as caught:
        run(me, ranks=2)
    result = caught.value.run
    assert (result.values, result.endings, result.error) == ([None] * 2, ("stopped",) * 2, caught.value)
    assert result.trace.events == () and "no rank was started" in result.picture().svg


# ---- the board ----


def posted(rank: int, number: int = 1) -> Posted:
    where = Where("a file", number, "step")
    return Posted(
        Operation(rank, "all_reduce", "world", (0, 1), number, ((1,),), ("float32",), 1, 4, 4, 0.0, where, "")
    )


def test_what_is_posted_is_read_whole_and_in_order(tmp_path: Path) -> None:
    launcher = Board(tmp_path, 2)
    boards = [Board(tmp_path, 2, reader=rank) for rank in range(2)]
    posters = [Poster(board, tmp_path, rank) for rank, board in enumerate(boards)]
    count = ("collective", "0")
    for number in range(1, 101):
        key, place = posters[0].issue(count, posted(0, number))
        assert key == (*count, number)
        posters[0].waits(place)
        found = boards[1].log(0).find(key)
        assert found is not None and found.operation.where.line == number
        assert launcher.waits_in(0) == (key, found.operation)
        assert launcher.missing(0, key, found.operation) == (1,)
    posters[1].issue(count, posted(1))
    assert launcher.missing(0, (*count, 1), posted(0).operation) == ()
    assert launcher.missing(0, (*count, 2), posted(0, 2).operation) == (1,)
    assert boards[1].log(0).find((*count, 50)) and boards[1].log(0).latest() == posted(0, 100).operation
    boards[1].log(0).forget((*count, 50))
    assert boards[1].log(0).find((*count, 50)) is None and launcher.log(0).find((*count, 50))
    posters[0].status(RUNNING)
    posters[1].status(ENDED)
    assert launcher.look().status == (RUNNING, ENDED) and not launcher.look().nobody_runs
    assert pickle.loads(pickle.dumps(posted(0))) == posted(0)
    for thing in (launcher, *boards, *posters):
        thing.close()


# ---- in a real kernel ----

CELLS = {
    "setup": "import os, logging, torch, torch.distributed as dist\nfrom lessons_lib import run\n"
    "def go(fn, ranks): return run(fn, ranks=ranks, transport='processes')",
    "class": "class Point:\n    n = 0\n    def __init__(self, x):\n        self.x = x",
    "state": "counter = 0\nweight = torch.arange(3.)\nscale = lambda x: x * weight",
    "def": "def step():\n    global counter\n    counter += 1\n    Point.n += 1\n"
    "    weight.add_(dist.get_rank())\n    return Point(dist.get_rank()), counter, scale(2.).tolist()\n"
    "points = go(step, 2).values\n"
    "print([(p.x, *rest) for p, *rest in points], [type(p) is Point for p, *_ in points])\n"
    "print(counter, weight.tolist(), Point.n)",
    "objects": "def exchange():\n    got = [None] * 2\n"
    "    dist.all_gather_object(got, Point(dist.get_rank()))\n"
    "    return [p.x for p in got]\nprint(go(exchange, 2).values)",
    "raises": "def inner(x):\n    return x.no_such_attribute\n\ndef fails():\n"
    "    if dist.get_rank() == 2:\n        inner(torch.ones(1))\n    dist.barrier()\n\ngo(fails, 4)",
    "deadlock": "def early():\n    if dist.get_rank() == 1:\n        return\n    dist.barrier()\n\n"
    "go(early, 3)",
    "prints": "logging.basicConfig(level=logging.INFO, force=True)\n"
    "def talk():\n    print('hello from', dist.get_rank())\n    logging.info('log of %d', dist.get_rank())\n"
    "go(talk, 2);",
    "main guard": "print(go(lambda: __name__, 2).values, 'RANK' in os.environ)",
}


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """Outputs of CELLS, executed one after the other in one ipykernel."""
    return executed(CELLS)


@pytest.mark.slow
def test_a_cells_functions_closures_and_classes_run(cells: dict[str, Any]) -> None:
    """S02: and an object that comes back is of the notebook's class, which ranks did not change."""
    assert printed(cells["def"]) == (
        "[(0, 1, [0.0, 2.0, 4.0]), (1, 1, [2.0, 4.0, 6.0])] [True, True]\n0 [0.0, 1.0, 2.0] 0\n"
    )
    assert printed(cells["objects"]) == "[[0, 1], [0, 1]]\n"
    assert printed(cells["main guard"]) == "['__main__', '__main__'] False\n"


@pytest.mark.slow
def test_reports_show_the_cell_and_its_lines(cells: dict[str, Any]) -> None:
    number = list(CELLS).index("raises") + 1
    lines = failed(cells["raises"]).splitlines()
    assert lines[0] == "rank 2 raised AttributeError: 'Tensor' object has no attribute 'no_such_attribute'"
    assert lines[1].strip() == f"Cell In[{number}], line 6, in fails: inner(torch.ones(1))"
    assert lines[2].strip() == f"Cell In[{number}], line 2, in inner: return x.no_such_attribute"
    assert f"Cell In[{number}], line 7, in fails: dist.barrier()" in failed(cells["raises"])
    text = failed(cells["deadlock"])
    assert text.startswith("Deadlock: ranks 0 and 2 of 3 wait, and no rank can go on.")
    assert f"Cell In[{number + 1}], line 4, in early: dist.barrier()" in text


@pytest.mark.slow
def test_prints_and_logs_arrive_in_the_cell(cells: dict[str, Any]) -> None:
    """S20."""
    assert sorted(printed(cells["prints"]).splitlines()) == [f"[rank {r}] hello from {r}" for r in range(2)]
    logs = sorted(printed(cells["prints"], "stderr").splitlines())
    assert logs == [f"[rank {r}] INFO:root:log of {r}" for r in range(2)]
