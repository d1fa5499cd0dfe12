"""The exercises of lesson 14: what the layers of a 2.5D grid owe each other in the backward."""

from __future__ import annotations

from collections.abc import Mapping

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
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel import SCHEMES, Summa, Tesseract, layer_norm
from lessons_lib.timeline import ring_traffic

# ---- the solutions ----


def tesseract_backward(dy: Tensor, x: Tensor, w: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's blocks of dX, dW and dbias of Y = X W + bias, on a mesh of depth, row and col.

    ``dy`` is this rank's block of dY, layout ``B@depth@row F@col``; ``x`` that of X, ``B@depth@row D@col``;
    ``w`` that of W, ``D@row F@col``. The bias lies as ``F@col``. ``Summa().backward(dy, x, w, mesh)`` does
    what happens inside a layer, and returns two blocks.
    """
    dx, dw = Summa().backward(dy, x, w, mesh)
    row, depth = mesh["row"], mesh["depth"]
    return dx, depth.all_reduce(dw), depth.all_reduce(row.all_reduce(dy.sum(0)))


def norm_backward(dy: Tensor, normed: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return this rank's parts of dgain and dbias of Y = normed * gain + bias, the end of a LayerNorm.

    ``dy`` and ``normed`` are this rank's blocks, layout ``B@depth@row D@col``; gain and bias have one number
    per column and lie as ``D@col``.
    """
    row, depth = mesh["row"], mesh["depth"]
    dgain, dbias = (dy * normed).sum(0), dy.sum(0)
    return depth.all_reduce(row.all_reduce(dgain)), depth.all_reduce(row.all_reduce(dbias))


# ---- the trials ----

MESHES: tuple[Mapping[str, int], ...] = (
    {"depth": 3, "row": 2, "col": 2},
    {"depth": 2, "row": 2, "col": 2},
    {"depth": 3, "row": 2, "col": 2},
)
CUT_BY = ("depth", "row")  # the axes that cut the rows
NO_DEPTH = "the sum over depth is missing: each layer has the term of its own rows"
NO_ROW = "the sum over row is missing: each grid row has the term of its own rows"
NO_SUM = "this is the term of the rank's own rows: they are cut over depth and over row"
NOT_COL = (
    "columns that have nothing to do with each other were added up: over col, each rank's part is its own"
)
DX_SUMMED = "dX was added up over depth: its rows belong to one layer each, and need no sum"


class Tower:
    """The sizes and tensors of a trial. Every layer has rows of its own.

    Sizes divide evenly wherever somebody may cut them. D is the smallest, as in lesson 13.
    """

    def __init__(
        self, draw: Draw, sizes: Mapping[str, int], shape: tuple[int, int, int] | None = None
    ) -> None:
        self.sizes = sizes
        q, d = sizes["row"], sizes["depth"]
        b, width = draw.between(7, 9), 2 * d * (2 if d == 2 else 1)
        self.B, self.D, self.F = shape or (b * q * d, draw.between(4, 5) * q, width * q)
        self.X, self.W, self.dY = (
            draw.tensor(*shape) for shape in ((self.B, self.D), (self.D, self.F), (self.B, self.F))
        )

    @property
    def facts(self) -> str:
        return sizes_text(self.sizes, B=self.B, D=self.D, F=self.F)

    def sums(self, terms: list[Tensor], *axes: str) -> list[Tensor]:
        return sums_along(terms, self.sizes, axes)

    def column_mistakes(self, terms: list[Tensor]) -> dict[str, list[Tensor]]:
        """What goes wrong where terms of each rank's rows have to be added up."""
        return {
            NO_SUM: terms,
            NO_DEPTH: self.sums(terms, "row"),
            NO_ROW: self.sums(terms, "depth"),
            NOT_COL: self.sums(terms, "depth", "row", "col"),
        }

    def over_rows(self, n: int) -> tuple[int, int]:
        """Elements a rank sends to add up ``n`` over row, then over depth; and over both at once."""
        q, d = self.sizes["row"], self.sizes["depth"]
        one_by_one = ring_traffic("all_reduce", n, q) + ring_traffic("all_reduce", n, d)
        return int(one_by_one), int(ring_traffic("all_reduce", n, q * d))


def _towers(draw: Draw) -> list[Tower]:
    """A tower of every mesh; the last has the sizes of the first, so that what is written down is seen."""
    first, second = (Tower(draw, sizes) for sizes in MESHES[:2])
    return [first, second, Tower(draw, MESHES[2], (first.B, first.D, first.F))]


def _linear_trials(draw: Draw) -> list[Trial]:
    return [_linear(of) for of in _towers(draw)]


def _norm_trials(draw: Draw) -> list[Trial]:
    return [_norm(of, draw) for of in _towers(draw)]


def _linear(of: Tower) -> Trial:
    scheme, sizes = SCHEMES["2.5d"], of.sizes
    x, w, dy = (
        each_block(layout, whole, sizes)
        for layout, whole in ((scheme.X, of.X), (scheme.W, of.W), (scheme.Y, of.dY))
    )
    dX, dW, dbias = of.dY @ of.W.T, of.X.T @ of.dY, of.dY.sum(0)
    dx = each_block(scheme.X, dX, sizes)
    layers = of.X.chunk(sizes["depth"]), of.dY.chunk(sizes["depth"])
    grid = {"row": sizes["row"], "col": sizes["col"]}
    by_layer = [
        block for X, dY in zip(*layers, strict=True) for block in each_block(scheme.W, X.T @ dY, grid)
    ]
    n_bias, d = of.F // sizes["col"], sizes["depth"]
    bias, bias_at_once = of.over_rows(n_bias)
    products = 2 * (sizes["row"] - 1) * (x[0].numel() + w[0].numel())
    over_depth = int(ring_traffic("all_reduce", w[0].numel(), d))
    n_ranks = len(x)
    return Trial(
        function="tesseract_backward",
        sizes=sizes,
        facts=of.facts,
        args=[(c, a, b, WholeMesh()) for a, b, c in zip(x, w, dy, strict=True)],
        outputs=[
            Output("dX", "dX", dx, dX, {DX_SUMMED: of.sums(dx, "depth")}),
            Output("dW", "dW", each_block(scheme.W, dW, sizes), dW, {NO_DEPTH: by_layer}),
            Output(
                "dbias",
                "dbias",
                each_block(Layout("F@col"), dbias, sizes),
                dbias,
                of.column_mistakes([block.sum(0) for block in dy]),
            ),
        ],
        budgets={
            "forward": Budget.even(
                products + over_depth + bias,
                sizes,
                "dW is a sum over depth, and dbias over depth and row",
                possible=n_ranks * (products + over_depth + bias_at_once),
            )
        },
        wholes={"X": of.X.numel(), "W": of.W.numel()},
        spare=3 * (x[0].numel() + w[0].numel()) + dy[0].numel(),
    )


def _norm(of: Tower, draw: Draw) -> Trial:
    sizes, layout, D = of.sizes, Layout("B@depth@row F@col"), of.F
    normed = draw.tensor(of.B, D)
    dy, x = each_block(layout, of.dY, sizes), each_block(layout, normed, sizes)
    dgain, dbias = (of.dY * normed).sum(0), of.dY.sum(0)
    n = D // sizes["col"]
    both, at_once = of.over_rows(2 * n)
    return Trial(
        function="norm_backward",
        sizes=sizes,
        facts=sizes_text(sizes, B=of.B, D=D),
        args=[(a, b, WholeMesh()) for a, b in zip(dy, x, strict=True)],
        outputs=[
            Output(
                name,
                name,
                each_block(Layout("D@col"), whole, sizes),
                whole,
                of.column_mistakes(terms),
            )
            for name, whole, terms in (
                ("dgain", dgain, [(a * b).sum(0) for a, b in zip(dy, x, strict=True)]),
                ("dbias", dbias, [a.sum(0) for a in dy]),
            )
        ],
        budgets={
            "forward": Budget.even(
                both, sizes, "dgain and dbias are sums over depth and row", possible=len(dy) * at_once
            )
        },
        wholes={"dY": of.dY.numel(), "normed": normed.numel()},
        spare=2 * dy[0].numel() + 8 * n,
    )


TRAFFIC = Claim("traffic", "as few bytes as the best known way", 2)
MEMORY = Claim("memory", "no rank holds more than its blocks, and what it works on", 1)
NO_DEADLOCK = Claim("no deadlock", "no rank is left waiting, whoever begins", 1)

EXERCISES = (
    Exercise(
        id="14-linear",
        title="The sum over depth: weight and bias",
        objective="Add up the gradients of a weight and a bias over the axes that cut the data and not them.",
        functions=(tesseract_backward,),
        claims=(
            Claim("dX", "dX: each rank's block", 1),
            Claim("dW", "dW: each rank's block, over all rows", 3),
            Claim("dbias", "dbias: each rank's part, over all rows", 2),
            TRAFFIC,
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=_linear_trials,
        hints=(
            "Which axes cut the rows of dY? Each gradient has these rows, or is a sum over them.",
            "Summa().backward has added up over the grid's rows already, and knows nothing of depth. "
            "Nobody has added up dbias yet.",
            'dX as it comes; mesh["depth"].all_reduce(dw); and dy.sum(0), all-reduced over row and over '
            "depth.",
        ),
        shown=(Tesseract.backward,),
    ),
    Exercise(
        id="14-norm",
        title="The sum over depth: a norm",
        objective="Add up the gradients of a LayerNorm's gain and bias on a 2.5D grid.",
        functions=(norm_backward,),
        claims=(
            Claim("dgain", "dgain: each rank's part, over all rows", 3),
            Claim("dbias", "dbias: each rank's part, over all rows", 3),
            TRAFFIC,
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=_norm_trials,
        hints=(
            "On one rank dgain is (dy * normed).sum(0) and dbias dy.sum(0). What has a rank of these?",
            "The rows are cut over depth and over row, so both are sums over both; the columns over col, so "
            "over col there is nothing to add up.",
            'depth.all_reduce(row.all_reduce((dy * normed).sum(0))), with row = mesh["row"] and '
            'depth = mesh["depth"], and the same for dy.sum(0).',
        ),
        shown=(layer_norm.layer_norm,),
    ),
)
