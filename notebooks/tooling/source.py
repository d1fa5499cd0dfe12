"""The cells of a lesson, read from its source in jupytext's py:percent format.

    # %% tags=["setup"]                    the first such cell comes before every section that is run alone
    # %% tags=["raises-exception"]         must raise
    # %% name="relay"                      the cell's id; without it, its place in its section
    # %% [markdown] minutes=3 core=true    anything else stays in the cell's metadata
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jupytext
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
}


def sources(folder: Path) -> list[Path]:
    """All lesson sources under ``folder``, in order."""
    return sorted((folder / "src").glob("*.py"))


def notebook_path(source: Path) -> Path:
    """The notebook that ``source`` becomes.

    >>> notebook_path(Path("notebooks/src/00_start_here.py")).as_posix()
    'notebooks/00_start_here.ipynb'
    """
    return source.parent.parent / f"{source.stem}.ipynb"


def read(source: Path) -> NotebookNode:
    """Read ``source`` as a notebook that has not run yet."""
    written = jupytext.read(source, fmt="py:percent").cells
    cells = []
    for cell, id in zip(written, cell_ids(written), strict=True):
        new_cell = new_code_cell if cell.cell_type == "code" else new_markdown_cell
        metadata = {key: value for key, value in cell.metadata.items() if not key.startswith("lines_to_")}
        cells.append(new_cell(cell.source, id=id, metadata=metadata))
    lesson = new_notebook(cells=cells, metadata=NOTEBOOK_METADATA)
    lesson.metadata["lessons"] = {"source_sha256": digest(cells)}
    return lesson


def cell_ids(cells: list[NotebookNode]) -> list[str]:
    """Give every cell an id that stays when other cells change.

    Ids follow from names or from places, never from what a cell says: editing one cell changes no id,
    adding one renumbers at most the cells of its kind that follow in the same section.
    """
    section, ids, count = "start", [], Counter[str]()
    for cell in cells:
        if is_heading(cell):
            section = re.sub(r"[^a-z0-9]+", "-", cell.source.splitlines()[0].lower()).strip("-")[:40]
        place = f"{section}-{'code' if cell.cell_type == 'code' else 'text'}"
        count[place] += 1
        ids.append(cell.metadata.get("name", f"{place}-{count[place]}"))
    for id, times in Counter(ids).items():
        if times > 1:
            raise ValueError(f"{times} cells are called {id!r}: give each its own name")
    return ids


def is_heading(cell: NotebookNode) -> bool:
    """Whether ``cell`` begins a section."""
    return bool(cell.cell_type == "markdown" and cell.source.startswith("## "))


def has_tag(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def sections(cells: list[NotebookNode]) -> Iterator[tuple[str, list[NotebookNode]]]:
    """Yield (heading, code cells) of every section that has code; what comes first is 'the beginning'."""
    heading = "the beginning"
    code: list[NotebookNode] = []
    for cell in cells:
        if is_heading(cell):
            if code:
                yield heading, code
            heading, code = cell.source.splitlines()[0].removeprefix("## "), []
        elif cell.cell_type == "code":
            code.append(cell)
    if code:
        yield heading, code


def essence(cell: NotebookNode) -> tuple[str, str, str, dict]:
    """What of a cell was written, as against what its execution left."""
    return cell.id, cell.cell_type, cell.source, dict(cell.metadata)


def digest(cells: list[NotebookNode]) -> str:
    """A hash of everything written. A saved notebook keeps that of the source its outputs came from."""
    written = json.dumps([essence(cell) for cell in cells], sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()
