"""The exercises of lesson 13: SUMMA, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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
    sums_along,
)
from lessons_lib.grading.rules import along_one_axis
from lessons_lib.layout import coordinates
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel import SCHEMES, Summa, panels

# ---- the solutions ----


def summa(x: Tensor, w: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's block of Y = X W, on a square grid with the axes row and col.

    ``x`` is this rank's block of X, layout ``B@row D@col``; ``w`` that of W, ``D@row F@col``; Y lies as
    ``B@row F@col``. A rank holds two panels of X and two of W at most, and never a whole row of blocks.
    """
    row, col = mesh["row"], mesh["col"]
    y = x.new_zeros(x.shape[0], w.shape[1])
    for step in range(col.size):
        y += col.broadcast(x, step) @ row.broadcast(w, step)
    return y


def summa_backward(dy: Tensor, x: Tensor, w: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return this rank's blocks of dX and dW.

    ``dy`` is this rank's block of dY, layout ``B@row F@col``; ``x`` and ``w`` are as in the forward, and dX
    and dW lie as X and W do.
    """
    row, col = mesh["row"], mesh["col"]
    for step in range(col.size):
        total = col.reduce(dy @ row.broadcast(w, step).T, step)
        if total is not None:
            dx = total
    for step in range(row.size):
        total = row.reduce(col.broadcast(x, step).T @ dy, step)
        if total is not None:
            dw = total
    return dx, dw


# ---- the trials ----

GRIDS: tuple[Mapping[str, int], ...] = ({"row": 2, "col": 2}, {"row": 3, "col": 3})
OWN_BLOCKS = "this is made of the rank's own blocks alone: the other terms of the sum are missing"
WRONG_WAY = (
    'X came along the grid column and W along the grid row: along a row runs mesh["col"], whose ranks differ '
    "in col"
)
LAST_STEP = "the term of the last step is missing: there are as many as the grid is wide"


class Grid:
    """The sizes, tensors and blocks of a trial.

    D is the smallest of the three, so that it is Y that is worth keeping in its place, and X and W travel.
    """

    def __init__(self, draw: Draw, sizes: Mapping[str, int]) -> None:
        self.sizes, self.q = sizes, sizes["row"]
        d = draw.between(4, 6)
        b, f = (d + more for more in draw.different(1, 2, 2))
        self.redraw(draw, b * self.q, d * self.q, f * self.q)

    def redraw(self, draw: Draw, B: int, D: int, F: int) -> Grid:
        self.B, self.D, self.F = B, D, F
        self.X, self.W, self.dY = draw.tensor(B, D), draw.tensor(D, F), draw.tensor(B, F)
        scheme = SCHEMES["2d"]
        self.x = each_block(scheme.X, self.X, self.sizes)
        self.w = each_block(scheme.W, self.W, self.sizes)
        self.dy = each_block(scheme.Y, self.dY, self.sizes)
        return self

    def at(self, blocks: list[Tensor], row: int, col: int) -> Tensor:
        return blocks[row * self.q + col]

    def each(self, make: Callable[[int, int, int], Tensor], steps: int | None = None) -> list[Tensor]:
        """For every rank the sum over the steps of ``make(row, col, step)``."""
        return [
            torch.stack([make(place["row"], place["col"], step) for step in range(steps or self.q)]).sum(0)
            for place in coordinates(self.sizes)
        ]

    @property
    def facts(self) -> str:
        return sizes_text(self.sizes, B=self.B, D=self.D, F=self.F)

    @property
    def panels(self) -> int:
        """Elements of one panel of X and one of W."""
        return self.x[0].numel() + self.w[0].numel()

    @property
    def spare(self) -> int:
        """Two panels of each, and one product."""
        return 2 * self.panels + self.dy[0].numel()

    @property
    def wholes(self) -> dict[str, int]:
        whole = {"X": self.X.numel(), "W": self.W.numel()}
        lines = {"a grid row of X": whole["X"] // self.q, "a grid column of W": whole["W"] // self.q}
        return whole | lines

    def budget(self, products: int, why: str) -> Budget:
        return Budget.even(products * (self.q - 1) * self.panels, self.sizes, why)


def _grids(draw: Draw) -> list[Grid]:
    """A grid of every size; of the first sizes two, so that numbers that are written down are seen."""
    grids = [Grid(draw, sizes) for sizes in GRIDS]
    first = grids[0]
    return [first, grids[1], Grid(draw, first.sizes).redraw(draw, first.B, first.D, first.F)]


def _forward_trials(draw: Draw) -> list[Trial]:
    return [_forward(of) for of in _grids(draw)]


def _backward_trials(draw: Draw) -> list[Trial]:
    return [_backward(of) for of in _grids(draw)]


def _forward(of: Grid) -> Trial:
    Y = of.X @ of.W
    mistakes = {
        OWN_BLOCKS: [x @ w for x, w in zip(of.x, of.w, strict=True)],
        WRONG_WAY: of.each(lambda r, c, s: of.at(of.x, s, c) @ of.at(of.w, r, s)),
        LAST_STEP: of.each(lambda r, c, s: of.at(of.x, r, s) @ of.at(of.w, s, c), of.q - 1),
    }
    return Trial(
        function="summa",
        sizes=of.sizes,
        facts=of.facts,
        args=[(x, w, WholeMesh()) for x, w in zip(of.x, of.w, strict=True)],
        outputs=[Output("Y", "Y", each_block(SCHEMES["2d"].Y, Y, of.sizes), Y, mistakes)],
        budgets={
            "forward": of.budget(1, "a block of X goes to its grid row, a block of W to its grid column")
        },
        wholes=of.wholes,
        spare=of.spare,
        rules=[along_one_axis],
    )


def _backward(of: Grid) -> Trial:
    dX, dW = of.dY @ of.W.T, of.X.T @ of.dY
    own_dx = [dy @ w.T for dy, w in zip(of.dy, of.w, strict=True)]
    own_dw = [x.T @ dy for x, dy in zip(of.x, of.dy, strict=True)]
    not_added = "this is the rank's own term: the terms were not added up {}"
    along_row, along_column = 'along the grid row, mesh["col"]', 'along the grid column, mesh["row"]'
    wrong_axis = "the terms were added up {}: its terms lie {}"

    def kept(make: Callable[[int, int, int], Tensor], mine: Callable[[int, int], int]) -> list[Tensor]:
        """The term that every rank made in the step in which it is the owner."""
        return [make(at["row"], at["col"], mine(at["row"], at["col"])) for at in coordinates(of.sizes)]

    def dx_term(r: int, c: int, step: int) -> Tensor:
        return of.at(of.dy, r, c) @ of.at(of.w, step, c).T

    def dw_term(r: int, c: int, step: int) -> Tensor:
        return of.at(of.x, r, step).T @ of.at(of.dy, r, c)

    dx_mistakes = {
        OWN_BLOCKS: own_dx,
        not_added.format(along_row): kept(dx_term, lambda r, c: c),
        wrong_axis.format(along_column, along_row): sums_along(own_dx, of.sizes, ["row"]),
    }
    dw_mistakes = {
        OWN_BLOCKS: own_dw,
        not_added.format(along_column): kept(dw_term, lambda r, c: r),
        wrong_axis.format(along_row, along_column): sums_along(own_dw, of.sizes, ["col"]),
    }
    scheme = SCHEMES["2d"]
    return Trial(
        function="summa_backward",
        sizes=of.sizes,
        facts=of.facts,
        args=[(dy, x, w, WholeMesh()) for dy, x, w in zip(of.dy, of.x, of.w, strict=True)],
        outputs=[
            Output("dX", "dX", each_block(scheme.X, dX, of.sizes), dX, dx_mistakes),
            Output("dW", "dW", each_block(scheme.W, dW, of.sizes), dW, dw_mistakes),
        ],
        budgets={"forward": of.budget(2, "blocks come along one axis, and each sum goes to its owner alone")},
        wholes=of.wholes,
        spare=of.spare,
        rules=[along_one_axis],
    )


TRAFFIC = Claim("traffic", "along rows and columns only, as few bytes as the best known way", 3)
MEMORY = Claim("memory", "no rank holds more than its blocks, two panels of each, and a product", 2)
NO_DEADLOCK = Claim("no deadlock", "no rank is left waiting, whoever begins", 1)

EXERCISES = (
    Exercise(
        id="13-summa",
        title="SUMMA",
        objective="Multiply two matrices of which no rank ever holds more than a few blocks.",
        functions=(summa,),
        claims=(Claim("Y", "Y: each rank's block", 4), TRAFFIC, MEMORY, NO_DEADLOCK),
        trials=_forward_trials,
        hints=(
            "Y[i,j] is a sum of q terms X[i,l] W[l,j]. In step l, who has X[i,l], and who needs it?",
            'The ranks of a grid row differ in col: X comes by mesh["col"].broadcast(x, l). And W?',
            "y = x.new_zeros(x.shape[0], w.shape[1]); for each l: "
            'y += mesh["col"].broadcast(x, l) @ mesh["row"].broadcast(w, l).',
        ),
        shown=(Summa.forward, panels.panels),
    ),
    Exercise(
        id="13-backward",
        title="SUMMA, backward",
        objective="Compute both gradients of a product whose matrices are cut both ways.",
        functions=(summa_backward,),
        claims=(
            Claim("dX", "dX: each rank's block", 2),
            Claim("dW", "dW: each rank's block", 2),
            TRAFFIC,
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=_backward_trials,
        hints=(
            "What is broadcast forward is summed backward. dX[i,l] is a sum over j: along which line of the "
            "grid do its terms lie?",
            "dX, step l: W[l,j] comes along column j, every rank makes a term, and the terms go as a sum to "
            "the rank in column l of their row: reduce returns None to the others.",
            'total = mesh["col"].reduce(dy @ mesh["row"].broadcast(w, l).T, l), kept by the rank that gets '
            "one. "
            "For dW the mirror image: x.T @ dy, x along the row, the sum along the column.",
        ),
        shown=(Summa.backward, panels.reduce_each),
    ),
)
