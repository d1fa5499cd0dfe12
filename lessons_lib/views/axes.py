"""Where time and ranks lie in a picture of lanes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Where a time lies in the picture, and how it is written."""

    end: float
    left: float
    right: float
    unit: str
    per_unit: float  # how much time one unit is

    @classmethod
    def until(cls, end: float, left: float, right: float) -> TimeAxis:
        """An axis in seconds, milliseconds or microseconds, whichever gives handy numbers.

        >>> axis = TimeAxis.until(0.0025, 0, 100)
        >>> axis.unit, axis.x(0.001), axis.ticks(), axis.words(0.00125)
        ('ms', 40.0, [0.0, 0.0005, 0.001, 0.0015, 0.002, 0.0025], '1.25 ms')
        """
        unit, per_unit = next((u for u in (("s", 1.0), ("ms", 1e-3)) if end >= u[1]), ("µs", 1e-6))
        return cls(end, left, right, unit, per_unit)

    def x(self, time: float) -> float:
        return self.left + (self.right - self.left) * (min(time / self.end, 1.0) if self.end else 0.0)

    def number(self, time: float) -> str:
        value = time / self.per_unit
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    def words(self, time: float) -> str:
        return f"{self.number(time)} {self.unit}"

    def ticks(self, most: int = 10) -> list[float]:
        """Round times from 0 to the end, at most ``most`` steps of 1, 2 or 5 times a power of ten."""
        if not self.end:
            return [0.0]
        end = self.end / self.per_unit
        power = 10.0 ** math.floor(math.log10(end / most))
        step = next(s * power for s in (1, 2, 5, 10, 20) if end / (s * power) <= most)
        return [at * step * self.per_unit for at in range(int(end / step * (1 + 1e-12)) + 1)]


def clock_words(clock: str, unit: str = "") -> str:
    """What a clock counts, in a sentence; with a ``unit``, as the title of an axis.

    >>> clock_words("measured"), clock_words("virtual (4xH100)")
    ('measured time', 'virtual time on 4xH100')
    >>> clock_words("measured", "ms"), clock_words("virtual (4xH100)", "ms")
    ('measured time (ms)', 'time on 4xH100 (ms), virtual')
    """
    on_machine = re.fullmatch(r"(\w+) \((.+)\)", clock)
    if on_machine is None:
        return f"{clock} time ({unit})" if unit else f"{clock} time"
    sort, machine = on_machine.groups()
    return f"time on {machine} ({unit}), {sort}" if unit else f"{sort} time on {machine}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the lanes are: fewer ranks, higher lanes. Each has a gap above it and memory below."""

    top: float
    n_ranks: int
    gap: float
    height: float
    memory: float  # height of the memory curve; 0 without

    @classmethod
    def below(cls, top: float, n_ranks: int, *, ticks: bool = False, memory: bool = False) -> Rows:
        """Rows for ``n_ranks``, with room for ``ticks`` above the lanes and for ``memory`` below them."""
        pitch = min(36.0, max(9.0, 320 / n_ranks))
        gap = (0.3 if ticks else 0.25) * pitch
        return cls(top, n_ranks, gap, pitch - gap, min(22.0, 0.6 * pitch) if memory else 0.0)

    @property
    def pitch(self) -> float:
        return self.gap + self.height + self.memory

    @property
    def bottom(self) -> float:
        return self.top + self.n_ranks * self.pitch + self.gap / 2

    @property
    def tick(self) -> float:
        """How far a tick rises above its lane."""
        return min(6.0, 0.6 * self.gap)

    def y(self, rank: int) -> float:
        """The upper edge of a lane."""
        return self.top + rank * self.pitch + self.gap

    def middle(self, rank: int) -> float:
        return self.y(rank) + self.height / 2

    def floor(self, rank: int) -> float:
        """Where the memory curve of a rank stands; without one, the lower edge of the lane."""
        return self.y(rank) + self.height + self.memory

    def every(self, height: float) -> int:
        """Each how many-th rank has room for something ``height`` pixels high: 1, 2, 4, 8, ..."""
        return every(height, self.pitch)


def every(need: float, pitch: float) -> int:
    """Each how many-th of things ``pitch`` apart has room for ``need`` pixels: 1, 2, 4, 8, ...

    >>> every(14, 20), every(14, 9), every(14, 4)
    (1, 2, 4)
    """
    return 1 << max(0, math.ceil(math.log2(need / pitch)))
