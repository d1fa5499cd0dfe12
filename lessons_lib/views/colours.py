"""What each colour means, the same in every picture.

Operations of one family share a hue and differ in lightness. No two operations come close to each
other for any of the three kinds of colour-blindness; ranks carry their number besides, waiting is
hatched and a partial sum dotted. Tests hold all this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MOST_RANK_COLOURS = 8  # from nine ranks on, axes are coloured instead

# Okabe and Ito 2008, with a grey that is seen on a dark card in place of black.
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#595959")

# Mesh axes, in the order of the mesh.
AXIS_COLOURS = ("#3d348b", "#4fb3a2", "#b5651d", "#e3d58a")

# Kind of a span: colour and the name in the legend, which is the one that learners type.
OPERATIONS = {
    "compute": ("#91a3bf", "compute"),
    "F": ("#22577a", "forward"),
    "B": ("#e07a1f", "backward"),
    "I": ("#e07a1f", "input gradient"),
    "W": ("#f7dc6f", "weight gradient"),
    "all_reduce": ("#613d99", "all_reduce"),  # violet: data is added up
    "reduce_scatter": ("#b57bea", "reduce_scatter"),
    "reduce": ("#cfb8f7", "reduce"),
    "all_gather": ("#1f6b3a", "all_gather"),  # green: data is handed on as it is
    "gather": ("#84efd6", "gather"),
    "broadcast": ("#52c04a", "broadcast"),
    "scatter": ("#dde38b", "scatter"),
    "all_to_all": ("#8f500a", "all_to_all"),  # brown: all exchange
    "send": ("#e02a66", "send"),  # red: one rank to one other
    "recv": ("#ffa9a2", "recv"),
    "barrier": ("#3b3f45", "barrier"),
}
UNKNOWN_OPERATION = "#888f98"
WAITING = "wait"  # the kind that is hatched instead


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of the card that a figure paints for itself."""

    card: str
    ink: str
    muted: str  # text of second rank; readable on card, panel and lane
    line: str
    panel: str
    lane: str
    hatch: str
    alarm: str
    memory: str


THEMES = {
    "light": Theme(
        card="#ffffff",
        ink="#1f2328",
        muted="#57606a",
        line="#d0d7de",
        panel="#eef2f6",
        lane="#f1f3f5",
        hatch="#b4bcc5",
        alarm="#c4202c",
        memory="#b2b7bd",
    ),
    "dark": Theme(
        card="#161b22",
        ink="#e6edf3",
        muted="#9aa4af",
        line="#3d444d",
        panel="#21262d",
        lane="#21262d",
        hatch="#59636e",
        alarm="#ff7b72",
        memory="#59636e",
    ),
}


def rank_colour(rank: int, n_ranks: int) -> str | None:
    """The colour of a rank, or ``None`` where there are more ranks than colours.

    >>> rank_colour(1, 8), rank_colour(1, 9)
    ('#E69F00', None)
    """
    return RANK_COLOURS[rank] if n_ranks <= MOST_RANK_COLOURS else None


def axis_colour(axis: str, axes: Iterable[str]) -> str:
    """The colour of one of the axes of a mesh.

    >>> axis_colour("col", {"row": 2, "col": 2})
    '#4fb3a2'
    """
    return AXIS_COLOURS[list(axes).index(axis) % len(AXIS_COLOURS)]


def operation_colour(kind: str) -> str:
    return OPERATIONS.get(kind, (UNKNOWN_OPERATION, kind))[0]


def operation_name(kind: str) -> str:
    return OPERATIONS.get(kind, (UNKNOWN_OPERATION, kind))[1]


def mix(one: str, other: str, share: float) -> str:
    """``one`` with a ``share`` of ``other`` in it.

    >>> mix("#ffffff", "#000000", 0.0), mix("#ffffff", "#0072B2", 0.5)
    ('#ffffff', '#80b9d9')
    """
    channels = ((int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{math.floor(a + (b - a) * share + 0.5):02x}" for a, b in channels)


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, from 0 to 1 (WCAG 2)."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours (WCAG 2): 4.5 is enough for text.

    >>> contrast("#ffffff", "#000000")
    21.0
    """
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def text_on(fill: str) -> str:
    """Black or white, whichever reads better on ``fill``.

    >>> text_on("#F0E442"), text_on("#0072B2")
    ('#000000', '#ffffff')
    """
    return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, fill))
