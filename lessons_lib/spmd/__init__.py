"""Run a function on N ranks, record what each does, explain what goes wrong."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons_lib.spmd.launcher import compute, region, run
    from lessons_lib.spmd.result import Run

__all__ = ["Run", "compute", "region", "run"]

_HOME = {"Run": "result", "compute": "launcher", "region": "launcher", "run": "launcher"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
