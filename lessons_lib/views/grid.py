"""The picture of a mesh: every rank with the blocks it holds, axes further out as layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout, coordinates
from lessons_lib.timeline import ranks_text
from lessons_lib.views.axes import every
from lessons_lib.views.colours import rank_colour, text_on
from lessons_lib.views.layouts import (
    BRACKET,
    PANEL,
    PANEL_ROW,
    Grid,
    axis_fill,
    brackets,
    mesh_words,
    rank_of,
)
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, Key, fit, text_width

MOST_LAYERS = 6
BETWEEN = 14.0  # layers
HEAD = 20.0  # of a rank's cell
CHIP = 20.0  # height of a block's label and the space below it


def mesh_picture(
    layouts: Mapping[str, Layout | str],
    sizes: Mapping[str, int],
    *,
    rank: int = 0,
    title: str = "",
    theme: str = "light",
) -> Figure:
    """Draw the ranks of a mesh as a grid, each with its block of every tensor; mark what ``rank`` holds.

    >>> layouts = {"X": "B@depth@row D@col", "W": "D@row F@col"}
    >>> print(mesh_picture(layouts, {"depth": 2, "row": 2, "col": 2}).alt)
    What 8 ranks hold on a mesh of depth=2, row=2, col=2: X as B@depth@row D@col, in 8 blocks; \
W as D@row F@col, in 4 blocks, 2 copies along depth. Rank 0 at depth=0, row=0, col=0 holds X[0,0] and W[0,0].

    The last axis runs across and the one before it down; every place on the other axes is a layer. A
    block that lies on several ranks is a stack, a term of a sum is dotted, and blocks that ``rank``
    holds are outlined wherever they are. ``X[:,1]`` has all of the first dim.
    """
    tensors = {
        name: Layout(layout) if isinstance(layout, str) else layout for name, layout in layouts.items()
    }
    if not tensors:
        raise RefusedError("a picture of a mesh needs a tensor to lie on it: try {'W': 'D F@tp'}.")
    place = rank_of(sizes, rank)
    n_ranks = math.prod(sizes.values())
    held = {
        name: [label(name, layout, sizes, at) for at in coordinates(sizes)]
        for name, layout in tensors.items()
    }
    shown = _shown_layers(sizes, place)
    subtitle = f"A mesh of {mesh_words(sizes)}."
    if len(shown) < n_ranks // _in_layer(sizes):
        outer = dict(list(place.items())[:-2])
        subtitle = f"A mesh of {mesh_words(sizes)}. Shown: {mesh_words(outer)}."
    figure = Figure(
        title or f"What {_ranks(n_ranks)} {'holds' if n_ranks == 1 else 'hold'} of {_and(list(tensors))}",
        _alt(tensors, sizes, held, place, rank),
        subtitle=subtitle,
        theme=theme,
    )
    keys = _keys(figure, tensors, sizes)
    top = figure.legend(keys, figure.top) if keys else figure.top
    cells = _cells(top, sizes, shown, tensors, held)
    for layer, outer_place in zip(cells.layers(), shown, strict=True):
        _layer_rulers(figure, layer, sizes, outer_place)
    for at, place_of_cell in enumerate(coordinates(sizes)):
        box = cells.box(sizes, shown, place_of_cell)
        if box is not None:
            _cell(figure, box, at, n_ranks, tensors, sizes, held, rank)
    panel = (PANEL, top) if cells.right <= PANEL - 16 else (MARGIN, cells.bottom + BETWEEN)
    _panel(figure, panel, tensors, sizes, held, place, rank)
    return figure


def label(name: str, layout: Layout, sizes: Mapping[str, int], place: Mapping[str, int]) -> str:
    """The block at a place of the mesh, a colon for a dim that is not cut.

    >>> sizes = {"dp": 2, "tp": 2}
    >>> label("X", Layout("B@dp D"), sizes, {"dp": 1, "tp": 0}), label("W", Layout("D F"), sizes, {})
    ('X[1,:]', 'W')
    """
    index = layout.block(sizes, place)
    parts = [str(at) if cut else ":" for at, cut in zip(index, layout.cuts, strict=True)]
    return f"{name}[{','.join(parts)}]" if any(layout.cuts) else name


# Where the cells are


def _in_layer(sizes: Mapping[str, int]) -> int:
    return math.prod(list(sizes.values())[-2:])


def _shown_layers(sizes: Mapping[str, int], place: Mapping[str, int]) -> list[dict[str, int]]:
    """The places on all axes but the last two; of many, the one ``place`` lies in."""
    outer = dict(list(sizes.items())[:-2])
    every_layer = coordinates(outer)
    return every_layer if len(every_layer) <= MOST_LAYERS else [{axis: place[axis] for axis in outer}]


@dataclass(frozen=True, slots=True)
class Cells:
    """Grids of equal size, one per layer."""

    x: float
    y: float
    across: int  # layers side by side
    n_layers: int
    rows: int
    cols: int
    width: float  # of a cell
    height: float
    left: float  # room for rulers beside and above each layer
    above: float

    @property
    def right(self) -> float:
        return self.x + self.across * (self.left + self.cols * self.width + BETWEEN) - BETWEEN

    @property
    def bottom(self) -> float:
        n_down = math.ceil(self.n_layers / self.across)
        return self.y + n_down * (self.above + self.rows * self.height + BETWEEN) - BETWEEN

    def layers(self) -> Iterator[Grid]:
        for at in range(self.n_layers):
            down, right = divmod(at, self.across)
            width, height = self.cols * self.width, self.rows * self.height
            x = self.x + right * (self.left + width + BETWEEN) + self.left
            y = self.y + down * (self.above + height + BETWEEN) + self.above
            yield Grid(x, y, width, height, self.rows, self.cols)

    def box(
        self, sizes: Mapping[str, int], shown: Sequence[Mapping[str, int]], place: Mapping[str, int]
    ) -> tuple[float, float, float, float] | None:
        """The cell of the rank at a place; ``None`` in a layer that is not shown."""
        inner, outer = list(sizes)[-2:], list(sizes)[:-2]
        where = {axis: place[axis] for axis in outer}
        if where not in shown:
            return None
        grid = list(self.layers())[shown.index(where)]
        row, col = (
            (place[inner[0]], place[inner[1]]) if len(inner) == 2 else divmod(place[inner[0]], self.cols)
        )
        return grid.cell(row, col)


def _cells(
    top: float,
    sizes: Mapping[str, int],
    shown: Sequence[object],
    tensors: Mapping[str, Layout],
    held: Mapping[str, Sequence[str]],
) -> Cells:
    """Layers side by side where labels fit, if need be over the whole width, with the panel below."""
    inner = list(sizes.values())[-2:]
    rows, cols = inner if len(inner) == 2 else (math.ceil(inner[0] / 8), min(inner[0], 8))
    above = (BRACKET + 4) * ((len(inner) == 2 or rows == 1) + (len(sizes) > 2))
    left = BRACKET + 4.0 if len(inner) == 2 else 0.0
    need = max(
        text_width(words, SMALL, True) + 20 + 22 * (tensors[name].n_terms(sizes) > 1)
        for name in tensors
        for words in set(held[name])
    )

    def width(room: float, across: int) -> float:
        return min(180.0, ((room - (across - 1) * BETWEEN) / across - left) / cols)

    room = PANEL - 24.0 - MARGIN
    most = len(shown)
    if width(room, most) < need <= width(WIDTH - 2 * MARGIN, 1):
        room = WIDTH - 2.0 * MARGIN
    across = next((n for n in range(most, 1, -1) if width(room, n) >= need), 1)
    cell = width(room, across)
    height = HEAD + CHIP * len(tensors) + 12 if cell >= need else min(cell, 28.0)
    return Cells(MARGIN, top, across, most, rows, cols, cell, height, left, above)


# Rulers and cells


def _layer_rulers(figure: Figure, grid: Grid, sizes: Mapping[str, int], outer: Mapping[str, int]) -> None:
    """Brackets for the axes of a layer, and which layer it is."""
    inner = list(sizes)[-2:]
    at_y = grid.y - 24
    if len(inner) == 2:
        brackets(figure, grid, inner[0], sizes, grid.rows, grid.x - BRACKET - 4, True)
        brackets(figure, grid, inner[1], sizes, grid.cols, at_y, False)
    elif grid.rows == 1:
        brackets(figure, grid, inner[0], sizes, grid.cols, at_y, False)
    if outer:
        fill = axis_fill(figure, next(iter(outer)), sizes)
        words = fit(mesh_words(outer), grid.width - 10, SMALL)
        figure.rect(grid.x + 1, at_y - 24, grid.width - 2, BRACKET, fill, line=figure.theme.line, radius=3)
        figure.text(
            grid.x + grid.width / 2,
            at_y - 9.7,
            words,
            size=SMALL,
            anchor="middle",
            fill=text_on(fill),
            bold=True,
        )


def _cell(
    figure: Figure,
    box: tuple[float, float, float, float],
    at: int,
    n_ranks: int,
    tensors: Mapping[str, Layout],
    sizes: Mapping[str, int],
    held: Mapping[str, Sequence[str]],
    rank: int,
) -> None:
    """One rank: its number and its block of each tensor."""
    theme = figure.theme
    x, y, width, height = box
    gap = 2.5 if width > 40 else 1.0
    x, y, width, height = x + gap, y + gap, width - 2 * gap, height - 2 * gap
    tip = f"rank {at}: {', '.join(held[name][at] for name in tensors)}"
    line, line_width = (theme.ink, 3.0) if at == rank else (theme.line, 1.0)
    head = rank_colour(at, n_ranks) or theme.panel
    if height < HEAD + CHIP:
        shares = any(held[name][at] == held[name][rank] for name in tensors)
        fill = head if not shares else theme.line
        figure.rect(x, y, width, height, fill, line=line, line_width=line_width, radius=2, tip=tip)
        if at % every(text_width(str(n_ranks - 1), SMALL) + 4, width) == 0 and height >= 14:
            figure.text(
                x + width / 2, y + height / 2 + 4.3, str(at), size=SMALL, anchor="middle", fill=text_on(fill)
            )
        return
    figure.rect(x, y, width, height, theme.card, line=line, line_width=line_width, radius=5, tip=tip)
    figure.rect(x + 2, y + 2, width - 4, HEAD - 2, head, radius=3, tip=tip)
    words = f"rank {at}" if text_width(f"rank {n_ranks - 1}", SMALL, True) <= width - 8 else str(at)
    figure.text(x + width / 2, y + 15.5, words, size=SMALL, anchor="middle", fill=text_on(head), bold=True)
    for row, (name, layout) in enumerate(tensors.items()):
        mine = held[name][at] == held[name][rank]
        top = y + HEAD + 5 + row * CHIP
        _block(figure, x + 6, top, width - 12, held[name][at], layout, sizes, mine)


def _block(
    figure: Figure,
    x: float,
    y: float,
    width: float,
    words: str,
    layout: Layout,
    sizes: Mapping[str, int],
    mine: bool,
) -> None:
    """A block's label: a stack if there are copies, dotted if it is a term of a sum."""
    theme, height = figure.theme, CHIP - 4
    copied = layout.n_copies(sizes) > 1
    line = theme.ink if mine else theme.muted if copied else theme.line
    if copied:
        width -= 3
        figure.rect(x + 3, y - 3, width, height, theme.lane, line=line, radius=3)
    fill = figure.partial() if layout.n_terms(sizes) > 1 else theme.panel
    figure.rect(x, y, width, height, fill, line=line, line_width=1.8 if mine else 1.0, radius=3)
    if layout.n_terms(sizes) > 1:
        half = text_width(words, SMALL, mine) / 2 + 3
        figure.rect(x + width / 2 - half, y + 1.5, 2 * half, height - 3, theme.card)
    figure.text(x + width / 2, y + 12.3, words, size=SMALL, anchor="middle", bold=mine)


def _keys(figure: Figure, tensors: Mapping[str, Layout], sizes: Mapping[str, int]) -> list[Key]:
    copied = [name for name, layout in tensors.items() if layout.n_copies(sizes) > 1]
    summed = [name for name, layout in tensors.items() if layout.n_terms(sizes) > 1]
    keys = []
    if copied:
        keys.append(Key(figure.theme.panel, f"on several ranks: {_and(copied)}", "stack"))
    if summed:
        keys.append(Key(figure.partial(), f"a term of a sum: {_and(summed)}"))
    return keys


def _panel(
    figure: Figure,
    corner: tuple[float, float],
    tensors: Mapping[str, Layout],
    sizes: Mapping[str, int],
    held: Mapping[str, Sequence[str]],
    place: Mapping[str, int],
    rank: int,
) -> None:
    """What one rank holds, and who holds the same."""
    theme, (x, y) = figure.theme, corner
    width = WIDTH - MARGIN - x
    rows = [("at", mesh_words(place))]
    for name, layout in tensors.items():
        share = layout.share(sizes)
        rows.append((held[name][rank], f"all of {name}" if share == 1 else f"{share} of {name}"))
        rows += [("", words) for words in _others(layout, sizes, place, rank)]
    figure.rect(x, y, width, 52 + PANEL_ROW * len(rows), theme.panel, radius=8)
    colour = rank_colour(rank, math.prod(sizes.values())) or theme.line
    figure.chip(x + 14, y + 13, str(rank), colour, width=34, height=22)
    figure.text(x + 58, y + 29, f"rank {rank}", size=14, bold=True)
    column = x + 28 + max(text_width(left, bold=True) for left, _ in rows)
    for number, (left, right) in enumerate(rows):
        at_y, start = y + 60 + PANEL_ROW * number, column if left else x + 26
        figure.text(x + 14, at_y, left, bold=left != "at")
        shown = fit(right, x + width - 10 - start)
        figure.text(start, at_y, shown, fill=theme.muted, tip="" if shown == right else right)


def _others(layout: Layout, sizes: Mapping[str, int], place: Mapping[str, int], rank: int) -> Iterator[str]:
    """Which other ranks hold copies of a rank's block, and which hold other terms of its sum."""
    for words, axes in (("copy on", layout.replicated(sizes)), ("other terms on", layout.partial)):
        ranks = [
            at
            for at, other in enumerate(coordinates(sizes))
            if at != rank and all(other[axis] == place[axis] for axis in sizes if axis not in axes)
        ]
        if ranks:
            plural = "copies on" if len(ranks) > 1 and words == "copy on" else words
            plural = "other term on" if len(ranks) == 1 and words == "other terms on" else plural
            yield f"{plural} {ranks_text(ranks)}"


# Words


def _alt(
    tensors: Mapping[str, Layout],
    sizes: Mapping[str, int],
    held: Mapping[str, Sequence[str]],
    place: Mapping[str, int],
    rank: int,
) -> str:
    n_ranks = math.prod(sizes.values())
    parts = []
    for name, layout in tensors.items():
        n_blocks = math.prod(layout.n_blocks(sizes))
        words = f"{name} as {layout}, {'whole' if n_blocks == 1 else f'in {n_blocks} blocks'}"
        if layout.n_copies(sizes) > 1:
            words += f", {layout.n_copies(sizes)} copies along {_and(layout.replicated(sizes))}"
        if layout.n_terms(sizes) > 1:
            words += f", {layout.n_terms(sizes)} terms along {_and(layout.partial)}"
        parts.append(words)
    mine = _and([held[name][rank] for name in tensors])
    return (
        f"What {_ranks(n_ranks)} hold on a mesh of {mesh_words(sizes)}: {'; '.join(parts)}. "
        f"Rank {rank} at {mesh_words(place)} holds {mine}."
    )


def _ranks(n_ranks: int) -> str:
    return "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
