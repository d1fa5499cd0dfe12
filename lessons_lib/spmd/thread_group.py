"""A torch process group between thread ranks.

Every collective is the same three steps: a rank *issues* it (its data are copied there and then,
so what it does to its buffers afterwards changes nothing), the last rank to arrive *exchanges* the
data of all, and each rank *delivers* the result into its own buffers when it waits. Reading the
buffer of an asynchronous operation before ``wait()`` therefore always shows the old value, as on a
GPU it may. Messages work likewise: a send and a receive meet, and the receiver delivers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from lessons_lib.spmd import doctor
from lessons_lib.spmd._torch_internals import ProcessGroup, Work, plain_tensors, run_after_backward
from lessons_lib.spmd.threads import Rank, current
from lessons_lib.spmd.trace import Operation, bytes_by_ring

Tensors = Sequence[Tensor]

REDUCTIONS: dict[Any, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    ReduceOp.SUM: ("sum", torch.add),
    ReduceOp.AVG: ("avg", torch.add),
    ReduceOp.PRODUCT: ("product", torch.mul),
    ReduceOp.MIN: ("min", torch.minimum),
    ReduceOp.MAX: ("max", torch.maximum),
    ReduceOp.BAND: ("band", torch.bitwise_and),
    ReduceOp.BOR: ("bor", torch.bitwise_or),
    ReduceOp.BXOR: ("bxor", torch.bitwise_xor),
}


@dataclass
class Meeting:
    """A collective under way: who has arrived with which data, and in the end the results."""

    size: int
    operations: dict[int, Operation] = field(default_factory=dict)  # by index in the group
    sent: dict[int, list[Tensor]] = field(default_factory=dict)
    results: list[list[Tensor]] | None = None
    met_s: float = 0.0

    def missing(self, members: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(member for index, member in enumerate(members) if index not in self.operations)


@dataclass
class Letter:
    """A send or a receive that looks for its other side."""

    operation: Operation
    tensors: list[Tensor]
    sender: int | None  # index in the group; None receives from anyone
    met: Letter | None = None


class Pending(Work):
    """What torch gets for an operation: ``wait()`` hands on the baton, then delivers."""

    def __init__(
        self,
        rank: Rank,
        operation: Operation,
        is_met: Callable[[], bool],
        missing: Callable[[], tuple[int, ...]],
        deliver: Callable[[], float],
        buffers: Any,
    ) -> None:
        super().__init__()
        self.rank, self.operation, self.missing = rank, operation, missing
        self._is_met, self._deliver, self._buffers = is_met, deliver, buffers
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
        if not self._is_met():
            self.rank.world.let_others_run()
        return self._is_met() and self.wait()

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> Any:
        return self._buffers

    def get_future(self) -> Future[Any]:
        """A future that is done: C++ waits for futures without handing on the baton.

        DistributedDataParallel takes one for every bucket during backward, and waits at its end;
        so does this rank's clock.
        """
        self._take_delivery()
        if not run_after_backward(self._settle):
            self._settle()
        future: Future[Any] = Future()
        future.set_result(self._buffers)
        return future

    getFuture = get_future

    def _source_rank(self) -> int:
        return -1 if self.operation.peer is None else self.operation.peer

    source_rank = _source_rank

    def _take_delivery(self) -> None:
        if not self._delivered:
            self.rank.world.wait(self._is_met, self)
            self._delivered = True
            with self.rank.clock_stopped(), plain_tensors():
                self._met_s = self._deliver()

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            now, operation = self.rank.now(), self.operation
            operation.done_s = max(operation.issued_s, self._met_s)
            operation.waited_s = max(0.0, self._met_s - now)
            self.rank.catch_up(self._met_s)


class ThreadGroup(ProcessGroup):
    """The ranks ``members`` of a run, as rank ``owner`` sees them."""

    def __init__(self, owner: Rank, name: str, label: str, members: tuple[int, ...]) -> None:
        self.owner, self.members, self.label = owner, members, label
        self.index = members.index(owner.number)
        super().__init__(self.index, len(members))
        self._name = name
        self._n_collectives = 0

    # ---- what torch asks of every group ----

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self.index

    def getBackendName(self) -> str:
        return "ranks"

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self.label

    def shutdown(self) -> None:
        pass

    abort = shutdown

    def new_group(
        self,
        ranks: list[int],
        timeout: Any = None,
        pg_options: Any = None,
        *,
        group_name: str,
        group_desc: str | None,
    ) -> ThreadGroup | None:
        """Called by ``torch.distributed.new_group`` on every rank; ``None`` for one outside."""
        owner, members = self._speaker(), tuple(ranks)
        label = (group_desc or "").removeprefix("mesh_") or f"ranks {', '.join(map(str, members))}"
        known = owner.world.groups.setdefault(group_name, (members, owner.number, owner.world.lines.here()))
        if known[0] != members:
            owner.world.mismatch(
                doctor.different_groups(known, (members, owner.number, owner.world.lines.here()))
            )
        if owner.number not in members:
            return None
        return ThreadGroup(owner, group_name, label, members)

    # ---- collectives ----

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        name, combine = self._reduction(opts)
        return self._collective(
            "all_reduce",
            tensors,
            tensors,
            lambda sent: [[combine([s[k] for s in sent]) for k in range(len(tensors))]] * self.size(),
            detail=name,
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        name, combine = self._reduction(opts)
        root = opts.rootRank
        return self._collective(
            "reduce",
            tensors,
            tensors if self.index == root else [],
            lambda sent: [[combine([s[0] for s in sent])] if i == root else [] for i in range(self.size())],
            root=root,
            detail=name,
        )

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        root = opts.rootRank
        return self._collective(
            "broadcast",
            tensors,
            [] if self.index == root else tensors,
            lambda sent: [[] if i == root else sent[root] for i in range(self.size())],
            root=root,
        )

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self._collective(
            "all_gather",
            inputs,
            self._one_for_each(outputs[0], "all_gather receives"),
            lambda sent: [[s[0] for s in sent]] * self.size(),
            n_elements=inputs[0].numel() * self.size(),
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._collective(
            "all_gather",
            inputs,
            outputs,
            lambda sent: (
                [[torch.cat([s[k].reshape(-1) for s in sent]) for k in range(len(inputs))]] * self.size()
            ),
            n_elements=sum(t.numel() for t in inputs) * self.size(),
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        name, combine = self._reduction(opts)
        return self._collective(
            "reduce_scatter",
            self._one_for_each(inputs[0], "reduce_scatter sends"),
            outputs,
            lambda sent: [[combine([s[i] for s in sent])] for i in range(self.size())],
            detail=name,
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        name, combine = self._reduction(opts)
        for tensor in inputs:
            self._even(tensor.numel(), "reduce_scatter", "elements")

        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            whole = [combine([s[k].reshape(-1) for s in sent]) for k in range(len(inputs))]
            return [[flat.chunk(self.size())[i] for flat in whole] for i in range(self.size())]

        return self._collective("reduce_scatter", inputs, outputs, exchange, detail=name)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        root = opts.rootRank
        return self._collective(
            "gather",
            inputs,
            self._one_for_each(outputs[0], "the root of gather receives") if self.index == root else [],
            lambda sent: [[s[0] for s in sent] if i == root else [] for i in range(self.size())],
            root=root,
            n_elements=inputs[0].numel() * self.size(),
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        root = opts.rootRank
        return self._collective(
            "scatter",
            self._one_for_each(inputs[0], "the root of scatter sends") if self.index == root else [],
            outputs,
            lambda sent: [[sent[root][i]] for i in range(self.size())],
            root=root,
            shapes=[outputs[0].shape],
            dtype=outputs[0].dtype,
            n_elements=outputs[0].numel() * self.size(),
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        self._one_for_each(outputs, "all_to_all receives")
        self._one_for_each(inputs, "all_to_all sends")

        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[s[i] for s in sent] for i in range(self.size())]

        return self._collective("all_to_all", inputs, outputs, exchange, bytes_kept=inputs[self.index].nbytes)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        def parts(tensor: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
            if sizes:
                return list(tensor.split(list(sizes)))
            self._even(len(tensor), "all_to_all", "rows")
            return list(tensor.tensor_split(self.size()))

        return self.alltoall(parts(output, output_split_sizes), parts(input, input_split_sizes), opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        return self._collective("barrier", [], [], lambda sent: [[]] * self.size())

    def _one_for_each(self, tensors: Tensors, who: str) -> Tensors:
        if len(tensors) != self.size():
            raise ValueError(
                f"{who} one tensor for each of the group's {self.size()} ranks, and got {len(tensors)}"
            )
        return tensors

    def _even(self, size: int, kind: str, what: str) -> None:
        if size % self.size():
            raise ValueError(
                f"{kind} cuts its tensor into {self.size()} equal pieces, one for each rank of the group, "
                f"and it has {size} {what}"
            )

    def _collective(
        self,
        kind: str,
        inputs: Tensors,
        outputs: Tensors,
        exchange: Callable[[list[list[Tensor]]], list[list[Tensor]]],
        *,
        root: int | None = None,
        detail: str = "",
        shapes: Sequence[torch.Size] | None = None,
        dtype: torch.dtype | None = None,
        n_elements: int | None = None,
        bytes_kept: int | None = None,
    ) -> Work:
        """Issue a collective: ``exchange`` maps what each rank sent to what each rank receives."""
        rank = self._speaker()
        world = rank.world
        with rank.clock_stopped(), plain_tensors():
            self._n_collectives += 1
            if n_elements is None:
                n_elements = sum(tensor.numel() for tensor in inputs)
            if dtype is None and inputs:
                dtype = inputs[0].dtype
            bytes_sent = (
                bytes_by_ring(
                    kind, n_elements, dtype.itemsize if dtype else 0, self.members, self.index, root
                )
                if bytes_kept is None
                else sum(tensor.nbytes for tensor in inputs) - bytes_kept
            )
            operation = self._operation(
                rank,
                kind,
                self._n_collectives,
                shapes or [tensor.shape for tensor in inputs],
                dtype,
                n_elements,
                bytes_sent,
                root=root,
                detail="" if detail == "sum" else detail,
            )
            key = self._name, self._n_collectives
            meeting = world.meetings.setdefault(key, Meeting(self.size()))
            meeting.operations[self.index] = operation
            meeting.sent[self.index] = [_copy(tensor) for tensor in inputs]
            meeting.met_s = max(meeting.met_s, operation.issued_s)
            if len(meeting.operations) == self.size():
                disagreement = doctor.disagreement_in(meeting.operations.values())
                if disagreement:
                    world.mismatch(disagreement)
                del world.meetings[key]
                for operation_of_rank in meeting.operations.values():
                    operation_of_rank.met = True
                meeting.results = exchange([meeting.sent[index] for index in range(self.size())])
                meeting.sent.clear()

        def deliver() -> float:
            results = meeting.results[self.index] if meeting.results else []
            for output, result in zip(outputs, results, strict=True):
                if output.numel() != result.numel() or output.dtype != result.dtype:
                    world.mismatch(doctor.wrong_buffer(operation, output, result))
                output.detach().copy_(result.reshape(output.shape))
            return meeting.met_s

        return Pending(
            rank,
            operation,
            lambda: meeting.results is not None,
            lambda: meeting.missing(self.members),
            deliver,
            list(outputs) or list(inputs),
        )

    # ---- messages ----

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        rank = self._speaker()
        with rank.clock_stopped(), plain_tensors():
            operation = self._message("send", tensors, dstRank, tag)
            letter = Letter(operation, [_copy(tensor) for tensor in tensors], self.index)
            self._post(letter, self._mailbox(dstRank, tag), is_send=True)
        # A send is awaited like a receive, which proves cycles; but on the clock it takes no time.
        return Pending(
            rank,
            operation,
            lambda: letter.met is not None,
            lambda: (self.members[dstRank],),
            lambda: operation.issued_s,
            list(tensors),
        )

    def recv(self, tensors: Tensors, srcRank: int | None, tag: int = 0) -> Work:
        rank = self._speaker()
        with rank.clock_stopped(), plain_tensors():
            operation = self._message("recv", tensors, srcRank, tag)
            letter = Letter(operation, list(tensors), srcRank)
            self._post(letter, self._mailbox(self.index, tag), is_send=False)
        others = tuple(member for member in self.members if member != rank.number)

        def deliver() -> float:
            sent = letter.met
            assert sent is not None
            for buffer, tensor in zip(letter.tensors, sent.tensors, strict=True):
                buffer.detach().copy_(tensor.reshape(buffer.shape))
            return max(sent.operation.issued_s, operation.issued_s)

        return Pending(
            rank,
            operation,
            lambda: letter.met is not None,
            lambda: others if operation.peer is None else (operation.peer,),
            deliver,
            list(tensors),
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    def _message(self, kind: str, tensors: Tensors, peer: int | None, tag: int) -> Operation:
        # counted by what the trace tells apart: two groups may have the same name and members
        counts, key = self.owner.n_messages, (self.label, self.members, kind, peer)
        counts[key] = counts.get(key, 0) + 1
        n_elements = sum(tensor.numel() for tensor in tensors)
        return self._operation(
            self.owner,
            kind,
            counts[key],
            [tensor.shape for tensor in tensors],
            tensors[0].dtype,
            n_elements,
            sum(tensor.nbytes for tensor in tensors) if kind == "send" else 0,
            peer=None if peer is None else self.members[peer],
            detail=f"tag={tag}" if tag else "",
        )

    def _mailbox(self, receiver: int, tag: int) -> tuple[list[Letter], list[Letter]]:
        return self.owner.world.mailboxes.setdefault((self._name, receiver, tag), ([], []))

    def _post(self, letter: Letter, mailbox: tuple[list[Letter], list[Letter]], *, is_send: bool) -> None:
        """Meet the first letter of the other side that fits, or wait in the mailbox."""
        same_side, other_side = mailbox if is_send else mailbox[::-1]
        for other in other_side:
            if None in (letter.sender, other.sender) or letter.sender == other.sender:
                other_side.remove(other)
                sent, received = (letter, other) if is_send else (other, letter)
                if [(t.numel(), t.dtype) for t in sent.tensors] != [
                    (t.numel(), t.dtype) for t in received.tensors
                ]:
                    self.owner.world.mismatch(doctor.different_message(sent.operation, received.operation))
                letter.met, other.met = other, letter
                sent.operation.met = received.operation.met = True
                received.operation.peer = sent.operation.rank
                received.operation.sequence = sent.operation.sequence
                return
        same_side.append(letter)

    # ---- shared ----

    def _speaker(self) -> Rank:
        """The rank that owns this group, if it is the one that calls."""
        if current() is not self.owner:
            raise RuntimeError(
                f"this process group belongs to rank {self.owner.number} of "
                f"{'this run' if current() else 'a run that has ended'}; it was kept in a global, a default "
                "argument or a returned value. Ask for a group inside the function that uses it."
            )
        return self.owner

    def _operation(
        self,
        rank: Rank,
        kind: str,
        sequence: int,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype | None,
        n_elements: int,
        bytes_sent: int,
        *,
        peer: int | None = None,
        root: int | None = None,
        detail: str = "",
    ) -> Operation:
        operation = Operation(
            rank=rank.number,
            kind=kind,
            group=self.label,
            members=self.members,
            sequence=sequence,
            shapes=tuple(tuple(shape) for shape in shapes),
            dtype="" if dtype is None else str(dtype).removeprefix("torch."),
            n_elements=n_elements,
            bytes_sent=bytes_sent,
            issued_s=rank.clock_s,
            where=rank.world.lines.here(),
            region="/".join(rank.regions),
            peer=peer,
            root=root,
            detail=detail,
        )
        rank.world.operations.append(operation)
        return operation

    def _reduction(self, opts: Any) -> tuple[str, Callable[[list[Tensor]], Tensor]]:
        op = getattr(opts, "reduceOp", ReduceOp.SUM)
        op = getattr(op, "op", op)
        if op not in REDUCTIONS:
            known = ", ".join(name.upper() for name, _ in REDUCTIONS.values())
            raise ValueError(f"thread ranks cannot reduce with {op}; they know {known}")
        name, combine = REDUCTIONS[op]
        size = self.size()

        def reduction(tensors: list[Tensor]) -> Tensor:
            total = reduce(combine, tensors)
            if name != "avg":
                return total
            return total / size if total.is_floating_point() or total.is_complex() else total // size

        return name, reduction


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
