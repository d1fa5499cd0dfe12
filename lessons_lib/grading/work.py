"""``python -m lessons_lib start 01`` and ``reset 01``: a copy of an exercise to work in.

Copies lie in ``my_work/``, which git ignores and no update touches. A copy is never overwritten: reset
keeps what there was under the date of the day.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

COURSE = Path(__file__).parents[2]


def start(arguments: Sequence[str], course: Path = COURSE) -> int:
    """Copy the exercise of a lesson to my_work/, if it is not there yet; return the exit status."""
    found = _exercise(arguments, course, "start")
    if found is None:
        return 2
    mine = course / "my_work" / found.name
    if mine.exists():
        print(f"{_shown(mine, course)} is there already, and stays as it is.")
        print(f"A new copy, with the old one kept: python -m lessons_lib reset {found.name[:2]}")
        return 0
    _copy(found, mine, course)
    return 0


def reset(arguments: Sequence[str], course: Path = COURSE) -> int:
    """Copy the exercise of a lesson anew, and keep the old copy under today's date."""
    found = _exercise(arguments, course, "reset")
    if found is None:
        return 2
    mine = course / "my_work" / found.name
    if mine.exists():
        kept = _unused(mine, time.strftime("%Y-%m-%d"))
        mine.rename(kept)
        print(f"What you had is kept as {_shown(kept, course)}.")
    _copy(found, mine, course)
    return 0


def _exercise(arguments: Sequence[str], course: Path, command: str) -> Path | None:
    """The notebook that the arguments name, or ``None`` after saying what there is."""
    every = sorted(path for path in (course / "exercises").glob("[0-9][0-9]_*.ipynb"))
    wanted = arguments[0].zfill(2) if len(arguments) == 1 else ""
    for path in every:
        if wanted == path.name[:2]:
            return path
    if not every:
        print(f"There are no exercises in {course / 'exercises'}: is this the whole course?", file=sys.stderr)
        return None
    asked = f"There is no exercise {' '.join(arguments)!r}. " if arguments else ""
    print(f"{asked}python -m lessons_lib {command} NN, where NN is one of", file=sys.stderr)
    for path in every:
        print(f"  {path.name[:2]}  {path.stem[3:].replace('_', ' ')}", file=sys.stderr)
    return None


def _copy(exercise: Path, mine: Path, course: Path) -> None:
    mine.parent.mkdir(exist_ok=True)
    shutil.copyfile(exercise, mine)
    print(f"Ready: open {_shown(mine, course)} in JupyterLab.")


def _unused(path: Path, date: str) -> Path:
    """A name for an old copy that nothing has yet."""
    kept = path.with_name(f"{path.stem}.{date}{path.suffix}")
    number = 2
    while kept.exists():
        kept = path.with_name(f"{path.stem}.{date}-{number}{path.suffix}")
        number += 1
    return kept


def _shown(path: Path, course: Path) -> str:
    return path.relative_to(course).as_posix()
