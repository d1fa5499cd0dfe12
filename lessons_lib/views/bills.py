"""The picture of a product's bill: which collectives lead to it, and what each rank sends in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from lessons_lib.layout import Layout
from lessons_lib.views.colours import mix, operation_colour, operation_name
from lessons_lib.views.layouts import mesh_words
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, fit, text_width

BAR = 560.0  # where the bars begin
NUMBER = 74.0  # room for a number behind the longest bar
LINE = 34.0
LOCAL = ("keep", "term")  # steps in which nothing is sent

Sent = int | Fraction


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the bill: a step of one tensor, and the elements each rank sends in it."""

    tensor: str
    kind: str
    axis: str
    source: Layout
    target: Layout
    sent: Sent


@dataclass(frozen=True, slots=True)
class Bill:
    """Y = X W, from given layouts to a wanted one: what happens before the product, and after it."""

    sizes: Mapping[str, int]
    shape: tuple[int, int, int]  # B, D, F
    given: tuple[Layout, Layout]  # of X and W
    wanted: Layout
    multiplied: tuple[Layout, Layout, Layout]  # as which X and W are multiplied, and Y comes out
    before: tuple[Entry, ...]
    after: tuple[Entry, ...]
    local: tuple[int, int, int]  # b, d, f of each rank's product
    n_ranks: int
    times: int  # how many ranks compute the same
    gathered: Sent  # what it would be to gather X and W whole, multiply, and cut
    scale: int  # elements at the end of the axis

    @property
    def sent(self) -> Sent:
        return sum((each.sent for each in (*self.before, *self.after)), start=0)


def bill_picture(bill: Bill, *, theme: str = "light") -> Figure:
    """Draw a bill line by line, a bar for the elements that each rank sends; the axis is always the same."""
    B, D, F = bill.shape
    x, w = bill.given
    figure = Figure(
        f"X[{x}] · W[{w}] gives Y[{bill.wanted}]",
        _alt(bill),
        subtitle=f"B = {B}, D = {D}, F = {F} on a mesh of {mesh_words(bill.sizes)}",
        theme=theme,
    )
    y = figure.top + 8
    _axis(figure, bill, y)
    y += 14
    for each in bill.before:
        _line(figure, bill, each, y)
        y += LINE
    _product(figure, bill, y)
    y += LINE + 20
    for each in bill.after:
        _line(figure, bill, each, y)
        y += LINE
    figure.line([(MARGIN, y + 3), (WIDTH - MARGIN, y + 3)], figure.theme.line)
    figure.text(MARGIN, y + 27, "Each rank sends", size=14, bold=True)
    _bar(figure, bill, bill.sent, figure.theme.ink, y + 12, bold=True)
    figure.text(MARGIN, y + 57, "To gather X and W whole, multiply, and cut", fill=figure.theme.muted)
    _bar(figure, bill, bill.gathered, figure.theme.memory, y + 42)
    return figure


def _axis(figure: Figure, bill: Bill, y: float) -> None:
    muted = figure.theme.muted
    figure.text(MARGIN, y, "what", size=SMALL, fill=muted)
    figure.text(BAR, y, f"elements each rank sends, 0 to {bill.scale:,}", size=SMALL, fill=muted)


def _bar(figure: Figure, bill: Bill, n: Sent, fill: str, y: float, bold: bool = False) -> None:
    full = WIDTH - MARGIN - NUMBER - BAR
    length = full * min(1.0, float(n) / bill.scale)
    figure.rect(BAR, y, full, 20, figure.theme.lane, radius=2)
    if n:
        figure.rect(BAR, y, max(length, 2.0), 20, fill, radius=2, tip=f"{number(n)} elements")
    figure.text(WIDTH - MARGIN, y + 15, number(n), anchor="end", bold=bold, size=14 if bold else 13)


def _line(figure: Figure, bill: Bill, each: Entry, y: float) -> None:
    theme = figure.theme
    local = each.kind in LOCAL
    fill = theme.lane if local else operation_colour(each.kind if each.kind != "exchange" else "send")
    words = {"keep": "cut a copy", "term": "make a term", "exchange": "exchange"}.get(each.kind)
    words = words or operation_name(each.kind)
    chip = text_width(words, bold=True) + 16
    figure.text(MARGIN, y + 20, each.tensor, size=14, bold=True)
    if local:
        figure.rect(MARGIN + 22, y + 4, chip, 24, fill, line=theme.line, radius=4)
        figure.text(MARGIN + 22 + chip / 2, y + 20.7, words, anchor="middle", bold=True)
    else:
        figure.chip(MARGIN + 22, y + 4, words, fill, width=chip, height=24)
    over = f"over {each.axis}" if each.axis else ""
    figure.text(MARGIN + 32 + chip, y + 20, over, fill=theme.muted)
    arrow = f"{each.source}  →  {each.target}"
    shown = fit(arrow, BAR - 260 - 12)
    figure.text(MARGIN + 244, y + 20, shown, tip="" if shown == arrow else arrow)
    _bar(figure, bill, each.sent, fill, y + 6)


def _product(figure: Figure, bill: Bill, y: float) -> None:
    theme = figure.theme
    fill = operation_colour("compute")
    figure.rect(
        MARGIN, y + 4, WIDTH - 2 * MARGIN, LINE + 8, mix(theme.card, fill, 0.3), line=theme.line, radius=6
    )
    figure.chip(
        MARGIN + 22, y + 13, "multiply", fill, width=text_width("multiply", bold=True) + 16, height=24
    )
    x, w, out = bill.multiplied
    b, d, f = bill.local
    equation = f"X[{x}] · W[{w}]  gives  Y[{out}]"
    figure.text(MARGIN + 124, y + 21, fit(equation, 560, bold=True), bold=True)
    share = f"each rank {b} × {d} times {d} × {f}"
    if bill.times > 1:
        share += f"; {bill.times} ranks at a time compute the same"
    ink = theme.ink
    figure.text(MARGIN + 124, y + 39, share, fill=ink, size=SMALL)


def number(n: Sent) -> str:
    """
    >>> number(1536), number(Fraction(5, 2))
    ('1,536', '2.5')
    """
    return f"{n:,}" if n == int(n) else f"{float(n):,.4g}"


def _said(each: Entry) -> str:
    over = f" over {each.axis}" if each.axis else ""
    return f"{each.kind} of {each.tensor}{over}, {number(each.sent)}"


def _alt(bill: Bill) -> str:
    B, D, F = bill.shape
    x, w = bill.given
    steps = [*map(_said, bill.before), "multiply", *map(_said, bill.after)]
    times = f", {bill.times} ranks each the same" if bill.times > 1 else ""
    b, d, f = bill.local
    return (
        f"From X[{x}] and W[{w}] to Y[{bill.wanted}], B={B}, D={D}, F={F}, on a mesh of "
        f"{mesh_words(bill.sizes)}: {'; '.join(steps)}. Each rank sends {number(bill.sent)} elements and "
        f"multiplies {b} × {d} by {d} × {f}{times}; to gather X and W whole would send "
        f"{number(bill.gathered)}."
    )
