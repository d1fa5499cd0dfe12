"""The picture of bytes against memory: a dot for each way to compute a layer on as many ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lessons_lib.views.memory import bytes_text
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, fit, text_width

LEFT, PLOT_WIDTH, PLOT_HEIGHT = 100.0, 520.0, 380.0
PANEL = 644.0
MARK = 6.0  # half the width of a dot

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # x, y, width, height


@dataclass(frozen=True, slots=True)
class Dot:
    """A way: bytes that a rank holds and sends, and whether a run was counted or a formula asked."""

    name: str
    mesh: str
    held: int
    sent: int
    counted: bool


@dataclass(frozen=True, slots=True)
class Frontier:
    """Dots on axes that do not depend on them, and the line of equal time."""

    title: str
    held_name: str
    dots: tuple[Dot, ...]
    held_axis: tuple[int, int]
    sent_axis: tuple[int, int]
    line: float  # bytes that take as long to send as the products take
    machine: str  # on which it does
    best: tuple[bool, ...]  # which dots no other is better than in both


def frontier_picture(frontier: Frontier, *, theme: str = "light") -> Figure:
    """Draw bytes sent over bytes held, both axes logarithmic and always the same.

    A dot is better the further it is left and the further down. Those that no other beats in both are
    joined. Below the dashed line, sending takes less time than multiplying.
    """
    figure = Figure(
        frontier.title,
        _alt(frontier),
        subtitle="Each dot is one way to run a layer. Left: holds less. Down: sends less.",
        theme=theme,
    )
    top = figure.top + 10
    _axes(figure, frontier, top)
    _line(figure, frontier, top)
    places = [(_x(frontier, dot.held), _y(frontier, dot.sent, top)) for dot in frontier.dots]
    steps = _staircase(sorted(place for place, best in zip(places, frontier.best, strict=True) if best))
    if steps:
        figure.line(steps, figure.theme.ink, width=1.5, dash="2 3")
    lines = list(pairwise(steps))
    if not _outside(frontier):
        at = _y(frontier, frontier.line, top)
        lines.append(((LEFT, at), (LEFT + PLOT_WIDTH, at)))
    names = _names(frontier, places, [_around(*line) for line in lines])
    for dot, place, best, name in zip(frontier.dots, places, frontier.best, names, strict=True):
        tip = f"{dot.name} on {dot.mesh}: holds {bytes_text(dot.held)}, sends {bytes_text(dot.sent)}"
        _mark(figure, *place, best, tip)
        figure.text(name[0] + 4, name[1] + 12, dot.name, size=SMALL, bold=True)
    _table(figure, frontier, top)
    return figure


def _x(frontier: Frontier, held: float) -> float:
    return LEFT + PLOT_WIDTH * _share(held, frontier.held_axis)


def _y(frontier: Frontier, sent: float, top: float) -> float:
    return top + PLOT_HEIGHT * (1 - _share(sent, frontier.sent_axis))


def _share(n: float, axis: tuple[int, int]) -> float:
    low, high = map(math.log, axis)
    return (math.log(n) - low) / (high - low)


def _ticks(axis: tuple[int, int]) -> Iterator[int]:
    """1, 2 and 5 times powers of ten inside an axis."""
    for power in range(13):
        yield from (n * 10**power for n in (1, 2, 5) if axis[0] <= n * 10**power <= axis[1])


def _axes(figure: Figure, frontier: Frontier, top: float) -> None:
    theme, bottom = figure.theme, top + PLOT_HEIGHT
    figure.rect(LEFT, top, PLOT_WIDTH, PLOT_HEIGHT, theme.lane)
    for n in _ticks(frontier.held_axis):
        x = _x(frontier, n)
        figure.line([(x, top), (x, bottom)], theme.line)
        figure.text(x, bottom + 16, bytes_text(n), size=SMALL, anchor="middle", fill=theme.muted)
    for n in _ticks(frontier.sent_axis):
        y = _y(frontier, n, top)
        figure.line([(LEFT, y), (LEFT + PLOT_WIDTH, y)], theme.line)
        figure.text(LEFT - 6, y + 4.3, bytes_text(n), size=SMALL, anchor="end", fill=theme.muted)
    figure.text(LEFT + PLOT_WIDTH / 2, bottom + 38, frontier.held_name, anchor="middle")
    middle = top + PLOT_HEIGHT / 2
    figure.text(MARGIN + 12, middle, "bytes each rank sends", anchor="middle", turn=-90)


def _line(figure: Figure, frontier: Frontier, top: float) -> None:
    """The line below which sending takes less time than multiplying."""
    if _outside(frontier) == "":
        y = _y(frontier, frontier.line, top)
        figure.line([(LEFT, y), (LEFT + PLOT_WIDTH, y)], figure.theme.alarm, width=2, dash="8 5")


def _outside(frontier: Frontier) -> str:
    low, high = frontier.sent_axis
    return "above" if frontier.line > high else "below" if frontier.line < low else ""


def _mark(figure: Figure, x: float, y: float, best: bool, tip: str = "") -> None:
    """Filled where no other dot is better in both."""
    theme = figure.theme
    fill = theme.ink if best else theme.card
    figure.rect(
        x - MARK, y - MARK, 2 * MARK, 2 * MARK, fill, line=theme.ink, line_width=2, radius=MARK, tip=tip
    )


def _staircase(front: Sequence[Point]) -> list[Point]:
    """From dot to dot, to the right and then down."""
    steps = list(front[:1])
    for before, after in pairwise(front):
        steps += [(after[0], before[1]), after]
    return steps if len(front) > 1 else []


def _around(start: Point, end: Point) -> Box:
    """The box of a line that runs across or down."""
    (x0, y0), (x1, y1) = start, end
    return min(x0, x1) - 1, min(y0, y1) - 1, abs(x1 - x0) + 2, abs(y1 - y0) + 2


def _names(frontier: Frontier, places: Sequence[Point], lines: Sequence[Box]) -> list[Box]:
    """Where names stand: beside their dots, where neither a dot, nor a line, nor another name is."""
    taken = [*lines, *((x - MARK, y - MARK, 2 * MARK, 2 * MARK) for x, y in places)]
    names = []
    for dot, (x, y) in zip(frontier.dots, places, strict=True):
        width, height = text_width(dot.name, SMALL, bold=True) + 8, 16.0
        away, across, down = MARK + 1, -width / 2, -height / 2
        around = [
            (x + away, y + down),
            (x - away - width, y + down),
            (x + across, y - away - height),
            (x + across, y + away),
            *((x + dx, y + dy) for dx in (away, -away - width) for dy in (-away - height, away)),
        ]
        boxes = [(left, top, width, height) for left, top in around]
        free = [box for box in boxes if not any(_overlap(box, other) for other in taken)]
        names.append((free or boxes)[0])
        taken.append(names[-1])
    return names


def _overlap(one: Box, other: Box) -> bool:
    return all(one[at] < other[at] + other[at + 2] and other[at] < one[at] + one[at + 2] for at in (0, 1))


def _table(figure: Figure, frontier: Frontier, top: float) -> None:
    """The numbers of every dot."""
    theme, width = figure.theme, WIDTH - MARGIN - PANEL
    figure.rect(PANEL, top, width, 24 + 66 * len(frontier.dots), theme.panel, radius=8)
    for at, (dot, best) in enumerate(zip(frontier.dots, frontier.best, strict=True)):
        y = top + 14 + 66 * at
        _mark(figure, PANEL + 20, y + 10, best)
        words = dot.name if best else f"{dot.name}: beaten"
        figure.text(PANEL + 36, y + 14.5, words, bold=True)
        figure.text(PANEL + 36, y + 32, fit(dot.mesh, 190, SMALL), size=SMALL, fill=theme.muted)
        numbers = f"{bytes_text(dot.held)} held, {bytes_text(dot.sent)} sent"
        figure.text(PANEL + 36, y + 50, fit(numbers, width - 40), tip=numbers)
    y = top + 46 + 66 * len(frontier.dots)
    figure.line([(PANEL + 12, y - 4), (PANEL + 54, y - 4)], theme.alarm, width=2, dash="8 5")
    where = _outside(frontier)
    figure.text(PANEL + 62, y, f"{bytes_text(frontier.line)}{f', {where} the picture' if where else ''}")
    counted = all(dot.counted for dot in frontier.dots)
    for at, words in enumerate(
        (
            "takes as long to send as",
            f"multiplying, on {frontier.machine}",
            "filled: none is better in both",
            "all dots counted from runs" if counted else "all dots from the formulas",
        )
    ):
        figure.text(PANEL + 12, y + 19 + 18 * at, words, size=SMALL, fill=theme.muted)


def _alt(frontier: Frontier) -> str:
    dots = "; ".join(
        f"{dot.name} on {dot.mesh} holds {bytes_text(dot.held)} and sends {bytes_text(dot.sent)}"
        f"{'' if best else ' (beaten in both)'}, {'counted' if dot.counted else 'by formula'}"
        for dot, best in zip(frontier.dots, frontier.best, strict=True)
    )
    return (
        f"{frontier.title}: {dots}. On {frontier.machine} it takes as long to send "
        f"{bytes_text(frontier.line)} as to multiply."
    )
