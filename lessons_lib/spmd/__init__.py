"""Run a function on N ranks, record what each does, explain what goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.spmd.launcher import compute, region, run
    from lessons_lib.spmd.result import Run

__all__ = ["Run", "compute", "region", "run"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Run": ".result",
        "compute": ".launcher",
        "region": ".launcher",
        "run": ".launcher",
    },
)
