"""python -m lessons_lib selfcheck: what works on this machine, and what to do about the rest.

Needs nothing but Python itself, so that it can say what is missing. Every check has a letter; the
code in the last line names the checks that failed (capital) or only warn (small), short enough to be
read to a teacher over the phone.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

TORCH = "2.13.0"  # the version the course is tested with, as in requirements.txt
INSTALL = f"{shlex.quote(sys.executable)} -m pip install"
INSTALL_ALL = f"{INSTALL} -r requirements.txt"

GREEN, YELLOW, RED, GREY = "\033[32m", "\033[33m", "\033[31m", "\033[90m"
SIGNS = {"ok": (GREEN, "✓"), "warning": (YELLOW, "!"), "failed": (RED, "✗"), "note": (GREY, "·")}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found: ``state`` is a key of SIGNS, ``remedy`` what to do unless it is ok."""

    state: str
    found: str
    remedy: str = ""


def check_python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= (3, 11):  # noqa: UP036 - an older Python must be told, not assumed away
        return Finding("ok", found)
    return Finding("failed", found, "install Python 3.11 or newer, remove .venv, and run make lab again")


def check_torch() -> Finding:
    remedy = f"{INSTALL} torch=={TORCH}"
    try:
        found = str(import_module("torch").__version__)
    except Exception as error:  # a broken installation raises OSError, RuntimeError, ...
        return Finding("failed", f"cannot be imported: {first_line(error)}", remedy)
    if found.split("+")[0] == TORCH:
        return Finding("ok", found)
    return Finding("warning", f"{found}; the course is tested with {TORCH}", remedy)


def check_packages(*names: str) -> Finding:
    """Import ``names``, whose distributions are called the same."""
    try:
        for name in names:
            import_module(name)
        return Finding("ok", ", ".join(f"{name} {version(name)}" for name in names))
    except PackageNotFoundError as error:
        return Finding("failed", f"{error.name} is not installed", INSTALL_ALL)
    except Exception as error:
        return Finding("failed", f"{name} cannot be imported: {first_line(error)}", INSTALL_ALL)


def check_ranks() -> Finding:
    """Let four ranks add up their numbers."""
    remedy = f"{INSTALL_ALL}; if that changes nothing, report this line"
    try:
        import_module("torch")
    except Exception:
        return Finding("note", "not tried: they need torch")

    def add_ranks() -> float:
        import torch
        import torch.distributed as dist

        x = torch.full((1,), float(dist.get_rank()))
        dist.all_reduce(x)
        return x.item()

    try:
        from lessons_lib import run

        values = list(run(add_ranks, ranks=4, timeout_s=60).values)
    except Exception as error:
        return Finding("failed", f"4 ranks could not run: {first_line(error)}", remedy)
    if values == [6.0] * 4:
        return Finding("ok", "4 ranks added 0 + 1 + 2 + 3, and each has 6")
    return Finding("failed", f"4 ranks added 0 + 1 + 2 + 3 and have {values}", remedy)


def check_machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{platform.system()} {platform.machine()}, {cores} cores"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found += f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB of memory"
    return Finding("note", found)


def check_gpu() -> Finding:
    try:
        cuda = import_module("torch").cuda
        names = [cuda.get_device_name(i) for i in range(cuda.device_count())]
    except Exception:
        return Finding("note", "not looked for: that needs torch")
    return Finding("note", f"{len(names)}: {', '.join(names)}" if names else "none, and none is needed")


CHECKS: dict[str, tuple[str, Callable[[], Finding]]] = {  # letter: (name, check)
    "P": ("Python", check_python),
    "T": ("torch", check_torch),
    "N": ("arrays", lambda: check_packages("numpy")),
    "C": ("cells", lambda: check_packages("cloudpickle")),
    "J": ("notebooks", lambda: check_packages("jupyterlab", "ipykernel")),
    "W": ("widgets", lambda: check_packages("ipywidgets")),
    "M": ("curves", lambda: check_packages("matplotlib")),
    "R": ("ranks", check_ranks),
    "H": ("hardware", check_machine),
    "G": ("GPU", check_gpu),
}


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def short_code(states: Iterable[tuple[str, str]]) -> str:
    """Name what is not ok by its letter.

    >>> short_code([("P", "ok"), ("T", "warning"), ("R", "failed"), ("G", "note")])
    'SB-tR'
    >>> short_code([("P", "ok"), ("G", "note")])
    'SB-OK'
    """
    letters = {"failed": str.upper, "warning": str.lower}
    return "SB-" + ("".join(letters[state](letter) for letter, state in states if state in letters) or "OK")


def main() -> int:
    """Print one line per check as it is done; return 1 if any failed."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    states = []
    for letter, (name, check) in CHECKS.items():
        finding = check()
        states.append((letter, finding.state))
        ink, sign = SIGNS[finding.state]
        line = f"{sign} {letter} {name:<12}{finding.found}"
        print(f"{ink}{line}\033[0m" if colour else line, flush=True)
        if finding.remedy:
            print(f"    {'':<12}-> {finding.remedy}")
    failed = any(state == "failed" for _, state in states)
    print("\nSomething is missing" if failed else "\nReady", f"(code {short_code(states)}).")
    return int(failed)
