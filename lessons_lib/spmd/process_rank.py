"""What runs in the process of a rank: take a job from the launcher, do it, answer.

The process lives as long as the launcher holds the other end of its connection: if the kernel ends,
is restarted or killed, the connection closes and so does the process.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from lessons_lib.machines import Machine
from lessons_lib.spmd import _torch_internals, by_value, doctor
from lessons_lib.spmd.board import Board, Poster
from lessons_lib.spmd.clock import Clock, standing_still
from lessons_lib.spmd.current import be_in_this_process
from lessons_lib.spmd.lines import LineFinder, know_cells, line_of_frame
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.process_group import ProcessRankGroup
from lessons_lib.spmd.recording import Ledger, recording
from lessons_lib.timeline import Where


@dataclass(frozen=True)
class Job:
    """What the launcher asks of a rank."""

    rank: int
    n_ranks: int
    pickled: bytes
    folder: str  # of this run: the board and the store lie there
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


NOWHERE = Where("?", 0, "?")


@dataclass(frozen=True)
class Account:
    """What a rank has done, told at its end."""

    operations: list[Operation] = field(default_factory=list)
    ended_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    where: Where = NOWHERE  # the line it had come to


class ProcessRank:
    """The rank that this process is."""

    def __init__(self, job: Job, began: float) -> None:
        self.number, self.n_ranks = job.rank, job.n_ranks
        self.backend, self.machine = job.backend, job.machine
        self.clock = Clock(standing_still if job.machine else lambda: time.perf_counter() - began)
        self.clock.catch_up(0.0)
        self.lines, self.ledger = LineFinder(), Ledger()
        self.operations: list[Operation] = []
        self.n_messages: dict[Any, int] = {}
        self.n_groups: dict[Any, int] = {}
        self.regions: list[str] = []
        self.link_free_s = 0.0
        self.store = _torch_internals.file_store(f"{job.folder}/store", job.n_ranks)
        self.poster = Poster(Board(Path(job.folder, "board"), job.n_ranks), job.rank)

    def region(self) -> str:
        return "/".join(self.regions)

    def account(self) -> Account:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return Account(self.operations, self.clock.now(), self.ledger, line_of_frame(frame))


@dataclass
class Line:
    """The connection to the launcher, on which one thread of this process speaks at a time."""

    connection: Connection
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, *message: Any) -> None:
        with self.lock:
            self.connection.send_bytes(cloudpickle.dumps(message))


class Told:
    """A text stream that tells the launcher what is written to it."""

    encoding = "utf-8"

    def __init__(self, line: Line, name: str) -> None:
        self._line, self._name = line, name

    def write(self, text: str) -> int:
        if text:
            self._line.send("wrote", self._name, text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True


def serve(connection: Connection) -> None:
    """Do the one job that comes through ``connection``, and end with the launcher's word."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the launcher's to handle
    line = Line(connection)
    job: Job = cloudpickle.loads(connection.recv_bytes())
    rank = _become(job)
    threading.Thread(target=_listen, args=(line, rank), daemon=True).start()
    sys.stdout, sys.stderr = Told(line, "stdout"), Told(line, "stderr")
    try:
        everybody = tuple(range(job.n_ranks))
        _torch_internals.become_default_group(ProcessRankGroup(rank, "0", "world", everybody))
        fn, args = by_value.unpack(job.pickled)
        with recording(job.record, job.machine, rank.clock, rank.region, rank.ledger, (fn, args)):
            value = fn(*args)
            _torch_internals.await_results(value)
        rank.poster.state("ended")
        _answer(line, "returned", value, rank)
    except SystemExit as end:
        rank.poster.state("ended")
        if end.code in (None, 0):
            _answer(line, "returned", None, rank)
        else:
            _answer(line, "raised", end, rank)
    except BaseException as error:
        rank.poster.state("failed")
        _answer(line, "raised", error, rank)
    threading.Event().wait()  # until the launcher lets go: others may still need this rank


def _answer(line: Line, what: str, value: Any, rank: ProcessRank) -> None:
    report = "\n".join(doctor.traceback_of(rank.number, value)) if what == "raised" else ""
    try:
        line.send(what, value, report, rank.account())
    except Exception as error:
        if what == "raised":  # an exception that cannot travel is told in words
            line.send(what, None, report, rank.account())
        else:
            refusal = TypeError(f"what the rank returned cannot travel back to the notebook: {error}")
            line.send("raised", refusal, f"rank {rank.number} raised TypeError: {refusal}", rank.account())


def _listen(line: Line, rank: ProcessRank) -> None:
    """Tell what this rank has done if the launcher asks; end when it lets go."""
    try:
        while line.connection.recv_bytes() == b"account":
            line.send("account", rank.account())
    except (EOFError, OSError):
        pass
    os._exit(0)


def _become(job: Job) -> ProcessRank:
    """Make this process the rank of a job: its place, its environment, its random state."""
    began = time.perf_counter()
    os.chdir(job.working_directory)
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(job.rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(job.n_ranks)
    sys.path[:] = job.path
    know_cells(job.cells)
    torch.set_num_threads(job.n_threads)
    torch.set_default_dtype(job.default_dtype)
    torch.manual_seed(job.seed)
    np.random.seed(job.seed)
    random.seed(job.seed)
    if job.backend == "nccl":
        torch.cuda.set_device(job.rank)
    rank = ProcessRank(job, began)
    be_in_this_process(rank)
    return rank
