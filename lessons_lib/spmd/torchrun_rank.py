"""A rank that torchrun started: how it tells the others why a run ends, and what it has done.

There is no launcher to ask and no board to read; what ranks tell each other goes through the store of the
launch, and at a good end through a group of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import Tensor

from lessons_lib.errors import MismatchError, PeerLostError, RankError, RunTimeoutError
from lessons_lib.spmd import doctor
from lessons_lib.spmd._torch_internals import AllgatherOptions
from lessons_lib.spmd.clock import Clock
from lessons_lib.spmd.doctor import RankStatus
from lessons_lib.spmd.library import LibraryRank, first_line
from lessons_lib.spmd.lines import line_of_frame
from lessons_lib.spmd.network import WAIT, sever
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.process_rank import Account
from lessons_lib.spmd.processes import Ended
from lessons_lib.spmd.stuck import in_flight
from lessons_lib.spmd.threads import Stopped
from lessons_lib.timeline import Where, ranks_text

if TYPE_CHECKING:
    from lessons_lib.spmd.torchrun import Launch

GRACE_S = 2.0  # how long ranks may take to tell what they did, and why they ended


def shown_by(rank: int, error: Any) -> Any:
    """Let an error that all processes raise be shown by one of them, if nobody catches it."""
    error.shown_by = rank
    if sys.excepthook is not _show:
        _hooks.append(sys.excepthook)
        sys.excepthook = _show
    return error


_hooks: list[Any] = []


def _show(kind: Any, error: Any, trace: Any) -> None:
    if getattr(error, "shown_by", None) in (None, int(os.environ["RANK"])):
        _hooks[-1](kind, error, trace)


@dataclass(frozen=True)
class Report:
    """What a rank returned and did, told to all."""

    value: Any
    returned: bool
    account: Account


_RUN_ERRORS = {"MismatchError": MismatchError, "RunTimeoutError": RunTimeoutError}


@dataclass(frozen=True)
class Failure:
    """Why a run ended, told to all by the rank that found out first."""

    kind: str  # the name of the error
    rank: int
    report: str
    cause: bytes | None  # what the rank raised, if that can travel

    def error(self, cause: BaseException | None) -> BaseException:
        """The error for ``run`` to raise; ``cause`` is the exception itself, on the rank that raised it."""
        if self.kind in _RUN_ERRORS:
            return _RUN_ERRORS[self.kind](self.report)
        if cause is None and self.cause is not None:
            with contextlib.suppress(Exception):  # of a type that is not known here
                cause = cloudpickle.loads(self.cause)
        return RankError.of(self.rank, cause or RuntimeError(self.report), self.report)


@dataclass(frozen=True)
class Standing:
    """Where a rank was when its time was up."""

    status: RankStatus
    where: Where | None  # its line, if it was running
    issued: dict[Any, int]  # collectives of each group
    cleaning_up: str = ""  # after which exception, as the doctor tells it


class TorchrunRank(LibraryRank):
    """The rank that this process is, for one run."""

    def __init__(self, launch: Launch, store: Any, backend: str) -> None:
        super().__init__(launch.rank, launch.n_ranks, None, Clock())
        self.launch, self.store, self.backend = launch, store, backend
        self.natives: list[Any] = list(launch.world.values())  # groups of libraries that ranks may wait in
        self.waits_in: Operation | None = None
        self.cause: BaseException | None = None  # what this rank itself raised
        self._ended = threading.Event()
        self._ending = threading.Lock()

    def account(self) -> Account:
        return Account(self.operations, ended_s=self.clock.now(), ledger=self.ledger)

    # ---- going wrong ----

    def fail(self, kind: str, report: str, cause: BaseException | None = None) -> None:
        """Tell all ranks why the run ends, and let those stop that wait. The first reason is the run's."""
        self.cause = cause
        failure = Failure(kind, self.number, report, _portable(cause))
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self.store.compare_set("failure", "", pickle.dumps(failure))
        self.sever()

    def sever(self) -> None:
        for group in (*self.natives, self.launch.reports):
            sever(group)

    def failure(self, within_s: float = 0.0) -> Failure | None:
        """Why the run ended, if a rank tells it soon."""
        until = time.perf_counter() + within_s
        with contextlib.suppress(RuntimeError):
            while True:
                if self.store.check(["failure"]):
                    failure: Failure = pickle.loads(self.store.get("failure"))
                    return failure
                if time.perf_counter() >= until:
                    break
                time.sleep(0.02)
        return None

    def broke_off(self, what: str, error: RuntimeError) -> PeerLostError:
        """What to raise for a communication that failed; does not return if another rank has the reason."""
        if self.failure(GRACE_S):
            raise Stopped
        return PeerLostError(f"{what} broke off: {first_line(error)}")

    def meet(self, what: str, members: tuple[int, ...]) -> None:
        """Wait until all members have come here, or the run has failed."""
        keys = [f"{what}/{member}" for member in members]
        until = time.perf_counter() + WAIT.total_seconds()
        self.store.set(f"{what}/{self.number}", "")
        while not self.store.check(keys):
            if self.failure():
                raise Stopped
            if time.perf_counter() > until:
                absent = [m for m, key in zip(members, keys, strict=True) if not self.store.check([key])]
                raise PeerLostError(f"{ranks_text(absent)} did not come to {what} within {WAIT}")
            time.sleep(0.001)

    # ---- taking too long ----

    @contextlib.contextmanager
    def at_most(self, timeout_s: float | None) -> Iterator[None]:
        """Stop this rank, the main thread of its process or another, when its time is up."""
        timer = threading.Timer(timeout_s or 0.0, self._give_up, (timeout_s, threading.get_ident()))
        timer.daemon = True
        if timeout_s is not None:
            timer.start()
        try:
            yield
        finally:
            with self._ending:
                self._ended.set()
            if timeout_s is not None:
                timer.cancel()
                with contextlib.suppress(RuntimeError):
                    self.store.set(f"standing/{self.number}", pickle.dumps(self._standing(0)))

    def _give_up(self, timeout_s: float, thread: int) -> None:
        self.store.set(f"standing/{self.number}", pickle.dumps(self._standing(thread)))
        told = self._told("standing", GRACE_S)
        running = [(s.status.rank, s.where) for s in told.values() if s.where is not None]
        first_errors = "".join(standing.cleaning_up for standing in told.values())
        report = first_errors + doctor.too_long(timeout_s, running, _who_waits_for_whom(told))
        self.fail("RunTimeoutError", report)
        with self._ending:
            if not self._ended.is_set() and self.waits_in is None:
                stopped = ctypes.py_object(Stopped)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), stopped)
        if not self._ended.wait(GRACE_S):  # busy in native code
            sys.stderr.write(f"{report}\n{doctor.still_busy([self.number])}\n")
            sys.stderr.flush()
            os._exit(1)

    def _standing(self, thread: int) -> Standing:
        operation, last = self.waits_in, self.operations[-1] if self.operations else None
        status = RankStatus(self.number, ended=self._ended.is_set(), waits_in=operation, last=last)
        running = operation is None and not status.ended
        where = line_of_frame(sys._current_frames().get(thread)) if running else None
        issued: dict[Any, int] = {}
        for each in list(self.operations):
            if each.kind not in ("send", "recv"):
                issued[each.group, each.members] = each.sequence
        error = in_flight(thread)
        what = "came to no end" if running else "began a communication of its own"
        first = doctor.cleaning_up(self.number, error, what) if error and not status.ended else ""
        return Standing(status, where, issued, first)

    # ---- telling ----

    def _told(self, what: str, within_s: float) -> dict[int, Any]:
        """What ranks have told under this name; wait a little for those that have not."""
        keys = [f"{what}/{rank}" for rank in range(self.n_ranks)]
        until = time.perf_counter() + within_s
        told = {}
        with contextlib.suppress(RuntimeError):
            while not self.store.check(keys) and time.perf_counter() < until:
                time.sleep(0.02)
            for rank, key in enumerate(keys):
                if self.store.check([key]):
                    told[rank] = cloudpickle.loads(self.store.get(key))
        return told

    def end(self, report: Report) -> Ended:
        """Exchange reports with all ranks; if the run failed, as far as they can still be had."""
        try:
            data = _dumps(report)
        except Exception as error:
            refusal = TypeError(f"what the rank returned cannot travel to the other ranks: {error}")
            self.fail("RankError", f"rank {self.number} raised TypeError: {refusal}", refusal)
            report = Report(None, False, report.account)
            data = _dumps(report)
        failure = self.failure()
        reports: dict[int, Report] = {}
        if failure is None:
            try:
                gathered = gather(self.launch.reports, data)
                reports = {rank: cloudpickle.loads(each) for rank, each in enumerate(gathered)}
            except RuntimeError as error:
                try:
                    lost = self.broke_off("gathering what all ranks did", error)
                    self.fail("RankError", "\n".join(doctor.traceback_of(self.number, lost)), lost)
                except Stopped:
                    pass
                failure = self.failure()
        if failure is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"report/{self.number}", data)
            reports = self._told("report", GRACE_S)
            self.sever()
            self.launch.world, self.launch.reports = {}, None
        elif any(math.isinf(o.done_s) for each in reports.values() for o in each.account.operations):
            for group in self.natives:  # what was left unfinished must not meet the next run
                sever(group)
            self.launch.world = {}
        self.natives.clear()
        own = self.cause if failure is not None and failure.rank == self.number else None
        ended_by = None if failure is None else shown_by(failure.rank, failure.error(own))
        accounts = [reports[rank].account if rank in reports else Account() for rank in range(self.n_ranks)]
        return Ended(
            values=[reports[rank].value if rank in reports else None for rank in range(self.n_ranks)],
            returned=[rank in reports and reports[rank].returned for rank in range(self.n_ranks)],
            accounts=accounts,
            failure=ended_by,
        )


def _who_waits_for_whom(told: dict[int, Standing]) -> list[RankStatus]:
    statuses = []
    for standing in told.values():
        operation = standing.status.waits_in
        missing: tuple[int, ...] = ()
        if operation is not None and operation.peer is not None:
            missing = (operation.peer,)
        elif operation is not None and operation.kind != "recv":
            group = operation.group, operation.members
            missing = tuple(
                member
                for member in operation.members
                if member in told and told[member].issued.get(group, 0) < operation.sequence
            )
        statuses.append(replace(standing.status, missing=missing))
    return statuses


def _dumps(thing: Any) -> bytes:
    """Pickled: what the script defines by its name, since every process runs that script."""
    try:
        return pickle.dumps(thing)
    except Exception:
        return cloudpickle.dumps(thing)


def _portable(cause: BaseException | None) -> bytes | None:
    with contextlib.suppress(Exception):
        data = _dumps(cause)
        cloudpickle.loads(data)
        return data
    return None


def gather(group: Any, data: bytes) -> list[bytes]:
    """What every rank of a gloo group brings, on every rank."""

    def all_gather(mine: Tensor) -> list[Tensor]:
        outputs = [torch.empty_like(mine) for _ in range(group.size())]
        group.allgather([outputs], [mine], AllgatherOptions()).wait()
        return outputs

    sizes = [int(size) for size in all_gather(torch.tensor([len(data)]))]
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes))), dtype=torch.uint8)
    return [each.numpy().tobytes()[:size] for each, size in zip(all_gather(padded), sizes, strict=True)]
