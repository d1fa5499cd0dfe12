"""The group of process ranks: a communication library does the work, the board says who does what.

Before a rank asks gloo or nccl for anything it posts the operation and looks at what the others
have posted under the same number: ranks that disagree are stopped before a wrong number can come
out. While it waits, it says so, and the launcher proves from the board when nobody can go on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lessons_lib.errors import MismatchError, PeerLostError
from lessons_lib.machines import Machine
from lessons_lib.spmd import doctor
from lessons_lib.spmd._torch_internals import Work, native_group, run_after_backward
from lessons_lib.spmd.board import Key
from lessons_lib.spmd.doctor import Creation
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.rank_group import Exchange, Native, RankGroup, Tensors

if TYPE_CHECKING:
    from lessons_lib.spmd.process_rank import ProcessRank

POLL_S = 0.0005


class ProcessRankGroup(RankGroup):
    """A group whose members are processes. ``native`` is the library's group over the same ranks."""

    owner: ProcessRank

    def __init__(
        self, owner: ProcessRank, name: str, label: str, members: tuple[int, ...], native: Any = None
    ) -> None:
        super().__init__(owner, name, label, members)
        self.native = native or native_group(owner.backend, owner.store, name, self.index, len(members))

    def _new_group(self, name: str, label: str, creation: Creation) -> RankGroup | None:
        poster, me = self.owner.poster, self.owner.number
        poster.notice.groups[name] = creation
        poster.post()
        for other in range(self.owner.n_ranks):
            first = poster.board.read(other).groups.get(name)
            if first is not None and first.members != creation.members:
                raise MismatchError(doctor.different_groups(*sorted((first, creation), key=lambda c: c.rank)))
        if me not in creation.members:
            return None
        return ProcessRankGroup(self.owner, name, label, creation.members)

    def _issue_collective(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, exchange: Exchange, native: Native
    ) -> Work:
        key = self._post(("collective", self.group_name), operation)
        posted = [self.owner.poster.board.read(member).find(key) for member in self.members]
        disagreement = doctor.disagreement([found[0] for found in posted if found])
        if disagreement:
            raise MismatchError(disagreement)
        return ProcessWork(self, operation, key, self._ask(operation, native), list(outputs) or list(inputs))

    def _issue_message(
        self,
        operation: Operation,
        tensors: Tensors,
        sender: int | None,
        receiver: int,
        tag: int,
        native: Native,
    ) -> Work:
        key = self._post((operation.kind, self.group_name, sender, receiver, tag), operation)
        other = "recv" if operation.kind == "send" else "send"
        peer = None if operation.peer is None else self.owner.poster.board.read(operation.peer)
        found = peer.find((other, *key[1:])) if peer else None
        if found:
            sent, received = (operation, found[0]) if other == "recv" else (found[0], operation)
            if (sent.n_elements, sent.dtypes) != (received.n_elements, received.dtypes):
                raise MismatchError(doctor.different_message(sent, received))
        return ProcessWork(self, operation, key, self._ask(operation, native), list(tensors))

    def _post(self, count: Key, operation: Operation) -> Key:
        ready_s = max(operation.issued_s, self.owner.link_free_s)
        return self.owner.poster.issue(count, operation, ready_s)

    def _ask(self, operation: Operation, native: Native) -> list[Work]:
        operation.met = True  # the library answers when the other side has come
        try:
            return native(self.native)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.owner.backend} cannot do {operation}: {str(error).splitlines()[0]}"
            ) from error


class ProcessWork(Work):
    """The handle of an operation of process ranks."""

    def __init__(
        self,
        group: ProcessRankGroup,
        operation: Operation,
        key: Key,
        works: list[Work],
        buffers: list[Tensor],
    ) -> None:
        super().__init__()
        self.group, self.operation, self.key = group, operation, key
        self._works, self._buffers = works, buffers
        self._settled = False

    def wait(self, timeout: Any = None) -> bool:
        began, poster = self.group.owner.clock.now(), self.group.owner.poster
        waits = not self._is_done()
        if waits:
            poster.state("waiting", self.key)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"{self.operation} broke off: {str(error).splitlines()[0]}") from None
        while not self._is_received():
            time.sleep(POLL_S)
        if waits:
            poster.state("running")
        self._settle(began)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._is_done() and self.wait()

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> Any:
        return self._buffers

    def get_future(self) -> Any:
        run_after_backward(self.wait)  # DistributedDataParallel waits for the future; the clock, then too
        return self._works[-1].get_future()

    getFuture = get_future

    def _source_rank(self) -> int:
        return self._works[-1]._source_rank()

    source_rank = _source_rank

    def _is_done(self) -> bool:
        return all(work.is_completed() for work in self._works) and self._is_received()

    def _is_received(self) -> bool:
        """For a send: whether the other side has asked for it. A library may buffer a small message;
        a program that relies on that works for small ones only, so ranks here wait."""
        if self.operation.kind != "send" or self.operation.peer is None:
            return True
        _, name, _, receiver, tag, number = self.key
        counts = self.group.owner.poster.board.read(self.operation.peer).counts
        asked = counts.get(("recv", *self.key[1:5]), 0)
        return asked >= number or counts.get(("recv", name, None, receiver, tag), 0) > 0

    def _settle(self, began: float) -> None:
        if self._settled:
            return
        self._settled = True
        owner, operation = self.group.owner, self.operation
        if operation.kind == "recv" and operation.peer is None:
            operation.peer = self.group.members[self._source_rank()]
        if owner.machine is None:
            operation.done_s = owner.clock.now()
        else:
            operation.done_s = max(operation.issued_s, self._done_on(owner.machine))
            owner.clock.catch_up(operation.done_s)
        operation.waited_s = max(0.0, operation.done_s - began)

    def _done_on(self, machine: Machine) -> float:
        """When the operation is done on a virtual clock: as for thread ranks, from what others posted."""
        owner, operation = self.group.owner, self.operation
        board = owner.poster.board
        if operation.kind == "send":
            return operation.issued_s
        if operation.kind == "recv":
            assert operation.peer is not None
            sender = self.group.members.index(operation.peer)
            found = board.read(operation.peer).find(("send", self.key[1], sender, *self.key[3:]))
            sent_s = found[0].issued_s if found else operation.issued_s
            return sent_s + machine.link(operation.peer, owner.number).message_s(operation.n_bytes)
        posted = [board.read(member).find(self.key) for member in self.group.members]
        began = max(found[1] for found in posted if found)
        done = began + machine.collective_s(operation.kind, operation.n_bytes, operation.members)
        owner.link_free_s = done
        return done
