"""The self-check tells what is wrong, also where almost everything is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lessons_lib import selfcheck
from lessons_lib.selfcheck import TORCH, Finding
from lessons_lib.spmd._torch_internals import TESTED_VERSION

PROJECT = Path(__file__).parents[1]


def command(*arguments: str, python_path: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    """Run python -m lessons_lib; modules in ``python_path`` win over installed ones."""
    path = f"{python_path}{os.pathsep}{PROJECT}"
    environment = os.environ | {"PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    line = [sys.executable, "-m", "lessons_lib", *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100, check=False)


def broken(name: str, folder: Path, text: str) -> None:
    """Let ``import name`` run ``text`` where ``folder`` comes first on the path."""
    (folder / f"{name}.py").write_text(text)


def test_all_is_green_here() -> None:
    done = command("selfcheck")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ R ranks       4 ranks added 0 + 1 + 2 + 3, and each has 6" in done.stdout
    assert done.stdout.endswith("\nReady (code SB-OK).\n")
    assert done.stderr == ""


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    broken("torch", tmp_path, "raise ModuleNotFoundError('No torch here')")
    done = command("selfcheck", python_path=tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"✗ T torch +cannot be imported: No torch here\n +-> .+ torch==2\.13", done.stdout)
    assert "· R ranks       not tried: they need torch" in done.stdout
    assert done.stdout.endswith("\nSomething is missing (code SB-T).\n")


def test_another_torch_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.99.0+cpu")
    assert selfcheck.check_torch() == Finding(
        "warning", "2.99.0+cpu; the course is tested with 2.13.0", f"{selfcheck.INSTALL} torch==2.13.0"
    )


def test_broken_packages_are_named(tmp_path: Path) -> None:
    broken("torch", tmp_path, "raise ImportError")
    broken("numpy", tmp_path, "raise ImportError('too old\\nand more')")
    broken("ipywidgets", tmp_path, "raise ModuleNotFoundError('none here')")
    broken("matplotlib", tmp_path, "raise OSError('a library is missing')")
    done = command("selfcheck", python_path=tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"✗ T torch +cannot be imported: ImportError\n", done.stdout)
    assert re.search(r"✗ N arrays +numpy cannot be imported: too old\n +-> .+ -r requirements", done.stdout)
    assert re.search(r"✗ W widgets +ipywidgets cannot be imported: none here\n", done.stdout)
    assert re.search(r"✗ M curves +matplotlib cannot be imported: a library is missing\n", done.stdout)
    assert done.stdout.endswith("(code SB-TNWM).\n")


def test_an_absent_distribution_is_named() -> None:
    assert selfcheck.check_packages("tests").found == "tests is not installed"


def test_ranks_that_add_up_wrongly_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Result:
        values = (6.0, 6.0, 5.0, 6.0)

    monkeypatch.setattr("lessons_lib.run", lambda *_, **__: Result)
    assert selfcheck.check_ranks().state == "failed"
    assert "[6.0, 6.0, 5.0, 6.0]" in selfcheck.check_ranks().found


def test_ranks_that_cannot_run_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise RuntimeError("no threads left\nand more")

    monkeypatch.setattr("lessons_lib.run", run)
    assert selfcheck.check_ranks().found == "4 ranks could not run: no threads left"


def test_old_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert selfcheck.check_python().state == "failed"
    assert "install Python 3.11" in selfcheck.check_python().remedy


def test_the_version_is_the_one_in_requirements() -> None:
    assert f"\ntorch=={TORCH} " in (PROJECT / "requirements.txt").read_text()
    assert TESTED_VERSION == TORCH  # stated again, since the self-check cannot import what needs torch


def test_commands_are_listed() -> None:
    listed = command()
    assert listed.returncode == 0 and "selfcheck" in listed.stdout and "train [OPTION ...]" in listed.stdout
    unknown = command("selfchek")
    assert unknown.returncode == 2
    assert unknown.stderr == "There is no command 'selfchek'.\n" and unknown.stdout == listed.stdout


def test_a_command_takes_options_or_takes_none() -> None:
    done = command("train", "--ranks", "four")
    assert done.returncode == 2 and "argument --ranks: must be a whole number, not 'four'" in done.stderr
    done = command("selfcheck", "--ranks", "4")
    assert done.returncode == 2 and done.stderr == "There is no command 'selfcheck --ranks 4'.\n"
