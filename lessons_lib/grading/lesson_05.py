"""The exercise of lesson 05: Adam, whose moments are cut over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Adam

from lessons_lib.data_parallel.stages import padded
from lessons_lib.data_parallel.unit import Unit
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
from lessons_lib.layout import coordinates
from lessons_lib.mesh import Group

# ---- the solution ----


def sharded_adam(W: Tensor, x: Tensor, y: Tensor, n_steps: int, dp: Group) -> Tensor:
    """Return all N weights after ``n_steps`` steps of ``Adam(lr=0.1, eps=0.1)`` on the loss |X W - Y|² / 2.

    ``W`` has one dim, N weights, and is the same on every rank. ``x`` and ``y`` are this rank's rows of X,
    B x N, and of Y, so ``x.T @ (x @ W - y)`` is its term of the gradient. A rank keeps the moments of N/p
    weights, rounded up: p need not divide N.
    """
    n = len(W)
    piece = nn.Parameter(dp.piece(nn.functional.pad(W, (0, -n % dp.size)), 0))
    optimizer = Adam([piece], lr=0.1, eps=0.1)
    for _ in range(n_steps):
        term = x.T @ (x @ W - y)
        piece.grad = dp.reduce_scatter(nn.functional.pad(term, (0, -n % dp.size)), 0)
        optimizer.step()
        W = dp.all_gather(piece.detach(), 0)[:n]
    return W


# ---- the trials ----

MESHES: tuple[Mapping[str, int], ...] = ({"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}, {"dp": 8})
ROWS = 3  # of each rank
STATE = "Does every rank keep the moments of all weights? Gathered must be updated weights, not gradients"
Combined = Callable[[Tensor], Tensor]  # of what every rank has, a row each


def _trials(draw: Draw) -> list[Trial]:
    """For every mesh a size that p divides and one that it does not; the last one twice."""
    trials = []
    for sizes in MESHES:
        p = sizes["dp"]
        n = draw.between(240 // p, 320 // p) * p
        trials += [_trial(draw, sizes, n), _trial(draw, sizes, n + draw.between(1, p - 1))]
    return [*trials, _trial(draw, sizes, sum(trials[-1].args[0][0].shape))]


def _trial(draw: Draw, sizes: Mapping[str, int], n: int) -> Trial:
    places, p, n_steps = coordinates(sizes), sizes["dp"], 3
    n_groups = len(places) // p
    weights = [draw.tensor(n) for _ in range(n_groups)]
    W = torch.stack([weights[place.get("tp", 0)] for place in places])
    x, y = draw.tensor(len(places), ROWS, n), draw.tensor(len(places), ROWS)
    n_padded = padded(n, p)
    owner = torch.arange(n) // (n_padded // p)
    mine = torch.stack([owner == place["dp"] for place in places])
    train = partial(_trained, W, x, y, n_steps)

    def added(terms: Tensor) -> Tensor:
        return torch.stack(sums_along(list(terms), sizes, ["dp"]))

    mistakes = {
        "each rank took its own term for the gradient: the terms were not added up": train(
            lambda terms: terms, lambda new, old: added(new * mine)
        ),
        "no rank took a gradient from the others: each trained for itself": train(lambda terms: terms),
        "the gradient was averaged over the ranks, and the loss is a sum": train(
            lambda terms: added(terms) / p
        ),
        "the gradient is p times too large: it was added up twice": train(lambda terms: added(terms) * p),
        "each rank has updated its piece, and kept the others as they were: pieces were not gathered": train(
            added, lambda new, old: new.where(mine, old)
        ),
        "the gradient was always taken at the first weights: gather the new ones in every step": train(
            added, stale=True
        ),
        "the moments were forgotten after each step: make the optimizer once": train(added, forgetful=True),
    }
    if n_groups > 1:
        mistakes["this is a sum over all ranks of the mesh: dp is one axis of it"] = train(
            lambda terms: terms.sum(0).expand_as(terms)
        )
    each = 2 * (p - 1) * n_steps
    return Trial(
        function="sharded_adam",
        sizes=sizes,
        facts=sizes_text(sizes, N=n, steps=n_steps),
        args=[
            (w.clone(), a.clone(), b.clone(), n_steps, Axis("dp")) for w, a, b in zip(W, x, y, strict=True)
        ],
        outputs=[
            Output(
                "W",
                "even" if n_padded == n else "odd",
                list(train(added)),
                mistakes={what: list(wrong) for what, wrong in mistakes.items()},
            )
        ],
        budgets={
            "forward": Budget(
                n_groups * each * n_padded,
                each * n_padded // p,
                "in every step terms become a sum, and pieces a whole",
                possible=n_groups * each * n,
            )
        },
        wholes={"X": p * ROWS * n},
        spare=16 * n // 5 + 28 * n_padded // p // 5,  # three vectors and a little, and not six pieces
        too_much=STATE,
    )


def _trained(
    W: Tensor,
    x: Tensor,
    y: Tensor,
    n_steps: int,
    combined: Combined,
    spread: Callable[[Tensor, Tensor], Tensor] = lambda new, old: new,
    stale: bool = False,
    forgetful: bool = False,
) -> Tensor:
    """The weights of every rank, a row each, by one Adam for all, which works number by number."""
    now, parameter = W, nn.Parameter(W.clone())
    optimizer = Adam([parameter], lr=0.1, eps=0.1)
    for _ in range(n_steps):
        residuals = torch.einsum("rbn,rn->rb", x, W if stale else now) - y
        parameter.grad = combined(torch.einsum("rbn,rb->rn", x, residuals)).contiguous()
        if forgetful:
            optimizer = Adam([parameter], lr=0.1, eps=0.1)
        optimizer.step()
        now = spread(parameter.detach().clone(), now)
    return now


EXERCISES = (
    Exercise(
        id="05-adam",
        title="Sharded Adam",
        objective="Train with Adam while each rank keeps the moments of its piece only, at any size.",
        functions=(sharded_adam,),
        claims=(
            Claim("even", "W after all steps, where p divides N", 3),
            Claim("odd", "W after all steps, where it does not", 2),
            Claim("traffic", "as many bytes as an all-reduce in each step", 1),
            Claim("memory", "no rank keeps the moments of others' weights", 3),
            Claim("no deadlock", "no rank is left waiting, whoever begins", 1),
        ),
        trials=_trials,
        hints=(
            "Which part of the gradient does a rank need, if it updates N/p of the weights? Which collective "
            "brings a sum of terms just there?",
            "piece = nn.Parameter(dp.piece(W, 0)) and one Adam([piece], ...), made once. In each step: "
            "reduce-scatter the terms into piece.grad, step, all-gather piece.detach().",
            "Where p does not divide N: nn.functional.pad(vector, (0, -n % dp.size)) before a piece is taken "
            "or terms are scattered, and [:n] after the gather.",
        ),
        shown=(Unit.start_reducing, Unit.update, Unit.spread),
    ),
)
