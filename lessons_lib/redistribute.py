"""From one layout to another: the collectives that lead there, their bill, and their execution.

>>> from lessons_lib import Layout
>>> for step in redistribution(Layout("B D +tp"), Layout("B@tp D"), (8, 6), {"tp": 4}):
...     print(step)
reduce_scatter over tp: B D +tp -> B@tp D, 36 elements sent
>>> redistribution(Layout("B D"), Layout("B D@tp"), (8, 8), {"tp": 4})[0].sent
0

Which way is the cheapest is found by search: layouts are places, and each of the collectives below is a road
from one to the next, as long as the elements that a rank sends in it (by the ring convention). Between ways
of one length the one with fewer steps is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice, permutations

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout, coordinates
from lessons_lib.mesh import Mesh
from lessons_lib.timeline import ring_traffic


@dataclass(frozen=True, slots=True)
class Step:
    """One communication, or one local step, between two layouts."""

    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, exchange; keep and term are local
    axis: str  # the mesh axis it runs over; empty for an exchange between single ranks
    source: Layout
    target: Layout
    sent: int | Fraction  # elements each rank sends, the mean over ranks

    def __str__(self) -> str:
        over = f" over {self.axis}" if self.axis else ""
        return f"{self.kind}{over}: {self.source} -> {self.target}, {self.sent} elements sent"


def redistribution(
    source: Layout, target: Layout, shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target`` in which ranks send the least. No ranks are needed.

    >>> steps = redistribution(Layout("B@i D"), Layout("B D@i"), (8, 4), {"i": 4})
    >>> [(step.kind, step.sent) for step in steps]
    [('all_to_all', 6)]

    ``shape`` is that of the whole tensor. The bill is ``sum(step.sent for step in steps)``, in elements per
    rank; where ranks differ, their mean.

    Raises RefusedError if the layouts have not the same dims, or one of them does not fit the mesh or shape.
    """
    if source.dims != target.dims:
        raise RefusedError(
            f"{source!r} and {target!r} do not describe one tensor: their dims are "
            f"{' '.join(source.dims) or 'none'} and {' '.join(target.dims) or 'none'}."
        )
    for layout in (source, target):
        layout.local_shape(shape, sizes)

    order = count()  # ties go to the way that was found first, which is the same on every rank
    ways: list[tuple[int | Fraction, int, int, Layout, tuple[Step, ...]]]
    ways = [(0, 0, next(order), source, ())]
    done: set[Layout] = set()
    while ways:
        sent, n_steps, _, layout, steps = heapq.heappop(ways)
        if layout == target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for step in _roads(layout, shape, sizes):
            if step.target not in done:
                way = (sent + step.sent, n_steps + 1, next(order), step.target, (*steps, step))
                heapq.heappush(ways, way)
    raise AssertionError(f"no way from {source!r} to {target!r}: gather all, then cut, is one always")


def redistribute(x: Tensor, source: Layout, target: Layout, mesh: Mesh) -> Tensor:
    """This rank's block of a tensor in ``target``, from its block in ``source``; always a new tensor.

    >>> import torch
    >>> from lessons_lib import run
    >>> def step():
    ...     mesh = Mesh(tp=2)
    ...     term = torch.full((4,), mesh.rank + 1)
    ...     return redistribute(term, Layout("D +tp"), Layout("D@tp"), mesh).tolist()
    >>> run(step, ranks=2).values
    [[3, 3], [3, 3]]

    Traffic: the bill of :func:`redistribution`. A copy that is cut costs nothing, a partial sum that is cut
    half of one that is copied.
    """
    shape = source.global_shape(x.shape, mesh.sizes)
    y = x
    for step in redistribution(source, target, shape, mesh.sizes):
        y = _EXECUTE[step.kind](y, step, mesh)
    return y.clone() if y is x else y


# ---- the roads from a layout, and what they cost


def _roads(layout: Layout, shape: Sequence[int], sizes: Mapping[str, int]) -> Iterator[Step]:
    """Every step that leads from ``layout`` to another one on this mesh."""
    n = layout.n_local(shape, sizes)
    free = layout.replicated(sizes)

    def road(
        kind: str, axis: str, cuts: Mapping[str, tuple[str, ...]], partial: Sequence[str]
    ) -> Iterator[Step]:
        target = Layout.of(cuts, partial)
        if all(size % blocks == 0 for size, blocks in zip(shape, target.n_blocks(sizes), strict=True)):
            n_elements = n * sizes[axis] if kind == "all_gather" else n  # what elements_sent calls whole
            sent = 0 if kind in ("keep", "term") else ring_traffic(kind, n_elements, sizes[axis])
            yield Step(kind, axis, layout, target, sent)

    cuts = dict(zip(layout.dims, layout.cuts, strict=True))
    for axis in layout.partial:
        rest = [other for other in layout.partial if other != axis]
        yield from road("all_reduce", axis, cuts, rest)
        for dim in cuts:
            yield from road("reduce_scatter", axis, cuts | {dim: (*cuts[dim], axis)}, rest)
    for dim, cut in cuts.items():
        if cut:
            *outer, axis = cut
            yield from road("all_gather", axis, cuts | {dim: tuple(outer)}, layout.partial)
            for other in cuts:
                if other != dim:
                    moved = cuts | {dim: tuple(outer), other: (*cuts[other], axis)}
                    yield from road("all_to_all", axis, moved, layout.partial)
        for axis in free:
            yield from road("keep", axis, cuts | {dim: (*cut, axis)}, layout.partial)
    for axis in free:
        yield from road("term", axis, cuts, [*layout.partial, axis])
    for target in _axes_exchanged(layout, sizes):
        moving = [rank for rank, source in enumerate(_senders(layout, target, sizes)) if source != rank]
        sent = Fraction(n * len(moving), len(coordinates(sizes)))
        yield Step("exchange", "", layout, target, int(sent) if sent.denominator == 1 else sent)


def _axes_exchanged(layout: Layout, sizes: Mapping[str, int]) -> Iterator[Layout]:
    """The layouts with as many blocks and terms, which other ranks hold."""
    lengths = [len(cut) for cut in layout.cuts]
    for axes in permutations(sizes, len(layout.axes)):
        left = iter(axes)
        cuts = [tuple(islice(left, length)) for length in lengths]
        target = Layout.of(dict(zip(layout.dims, cuts, strict=True)), list(left))
        same_blocks = target.n_blocks(sizes) == layout.n_blocks(sizes)
        if same_blocks and target.n_terms(sizes) == layout.n_terms(sizes) and target != layout:
            yield target


def _senders(source: Layout, target: Layout, sizes: Mapping[str, int]) -> list[int]:
    """From which rank each gets its block (or term) of ``target``: itself if it can, else one of its own."""
    places = coordinates(sizes)

    def key(layout: Layout, at: Mapping[str, int]) -> tuple[int, ...]:
        term = 0
        for axis in layout.partial:
            term = term * sizes[axis] + at[axis]
        return (*layout.block(sizes, at), term)

    has, wants = ([key(layout, at) for at in places] for layout in (source, target))
    givers: dict[tuple[int, ...], list[int]] = {}
    for rank, block in enumerate(has):
        if block != wants[rank]:
            givers.setdefault(block, []).append(rank)
    return [rank if has[rank] == block else givers[block].pop(0) for rank, block in enumerate(wants)]


# ---- execution


def _dim(step: Step, changed: Callable[[int, int], bool]) -> int:
    """The dim of which the number of axes that cut it has changed so."""
    cuts = zip(step.source.cuts, step.target.cuts, strict=True)
    return next(at for at, (before, after) in enumerate(cuts) if changed(len(before), len(after)))


def _grows(step: Step) -> int:
    return _dim(step, lambda before, after: before > after)


def _shrinks(step: Step) -> int:
    return _dim(step, lambda before, after: before < after)


def _term(x: Tensor, step: Step, mesh: Mesh) -> Tensor:
    return x.clone() if mesh[step.axis].rank == 0 else torch.zeros_like(x)


def _exchange(x: Tensor, step: Step, mesh: Mesh) -> Tensor:
    senders = _senders(step.source, step.target, mesh.sizes)
    source, receiver = senders[mesh.rank], senders.index(mesh.rank)
    if source == mesh.rank:
        return x.clone()
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    swap = [dist.P2POp(dist.isend, x, receiver), dist.P2POp(dist.irecv, y, source)]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    return y


_EXECUTE: dict[str, Callable[[Tensor, Step, Mesh], Tensor]] = {
    "all_reduce": lambda x, step, mesh: mesh[step.axis].all_reduce(x),
    "reduce_scatter": lambda x, step, mesh: mesh[step.axis].reduce_scatter(x, _shrinks(step)),
    "all_gather": lambda x, step, mesh: mesh[step.axis].all_gather(x, _grows(step)),
    "all_to_all": lambda x, step, mesh: mesh[step.axis].all_to_all(x, _shrinks(step), _grows(step)),
    "keep": lambda x, step, mesh: mesh[step.axis].piece(x, _shrinks(step)),
    "term": _term,
    "exchange": _exchange,
}
