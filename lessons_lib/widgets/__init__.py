"""Explorers: pictures with controls. Without ipywidgets they are the picture alone.

>>> from lessons_lib import widgets
>>> widgets.__all__
['Explorer', 'collective_stepper', 'layout_explorer', 'pipeline_explorer', 'wait_explorer']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.widgets.collectives import collective_stepper
    from lessons_lib.widgets.explorer import Explorer
    from lessons_lib.widgets.layouts import layout_explorer
    from lessons_lib.widgets.pipelines import pipeline_explorer
    from lessons_lib.widgets.waits import wait_explorer

__all__ = ["Explorer", "collective_stepper", "layout_explorer", "pipeline_explorer", "wait_explorer"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Explorer": ".explorer",
        "collective_stepper": ".collectives",
        "layout_explorer": ".layouts",
        "pipeline_explorer": ".pipelines",
        "wait_explorer": ".waits",
    },
)
