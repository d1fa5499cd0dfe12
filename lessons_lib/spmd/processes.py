"""Ranks as processes of this host: one process each, gloo on CPUs, nccl with a GPU for every rank.

Every call gets fresh processes, forked from one that has torch loaded. The launcher passes on what
they print, proves deadlocks from the board, and ends them all with the run. Nothing but numbered
addresses of the loopback interface is used, and no environment variable.
"""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from lessons_lib.errors import (
    DeadlockError,
    MismatchError,
    PeerLostError,
    RankError,
    RefusedError,
    RunError,
    RunTimeoutError,
)
from lessons_lib.machines import Machine
from lessons_lib.spmd import by_value, doctor
from lessons_lib.spmd.board import Board, Key, Notice
from lessons_lib.spmd.doctor import RankStatus
from lessons_lib.spmd.lines import notebook_cells
from lessons_lib.spmd.output import LabelledStream
from lessons_lib.spmd.process_rank import Account, Job

POLL_S = 0.05  # how often the board is looked at
START_S = 60.0  # how long processes may take to start, and as much again for every rank that shares a core
GRACE_S = 1.0  # how long ranks may take to tell what they did

Start = Callable[[int], list[tuple[Connection, "Process"]]]


@dataclass
class Process:
    """A rank's process, as the launcher knows it."""

    pid: int
    exit_code: int | None = None  # negative: the signal that ended it

    def kill(self) -> None:
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass
class Ended:
    """How a run of processes went."""

    values: list[Any]
    returned: list[bool]
    accounts: list[Account | None]
    failure: BaseException | None
    standing: list[RankStatus]


def available_cores() -> int:
    """Cores this process may use: what it is pinned to, and what a container allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def threads_per_rank(n_ranks: int) -> int:
    """OpenMP threads of a rank: the cores shared out, or what the user has set."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else max(1, available_cores() // n_ranks)


# ---- starting ----


class Zygote:
    """The process that forks ranks; one for this kernel, started when it is first needed."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lessons_lib.spmd.zygote", "fork", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C in a terminal is the launcher's alone
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
            )
        self._children: dict[int, Process] = {}
        self._started: list[list[int]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def fork(self, n_ranks: int) -> list[tuple[Connection, Process]]:
        pairs = [socket.socketpair() for _ in range(n_ranks)]
        socket.send_fds(self.control, [b"+"], [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        with self._changed:
            if not self._changed.wait_for(lambda: self._started or not self.lives, timeout=START_S):
                raise RunError(f"no rank was started within {START_S:g} s")
            if not self._started:
                raise RunError("the process that starts ranks has ended; the next run starts a new one")
            pids = self._started.pop(0)
            ours = [Connection(mine.detach()) for mine, _ in pairs]
            return [(end, self._children[pid]) for end, pid in zip(ours, pids, strict=True)]

    def _listen(self) -> None:
        stream = self.control.makefile("rb")
        while size := stream.read(4):
            what, *rest = pickle.loads(stream.read(int.from_bytes(size, "little")))
            with self._changed:
                if what == "started":
                    self._children |= {pid: Process(pid) for pid in rest[0]}
                    self._started.append(rest[0])
                else:
                    self._children.pop(rest[0]).exit_code = rest[1]
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self.control.close()


_zygote: list[Zygote] = []


def forked(n_ranks: int) -> list[tuple[Connection, Process]]:
    """Fork the ranks from a process that has torch loaded."""
    if not _zygote or not _zygote[0].lives:
        _zygote[:] = [Zygote()]
        atexit.register(_zygote[0].close)
    return _zygote[0].fork(n_ranks)


def spawned(n_ranks: int) -> list[tuple[Connection, Process]]:
    """Start every rank as a new Python: for systems that cannot fork. Untested on Windows and macOS."""
    key = secrets.token_bytes(32)
    ranks = []
    with Listener(("127.0.0.1", 0), backlog=n_ranks, authkey=key) as listener:
        for _ in range(n_ranks):
            child = subprocess.Popen(
                [sys.executable, "-m", "lessons_lib.spmd.zygote", repr(listener.address)],
                stdin=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            assert child.stdin is not None
            child.stdin.write(key)
            child.stdin.close()
            process = Process(child.pid)
            threading.Thread(target=_await, args=(child, process), daemon=True).start()
            ranks.append(process)
        return [(listener.accept(), process) for process in ranks]


def _await(child: subprocess.Popen[bytes], process: Process) -> None:
    process.exit_code = child.wait()


def default_start() -> Start:
    can_fork = sys.platform.startswith("linux") and hasattr(os, "pidfd_open")
    return forked if can_fork else spawned


def backend_for(n_ranks: int) -> str:
    """nccl with a GPU for every rank; otherwise gloo."""
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= n_ranks else "gloo"


# ---- a run ----


def launch(
    n_ranks: int,
    packed: by_value.Packed,
    *,
    seed: int,
    machine: Machine | None,
    record: tuple[str, ...],
    timeout_s: float | None,
    start: Start | None = None,
) -> Ended:
    """Run a function on ``n_ranks`` processes to its end."""
    with _folder() as folder:
        board = Board(folder / "board", n_ranks)
        ranks = (start or default_start())(n_ranks)
        try:
            watch = Watch(board, ranks, timeout_s)
            for rank, (connection, _) in enumerate(ranks):
                job = Job(
                    rank=rank,
                    n_ranks=n_ranks,
                    pickled=packed.pickled,
                    folder=str(folder),
                    backend=backend_for(n_ranks),
                    seed=seed,
                    n_threads=threads_per_rank(n_ranks),
                    machine=machine,
                    record=record,
                    default_dtype=torch.get_default_dtype(),
                    cells=notebook_cells(),
                    working_directory=os.getcwd(),
                    path=list(sys.path),
                    environment=dict(os.environ),
                )
                connection.send_bytes(cloudpickle.dumps(job))
            return watch.until_the_end()
        finally:
            for connection, process in ranks:
                connection.close()
                process.kill()
            board.close()


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Watch:
    """The launcher's view of a run: what ranks tell, and what the board says when they are silent."""

    def __init__(
        self, board: Board, ranks: list[tuple[Connection, Process]], timeout_s: float | None
    ) -> None:
        self.board, self.ranks, self.timeout_s = board, ranks, timeout_s
        n_ranks = len(ranks)
        self.values: list[Any] = [None] * n_ranks
        self.returned = [False] * n_ranks
        self.accounts: list[Account | None] = [None] * n_ranks
        self.failure: BaseException | None = None
        self._writer = [0]  # the rank whose text is being written
        self._streams = {
            "stdout": LabelledStream.of(sys.stdout, lambda: self._writer[0]),
            "stderr": LabelledStream.of(sys.stderr, lambda: self._writer[0]),
        }
        self._lost: list[tuple[int, PeerLostError, str]] = []  # ranks that noticed that another has gone
        self._seen: list[int] = []  # versions of the notices when the board was last looked at

    def until_the_end(self) -> Ended:
        deadline = time.perf_counter() + (self.timeout_s or float("inf"))
        look = time.perf_counter() + POLL_S
        try:
            while self.failure is None and not all(self.returned):
                self._hear(look - time.perf_counter())
                if self.failure is None and time.perf_counter() >= look:
                    look = time.perf_counter() + POLL_S
                    self._look()
                if self._lost and self.failure is None:
                    self._hear_the_cause()
                if self.failure is None and time.perf_counter() > deadline:
                    self._give_up()
        except KeyboardInterrupt:
            self.failure = KeyboardInterrupt("the ranks were stopped")
        standing = self.standing()
        if self.failure is not None:
            self._ask_for_accounts()
        for rank in range(len(self.ranks)):
            for stream in self._streams.values():
                stream.finish(rank)
        return Ended(self.values, self.returned, self.accounts, self.failure, standing)

    # ---- what ranks tell ----

    def _hear(self, timeout: float) -> None:
        silent = [connection for connection, _ in self.ranks if not connection.closed]
        for connection in wait(silent, max(0.0, timeout)):
            rank = next(rank for rank, (theirs, _) in enumerate(self.ranks) if theirs is connection)
            self._hear_from(rank)

    def _hear_from(self, rank: int) -> None:
        connection = self.ranks[rank][0]
        try:
            what, *rest = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            connection.close()
            self._ended_without_a_word(rank)
            return
        match what:
            case "wrote":
                self._writer[0] = rank
                self._streams[rest[0]].write(rest[1])
            case "account":
                self.accounts[rank] = rest[0]
            case "returned":
                value, _, self.accounts[rank] = rest
                self.values[rank], self.returned[rank] = value, True
            case "raised":
                error, report, self.accounts[rank] = rest
                self._raised(rank, error, report)

    def _raised(self, rank: int, error: BaseException | None, report: str) -> None:
        if self.failure is not None:
            return
        if isinstance(error, PeerLostError):
            self._lost.append((rank, error, report))
            return
        if isinstance(error, MismatchError):
            self.failure = error
            return
        disagreement = self._disagreement()  # a library may fail because ranks disagree
        if disagreement and not isinstance(error, RunError | RefusedError):
            self.failure = MismatchError(disagreement)
            return
        others = doctor.where_ranks_stand([stands for stands in self.standing() if stands.rank != rank])
        text = "\n".join([report, *(["", *others] if others else [])])
        self.failure = RankError.of(rank, error or RuntimeError(report), text)

    def _hear_the_cause(self) -> None:
        """A rank noticed that another has gone: that one has the reason, and tells it, or ends."""
        until = time.perf_counter() + GRACE_S
        while self.failure is None and time.perf_counter() < until:
            self._hear(0.05)
        if self.failure is None:
            rank, error, report = self._lost[0]
            self.failure = RankError.of(rank, error, report)

    def _ended_without_a_word(self, rank: int) -> None:
        process = self.ranks[rank][1]
        for _ in range(100):
            if process.exit_code is not None:
                break
            time.sleep(0.01)
        code = process.exit_code
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"ended its process with exit code {code}"
        others = doctor.where_ranks_stand([stands for stands in self.standing() if stands.rank != rank])
        last = self.board.read(rank).latest()
        lines = [f"rank {rank} {how}"]
        if last is not None:
            lines += [f"  its last communication was {last}", f"      {last.where}"]
        text = "\n".join([*lines, *(["", *others] if others else [])])
        self.failure = self.failure or RankError.of(rank, ChildProcessError(lines[0]), text)

    def _ask_for_accounts(self) -> None:
        """Let every rank tell what it has done until now; wait no longer than ``GRACE_S``."""
        asked = []
        for rank, (connection, _) in enumerate(self.ranks):
            if self.accounts[rank] is None and not connection.closed:
                with suppress(OSError):
                    connection.send_bytes(b"account")
                    asked.append(rank)
        until = time.perf_counter() + GRACE_S
        while any(self.accounts[rank] is None and not self.ranks[rank][0].closed for rank in asked):
            if time.perf_counter() > until:
                break
            self._hear(0.05)

    # ---- what the board says ----

    def notices(self) -> list[Notice]:
        return [self.board.read(rank) for rank in range(len(self.ranks))]

    def _look(self) -> None:
        notices = self.notices()
        versions = [notice.version for notice in notices]
        still, self._seen = versions == self._seen, versions
        waiting = [rank for rank, notice in enumerate(notices) if notice.state == "waiting"]
        if not still or not waiting or any(notice.state in ("starting", "running") for notice in notices):
            return
        if any(not missing(notices, rank) for rank in waiting):
            return
        disagreement = self._disagreement()
        if disagreement:
            self.failure = MismatchError(disagreement)
            return
        standing = self.standing()
        error = DeadlockError(doctor.deadlock(standing))
        error.waiting = tuple(rank.waiting for rank in standing if rank.waiting)
        self.failure = error

    def _disagreement(self) -> str:
        """The first collective among those that ranks wait in whose ranks disagree."""
        notices = self.notices()
        for notice in notices:
            if notice.state == "waiting" and notice.waits_for and notice.waits_for[0] == "collective":
                found = [other.find(notice.waits_for) for other in notices]
                text = doctor.disagreement([each[0] for each in found if each])
                if text:
                    return text
        return ""

    def standing(self) -> list[RankStatus]:
        notices = self.notices()
        ranks = []
        for rank, notice in enumerate(notices):
            found = notice.find(notice.waits_for) if notice.state == "waiting" else None
            if found:
                ranks.append(RankStatus(rank, waits_in=found[0], missing=missing(notices, rank)))
            else:
                ranks.append(RankStatus(rank, ended=notice.state == "ended", last=notice.latest()))
        return ranks

    def _give_up(self) -> None:
        notices = self.notices()
        self._ask_for_accounts()
        running = [
            (rank, account.where)
            for rank, account in enumerate(self.accounts)
            if account and notices[rank].state == "running" and not self.returned[rank]
        ]
        self.failure = RunTimeoutError(doctor.too_long(self.timeout_s or 0.0, running, self.standing()))


def missing(notices: list[Notice], rank: int) -> tuple[int, ...]:
    """The ranks that ``rank`` waits for and that have not posted their side."""
    key: Key = notices[rank].waits_for
    found = notices[rank].find(key)
    if not found:
        return ()
    operation = found[0]
    if key[0] == "collective":
        count, number = key[:2], key[2]
        return tuple(m for m in operation.members if notices[m].counts.get(count, 0) < number)
    kind, name, sender, receiver, tag, number = key
    if operation.peer is None:  # from anyone: as many sends as receives would do
        sends = sum(
            n
            for notice in notices
            for (what, *where), n in notice.counts.items()
            if what == "send" and (where[0], where[2], where[3]) == (name, receiver, tag)
        )
        others = tuple(m for m in operation.members if m != rank)
        return others if sends < number else ()
    other = "recv" if kind == "send" else "send"
    theirs = notices[operation.peer].counts
    met = theirs.get((other, name, sender, receiver, tag), 0)
    if kind == "send":
        met += theirs.get((other, name, None, receiver, tag), 0)
    return () if met >= number else (operation.peer,)
