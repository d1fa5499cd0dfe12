"""The exercise of lesson 19: where to place W, if memory has a limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lessons_lib.errors import RefusedError
from lessons_lib.grading.exercise import Claim, Draw, Exercise, Output, Trial, sizes_text
from lessons_lib.grading.rows import as_numbers, as_row
from lessons_lib.mesh import Mesh
from lessons_lib.pipeline_parallel import (
    Schedule,
    Times,
    cut_batch,
    execute,
    first_fault,
    simulate,
    zb_h1,
    zb_h2,
)
from lessons_lib.pipeline_parallel.actions import Action

Row = Sequence[Action]

# ---- the solution ----


def place_w(
    row: Sequence[tuple[str, int, int]], pauses: Sequence[int], W: int, cap: int
) -> list[tuple[str, int, int]]:
    """Return ``row`` with a ("W", stage, micro-batch) for each of its I, the oldest first.

    ``row`` has what a rank does in order, as (kind, stage, micro-batch), and only kinds "F" and "I".
    ``pauses[n]`` is how long the rank stands still before ``row[n]`` if no W is done before; a W takes ``W``.
    From its F to its W the rank keeps a micro-batch, and never more than ``cap`` of them.
    """
    placed: list[tuple[str, int, int]] = []
    waiting: deque[tuple[str, int, int]] = deque()
    kept = 0
    for (kind, stage, k), pause in zip(row, pauses, strict=True):
        while waiting and (pause >= W or (kind == "F" and kept == cap)):
            placed.append(waiting.popleft())
            pause, kept = pause - W, kept - 1
        placed.append((kind, stage, k))
        if kind == "F":
            kept += 1
        else:
            waiting.append(("W", stage, k))
    return placed + list(waiting)


# ---- the trials ----

WIDTH, ROWS = 3, 2  # of a stage, and of a micro-batch


def _trials(draw: Draw) -> list[Trial]:
    """With ZB-H1's forwards and its memory, with room to spare, and with ZB-H2's."""
    trials = []
    for generator, p, spare in ((zb_h1, 2, 0), (zb_h1, 3, 1), (zb_h1, 4, 0), (zb_h2, 3, 0), (zb_h2, 4, 0)):
        m = draw.between(2 * p, 3 * p)
        trials.append(_trial(draw, generator(p, m), spare))
    return trials


def _trial(draw: Draw, best: Schedule, spare: int) -> Trial:
    """W takes no longer than F and I: there ``best`` ends as early as its order of F and I can."""
    p, m = best.n_ranks, best.n_microbatches
    F, I, W = draw.between(4, 7), draw.between(4, 7), draw.between(2, 4)
    times = Times(F, I, W)
    rows = [tuple(part for action in row for part in action.parts if part.kind != "W") for row in best.rows]
    cap = int(max(simulate(best).peak_in_flight())) + spare
    end = simulate(best, times).makespan
    layers = [draw.tensor(WIDTH, WIDTH) for _ in range(p)]
    X, Y = draw.tensor(ROWS * m, WIDTH), draw.tensor(ROWS * m, WIDTH)
    right = [as_numbers(row) for row in best.rows]
    order, memory, last = (
        Output(name, claim, right, judged=judged)
        for name, claim, judged in (
            ("the order", "order", partial(_order, rows)),
            ("the memory", "memory cap", partial(_memory, cap)),
            ("the end", "end", partial(_end, times, end)),
        )
    )
    return Trial(
        function="place_w",
        sizes={"pp": p},
        facts=sizes_text({}, p=p, m=m, F=F, I=I, W=W, cap=cap),
        args=[
            (tuple(map(tuple, row)), pauses, W, cap)
            for row, pauses in zip(rows, _pauses(rows, times), strict=True)
        ],
        then=partial(_carried_out, layers, X, Y),
        outputs=[order, memory, last, Output("the gradient", "gradients", _gradients(layers, X, Y))],
    )


def _pauses(rows: Sequence[Row], times: Times) -> list[tuple[Any, ...]]:
    """How long each rank stands still before each action, without any W."""
    timeline = simulate(Schedule.of("without W", rows), times)
    return [
        tuple(start - before for start, before in zip(starts, [0, *ends], strict=False))
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    ]


def _carried_out(layers: Sequence[Tensor], X: Tensor, Y: Tensor, row: Any, mesh: Mesh) -> tuple[Tensor, ...]:
    """Train real stages by the rows of all ranks: this rank's row, for each line that looks at it, and dw."""
    group, mine = mesh["pp"], as_numbers(row, mesh.rank)
    lengths = [int(n) for n in group.all_gather(torch.tensor([float(len(mine))]), 0)]
    padded = torch.cat([mine, mine.new_zeros(max(lengths) - len(mine), 3)])
    of_all = group.all_gather(padded, 0).chunk(group.size)
    schedule = Schedule.of("mine", [as_row(row[:n]) for row, n in zip(of_all, lengths, strict=True)])
    if schedule.n_ranks != schedule.n_stages or schedule.n_microbatches * ROWS != len(X):
        raise RefusedError(f"{schedule!r} has other stages or micro-batches than the row that was given.")
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=X.dtype)
    layer.weight.data.copy_(layers[group.rank])
    execute(schedule, {group.rank: layer}, cut_batch(X, Y, schedule.n_microbatches), _squares, group)
    assert layer.weight.grad is not None
    return mine, mine, mine, layer.weight.grad


def _squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def _gradients(layers: Sequence[Tensor], X: Tensor, Y: Tensor) -> list[Tensor]:
    """The gradient of every layer, serially."""
    weights = [layer.clone().requires_grad_() for layer in layers]
    y = X
    for weight in weights:
        y = y @ weight.T
    return list(torch.autograd.grad(_squares(y, Y) / Y.numel(), weights))


# ---- what is wrong with rows, where several are right ----


def _order(rows: Sequence[Row], found: Sequence[Tensor]) -> str:
    mine = list(map(as_row, found))
    for rank, (given, row) in enumerate(zip(rows, mine, strict=True)):
        if [action for action in row if action.kind != "W"] != list(given):
            return f"rank {rank}: F and I are not those of the row that was given, in its order"
    fault = first_fault(Schedule.of("mine", mine))
    return str(fault) if fault else ""


def _memory(cap: int, found: Sequence[Tensor]) -> str:
    for rank, row in enumerate(map(as_row, found)):
        kept = 0
        for at, action in enumerate(row):
            kept += {"F": 1, "W": -1}.get(action.kind, 0)
            if kept > cap:
                return f"rank {rank} keeps {kept} micro-batches at action {at}, {action}; the cap is {cap}"
    return ""


def _end(times: Times, best: Any, found: Sequence[Tensor]) -> str:
    timeline = simulate(Schedule.of("mine", map(as_row, found)), times)
    if timeline.makespan <= best:
        return ""
    return f"the last rank ends at {timeline.makespan}, and {best} is possible: {_pause(timeline, times.W)}"


def _pause(timeline: Any, W: Any) -> str:
    """The first pause in which a W could have been done that was waiting."""
    for rank, row in enumerate(timeline.schedule.rows):
        starts, ends = timeline.starts[rank], timeline.ends[rank]
        for at in range(1, len(row)):
            done = [action.kind for action in row[:at]]
            pause = starts[at] - ends[at - 1]
            if pause >= W and done.count("I") > done.count("W"):
                return f"rank {rank} stands still for {pause} before {row[at]}, and had a W to do"
    return (
        "no pause is left that a W would fill, but a W was done before it had to be, and others waited for it"
    )


EXERCISES = (
    Exercise(
        id="19-place",
        title="Place W under a memory cap",
        objective="Place weight gradients where nobody waits for them, with a limit on memory.",
        functions=(place_w,),
        claims=(
            Claim("order", "every I has its W, after it; F and I as they were", 2),
            Claim("memory cap", "no rank ever keeps more micro-batches than the cap", 3),
            Claim("end", "the last rank ends as early as possible", 3),
            Claim("gradients", "carried out on real stages: the serial gradients", 2),
        ),
        trials=_trials,
        hints=(
            "Go through the row, and keep a queue of W that wait and a count of what is kept. Before each "
            "action: is there a reason to do a W now?",
            "Two reasons: the pause before the action is at least as long as a W, or the action is an F and "
            "there is no room. One pause may take several. What is left comes at the end.",
            'while waiting and (pause >= W or (kind == "F" and kept == cap)): take the oldest, and then '
            "pause -= W and kept -= 1.",
        ),
    ),
)
