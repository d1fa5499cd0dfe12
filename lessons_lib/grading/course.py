"""The course's own data, read from course.toml: lessons, what each is for, and paths through them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("course.toml")


@dataclass(frozen=True)
class Objective:
    """Something to be learnt, named by the check that proves it."""

    check: str
    tests: tuple[str, ...]  # files in tests/, or FILE::TEST
    recaps: tuple[str, ...] = ()  # questions that ask for it again in later lessons


@dataclass(frozen=True)
class Lesson:
    """``file`` is its name in notebooks/src and, if it has one, exercises/src; without one it is to come.

    ``recaps`` are questions about what it shows and no exercise of it asks for.
    """

    number: str
    title: str
    file: str = ""
    you_see: str = ""
    recaps: tuple[str, ...] = ()
    objectives: tuple[Objective, ...] = ()

    @property
    def all_recaps(self) -> list[str]:
        return [*self.recaps, *(recap for objective in self.objectives for recap in objective.recaps)]


@dataclass(frozen=True)
class Course:
    """``lessons`` by number; ``paths``, by name, are sittings, each a list of lessons' numbers."""

    lessons: dict[str, Lesson]
    paths: dict[str, list[list[str]]]

    @property
    def objectives(self) -> dict[str, Objective]:
        """All objectives, by the check that proves them."""
        return {each.check: each for lesson in self.lessons.values() for each in lesson.objectives}


@cache
def course(file: Path = FILE) -> Course:
    """Read the course.

    >>> course().lessons["01"].title, course().objectives["01-all-gather"].tests[-1]
    ('Collectives', 'test_rings.py')
    """
    written = tomllib.loads(file.read_text(encoding="utf-8"))
    lessons = [_lesson(**entry) for entry in written["lesson"]]
    return Course(
        lessons={lesson.number: lesson for lesson in lessons},
        paths={path["title"]: path["sittings"] for path in written["path"]},
    )


def _lesson(*, objective: tuple[dict[str, Any], ...] = (), **entry: Any) -> Lesson:
    objectives = [Objective(**_with_tuples(each)) for each in objective]
    return Lesson(**_with_tuples(entry), objectives=tuple(objectives))


def _with_tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
