"""The exercises of lesson 08: a linear layer on several ranks, and two of them in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lessons_lib import mesh as pairs
from lessons_lib.grading.exercise import (
    Axis,
    Budget,
    Claim,
    Draw,
    Exercise,
    Output,
    Trial,
    sizes_text,
    sums_along,
)
from lessons_lib.layout import Layout, coordinates
from lessons_lib.mesh import Group
from lessons_lib.tensor_parallel import SCHEMES, Column, Row, Scheme, TensorParallelLinear

# ---- the solutions ----


def column_forward(x: Tensor, w: Tensor, tp: Group) -> Tensor:
    """Return this rank's columns of Y = X W.

    ``x`` is all of X, B x D; ``w`` this rank's columns of W, D x F/p: layout ``D F@tp``.
    """
    return x @ w


def column_backward(dy: Tensor, x: Tensor, w: Tensor, tp: Group) -> tuple[Tensor, Tensor]:
    """Return dX, whole on every rank, and this rank's columns of dW.

    ``dy`` is this rank's columns of dY, B x F/p; ``x`` and ``w`` are as in the forward.
    """
    return tp.all_reduce(dy @ w.T), x.T @ dy


def row_forward(x: Tensor, w: Tensor, tp: Group) -> Tensor:
    """Return Y = X W, whole on every rank.

    ``x`` is this rank's columns of X, B x D/p; ``w`` this rank's rows of W, D/p x F: layout ``D@tp F``.
    """
    return tp.all_reduce(x @ w)


def row_backward(dy: Tensor, x: Tensor, w: Tensor, tp: Group) -> tuple[Tensor, Tensor]:
    """Return this rank's columns of dX and this rank's rows of dW.

    ``dy`` is all of dY, B x F; ``x`` and ``w`` are as in the forward.
    """
    return dy @ w.T, x.T @ dy


def bias_forward(x: Tensor, w: Tensor, bias: Tensor, tp: Group) -> Tensor:
    """Return Y = X W + bias, whole on every rank.

    ``x`` and ``w`` are cut as for the row-parallel layer; ``bias`` is whole, F elements, on every rank.
    """
    return tp.all_reduce(x @ w) + bias


def bias_backward(dy: Tensor, x: Tensor, w: Tensor, tp: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's columns of dX, its rows of dW, and dbias, whole on every rank.

    ``dy`` is all of dY, B x F; ``x`` and ``w`` are as in the forward.
    """
    return dy @ w.T, x.T @ dy, dy.sum(0)


class _CopySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_reduce(dy), None


class _SumCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        return tp.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def copy_sum(x: Tensor, tp: Group) -> Tensor:
    """Return x as it is; backward, the gradients of all ranks of ``tp`` are added up. Megatron's f."""
    return _CopySum.apply(x, tp)


def sum_copy(x: Tensor, tp: Group) -> Tensor:
    """Return the sum of x over ``tp``; backward, every rank gets the gradient as it is. Megatron's g."""
    return _SumCopy.apply(x, tp)


def mlp(x: Tensor, w1: Tensor, w2: Tensor, tp: Group) -> Tensor:
    """Return Y = gelu(X W1) W2, whole on every rank, so that autograd finds dX, dW1 and dW2.

    ``x`` is all of X, B x D, on every rank; ``w1`` is cut ``D F@tp`` and ``w2`` ``F@tp D``.
    """
    h = torch.nn.functional.gelu(copy_sum(x, tp) @ w1)
    return sum_copy(h @ w2, tp)


# ---- the trials ----

MESHES: tuple[Mapping[str, int], ...] = (
    {"dp": 1, "tp": 2},
    {"dp": 2, "tp": 3},
    {"dp": 1, "tp": 4},
)
NOT_ADDED_UP = "this is each rank's partial sum: the terms were not added up over tp"
TOO_MANY = "this is a sum over all ranks of the mesh: tp is one axis of it"
BLOCKS_ADDED = "blocks of different ranks were added up: each rank's block is its own, and needs no sum"


class Setting:
    """The sizes and the tensors of a trial. Data-parallel rows of the mesh have rows of X of their own.

    B is small and W large, so that whoever holds all of W is seen.
    """

    def __init__(self, draw: Draw, sizes: Mapping[str, int], B: int, D: int, F: int) -> None:
        self.sizes, self.p = sizes, sizes["tp"]
        self.B, self.D, self.F = B, D, F
        self.W, self.bias = draw.tensor(self.D, self.F), draw.tensor(self.F)
        self.X = [draw.tensor(self.B, self.D) for _ in range(sizes["dp"])]
        self.dY = [draw.tensor(self.B, self.F) for _ in range(sizes["dp"])]

    def each(self, layout: Layout, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The block of every rank, of the tensor of its data-parallel row."""
        places = coordinates(self.sizes)
        return [layout.cut(wholes[place["dp"]], {"tp": self.p}, {"tp": place["tp"]}) for place in places]

    def sums(self, terms: Sequence[Tensor], axes: Sequence[str] = ("tp",)) -> list[Tensor]:
        """The sum of every rank's term over the ranks that differ from it in ``axes`` alone."""
        return sums_along(terms, self.sizes, axes)

    def mistaken(self, terms: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
        """What goes wrong where the terms of the ranks have to be added up over tp."""
        wrong: dict[str, Sequence[Tensor]] = {NOT_ADDED_UP: terms}
        if self.sizes["dp"] > 1:
            wrong[TOO_MANY] = self.sums(terms, ("dp", "tp"))
        return wrong

    @property
    def facts(self) -> str:
        shown = {axis: size for axis, size in self.sizes.items() if size > 1}
        return sizes_text(shown, B=self.B, D=self.D, F=self.F)

    @property
    def spare(self) -> int:
        """Elements to work on: two more blocks of W, from 3 ranks on not all of it, and some of X."""
        return 2 * self.D * self.F // self.p + self.B * (self.D + self.F)


def _settings(draw: Draw, cut: str) -> list[Setting]:
    """A setting for every mesh; of the last sizes two, so that numbers that are written down are seen."""
    settings = []
    for sizes in MESHES:
        p = sizes["tp"]
        B, small, whole = draw.between(3, 4), draw.between(9, 14), draw.between(8, 12) * p
        small += small == whole
        D, F = (small, whole) if cut == "F" else (whole, small)
        settings.append(Setting(draw, sizes, B, D, F))
    return [*settings, Setting(draw, sizes, B, D, F)]


def _linear_trials(draw: Draw, name: str, scheme: Scheme, cut: str) -> list[Trial]:
    return [trial(of, name, scheme) for of in _settings(draw, cut) for trial in (_forward, _backward)]


def _forward(of: Setting, name: str, scheme: Scheme) -> Trial:
    x, w = of.each(scheme.X, of.X), of.each(scheme.W, [of.W] * len(of.X))
    Y = [X @ of.W for X in of.X]
    biased = name == "bias"
    y = of.each(scheme.Y, Y)
    terms = [a @ b for a, b in zip(x, w, strict=True)]
    mistakes: dict[str, Sequence[Tensor]] = {}
    if scheme.W.dim("D"):
        mistakes |= of.mistaken(terms)
    if biased:
        mistakes |= {
            f"the bias was added {of.p} times: once on every rank, before the sum": [
                part + of.p * of.bias for part in y
            ],
            "the bias is missing": y,
            f"bias/{of.p} was added: the bias belongs to the sum once, whole": [
                part + of.bias / of.p for part in y
            ],
            "the bias was added, but the partial sums were not": [term + of.bias for term in terms],
        }
        y, Y = [part + of.bias for part in y], [part + of.bias for part in Y]
    kind = "all_reduce" if scheme.W.dim("D") else ""
    return Trial(
        function=f"{name}_forward",
        sizes=of.sizes,
        facts=of.facts,
        args=[
            (a, b, of.bias, Axis("tp")) if biased else (a, b, Axis("tp")) for a, b in zip(x, w, strict=True)
        ],
        outputs=[Output("Y", "forward", y, _whole(scheme.Y, Y), mistakes)],
        budgets={
            "forward": _budget(kind, of.B * of.F, of, "Y is a sum over ranks", "x and w are enough for y")
        },
        wholes={"W": of.D * of.F},
        spare=of.spare,
    )


def _backward(of: Setting, name: str, scheme: Scheme) -> Trial:
    x, w = of.each(scheme.X, of.X), of.each(scheme.W, [of.W] * len(of.X))
    dy = of.each(scheme.Y, of.dY)
    dX = [dY @ of.W.T for dY in of.dY]
    dW = [X.T @ dY for X, dY in zip(of.X, of.dY, strict=True)]
    terms = [a @ b.T for a, b in zip(dy, w, strict=True)]
    partial = not scheme.X.dim("D")
    dw = of.each(scheme.W, dW)
    outputs = [
        Output(
            "dX", "dX", of.each(scheme.X, dX), _whole(scheme.X, dX), of.mistaken(terms) if partial else {}
        ),
        Output("dW", "dW", dw, _whole(scheme.W, dW), {BLOCKS_ADDED: of.sums(dw)}),
    ]
    if name == "bias":
        dbias = [dY.sum(0) for dY in of.dY]
        outputs.append(Output("dbias", "dbias", of.each(Layout("F"), dbias)))
    kind = "all_reduce" if partial else ""
    return Trial(
        function=f"{name}_backward",
        sizes=of.sizes,
        facts=of.facts,
        args=[(a, b, c, Axis("tp")) for a, b, c in zip(dy, x, w, strict=True)],
        outputs=outputs,
        budgets={
            "forward": _budget(kind, of.B * of.D, of, "dX is a sum over ranks", "every rank has all it needs")
        },
        wholes={"W": of.D * of.F},
        spare=of.spare,
    )


def _whole(layout: Layout, wholes: Sequence[Tensor]) -> Tensor | None:
    return wholes[0] if layout.axes else None


def _budget(kind: str, n_elements: int, of: Setting, why: str, why_not: str) -> Budget:
    if not kind:
        return Budget.nothing(why_not)
    return Budget.of(kind, n_elements, of.sizes, "tp", why)


def _pair_trials(draw: Draw) -> list[Trial]:
    trials = []
    for of in _settings(draw, "F"):
        sizes = of.sizes
        n_ranks, shape = len(coordinates(sizes)), (of.D, of.B)
        xs = [draw.tensor(*shape).requires_grad_() for _ in range(n_ranks)]
        terms = [draw.tensor(*reversed(shape)).T for _ in range(n_ranks)]  # not contiguous
        seen = [terms[rank - rank % of.p] for rank in range(n_ranks)]  # one loss, seen by all of tp
        plain = [x.detach() for x in xs]
        n = of.D * of.B
        nothing = Budget.nothing("this way it is a copy")
        a_sum = Budget.of("all_reduce", n, sizes, "tp", "this way it is a sum over ranks")
        outputs = {
            "copy_sum": [
                Output(
                    "y", "f forward", plain, None, {"x was added up: forward, f is a copy": of.sums(plain)}
                ),
                Output("dx", "f backward", of.sums(terms), None, of.mistaken(terms)),
            ],
            "sum_copy": [
                Output("y", "g forward", of.sums(plain), None, of.mistaken(plain)),
                Output("dx", "g backward", seen),
            ],
        }
        for name, upstream, forward, backward in (
            ("copy_sum", terms, nothing, a_sum),
            ("sum_copy", seen, a_sum, nothing),
        ):
            trials.append(
                Trial(
                    function=name,
                    sizes=sizes,
                    facts=of.facts,
                    args=[(x, Axis("tp")) for x in xs],
                    outputs=outputs[name],
                    upstream=upstream,
                    budgets={"forward": forward, "backward": backward},
                    spare=6 * n,
                )
            )
    return trials


def _mlp_trials(draw: Draw) -> list[Trial]:
    return [_mlp_trial(of, draw) for of in _settings(draw, "F")]


def _mlp_trial(of: Setting, draw: Draw) -> Trial:
    W1, W2 = of.W, draw.tensor(of.F, of.D)
    up, down = SCHEMES["column"].W, SCHEMES["row"].W
    n_rows = len(of.X)
    dY = [draw.tensor(of.B, of.D) for _ in range(n_rows)]
    serial = [_serial_mlp(X, W1, W2, dy) for X, dy in zip(of.X, dY, strict=True)]
    Y, dX, dW1, dW2 = (list(each) for each in zip(*serial, strict=True))
    x, w1, w2 = of.each(Layout("B D"), of.X), of.each(up, [W1] * n_rows), of.each(down, [W2] * n_rows)
    dy = of.each(Layout("B D"), dY)
    terms = [_serial_mlp(*each) for each in zip(x, w1, w2, dy, strict=True)]
    n = of.B * of.D
    return Trial(
        function="mlp",
        sizes=of.sizes,
        facts=of.facts,
        args=[
            (*(tensor.clone().requires_grad_() for tensor in each), Axis("tp"))
            for each in zip(x, w1, w2, strict=True)
        ],
        outputs=[
            Output("Y", "forward", of.each(Layout("B D"), Y), None, of.mistaken([term[0] for term in terms])),
            Output("dX", "dX", of.each(Layout("B D"), dX), None, of.mistaken([term[1] for term in terms])),
            Output("dW1", "dW1", of.each(up, dW1), dW1[0], {}),
            Output("dW2", "dW2", of.each(down, dW2), dW2[0], {}),
        ],
        upstream=dy,
        budgets={
            "forward": Budget.of("all_reduce", n, of.sizes, "tp", "Y is a sum over ranks"),
            "backward": Budget.of("all_reduce", n, of.sizes, "tp", "dX is a sum over ranks"),
        },
        wholes={"W1": of.D * of.F, "W2": of.D * of.F},
        spare=of.spare + 4 * of.B * of.F // of.p,
    )


def _serial_mlp(X: Tensor, W1: Tensor, W2: Tensor, dY: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Y, dX, dW1 and dW2 of gelu(X W1) W2 by autograd, on one rank."""
    X, W1, W2 = (tensor.clone().requires_grad_() for tensor in (X, W1, W2))
    Y = torch.nn.functional.gelu(X @ W1) @ W2
    gradients: Any = torch.autograd.grad(Y, (X, W1, W2), dY)
    return Y.detach(), *gradients


TRAFFIC = Claim("traffic", "as few bytes as the best known way", 2)
MEMORY = Claim("memory", "no rank holds more than its blocks, and what it works on", 1)
NO_DEADLOCK = Claim("no deadlock", "no rank is left waiting, whoever begins", 1)

EXERCISES = (
    Exercise(
        id="08-column",
        title="Column-parallel linear",
        objective="Compute a linear layer whose W is cut by columns, forward and backward.",
        functions=(column_forward, column_backward),
        claims=(
            Claim("forward", "Y: each rank's columns", 2),
            Claim("dX", "dX: whole on every rank", 2),
            Claim("dW", "dW: each rank's columns", 2),
            TRAFFIC,
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=lambda draw: _linear_trials(draw, "column", SCHEMES["column"], "F"),
        hints=(
            "Write Y = X W on paper with W cut by columns. Which columns of Y can a rank compute alone?",
            "dX = dY W.T is a sum over the columns of W, and each rank has some of them.",
            "Forward: x @ w. Backward: dX is tp.all_reduce(dy @ w.T), and dW is x.T @ dy, without any.",
        ),
        shown=(Column.forward, Column.backward),
    ),
    Exercise(
        id="08-row",
        title="Row-parallel linear",
        objective="Compute a linear layer whose W is cut by rows, forward and backward.",
        functions=(row_forward, row_backward),
        claims=(
            Claim("forward", "Y: whole on every rank", 2),
            Claim("dX", "dX: each rank's columns", 2),
            Claim("dW", "dW: each rank's rows", 2),
            TRAFFIC,
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=lambda draw: _linear_trials(draw, "row", SCHEMES["row"], "D"),
        hints=(
            "An output needs all inputs, and a rank has some of them. What does x @ w give it?",
            "Forward is a sum over ranks. Backward, every rank has all of dY: what else does it need?",
            "Forward: tp.all_reduce(x @ w). Backward: dy @ w.T and x.T @ dy, without communication.",
        ),
        shown=(Row.forward, Row.backward),
    ),
    Exercise(
        id="08-bias",
        title="The bias of a row-parallel linear",
        objective="Add a bias that every rank has once, not once per rank.",
        functions=(bias_forward, bias_backward),
        claims=(
            Claim("forward", "Y: whole on every rank, the bias in it once", 3),
            Claim("dX", "dX: each rank's columns", 1),
            Claim("dW", "dW: each rank's rows", 1),
            Claim("dbias", "dbias: whole on every rank", 2),
            TRAFFIC._replace(points=1),
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=lambda draw: _linear_trials(draw, "bias", SCHEMES["row"], "D"),
        hints=(
            "If every rank adds the bias to its partial sum, how often is it in the sum?",
            "Add it where there is only one Y: after the sum. For dbias: who has all of dY?",
            "tp.all_reduce(x @ w) + bias; and dbias is dy.sum(0), on every rank, without communication.",
        ),
        shown=(TensorParallelLinear.forward,),
    ),
    Exercise(
        id="08-pair",
        title="The pair f and g",
        objective="Write a communication together with what becomes of its gradient.",
        functions=(copy_sum, sum_copy),
        claims=(
            Claim("f forward", "copy_sum: a copy", 1),
            Claim("f backward", "copy_sum, backward: the gradients added up", 3),
            Claim("g forward", "sum_copy: the sum", 1),
            Claim("g backward", "sum_copy, backward: the gradient as it is", 3),
            TRAFFIC._replace(points=1),
            NO_DEADLOCK,
        ),
        trials=_pair_trials,
        hints=(
            "Write a subclass of torch.autograd.Function with forward(ctx, x, tp) and backward(ctx, dy).",
            "Backward returns one gradient for every argument of forward: (dx, None), as tp has none. "
            "Keep tp as ctx.tp.",
            "copy_sum: forward returns x.clone(), backward ctx.tp.all_reduce(dy). sum_copy mirrors it. "
            "The function that is checked returns YourClass.apply(x, tp).",
        ),
        shown=(pairs._Pair, pairs.copy_sum, pairs.sum_copy),
    ),
    Exercise(
        id="08-mlp",
        title="Two linears in a row",
        objective="Put a column-parallel and a row-parallel layer together, with one sum each way.",
        functions=(mlp,),
        claims=(
            Claim("forward", "Y: whole on every rank", 2),
            Claim("dX", "dX: whole on every rank", 2),
            Claim("dW1", "dW1: each rank's columns", 1),
            Claim("dW2", "dW2: each rank's rows", 1),
            TRAFFIC,
            MEMORY,
            NO_DEADLOCK,
        ),
        trials=_mlp_trials,
        hints=(
            "gelu acts on every element alone, so the hidden layer may stay cut between the two products.",
            "f stands where all ranks begin from one x, g where their partial sums become one.",
            "sum_copy(gelu(copy_sum(x, tp) @ w1) @ w2, tp), with the pair of the exercise before, or that of "
            "lessons_lib.mesh.",
        ),
    ),
)
