"""What the README promises: its code prints what it says, its links lead somewhere, its numbers are true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tooling.source import read

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_prints_what_stands_below_it():
    ((code, output),) = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 8
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == (output, "")


EXERCISES = ["exercises/README.md", "exercises/AGENTS.md"]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "TEACHING.md", *EXERCISES]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_sections(page):
    text = (ROOT / page).read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            assert ((ROOT / page).parent / target.split("#")[0]).exists(), target


def test_the_map_names_every_lesson_with_its_minutes():
    row = r"^\| (\d\d) \| .*\(notebooks/(\w+)\.ipynb\).* \| (\d+) \| (\d+) \|"
    rows = re.findall(row, README, re.MULTILINE)
    lessons = sorted(path.stem for path in (ROOT / "notebooks" / "src").glob("*.py"))
    assert [(name[:2], name) for name in lessons] == [row[:2] for row in rows]
    for _, name, core, everything in rows:
        sources = [ROOT / kind / "src" / f"{name}.py" for kind in ("notebooks", "exercises")]
        cells = [cell for source in sources if source.exists() for cell in read(source).cells]
        minutes = [(cell.metadata.get("minutes", 0), bool(cell.metadata.get("core"))) for cell in cells]
        assert int(core) == sum(n for n, is_core in minutes if is_core), name
        assert int(everything) == sum(n for n, _ in minutes), name


def test_the_tree_names_what_is_there():
    tree = README.split("## What is where")[1]
    for name in re.findall(r"^  (\w+)/?  ", tree, re.MULTILINE):
        folder, module = ROOT / "lessons_lib" / name, ROOT / "lessons_lib" / f"{name}.py"
        assert folder.is_dir() or module.is_file(), name
