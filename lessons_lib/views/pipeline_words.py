"""What is said about a pipeline: sizes, the three measures of its bubble, memory, messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lessons_lib.views.memory import bytes_text

if TYPE_CHECKING:
    from lessons_lib.pipeline_parallel.timeline import PipelineTimeline


@dataclass(frozen=True)
class Words:
    """A timeline in words; memory is counted with ``mb`` and ``mw``, in ``unit``.

    >>> from lessons_lib.pipeline_parallel import gpipe, simulate
    >>> words = Words(simulate(gpipe(16, 8)))
    >>> words.sizes, words.bubbles
    ('p = 16, m = 8', 'bubble 65.2 % of total time, 187.5 % of ideal time, 65.2 % of the longest own span')
    """

    timeline: PipelineTimeline
    mb: Any = 1
    mw: Any = 1
    unit: str = "micro-batches"

    @cached_property
    def curves(self) -> list[list[tuple[Any, Any]]]:
        return [self.timeline.in_flight(rank, self.mb, self.mw) for rank in range(self.timeline.n_ranks)]

    @cached_property
    def peaks(self) -> list[Any]:
        return [max((amount for _, amount in curve), default=0) for curve in self.curves]

    def amount(self, number: Any) -> str:
        return bytes_text(float(number)) if self.unit == "bytes" else number_text(number)

    @property
    def peak(self) -> str:
        low, high = self.amount(min(self.peaks)), self.amount(max(self.peaks))
        each = low if low == high else f"{low} to {high}"
        return f"peak {each}" if self.unit == "bytes" else f"peak {each} {self.unit}"

    @property
    def sizes(self) -> str:
        schedule = self.timeline.schedule
        v = f", v = {schedule.n_chunks}" if schedule.n_chunks > 1 else ""
        return f"p = {schedule.n_ranks}, m = {schedule.n_microbatches}{v}"

    @property
    def done(self) -> str:
        return f"done at {number_text(self.timeline.makespan)}"

    @property
    def bubbles(self) -> str:
        """Every measure of the bubble, each by its name."""
        total, ideal, span = (
            percent(share)
            for share in (self.timeline.bubble, self.timeline.bubble_ratio, self.timeline.span_bubble)
        )
        return f"bubble {total} of total time, {ideal} of ideal time, {span} of the longest own span"

    @property
    def messages(self) -> str:
        n = len(self.timeline.messages)
        sent = f" ({bytes_text(self.timeline.bytes_sent)})" if self.timeline.message_bytes else ""
        return f"{n:,} message{'' if n == 1 else 's'}{sent}"

    @property
    def sentence(self) -> str:
        what = f"{self.timeline.schedule.name}, {self.sizes}, {self.timeline.clock}"
        return f"{what}: {self.done}; {self.bubbles}; {self.peak}; {self.messages}."


def number_text(number: Any) -> str:
    """A number in about four digits.

    >>> number_text(27), number_text(27 / 8), number_text(12345.6)
    ('27', '3.375', '12,346')
    """
    return f"{float(number):,.0f}" if abs(number) >= 1000 else f"{float(number):.4g}"


def percent(share: Any) -> str:
    """A share to a tenth of a percent.

    >>> percent(1 / 9), percent(0), percent(0.0625), percent(1.875)
    ('11.1 %', '0 %', '6.3 %', '187.5 %')
    """
    return f"{math.floor(1000 * float(share) + 0.5) / 10:g} %"
