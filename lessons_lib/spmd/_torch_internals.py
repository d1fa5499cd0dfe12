"""The only module that touches private torch API, so that a torch upgrade is one file's work.

Thread ranks need three things torch keeps private: a distributed world per thread (torch's own
tests have one), a registry of process groups per thread, and a way to make a process group the
default one without a rendezvous. Each is one small function here, and each was checked against
the torch version named below.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# These capture the default group as a default argument when they are imported, so they must be
# imported before any rank exists.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    Work,
    _set_thread_isolation_mode,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as nn_module
from torch.testing._internal.distributed import multi_threaded_pg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

tree_leaves = pytree.tree_leaves
ProcessGroup: Any = dist.ProcessGroup  # its overloads would forbid to name arguments well
TESTED_VERSION = "2.13.0"
BACKEND = "ranks"

__all__ = [
    "BACKEND",
    "TESTED_VERSION",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "DispatchMode",
    "ProcessGroup",
    "Work",
    "await_results",
    "become_default_group",
    "c10d",
    "forget_groups",
    "load_compiler",
    "module_hooks_restored",
    "one_world_per_thread",
    "plain_tensors",
    "register_group",
    "resizing_watched",
    "run_after_backward",
    "storage_reducers",
    "tree_leaves",
    "warn_if_untested",
]


class DispatchMode(TorchDispatchMode):
    """A mode that sees every operation of torch, and of which the compiler of torch is not told.

    Telling it would import it, which takes each rank of a fresh process a second.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_warned = threading.Event()


def warn_if_untested() -> None:
    """Warn once when this torch is not the version these internals were checked against."""
    found = torch.__version__.split("+")[0]
    if found != TESTED_VERSION and not _warned.is_set():
        _warned.set()
        warnings.warn(
            f"torch {found} is untested here; this library was checked against torch {TESTED_VERSION}",
            stacklevel=3,
        )


def load_compiler() -> None:
    """Load the compiler, which torch loads with the first optimizer of a process. It takes a second."""
    importlib.import_module("torch._dynamo")


def _refuse_creation(*_: Any) -> dist.ProcessGroup:
    raise RuntimeError(
        "the ranks backend exists inside lessons_lib.run alone; run has already initialised it"
    )


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, _refuse_creation, devices=["cpu", "cuda"])
_BACKEND_CONFIG = str(c10d.BackendConfig(dist.Backend(BACKEND)))


@contextlib.contextmanager
def one_world_per_thread() -> Iterator[None]:
    """Give every thread its own torch.distributed world and registry of groups."""
    before = c10d._world
    c10d._world = multi_threaded_pg.ThreadLocalWorld()  # type: ignore[assignment]
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        c10d._world = before


def become_default_group(group: dist.ProcessGroup) -> None:
    """Make ``group`` what ``torch.distributed`` uses in this thread when no group is named."""
    # On the autograd threads of C++ no rank would be known: keep backward on the rank's thread.
    torch.autograd.set_multithreading_enabled(False)
    register_group(group, range(group.size()))
    c10d._world.group_count = 1
    c10d._update_default_pg(group)


def register_group(group: dist.ProcessGroup, members: range) -> None:
    """Enter a new default group into torch's tables; sub-groups are entered by torch itself."""
    c10d._register_pg_in_world(
        group,
        backend_name=BACKEND,
        store=dist.HashStore(),  # type: ignore[attr-defined]
        group_name=c10d.GroupName(group.group_name),
        backend_config=_BACKEND_CONFIG,
        rank_mapping={member: index for index, member in enumerate(members)},
        add_to_default_tag=True,
    )


def forget_groups() -> None:
    """Undo :func:`become_default_group` and every sub-group of this thread."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Move data with no autograd graph, dispatch mode or default device in the way.

    The rank that arrives last moves the data of all, so a mode of its own that counts or records
    must not see the others' buffers.
    """
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def run_after_backward(callback: Any) -> bool:
    """Call ``callback`` when the running backward pass ends; False outside of one."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


def await_results(value: Any) -> None:
    """Wait for every result of a functional collective in ``value``.

    Such a tensor waits when it is first used. Returned from a rank it would be used by the
    notebook, which is no rank and cannot wait.
    """
    for leaf in tree_leaves(value):
        tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor.trigger_wait()


_resize = torch.UntypedStorage.resize_
_resizing_watched = threading.local()
_watchers: list[int] = []


def _resize_and_tell(storage: Any, n_bytes: int) -> None:
    _resize(storage, n_bytes)
    callback = getattr(_resizing_watched, "callback", None)
    if callback is not None:
        callback(storage)


@contextlib.contextmanager
def resizing_watched(callback: Any) -> Iterator[None]:
    """Call ``callback(storage)`` when this thread has resized one, as FSDP does to free memory.

    That is no operation of torch, so no dispatch mode sees it.
    """
    _watchers.append(threading.get_ident())
    _resizing_watched.callback = callback
    torch.UntypedStorage.resize_ = _resize_and_tell  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _resizing_watched.callback = None
        _watchers.remove(threading.get_ident())
        if not _watchers:
            del torch.UntypedStorage.resize_  # what it inherits


def storage_reducers() -> dict[type, Any]:
    """How pickle copies the memory of CPU tensors: as bytes, and one memory once.

    torch's own way goes through ``torch.save`` for every tensor, which takes a millisecond each.
    """
    return {torch.UntypedStorage: _reduce_storage, torch.storage.TypedStorage: _reduce_typed_storage}


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "cpu" or storage.is_shared():
        return storage.__reduce__()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    return _storage_of, (memory.numpy().tobytes(),)


def _storage_of(data: bytes) -> torch.UntypedStorage:
    if not data:
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()


def _reduce_typed_storage(storage: torch.storage.TypedStorage) -> Any:
    return _typed_storage_of, (storage._untyped_storage, storage.dtype)


def _typed_storage_of(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


@contextlib.contextmanager
def module_hooks_restored() -> Iterator[None]:
    """Put back the process-wide hooks on ``nn.Module`` that ranks may have added to."""
    tables = [
        table
        for name, table in vars(nn_module).items()
        if name.startswith("_global_") and name.endswith("_hooks") and isinstance(table, dict)
    ]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def native_group(backend: str, store: Any, name: str, rank: int, size: int) -> Any:
    """A group of a communication library: gloo on the loopback interface, or nccl.

    The address is numeric, so no host name is ever looked up, and time-outs are the launcher's.
    """
    prefixed = dist.PrefixStore(f"{name}/", store)  # type: ignore[attr-defined]
    if backend == "nccl":
        return dist.ProcessGroupNCCL(prefixed, rank, size, dist.ProcessGroupNCCL.Options())
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(days=7)
    options._threads = 2
    return dist.ProcessGroupGloo(prefixed, rank, size, options)


def file_store(path: str, n_ranks: int) -> Any:
    return dist.FileStore(path, n_ranks)  # type: ignore[attr-defined]
