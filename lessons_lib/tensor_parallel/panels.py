"""Panels: the blocks of one grid row or column, passed round while the ranks multiply.

Both loops keep two panels: one is used while the other travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib.mesh import Group


def panels(block: Tensor, group: Group) -> Iterator[Tensor]:
    """Every rank's ``block`` in turn, on every rank of the group; the first travels at once.

    A panel is good until the next one is asked for. Traffic: p broadcasts, in which each rank sends p-1
    blocks (a chain from rank l on ends before rank l, so each rank is the last one once).
    Memory: two blocks.
    """
    block = block.contiguous()
    buffers = [torch.empty_like(block) for _ in range(min(2, group.size - 1))]

    def begin(root: int) -> tuple[Tensor, Any]:
        panel = block if root == group.rank else buffers[root % len(buffers)]
        return panel, dist.broadcast(panel, group=group.process_group, group_src=root, async_op=True)

    first = begin(0)  # before anybody asks: a second matrix's panels begin at the same time

    def each() -> Iterator[Tensor]:
        panel, travels = first
        for root in range(group.size):
            travels.wait()
            here = panel
            if root + 1 < group.size:
                panel, travels = begin(root + 1)
            yield here

    return each()


def reduce_each(terms: Iterable[Tensor], group: Group) -> Tensor:
    """Sum the l-th of ``terms`` over the group, onto rank l; return the sum that this rank gets.

    Traffic: p reduces, in which each rank sends p-1 terms. Memory: two terms, and the result.
    """
    mine: Tensor | None = None
    travels: Any = None
    for root, term in enumerate(terms):
        if travels is not None:
            travels.wait()
        travels = dist.reduce(term, group=group.process_group, group_dst=root, async_op=True)
        if root == group.rank:
            mine = term
    travels.wait()
    assert mine is not None
    return mine
