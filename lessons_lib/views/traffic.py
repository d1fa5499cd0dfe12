"""The picture of traffic: a row for each rank that sends, a column for each that receives."""

from __future__ import annotations

from collections.abc import Sequence

from lessons_lib.timeline import Traffic, one_or_range
from lessons_lib.views.axes import every
from lessons_lib.views.colours import Theme, mix, rank_colour, text_on
from lessons_lib.views.memory import bytes_text
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, text_width

LEFT = 92  # of the matrix
TOTALS = 150  # width of the columns beside it
FAINTEST, FULL = 0.1, 0.75  # how much ink the least and the most traffic get


def traffic_matrix(traffic: Traffic, *, title: str = "Who sends to whom", theme: str = "light") -> Figure:
    """Draw how many bytes went from each rank to each other: the darker, the more.

    >>> from lessons_lib import run, Mesh
    >>> import torch
    >>> result = run(lambda: Mesh(row=2, col=2)["col"].all_reduce(torch.ones(8)), ranks=4)
    >>> print(traffic_matrix(result.trace.traffic).alt)
    Who sends to whom: bytes between 4 ranks; each sends 32 bytes, to 1 other rank; the most is 32 bytes, \
from rank 0 to rank 1.

    What a collective sends goes to the next rank of its ring, by the convention that bytes are counted by.
    Numbers are written in full where they fit, and always on hover.
    """
    n = traffic.n_ranks
    sent = traffic.between or tuple((0,) * n for _ in range(n))
    most = max(map(max, sent))
    what = "Bytes from each rank (row) to each other (column); a collective sends around its ring."
    figure = Figure(
        title, _alt(sent, title), subtitle=what if most else "No rank sent anything.", theme=theme
    )
    width = min(110.0, (WIDTH - MARGIN - TOTALS - LEFT) / n)
    height = min(34.0, 544 / n)
    top = figure.top + 42
    _labels(figure, top, width, height, n)
    words = _words([n_bytes for row in sent for n_bytes in row], width - 8, height)
    for source, row in enumerate(sent):
        for destination, n_bytes in enumerate(row):
            x, y = LEFT + destination * width, top + source * height
            gap = 1 if width > 16 else 0.25
            box = x + gap, y + gap, width - 2 * gap, height - 2 * gap
            if source == destination:
                figure.rect(*box, figure.theme.card, line=figure.theme.line)
                continue
            fill = _shade(figure.theme, n_bytes / most if most else 0)
            tip = f"rank {source} to rank {destination}: {n_bytes:,} bytes"
            figure.rect(*box, fill, radius=2 * (width > 16), tip=tip)
            if n_bytes and words:
                figure.text(
                    x + width / 2,
                    y + height / 2 + 4.3,
                    words[n_bytes],
                    size=SMALL,
                    anchor="middle",
                    fill=text_on(fill),
                )
    _totals(figure, top, width, height, sent)
    return figure


def _shade(theme: Theme, share: float) -> str:
    return mix(theme.lane, theme.ink, FAINTEST + (FULL - FAINTEST) * share) if share else theme.lane


def _words(numbers: Sequence[int], width: float, height: float) -> dict[int, str]:
    """How numbers are written, all in the same way: in full, in a handy unit or, without room, not at all."""
    for write in ("{:,}".format, bytes_text):
        words = {n_bytes: write(n_bytes) for n_bytes in set(numbers)}
        if height >= 14 and all(text_width(each, SMALL) <= width for each in words.values()):
            return words
    return {}


def _labels(figure: Figure, top: float, width: float, height: float, n: int) -> None:
    theme = figure.theme
    figure.text(LEFT + n * width / 2, figure.top + 10, "to rank", anchor="middle", fill=theme.muted)
    figure.text(MARGIN, top - 10, "from rank", size=SMALL, fill=theme.muted)
    for rank in range(n):
        x, y = LEFT + (rank + 0.5) * width, top + (rank + 0.5) * height
        colour = rank_colour(rank, n)
        if colour:
            for at_x, at_y in ((x, top - 14), (LEFT - 24, y)):
                figure.chip(at_x - 12, at_y - 9, str(rank), colour, width=24, tip=f"rank {rank}")
            continue
        if rank % every(text_width(str(n), SMALL) + 6, width) == 0:
            figure.text(x, top - 8, str(rank), size=SMALL, anchor="middle")
        if rank % every(15, height) == 0:
            figure.text(LEFT - 10, y + 4.3, str(rank), size=SMALL, anchor="end")


def _totals(figure: Figure, top: float, width: float, height: float, sent: Sequence[Sequence[int]]) -> None:
    """What each rank sends in all, beside its row, and what each receives, below its column."""
    n, theme = len(sent), figure.theme
    right, bottom = LEFT + n * width, top + n * height
    out = [sum(row) for row in sent]
    into = [sum(row[rank] for row in sent) for rank in range(n)]
    figure.text(right + 12, top - 10, "sends", size=SMALL, fill=theme.muted)
    written = _words(out, WIDTH - MARGIN - right - 12, height)
    for rank in range(n) if written else ():
        y = top + (rank + 0.5) * height + 4.3
        figure.text(right + 12, y, written[out[rank]], size=SMALL, bold=True)
    if not written:
        figure.text(right + 12, top + 12, f"{one_or_range(out)} each", size=SMALL, bold=True)
    figure.text(LEFT - 10, bottom + 18, "receives", size=SMALL, anchor="end", fill=theme.muted)
    written = _words(into, width - 6, height)
    for rank in range(n) if written else ():
        x = LEFT + (rank + 0.5) * width
        figure.text(x, bottom + 18, written[into[rank]], size=SMALL, anchor="middle", bold=True)
    if not written:
        figure.text(LEFT, bottom + 18, f"{one_or_range(into)} each", size=SMALL, bold=True)


def _alt(sent: Sequence[Sequence[int]], title: str) -> str:
    n = len(sent)
    ranks = "1 rank" if n == 1 else f"{n} ranks"
    most, source, destination = max(
        (n_bytes, -source, -destination)
        for source, row in enumerate(sent)
        for destination, n_bytes in enumerate(row)
    )
    if not most:
        return f"{title}: bytes between {ranks}; no rank sends anything."
    partners = [sum(n_bytes > 0 for n_bytes in row) for row in sent]
    others = "1 other rank" if set(partners) == {1} else f"{one_or_range(partners)} other ranks"
    return (
        f"{title}: bytes between {ranks}; each sends {one_or_range([sum(row) for row in sent])} bytes, "
        f"to {others}; the most is {most:,} bytes, from rank {-source} to rank {-destination}."
    )
