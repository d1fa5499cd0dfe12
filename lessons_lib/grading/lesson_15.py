"""The exercises of lesson 15: a linear on a cube of ranks, and two of them in a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

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
from lessons_lib.layout import Layout, coordinates
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel import Cube

# ---- the solutions ----


def cube_forward(x: Tensor, w: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's share of Y = X W, on a mesh of i, j and k.

    ``x`` is this rank's share of X, layout ``B@i@j D@k``; ``w`` that of W, ``D@k@i F@j``; Y lies as
    ``B@i@k F@j``.
    """
    x_ik, w_kj = mesh["j"].all_gather(x, 0), mesh["i"].all_gather(w, 0)
    return mesh["k"].reduce_scatter(x_ik @ w_kj, 0)


def cube_backward(dy: Tensor, x: Tensor, w: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return this rank's shares of dX and dW.

    ``dy`` is this rank's share of dY, layout ``B@i@k F@j``; ``x`` and ``w`` are as in the forward, and dX and
    dW lie as X and W do.
    """
    i, j, k = mesh["i"], mesh["j"], mesh["k"]
    dy_ij = k.all_gather(dy, 0)
    dx = j.reduce_scatter(dy_ij @ i.all_gather(w, 0).T, 0)
    dw = i.reduce_scatter(j.all_gather(x, 0).T @ dy_ij, 0)
    return dx, dw


def two_linears(x: Tensor, w1: Tensor, w2: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return this rank's shares of H = X W1, in the layout ``B@i@k F@j``, and Z = H W2, in ``B@i@j D@k``.

    ``x`` lies as ``B@i@j D@k``, ``w1`` as ``D@k@i F@j``, and ``w2`` as ``F@j@i D@k``.
    """
    i, j, k = mesh["i"], mesh["j"], mesh["k"]
    h = k.reduce_scatter(j.all_gather(x, 0) @ i.all_gather(w1, 0), 0)
    return h, j.reduce_scatter(k.all_gather(h, 0) @ i.all_gather(w2, 0), 0)


# ---- the trials ----

CUBES: tuple[Mapping[str, int], ...] = ({"i": 2, "j": 2, "k": 2}, {"i": 2, "j": 3, "k": 1})
FIRST, SECOND = Cube(), Cube().exchanged()
BECAUSE = "blocks are gathered along one axis each, and each sum is scattered along the third"
NO_SUM = "this is a part of the rank's own term: the terms of {} were not added up along {}"
WRONG_SUM = "the terms were added up along {}: those of {} lie along {}"
WRONG_GATHER = (
    "X was gathered along {} and W along {}: the ranks along j share a block of X, those along i one of W"
)
NOT_EXCHANGED = (
    "the roles were not exchanged: H lies as B@i@k F@j, so it is gathered along k, and the sum is scattered "
    "along j"
)


class Shapes:
    """The sizes and tensors of a trial."""

    def __init__(
        self, draw: Draw, sizes: Mapping[str, int], shape: tuple[int, int, int] | None = None
    ) -> None:
        self.sizes = sizes
        p = 4 if sizes["k"] == 2 else 6  # cut evenly, whichever of the axes are used
        b, d, f = draw.different(2, 4, 3)
        self.B, self.D, self.F = shape or (p * b, p * d, p * f)
        self.X, self.W1, self.W2 = (
            draw.tensor(*each) for each in ((self.B, self.D), (self.D, self.F), (self.F, self.D))
        )
        self.dY = draw.tensor(self.B, self.F)

    def each(self, layout: Layout, whole: Tensor) -> list[Tensor]:
        return each_block(layout, whole, self.sizes)

    @property
    def facts(self) -> str:
        return sizes_text(self.sizes, B=self.B, D=self.D, F=self.F)

    @property
    def gathered(self) -> list[int]:
        """Elements of the blocks that are gathered, and of the product: with q = 2 a quarter of all three."""
        i, j, k = self.sizes.values()
        return [self.B * self.D // (i * k), self.D * self.F // (k * j), self.B * self.F // (i * j)]

    def budget(self, direction: str) -> Budget:
        sent = FIRST.traffic(self.B, self.D, self.F, self.sizes)[direction]
        return Budget.even(sent, self.sizes, BECAUSE)

    @property
    def layers(self) -> list[tuple[Cube, tuple[int, int, int]]]:
        """Two in a row, each with its B, D and F."""
        return [(FIRST, (self.B, self.D, self.F)), (SECOND, (self.B, self.F, self.D))]

    @property
    def wholes(self) -> dict[str, int]:
        return {"X": self.X.numel(), "W": self.W1.numel()}

    def gathered_along(self, axis: str, shares: Sequence[Tensor]) -> list[Tensor]:
        """For every rank the shares of the ranks along ``axis``, one below the other."""
        places = coordinates(self.sizes)
        kept = [{**place, axis: None} for place in places]
        return [
            torch.cat([share for share, other in zip(shares, kept, strict=True) if other == mine])
            for mine in kept
        ]

    def pieces(self, axis: str, terms: Sequence[Tensor]) -> list[Tensor]:
        """Every rank's piece of its term, cut along the first dim over ``axis``."""
        share, places = Layout(f"rows@{axis} columns"), coordinates(self.sizes)
        return [share.cut(term, self.sizes, place) for term, place in zip(terms, places, strict=True)]

    def scattered(self, axis: str, terms: Sequence[Tensor]) -> list[Tensor]:
        return self.pieces(axis, sums_along(terms, self.sizes, [axis]))

    def sum_mistakes(self, name: str, axis: str, terms: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """What goes wrong where terms have to be added up and scattered along ``axis``."""
        if self.sizes[axis] == 1:
            return {}
        wrong = {NO_SUM.format(name, axis): self.pieces(axis, terms)}
        if self.is_cube:  # else other axes give other shapes
            for other in "ijk".replace(axis, ""):
                wrong[WRONG_SUM.format(other, name, axis)] = self.scattered(other, terms)
        return wrong

    @property
    def is_cube(self) -> bool:
        return len(set(self.sizes.values())) == 1


def _shapes(draw: Draw) -> list[Shapes]:
    """A cube and a box; of the cube's sizes two, so that numbers that are written down are seen."""
    cube, box = (Shapes(draw, sizes) for sizes in CUBES)
    return [cube, box, Shapes(draw, CUBES[0], (cube.B, cube.D, cube.F))]


def _products(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    return [a @ b for a, b in zip(left, right, strict=True)]


def _linear(of: Shapes, x: Sequence[Tensor], w: Sequence[Tensor], along: Sequence[str]) -> list[Tensor]:
    """A product on the cube, whose x, w and y are shared along these three axes."""
    of_x, of_w, of_y = along
    return of.scattered(of_y, _products(of.gathered_along(of_x, x), of.gathered_along(of_w, w)))


def _forward(of: Shapes) -> Trial:
    Y = of.X @ of.W1
    x, w = of.each(FIRST.X, of.X), of.each(FIRST.W, of.W1)
    terms = _products(of.gathered_along("j", x), of.gathered_along("i", w))
    mistakes = of.sum_mistakes("Y", "k", terms)
    if of.is_cube:
        for of_x, of_w in product("ijk", repeat=2):
            if of_x + of_w != "ji":
                mistakes[WRONG_GATHER.format(of_x, of_w)] = _linear(of, x, w, [of_x, of_w, "k"])
    return Trial(
        function="cube_forward",
        sizes=of.sizes,
        facts=of.facts,
        args=[(a, b, WholeMesh()) for a, b in zip(x, w, strict=True)],
        outputs=[Output("Y", "Y", of.each(FIRST.Y, Y), Y, mistakes)],
        budgets={"forward": of.budget("forward")},
        wholes=of.wholes,
        spare=sum(of.gathered) + max(of.gathered),  # and a buffer of a gather
        rules=[along_one_axis],
    )


def _backward(of: Shapes) -> Trial:
    dX, dW = of.dY @ of.W1.T, of.X.T @ of.dY
    x, w, dy = of.each(FIRST.X, of.X), of.each(FIRST.W, of.W1), of.each(FIRST.Y, of.dY)
    dy_ij, x_ik, w_kj = (of.gathered_along(axis, shares) for axis, shares in (("k", dy), ("j", x), ("i", w)))
    dx_terms = _products(dy_ij, [block.T for block in w_kj])
    dw_terms = _products([block.T for block in x_ik], dy_ij)
    return Trial(
        function="cube_backward",
        sizes=of.sizes,
        facts=of.facts,
        args=[(a, b, c, WholeMesh()) for a, b, c in zip(dy, x, w, strict=True)],
        outputs=[
            Output("dX", "dX", of.each(FIRST.X, dX), dX, of.sum_mistakes("dX", "j", dx_terms)),
            Output("dW", "dW", of.each(FIRST.W, dW), dW, of.sum_mistakes("dW", "i", dw_terms)),
        ],
        budgets={"forward": of.budget("backward")},
        wholes=of.wholes,
        spare=2 * sum(of.gathered),
        rules=[along_one_axis],
    )


def _pair(of: Shapes) -> Trial:
    H = of.X @ of.W1
    Z = H @ of.W2
    x, w1, w2 = of.each(FIRST.X, of.X), of.each(FIRST.W, of.W1), of.each(SECOND.W, of.W2)
    h = of.each(FIRST.Y, H)
    h_terms = _products(of.gathered_along("j", x), of.gathered_along("i", w1))
    z_terms = _products(of.gathered_along("k", h), of.gathered_along("i", w2))
    z_mistakes = of.sum_mistakes("Z", "j", z_terms)
    if of.is_cube:
        z_mistakes = {NOT_EXCHANGED: _linear(of, h, w2, ["j", "i", "k"])} | z_mistakes
    forward = [scheme.traffic(*shape, of.sizes)["forward"] for scheme, shape in of.layers]
    return Trial(
        function="two_linears",
        sizes=of.sizes,
        facts=of.facts,
        args=[(a, b, c, WholeMesh()) for a, b, c in zip(x, w1, w2, strict=True)],
        outputs=[
            Output("H", "H", h, H, of.sum_mistakes("H", "k", h_terms)),
            Output("Z", "Z", of.each(SECOND.Y, Z), Z, z_mistakes),
        ],
        budgets={"forward": Budget.even(sum(forward), of.sizes, BECAUSE)},
        wholes=of.wholes,
        spare=2 * sum(of.gathered),
        rules=[along_one_axis],
    )


def _trials(make: Callable[[Shapes], Trial]) -> Callable[[Draw], list[Trial]]:
    return lambda draw: [make(of) for of in _shapes(draw)]


REST = "each rank's share, an eighth of it on 2 x 2 x 2"
TRAFFIC = Claim("traffic", "along one axis at a time, as few bytes as the best known way", 3)
MEMORY = Claim(
    "memory", "working, a rank holds its shares, and of what it multiplies a quarter on 2 x 2 x 2", 2
)
NO_DEADLOCK = Claim("no deadlock", "no rank is left waiting, whoever begins", 1)

EXERCISES = (
    Exercise(
        id="15-cube",
        title="A linear on a cube",
        objective="Multiply on a cube of ranks: which axis for which of the three matrices.",
        functions=(cube_forward, cube_backward),
        claims=(
            Claim("Y", f"Y: {REST}", 2),
            Claim("dX", "dX: each rank's share", 1),
            Claim("dW", "dW: each rank's share", 1),
            TRAFFIC,
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=lambda draw: [trial for of in _shapes(draw) for trial in (_forward(of), _backward(of))],
        hints=(
            "Rank (i, j, k) multiplies X[i,k] by W[k,j]. Which axis does each of the three matrices not "
            "depend "
            "on? Along it its block is shared, and along it there is something to gather, or to add up.",
            "Forward: gather X along j and W along i, and scatter the sum along k. Backward, the terms of "
            "dX lie "
            "along j and those of dW along i.",
            'Forward: mesh["k"].reduce_scatter(x_ik @ w_kj, 0). Backward: gather dy along k, w along i, x '
            "along "
            "j; j.reduce_scatter(dy_ij @ w_kj.T, 0) and i.reduce_scatter(x_ik.T @ dy_ij, 0).",
        ),
        shown=(Cube.forward, Cube.backward),
    ),
    Exercise(
        id="15-pair",
        title="Two linears in a row",
        objective="Put two 3D linears in a row, so that the second one's output lies as the first one's X.",
        functions=(two_linears,),
        claims=(
            Claim("H", f"H, as B@i@k F@j: {REST}", 2),
            Claim("Z", f"Z, as B@i@j D@k: {REST}", 3),
            TRAFFIC._replace(points=2),
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=_trials(_pair),
        hints=(
            "Compare the layout of H with that of X: which two axes have changed places?",
            "In the second linear j and k change places everywhere: H is gathered along k, and the sum "
            "over F, "
            "which is cut over j, is scattered along j. W2 is gathered along i, as W1 is.",
            "z = j.reduce_scatter(k.all_gather(h, 0) @ i.all_gather(w2, 0), 0). With cube_forward: write the "
            "axes as arguments and call it twice.",
        ),
        shown=(Cube.__init__, Cube.exchanged, Cube.forward),
    ),
)
