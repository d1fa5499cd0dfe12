"""The clock of a rank: measured on this machine, or virtual on a machine of your choice.

Both are the same clock. It runs while its rank runs, it stands while the rank waits or while the
launcher works, and a rank that waited for another is set to when the other was there. A measured
clock runs by the computer's; a virtual one does not run by itself but is moved: by
:func:`lessons_lib.compute`, by counted FLOPs, and by what communication costs.

What that costs is decided by what ranks issue and when, never by who came first on this computer, so
virtual time is the same wherever ranks run:

* Every group has a :class:`Channel` of its own, as every communicator of nccl has its own stream. Its
  collectives follow each other in order; one begins when all its ranks have issued it and the one before
  is done.
* Channels do not slow each other down: two groups at once both get all of a link that a real machine would
  share between them. So they overlap for free where they use different links (tensor parallel in a node,
  data parallel between nodes), and too well where they use the same.
* A message travels on its own, from when it was sent, and takes its sender no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lessons_lib.machines import Machine
from lessons_lib.spmd.operation import Operation


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


# ---- what communication costs ----


class Channel:
    """The collectives of one group: one after the other. Without a machine they take no time."""

    def __init__(self, machine: Machine | None) -> None:
        self._machine, self._free_s = machine, 0.0

    def carry(self, operations: Sequence[Operation]) -> float:
        """When the next collective is done, of which ``operations`` are all ranks' parts."""
        began = max(self._free_s, *(operation.issued_s for operation in operations))
        self._free_s = began
        if self._machine is not None:
            first = operations[0]
            n_bytes = max(operation.n_bytes for operation in operations)  # in an all-to-all they differ
            self._free_s += self._machine.collective_s(first.kind, n_bytes, first.members)
        return self._free_s


def arrival_s(machine: Machine | None, sent: Operation, receiver: int) -> float:
    """When a message has arrived, if somebody receives it."""
    travels_s = machine.link(sent.rank, receiver).message_s(sent.n_bytes) if machine else 0.0
    return sent.issued_s + travels_s
