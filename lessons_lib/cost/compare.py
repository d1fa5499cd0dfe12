"""What a layer costs under every tensor-parallel scheme: said by the formulas, and counted from runs.

>>> one, two = ways(4)
>>> str(one), str(two)
('1D on tp=4', '2D on row=2, col=2')
>>> count(two, tokens=48, h=8) == formula(two, tokens=48, h=8)
True
>>> [count(way, tokens=96, h=8).sent for way in (one, two)]    # b s = 12 h: here 2D begins to win
[4608, 4608]

A layer is a row of linears, by default the four of a transformer layer; what lies between them (norms,
attention, the activation) sends nothing to speak of and is left out, as in the published comparisons.
Sizes are in elements. Nothing here knows how a scheme computes: it is run, or asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import cycle

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lessons_lib import Mesh, region, run
from lessons_lib.errors import RefusedError
from lessons_lib.machines import Link, Machine, machine
from lessons_lib.spmd.trace import Trace
from lessons_lib.tensor_parallel import SCHEMES, Cube, CubeKept, PricedScheme, tensor_parallel_linear
from lessons_lib.tensor_parallel.scheme import blocks

TRANSFORMER = ((1, 3), (1, 1), (1, 4), (4, 1))
"""D and F of a transformer layer's linears, in units of h: QKV, projection, and the two of the MLP."""

Linears = Sequence[tuple[int, int]]
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Way:
    """Schemes on a mesh of ranks; the linears of a layer take them in turn."""

    name: str
    schemes: tuple[PricedScheme, ...]
    sizes: Mapping[str, int]

    @property
    def n_ranks(self) -> int:
        return math.prod(self.sizes.values())

    def linears(self, tokens: int, h: int, layer: Linears) -> list[tuple[PricedScheme, int, int, int]]:
        """The scheme, B, D and F of every linear of a layer."""
        shapes = ((tokens, d * h, f * h) for d, f in layer)
        return [(scheme, *shape) for scheme, shape in zip(cycle(self.schemes), shapes, strict=False)]

    def __str__(self) -> str:
        return f"{self.name} on {', '.join(f'{axis}={size}' for axis, size in self.sizes.items())}"


def ways(n_ranks: int) -> list[Way]:
    """Every way that ``n_ranks`` ranks have: 1D always, grids and cubes where they fit.

    >>> [str(way) for way in ways(8)]
    ['1D on tp=8', '2.5D on depth=2, row=2, col=2', '3D on i=2, j=2, k=2', '3D kept on i=2, j=2, k=2']

    1D takes column and row in turn, 3D its two orientations. 2.5D has 1 < d <= q; d = 1 is 2D.
    """
    found = [Way("1D", (SCHEMES["column"], SCHEMES["row"]), {"tp": n_ranks})]
    for q in range(2, n_ranks):
        if q * q == n_ranks:
            found.append(Way("2D", (SCHEMES["2d"],), {"row": q, "col": q}))
        d, rest = divmod(n_ranks, q * q)
        if not rest and 1 < d <= q:
            found.append(Way("2.5D", (SCHEMES["2.5d"],), {"depth": d, "row": q, "col": q}))
        if q**3 == n_ranks:
            for name, cube in (("3D", Cube()), ("3D kept", CubeKept())):
                found.append(Way(name, (cube, cube.exchanged()), {"i": q, "j": q, "k": q}))
    return sorted(found, key=lambda way: way.name)


@dataclass(frozen=True, slots=True)
class Bill:
    """What a layer costs a rank, in elements: the mean of what ranks send, and the fullest rank's memory."""

    forward: int | Fraction  # sent
    backward: int | Fraction  # sent
    kept: int  # between forward and backward: blocks of W, and what backward needs of X
    peak: int  # while one linear computes

    @property
    def sent(self) -> int | Fraction:
        return self.forward + self.backward


def formula(way: Way, tokens: int, h: int, layer: Linears = TRANSFORMER) -> Bill:
    """What the schemes' formulas say.

    >>> formula(ways(64)[0], tokens=64, h=64)
    Bill(forward=16128, backward=16128, kept=9280, peak=17728)
    """
    linears = way.linears(tokens, h, layer)
    traffic = [scheme.traffic(B, D, F, way.sizes) for scheme, B, D, F in linears]
    memory = [scheme.memory(B, D, F, way.sizes) for scheme, B, D, F in linears]
    at_rest = [sum(blocks(scheme, B, D, F, way.sizes)[:2]) for scheme, B, D, F in linears]
    kept, peaks = sum(at_rest), []
    for mine, rest in zip(memory, at_rest, strict=True):
        peaks.append(kept - rest + max(mine["forward"], mine["backward"]))
        kept += mine["kept"] - rest  # from now on until its backward
    return Bill(
        sum(each["forward"] for each in traffic),
        sum(each["backward"] for each in traffic),
        kept,
        max(peaks),
    )


def count(way: Way, tokens: int, h: int, layer: Linears = TRANSFORMER) -> Bill:
    """What a run of the layer on thread ranks is counted to send and to hold.

    Large layers are run as a model of themselves with all sizes 1/s as large, and what is counted is taken
    s^2 times: every block is the product of two sizes.
    """
    tokens, h, scale = _model(way, tokens, h)
    result = run(_forward_and_backward, way, tokens, h, layer, ranks=way.n_ranks, record=("memory",))
    forward, backward = (_sent(result.trace, direction, scale) for direction in ("forward", "backward"))
    names_of_ranks = torch.int.itemsize * way.n_ranks  # which the mesh holds
    peak = max(map(result.trace.peak_bytes, range(way.n_ranks))) - names_of_ranks
    kept = max(result.values)
    return Bill(forward, backward, kept * scale**2, peak // DTYPE.itemsize * scale**2)


def trace(way: Way, tokens: int, h: int, layer: Linears = TRANSFORMER, on: Machine | None = None) -> Trace:
    """Everything that ranks send when they run the layer, at these very sizes."""
    return run(_forward_and_backward, way, tokens, h, layer, ranks=way.n_ranks, machine=on).trace


def time_s(way: Way, tokens: int, h: int, on: Machine | str, layer: Linears = TRANSFORMER) -> float:
    """Virtual seconds of forward and backward on a machine, counted FLOPs at its peak, two bytes an element.

    A model 1/s as large sends s^2 times less and computes s^3 times less, so it runs on a machine whose
    links and FLOP/s are as much slower; latencies stay.
    """
    tokens, h, scale = _model(way, tokens, h)
    whole = machine(on) if isinstance(on, str) else on

    def slower(link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / scale**2)

    model = replace(
        whole,
        flops_per_s=whole.flops_per_s / scale**3,
        in_node=slower(whole.in_node),
        between_nodes=slower(whole.between_nodes),
    )
    return trace(way, tokens, h, layer, model).timeline.makespan


def rounds(way: Way, layer: Linears = TRANSFORMER) -> int:
    """How many messages follow each other in forward and backward, where those that can be are at once.

    Measured: the seconds on a machine on which a message takes one, however long it is, and all else none.

    >>> [rounds(way) for way in ways(4)]
    [24, 32]
    """
    a_message = Link(latency_s=1.0)
    clock = Machine("rounds", in_node=a_message, between_nodes=a_message)
    return round(trace(way, way.n_ranks, way.n_ranks, layer, clock).timeline.makespan)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row of :func:`compare_ways`."""

    way: Way
    bill: Bill
    rounds: int
    time_s: float


def compare_ways(
    tokens: int, h: int, n_ranks: int, on: Machine | str, layer: Linears = TRANSFORMER
) -> list[Comparison]:
    """Run a layer in every way that ``n_ranks`` ranks have, on a machine.

    >>> for row in compare_ways(tokens=2048, h=1024, n_ranks=4, on="4xH100"):
    ...     print(f"{row.way.name}: {row.bill.sent:,} sent, {row.bill.kept:,} kept, {row.rounds} rounds")
    1D: 12,582,912 sent, 9,961,472 kept, 24 rounds
    2D: 20,447,232 sent, 6,815,744 kept, 32 rounds
    """
    return [
        Comparison(way, count(way, tokens, h, layer), rounds(way, layer), time_s(way, tokens, h, on, layer))
        for way in ways(n_ranks)
    ]


def crossover(one: Way, other: Way, h: int, most: int = 16, layer: Linears = TRANSFORMER) -> Fraction:
    """From how many tokens on, in units of h, ``other`` sends no more than ``one``: found by counting.

    >>> one, two = ways(4)
    >>> crossover(one, two, h=8)
    Fraction(12, 1)

    Halves the interval up to ``most`` h. Tokens are a multiple of the number of ranks, which every way can
    cut: the larger h, the finer the answer. Raises RefusedError where ``other`` sends more even at the end.
    """

    def wins(step: int) -> bool:
        sizes = _model(one, step * one.n_ranks, h)[:2]  # at which one sends as many times more
        return _sent(trace(other, *sizes, layer)) <= _sent(trace(one, *sizes, layer))

    low, high = 0, most * h // one.n_ranks
    if not wins(high):
        raise RefusedError(f"{other} sends more than {one} up to b s = {most} h. Try a larger most=.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return Fraction(high * one.n_ranks, h)


# ---- runs


def _forward_and_backward(way: Way, tokens: int, h: int, layer: Linears) -> int:
    """Run the layer's linears on this rank; return the elements kept between forward and backward."""
    mesh = Mesh(**way.sizes)
    linears = [
        (
            scheme,
            torch.ones(scheme.X.local_shape((B, D), mesh.sizes), dtype=DTYPE, requires_grad=True),
            torch.ones(scheme.W.local_shape((D, F), mesh.sizes), dtype=DTYPE, requires_grad=True),
        )
        for scheme, B, D, F in way.linears(tokens, h, layer)
    ]
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ends: list[tuple[GradientEdge, torch.Size]] = []
    with region("forward"), saved_tensors_hooks(keep, lambda tensor: tensor):
        for scheme, x, w in linears:
            y = tensor_parallel_linear(keep(x), keep(w), scheme, mesh)
            ends.append((get_gradient_edge(y), y.shape))
            del y  # the next layer's business
    with region("backward"):
        while ends:
            (end, shape), (_, x, w) = ends.pop(), linears[len(ends)]
            torch.autograd.grad(end, (x, w), torch.ones(shape, dtype=DTYPE))
            del end
    return sum(storages.values()) // DTYPE.itemsize


def _sent(trace: Trace, direction: str | None = None, scale: int = 1) -> int | Fraction:
    """Elements that ranks sent, their mean."""
    n_bytes = sum(trace.bytes_sent(rank, direction) for rank in range(trace.n_ranks))
    mean = Fraction(n_bytes // DTYPE.itemsize * scale**2, trace.n_ranks)
    return int(mean) if mean.denominator == 1 else mean


def _model(way: Way, tokens: int, h: int) -> tuple[int, int, int]:
    """Smaller tokens and h of which every way can cut, on every rank, 2 x 2 or more; and how much smaller."""
    times, rest = divmod(math.gcd(tokens, h), way.n_ranks)
    if rest:
        return tokens, h, 1
    smallest = next((m for m in range(2, times) if times % m == 0), times)
    scale = times // smallest
    return tokens // scale, h // scale, scale
