"""The picture of one round of a collective: what every rank holds, what travels, what was sent so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lessons_lib.errors import RefusedError
from lessons_lib.timeline import one_or_range, ranks_text
from lessons_lib.views.colours import MOST_RANK_COLOURS, operation_colour, rank_colour
from lessons_lib.views.svg import MARGIN, SMALL, TEXT, WIDTH, Figure, fit, text_width

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_RANKS = 16
PANEL = 636  # where the panel begins, if it stands beside the cards
HEADER = 33  # of a card, with the rank's number
LEVEL = 17  # pixels between two arrows that go the same way

Chunks = tuple[frozenset[int], ...]  # of each chunk: the ranks whose contributions are in it


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message: some chunks, from one rank to another, which adds them to its own or keeps them."""

    source: int
    destination: int
    chunks: tuple[int, ...]
    n_bytes: int
    adds: bool


@dataclass(frozen=True, slots=True)
class Steps:
    """What a collective did, round by round.

    ``held[step][rank]`` is what a rank holds after ``step`` rounds; after the last, what its function
    returned. ``whole`` is what is in a chunk when nothing is missing.
    """

    name: str
    n_ranks: int
    chunk_bytes: tuple[int, ...]
    rounds: tuple[tuple[Transfer, ...], ...]
    held: tuple[tuple[Chunks, ...], ...]
    whole: Chunks

    @property
    def n_bytes(self) -> int:
        """Of the whole tensor: n."""
        return sum(self.chunk_bytes)

    def bytes_sent(self, rank: int, step: int) -> int:
        """Bytes that ``rank`` has sent in the first ``step`` rounds."""
        sent = (each for messages in self.rounds[:step] for each in messages)
        return sum(each.n_bytes for each in sent if each.source == rank)

    def owners(self, step: int) -> list[int]:
        """The ranks that hold all of the result."""
        return [rank for rank, chunks in enumerate(self.held[step]) if chunks == self.whole]

    def state(self, step: int) -> str:
        """``"copy"``, ``"root"`` (whole on some ranks), ``"cut"`` or ``"partial"``."""
        owners = self.owners(step)
        if owners:
            return "copy" if len(owners) == self.n_ranks else "root"
        somewhere = (any(held[c] == whole for held in self.held[step]) for c, whole in enumerate(self.whole))
        return "cut" if all(somewhere) else "partial"

    def moved(self) -> bool:
        """Whether something goes from a rank to another than its neighbour in the ring."""
        hops = {(each.destination - each.source) % self.n_ranks for sent in self.rounds for each in sent}
        return not hops <= {1}


def collective_step(steps: Steps, step: int, *, theme: str = "light") -> Figure:
    """Draw a collective after ``step`` of its rounds, with the messages of the last of them.

    >>> one = Transfer(0, 1, (0,), 8, adds=False)
    >>> held = ((frozenset({0}),), (frozenset(),)), ((frozenset({0}),), (frozenset({0}),))
    >>> steps = Steps("chain broadcast", 2, (8,), ((one,),), held, (frozenset({0}),))
    >>> print(collective_step(steps, 1).alt)
    Chain broadcast on 2 ranks after round 1 of 1: copy, every rank holds the whole result; \
A goes from rank 0 to 1 and is kept; 0 to 8 bytes sent per rank, 8 by all.

    Each rank is a card with a bar for each chunk, which fills as contributions are summed. Where all
    messages go to the neighbour, cards stand as a ring, else in rows. No arrow passes a card.
    """
    if not 0 <= step <= len(steps.rounds):
        raise RefusedError(f"step={step}: {steps.name} has the steps 0 to {len(steps.rounds)}.")
    if not 1 < steps.n_ranks <= MOST_RANKS or len(steps.chunk_bytes) > len(LETTERS):
        raise RefusedError(
            f"{steps.n_ranks} ranks with {len(steps.chunk_bytes)} chunks: a picture of a step shows 2 to "
            f"{MOST_RANKS} ranks and at most {len(LETTERS)} chunks."
        )
    figure = Figure(
        f"{_name(steps)}, {steps.n_ranks} ranks", _alt(steps, step), subtitle=_round(steps, step), theme=theme
    )
    beside = steps.n_ranks <= MOST_RANK_COLOURS
    cards = _cards(steps, figure.top + 6, PANEL - 26 if beside else WIDTH - MARGIN)
    arrived = steps.rounds[step - 1] if step else ()
    for rank in range(steps.n_ranks):
        _card(figure, cards[rank], steps, step, rank, arrived)
    _messages(figure, cards, arrived)
    bottom = max(card.y + card.height for card in cards) + 20
    sections = (_badge, _progress, _sent, _how_to_read)
    if beside:
        y = figure.top + 6
        for section in sections:
            y = section(figure, steps, step, PANEL, y, WIDTH - MARGIN - PANEL) + 18
    else:
        width = (WIDTH - 2 * MARGIN + 24) / 4
        for at, section in enumerate(sections):
            section(figure, steps, step, MARGIN + at * width, bottom, width - 24)
    return figure


# ---- the cards ----


class Card(NamedTuple):
    """Where a rank stands."""

    x: float
    y: float
    width: float
    height: float
    row: int

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


def _pitch(n_chunks: int) -> float:
    """The height of a chunk's line in a card."""
    if n_chunks == 1:
        return 38.0
    return 21.0 if n_chunks <= 4 else 17.0 if n_chunks <= 8 else 13.5


def _cards(steps: Steps, top: float, right: float) -> list[Card]:
    """Two rows; as a ring, the lower one runs back."""
    p, ring = steps.n_ranks, not steps.moved()
    columns = max(2, math.ceil(p / 2))
    pitch = min((right - MARGIN) / columns, 300.0)
    gap = 84.0 if columns == 2 else max(34.0, min(60.0, 0.28 * pitch))
    width = pitch - gap
    height = HEADER + _pitch(len(steps.whole)) * len(steps.whole) + 8
    upper = list(range(columns))
    lower = p - columns
    if ring and lower:
        # from the right end to the left one
        spread = [columns - 1 - at * (columns - 1) / (lower - 1) for at in range(lower)] if lower > 1 else []
        places: list[float] = [*upper, *(spread or [(columns - 1) / 2])]
    else:
        places = [*upper, *range(lower)]
    channel = 74.0 if ring else max(90.0, 40.0 + LEVEL * _levels(steps, columns))
    left = MARGIN + (right - MARGIN - columns * pitch + gap) / 2
    rows = [0] * columns + [1] * lower
    return [
        Card(left + place * pitch, top + row * (height + channel), width, height, row)
        for place, row in zip(places, rows, strict=True)
    ]


def _levels(steps: Steps, columns: int) -> int:
    """The most messages of a round that stay in their row."""
    return max(
        (
            sum((each.source < columns) == (each.destination < columns) for each in sent)
            for sent in steps.rounds
        ),
        default=0,
    )


def _card(
    figure: Figure, card: Card, steps: Steps, step: int, rank: int, arrived: Sequence[Transfer]
) -> None:
    theme, pitch = figure.theme, _pitch(len(steps.whole))
    colour = rank_colour(rank, steps.n_ranks) or theme.line
    figure.rect(card.x, card.y, card.width, card.height, theme.panel, line=theme.line, radius=8)
    chip = 22.0 if rank < 10 else 28.0
    named = card.width > 66 + chip
    if named:
        figure.text(card.x + 10, card.y + 18, "rank", fill=theme.muted)
    figure.chip(card.x + (44 if named else 8), card.y + 5, str(rank), colour, width=chip)
    changed = {chunk for each in arrived if each.destination == rank for chunk in each.chunks}
    held, bar, thick = steps.held[step][rank], card.x + 24, pitch - (7 if pitch > 15 else 4)
    for chunk, inside in enumerate(held):
        y = card.y + HEADER + chunk * pitch
        whole = steps.whole[chunk]
        fresh = chunk in changed and bool(inside)
        baseline = y + thick / 2 + 4.5
        figure.text(card.x + 9, baseline, LETTERS[chunk], size=SMALL, bold=fresh)
        tip = f"{LETTERS[chunk]} on rank {rank}: {_contents(inside, whole)}"
        _bar(figure, (bar, y, card.x + card.width - 10 - bar, thick), inside, whole, tip)
        if fresh:
            outline = (bar - 1.5, y - 1.5, card.x + card.width - 10 - bar + 3, thick + 3)
            figure.rect(*outline, "none", line=theme.ink, line_width=2, radius=3, tip=f"{tip}; new")


def _contents(inside: frozenset[int], whole: frozenset[int]) -> str:
    if not inside:
        return "nothing"
    if inside == whole:
        return "complete" if len(whole) > 1 else f"complete, from {ranks_text(sorted(whole))}"
    return f"{len(inside)} of {len(whole)} contributions, from {ranks_text(sorted(inside))}"


def _bar(
    figure: Figure,
    box: tuple[float, float, float, float],
    inside: frozenset[int],
    whole: frozenset[int],
    tip: str,
) -> None:
    """Dotted while terms are missing, solid when complete."""
    x, y, width, height = box
    theme = figure.theme
    figure.rect(x, y, width, height, theme.card, line=theme.line, radius=2, tip=tip)
    if inside == whole:
        figure.rect(x, y, width, height, theme.muted, radius=2, tip=tip)
    elif inside:
        part = width * len(inside) / len(whole)
        figure.rect(x, y, part, height, figure.partial(), radius=2)
        figure.rect(x, y, part, height, theme.hatch, line=theme.muted, radius=2, opacity=0.45, tip=tip)
        if width / len(whole) >= 6:
            for at in range(1, len(inside)):
                mark = x + width * at / len(whole)
                figure.line([(mark, y), (mark, y + height)], theme.muted)


# ---- the messages ----


def _messages(figure: Figure, cards: Sequence[Card], sent: Sequence[Transfer]) -> None:
    """Arrows in the gap between neighbours, or in the channel between the rows."""
    colour = operation_colour("send")
    level = 0
    pairs = {(each.source, each.destination) for each in sent}
    for each in sent:
        source, target = cards[each.source], cards[each.destination]
        both_ways = 9.0 if (each.destination, each.source) in pairs else 0.0
        words = f"{_letters(each.chunks)}, {each.n_bytes:,} bytes, from rank {each.source} to rank "
        tip = f"{words}{each.destination}: {'added' if each.adds else 'kept'}"
        if source.row != target.row:
            down = source.row < target.row
            start = source.middle[0], source.y + (source.height + 3 if down else -3)
            end = target.middle[0], target.y + (-3 if down else target.height + 3)
            figure.arrow(start, end, colour, width=2.5, tip=tip)
            at = 0.5 if start[0] == end[0] else 0.3  # where arrows cross, not all letters in one place
            label = start[0] + at * (end[0] - start[0]), start[1] + at * (end[1] - start[1])
        elif _neighbours(cards, source, target):
            right = target.x > source.x
            y = source.middle[1] + (both_ways if right else -both_ways)
            start = (source.x + source.width + 4 if right else source.x - 4), y
            end = (target.x - 4 if right else target.x + target.width + 4), y
            figure.arrow(start, end, colour, width=2.5, tip=tip)
            label = (start[0] + end[0]) / 2, y + (15 if both_ways and right else -15)
        else:
            level += 1
            upper = source.row == 0
            edge = source.y + source.height if upper else source.y
            away = 1 if upper else -1
            y = edge + away * (12 + LEVEL * level)
            right = target.x > source.x
            x0, x1 = source.middle[0] + (12 if right else -12), target.middle[0] + (-12 if right else 12)
            figure.line([(x0, edge + away * 3), (x0, y), (x1, y)], colour, width=2.5, tip=tip)
            figure.arrow((x1, y), (x1, edge + away * 3), colour, width=2.5, tip=tip)
            label = x0 + 0.25 * (x1 - x0), y
        _label(figure, label, _letters(each.chunks), colour, tip)


def _neighbours(cards: Sequence[Card], one: Card, other: Card) -> bool:
    """Whether no card stands between two cards of a row."""
    low, high = sorted((one.x, other.x))
    return not any(card.row == one.row and low < card.x < high for card in cards)


def _label(figure: Figure, at: tuple[float, float], letters: str, colour: str, tip: str) -> None:
    width = text_width(letters, SMALL, bold=True) + 10
    x, y = at[0] - width / 2, at[1] - 8
    figure.rect(x, y, width, 16, figure.theme.card, line=colour, line_width=1.5, radius=5, tip=tip)
    figure.text(at[0], at[1] + 4.3, letters, size=SMALL, anchor="middle", bold=True)


def _letters(chunks: Sequence[int]) -> str:
    """``A``; ``A-D``; ``A C``."""
    if len(chunks) > 2 and list(chunks) == list(range(chunks[0], chunks[-1] + 1)):
        return f"{LETTERS[chunks[0]]}-{LETTERS[chunks[-1]]}"
    return " ".join(LETTERS[chunk] for chunk in chunks)


# ---- the panel: each section returns where it ends ----


def _badge(figure: Figure, steps: Steps, step: int, x: float, y: float, width: float) -> float:
    theme, state = figure.theme, steps.state(step)
    name, meaning = _state(steps, step)
    chip = text_width(name, 14, bold=True) + 26
    fill = {"partial": figure.partial(), "copy": theme.muted}.get(state, theme.card)
    figure.rect(x, y, chip, 28, fill, line=theme.ink, line_width=2, radius=6, tip=meaning)
    plate = theme.card if state != "copy" else theme.muted
    if state == "partial":
        figure.rect(x + 8, y + 5, chip - 16, 18, plate, radius=4)
    ink = theme.card if state == "copy" else theme.ink
    figure.text(x + chip / 2, y + 19, name, size=14, anchor="middle", fill=ink, bold=True)
    return _lines(figure, meaning, x, y + 48, width)


def _progress(figure: Figure, steps: Steps, step: int, x: float, y: float, width: float) -> float:
    theme, n = figure.theme, len(steps.rounds)
    figure.text(x, y + 12, f"{_times(step, 'round')} of {n}", size=14, bold=True)
    each = min(34.0, width / max(n, 1))
    for at in range(n):
        fill = theme.muted if at < step else theme.lane
        tip = f"round {at + 1}: {_times(len(steps.rounds[at]), 'message')}"
        figure.rect(x + at * each, y + 22, each - 2.5, 14, fill, line=theme.line, radius=2, tip=tip)
    return y + 36


def _sent(figure: Figure, steps: Steps, step: int, x: float, y: float, width: float) -> float:
    now, end = (
        [steps.bytes_sent(rank, at) for rank in range(steps.n_ranks)] for at in (step, len(steps.rounds))
    )
    figure.text(x, y + 12, "Sent by each rank so far", size=14, bold=True)
    rows = [
        f"{one_or_range(now)} bytes = {_in_tensors(now, steps)} n",
        f"in the end {_in_tensors(end, steps)} n",
        f"all: {sum(now):,} of {sum(end):,} bytes",
        f"n = {steps.n_bytes:,} bytes, one tensor",
    ]
    for at, words in enumerate(rows):
        fill = figure.theme.muted if at else figure.theme.ink
        figure.text(x, y + 34 + 20 * at, fit(words, width), fill=fill, tip=words)
    return y + 98


def _how_to_read(figure: Figure, steps: Steps, step: int, x: float, y: float, width: float) -> float:
    p = max(map(len, steps.whole))
    some, every = frozenset([0]), frozenset(range(p))
    figure.text(x, y + 12, "How to read", size=14, bold=True)
    at = y + 26
    if p > 1:
        _bar(figure, (x, at, 44, 13), some, every, "")
        figure.text(x + 54, at + 11, f"1 of {p} contributions")
        at += 22
    _bar(figure, (x, at, 44, 13), every, every, "")
    figure.text(x + 54, at + 11, "complete")
    at += 22
    figure.rect(x, at - 1, 44, 15, figure.theme.card, line=figure.theme.ink, line_width=2, radius=3)
    figure.text(x + 54, at + 11, "arrived in this round")
    at += 22
    _label(figure, (x + 22, at + 7), "A", operation_colour("send"), "")
    figure.text(x + 54, at + 11, "a chunk on its way")
    return at + 14


def _lines(figure: Figure, words: str, x: float, y: float, width: float) -> float:
    """Write a sentence in lines of ``width``; return where it ends."""
    line = ""
    for word in words.split():
        if line and text_width(f"{line} {word}") > width:
            figure.text(x, y, line, fill=figure.theme.muted)
            line, y = word, y + 18
        else:
            line = f"{line} {word}".strip()
    figure.text(x, y, line, fill=figure.theme.muted, size=TEXT)
    return y + 4


# ---- words ----


def _name(steps: Steps) -> str:
    return steps.name[:1].upper() + steps.name[1:]


def _times(n: int, thing: str) -> str:
    return f"{n} {thing}{'' if n == 1 else 's'}"


def _state(steps: Steps, step: int) -> tuple[str, str]:
    """What a collective changes, in a word and in a sentence."""
    state = steps.state(step)
    if state == "root":
        owners = steps.owners(step)
        where = ranks_text(owners) + (" alone" if len(owners) == 1 else "")
        return (
            f"on {len(owners)} of {steps.n_ranks}",
            f"{where} {'holds' if len(owners) == 1 else 'hold'} all",
        )
    return {
        "partial": ("partial sum", "no rank holds all, and some chunk is complete nowhere"),
        "cut": ("cut", "each chunk is complete somewhere, and no rank holds all"),
        "copy": ("copy", "every rank holds the whole result"),
    }[state]


def _round(steps: Steps, step: int) -> str:
    """What happens in this round."""
    n = len(steps.rounds)
    if step == 0:
        return f"Before the first of {_times(n, 'round')}: what each rank brings."
    sent = steps.rounds[step - 1]
    how = {each.adds for each in sent}
    arrives = "what arrives is added" if how == {True} else "what arrives is kept" if how == {False} else ""
    who = f"{_times(len(sent), 'message')} at once" if len(sent) > 1 else "1 message"
    dropped = "; what is no part of the result is dropped" if _drops(steps, step) else ""
    return f"Round {step} of {n}: {who}{'; ' if arrives else ''}{arrives}{dropped}."


def _drops(steps: Steps, step: int) -> bool:
    """Whether a rank returned less than it held."""
    before, after = steps.held[step - 1], steps.held[step]
    return any(
        b and not a for one, other in zip(before, after, strict=True) for b, a in zip(one, other, strict=True)
    )


def _in_tensors(n_bytes: Sequence[int], steps: Steps) -> str:
    """Bytes in units of the whole tensor."""
    low, high = min(n_bytes) / steps.n_bytes, max(n_bytes) / steps.n_bytes
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _alt(steps: Steps, step: int) -> str:
    name, meaning = _state(steps, step)
    when = (
        f"after round {step} of {len(steps.rounds)}"
        if step
        else f"before the first of {len(steps.rounds)} rounds"
    )
    parts = [f"{_name(steps)} on {steps.n_ranks} ranks {when}: {name}, {meaning}"]
    sent = steps.rounds[step - 1] if step else ()
    for each in sent[:4]:
        what = f"{_letters(each.chunks)} goes from rank {each.source} to {each.destination}"
        parts.append(f"{what} and is {'added' if each.adds else 'kept'}")
    if len(sent) > 4:
        parts.append(f"{_times(len(sent) - 4, 'further message')}")
    bytes_sent = [steps.bytes_sent(rank, step) for rank in range(steps.n_ranks)]
    parts.append(f"{one_or_range(bytes_sent)} bytes sent per rank, {sum(bytes_sent):,} by all")
    return "; ".join(parts) + "."
