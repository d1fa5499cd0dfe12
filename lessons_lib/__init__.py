"""Shards & Bubbles: the reference library of the course.

Importing it is instant and needs nothing but Python; the names below bring their module, and torch,
when they are first used.

>>> import lessons_lib
>>> lessons_lib.__all__
['Layout', 'Mesh', 'compute', 'region', 'run']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.layout import Layout
    from lessons_lib.mesh import Mesh
    from lessons_lib.spmd import compute, region, run

__all__ = ["Layout", "Mesh", "compute", "region", "run"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Layout": ".layout",
        "Mesh": ".mesh",
        "compute": ".spmd",
        "region": ".spmd",
        "run": ".spmd",
    },
)
