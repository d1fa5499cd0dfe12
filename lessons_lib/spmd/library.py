"""How gloo and nccl do what thread ranks do, for ranks that have a process each, whoever started it.

They read and write memory as if the elements of a tensor lay one after the other, they do not know
all types of numbers, and they add up in the buffers of ranks that want no result. So what they get
is laid out for them first, and what has arrived is brought into the buffers of the rank when it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lessons_lib.machines import Machine
from lessons_lib.spmd._torch_internals import AllgatherOptions, Work, run_after_backward
from lessons_lib.spmd.clock import Clock
from lessons_lib.spmd.lines import LineFinder
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.rank_group import Exchange, Native, RankGroup, Tensors
from lessons_lib.spmd.recording import Ledger

POLL_S = 0.0005
MOST_IDLE_POLLS = 10_000

# What the libraries can add up; the rest travels as bytes.
_FLOATING = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_KNOWN = _FLOATING | {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


class Asked:
    """What a library was asked for, and how its result gets into the buffers of the rank."""

    def __init__(
        self, works: list[Work], deliver: Callable[[], None], held: Any, buffers: list[Tensor]
    ) -> None:
        self.works, self.deliver, self.buffers = works, deliver, buffers
        self._held = held  # the library reads and writes this memory until it is done


def ask(
    library: Any,
    group: RankGroup,
    operation: Operation,
    inputs: Tensors,
    outputs: Tensors,
    exchange: Exchange,
    native: Native,
) -> Asked:
    """Ask a library's group for an operation of ``group``."""
    buffers = list(outputs) or list(inputs)
    if operation.kind in _REDUCTIONS and not _can_reduce(operation, inputs):
        return _reduce_here(library, group, inputs, outputs, exchange)
    pieces: Sequence[Tensor]
    if operation.kind == "all_to_all":
        sent, received = [_end_to_end(inputs)], [_end_to_end(outputs)]
        pieces = received[0].split([output.numel() for output in outputs])
    else:
        adds_up_aside = operation.kind == "reduce" and operation.root != group.index
        laid_out = {id(each): _laid_out(each, operation.kind) for each in (*inputs, *outputs)}
        sent = [laid_out[id(each)].clone() if adds_up_aside else laid_out[id(each)] for each in inputs]
        received = pieces = [laid_out[id(each)] for each in outputs]
    pairs = list(zip(outputs, pieces, strict=True))
    works = native(library, sent, received)
    return Asked(works, lambda: _deliver(pairs), (sent, received), buffers)


def _can_reduce(operation: Operation, inputs: Tensors) -> bool:
    known = _FLOATING if operation.detail == "avg" else _KNOWN
    return all(tensor.dtype in known for tensor in inputs)


def _reduce_here(
    library: Any, group: RankGroup, inputs: Tensors, outputs: Tensors, exchange: Exchange
) -> Asked:
    """What no library reduces: bring all terms here as bytes, and reduce them as thread ranks do."""
    mine = torch.cat([_flat(tensor).view(torch.uint8) for tensor in inputs])
    terms = [torch.empty_like(mine) for _ in group.members]
    work = library.allgather([terms], [mine], AllgatherOptions())

    def tensors_of(term: Tensor) -> list[Tensor]:
        pieces = term.split([tensor.nbytes for tensor in inputs])
        pairs = zip(pieces, inputs, strict=True)
        return [piece.clone().view(like.dtype).view(like.shape) for piece, like in pairs]

    def deliver() -> None:
        reduced = exchange([tensors_of(term) for term in terms])[group.index]
        _deliver(list(zip(outputs, reduced, strict=True)))

    return Asked([work], deliver, (mine, terms), list(outputs) or list(inputs))


def _flat(tensor: Tensor) -> Tensor:
    """The elements one after the other: the tensor's own memory if they lie so, or a copy."""
    return tensor.detach().contiguous().reshape(-1)


def _laid_out(tensor: Tensor, kind: str) -> Tensor:
    flat = _flat(tensor)
    return flat if kind in _REDUCTIONS or flat.dtype in _KNOWN else flat.view(torch.uint8)


def _end_to_end(pieces: Tensors) -> Tensor:
    """All elements of the pieces of an all-to-all along the first dim of one tensor."""
    if len({piece.dtype for piece in pieces}) > 1:
        raise RuntimeError("its pieces have several dtypes")
    flat = torch.cat([piece.detach().reshape(-1) for piece in pieces])
    return flat if flat.dtype in _KNOWN else flat.view(torch.uint8).view(len(flat), -1)


def _deliver(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Bring what has arrived into the buffers that it did not arrive in."""
    for buffer, arrived in pairs:
        if arrived.data_ptr() != buffer.data_ptr():
            buffer.detach().copy_(arrived.reshape(-1).view(buffer.dtype).view(buffer.shape))


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class LibraryWork(Work):
    """The handle of an operation that a library does."""

    def __init__(self, group: RankGroup, operation: Operation, asked: Asked) -> None:
        super().__init__()
        self.group, self.operation, self.asked = group, operation, asked
        self._settled = False
        self._polls = 0

    def wait(self, timeout: Any = None) -> bool:
        if not self._settled:
            began = self.group.owner.clock.now()
            self._wait()
            self._settle(began)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the result is there; to ask for ever is to wait, and can be a deadlock too."""
        self._polls += 1
        return self._settled or ((self._is_done() or self._polls > MOST_IDLE_POLLS) and self.wait())

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> Any:
        return self.asked.buffers

    def get_future(self) -> Any:
        """A future of the library in a backward pass, where DistributedDataParallel takes one for every
        bucket and waits at its end, as does this rank's clock; elsewhere one that is done."""
        if run_after_backward(self.wait):
            return self.asked.works[-1].get_future()
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self.asked.buffers)
        return future

    getFuture = get_future

    def _source_rank(self) -> int:
        peer = self.operation.peer
        if peer is not None:
            return self.operation.members.index(peer)
        return self.asked.works[-1]._source_rank()

    source_rank = _source_rank

    def _wait(self) -> None:
        self._await_library()

    def _await_library(self) -> None:
        """Wait for the library, once: for a second wait it would want a second message."""
        for work in self.asked.works:
            if any(buffer.is_cuda for buffer in self.asked.buffers):
                while not work.is_completed():  # there, wait() only lines up what comes after it
                    time.sleep(POLL_S)
            work.wait()

    def _is_done(self) -> bool:
        return all(work.is_completed() for work in self.asked.works)

    def _settle(self, began: float) -> None:
        """What follows once: the operation is over."""
        self._settle_at(self.group.owner.clock.now(), began)

    def _settle_at(self, done_s: float, began: float) -> None:
        self._settled = True
        self.asked.deliver()
        operation = self.operation
        operation.met = True
        operation.done_s = max(operation.issued_s, done_s)
        operation.waited_s = max(0.0, operation.done_s - began)
        self.group.owner.clock.catch_up(operation.done_s)


# ---- ranks and groups ----


class LibraryRank:
    """What a rank that has a process for itself keeps of what it does."""

    def __init__(self, number: int, n_ranks: int, machine: Machine | None, clock: Clock) -> None:
        self.number, self.n_ranks = number, n_ranks
        self.machine, self.clock = machine, clock
        self.lines, self.ledger = LineFinder(), Ledger()
        self.operations: list[Operation] = []
        self.n_messages: dict[Any, int] = {}
        self.n_groups: dict[Any, int] = {}
        self.regions: list[str] = []

    def region(self) -> str:
        return "/".join(self.regions)


def by_device(backend: str) -> dict[str, str]:
    """The library for tensors on each kind of device: nccl moves what lies on a GPU, and nothing else.

    >>> by_device("gloo"), by_device("nccl")
    ({'cpu': 'gloo'}, {'cpu': 'gloo', 'cuda': 'nccl'})
    """
    return {"cpu": "gloo"} | ({"cuda": "nccl"} if backend == "nccl" else {})


class LibraryGroup(RankGroup):
    """A group of ranks in processes. ``native`` is its group of a library, for each kind of device.

    A transport says how a rank tells the others what it is about to do, and is stopped if they disagree;
    and what the handle of an operation does while it waits.
    """

    def __init__(
        self, owner: LibraryRank, name: str, label: str, members: tuple[int, ...], native: Mapping[str, Any]
    ) -> None:
        super().__init__(owner, name, label, members)
        self.native = native

    def library_of(self, tensors: Tensors) -> Any:
        """The library's group that moves these tensors."""
        device = next((tensor.device.type for tensor in tensors), "cpu")
        return self.native.get(device, self.native["cpu"])

    def _tell_collective(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Any:
        raise NotImplementedError

    def _tell_message(
        self, operation: Operation, tensors: Tensors, sender: int | None, receiver: int, tag: int
    ) -> Any:
        raise NotImplementedError

    def _work(self, operation: Operation, told: Any, asked: Asked) -> Work:
        raise NotImplementedError

    def _issue_collective(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, exchange: Exchange, native: Native
    ) -> Work:
        told = self._tell_collective(operation, inputs, outputs)
        return self._work(operation, told, self._ask(operation, inputs, outputs, exchange, native))

    def _issue_message(
        self,
        operation: Operation,
        tensors: Tensors,
        sender: int | None,
        receiver: int,
        tag: int,
        native: Native,
    ) -> Work:
        told = self._tell_message(operation, tensors, sender, receiver, tag)
        inputs, outputs = (tensors, []) if operation.kind == "send" else ([], tensors)
        return self._work(operation, told, self._ask(operation, inputs, outputs, lambda sent: sent, native))

    def _ask(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, exchange: Exchange, native: Native
    ) -> Asked:
        library = self.library_of((*inputs, *outputs))
        try:
            return ask(library, self, operation, inputs, outputs, exchange, native)
        except RuntimeError as error:
            raise RuntimeError(f"{library.name()} cannot do {operation}: {first_line(error)}") from error
