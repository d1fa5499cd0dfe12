"""The exercise of lesson 16: a step of GPipe, on stages that only talk to their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lessons_lib.grading.exercise import (
    Axis,
    Budget,
    Claim,
    Deadline,
    Draw,
    Exercise,
    Output,
    Trial,
    sizes_text,
)
from lessons_lib.machines import Machine
from lessons_lib.mesh import Group
from lessons_lib.pipeline_parallel import Times, execute, gpipe, simulate
from lessons_lib.timeline import Event

# ---- the solution ----


def gpipe_step(w: Tensor, xs: list[Tensor], targets: list[Tensor], rows: list[int], pp: Group) -> Tensor:
    """Return the gradient of this stage's ``w`` after one step of GPipe.

    A stage is y = tanh(x @ w); ``w`` has other sizes on every rank of ``pp``. There are ``len(rows)``
    micro-batches, the k-th of ``rows[k]`` rows. Rank 0 has their inputs in ``xs``, the last rank what should
    come out in ``targets``; on all others these lists are empty. The loss is the sum of all squares of
    y - target, divided by the number of all rows of all micro-batches.
    """
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    w = w.detach().clone().requires_grad_()
    kept = []
    for k, n in enumerate(rows):
        x = xs[k] if first else pp.recv(w.new_empty(n, w.shape[0]), pp.rank - 1).requires_grad_()
        y = torch.tanh(x @ w)
        kept.append((x, y))
        if not last:
            pp.send(y.detach(), pp.rank + 1)
    for k, (x, y) in enumerate(kept):
        if last:
            ((y - targets[k]).square().sum() / sum(rows)).backward()
        else:
            y.backward(pp.recv(torch.empty_like(y), pp.rank + 1))
        if x.grad is not None:
            pp.send(x.grad, pp.rank - 1)
    assert w.grad is not None
    return w.grad


# ---- the trials ----


def messages(trial: Trial, events: Sequence[Event]) -> str:
    """Over every border go an output and a gradient per micro-batch, and nothing else."""
    strange = sorted({event.kind for event in events if event.is_collective and event.kind != "barrier"})
    if strange:
        return f"{', '.join(strange)} was called; stages need only their neighbours, by send and receive"
    m = len(trial.args[0][3])
    for border in range(trial.n_ranks - 1):
        both = {border, border + 1}
        sent = [event.rank for event in events if event.kind == "send" and {event.rank, event.peer} == both]
        down, up = sent.count(border), sent.count(border + 1)
        if (down, up) != (m, m):
            return (
                f"between ranks {border} and {border + 1} went {down} messages down and {up} up, and {m} "
                f"micro-batches need {m} each way"
            )
    far = [event for event in events if event.kind == "send" and abs(event.rank - (event.peer or 0)) > 1]
    if far:
        return f"rank {far[0].rank} sent to rank {far[0].peer}, which is no neighbour"
    return ""


def _trials(draw: Draw) -> list[Trial]:
    """Equal micro-batches; of several sizes; fewer than stages; one; the last sizes twice."""
    p = draw.between(3, 4)
    n = draw.between(3, 5)
    uneven = [draw.different(1, 6, 3) + draw.different(2, 5, 2) for _ in range(2)]
    few = draw.different(2, 6, 2)
    return [
        _trial(draw, p, [n] * (2 * p + draw.between(1, p - 1))),
        _trial(draw, p - 1, uneven[0]),
        _trial(draw, 4, few),
        _trial(draw, 2, [draw.between(3, 6)]),
        _trial(draw, 3, uneven[1]),
        _trial(draw, 3, uneven[1]),
    ]


def _trial(draw: Draw, p: int, rows: list[int]) -> Trial:
    widths = draw.different(4, 9, p + 1)
    pairs = list(pairwise(widths))
    ws = [draw.tensor(*sizes) / sizes[0] ** 0.5 for sizes in pairs]
    xs = [draw.tensor(n, widths[0]) for n in rows]
    targets = [draw.tensor(n, widths[-1]) for n in rows]
    of_each = [_gradients(ws, x, target) for x, target in zip(xs, targets, strict=True)]  # of sums
    n, m = sum(rows), len(rows)
    sums = [torch.stack(own).sum(0) for own in zip(*of_each, strict=True)]
    means = [[own[r] / len(x) for own, x in zip(of_each, xs, strict=True)] for r in range(p)]
    added = [torch.stack(own).sum(0) for own in means]
    mistakes: dict[str, Sequence[Tensor]] = {
        "this is the gradient of the sum: the loss was not divided": sums,
        f"divided by all {n * widths[-1]} numbers: it is the {n} rows that were asked for": [
            own / n / widths[-1] for own in sums
        ],
    }
    if m > 1:
        mistakes |= {
            f"each micro-batch has its own mean, and {m} of them were added: divide by all rows, once": added,
            "this is an average of averages: a row of a small micro-batch counts more": [
                own / m for own in added
            ],
            f"each micro-batch has the mean of its own numbers, and {m} were added; divide by all rows": [
                own / widths[-1] for own in added
            ],
            "this is an average of averages, each over the numbers of a micro-batch": [
                own / m / widths[-1] for own in added
            ],
            f"divided twice, by all {n} rows and by {m} micro-batches": [own / n / m for own in sums],
            "this is the last micro-batch's gradient: those before were overwritten": [
                own / n for own in of_each[-1]
            ],
            "this is the first micro-batch's gradient: the others were not added": [
                own / n for own in of_each[0]
            ],
        }
    even = len(set(rows)) == 1 and m > p
    border = [2 * n * width for width in widths[1:-1]]
    sent = [(n * widths[r + 1]) * (r < p - 1) + (n * widths[r]) * (r > 0) for r in range(p)]
    return Trial(
        function="gpipe_step",
        sizes={"pp": p},
        facts=sizes_text({}, p=p, m=m) + f", rows: {', '.join(map(str, rows))}",
        args=[
            (w, xs if r == 0 else [], targets if r == p - 1 else [], rows, Axis("pp"))
            for r, w in enumerate(ws)
        ],
        outputs=[Output("the gradient of w", "values", [own / n for own in sums], mistakes=mistakes)],
        budgets={"forward": Budget(sum(border), max(sent), "every border needs outputs and their gradients")},
        rules=[messages],
        deadline=_deadline(p, m, rows[0], pairs) if even else None,
    )


def _gradients(ws: Sequence[Tensor], x: Tensor, target: Tensor) -> Sequence[Tensor]:
    """Of one micro-batch's sum of squares, for all stages, in one graph."""
    ws = [w.clone().requires_grad_() for w in ws]
    for w in ws:
        x = torch.tanh(x @ w)
    return torch.autograd.grad((x - target).square().sum(), ws)


def _deadline(p: int, m: int, n: int, pairs: Sequence[tuple[int, int]]) -> Deadline:
    """When GPipe is done, if a forward of the largest stage takes 1 µs and only products are counted."""
    flops = [2 * n * d * f for d, f in pairs]
    forward = [each / max(flops) for each in flops]
    times = Times(F=forward, B=[2 * each for each in forward])
    made = simulate(gpipe(p, m), times).makespan
    return Deadline(
        Machine("one on which the largest forward takes 1 µs", flops_per_s=1e6 * max(flops)),
        1.001e-6 * float(made),
        "send an output off before you wait for its gradient, and a gradient as soon as there is one: the "
        "neighbours need both to go on",
    )


EXERCISES = (
    Exercise(
        id="16-gpipe",
        title="GPipe on real stages",
        objective="Train stages that only talk to their neighbours, in micro-batches, to serial gradients.",
        functions=(gpipe_step,),
        claims=(
            Claim("values", "the gradient of every stage, divided once", 4),
            Claim("traffic", "2m messages over each border, and nothing else", 2),
            Claim("time", "stages work at the same time", 3),
            Claim("no deadlock", "no rank is left waiting, whoever begins", 1),
        ),
        trials=_trials,
        hints=(
            "Two loops: one over all forwards, one over all backwards. What must a rank keep in between?",
            "x = pp.recv(w.new_empty(rows[k], len(w)), pp.rank - 1).requires_grad_() has a gradient of its "
            "own; y goes to the next rank detached. Keep x and y.",
            "Backward: on the last rank the share of the loss, ((y - targets[k]) ** 2).sum() / sum(rows), "
            "elsewhere y.backward(dy) with dy from pp.rank + 1. Then send x.grad to pp.rank - 1.",
        ),
        shown=(execute,),
    ),
)
