"""What the ranks of a pipeline did when, and what can be read off it: bubbles, memory, messages.

A schedule that was simulated and one that was executed both end as a :class:`PipelineTimeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from lessons_lib.pipeline_parallel.actions import Schedule
from lessons_lib.pipeline_parallel.rules import Result, makes, needs
from lessons_lib.pipeline_parallel.times import Number, neat
from lessons_lib.timeline import Message, Span

if TYPE_CHECKING:
    from lessons_lib.views.svg import Figure

Place = tuple[int, int]  # rank and index of an action


# What each kind adds to the micro-batches that are kept whole, and to those of which W's part is kept.
CHANGES = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1), "U": (0, 0)}


class Arrivals(Protocol):
    """When a result was there for the rank that needs it, in ticks."""

    def __getitem__(self, result: Result, /) -> Any: ...


@dataclass(frozen=True, eq=False, repr=False)
class PipelineTimeline:
    """When every action of a schedule started and ended.

    >>> from lessons_lib.pipeline_parallel import gpipe, simulate
    >>> timeline = simulate(gpipe(4, 12))                      # F = I = W = 1
    >>> timeline.makespan, timeline.bubble, timeline.bubble_ratio
    (45, Fraction(1, 5), Fraction(1, 4))
    >>> timeline.peak_in_flight()
    [12, 12, 12, 12]

    ``starts[rank][index]`` and ``ends`` count ticks of length ``tick``, so that rational times stay exact.
    ``arrivals``, in ticks too, says of every result that was sent to another rank when it came there.
    ``message_bytes`` is what one such message carries.
    """

    schedule: Schedule
    starts: Sequence[Sequence[Any]]
    ends: Sequence[Sequence[Any]]
    tick: Number = 1
    arrivals: Arrivals | None = None
    message_bytes: int = 0
    clock: str = "measured"

    # ---- time

    @property
    def n_ranks(self) -> int:
        return self.schedule.n_ranks

    def time(self, ticks: Any) -> Number:
        """A number of ticks as a time: exact, and an int where it is whole."""
        return ticks if self.tick == 1 else neat(ticks * self.tick)

    @cached_property
    def makespan(self) -> Number:
        """When the last rank ends."""
        return self.time(max((ends[-1] for ends in self.ends if ends), default=0))

    @cached_property
    def work(self) -> list[Number]:
        """For each rank, how long it worked."""
        return [
            self.time(sum(ends) - sum(starts)) for starts, ends in zip(self.starts, self.ends, strict=True)
        ]

    @property
    def idle(self) -> list[Number]:
        """For each rank, how long it stood still before the last rank ended."""
        return [self.makespan - work for work in self.work]

    @cached_property
    def spans_of_ranks(self) -> list[Number]:
        """For each rank, the time from its first start to its last end."""
        both = zip(self.starts, self.ends, strict=True)
        return [self.time(ends[-1] - starts[0]) if ends else 0 for starts, ends in both]

    # ---- the three measures of a bubble

    @property
    def bubble(self) -> Number:
        """Idle share of all the time there was: of p times the makespan. Never above 1."""
        return _ratio(sum(self.idle), self.n_ranks * self.makespan)

    @property
    def bubble_ratio(self) -> Number:
        """Idle time over the ideal time, in which nobody ever waits. May exceed 1."""
        return _ratio(sum(self.idle), sum(self.work))

    @property
    def span_bubble(self) -> Number:
        """What is not work of the longest own span, from a rank's first start to its last end.

        The rate of the zero-bubble paper: the steps in which ranks start and end do not count, as if the next
        iteration began there.
        """
        longest = max(self.spans_of_ranks)
        return _ratio(longest - _ratio(sum(self.work), self.n_ranks), longest)

    # ---- memory

    def in_flight(self, rank: int, mb: Number = 1, mw: Number = 1) -> list[tuple[Number, Number]]:
        """What ``rank`` keeps of its micro-batches: ``(time, amount from then on)``.

        >>> from lessons_lib.pipeline_parallel import one_f_one_b, simulate
        >>> simulate(one_f_one_b(2, 2)).in_flight(0)
        [(0, 1), (1, 2), (6, 1), (9, 0)]

        A micro-batch takes ``mb`` from the start of F to the end of I, and ``mw`` from there to the end of W,
        of a rank's whole stage: a chunk takes its share. With bytes of a stage as mb and mw these are bytes.
        """
        share = neat(Fraction(self.n_ranks, self.schedule.n_stages))
        whole = for_w = 0  # micro-batches between F and I, and between I and W
        curve: list[tuple[Number, Number]] = []
        row = self.schedule.rows[rank]
        for action, start, end in zip(row, self.starts[rank], self.ends[rank], strict=True):
            for kind, *_ in action.parts:
                whole += CHANGES[kind][0]
                for_w += CHANGES[kind][1]
                if kind != "U":
                    amount = neat((whole * mb + for_w * mw) * share)
                    curve.append((self.time(start if kind == "F" else end), amount))
        return curve

    def peak_in_flight(self, mb: Number = 1, mw: Number = 1) -> list[Number]:
        """For each rank, the most it keeps at any time.

        >>> from lessons_lib.pipeline_parallel import one_f_one_b, zb_h1, simulate
        >>> simulate(one_f_one_b(4, 8)).peak_in_flight(), simulate(zb_h1(4, 8)).peak_in_flight(mb=2, mw=1)
        ([4, 3, 2, 1], [8, 7, 6, 5])
        """
        return [
            max((amount for _, amount in self.in_flight(rank, mb, mw)), default=0)
            for rank in range(self.n_ranks)
        ]

    # ---- who waited for whom

    @cached_property
    def makers(self) -> dict[Result, Place]:
        """For each result, where it is made."""
        return {
            result: (rank, index)
            for rank, row in enumerate(self.schedule.rows)
            for index, action in enumerate(row)
            for part in action.parts
            for result in makes(part)
        }

    def needed(self, rank: int, index: int) -> list[tuple[Result, int, Number]]:
        """What an action needed, from which rank, and when it was there."""
        found = []
        for part in self.schedule.rows[rank][index].parts:
            for result in needs(part, self.schedule.n_stages):
                source, at = self.makers[result]
                there = self.ends[source][at]
                if source != rank and self.arrivals is not None:
                    there = self.arrivals[result]
                found.append((result, source, self.time(there)))
        return found

    @cached_property
    def critical_path(self) -> tuple[Place, ...]:
        """Actions that follow each other without a pause, or with a message between, to the very end.

        >>> from lessons_lib.pipeline_parallel import one_f_one_b, simulate
        >>> timeline = simulate(one_f_one_b(2, 2))
        >>> [str(timeline.schedule.rows[rank][index]) for rank, index in timeline.critical_path]
        ['0F0', '1F0', '1B0', '1F1', '1B1', '0B1']

        If one of them took longer, so would the whole. There may be several such paths; this is the one that
        stays on its rank where it can. Of a measurement, every action follows the one it could not start
        before.
        """
        rank = max(range(self.n_ranks), key=lambda rank: (*self.ends[rank][-1:], -rank))
        index = len(self.ends[rank]) - 1
        path = [(rank, index)]
        while True:
            before = [(self.time(self.ends[rank][index - 1]), (rank, index - 1))] if index else []
            before += [(there, self.makers[result]) for result, _, there in self.needed(rank, index)]
            if not before:
                return tuple(reversed(path))
            _, (rank, index) = max(before, key=lambda one: one[0])
            path.append((rank, index))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """What went from rank to rank, in the order in which it was sent."""
        return tuple(sorted(self._messages(), key=lambda message: message.sent))

    def _messages(self) -> Iterator[Message]:
        for rank, row in enumerate(self.schedule.rows):
            for index, action in enumerate(row):
                for result, source, there in self.needed(rank, index):
                    if source != rank:
                        at = self.makers[result][1]
                        sent = float(self.time(self.ends[source][at]))
                        yield Message(source, sent, rank, float(there), f"{result}, for {action}")

    @property
    def bytes_sent(self) -> int:
        return len(self.messages) * self.message_bytes

    # ---- as a picture

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action as a :class:`lessons_lib.timeline.Span`."""
        return tuple(
            Span(rank, float(self.time(start)), float(self.time(end)), action.kind, str(action))
            for rank, row in enumerate(self.schedule.rows)
            for action, start, end in zip(row, self.starts[rank], self.ends[rank], strict=True)
        )

    def picture(self, **options: Any) -> Figure:
        from lessons_lib.views.pipeline import pipeline_picture

        return pipeline_picture(self, **options)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.picture()._repr_mimebundle_(include, exclude)

    def __repr__(self) -> str:
        return f"<timeline of {self.schedule.name}, {self.clock}: {self.makespan} long>"


def _ratio(part: Number, whole: Number) -> Number:
    """Exact where both are."""
    if not whole:
        return 0
    exact = not isinstance(part, float) and not isinstance(whole, float)
    return neat(Fraction(part) / Fraction(whole)) if exact else part / whole
