"""Cells of a notebook, executed one after the other in one kernel, and what they printed or raised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent


def executed(sources: Mapping[str, str]) -> dict[str, Any]:
    """Execute cells; return them with their outputs, by name."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources.values()])
    client = NotebookClient(
        book,
        timeout=60,
        kernel_name="python3",
        allow_errors=True,
        coalesce_streams=True,
        resources={"metadata": {"path": str(ROOT)}},
    )
    client.execute()
    return dict(zip(sources, book.cells, strict=True))


def printed(cell: Any, name: str = "stdout") -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == name)


def failed(cell: Any) -> str:
    (error,) = (out for out in cell.outputs if out.output_type == "error")
    return "\n".join(error.traceback)
