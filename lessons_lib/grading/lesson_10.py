"""The exercises of lesson 10: the pair of Megatron's sequence parallelism, and training with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from lessons_lib import mesh as pairs
from lessons_lib.grading.exercise import (
    Axis,
    Budget,
    Claim,
    Draw,
    Exercise,
    Output,
    Trial,
    each_block,
    sizes_text,
)
from lessons_lib.layout import Layout
from lessons_lib.mesh import Group, Mesh
from lessons_lib.sequence_parallel import SequenceColumn, SequenceRow
from lessons_lib.tensor_parallel.layer_norm import layer_norm as parallel_layer_norm
from lessons_lib.timeline import Event, ring_traffic

# ---- the solutions ----


class _GatherReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return tp.all_gather(x, 0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.reduce_scatter(dy, 0), None


class _ReduceScatterGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return tp.reduce_scatter(x, 0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_gather(dy, 0), None


def gather_reduce_scatter(x: Tensor, tp: Group) -> Tensor:
    """Return the tokens of all ranks of ``tp``, one after the other; ``x`` is this rank's, S/p x D.

    Before a column-parallel layer: every rank does other work with them, so the gradient comes in terms.
    """
    return _GatherReduceScatter.apply(x, tp)


def reduce_scatter_gather(x: Tensor, tp: Group) -> Tensor:
    """Return this rank's tokens of the sum over ``tp``; ``x`` is this rank's term, S x D.

    Behind a row-parallel layer.
    """
    return _ReduceScatterGather.apply(x, tp)


def train(
    x: Tensor, t: Tensor, gamma: Tensor, bias: Tensor, w1: Tensor, w2: Tensor, n_steps: int, tp: Group
) -> tuple[Tensor, ...]:
    """Return gamma, bias, w1 and w2 after ``n_steps`` steps of SGD, each ``w -= 0.001 * gradient``.

    The loss is |Y - T|² / 2, summed over all tokens, and Y = X + gelu((layer_norm(X) * gamma) W1) W2 + bias.
    ``x`` and ``t`` are this rank's tokens of X and T, S/p x D: layout ``S@tp D``. ``gamma`` and ``bias`` have
    D numbers, the same on every rank; ``w1`` is cut ``D F@tp`` and ``w2`` ``F@tp D``.
    """
    for _ in range(n_steps):
        leaves = [each.detach().requires_grad_() for each in (gamma, bias, w1, w2)]
        gamma, bias, w1, w2 = leaves
        normed = layer_norm(x, x.shape[-1:]) * gamma
        h = gelu(gather_reduce_scatter(normed, tp) @ w1)
        y = x + reduce_scatter_gather(h @ w2, tp) + bias
        dgamma, dbias, dw1, dw2 = torch.autograd.grad((y - t).square().sum() / 2, leaves)
        gradients = tp.all_reduce(dgamma), tp.all_reduce(dbias), dw1, dw2
        gamma, bias, w1, w2 = (
            each.detach() - RATE * gradient for each, gradient in zip(leaves, gradients, strict=True)
        )
    return gamma, bias, w1, w2


RATE = 0.001

# ---- the trials ----

MESHES: tuple[Mapping[str, int], ...] = ({"tp": 2}, {"tp": 3}, {"tp": 4}, {"tp": 4})
NOT_ADDED_UP = "this is each rank's own term: the terms were not added up over tp"
TOKENS = Layout("S@tp D")


def _pair_trials(draw: Draw) -> list[Trial]:
    trials, n, D = [], 0, 0
    for number, sizes in enumerate(MESHES):
        if number + 1 < len(MESHES):  # the last sizes twice, so that numbers that are written down are seen
            n, D = draw.different(3, 8, 2)
        trials += _pair_of_trials(draw, sizes, n, D)
    return trials


def _pair_of_trials(draw: Draw, sizes: Mapping[str, int], n: int, D: int) -> list[Trial]:
    p = sizes["tp"]
    X, dX = draw.tensor(p * n, D), draw.tensor(p * n, D)
    parts, gradients = each_block(TOKENS, X, sizes), each_block(TOKENS, dX, sizes)
    terms = [draw.tensor(p * n, D) for _ in range(p)]
    total = torch.stack(terms).sum(0)
    pieces = each_block(TOKENS, total, sizes)
    own_pieces = [TOKENS.cut(term, sizes, {"tp": rank}) for rank, term in enumerate(terms)]
    not_summed = {
        NOT_ADDED_UP: own_pieces,
        "this is a mean over the ranks: it is their sum that is wanted": [each / p for each in pieces],
    }
    outputs = {
        "gather_reduce_scatter": [
            Output("y", "gather", [X] * p, None, {}),
            Output("dx", "gather backward", pieces, total, not_summed),
        ],
        "reduce_scatter_gather": [
            Output("y", "scatter", pieces, total, not_summed),
            Output(
                "dx",
                "scatter backward",
                [dX] * p,
                None,
                {"the gathered gradients were added up, too: p times too large": [dX * p] * p},
            ),
        ],
    }
    half = Budget.even(
        ring_traffic("all_gather", X.numel(), sizes["tp"]), sizes, "each way needs half an all-reduce"
    )
    calls = {"gather_reduce_scatter": (parts, terms), "reduce_scatter_gather": (terms, gradients)}
    return [
        Trial(
            function=name,
            sizes=sizes,
            facts=sizes_text(sizes, S=p * n, D=D),
            args=[(x.clone().requires_grad_(), Axis("tp")) for x in xs],
            outputs=outputs[name],
            upstream=upstream,
            budgets={"forward": half, "backward": half},
        )
        for name, (xs, upstream) in calls.items()
    ]


def _train_trials(draw: Draw) -> list[Trial]:
    trials, S, D, F = [], 0, 0, 0
    for number, sizes in enumerate(MESHES):
        p = sizes["tp"]
        if number + 1 < len(MESHES):
            S, D, F = 12 * p, p * draw.between(4, 6), p * draw.between(1, 2)
        trials.append(_train_trial(draw, sizes, S, D, F))
    return trials


def _train_trial(draw: Draw, sizes: Mapping[str, int], S: int, D: int, F: int) -> Trial:
    p, n_steps = sizes["tp"], 10
    X, T, gamma, beta = draw.tensor(S, D), draw.tensor(S, D), 1 + draw.tensor(D) / 4, draw.tensor(D)
    W1, W2 = draw.tensor(D, F) / D**0.5, draw.tensor(F, D) / F**0.5

    def trained(combined: Combined, of_bias: Combined | None = None, **other: Any) -> list[list[Tensor]]:
        """gamma, bias, W1 and W2 of every rank."""
        start = gamma.expand(p, -1), beta.expand(p, -1), W1, W2
        gammas, betas, w1, w2 = _trained(X, T, start, n_steps, combined, of_bias or combined, **other)
        return [list(gammas), list(betas), [w1] * p, [w2] * p]

    right = trained(summed)
    early = "the bias was added by every rank before the sum: p times"
    wrong = {
        f"{NOT_ADDED_UP}. Each rank's tokens had their say on its own copy alone": trained(own),
        "of gamma and bias, the gradients of gamma alone were added up over tp": trained(summed, own),
        "of gamma and bias, the gradients of bias alone were added up over tp": trained(own, summed),
        "the gradient is a mean over the ranks, and the loss is a sum over all tokens": trained(mean),
        "the gradients of w1 and w2, which are complete, were added up over tp, too": trained(
            summed, of_parts=_sum_of_parts
        ),
        "every gradient is twice what it should be: the loss is |Y - T|² / 2": trained(summed, rate=2 * RATE),
        early: trained(summed, own, bias=summed),
        f"{early}, and so was its gradient, which was complete": trained(summed, summed, bias=summed),
    }

    def mistakes(at: int, layout: Layout) -> dict[str, Sequence[Tensor]]:
        return {
            what: [layout.cut(each, sizes, {"tp": rank}) for rank, each in enumerate(found[at])]
            for what, found in wrong.items()
        }

    layouts = {"gamma": Layout("D"), "bias": Layout("D"), "w1": Layout("D F@tp"), "w2": Layout("F@tp D")}
    outputs = [
        Output(
            name,
            "copies" if at < 2 else "parts",
            each_block(layout, right[at][0], sizes),
            right[at][0] if layout.axes else None,
            mistakes(at, layout),
        )
        for at, (name, layout) in enumerate(layouts.items())
    ]
    both = [torch.cat([right[0][0], right[1][0]])] * p
    outputs.append(Output("gamma and bias", "same bits", both, judged=_same_bits))
    blocks = {name: each_block(layout, whole, sizes) for (name, layout), whole in zip(
        layouts.items(), (gamma, beta, W1, W2), strict=True)}  # fmt: skip
    halves = 4 * ring_traffic("all_gather", S * D, p) + 2 * ring_traffic("all_reduce", D, p)
    return Trial(
        function="train",
        sizes=sizes,
        facts=sizes_text(sizes, S=S, D=D, F=F, steps=n_steps),
        args=[
            (x, t, *(blocks[name][rank].clone() for name in layouts), n_steps, Axis("tp"))
            for rank, (x, t) in enumerate(
                zip(each_block(TOKENS, X, sizes), each_block(TOKENS, T, sizes), strict=True)
            )
        ],
        outputs=outputs,
        then=_and_both,
        budgets={
            "forward": Budget.even(
                n_steps * halves,
                sizes,
                "a step needs two halves forward, two backward, and two sums of vectors",
            )
        },
        spare=SPARE_WHOLES * S * D + SPARE_PARTS * S * D // p,
        too_much="Is the stream whole on it anywhere but between the all-gather and the reduce-scatter?",
        rules=(no_whole_sum,),
    )


SPARE_WHOLES, SPARE_PARTS = 3, 9
Combined = Callable[[Tensor], Tensor]  # of what every rank has, a row each


def own(terms: Tensor) -> Tensor:
    return terms


def summed(terms: Tensor) -> Tensor:
    return terms.sum(0).expand_as(terms)


def mean(terms: Tensor) -> Tensor:
    return terms.mean(0).expand_as(terms)


def _sum_of_parts(dW: Tensor, dim: int, p: int) -> Tensor:
    """The gradient of a matrix cut along ``dim``, if its p blocks were taken for terms of a sum."""
    return torch.cat([torch.stack(dW.chunk(p, dim)).sum(0)] * p, dim)


def _trained(
    X: Tensor,
    T: Tensor,
    start: Sequence[Tensor],
    n_steps: int,
    of_gamma: Combined,
    of_bias: Combined,
    bias: Combined = own,
    of_parts: Callable[[Tensor, int, int], Tensor] = lambda dW, dim, p: dW,
    rate: float = RATE,
) -> Sequence[Tensor]:
    """What training gives: gammas and biases with a row for each rank, and W1 and W2.

    ``of_gamma`` and ``of_bias`` make gradients of the ranks' terms, ``bias`` what is added of their biases,
    ``of_parts`` gradients of those of W1 and W2.
    """
    now, p = start, len(start[0])
    for _ in range(n_steps):
        gammas, biases, W1, W2 = leaves = [each.detach().clone().requires_grad_() for each in now]
        x, t = X.unflatten(0, (p, -1)), T.unflatten(0, (p, -1))
        normed = layer_norm(x, x.shape[-1:]) * gammas[:, None]
        y = x + gelu(normed @ W1) @ W2 + bias(biases)[:, None]
        dgammas, dbiases, dW1, dW2 = torch.autograd.grad((y - t).square().sum() / 2, leaves)
        steps = [of_gamma(dgammas), of_bias(dbiases), of_parts(dW1, 1, p), of_parts(dW2, 0, p)]
        now = [each.detach() - rate * step for each, step in zip(leaves, steps, strict=True)]
    return now


def _and_both(result: Any, mesh: Mesh) -> Any:
    """What ``train`` returned, and its copies once more, to be compared bit by bit."""
    four = isinstance(result, tuple | list) and len(result) == 4
    if four and all(isinstance(each, Tensor) for each in result):
        return *result, torch.cat([result[0].flatten(), result[1].flatten()])
    return result


def _same_bits(results: Sequence[Tensor]) -> str:
    for rank, each in enumerate(results):
        if each.shape != results[0].shape or not torch.equal(each, results[0]):
            return f"gamma and bias are copies, and rank {rank}'s differ from rank 0's: ranks have gone apart"
    return ""


def no_whole_sum(trial: Trial, events: Sequence[Event]) -> str:
    """A sum over ranks ends as parts of it, unless it is of vectors; both may go in one call."""
    stream = sum(args[0].numel() for args in trial.args)
    for event in events:
        if event.kind == "all_reduce" and event.n_elements >= stream:
            return (
                f"an all_reduce of {event.n_elements:,} elements made the sum whole on every rank: "
                "stop it halfway, and each rank has its own tokens"
            )
    return ""


TRAFFIC = Claim("traffic", "as many bytes as 1D, and no sum is whole on every rank", 1)
NO_DEADLOCK = Claim("no deadlock", "no rank is left waiting, whoever begins", 1)

EXERCISES = (
    Exercise(
        id="10-pair",
        title="The two halves of an all-reduce",
        objective="Write reduce-scatter and all-gather so that autograd finds the gradient of either.",
        functions=(gather_reduce_scatter, reduce_scatter_gather),
        claims=(
            Claim("gather", "gather_reduce_scatter: the tokens of all ranks", 1),
            Claim("gather backward", "its backward: this rank's part of the summed gradient", 3),
            Claim("scatter", "reduce_scatter_gather: this rank's part of the sum", 1),
            Claim("scatter backward", "its backward: the gradients of all ranks, side by side", 3),
            Claim("traffic", "half an all-reduce each way", 1),
            NO_DEADLOCK,
        ),
        trials=_pair_trials,
        hints=(
            "Two subclasses of torch.autograd.Function, with forward(ctx, x, tp) and backward(ctx, dy). What "
            "one does forward, the other does backward.",
            "tp.all_gather(x, 0) puts the ranks' tokens one after the other, tp.reduce_scatter(x, 0) adds up "
            "and leaves each rank its part. Keep tp as ctx.tp.",
            "Gather: forward tp.all_gather(x, 0), backward (ctx.tp.reduce_scatter(dy, 0), None). The other "
            "one the other way round. The functions return YourClass.apply(x, tp).",
        ),
        shown=(pairs._Pair, pairs.gather_reduce_scatter, pairs.reduce_scatter_gather),
    ),
    Exercise(
        id="10-train",
        title="Ten steps with the stream cut",
        objective="Train a branch whose stream is cut along S, and keep the copies of a parameter equal.",
        functions=(train,),
        claims=(
            Claim("copies", "gamma and bias: as trained on one device", 3),
            Claim("same bits", "gamma and bias: to the last bit the same on every rank", 1),
            Claim("parts", "w1 and w2: each rank's part", 2),
            TRAFFIC,
            Claim("memory", "the stream is whole on no rank, but where a matrix needs it", 2),
            NO_DEADLOCK,
        ),
        trials=_train_trials,
        hints=(
            "Norm the rank's own tokens; gather them; multiply by w1, and by w2; reduce-scatter; add. Which "
            "of the four parameters saw a part of the tokens only?",
            "gamma and bias: their gradients are terms, one for each rank's tokens. The loss is a sum over "
            "tokens, so add them up, without a mean. Add the bias when the sum over ranks is complete.",
            "normed = layer_norm(x, x.shape[-1:]) * gamma; h = gelu(gather_reduce_scatter(normed, tp) @ w1); "
            "y = x + reduce_scatter_gather(h @ w2, tp) + bias. Then tp.all_reduce both copies' gradients.",
        ),
        shown=(SequenceColumn, SequenceRow, parallel_layer_norm),
    ),
)
