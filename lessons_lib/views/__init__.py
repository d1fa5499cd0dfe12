"""Pictures of records and layouts: data in, SVG out (curves: matplotlib).

>>> from lessons_lib import views
>>> views.__all__
['Figure', 'lanes', 'layout_picture', 'loss_curves']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.views.curves import loss_curves
    from lessons_lib.views.layouts import layout_picture
    from lessons_lib.views.ranks import lanes
    from lessons_lib.views.svg import Figure

__all__ = ["Figure", "lanes", "layout_picture", "loss_curves"]

__getattr__, __dir__ = lazy(
    __name__,
    {"Figure": ".svg", "lanes": ".ranks", "layout_picture": ".layouts", "loss_curves": ".curves"},
)
