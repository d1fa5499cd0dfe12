"""Ranks as processes of this host: one process each, gloo on CPUs, nccl with a GPU for every rank.

Every call gets fresh processes, forked from one that has torch loaded. The launcher passes on what
they print, proves deadlocks from the board, and ends them all with the run. Nothing but numbered
addresses of the loopback interface is used, and no environment variable.
"""

from __future__ import annotations

import atexit
import hmac
import logging
import math
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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

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
from lessons_lib.spmd import by_value, doctor, process_state
from lessons_lib.spmd.board import ENDED, RUNNING, STARTING, Board, Key, Look
from lessons_lib.spmd.doctor import RankStatus
from lessons_lib.spmd.lines import notebook_cells
from lessons_lib.spmd.output import LabelledStream
from lessons_lib.spmd.process_rank import JOB, Account, Job, Rebuilt
from lessons_lib.spmd.zygote import MOST_AT_ONCE
from lessons_lib.timeline import Where, ranks_text

POLL_S = 0.05  # how often the board is looked at
START_S = 60.0  # how long processes may take to start, and as much again for every rank that shares a core
CONNECT_S = 20.0  # how long started ranks may take to connect, and a second more for each
SETTLE_S = 0.25  # how long the others may take to come to a halt after the first sign of a failure
GRACE_S = 1.0  # how long ranks may take to tell what they did

Ranks = list[tuple[Connection, "Process"]]
Start = Callable[[int], Ranks]

RANK = "lessons_lib.spmd.process_rank"  # whose serve() runs in the process of a rank


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
    accounts: list[Account]
    failure: BaseException | None

    @classmethod
    def before_it_began(cls, n_ranks: int, failure: RunError) -> Ended:
        """Of a run whose ranks could not be started."""
        return cls([None] * n_ranks, [False] * n_ranks, [Account() for _ in range(n_ranks)], failure)


CGROUPS = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Cores this process may use: what it is pinned to, and what a container allows."""
    pinned = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([pinned, *(max(1, quota // period) for quota, period in _cpu_quotas())])


def _cpu_quotas() -> Iterator[tuple[int, int]]:
    """Microseconds of computing per period that control groups allow: version 2, then version 1."""
    group = CGROUPS
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = CGROUPS / next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            yield int(quota), int(period)
    with suppress(OSError, ValueError):
        quota, period = ((CGROUPS / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota), int(period)


def threads_per_rank(n_ranks: int) -> int:
    """OpenMP threads of a rank: the cores shared out, or what the user has set."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else max(1, available_cores() // n_ranks)


# ---- starting ----


def _environment() -> dict[str, str]:
    """For a process of ours that is to import this library, and to leave its cores to the ranks."""
    here = str(Path(__file__).parents[2])
    own = {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), here])}
    return {"OPENBLAS_NUM_THREADS": "1"} | os.environ | own


class Zygote:
    """The process that forks ranks; one for this kernel, started when it is first needed."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lessons_lib.spmd.zygote", "fork", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C in a terminal is the launcher's alone
                env=_environment(),
                stdin=subprocess.DEVNULL,
            )
        self._living: dict[int, Process] = {}
        self._started: list[list[Process]] = []
        self._changed = threading.Condition()
        self._one_request = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def fork(self, n_ranks: int, module: str) -> Ranks:
        with self._one_request:
            ranks: Ranks = []
            while len(ranks) < n_ranks:
                ranks += self._fork(min(n_ranks - len(ranks), MOST_AT_ONCE), module)
            return ranks

    def _fork(self, n_ranks: int, module: str) -> Ranks:
        pairs = [socket.socketpair() for _ in range(n_ranks)]
        try:
            with suppress(OSError):  # it has ended: said below
                socket.send_fds(self.control, [module.encode()], [theirs.fileno() for _, theirs in pairs])
            with self._changed:
                if not self._changed.wait_for(lambda: self._started or not self.lives, START_S):
                    raise RunError(f"no rank was started within {START_S:g} s")
                if not self._started:
                    raise RunError("the process that starts ranks has ended; the next run starts a new one")
                processes = self._started.pop(0)
            return [
                (Connection(mine.detach()), each) for (mine, _), each in zip(pairs, processes, strict=True)
            ]
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()

    def _listen(self) -> None:
        stream = self.control.makefile("rb")
        with suppress(OSError):
            while size := stream.read(4):
                what, *rest = pickle.loads(stream.read(int.from_bytes(size, "little")))
                with self._changed:
                    if what == "started":
                        processes = [Process(pid) for pid in rest[0]]
                        self._living |= {process.pid: process for process in processes}
                        self._started.append(processes)
                    else:
                        self._living.pop(rest[0]).exit_code = rest[1]
                    self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()


_zygote: list[Zygote] = []
_one_zygote = threading.Lock()


@atexit.register
def _close_zygote() -> None:
    for zygote in _zygote:
        zygote.close()
    _zygote.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_zygote.clear)  # it is the parent's


def forked(n_ranks: int, module: str = RANK) -> Ranks:
    """Fork the ranks, or whatever else ``module`` serves, from a process that has torch loaded."""
    with _one_zygote:
        if not _zygote or not _zygote[0].lives:
            _close_zygote()
            _zygote.append(Zygote())
        zygote = _zygote[0]
    return zygote.fork(n_ranks, module)


def spawned(n_ranks: int, module: str = RANK) -> Ranks:
    """The same, each as a new Python: for systems that cannot fork. Untested on Windows and macOS."""
    key = secrets.token_bytes(32)
    until = time.perf_counter() + START_S * (1 + n_ranks / available_cores())
    processes: list[Process] = []
    connections: dict[int, Connection] = {}
    with socket.create_server(("127.0.0.1", 0), backlog=n_ranks) as server:
        server.settimeout(POLL_S)
        try:
            for number in range(n_ranks):
                port = str(server.getsockname()[1])
                child = subprocess.Popen(
                    [sys.executable, "-m", "lessons_lib.spmd.zygote", "alone", port, str(number), module],
                    stdin=subprocess.PIPE,
                    env=_environment(),
                )
                processes.append(Process(child.pid))
                threading.Thread(target=_await, args=(child, processes[-1]), daemon=True).start()
                assert child.stdin is not None
                with child.stdin:
                    child.stdin.write(key)
            while len(connections) < n_ranks:
                with suppress(TimeoutError):
                    number, connection = _accepted(server, key)
                    connections[number] = connection
                ended = [number for number, each in enumerate(processes) if each.exit_code is not None]
                if ended or time.perf_counter() > until:
                    why = (
                        f"rank {ended[0]} ended while it started"
                        if ended
                        else "not all ranks started in time"
                    )
                    raise RunError(f"{why}; thread ranks, the default transport, start no process")
        except BaseException:
            for process in processes:
                process.kill()
            for connection in connections.values():
                connection.close()
            raise
    return [(connections[number], process) for number, process in enumerate(processes)]


def _accepted(server: socket.socket, key: bytes) -> tuple[int, Connection]:
    """The next rank that calls, and its number; whoever does not know the key is not one."""
    end, _ = server.accept()
    end.settimeout(START_S)
    said = b""
    while len(said) < len(key) + 4 and (more := end.recv(len(key) + 4 - len(said))):
        said += more
    if not hmac.compare_digest(said[: len(key)], key):
        end.close()
        raise TimeoutError
    end.settimeout(None)
    return int.from_bytes(said[len(key) :], "little"), Connection(end.detach())


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
    root = logging.getLogger()
    job = Job(
        n_ranks=n_ranks,
        pickled=packed.pickled,
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
        log_level=root.level if root.handlers else None,
    )
    with _folder() as folder, process_state.restored(packed.classes):  # values come with their classes
        board = Board(folder, n_ranks)
        ranks: Ranks = []
        try:
            (folder / JOB).write_bytes(by_value.dumps(job))
            ranks = (start or default_start())(n_ranks)
            for rank, (connection, _) in enumerate(ranks):
                connection.send_bytes(pickle.dumps((rank, str(folder))))
            return Watch(board, ranks, timeout_s).until_the_end()
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


@dataclass
class Raised:
    """What a rank raised."""

    rank: int
    error: BaseException
    report: str


class Watch:
    """The launcher's view of a run: what ranks tell, and what the board says when they are silent.

    At the first sign of a failure it gives the others a moment to come to a halt, so that the report
    can say where all of them stand, and so that a rank that only noticed the end of another, which
    happens within milliseconds, is not taken for the cause.
    """

    def __init__(self, board: Board, ranks: Ranks, timeout_s: float | None) -> None:
        self.board, self.ranks, self.timeout_s = board, ranks, timeout_s
        n_ranks = len(ranks)
        self.values: list[Any] = [None] * n_ranks
        self.returned = [False] * n_ranks
        self.accounts: list[Account | None] = [None] * n_ranks
        self.failure: BaseException | None = None
        self._raised: list[Raised] = []
        self._died: list[int] = []
        self._disagree: list[tuple[Key | str, str]] = []  # where or how, and what was in flight
        self._heard: set[int] = set()  # ranks that have said their last
        self._failed_since = math.inf
        self._asked: set[int] = set()  # ranks that were asked for an account
        self._seen: Look | None = None
        self._writer = 0  # the rank whose text is being written
        self._streams = {
            "stdout": LabelledStream.of(sys.stdout, lambda: self._writer),
            "stderr": LabelledStream.of(sys.stderr, lambda: self._writer),
        }

    def until_the_end(self) -> Ended:
        deadline = time.perf_counter() + (self.timeout_s or math.inf)
        connected_by = time.perf_counter() + CONNECT_S + len(self.ranks)
        try:
            while self.failure is None and not all(self.returned):
                self._hear(POLL_S if self._failed_since == math.inf else POLL_S / 10)
                look, before = self.board.look(), self._seen
                self._seen = look
                if self._failed_since < math.inf:
                    self._decide(look)
                elif STARTING in look.status and time.perf_counter() > connected_by:
                    self.failure = self._not_connected(look)
                elif look == before and look.nobody_runs:
                    self._nobody_runs(look)
                if self.failure is None and time.perf_counter() > deadline:
                    silent = self._ask_for_accounts()
                    report = doctor.too_long(self.timeout_s or 0.0, self.running(), self.standing())
                    self.failure = RunTimeoutError(self._first_errors() + report + silent)
        except KeyboardInterrupt:
            silent = self._ask_for_accounts()
            report = doctor.interrupted(self.running(), self.standing())
            self.failure = KeyboardInterrupt(self._first_errors() + report + silent)
        if self.failure is not None:
            self._ask_for_accounts()
        for rank in range(len(self.ranks)):
            for stream in self._streams.values():
                stream.finish(rank)
        return Ended(self.values, self.returned, self._whole_accounts(), self.failure)

    # ---- what ranks tell ----

    def _hear(self, timeout: float) -> None:
        by_connection = {
            connection: rank for rank, (connection, _) in enumerate(self.ranks) if not connection.closed
        }
        for connection in wait(list(by_connection), timeout):
            assert isinstance(connection, Connection)
            self._hear_from(by_connection[connection], connection)

    def _hear_from(self, rank: int, connection: Connection) -> None:
        try:
            what, *rest = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            connection.close()
            self._died.append(rank)
            self._heard.add(rank)
            self._fails()
            return
        if what in ("returned", "mismatch", "raised"):
            self._heard.add(rank)
        match what:
            case "wrote":
                self._writer = rank
                self._streams[rest[0]].write(rest[1])
            case "account":
                self.accounts[rank] = rest[0]
            case "returned":
                self._take_value(rank, *rest)
            case "mismatch":
                self._disagree.append((rest[0], rest[1]))
                self._fails()
            case "raised":
                error, report, self.accounts[rank] = rest
                self._raised.append(Raised(rank, _error_of(error, report), report))
                self._fails()

    def _take_value(self, rank: int, data: bytes, account: Account) -> None:
        self.accounts[rank] = account
        try:
            self.values[rank] = pickle.loads(data)
            self.returned[rank] = True
        except Exception as error:
            refusal = TypeError(f"what the rank returned cannot be made again in the notebook: {error}")
            report = f"rank {rank} raised TypeError: {refusal}"
            self._raised.append(Raised(rank, refusal, report))
            self._fails()

    def _fails(self) -> None:
        self._failed_since = min(self._failed_since, time.perf_counter())

    # ---- what has gone wrong ----

    def _not_connected(self, look: Look) -> RunError:
        late = ranks_text([rank for rank, status in enumerate(look.status) if status == STARTING])
        return RunError(
            f"{late} did not get ready within {CONNECT_S + len(self.ranks):g} s. Ranks meet on the loopback "
            "interface, 127.0.0.1: does a firewall block it, or are the function's arguments very large? "
            "Thread ranks, the default transport, need no network."
        )

    def _decide(self, look: Look) -> None:
        """Say what the failure is, once the other ranks have come to a halt or had the time to."""
        since = time.perf_counter() - self._failed_since
        halted = set(look.waiting) | self._heard
        causes = [each for each in self._raised if not isinstance(each.error, PeerLostError)]
        if self._disagree or self._died or causes:
            if since < SETTLE_S and len(halted) < len(self.ranks):
                return
        elif since < GRACE_S:
            return
        if self._disagree:
            self.failure = self._mismatch()
        elif self._died:
            self.failure = self._death(self._died[0])
        else:
            self.failure = self._error(min(causes or self._raised, key=lambda each: each.rank))

    def _mismatch(self) -> MismatchError:
        where = self._disagree[0][0]
        report = where if isinstance(where, str) else self._disagreement(where)
        in_flight = "".join(text for _, text in self._disagree)
        return MismatchError(in_flight + self._first_errors() + report)

    def _error(self, raised: Raised) -> BaseException:
        disagreement = self._any_disagreement()  # a library may fail because ranks disagree
        if disagreement and not isinstance(raised.error, RunError | RefusedError):
            return MismatchError(self._first_errors() + disagreement)
        return RankError.of(raised.rank, raised.error, "\n".join([raised.report, *self._others(raised.rank)]))

    def _death(self, rank: int) -> RankError:
        process = self.ranks[rank][1]
        until = time.perf_counter() + GRACE_S
        while process.exit_code is None and time.perf_counter() < until:
            time.sleep(0.005)
        match process.exit_code:
            case None:
                how = "has lost its connection to the notebook"
            case code if code < 0:
                name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
                how = f"was killed by signal {-code} ({name})"
            case code:
                how = f"ended its process with exit code {code}"
        last = self.board.log(rank).latest()
        lines = [f"rank {rank} {how}"]
        if last is not None:
            lines += [f"  its last communication was {last}", f"      {last.where}"]
        return RankError.of(rank, ChildProcessError(lines[0]), "\n".join([*lines, *self._others(rank)]))

    def _others(self, rank: int) -> list[str]:
        others = doctor.where_ranks_stand([stands for stands in self.standing() if stands.rank != rank])
        return ["", *others] if others else []

    def _nobody_runs(self, look: Look) -> None:
        """No rank has moved since the last look, and none runs: a deadlock if each waits in vain."""
        standing = self.standing()
        first_errors, disagreement = self._first_errors(), self._any_disagreement()
        in_vain = all(rank.missing for rank in standing if rank.waits_in)
        if not look.waiting or not in_vain or self.board.look() != look:
            return
        if disagreement:
            self.failure = MismatchError(first_errors + disagreement)
            return
        error = DeadlockError(first_errors + doctor.deadlock(standing))
        error.waiting = tuple(rank.waiting for rank in standing if rank.waiting)
        self.failure = error

    def _first_errors(self) -> str:
        """Exceptions in flight in ranks that are cleaning up: what went wrong first."""
        waiting = set(self.board.look().waiting)
        told = [account.cleaning_up if account else "" for account in self.accounts]
        return "".join(self.board.cleaning_up(r) if r in waiting else told[r] for r in range(len(told)))

    def _any_disagreement(self) -> str:
        """The first collective among those that ranks wait in whose ranks disagree."""
        for rank in self.board.look().waiting:
            waits_in = self.board.waits_in(rank)
            if waits_in and waits_in[0][0] == "collective":
                text = self._disagreement(waits_in[0])
                if text:
                    return text
        return ""

    def _disagreement(self, key: Key) -> str:
        found = [self.board.log(rank).find(key) for rank in range(len(self.ranks))]
        operations = [each.operation for each in found if each]
        come = {operation.rank for operation in operations}
        missing = tuple(member for member in operations[0].members if member not in come)
        return doctor.disagreement(operations, missing)

    def standing(self) -> list[RankStatus]:
        standing = []
        for rank in range(len(self.ranks)):
            status, waits_in = self.board.status(rank), self.board.waits_in(rank)
            if waits_in:
                key, operation = waits_in
                missing = self.board.missing(rank, key, operation)
                standing.append(RankStatus(rank, waits_in=operation, missing=missing))
            else:
                standing.append(RankStatus(rank, status == ENDED, last=self.board.log(rank).latest()))
        return standing

    # ---- what ranks have done ----

    def running(self) -> list[tuple[int, Where]]:
        """The ranks that run, and the line each has come to, as far as it has told."""
        return [
            (rank, account.where)
            for rank, account in enumerate(self.accounts)
            if account is not None and self.board.status(rank) in (STARTING, RUNNING)
        ]

    def _ask_for_accounts(self) -> str:
        """Let every rank tell what it has done until now; say which do not within ``GRACE_S``."""
        asked = []
        for rank, (connection, _) in enumerate(self.ranks):
            if self.accounts[rank] is None and rank not in self._asked and not connection.closed:
                with suppress(OSError):
                    connection.send_bytes(b"account")
                    asked.append(rank)
        self._asked |= set(asked)
        until = time.perf_counter() + GRACE_S
        while asked and time.perf_counter() < until:
            self._hear(POLL_S)
            asked = [rank for rank in asked if self.accounts[rank] is None and rank not in self._heard]
        return f"\n{ranks_text(asked)} did not answer: busy in native code." if asked else ""

    def _whole_accounts(self) -> list[Account]:
        """The accounts of all ranks, and which of their open operations the other side has joined."""
        accounts = [account or Account() for account in self.accounts]
        for rank, account in enumerate(accounts):
            for index, key in account.keys.items():
                operation = account.operations[index]
                operation.met = not self.board.missing(rank, key, operation)
        return accounts


def _error_of(data: bytes, report: str) -> BaseException:
    """The exception a rank raised, or its report if it cannot be made again."""
    try:
        thing = pickle.loads(data)
        return thing.error() if isinstance(thing, Rebuilt) else thing
    except Exception:
        return RuntimeError(report)
