"""Shards & Bubbles: the reference library of the course.

Importing it is instant and needs nothing but Python; the names below bring their module, and torch,
when they are first used.

>>> import lessons_lib
>>> lessons_lib.__all__
['Layout', 'Mesh', 'compute', 'region', 'run']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons_lib.layout import Layout
    from lessons_lib.mesh import Mesh
    from lessons_lib.spmd import compute, region, run

__all__ = ["Layout", "Mesh", "compute", "region", "run"]

_HOME = {
    "Layout": "lessons_lib.layout",
    "Mesh": "lessons_lib.mesh",
    "compute": "lessons_lib.spmd",
    "region": "lessons_lib.spmd",
    "run": "lessons_lib.spmd",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
