"""Train the GPT across ranks: the command ``python -m lessons_lib.train``, and what it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.train.steps import Comparison, Outcome, Saving, Settings, Training, check, train

__all__ = ["Comparison", "Outcome", "Saving", "Settings", "Training", "check", "train"]

__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, ".steps"))
