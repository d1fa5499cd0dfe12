"""Every lesson, seen as a reader sees it: run in a real JupyterLab, without an error anywhere."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from tooling.source import NOTEBOOK_METADATA

from tests.browser.run_notebook import Report, find_chromium, run_notebook

PROJECT = Path(__file__).parents[2]
LESSONS = sorted((PROJECT / "notebooks").glob("*.ipynb"))
SCREENSHOTS = PROJECT / "screenshots"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium: install it, or name it in $CHROMIUM"),
]


def run(notebook: Path, out: Path) -> Report:
    chromium = find_chromium()
    assert chromium is not None
    return run_notebook(notebook, out, chromium)


@pytest.mark.parametrize("notebook", LESSONS, ids=lambda path: path.stem)
def test_lesson_runs_in_a_browser(notebook: Path) -> None:
    report = run(notebook, SCREENSHOTS / notebook.stem)
    assert report.problems == []
    assert all(path.stat().st_size > 0 for path in report.screenshots)


def test_a_lesson_with_faults_is_seen(tmp_path: Path) -> None:
    must_raise = {"tags": ["raises-exception"]}
    cells = [
        new_code_cell("from IPython.display import HTML, Javascript"),
        new_code_cell("1 / 0", metadata=must_raise),
        new_code_cell("2", metadata=must_raise),
        new_code_cell("Javascript('console.error(\"oh\")')"),
        new_code_cell("HTML('<p style=\"width: 3000px\">wide')"),
        new_code_cell("3 / 0"),
        new_code_cell("4"),
    ]
    nbformat.write(new_notebook(cells=cells, metadata=NOTEBOOK_METADATA), tmp_path / "faults.ipynb")
    report = run(tmp_path / "faults.ipynb", tmp_path / "pictures")
    assert report.problems == [
        "the console says: oh",
        "cell 2 is tagged raises-exception and did not raise",
        "cell 5 raised ZeroDivisionError: division by zero",
        "cell 6 did not run",
    ]
    assert report.wide == ["cell 4 at 1200 px", "cell 4 at 900 px"]
    assert len(report.screenshots) == 3 * (1 + len(cells))
