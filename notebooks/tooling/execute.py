"""The cells of a lesson, run in a fresh kernel."""

from __future__ import annotations

from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_notebook

from tooling.source import NOTEBOOK_METADATA, has_tag

CELL_TIMEOUT_S = 60


class CellFailedError(Exception):
    """A cell did not do what it must."""

    def __init__(self, cell: NotebookNode, what: str) -> None:
        super().__init__(f"cell {cell.id}: {what}\n{indented(cell.source)}")


def execute(cells: list[NotebookNode], folder: Path, timeout_s: int = CELL_TIMEOUT_S) -> None:
    """Run ``cells`` in order, in one fresh kernel that works in ``folder``; they keep their outputs.

    Raises CellFailedError at the first cell that fails, lasts longer than ``timeout_s``, or is tagged
    raises-exception and does not raise.
    """
    client = NotebookClient(
        new_notebook(cells=cells, metadata=NOTEBOOK_METADATA),
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        timeout=timeout_s,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    with client.setup_kernel():
        for index, cell in enumerate(cells):
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                raise CellFailedError(cell, f"raised {error.ename}: {error.evalue}") from None
            except CellTimeoutError:
                raise CellFailedError(cell, f"was not done after {timeout_s} s") from None
            except DeadKernelError:
                raise CellFailedError(cell, "ended its kernel") from None
            if has_tag(cell, "raises-exception") and not raised(cell):
                raise CellFailedError(cell, "is tagged raises-exception, and did not raise")


def raised(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def indented(source: str) -> str:
    return "\n".join(f"    {line}" for line in source.splitlines())
