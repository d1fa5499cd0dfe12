"""A branch of a transformer block, step by step: what every tensor is cut along, and what is sent between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.views.colours import MOST_RANK_COLOURS, OPERATIONS, RANK_COLOURS, mix, text_on
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, Key, fit, text_width

UNIT, HIGH = 40.0, 112.0  # a width of D, and S, in pixels
CARD = 5.0  # by how much copies stick out
MOST_STEPS, WIDEST = 6, 4


class Step(NamedTuple):
    """A tensor [B, S, width D] on the way through a branch."""

    name: str
    layout: str  # of B, S and a third dim
    width: int = 1  # of the third dim, in units of D
    by: str = ""  # the collective that leads to it, if one does


def branches_picture(
    branches: Mapping[str, Sequence[Step]], n_ranks: int, *, title: str, theme: str = "light"
) -> Figure:
    """Draw the tensors of each branch in a row: S runs down, the other dim across, a colour is a rank.

    >>> mlp = [Step("norm", "B S@tp D"), Step("gathered", "B S D", by="all_gather")]
    >>> mlp += [Step("up", "B S F@tp", 4)]
    >>> branches_picture({"MLP": mlp}, 2, title="Into the MLP")
    MLP: norm is cut along S, then by all_gather gathered is whole on all 2 ranks, then up is cut along F.

    A tensor that is whole on every rank is a stack of cards; a partial sum, of which every rank has a term,
    a stack of dotted ones.
    """
    if not 1 <= n_ranks <= MOST_RANK_COLOURS:
        raise RefusedError(f"branches_picture: {n_ranks} ranks; it draws 1 to {MOST_RANK_COLOURS}.")
    for name, steps in branches.items():
        if not 1 <= len(steps) <= MOST_STEPS or any(not 1 <= step.width <= WIDEST for step in steps):
            raise RefusedError(
                f"branches_picture: {name!r} has {len(steps)} steps of width up to "
                f"{max((step.width for step in steps), default=0)} D; it draws 1 to {MOST_STEPS}, "
                f"up to {WIDEST} D wide."
            )
    alt = " ".join(f"{name}: {_way(steps, n_ranks)}." for name, steps in branches.items())
    figure = Figure(title, alt, theme=theme)
    y = figure.top + 6
    for name, steps in branches.items():
        _branch(figure, name, steps, n_ranks, y)
        y += HIGH + 78
    layouts = [Layout(step.layout) for steps in branches.values() for step in steps]
    card = figure.theme.card
    keys = [Key(mix(RANK_COLOURS[rank], card, 0.35), f"rank {rank}") for rank in range(n_ranks)]
    if any(not layout.axes for layout in layouts):
        keys.append(Key(card, "whole, on every rank", "stack"))
    if any(layout.partial for layout in layouts):
        keys.append(Key(figure.partial(), "a term of a sum, on every rank", "stack"))
    figure.legend(keys, y + 2)
    return figure


def _branch(figure: Figure, name: str, steps: Sequence[Step], n_ranks: int, y: float) -> None:
    colours = figure.theme
    figure.text(MARGIN, y + 12, name, bold=True)
    top = y + 26
    boxes = sum(step.width for step in steps) * UNIT
    names = text_width("S", SMALL) + 14
    overhang = max(0.0, max(text_width(text, SMALL) for text in steps[-1][:2]) - steps[-1].width * UNIT)
    room = WIDTH - 2 * MARGIN - names - boxes - overhang
    between = min(room / max(len(steps) - 1, 1), 112.0)
    figure.text(MARGIN, top + HIGH / 2 + 4, "S", size=SMALL, fill=colours.muted)
    x = MARGIN + names
    for at, step in enumerate(steps):
        if at:
            _arrow(figure, x - between + 2 * CARD + 4, x - 5, top + HIGH / 2, step.by)
        _tensor(figure, x, top, step, n_ranks)
        label = fit(step.name, step.width * UNIT + max(between - 8, overhang), SMALL)
        figure.text(
            x, top + HIGH + 2 * CARD + 14, label, size=SMALL, tip="" if label == step.name else step.name
        )
        figure.text(x, top + HIGH + 2 * CARD + 29, step.layout, size=SMALL, fill=colours.muted)
        x += step.width * UNIT + between


def _arrow(figure: Figure, start: float, end: float, y: float, by: str) -> None:
    colour, name = OPERATIONS[by] if by else (figure.theme.muted, "")
    figure.arrow((start, y), (end, y), colour, width=2.5 if by else 1.5, tip=name or "nothing is sent")
    for line, word in enumerate(reversed(name.split("_"))):
        figure.text((start + end) / 2, y - 8 - 14 * line, word, size=SMALL, anchor="middle", bold=True)


def _tensor(figure: Figure, x: float, y: float, step: Step, n_ranks: int) -> None:
    layout, width, colours = Layout(step.layout), step.width * UNIT, figure.theme
    said = f"{step.name}: {_cut(layout, n_ranks)}"
    if not layout.axes or layout.partial:
        fill = figure.partial() if layout.partial else colours.card
        for card in (2, 1, 0):
            at = card * CARD
            figure.rect(x + at, y + at, width, HIGH, fill, line=colours.muted, radius=3, tip=said)
        word = f"+ {n_ranks}" if layout.partial else f"x {n_ranks}"
        figure.text(x + width / 2, y + HIGH / 2 + 4, word, size=SMALL, anchor="middle", bold=True)
        return
    down = bool(layout.dim("S"))
    w, h = (width, HIGH / n_ranks) if down else (width / n_ranks, HIGH)
    for rank in range(n_ranks):
        left, top = (x, y + rank * h) if down else (x + rank * w, y)
        fill = mix(RANK_COLOURS[rank], colours.card, 0.35)
        figure.rect(left, top, w, h, fill, line=colours.card, tip=f"{said}; rank {rank}")
        if w > 12 and h > 13:
            figure.text(
                left + w / 2,
                top + h / 2 + 4,
                str(rank),
                size=SMALL,
                anchor="middle",
                bold=True,
                fill=text_on(fill),
            )


def _way(steps: Sequence[Step], n_ranks: int) -> str:
    said = [
        f"{f'by {step.by} ' if step.by else ''}{step.name} {_cut(Layout(step.layout), n_ranks)}"
        for step in steps
    ]
    return ", then ".join(said)


def _cut(layout: Layout, n_ranks: int) -> str:
    if layout.partial:
        return f"is a sum of {n_ranks} ranks' terms"
    cut = [dim for dim in layout.dims if layout.dim(dim)]
    return f"is cut along {' and '.join(cut)}" if cut else f"is whole on all {n_ranks} ranks"
