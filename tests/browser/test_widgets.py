"""Explorers, as a learner meets them: in a real JupyterLab, moved by the keyboard."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, Page, expect, sync_playwright
from tooling.source import NOTEBOOK_METADATA

from tests.browser.run_notebook import (
    CHROMIUM_FLAGS,
    Report,
    cells_wider_than_the_window,
    find_chromium,
    jupyterlab,
    photograph,
    run_all,
    wait_until_idle,
)

PROJECT = Path(__file__).parents[2]
SCREENSHOTS = PROJECT / "screenshots" / "widgets"
STEPPER, WAITS, LAYOUTS, SLOW = 1, 2, 3, 4  # cells
CELLS = [
    """
import time
import torch
import torch.distributed as dist
from lessons_lib import run
from lessons_lib.errors import RunError
from lessons_lib.views import Figure
from lessons_lib.widgets import collective_stepper, layout_explorer, wait_explorer
from lessons_lib.widgets.explorer import Explorer, Slider

def all_send_first():
    r, p = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(1)
    dist.all_reduce(x)
    dist.send(x, (r + 1) % p)
    dist.recv(x, (r - 1) % p)

drawn = []
def slow(n):
    time.sleep(0.3)
    drawn.append(n)
    return Figure("Slow", f"n is {n}, drawing {len(drawn)}.")
""",
    "collective_stepper()",
    """
try:
    run(all_send_first, ranks=4)
except RunError as error:
    stood_still = error
wait_explorer(stood_still)
""",
    "layout_explorer()",
    'Explorer(slow, {"n": Slider("Number", 0, 100)}, {"n": 0})',
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium: install it, or name it in $CHROMIUM"),
]


@dataclass
class Lab:
    """A notebook with explorers, open in a browser, all cells run."""

    page: Page
    report: Report
    url: str

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def sentence(self, index: int) -> str:
        """What a screen reader is told."""
        return self.cell(index).get_by_role("status").inner_text()

    def wait_for(self, index: int, words: str) -> None:
        expect(self.cell(index).get_by_role("status")).to_contain_text(re.compile(words))

    def check_picture(self, index: int) -> None:
        """Exactly one picture is seen, and it is the one of the sentence."""
        seen = self.cell(index).locator("svg[role=img]").filter(visible=True)
        expect(seen).to_have_count(1)
        assert seen.locator("desc").first.text_content() == self.sentence(index)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder, chromium = tmp_path_factory.mktemp("lab"), find_chromium()
    notebook = folder / "explorers.ipynb"
    cells = [new_code_cell(source.strip()) for source in CELLS]
    nbformat.write(new_notebook(cells=cells, metadata=NOTEBOOK_METADATA), notebook)
    report = Report()
    with (
        jupyterlab(folder, notebook) as url,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS) as browser,
    ):
        page = browser.new_page(viewport={"width": 1600, "height": 900})
        page.on("console", report.hear)
        page.on("pageerror", lambda error: report.problems.append(f"a script failed: {error}"))
        page.goto(url)
        wait_until_idle(page)
        run_all(page, [])
        yield Lab(page, report, url)


@pytest.fixture(autouse=True)
def nothing_goes_wrong(lab: Lab) -> Iterator[None]:
    yield
    assert lab.report.problems == []


@pytest.mark.parametrize("index", [STEPPER, WAITS, LAYOUTS])
def test_every_control_has_a_name_and_keeps_it(lab: Lab, index: int) -> None:
    cell = lab.cell(index)
    for _ in range(2):
        controls = cell.locator(".explorer").locator(
            "select, input, button, [contenteditable], [role=slider]"
        )
        assert controls.count() >= 4
        for control in controls.all():
            assert re.match(r"""- '?\w+ "\w[^"]+\"""", control.aria_snapshot()), control.aria_snapshot()
        cell.get_by_role("button", name="Try").first.press("Enter")  # sliders get other ends
        lab.page.wait_for_timeout(600)
    cell.get_by_role("button", name="Reset").press("Enter")


def test_a_slider_by_keyboard(lab: Lab) -> None:
    lab.check_picture(STEPPER)
    lab.wait_for(STEPPER, "after round 2 of 6")
    slider = lab.cell(STEPPER).get_by_role("slider", name="Round")
    slider.focus()
    for step in (3, 4, 5, 6):
        lab.page.keyboard.press("ArrowRight")
        lab.wait_for(STEPPER, f"after round {step} of 6")
        expect(slider).to_be_focused()
    lab.wait_for(STEPPER, "copy, every rank holds the whole result; .*192 bytes sent per rank, 768 by all")
    lab.check_picture(STEPPER)


def test_a_choice_by_keyboard_and_a_slider_whose_end_depends_on_it(lab: Lab) -> None:
    cell = lab.cell(STEPPER)
    cell.get_by_role("combobox", name="Collective").focus()
    lab.page.keyboard.type("tree")
    lab.wait_for(STEPPER, "Tree broadcast on 4 ranks after round 2 of 2: copy")
    lab.check_picture(STEPPER)
    expect(cell.get_by_role("slider", name="Round")).to_have_attribute("aria-valuemax", "2.0")
    cell.get_by_role("slider", name="Ranks").focus()
    lab.page.keyboard.press("End")
    lab.wait_for(STEPPER, "Tree broadcast on 16 ranks after round 2 of 4: on 4 of 16")
    lab.check_picture(STEPPER)


def test_buttons_by_keyboard(lab: Lab) -> None:
    cell = lab.cell(STEPPER)
    cell.get_by_role("button", name="all through one rank").focus()
    lab.page.keyboard.press("Enter")
    lab.wait_for(STEPPER, "Star all-reduce on 8 ranks after round 7 of 14: on 1 of 8, rank 0 alone holds all")
    cell.get_by_role("button", name="Reset").focus()
    lab.page.keyboard.press("Space")
    lab.wait_for(STEPPER, "Ring all-reduce on 4 ranks after round 2 of 6")
    lab.check_picture(STEPPER)


def test_scrubbing_to_where_it_stood_still(lab: Lab) -> None:
    lab.wait_for(WAITS, "the circle 0 → 1 → 2 → 3 → 0 is closed")
    slider = lab.cell(WAITS).get_by_role("slider", name="Moment")
    slider.focus()
    lab.page.keyboard.press("Home")
    lab.wait_for(WAITS, "ranks 0 to 3 are running")
    lab.check_picture(WAITS)
    lab.page.keyboard.press("End")
    lab.wait_for(WAITS, "the circle 0 → 1 → 2 → 3 → 0 is closed")
    lab.check_picture(WAITS)


def test_what_goes_wrong_is_shown_beside_the_control_and_the_next_value_recovers(lab: Lab) -> None:
    cell = lab.cell(LAYOUTS)
    layout, wrong = cell.get_by_role("textbox", name="Layout"), cell.get_by_role("alert")
    for notation, words in (
        ("D@nowhere F", "nowhere"),
        ("D@@", "Write the dims in order"),
        ("D F G", "3 dims"),
    ):
        layout.fill(notation)
        layout.press("Enter")
        expect(wrong).to_contain_text(words)
        lab.check_picture(LAYOUTS)  # still that of the last values that worked
    layout.fill("D@row F@col")
    layout.press("Enter")
    lab.wait_for(LAYOUTS, "which is 1/4 of the elements")
    expect(wrong).to_have_count(0)
    lab.check_picture(LAYOUTS)


def test_ten_changes_later_all_controls_are_there(lab: Lab) -> None:
    cell = lab.cell(LAYOUTS)
    rank = cell.get_by_role("slider", name="Rank")
    rank.focus()
    for key in ["ArrowRight", "ArrowLeft"] * 5:
        lab.page.keyboard.press(key)
        lab.page.wait_for_timeout(60)
    for role, names in (
        ("textbox", ("Layout", "Shape")),
        ("combobox", ("Mesh",)),
        ("button", ("Reset", "2D", "a partial sum")),
        ("slider", ("Rank",)),
    ):
        for name in names:
            expect(cell.get_by_role(role, name=name)).to_have_count(1)  # type: ignore[arg-type]
    lab.check_picture(LAYOUTS)


def test_fifty_changes_in_a_second_end_on_the_last_with_a_handful_of_updates(lab: Lab) -> None:
    before = int(re.findall(r"drawing (\d+)", lab.sentence(SLOW))[0])
    lab.cell(SLOW).get_by_role("slider", name="Number").focus()
    start = time.monotonic()
    for number in range(50):
        lab.page.keyboard.press("ArrowRight")
        lab.page.wait_for_timeout(max(0, 1000 * (start + 0.02 * (number + 1) - time.monotonic())))
    typed_s = time.monotonic() - start
    lab.wait_for(SLOW, "n is 50,")
    free_s = time.monotonic() - start - typed_s
    lab.page.wait_for_timeout(800)  # whatever else would come
    assert re.fullmatch(r"n is 50, drawing (\d+)\.", lab.sentence(SLOW))
    updates = int(re.findall(r"drawing (\d+)", lab.sentence(SLOW))[0]) - before
    print(
        f"50 keys in {typed_s:.2f} s, {updates} updates, the last one shown {free_s:.2f} s after the last key"
    )
    assert 1 <= updates <= 6
    assert free_s < 3 * 0.3 + 0.3
    lab.check_picture(SLOW)


def test_a_cell_run_again_leaves_one_picture_and_one_callback(lab: Lab) -> None:
    cell = lab.cell(SLOW)
    for _ in range(3):
        cell.locator(".cm-content").click()
        lab.page.keyboard.press("Control+Enter")
        wait_until_idle(lab.page)
        lab.wait_for(SLOW, "n is 0,")
    lab.check_picture(SLOW)
    before = int(re.findall(r"drawing (\d+)", lab.sentence(SLOW))[0])
    cell.get_by_role("slider", name="Number").focus()
    lab.page.keyboard.press("ArrowRight")
    lab.wait_for(SLOW, f"n is 1, drawing {before + 1}")
    lab.page.wait_for_timeout(1000)
    assert lab.sentence(SLOW) == f"n is 1, drawing {before + 1}."
    lab.check_picture(SLOW)


def test_pictures_fit_their_column_or_scroll_alone(lab: Lab) -> None:
    for width in (1600, 900):
        photograph(lab.page, width, SCREENSHOTS / str(width), lab.report)
        assert cells_wider_than_the_window(lab.page) == []
    lab.page.set_viewport_size({"width": 1600, "height": 900})


def test_reopened_without_their_kernel_pictures_are_there(lab: Lab) -> None:
    """The last test: it ends the kernel."""
    lab.page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    end_kernels(lab.url)
    lab.report.problems.clear()
    lab.page.reload()
    wait_until_idle(lab.page)
    expect(lab.cell(STEPPER).locator("svg[role=img]").filter(visible=True)).to_have_count(1, timeout=10_000)
    for index in (STEPPER, WAITS, LAYOUTS, SLOW):
        expect(lab.cell(index).locator("svg[role=img]").filter(visible=True)).to_have_count(1)
        expect(lab.cell(index).get_by_text("need a running kernel")).to_be_visible()
    photograph(lab.page, 1600, SCREENSHOTS / "reopened", lab.report)
    lab.report.problems[:] = [each for each in lab.report.problems if "model not found" not in each]


def end_kernels(url: str) -> None:
    at = urlsplit(url)
    sessions = f"http://{at.netloc}/api/sessions"
    with urllib.request.urlopen(f"{sessions}?{at.query}") as answer:
        for session in json.load(answer):
            end = urllib.request.Request(f"{sessions}/{session['id']}?{at.query}", method="DELETE")
            urllib.request.urlopen(end).close()
