"""What parallel training costs: formulas beside what is counted.

>>> from lessons_lib import cost
>>> "compare_ways" in cost.__all__
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.cost.compare import (
        Bill,
        Way,
        compare_ways,
        count,
        crossover,
        formula,
        rounds,
        time_s,
        ways,
    )

__all__ = [
    "Bill",
    "Way",
    "compare_ways",
    "count",
    "crossover",
    "formula",
    "rounds",
    "time_s",
    "ways",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Bill": ".compare",
        "Way": ".compare",
        "compare_ways": ".compare",
        "count": ".compare",
        "crossover": ".compare",
        "formula": ".compare",
        "rounds": ".compare",
        "time_s": ".compare",
        "ways": ".compare",
    },
)
