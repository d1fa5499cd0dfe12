"""Named axes over the ranks, groups along an axis, and collectives that know their gradient.

``Mesh(row=2, col=3)`` numbers six ranks row-major, last axis fastest. ``mesh["col"]`` holds the
ranks that differ *only in the coordinate* ``col``: it is what runs along a grid row.

The methods of a :class:`Group` are plain collectives, out of place. Autograd does not see them,
and there is no single gradient it could know: whether the backward of an all-reduce is an
all-reduce or nothing depends on what the ranks do with the result. So each *pair* of forward and
backward is a function of its own, named ``forward_backward``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lessons_lib.errors import RefusedError

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Mesh:
    """Named axes over all ranks of a run: ``Mesh(row=2, col=3)``, ``Mesh(tp=4)``.

    >>> from lessons_lib import run
    >>> run(lambda: tuple(Mesh(row=2, col=3).coordinate.values()), ranks=6).values
    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]

    Built on torch's ``DeviceMesh``, which is ``mesh.device_mesh``. Every rank makes the mesh.
    Raises :class:`~lessons_lib.errors.RefusedError` on every rank, before any communication, when
    the sizes do not multiply to the number of ranks.
    """

    def __init__(self, *unnamed: int, **sizes: int) -> None:
        if unnamed:
            raise RefusedError(f"Mesh{unnamed} names no axes. Try Mesh(row=2, col=2), or Mesh(tp=4).")
        if not dist.is_initialized():
            raise RefusedError(
                "a Mesh lies over the ranks of a run: make it inside the function given to run."
            )
        n_ranks = dist.get_world_size()
        text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        for axis, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise RefusedError(
                    f"Mesh({text}): the size of axis {axis!r} is {size!r}; it must be 1 or more."
                )
        wanted = math.prod(sizes.values())
        if not sizes or wanted != n_ranks:
            raise RefusedError(
                f"Mesh({text}) has {wanted} places and this run has {n_ranks} ranks. "
                f"Try {_fitting(sizes, n_ranks)}, or run with ranks={wanted}."
            )
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self.device_mesh: DeviceMesh = init_device_mesh(
            device, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        # torch takes the group of all ranks for an axis that spans them, which would go by its name.
        self._groups = {
            axis: dist.new_group(group_desc=f"mesh_{axis}")
            if size == n_ranks
            else self.device_mesh.get_group(axis)
            for axis, size in sizes.items()
        }
        self.sizes: dict[str, int] = dict(sizes)
        self.rank: int = dist.get_rank()
        self.coordinate: dict[str, int] = {}
        remaining = self.rank
        for axis, size in reversed(sizes.items()):
            remaining, self.coordinate[axis] = divmod(remaining, size)
        self.coordinate = {axis: self.coordinate[axis] for axis in sizes}

    def __getitem__(self, axis: str) -> Group:
        """The group of the ranks that differ from this one in ``axis`` alone."""
        if axis not in self.sizes:
            nearest = get_close_matches(str(axis), self.sizes, n=1)
            guess = f" Did you mean {nearest[0]!r}?" if nearest else ""
            known = ", ".join(map(repr, self.sizes))
            raise RefusedError(f"this mesh has no axis {axis!r}; it has {known}.{guess}")
        if not dist.is_initialized():
            raise RefusedError(
                f"{self!r} belongs to a run that has ended: make a new one inside the function."
            )
        return Group(self._groups[axis])

    def __repr__(self) -> str:
        inside = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"Mesh({inside})"


def _fitting(sizes: dict[str, int], n_ranks: int) -> str:
    """A mesh over ``n_ranks`` with the same axes, the first sizes kept where they divide."""
    fitting, remaining = {}, n_ranks
    for axis, size in list(sizes.items())[:-1]:
        fitting[axis] = math.gcd(size, remaining)
        remaining //= fitting[axis]
    fitting[next(reversed(sizes), "tp")] = remaining
    return f"Mesh({', '.join(f'{axis}={size}' for axis, size in fitting.items())})"


class Group:
    """Ranks that communicate along one mesh axis: plain collectives, out of place.

    ``rank`` and every ``root`` are indices in the group, never global ranks. Every method refuses
    a tensor that requires grad and names the differentiable pairs of this module instead.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.size: int = dist.get_world_size(process_group)
        self.rank: int = dist.get_rank(process_group)

    def __repr__(self) -> str:
        return f"Group(ranks={dist.get_process_group_ranks(self.process_group)}, rank={self.rank})"

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Sum of every rank's ``x``, on every rank."""
        y = own_copy(x, "Group.all_reduce")
        dist.all_reduce(y, _reduction(op), group=self.process_group)
        return y

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's ``x``, one after the other along ``dim``, on every rank."""
        x = plain(x, "Group.all_gather").contiguous()
        _check_dim(x, dim)
        y = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(y.unbind()), x, group=self.process_group)
        return y.flatten(0, 1) if dim in (0, -x.dim()) else torch.cat(y.unbind(), dim)

    def reduce_scatter(self, x: Tensor, dim: int, op: str = "sum") -> Tensor:
        """Sum of every rank's ``x``, cut along ``dim``: this rank's piece."""
        parts = [part.contiguous() for part in self._cut(plain(x, "Group.reduce_scatter"), dim)]
        y = torch.empty_like(parts[self.rank])
        dist.reduce_scatter(y, parts, _reduction(op), group=self.process_group)
        return y

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """The root's ``x`` on every rank; all pass a tensor of its shape and dtype."""
        y = own_copy(x, "Group.broadcast")
        dist.broadcast(y, group=self.process_group, group_src=self.index(root, "root"))
        return y

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> Tensor | None:
        """Sum of every rank's ``x`` on the root; ``None`` elsewhere."""
        y = own_copy(x, "Group.reduce")
        dist.reduce(y, op=_reduction(op), group=self.process_group, group_dst=self.index(root, "root"))
        return y if self.rank == root else None

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Piece k of ``x`` along ``split_dim`` goes to rank k; arrivals are joined along ``concat_dim``."""
        x = plain(x, "Group.all_to_all")
        _check_dim(x, concat_dim)
        sent = torch.stack(self._cut(x, split_dim)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return torch.cat(received.unbind(), concat_dim)

    def send(self, x: Tensor, to: int) -> None:
        """Send ``x`` to rank ``to`` of the group, and wait until it is received."""
        x = plain(x, "Group.send").contiguous()
        dist.send(x, group=self.process_group, group_dst=self.index(to, "to"))

    def recv(self, like: Tensor, source: int) -> Tensor:
        """What rank ``source`` of the group sends, in a new tensor of the shape and dtype of ``like``."""
        y = torch.empty_like(plain(like, "Group.recv"), memory_format=torch.contiguous_format)
        dist.recv(y, group=self.process_group, group_src=self.index(source, "source"))
        return y

    def shift(self, x: Tensor, by: int) -> Tensor:
        """Send ``x`` to the rank ``by`` places further round the ring; what arrives from behind.

        >>> from lessons_lib import run
        >>> run(lambda: int(Mesh(ring=3)["ring"].shift(torch.tensor(Mesh(ring=3).rank), 1)), ranks=3).values
        [2, 0, 1]
        """
        if not _is_whole(by):
            raise RefusedError(f"by={by!r}: give a whole number of places.")
        if by % self.size == 0:
            return own_copy(x, "Group.shift")
        x = plain(x, "Group.shift").contiguous()
        y = torch.empty_like(x)
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        operations = [
            dist.P2POp(dist.isend, x, group=self.process_group, group_peer=to),
            dist.P2POp(dist.irecv, y, group=self.process_group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return y

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        dist.barrier(group=self.process_group)

    def piece(self, x: Tensor, dim: int) -> Tensor:
        """This rank's piece of ``x`` cut along ``dim``; no communication."""
        return self._cut(plain(x, "Group.piece"), dim)[self.rank].clone(memory_format=torch.contiguous_format)

    def _cut(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        _check_dim(x, dim)
        if x.shape[dim] % self.size:
            below = x.shape[dim] // self.size * self.size
            near = " or ".join(str(size) for size in (below, below + self.size) if size)
            raise RefusedError(
                f"dim {dim} of a tensor of shape {list(x.shape)} has size {x.shape[dim]}, "
                f"which {self.size} ranks cannot share evenly. Nearest sizes that they can: {near}."
            )
        return x.chunk(self.size, dim)

    def index(self, rank: int, name: str) -> int:
        """``rank``, an argument called ``name``, if it is a rank of this group; else it is refused."""
        if not _is_whole(rank) or not 0 <= rank < self.size:
            raise RefusedError(
                f"{name}={rank!r} is no rank of this group: it counts its ranks from 0 to {self.size - 1} "
                f"(global ranks {dist.get_process_group_ranks(self.process_group)})."
            )
        return operator.index(rank)


def _is_whole(number: Any) -> bool:
    """Whether this is a whole number, of Python, numpy or torch: 2.0 is none, and True counts nothing."""
    try:
        operator.index(number)
    except TypeError:
        return False
    return not isinstance(number, bool)


def _check_dim(x: Tensor, dim: int) -> None:
    if not _is_whole(dim):
        raise RefusedError(f"dim={dim!r}: give a whole number, a dim of a tensor of shape {list(x.shape)}.")
    if not -x.dim() <= dim < x.dim():
        raise RefusedError(f"dim={dim} is out of range for a tensor of shape {list(x.shape)}.")


def _reduction(op: str) -> Any:
    if op not in REDUCTIONS:
        raise RefusedError(f"op={op!r} is unknown; known: {', '.join(map(repr, REDUCTIONS))}.")
    return REDUCTIONS[op]


def plain(x: Tensor, caller: str) -> Tensor:
    """``x`` without its gradient; where autograd expects one it is refused: it would be wrong, silently.

    ``caller`` is the function that communicates, as the learner calls it.
    """
    if not isinstance(x, Tensor):
        raise RefusedError(f"{caller} takes a tensor and got {x!r}. Try torch.tensor({x!r}).")
    if torch.is_grad_enabled() and x.requires_grad:
        raise RefusedError(
            f"{caller} is plain communication, which autograd does not see, and x requires grad. "
            f"Use a pair that says what the backward is ({', '.join(PAIRS)}; all in lessons_lib.mesh), "
            "or x.detach() if no gradient is wanted."
        )
    return x.detach()


def own_copy(x: Tensor, caller: str) -> Tensor:
    """A copy of ``x``, whose memory lies in the order of its values; refused like :func:`plain`."""
    return plain(x, caller).clone(memory_format=torch.contiguous_format)


# ---- pairs: what happens forward, what happens to the gradient ----


Communication = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """One communication forward, another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Communication, backward: Communication) -> Tensor:
        ctx.communicate = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.communicate(dy), None, None


def copy_sum(x: Tensor, group: Group) -> Tensor:
    """Identity / all-reduce: one tensor enters the work of p ranks, whose gradients add up.

    Megatron's *f*. In front of a column-parallel linear.
    """
    return _Pair.apply(x, torch.clone, group.all_reduce)


def sum_copy(x: Tensor, group: Group) -> Tensor:
    """All-reduce / identity: p partial sums become one tensor, and *one* loss, seen p times, follows.

    Megatron's *g*. Behind a row-parallel linear.
    """
    return _Pair.apply(x, group.all_reduce, torch.clone)


def sum_sum(x: Tensor, group: Group) -> Tensor:
    """All-reduce / all-reduce: a sum that p *different* losses use, which are added up."""
    return _Pair.apply(x, group.all_reduce, group.all_reduce)


def gather_split(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All-gather / this rank's piece: all ranks go on alike with the whole, under one loss."""
    return _Pair.apply(x, lambda t: group.all_gather(t, dim), lambda t: group.piece(t, dim))


def gather_reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All-gather / reduce-scatter: each rank does other work with the whole, and gradients add up."""
    return _Pair.apply(x, lambda t: group.all_gather(t, dim), lambda t: group.reduce_scatter(t, dim))


def reduce_scatter_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Reduce-scatter / all-gather: partial sums become one tensor, of which each rank keeps a piece."""
    return _Pair.apply(x, lambda t: group.reduce_scatter(t, dim), lambda t: group.all_gather(t, dim))


def split_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's piece / all-gather: of one tensor that all hold, each goes on with a piece."""
    return _Pair.apply(x, lambda t: group.piece(t, dim), lambda t: group.all_gather(t, dim))


def exchange_exchange(x: Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """All-to-all / all-to-all with the dims swapped: another dim is cut afterwards."""
    return _Pair.apply(
        x,
        lambda t: group.all_to_all(t, split_dim, concat_dim),
        lambda t: group.all_to_all(t, concat_dim, split_dim),
    )


PAIRS: dict[str, Callable[..., Tensor]] = {
    pair.__name__: pair
    for pair in (
        copy_sum,
        sum_copy,
        sum_sum,
        gather_split,
        gather_reduce_scatter,
        reduce_scatter_gather,
        split_gather,
        exchange_exchange,
    )
}
