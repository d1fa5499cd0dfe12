"""The picture of what fills a rank's memory: kinds stacked to a bar, measurements as ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lessons_lib.views.colours import text_on
from lessons_lib.views.memory import bytes_text
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, Key, fit, text_width

# From what is always there to what comes and goes; apart in lightness.
KINDS = {
    "parameters": "#22577a",
    "gradients": "#e07a1f",
    "state": "#f7dc6f",
    "activations": "#91a3bf",
}
BAR, GAP = 34.0, 26.0
LEFT = 150.0


@dataclass(frozen=True, slots=True)
class Filled:
    """What a rank holds of each kind: (kind, bytes predicted, bytes measured)."""

    name: str
    kinds: tuple[tuple[str, int, int], ...]

    @property
    def predicted(self) -> int:
        return sum(predicted for _, predicted, _ in self.kinds)

    @property
    def measured(self) -> int:
        return sum(measured for *_, measured in self.kinds)


def memory_bars(
    bars: Sequence[Filled], *, until: float, title: str, subtitle: str = "", theme: str = "light"
) -> Figure:
    """Draw a bar for each of ``bars``, kinds stacked, on one axis that ends at ``until`` bytes.

    >>> bar = Filled("ZeRO 1", (("parameters", 400, 400), ("state", 200, 208)))
    >>> print(memory_bars([bar], until=1000, title="A rank").alt)
    A rank. ZeRO 1: 600 B predicted, 608 B measured (parameters 400 B, state 200 B).

    The length of a part is what was predicted, the tick above its end what was measured up to there.
    """
    sentences = [
        f"{bar.name}: {bytes_text(bar.predicted)} predicted, {bytes_text(bar.measured)} measured "
        f"({', '.join(f'{kind} {bytes_text(predicted)}' for kind, predicted, _ in bar.kinds)})."
        for bar in bars
    ]
    figure = Figure(title, f"{title}. {' '.join(sentences)}", subtitle=subtitle, theme=theme)
    shown = [kind for kind in KINDS if any(kind == name for bar in bars for name, *_ in bar.kinds)]
    keys = [Key(KINDS[kind], kind) for kind in shown]
    y = figure.legend([*keys, Key(figure.theme.ink, "measured", form="ticks")], figure.top) + 10
    scale = (WIDTH - MARGIN - 90 - LEFT) / until
    for bar in bars:
        figure.text(LEFT - 12, y + BAR / 2 + 5, fit(bar.name, LEFT - 12 - MARGIN), anchor="end")
        _draw_bar(figure, bar, y, scale)
        y += BAR + GAP
    return figure


def _draw_bar(figure: Figure, bar: Filled, y: float, scale: float) -> None:
    x = measured_x = LEFT
    for kind, predicted, measured in bar.kinds:
        width = predicted * scale
        tip = f"{bar.name}, {kind}: {predicted:,} bytes predicted, {measured:,} measured"
        figure.rect(x, y, width, BAR, KINDS[kind], line=figure.theme.card, tip=tip)
        label = bytes_text(predicted)
        if text_width(label, SMALL) + 8 <= width:
            middle = x + width / 2
            ink = text_on(KINDS[kind])
            figure.text(middle, y + BAR / 2 + 4.3, label, size=SMALL, anchor="middle", fill=ink)
        x += width
        measured_x += measured * scale
        tick = [(measured_x, y - 8), (measured_x, y - 1)]
        figure.line(tick, figure.theme.ink, width=2)
    figure.text(max(x, measured_x) + 8, y + BAR / 2 + 5, bytes_text(bar.measured), bold=True)
