"""What is under way between thread ranks: collectives that gather their ranks, and messages.

Every communication is the same three steps. A rank *issues* it: its data are copied there and then,
so what it does to its buffers afterwards changes nothing. When the last side has come, the data are
*exchanged*. And each rank *delivers* what is for it into its own buffers when it waits. Reading the
buffer of an asynchronous operation before ``wait()`` therefore always shows the old value, as on a
GPU it may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from lessons_lib.machines import Machine
from lessons_lib.spmd import doctor
from lessons_lib.spmd._torch_internals import Work, plain_tensors, run_after_backward
from lessons_lib.spmd.clock import arrival_s
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.rank_group import Exchange, Tensors

if TYPE_CHECKING:
    from lessons_lib.spmd.threads import Rank


def snapshot(tensors: Tensors) -> list[Tensor]:
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


class Part(Protocol):
    """One rank's part in a communication."""

    operation: Operation

    def is_met(self) -> bool:
        """Whether the other side has come."""

    def missing(self) -> tuple[int, ...]:
        """Global ranks that have yet to come."""

    def deliver(self) -> float:
        """Fill this rank's buffers; return when, on the clock, the result was there."""


# ---- collectives ----


@dataclass
class Collective:
    """A collective: who has arrived, with which data, and in the end the results."""

    members: tuple[int, ...]
    operations: dict[int, Operation] = field(default_factory=dict)  # by index in the group
    sent: dict[int, list[Tensor]] = field(default_factory=dict)
    results: list[list[Tensor]] | None = None
    met_s: float = 0.0

    def join(self, index: int, operation: Operation, inputs: Tensors) -> bool:
        """Take in what one rank brings; say whether it was the last."""
        self.operations[index], self.sent[index] = operation, snapshot(inputs)
        return len(self.operations) == len(self.members)

    def disagreement(self) -> str:
        """How its ranks disagree about what they do together, or nothing."""
        return doctor.disagreement([self.operations[i] for i in self.operations], self.missing())

    def complete(self, exchange: Exchange, done_s: float) -> None:
        """All are here and agree: work out what each of them receives, at ``done_s`` on the clock."""
        self.met_s = done_s
        for operation in self.operations.values():
            operation.met = True
        self.results = exchange([self.sent[index] for index in range(len(self.members))])
        self.sent.clear()

    def missing(self) -> tuple[int, ...]:
        return tuple(member for index, member in enumerate(self.members) if index not in self.operations)


@dataclass
class CollectivePart:
    """One rank's part in a collective."""

    collective: Collective
    index: int
    operation: Operation
    outputs: Tensors
    mismatch: Callable[[str], None]  # stops the run

    def is_met(self) -> bool:
        return self.collective.results is not None

    def missing(self) -> tuple[int, ...]:
        return self.collective.missing()

    def deliver(self) -> float:
        assert self.collective.results is not None
        for output, result in zip(self.outputs, self.collective.results[self.index], strict=True):
            if output.numel() != result.numel() or output.dtype != result.dtype:
                self.mismatch(doctor.wrong_buffer(self.operation, output, result))
            output.detach().copy_(result.reshape(output.shape))
        return self.collective.met_s


# ---- messages ----


@dataclass
class P2P:
    """A send, which carries a copy of its tensors, or a receive, which carries its buffers."""

    operation: Operation
    tensors: Sequence[Tensor]
    sender: int | None  # index in the group; None receives from anyone
    strangers: tuple[int, ...]  # the ranks any of which may send
    machine: Machine | None
    met: P2P | None = None

    def is_met(self) -> bool:
        return self.met is not None

    def missing(self) -> tuple[int, ...]:
        return self.strangers if self.operation.peer is None else (self.operation.peer,)

    def deliver(self) -> float:
        assert self.met is not None
        if self.operation.kind == "send":
            # It is waited for like a receive, which proves cycles; but on the clock it takes no time.
            return self.operation.issued_s
        for buffer, tensor in zip(self.tensors, self.met.tensors, strict=True):
            buffer.detach().copy_(tensor.reshape(buffer.shape))
        self.tensors = self.met.tensors = ()  # the two know each other: nobody else would let go of them
        arrived = arrival_s(self.machine, self.met.operation, self.operation.rank)
        return max(arrived, self.operation.issued_s)

    def fits(self, other: P2P) -> bool:
        return None in (self.sender, other.sender) or self.sender == other.sender


@dataclass
class P2PQueue:
    """Sends and receives of one receiver, group and tag that have not met yet, in order."""

    sends: list[P2P] = field(default_factory=list)
    receives: list[P2P] = field(default_factory=list)

    def post(self, p2p: P2P) -> str:
        """Meet the first p2p of the other side that fits, or stay; return how the two disagree."""
        is_send = p2p.operation.kind == "send"
        others = self.receives if is_send else self.sends
        other = next(filter(p2p.fits, others), None)
        if other is None:
            (self.sends if is_send else self.receives).append(p2p)
            return ""
        others.remove(other)
        sent, received = (p2p, other) if is_send else (other, p2p)
        if [(t.numel(), t.dtype) for t in sent.tensors] != [(t.numel(), t.dtype) for t in received.tensors]:
            return doctor.different_message(sent.operation, received.operation)
        sent.met, received.met = received, sent
        sent.operation.met = received.operation.met = True
        received.operation.peer, received.operation.sequence = sent.operation.rank, sent.operation.sequence
        return ""


# ---- what torch gets ----


class ThreadWork(Work):
    """The handle of an operation: ``wait()`` hands on the baton, then delivers."""

    def __init__(self, rank: Rank, part: Part, buffers: Any) -> None:
        super().__init__()
        self.rank, self.part, self.buffers = rank, part, buffers
        self.operation = part.operation
        self._delivered = self._settled = False
        self._met_s = 0.0

    def wait(self, timeout: Any = None) -> bool:
        self._take_delivery()
        self._settle()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the result is there. Once this says so, it is in the buffer, as torch promises."""
        if not self.part.is_met():
            self.rank.world.poll(self.part)
        return self.part.is_met() and self.wait()

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> Any:
        return self.buffers

    def get_future(self) -> Future[Any]:
        """A future that is done: C++ waits for futures without handing on the baton.

        DistributedDataParallel takes one for every bucket during backward, and waits at its end;
        so does this rank's clock.
        """
        self._take_delivery()
        if not run_after_backward(self._settle):
            self._settle()
        future: Future[Any] = Future()
        future.set_result(self.buffers)
        return future

    getFuture = get_future

    def _source_rank(self) -> int:
        peer = self.operation.peer
        return -1 if peer is None else self.operation.members.index(peer)

    source_rank = _source_rank

    def _take_delivery(self) -> None:
        if not self._delivered:
            self.rank.world.wait(self.part)
            self._delivered = True
            with self.rank.clock.halted(), plain_tensors():
                self._met_s = self.part.deliver()

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            now, operation = self.rank.clock.now(), self.operation
            operation.done_s = max(operation.issued_s, self._met_s)
            operation.waited_s = max(0.0, self._met_s - now)
            self.rank.clock.catch_up(self._met_s)
