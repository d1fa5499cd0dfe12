"""Explorer 5: layouts of X and W, a wanted layout of Y, and the collectives that lead there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from itertools import permutations, product

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.redistribute import Step, redistribution
from lessons_lib.views import Figure
from lessons_lib.views.bills import Bill, Entry, bill_picture
from lessons_lib.widgets.explorer import Choice, Explorer, Written
from lessons_lib.widgets.layouts import read_mesh

MESHES = ("row=1, col=4", "row=2, col=2", "row=2, col=4", "row=4, col=2", "row=4, col=4")
SHAPE = (16, 32, 64)  # B, D, F
MOST_AXES = 2


def layout_bill_explorer(
    x: str = "B D@col",
    w: str = "D@col F",
    y: str = "B F",
    mesh: str = "row=1, col=4",
    *,
    theme: str = "light",
) -> Explorer:
    """Write layouts of X and W and the one that Y shall have; see the collectives and what each rank sends.

    >>> print(layout_bill_explorer().figure.alt)
    From X[B D@col] and W[D@col F] to Y[B F], B=16, D=32, F=64, on a mesh of row=1, col=4: multiply; \
all_reduce of Y over col, 1,536. Each rank sends 1,536 elements and multiplies 16 × 8 by 8 × 64; \
to gather X and W whole would send 1,920.

    It opens with a question: which layout of Y costs half as much, and which nothing at all?
    Raises RefusedError for layouts that are not of X[B, D], W[D, F] and Y[B, F], or do not fit the mesh.
    """
    meshes = MESHES if mesh in MESHES else (mesh, *MESHES)

    def draw(x: str, w: str, y: str, mesh: str) -> Figure:
        bill = product_bill(Layout(x), Layout(w), Layout(y), tuple(read_mesh(mesh).items()))
        return bill_picture(bill, theme=theme)

    return Explorer(
        draw,
        {
            "x": Written("X lies as"),
            "w": Written("W lies as"),
            "y": Written("Y wanted"),
            "mesh": Choice("Mesh", meshes),
        },
        start={"x": x, "w": w, "y": y, "mesh": mesh},
        settings={
            "weights cut as ZeRO does": {"x": "B@col D", "w": "D@col F", "y": "B@col F", "mesh": meshes[0]},
            "all in 2D": {
                "x": "B@row D@col",
                "w": "D@row F@col",
                "y": "B@row F@col",
                "mesh": "row=2, col=2",
            },
        },
    )


@cache
def product_bill(
    X: Layout, W: Layout, Y: Layout, mesh: tuple[tuple[str, int], ...], shape: tuple[int, int, int] = SHAPE
) -> Bill:
    """The way from layouts of X and W to a wanted one of Y = X W in which ranks send least.

    >>> bill = product_bill(Layout("B@col D"), Layout("D F@col"), Layout("B F@col"), (("row", 1), ("col", 4)))
    >>> [(each.tensor, each.kind) for each in (*bill.before, *bill.after)], bill.sent
    ([('X', 'all_gather')], 384)

    Blocks can be multiplied where X and W cut D alike and share no other axis; the axes of D then hold
    terms of Y. Every such pair is tried, and each tensor brought there by the cheapest steps of
    :func:`lessons_lib.redistribute.redistribution`. Of ways that send the same, the one in which ranks
    compute less is taken, then the one with fewer steps.
    """
    sizes = dict(mesh)
    if len(sizes) > MOST_AXES:
        raise RefusedError(f"{len(sizes)} axes: a bill is found for meshes of one or two. Leave some out.")
    B, D, F = shape
    wanted = {"X": (X, ("B", "D"), (B, D)), "W": (W, ("D", "F"), (D, F)), "Y": (Y, ("B", "F"), (B, F))}
    for name, (layout, dims, each) in wanted.items():
        if layout.dims != dims:
            raise RefusedError(
                f"{name} has the dims {dims[0]} and {dims[1]}, in this order; {layout!r} does not."
            )
        layout.local_shape(each, sizes)
    ways = []
    for x, w in _pairs(sizes, shape):
        out = Layout.of({"B": x.dim("B"), "F": w.dim("F")}, x.dim("D"))
        x_steps, w_steps, y_steps = (
            redistribution(*ends, size, sizes)
            for ends, size in zip(((X, x), (W, w), (out, Y)), ((B, D), (D, F), (B, F)), strict=True)
        )
        steps = [*x_steps, *w_steps, *y_steps]
        work = math.prod(x.local_shape((B, D), sizes)) * w.local_shape((D, F), sizes)[1]
        ways.append((_sent(steps), work, len(steps), x, w, out, x_steps, w_steps, y_steps))
    _, work, _, x, w, out, x_steps, w_steps, y_steps = min(ways, key=lambda way: way[:3])
    (b, d), f = x.local_shape((B, D), sizes), w.local_shape((D, F), sizes)[1]
    n_ranks = math.prod(sizes.values())
    return Bill(
        sizes,
        shape,
        (X, W),
        Y,
        (x, w, out),
        (*_entries("X", x_steps), *_entries("W", w_steps)),
        _entries("Y", y_steps),
        (b, d, f),
        n_ranks,
        n_ranks * work // (B * D * F),
        _sent(
            [
                *redistribution(X, Layout("B D"), (B, D), sizes),
                *redistribution(W, Layout("D F"), (D, F), sizes),
                *redistribution(Layout("B F"), Y, (B, F), sizes),
            ]
        ),
        2 * max(B * D, D * F, B * F),
    )


def _pairs(sizes: Mapping[str, int], shape: tuple[int, int, int]) -> Iterator[tuple[Layout, Layout]]:
    """All layouts of X and W whose blocks can be multiplied."""
    B, D, F = shape
    for places in product("BDF-", repeat=len(sizes)):
        cut = {dim: [axis for axis, at in zip(sizes, places, strict=True) if at == dim] for dim in "BDF"}
        for over_b, over_d, over_f in product(*(permutations(cut[dim]) for dim in "BDF")):
            x, w = Layout.of({"B": over_b, "D": over_d}), Layout.of({"D": over_d, "F": over_f})
            whole = ((x, (B, D)), (w, (D, F)))
            if all(
                size % n == 0
                for layout, shape_of in whole
                for size, n in zip(shape_of, layout.n_blocks(sizes), strict=True)
            ):
                yield x, w


def _entries(tensor: str, steps: tuple[Step, ...]) -> tuple[Entry, ...]:
    return tuple(Entry(tensor, step.kind, step.axis, step.source, step.target, step.sent) for step in steps)


def _sent(steps: list[Step]) -> int | Fraction:
    return sum((step.sent for step in steps), start=0)
