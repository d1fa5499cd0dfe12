"""The exercise of lesson 00: a relay."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib.grading import rules
from lessons_lib.grading.exercise import Budget, Claim, Draw, Exercise, Output, Trial, sizes_text


def relay(x: Tensor) -> Tensor:
    """Return the sum of the numbers of ranks 0 to this one. ``x`` is this rank's, a tensor of one element.

    A number goes from rank to rank, and each adds its own: one message from every rank to the next.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    total = torch.zeros_like(x)
    if rank > 0:
        dist.recv(total, src=rank - 1)
    total += x
    if rank < last:
        dist.send(total, dst=rank + 1)
    return total


def _trials(draw: Draw) -> list[Trial]:
    return [_trial(draw, p) for p in (2, 3, 5, 5)]


def _trial(draw: Draw, p: int) -> Trial:
    xs = [draw.tensor(1) for _ in range(p)]
    running = [torch.stack(xs[: rank + 1]).sum(0) for rank in range(p)]
    return Trial(
        function="relay",
        sizes={"ranks": p},
        facts=sizes_text({"ranks": p}),
        args=[(x,) for x in xs],
        outputs=[
            Output(
                "the running sum",
                "values",
                running,
                mistakes={
                    "this is the rank's own number: nothing was added to it": xs,
                    "this is the sum over all ranks: a relay knows only those before": [running[-1]] * p,
                    "this is what arrived: the rank's own number is missing": [
                        total - x for total, x in zip(running, xs, strict=True)
                    ],
                    "only the left neighbour's own number was added: hand on the sum, not your number": [
                        xs[rank] + xs[rank - 1] if rank else xs[0] for rank in range(p)
                    ],
                },
            )
        ],
        keeps=False,
        budgets={"forward": Budget(p - 1, 1, "one number from each rank to the next")},
        rules=[rules.no_collective, rules.one_number_from_each_to_the_next],
    )


EXERCISES = (
    Exercise(
        id="00-relay",
        title="A relay",
        objective="Pass a number from rank to rank with send and recv.",
        functions=(relay,),
        claims=(
            Claim("values", "every rank has the sum of all ranks up to it", 5),
            Claim("traffic", "one message of one element from each rank to the next", 3),
            Claim("no deadlock", "no rank is left waiting, whoever begins", 2),
        ),
        trials=_trials,
        hints=(
            "Which rank can begin at once, without hearing from anybody? Which one tells nobody?",
            "Every other rank does three things in this order: receive, add, send.",
            "dist.recv(total, src=rank - 1) fills a tensor that you have made; only ranks above 0 call it. "
            "dist.send(total, dst=rank + 1) is for all but the last.",
        ),
    ),
)
