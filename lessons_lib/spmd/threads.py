"""Ranks as threads of this process: one baton, one rank running at a time.

A rank keeps the baton until it has to wait for another rank, and then hands it to the next rank
that can go on. So a run is deterministic, printing needs no locks, and a deadlock is *proved* the
moment it happens: nobody can take the baton.

Each rank has a clock of its own that runs only while it holds the baton. When ranks meet, those
that came early are set to the clock of the last one. The clock therefore reads as if the ranks
had run side by side and communication were free.
"""

from __future__ import annotations

import contextvars
import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lessons_lib.errors import DeadlockError, LessonsError, MismatchError
from lessons_lib.spmd import _torch_internals, ambient, by_value, doctor
from lessons_lib.spmd.output import labelled
from lessons_lib.spmd.trace import LineFinder, Operation

GRACE_S = 2.0  # how long ranks may take to stop before they are left alone

_this_thread = threading.local()
_one_run = threading.Lock()


class Stopped(BaseException):
    """Ends a rank that must not go on, through the learner's ``except Exception``."""


def current() -> Rank | None:
    """The rank that the calling thread is, if it is one."""
    return getattr(_this_thread, "rank", None)


def current_number() -> int | None:
    rank = current()
    return None if rank is None else rank.number


@dataclass
class Rank:
    """One emulated rank: its thread, its place in the program, its clock."""

    number: int
    world: World
    ambient: ambient.Ambient
    state: str = "ready"  # ready, running, waiting, done
    may_go_on: Callable[[], bool] = bool  # when waiting
    waits_for: Any = None  # when waiting: the Operation it stands in and a function naming whom it misses
    cleaning_up_after: BaseException | None = None  # in a communication: the exception in flight, if any
    clock_s: float = 0.0
    resumed_at: float = 0.0
    regions: list[str] = field(default_factory=list)
    n_messages: dict[Any, int] = field(default_factory=dict)  # sent or received, see thread_group
    value: Any = None
    returned: bool = False
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None

    def now(self) -> float:
        """Seconds this rank has run, read by itself."""
        return self.clock_s + time.perf_counter() - self.resumed_at

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Our own work, and work done for all ranks, which costs the one that does it no time."""
        self.clock_s = self.now()
        self.resumed_at = time.perf_counter()
        try:
            yield
        finally:
            self.resumed_at = time.perf_counter()

    def catch_up(self, clock_s: float) -> None:
        """Be no earlier than ``clock_s``: what this rank waited for happened then."""
        self.clock_s = max(self.now(), clock_s)
        self.resumed_at = time.perf_counter()


class World:
    """The ranks of one run, the baton, and what is under way between them."""

    def __init__(self, n_ranks: int, seed: int) -> None:
        self.ranks = [Rank(number, self, own) for number, own in enumerate(ambient.seeded(n_ranks, seed))]
        self.operations: list[Operation] = []
        self.lines = LineFinder()
        self.meetings: dict[Any, Any] = {}  # collectives under way, see thread_group
        self.mailboxes: dict[Any, Any] = {}  # messages under way, see thread_group
        self.groups: dict[str, Any] = {}  # groups by name, see thread_group
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self.stopped_at: float | None = None

    # ---- the baton ----

    def wait(self, may_go_on: Callable[[], bool], waits_for: Any) -> None:
        """Hand the baton on until ``may_go_on()``; if nobody can take it, that is a deadlock."""
        rank = self._me()
        if self.stopped:
            raise Stopped
        if may_go_on():
            return
        rank.state, rank.may_go_on, rank.waits_for = "waiting", may_go_on, waits_for
        rank.cleaning_up_after = sys.exc_info()[1]
        following = self._next_after(rank)
        if following is None:
            self.stop(self._standstill())
            following = rank
        if following is not rank:
            self._leave(rank)
            following.baton.release()
            rank.baton.acquire()
        self._enter(rank)
        if self.stopped:
            raise Stopped

    def let_others_run(self) -> None:
        """Offer the baton to whoever can take it: for loops that poll."""
        rank = self._me()
        if self.stopped:
            raise Stopped
        following = self._next_after(rank)
        if following is not None:
            rank.state = "ready"
            self._leave(rank)
            following.baton.release()
            rank.baton.acquire()
            self._enter(rank)
        if self.stopped:
            raise Stopped

    def _me(self) -> Rank:
        rank = current()
        if rank is None or rank.world is not self:
            raise RuntimeError(
                "only the ranks of a run communicate, each from its own thread, while it lasts"
            )
        return rank

    def _next_after(self, rank: Rank) -> Rank | None:
        n_ranks = len(self.ranks)
        for step in range(1, n_ranks + 1):
            other = self.ranks[(rank.number + step) % n_ranks]
            if other.state == "ready" or (other.state == "waiting" and (self.stopped or other.may_go_on())):
                return other
        return None

    def _leave(self, rank: Rank) -> None:
        rank.clock_s = rank.now()
        rank.ambient.keep()

    def _enter(self, rank: Rank) -> None:
        rank.state, rank.waits_for, rank.cleaning_up_after = "running", None, None
        if self.ended.is_set():
            return
        rank.ambient.put_in_place()
        ambient.name_rank(rank.number)
        rank.resumed_at = time.perf_counter()

    # ---- beginning and end of a rank ----

    def run_rank(self, rank: Rank, packed: bytes, make_group: Callable[[Rank], Any], finish: Any) -> None:
        rank.baton.acquire()
        _this_thread.rank = rank
        try:
            torch.set_num_threads(1)  # a new thread would bring a team of OpenMP threads of its own
            _torch_internals.become_default_group(make_group(rank))
            self._enter(rank)
            if not self.stopped:
                fn, args = by_value.unpack(packed)
                rank.resumed_at = time.perf_counter()
                rank.value, rank.returned = fn(*args), True
        except Stopped:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                self._raised(rank, end)
        except BaseException as error:
            self._raised(rank, error)
        finally:
            self._end(rank, finish)

    def _raised(self, rank: Rank, error: BaseException) -> None:
        if not self.stopped:  # the report is made now: where the others stand is soon forgotten
            self.stop(doctor.raised(self, rank, error))

    def _end(self, rank: Rank, finish: Callable[[int], None]) -> None:
        rank.clock_s = rank.now()
        rank.state = "done"
        if self.ended.is_set():  # this run has been given up: its torch world is no longer in place
            return
        try:
            _torch_internals.forget_groups()
            finish(rank.number)
        except BaseException as error:  # say so, and hand on the baton all the same
            self._raised(rank, error)
        following = self._next_after(rank)
        if following is None and any(other.state == "waiting" for other in self.ranks):
            self.stop(self._standstill())
            following = self._next_after(rank)
        if following is None:
            self.ended.set()
        else:
            following.baton.release()

    # ---- stopping ----

    @property
    def stopped(self) -> bool:
        return self.stopped_at is not None

    def stop(self, failure: BaseException) -> None:
        """Let every rank end at its next wait. The first failure is the run's."""
        if not self.stopped:
            self.failure, self.stopped_at = failure, time.perf_counter()
            for rank in self.ranks:
                if rank.state == "waiting" and not rank.may_go_on():
                    rank.waits_for.operation.waited_s = math.inf

    def mismatch(self, report: str) -> None:
        """Stop everybody: ranks disagree, and going on would give a wrong number."""
        self._me().cleaning_up_after = sys.exc_info()[1]
        self.stop(MismatchError(doctor.cleaning_up(self) + report))
        raise Stopped

    def _standstill(self) -> LessonsError:
        before, disagreement = doctor.cleaning_up(self), doctor.disagreement(self)
        if disagreement:
            return MismatchError(before + disagreement)
        error = DeadlockError(before + doctor.deadlock(self))
        error.waiting = doctor.waiting(self)
        return error

    def interrupt(self) -> None:
        """Raise :class:`Stopped` in the rank that runs, at its next line of Python."""
        for rank in self.ranks:
            if rank.state == "running" and rank.thread is not None and rank.thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(rank.thread.ident), ctypes.py_object(Stopped)
                )

    def abandon(self) -> list[Rank]:
        """Give up on ranks that do not stop; returns them. Those that only wait are let go."""
        stuck = [rank for rank in self.ranks if rank.state == "running"]
        self.ended.set()
        for rank in self.ranks:
            if rank.state in ("ready", "waiting"):
                rank.baton.release()
        return stuck


def launch(
    world: World, packed: bytes, make_group: Callable[[Rank], Any], timeout_s: float | None
) -> list[Rank]:
    """Run every rank of ``world`` to its end; returns those that could not be stopped.

    ``KeyboardInterrupt`` stops the ranks and is raised again.
    """
    with (
        _one_run,
        ambient.restored(),
        _torch_internals.one_world_per_thread(),
        labelled(current_number) as finish,
    ):
        ambient.name_world(len(world.ranks))
        try:
            for rank in world.ranks:
                context = contextvars.copy_context()
                rank.thread = threading.Thread(
                    target=context.run,
                    args=(world.run_rank, rank, packed, make_group, finish),
                    name=f"rank {rank.number}",
                    daemon=True,
                )
                rank.thread.start()
            world.ranks[0].baton.release()
            stuck = _wait_for_end(world, timeout_s)
        except KeyboardInterrupt as interrupt:
            world.stop(interrupt)
            try:
                stuck = _wait_for_end(world, None)
            except KeyboardInterrupt:  # a second one: do not wait until the ranks have stopped
                stuck = world.abandon()
        for rank in world.ranks:
            if rank not in stuck and rank.thread is not None and rank.thread.ident is not None:
                rank.thread.join()
        return stuck


def _wait_for_end(world: World, timeout_s: float | None) -> list[Rank]:
    """Wait until all ranks have ended; once the run is stopped, at most ``GRACE_S`` longer."""
    deadline = float("inf") if timeout_s is None else time.perf_counter() + timeout_s
    interrupted = 0
    while not world.ended.wait(0.05):
        now = time.perf_counter()
        if now > deadline and not world.stopped:
            world.stop(doctor.too_long(world, timeout_s or 0.0))
        if world.stopped_at is not None:
            if now - world.stopped_at > GRACE_S:
                return world.abandon()
            if now - world.stopped_at > interrupted * GRACE_S / 4:  # clean-up code may catch it once
                interrupted += 1
                world.interrupt()
    return []
