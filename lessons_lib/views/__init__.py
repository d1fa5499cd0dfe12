"""Pictures of records and layouts: data in, SVG out (curves: matplotlib).

>>> from lessons_lib import views
>>> "layout_picture" in views.__all__
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.views.branches import Step, branches_picture
    from lessons_lib.views.cube import cube_picture
    from lessons_lib.views.curves import loss_curves
    from lessons_lib.views.grid import mesh_picture
    from lessons_lib.views.heads import heads_picture
    from lessons_lib.views.layouts import layout_picture
    from lessons_lib.views.pipeline import pipeline_picture
    from lessons_lib.views.ranks import lanes
    from lessons_lib.views.steps import collective_step
    from lessons_lib.views.svg import Figure
    from lessons_lib.views.traffic import traffic_matrix
    from lessons_lib.views.waits import wait_graph
    from lessons_lib.views.words import words_picture

__all__ = [
    "Figure",
    "Step",
    "branches_picture",
    "collective_step",
    "cube_picture",
    "heads_picture",
    "lanes",
    "layout_picture",
    "loss_curves",
    "mesh_picture",
    "pipeline_picture",
    "traffic_matrix",
    "wait_graph",
    "words_picture",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Figure": ".svg",
        "Step": ".branches",
        "branches_picture": ".branches",
        "collective_step": ".steps",
        "cube_picture": ".cube",
        "heads_picture": ".heads",
        "lanes": ".ranks",
        "layout_picture": ".layouts",
        "loss_curves": ".curves",
        "mesh_picture": ".grid",
        "pipeline_picture": ".pipeline",
        "traffic_matrix": ".traffic",
        "wait_graph": ".waits",
        "words_picture": ".words",
    },
)
