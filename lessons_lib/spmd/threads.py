"""Ranks as threads of this process: one baton, one rank running at a time.

A rank keeps the baton until it has to wait for another rank, and then hands it to the next rank
that can go on. So a run is deterministic, printing needs no locks, and a deadlock is *proved* the
moment it happens: nobody can take the baton.

Each rank has a clock of its own that runs only while it holds the baton. When ranks meet, those
that came early are set to the clock of the last one. The clock therefore reads as if the ranks
had run side by side, with communication that is free (measured) or that costs what a machine's
links cost (virtual).
"""

from __future__ import annotations

import contextvars
import ctypes
import enum
import math
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lessons_lib.errors import (
    DeadlockError,
    MismatchError,
    RankError,
    RefusedError,
    RunError,
    RunTimeoutError,
)
from lessons_lib.machines import Machine
from lessons_lib.spmd import _torch_internals, by_value, doctor, process_state, stuck
from lessons_lib.spmd.clock import Channel, Clock, standing_still
from lessons_lib.spmd.current import be_in_this_thread, current, current_number
from lessons_lib.spmd.doctor import Creation, RankStatus
from lessons_lib.spmd.lines import LineFinder, line_of_frame
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.output import labelled
from lessons_lib.spmd.recording import Ledger, recording
from lessons_lib.spmd.stuck import CleanUp
from lessons_lib.timeline import Where

if TYPE_CHECKING:
    from lessons_lib.spmd.in_flight import Collective, P2PQueue, Part

MOST_IDLE_POLLS = 2_000
GRACE_S = 2.0  # how long ranks may take to stop before they are left alone

_one_run = threading.Lock()


class Stopped(BaseException):
    """Ends a rank that must not go on, through the learner's ``except Exception``."""


class State(enum.Enum):
    READY = enum.auto()  # may take the baton
    RUNNING = enum.auto()  # has it
    WAITING = enum.auto()  # may take it when what it waits for is met
    ENDED = enum.auto()


@dataclass(eq=False)
class Rank:
    """One emulated rank: its thread, its place in the program, its clock."""

    number: int
    world: World
    process_state: process_state.ProcessState
    state: State = State.READY
    waits_for: Part | None = None  # what it waits for
    cleaning_up_after: BaseException | None = None  # in a communication: the exception in flight, if any
    clock: Clock = field(default_factory=Clock)
    regions: list[str] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    n_messages: dict[Any, int] = field(default_factory=dict)  # sent or received, by the other side
    n_groups: dict[Any, int] = field(default_factory=dict)  # made, by name and members
    idle_polls: int = 0  # in a row, with no other rank able to run
    value: Any = None
    returned: bool = False
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None

    def region(self) -> str:
        return "/".join(self.regions)

    @property
    def machine(self) -> Machine | None:
        return self.world.machine

    @property
    def lines(self) -> LineFinder:
        return self.world.lines

    @property
    def operations(self) -> list[Operation]:
        """Those of all ranks, in the order in which they were issued."""
        return self.world.operations

    @property
    def stands_still(self) -> bool:
        return self.state is State.WAITING and self.waits_for is not None and not self.waits_for.is_met()


class World:
    """The ranks of one run, the baton, and what is under way between them."""

    def __init__(
        self,
        n_ranks: int,
        seed: int,
        classes: Sequence[type],
        machine: Machine | None = None,
        record: Sequence[str] = (),
        turns: int | None = None,
    ) -> None:
        self.machine, self.record = machine, record
        self.turns = None if turns is None else random.Random(turns)  # draws whose turn is next
        tick = time.perf_counter if machine is None else standing_still
        everyone = enumerate(process_state.seeded(n_ranks, seed, classes))
        self.ranks = [Rank(number, self, own, clock=Clock(tick)) for number, own in everyone]
        for rank in self.ranks:
            rank.clock.halt()
        self.operations: list[Operation] = []
        self.lines = LineFinder()
        self.collectives: dict[tuple[str, int], Collective] = {}  # by group and number of the collective
        self.p2p_queues: dict[tuple[str, int, int], P2PQueue] = {}  # by group, receiver and tag
        self.groups: dict[str, Creation] = {}  # the first call that created a group, by its name
        self.channels: defaultdict[str, Channel] = defaultdict(lambda: Channel(machine))  # by group
        self.all_ended = threading.Event()
        self.failure: BaseException | None = None
        self.stopped_at: float | None = None

    # ---- the baton ----

    def wait(self, part: Part) -> None:
        """Hand the baton on until ``part`` is met; if nobody can take it, that is a deadlock."""
        rank = self._me()
        if part.is_met():
            return
        rank.state, rank.waits_for = State.WAITING, part
        rank.cleaning_up_after = sys.exc_info()[1]
        if self._next_after(rank) is None:
            self.stop(self._standstill())
        self._hand_over(rank)

    def poll(self, part: Part) -> None:
        """Offer the baton to whoever can take it: for loops that ask whether ``part`` is met.

        A loop that asks for ever while no other rank can run is a deadlock too.
        """
        rank = self._me()
        rank.state = State.READY
        rank.idle_polls = rank.idle_polls + 1 if self._next_after(rank) is rank else 0
        if rank.idle_polls > MOST_IDLE_POLLS:
            self.wait(part)
        else:
            self._hand_over(rank)

    def _me(self) -> Rank:
        rank = current()
        if rank is None or rank.world is not self:
            raise RefusedError(
                "only the ranks of a run communicate, each in its own thread, while it lasts. "
                'Try without threads of your own; or transport="processes", whose ranks may have some.'
            )
        if self.stopped:
            raise Stopped
        return rank

    def _hand_over(self, rank: Rank) -> None:
        """Let the next rank that can go on do so; return when it is this one's turn again."""
        following = self._next_after(rank)
        if following is not None and following is not rank:
            rank.clock.halt()
            rank.process_state.keep()
            following.baton.release()
            rank.baton.acquire()
        self._take(rank)
        if self.stopped:
            raise Stopped

    def _take(self, rank: Rank) -> None:
        """Have the baton: put in place what only this rank may see."""
        rank.state, rank.waits_for, rank.cleaning_up_after = State.RUNNING, None, None
        if not self.all_ended.is_set():
            rank.process_state.put_in_place()
            process_state.name_rank(rank.number)
            rank.clock.resume()

    def _next_after(self, rank: Rank) -> Rank | None:
        """The next rank that can go on, the given one last."""
        others = self.ranks[rank.number + 1 :] + self.ranks[: rank.number]
        if self.turns is not None:
            self.turns.shuffle(others)
        for other in (*others, rank):
            if other.state is State.READY:
                return other
            if other.state is State.WAITING and (self.stopped or not other.stands_still):
                return other
        return None

    def first(self) -> Rank:
        """The rank that begins."""
        return self.ranks[0] if self.turns is None else self.turns.choice(self.ranks)

    # ---- beginning and end of a rank ----

    def run_rank(self, rank: Rank, pickled: bytes, make_group: Callable[[Rank], Any], finish: Any) -> None:
        """The thread of one rank, from its first turn to its end."""
        rank.baton.acquire()
        be_in_this_thread(rank)
        try:
            torch.set_num_threads(1)  # a new thread would bring a team of OpenMP threads of its own
            _torch_internals.become_default_group(make_group(rank))
            self._take(rank)
            if not self.stopped:
                with rank.clock.halted():
                    fn, args = by_value.unpack(pickled)
                with recording(self.record, self.machine, rank.clock, rank.region, rank.ledger, (fn, args)):
                    rank.value = fn(*args)
                    _torch_internals.await_results(rank.value)
                rank.returned = True
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
            report = self._safely(lambda: doctor.raised(rank.number, error, self.standing()))
            self.stop(RankError.of(rank.number, error, report))

    def _end(self, rank: Rank, finish: Callable[[int], None]) -> None:
        rank.clock.halt()
        rank.state = State.ENDED
        if self.all_ended.is_set():  # this run has been given up: its torch world is no longer in place
            return
        try:
            rank.process_state.keep()
            _torch_internals.forget_groups()
            finish(rank.number)
        except BaseException as error:  # say so, and hand on the baton all the same
            self._raised(rank, error)
        if self._next_after(rank) is None and any(other.stands_still for other in self.ranks):
            self.stop(self._standstill())
        following = self._next_after(rank)
        if following is None:
            self.all_ended.set()
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
                if rank.stands_still and rank.waits_for is not None:
                    rank.waits_for.operation.waited_s = math.inf

    def mismatch(self, report: str) -> None:
        """Stop everybody: ranks disagree, and going on would give a wrong number."""
        self._me().cleaning_up_after = sys.exc_info()[1]
        self.stop(MismatchError(self.first_errors() + report))
        raise Stopped

    def standing(self) -> list[RankStatus]:
        """Where every rank is, for the doctor."""
        last = {operation.rank: operation for operation in self.operations}
        standing = []
        for rank in self.ranks:
            ended = rank.state is State.ENDED
            if rank.stands_still and rank.waits_for is not None:
                part = rank.waits_for
                standing.append(RankStatus(rank.number, ended, part.operation, part.missing()))
            else:
                standing.append(RankStatus(rank.number, ended, last=last.get(rank.number)))
        return standing

    @staticmethod
    def _safely(report: Callable[[], str]) -> str:
        """A report, or that it could not be made: a run ends also then."""
        try:
            return report()
        except Exception as failure:
            return f"a rank failed, and so did the report about it: {failure!r}"

    def _standstill(self) -> RunError:
        try:
            return self._why_nobody_can_go_on()
        except Exception as failure:
            return RunError(f"no rank can go on, and the report about it failed: {failure!r}")

    def _why_nobody_can_go_on(self) -> DeadlockError | MismatchError:
        for collective in self.collectives.values():
            disagreement = collective.disagreement()
            if disagreement:
                return MismatchError(self.first_errors() + disagreement)
        standing = self.standing()
        error = DeadlockError(self.first_errors() + doctor.deadlock(standing))
        error.waiting = tuple(rank.waiting for rank in standing if rank.waiting)
        return error

    def first_errors(self) -> str:
        """Exceptions in flight in ranks that are cleaning up: what went wrong first."""
        reports = []
        for rank in self.ranks:
            if rank.cleaning_up_after is not None:
                reports.append(doctor.cleaning_up(rank.number, rank.cleaning_up_after))
            elif rank.state is State.RUNNING and rank.thread is not None:
                error = stuck.in_flight(rank.thread.ident or 0)
                if error is not None:
                    reports.append(doctor.cleaning_up(rank.number, error, "came to no end"))
        return "".join(reports)

    def look_at(self, clean_ups: dict[int, CleanUp]) -> None:
        """End the run for a rank whose clean-up code stands still: its exception would never come."""
        for rank in self.ranks:
            if rank.state is State.RUNNING and rank.thread is not None and rank.thread.ident is not None:
                look = clean_ups.setdefault(rank.number, CleanUp(rank.thread.ident))
                error = look.stands_still()
                if error is not None:
                    self._raised(rank, error)

    def interrupt(self) -> None:
        """Raise :class:`Stopped` in the rank that runs, at its next line of Python."""
        for rank in self.ranks:
            if rank.state is State.RUNNING and rank.thread is not None and rank.thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(rank.thread.ident), ctypes.py_object(Stopped)
                )

    def running(self) -> list[tuple[int, Where]]:
        """The ranks that run, and the line each has come to."""
        frames = sys._current_frames()
        return [
            (rank.number, line_of_frame(frames.get(rank.thread.ident or 0)))
            for rank in self.ranks
            if rank.state is State.RUNNING and rank.thread is not None
        ]

    def abandon(self) -> list[Rank]:
        """Leave alone the ranks that do not stop; returns them. Those that only wait are let go."""
        stuck = [rank for rank in self.ranks if rank.state is State.RUNNING]
        self.all_ended.set()
        for rank in self.ranks:
            if rank.state in (State.READY, State.WAITING):
                rank.baton.release()
        return stuck


def launch(
    world: World, packed: by_value.Packed, make_group: Callable[[Rank], Any], timeout_s: float | None
) -> list[Rank]:
    """Run every rank of ``world`` to its end; returns those that could not be stopped.

    ``KeyboardInterrupt`` stops the ranks and becomes the failure of the run.
    """
    with (
        _one_run,
        process_state.restored(packed.classes),
        _torch_internals.one_world_per_thread(),
        labelled(current_number) as finish,
    ):
        process_state.name_world(len(world.ranks))
        try:
            for rank in world.ranks:
                context = contextvars.copy_context()
                rank.thread = threading.Thread(
                    target=context.run,
                    args=(world.run_rank, rank, packed.pickled, make_group, finish),
                    name=f"rank {rank.number}",
                    daemon=True,
                )
                try:
                    rank.thread.start()
                except RuntimeError as failure:  # the system gives no more threads
                    world.stop(RunError(f"rank {rank.number} could not be started: {failure}"))
                    return world.abandon()
            world.first().baton.release()
            stuck = _wait_for_end(world, timeout_s)
        except KeyboardInterrupt:
            report = doctor.interrupted(world.running(), world.standing())
            world.stop(KeyboardInterrupt(world.first_errors() + report))
            try:
                stuck = _wait_for_end(world, None)
            except KeyboardInterrupt:  # a second one: do not wait until the ranks have stopped
                stuck = world.abandon()
        return stuck + [rank for rank in world.ranks if rank not in stuck and not _joined(rank)]


def _joined(rank: Rank) -> bool:
    """Wait for the thread of a rank that has been let go; False if it goes on."""
    if rank.thread is None or rank.thread.ident is None:
        return True
    rank.thread.join(GRACE_S)
    return not rank.thread.is_alive()


def _wait_for_end(world: World, timeout_s: float | None) -> list[Rank]:
    """Wait until all ranks have ended; once the run is stopped, at most ``GRACE_S`` longer."""
    deadline = math.inf if timeout_s is None else time.perf_counter() + timeout_s
    interruptions = 0
    clean_ups: dict[int, CleanUp] = {}
    while not world.all_ended.wait(0.05):
        now = time.perf_counter()
        if now > deadline and not world.stopped:
            report = doctor.too_long(timeout_s or 0.0, world.running(), world.standing())
            world.stop(RunTimeoutError(world.first_errors() + report))
        if not world.stopped:
            world.look_at(clean_ups)
        if world.stopped_at is not None:
            if now - world.stopped_at > GRACE_S:
                return world.abandon()
            # A rank that was stopped from outside may be in a loop. Others end by themselves, and soon;
            # clean-up code may catch an interruption, so there are several.
            first = 0 if isinstance(world.failure, KeyboardInterrupt | RunTimeoutError) else 1
            if now - world.stopped_at > (first + interruptions) * GRACE_S / 4:
                interruptions += 1
                world.interrupt()
    return []
