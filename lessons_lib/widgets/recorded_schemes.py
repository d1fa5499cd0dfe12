"""Tensor-parallel schemes, run on thread ranks and recorded product by product.

Whole matrices hold the numbers 0, 1, 2, ..., each its own. So what a rank multiplies says which part of
which matrix it is, and what a collective carries is known from what the ranks put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout, coordinates
from lessons_lib.mesh import Mesh
from lessons_lib.spmd import region, run
from lessons_lib.spmd._torch_internals import DispatchMode
from lessons_lib.tensor_parallel import SCHEMES, PricedScheme
from lessons_lib.tensor_parallel.schemes import VARIANTS
from lessons_lib.timeline import Event
from lessons_lib.views.scheme_steps import Carried, Matrix, Part, Product, SchemeSteps, Stage

B, D, F = 24, 36, 48  # all different, and each can be cut into 2, 3, 4, 6 and 12
DTYPE = torch.float64
RESULTS = {"Y": ("X", "W"), "dX": ("dY", "W"), "dW": ("X", "dY")}  # and what is multiplied for each
SHAPES = {"X": (B, D), "W": (D, F), "dY": (B, F), "Y": (B, F), "dX": (B, D), "dW": (D, F)}
FIRST_NUMBER = {"X": 0, "W": B * D, "dY": B * D + D * F}


def scheme_of(name: str) -> PricedScheme:
    every = {**SCHEMES, **VARIANTS}
    if name not in every:
        raise RefusedError(f"no scheme is called {name!r}; there are {', '.join(every)}.")
    return every[name]


def layouts_of(scheme: PricedScheme) -> dict[str, Layout]:
    """Gradients lie as what they are gradients of."""
    return {name: getattr(scheme, name.removeprefix("d")) for name in SHAPES}


@cache
def record_scheme(name: str, sizes: tuple[tuple[str, int], ...], result: str) -> SchemeSteps:
    """How the ranks of a mesh come to ``"Y"``, ``"dX"`` or ``"dW"``, in a run of a scheme.

    >>> steps = record_scheme("2d", (("row", 2), ("col", 2)), "Y")
    >>> for stage in steps.stages:
    ...     print(stage.products[3], "|", *stage.fetched[:1])
    X[1,0] · W[0,1] -> Y[1,1] | X[0,0] by broadcast over col
    X[1,1] · W[1,1] -> Y[1,1] | X[0,1] by broadcast over col

    A stage is a product on every rank, with the collectives that bring what is multiplied and those that
    take away what comes out. What is used again is part of the stage that used it first.
    """
    if result not in RESULTS:
        raise RefusedError(f"result={result!r}: choose one of {', '.join(RESULTS)}.")
    recorded = _record(name, sizes)
    stages = [stage for made, stage in recorded.stages if made == result]
    scheme, left, right = recorded.scheme, *RESULTS[result]
    flipped = {"Y": (False, False), "dX": (False, True), "dW": (True, False)}[result]
    matrices = [
        Matrix(tensor, str(layouts_of(scheme)[tensor]), SHAPES[tensor], turned)
        for tensor, turned in zip((left, right, result), (*flipped, False), strict=True)
    ]
    direction = "forward" if result == "Y" else "backward"
    return SchemeSteps(
        name,
        dict(sizes),
        matrices[0],
        matrices[1],
        matrices[2],
        tuple(stages),
        direction,
        recorded.rest,
        recorded.peaks[direction],
        B * D + D * F + B * F,
    )


# ---- what the ranks write down


@dataclass(repr=False)  # a run writes out what ranks return
class Put:
    """A collective, with what this rank puts in."""

    kind: str
    axis: str
    members: tuple[int, ...]
    root: int | None  # global rank
    sequence: int
    input: Tensor | None  # None where nothing is put in
    direction: str = ""
    sent: int = 0  # elements, from the trace

    @property
    def key(self) -> tuple[Any, ...]:
        return self.axis, self.members, self.sequence


@dataclass(repr=False)
class Multiplied:
    """A product, of what and how much."""

    left: Tensor
    right: Tensor
    out: Tensor | None  # None where the product is added to a sum at once


Entry = Put | Multiplied


class _Products(DispatchMode):
    """Writes down every product of two matrices."""

    def __init__(self, log: list[Entry]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            alone = func.overloadpacket is torch.ops.aten.mm
            left, right = args if alone else args[1:3]
            self.log.append(Multiplied(left.clone(), right.clone(), out.clone() if alone else None))
        return out


@cache
def whole(tensor: str) -> Tensor:
    """The matrix of which every element is another number."""
    rows, cols = SHAPES[tensor]
    return torch.arange(rows * cols, dtype=DTYPE).reshape(rows, cols) + FIRST_NUMBER[tensor]


def _step(scheme: PricedScheme, sizes: dict[str, int]) -> list[Entry]:
    """Forward and backward on this rank, everything written down."""
    mesh, log = Mesh(**sizes), list[Entry]()

    def listen(axis: str, group: Any, issue: Any) -> Any:
        def written(operation: Any, inputs: Sequence[Tensor], *more: Any) -> Any:
            root = None if operation.root is None else operation.members[operation.root]
            brings = operation.kind != "broadcast" or root == operation.rank
            put = torch.cat(list(inputs)).clone() if brings else None
            log.append(Put(operation.kind, axis, operation.members, root, operation.sequence, put))
            return issue(operation, inputs, *more)

        setattr(group, "_issue_collective", written)  # noqa: B010  this rank's own group, of this run

    for axis in sizes:
        group: Any = mesh[axis].process_group
        listen(axis, group, group._issue_collective)
    x, w = (getattr(scheme, name).shard(whole(name), mesh) for name in ("X", "W"))
    dy = scheme.Y.shard(whole("dY"), mesh)
    with _Products(log):
        with region("forward"):
            scheme.forward(x, w, mesh)
        with region("backward"):
            scheme.backward(dy, x, w, mesh)
    return log


def _peak(scheme: PricedScheme, sizes: dict[str, int], direction: str) -> None:
    """One direction, for its memory."""
    mesh = Mesh(**sizes)
    x, w = (
        torch.ones(layout.local_shape(SHAPES[name], sizes), dtype=DTYPE)
        for name, layout in (("X", scheme.X), ("W", scheme.W))
    )
    if direction == "forward":
        scheme.forward(x, w, mesh)
    else:
        dy = torch.ones(scheme.Y.local_shape(SHAPES["Y"], sizes), dtype=DTYPE)
        scheme.backward(dy, x, w, mesh)


# ---- what it means


@dataclass
class Recorded:
    """A run: its stages with the result each is for, and elements that the fullest rank held."""

    scheme: PricedScheme
    stages: list[tuple[str, Stage]]
    rest: int
    peaks: dict[str, int]


@cache
def _record(name: str, sizes: tuple[tuple[str, int], ...]) -> Recorded:
    scheme, mesh = scheme_of(name), dict(sizes)
    n = len(coordinates(mesh))
    result = run(_step, scheme, mesh, ranks=n)
    logs: list[list[Entry]] = list(result.values)
    for rank, log in enumerate(logs):
        puts = [each for each in log if isinstance(each, Put)]
        for put, event in zip(puts, result.trace.collectives(rank), strict=True):
            _same(put, event)
            put.sent, put.direction = event.bytes_sent // DTYPE.itemsize, event.region
    names_of_ranks = torch.int.itemsize * n  # which the mesh holds
    peaks = {}
    for direction in ("forward", "backward"):
        counted = run(_peak, scheme, mesh, direction, ranks=n, record="memory").trace
        most = max(map(counted.peak_bytes, range(n)))
        peaks[direction] = (most - names_of_ranks) // DTYPE.itemsize
    rest = sum(layouts_of(scheme)[each].n_local(SHAPES[each], mesh) for each in ("X", "W", "Y"))
    return Recorded(scheme, _Reading(layouts_of(scheme), mesh, logs).stages(), rest, peaks)


def _same(put: Put, event: Event) -> None:
    if (put.kind, put.axis, put.members) != (event.kind, event.group, event.members):
        raise RefusedError(f"rank {event.rank} issued {put.kind} over {put.axis}; the trace says {event}.")


@dataclass
class _Reading:
    """Reads logs: which part of which matrix each product takes, what brought it, what takes it away."""

    layouts: dict[str, Layout]
    sizes: dict[str, int]
    logs: list[list[Entry]]
    carried: dict[tuple[Any, ...], Carried] = field(default_factory=dict)
    used: set[tuple[Any, ...]] = field(default_factory=set)
    by_key: dict[tuple[Any, ...], dict[int, Put]] = field(default_factory=dict)
    brought: dict[tuple[Any, ...], Part] = field(default_factory=dict)

    def stages(self) -> list[tuple[str, Stage]]:
        products = [[each for each in log if isinstance(each, Multiplied)] for log in self.logs]
        summed: dict[tuple[str, int, Part], frozenset[int]] = {}
        done: list[tuple[str, Stage]] = []
        for together in zip(*products, strict=True):
            read = [self.product(each) for each in together]
            fetched = self.new(
                key
                for rank, (each, product) in enumerate(zip(together, read, strict=True))
                for key in self.sources(rank, each, product)
            )
            given = {
                put.key: self.carry(put.key, product.out)
                for rank, (each, product) in enumerate(zip(together, read, strict=True))
                for put in self.takes_away(rank, each)
            }
            made = read[0].out.tensor
            for rank, product in enumerate(read):
                at = made, rank, product.out
                summed[at] = summed.get(at, frozenset()) | set(product.summed)
            self.add(summed, made, given.values())
            self.used |= set(given)
            done.append((made, Stage(tuple(read), fetched, tuple(given.values()), self.state(summed, made))))
        for made in dict.fromkeys(made for made, _ in done):
            left = self.left_over(made)
            if left:
                self.add(summed, made, left)
                nothing = (None,) * len(self.logs)
                done.append((made, Stage(nothing, (), tuple(left), self.state(summed, made))))
        return done

    # Parts

    def own(self, tensor: str, rank: int) -> Part:
        place = coordinates(self.sizes)[rank]
        rows, cols = self.layouts[tensor].slices(SHAPES[tensor], self.sizes, place)
        return self.part(tensor, (rows.start, rows.stop), (cols.start, cols.stop))

    def part(self, tensor: str, rows: tuple[int, int], cols: tuple[int, int]) -> Part:
        height, width = self.layouts[tensor].local_shape(SHAPES[tensor], self.sizes)
        return Part(
            tensor,
            (rows[0] // height, rows[1] // height),
            (cols[0] // width, cols[1] // width),
        )

    def read(self, block: Tensor) -> tuple[str, slice, slice]:
        """Where a block, turned or not, stands in one of the matrices."""
        low = int(block.min())
        tensor = max((n for n in FIRST_NUMBER if FIRST_NUMBER[n] <= low), key=lambda n: FIRST_NUMBER[n])
        row, col = divmod(low - FIRST_NUMBER[tensor], SHAPES[tensor][1])
        for height, width in (block.shape, block.shape[::-1]):
            rows, cols = slice(row, row + height), slice(col, col + width)
            there = whole(tensor)[rows, cols]
            if torch.equal(there, block) or torch.equal(there.T, block):
                return tensor, rows, cols
        raise RefusedError(f"a block of {tuple(block.shape)} from {low} on is no part of X, W or dY.")

    def reads(self, block: Tensor) -> Part:
        tensor, rows, cols = self.read(block)
        return self.part(tensor, (rows.start, rows.stop), (cols.start, cols.stop))

    def product(self, each: Multiplied) -> Product:
        left, right = self.read(each.left), self.read(each.right)
        (made,) = (made for made, pair in RESULTS.items() if pair == (left[0], right[0]))
        # in W.T and X.T the dims of the result and of the sum have changed places
        rows, inner = (left[1], left[2]) if made != "dW" else (left[2], left[1])
        cols = right[2] if made != "dX" else right[1]
        out = self.part(made, (rows.start, rows.stop), (cols.start, cols.stop))
        return Product(self.reads(each.left), self.reads(each.right), out, range(inner.start, inner.stop))

    # Collectives

    def puts(self, key: tuple[Any, ...]) -> dict[int, Put]:
        """What each member put into a collective."""
        if not self.by_key:
            for rank, log in enumerate(self.logs):
                for put in log:
                    if isinstance(put, Put):
                        self.by_key.setdefault(put.key, {})[rank] = put
        return self.by_key[key]

    def carry(self, key: tuple[Any, ...], part: Part) -> Carried:
        if key not in self.carried:
            puts = self.puts(key)
            one = puts[key[1][0]]
            sent = {rank: put.sent for rank, put in puts.items()}
            self.carried[key] = Carried(one.kind, one.axis, one.members, one.root, part, sent)
        return self.carried[key]

    def brings(self, key: tuple[Any, ...]) -> Part:
        """The part that a broadcast or an all-gather brings."""
        if key not in self.brought:
            parts = [self.reads(put.input) for put in self.puts(key).values() if put.input is not None]
            rows, cols = [each.rows for each in parts], [each.cols for each in parts]
            whole = Part(parts[0].tensor, (min(rows)[0], max(rows)[1]), (min(cols)[0], max(cols)[1]))
            self.brought[key] = whole
        return self.brought[key]

    def sources(self, rank: int, each: Multiplied, product: Product) -> list[tuple[Any, ...]]:
        """What brought the operands that are not this rank's own."""
        log, found = self.logs[rank], []
        at = next(place for place, entry in enumerate(log) if entry is each)
        for part in (product.left, product.right):
            if part != self.own(part.tensor, rank):
                handed = (e for e in log[:at] if isinstance(e, Put) and e.kind in ("broadcast", "all_gather"))
                keys = [put.key for put in handed if self.brings(put.key) == part]
                found.append(keys[-1])
        return found

    def new(self, keys: Any) -> tuple[Carried, ...]:
        fresh = [key for key in dict.fromkeys(keys) if key not in self.used]
        self.used |= set(fresh)
        return tuple(self.carry(key, self.brings(key)) for key in fresh)

    def takes_away(self, rank: int, each: Multiplied) -> list[Put]:
        """The collectives into which the product went as it was."""
        return [
            put
            for put in self.logs[rank]
            if isinstance(put, Put)
            and each.out is not None
            and put.input is not None
            and put.input.shape == each.out.shape
            and torch.equal(put.input, each.out)
        ]

    def left_over(self, made: str) -> list[Carried]:
        """Collectives of no single product: they carry what was summed already."""
        shape = self.layouts[made].local_shape(SHAPES[made], self.sizes)
        direction = "forward" if made == "Y" else "backward"
        found: dict[tuple[Any, ...], Carried] = {}
        for rank, log in enumerate(self.logs):
            for put in log:
                if (
                    isinstance(put, Put)
                    and put.direction == direction
                    and put.key not in self.used
                    and put.input is not None
                    and tuple(put.input.shape) == shape
                ):
                    found[put.key] = self.carry(put.key, self.own(made, rank))
        self.used |= set(found)
        return list(found.values())

    # Sums

    def add(self, summed: dict[tuple[str, int, Part], frozenset[int]], made: str, given: Any) -> None:
        """After a reduction its receivers hold the terms of all members."""
        for carried in given:
            terms = frozenset[int]().union(
                *(summed.get((made, rank, carried.part), frozenset()) for rank in carried.members)
            )
            for rank in carried.members if carried.root is None else (carried.root,):
                summed[made, rank, self.own(made, rank)] = terms

    def state(self, summed: dict[tuple[str, int, Part], frozenset[int]], made: str) -> dict[Part, Fraction]:
        """Of every block of the result: how much of its sum an owner of it has."""
        n = SHAPES[RESULTS[made][0]][0 if made == "dW" else 1]
        blocks: dict[Part, Fraction] = {}
        for rank in range(len(self.logs)):
            block = self.own(made, rank)
            has = Fraction(len(summed.get((made, rank, block), ())), n)
            blocks[block] = max(has, blocks.get(block, Fraction(0)))
        return blocks
