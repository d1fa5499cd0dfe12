"""What `make check` asks of every lesson.

Each function yields sentences that name the notebook's cell; no sentence means that all is well.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from statistics import median

import nbformat
from nbformat import NotebookNode

from tooling.execute import CellFailedError, execute
from tooling.saved import WIDGET, clean
from tooling.source import digest, essence, has_tag, notebook_path, read, sections

LESSON_LIMIT_S = 60
MAX_LINES, MEDIAN_LINES = 20, 6
CELLS_PER_PICTURE = 6


def check(source: Path) -> Iterator[str]:
    """Everything that is wrong with the lesson written in ``source``."""
    lesson, folder = read(source), notebook_path(source).parent
    yield from wrong_as_written(lesson)
    yield from wrong_as_saved(lesson, notebook_path(source))
    yield from wrong_as_run(lesson, folder)
    yield from wrong_alone(lesson, folder)


def wrong_as_written(lesson: NotebookNode) -> Iterator[str]:
    code = [cell for cell in lesson.cells if cell.cell_type == "code"]
    lengths = [len(cell.source.splitlines()) for cell in code]
    for cell, length in zip(code, lengths, strict=True):
        if length > MAX_LINES:
            yield f"cell {cell.id}: {length} lines; a cell has at most {MAX_LINES}"
    if lengths and median(lengths) > MEDIAN_LINES:
        yield f"the median of its code cells is {median(lengths):g} lines; at most {MEDIAN_LINES}"
    if not any(has_tag(cell, "setup") for cell in code):
        yield 'no code cell is tagged as the setup cell: # %% tags=["setup"]'
    for heading, cells in alone(lesson):
        if missing := names_missing("\n".join(cell.source for cell in cells)):
            yield f'section "{heading}" alone after the setup cell: has no {", ".join(missing)}'


def wrong_as_saved(lesson: NotebookNode, path: Path) -> Iterator[str]:
    """Is the notebook at ``path`` what building ``lesson`` would save?"""
    if not path.exists():
        yield f"stale: {path.name} does not exist; run make notebooks"
        return
    saved = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(saved)
    if changed := changed_cells(lesson, saved):
        yield f"stale: cell {changed[0]} is not what the source says; run make notebooks"
    elif is_stale(lesson, path):
        yield "stale: its outputs come from another version of the source; run make notebooks"
    if "widgets" in saved.metadata:
        yield "widget state is saved in metadata.widgets; run make notebooks"
    for before, after in zip(saved.cells, clean(saved).cells, strict=True):
        if any(WIDGET in output.get("data", {}) for output in before.get("outputs", [])):
            yield f"cell {before.id}: a live widget is saved; run make notebooks"
        elif before != after:
            yield f"cell {before.id}: holds traces of a machine, or an SVG without a PNG; run make notebooks"
        elif before.cell_type == "code" and before.execution_count is None:
            yield f"cell {before.id}: was not executed; run make notebooks"


def is_stale(lesson: NotebookNode, path: Path) -> bool:
    """Whether the notebook at ``path`` was made from anything else than ``lesson``."""
    if not path.exists():
        return True
    saved = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    made_from = saved.metadata.get("lessons", {}).get("source_sha256")
    return made_from != digest(lesson.cells) or bool(changed_cells(lesson, saved))


def changed_cells(lesson: NotebookNode, saved: NotebookNode) -> list[str]:
    """The ids of cells that differ between what is written and what is saved."""
    return [
        (written or found).id
        for written, found in zip_longest(lesson.cells, saved.cells)
        if written is None or found is None or essence(written) != essence(found)
    ]


def wrong_as_run(lesson: NotebookNode, folder: Path) -> Iterator[str]:
    """Does the lesson run from top to bottom, in time?"""
    cells = code_cells(lesson.cells)
    start = time.perf_counter()
    try:
        execute(cells, folder)
    except CellFailedError as error:
        yield str(error)
    else:
        seconds = time.perf_counter() - start
        print(f"  {seconds:.1f} s from top to bottom")
        if seconds > LESSON_LIMIT_S:
            yield f"runs for {seconds:.0f} s; a lesson has {LESSON_LIMIT_S} s"
        for cell in few_pictures(cells):
            print(f"  warning: no picture in the {CELLS_PER_PICTURE} code cells before cell {cell.id}")


def few_pictures(cells: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Yield the cells that come when readers have waited too long for a picture."""
    since = 0
    for cell in cells:
        if since == CELLS_PER_PICTURE:
            yield cell
        kinds = [mime for output in cell.outputs for mime in output.get("data", {})]
        since = 0 if any(kind.startswith("image/") for kind in kinds) else since + 1


def wrong_alone(lesson: NotebookNode, folder: Path) -> Iterator[str]:
    """Does every section run with nothing but the setup cell before it? Who fell behind joins there."""
    for heading, cells in alone(lesson):
        start = time.perf_counter()
        try:
            execute(code_cells(cells), folder)
        except CellFailedError as error:
            yield f'section "{heading}" alone after the setup cell: {error}'
        else:
            print(f"  {time.perf_counter() - start:.1f} s {heading}, alone")


def alone(lesson: NotebookNode) -> Iterator[tuple[str, list[NotebookNode]]]:
    """Yield (heading, code cells) of every section, the setup cell first."""
    setup = next((cell for cell in lesson.cells if has_tag(cell, "setup")), None)
    for heading, code in sections(lesson.cells):
        if cells := [cell for cell in code if cell is not setup]:
            yield heading, [setup, *cells] if setup else cells


def names_missing(code: str) -> list[str]:
    """The names that ``code`` uses and nothing in it defines.

    >>> names_missing("x = 1\\nprint(x + y)")
    ['y']
    """
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=json", "-"]
    found = subprocess.run(ruff, input=code, capture_output=True, text=True).stdout
    return sorted({finding["message"].split("`")[1] for finding in json.loads(found)})


def code_cells(cells: list[NotebookNode]) -> list[NotebookNode]:
    return [copy.deepcopy(cell) for cell in cells if cell.cell_type == "code"]
