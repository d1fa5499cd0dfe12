"""The picture of a pipeline: what every rank does when, what it keeps meanwhile, where it stands still."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lessons_lib.errors import RefusedError
from lessons_lib.timeline import Span
from lessons_lib.views.bars import bars
from lessons_lib.views.colours import operation_colour, operation_name
from lessons_lib.views.pipeline_lanes import (
    LEFT,
    MOST_LINES,
    Axis,
    Lanes,
    chunk_lines,
    draw_time_axis,
    rows_below,
)
from lessons_lib.views.pipeline_words import Words, number_text
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, fit, text_width

if TYPE_CHECKING:
    from lessons_lib.pipeline_parallel.actions import Schedule
    from lessons_lib.pipeline_parallel.timeline import PipelineTimeline

MOST_RANKS, MOST_MICROBATCHES = 16, 64  # drawn whole; of more, an overview and a window
MOST_ROWS = 80  # of an overview: every so many-th rank
SLOT = 21.0  # pixels in a window for the shortest action: two digits


def pipeline_picture(
    *timelines: PipelineTimeline,
    theme: str = "light",
    critical_path: bool = False,
    until: float | None = None,
    window: tuple[int, float] = (0, 0.0),
    mb: Any = 1,
    mw: Any = 1,
    unit: str = "micro-batches",
) -> Figure:
    """Draw a schedule, or several below each other on one time axis.

    >>> from lessons_lib.pipeline_parallel import gpipe, simulate
    >>> print(pipeline_picture(simulate(gpipe(4, 12))).alt)
    GPipe, p = 4, m = 12, simulated: done at 45; bubble 20 % of total time, 25 % of ideal time, 20 % of the \
longest own span; peak 12 micro-batches; 72 messages.

    Below the lane of each rank stands what it keeps, as ``PipelineTimeline.in_flight`` counts it with ``mb``
    and ``mw``, in ``unit``; the unit ``"bytes"`` is written as kB, MB, ... ``critical_path`` outlines the
    actions that decide the end. ``until`` is where the axis ends, so that several pictures can share one.
    Above 16 ranks or 64 micro-batches an overview is drawn, and below it a window, which begins at a rank and
    a time.
    """
    if not timelines:
        raise RefusedError("pipeline_picture() needs a timeline: pass what simulate(schedule) returns.")
    told = [Words(timeline, mb, mw, unit) for timeline in timelines]
    title = " and ".join(timeline.schedule.name for timeline in timelines)
    figure = Figure(title, " ".join(words.sentence for words in told), theme=theme)
    y = _legend(figure, [timeline.schedule for timeline in timelines], critical_path)
    end = float(until or max(float(timeline.makespan) for timeline in timelines))
    most = max(float(max(words.peaks)) for words in told) or 1.0
    for words in told:
        timeline = words.timeline
        y = _caption(figure, words, y + 2, alone=len(told) == 1)
        axis, ranks, large = Axis.of(timeline, end), range(timeline.n_ranks), _is_large(timeline.schedule)
        if large:
            ranks, axis, y = _overview(figure, timeline, axis, window, y)
        rows = rows_below(y, len(ranks), len(ranks) * len(told))
        lanes = Lanes(figure, words, ranks, rows, axis, most)
        lanes.draw()
        if critical_path:
            lanes.draw_critical_path()
        y = rows.bottom
        if large or words is told[-1]:
            y = draw_time_axis(figure, axis, y, timeline.clock)
        y += 8
    return figure


def _is_large(schedule: Schedule) -> bool:
    return schedule.n_ranks > MOST_RANKS or schedule.n_microbatches > MOST_MICROBATCHES


def _caption(figure: Figure, words: Words, y: float, alone: bool) -> float:
    muted, name, x = figure.theme.muted, words.timeline.schedule.name, float(MARGIN)
    if not alone:
        figure.text(x, y + 14, name, size=14, bold=True)
        x += text_width(name, 14, bold=True) + 12
    first = " · ".join([words.sizes, words.done, words.peak, words.messages])
    figure.text(x, y + 14, fit(first, WIDTH - MARGIN - x), fill=muted)
    figure.text(MARGIN, y + 33, fit(words.bubbles, WIDTH - 2 * MARGIN), fill=muted)
    return y + 38


def _legend(figure: Figure, schedules: Sequence[Schedule], critical_path: bool) -> float:
    """Only what occurs, in an order that never changes."""
    theme = figure.theme
    actions = [action for schedule in schedules for row in schedule.rows for action in row]
    kinds = {part.kind for action in actions for part in action.parts}
    x, y = float(MARGIN), figure.top

    def key(name: str, *fills: str, line: str = theme.line, chunk: int = 0) -> None:
        """A box with one fill, or two above each other, and its name."""
        nonlocal x, y
        width = 20 + text_width(name) + 15
        if x + width > WIDTH:
            x, y = float(MARGIN), y + 22
        height = 14 / len(fills)
        for at, fill in enumerate(fills):
            figure.rect(x, y + at * height, 14, height, fill, line=line, radius=2)
        chunk_lines(figure, x, y, 14, chunk, fills[0])
        figure.text(x + 20, y + 11.5, name)
        x += width

    for kind in "FBIW":
        if kind in kinds:
            key(operation_name(kind), operation_colour(kind))
    if any(action.kind == "FB" for action in actions):
        key("both, overlapped", operation_colour("F"), operation_colour("B"))
    if "U" in kinds:
        key("update", theme.ink)
    key("idle", figure.waiting())
    key("kept for backward", theme.memory)
    for name, chunk in {name: at for s in schedules for at, name in enumerate(s.chunk_names)}.items():
        if 0 < chunk <= MOST_LINES:
            key(name, operation_colour("F"), chunk=chunk)
    if critical_path:
        key("decides the end", theme.card, line=theme.ink)
    return y + 22


# ---- large schedules


def _overview(
    figure: Figure, timeline: PipelineTimeline, axis: Axis, window: tuple[int, float], y: float
) -> tuple[range, Axis, float]:
    """All ranks and all time, small, and a frame around the window; return what ranks and times are in it."""
    n_ranks, top = timeline.n_ranks, y + 6
    every = -(-n_ranks // MOST_ROWS)
    drawn = range(0, n_ranks, every)
    pitch = min(8.0, max(2.0, 160 / len(drawn)))
    height = pitch * len(drawn)
    width = axis.x(float(timeline.makespan)) - axis.left
    figure.rect(axis.left, top, width, height, figure.waiting())
    shapes: dict[str, list[tuple[float, float, float, float]]] = {}
    for bar in bars(list(_small_spans(timeline, drawn)), axis, len(drawn)):
        box = bar.x, top + bar.span.rank * pitch + 0.2, bar.end_x - bar.x, pitch - 0.4
        shapes.setdefault(bar.span.kind, []).append(box)
    for kind, boxes in sorted(shapes.items()):
        tip = f"{operation_name(kind)}: overview of {n_ranks} ranks"
        figure.boxes(boxes, operation_colour(kind), tip=tip)
    figure.text(LEFT - 10, top + 10, f"{n_ranks} ranks", size=SMALL, anchor="end", fill=figure.theme.muted)
    y = draw_time_axis(figure, axis, top + height, timeline.clock)

    ranks, inside = _window(timeline, axis, window)
    x, end_x = axis.x(inside.start), axis.x(inside.end)
    frame = x, top + ranks[0] / every * pitch, end_x - x, len(ranks) / every * pitch
    figure.rect(*frame, "none", line=figure.theme.ink, line_width=2)
    times = f"{number_text(inside.start)} to {number_text(inside.end)}"
    figure.text(axis.left, y + 18, f"in the frame: ranks {ranks[0]} to {ranks[-1]}, {times}")
    return ranks, inside, y + 20


def _window(timeline: PipelineTimeline, axis: Axis, window: tuple[int, float]) -> tuple[range, Axis]:
    """The ranks and times of a window: as many as can be read, all of them there."""
    rank = min(max(window[0], 0), max(0, timeline.n_ranks - MOST_RANKS))
    both = zip(timeline.starts[rank], timeline.ends[rank], strict=True)
    shortest = timeline.time(min((end - start for start, end in both if end > start), default=1))
    length = min(axis.end, (axis.right - axis.left) / SLOT * float(shortest))
    start = min(max(float(window[1]), 0.0), axis.end - length)
    ranks = range(rank, min(rank + MOST_RANKS, timeline.n_ranks))
    return ranks, replace(axis, start=start, end=start + length)


def _small_spans(timeline: PipelineTimeline, ranks: range) -> Iterator[Span]:
    """The actions of some ranks, a pair as its forward and its backward one after the other."""
    for row, rank in enumerate(ranks):
        times = zip(timeline.schedule.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        for action, start_tick, end_tick in times:
            start, end = float(timeline.time(start_tick)), float(timeline.time(end_tick))
            each = (end - start) / len(action.parts)
            for at, part in enumerate(action.parts):
                if part.kind != "U":
                    yield Span(row, start + at * each, start + (at + 1) * each, part.kind)
