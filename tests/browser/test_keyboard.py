"""One whole lesson without a mouse: run, guess, move a slider, change a cell."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.run_notebook import (
    CHROMIUM_FLAGS,
    Report,
    cells_now,
    find_chromium,
    has_run,
    jupyterlab,
    wait_until_idle,
    wrong_cells,
)

LESSON = Path(__file__).parents[2] / "notebooks" / "00_start_here.ipynb"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium: install it, or name it in $CHROMIUM"),
]


def go_to(page: Page, ids: list[str], id: str) -> None:
    """Make a cell the active one, in command mode."""
    page.keyboard.press("Escape")
    trail = []
    for _ in range(len(ids)):
        at = page.evaluate("jupyterapp.shell.currentWidget.content.activeCellIndex")
        if at == ids.index(id):
            return
        trail.append(at)
        page.keyboard.press("ArrowUp" if at > ids.index(id) else "ArrowDown")
    raise AssertionError(f"the arrow keys do not lead to {id}, cell {ids.index(id)}, but to {trail}")


def tab_to(page: Page, what: str, most: int = 60) -> None:
    """Press Tab until the focus is on an element whose words (name or text) match."""
    for _ in range(most):
        page.keyboard.press("Tab")
        here = page.evaluate(
            "(e => `${e.getAttribute('role') ?? e.tagName.toLowerCase()} "
            "${e.getAttribute('aria-label') ?? e.textContent.slice(0, 40)}`)(document.activeElement)"
        )
        if re.fullmatch(what, here.strip()):
            return
    raise AssertionError(f"{most} times Tab do not lead to {what}; the last was {here}")


def test_a_whole_lesson_by_keyboard() -> None:
    report, chromium = Report(), find_chromium()
    with (
        tempfile.TemporaryDirectory() as folder,
        jupyterlab(Path(folder), LESSON) as url,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS) as browser,
    ):
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.on("console", report.hear)
        page.on("pageerror", lambda error: report.problems.append(f"a script failed: {error}"))
        page.goto(url)
        wait_until_idle(page)
        ids = [cell["id"] for cell in cells_now(page)]
        tags = [cell["metadata"].get("tags", []) for cell in cells_now(page)]
        may_fail = [at for at, names in enumerate(tags) if "raises-exception" in names]

        go_to(page, ids, ids[0])
        page.keyboard.press("Control+Shift+c")  # the list of all commands
        page.keyboard.insert_text("Clear Outputs of All Cells")
        page.wait_for_timeout(500)
        page.keyboard.press("Enter")
        page.wait_for_timeout(500)
        assert not has_run(cells_now(page)[ids.index("hello")])
        go_to(page, ids, ids[0])
        for _ in ids:
            page.keyboard.press("Shift+Enter")
        for _ in range(600):
            if all(map(has_run, cells_now(page)[: len(ids)])):
                break
            page.wait_for_timeout(200)
        wait_until_idle(page)
        assert list(wrong_cells(cells_now(page)[: len(ids)], may_fail)) == []

        go_to(page, ids, "change-guess")
        tab_to(page, "button A")
        page.keyboard.press("Enter")
        cell = page.locator(".jp-Notebook .jp-Cell").nth(ids.index("change-guess"))
        expect(cell.get_by_text("You guess A.")).to_be_visible()
        go_to(page, ids, "change-seen")
        page.keyboard.press("Shift+Enter")
        seen = page.locator(".jp-Notebook .jp-Cell").nth(ids.index("change-seen"))
        expect(seen.get_by_text("You chose A: ranks share no variable")).to_be_visible()

        go_to(page, ids, "pipeline")
        tab_to(page, "slider Micro-batches")
        page.keyboard.press("ArrowRight")
        pipeline = page.locator(".jp-Notebook .jp-Cell").nth(ids.index("pipeline"))
        expect(pipeline.get_by_role("status")).to_contain_text("m = 5")

        tab_to(page, "button Reset")  # a slider keeps arrows and Escape for itself
        go_to(page, ids, "your-turn")
        page.keyboard.press("Enter")
        page.keyboard.press("Control+a")
        page.keyboard.press("Delete")
        page.keyboard.insert_text(
            "def combine():\n"
            "    x = torch.tensor([float(dist.get_rank() ** 2)])\n"
            "    dist.all_reduce(x, op=dist.ReduceOp.MAX)\n"
            "    return x.item()\n\n"
            "print(run(combine, ranks=8).values[0])"
        )
        page.keyboard.press("Shift+Enter")
        turn = page.locator(".jp-Notebook .jp-Cell").nth(ids.index("your-turn"))
        expect(turn.locator(".jp-OutputArea-output")).to_contain_text("49.0")
    assert report.problems == []
