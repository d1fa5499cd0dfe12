"""Train the GPT across ranks: the command ``python -m lessons_lib.train``, and what it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.train.parts import Part, part_of_model
    from lessons_lib.train.settings import Saving, Settings
    from lessons_lib.train.steps import Comparison, Outcome, Training, check, train

__all__ = [
    "Comparison",
    "Outcome",
    "Part",
    "Saving",
    "Settings",
    "Training",
    "check",
    "part_of_model",
    "train",
]

_HOMES = {
    ".parts": "Part part_of_model",
    ".settings": "Saving Settings",
    ".steps": "Comparison Outcome Training check train",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__getattr__, __dir__ = lazy(__name__, {name: _HOME_OF[name] for name in __all__})
