"""The clock of a rank: measured on this machine, or virtual on a machine of your choice.

Both are the same clock. It runs while its rank runs, it stands while the rank waits or while the
launcher works, and a rank that waited for another is set to when the other was there. A measured
clock runs by the computer's; a virtual one does not run by itself but is moved: by
:func:`lessons_lib.compute`, by counted FLOPs, and by what communication costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def standing_still() -> float:
    """How a virtual clock runs by itself: not at all."""
    return 0.0


class Clock:
    """Seconds of one rank.

    >>> clock = Clock(standing_still)
    >>> clock.advance(2.0); clock.catch_up(5.0); clock.catch_up(1.0); clock.now()
    5.0
    """

    def __init__(self, tick: Callable[[], float] = time.perf_counter) -> None:
        self._tick = tick
        self._seconds = 0.0
        self._since = tick()
        self._runs = True

    def now(self) -> float:
        return self._seconds + (self._tick() - self._since if self._runs else 0.0)

    def halt(self) -> None:
        self._seconds, self._runs = self.now(), False

    def resume(self) -> None:
        if not self._runs:
            self._since, self._runs = self._tick(), True

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Work of ours, or for all ranks, which costs the rank that does it no time."""
        ran = self._runs
        self.halt()
        try:
            yield
        finally:
            if ran:
                self.resume()

    def advance(self, seconds: float) -> None:
        self._seconds += seconds

    def catch_up(self, seconds: float) -> None:
        """Be no earlier than ``seconds``: what this rank waited for happened then."""
        self.advance(max(0.0, seconds - self.now()))


class WallClock(Clock):
    """The computer's own clock, which all processes share: it goes on while a rank waits."""

    def begin(self, zero_s: float) -> None:
        """Count from ``zero_s``, as ``time.perf_counter`` reads it."""
        self._since = zero_s

    def halt(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def advance(self, seconds: float) -> None:
        pass
