"""The exercises of lesson 07: a tensor brought from one layout to another, over one axis and over two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations, permutations, product
from typing import Any

import torch
from torch import Tensor

from lessons_lib import redistribute as library
from lessons_lib.grading.exercise import (
    Budget,
    Claim,
    Draw,
    Exercise,
    Output,
    Trial,
    WholeMesh,
    each_block,
    sizes_text,
)
from lessons_lib.layout import Layout, coordinates
from lessons_lib.mesh import Mesh
from lessons_lib.redistribute import redistribution

# ---- the solutions ----


def redistribute(x: Tensor, source: Layout, target: Layout, mesh: Mesh) -> Tensor:
    """Return this rank's block of X in the layout ``target``, from ``x``, its block in ``source``.

    X is a matrix, B x D. Both layouts name no axis but tp. ``source.dim("B")`` is ``("tp",)`` if B is cut and
    ``()`` if not, and ``source.partial`` is ``("tp",)`` for a partial sum. The target is none.
    """
    tp = mesh["tp"]
    before, after = _cut_dim(source), _cut_dim(target)
    if source.partial:
        return tp.all_reduce(x) if after is None else tp.reduce_scatter(x, after)
    if after is None:
        return x if before is None else tp.all_gather(x, before)
    if before is None:
        return tp.piece(x, after)
    return x if before == after else tp.all_to_all(x, after, before)


def _cut_dim(layout: Layout) -> int | None:
    return next((n for n, dim in enumerate("BD") if layout.dim(dim)), None)


def redistribute_on_grid(x: Tensor, source: Layout, target: Layout, mesh: Mesh) -> Tensor:
    """Return this rank's block of X in the layout ``target``, from ``x``, its block in ``source``.

    X is a matrix, B x D, on a mesh of row and col. The layouts may name both axes, in any order.
    ``redistribution(source, target, shape, mesh.sizes)`` plans the way, with ``shape`` that of the whole X:
    steps with ``kind``, ``axis``, ``source`` and ``target``. The kinds that occur are all_reduce,
    reduce_scatter, all_gather, all_to_all and keep; keep cuts a copy.
    """
    shape = source.global_shape(x.shape, mesh.sizes)
    for step in redistribution(source, target, shape, mesh.sizes):
        group = mesh[step.axis]
        longer = [len(step.target.dim(dim)) - len(step.source.dim(dim)) for dim in "BD"]
        if step.kind == "all_reduce":
            x = group.all_reduce(x)
        elif step.kind == "reduce_scatter":
            x = group.reduce_scatter(x, longer.index(1))
        elif step.kind == "all_gather":
            x = group.all_gather(x, longer.index(-1))
        elif step.kind == "all_to_all":
            x = group.all_to_all(x, longer.index(1), longer.index(-1))
        else:
            x = group.piece(x, longer.index(1))
    return x


# ---- the trials ----

ONE_AXIS: tuple[Mapping[str, int], ...] = ({"tp": 4}, {"tp": 3}, {"tp": 2})
SOURCES = ("B D", "B@tp D", "B D@tp", "B D +tp")
TARGETS = ("B D", "B@tp D", "B D@tp")
GRIDS: tuple[Mapping[str, int], ...] = ({"row": 2, "col": 2}, {"row": 2, "col": 3})
N_PAIRS = 30
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "keep")  # no exchange
NOT_ADDED_UP = "this is a piece of each rank's own term: the terms were not added up"
WHY = {
    "copy": "whoever has a copy has all it needs, and keeps a part",
    "cut": "what a rank has not has to come to it, once, and nothing else",
    "sum": "the terms have to be added up, and nobody needs more of the sum than its own block",
}


def _trial(
    draw: Draw, function: str, pair: tuple[Layout, Layout], sizes: Mapping[str, int], shape: tuple[int, int]
) -> Trial:
    """One pair of layouts."""
    source, target = pair
    places = coordinates(sizes)
    blocks = Layout.of(dict(zip(source.dims, source.cuts, strict=True)))
    terms = {key: draw.tensor(*shape) for key in product(*(range(sizes[axis]) for axis in source.partial))}
    mine = [terms[tuple(place[axis] for axis in source.partial)] for place in places]
    X = torch.stack(list(terms.values())).sum(0)
    mistakes = {}
    if source.partial:
        mistakes[NOT_ADDED_UP] = [target.cut(term, sizes, at) for term, at in zip(mine, places, strict=True)]
    return Trial(
        function=function,
        sizes=sizes,
        facts=f"{source} -> {target}, {sizes_text(sizes, B=shape[0], D=shape[1])}",
        args=[
            (blocks.cut(term, sizes, at), source, target, WholeMesh())
            for term, at in zip(mine, places, strict=True)
        ],
        outputs=[
            Output("X", _kind(source), each_block(target, X, sizes), X if target.axes else None, mistakes)
        ],
        budgets={"forward": _budget(source, target, shape, sizes)},
        wholes={"X": shape[0] * shape[1]},
    )


def _kind(source: Layout) -> str:
    return "sum" if source.partial else "cut" if source.axes else "copy"


def _budget(source: Layout, target: Layout, shape: tuple[int, int], sizes: Mapping[str, int]) -> Budget:
    """The bill of the library's way, and what no way can do without: every number a rank has not must "
    "come."""
    sent = sum(step.sent for step in redistribution(source, target, shape, sizes))
    missing = 0
    for place in coordinates(sizes):
        has, wants = (layout.slices(shape, sizes, place) for layout in (source, target))
        kept = 1
        for mine, goal in zip(has, wants, strict=True):
            kept *= max(0, min(mine.stop, goal.stop) - max(mine.start, goal.start))
        missing += target.n_local(shape, sizes) - (0 if source.partial else kept)
    return Budget.even(sent, sizes, WHY[_kind(source)], missing)


def _one_axis_trials(draw: Draw) -> list[Trial]:
    pairs = [(Layout(source), Layout(target)) for source, target in product(SOURCES, TARGETS)]
    trials = []
    for number, pair in enumerate(pairs):
        sizes = ONE_AXIS[number % len(ONE_AXIS)]
        shape = _different_multiples(draw, sizes["tp"])
        trials.append(_trial(draw, "redistribute", pair, sizes, shape))
    return [*trials, _trial(draw, "redistribute", pair, sizes, shape)]  # the last twice: nothing written down


def _grid_trials(draw: Draw) -> list[Trial]:
    """Thirty pairs of every kind: there are far more layouts with a cut than others."""
    trials = []
    kinds = ["cut", "sum", "cut", "sum", "copy"]
    for number in range(N_PAIRS):
        sizes = GRIDS[number % len(GRIDS)]
        pair = draw.random.choice(_pairs(tuple(sizes.items()), kinds[number % len(kinds)]))
        shape = _different_multiples(draw, 4 * 3)
        trials.append(_trial(draw, "redistribute_on_grid", pair, sizes, shape))
    return [*trials, _trial(draw, "redistribute_on_grid", pair, sizes, shape)]


def _different_multiples(draw: Draw, p: int) -> tuple[int, int]:
    b, d = draw.different(1, 3, 2)
    return b * p, d * p


@cache
def _pairs(grid: tuple[tuple[str, int], ...], kind: str) -> list[tuple[Layout, Layout]]:
    """All pairs of different layouts on a grid, from a source of one kind, without an exchange on the way."""
    sizes = dict(grid)
    layouts = list(_layouts(tuple(sizes)))
    shape = (12, 12)
    return [
        (source, target)
        for source, target in product(layouts, layouts)
        if source != target and not target.partial and _kind(source) == kind
        if all(step.kind in KINDS for step in redistribution(source, target, shape, sizes))
    ]


def _layouts(axes: tuple[str, ...]) -> Iterator[Layout]:
    """Every layout of a matrix on these axes."""
    for n in range(len(axes) + 1):
        for named in combinations(axes, n):
            for partial in (part for m in range(n + 1) for part in combinations(named, m)):
                left = [axis for axis in named if axis not in partial]
                for order in permutations(left):
                    for at in range(len(order) + 1):
                        yield Layout.of({"B": order[:at], "D": order[at:]}, partial)


def _claims(*points: float) -> tuple[Claim, ...]:
    return (
        Claim("copy", "from a copy: each rank's block", points[0]),
        Claim("cut", "from a cut: each rank's block", points[1]),
        Claim("sum", "from a partial sum: each rank's block", points[2]),
        Claim("traffic", "as few bytes as the best known way; none from a copy", 3),
        Claim("no deadlock", "no rank is left waiting, whoever begins", 1),
    )


SHOWN: tuple[Any, ...] = (library.redistribute, library._roads)

EXERCISES = (
    Exercise(
        id="07-redistribute",
        title="From one layout to another",
        objective="Bring a tensor from any layout to any other with the collective that sends the least.",
        functions=(redistribute,),
        claims=_claims(1, 2, 3),
        trials=_one_axis_trials,
        hints=(
            "Make a table: from a copy, a cut of B, a cut of D or a partial sum, to a copy, a cut of B or "
            "a cut "
            "of D. Which of them is free, which an all-gather, an all-to-all, a reduce-scatter?",
            "From a copy, tp.piece(x, dim) cuts without a word. A partial sum that is wanted in pieces is "
            "never "
            "made whole: tp.reduce_scatter(x, dim). From cut to cut: tp.all_to_all(x, split_dim, "
            "concat_dim).",
            "Find the dim that is cut before and the one after, 0, 1 or None. Partial: all_reduce if after "
            "is "
            "None, else reduce_scatter(x, after). Equal: x. before None: piece(x, after). after None: "
            "all_gather(x, before). Else all_to_all(x, after, before).",
        ),
        shown=SHOWN,
    ),
    Exercise(
        id="07-grid",
        title="Layouts over two axes",
        objective="Carry out a plan of collectives between layouts that are cut over two axes.",
        functions=(redistribute_on_grid,),
        claims=_claims(2, 2, 2),
        trials=_grid_trials,
        hints=(
            "Every step of the plan runs over one axis: mesh[step.axis]. What is left to find out is the "
            "dim.",
            "Compare len(step.source.dim(name)) with len(step.target.dim(name)): a dim with one axis more is "
            "the one to cut, a dim with one axis less the one to put together.",
            'longer = [len(step.target.dim(d)) - len(step.source.dim(d)) for d in "BD"]; then cut at '
            "longer.index(1), put together at longer.index(-1), with the group's method of the step's kind; "
            "keep is group.piece.",
        ),
        shown=(library.redistribution, *SHOWN),
    ),
)
