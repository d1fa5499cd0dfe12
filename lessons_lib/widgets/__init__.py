"""Explorers: pictures with controls. Without ipywidgets they are the picture alone.

>>> from lessons_lib import widgets
>>> widgets.__all__
['Explorer', 'attention_explorer', 'bytes_memory_explorer', 'collective_stepper', 'layout_bill_explorer', \
'layout_explorer', 'memory_explorer', 'pipeline_explorer', 'scheme_stepper', 'wait_explorer']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.widgets.attention import attention_explorer
    from lessons_lib.widgets.bills import layout_bill_explorer
    from lessons_lib.widgets.collectives import collective_stepper
    from lessons_lib.widgets.explorer import Explorer
    from lessons_lib.widgets.frontier import bytes_memory_explorer
    from lessons_lib.widgets.layouts import layout_explorer
    from lessons_lib.widgets.memory import memory_explorer
    from lessons_lib.widgets.pipelines import pipeline_explorer
    from lessons_lib.widgets.schemes import scheme_stepper
    from lessons_lib.widgets.waits import wait_explorer

__all__ = [
    "Explorer",
    "attention_explorer",
    "bytes_memory_explorer",
    "collective_stepper",
    "layout_bill_explorer",
    "layout_explorer",
    "memory_explorer",
    "pipeline_explorer",
    "scheme_stepper",
    "wait_explorer",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Explorer": ".explorer",
        "attention_explorer": ".attention",
        "bytes_memory_explorer": ".frontier",
        "collective_stepper": ".collectives",
        "layout_bill_explorer": ".bills",
        "layout_explorer": ".layouts",
        "memory_explorer": ".memory",
        "pipeline_explorer": ".pipelines",
        "scheme_stepper": ".schemes",
        "wait_explorer": ".waits",
    },
)
