"""The picture of who waits for whom: an arrow from each rank that stands still to those it waits for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lessons_lib.timeline import Waiting, Where, ranks_text
from lessons_lib.views.colours import rank_colour
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, Key, fit

PANEL = 440  # where the list begins
CENTRE, RADIUS = (222.0, 172.0), 138.0  # of the circle of ranks, below the legend
MOST_LINES = 4  # of code in the list
MOST_MOMENTS = 60  # in the strip
FAILED = ("raised", "called sys.exit")  # how an ending begins that is a rank's own failure


@dataclass(frozen=True, slots=True)
class Standstill:
    """Where all ranks are at one moment: who waits, and what became of those that have ended.

    ``cycle`` are ranks each of which waits for the next, the last for the first.
    """

    n_ranks: int
    waiting: tuple[Waiting, ...]
    ended: Mapping[int, str] = field(default_factory=dict)  # of ranks: "returned 3", "raised ValueError"
    cycle: tuple[int, ...] = ()

    @property
    def missing(self) -> list[int]:
        """Ranks that have ended, and that others wait for."""
        return sorted({rank for each in self.waiting for rank in each.missing} & self.ended.keys())

    def what(self, rank: int) -> str:
        """``"waits"``, ``"ended"``, ``"failed"`` or ``"runs"``."""
        if any(each.rank == rank for each in self.waiting):
            return "waits"
        if rank in self.ended:
            return "failed" if self.ended[rank].startswith(FAILED) else "ended"
        return "runs"


def wait_graph(
    standstill: Standstill,
    *,
    title: str,
    subtitle: str = "",
    moments: Sequence[Standstill] = (),
    moment: int = 0,
    theme: str = "light",
) -> Figure:
    """Draw who waits for whom, and in a list, in which operation at which line.

    >>> here = Where("Cell In[3]", 4, "step", "dist.recv(x, src=1)")
    >>> waits = Waiting(0, "recv(float32[1]) from rank 1", "world", 1, (1,), here)
    >>> print(wait_graph(Standstill(2, (waits,), {1: "returned"}), title="step").alt)
    step: rank 0 waits for rank 1 in recv(float32[1]) from rank 1, Cell In[3] line 4; rank 1 has returned; \
rank 0 waits in vain for rank 1, which has ended.

    Ranks that wait are hatched; a cycle is red, and so is a rank that others wait for and that has
    ended. ``moments`` draws below what every rank did at each moment of a run, with a mark at
    ``moment``.
    """
    figure = Figure(title, _alt(standstill, title, moments, moment), subtitle=subtitle, theme=theme)
    top = figure.legend(_keys(figure, standstill, moments), figure.top)
    places = _places(standstill.n_ranks, top)
    _arrows(figure, standstill, places)
    _nodes(figure, standstill, places)
    bottom = max(_list(figure, standstill, top + 6), top + 2 * CENTRE[1] - 8)
    if moments:
        _strip(figure, moments, moment, bottom + 14)
    return figure


# ---- the circle ----


def _places(n_ranks: int, top: float) -> list[tuple[float, float]]:
    """Ranks on a circle, clockwise from above. No line between two of them meets a third."""
    turn = 2 * math.pi / n_ranks
    x, y = CENTRE[0], top + CENTRE[1]
    return [(x + RADIUS * math.sin(turn * r), y - RADIUS * math.cos(turn * r)) for r in range(n_ranks)]


def _size(n_ranks: int) -> float:
    """The radius of a rank: small enough that a line from its left to its right neighbour passes it."""
    return max(3.0, min(21.0, 0.75 * RADIUS * (1 - math.cos(2 * math.pi / max(n_ranks, 4)))))


def _arrows(figure: Figure, standstill: Standstill, places: Sequence[tuple[float, float]]) -> None:
    theme, size = figure.theme, _size(len(places))
    closed = set(pairwise([*standstill.cycle, *standstill.cycle[:1]]))
    gone = set(standstill.missing)
    edges = [(each, other) for each in standstill.waiting for other in each.missing if other != each.rank]
    both = {(each.rank, other) for each, other in edges}
    for each, other in sorted(edges, key=lambda edge: (edge[0].rank, edge[1]) in closed):  # red on top
        (x0, y0), (x1, y1) = places[each.rank], places[other]
        length = math.hypot(x1 - x0, y1 - y0)
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        aside = size / 4 if (other, each.rank) in both else 0.0
        away = math.sqrt(max(0.0, (size + 3) ** 2 - aside**2))
        start = x0 + ux * away - uy * aside, y0 + uy * away + ux * aside
        end = x1 - ux * away - uy * aside, y1 - uy * away + ux * aside
        alarming = (each.rank, other) in closed or other in gone
        colour = theme.alarm if alarming else theme.muted
        width = (2.5 if alarming else 1.5) if len(places) <= 16 else 1.0
        tip = f"rank {each.rank} waits for rank {other} in {each.operation}; {each.where}"
        figure.arrow(start, end, colour, width=width, tip=tip)


def _nodes(figure: Figure, standstill: Standstill, places: Sequence[tuple[float, float]]) -> None:
    theme, n = figure.theme, len(places)
    size, gone = _size(n), {*standstill.missing, *standstill.cycle}
    every = 1 << max(0, math.ceil(math.log2(max(1.0, 18 * n / (2 * math.pi * (RADIUS + 16))))))
    for rank, (x, y) in enumerate(places):
        what = standstill.what(rank)
        said = {"waits": "waits", "runs": "is running"}.get(what, standstill.ended.get(rank, ""))
        tip = f"rank {rank} {said}"
        line = theme.alarm if rank in gone or what == "failed" else theme.muted
        fill = {"waits": figure.waiting(), "runs": rank_colour(rank, n) or theme.memory}.get(what, theme.card)
        box = (x - size, y - size, 2 * size, 2 * size)
        if what == "ended" and rank not in gone:
            line = theme.line
        figure.rect(*box, fill, line=line, line_width=3 if rank in gone else 1.5, radius=size, tip=tip)
        if what == "failed":
            figure.line(
                [(x - size * 0.7, y - size * 0.7), (x + size * 0.7, y + size * 0.7)], theme.alarm, width=2
            )
        if size >= 15:
            colour = rank_colour(rank, n) or theme.line
            figure.chip(x - 12, y - 9, str(rank), colour, width=24, tip=tip)
        elif rank % every == 0:
            away = (RADIUS + size + 12) / RADIUS
            centre_y = y + (y - _middle(places)) * (away - 1)
            figure.text(
                CENTRE[0] + (x - CENTRE[0]) * away, centre_y + 4.3, str(rank), size=SMALL, anchor="middle"
            )


def _middle(places: Sequence[tuple[float, float]]) -> float:
    return places[0][1] + RADIUS


# ---- the list ----


def _list(figure: Figure, standstill: Standstill, y: float) -> float:
    """Who waits in what at which line, those that do the same together; then who has ended."""
    theme, width = figure.theme, WIDTH - MARGIN - PANEL

    def write(words: str, indent: float, fill: str, bold: bool = False) -> None:
        nonlocal y
        shown = fit(words, width - indent, bold=bold)
        tip = "" if shown == words else words
        figure.text(PANEL + indent, y + 10, shown, fill=fill, bold=bold, tip=tip)
        y += 19

    groups = list(_groups(standstill).items())
    for (operation, missing, where), ranks in groups[:MOST_LINES]:
        whom = f" for {ranks_text(missing)}" if missing else ""
        write(f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'}{whom}", 0, theme.ink, bold=True)
        write(f"in {operation}", 12, theme.ink)
        write(f"{where.file}, line {where.line}: {where.source}".rstrip(": "), 12, theme.muted)
        y += 7
    if len(groups) > MOST_LINES:
        write(f"and {len(groups) - MOST_LINES} more, see the hover texts", 0, theme.muted)
    for said, ranks in _endings(standstill).items():
        write(
            f"{ranks_text(ranks)} {said}",
            0,
            theme.alarm if set(ranks) & set(standstill.missing) else theme.ink,
        )
    if not groups and not standstill.ended:
        write("every rank is running", 0, theme.ink)
    return y


def _groups(standstill: Standstill) -> dict[tuple[str, tuple[int, ...], Where], list[int]]:
    same: dict[tuple[str, tuple[int, ...], Where], list[int]] = {}
    for each in standstill.waiting:
        same.setdefault((each.operation, each.missing, each.where), []).append(each.rank)
    return same


def _endings(standstill: Standstill) -> dict[str, list[int]]:
    """What ended ranks did, with those that did the same."""
    same: dict[str, list[int]] = {}
    for rank, said in standstill.ended.items():
        same.setdefault("returned" if said.startswith("returned") else said, []).append(rank)
    if "returned" in same:
        ranks = same.pop("returned")
        same["has returned" if len(ranks) == 1 else "have returned"] = ranks
    return same


# ---- the strip of moments ----


def _strip(figure: Figure, moments: Sequence[Standstill], moment: int, y: float) -> None:
    """A column for every moment, a row for every rank: solid while it runs, hatched while it waits."""
    theme, n_ranks = figure.theme, moments[0].n_ranks
    first = max(0, min(moment - MOST_MOMENTS // 2, len(moments) - MOST_MOMENTS))
    shown = moments[first : first + MOST_MOMENTS]
    left, right = 92.0, WIDTH - MARGIN
    each = min(64.0, (right - left) / len(shown))
    row = max(4.0, min(18.0, 160 / n_ranks))
    for rank in range(n_ranks):
        at_y = y + rank * row
        if row >= 12 or rank % 4 == 0:
            figure.text(left - 8, at_y + row / 2 + 4.3, f"rank {rank}", size=SMALL, anchor="end")
        for column, standstill in enumerate(shown):
            what = standstill.what(rank)
            fill = {"waits": figure.waiting(), "runs": rank_colour(rank, n_ranks) or theme.memory}.get(
                what, ""
            )
            if fill:
                box = (left + column * each + 1, at_y + 1, each - 2, row - 2)
                figure.rect(*box, fill, radius=1, tip=f"rank {rank} {what} at moment {first + column}")
    x = left + (moment - first) * each
    figure.rect(x, y - 3, each, n_ranks * row + 6, "none", line=theme.ink, line_width=2, radius=3)
    words = f"moment {moment} of {len(moments) - 1}, in order and not to scale"
    shift = "end" if x > WIDTH / 2 else "start"
    figure.text(x + (each if shift == "end" else 0), y + n_ranks * row + 19, words, size=SMALL, anchor=shift)


# ---- words ----


def _keys(figure: Figure, standstill: Standstill, moments: Sequence[Standstill]) -> list[Key]:
    theme = figure.theme
    keys = [Key(figure.waiting(), "waits")]
    if moments or any(standstill.what(rank) == "runs" for rank in range(standstill.n_ranks)):
        keys.append(Key(rank_colour(0, standstill.n_ranks) or theme.memory, "runs"))
    keys.append(Key(theme.card, "has ended"))
    keys.append(Key(theme.alarm, "closes the circle, or is waited for in vain"))
    return keys


def _alt(standstill: Standstill, title: str, moments: Sequence[Standstill], moment: int) -> str:
    parts = []
    for (operation, missing, where), ranks in list(_groups(standstill).items())[:MOST_LINES]:
        whom = f" for {ranks_text(missing)}" if missing else ""
        verb = "waits" if len(ranks) == 1 else "wait"
        parts.append(f"{ranks_text(ranks)} {verb}{whom} in {operation}, {where.file} line {where.line}")
    parts += [f"{ranks_text(ranks)} {said}" for said, ranks in _endings(standstill).items()]
    running = [rank for rank in range(standstill.n_ranks) if standstill.what(rank) == "runs"]
    if running:
        parts.append(f"{ranks_text(running)} {'is' if len(running) == 1 else 'are'} running")
    if standstill.cycle:
        parts.append(f"the circle {' → '.join(map(str, [*standstill.cycle, standstill.cycle[0]]))} is closed")
    if standstill.missing:
        gone = set(standstill.missing)
        who = [each.rank for each in standstill.waiting if gone & set(each.missing)]
        verb = f"{'waits' if len(who) == 1 else 'wait'} in vain for {ranks_text(sorted(gone))}"
        parts.append(f"{ranks_text(who)} {verb}, which {'has' if len(gone) == 1 else 'have'} ended")
    when = f", moment {moment} of {len(moments) - 1}" if moments else ""
    return f"{title}{when}: {'; '.join(parts)}."
