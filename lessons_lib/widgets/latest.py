"""Work that is asked for more often than it can be done: only what was asked last counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

QUIET_S = 0.02  # so long after the last of several changes the work begins; slow work waits longer
PATIENCE_S = 0.1  # changes that go on and on are served all the same


class Latest:
    """Runs ``work`` soon after it was asked for, once for many askings.

    The kernel takes messages one after the other, and while work is done they queue up. So asking starts
    nothing: it sets a timer on the kernel's own event loop, which rings when the queue is empty. Without a
    loop, as in a script, the work is done at once.

    >>> done = []
    >>> latest = Latest(lambda: done.append("done"))
    >>> latest.ask(); latest.ask(); done
    ['done', 'done']
    >>> async def three_askings(): latest.ask(); latest.ask(); latest.ask(); await asyncio.sleep(0.05)
    >>> done.clear(); asyncio.run(three_askings()); done
    ['done']
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0  # the first asking that was not served
        self._took_s = 0.0  # the last time

    def ask(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._run()
            return
        now = loop.time()
        if self._timer is None:
            self._since = now
        else:
            self._timer.cancel()
        # Half of the kernel's time at least is for messages, so that the queue does empty.
        at_last = self._since + max(PATIENCE_S, 2 * self._took_s)
        quiet = now + max(QUIET_S, self._took_s / 4)
        self._timer = loop.call_at(min(quiet, max(now, at_last)), self._run)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        began = time.monotonic()
        try:
            self._work()
        finally:
            self._took_s = time.monotonic() - began
