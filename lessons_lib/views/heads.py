"""Attention heads over ranks: which queries a rank has, and the keys and values they look at."""

from __future__ import annotations

from collections.abc import Sequence

from lessons_lib.errors import RefusedError
from lessons_lib.views.colours import MOST_RANK_COLOURS, RANK_COLOURS
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, Key

CHIP, GAP = 30.0, 6.0
NAMES = 84.0


def heads_picture(
    queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], *, theme: str = "light"
) -> Figure:
    """Draw the query heads of every rank, and the heads of keys and values it has for them.

    >>> heads_picture([[0, 1], [2, 3]], [[0], [0]])
    4 query heads and 1 head of keys and values over 2 ranks. Rank 0 has queries 0 and 1 with keys and \
values 0, rank 1 queries 2 and 3 with keys and values 0. Head 0 of keys and values lies on ranks 0 and 1.

    ``queries[rank]`` and ``keys[rank]`` are the numbers of its heads. Query heads share keys and values in
    order and evenly, so head h looks at head h G // H of G.
    """
    n_ranks = len(queries)
    H = len({head for each in queries for head in each})
    G = len({head for each in keys for head in each})
    widest = max((len(each) for each in [*queries, *keys]), default=0)
    room = (WIDTH - 2 * MARGIN - NAMES) / max(n_ranks, 1) - 12
    if not 1 <= n_ranks <= MOST_RANK_COLOURS or len(keys) != n_ranks or widest * (CHIP + GAP) > room:
        raise RefusedError(
            f"heads_picture: {H} heads over {n_ranks} ranks, up to {widest} on one. It draws up to "
            f"{MOST_RANK_COLOURS} ranks, as many heads on each as find room: try fewer."
        )
    holders = {head: [r for r, each in enumerate(keys) if head in each] for head in range(G)}
    figure = Figure(
        f"{H} query heads, {G} of keys and values, {n_ranks} ranks", _alt(queries, keys, H, G), theme=theme
    )
    colours = figure.theme
    top = figure.top + 34
    low = top + 66
    figure.text(MARGIN, top + 20, "queries", size=SMALL, fill=colours.muted)
    figure.text(MARGIN, low + 20, "keys, values", size=SMALL, fill=colours.muted)
    for rank in range(n_ranks):
        x = MARGIN + NAMES + rank * (room + 12)
        figure.rect(x, figure.top, room + 2, low + 44 - figure.top, colours.panel, radius=6)
        figure.text(x + (room + 2) / 2, figure.top + 20, f"rank {rank}", anchor="middle", bold=True)

        def places(heads: Sequence[int], x: float = x) -> dict[int, float]:
            step = CHIP + GAP
            left = x + (room + 2 - len(heads) * step + GAP) / 2
            return {head: left + at * step for at, head in enumerate(heads)}

        asked, answered = places(queries[rank]), places(keys[rank])
        for head, at in asked.items():
            if (of := head * G // H) in answered:
                line = [(at + CHIP / 2, top + 30), (answered[of] + CHIP / 2, low)]
                figure.line(line, colours.muted, tip=f"query head {head} looks at keys and values {of}")
        for head, at in asked.items():
            said = f"query head {head} of {H}, on rank {rank}"
            figure.chip(at, top, str(head), RANK_COLOURS[rank], width=CHIP, height=30, tip=said)
        for head, at in answered.items():
            copies = holders[head]
            said = f"keys and values {head} of {G}, on {len(copies)} rank{'s' if len(copies) > 1 else ''}"
            if len(copies) > 1:
                figure.rect(at + 4, low - 4, CHIP, 30, colours.lane, line=colours.muted, radius=4)
            figure.rect(at, low, CHIP, 30, colours.card, line=colours.ink, line_width=1.5, radius=4, tip=said)
            figure.text(at + CHIP / 2, low + 20, str(head), anchor="middle", bold=True)
    legend = [
        Key(RANK_COLOURS[0], "a query head, in its rank's colour"),
        Key(colours.card, "keys and values"),
    ]
    if any(len(copies) > 1 for copies in holders.values()):
        legend.append(Key(colours.card, "the same on several ranks: copies", "stack"))
    figure.legend(legend, low + 58)
    return figure


def _alt(queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], H: int, G: int) -> str:
    ranks = [
        f"rank {rank} {'has ' if rank == 0 else ''}queries {_and(mine)} with keys and values {_and(theirs)}"
        for rank, (mine, theirs) in enumerate(zip(queries, keys, strict=True))
    ]
    copies = [
        f" Head {head} of keys and values lies on ranks {_and(on)}."
        for head in range(G)
        if len(on := [rank for rank, each in enumerate(keys) if head in each]) > 1
    ]
    sentence = ", ".join(ranks)
    return (
        f"{H} query heads and {G} head{'s' if G > 1 else ''} of keys and values over {len(queries)} ranks. "
        f"R{sentence[1:]}.{''.join(copies)}"
    )


def _and(numbers: Sequence[int]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"
