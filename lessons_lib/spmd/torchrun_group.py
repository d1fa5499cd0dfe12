"""The group of ranks that torchrun started: gloo and nccl do the work, the store of the launch compares.

Every operation of gloo is first put under its number in the store, by the rank that comes first; the others
compare theirs with it, and ranks that disagree are stopped before a wrong number can come out.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lessons_lib.spmd import doctor
from lessons_lib.spmd._torch_internals import Work
from lessons_lib.spmd.doctor import Creation
from lessons_lib.spmd.library import Asked, LibraryGroup, LibraryWork
from lessons_lib.spmd.network import connected
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.rank_group import Exchange, Native, RankGroup, Tensors
from lessons_lib.spmd.threads import Stopped

if TYPE_CHECKING:
    from lessons_lib.spmd.torchrun_rank import TorchrunRank

LAG = 64  # a check stays in the store until its group is so many collectives further


class TorchrunGroup(LibraryGroup):
    """A group of ranks that torchrun started."""

    owner: TorchrunRank

    def __init__(
        self,
        owner: TorchrunRank,
        name: str,
        label: str,
        members: tuple[int, ...],
        native: Mapping[str, Any],
    ) -> None:
        super().__init__(owner, name, label, members, native)
        self._n_checks: dict[Any, int] = {}  # of messages, by sender, receiver and tag
        self._any_source: set[int] = set()  # tags that this rank receives from anyone

    def _new_group(self, name: str, label: str, creation: Creation) -> RankGroup | None:
        owner = self.owner
        first: Creation = self._first(f"group/{name}", creation)
        if first.members != creation.members:
            self._mismatch(doctor.different_groups(*sorted((first, creation), key=lambda c: c.rank)))
        if owner.number not in creation.members:
            return None
        owner.meet(f"group/{name}", creation.members)  # inside of gloo nobody could stop a rank that waits
        index, size = creation.members.index(owner.number), len(creation.members)
        native = connected(owner.backend, owner.store, f"group{name}", index, size)
        owner.natives += native.values()
        return TorchrunGroup(owner, name, label, creation.members, native)

    def _tell_collective(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        if self._is_checked((*inputs, *outputs)) and self.size() > 1:
            prefix = f"collective/{self.group_name}/"
            first = self._first(f"{prefix}{operation.sequence}", operation)
            disagreement = doctor.disagreement([first, operation])
            if disagreement:
                self._mismatch(disagreement)
            if self.index == 0 and operation.sequence > LAG:
                self.owner.store.delete_key(f"{prefix}{operation.sequence - LAG}")

    def _tell_message(
        self, operation: Operation, tensors: Tensors, sender: int | None, receiver: int, tag: int
    ) -> None:
        if sender is None:  # from now on it is open which message meets which receive
            self._any_source.add(tag)
        elif self._is_checked(tensors) and not (operation.kind == "recv" and tag in self._any_source):
            pair = sender, receiver, tag
            number = self._n_checks[pair] = self._n_checks.get(pair, 0) + 1
            key = f"message/{self.group_name}/{sender}/{receiver}/{tag}/{number}"
            first = self._first(key, operation)
            if first.kind != operation.kind:
                self.owner.store.delete_key(key)
                sent, received = (first, operation) if first.kind == "send" else (operation, first)
                if (sent.n_elements, sent.dtypes) != (received.n_elements, received.dtypes):
                    self._mismatch(doctor.different_message(sent, received))

    def _is_checked(self, tensors: Tensors) -> bool:
        """Whether gloo moves these: what nccl moves is not to wait for the store."""
        return bool(self.library_of(tensors).name() == "gloo")

    def _work(self, operation: Operation, told: None, asked: Asked) -> Work:
        return TorchrunWork(self, operation, asked)

    def _first(self, key: str, mine: Any) -> Any:
        """What the first rank to come has put under ``key``; this one's, if it is the first."""
        return pickle.loads(self.owner.store.compare_set(key, "", pickle.dumps(mine)))

    def _mismatch(self, report: str) -> None:
        """Stop everybody: ranks disagree, and going on would give a wrong number."""
        self.owner.fail("MismatchError", report)
        raise Stopped

    def _ask(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, exchange: Exchange, native: Native
    ) -> Asked:
        operation.met = True  # the library answers when the other side has come
        try:
            return super()._ask(operation, inputs, outputs, exchange, native)
        except RuntimeError:
            if self.owner.failure():
                raise Stopped from None
            raise


class TorchrunWork(LibraryWork):
    """The handle of an operation: what the library says is true."""

    group: TorchrunGroup

    def _wait(self) -> None:
        owner = self.group.owner
        owner.waits_in = self.operation
        try:
            self._await_library()
        except RuntimeError as error:
            raise owner.broke_off(str(self.operation), error) from None
        finally:
            owner.waits_in = None

    def _settle(self, began: float) -> None:
        operation = self.operation
        if operation.kind == "recv" and operation.peer is None:
            # now it is known which message came: the next one from that rank
            peer = self._source_rank()
            operation.peer = operation.members[peer]
            counts, key = self.group.owner.n_messages, (self.group.label, operation.members, "recv", peer)
            counts[key] = operation.sequence = counts.get(key, 0) + 1
        super()._settle(began)
