"""Rows of a schedule as numbers: that is how a child process tells what a function returned.

>>> numbers = as_numbers([("F", 0, 0), ("F", 2, 0), ("B", 2, 0)])
>>> numbers.tolist()
[[0.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.0, 2.0, 0.0]]
>>> [str(action) for action in as_row(numbers)]
['0F0', '2F0', '2B0']
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel.actions import KINDS, Action, Schedule


def as_numbers(row: Any, rank: int = 0) -> Tensor:
    """One line for each action of ``rank``: the number of its kind, its stage, its micro-batch.

    Raises RefusedError where the row holds something else.
    """
    if not isinstance(row, list | tuple):
        raise RefusedError(f"rank {rank}: a row is a list of actions such as ('F', 0, 3), not {row!r}.")
    *_, actions = Schedule.of("mine", [*[()] * rank, row]).rows
    found = [(KINDS.index(part.kind), part.stage, part.microbatch) for a in actions for part in a.parts]
    return torch.tensor(found, dtype=torch.float64)


def as_row(numbers: Tensor) -> tuple[Action, ...]:
    """The actions again, on the side that judges."""
    return tuple(
        Action(KINDS[int(kind)], int(stage), int(k)) for kind, stage, k in numbers.reshape(-1, 3).tolist()
    )


def the_same_as(rows: Sequence[Sequence[Action]], what: str) -> Callable[[Sequence[Tensor]], str]:
    """Judge: every rank has the actions of its row, in order.

    >>> rows = [[Action("F", 0, 0), Action("F", 0, 1)]]
    >>> the_same_as(rows, "forwards")([as_numbers([("F", 0, 0), ("F", 2, 0)])])
    'forwards of rank 0: action 1 is 2F0, where 0F1 is right'
    """

    def judge(found: Sequence[Tensor]) -> str:
        for rank, (numbers, right) in enumerate(zip(found, rows, strict=True)):
            mine = as_row(numbers)
            if len(mine) != len(right):
                return f"{what} of rank {rank}: {len(mine)} actions, and {len(right)} are to be done"
            for at, (a, b) in enumerate(zip(mine, right, strict=True)):
                if a != b:
                    return f"{what} of rank {rank}: action {at} is {a}, where {b} is right"
        return ""

    return judge
