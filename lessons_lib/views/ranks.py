"""The picture of a run: one lane per rank over time, and below it who sent how much."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from lessons_lib.timeline import Event, Message, Span, Timeline, Traffic, TrafficRow, one_or_range
from lessons_lib.views.colours import OPERATIONS, WAITING, operation_colour, operation_name, rank_colour
from lessons_lib.views.svg import MARGIN, SMALL, TEXT, WIDTH, Figure, fit, text_width

LEFT, RIGHT = 92, WIDTH - 28  # of the time axis
NARROWEST = 3.0  # pixels; a communication that takes no time is drawn this wide
MOST_ROWS = 16  # of the traffic table
MOST_BARS = 3000  # with a hover title each; more are drawn as one shape per lane and kind
WORK = ("compute", "F", "B", "I", "W")  # other kinds but waiting are communication

Note = tuple[int, float, str]  # rank, time, what became of it (may be empty)


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


@dataclass(frozen=True, slots=True)
class Bar:
    """What is drawn for a span, or for several spans too short to be drawn one by one."""

    x: float
    end_x: float
    span: Span  # the first
    until: float
    n_spans: int = 1


def lanes(
    timeline: Timeline,
    traffic: Traffic | None = None,
    *,
    title: str,
    subtitle: str = "",
    notes: Sequence[Note] = (),
    failed: Collection[int] = (),
    events: Iterable[Event] = (),
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
    message an arrow. ``events`` joins the lanes that meet in a collective by a thin line. ``notes`` mark
    where lanes end and say what became of their ranks, ``(rank, time, text)``; the marks of ``failed``
    ranks stand out. ``cursor`` marks a time. ``until`` is where the axis ends, so that several pictures
    can share one.
    """
    last = [timeline.makespan, *(m.received for m in timeline.messages), *(time for _, time, _ in notes)]
    end = float(until or max(last))
    words = max((text_width(text) for *_, text in notes), default=0.0)
    right = RIGHT - min(320.0, words)
    axis = TimeAxis.until(end, LEFT, right)
    figure = Figure(title, _alt(timeline, traffic, notes, axis, title), subtitle=subtitle, theme=theme)
    kinds = {span.kind for span in timeline.spans}
    top = figure.legend(_legend(figure, kinds, bool(timeline.messages)), figure.top) if kinds else figure.top
    rows = Rows.below(top + 4, timeline.n_ranks)

    _lanes(figure, rows, axis)
    _meetings(figure, rows, axis, events)
    _spans(figure, rows, axis, timeline.spans)
    _messages(figure, rows, axis, timeline.messages)
    _notes(figure, rows, axis, notes, failed)
    if cursor is not None and cursor <= end:
        x = axis.x(cursor)
        figure.line(
            [(x, rows.top - 6), (x, rows.bottom + 4)], figure.theme.ink, width=2, tip=axis.words(cursor)
        )
    bottom = _time_axis(figure, rows, axis, timeline.clock)
    if traffic is not None:
        _traffic_table(figure, traffic, bottom + 20)
    return figure


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the lanes are: fewer ranks, higher lanes."""

    top: float
    n_ranks: int
    pitch: float
    height: float

    @classmethod
    def below(cls, top: float, n_ranks: int) -> Rows:
        pitch = min(36.0, max(9.0, 320 / n_ranks))
        return cls(top, n_ranks, pitch, 0.75 * pitch)

    @property
    def bottom(self) -> float:
        return self.top + self.n_ranks * self.pitch

    def y(self, rank: int) -> float:
        """The upper edge of a lane."""
        return self.top + rank * self.pitch + (self.pitch - self.height) / 2

    def middle(self, rank: int) -> float:
        return self.top + (rank + 0.5) * self.pitch

    def every(self, height: float) -> int:
        """Each how many-th rank has room for something ``height`` pixels high: 1, 2, 4, 8, ..."""
        return 1 << max(0, math.ceil(math.log2(height / self.pitch)))


def _alt(
    timeline: Timeline, traffic: Traffic | None, notes: Sequence[Note], axis: TimeAxis, title: str
) -> str:
    n = timeline.n_ranks
    parts = [f"{title}: {_lanes_of(n)} over {axis.words(axis.end)} of {timeline.clock} time"]
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
    ends: dict[str, list[int]] = {}
    for rank, _, text in notes:
        ends.setdefault(text, []).append(rank)
    told = [(text, ranks) for text, ranks in ends.items() if text]
    parts += [f"{_ranks(ranks)}: {text}" for text, ranks in told[:4]]
    if len(told) > 4:
        parts.append(f"{len(told) - 4} further ways to end")
    return "; ".join(parts) + "."


def _lanes_of(n_ranks: int) -> str:
    return f"lanes of {n_ranks} ranks" if n_ranks > 1 else "the lane of 1 rank"


def _ranks(ranks: Sequence[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"


def _count(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def _legend(figure: Figure, kinds: set[str], messages: bool) -> list[tuple[str, str]]:
    """Only what occurs, in an order that never changes."""
    known = [kind for kind in OPERATIONS if kind in kinds]
    others = sorted(kinds - {*known, WAITING})
    entries = [(operation_colour(kind), operation_name(kind)) for kind in [*known, *others]]
    if messages and "send" not in kinds:
        entries.append((operation_colour("send"), "message"))
    if WAITING in kinds:
        entries.append((figure.waiting(), "waiting"))
    return entries


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
        figure.line([(x, rows.top), (x, rows.bottom)], theme.line, width=0.8)


def _meetings(figure: Figure, rows: Rows, axis: TimeAxis, events: Iterable[Event]) -> None:
    """A thin line through the lanes that meet in a collective."""
    met: dict[tuple[str, str, tuple[int, ...], int], list[Event]] = {}
    for event in events:
        if event.is_collective:
            met.setdefault((event.kind, event.group, event.members, event.sequence), []).append(event)
    last_x: dict[tuple[int, ...], float] = {}
    for (kind, group, members, _), present in met.items():
        points = [
            (max(axis.left, axis.x(event.done_s) - 0.7), rows.middle(event.rank))
            for event in sorted(present, key=lambda event: event.rank)
        ]
        x = min(x for x, _ in points)
        complete = 1 < len(points) == len(members)  # else they never met
        if complete and x - last_x.get(members, -math.inf) >= 2 * NARROWEST:
            last_x[members] = x
            who = ", ".join(str(rank) for rank in members)
            figure.line(points, operation_colour(kind), width=1.4, tip=f"{kind} on {group}, ranks {who}")


def _spans(figure: Figure, rows: Rows, axis: TimeAxis, spans: Sequence[Span]) -> None:
    """Waiting below, work above it, communication on top."""
    few = len(spans) <= 2000
    bars = list(_bars(spans, axis, *((0.5, NARROWEST) if few else (1.5, 1.0))))
    many = len(bars) > MOST_BARS
    over = min(3.0, (rows.pitch - rows.height) / 2)
    shapes: dict[tuple[int, str], list[tuple[float, float, float, float]]] = {}
    for bar in sorted(bars, key=lambda bar: _depth(bar.span.kind)):
        kind, rank = bar.span.kind, bar.span.rank
        x, width, y, height = bar.x, bar.end_x - bar.x, rows.y(rank), rows.height
        if _depth(kind) == 2:
            y, height = y - over, height + 2 * over
        elif width > 4:
            width -= 0.6  # neighbours of one colour stay two
        if many:
            shapes.setdefault((rank, kind), []).append((x, y, width, height))
        else:
            tip = _tip(bar, axis)
            figure.rect(x, y, width, height, _fill(figure, kind), radius=1.5 * (width > 3), tip=tip)
    for (rank, kind), boxes in shapes.items():
        figure.boxes(boxes, _fill(figure, kind), tip=f"rank {rank}, {_name(kind)}")


def _depth(kind: str) -> int:
    return 0 if kind == WAITING else 1 if kind in WORK else 2


def _fill(figure: Figure, kind: str) -> str:
    return figure.waiting() if kind == WAITING else operation_colour(kind)


def _name(kind: str) -> str:
    return "waiting" if kind == WAITING else operation_name(kind)


def _bars(spans: Sequence[Span], axis: TimeAxis, fine: float, narrowest: float) -> Iterable[Bar]:
    """What to draw: spans below ``fine`` pixels are merged with what they touch, of their kind and lane.

    A communication is at least ``narrowest`` pixels wide, even if it took no time.
    """
    open_bars: dict[tuple[int, str], Bar] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        x, end_x = axis.x(float(span.start)), axis.x(float(span.end))
        narrow = end_x - x < fine
        if _depth(span.kind) == 2 and end_x - x < narrowest:
            x = min(max(axis.left, (x + end_x - narrowest) / 2), axis.right - narrowest)
            end_x = x + narrowest
        lane = span.rank, span.kind
        before = open_bars.get(lane)
        if before is not None and narrow and x - before.end_x < fine:
            open_bars[lane] = replace(
                before, end_x=max(end_x, before.end_x), until=float(span.end), n_spans=before.n_spans + 1
            )
            continue
        if before is not None:
            yield before
        open_bars[lane] = Bar(x, end_x, span, float(span.end))
    yield from open_bars.values()


def _tip(bar: Bar, axis: TimeAxis) -> str:
    span, start = bar.span, float(bar.span.start)
    many = f"{bar.n_spans} × " if bar.n_spans > 1 else ""
    when = f"at {axis.words(start)}"
    if bar.until > start:
        when = f"{axis.number(start)} to {axis.words(bar.until)}, {axis.words(bar.until - start)}"
    label = f": {span.label}" if span.label and bar.n_spans == 1 else ""
    return f"rank {span.rank}, {many}{_name(span.kind)}, {when}{label}"


def _messages(figure: Figure, rows: Rows, axis: TimeAxis, messages: Sequence[Message]) -> None:
    """Arrows from lane to lane; of arrows that would cover each other, the first."""
    colour = operation_colour("send")
    last: dict[tuple[int, int], tuple[float, float]] = {}
    for message in sorted(messages, key=lambda message: message.sent):
        x, end_x = axis.x(float(message.sent)), axis.x(float(message.received))
        ends = message.source, message.destination
        before = last.get(ends)
        if before and x - before[0] < 2 and abs(end_x - before[1]) < 2:
            continue
        last[ends] = x, end_x
        down = message.destination > message.source
        leave = rows.y(message.source) + (rows.height if down else 0)
        arrive = rows.y(message.destination) + (0 if down else rows.height)
        label = f": {message.label}" if message.label else ""
        tip = (
            f"rank {message.source} to rank {message.destination}, sent at {axis.words(float(message.sent))}"
        )
        figure.arrow((x, leave), (end_x, arrive), colour, tip=tip + label)


def _notes(
    figure: Figure, rows: Rows, axis: TimeAxis, notes: Sequence[Note], failed: Collection[int]
) -> None:
    """A mark where a lane ends, and what became of its rank, where there is room to write it."""
    theme, written = figure.theme, -math.inf
    for rank, time, text in sorted(notes):
        x, y = axis.x(float(time)), rows.middle(rank)
        half, width = (min(9.0, rows.pitch / 2 - 0.5), 4) if rank in failed else (rows.height / 2, 2)
        mark = theme.alarm if rank in failed else theme.muted
        tip = f"rank {rank} at {axis.words(float(time))}: {text or 'ended'}"
        figure.rect(x - width / 2, y - half, width, 2 * half, mark, radius=1, tip=tip)
        if text and y - written >= 15:
            written = y
            shown = fit(text, WIDTH - MARGIN - x - 8)
            plate = min(text_width(shown) + 6, WIDTH - x - 8)
            figure.rect(x + 4, y - 7, plate, 14, theme.card, radius=2)
            figure.text(x + 8, y + 4.5, shown, tip=tip)


def _time_axis(figure: Figure, rows: Rows, axis: TimeAxis, clock: str) -> float:
    theme, y = figure.theme, rows.bottom + 6
    figure.line([(axis.left, y), (axis.right, y)], theme.line)
    for tick in axis.ticks():
        x = axis.x(tick)
        figure.line([(x, y), (x, y + 5)], theme.muted)
        figure.text(x, y + 18, axis.number(tick), size=SMALL, anchor="middle", fill=theme.muted)
    middle = (axis.left + axis.right) / 2
    figure.text(middle, y + 36, f"{clock} time ({axis.unit})", size=SMALL, anchor="middle", fill=theme.muted)
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
