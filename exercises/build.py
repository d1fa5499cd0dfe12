"""Build the exercises: exercises/src/NN_name.py -> exercises/NN_name.ipynb, without solutions.

python exercises/build.py                      build all
python exercises/build.py --instructor FOLDER  write an nbgrader course there, with solutions
python exercises/build.py --check              build nothing; say what is wrong, and fail if anything is

A source holds both versions, in nbgrader's own marks. The student's is made by nbgrader's own steps, with the
settings of nbgrader_config.py, so it is what `nbgrader generate_assignment` would release.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import os
import re
import shutil
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbformat import NotebookNode
from nbgrader import preprocessors as nbgrader
from nbgrader.utils import determine_grade, is_grade, is_solution
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

PROJECT = Path(__file__).parents[1]
FOLDER = PROJECT / "exercises"
sys.path += [str(PROJECT / "notebooks")] * (str(PROJECT / "notebooks") not in sys.path)

from tooling.side_by_side import check_side_by_side  # noqa: E402
from tooling.source import has_tag, notebook_path, read, sources  # noqa: E402

from lessons_lib.grading.catalogue import EXERCISES  # noqa: E402

RELEASE = (  # the steps of nbgrader's GenerateAssignment, without its gradebook
    nbgrader.LockCells,
    nbgrader.ClearSolutions,
    nbgrader.ClearOutput,
    nbgrader.CheckCellMetadata,
    nbgrader.ComputeChecksums,
    nbgrader.ClearHiddenTests,
    nbgrader.ClearMarkScheme,
    nbgrader.ComputeChecksums,
    nbgrader.CheckCellMetadata,
)
BANNER = """\
<!-- BEGIN MARK SCHEME -->
> **Instructor's copy: it holds solutions and hidden checks. Do not hand it out.**

<!-- END MARK SCHEME -->
"""
PROMISE = "# {} hidden checks will run later."
MARKS = ("SOLUTION", "HIDDEN TESTS", "MARK SCHEME")
MAX_LINES = 20
QUIET = ["--IPKernelApp.log_level=ERROR"]
GRADED_LIMIT_S = 30  # nbgrader's own limit, on a busy machine; nbgrader_config.py allows more


# ---- two versions ----


def instructor(source: Path) -> NotebookNode:
    """Read ``source`` as the instructor's notebook: everything in it, and nbgrader's metadata complete."""
    notebook = read(source)
    graded = []
    for cell in notebook.cells:
        if "nbgrader" in cell.metadata:
            mark = cell.metadata["nbgrader"]
            grade = mark.get("grade", False)
            mark |= {"schema_version": 3, "task": False}
            mark |= {"grade": grade, "locked": grade, "solution": not grade}
            cell["id"] = mark["grade_id"]
            if grade and mark["grade_id"] in EXERCISES:
                mark["points"] = EXERCISES[mark["grade_id"]].points
                graded.append(mark["grade_id"])
    notebook.metadata["lessons"] = {
        "exercise": source.stem,
        "version": tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"],
        "functions": {id: EXERCISES[id].names for id in graded},
    }
    notebook.cells[0]["source"] = BANNER + notebook.cells[0].source
    return notebook


def student(notebook: NotebookNode) -> NotebookNode:
    """Return the student's version of an instructor's notebook."""
    result, settings = copy.deepcopy(notebook), nbgrader_settings()
    for step in RELEASE:
        result, _ = step(config=settings).preprocess(result, {})
    return result


def nbgrader_settings() -> Config:
    with patch.dict(os.environ):  # it sets a variable for the kernels that nbgrader starts
        return PyFileConfigLoader("nbgrader_config.py", str(FOLDER)).load_config()


def build(source: Path) -> None:
    nbformat.write(student(instructor(source)), notebook_path(source))
    print(f"{source.stem}: built")


def write_course(lessons: list[Path], folder: Path) -> None:
    """Lay out what nbgrader calls a course: source/NN_name/NN_name.ipynb, and its settings."""
    for source in lessons:
        path = folder / "source" / source.stem / f"{source.stem}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(instructor(source), path)
    shutil.copy(FOLDER / "nbgrader_config.py", folder)
    print(f"{len(lessons)} instructor's copies in {folder / 'source'}; how to go on: exercises/README.md")


# ---- what must hold ----


def check(source: Path) -> Iterator[str]:
    """Everything that is wrong with the exercises written in ``source``."""
    with_solutions = instructor(source)
    without = student(with_solutions)
    yield from wrong_as_written(with_solutions)
    yield from too_long(without)
    yield from wrong_as_saved(without, notebook_path(source))
    yield from leaks(with_solutions, without)
    yield from wrong_as_run(with_solutions, solved=True)
    yield from wrong_as_run(without, solved=False)


def wrong_as_written(notebook: NotebookNode) -> Iterator[str]:
    """Do the cells ask for what the grading engine checks?"""
    definitions = [
        node
        for cell in filter(is_solution, notebook.cells)
        for node in ast.parse(cell.source).body
        if isinstance(node, ast.FunctionDef)
    ]
    for cell in filter(is_grade, notebook.cells):
        if cell.id not in EXERCISES:
            yield f"cell {cell.id}: the grading engine has no exercise of this id"
            continue
        exercise = EXERCISES[cell.id]
        call = f'check("{cell.id}", {", ".join(exercise.names)}'
        n_hidden = sum(text.count(f"{call}, seed=") for text in regions([cell], "HIDDEN TESTS"))
        for text in (f"{call})", PROMISE.format(n_hidden)):
            if text not in cell.source:
                yield f"cell {cell.id}: does not say {text}"
        for function in exercise.functions:
            yield from wrong_definition(exercise.id, function, definitions)
        given = {ast.dump(plain(definition)) for definition in definitions}
        for function in exercise.broken:
            if ast.dump(plain(parsed(function))) not in given:
                yield f"{exercise.id}: no cell gives {function.__name__} to repair as the exercise has it"


def wrong_definition(id: str, asked: Any, definitions: list[ast.FunctionDef]) -> Iterator[str]:
    """Is the function of the notebook the one that the exercise asks for, in the same words?"""
    expected = plain(parsed(asked))
    found = [plain(node) for node in definitions if node.name == expected.name]
    if not found:
        yield f"{id} asks for {expected.name}, which no solution cell defines"
    for node in found:
        if ast.unparse(node.args) != ast.unparse(expected.args):
            yield f"{id} asks for {expected.name}({ast.unparse(expected.args)})"
    docstring = ast.get_docstring(expected)
    if found and docstring not in map(ast.get_docstring, found):
        yield f"{id}: {expected.name} has another docstring in the exercise: {docstring}"


def parsed(function: Any) -> ast.FunctionDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    return node


def plain(function: ast.FunctionDef) -> ast.FunctionDef:
    """The function without annotations, which a learner need not write, and its docstring on one line."""
    result = copy.deepcopy(function)
    result.returns = None
    for argument in result.args.args:
        argument.annotation = None
    if docstring := ast.get_docstring(result):
        result.body[0] = ast.Expr(ast.Constant(" ".join(docstring.split())))
    return result


def too_long(notebook: NotebookNode) -> Iterator[str]:
    for cell in notebook.cells:
        if cell.cell_type == "code" and len(cell.source.splitlines()) > MAX_LINES:
            yield f"cell {cell.id}: {len(cell.source.splitlines())} lines; a cell has at most {MAX_LINES}"


def wrong_as_saved(notebook: NotebookNode, path: Path) -> Iterator[str]:
    nbformat.validate(notebook)
    if not path.exists() or nbformat.read(path, as_version=nbformat.NO_CONVERT) != notebook:
        yield f"stale: {path.name} is not what its source says; run python exercises/build.py"


def leaks(with_solutions: NotebookNode, without: NotebookNode) -> Iterator[str]:
    """Is a line of a solution or of a hidden check left anywhere in the student's notebook?

    What the instructor's notebook shows outside these regions is no secret, nor is a line of one sign.
    """
    found = "\n".join(strings(without))
    for mark in MARKS:
        if f"BEGIN {mark}" in found or f"END {mark}" in found:
            yield f"leak: the mark {mark}"
        for text in regions(with_solutions.cells, mark):
            for line in map(str.strip, text.splitlines()):
                if len(line) > 1 and line in found and line not in shown(with_solutions):
                    yield f"leak: {line}"


def shown(notebook: NotebookNode) -> str:
    """The text of all cells outside of what is marked."""
    text = "\n".join(cell.source for cell in notebook.cells)
    for mark in MARKS:
        text = region(mark).sub("", text)
    return text


def regions(cells: list[NotebookNode], mark: str) -> Iterator[str]:
    for cell in cells:
        yield from region(mark).findall(cell.source)


def region(mark: str) -> re.Pattern[str]:
    return re.compile(rf"BEGIN {mark}[^\n]*\n(.*?)\n[^\n]*END {mark}", re.DOTALL)


def strings(value: Any) -> Iterator[str]:
    """Every string in a notebook, keys and metadata included."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def wrong_as_run(notebook: NotebookNode, solved: bool) -> Iterator[str]:
    """Does every graded cell give all its points, or, unsolved, none? Nothing else may raise."""
    for cell in autograde(notebook).cells:
        if is_grade(cell):
            points, of = determine_grade(cell)
            print(f"  {seconds(cell):4.1f} s  {points:g} of {of:g} points  {cell.id}", flush=True)
            if points != (of if solved else 0):
                yield f"{'solved' if solved else 'unsolved'}, {cell.id} gives {points:g} of {of:g} points"
            if seconds(cell) > GRADED_LIMIT_S:
                yield f"{cell.id} runs for {seconds(cell):.0f} s; a graded cell has {GRADED_LIMIT_S} s"
        may_raise = has_tag(cell, "raises-exception") and not solved
        for output in cell.get("outputs", []):
            if output.output_type == "error" and not may_raise:
                yield f"cell {cell.id} raised {output.ename}: {output.evalue}"


def autograde(notebook: NotebookNode) -> NotebookNode:
    """Execute every cell as nbgrader does, whatever earlier cells did, far from anybody's files."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, LESSONS_PROGRESS="off"):
        execute = nbgrader.Execute(config=nbgrader_settings(), extra_arguments=QUIET)
        result, _ = execute.preprocess(copy.deepcopy(notebook), {"metadata": {"path": folder}})
    return result


def seconds(cell: NotebookNode) -> float:
    start, end = (cell.metadata.execution[key] for key in ("iopub.execute_input", "shell.execute_reply"))
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


# ---- the command ----


def check_all(lessons: list[Path], folder: Path) -> int:
    built = {notebook_path(source) for source in sources(folder)}
    wrong = [f"{path.name}: has no source in src" for path in folder.glob("*.ipynb") if path not in built]
    graded = {cell.id for source in sources(folder) for cell in filter(is_grade, instructor(source).cells)}
    wrong += [f"{id}: no notebook has this exercise" for id in EXERCISES if id not in graded]
    wrong += check_side_by_side(check, lessons)
    for sentence in wrong:
        print(f"WRONG in {sentence}")
    print(f"{len(lessons)} exercises checked, {len(wrong)} problems")
    return int(bool(wrong))


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(description="Build the exercises from exercises/src.")
    parser.add_argument("lesson", nargs="*", help="first letters of a lesson's name; without any, all")
    parser.add_argument("--check", action="store_true", help="build nothing, say what is wrong")
    parser.add_argument("--instructor", type=Path, metavar="FOLDER", help="write an nbgrader course there")
    options = parser.parse_args(arguments)
    lessons = [path for path in sources(folder) if path.name.startswith(tuple(options.lesson or [""]))]
    if not lessons:
        parser.error(f"no source in {folder / 'src'} is called {' or '.join(options.lesson) or 'anything'}")
    if options.check:
        return check_all(lessons, folder)
    if options.instructor:
        write_course(lessons, options.instructor)
    else:
        for source in lessons:
            build(source)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
