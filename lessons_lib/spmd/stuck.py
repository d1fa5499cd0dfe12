"""Notices a rank that stands still while it cleans up after an exception.

A rank that waits for another is proved to wait in vain, but one that waits for anything else, a lock, a
queue, a thread of its own, cannot be told from one that works. With an exception in flight it would keep
that to itself for ever: so a rank that neither computes nor communicates for a while is taken at its word.
"""

from __future__ import annotations

import sys
import time

PATIENCE_S = 10.0  # how long clean-up code may stand still


def in_flight(thread: int) -> BaseException | None:
    """The exception after which a thread is cleaning up, in a ``finally`` or an ``except``."""
    found = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found  # a tuple until Python 3.11


class CleanUp:
    """Looks at one thread from time to time."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._seen: tuple[int, float] = (0, 0.0)  # which exception, and how much the thread had computed
        self._since = 0.0

    def stands_still(self) -> BaseException | None:
        """The exception in flight, if nothing has happened since for longer than ``PATIENCE_S``."""
        error = in_flight(self._thread)
        now = time.perf_counter()
        seen = id(error), _computed_s(self._thread)
        if error is None or seen != self._seen:
            self._seen, self._since = seen, now
            return None
        return error if now - self._since > PATIENCE_S else None


def _computed_s(thread: int) -> float:
    """Seconds for which a thread has had a processor; where this is not known, always more than before."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.perf_counter()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
