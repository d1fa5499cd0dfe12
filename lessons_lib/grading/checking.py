"""``check("08-column", column_forward, column_backward)``: is it right, and what is missing?"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lessons_lib.errors import RefusedError
from lessons_lib.grading import catalogue, records, sandbox
from lessons_lib.grading.exercise import Draw, Exercise
from lessons_lib.grading.judge import details, judge
from lessons_lib.grading.report import Report

LARGEST_SEED = 10**6


def check(
    id: str, *functions: Callable[..., Any], seed: int | None = None, **by_name: Callable[..., Any]
) -> Report:
    """Check a solution of exercise ``id`` against the serial program, on all ranks.

        check("08-column", column_forward, column_backward)

    The functions come in the order in which the exercise names them, or by name. They run in a child
    process, on ranks that take turns in drawn orders and whose sends wait for their receives; sizes, values
    and upstream gradients are drawn anew in every check, or from ``seed``. The report shows itself as a
    table: ``.passed``, ``.points`` of ``.possible``, ``.lines``.

    A wrong solution is reported, never raised. Raises RefusedError for an id that does not exist, or if the
    exercise asks for other functions.
    """
    exercise = catalogue.find(id)
    named = _named(exercise, functions, by_name)
    seed = secrets.randbelow(LARGEST_SEED) if seed is None else seed
    began = time.perf_counter()
    draw = Draw(seed)
    with _one_thread():
        trials = exercise.trials(draw)
    turns = [draw.between(0, LARGEST_SEED) for _ in trials]
    try:
        outcome = sandbox.run_in_child(named, trials, turns)
    except RefusedError as refusal:  # it cannot travel to another process
        outcome = sandbox.Outcome(ended=str(refusal))
    with _one_thread():
        lines = tuple(judge(exercise, trials, outcome))
    report = Report(
        exercise.id,
        exercise.title,
        lines,
        seed,
        time.perf_counter() - began,
        details(exercise, trials, outcome),
        _printed(outcome),
    )
    records.note_check(report)
    return report


def _named(
    exercise: Exercise, functions: tuple[Any, ...], by_name: dict[str, Any]
) -> dict[str, Callable[..., Any]]:
    """The functions by the names that the exercise gives them."""
    names = exercise.names
    wanted = f'check("{exercise.id}", {", ".join(names)})'
    given = dict(zip(names, functions, strict=False)) | by_name
    twice = [name for name in names[: len(functions)] if name in by_name]
    unknown = [name for name in by_name if name not in names]
    if len(functions) > len(names) or len(given) != len(names) or twice or unknown:
        count = len(functions) + len(by_name)
        strange = f"; it knows no {', '.join(unknown)}" if unknown else ""
        raise RefusedError(
            f"{exercise.id} asks for {len(names)} function{'s'[: len(names) > 1]} "
            f"({', '.join(names)}) and was given {count}{strange}. Try {wanted}."
        )
    for name in names:
        if not callable(given[name]):
            raise RefusedError(
                f"{exercise.id} needs the function {name} itself and got {given[name]!r}: "
                f"give it without calling it. Try {wanted}."
            )
    return {name: given[name] for name in names}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small tensors: a team of threads costs more than it helps, and much more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _printed(outcome: sandbox.Outcome) -> str:
    more = outcome.n_printed - len(outcome.printed)
    return outcome.printed + (f"\n... and {more:,} more characters" if more > 0 else "")
