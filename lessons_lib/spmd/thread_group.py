"""The group of thread ranks: the last rank to come exchanges the data of all."""

from __future__ import annotations

from lessons_lib.spmd import doctor
from lessons_lib.spmd._torch_internals import Work
from lessons_lib.spmd.doctor import Creation
from lessons_lib.spmd.in_flight import P2P, Collective, CollectivePart, P2PQueue, ThreadWork, snapshot
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.rank_group import Exchange, Native, RankGroup, Tensors
from lessons_lib.spmd.threads import Rank


class ThreadGroup(RankGroup):
    """A group whose members are threads of this process."""

    owner: Rank

    def _new_group(self, name: str, label: str, creation: Creation) -> RankGroup | None:
        world = self.owner.world
        first = world.groups.setdefault(name, creation)
        if first.members != creation.members:
            world.mismatch(doctor.different_groups(first, creation))
        if self.owner.number not in creation.members:
            return None
        return ThreadGroup(self.owner, name, label, creation.members)

    def _issue_collective(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, exchange: Exchange, native: Native
    ) -> Work:
        world = self.owner.world
        key = self.group_name, operation.sequence
        collective = world.collectives.setdefault(key, Collective(self.members))
        if collective.join(self.index, operation, inputs):
            disagreement = collective.disagreement()
            if disagreement:
                world.mismatch(disagreement)
            del world.collectives[key]
            done_s = world.channels[self.group_name].carry(list(collective.operations.values()))
            collective.complete(exchange, done_s)
        part = CollectivePart(collective, self.index, operation, outputs, world.mismatch)
        return ThreadWork(self.owner, part, list(outputs) or list(inputs))

    def _issue_message(
        self,
        operation: Operation,
        tensors: Tensors,
        sender: int | None,
        receiver: int,
        tag: int,
        native: Native,
    ) -> Work:
        world = self.owner.world
        others = tuple(member for member in self.members if member != self.owner.number)
        carried = snapshot(tensors) if operation.kind == "send" else list(tensors)
        p2p = P2P(operation, carried, sender, others, world.machine)
        queue = world.p2p_queues.setdefault((self.group_name, receiver, tag), P2PQueue())
        disagreement = queue.post(p2p)
        if disagreement:
            world.mismatch(disagreement)
        return ThreadWork(self.owner, p2p, list(tensors))
