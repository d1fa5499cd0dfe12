"""``run``: what ranks share and do not share, how a run ends, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from tqdm import tqdm

from lessons_lib import Mesh, region, run
from lessons_lib.errors import (
    RankError,
    RefusedError,
    RunError,
    RunTimeoutError,
)
from lessons_lib.spmd import output
from tests.cells import executed, failed, printed

ROOT = Path(__file__).parents[1]


def all_ranks_sum() -> int:
    """A run that works: what every test of a broken run does afterwards."""
    x = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(x)
    return int(x)


def assert_next_run_is_clean() -> None:
    assert run(all_ranks_sum, ranks=3).values == [6, 6, 6]


# ---- values ----


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_values_come_in_rank_order_and_the_world_is_torchs_own(ranks: int) -> None:
    def step(offset: int) -> tuple[int, int, int, bool]:
        return dist.get_rank() + offset, dist.get_world_size(), all_ranks_sum(), dist.is_initialized()

    total = ranks * (ranks + 1) // 2
    result = run(step, 10, ranks=ranks)
    assert result.values == [(10 + rank, ranks, total, True) for rank in range(ranks)]
    assert result.ranks == ranks and result.error is None and result.seconds > 0
    assert not dist.is_initialized()


def test_64_ranks() -> None:
    assert run(all_ranks_sum, ranks=64).values == [64 * 65 // 2] * 64


class Scaled:
    """Callable, with state: not a function."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, x: int) -> int:
        return self.factor * x + dist.get_rank()

    def method(self, x: int) -> int:
        return self(x)


def make_recursive() -> Callable[[int], int]:
    def factorial(n: int) -> int:
        return 1 if n == 0 else n * factorial(n - 1)

    return factorial


@pytest.mark.parametrize(
    "fn, expected",
    [
        (lambda x: x + dist.get_rank(), [5, 6]),
        (functools.partial(lambda y, x: x - y, 1), [4, 4]),
        (Scaled(2), [10, 11]),
        (Scaled(2).method, [10, 11]),
        (make_recursive(), [120, 120]),
        (abs, [5, 5]),
    ],
    ids=["lambda", "partial", "object", "method", "recursive", "builtin"],
)
def test_whatever_can_be_called_runs(fn: Callable[[int], int], expected: list[int]) -> None:
    assert run(fn, 5, ranks=2).values == expected


def test_a_rank_without_value_has_none_and_sys_exit_0_is_an_end_like_any_other() -> None:
    def step() -> int | None:
        if dist.get_rank() == 1:
            sys.exit(0)
        return dist.get_rank()

    assert run(step, ranks=3).values == [0, None, 2]


def test_ranks_take_turns_in_a_fixed_order() -> None:
    def step() -> torch.Tensor:
        x = torch.randn(3) * (dist.get_rank() + 1)
        dist.all_reduce(x)
        return x

    first, second = (run(step, ranks=4) for _ in range(2))
    assert [(e.rank, e.kind) for e in first.trace.events] == [(e.rank, e.kind) for e in second.trace.events]
    assert all(torch.equal(a, b) for a, b in zip(first.values, second.values, strict=True))


# ---- what ranks share: nothing of the notebook ----


def test_arguments_travel_by_value_and_stay_one_object_within_a_rank() -> None:
    numbers, x, model = [1], torch.zeros(2), nn.Linear(2, 2)

    def step(numbers: list[int], x: torch.Tensor, model: nn.Module, again: list[int]) -> tuple[Any, ...]:
        numbers.append(dist.get_rank())
        x += dist.get_rank()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(dist.get_rank())
        dist.barrier()
        return numbers, x, model.bias, again is numbers

    values = run(step, numbers, x, model, numbers, ranks=3).values
    for rank, (own, own_x, bias, same) in enumerate(values):
        assert own == [1, rank] and same
        assert own_x.tolist() == [rank, rank] and bias.tolist() == [rank, rank]
    assert numbers == [1] and x.tolist() == [0, 0] and not torch.equal(model.weight, torch.zeros(2, 2))
    assert len({value[1].data_ptr() for value in values}) == 3


def test_closures_and_default_arguments_travel_by_value() -> None:
    seen: list[int] = []
    weight = torch.zeros(1)

    def step(log: list[int] = []) -> tuple[list[int], list[int], float]:  # noqa: B006
        seen.append(dist.get_rank())
        log.append(dist.get_rank())
        weight.add_(1)
        dist.barrier()
        return seen, log, weight.item()

    assert run(step, ranks=3).values == [([0], [0], 1.0), ([1], [1], 1.0), ([2], [2], 1.0)]
    assert seen == [] and step.__defaults__ == ([],) and weight.item() == 0


def notebook(code: str) -> dict[str, Any]:
    """What a ``__main__`` holds after ``code``."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    return names


def test_globals_of_the_notebook_travel_by_value() -> None:
    main = notebook("""
counter = 0
cache = {"hits": []}
def bump():
    global counter
    counter += 1
    cache["hits"].append(counter)
    return helper()
def helper():
    return counter, cache["hits"]
""")
    assert run(main["bump"], ranks=3).values == [(1, [1])] * 3
    assert (main["counter"], main["cache"]) == (0, {"hits": []})


def test_modules_and_working_directory_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_shared_module")
    module.n = 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_shared_module", module)
    monkeypatch.chdir(tmp_path)

    def step() -> tuple[int, str]:
        import a_shared_module  # type: ignore[import-not-found]

        a_shared_module.n += 1
        return a_shared_module.n, os.getcwd()

    assert run(step, ranks=2).values == [(1, str(tmp_path)), (2, str(tmp_path))]


def draws(n: int) -> tuple[Any, ...]:
    """``n`` rounds of one number of every generator. Normal numbers of numpy are made in pairs."""
    return tuple(
        (torch.rand(1).item(), float(np.random.randn()), float(np.random.rand()), random.random())
        for _ in range(n)
    )


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_every_rank_draws_what_one_process_would_draw() -> None:
    seed_all(7)
    alone = draws(3)

    def step() -> tuple[Any, ...]:
        numbers: list[Any] = []
        for _ in range(3):
            numbers += draws(1)
            dist.barrier()  # hands the baton on, in the middle of a pair
        return tuple(numbers)

    assert run(step, ranks=3, seed=7).values == [alone] * 3
    assert run(step, ranks=3, seed=8).values[0] != alone


def test_every_rank_has_generators_of_its_own() -> None:
    def step() -> tuple[Any, ...]:
        seed_all(dist.get_rank())
        dist.barrier()
        first = draws(1)
        dist.barrier()
        return first + draws(2)

    def alone(rank: int) -> tuple[Any, ...]:
        seed_all(rank)
        return draws(3)

    assert run(step, ranks=3).values == [alone(rank) for rank in range(3)]


def seed_and_draw() -> None:
    seed_all(9)
    draws(5)


@pytest.mark.parametrize("n_before", [0, 1, 2])
def test_the_notebooks_generators_go_on_as_if_nothing_had_been(n_before: int) -> None:
    seed_all(3)
    alone = draws(n_before + 2)
    seed_all(3)
    before = draws(n_before)
    run(seed_and_draw, ranks=2)
    with pytest.raises(ZeroDivisionError):
        run(lambda: draws(1) and 1 / 0, ranks=2)
    assert before + draws(2) == alone


def test_each_rank_has_its_default_dtype_and_the_notebooks_is_restored() -> None:
    def step() -> tuple[torch.dtype, torch.dtype]:
        before = torch.ones(1).dtype
        torch.set_default_dtype((torch.float64, torch.float32, torch.bfloat16)[dist.get_rank()])
        dist.barrier()
        return before, torch.ones(1).dtype

    kinds = torch.float64, torch.float32, torch.bfloat16
    assert run(step, ranks=3).values == [(torch.float32, kind) for kind in kinds]
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert run(lambda: torch.ones(1).dtype, ranks=2).values == [torch.float64] * 2
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_environment_reads_as_on_a_real_rank_and_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "before")
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("DELETED", "before")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ADDED"):
        monkeypatch.delenv(name, raising=False)
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"

    def step() -> list[str]:
        first = [os.environ[name] for name in names]
        dist.barrier()
        os.environ["CHANGED"] = os.environ["ADDED"] = "by a rank"
        os.environ.pop("DELETED", None)
        return first + [os.environ[name] for name in names]

    before = dict(os.environ)
    assert run(step, ranks=3).values == [[str(rank), str(rank), "3", "3"] * 2 for rank in range(3)]
    assert dict(os.environ) == before


def test_hooks_and_thread_counts_are_restored() -> None:
    n_threads = torch.get_num_threads()
    calls: list[int] = []
    own = register_module_forward_hook(lambda *_: calls.append(1))  # of the notebook

    def step() -> int:
        register_module_forward_hook(lambda *_: print("a hook"))
        torch.set_num_threads(1)
        return torch.get_num_threads()

    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        assert run(step, ranks=2).values == [1, 1]
        nn.Linear(1, 1)(torch.ones(1))
    own.remove()
    assert stream.getvalue() == "" and calls == [1]
    assert torch.get_num_threads() == n_threads
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_one_thread_per_rank_and_grad_enabled_whatever_the_notebook_does() -> None:
    with torch.no_grad():
        assert (
            run(lambda: (torch.get_num_threads(), torch.is_grad_enabled()), ranks=2).values == [(1, True)] * 2
        )
        assert not torch.is_grad_enabled()


def test_regions_need_no_ranks() -> None:
    with region("serial"):
        pass


# ---- refused before anything starts ----


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: run(None, ranks=4), r"got None, which is what it returned.*run\(step, ranks=4\)"),  # type: ignore[arg-type]
        (lambda: run(torch.ones(1), ranks=4), r"got tensor\(\[1\.\]\), which is what it returned"),  # type: ignore[arg-type]
        (lambda: run(4, ranks=4), r"needs the function itself and got 4\. Write run\(step, ranks=4\)"),  # type: ignore[arg-type]
        (lambda: run(abs, ranks=0), r"ranks=0: a run needs a whole number of ranks, 1 or more\. Try ranks=4"),
        (lambda: run(abs, ranks=-2), r"ranks=-2"),
        (lambda: run(abs, ranks=2.0), r"ranks=2\.0"),  # type: ignore[arg-type]
        (lambda: run(abs, ranks=True), r"ranks=True"),
        (
            lambda: run(abs, ranks=2, transport="pigeons"),
            r"transport='pigeons' is unknown; known: \"threads\"",
        ),
        (lambda: run(abs, ranks=2, timeout_s=0), r"timeout_s=0: give a number of seconds above 0"),
        (lambda: run(abs, ranks=2, timeout_s=float("nan")), r"timeout_s=nan"),
        (lambda: run(abs, ranks=2, timeout_s="3"), r"timeout_s='3'"),  # type: ignore[arg-type]
    ],
)
def test_refused_before_anything_starts(call: Callable[[], Any], message: str) -> None:
    n_threads = threading.active_count()
    with pytest.raises(RefusedError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError) and threading.active_count() == n_threads
    assert_next_run_is_clean()


def test_what_cannot_be_copied_is_named() -> None:
    lock, started = threading.Lock(), []

    def step() -> None:
        started.append(lock)

    def unset() -> Any:
        return lock, later

    with pytest.raises(
        RefusedError, match=r"the variable 'lock' \(lock\) cannot be copied.*inside the function"
    ):
        run(step, ranks=2)
    with pytest.raises(RefusedError, match=r"argument 1 \(generator\) cannot be copied"):
        run(lambda a, b: None, 1, (i for i in range(3)), ranks=2)
    with pytest.raises(RefusedError, match=r"the variable 'lock'"):
        run(unset, ranks=2)
    later = 1
    assert started == []


def test_a_nested_run_is_refused_in_the_rank_that_tries(capsys: pytest.CaptureFixture[str]) -> None:
    def step() -> None:
        if dist.get_rank() == 1:
            run(all_ranks_sum, ranks=2)

    with pytest.raises(RefusedError, match=r"run inside rank 1 of a run: ranks cannot start ranks") as caught:
        run(step, ranks=2)
    assert isinstance(caught.value, RankError) and caught.value.rank == 1
    assert_next_run_is_clean()


def test_initialising_torch_distributed_oneself_is_explained() -> None:
    with pytest.raises(
        RankError, match=r"twice(.|\n)*Try: run has initialised it for every rank: leave that"
    ):
        run(lambda: dist.init_process_group("gloo"), ranks=2)


# ---- a rank that raises ----


def test_the_traceback_of_the_rank_that_raised_comes_first() -> None:
    def helper() -> None:
        raise ValueError("no such layer")

    def step() -> int:
        if dist.get_rank() == 2:
            helper()
        return all_ranks_sum()

    with pytest.raises(ValueError, match="no such layer") as caught:
        run(step, ranks=4)
    error = caught.value
    assert isinstance(error, RankError) and error.rank == 2 and isinstance(error.cause, ValueError)
    lines = str(error).splitlines()
    assert lines[0] == "rank 2 raised ValueError: no such layer"
    assert re.fullmatch(r" +tests/test_run.py, line \d+, in step: helper\(\)", lines[1])
    assert re.fullmatch(
        r' +tests/test_run.py, line \d+, in helper: raise ValueError\("no such layer"\)', lines[2]
    )
    assert "ranks 0 and 1 wait for ranks 2 and 3 in all_reduce(int64[]), #1 on world" in str(error)
    assert error.run.values == [None] * 4 and error.run.error is error
    assert [event.rank for event in error.run.trace.events] == [0, 1]
    assert_next_run_is_clean()


@pytest.mark.parametrize("first", [0, 1, 3])
def test_other_ranks_that_raise_do_not_hide_the_first(first: int) -> None:
    def step() -> None:
        if dist.get_rank() < first:
            dist.barrier()
        raise KeyError(f"rank {dist.get_rank()}")

    with pytest.raises(KeyError) as caught:
        run(step, ranks=4)
    assert str(caught.value).startswith(f"rank {first} raised KeyError: 'rank {first}'")
    assert str(caught.value).count("raised") == 1


def test_the_others_stop_at_once_and_except_exception_does_not_hold_them() -> None:
    reached: list[str] = []
    sys.modules[__name__].__dict__["_reached"] = reached

    def step() -> None:
        import importlib

        marks = importlib.import_module(__name__)._reached
        if dist.get_rank() == 1:
            raise RuntimeError("stop")
        try:
            dist.barrier()
        except Exception:
            marks.append("caught")
        finally:
            marks.append("finally")
        marks.append("went on")

    began = time.perf_counter()
    with pytest.raises(RuntimeError, match="rank 1 raised RuntimeError: stop"):
        run(step, ranks=3)
    assert time.perf_counter() - began < 0.5
    assert reached == ["finally"]


@pytest.mark.parametrize("code", [3, "no data"])
def test_sys_exit_names_its_code(code: Any) -> None:
    def step() -> int:
        if dist.get_rank() == 1:
            sys.exit(code)
        return all_ranks_sum()

    with pytest.raises(RankError, match=re.escape(f"rank 1 called sys.exit({code!r})")):
        run(step, ranks=3)
    assert_next_run_is_clean()


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
        (lambda: KeyError("lr"), "KeyError: 'lr'"),
        (
            lambda: FileNotFoundError(2, "No such file", "x"),
            r"FileNotFoundError: \[Errno 2\] No such file: 'x'",
        ),
        (lambda: ExceptionGroup("many", [ValueError(1)]), r"ExceptionGroup: many \(1 sub-exception\)"),
        (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "UnicodeDecodeError: 'utf-8' codec"),
        (lambda: Demanding(reason="because"), "Demanding: because"),
        (Unprintable, r"Unprintable: \(its text cannot be shown: __str__ raised RuntimeError\)"),
        (lambda: KeyboardInterrupt("mine"), "KeyboardInterrupt: mine"),
        (lambda: GeneratorExit(), "GeneratorExit"),
        (lambda: StopIteration(4), "StopIteration: 4"),
        (lambda: AssertionError(), "AssertionError"),
    ],
)
def test_every_kind_of_exception_is_reported(make: Callable[[], BaseException], message: str) -> None:
    def step() -> None:
        raise make()

    with pytest.raises(RankError, match=f"rank 0 raised {message}") as caught:
        run(step, ranks=2)
    assert type(caught.value.cause) is type(make())
    if isinstance(make(), Exception) and not isinstance(make(), ExceptionGroup):
        assert isinstance(caught.value, type(make()))
    assert_next_run_is_clean()


def test_a_message_of_5_megabytes_is_cut() -> None:
    def step() -> None:
        raise ValueError("x" * 5_000_000)

    with pytest.raises(ValueError, match=r"message cut, 4,996,000 more characters") as caught:
        run(step, ranks=2)
    assert len(str(caught.value)) < 6_000


def test_an_endless_recursion_is_reported_in_a_few_lines() -> None:
    def down(n: int) -> int:
        return down(n + 1)

    with pytest.raises(RecursionError, match="rank 0 raised RecursionError") as caught:
        run(down, 0, ranks=2)
    assert re.search(r"\.\.\. \d+ calls left out \.\.\.", str(caught.value))
    assert 10 < len(str(caught.value).splitlines()) < 40


def test_what_an_exception_was_raised_from_is_named() -> None:
    def step() -> None:
        try:
            raise KeyError("wq")
        except KeyError as error:
            raise ValueError("bad checkpoint") from error

    with pytest.raises(ValueError, match=r"bad checkpoint(.|\n)*while handling KeyError: 'wq'"):
        run(step, ranks=1)


def test_a_rank_that_communicates_while_it_cleans_up_keeps_its_own_error() -> None:
    """The barrier in ``finally`` can never be met; the reason is the error before it."""

    def step() -> None:
        try:
            if dist.get_rank() == 1:
                raise ValueError("the reason")
            all_ranks_sum()
        finally:
            dist.barrier()

    with pytest.raises(RunError) as caught:
        run(step, ranks=3)
    text = str(caught.value)
    assert text.startswith("rank 1 raised ValueError: the reason\n")
    assert "\nCleaning up after that, rank 1 began a communication of its own.\n\nMismatch: " in text
    assert_next_run_is_clean()


@pytest.mark.parametrize("last", [0, 2])
def test_so_does_one_whose_cleaning_up_deadlocks_or_disagrees(last: int) -> None:
    """Also where the rank that raises is the last to arrive, or all the others have returned."""

    def step(disagree: bool) -> None:
        try:
            if dist.get_rank() == last:
                raise ValueError("the reason")
        finally:
            if dist.get_rank() == last:
                dist.barrier()
            elif disagree:
                all_ranks_sum()

    for disagree, kind in ((False, "Deadlock"), (True, "Mismatch")):
        with pytest.raises(RunError, match=rf"^rank {last} raised ValueError: the reason\n(.|\n)*\n{kind}: "):
            run(step, disagree, ranks=3)


def test_cleaning_up_that_raises_keeps_the_first_error() -> None:
    def step() -> None:
        if dist.get_rank() == 0:
            raise ValueError("first")
        try:
            all_ranks_sum()
        finally:
            raise KeyError("while cleaning up")

    with pytest.raises(ValueError, match="rank 0 raised ValueError: first"):
        run(step, ranks=3)
    assert_next_run_is_clean()


def test_a_rank_may_destroy_its_process_group() -> None:
    def step() -> int:
        total = all_ranks_sum()
        dist.destroy_process_group()
        return total

    assert run(step, ranks=2).values == [3, 3]
    assert_next_run_is_clean()


def test_a_group_kept_in_a_module_is_refused_in_the_next_run() -> None:
    kept = types.ModuleType("kept_groups")
    sys.modules["kept_groups"] = kept
    try:

        def keep() -> None:
            import kept_groups  # type: ignore[import-not-found]

            kept_groups.group = dist.group.WORLD

        def use() -> None:
            import kept_groups

            kept_groups.group.allreduce([torch.ones(1)])

        run(keep, ranks=2)
        with pytest.raises(RankError, match=r"belongs to rank 1 of .*; it was kept in a global"):
            run(use, ranks=2)
    finally:
        del sys.modules["kept_groups"]
    assert_next_run_is_clean()


# ---- runs that take too long or are interrupted ----


def test_timeout_names_who_ran_and_who_waited_and_where() -> None:
    def step() -> None:
        if dist.get_rank() == 1:
            while True:  # never comes to the barrier
                pass
        dist.barrier()

    began = time.perf_counter()
    with pytest.raises(RunTimeoutError, match=r"longer than its timeout_s=0\.2 and was stopped") as caught:
        run(step, ranks=3, timeout_s=0.2)
    assert time.perf_counter() - began < 1.5
    text = str(caught.value)
    assert re.search(r"rank 1 was running\n +tests/test_run.py, line \d+, in step: (while True|pass)", text)
    assert "rank 0 waits for ranks 1 and 2 in barrier(), #1 on world" in text
    assert re.search(r"Try: look at tests/test_run.py, line \d+: rank 1 came to no next comm", text)
    assert caught.value.run.values == [None] * 3
    assert_next_run_is_clean()


def test_timeout_of_a_rank_that_swallows_everything_once() -> None:
    def step() -> None:
        with contextlib.suppress(BaseException):
            while True:
                pass
        while True:
            pass

    with pytest.raises(RunTimeoutError):
        run(step, ranks=1, timeout_s=0.1)
    assert_next_run_is_clean()


def test_a_run_in_time_knows_no_timeout() -> None:
    assert run(all_ranks_sum, ranks=2, timeout_s=60).values == [3, 3]


INTERRUPTED = """
import sys, time, torch, torch.distributed as dist
from lessons_lib import run

def loop():
    n = 0
    while True:
        n += 1

def collective():
    if dist.get_rank() == 1:
        dist.barrier()
    loop()

def poll():
    if dist.get_rank() == 1:
        loop()
    work = dist.barrier(async_op=True)
    while not work.is_completed():
        pass

def swallow():
    while True:
        try:
            loop()
        except Exception:
            pass

def sleep():
    time.sleep(60)

def good():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

for number, step in enumerate([loop, collective, poll, swallow, sleep, sleep]):
    began = time.perf_counter()
    try:
        def ready():
            if dist.get_rank() == 0:
                sys.__stdout__.write(f"READY {number}\\n")
                sys.__stdout__.flush()
            step()
        run(ready, ranks=2)
    except KeyboardInterrupt as error:
        took = time.perf_counter() - began
        values = run(good, ranks=3).values
        print("INTERRUPTED", step.__name__, f"{took:.2f}", repr(str(error)), values, flush=True)
"""


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the process ended without {text!r}")


@pytest.mark.slow
def test_a_real_interrupt_stops_the_ranks_and_the_next_run_works() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        for number, name in enumerate(["loop", "collective", "poll", "swallow", "sleep"]):
            read_until(process, f"READY {number}")
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            line = read_until(process, "INTERRUPTED")
            assert f"INTERRUPTED {name}" in line and "[3.0, 3.0, 3.0]" in line
            assert float(line.split()[2]) < (3.5 if name == "sleep" else 1.5)
            assert ("rank 0 could not be stopped: busy in native code" in line) == (name == "sleep")
        read_until(process, "READY 5")  # somebody impatient
        for _ in range(2):
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
        line = read_until(process, "INTERRUPTED sleep")
        assert float(line.split()[2]) < 1.5 and "[3.0, 3.0, 3.0]" in line
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# ---- nothing stays behind ----


def any_end(number: int) -> torch.Tensor:
    """A small run whose number says how it ends. 128 KiB: a thousand runs on 2 ranks would keep 250 MiB."""
    x, other = torch.ones(32_768), 1 - dist.get_rank()
    pair = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty_like(x), other)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    Mesh(tp=2)["tp"].all_reduce(x)
    match number % 10:
        case 1:
            raise ValueError("on purpose")
        case 2:
            dist.recv(x, other)  # a deadlock
        case 3:
            dist.all_reduce(x[dist.get_rank() :])  # a mismatch
        case 4:
            dist.all_reduce(x, async_op=True)  # left unfinished
        case 5:
            sys.exit(3)
        case 6 if dist.get_rank():
            try:
                raise KeyError("before cleaning up")
            finally:
                dist.barrier()
    return x


def left_over() -> Counter[str]:
    """Objects of ours, and process groups, that are still there."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        kind.__qualname__
        for kind in kinds
        if str(kind.__module__).startswith(("lessons_lib.spmd", "lessons_lib.timeline", "lessons_lib.errors"))
        or issubclass(kind, dist.ProcessGroup | dist.Work)
    )


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::lessons_lib.errors.UnfinishedWarning")
def test_runs_leak_no_thread_no_file_no_object_and_no_memory(n: int) -> None:
    """Also those that fail, whose errors hold what was done and the frames of the rank that raised."""
    seen: list[weakref.ref[Any]] = []

    def many(n: int) -> None:
        for number in range(n):
            record = ("flops", "memory") if number % 3 == 0 else ()
            try:
                result = run(any_end, number, ranks=2, record=record)
            except (RunError, ValueError) as error:
                seen.extend((weakref.ref(error), weakref.ref(error.run)))
            else:
                seen.append(weakref.ref(result))

    many(20)
    objects = left_over()
    process = psutil.Process()
    threads, files, memory = threading.enumerate(), process.num_fds(), process.memory_info().rss
    many(n)
    assert left_over() == objects
    assert len(seen) == (n + 20) * 15 // 10 and not any(reference() for reference in seen)
    assert threading.enumerate() == threads
    assert process.num_fds() == files
    assert process.memory_info().rss - memory < 25 * 2**20


def test_runs_work_from_a_thread_and_two_at_a_time_wait_for_each_other() -> None:
    values: list[Any] = []
    threads = [
        threading.Thread(target=lambda: values.append(run(all_ranks_sum, ranks=3).values)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [[6, 6, 6]] * 3


# ---- output ----


class Recorder(io.StringIO):
    """A stream that knows when what came."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.writes.append((time.perf_counter(), text))
        return super().write(text)

    def run(self, fn: Callable[[], Any], ranks: int) -> Any:
        with contextlib.redirect_stdout(self):  # pytest has a stdout of its own for every phase of a test
            return run(fn, ranks=ranks)

    def when(self, text: str) -> float:
        return next(at for at, written in self.writes if text in written)


@pytest.fixture
def stream() -> Recorder:
    return Recorder()


def test_prints_are_whole_labelled_lines_in_order(stream: Recorder) -> None:
    def step() -> None:
        rank = dist.get_rank()
        for line in range(3):
            print("line", line, "of", rank, sep=" ", end="\n" if line else "")
            dist.barrier()  # others print in the middle of this rank's line
            if line == 0:
                print(" continued")
        print("two\nat once")
        print("unfinished", end="")

    stream.run(step, ranks=3)
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\[rank [012]\] ", line) for line in lines)
    for rank in range(3):
        assert [line[9:] for line in lines if line.startswith(f"[rank {rank}]")] == [
            f"line 0 of {rank} continued",
            f"line 1 of {rank}",
            f"line 2 of {rank}",
            "two",
            "at once",
            "unfinished",
        ]
    assert stream.getvalue().endswith("\n")


def test_prints_arrive_while_ranks_still_run(stream: Recorder) -> None:
    def step() -> float:
        print("early", dist.get_rank())
        time.sleep(0.05)
        dist.barrier()
        return time.perf_counter()

    ended = stream.run(step, ranks=2).values
    assert stream.when("early 0") + 0.09 < min(ended)
    assert stream.when("early 1") + 0.04 < min(ended)


def test_other_threads_print_as_ever_during_a_run(stream: Recorder) -> None:
    printed = threading.Event()
    sys.modules[__name__].__dict__["_printed"] = printed

    def step() -> None:
        import importlib

        importlib.import_module(__name__)._printed.wait(5)

    def other() -> None:
        while not isinstance(sys.stdout, output.LabelledStream):  # until the run has begun
            time.sleep(0.001)
        print("from the notebook")
        printed.set()

    thread = threading.Thread(target=other)
    thread.start()
    stream.run(step, ranks=1)
    thread.join()
    assert stream.getvalue() == "from the notebook\n"


def test_long_lines_and_long_output_are_cut_with_a_note(stream: Recorder) -> None:
    def step() -> None:
        if dist.get_rank() == 0:
            print("x" * 200_000)
        if dist.get_rank() == 1:
            for _ in range(2_000):
                print("y" * 99)  # 100 characters with the end of line: 200,000
        print("end of", dist.get_rank())

    stream.run(step, ranks=3)
    text = stream.getvalue()
    assert "[rank 0] " + "x" * 2_000 + " ... (line cut, 198,000 more characters)\n" in text
    assert text.count("y" * 99) == output.MOST_PER_RANK // 100
    hidden = 200_000 - output.MOST_PER_RANK + len("end of 1\n")
    assert f"[rank 1] ... {hidden:,} more characters not shown (a run shows 50,000 of each rank)" in text
    assert "[rank 0] end of 0\n" in text and "[rank 2] end of 2\n" in text
    stream.run(step, ranks=1)  # the next run shows its own share
    assert stream.getvalue().count("end of 0") == 2


def test_progress_bars_redraw_their_line(stream: Recorder) -> None:
    def step() -> None:
        for _ in tqdm(range(3), file=sys.stdout, mininterval=0, bar_format="{n}/{total}"):
            pass
        for percent in (10, 20):
            print(f"{percent} %", end="\r")
        print()
        print("done", end="\r\n")

    stream.run(step, ranks=2)
    text = stream.getvalue()
    for rank in range(2):
        for state in ("0/3", "3/3", "10 %", "20 %"):
            assert f"\r[rank {rank}] {state}" in text
        assert f"\n[rank {rank}] done\n" in text
    for line in text.split("\n"):
        shown = line.rsplit("\r", 1)[-1]  # what a terminal shows in the end
        assert shown == "" or re.match(r"\[rank \d\]", shown)


def test_a_bar_and_lines_of_another_rank_do_not_mix(stream: Recorder) -> None:
    def step() -> None:
        if dist.get_rank() == 0:
            sys.stdout.write("\rbar 1")
        dist.barrier()
        if dist.get_rank() == 1:
            print("a line")
        dist.barrier()
        if dist.get_rank() == 0:
            sys.stdout.write("\rbar 2\n")

    stream.run(step, ranks=2)
    assert [line.rsplit("\r", 1)[-1] for line in stream.getvalue().split("\n")] == [
        "[rank 0] bar 1",
        "[rank 1] a line",
        "[rank 0] bar 2",
        "",
    ]


@pytest.mark.parametrize("made_in_rank", [False, True])
def test_logging_is_labelled_and_handlers_are_put_back(stream: Recorder, made_in_rank: bool) -> None:
    logger = logging.getLogger("test_run.ranks")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    if not made_in_rank:
        logger.addHandler(logging.StreamHandler(stream))

    def step() -> None:
        own = logging.getLogger("test_run.ranks")
        if made_in_rank and dist.get_rank() == 0:
            own.addHandler(logging.StreamHandler(sys.stdout))
        dist.barrier()
        own.info("step of\nrank %d", dist.get_rank())

    try:
        stream.run(step, ranks=2)
        logger.info("after")
        lines = stream.getvalue().splitlines()
        assert sorted(lines[:-1]) == sorted(
            f"[rank {rank}] {text}" for rank in range(2) for text in ("step of", f"rank {rank}")
        )
        assert lines[-1] == "after"
        assert not any(isinstance(handler.stream, output.LabelledStream) for handler in logger.handlers)  # type: ignore[attr-defined]
    finally:
        logger.handlers.clear()


def test_streams_are_put_back_also_after_a_failure(stream: Recorder) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: print("half a line", end="") or 1 / 0, ranks=2)
    assert (sys.stdout, sys.stderr) == before and stream.getvalue() == "[rank 0] half a line\n"


def test_a_stream_that_breaks_ends_the_run_with_an_error() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    with contextlib.redirect_stdout(Broken()), pytest.raises(BrokenPipeError):
        run(lambda: print("unfinished", end=""), ranks=2, timeout_s=5)
    assert_next_run_is_clean()


# ---- in a real kernel ----

CELLS = {
    "setup": "import os, logging, torch, torch.distributed as dist\nfrom lessons_lib import run, Mesh",
    "class": "class Point:\n    def __init__(self, x):\n        self.x = x",
    "state": "counter = 0\nweight = torch.arange(3.)\nscale = lambda x: x * weight",
    "def": "def step(p):\n"
    "    global counter\n"
    "    counter += 1\n"
    "    weight.add_(dist.get_rank())\n"
    "    return Point(p.x + dist.get_rank()).x, counter, scale(2.).tolist()\n"
    "print(run(step, Point(10), ranks=2).values)\n"
    "print(counter, weight.tolist())",
    "lambda": "f = lambda: [type(Point(dist.get_rank())).__name__, scale(1.).sum().item()]\n"
    "print(run(f, ranks=4).values)",
    "returned": "print(all(isinstance(p, Point) for p in run(lambda: Point(1), ranks=2).values))",
    "raises": "def inner(x):\n    return x.no_such_attribute\n\ndef fails():\n"
    "    if dist.get_rank() == 2:\n        inner(torch.ones(1))\n    dist.barrier()\n\nrun(fails, ranks=4)",
    "deadlock": "def early():\n    if dist.get_rank() == 1:\n        return\n    dist.barrier()\n\n"
    "run(early, ranks=3)",
    "where": "print(run(lambda: dist.barrier(), ranks=2).trace.events[0].where)",
    "prints": "logging.basicConfig(level=logging.INFO, force=True)\n"
    "def talk():\n    print('hello from', dist.get_rank())\n    logging.info('log of %d', dist.get_rank())\n"
    "run(talk, ranks=4);",
    "refused": "run(step(Point(1)), ranks=2)",
    "after": "print(run(lambda: dist.get_rank(), ranks=2).values, 'RANK' in os.environ)",
    "main guard": "print(run(lambda: __name__, ranks=2).values)",
}


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """Outputs of CELLS, executed one after the other in one ipykernel."""
    return executed(CELLS)


def test_a_cells_functions_closures_and_classes_run(cells: dict[str, Any]) -> None:
    assert printed(cells["def"]) == (
        "[(10, 1, [0.0, 2.0, 4.0]), (11, 1, [2.0, 4.0, 6.0])]\n0 [0.0, 1.0, 2.0]\n"
    )
    assert printed(cells["returned"]) == "True\n"
    assert printed(cells["lambda"]) == f"{[['Point', 3.0]] * 4}\n"
    assert printed(cells["after"]) == "[0, 1] False\n"
    assert printed(cells["main guard"]) == "['__main__', '__main__']\n"


def test_an_error_shows_the_cell_and_its_lines_and_nothing_of_ours(cells: dict[str, Any]) -> None:
    number = list(CELLS).index("raises") + 1
    lines = failed(cells["raises"]).splitlines()
    assert lines[0] == "rank 2 raised AttributeError: 'Tensor' object has no attribute 'no_such_attribute'"
    assert lines[1].strip() == f"Cell In[{number}], line 6, in fails: inner(torch.ones(1))"
    assert lines[2].strip() == f"Cell In[{number}], line 2, in inner: return x.no_such_attribute"
    assert f"Cell In[{number}], line 7, in fails: dist.barrier()" in failed(cells["raises"])
    assert "launcher.py" not in failed(cells["raises"])


def test_a_deadlock_and_a_trace_show_the_cell_and_its_line(cells: dict[str, Any]) -> None:
    number = list(CELLS).index("deadlock") + 1
    text = failed(cells["deadlock"])
    assert text.startswith("Deadlock: ranks 0 and 2 of 3 wait, and no rank can go on.")
    assert f"Cell In[{number}], line 4, in early: dist.barrier()" in text
    assert re.match(r"Cell In\[\d+\], line 1, in <lambda>: print\(run\(lambda", printed(cells["where"]))


def test_prints_and_logs_of_ranks_arrive_in_the_cell(cells: dict[str, Any]) -> None:
    assert printed(cells["prints"]) == "".join(f"[rank {rank}] hello from {rank}\n" for rank in range(4))
    assert printed(cells["prints"], "stderr") == "".join(
        f"[rank {rank}] INFO:root:log of {rank}\n" for rank in range(4)
    )


def test_calling_the_function_in_the_cell_is_refused(cells: dict[str, Any]) -> None:
    text = failed(cells["refused"])
    assert "Default process group" in text or "run needs the function itself" in text
