"""What gets trained: a serial GPT that knows nothing of ranks (``gpt``), and real text (``corpus``).

>>> GPTConfig().D
128
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]

__getattr__, __dir__ = lazy(__name__, {"GPT": ".gpt", "GPTConfig": ".gpt"})
