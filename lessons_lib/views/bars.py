"""From spans to what is drawn of them, where spans may be shorter than a pixel.

Work and waiting too short to be drawn are shown in stripes of their kinds, each as wide in sum as
its time is long. A communication that takes no time is a mark: a narrow bar across its lane or,
where these would stand so close that they hid the work, a tick above it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from lessons_lib.timeline import Span
from lessons_lib.views.axes import TimeAxis
from lessons_lib.views.colours import WAITING

MARK = 2.0  # pixels; a communication that takes no time is a bar of this width
TICK = 1.0  # pixels; or a tick of this width
CLOSE = 3 * MARK  # bars nearer to each other than that hide what is below
WORK = ("compute", "F", "B", "I", "W")  # other kinds but waiting are communication


@dataclass(frozen=True, slots=True)
class Bar:
    """What is drawn for a span, or for several spans too short to be drawn one by one."""

    x: float
    end_x: float
    span: Span  # the first
    until: float
    n_spans: int = 1


def depth(kind: str) -> int:
    """Waiting is drawn first, then work, then communication."""
    return 0 if kind == WAITING else 1 if kind in WORK else 2


def is_crowded(spans: Iterable[Span], axis: TimeAxis) -> bool:
    """Whether marks would hide what is below: three in one lane, each CLOSE to the next on average."""
    lanes: dict[int, list[float]] = {}
    for span in spans:
        if depth(span.kind) == 2 and axis.x(float(span.end)) - axis.x(float(span.start)) < MARK:
            lanes.setdefault(span.rank, []).append(axis.x(float(span.end)))
    for places in lanes.values():
        places.sort()
        if any(third - first < 2 * CLOSE for first, third in zip(places, places[2:], strict=False)):
            return True
    return False


def bars(spans: Sequence[Span], axis: TimeAxis, n_ranks: int) -> list[Bar]:
    """Bars of work and waiting, the deepest first."""
    fine = 0.5 if len(spans) <= 2000 else 1.5 if n_ranks <= 16 else 3.0
    wide: list[Bar] = []
    short: dict[int, list[Span]] = {}
    for span in spans:
        x, end_x = axis.x(float(span.start)), axis.x(float(span.end))
        if end_x - x >= fine:
            wide.append(Bar(x, end_x, span, float(span.end)))
        elif span.end > span.start:
            short.setdefault(span.rank, []).append(span)
    striped = [bar for lane in short.values() for bar in _stripes(lane, axis, max(fine, 1.5))]
    wide.sort(key=lambda bar: depth(bar.span.kind))
    return striped + wide  # a stripe is up to its width out of place: below what is drawn to scale


def _stripes(spans: Iterable[Span], axis: TimeAxis, width: float) -> Iterable[Bar]:
    """Cells of ``width`` pixels of one lane, each of the kind that is most behind its share of time.

    A span that has its cells for itself is drawn as it is.
    """
    in_order = sorted(spans, key=lambda span: span.start)
    n_spans: dict[int, int] = {}  # of each cell
    for span in in_order:
        for cell in _cells(span, axis, width):
            n_spans[cell] = n_spans.get(cell, 0) + 1
    shares: dict[int, dict[str, float]] = {}
    waiting: dict[str, list[Span]] = {}  # spans to be shown, the earliest first
    for span in in_order:
        x, end_x = axis.x(float(span.start)), axis.x(float(span.end))
        if all(n_spans[cell] == 1 for cell in _cells(span, axis, width)):
            yield Bar(x, end_x, span, float(span.end))
            continue
        waiting.setdefault(span.kind, []).append(span)
        for cell in _cells(span, axis, width):
            left = axis.left + cell * width
            share = (min(end_x, left + width) - max(x, left)) / width
            shares.setdefault(cell, {}).setdefault(span.kind, 0.0)
            shares[cell][span.kind] += share
    behind: dict[str, float] = {}
    chosen: list[tuple[int, str]] = []
    for cell, of_kind in sorted(shares.items()):
        for kind, share in of_kind.items():
            behind[kind] = behind.get(kind, 0.0) + share
        most = max(behind, key=lambda kind: behind[kind])
        if behind[most] >= 0.5:
            behind[most] -= 1.0
            chosen.append((cell, most))
    for (kind, _), run in groupby(enumerate(chosen), key=lambda at: (at[1][1], at[1][0] - at[0])):
        cells = [cell for _, (cell, _) in run]
        x, end_x = axis.left + cells[0] * width, min(axis.left + (cells[-1] + 1) * width, axis.right)
        queue = waiting[kind]
        n = max(1, bisect_left(queue, end_x, key=lambda span: axis.x(float(span.start))))
        shown = queue[:n]
        del queue[: min(n, len(queue) - 1)]  # one is kept: a stripe always has a span
        yield Bar(x, end_x, shown[0], float(shown[-1].end), len(shown))


def _cells(span: Span, axis: TimeAxis, width: float) -> range:
    first, last = (int((axis.x(float(time)) - axis.left) / width) for time in (span.start, span.end))
    return range(first, last + 1)


def marks(spans: Iterable[Span], axis: TimeAxis, width: float) -> list[Bar]:
    """Bars of communications, at least ``width`` wide; marks of a kind that coincide become one."""
    done: list[Bar] = []
    last: dict[tuple[int, str], int] = {}  # where in done the last mark of a lane and kind is
    for span in sorted(spans, key=lambda span: span.end):
        x, end_x = axis.x(float(span.start)), axis.x(float(span.end))
        if end_x - x < width:
            x = min(max(axis.left, (x + end_x - width) / 2), axis.right - width)
            end_x = x + width
            at = last.get((span.rank, span.kind))
            if at is not None and x - done[at].x < 0.75 * width:
                before = done[at]
                done[at] = Bar(before.x, before.end_x, before.span, float(span.end), before.n_spans + 1)
                continue
            last[span.rank, span.kind] = len(done)
        done.append(Bar(x, end_x, span, float(span.end)))
    return done
