"""Ranks that torchrun has started: every process of the launch calls ``run``, on one host or on many.

    torchrun --nproc-per-node 4 script.py
    torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 8 script.py

The launch decides how many ranks there are; each process is one of them, whatever ``transport`` says.
Tensors on CPUs travel through gloo, those on GPUs through nccl where every rank has one. What each rank did
is gathered at the end, so that every process gets the same ``Run``, whose times are measured on each rank.

Hosts share no memory, so there is no board, and less is proved than elsewhere:

* Checked before any data move, through torchrun's store, at a round trip for each operation of gloo:
  whether the ranks agree on operation, shape, dtype, root and reduction of every collective, on size and
  dtype of a message. Always: whether they create the same groups, and call ``run`` alike.
* Not proved: that nobody can go on. A deadlock lasts until ``timeout_s``, and the error then says in which
  operation and line every rank stands and who has not come; without ``timeout_s`` after
  ``network.WAIT``, as in torch. Mismatches on GPUs are left to nccl. A receive from any rank is not checked.
* Not made equal: a library may buffer a small message, so that a send returns before it is received. What
  stands still on thread and process ranks may run here.

A rank that raises tells the store why and closes its connections; all others, which then find theirs
closed, raise the same error. The process ends with it, and torchrun ends those that are still busy.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lessons_lib.errors import MismatchError, RefusedError, RunError
from lessons_lib.machines import Machine
from lessons_lib.spmd import _torch_internals, by_value, doctor, process_state
from lessons_lib.spmd.current import be_in_this_process, current_number
from lessons_lib.spmd.network import connected, part_of
from lessons_lib.spmd.output import labelled
from lessons_lib.spmd.process_state import seed_all
from lessons_lib.spmd.processes import Ended
from lessons_lib.spmd.recording import recording
from lessons_lib.spmd.threads import Stopped
from lessons_lib.spmd.torchrun_group import TorchrunGroup
from lessons_lib.spmd.torchrun_rank import Report, TorchrunRank, shown_by
from lessons_lib.timeline import ranks_text

START_S = 120.0  # how long the other processes of a launch may take to call run


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


# ---- the launch this process belongs to ----


class Launch:
    """This process's place in a torchrun launch, and what it keeps from one run to the next."""

    def __init__(self) -> None:
        self.store: Any
        self.store, self.rank, self.n_ranks = next(rendezvous("env://"))
        self.n_runs = 0
        self.world: dict[str, Any] = {}  # groups of libraries over all ranks, by device
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
        if not self.world:
            everybody = self.rank, self.n_ranks
            self.world = connected(backend, store, "world", *everybody)
            self.reports = connected("gloo", store, "reports", *everybody)["cpu"]
        return store, backend


def _call_text(call: tuple[Any, ...]) -> str:
    name, line, record, seed = call
    options = "".join(f", {key}={value!r}" for key, value in (("record", record), ("seed", seed)) if value)
    return f"run({name}{options}), whose function begins in line {line}"


_launch: list[Launch] = []


# ---- a run ----


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
    seed_all(seed)
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
