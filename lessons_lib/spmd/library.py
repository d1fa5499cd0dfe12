"""How gloo and nccl are asked for an operation, so that it means what it means on thread ranks.

They read and write memory as if the elements of a tensor lay one after the other, they do not know
all types of numbers, and they add up in the buffers of ranks that want no result. So what they get
is laid out for them first, and what has arrived is brought into the buffers of the rank when it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lessons_lib.spmd._torch_internals import AllgatherOptions, Work, run_after_backward
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.rank_group import Exchange, Native, RankGroup, Tensors

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
