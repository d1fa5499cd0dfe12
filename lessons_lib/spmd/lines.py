"""Finds the learner's line behind a call, and says it as the learner knows it."""

from __future__ import annotations

import linecache
import os
import sys
from importlib.util import find_spec
from types import FrameType
from typing import Any

import torch

from lessons_lib.timeline import Where

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CHECKERS = ("jaxtyping", "beartype")  # of shapes in signatures: they stand between a call and its function


def _folders() -> tuple[str, ...]:
    """Where torch and the checkers lie, whether these have been imported or not."""
    found = [find_spec(name) for name in _CHECKERS]
    places = [spec.origin for spec in found if spec and spec.origin]
    return tuple(os.path.dirname(place) + os.sep for place in (torch.__file__, *places))


_MACHINERY = (_LIBRARY + os.sep, *_folders(), "<")
_WRAPPERS = ("contextlib.py", "threading.py", "typing_extensions.py")  # of torch's deprecated functions


def is_machinery(file: str) -> bool:
    """Whether a file belongs to torch, to this library or to the interpreter, not to the learner."""
    return file.startswith(_MACHINERY) or file.endswith(_WRAPPERS)


def _is_machinery_frame(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file in ("<string>", "<stdin>"):  # generated code, or a program given with -c or typed in
        return frame.f_globals.get("__name__") != "__main__"
    return is_machinery(file)


_cells: dict[str, str] = {}  # in the process of a rank: what the notebook's cells are called


def display_name(file: str) -> str:
    """A notebook cell's ``Cell In[3]`` for the file name IPython gave it; a path as short as it can be."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    named = shell.compile.format_code_name(file) if shell else None
    if named:
        return " ".join(named)
    if file in _cells:
        return _cells[file]
    nearby = os.path.relpath(file) if os.path.isabs(file) else file
    return file if nearby.startswith("..") else nearby


def path_in_package(file: str) -> str:
    """The end of a path: from the package on where it is ours, else a folder or two and the file.

    >>> path_in_package(__file__), path_in_package("/usr/lib/python3/torch/nn/linear.py")
    ('lessons_lib/spmd/lines.py', 'torch/nn/linear.py')
    """
    if file.startswith(_LIBRARY):
        return os.path.relpath(file, os.path.dirname(_LIBRARY)).replace(os.sep, "/")
    return "/".join(file.split("/")[-3:])


def notebook_cells() -> dict[str, tuple[str, str]]:
    """The cells of the notebook by file name: what they are called and their text."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return {}
    return {
        file: (display_name(file), "".join(linecache.getlines(file)))
        for file in list(linecache.cache)
        if shell.compile.format_code_name(file)
    }


def know_cells(cells: dict[str, tuple[str, str]]) -> None:
    """Let lines of these cells be found in this process, which has not run them."""
    for file, (name, text) in cells.items():
        _cells[file] = name
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file


def line_of(file: str, line: int, function: str) -> Where:
    return Where(display_name(file), line, function, linecache.getline(file, line).strip())


def line_of_frame(frame: FrameType | None) -> Where:
    """The innermost line of the learner's below ``frame``."""
    while frame is not None and _is_machinery_frame(frame):
        frame = frame.f_back
    if frame is None:
        return Where("?", 0, "?")
    return line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


class LineFinder:
    """Keeps the lines it has found, since loops repeat them."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, int], Where] = {}

    def here(self) -> Where:
        """The innermost line that is neither torch's nor ours; if there is none, ours."""
        frame: FrameType | None = sys._getframe(1)
        ours: FrameType | None = None
        while frame is not None:
            file = frame.f_code.co_filename
            if not _is_machinery_frame(frame):
                return self._where(frame)
            if ours is None and file.startswith(_LIBRARY) and f"{os.sep}spmd{os.sep}" not in file:
                ours = frame
            frame = frame.f_back
        return self._where(ours) if ours is not None else Where("?", 0, "?")

    def _where(self, frame: FrameType) -> Where:
        key = frame.f_code, frame.f_lineno
        if key not in self._known:
            self._known[key] = line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        return self._known[key]
