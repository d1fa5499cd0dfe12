"""Round the ring: every rank's tensors visit every rank, and what is computed hides the travelling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib.mesh import Group


class Hop:
    """Tensors on their way to the right neighbour, while those of the left one are on theirs.

    It begins when it is made and ends in :meth:`wait`. In between, what is sent must not change.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Group) -> None:
        self._sent = [x.contiguous() for x in tensors]  # held until they have left
        self._works: list[dist.Work] = []
        if group.size == 1:
            self._arrived = self._sent
            return
        self._arrived = [torch.empty_like(x) for x in self._sent]
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        operations = []
        for outgoing, incoming in zip(self._sent, self._arrived, strict=True):
            operations += [
                dist.P2POp(dist.isend, outgoing, group=group.process_group, group_peer=right),
                dist.P2POp(dist.irecv, incoming, group=group.process_group, group_peer=left),
            ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """What has arrived."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self._arrived


def visits(tensors: Sequence[Tensor], group: Group) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield every rank's tensors, with its rank: first one's own, then those from further and further left.

    >>> from lessons_lib import Mesh, run
    >>> def step():
    ...     group = Mesh(cp=3)["cp"]
    ...     return [(source, int(x)) for source, (x,) in visits([torch.tensor(10 * group.rank)], group)]
    >>> run(step, ranks=3).values[1]
    [(1, 10), (0, 0), (2, 20)]

    The next ones set out before these are worked on, so a rank holds two sets. p-1 hops. Traffic per rank:
    p-1 times the size of its tensors.
    """
    for step in range(group.size):
        hop = Hop(tensors, group) if step < group.size - 1 else None
        yield (group.rank - step) % group.size, tensors
        if hop:
            tensors = hop.wait()
