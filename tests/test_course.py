"""The course's own data: nothing in it has lost its other half, and the pages' tables are made from it."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tables import TABLES, main, with_tables, wrong

from lessons_lib.grading.course import Course, Lesson, Objective, course

ROOT = Path(__file__).parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of all that the tables are made from."""
    for kind in ("notebooks", "exercises"):
        shutil.copytree(ROOT / kind / "src", tmp_path / kind / "src")
    (tmp_path / "tests").mkdir()
    for test in (ROOT / "tests").glob("test_*.py"):
        shutil.copy(test, tmp_path / "tests")
    for page in TABLES:
        shutil.copy(ROOT / page, tmp_path)
    return tmp_path


def with_lesson(data: Course, **changes: object) -> Course:
    """``data`` with a changed lesson 01."""
    return replace(data, lessons=data.lessons | {"01": replace(data.lessons["01"], **changes)})


def with_objective(data: Course, n: int, **changes: object) -> Course:
    objectives = list(data.lessons["01"].objectives)
    objectives[n] = replace(objectives[n], **changes)
    return with_lesson(data, objectives=tuple(objectives))


def test_the_course_has_no_orphan_and_its_tables_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "change, complaint",
    [
        (
            lambda data: with_lesson(data, objectives=data.lessons["01"].objectives[1:]),
            "exercise 01-reduce-scatter of lesson 01 has no objective in course.toml",
        ),
        (
            lambda data: with_lesson(data, objectives=data.lessons["01"].objectives[1:]),
            "the grading engine has 01-reduce-scatter, and course.toml no objective for it",
        ),
        (
            lambda data: with_objective(data, 0, check="01-scan"),
            "objective 01-scan of lesson 01 has no exercise: no graded cell has this id",
        ),
        (
            lambda data: with_objective(data, 0, check="01-scan"),
            "objective 01-scan: the grading engine has no check of this id",
        ),
        (
            lambda data: with_objective(data, 0, tests=("test_rings.py::test_nothing",)),
            "objective 01-reduce-scatter: there is no test test_rings.py::test_nothing",
        ),
        (
            lambda data: with_objective(data, 0, tests=("test_nowhere.py",)),
            "objective 01-reduce-scatter: there is no test test_nowhere.py",
        ),
        (
            lambda data: with_objective(data, 0, tests=()),
            "objective 01-reduce-scatter: there is no test (none)",
        ),
        (
            lambda data: with_objective(data, 0, recaps=("01-nothing",)),
            "recap 01-nothing of lesson 01 is no question of this lesson",
        ),
        (
            lambda data: with_objective(data, 0, recaps=("02-who-waits",)),
            "recap 02-who-waits of lesson 01 is no question of this lesson",
        ),
        (
            lambda data: with_objective(data, 0, recaps=()),
            "recap 01-reduce-scatter-bytes has 0 places in course.toml, and not one",
        ),
        (
            lambda data: with_lesson(data, recaps=("01-tree-rounds",)),
            "recap 01-tree-rounds has 2 places in course.toml, and not one",
        ),
        (
            lambda data: with_lesson(data, file="01_other"),
            "notebooks/src/01_collectives.py belongs to no lesson in course.toml",
        ),
        (
            lambda data: with_lesson(data, file="01_other"),
            "notebooks/src/01_other.py does not exist, and course.toml has its lesson",
        ),
        (
            lambda data: replace(data, lessons=data.lessons | {"23": Lesson("23", "One more")}),
            "lesson 23 is on no path, or on a path and not in the course",
        ),
        (
            lambda data: replace(data, paths=data.paths | {"A minute": [["33"]]}),
            "lesson 33 is on no path, or on a path and not in the course",
        ),
    ],
)
def test_an_orphan_is_named(change: Callable[[Course], Course], complaint: str) -> None:
    assert complaint in list(wrong(change(course())))


@pytest.mark.parametrize(
    "kind, before, after, complaint",
    [
        (
            "exercises",
            "minutes=4 core=true",
            "minutes=60 core=true",
            r"lesson 01 takes \d{3} core minutes, \d{3} in all, with its exercise; at most 55 and 90",
        ),
        (
            "exercises",
            "minutes=6 more=true",
            "minutes=60 more=true",
            r"lesson 01 takes \d\d core minutes, \d{3} in all, with its exercise; at most 55 and 90",
        ),
        (
            "notebooks",
            "minutes=1 core=true\n# # Collectives",
            "minutes=1\n# # Collectives",
            "lesson 01: the minutes of cell start-text-1 are neither core nor more",
        ),
    ],
)
def test_too_many_minutes_are_named(
    project: Path, kind: str, before: str, after: str, complaint: str
) -> None:
    source = project / kind / "src" / "01_collectives.py"
    sound, text = set(wrong(course(), project)), source.read_text()
    assert before in text
    source.write_text(text.replace(before, after, 1))
    (sentence,) = set(wrong(course(), project)) - sound
    assert re.fullmatch(complaint, sentence)


def test_a_stale_table_is_named_and_made_anew(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    renamed = with_lesson(course(), title="Rings")
    assert main(["--check"], renamed, project) == 1
    said = capsys.readouterr().out
    for page in TABLES:
        assert f"WRONG: stale: the tables of {page}; run python notebooks/tables.py" in said
    main([], renamed, project)
    assert "README.md: tables made" in capsys.readouterr().out
    assert "[Rings](notebooks/01_collectives.ipynb)" in (project / "README.md").read_text()
    main(["--check"], renamed, project)
    assert "stale" not in capsys.readouterr().out


def test_a_page_without_a_place_for_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README.md needs one place for a table, between <!-- lessons: "):
        with_tables("# A page", "README.md", course())


def test_the_data_is_read_as_it_is_written() -> None:
    data = course()
    assert [lesson.number for lesson in data.lessons.values()] == [f"{n:02}" for n in range(23)]
    assert data.objectives["00-relay"] in data.lessons["00"].objectives
    assert isinstance(data.objectives["00-relay"], Objective)
    for name, sittings in data.paths.items():
        order = [number for sitting in sittings for number in sitting]
        assert order == sorted(order), name


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"] and citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "Shards & Bubbles contributors"}]
    assert {"title", "message", "type", "abstract", "license"} <= set(citation)
