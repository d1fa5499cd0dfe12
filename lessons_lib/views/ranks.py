"""The picture of a run: one lane per rank over time, and below it who sent how much."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lessons_lib.timeline import (
    Event,
    Message,
    Timeline,
    Traffic,
    TrafficRow,
    one_or_range,
    ranks_text,
)
from lessons_lib.views.axes import Rows, TimeAxis, clock_words
from lessons_lib.views.bars import CLOSE, MARK, TICK, Bar, bars, depth, is_crowded, marks
from lessons_lib.views.colours import OPERATIONS, WAITING, operation_colour, operation_name, rank_colour
from lessons_lib.views.memory import Curve, bytes_text, draw_memory, peak, peaks_text
from lessons_lib.views.svg import MARGIN, SMALL, TEXT, WIDTH, Figure, Key, fit, text_width

LEFT, RIGHT = 92, WIDTH - 28  # of the time axis
BESIDE = (90, 190)  # widths of the column beside the lanes: few, so that few pictures differ in scale
MOST_ROWS = 16  # of the traffic table
MOST_BARS = 3000  # with a hover title each; more are drawn as one shape per lane and kind
HEAD = 6.0  # pixels; the width of an arrowhead
APART = 24.0  # pixels between the lines that join lanes, where there are many

Note = tuple[int, float, str]  # rank, time, what became of it (may be empty)


def lanes(
    timeline: Timeline,
    traffic: Traffic | None = None,
    *,
    title: str,
    subtitle: str = "",
    notes: Sequence[Note] = (),
    failed: Collection[int] = (),
    events: Iterable[Event] = (),
    memory: Sequence[Curve] = (),
    theme: str = "light",
    cursor: float | None = None,
    until: float | None = None,
) -> Figure:
    """Draw one lane per rank over time, and the traffic table below.

    >>> from lessons_lib.timeline import Message, Span, Timeline
    >>> spans = (Span(0, 0.0, 2e-3, "compute"), Span(1, 0.0, 2e-3, "wait"), Span(1, 2e-3, 4e-3, "compute"))
    >>> print(lanes(Timeline(2, spans, (Message(0, 2e-3, 1, 2e-3),)), title="A send, measured").alt)
    A send, measured: lanes of 2 ranks over 4 ms of measured time, with 1 message between them.

    Work is a solid bar, waiting is hatched, a communication is a bar higher than the lane and a
    message an arrow. Where communications are many they are ticks above the lanes, and the legend
    counts them. ``events`` joins the lanes that meet in a collective by a thin line. ``notes`` mark
    where lanes end and say what became of their ranks, ``(rank, time, text)``; the marks of ``failed``
    ranks stand out. ``memory`` is for each rank a list of ``(time, bytes)``, drawn below its lane, on
    one scale for all. ``cursor`` marks a time. ``until`` is where the axis ends, so that several
    pictures can share one.
    """
    last = [timeline.makespan, *(m.received for m in timeline.messages), *(time for _, time, _ in notes)]
    end = float(until or max(last))
    beside = [text for *_, text in notes] + [_peak(curve) for curve in memory]
    words = max((text_width(text) for text in beside), default=0.0)
    right = RIGHT - next((width for width in (0, *BESIDE) if words <= width), BESIDE[-1])
    axis = TimeAxis.until(end, LEFT, right)
    alt = _alt(timeline, traffic, notes, memory, axis, title)
    figure = Figure(title, alt, subtitle=subtitle, theme=theme)
    crowded = is_crowded(timeline.spans, axis)
    arrows = _arrows(timeline, axis, crowded)
    keys = _keys(figure, timeline, memory, axis, crowded, len(arrows))
    top = figure.legend(keys, figure.top) if keys else figure.top
    rows = Rows.below(top + 2, timeline.n_ranks, ticks=crowded, memory=bool(memory))

    _lanes(figure, rows, axis)
    if memory:
        ends = [timeline.end_of(rank) or end for rank in range(timeline.n_ranks)]
        draw_memory(figure, rows, axis, memory, ends)
    joins = _joins(rows, axis, events, APART if crowded else CLOSE)
    thin = 1.0 if crowded else MARK
    for join in joins:
        for above, below in pairwise(join.pieces):  # behind lanes that are not in the group
            figure.line([above[-1], below[0]], join.colour, width=thin)
    fillings = [span for span in timeline.spans if depth(span.kind) < 2]
    _bars(figure, rows, axis, bars(fillings, axis, timeline.n_ranks))
    for join in joins:
        for piece in join.pieces:
            figure.line(piece, join.colour, width=thin, tip=join.tip)
    communications = [span for span in timeline.spans if depth(span.kind) == 2]
    _bars(figure, rows, axis, marks(communications, axis, TICK if crowded else MARK), crowded)
    _messages(figure, rows, axis, arrows)
    _ends(figure, rows, axis, notes, failed)
    _beside(figure, rows, axis, notes, memory)
    if cursor is not None and cursor <= end:
        x = axis.x(cursor)
        figure.line(
            [(x, rows.top - 6), (x, rows.bottom + 4)], figure.theme.ink, width=2, tip=axis.words(cursor)
        )
    bottom = _time_axis(figure, rows, axis, timeline.clock)
    if traffic is not None:
        _traffic_table(figure, traffic, bottom + 20)
    return figure


def _alt(
    timeline: Timeline,
    traffic: Traffic | None,
    notes: Sequence[Note],
    memory: Sequence[Curve],
    axis: TimeAxis,
    title: str,
) -> str:
    n = timeline.n_ranks
    parts = [f"{title}: {_lanes_of(n)} over {axis.words(axis.end)} of {clock_words(timeline.clock)}"]
    if timeline.messages:
        parts[0] += f", with {_count(len(timeline.messages), 'message')} between them"
    if traffic is not None and traffic.rows:
        sent = one_or_range([traffic.bytes_sent(rank) for rank in range(n)])
        calls = [f"{one_or_range(row.calls)} {row.kind} on {row.group}" for row in traffic.rows[:4]]
        more = len(traffic.rows) - len(calls)
        calls += [f"{more} further kinds"] if more else []
        parts.append(f"each rank sends {sent} bytes in {', '.join(calls)}")
    elif traffic is not None:
        parts.append("the ranks did not communicate")
    if memory:
        parts.append(f"memory peaks at {peaks_text(memory)} on each rank")
    ends: dict[str, list[int]] = {}
    for rank, _, text in notes:
        ends.setdefault(text, []).append(rank)
    told = [(text, ranks) for text, ranks in ends.items() if text]
    parts += [f"{ranks_text(ranks)}: {text}" for text, ranks in told[:4]]
    if len(told) > 4:
        parts.append(f"{len(told) - 4} further ways to end")
    return "; ".join(parts) + "."


def _lanes_of(n_ranks: int) -> str:
    return f"lanes of {n_ranks} ranks" if n_ranks > 1 else "the lane of 1 rank"


def _count(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def _keys(
    figure: Figure,
    timeline: Timeline,
    memory: Sequence[Curve],
    axis: TimeAxis,
    crowded: bool,
    n_arrows: int,
) -> list[Key]:
    """Only what occurs, in an order that never changes; of ticks, which are many, the number."""
    calls: dict[str, list[int]] = {}
    short: set[str] = set()
    for span in timeline.spans:
        calls.setdefault(span.kind, [0] * timeline.n_ranks)[span.rank] += 1
        if crowded and axis.x(float(span.end)) - axis.x(float(span.start)) < TICK:
            short.add(span.kind)
    known = [kind for kind in OPERATIONS if kind in calls]
    others = sorted(calls.keys() - {*known, WAITING})
    keys = []
    for kind in [*known, *others]:
        if depth(kind) == 2 and kind in short:
            count = one_or_range(calls[kind])
            keys.append(Key(operation_colour(kind), f"{count} {operation_name(kind)} per rank", "ticks"))
        else:
            keys.append(Key(operation_colour(kind), operation_name(kind)))
    n_messages = len(timeline.messages)
    if crowded and n_arrows < n_messages:
        keys.append(Key(operation_colour("send"), f"{n_arrows:,} of {n_messages:,} messages"))
    elif timeline.messages and "send" not in calls:
        keys.append(Key(operation_colour("send"), "message"))
    if WAITING in calls:
        keys.append(Key(figure.waiting(), "waiting"))
    if memory:
        most = max(map(peak, memory))
        keys.append(Key(figure.theme.memory, f"memory, at most {bytes_text(most)}"))
    return keys


def _lanes(figure: Figure, rows: Rows, axis: TimeAxis) -> None:
    """The empty lanes with the ranks' numbers."""
    theme = figure.theme
    every = rows.every(20)
    for rank in range(rows.n_ranks):
        figure.rect(axis.left, rows.y(rank), axis.right - axis.left, rows.height, theme.lane, radius=2)
        colour = rank_colour(rank, rows.n_ranks)
        baseline = rows.middle(rank) + 4.5
        if colour:
            figure.text(MARGIN, baseline, "rank", fill=theme.muted)
            figure.chip(
                MARGIN + 36, rows.middle(rank) - 9, str(rank), colour, width=24, height=18, tip=f"rank {rank}"
            )
        elif rank % every == 0:
            figure.text(axis.left - 10, baseline, f"rank {rank}", size=SMALL, anchor="end")
    for tick in axis.ticks():
        x = axis.x(tick)
        figure.line([(x, rows.top + rows.gap / 2), (x, rows.bottom)], theme.line, width=0.8)


@dataclass(frozen=True, slots=True)
class Join:
    """The line through the lanes that meet in a collective, in pieces of neighbouring lanes."""

    pieces: list[list[tuple[float, float]]]
    colour: str
    tip: str


def _joins(rows: Rows, axis: TimeAxis, events: Iterable[Event], apart: float) -> list[Join]:
    """Of lines of one group nearer than ``apart`` to each other, the first."""
    met: dict[tuple[str, str, tuple[int, ...], int], list[Event]] = {}
    for event in events:
        if event.is_collective:
            met.setdefault((event.kind, event.group, event.members, event.sequence), []).append(event)
    joins: list[Join] = []
    last_x: dict[tuple[int, ...], float] = {}
    over = rows.gap / 3
    for (kind, group, members, _), present in met.items():
        if not 1 < len(present) == len(members):  # they never met
            continue
        x = axis.x(max(event.done_s for event in present))
        if abs(x - last_x.get(members, -math.inf)) < apart:
            continue
        last_x[members] = x
        pieces: list[list[tuple[float, float]]] = []
        before = None
        for event in sorted(present, key=lambda event: event.rank):
            at = min(max(axis.left + MARK / 2, axis.x(event.done_s)), axis.right - MARK / 2)
            y = rows.y(event.rank)
            if before is None or event.rank != before + 1:
                pieces.append([])
            pieces[-1] += [(at, y - over), (at, y + rows.height + over)]
            before = event.rank
        straight = [[p[0], p[-1]] if len({x for x, _ in p}) == 1 else p for p in pieces]
        joins.append(Join(straight, operation_colour(kind), f"{kind} on {group}, {ranks_text(members)}"))
    return joins


def _bars(figure: Figure, rows: Rows, axis: TimeAxis, drawn: Sequence[Bar], ticks: bool = False) -> None:
    """Work fills its lane, communication is higher; what takes no time is a tick above, if ``ticks``."""
    shapes: dict[tuple[int, str], list[tuple[float, float, float, float]]] = {}
    n_spans: dict[tuple[int, str], int] = {}
    for bar in drawn:
        kind, rank = bar.span.kind, bar.span.rank
        x, width, y, height = bar.x, bar.end_x - bar.x, rows.y(rank), rows.height
        if depth(kind) == 2 and ticks and width <= TICK + 1e-6:
            y, height = y - rows.tick, rows.tick
        elif depth(kind) == 2:
            y, height = y - rows.gap / 3, height + 2 * rows.gap / 3
        elif width > 4:
            width -= 0.6  # neighbours of one colour stay two
        if len(drawn) > MOST_BARS:
            shapes.setdefault((rank, kind), []).append((x, y, width, height))
            n_spans[rank, kind] = n_spans.get((rank, kind), 0) + bar.n_spans
        else:
            tip = _tip(bar, axis)
            figure.rect(x, y, width, height, _fill(figure, kind), radius=1.5 * (width > 3), tip=tip)
    for (rank, kind), boxes in shapes.items():
        tip = f"rank {rank}, {n_spans[rank, kind]:,} × {_name(kind)}"
        figure.boxes(boxes, _fill(figure, kind), tip=tip)


def _fill(figure: Figure, kind: str) -> str:
    return figure.waiting() if kind == WAITING else operation_colour(kind)


def _name(kind: str) -> str:
    return "waiting" if kind == WAITING else operation_name(kind)


def _tip(bar: Bar, axis: TimeAxis) -> str:
    span, start = bar.span, float(bar.span.start)
    if bar.n_spans > 1:
        many = f"{bar.n_spans} × {_name(span.kind)}, {axis.number(start)} to {axis.words(bar.until)}"
        return f"rank {span.rank}, {many}"
    when = f"at {axis.words(start)}"
    if bar.until > start:
        when = f"{axis.number(start)} to {axis.words(bar.until)}, {axis.words(bar.until - start)}"
    label = f": {span.label}" if span.label else ""
    return f"rank {span.rank}, {_name(span.kind)}, {when}{label}"


def _arrows(timeline: Timeline, axis: TimeAxis, crowded: bool) -> list[Message]:
    """The messages to draw: of those between two ranks that would hide each other or the work, the first."""
    apart = APART * max(1.0, timeline.n_ranks / 8) if crowded else HEAD
    drawn: list[Message] = []
    last: dict[tuple[int, int], tuple[float, float]] = {}
    for message in sorted(timeline.messages, key=lambda message: message.sent):
        x, end_x = axis.x(float(message.sent)), axis.x(float(message.received))
        ends = message.source, message.destination
        before = last.get(ends)
        if before is None or x - before[0] >= apart or abs(end_x - before[1]) >= apart:
            last[ends] = x, end_x
            drawn.append(message)
    return drawn


def _messages(figure: Figure, rows: Rows, axis: TimeAxis, messages: Iterable[Message]) -> None:
    """Arrows from lane to lane."""
    colour = operation_colour("send")
    for message in messages:
        x, end_x = axis.x(float(message.sent)), axis.x(float(message.received))
        down = message.destination > message.source
        leave = rows.y(message.source) + (rows.height if down else 0)
        arrive = rows.y(message.destination) + (0 if down else rows.height)
        label = f": {message.label}" if message.label else ""
        tip = (
            f"rank {message.source} to rank {message.destination}, sent at {axis.words(float(message.sent))}"
        )
        figure.arrow((x, leave), (end_x, arrive), colour, tip=tip + label)


def _ends(figure: Figure, rows: Rows, axis: TimeAxis, notes: Sequence[Note], failed: Collection[int]) -> None:
    """A mark where a lane ends."""
    theme = figure.theme
    for rank, time, text in notes:
        x, y = axis.x(float(time)), rows.middle(rank)
        half, width = (rows.height / 2 + rows.gap / 3, 4) if rank in failed else (rows.height / 2, 2)
        mark = theme.alarm if rank in failed else theme.muted
        tip = f"rank {rank} at {axis.words(float(time))}: {text or 'ended'}"
        figure.rect(x - width / 2, y - half, width, 2 * half, mark, radius=1, tip=tip)


def _beside(
    figure: Figure, rows: Rows, axis: TimeAxis, notes: Sequence[Note], memory: Sequence[Curve]
) -> None:
    """A column of what became of each rank and of its peak of memory, where there is room to write it."""
    theme, x = figure.theme, axis.right + 10
    words = [(rows.middle(rank), text, theme.ink) for rank, _, text in sorted(notes)]
    words += [
        (rows.floor(rank) - rows.memory / 2 + 1, _peak(curve), theme.muted)
        for rank, curve in enumerate(memory)
    ]
    written: list[float] = []
    for y, text, ink in words:
        if text and all(abs(y - other) >= 14 for other in written):
            written.append(y)
            shown = fit(text, WIDTH - MARGIN - x)
            figure.text(x, y + 4.5, shown, fill=ink, tip="" if shown == text else text)


def _peak(curve: Curve) -> str:
    return f"peak {bytes_text(peak(curve))}"


def _time_axis(figure: Figure, rows: Rows, axis: TimeAxis, clock: str) -> float:
    theme, y = figure.theme, rows.bottom + 2
    figure.line([(axis.left, y), (axis.right, y)], theme.line)
    for tick in axis.ticks():
        x = axis.x(tick)
        figure.line([(x, y), (x, y + 5)], theme.muted)
        figure.text(x, y + 18, axis.number(tick), size=SMALL, anchor="middle", fill=theme.muted)
    middle = (axis.left + axis.right) / 2
    words = fit(clock_words(clock, axis.unit), axis.right - axis.left, SMALL)
    figure.text(middle, y + 36, words, size=SMALL, anchor="middle", fill=theme.muted)
    return y + 40


def _traffic_table(figure: Figure, traffic: Traffic, y: float) -> None:
    """One row per kind and group, and the total."""
    theme = figure.theme
    group_x, calls_x, bytes_x = 260, 640, WIDTH - MARGIN - 12
    ranks = range(traffic.n_ranks)
    if not traffic.rows:
        figure.text(MARGIN, y + 14, "No communication: no rank sent anything.", fill=theme.muted)
        return
    for x, anchor, head in (
        (MARGIN + 22, "start", "communication"),
        (group_x, "start", "group"),
        (calls_x, "end", "calls per rank"),
        (bytes_x, "end", "bytes sent per rank"),
    ):
        figure.text(x, y + 8, head, size=SMALL, anchor=anchor, fill=theme.muted)
    y += 16

    def numbers(calls: Sequence[int], sent: Sequence[int], bold: bool = False) -> None:
        figure.text(calls_x, y + 16, one_or_range(calls), anchor="end", bold=bold)
        figure.text(bytes_x, y + 16, one_or_range(sent), anchor="end", bold=bold)

    for row in traffic.rows[:MOST_ROWS]:
        figure.line([(MARGIN, y), (WIDTH - MARGIN, y)], theme.line)
        figure.rect(MARGIN + 2, y + 5, 13, 13, operation_colour(row.kind), line=theme.line, radius=2)
        figure.text(MARGIN + 22, y + 16, fit(row.kind, group_x - 50))
        group = fit(row.group, calls_x - group_x - 130)
        figure.text(group_x, y + 16, group, tip="" if group == row.group else row.group)
        numbers(row.calls, row.bytes_sent)
        y += 24
    left_out: Sequence[TrafficRow] = traffic.rows[MOST_ROWS:]
    if left_out:
        figure.line([(MARGIN, y), (WIDTH - MARGIN, y)], theme.line)
        figure.text(
            MARGIN + 22, y + 16, f"{_count(len(left_out), 'further row')}, in the total", fill=theme.muted
        )
        y += 24
    figure.line([(MARGIN, y), (WIDTH - MARGIN, y)], theme.muted)
    figure.text(MARGIN + 22, y + 16, "total", size=TEXT, bold=True)
    numbers(
        [sum(row.calls[rank] for row in traffic.rows) for rank in ranks],
        [traffic.bytes_sent(rank) for rank in ranks],
        bold=True,
    )
