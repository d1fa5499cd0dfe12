"""The stages of ZeRO: a table of who holds what, and the bill that follows from it.

N parameters lie in one flat vector. Of the parameters, the gradients and the optimizer's state every rank has
either a copy, ``Layout("N")``, or a piece, ``Layout("N@dp")``. All that a stage does is bring vectors from
the layout in which they are to the one in which they are needed:

    parameters   as the stage holds them  ->  copy                          before a unit computes
    gradients    terms of a sum  ->  as the stage holds them                when backward has made them
    gradients    ...  ->  as the state lies                                 before the optimizer's step
    parameters   as the state lies  ->  as the stage holds them             after it

>>> for stage in STAGES:
...     print(stage, traffic(stage, n=600, n_ranks=4))
0 {'forward': 0, 'backward': 0, 'step': 900}
1 {'forward': 0, 'backward': 0, 'step': 900}
2 {'forward': 0, 'backward': 450, 'step': 450}
3 {'forward': 450, 'backward': 900, 'step': 0}

Stage 1 is the all-reduce stopped halfway: the optimizer works between its two halves.
Source: Rajbhandari et al. 2020 (ZeRO), sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.mesh import Group
from lessons_lib.timeline import ring_traffic

COPY, CUT, TERMS = Layout("N"), Layout("N@dp"), Layout("N +dp")


class Stage(NamedTuple):
    """How a rank holds the three vectors."""

    parameters: Layout
    gradients: Layout
    state: Layout  # of the optimizer, and its own copy of the parameters if it has one


STAGES: Mapping[int, Stage] = {
    0: Stage(parameters=COPY, gradients=COPY, state=COPY),
    1: Stage(parameters=COPY, gradients=COPY, state=CUT),
    2: Stage(parameters=COPY, gradients=CUT, state=CUT),
    3: Stage(parameters=CUT, gradients=CUT, state=CUT),
}

COLLECTIVES: Mapping[tuple[Layout, Layout], str] = {
    (TERMS, COPY): "all_reduce",
    (TERMS, CUT): "reduce_scatter",
    (CUT, COPY): "all_gather",
}
"""What brings a vector from one layout to another; where nothing stands here, nothing needs to be sent."""


def stage_of(stage: int | Stage) -> Stage:
    """The row of the table, or a row of your own.

    >>> stage_of(4)
    Traceback (most recent call last):
    ...
    lessons_lib.errors.RefusedError: stage=4: ZeRO has the stages 0 (all copied), 1, 2 and 3.
    """
    if isinstance(stage, Stage):
        return stage
    if stage not in STAGES:
        raise RefusedError(f"stage={stage!r}: ZeRO has the stages 0 (all copied), 1, 2 and 3.")
    return STAGES[stage]


def send(source: Layout, target: Layout, x: Tensor, y: Tensor, group: Group) -> dist.Work | None:
    """Begin to bring ``x``, which lies as ``source``, into ``y``, which lies as ``target``.

    Returns the work under way, or None where nothing is sent (and nothing is done). An all-reduce works in
    place: there ``y`` is ``x``.
    """
    kind, along = COLLECTIVES.get((source, target)), group.process_group
    if kind == "all_reduce":
        return dist.all_reduce(y, group=along, async_op=True)
    if kind == "reduce_scatter":
        return dist.reduce_scatter_single(y, x, group=along, async_op=True)
    if kind == "all_gather":
        return dist.all_gather_single(y, x, group=along, async_op=True)
    return None


def padded(n: int, n_ranks: int) -> int:
    """The length of a vector of ``n`` elements that ``n_ranks`` ranks can cut evenly.

    >>> padded(10, 4), padded(8, 4)
    (12, 8)
    """
    return -(-n // n_ranks) * n_ranks


class Move(NamedTuple):
    """A vector that is sent in a step: when, what of, and by which collective."""

    when: str  # "forward", "backward" or "step"
    what: str  # "parameters" or "gradients"
    kind: str
    per_microbatch: bool


def moves(stage: int | Stage) -> list[Move]:
    """All that a step sends.

    >>> [f"{move.what} {move.kind}" for move in moves(1)]
    ['gradients reduce_scatter', 'parameters all_gather']

    Gradients that are cut have no place to add up before they are reduced, and parameters that are cut are
    gathered anew for every micro-batch: stages 2 and 3 pay for each of them.
    """
    parameters, gradients, state = stage_of(stage)
    at_once = gradients == CUT
    planned = [
        ("forward", "parameters", parameters, COPY, True),
        ("backward", "parameters", parameters, COPY, True),
        ("backward" if at_once else "step", "gradients", TERMS, state, at_once),
        ("step", "parameters", state, parameters, False),
    ]
    return [
        Move(when, what, COLLECTIVES[source, target], often)
        for when, what, source, target, often in planned
        if (source, target) in COLLECTIVES
    ]


def traffic(stage: int | Stage, n: int, n_ranks: int, n_microbatches: int = 1) -> dict[str, int | Fraction]:
    """Elements each rank sends in a step of ``n`` (padded) parameters, by the ring convention.

    >>> [sum(traffic(stage, 600, 4).values()) for stage in STAGES]               # 2, 2, 2 and 3 (p-1)/p n
    [900, 900, 900, 1350]
    >>> [sum(traffic(stage, 600, 4, n_microbatches=4).values()) for stage in STAGES]
    [900, 900, 2250, 5400]
    """
    bill: dict[str, int | Fraction] = {"forward": 0, "backward": 0, "step": 0}
    for move in moves(stage):
        times = n_microbatches if move.per_microbatch else 1
        bill[move.when] += times * ring_traffic(move.kind, n, n_ranks)
    return bill


def stored(stage: int | Stage, n: int, n_ranks: int) -> dict[str, int]:
    """Elements of each of the three vectors that a rank holds, of ``n`` (padded) parameters.

    >>> stored(2, 600, 4)
    {'parameters': 600, 'gradients': 150, 'state': 150}
    """
    sizes = {"dp": n_ranks}
    return {what: layout.n_local((n,), sizes) for what, layout in stage_of(stage)._asdict().items()}


def buffers(stage: int | Stage, unit: int, parameter: int) -> dict[str, int]:
    """Elements of what a rank holds besides, at most, while it computes; by name.

    >>> buffers(3, unit=100, parameter=40)
    {'gathered': 200, 'gradients on their way': 200, 'just made': 40}

    ``unit`` and ``parameter`` are the sizes of the largest unit, padded, and of the largest parameter.
    Gathered are the unit that computes and the one that comes next; of gradients that are cut backward fills
    one unit while another is reduced; what backward has just made is a parameter's own gradient.
    """
    parameters, gradients, _ = stage_of(stage)
    return {
        "gathered": 2 * unit if parameters == CUT else 0,
        "gradients on their way": 2 * unit if gradients == CUT else 0,
        "just made": parameter,
    }
