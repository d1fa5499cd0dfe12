"""The lanes of a pipeline: one per rank, with its actions over time and below it what it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lessons_lib.views.axes import Rows, TimeAxis
from lessons_lib.views.colours import operation_colour, operation_name, rank_colour, text_on
from lessons_lib.views.pipeline_words import Words, number_text, percent
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, text_width

if TYPE_CHECKING:
    from lessons_lib.pipeline_parallel.actions import Action
    from lessons_lib.pipeline_parallel.timeline import PipelineTimeline

LEFT, RIGHT = 92, WIDTH - 128  # of the time axis
IDLE, PEAK = WIDTH - 70, WIDTH - MARGIN  # where the columns of numbers end
MOST_LINES = 3  # across a block, for its chunk

ink_on = cache(text_on)


@dataclass(frozen=True, slots=True)
class Axis(TimeAxis):
    """A time axis that need not begin at 0."""

    start: float = 0.0

    @classmethod
    def of(cls, timeline: PipelineTimeline, end: float) -> Axis:
        """In s, ms or µs what was measured; anything else in the unit of its times, which has no name."""
        if timeline.clock == "measured":
            seconds = TimeAxis.until(end, LEFT, RIGHT)
            return cls(end, LEFT, RIGHT, seconds.unit, seconds.per_unit)
        return cls(end, LEFT, RIGHT, "", 1.0)

    def x(self, time: float) -> float:
        share = (time - self.start) / ((self.end - self.start) or 1.0)
        return self.left + (self.right - self.left) * min(max(share, 0.0), 1.0)

    def ticks(self, most: int = 10) -> list[float]:
        """Round times from the start to the end.

        >>> Axis(250.0, 0, 100, "", 1.0, start=201.0).ticks()
        [205.0, 210.0, 215.0, 220.0, 225.0, 230.0, 235.0, 240.0, 245.0, 250.0]
        """
        length = TimeAxis(self.end - self.start, self.left, self.right, self.unit, self.per_unit)
        step = length.ticks(most)[1] if self.end > self.start else 1.0
        first, last = math.ceil(self.start / step - 1e-9), int(self.end / step * (1 + 1e-12))
        return [at * step for at in range(first, last + 1)]

    def shows(self, start: float, end: float) -> bool:
        return start < self.end and end > self.start


@dataclass(frozen=True)
class Lanes:
    """The lanes of some ranks in a figure; ``most`` is the amount that fills the height of a memory curve."""

    figure: Figure
    words: Words
    ranks: range
    rows: Rows
    axis: Axis
    most: float

    @property
    def timeline(self) -> PipelineTimeline:
        return self.words.timeline

    def draw(self) -> None:
        theme, rows, axis = self.figure.theme, self.rows, self.axis
        for right, head in ((IDLE, "idle"), (PEAK, "peak")):
            self.figure.text(right, rows.top - 3, head, size=SMALL, anchor="end", fill=theme.muted)
        for tick in axis.ticks():
            x = axis.x(tick)
            self.figure.line([(x, rows.top + rows.gap / 2), (x, rows.bottom)], theme.line, width=0.8)
        for row, rank in enumerate(self.ranks):
            self._beside(row, rank)
            self._idle(row, rank)
            self._blocks(row, rank)
            self._memory(row, rank)
        done = float(self.timeline.makespan)
        if axis.start < done <= axis.end:
            ends = [(axis.x(done), rows.top), (axis.x(done), rows.bottom)]
            self.figure.line(ends, theme.ink, width=1.2, dash="4 3")

    def _beside(self, row: int, rank: int) -> None:
        """On the left the rank, on the right how long it is idle and the most it keeps."""
        figure, theme, baseline = self.figure, self.figure.theme, self.rows.middle(row) + 4.5
        colour = rank_colour(rank, self.timeline.n_ranks)
        if colour:
            figure.text(MARGIN, baseline, "rank", fill=theme.muted)
            top = self.rows.middle(row) - 9
            figure.chip(MARGIN + 36, top, str(rank), colour, width=24, height=18, tip=f"rank {rank}")
        else:
            figure.text(LEFT - 10, baseline, f"rank {rank}", anchor="end")
        share = self.timeline.idle[rank] / (self.timeline.makespan or 1)
        figure.text(IDLE, baseline, percent(share), anchor="end", fill=theme.muted)
        figure.text(PEAK, baseline, self.words.amount(self.words.peaks[rank]), anchor="end", bold=True)

    def _idle(self, row: int, rank: int) -> None:
        """Hatched: from an end to the next start, and after the last end until all ranks are done."""
        timeline, axis = self.timeline, self.axis
        starts = [timeline.time(start) for start in timeline.starts[rank]] + [timeline.makespan]
        ends = [0, *(timeline.time(end) for end in timeline.ends[rank])]
        for index, (end, start) in enumerate(zip(ends, starts, strict=True)):
            if start > end and axis.shows(float(end), float(start)):
                x, end_x = axis.x(float(end)), axis.x(float(start))
                tip = f"rank {rank} idle, {number_text(end)} to {number_text(start)}{self._why(rank, index)}"
                height = self.rows.height
                self.figure.rect(x, self.rows.y(row), end_x - x, height, self.figure.waiting(), tip=tip)

    def _why(self, rank: int, index: int) -> str:
        """What an action waited for: what came last of all it needed."""
        if index == len(self.timeline.starts[rank]):
            return ": done"
        needed = self.timeline.needed(rank, index)
        if not needed:
            return ""
        result, source, _ = max(needed, key=lambda need: need[2])
        return f": waits for {result}, from rank {source}"

    def _blocks(self, row: int, rank: int) -> None:
        timeline, axis, rows = self.timeline, self.axis, self.rows
        shown = []
        room: dict[str, float] = {}  # that every number of a kind needs: all are written, or none
        for index, action in enumerate(timeline.schedule.rows[rank]):
            start, end = (timeline.time(each[rank][index]) for each in (timeline.starts, timeline.ends))
            if axis.shows(float(start), float(end)) or start == end:
                x = axis.x(float(start))
                shown.append((action, x, axis.x(float(end)) - x, self._tip(rank, index, start, end)))
                for part in action.parts:
                    width = text_width(str(part.microbatch), SMALL, bold=True) + 3
                    room[action.kind] = max(room.get(action.kind, 0.0), width)
        for action, x, width, tip in shown:
            if action.kind == "U" and width < 2:
                ink = self.figure.theme.ink
                self.figure.rect(x - 1, rows.y(row) - 2, 2, rows.height + 4, ink, tip=tip)
                continue
            height = rows.height / len(action.parts)
            for at, part in enumerate(action.parts):
                box = x, rows.y(row) + at * height, width - min(1.0, width / 8), height - 0.5 * (at == 0)
                self._block(rank, part, box, tip, has_number=room[action.kind] <= width and height >= 11)

    def _block(
        self, rank: int, part: Action, box: tuple[float, float, float, float], tip: str, has_number: bool
    ) -> None:
        x, y, width, height = box
        colour = self.figure.theme.muted if part.kind == "U" else operation_colour(part.kind)
        self.figure.rect(x, y, width, height, colour, radius=min(2.0, width / 6), tip=tip)
        if width > 3 and not (has_number and height < 18):
            chunk_lines(self.figure, x, y, width, self.timeline.schedule.chunk(rank, part), colour)
        if has_number:
            number, middle, baseline = str(part.microbatch), x + width / 2, y + height / 2 + 4.5
            ink = ink_on(colour)
            self.figure.text(middle, baseline, number, size=SMALL, anchor="middle", fill=ink, bold=True)

    def _tip(self, rank: int, index: int, start: Any, end: Any) -> str:
        """An action, its start and end, and what it needed."""
        parts = []
        for kind, stage, k in self.timeline.schedule.rows[rank][index].parts:
            name = "update after" if kind == "U" else operation_name(kind)
            parts.append(f"{name} {k} on stage {stage}")
        needed = [
            f"{result}, from rank {source}, there at {number_text(there)}"
            for result, source, there in self.timeline.needed(rank, index)
        ]
        what = f"rank {rank}, {' and '.join(parts)}, {number_text(start)} to {number_text(end)}"
        return what + (f"; needed {'; '.join(needed)}" if needed else "")

    def _memory(self, row: int, rank: int) -> None:
        """What the rank keeps, as a filled step curve."""
        axis, floor = self.axis, self.rows.floor(row)
        outline = [(axis.left, floor)]
        for time, amount in self.words.curves[rank]:
            if time <= axis.end:
                height = (self.rows.memory - 3) * float(amount) / self.most
                x = axis.x(float(time))
                outline += [(x, outline[-1][1]), (x, floor - height)]
        end_x = axis.x(min(float(self.timeline.makespan), axis.end))
        outline += [(end_x, outline[-1][1]), (end_x, floor)]
        tip = f"rank {rank} keeps at most {self.words.amount(self.words.peaks[rank])}"
        self.figure.polygon(outline, self.figure.theme.memory, tip=tip)
        self.figure.line([(axis.left, floor), (axis.right, floor)], self.figure.theme.line)

    def draw_critical_path(self) -> None:
        """Outlines around the actions that decide the end, and a line along each message between them."""
        ink, rows, timeline = self.figure.theme.ink, self.rows, self.timeline
        places: list[tuple[int, float, float] | None] = []  # row, left and right; None out of the picture
        for rank, index in timeline.critical_path:
            start, end = (float(timeline.time(t[rank][index])) for t in (timeline.starts, timeline.ends))
            seen = rank in self.ranks and self.axis.shows(start, end)
            row = rank - self.ranks[0]
            places.append((row, self.axis.x(start), self.axis.x(end) - 1) if seen else None)
        for row, x, end_x in filter(None, places):
            y, low_y = rows.y(row), rows.y(row) + rows.height
            self.figure.line([(x, y), (end_x, y), (end_x, low_y), (x, low_y), (x, y)], ink, width=2)
        for one, other in pairwise(places):
            if one and other and one[0] != other[0]:
                down = other[0] > one[0]
                leave = rows.y(one[0]) + (rows.height if down else 0)
                arrive = rows.y(other[0]) + (0 if down else rows.height)
                self.figure.line([(one[2], leave), (other[1], arrive)], ink, width=2)


def chunk_lines(figure: Figure, x: float, y: float, width: float, chunk: int, colour: str) -> None:
    """No line for the first chunk, one for the second, ...; of too many chunks, none."""
    for at in range(chunk if chunk <= MOST_LINES else 0):
        figure.rect(x, y + 2 + 3 * at, width, 1.2, ink_on(colour), opacity=0.75)


def draw_time_axis(figure: Figure, axis: Axis, y: float, clock: str) -> float:
    """Ticks, numbers and what is counted; return where the next thing may begin."""
    theme, y = figure.theme, y + 2
    figure.line([(axis.left, y), (axis.right, y)], theme.line)
    for tick in axis.ticks():
        x = axis.x(tick)
        figure.line([(x, y), (x, y + 5)], theme.muted)
        figure.text(x, y + 18, axis.number(tick), size=SMALL, anchor="middle", fill=theme.muted)
    words = f"{clock} time ({axis.unit})" if axis.unit else f"{clock} time, in the unit of F, I and W"
    figure.text((axis.left + axis.right) / 2, y + 36, words, size=SMALL, anchor="middle", fill=theme.muted)
    return y + 40


def rows_below(y: float, n_ranks: int, n_in_all: int) -> Rows:
    """Rows for some ranks: the more there are in all, the lower."""
    pitch = min(54.0, max(27.0, 460 / n_in_all))
    memory, gap = 0.36 * pitch, 0.14 * pitch
    return Rows(y + 12, n_ranks, gap, pitch - memory - gap, memory)
