"""Logits over ranks: whose words they are, and what the ranks tell each other about a token."""

from __future__ import annotations

from collections.abc import Sequence

from lessons_lib.errors import RefusedError
from lessons_lib.views.colours import MOST_RANK_COLOURS, RANK_COLOURS, mix
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, Key, text_width

ROW = 26.0
NAMES = 118.0  # room for the names of the tokens
MOST_TOKENS, MOST_WORDS = 12, 48
SENT = ("max", "sum of exp", "label's logit")  # of one token, over all ranks
IGNORED = -100


def words_picture(
    labels: Sequence[int], V: int, n_words: int, n_ranks: int, *, theme: str = "light"
) -> Figure:
    """Draw the logits of a few tokens, cut over ``n_ranks`` by words, and the three numbers that travel.

    >>> words_picture([2, 5, 0], V=10, n_words=12, n_ranks=4)
    Logits of 3 tokens, 10 words and 2 of padding over 4 ranks, 3 columns each. The label of token 0 lies \
on rank 0, of token 1 on rank 1, of token 2 on rank 0. Every rank adds to the maximum and to the sum of \
exp; only the rank of the label adds its logit.

    ``n_words`` is V with its padding. A label of -100 is none: its token is ignored.
    """
    if n_ranks > MOST_RANK_COLOURS or n_words % n_ranks or not V <= n_words <= MOST_WORDS:
        raise RefusedError(
            f"words_picture: {V} words, padded to {n_words}, over {n_ranks} ranks. It draws up to "
            f"{MOST_WORDS} words over up to {MOST_RANK_COLOURS} ranks that share them evenly: pad V to a "
            "multiple of the ranks, or try fewer."
        )
    if not 1 <= len(labels) <= MOST_TOKENS:
        raise RefusedError(f"words_picture: {len(labels)} tokens; it draws 1 to {MOST_TOKENS}.")
    each = n_words // n_ranks
    owners = [None if label == IGNORED else label // each for label in labels]
    figure = Figure("Logits over ranks", _alt(V, n_words, n_ranks, each, owners), theme=theme)
    colours = figure.theme
    dots = [max(n_ranks * 14.0, text_width(name, SMALL)) for name in SENT]
    sent_x = WIDTH - MARGIN - sum(dots) - 2 * 18
    left = MARGIN + NAMES
    column = min(40.0, (sent_x - 34 - left) / n_words)
    top = figure.top + 52

    for rank in range(n_ranks):
        x, width = left + rank * each * column, each * column
        chip = f"rank {rank}" if width > 58 else str(rank)
        figure.chip(x + 1, figure.top + 4, chip, RANK_COLOURS[rank], width=width - 2, height=20)
        last = min((rank + 1) * each, V) - 1
        words = f"{rank * each}:{last + 1}" if last >= rank * each else "none"
        figure.text(x + width / 2, figure.top + 42, words, size=SMALL, anchor="middle", fill=colours.muted)
    figure.text(MARGIN, figure.top + 42, "words", size=SMALL, fill=colours.muted)
    x = sent_x
    for name, width in zip(SENT, dots, strict=True):
        figure.text(x, figure.top + 42, name, size=SMALL, fill=colours.muted)
        x += width + 18
    figure.text(sent_x, figure.top + 20, "travels, per token", bold=True)

    for token, (label, owner) in enumerate(zip(labels, owners, strict=True)):
        y = top + token * ROW
        name = f"token {token}" if owner is not None else f"token {token}, ignored"
        figure.text(
            MARGIN, y + 16, name, size=SMALL, fill=colours.ink if owner is not None else colours.muted
        )
        for word in range(n_words):
            rank = word // each
            fill = mix(RANK_COLOURS[rank], colours.card, 0.62) if word < V else figure.waiting()
            said = f"token {token}, word {word}, on rank {rank}" if word < V else "padding: no word"
            figure.rect(left + word * column, y, column, ROW - 4, fill, line=colours.card, tip=said)
        if owner is not None:
            figure.rect(
                left + label * column,
                y,
                column,
                ROW - 4,
                RANK_COLOURS[owner],
                line=colours.ink,
                line_width=2,
                tip=f"token {token}: its label, word {label}",
            )
        x = sent_x
        for number, width in enumerate(dots):
            for rank in range(n_ranks):
                adds = number < 2 or rank == owner
                figure.rect(
                    x + rank * 14,
                    y + 5,
                    11,
                    11,
                    RANK_COLOURS[rank] if adds else colours.card,
                    line=colours.muted,
                    radius=2,
                    tip=f"{SENT[number]}, rank {rank} {'has a term' if adds else 'adds 0'}",
                )
            x += width + 18
    keys = [
        Key(mix(RANK_COLOURS[0], colours.card, 0.62), "a logit, in its rank's colour"),
        Key(RANK_COLOURS[0], "the label's, or a term of what travels"),
        Key(colours.card, "adds 0"),
    ]
    if n_words > V:
        keys.insert(2, Key(figure.waiting(), "padding"))
    figure.legend(keys, top + len(labels) * ROW + 12)
    return figure


def _alt(V: int, n_words: int, n_ranks: int, each: int, owners: Sequence[int | None]) -> str:
    padding = f" and {n_words - V} of padding" if n_words > V else ""
    places = [f"token {token} on rank {owner}" for token, owner in enumerate(owners) if owner is not None]
    where = f" The label of {', of '.join(places)}." if places else ""
    where = where.replace(" on rank", " lies on rank", 1)
    ignored = [token for token, owner in enumerate(owners) if owner is None]
    left_out = f" Of token {' and '.join(map(str, ignored))} the label is ignored." if ignored else ""
    return (
        f"Logits of {len(owners)} tokens, {V} words{padding} over {n_ranks} ranks, {each} columns each."
        f"{where}{left_out} Every rank adds to the maximum and to the sum of exp; only the rank of the label "
        "adds its logit."
    )
