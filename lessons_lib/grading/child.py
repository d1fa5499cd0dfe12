"""What runs in the child process of a check: the learner's functions, on thread ranks, and nothing else.

The child knows no right answer. It is given functions and arguments, and tells what came out and what was
sent, as JSON: numbers and text, which cannot do anything in the process that reads them. Everything is
judged there. A child that hangs, ends or eats memory is killed, and costs nobody anything.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib import mesh as meshes
from lessons_lib.errors import RunTimeoutError
from lessons_lib.grading.exercise import Axis, WholeMesh, tensors_in
from lessons_lib.grading.job import Call, Job
from lessons_lib.mesh import Mesh
from lessons_lib.spmd import _torch_internals, by_value, launcher, rank_group
from lessons_lib.spmd.current import current
from lessons_lib.spmd.launcher import Request, region
from lessons_lib.spmd.lines import know_cells

_torch_internals.load_compiler()  # a Mesh needs it, and it takes its time: once, for all children

MOST_BYTES = 2**30  # of memory that the learner's functions may take
MOST_ELEMENTS = 100_000  # of a tensor that is told in numbers
MOST_PRINTED = 2_000  # characters that are kept
LONGEST_REPORT = 20_000  # characters of an error that are told


class Exited(Exception):
    """The learner's function called sys.exit, which would end a rank without a word."""


class Printed(io.TextIOBase):
    """Keeps the beginning of what is printed."""

    def __init__(self) -> None:
        self.kept, self.n_characters = "", 0

    def write(self, text: str) -> int:
        self.n_characters += len(text)
        self.kept += text[: MOST_PRINTED - len(self.kept)]
        return len(text)

    def writable(self) -> bool:
        return True


def serve(connection: Connection) -> None:
    """Do the one job that comes through ``connection``, and tell what came out."""
    _fence()
    job: Job = pickle.loads(connection.recv_bytes())
    try:
        _do(job, connection)
    except BaseException as error:  # outside of the ranks, which have their own reports
        _tell(connection, broke=f"{type(error).__name__}: {error}"[:LONGEST_REPORT])
    threading.Event().wait(60)  # until it is killed


def _do(job: Job, connection: Connection) -> None:
    know_cells(job.cells)
    sys.path[:] = job.path
    os.chdir(job.working_directory)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.stdout = sys.stderr = printed = Printed()
    watched = _watched()
    _tell(connection, ready=True)
    functions = pickle.loads(job.functions)
    for number, call in enumerate(job.calls):
        told = _tried(functions, call, job.trial_s)
        _tell(connection, trial=number, **told)
        if number == 0 and printed.n_characters:
            _tell(connection, printed=printed.kept, n_characters=printed.n_characters)
        if told["timed_out"]:  # its threads may go on
            break
    _tell(connection, replaced=[name for name, thing in watched.items() if _found(name) is not thing])
    _tell(connection, done=True)


def _fence() -> None:
    """Keep what the learner's functions do to this process, and end it if nobody else does."""
    if hasattr(os, "setsid"):
        with suppress(OSError):
            os.setsid()  # so that what they start ends with it
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _tell(connection: Connection, **message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


# ---- one trial ----


def _tried(functions: dict[str, Callable[..., Any]], call: Call, trial_s: float) -> dict[str, Any]:
    """Run a trial and say what came out, in numbers and text."""
    function = functions[call.function]
    step = partial(_on_a_rank, function, dict(call.sizes), call.args, call.upstream, call.then)
    packed = by_value.pack(step, ())
    asked = Request(len(call.args), packed, call.function, call.machine, ("memory",), trial_s, 0, call.turns)
    result = launcher.run_threads(asked)
    error = result.error
    return {
        "values": result.values,
        "error": None if error is None else [type(error).__name__, str(error)[:LONGEST_REPORT]],
        "cause": type(getattr(error, "cause", None)).__name__,
        "timed_out": isinstance(error, RunTimeoutError),
        "notes": [*result.notes, *result.questions],
        "events": [_event(event) for event in result.trace.events],
        "seconds": result.seconds,
        "done_s": result.trace.timeline.makespan,
    }


def _event(event: Any) -> dict[str, Any]:
    names = ("rank", "kind", "members", "sequence", "n_elements", "bytes_sent", "peer", "region")
    return {name: getattr(event, name) for name in names}


def _on_a_rank(
    function: Callable[..., Any],
    sizes: dict[str, int],
    args: list[bytes],
    upstream: list[bytes] | None,
    then: Callable[..., Any] | None,
) -> dict[str, Any]:
    """What every rank runs: one call, perhaps its backward, and what there is to tell of it."""
    mesh = Mesh(**sizes)
    given = pickle.loads(args[mesh.rank])
    mine = [mesh[arg.name] if isinstance(arg, Axis) else arg for arg in given]
    mine = [mesh if isinstance(arg, WholeMesh) else arg for arg in mine]
    tensors = [tensor for _, tensor in tensors_in(enumerate(mine))]
    for tensor in tensors:
        tensor.detach()  # the meter sees it
    peaks = {}
    with region("forward"):
        begun = _mark()
        try:
            value = function(*mine)
        except SystemExit as end:
            raise Exited(f"sys.exit({end.code!r}) was called: return instead") from None
        peaks["forward"] = _peak(begun)
    if then is not None and value is not None and value is not ...:
        value = then(value, mesh)
    results = list(value) if isinstance(value, tuple | list) else [value]
    results = [each.to_local() if hasattr(each, "to_local") else each for each in results]  # of a DTensor
    gradients: list[Any] = []
    if upstream is not None:
        y = results[0]
        differentiable = isinstance(y, Tensor) and y.requires_grad
        dy = pickle.loads(upstream[mesh.rank])
        if differentiable and dy.shape == y.shape:
            with region("backward"):
                begun = _mark()
                y.backward(dy)
                peaks["backward"] = _peak(begun)
        gradients = [tensor.grad for tensor in tensors if tensor.requires_grad]
    before = [tensor for _, tensor in tensors_in(enumerate(pickle.loads(args[mesh.rank])))]
    with torch.no_grad():
        changed = [n for n, (old, new) in enumerate(zip(before, tensors, strict=True)) if not _same(old, new)]
    return {
        "results": [_told(each) for each in results],
        "gradients": [_told(each) for each in gradients],
        "changed": changed,
        "peaks": peaks,
    }


def _same(old: Tensor, new: Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and torch.equal(old, new)


def _mark() -> int:
    return len(current().ledger.live_bytes)


def _peak(begun: int) -> int:
    """The most bytes that tensors of this rank held since a mark, besides those it held at the mark."""
    live = [n_bytes for _, n_bytes in current().ledger.live_bytes[begun - 1 :]]
    return max(live) - live[0]


def _told(value: Any) -> dict[str, Any]:
    """A result in numbers and text."""
    if value is None or value is ...:
        return {"nothing": True}
    if isinstance(value, bool | int | float):
        return {"dtype": type(value).__name__, "shape": [], "data": [float(value)]}
    if not isinstance(value, Tensor):
        return {"what": type(value).__name__}
    dtype = str(value.dtype).removeprefix("torch.")
    told: dict[str, Any] = {"dtype": dtype, "shape": list(value.shape)}
    if value.numel() <= MOST_ELEMENTS and not value.is_complex():
        told["data"] = value.detach().double().flatten().tolist()
    return told


# ---- what must not be replaced ----

WATCHED: Sequence[Any] = (
    dist,
    _torch_internals.c10d,
    meshes,
    meshes.Group,
    launcher,
    rank_group,
    rank_group.RankGroup,
    sys.modules[__name__],
)


def _watched() -> dict[str, Any]:
    """The functions and classes that count and tell, by where they are found."""
    return {
        f"{place} {name}": thing
        for place, owner in enumerate(WATCHED)
        for name, thing in list(vars(owner).items())
        if callable(thing) and not name.startswith("__")
    }


def _found(name: str) -> Any:
    place, attribute = name.split(" ")
    return vars(WATCHED[int(place)]).get(attribute)
