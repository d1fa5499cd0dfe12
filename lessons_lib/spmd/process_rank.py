"""What runs in the process of a rank: take a job from the launcher, do it, answer.

The process lives as long as the launcher holds the other end of its connection: if the kernel ends,
is restarted or killed, the connection closes and so does the process.
"""

from __future__ import annotations

import gc
import io
import logging
import math
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from lessons_lib.errors import PeerLostError
from lessons_lib.machines import Machine
from lessons_lib.spmd import _torch_internals, by_value, doctor
from lessons_lib.spmd.board import ENDED, FAILED, RUNNING, Board, Key, Poster
from lessons_lib.spmd.clock import Clock, WallClock, standing_still
from lessons_lib.spmd.current import be_in_this_process
from lessons_lib.spmd.library import LibraryRank
from lessons_lib.spmd.lines import know_cells, line_of_frame
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.process_group import ProcessRankGroup, ProcessWork
from lessons_lib.spmd.process_state import seed_all
from lessons_lib.spmd.recording import Ledger, recording
from lessons_lib.spmd.stuck import CleanUp, in_flight
from lessons_lib.timeline import Where

JOB = "job"  # the file in the folder of the run
LOOK_S = 0.25  # how often a rank looks at itself


@dataclass(frozen=True)
class Job:
    """What the launcher asks of all ranks."""

    n_ranks: int
    pickled: bytes
    backend: str
    seed: int
    n_threads: int
    machine: Machine | None
    record: tuple[str, ...]
    default_dtype: torch.dtype
    cells: dict[str, tuple[str, str]]  # the notebook's cells by file name: what they are called, their text
    working_directory: str
    path: list[str]
    environment: dict[str, str]
    log_level: int | None  # of the notebook's root logger, if it has been set up


NOWHERE = Where("?", 0, "?")


@dataclass(frozen=True)
class Account:
    """What a rank has done, told at its end."""

    operations: list[Operation] = field(default_factory=list)
    keys: dict[int, Key] = field(default_factory=dict)  # of the operations that are still open
    ended_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    where: Where = NOWHERE  # the line it had come to
    cleaning_up: str = ""  # and after which exception, as the doctor tells it


class ProcessRank(LibraryRank):
    """The rank that this process is."""

    def __init__(self, job: Job, number: int, folder: Path, line: Line) -> None:
        clock = WallClock() if job.machine is None else Clock(standing_still)
        super().__init__(number, job.n_ranks, job.machine, clock)
        self.line, self.backend = line, job.backend
        self.unsettled: dict[int, ProcessWork] = {}
        self.store = _torch_internals.file_store(str(folder / "store"), job.n_ranks)
        self.board = Board(folder, job.n_ranks, reader=number)
        self.poster = Poster(self.board, folder, number)

    def begin(self) -> None:
        """Wait until all ranks are ready; that moment is zero on the clock of each."""
        self.poster.ready(time.perf_counter_ns())
        while (ready_ns := self.board.all_ready_ns()) is None:
            time.sleep(0.0005)
        if isinstance(self.clock, WallClock):
            self.clock.begin(ready_ns / 1e9)
        self.poster.status(RUNNING)

    @contextmanager
    def waiting(self, place: int) -> Iterator[None]:
        """Say on the board that this rank waits in the operation at ``place`` of its log."""
        error = sys.exc_info()[1]
        self.poster.waits(place, doctor.cleaning_up(self.number, error) if error else "")
        yield
        self.poster.status(RUNNING)  # unless it broke off: then this is where the rank stands

    def wait_until(self, met: Callable[[], bool], place: int) -> None:
        if not met():
            with self.waiting(place):
                while not met():
                    time.sleep(0.0005)

    def stop(self, why: Key | str) -> NoReturn:
        """Stop all ranks, which disagree in a collective or as a report says."""
        error = sys.exc_info()[1]
        self.poster.status(FAILED)
        self.line.send("mismatch", why, doctor.cleaning_up(self.number, error) if error else "")
        while True:
            time.sleep(60)  # until the launcher ends this process

    def account(self) -> Account:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        waits_in = self.board.waits_in(self.number)
        operations, keys = list(self.operations), {}
        for index, operation in enumerate(operations):
            work = self.unsettled.get(id(operation))
            if work is not None:
                keys[index] = work.key
                if waits_in and waits_in[0] == work.key:
                    operations[index] = replace(operation, waited_s=math.inf)
        ledger = Ledger(dict(self.ledger.flops), list(self.ledger.live_bytes))
        error = in_flight(threading.main_thread().ident or 0)
        first = doctor.cleaning_up(self.number, error, "came to no end") if error else ""
        return Account(operations, keys, self.clock.now(), ledger, line_of_frame(frame), first)


@dataclass
class Line:
    """The connection to the launcher, on which one thread of this process speaks at a time."""

    connection: Connection
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, *message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        with self.lock:
            self.connection.send_bytes(data)


class Told(io.TextIOBase):
    """A text stream that tells the launcher what is written to it."""

    encoding = "utf-8"

    def __init__(self, line: Line, name: str) -> None:
        self._line, self._name = line, name

    def write(self, text: str) -> int:
        if text:
            self._line.send("wrote", self._name, text)
        return len(text)

    def writable(self) -> bool:
        return True


def serve(connection: Connection) -> None:
    """Do the one job that comes through ``connection``, and end with the launcher's word."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the launcher's to handle
    line = Line(connection)
    number, folder = pickle.loads(connection.recv_bytes())
    sys.stdout, sys.stderr = Told(line, "stdout"), Told(line, "stderr")
    rank: ProcessRank | None = None
    try:
        job: Job = pickle.loads(Path(folder, JOB).read_bytes())
        _become(job, number)
        rank = ProcessRank(job, number, Path(folder), line)
        threading.Thread(target=_listen, args=(line, rank, folder), daemon=True).start()
        be_in_this_process(rank)
        everybody = tuple(range(job.n_ranks))
        _torch_internals.become_default_group(ProcessRankGroup(rank, "0", "world", everybody))
        fn, args = by_value.unpack(job.pickled)
        for each in by_value.classes_that_came():  # so that objects of theirs can be sent on as messages
            if each.__module__ == "__main__":
                setattr(sys.modules["__main__"], each.__name__, each)
        rank.begin()
        with recording(job.record, job.machine, rank.clock, rank.region, rank.ledger, (fn, args)):
            value = fn(*args)
            _torch_internals.await_results(value)
        _returned(line, value, rank)
    except SystemExit as end:
        if end.code in (None, 0) and rank is not None:
            _returned(line, None, rank)
        else:
            _raised(line, number, end, rank)
    except BaseException as error:
        _raised(line, number, error, rank)
    threading.Event().wait()  # until the launcher lets go: others may still need this rank


def _returned(line: Line, value: Any, rank: ProcessRank) -> None:
    rank.poster.status(ENDED)
    try:
        data = by_value.dumps(value)
    except Exception as error:
        refusal = TypeError(f"what the rank returned cannot travel back to the notebook: {error}")
        _raised(line, rank.number, refusal, rank)
    else:
        line.send("returned", data, rank.account())


def _raised(line: Line, number: int, error: BaseException, rank: ProcessRank | None) -> None:
    if rank is not None and not isinstance(error, PeerLostError):
        rank.poster.status(FAILED)
    report = "\n".join(doctor.traceback_of(number, error))
    line.send("raised", _pickled_error(error), report, rank.account() if rank else Account())


def _pickled_error(error: BaseException) -> bytes:
    """An exception as bytes from which the notebook can make it again; nothing if that cannot be."""
    bare = error.with_traceback(None)
    for thing in (bare, Rebuilt(type(bare), bare.args, dict(vars(bare)))):
        try:
            data = by_value.dumps(thing)
            if isinstance(pickle.loads(data), BaseException | Rebuilt):
                return data
        except Exception:  # a constructor that wants more than its args, a field that cannot be copied
            continue
    return b""


@dataclass
class Rebuilt:
    """An exception that cannot be made by calling its type."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    fields: dict[str, Any]

    def error(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)
        error.args = self.args
        vars(error).update(self.fields)
        return error


def _listen(line: Line, rank: ProcessRank, folder: str) -> None:
    """Tell what this rank has done if the launcher asks, or that it stands still; end when it lets go."""
    clean_up = CleanUp(threading.main_thread().ident or 0)
    try:
        while True:
            if line.connection.poll(LOOK_S):
                if line.connection.recv_bytes() != b"account":
                    break
                line.send("account", rank.account())
            elif rank.board.status(rank.number) == RUNNING:
                error = clean_up.stands_still()
                if error is not None:
                    _raised(line, rank.number, error, rank)
    except (EOFError, OSError):
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a launcher that was killed has left it
        os._exit(0)


def _become(job: Job, number: int) -> None:
    """Make this process a rank of a job: its place, its environment, its random state."""
    os.chdir(job.working_directory)
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(job.n_ranks)
    sys.path[:] = job.path
    sys.modules["__main__"] = types.ModuleType("__main__")
    know_cells(job.cells)
    if job.log_level is not None:
        logging.basicConfig(level=job.log_level, stream=sys.stderr)
    torch.set_num_threads(job.n_threads)
    torch.set_default_dtype(job.default_dtype)
    seed_all(job.seed)
    if job.backend == "nccl":
        torch.cuda.set_device(number)


def warm_up() -> None:
    """Do once, before ranks are forked, what would take the first time of each of them."""
    seed_all(0)  # loads more of torch and of numpy
    _torch_internals.load_compiler()
    torch.ones(2).sum().item()
    gc.collect()
    gc.freeze()  # the collector of a rank need not touch, and so copy, the memory it shares
