"""Help in steps: ``hint`` goes one further with every call, ``reveal`` shows how the library does it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from lessons_lib.grading.catalogue import find

_given: dict[str, int] = {}  # hints given so far, by exercise
_COURSE = Path(__file__).parents[2]


class Hint(str):
    """A hint, which a notebook shows as text."""

    def __repr__(self) -> str:
        return str(self)


def hint(id: str) -> Hint:
    """Give the next of the three hints of exercise ``id``; after the last one, they begin anew.

    >>> hint("08-row")
    Hint 1 of 3: An output needs all inputs, and a rank has some of them. What does x @ w give it?
    """
    exercise = find(id)
    step = _given.get(id, 0) % len(exercise.hints)
    _given[id] = step + 1
    more = "" if step + 1 < len(exercise.hints) else f'\nThat was the last. reveal("{id}") shows a solution.'
    return Hint(f"Hint {step + 1} of {len(exercise.hints)}: {exercise.hints[step]}{more}")


def reveal(id: str) -> None:
    """Print how the library does what exercise ``id`` asks for; where it has nothing, a solution.

    >>> reveal("08-mlp")  # doctest: +ELLIPSIS
    # A solution
    <BLANKLINE>
    def mlp(x: Tensor, w1: Tensor, w2: Tensor, tp: Group) -> Tensor:
    ...
    """
    exercise = find(id)
    if exercise.shown:
        for thing in exercise.shown:
            _print(f"# {_where(thing)}", thing)
    else:
        for function in exercise.functions:
            _print("# A solution", function)


def _print(heading: str, thing: Any) -> None:
    source = inspect.getsource(thing)
    print(f"{heading}\n\n{inspect.cleandoc(' ' + source) if source[:1] == ' ' else source}")


def _where(thing: Any) -> str:
    file = Path(inspect.getfile(thing)).resolve()
    _, line = inspect.getsourcelines(thing)
    shown = file.relative_to(_COURSE).as_posix() if file.is_relative_to(_COURSE) else file.name
    return f"{shown}, line {line}"
