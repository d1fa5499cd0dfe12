"""Run a notebook in a real JupyterLab, in a real browser, and photograph every cell.

    python tests/browser/run_notebook.py notebooks/00_start_here.ipynb --out screenshots

Works on a copy, with settings of its own: neither the notebook nor the user's JupyterLab is touched.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import ConsoleMessage, Page, expect, sync_playwright

WIDE, NARROW, HEIGHT, MAX_HEIGHT = 1200, 900, 900, 16_000  # pixels; taller, the browser gives up
START_TIMEOUT_S, RUN_TIMEOUT_S = 60, 180
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {
    "notebook-extension/tracker": {
        "windowingMode": "none",  # else cells out of sight are not rendered
        "scrollPastEnd": False,
    },
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


@dataclass
class Report:
    """What was seen. ``problems`` are sentences; ``wide`` names cells that must be scrolled sideways."""

    problems: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)
    screenshots: list[Path] = field(default_factory=list)
    run_s: float = 0.0

    def hear(self, message: ConsoleMessage) -> None:
        """Note what the browser's console calls an error."""
        if message.type == "error":
            where = message.location.get("url", "")
            self.problems.append(f"the console says: {message.text} {where}".strip())


def find_chromium() -> str | None:
    """The browser to drive: $CHROMIUM, or one on the path."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def run_notebook(notebook: Path, out: Path, chromium: str) -> Report:
    """Open ``notebook`` as a reader does, run all of it, and save pictures of it under ``out``."""
    tags = [cell["metadata"].get("tags", []) for cell in json.loads(notebook.read_text())["cells"]]
    may_fail = [i for i, names in enumerate(tags) if "raises-exception" in names]
    report = Report()
    with (
        tempfile.TemporaryDirectory() as folder,
        jupyterlab(Path(folder), notebook) as url,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS) as browser,
    ):
        page = browser.new_page()
        page.on("console", report.hear)
        page.on("pageerror", lambda error: report.problems.append(f"a script failed: {error}"))
        page.set_viewport_size({"width": WIDE, "height": HEIGHT})
        page.goto(url)
        wait_until_idle(page)
        photograph(page, WIDE, out / "as_opened", report)

        report.run_s = run_all(page, may_fail)
        report.problems += wrong_cells(cells_now(page), may_fail)
        for width in (WIDE, NARROW):
            photograph(page, width, out / str(width), report)
            report.wide += [f"cell {i} at {width} px" for i in cells_wider_than_the_window(page)]
    return report


@contextmanager
def jupyterlab(folder: Path, notebook: Path) -> Iterator[str]:
    """Serve a copy of ``notebook``; the settings, workspaces and logs of this server live in ``folder``."""
    work = folder / "work"
    work.mkdir()
    shutil.copy(notebook, work)
    for name, values in SETTINGS.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    port, token = free_port(), secrets.token_hex(16)
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={work}", "--LabApp.expose_app_in_browser=True"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for_server(server, f"http://127.0.0.1:{port}/api/status?token={token}", folder / "server.log")
        yield f"http://127.0.0.1:{port}/lab/tree/{notebook.name}?token={token}"
    finally:
        server.terminate()  # the server ends its kernels
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_server(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:  # nobody there yet
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start within {START_TIMEOUT_S} s:\n{log.read_text()}")


def wait_until_idle(page: Page) -> None:
    """Wait for the kernel: a Run All before it is idle is dropped without a word."""
    status = page.get_by_text("Python 3 (ipykernel) | Idle")
    expect(status).to_be_visible(timeout=START_TIMEOUT_S * 1000)


def run_all(page: Page, may_fail: list[int]) -> float:
    """Run all cells by the menu, until each has run or one fails that may not; return the seconds."""
    choose(page, "Edit", "Clear Outputs of All Cells")  # and with them, the numbers of the saved run
    start = time.monotonic()
    choose(page, "Run", "Run All Cells")
    while time.monotonic() < start + RUN_TIMEOUT_S:
        cells = cells_now(page)
        failed = [i for i, cell in enumerate(cells) if error_of(cell) and i not in may_fail]
        if failed or all(map(has_run, cells)):
            break
        page.wait_for_timeout(200)
    seconds = time.monotonic() - start
    wait_until_idle(page)
    page.wait_for_timeout(500)  # the last pictures arrive after the last number
    return seconds


def choose(page: Page, menu: str, item: str) -> None:
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.get_by_role("menuitem", name=item, exact=True).click()


def cells_now(page: Page) -> list[dict[str, Any]]:
    """The cells as JupyterLab holds them, in the format of a notebook file; of their outputs, the errors."""
    found: list[dict[str, Any]] = page.evaluate("""() =>
        [...jupyterapp.shell.currentWidget.content.model.cells].map(cell => ({
            id: cell.id,
            cell_type: cell.type,
            metadata: cell.metadata,
            execution_count: cell.executionCount ?? null,
            outputs: Array.from({length: cell.outputs?.length ?? 0}, (_, i) => cell.outputs.get(i))
                .filter(output => output.type === "error").map(output => output.toJSON()),
        }))""")
    return found


def has_run(cell: dict[str, Any]) -> bool:
    return cell["cell_type"] != "code" or cell["execution_count"] is not None


def error_of(cell: dict[str, Any]) -> str | None:
    errors = [output for output in cell.get("outputs", []) if output["output_type"] == "error"]
    return f"{errors[0]['ename']}: {errors[0]['evalue']}" if errors else None


def wrong_cells(cells: list[dict[str, Any]], may_fail: list[int]) -> Iterator[str]:
    for i, cell in enumerate(cells):
        if not has_run(cell):
            yield f"cell {i} did not run"
        elif i in may_fail and not error_of(cell):
            yield f"cell {i} is tagged raises-exception and did not raise"
        elif i not in may_fail and error_of(cell):
            yield f"cell {i} raised {error_of(cell)}"


def cells_wider_than_the_window(page: Page) -> list[int]:
    found: list[int] = page.evaluate("""() =>
        [...document.querySelectorAll(".jp-Notebook .jp-Cell")].flatMap((cell, i) =>
            [...cell.querySelectorAll(".jp-OutputArea-output, .jp-RenderedMarkdown")]
                .some(part => part.scrollWidth > part.clientWidth + 1) ? [i] : [])""")
    return found


def photograph(page: Page, width: int, out: Path, report: Report) -> None:
    """Save a picture of every cell and one of the whole page in ``out``, in a window of that width."""
    out.mkdir(parents=True, exist_ok=True)
    page.set_viewport_size({"width": width, "height": HEIGHT})
    height = page.evaluate("document.querySelector('.jp-Notebook .jp-WindowedPanel-outer').scrollHeight")
    page.set_viewport_size({"width": width, "height": min(height + HEIGHT // 4, MAX_HEIGHT)})
    cells = page.locator(".jp-Notebook .jp-Cell").all()
    page.screenshot(path=out / "page.png")
    boxes = page.evaluate("""() => [...document.querySelectorAll(".jp-Notebook .jp-Cell")].map(cell => {
        const box = cell.getBoundingClientRect();
        return [box.left, box.top, box.right, box.bottom];
    })""")
    with Image.open(out / "page.png") as whole:
        for i, (cell, (left, top, right, bottom)) in enumerate(zip(cells, boxes, strict=True)):
            path = out / f"cell_{i:02}.png"
            if 0 <= left < right <= whole.width and 0 <= top < bottom <= whole.height:
                whole.crop((int(left), int(top), ceil(right), ceil(bottom))).save(path)
            else:  # below what fits in the window
                cell.screenshot(path=path)
    report.screenshots += [out / "page.png", *(out / f"cell_{i:02}.png" for i in range(len(cells)))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run a notebook in a real JupyterLab and photograph it.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    options = parser.parse_args(arguments)
    chromium = find_chromium()
    if chromium is None:
        print("No Chromium found: install it, or say where it is in $CHROMIUM.", file=sys.stderr)
        return 1
    report = run_notebook(options.notebook, options.out, chromium)
    print(f"ran in {report.run_s:.1f} s; {len(report.screenshots)} pictures in {options.out}")
    for cell in report.wide:
        print(f"needs scrolling sideways: {cell}")
    for problem in report.problems:
        print(f"WRONG: {problem}")
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
