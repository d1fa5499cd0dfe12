"""Packages that list their names and bring the modules behind them when a name is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package whose names live in other modules.

    ``home`` says where each name lives, relative to the package, in the order in which they are listed:

    >>> find, names = lazy("lessons_lib", {"Layout": ".layout"})
    >>> find("Layout"), names()
    (<class 'lessons_lib.layout.Layout'>, ['Layout'])
    """

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(home)}")
        value = getattr(import_module(home[name], package), name)
        setattr(sys.modules[package], name, value)  # Python asks once
        return value

    return find, lambda: list(home)
