"""The picture of attention shared out: each pair of a query and a key, by whom it is computed and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lessons_lib.views.colours import rank_colour, text_on
from lessons_lib.views.svg import MARGIN, SMALL, TITLE, WIDTH, Figure, text_width

SIDE = 416.0  # of the mask, in pixels
LEFT = 58.0
BARS = 520.0  # where the ranks' bars begin
CHIP = 15.0
ONE_MASK = "Rows are queries, columns keys. A cell has the colour of its rank and the number of its step."
MASK_OF_HEADS = "Rows are queries, columns keys. Each rank computes all pairs, of heads of its own."
FAINT = 0.35  # of what is computed in another step


@dataclass(frozen=True, slots=True)
class Mask:
    """Who computes each row, and in which step each of its pairs; ``None`` where a key is hidden."""

    title: str
    computed_by: tuple[int, ...]  # by query
    steps: tuple[tuple[int | None, ...], ...]  # by query and key


@dataclass(frozen=True, slots=True)
class Shared:
    """Attention as some ranks share it out."""

    title: str
    masks: tuple[Mask, ...]  # of all heads alike, or one for each rank's heads
    holders: tuple[int, ...]  # of each token: the rank that has it, its query and its key
    pairs: tuple[tuple[int, ...], ...]  # [step][rank]
    busy: float  # share of the time, where a step lasts as long as its slowest rank
    sent: str  # what each rank sends, in words
    axis: int  # pairs in the length of the bars' axis

    @property
    def n_ranks(self) -> int:
        return len(self.pairs[0])


def attention_picture(shared: Shared, step: int | None = None, *, theme: str = "light") -> Figure:
    """Draw the mask, coloured by the rank that computes it, with the step in each cell, and each rank's time.

    With a ``step`` the pairs of that one stand out. A step lasts as long as its slowest rank.
    """
    figure = Figure(
        shared.title,
        _alt(shared, step),
        subtitle=ONE_MASK if len(shared.masks) == 1 else MASK_OF_HEADS,
        theme=theme,
    )
    top = figure.top + 6
    if len(shared.masks) == 1:
        _mask(figure, shared, shared.masks[0], LEFT, top + CHIP + 4, SIDE, step, chips=True)
    else:
        across = 2 if len(shared.masks) <= 4 else 3
        side = (SIDE - (across - 1) * 14) / across
        for at, mask in enumerate(shared.masks):
            row, column = divmod(at, across)
            x, y = LEFT + column * (side + 14), top + 14 + row * (side + 26)
            figure.text(x, y - 3, mask.title, size=SMALL)
            _mask(figure, shared, mask, x, y, side, step, chips=False)
    _bars(figure, shared, top, step)
    return figure


def _mask(
    figure: Figure, shared: Shared, mask: Mask, x: float, y: float, side: float, step: int | None, chips: bool
) -> None:
    theme, n = figure.theme, len(mask.steps)
    cell = side / n
    figure.rect(x, y, side, side, theme.lane)
    for query, row in enumerate(mask.steps):
        rank = mask.computed_by[query]
        colour = _colour(rank, shared)
        for key, when in enumerate(row):
            if when is None:
                continue
            active = step is None or when == step
            tip = f"query {query}, key {key}: rank {rank}, step {when}"
            place = (x + key * cell, y + query * cell)
            figure.rect(*place, cell, cell, colour, line=theme.card, opacity=1 if active else FAINT, tip=tip)
            if cell >= 20:
                ink = text_on(colour) if active else theme.ink
                middle = place[0] + cell / 2, place[1] + cell / 2 + 4.3
                figure.text(*middle, str(when), size=SMALL, anchor="middle", fill=ink)
    if step is not None and cell >= 20:
        _outline(figure, mask, x, y, cell, step)
    if not chips:
        return
    for at, rank in enumerate(shared.holders):
        across, down = x + at * cell + (cell - CHIP) / 2, y + at * cell + (cell - CHIP) / 2
        for place in ((across, y - CHIP - 3), (x - CHIP - 3, down)):
            tip = f"token {at} is on rank {rank}"
            figure.chip(*place, str(rank), _colour(rank, shared), width=CHIP, height=CHIP, tip=tip)
    figure.text(MARGIN + 8, y + side / 2, "queries, by rank", size=SMALL, anchor="middle", turn=-90)
    figure.text(x + side / 2, y + side + 18, "keys, by the rank they come from", size=SMALL, anchor="middle")


def _outline(figure: Figure, mask: Mask, x: float, y: float, cell: float, step: int) -> None:
    """A line around the cells of a step."""
    n, ink = len(mask.steps), figure.theme.ink
    inside = [[when == step for when in row] for row in mask.steps]
    for query in range(n):
        for key in range(n):
            if not inside[query][key]:
                continue
            left, top = x + key * cell, y + query * cell
            for other, ends in (
                ((query - 1, key), ((left, top), (left + cell, top))),
                ((query + 1, key), ((left, top + cell), (left + cell, top + cell))),
                ((query, key - 1), ((left, top), (left, top + cell))),
                ((query, key + 1), ((left + cell, top), (left + cell, top + cell))),
            ):
                if not all(0 <= place < n for place in other) or not inside[other[0]][other[1]]:
                    figure.line(ends, ink, width=2)


def _bars(figure: Figure, shared: Shared, top: float, step: int | None) -> None:
    theme = figure.theme
    scale = (WIDTH - MARGIN - 44 - BARS) / shared.axis
    height = 30.0 if shared.n_ranks <= 4 else 22.0
    figure.text(BARS, top + 12, "Each rank's time, in pairs", bold=True)
    y = top + 26
    for rank in range(shared.n_ranks):
        colour = _colour(rank, shared)
        figure.chip(BARS - 26, y + (height - 18) / 2, str(rank), colour, width=18, tip=f"rank {rank}")
        x = BARS
        for at, counts in enumerate(shared.pairs):
            length, work = max(counts) * scale, counts[rank] * scale
            active = step is None or at == step
            figure.rect(x, y, length, height, figure.waiting(), line=theme.line)
            if work:
                tip = f"rank {rank}, step {at}: {counts[rank]} pairs of {max(counts)}"
                opacity = 1 if active else FAINT
                figure.rect(x, y, work, height, theme.card)
                figure.rect(x, y, work, height, colour, line=theme.card, opacity=opacity, tip=tip)
            if work >= 20:
                ink = text_on(colour) if active else theme.ink
                middle = x + work / 2, y + height / 2 + 4.3
                figure.text(*middle, str(counts[rank]), size=SMALL, anchor="middle", fill=ink)
            x += length
        total = sum(counts[rank] for counts in shared.pairs)
        figure.text(x + 8, y + height / 2 + 4.6, str(total), bold=True)
        y += height + 8
    for fill, words in (
        (figure.waiting(), "waits for the slowest rank of the step"),
        (theme.lane, "hidden by the mask"),
    ):
        figure.rect(BARS, y + 6, 13, 13, fill, line=theme.line, radius=2)
        figure.text(BARS + 19, y + 17, words)
        y += 22
    share = f"{100 * shared.busy:.1f} %"
    figure.text(BARS, y + 40, share, size=TITLE, bold=True)
    figure.text(BARS + text_width(share, TITLE, bold=True) + 10, y + 40, "of the ranks' time is work")
    for at, words in enumerate(("Each rank sends, forward and backward,", shared.sent)):
        figure.text(BARS, y + 66 + 19 * at, words, fill=theme.muted if at == 0 else "", bold=at == 1)


def _colour(rank: int, shared: Shared) -> str:
    return rank_colour(rank, shared.n_ranks) or "#888f98"


def _alt(shared: Shared, step: int | None) -> str:
    totals = [sum(counts) for counts in zip(*shared.pairs, strict=True)]
    words = f"{shared.title}: ranks compute {_listed(totals)} pairs and are {100 * shared.busy:.1f} % busy"
    if step is not None:
        words += f"; in step {step} {_listed(shared.pairs[step])}"
    return f"{words}. Each rank sends {shared.sent}."


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
