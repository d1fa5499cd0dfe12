"""What learners use to see whether they are right: checks, hints, predictions, recaps, progress.

>>> from lessons_lib import grading
>>> grading.__all__
['check', 'hint', 'predict', 'progress', 'recap', 'reveal']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.grading.checking import check
    from lessons_lib.grading.hints import hint, reveal
    from lessons_lib.grading.predictions import predict
    from lessons_lib.grading.recaps import recap
    from lessons_lib.grading.records import progress

__all__ = ["check", "hint", "predict", "progress", "recap", "reveal"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "check": ".checking",
        "hint": ".hints",
        "predict": ".predictions",
        "progress": ".records",
        "recap": ".recaps",
        "reveal": ".hints",
    },
)
