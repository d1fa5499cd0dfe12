"""``run(fn, *args, ranks=N)``: call a function on N ranks and keep what each of them did."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lessons_lib import machines
from lessons_lib.errors import (
    DeadlockError,
    OrderWarning,
    RankError,
    RefusedError,
    RunError,
    UnfinishedWarning,
)
from lessons_lib.machines import Machine
from lessons_lib.spmd import _torch_internals, by_value, doctor, processes, recording, threads, torchrun
from lessons_lib.spmd.current import current
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.result import Run, returned
from lessons_lib.spmd.thread_group import ThreadGroup
from lessons_lib.spmd.trace import Trace
from lessons_lib.timeline import ranks_text

MOST_RANKS = 1024  # threads; each takes memory, and beyond it runs take seconds
TRANSPORTS = ("threads", "processes")


def run(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    transport: str = "threads",
    machine: str | Machine | None = None,
    record: str | Sequence[str] = (),
    timeout_s: float | None = None,
    seed: int = 0,
) -> Run:
    """Call ``fn(*args)`` on every one of ``ranks`` ranks and return what they returned and did.

    >>> import torch.distributed as dist
    >>> run(lambda x: x + dist.get_rank(), 10, ranks=3).values
    [10, 11, 12]

    ``fn`` is plain ``torch.distributed`` code; its world is initialised. It and ``args`` travel by
    value, so ranks share no variable with each other or with the caller. Every rank starts from the
    same ``seed`` for torch, numpy and random.

    With ``transport="threads"`` ranks are threads of this process that take turns: nothing to start
    and nothing to clean up, prints in a fixed order, a deadlock proved the moment it happens. With
    ``"processes"`` each is a process of its own, on gloo, or on nccl with a GPU for every rank. In a
    program that torchrun started, its processes are the ranks, and every one of them gets the result
    (see :mod:`lessons_lib.spmd.torchrun`); ``ranks`` may then be left out.

    ``machine`` gives every rank a virtual clock: ``"8xH100"`` (see :mod:`lessons_lib.machines`) or a
    ``Machine``. It runs by counted FLOPs, by :func:`compute` and by what communication costs there,
    and every time in the trace is then the machine's. ``record=("flops", "memory")`` counts these.

    Raises :class:`~lessons_lib.errors.RefusedError` before anything starts if it cannot work, and
    afterwards a :class:`~lessons_lib.errors.RunError` that carries ``.run``:
    :class:`~lessons_lib.errors.RankError` with the traceback of the rank that raised,
    :class:`~lessons_lib.errors.DeadlockError`, :class:`~lessons_lib.errors.MismatchError`, or
    :class:`~lessons_lib.errors.RunTimeoutError` after ``timeout_s``.
    """
    ranks = _refuse(fn, args, ranks, transport, machine, timeout_s)
    on = machines.machine(machine) if isinstance(machine, str) else machine
    if on is not None and ranks > on.n_gpus:
        raise RefusedError(f"ranks={ranks} and {on!r}: give a machine with a GPU for every rank.")
    recorded = recording.refuse_unknown(record)
    _torch_internals.warn_if_untested()
    packed = by_value.pack(fn, args)
    name = _name(fn)
    launch = {"threads": run_threads, "processes": _run_processes}[transport]
    if torchrun.is_launched():
        launch = _run_torchrun
    result = launch(Request(ranks, packed, name, on, recorded, timeout_s, seed))
    if result.error is not None:
        result.error.run = result  # type: ignore[attr-defined]
        raise result.error from None
    for notes, category in ((result.notes, UnfinishedWarning), (result.questions, OrderWarning)):
        if notes:
            more = f"\n... and {len(notes) - 3} more, see the result" if len(notes) > 3 else ""
            warnings.warn("\n".join(notes[:3]) + more, category, stacklevel=2)
    return result


class Request(NamedTuple):
    """What run was asked for, after everything that cannot work was refused."""

    ranks: int
    packed: by_value.Packed
    name: str
    machine: Machine | None
    record: tuple[str, ...]
    timeout_s: float | None
    seed: int
    turns: int | None = None  # a seed by which thread ranks take their turns in any order

    def trace(
        self, operations: Iterable[Operation], ended_s: Iterable[float], ledgers: Sequence[recording.Ledger]
    ) -> Trace:
        return Trace(
            self.ranks,
            tuple(operation.event() for operation in operations),
            tuple(ended_s),
            clock="measured" if self.machine is None else f"virtual ({self.machine.name})",
            flops=tuple(each.flops for each in ledgers) if "flops" in self.record else (),
            live_bytes=tuple(each.live_bytes for each in ledgers) if "memory" in self.record else (),
        )


def run_threads(asked: Request) -> Run:
    _warm_up()
    world = threads.World(
        asked.ranks, asked.seed, asked.packed.classes, asked.machine, asked.record, asked.turns
    )
    everybody = tuple(range(asked.ranks))
    began = time.perf_counter()
    stuck = threads.launch(
        world, asked.packed, lambda rank: ThreadGroup(rank, "0", "world", everybody), asked.timeout_s
    )
    seconds = time.perf_counter() - began
    left = doctor.still_busy([rank.number for rank in stuck])
    error = world.failure
    if isinstance(error, KeyboardInterrupt):
        error = KeyboardInterrupt(f"{error}{left}")
    elif isinstance(error, RunError):
        error.add_report(left)
    values = [rank.value for rank in world.ranks]
    return Run(
        ranks=asked.ranks,
        values=values,
        endings=_endings(values, [rank.returned for rank in world.ranks], error),
        trace=asked.trace(
            world.operations,
            (rank.clock.now() for rank in world.ranks),
            [rank.ledger for rank in world.ranks],
        ),
        seconds=seconds,
        name=asked.name,
        transport="threads",
        error=error,
        notes=tuple(doctor.unfinished(world.operations)),
        questions=tuple(doctor.swapped(world.operations)),
    )


@cache
def _warm_up() -> None:
    """Let torch do once what it does slowly the first time, which would look like the work of rank 0."""

    def step() -> float:
        x = torch.full((2,), float(dist.get_rank()))
        dist.all_reduce(x)
        return x.sum().item()

    world = threads.World(2, 0, ())
    packed = by_value.pack(step, ())
    threads.launch(world, packed, lambda rank: ThreadGroup(rank, "0", "world", (0, 1)), None)


def _run_processes(asked: Request) -> Run:
    return _run_launched(asked, "processes", processes.launch)


def _run_torchrun(asked: Request) -> Run:
    return _run_launched(asked, "torchrun", torchrun.launch)


def _run_launched(asked: Request, transport: str, launch: Callable[..., processes.Ended]) -> Run:
    began = time.perf_counter()
    try:
        ended = launch(
            asked.ranks,
            asked.packed,
            seed=asked.seed,
            machine=asked.machine,
            record=asked.record,
            timeout_s=asked.timeout_s,
        )
    except RunError as failure:
        ended = processes.Ended.before_it_began(asked.ranks, failure)
    seconds = time.perf_counter() - began
    accounts = ended.accounts
    operations = [operation for account in accounts for operation in account.operations]
    return Run(
        ranks=asked.ranks,
        values=ended.values,
        endings=_endings(ended.values, ended.returned, ended.failure),
        trace=asked.trace(
            sorted(operations, key=lambda operation: operation.issued_s),
            (account.ended_s for account in accounts),
            [account.ledger for account in accounts],
        ),
        seconds=seconds,
        name=asked.name,
        transport=transport,
        error=ended.failure,
        notes=tuple(doctor.unfinished(operations)),
        questions=tuple(doctor.swapped(operations)),
    )


def _endings(values: list[Any], finished: list[bool], error: BaseException | None) -> tuple[str, ...]:
    """What became of each rank, in a few words."""
    waiting = {each.rank: each.missing for each in error.waiting} if isinstance(error, DeadlockError) else {}
    endings = []
    for rank, value in enumerate(values):
        if finished[rank]:
            endings.append(returned(value))
        elif isinstance(error, RankError) and error.rank == rank:
            endings.append(f"raised {type(error.cause).__name__}")
        elif rank in waiting:
            endings.append(f"waits for {ranks_text(waiting[rank])}")
        else:
            endings.append("stopped")
    return tuple(endings)


def _refuse(fn: Any, args: tuple[Any, ...], ranks: Any, transport: Any, machine: Any, timeout_s: Any) -> int:
    """Refuse what cannot work, before anything starts; return the number of ranks."""
    if not callable(fn):
        called = "" if isinstance(fn, int | str) else ", which is what it returned"
        raise RefusedError(
            f"run needs the function itself and got {fn!r}{called}. "
            "Write run(step, ranks=4), not run(step(), ranks=4)."
        )
    if inspect.iscoroutinefunction(fn):
        raise RefusedError("run calls a function on every rank; an async function would return a coroutine.")
    here = current()
    if here is not None:
        raise RefusedError(
            f"run inside rank {here.number} of a run: ranks cannot start ranks. "
            "Call run from the notebook, or use groups (Mesh) inside the ranks you have."
        )
    if torchrun.is_launched():
        ranks = torchrun.ranks_of_launch(ranks, machine)
    if ranks is None:
        given = f"run(..., {args[-1]}) gives {args[-1]} to the function" if args else "run was not told"
        raise RefusedError(f"how many ranks? {given}. Try run({_name(fn)}, ranks=4).")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise RefusedError(f"ranks={ranks!r}: a run needs a whole number of ranks, 1 or more. Try ranks=4.")
    if transport not in TRANSPORTS:
        known = ", ".join(f'"{name}"' for name in TRANSPORTS)
        raise RefusedError(f"transport={transport!r} is unknown; known: {known}.")
    most = MOST_RANKS if transport == "threads" else 16 * processes.available_cores()
    if ranks > most and not torchrun.is_launched():
        advice = "" if transport == "threads" else "; thread ranks, the default transport, go further"
        raise RefusedError(f"ranks={ranks}: this machine carries {most} {transport}{advice}. Try ranks=8.")
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise RefusedError(f"timeout_s={timeout_s!r}: give a number of seconds above 0, or leave it out.")
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as mismatch:
        raise RefusedError(
            f"{_name(fn)}: {mismatch}. The function's arguments come after it: run(step, 10, ranks=4)."
        ) from None
    except ValueError:
        pass  # a builtin without a signature
    return ranks


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


@contextmanager
def region(name: str) -> Iterator[None]:
    """Label what this rank does inside: ``with region("backward"): loss.backward()``.

    Regions nest; the trace then counts a communication for every region around it.
    """
    rank = current()
    if rank is None:  # the serial model runs the same code without ranks
        yield
        return
    if "/" in name:
        raise RefusedError(f"region({name!r}): regions nest by themselves, so a name has no '/'.")
    rank.regions.append(name)
    try:
        yield
    finally:
        rank.regions.pop()


def compute(seconds: float) -> None:
    """Let this rank's virtual clock run: work that is assumed, not done.

    >>> from lessons_lib.machines import Machine
    >>> run(lambda: compute(0.25), ranks=2, machine=Machine("free")).trace.timeline.makespan
    0.25

    Without ranks it does nothing. Refused in a run without ``machine``: its clock is measured.
    """
    rank = current()
    if rank is None:
        return
    if rank.machine is None:
        raise RefusedError(
            f"compute({seconds!r}) moves a virtual clock, and this run's is measured. "
            'Give run a machine: run(step, ranks=4, machine="8xH100"), or machine=Machine("free").'
        )
    if not seconds >= 0:
        raise RefusedError(f"compute({seconds!r}): give 0 seconds or more.")
    rank.clock.advance(seconds)
