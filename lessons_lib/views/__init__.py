"""Pictures of records and layouts: data in, SVG out.

>>> from lessons_lib import views
>>> views.__all__
['Figure', 'lanes', 'layout_picture']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons_lib.views.layouts import layout_picture
    from lessons_lib.views.ranks import lanes
    from lessons_lib.views.svg import Figure

__all__ = ["Figure", "lanes", "layout_picture"]

_HOME = {
    "Figure": "lessons_lib.views.svg",
    "lanes": "lessons_lib.views.ranks",
    "layout_picture": "lessons_lib.views.layouts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
