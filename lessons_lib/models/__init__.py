"""What gets trained: a serial GPT that knows nothing of ranks (``gpt``), and real text (``corpus``).

>>> GPTConfig().D
128
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons_lib.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"{__name__}.gpt"), name)
    return value


def __dir__() -> list[str]:
    return __all__
