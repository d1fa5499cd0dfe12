"""The exercises of lesson 02: five broken programs, and what they should have returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib.grading import rules
from lessons_lib.grading.exercise import Axis, Claim, Draw, Exercise, Output, Trial, sizes_text
from lessons_lib.layout import coordinates
from lessons_lib.mesh import Group

# ---- broken ----


def sum_of_gradients(gradient: Tensor, n_samples: int) -> Tensor:
    """Return the sum of the gradients of all ranks, on every rank. Without samples a gradient is zero."""
    if n_samples > 0:
        dist.all_reduce(gradient)
    return gradient


def totals(loss: Tensor, n_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses and the sum of the token counts of all ranks, on every rank."""
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.all_reduce(n_tokens)
        dist.all_reduce(loss)
    else:
        dist.all_reduce(loss)
        dist.all_reduce(n_tokens)
    return loss, n_tokens


def from_the_left(x: Tensor) -> Tensor:
    """Return the left neighbour's ``x``; rank 0's left neighbour is the last rank."""
    r, p = dist.get_rank(), dist.get_world_size()
    y = torch.empty_like(x)
    dist.send(x, dst=(r + 1) % p)
    dist.recv(y, src=(r - 1) % p)
    return y


def norm_of_pair(x: Tensor, pair: Group) -> Tensor:
    """Return the norm of the two tensors of a pair of ranks taken together, on both ranks."""
    norm = torch.zeros(1)
    if pair.rank == 0:
        norm = pair.all_reduce(x.square().sum().reshape(1)).sqrt()
    return norm


def mean_score(scores: Tensor) -> Tensor:
    """Return the mean of all scores of all ranks, a tensor of one element, on every rank.

    Ranks have different numbers of scores.
    """
    everyone = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, scores)
    return torch.cat(everyone).mean().reshape(1)


BROKEN = {fn.__name__: fn for fn in (sum_of_gradients, totals, from_the_left, norm_of_pair, mean_score)}


# ---- repaired: functions of the same names ----


def _repaired() -> dict[str, Callable[..., Any]]:
    def sum_of_gradients(gradient: Tensor, n_samples: int) -> Tensor:
        """Return the sum of the gradients of all ranks, on every rank. Without samples a gradient is zero."""
        dist.all_reduce(gradient)
        return gradient

    def totals(loss: Tensor, n_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the sum of the token counts of all ranks, on every rank."""
        dist.all_reduce(loss)
        dist.all_reduce(n_tokens)
        return loss, n_tokens

    def from_the_left(x: Tensor) -> Tensor:
        """Return the left neighbour's ``x``; rank 0's left neighbour is the last rank."""
        r, p = dist.get_rank(), dist.get_world_size()
        y = torch.empty_like(x)
        if r % 2 == 0:
            dist.send(x, dst=(r + 1) % p)
            dist.recv(y, src=(r - 1) % p)
        else:
            dist.recv(y, src=(r - 1) % p)
            dist.send(x, dst=(r + 1) % p)
        return y

    def norm_of_pair(x: Tensor, pair: Group) -> Tensor:
        """Return the norm of the two tensors of a pair of ranks taken together, on both ranks."""
        return pair.all_reduce(x.square().sum().reshape(1)).sqrt()

    def mean_score(scores: Tensor) -> Tensor:
        """Return the mean of all scores of all ranks, a tensor of one element, on every rank."""
        sum_and_count = torch.stack([scores.sum(), torch.tensor(len(scores), dtype=scores.dtype)])
        dist.all_reduce(sum_and_count)
        return (sum_and_count[0] / sum_and_count[1]).reshape(1)

    return {fn.__name__: fn for fn in (sum_of_gradients, totals, from_the_left, norm_of_pair, mean_score)}


# ---- the trials ----


def _on_ranks(
    name: str, args: list[tuple[Any, ...]], outputs: list[Output], sizes: Mapping[str, int], facts: str = ""
) -> Trial:
    return Trial(
        function=name,
        sizes=sizes,
        facts=facts or sizes_text(sizes),
        args=args,
        outputs=outputs,
        keeps=False,
        rules=[rules.something_is_sent],
    )


def _gradient_trials(draw: Draw) -> list[Trial]:
    trials = []
    for p in (2, 3, 4):
        n_samples = [draw.between(1, 4) for _ in range(p)]
        absent = draw.between(0, p - 1)
        n_samples[absent] = 0
        gradients = [draw.tensor(3) if n else torch.zeros(3, dtype=torch.float64) for n in n_samples]
        output = Output(
            "the sum",
            "values",
            [torch.stack(gradients).sum(0)] * p,
            mistakes={"this is the rank's own gradient: nothing was added to it": gradients},
        )
        facts = sizes_text({"ranks": p}) + f", no samples on rank {absent}"
        args: list[tuple[Any, ...]] = list(zip(gradients, n_samples, strict=True))
        trials.append(_on_ranks("sum_of_gradients", args, [output], {"ranks": p}, facts))
    return trials


def _totals_trials(draw: Draw) -> list[Trial]:
    trials = []
    for p in (2, 3, 4):
        losses, counts = ([draw.tensor(1) for _ in range(p)] for _ in range(2))
        crossed = "the last rank's other number was added in: calls have no names, the n-th meets the n-th"
        outputs = [
            Output(
                name,
                "values",
                [torch.stack(mine).sum(0)] * p,
                mistakes={crossed: [torch.stack([*mine[:-1], other[-1]]).sum(0)] * (p - 1)
                          + [torch.stack([*other[:-1], mine[-1]]).sum(0)]},
            )
            for name, mine, other in (("sum of losses", losses, counts), ("sum of counts", counts, losses))
        ]  # fmt: skip
        args: list[tuple[Any, ...]] = list(zip(losses, counts, strict=True))
        trials.append(_on_ranks("totals", args, outputs, {"ranks": p}))
    return trials


def _left_trials(draw: Draw) -> list[Trial]:
    trials = []
    for p in (2, 3, 4, 5):
        xs = [draw.tensor(2) for _ in range(p)]
        mistakes = {
            "this is the right neighbour's": xs[1:] + xs[:1],
            "this is the rank's own: nothing arrived": xs,
        }
        output = Output("what arrived", "values", xs[-1:] + xs[:-1], mistakes=mistakes)
        trials.append(_on_ranks("from_the_left", [(x,) for x in xs], [output], {"ranks": p}))
    return trials


def _pair_trials(draw: Draw) -> list[Trial]:
    trials = []
    for dp in (1, 2, 3):
        sizes = {"dp": dp, "tp": 2}
        xs = [draw.tensor(3) for _ in coordinates(sizes)]
        of_all = torch.cat(xs).norm().reshape(1)
        norms = [torch.cat([xs[r - r % 2], xs[r - r % 2 + 1]]).norm().reshape(1) for r in range(len(xs))]
        output = Output(
            "the norm",
            "values",
            norms,
            mistakes={
                "this is the norm of the rank's own tensor": [x.norm().reshape(1) for x in xs],
                "this is the norm over all ranks, not over the pair": [of_all] * len(xs),
                "these are the two norms added up: squares are added, then comes the root": [
                    xs[r - r % 2].norm().reshape(1) + xs[r - r % 2 + 1].norm().reshape(1)
                    for r in range(len(xs))
                ],
            },
        )
        trials.append(_on_ranks("norm_of_pair", [(x, Axis("tp")) for x in xs], [output], sizes))
    return trials


def _score_trials(draw: Draw) -> list[Trial]:
    trials = []
    for p in (2, 3, 4):
        scores = [draw.tensor(n) for n in draw.different(1, 9, p)]
        means = [mine.mean().reshape(1) for mine in scores]
        output = Output(
            "the mean",
            "values",
            [torch.cat(scores).mean().reshape(1)] * p,
            mistakes={
                "this is the average of the averages: few scores count as much as many": [
                    torch.stack(means).mean(0)
                ]
                * p,
                "this is the mean of the rank's own scores": means,
            },
        )
        trials.append(_on_ranks("mean_score", [(mine,) for mine in scores], [output], {"ranks": p}))
    return trials


def _exercise(
    number: int,
    name: str,
    title: str,
    objective: str,
    values: str,
    trials: Callable[[Draw], list[Trial]],
    hints: tuple[str, str, str],
) -> Exercise:
    return Exercise(
        id=f"02-repair-{number}",
        title=title,
        objective=objective,
        functions=(_repaired()[name],),
        claims=(
            Claim("values", values, 2),
            Claim("traffic", "the numbers of others came by communication", 1),
            Claim("no deadlock", "no rank is left waiting, whoever begins", 2),
        ),
        trials=trials,
        hints=hints,
        broken=(BROKEN[name],),
    )


EXERCISES = (
    _exercise(
        1,
        "sum_of_gradients",
        "Repair: a rank stays away",
        "Let a rank that has nothing to add take part all the same.",
        "the sum of all gradients, on every rank",
        _gradient_trials,
        (
            "Run it and read the report: which rank is missing, and where has it gone?",
            "Every rank of a group makes the same calls. What does a rank bring that has nothing to add?",
            "Its gradient is zero already: call all_reduce without the if.",
        ),
    ),
    _exercise(
        2,
        "totals",
        "Repair: another order",
        "Give every rank the same order of calls.",
        "both sums, on every rank",
        _totals_trials,
        (
            "Print what each rank returns. Which number has got into which sum?",
            "Calls have no names: the first on one rank meets the first on the others.",
            "Take the if away: one order, on every rank.",
        ),
    ),
    _exercise(
        3,
        "from_the_left",
        "Repair: all send first",
        "Pass tensors around a ring of any number of ranks without a cycle of waiting.",
        "the left neighbour's tensor, on every rank",
        _left_trials,
        (
            "A send is done when it is received. Who receives first?",
            "One rank that receives first breaks the circle; or begin both, and wait for both afterwards.",
            "Let odd ranks call recv before send. Or: isend, irecv, then wait() for both.",
        ),
    ),
    _exercise(
        4,
        "norm_of_pair",
        "Repair: in a branch",
        "Keep a collective out of a branch that only some ranks of its group take.",
        "the norm of the pair, on both ranks",
        _pair_trials,
        (
            "Which ranks are in the group `pair`, and which of them make the call?",
            "The all_reduce belongs to both ranks of the pair, and so does its result.",
            "return pair.all_reduce(...).sqrt() on both, without the if.",
        ),
    ),
    _exercise(
        5,
        "mean_score",
        "Repair: another shape",
        "Find what has the same shape on every rank, and communicate that.",
        "the mean of all scores, on every rank",
        _score_trials,
        (
            "The ranks disagree about the shape. What could each send that has the same shape everywhere?",
            "A mean is a sum over a count, and both can be added up.",
            "all_reduce a tensor of two numbers, scores.sum() and len(scores), and divide afterwards.",
        ),
    ),
)
