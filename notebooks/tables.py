"""Make the tables of README.md and TEACHING.md from the course's own data, and name what is an orphan in it.

python notebooks/tables.py           write the tables
python notebooks/tables.py --check   write nothing; say what is wrong, and fail if anything is

Minutes, core and more come from the cells of notebooks/src and exercises/src, lessons, tests and paths from
lessons_lib/grading/course.toml, what is asked and why from the exercises of lessons_lib/grading.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from nbformat import NotebookNode
from tooling.source import read

from lessons_lib.grading.catalogue import EXERCISES
from lessons_lib.grading.course import Course, Lesson, course
from lessons_lib.grading.questions import QUESTIONS

PROJECT = Path(__file__).parents[1]
KINDS = ("notebooks", "exercises")
CORE_LIMIT, LIMIT = 55, 90  # minutes, with the exercise


@dataclass(frozen=True)
class Material:
    """The sources of a lesson and of its exercises."""

    lesson: Lesson
    project: Path

    @cached_property
    def cells(self) -> dict[str, list[NotebookNode]]:
        paths = {kind: self.project / kind / "src" / f"{self.lesson.file}.py" for kind in KINDS}
        return {kind: cells_of(path, path.read_text()) for kind, path in paths.items() if path.is_file()}

    def minutes(self, part: str) -> int:
        """The minutes of all cells that are ``part``, core or more."""
        return sum(cell.metadata.get("minutes", 0) for cell in self.all_cells if cell.metadata.get(part))

    @property
    def all_cells(self) -> list[NotebookNode]:
        return [cell for cells in self.cells.values() for cell in cells]

    @property
    def checks(self) -> list[str]:
        """The ids of the graded cells."""
        marks = [cell.metadata.get("nbgrader", {}) for cell in self.cells.get("exercises", [])]
        return [mark["grade_id"] for mark in marks if mark.get("grade")]


@cache
def cells_of(source: Path, text: str) -> list[NotebookNode]:
    """The cells of ``source``, which says ``text``: read once, as long as it says the same."""
    return list(read(source).cells)


def materials(data: Course, project: Path) -> dict[str, Material]:
    """What there is of every lesson that is written, by its number."""
    return {number: Material(lesson, project) for number, lesson in data.lessons.items() if lesson.file}


# ---- tables ----


def lessons_table(data: Course, project: Path) -> str:
    rows = ["| | lesson | core | with more | you see |", "|---|---|---|---|---|"]
    for number, material in materials(data, project).items():
        lesson, core = material.lesson, material.minutes("core")
        links = f"[{lesson.title}](notebooks/{lesson.file}.ipynb)"
        if "exercises" in material.cells:
            links += f", [exercise](exercises/{lesson.file}.ipynb)"
        rows.append(f"| {number} | {links} | {core} | {core + material.minutes('more')} | {lesson.you_see} |")
    to_come = [f"{lesson.number} {lesson.title}" for lesson in data.lessons.values() if not lesson.file]
    return "\n".join(rows) + f"\n\nTo come: {', '.join(to_come)}."


def paths_table(data: Course, project: Path) -> str:
    written = materials(data, project)
    rows = ["| path | sitting | lessons | minutes |", "|---|---|---|---|"]
    for title, sittings in data.paths.items():
        for n, sitting in enumerate(sittings, 1):
            names = [f"{number} {data.lessons[number].title}" for number in sitting]
            names = [name if name[:2] in written else f"*{name}*" for name in names]
            minutes = sum(written[number].minutes("core") for number in sitting if number in written)
            path = f"**{title}**" if n == 1 else ""
            rows.append(f"| {path} | {n} | {', '.join(names)} | {minutes or ''} |")
    return "\n".join(rows)


def objectives_table(data: Course, project: Path) -> str:
    rows = ["| | after it you can | exercise | recaps | tests |", "|---|---|---|---|---|"]
    for number, material in materials(data, project).items():
        if material.lesson.recaps:
            rows.append(f"| {number} | say what the lesson shows | | {in_code(material.lesson.recaps)} | |")
        for each in material.lesson.objectives:
            exercise, file = EXERCISES[each.check], material.lesson.file
            points = f"[{exercise.title}](exercises/{file}.ipynb), {exercise.points:g} points"
            can = exercise.objective[0].lower() + exercise.objective[1:].rstrip(".")
            recaps, tests = in_code(each.recaps), in_code(each.tests)
            rows.append(f"| `{each.check}` | {can} | {points} | {recaps} | {tests} |")
    return "\n".join(rows)


def in_code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


TABLES = {
    "README.md": {"lessons": lessons_table},
    "TEACHING.md": {"paths": paths_table, "objectives": objectives_table},
}


def with_tables(text: str, page: str, data: Course, project: Path = PROJECT) -> str:
    """``text`` with every table of ``page`` between its markers made anew."""
    for name, table in TABLES[page].items():
        begin, end = f"<!-- {name}: made by notebooks/tables.py -->", f"<!-- {name}: end -->"
        if [text.count(begin), text.count(end)] != [1, 1]:
            raise ValueError(f"{page} needs one place for a table, between {begin} and {end}")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n{table(data, project)}\n{end}{after}"
    return text


# ---- what must hold ----


def wrong(data: Course, project: Path = PROJECT) -> Iterator[str]:
    """Everything in the course's data that has lost its other half."""
    written = materials(data, project)
    yield from wrong_files(data, project)
    for number, material in written.items():
        yield from wrong_minutes(material)
        for recap in material.lesson.all_recaps:
            if recap not in QUESTIONS or recap[:2] != number:
                yield f"recap {recap} of lesson {number} is no question of this lesson"
        promised, graded = {each.check for each in material.lesson.objectives}, set(material.checks)
        for id in sorted(promised - graded):
            yield f"objective {id} of lesson {number} has no exercise: no graded cell has this id"
        for id in sorted(graded - promised):
            yield f"exercise {id} of lesson {number} has no objective in course.toml"
    for id in sorted(set(data.objectives) - set(EXERCISES)):
        yield f"objective {id}: the grading engine has no check of this id"
    for id in sorted(set(EXERCISES) - set(data.objectives)):
        yield f"the grading engine has {id}, and course.toml no objective for it"
    asked = Counter(recap for lesson in data.lessons.values() for recap in lesson.all_recaps)
    for recap in QUESTIONS:
        if asked[recap] != 1:
            yield f"recap {recap} has {asked[recap]} places in course.toml, and not one"
    for objective in data.objectives.values():
        for test in objective.tests or ["(none)"]:
            if not is_test(test, project / "tests"):
                yield f"objective {objective.check}: there is no test {test}"
    on_a_path = {number for sittings in data.paths.values() for sitting in sittings for number in sitting}
    for number in sorted(on_a_path ^ set(data.lessons)):
        yield f"lesson {number} is on no path, or on a path and not in the course"


def wrong_files(data: Course, project: Path) -> Iterator[str]:
    known = {lesson.file for lesson in data.lessons.values() if lesson.file}
    found = {kind: {path.stem for path in (project / kind / "src").glob("*.py")} for kind in KINDS}
    for kind in KINDS:
        for file in sorted(found[kind] - known):
            yield f"{kind}/src/{file}.py belongs to no lesson in course.toml"
    for file in sorted(known - found["notebooks"]):
        yield f"notebooks/src/{file}.py does not exist, and course.toml has its lesson"


def wrong_minutes(material: Material) -> Iterator[str]:
    core, more = material.minutes("core"), material.minutes("more")
    if core > CORE_LIMIT or core + more > LIMIT:
        yield (
            f"lesson {material.lesson.number} takes {core} core minutes, {core + more} in all, "
            f"with its exercise; at most {CORE_LIMIT} and {LIMIT}"
        )
    for cell in material.all_cells:
        metadata = cell.metadata
        if "minutes" in metadata and bool(metadata.get("core")) == bool(metadata.get("more")):
            yield f"lesson {material.lesson.number}: the minutes of cell {cell.id} are neither core nor more"


def is_test(name: str, folder: Path) -> bool:
    file, _, function = name.partition("::")
    if not (folder / file).is_file():
        return False
    tests = tests_in((folder / file).read_text(encoding="utf-8"))
    return function in tests if function else bool(tests)


@cache
def tests_in(text: str) -> frozenset[str]:
    """The names of the tests in a file that says ``text``: parsed once, as long as it says the same."""
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test"))


def main(arguments: list[str], data: Course | None = None, project: Path = PROJECT) -> int:
    data = data or course()
    problems = list(wrong(data, project))
    for page in TABLES:
        text = (project / page).read_text(encoding="utf-8")
        made = with_tables(text, page, data, project)
        if made != text and arguments == ["--check"]:
            problems.append(f"stale: the tables of {page}; run python notebooks/tables.py")
        elif made != text:
            (project / page).write_text(made, encoding="utf-8")
            print(f"{page}: tables made")
    for problem in problems:
        print(f"WRONG: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
