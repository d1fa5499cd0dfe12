"""Run a function on N ranks, record what each does, explain what goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons_lib.spmd.launcher import Run, region, run

__all__ = ["Run", "region", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import lessons_lib.spmd.launcher as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
