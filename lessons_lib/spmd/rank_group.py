"""The process group through which torch talks to the ranks of a run, on every transport.

Each method says what it sends and receives, how what all ranks sent becomes what each receives
(``exchange``), and how a communication library is asked for the same (``native``). Every operation
is written down here, in one way, so that kinds, bytes and lines are the same on every transport.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lessons_lib.errors import RefusedError
from lessons_lib.spmd._torch_internals import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ProcessGroup,
    Work,
    plain_tensors,
)
from lessons_lib.spmd.clock import Clock
from lessons_lib.spmd.current import current
from lessons_lib.spmd.doctor import Creation
from lessons_lib.spmd.lines import LineFinder
from lessons_lib.spmd.operation import Operation
from lessons_lib.timeline import elements_sent, ranks_text

Tensors = Sequence[Tensor]
Exchange = Callable[[list[list[Tensor]]], list[list[Tensor]]]  # what each rank sent -> what each receives
# asks a communication library's group for the same, with tensors as the transport has laid them out
Native = Callable[[Any, Tensors, Tensors], list[Work]]

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


class RankLike(Protocol):
    """What a group asks of the rank it belongs to."""

    number: int
    clock: Clock
    n_messages: dict[Any, int]
    n_groups: dict[Any, int]

    @property
    def lines(self) -> LineFinder: ...
    @property
    def operations(self) -> list[Operation]: ...
    def region(self) -> str: ...


class RankGroup(ProcessGroup):
    """The ranks ``members`` of a run, as rank ``owner`` sees them; a transport says how data travel."""

    def __init__(self, owner: RankLike, name: str, label: str, members: tuple[int, ...]) -> None:
        self.owner, self.members, self.label = owner, members, label
        self.index = members.index(owner.number)
        super().__init__(self.index, len(members))
        self._name = name
        self._n_collectives = 0
        self._handles: list[tuple[Operation, Work]] = []  # see _keep

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
    ) -> RankGroup | None:
        """Called by ``torch.distributed.new_group`` on every rank; ``None`` for one outside."""
        self._check_caller()
        members = tuple(ranks)
        label = self._label(group_desc, members)
        creation = Creation(members, self.owner.number, self.owner.lines.here())
        return self._new_group(group_name, label, creation)

    def _label(self, description: str | None, members: tuple[int, ...]) -> str:
        """What the group is called: its mesh axis or its ranks, and which it is if there are several."""
        label = (description or "").removeprefix("mesh_") or f"ranks {', '.join(map(str, members))}"
        made = self.owner.n_groups
        made[label, members] = made.get((label, members), 0) + 1
        which = made[label, members]
        return label if which == 1 else f"{label}, number {which}"

    def _new_group(self, name: str, label: str, creation: Creation) -> RankGroup | None:
        """Make the group, or stop the run if another rank makes another one by the same call."""
        raise NotImplementedError

    # ---- collectives ----

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        name, combine = self._reduction(opts)

        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return self._to_all([combine(list(terms)) for terms in zip(*sent, strict=True)])

        def native(group: Any, inputs: Tensors, outputs: Tensors) -> list[Work]:
            options = AllreduceOptions()
            if opts is not None:
                options.reduceOp = opts.reduceOp
            return [group.allreduce([tensor], options) for tensor in inputs]

        return self._collective("all_reduce", tensors, tensors, exchange, native, reduction=name)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        name, combine = self._reduction(opts)
        root = self._place(opts.rootRank, "reduce", "root")

        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return self._to_root(root, [combine([s[0] for s in sent])])

        outputs = tensors if self.index == root else []
        return self._collective(
            "reduce",
            tensors,
            outputs,
            exchange,
            lambda group, inputs, outputs: [group.reduce(inputs, opts)],
            root=root,
            reduction=name,
        )

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        root = self._place(opts.rootRank, "broadcast", "root")

        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[] if index == root else sent[root] for index in range(self.size())]

        outputs = [] if self.index == root else tensors
        return self._collective(
            "broadcast",
            tensors,
            outputs,
            exchange,
            lambda group, inputs, outputs: [group.broadcast(inputs, opts)],
            root=root,
        )

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        self._one_for_each(outputs[0], "all_gather receives")
        return self._collective(
            "all_gather",
            inputs,
            outputs[0],
            lambda sent: self._to_all([s[0] for s in sent]),
            lambda group, inputs, outputs: [group.allgather([outputs], inputs, opts or AllgatherOptions())],
            parts=self.size(),
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            flat = ([part.reshape(-1) for part in parts] for parts in zip(*sent, strict=True))
            return self._to_all([torch.cat(parts) for parts in flat])

        def native(group: Any, inputs: Tensors, outputs: Tensors) -> list[Work]:
            options = opts or AllgatherOptions()
            return [group._allgather_base(o, i, options) for o, i in zip(outputs, inputs, strict=True)]

        return self._collective("all_gather", inputs, outputs, exchange, native, parts=self.size())

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        name, combine = self._reduction(opts)
        self._one_for_each(inputs[0], "reduce_scatter sends")

        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[combine(list(terms))] for terms in zip(*sent, strict=True)]

        return self._collective(
            "reduce_scatter",
            inputs[0],
            outputs,
            exchange,
            lambda group, inputs, outputs: [group.reduce_scatter(outputs, [inputs], opts)],
            reduction=name,
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        name, combine = self._reduction(opts)
        for tensor in inputs:
            self._even(tensor.numel(), "reduce_scatter", "elements")

        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            sums = [combine([term.reshape(-1) for term in terms]) for terms in zip(*sent, strict=True)]
            return [[whole.chunk(self.size())[index] for whole in sums] for index in range(self.size())]

        def native(group: Any, inputs: Tensors, outputs: Tensors) -> list[Work]:
            return [group._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]

        return self._collective("reduce_scatter", inputs, outputs, exchange, native, reduction=name)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        root = self._place(opts.rootRank, "gather", "root")
        received = outputs[0] if self.index == root else []
        if self.index == root:
            self._one_for_each(received, "the root of gather receives")

        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return self._to_root(root, [s[0] for s in sent])

        return self._collective(
            "gather",
            inputs,
            received,
            exchange,
            lambda group, inputs, outputs: [
                group.gather([outputs] if self.index == root else [], inputs, opts)
            ],
            root=root,
            parts=self.size(),
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        root = self._place(opts.rootRank, "scatter", "root")
        sent_here = inputs[0] if self.index == root else []
        if self.index == root:
            self._one_for_each(sent_here, "the root of scatter sends")

        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[part] for part in sent[root]]

        return self._collective(
            "scatter",
            sent_here,
            outputs,
            exchange,
            lambda group, inputs, outputs: [
                group.scatter(outputs, [inputs] if self.index == root else [], opts)
            ],
            root=root,
            counted=outputs,
            parts=self.size(),
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        self._one_for_each(outputs, "all_to_all receives")
        self._one_for_each(inputs, "all_to_all sends")
        return self._all_to_all(outputs, inputs, opts)

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

        outputs, inputs = parts(output, output_split_sizes), parts(input, input_split_sizes)
        return self._all_to_all(
            self._one_for_each(outputs, "all_to_all receives"),
            self._one_for_each(inputs, "all_to_all sends"),
            opts,
        )

    alltoall_base = all_to_all_single

    def _all_to_all(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        def exchange(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return [list(parts) for parts in zip(*sent, strict=True)]

        return self._collective(
            "all_to_all",
            inputs,
            outputs,
            exchange,
            # a transport lays out the pieces of all ranks end to end, in one tensor each
            lambda group, sent, received: [
                group.alltoall_base(
                    received[0],
                    sent[0],
                    [piece.numel() for piece in outputs],
                    [piece.numel() for piece in inputs],
                    opts or AllToAllOptions(),
                )
            ],
        )

    def barrier(self, opts: Any = None) -> Work:
        return self._collective(
            "barrier",
            [],
            [],
            lambda sent: self._to_all([]),
            lambda group, inputs, outputs: [group.barrier(opts or BarrierOptions())],
        )

    def _collective(
        self,
        kind: str,
        inputs: Tensors,
        outputs: Tensors,
        exchange: Exchange,
        native: Native,
        *,
        root: int | None = None,
        reduction: str = "",
        counted: Tensors | None = None,
        parts: int = 1,
    ) -> Work:
        """Issue a collective: ``exchange`` says in torch what it does, ``native`` asks a library to do it.

        ``counted`` are the tensors that give its shape and size, if not the inputs; they are one of
        ``parts`` of the whole buffer, from which the ring convention counts.
        """
        self._check_caller()
        with self.owner.clock.halted(), plain_tensors():
            self._n_collectives += 1
            tensors = inputs if counted is None else counted
            operation = self._operation(
                kind,
                self._n_collectives,
                tensors,
                parts,
                self._bytes_sent(kind, tensors, parts, root),
                root=root,
                detail="" if reduction == "sum" else reduction,
            )
            work = self._issue_collective(operation, inputs, outputs, exchange, native)
            self._keep(operation, work)
            return work

    def _issue_collective(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, exchange: Exchange, native: Native
    ) -> Work:
        raise NotImplementedError

    def _keep(self, operation: Operation, work: Work) -> None:
        """Keep the handle of a single number from Python's collector until it is waited for.

        torch may keep its C++ half alone, which would then wait for ever: DistributedDataParallel.join
        does, for the count of ranks that still have inputs.
        """
        self._handles = [kept for kept in self._handles if math.isinf(kept[0].done_s)]
        if operation.n_elements == 1:
            self._handles.append((operation, work))

    def _place(self, index: int, kind: str, name: str) -> int:
        """Refuse a rank that is not in the group, before anything is sent."""
        if not 0 <= index < self.size():
            ranks = ranks_text(self.members)
            raise RefusedError(
                f"{kind} names a {name} that is not in its group, which has {ranks}. Try one of them: "
                "src and dst are global ranks, also in a sub-group; group_src and group_dst are not."
            )
        return index

    def _to_all(self, received: list[Tensor]) -> list[list[Tensor]]:
        return [received] * self.size()

    def _to_root(self, root: int, received: list[Tensor]) -> list[list[Tensor]]:
        return [received if index == root else [] for index in range(self.size())]

    def _bytes_sent(self, kind: str, tensors: Tensors, parts: int, root: int | None) -> int:
        if kind == "all_to_all":  # each rank cuts as it likes
            return sum(tensor.nbytes for tensor in tensors) - tensors[self.index].nbytes
        n_elements: dict[int, int] = {}  # by element size: a buffer may hold several types
        for tensor in tensors:
            size = tensor.element_size()
            n_elements[size] = n_elements.get(size, 0) + parts * tensor.numel()
        return sum(
            size * elements_sent(kind, n, self.size(), self.index, root or 0)
            for size, n in n_elements.items()
        )

    def _one_for_each(self, tensors: Tensors, who: str) -> Tensors:
        if len(tensors) != self.size():
            raise RefusedError(
                f"{who} one tensor for each of the group's {self.size()} ranks, and got {len(tensors)}. "
                f"Try a list of {self.size()}."
            )
        return tensors

    def _even(self, size: int, kind: str, what: str) -> None:
        if size % self.size():
            below = size // self.size() * self.size()
            near = " or ".join(str(n) for n in (below, below + self.size()) if n)
            raise RefusedError(
                f"{kind} cuts its tensor into {self.size()} equal pieces, one for each rank of the group, "
                f"and it has {size} {what}. Nearest that can be cut so: {near}."
            )

    def _reduction(self, opts: Any) -> tuple[str, Callable[[list[Tensor]], Tensor]]:
        op = getattr(opts, "reduceOp", ReduceOp.SUM)
        op = getattr(op, "op", op)
        if op not in REDUCTIONS:
            known = ", ".join(name.upper() for name, _ in REDUCTIONS.values())
            raise RefusedError(f"ranks cannot reduce with {op}; they know {known}. Try dist.ReduceOp.SUM.")
        name, combine = REDUCTIONS[op]
        size = self.size()

        def reduction(terms: list[Tensor]) -> Tensor:
            total = reduce(combine, terms)
            if name != "avg":
                return total
            return total / size if total.is_floating_point() or total.is_complex() else total // size

        return name, reduction

    # ---- messages ----

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        return self._message(
            "send",
            tensors,
            self.index,
            self._place(dstRank, "send", "rank"),
            tag,
            lambda group, inputs, outputs: [group.send(inputs, dstRank, tag)],
        )

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        return self._message(
            "recv",
            tensors,
            self._place(srcRank, "recv", "rank"),
            self.index,
            tag,
            lambda group, inputs, outputs: [group.recv(outputs, srcRank, tag)],
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self._message(
            "recv",
            tensors,
            None,
            self.index,
            tag,
            lambda group, inputs, outputs: [group.recv_anysource(outputs, tag)],
        )

    def _message(
        self, kind: str, tensors: Tensors, sender: int | None, receiver: int, tag: int, native: Native
    ) -> Work:
        """Issue a send or a receive between two indices in the group; no sender: from anyone."""
        self._check_caller()
        with self.owner.clock.halted(), plain_tensors():
            peer = receiver if kind == "send" else sender
            # counted by what the trace tells apart: two groups may have the same name and members
            counts, key = self.owner.n_messages, (self.label, self.members, kind, peer)
            counts[key] = counts.get(key, 0) + 1
            operation = self._operation(
                kind,
                counts[key],
                tensors,
                1,
                sum(tensor.nbytes for tensor in tensors) if kind == "send" else 0,
                peer=None if peer is None else self.members[peer],
                detail=f"tag={tag}" if tag else "",
            )
            return self._issue_message(operation, tensors, sender, receiver, tag, native)

    def _issue_message(
        self,
        operation: Operation,
        tensors: Tensors,
        sender: int | None,
        receiver: int,
        tag: int,
        native: Native,
    ) -> Work:
        raise NotImplementedError

    # ---- shared ----

    def _check_caller(self) -> None:
        """Only the rank that owns this group may call it."""
        if current() is not self.owner:
            whose = "this run" if current() else "a run that has ended"
            raise RefusedError(
                f"this process group belongs to rank {self.owner.number} of {whose}; it was kept in a "
                "global, a default argument or a returned value. Ask for a group where it is used."
            )

    def _operation(
        self,
        kind: str,
        sequence: int,
        tensors: Tensors,
        parts: int,
        bytes_sent: int,
        *,
        peer: int | None = None,
        root: int | None = None,
        detail: str = "",
    ) -> Operation:
        rank = self.owner
        operation = Operation(
            rank=rank.number,
            kind=kind,
            group=self.label,
            members=self.members,
            sequence=sequence,
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
            n_elements=parts * sum(tensor.numel() for tensor in tensors),
            n_bytes=parts * sum(tensor.nbytes for tensor in tensors),
            bytes_sent=bytes_sent,
            issued_s=rank.clock.now(),
            where=rank.lines.here(),
            region=rank.region(),
            peer=peer,
            root=root,
            detail=detail,
        )
        rank.operations.append(operation)
        return operation
