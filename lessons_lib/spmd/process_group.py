"""The group of process ranks: a communication library does the work, the board says who does what.

Before a rank asks gloo or nccl for anything it posts the operation and looks at what the others
have posted under the same number: ranks that disagree are stopped before a wrong number can come
out. While it waits, it says so, and the launcher proves from the board when nobody can go on.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from lessons_lib.errors import PeerLostError
from lessons_lib.machines import Machine
from lessons_lib.spmd import doctor
from lessons_lib.spmd._torch_internals import Work, native_group
from lessons_lib.spmd.board import Key, Posted
from lessons_lib.spmd.clock import Channel, arrival_s
from lessons_lib.spmd.doctor import Creation
from lessons_lib.spmd.library import POLL_S, Asked, LibraryGroup, LibraryWork, by_device, first_line
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.rank_group import RankGroup, Tensors

if TYPE_CHECKING:
    from lessons_lib.spmd.process_rank import ProcessRank


class ProcessRankGroup(LibraryGroup):
    """A group whose members are processes of this host."""

    owner: ProcessRank

    def __init__(self, owner: ProcessRank, name: str, label: str, members: tuple[int, ...]) -> None:
        index, n = members.index(owner.number), len(members)
        try:
            native = {
                device: native_group(library, owner.store, f"{name}/{library}", index, n)
                for device, library in by_device(owner.backend).items()
            }
        except RuntimeError as error:
            raise RuntimeError(
                f"the ranks cannot connect through the loopback interface, 127.0.0.1: {first_line(error)}. "
                "Is it up? Thread ranks, the default transport, need no network."
            ) from None
        super().__init__(owner, name, label, members, native)
        self._channel = Channel(owner.machine)
        self._done_s: list[float] = []  # when its collectives were done, on a virtual clock

    def _new_group(self, name: str, label: str, creation: Creation) -> RankGroup | None:
        """Like the libraries, wait for the other members; the doctor sees it as an operation."""
        owner = self.owner
        operation = Operation(
            rank=owner.number,
            kind="new_group",
            group=label,
            members=creation.members,
            sequence=1,
            shapes=(),
            dtypes=(),
            n_elements=0,
            n_bytes=0,
            bytes_sent=0,
            issued_s=owner.clock.now(),
            where=creation.where,
            region="",
        )
        key, place = owner.poster.issue(("new_group", name), Posted(operation))
        for other in range(owner.n_ranks):
            posted = owner.board.log(other).find(key)
            if posted is not None and posted.operation.members != creation.members:
                first, second = sorted((posted.operation, operation), key=lambda each: each.rank)
                owner.stop(
                    doctor.different_groups(
                        Creation(first.members, first.rank, first.where),
                        Creation(second.members, second.rank, second.where),
                    )
                )
        if owner.number not in creation.members:
            return None
        owner.wait_until(lambda: not owner.board.missing(owner.number, key, operation), place)
        return ProcessRankGroup(owner, name, label, creation.members)

    def _tell_collective(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> tuple[Key, int]:
        mine = Posted(operation, tuple((tuple(each.shape), _name(each.dtype)) for each in outputs))
        key, place = self.owner.poster.issue(("collective", self.group_name), mine)
        posted = [self.owner.board.log(member).find(key) for member in self.members]
        come = [each for each in posted if each]
        if doctor.disagreement([each.operation for each in come]):
            self.owner.stop(key)  # the launcher knows who comes later
        if operation.kind == "all_to_all":
            for other in come:
                self._check_pieces(other, mine)
                self._check_pieces(mine, other)
        return key, place

    def _check_pieces(self, sender: Posted, receiver: Posted) -> None:
        """Stop if what one rank sends to another in an all-to-all is not what that one expects."""
        to = self.members.index(receiver.operation.rank)
        source = self.members.index(sender.operation.rank)
        shape, dtype = sender.operation.shapes[to], sender.operation.dtypes[to]
        expected, expected_dtype = receiver.outputs[source]
        if (math.prod(shape), dtype) != (math.prod(expected), expected_dtype):
            buffer = torch.empty(expected, dtype=getattr(torch, expected_dtype), device="meta")
            arrives = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            self.owner.stop(doctor.wrong_buffer(receiver.operation, buffer, arrives))

    def _tell_message(
        self, operation: Operation, tensors: Tensors, sender: int | None, receiver: int, tag: int
    ) -> tuple[Key, int]:
        place_of = (self.group_name, sender, receiver, tag)
        key, place = self.owner.poster.issue((operation.kind, *place_of), Posted(operation))
        if operation.peer is not None:
            other = "recv" if operation.kind == "send" else "send"
            found = self.owner.board.log(operation.peer).find((other, *key[1:]))
            if found:
                pair = (operation, found.operation) if other == "recv" else (found.operation, operation)
                sent, received = pair
                if (sent.n_elements, sent.dtypes) != (received.n_elements, received.dtypes):
                    self.owner.stop(doctor.different_message(sent, received))
        return key, place

    def _work(self, operation: Operation, told: tuple[Key, int], asked: Asked) -> Work:
        return ProcessWork(self, operation, *told, asked)

    # ---- a virtual clock ----

    def done_on(self, machine: Machine, operation: Operation, key: Key) -> float:
        """When an operation that is over was done, from what its ranks posted: as for thread ranks."""
        board = self.owner.board
        if operation.kind == "send":
            return operation.issued_s
        if operation.kind == "recv":
            assert operation.peer is not None
            found = board.log(operation.peer).find(key)
            assert found is not None
            return arrival_s(machine, found.operation, operation.rank)
        while len(self._done_s) < operation.sequence:
            number = len(self._done_s) + 1
            posted = [board.log(member).find((*key[:-1], number)) for member in self.members]
            self._done_s.append(self._channel.carry([each.operation for each in posted if each]))
            for member in self.members:
                board.log(member).forget((*key[:-1], number))
        return self._done_s[operation.sequence - 1]


class ProcessWork(LibraryWork):
    """The handle of an operation of process ranks, done when the library says so and all others have come.

    A library may let a rank go before: it buffers small messages, and the root of a broadcast need not
    wait. A program that relies on that works by chance, so ranks here wait.
    """

    group: ProcessRankGroup

    def __init__(
        self, group: ProcessRankGroup, operation: Operation, key: Key, place: int, asked: Asked
    ) -> None:
        super().__init__(group, operation, asked)
        self.key, self.place = key, place
        group.owner.unsettled[id(operation)] = self

    def _wait(self) -> None:
        if self._is_done():
            self._await_library()
            return
        with self.group.owner.waiting(self.place):
            self._await_library()
            while not self._is_met():
                time.sleep(POLL_S)

    def _await_library(self) -> None:
        try:
            super()._await_library()
        except RuntimeError as error:
            raise PeerLostError(f"{self.operation} broke off: {first_line(error)}") from None

    def _is_done(self) -> bool:
        """Whether waiting would take no time. Libraries do not tell of messages before one waits."""
        return self._is_met() and (self.key[0] != "collective" or super()._is_done())

    def _is_met(self) -> bool:
        owner = self.group.owner
        return not owner.board.missing(owner.number, self.key, self.operation)

    def _settle(self, began: float) -> None:
        owner, operation = self.group.owner, self.operation
        sent = self._find_sender() if operation.kind == "recv" else None
        if owner.machine is None:
            done_s = owner.clock.now()
            for member in operation.members if sent is None else ():
                owner.board.log(member).forget(self.key)
        else:
            done_s = self.group.done_on(owner.machine, operation, sent or self.key)
        self._settle_at(done_s, began)
        if sent is not None and operation.peer is not None:
            owner.board.log(operation.peer).forget(sent)
        del owner.unsettled[id(operation)]

    def _find_sender(self) -> Key:
        """Under which key the message was sent that has arrived; for one from anyone, learn its sender."""
        _, name, sender, receiver, tag, number = self.key
        owner, operation = self.group.owner, self.operation
        if sender is None:
            sender = self._source_rank()
            operation.peer = self.group.members[sender]
            (*_, number), _ = owner.poster.issue(("recv", name, sender, receiver, tag), None)
            owner.poster.issue(("resolved", name, None, receiver, tag), None)
        assert operation.peer is not None
        key = ("send", name, sender, receiver, tag, number)
        sent = owner.board.log(operation.peer).find(key)
        if sent is not None:
            operation.sequence = sent.operation.sequence
        return key


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
