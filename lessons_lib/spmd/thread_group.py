"""The group of thread ranks: the last rank to come exchanges the data of all."""

from __future__ import annotations

from lessons_lib.spmd import doctor
from lessons_lib.spmd._torch_internals import Work
from lessons_lib.spmd.doctor import Creation
from lessons_lib.spmd.exchange import Attendance, Letter, Mailbox, Meeting, Pending, snapshot
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
        meeting = world.meetings.setdefault(key, Meeting(self.members))
        if meeting.arrive(self.index, operation, inputs):
            disagreement = meeting.disagreement()
            if disagreement:
                world.mismatch(disagreement)
            del world.meetings[key]
            meeting.hold(exchange, world.time_collective(list(meeting.operations.values())))
        attendance = Attendance(meeting, self.index, operation, outputs, world.mismatch)
        return Pending(self.owner, attendance, list(outputs) or list(inputs))

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
        letter = Letter(operation, carried, sender, others, world.time_message)
        mailbox = world.mailboxes.setdefault((self.group_name, receiver, tag), Mailbox())
        disagreement = mailbox.post(letter)
        if disagreement:
            world.mismatch(disagreement)
        return Pending(self.owner, letter, list(tensors))
