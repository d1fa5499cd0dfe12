"""Collectives built step by step from send and receive.

Plain functions of ``(x, group)``, out of place. In a ring each rank sends to its right neighbour while it
receives from its left one: one *round*. A ring knows no dims. It cuts the tensor as it lies in memory,
flat, into as many chunks as there are ranks, and where their number does not divide the elements, as
``torch.tensor_split`` does: nothing is padded. Chunk r ends its reduce-scatter, and starts its all-gather,
on rank r.

A tree needs the fewest rounds, a chain has every rank send the same: both move a whole tensor, from or to
one root.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group, own_copy, plain


def ring_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum of every rank's ``x``, cut into chunks: chunk r on rank r.

    >>> from lessons_lib import Mesh, run
    >>> x = torch.tensor([1, 2, 3, 4, 5])
    >>> run(lambda: ring_reduce_scatter(x, Mesh(ring=2)["ring"]).tolist(), ranks=2).values
    [[2, 4, 6], [8, 10]]

    Chunk c sets out on rank c+1, and each rank on its way adds its own:

        y_c = x_c+1 + x_c+2 + ... + x_c        (ranks modulo p), the last term on rank c

    Layout: ``n +ring`` to ``n@ring``. ``x`` of any shape, the result flat.
    p-1 rounds. Traffic per rank: all chunks but its own, (p-1)/p n elements.
    Raises RefusedError for a tensor that requires grad.
    Source: Patarasuk and Yuan 2009, the first half of their ring algorithm.
    """
    p, r = group.size, group.rank
    chunks = list(own_copy(x, "ring_reduce_scatter").flatten().tensor_split(p))
    for step in range(p - 1):
        outgoing, incoming = (r - 1 - step) % p, (r - 2 - step) % p
        chunks[incoming] += _pass_on(chunks[outgoing], chunks[incoming], group)
    return chunks[r].clone()


def ring_all_gather(x: Tensor, group: Group, n_elements: int | None = None) -> Tensor:
    """Every rank's ``x``, one after the other in one flat tensor, on every rank.

    >>> from lessons_lib import Mesh, run
    >>> step = lambda: ring_all_gather(torch.tensor(dist.get_rank()), Mesh(ring=3)["ring"]).tolist()
    >>> run(step, ranks=3).values
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]

    ``n_elements`` is the size of the whole. Without it all ranks bring equally many; with it, ``x`` is
    chunk r of so many elements, as :func:`ring_reduce_scatter` leaves it.

    Layout: ``n@ring`` to ``n``. p-1 rounds. Traffic per rank: all chunks but that of its right neighbour,
    (p-1)/p n elements.
    Raises RefusedError for a tensor that requires grad, or where x is not as large as its chunk.
    Source: Patarasuk and Yuan 2009, the second half of their ring algorithm.
    """
    p, r = group.size, group.rank
    x = plain(x, "ring_all_gather")
    y = x.new_empty(p * x.numel() if n_elements is None else n_elements)
    chunks = y.tensor_split(p)
    if x.numel() != chunks[r].numel():
        raise RefusedError(
            f"ring_all_gather: rank {r} of {p} has chunk {r} of {n_elements} elements, which has "
            f"{chunks[r].numel()}, and x has {x.numel()}. Chunks are cut as torch.tensor_split cuts."
        )
    chunks[r].copy_(x.flatten())
    for step in range(p - 1):
        outgoing, incoming = (r - step) % p, (r - step - 1) % p
        chunks[incoming].copy_(_pass_on(chunks[outgoing], chunks[incoming], group))
    return y


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum of every rank's ``x``, on every rank: a reduce-scatter, then an all-gather.

    >>> from lessons_lib import Mesh, run
    >>> run(lambda: ring_all_reduce(torch.ones(5), Mesh(ring=4)["ring"]).tolist(), ranks=4).values[3]
    [4.0, 4.0, 4.0, 4.0, 4.0]

    Layout: ``n +ring`` to ``n@ring`` to ``n``. Each chunk is added up in one order, and what all ranks
    get is that one sum: bit for bit the same.
    2 (p-1) rounds. Traffic per rank: 2 (p-1)/p n elements.
    Raises RefusedError for a tensor that requires grad.
    Source: Patarasuk and Yuan 2009, who derive this traffic as the lower bound where ranks do the adding.
    """
    x = plain(x, "ring_all_reduce")
    return ring_all_gather(ring_reduce_scatter(x, group), group, x.numel()).view(x.shape)


def _pass_on(x: Tensor, like: Tensor, group: Group) -> Tensor:
    """One round: send ``x`` to the right while something like ``like`` comes from the left; return that."""
    y = torch.empty_like(like)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    both_at_once = [
        dist.P2POp(dist.isend, x, group=group.process_group, group_peer=right),
        dist.P2POp(dist.irecv, y, group=group.process_group, group_peer=left),
    ]
    for work in dist.batch_isend_irecv(both_at_once):
        work.wait()
    return y


# ---- from and to one root ----


def chain_broadcast(x: Tensor, group: Group, root: int) -> Tensor:
    """The root's ``x`` on every rank, handed on from each to its right neighbour.

    >>> from lessons_lib import Mesh, run
    >>> step = lambda: int(chain_broadcast(torch.tensor(dist.get_rank()), Mesh(chain=3)["chain"], root=1))
    >>> run(step, ranks=3).values
    [1, 1, 1]

    All pass a tensor of the root's shape and dtype. p-1 rounds. Traffic per rank: n elements, 0 for the
    last. A pipelined chain, which hands on the first piece while the second arrives, sends the same in
    less time: pipelining is a matter of time, not of bytes.
    Raises RefusedError for a root outside the group, or a tensor that requires grad.
    """
    y = own_copy(x, "chain_broadcast")
    p, r, behind = group.size, group.rank, _behind(root, group)
    if behind > 0:
        y = group.recv(y, (r - 1) % p)
    if behind < p - 1:
        group.send(y, (r + 1) % p)
    return y


def chain_reduce(x: Tensor, group: Group, root: int) -> Tensor | None:
    """Sum of every rank's ``x`` on the root, collected on the way there; ``None`` elsewhere.

    >>> from lessons_lib import Mesh, run
    >>> step = lambda: chain_reduce(torch.tensor(dist.get_rank()), Mesh(chain=3)["chain"], root=1)
    >>> run(step, ranks=3).values
    [None, tensor(3), None]

    The chain begins behind the root and ends on it. p-1 rounds. Traffic per rank: n elements, 0 for the
    root; pipelined, the same in less time.
    Raises RefusedError for a root outside the group, or a tensor that requires grad.
    """
    y = own_copy(x, "chain_reduce")
    p, r, behind = group.size, group.rank, _behind(root, group)
    if behind != 1 % p:  # not the first of the chain
        y += group.recv(y, (r - 1) % p)
    if behind == 0:
        return y
    group.send(y, (r + 1) % p)
    return None


def tree_broadcast(x: Tensor, group: Group, root: int) -> Tensor:
    """The root's ``x`` on every rank: in each round, all that have it send it to one that has not.

    >>> from lessons_lib import Mesh, run
    >>> step = lambda: int(tree_broadcast(torch.tensor(dist.get_rank()), Mesh(tree=3)["tree"], root=1))
    >>> run(step, ranks=3).values
    [1, 1, 1]

    All pass a tensor of the root's shape and dtype. A binomial tree: after k rounds the 2^k ranks from
    the root on have it. log2(p) rounds, rounded up. Traffic: n elements for each rank that a rank hands
    it to, so log2(p) n on the root and nothing on the leaves; (p-1) n in all, as in a chain.
    Raises RefusedError for a root outside the group, or a tensor that requires grad.
    Source: Thakur, Rabenseifner and Gropp 2005, on broadcast in MPICH.
    """
    y = own_copy(x, "tree_broadcast")
    p, r, behind = group.size, group.rank, _behind(root, group)
    for have in _doubling(p):
        if behind < have and behind + have < p:
            group.send(y, (r + have) % p)
        elif have <= behind < 2 * have:
            y = group.recv(y, (r - have) % p)
    return y


def tree_reduce(x: Tensor, group: Group, root: int) -> Tensor | None:
    """Sum of every rank's ``x`` on the root, ``None`` elsewhere: :func:`tree_broadcast` backwards.

    >>> from lessons_lib import Mesh, run
    >>> step = lambda: tree_reduce(torch.tensor(dist.get_rank()), Mesh(tree=3)["tree"], root=1)
    >>> run(step, ranks=3).values
    [None, tensor(3), None]

    log2(p) rounds, rounded up. Traffic per rank: n elements, 0 for the root.
    Raises RefusedError for a root outside the group, or a tensor that requires grad.
    """
    y = own_copy(x, "tree_reduce")
    p, r, behind = group.size, group.rank, _behind(root, group)
    for left in reversed(_doubling(p)):
        if behind < left and behind + left < p:
            y += group.recv(y, (r + left) % p)
        elif left <= behind < 2 * left:
            group.send(y, (r - left) % p)
    return y if behind == 0 else None


def _doubling(p: int) -> list[int]:
    """The powers of two below ``p``: how many ranks of a tree have it, round by round.

    >>> _doubling(8), _doubling(5), _doubling(1)
    ([1, 2, 4], [1, 2, 4], [])
    """
    return [2**k for k in range((p - 1).bit_length())]


def _behind(root: int, group: Group) -> int:
    """How many places this rank stands behind the root, going right."""
    return (group.rank - group.index(root, "root")) % group.size
