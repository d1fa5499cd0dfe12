"""Ranks that torchrun has started: every process of the launch calls ``run``, on one host or on many.

    torchrun --nproc-per-node 4 script.py
    torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 8 script.py

The launch decides how many ranks there are; each process is one of them, whatever ``transport`` says.
Data travel through gloo, or through nccl where every rank has a GPU. What each rank did is gathered at
the end, so that every process gets the same ``Run``, whose times are measured on each rank.

Hosts share no memory, so there is no board, and less is proved than elsewhere:

* Checked before any data move, through torchrun's store, at a round trip for each operation: on gloo,
  whether the ranks agree on operation, shape, dtype, root and reduction of every collective, on size and
  dtype of a message, on the groups they create; on every backend, whether they call ``run`` alike.
* Not proved: that nobody can go on. A deadlock lasts until ``timeout_s``, and the error then says in which
  operation and line every rank stands and who has not come; without ``timeout_s`` until ``WAIT``, as in
  torch. On nccl, mismatches are left to nccl. A receive from any rank is not checked.
* Not made equal: a library may buffer a small message, so that a send returns before it is received. What
  stands still on thread and process ranks may run here.

A rank that raises tells the store why and closes its connections; all others, which then find theirs
closed, raise the same error. The process ends with it, and torchrun ends those that are still busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import os
import pickle
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from lessons_lib.errors import (
    MismatchError,
    PeerLostError,
    RankError,
    RefusedError,
    RunError,
    RunTimeoutError,
)
from lessons_lib.machines import Machine
from lessons_lib.spmd import _torch_internals, by_value, doctor, process_state
from lessons_lib.spmd._torch_internals import AllgatherOptions, Work, native_group
from lessons_lib.spmd.clock import Clock
from lessons_lib.spmd.current import be_in_this_process, current_number
from lessons_lib.spmd.doctor import Creation, RankStatus
from lessons_lib.spmd.library import Asked, LibraryWork, ask, first_line
from lessons_lib.spmd.lines import LineFinder, line_of_frame
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.output import labelled
from lessons_lib.spmd.process_rank import Account
from lessons_lib.spmd.processes import Ended
from lessons_lib.spmd.rank_group import Exchange, Native, RankGroup, Tensors
from lessons_lib.spmd.recording import Ledger, recording
from lessons_lib.spmd.threads import Stopped
from lessons_lib.timeline import Where, ranks_text

START_S = 120.0  # how long the other processes of a launch may take to call run
GRACE_S = 2.0  # how long ranks may take to tell what they did, and why they ended
WAIT = timedelta(minutes=30)  # torch's own: how long gloo waits for the other side
LAG = 64  # a check stays in the store until its group is so many collectives further
SEVERED = 2**31 - 1  # the tag of a message that nobody sends
ELSEWHERE = "192.0.2.1"  # an address set aside for documentation (RFC 5737): the way to it is the way out


def is_launched() -> bool:
    """Whether torchrun started this process, or a parent of it."""
    launch = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return launch and bool({"TORCHELASTIC_RUN_ID", "GROUP_RANK"} & os.environ.keys())


def is_first() -> bool:
    """Whether this process speaks for its launch: rank 0, or one that torchrun did not start."""
    return not is_launched() or os.environ["RANK"] == "0"


def ranks_of_launch(ranks: Any, machine: Any) -> Any:
    """``ranks`` as ``run`` was given it, or the launch's own; what a launch cannot do is refused."""
    size = int(os.environ["WORLD_SIZE"])
    refusal = ""
    if dist.is_initialized():
        refusal = (
            "torch.distributed is initialised already, and run does that itself in a torchrun launch. "
            "Leave init_process_group out, or call destroy_process_group before run."
        )
    elif isinstance(ranks, int) and ranks != size:
        refusal = (
            f"ranks={ranks}, and torchrun started {size} processes, which are the ranks. "
            f"Try ranks={size}, or leave ranks out; or start as many: torchrun --nproc-per-node {ranks} ..."
        )
    elif machine is not None:
        refusal = (
            f"machine={machine!r} gives ranks a virtual clock, and those of a torchrun launch are measured. "
            "Leave machine out, or run the script without torchrun: thread ranks keep that clock exactly."
        )
    if refusal:
        raise shown_by(0, RefusedError(refusal))
    return size if ranks is None else ranks


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


# ---- the launch this process belongs to ----


class Launch:
    """This process's place in a torchrun launch, and what it keeps from one run to the next."""

    def __init__(self) -> None:
        self.store: Any
        self.store, self.rank, self.n_ranks = next(rendezvous("env://"))
        self.n_runs = 0
        self.world: Any = None  # the library's group over all ranks
        self.reports: Any = None  # a group of our own, through which what ranks did is gathered

    def meet(self, call: tuple[Any, ...]) -> tuple[Any, str]:
        """Begin a run when all processes have called it alike: its part of the store, its backend."""
        self.n_runs += 1
        store = part_of(self.store, f"run{self.n_runs}")
        n_local = int(os.environ.get("LOCAL_WORLD_SIZE", self.n_ranks))
        has_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= n_local
        store.set(f"call/{self.rank}", pickle.dumps((call, has_gpu)))
        keys = [f"call/{rank}" for rank in range(self.n_ranks)]
        try:
            store.wait(keys, timedelta(seconds=START_S))
        except RuntimeError:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise RunError(
                f"{ranks_text(absent)} did not call {_call_text(call)} within {START_S:g} s. "
                "Every process of a torchrun launch calls run, in the same order."
            ) from None
        told = [pickle.loads(data) for data in store.multi_get(keys)]
        if len({theirs for theirs, _ in told}) > 1:
            lines = [f"  rank {rank} calls {_call_text(theirs)}" for rank, (theirs, _) in enumerate(told)]
            what = "Mismatch: the processes of this launch call run differently."
            remedy = "Try: let every process make the same calls of run, in the same order."
            raise shown_by(0, MismatchError("\n".join([what, "", *lines, "", remedy])))
        backend = "nccl" if all(gpu for _, gpu in told) else "gloo"
        if self.world is None:
            everybody = self.rank, self.n_ranks
            self.world = library_group(backend, store, "world", *everybody)
            self.reports = library_group("gloo", store, "reports", *everybody)
        return store, backend


def _call_text(call: tuple[Any, ...]) -> str:
    name, line, record, seed = call
    options = "".join(f", {key}={value!r}" for key, value in (("record", record), ("seed", seed)) if value)
    return f"run({name}{options}), whose function begins in line {line}"


_launch: list[Launch] = []


def part_of(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def library_group(backend: str, store: Any, name: str, rank: int, size: int) -> Any:
    """A group of gloo, on the interface that leads to the other hosts, or of nccl."""
    if backend == "nccl":
        return native_group(backend, store, name, rank, size)
    with _interface_named():
        return dist.ProcessGroupGloo(part_of(store, name), rank, size, WAIT)


@contextlib.contextmanager
def _interface_named() -> Iterator[None]:
    """Tell gloo its interface, as a user of torch does; left alone, it would look up this host's name."""
    variable = "GLOO_SOCKET_IFNAME"
    found = None if variable in os.environ else interface()
    if found is not None:
        os.environ[variable] = found
    try:
        yield
    finally:
        if found is not None:
            del os.environ[variable]


def interface() -> str | None:
    """The name of the interface that leads to the other ranks; ``None`` where it cannot be told."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return interface_of("127.0.0.1")
    own = address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if own is None or own.startswith("127."):  # many a host knows its own name as 127.0.1.1
        own = address_towards(ELSEWHERE, 9)
    return None if own is None else interface_of(own)


def address_towards(host: str, port: int) -> str | None:
    """The address of this host from which it would speak to another. Nothing is sent.

    >>> address_towards("127.0.0.1", 9)
    '127.0.0.1'
    """
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The interface with this IPv4 address, on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                asked = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), 0x8915, asked)  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def sever(group: Any) -> None:
    """Close the connections of a library's group, so that whoever waits in it, here or there, stops.

    gloo has no call for that, but closes them when a receive takes too long.
    """
    if group.name() == "gloo":
        if group.size() > 1:
            with contextlib.suppress(RuntimeError):
                peer = (group.rank() + 1) % group.size()
                group.recv([torch.empty(1)], peer, SEVERED).wait(timedelta(milliseconds=1))
    else:
        with contextlib.suppress(RuntimeError):
            group.abort()


# ---- a run ----


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


class TorchrunRank:
    """The rank that this process is, for one run."""

    def __init__(self, launch: Launch, store: Any, backend: str) -> None:
        self.number, self.n_ranks = launch.rank, launch.n_ranks
        self.launch, self.store, self.backend = launch, store, backend
        self.machine: Machine | None = None
        self.clock = Clock()
        self.lines, self.ledger = LineFinder(), Ledger()
        self.operations: list[Operation] = []
        self.n_messages: dict[Any, int] = {}
        self.n_groups: dict[Any, int] = {}
        self.regions: list[str] = []
        self.natives: list[Any] = [launch.world]
        self.waits_in: Operation | None = None
        self.cause: BaseException | None = None  # what this rank itself raised
        self._ended = threading.Event()
        self._ending = threading.Lock()

    def region(self) -> str:
        return "/".join(self.regions)

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
        return PeerLostError(f"{what} broke off: {str(error).splitlines()[0]}")

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
        report = doctor.too_long(timeout_s, running, _who_waits_for_whom(told))
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
        return Standing(status, where, issued)

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
            self.launch.world = self.launch.reports = None
        elif any(math.isinf(o.done_s) for each in reports.values() for o in each.account.operations):
            for group in self.natives:  # what was left unfinished must not meet the next run
                sever(group)
            self.launch.world = None
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


def launch(
    n_ranks: int,
    packed: by_value.Packed,
    *,
    seed: int,
    machine: Machine | None,
    record: tuple[str, ...],
    timeout_s: float | None,
) -> Ended:
    """Be a rank of this launch until the function has ended on all of them."""
    if not _launch:
        _launch.append(Launch())
    fn, args = by_value.unpack(packed.pickled)
    code = getattr(fn, "__code__", None)
    call = getattr(fn, "__name__", type(fn).__name__), code.co_firstlineno if code else 0, record, seed
    store, backend = _launch[0].meet(call)
    rank = TorchrunRank(_launch[0], store, backend)
    report = Report(None, False, rank.account())
    with process_state.restored(packed.classes), torch.autograd.set_multithreading_enabled(True):
        try:
            be_in_this_process(rank)
            with labelled(current_number) as finish, _whole_lines():
                report = _call(rank, fn, args, seed, record, timeout_s)
                finish(rank.number)
        finally:
            be_in_this_process(None)
            _torch_internals.forget_groups()
    return rank.end(report)


def _call(
    rank: TorchrunRank,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    seed: int,
    record: tuple[str, ...],
    timeout_s: float | None,
) -> Report:
    value, returned = None, False
    if rank.backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        everybody = tuple(range(rank.n_ranks))
        world = TorchrunGroup(rank, "0", "world", everybody, rank.launch.world)
        _torch_internals.become_default_group(world)
        meters = recording(record, None, rank.clock, rank.region, rank.ledger, (fn, args))
        with rank.at_most(timeout_s), meters:
            value = fn(*args)
            _torch_internals.await_results(value)
        returned = True
    except Stopped:
        pass
    except SystemExit as end:
        returned = end.code in (None, 0)
        if not returned:
            rank.fail("RankError", "\n".join(doctor.traceback_of(rank.number, end)), end)
    except KeyboardInterrupt:
        rank.fail("RankError", "the ranks were stopped", KeyboardInterrupt("the ranks were stopped"))
        raise
    except BaseException as error:
        rank.fail("RankError", "\n".join(doctor.traceback_of(rank.number, error)), error)
    return Report(value if returned else None, returned, rank.account())


@contextlib.contextmanager
def _whole_lines() -> Iterator[None]:
    """Write each line at once, so that the lines of several processes do not mix."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    yield


# ---- groups ----


class TorchrunGroup(RankGroup):
    """A group of ranks that torchrun started. ``native`` is the library's group over the same ranks."""

    owner: TorchrunRank

    def __init__(
        self, owner: TorchrunRank, name: str, label: str, members: tuple[int, ...], native: Any
    ) -> None:
        super().__init__(owner, name, label, members)
        self.native = native
        self._n_checks: dict[Any, int] = {}  # of messages, by sender, receiver and tag
        self._any_source: set[int] = set()  # tags that this rank receives from anyone

    def _new_group(self, name: str, label: str, creation: Creation) -> RankGroup | None:
        owner = self.owner
        first: Creation = self._first(f"group/{name}", creation)
        if first.members != creation.members:
            self._mismatch(doctor.different_groups(*sorted((first, creation), key=lambda c: c.rank)))
        if owner.number not in creation.members:
            return None
        owner.meet(f"group/{name}", creation.members)  # inside of gloo nobody could stop a rank that waits
        index, size = creation.members.index(owner.number), len(creation.members)
        native = library_group(owner.backend, owner.store, f"group{name}", index, size)
        owner.natives.append(native)
        return TorchrunGroup(owner, name, label, creation.members, native)

    def _issue_collective(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, exchange: Exchange, native: Native
    ) -> Work:
        if self.owner.backend == "gloo" and self.size() > 1:
            prefix = f"collective/{self.group_name}/"
            first = self._first(f"{prefix}{operation.sequence}", operation)
            disagreement = doctor.disagreement([first, operation])
            if disagreement:
                self._mismatch(disagreement)
            if self.index == 0 and operation.sequence > LAG:
                self.owner.store.delete_key(f"{prefix}{operation.sequence - LAG}")
        return TorchrunWork(self, operation, self._ask(operation, inputs, outputs, exchange, native))

    def _issue_message(
        self,
        operation: Operation,
        tensors: Tensors,
        sender: int | None,
        receiver: int,
        tag: int,
        native: Native,
    ) -> Work:
        if sender is None:  # from now on it is open which message meets which receive
            self._any_source.add(tag)
        elif self.owner.backend == "gloo" and not (operation.kind == "recv" and tag in self._any_source):
            pair = sender, receiver, tag
            number = self._n_checks[pair] = self._n_checks.get(pair, 0) + 1
            key = f"message/{self.group_name}/{sender}/{receiver}/{tag}/{number}"
            first = self._first(key, operation)
            if first.kind != operation.kind:
                self.owner.store.delete_key(key)
                sent, received = (first, operation) if first.kind == "send" else (operation, first)
                if (sent.n_elements, sent.dtypes) != (received.n_elements, received.dtypes):
                    self._mismatch(doctor.different_message(sent, received))
        inputs, outputs = (tensors, []) if operation.kind == "send" else ([], tensors)
        return TorchrunWork(self, operation, self._ask(operation, inputs, outputs, lambda sent: sent, native))

    def _first(self, key: str, mine: Any) -> Any:
        """What the first rank to come has put under ``key``; this one's, if it is the first."""
        return pickle.loads(self.owner.store.compare_set(key, "", pickle.dumps(mine)))

    def _mismatch(self, report: str) -> None:
        """Stop everybody: ranks disagree, and going on would give a wrong number."""
        self.owner.fail("MismatchError", report)
        raise Stopped

    def _ask(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, exchange: Exchange, native: Native
    ) -> Asked:
        operation.met = True  # the library answers when the other side has come
        try:
            return ask(self.native, self, operation, inputs, outputs, exchange, native)
        except RuntimeError as error:
            if self.owner.failure():
                raise Stopped from None
            raise RuntimeError(f"{self.owner.backend} cannot do {operation}: {first_line(error)}") from error


class TorchrunWork(LibraryWork):
    """The handle of an operation: what the library says is true."""

    group: TorchrunGroup

    def _wait(self) -> None:
        owner = self.group.owner
        owner.waits_in = self.operation
        try:
            self._await_library()
        except RuntimeError as error:
            raise owner.broke_off(str(self.operation), error) from None
        finally:
            owner.waits_in = None

    def _settle(self, began: float) -> None:
        operation = self.operation
        if operation.kind == "recv" and operation.peer is None:
            # now it is known which message came: the next one from that rank
            peer = self._source_rank()
            operation.peer = operation.members[peer]
            counts, key = self.group.owner.n_messages, (self.group.label, operation.members, "recv", peer)
            counts[key] = operation.sequence = counts.get(key, 0) + 1
        super()._settle(began)
