"""The picture of a layout: the whole tensor in blocks, the ranks that own each, and one rank's part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout, coordinates
from lessons_lib.timeline import ranks_text
from lessons_lib.views.axes import every
from lessons_lib.views.colours import MOST_RANK_COLOURS, axis_colour, rank_colour, text_on
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, fit, text_width

PANEL = 588  # where the panel about one rank begins
BRACKET = 20  # thickness of the brackets that show an axis
SIGNS = {"+": 16.0, ",": 11.0, "and": 36.0}  # what stands between two chips, and its width
PANEL_ROW = 24  # height of a line in the panel

MOST_LAYERS = 6
BETWEEN = 16.0  # layers

Drawn = tuple[int | None, int | None, int | None]  # which dim is cut into layers, runs down, runs across
Copies = tuple[tuple[int, ...], ...]  # for each copy of a block the ranks whose terms add up to it
Box = tuple[float, float, float, float]  # x, y, width, height


def layout_picture(
    layout: Layout | str,
    shape: Sequence[int],
    sizes: Mapping[str, int],
    *,
    name: str = "W",
    rank: int = 0,
    theme: str = "light",
) -> Figure:
    """Draw how a tensor of ``shape`` lies on a mesh of ``sizes``, and what ``rank`` holds of it.

    >>> print(layout_picture("D@row F@col", (4, 6), {"row": 2, "col": 2}).alt)
    Layout D@row F@col of W, 4 × 6, on a mesh of row=2, col=2: dim D is cut over row into 2 blocks of 2, \
dim F is cut over col into 2 blocks of 3; each rank holds 2 × 3, which is 1/4 of the elements.

    Blocks on several ranks are stacks of cards: ``0 and 2`` hold copies, ``0 + 1`` two terms of a sum
    that nobody has added up (dotted). Brackets show the mesh axes, the one that cuts first outside. Of
    a tensor with more than two dims the cut ones are drawn; where three are cut, the first in layers.
    """
    layout = Layout(layout) if isinstance(layout, str) else layout
    local = layout.local_shape(shape, sizes)
    n_ranks = math.prod(sizes.values())
    mine = layout.block(sizes, rank_of(sizes, rank))
    drawn = _drawn_dims(layout)
    ranks_words = f"{n_ranks} rank{'s' if n_ranks > 1 else ''}"
    figure = Figure(
        f"{name} laid out as {str(layout) or 'a scalar'}",
        _alt(layout, shape, local, sizes, name),
        subtitle=f"{_times(shape)} on a mesh of {mesh_words(sizes)}: {ranks_words}",
        theme=theme,
    )
    grids = _grids(figure, layout, shape, sizes, drawn, mine)
    for layer, grid in grids.items():
        _layer_heading(figure, grid, layout, shape, sizes, drawn[0], layer)
        _rulers(figure, grid, layout, shape, sizes, drawn)
    blocks = layout.owners(sizes).items()
    for index, ranks in sorted(blocks, key=lambda block: block[0] != mine):  # its outline below all text
        layer, row, col = (0 if at is None else index[at] for at in drawn)
        if layer in grids:
            copies = _copies(layout, sizes, ranks)
            _block(figure, grids[layer], row, col, copies, n_ranks, index == mine, f"{name}{list(index)}")
    _panel(figure, layout, shape, local, sizes, name, rank)
    return figure


def _drawn_dims(layout: Layout) -> Drawn:
    """All dims, or the cut ones, filled up with the last of the others."""
    dims = range(len(layout.dims))
    cut = [at for at in dims if layout.cuts[at]]
    if len(cut) > 3:
        raise RefusedError(
            f"{layout!r} is cut in {len(cut)} dims ({', '.join(layout.dims[at] for at in cut)}); a picture "
            f"shows three. Draw a part of it, for example {layout.drop(layout.dims[cut[0]])!r}."
        )
    uncut = [at for at in reversed(dims) if not layout.cuts[at]]
    shown: list[int | None] = [*sorted([*cut, *uncut[: max(0, 2 - len(cut))]])]
    layers, down, across = [None] * (3 - len(shown)) + shown
    return layers, down, across


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the blocks are, and where the rulers beside and above them begin."""

    x: float
    y: float
    width: float
    height: float
    rows: int
    cols: int
    left: float = 0.0
    top: float = 0.0

    def cell(self, row: int, col: int) -> Box:
        width, height = self.width / self.cols, self.height / self.rows
        return self.x + col * width, self.y + row * height, width, height


def _grids(
    figure: Figure,
    layout: Layout,
    shape: Sequence[int],
    sizes: Mapping[str, int],
    drawn: Drawn,
    mine: Sequence[int],
) -> dict[int, Grid]:
    """One grid, or one for every layer; of very many layers, the one where ``mine`` is."""
    n_blocks = layout.n_blocks(sizes)
    layers, down, across = drawn
    _, rows, cols = (1 if at is None else n_blocks[at] for at in drawn)
    beside, above = ((BRACKET + 4.0) * (0 if at is None else len(layout.cuts[at])) for at in (down, across))
    if down is not None:
        beside += BRACKET + max(
            36.0, 14 + max(text_width(words, SMALL) for words in _ranges(shape[down], rows))
        )
    above += 16 + (26 if across is not None else 0)
    room = PANEL - 24 - MARGIN
    if layers is None:
        y = figure.top + above
        least = min(max(rows * 84, 170 if rows > 1 else 110), 400) if rows <= 25 else min(rows * 16, 576)
        height = max(least, figure.top + _panel_height(layout, sizes) - y)
        return {0: Grid(MARGIN + beside, y, room - beside, height, rows, cols, MARGIN, figure.top)}
    shown = range(n_blocks[layers]) if n_blocks[layers] <= MOST_LAYERS else [mine[layers]]
    side_by_side = len(shown)
    while side_by_side > 1 and (room + BETWEEN) / side_by_side - BETWEEN - beside < 56 * cols:
        side_by_side -= 1
    width = (room + BETWEEN) / side_by_side - BETWEEN
    height = float(min(max(rows * 48, 96), 400))
    grids = {}
    for number, layer in enumerate(shown):
        at_row, at_col = divmod(number, side_by_side)
        left = MARGIN + at_col * (width + BETWEEN)
        top = figure.top + BRACKET + 14 + at_row * (above + height + BRACKET + 14 + BETWEEN)
        grids[layer] = Grid(left + beside, top + above, width - beside, height, rows, cols, left, top)
    return grids


def _layer_heading(
    figure: Figure,
    grid: Grid,
    layout: Layout,
    shape: Sequence[int],
    sizes: Mapping[str, int],
    dim: int | None,
    layer: int,
) -> None:
    """Which part of the first dim a layer is, and where on the mesh."""
    if dim is None:
        return
    axes = layout.cuts[dim]
    place, rest = {}, layer
    for axis in reversed(axes):
        rest, place[axis] = divmod(rest, sizes[axis])
    part = _ranges(shape[dim], layout.n_blocks(sizes)[dim])[layer]
    where = mesh_words({axis: place[axis] for axis in axes})
    fill = axis_fill(figure, axes[0], sizes)
    width = grid.x + grid.width - grid.left
    figure.rect(
        grid.left, grid.top - BRACKET - 14, width, BRACKET + 2, fill, line=figure.theme.line, radius=3
    )
    words = fit(f"{layout.dims[dim]} {part} · {where}", width - 10, bold=True)
    figure.text(grid.left + width / 2, grid.top - 18.5, words, anchor="middle", fill=text_on(fill), bold=True)


# Rulers: names and sizes of the dims, index ranges, and a bracket per axis, outermost first


def _rulers(
    figure: Figure,
    grid: Grid,
    layout: Layout,
    shape: Sequence[int],
    sizes: Mapping[str, int],
    drawn: Drawn,
) -> None:
    for at, vertical in zip(drawn[1:], (True, False), strict=True):
        if at is None:
            continue
        words = f"{layout.dims[at]} = {shape[at]}"
        if vertical:
            shown, at_y = fit(words, grid.height, 14, bold=True), grid.y + grid.height / 2
            figure.text(grid.left + 11, at_y, shown, size=14, anchor="middle", bold=True, turn=-90)
        else:
            shown = fit(words, grid.width, 14, bold=True)
            figure.text(grid.x + grid.width / 2, grid.top + 10, shown, size=14, anchor="middle", bold=True)
        outer = grid.left + BRACKET if vertical else grid.top + 18
        n_blocks = 1
        for axis in layout.cuts[at]:
            n_blocks *= sizes[axis]
            brackets(figure, grid, axis, sizes, n_blocks, outer, vertical)
            outer += BRACKET + 4
        _range_labels(figure, grid, _ranges(shape[at], n_blocks), vertical)


def brackets(
    figure: Figure,
    grid: Grid,
    axis: str,
    sizes: Mapping[str, int],
    n_parts: int,
    outer: float,
    vertical: bool,
) -> None:
    """A box for each index along a mesh axis, beside the blocks it stands for."""
    colour = axis_fill(figure, axis, sizes)
    each = (grid.height if vertical else grid.width) / n_parts
    last = sizes[axis] - 1  # the longest label decides for all
    named = text_width(f"{axis}={last}", SMALL) <= each - 6
    numbered = each >= 16 if vertical else text_width(str(last), SMALL) <= each - 4
    for part in range(n_parts):
        words = f"{axis}={part % sizes[axis]}"
        start, length = (grid.y if vertical else grid.x) + part * each + 1, each - 2
        x, y, width, height = (outer, start, BRACKET, length) if vertical else (start, outer, length, BRACKET)
        radius = min(3, each / 4)
        figure.rect(x, y, width, height, colour, line=figure.theme.line, radius=radius, tip=words)
        middle_x, middle_y, ink = x + width / 2, y + height / 2, text_on(colour)
        if named and vertical:
            figure.text(middle_x + 4.3, middle_y, words, size=SMALL, anchor="middle", fill=ink, turn=-90)
        elif named or numbered:
            shown = words if named else str(part % sizes[axis])
            figure.text(middle_x, middle_y + 4.3, shown, size=SMALL, anchor="middle", fill=ink)


def axis_fill(figure: Figure, axis: str, sizes: Mapping[str, int]) -> str:
    """The colour of an axis where there are more ranks than colours for them."""
    many = math.prod(sizes.values()) > MOST_RANK_COLOURS
    return axis_colour(axis, sizes) if many else figure.theme.panel


def _ranges(size: int, n_blocks: int) -> list[str]:
    """The index range of every block, written as in a slice."""
    local = size // n_blocks
    return [f"{at * local}:{(at + 1) * local}" for at in range(n_blocks)]


def _range_labels(figure: Figure, grid: Grid, words: Sequence[str], vertical: bool) -> None:
    """Write index ranges beside the blocks; of many, every so many-th."""
    pitch = (grid.height if vertical else grid.width) / len(words)
    need = 15 if vertical else max(text_width(each, SMALL) for each in words) + 8
    muted = figure.theme.muted
    for at in range(0, len(words), every(need, pitch)):
        middle = (at + 0.5) * pitch
        if vertical:
            figure.text(grid.x - 6, grid.y + middle + 4.3, words[at], size=SMALL, anchor="end", fill=muted)
        else:
            figure.text(grid.x + middle, grid.y - 7, words[at], size=SMALL, anchor="middle", fill=muted)


# Blocks and their owners


def _copies(layout: Layout, sizes: Mapping[str, int], ranks: Sequence[int]) -> Copies:
    """The owners of a block, sorted into copies; the ranks of one copy hold the terms of its sum."""
    replicated = layout.replicated(sizes)
    places = coordinates(sizes)
    copies: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        copies.setdefault(tuple(places[rank][axis] for axis in replicated), []).append(rank)
    return tuple(tuple(terms) for terms in copies.values())


def _block(
    figure: Figure, grid: Grid, row: int, col: int, copies: Copies, n_ranks: int, active: bool, name: str
) -> None:
    """One block with the numbers of its owners: a card, or a stack of cards."""
    theme = figure.theme
    x, y, width, height = grid.cell(row, col)
    roomy = min(width, height) > 24
    gap, radius = (3, 5) if roomy else (0.5, 1)
    x, y, width, height = x + gap, y + gap, width - 2 * gap, height - 2 * gap
    line, line_width = (theme.ink, 3.0 if roomy else 1.5) if active else (theme.line, 1.0)
    owners = [rank for terms in copies for rank in terms]
    n_terms = len(copies[0])
    tip = f"{name} on {ranks_text(owners)}: {_what(len(copies), n_terms)}"

    if len(owners) == 1:
        fill = rank_colour(owners[0], n_ranks) or theme.panel
        figure.rect(x, y, width, height, fill, line=line, line_width=line_width, radius=radius, tip=tip)
        _owner(figure, grid, row, col, owners[0], fill, n_ranks)
        return

    step = 6.0 if min(width, height) > 60 else 3.0 if roomy else 0.0
    behind = owners[1:4] if step else []
    width, height, y = width - step * len(behind), height - step * len(behind), y + step * len(behind)
    for depth, rank in reversed(list(enumerate(behind, 1))):
        fill = rank_colour(rank, n_ranks) or theme.line
        at_x, at_y = x + step * depth, y - step * depth
        figure.rect(at_x, at_y, width, height, fill, line=theme.card, radius=radius, tip=tip)
    if not active:
        line, line_width = rank_colour(owners[0], n_ranks) or theme.line, 2.0
    front = figure.partial() if n_terms > 1 else theme.card
    figure.rect(x, y, width, height, front, line=line, line_width=line_width, radius=radius, tip=tip)
    _owners(figure, (x, y, width, height), copies, n_ranks)


def _owner(figure: Figure, grid: Grid, row: int, col: int, rank: int, fill: str, n_ranks: int) -> None:
    """The number of the one rank that owns a block; where there is no room, of every so many-th."""
    x, y, width, height = grid.cell(row, col)
    middle_x, middle_y, ink = x + width / 2, y + height / 2, text_on(fill)
    longest = str(n_ranks - 1)  # decides for all blocks
    for word, size, bold in (("rank ", 14, True), ("rank ", SMALL, False), ("", SMALL, True)):
        if text_width(word + longest, size, bold) <= width - 8 and size + 2 <= height:
            words, baseline = f"{word}{rank}", middle_y + size * 0.36
            figure.text(middle_x, baseline, words, size=size, anchor="middle", fill=ink, bold=bold)
            return
    words = f"rank {rank}"
    half = text_width(words, SMALL) / 2 + 2
    if width < height and col % every(17, width) == 0 and 2 * half <= height:
        figure.rect(middle_x - 7, middle_y - half, 14, 2 * half, fill, radius=3)
        figure.text(middle_x + 4.3, middle_y, words, size=SMALL, anchor="middle", fill=ink, turn=-90)
    elif width >= height and row % every(16, height) == 0 and 2 * half <= width:
        figure.rect(middle_x - half, middle_y - 7, 2 * half, 14, fill, radius=3)
        figure.text(middle_x, middle_y + 4.3, words, size=SMALL, anchor="middle", fill=ink)


def _owners(figure: Figure, box: Box, copies: Copies, n_ranks: int) -> None:
    """Name all owners of a block: ``0, 1 and 2`` for copies, ``0 + 1`` for terms of a sum."""
    theme = figure.theme
    x, y, width, height = box
    pieces: list[str | int] = []  # signs and ranks
    for copy, terms in enumerate(copies):
        for term, rank in enumerate(terms):
            sign = "+" if term else "and" if copy == len(copies) - 1 else ","
            pieces += [sign, rank] if copy or term else [rank]
    chip = 20.0 if n_ranks <= 10 else 27.0
    lines: list[list[str | int]] = [[]]
    for piece in pieces:
        if isinstance(piece, str) and _length([*lines[-1], piece], chip) + chip > width - 16:
            lines.append([])  # a line begins with a sign, but not with a comma
            if piece == ",":
                continue
        lines[-1].append(piece)
    caption = _what(len(copies), len(copies[0]))
    longest = max(_length(line, chip) for line in lines)
    if height < 24 * len(lines) + 4 or longest > width - 8:
        short = f"{len(pieces) // 2 + 1} {'ranks' if len(copies) > 1 else 'terms'}"
        _in_words(figure, box, [" ".join(map(str, pieces)).replace(" ,", ","), caption, short])
        return
    captioned = height >= 24 * len(lines) + 24 and text_width(caption, SMALL) <= width - 10
    total = 24 * len(lines) + (18 if captioned else 0)
    top = y + (height - total) / 2
    plate = max(longest, text_width(caption, SMALL) if captioned else 0) + 10
    figure.rect(x + (width - plate) / 2, top - 1, plate, total + 2, theme.card, radius=4)
    for number, line in enumerate(lines):
        at, middle = x + (width - _length(line, chip)) / 2, top + 24 * number + 12
        for piece in line:
            if isinstance(piece, str):
                figure.text(at + SIGNS[piece] / 2, middle + 4.7, piece, anchor="middle", bold=piece != "and")
                at += SIGNS[piece]
            else:
                fill = rank_colour(piece, n_ranks) or theme.line
                figure.chip(at, middle - 9, str(piece), fill, width=chip)
                at += chip
    if captioned:
        figure.text(x + width / 2, top + total - 5, caption, size=SMALL, anchor="middle", fill=theme.muted)


def _length(line: Sequence[str | int], chip: float) -> float:
    return sum(SIGNS[piece] if isinstance(piece, str) else chip for piece in line)


def _in_words(figure: Figure, box: Box, choices: Sequence[str]) -> None:
    """Write the first text that fits across or, failing that, upright."""
    x, y, width, height = box
    middle_x, middle_y, card = x + width / 2, y + height / 2, figure.theme.card
    for words in choices:
        half = text_width(words, SMALL) / 2 + 3
        if 2 * half <= width - 2 and height >= 15:
            figure.rect(middle_x - half, middle_y - 7, 2 * half, 14, card, radius=3)
            figure.text(middle_x, middle_y + 4.3, words, size=SMALL, anchor="middle")
            return
        if 2 * half <= height - 2 and width >= 15:
            figure.rect(middle_x - 7, middle_y - half, 14, 2 * half, card, radius=3)
            figure.text(middle_x + 4.3, middle_y, words, size=SMALL, anchor="middle", turn=-90)
            return


# One rank


def _panel_height(layout: Layout, sizes: Mapping[str, int]) -> float:
    n_rows = 3 + len(layout.dims) + bool(layout.partial) + (layout.n_copies(sizes) > 1)
    return PANEL_ROW * n_rows + 108


def _panel(
    figure: Figure,
    layout: Layout,
    shape: Sequence[int],
    local: Sequence[int],
    sizes: Mapping[str, int],
    name: str,
    rank: int,
) -> None:
    """What one rank holds: its shape against the whole one, and its part of the elements."""
    theme = figure.theme
    x, y, width = PANEL, figure.top, WIDTH - MARGIN - PANEL
    place = coordinates(sizes)[rank]
    share = layout.share(sizes)
    colour = rank_colour(rank, math.prod(sizes.values()))
    rows = [
        ("at", mesh_words(place)),
        (f"global {name}", _product(shape)),
        (f"local {name.lower()}", _product(local)),
    ]
    where = layout.slices(shape, sizes, place)
    for dim, cut, size, part in zip(layout.dims, layout.cuts, shape, where, strict=True):
        how = f"cut over {' then '.join(cut)}" if cut else f"all {size}"
        rows.append((f"{dim} {part.start}:{part.stop}", how))
    if layout.partial:
        rows.append((f"1 of {layout.n_terms(sizes)} terms", f"along {', '.join(layout.partial)}"))
    if layout.n_copies(sizes) > 1:
        rows.append((f"1 of {layout.n_copies(sizes)} copies", f"along {', '.join(layout.replicated(sizes))}"))

    figure.rect(x, y, width, _panel_height(layout, sizes), theme.panel, radius=8)
    figure.chip(x + 14, y + 13, str(rank), colour or theme.line, width=28, height=22)
    figure.text(x + 52, y + 29, f"rank {rank}", size=14, bold=True)
    column = min(x + 28 + max(text_width(left) for left, _ in rows), x + width / 2)
    at = y + 60
    for left, right in rows:
        for words, start, end, fill in (
            (left, x + 14, column - 12, theme.ink),
            (right, column, x + width - 10, theme.muted),
        ):
            shown = fit(words, end - start)
            figure.text(start, at, shown, fill=fill, tip="" if shown == words else words)
        at += PANEL_ROW
    bar = width - 28
    figure.rect(x + 14, at - 6, bar, 14, theme.card, line=theme.line, radius=3, tip="all elements")
    tip = f"{share} of the elements"
    figure.rect(x + 14, at - 6, bar * float(share), 14, colour or theme.muted, radius=3, tip=tip)
    figure.text(x + 14, at + 27, "all of its elements" if share == 1 else f"{share} of its elements")


# Words


def _alt(
    layout: Layout, shape: Sequence[int], local: Sequence[int], sizes: Mapping[str, int], name: str
) -> str:
    cuts = [
        f"dim {dim} is cut over {' then '.join(cut)} into {n} blocks of {size}"
        for dim, cut, n, size in zip(layout.dims, layout.cuts, layout.n_blocks(sizes), local, strict=True)
        if cut
    ]
    parts = [", ".join(cuts) or "no dim is cut"]
    if layout.partial:
        parts.append(
            f"every block is a sum of {layout.n_terms(sizes)} terms along {', '.join(layout.partial)}"
        )
    if layout.n_copies(sizes) > 1:
        parts.append(f"{layout.n_copies(sizes)} copies along {', '.join(layout.replicated(sizes))}")
    share = layout.share(sizes)
    part = "all" if share == 1 else share
    parts.append(f"each rank holds {_times(local)}, which is {part} of the elements")
    of = f"{str(layout) or 'of a scalar'} of {name}"
    return f"Layout {of}, {_times(shape)}, on a mesh of {mesh_words(sizes)}: {'; '.join(parts)}."


def _what(n_copies: int, n_terms: int) -> str:
    copies = f"{n_copies} copies" if n_copies > 1 else ""
    terms = f"sum of {n_terms} terms" if n_terms > 1 else ""
    return f"{copies} of a {terms}" if copies and terms else copies or terms or "the only copy"


def _times(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "1 number"


def _product(shape: Sequence[int]) -> str:
    return f"{_times(shape)} = {math.prod(shape):,}" if len(shape) > 1 else _times(shape)


def rank_of(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Where a rank is on the mesh, if it is on it."""
    n_ranks = math.prod(sizes.values())
    if not 0 <= rank < n_ranks:
        raise RefusedError(f"rank={rank}: a mesh of {mesh_words(sizes)} has the ranks 0 to {n_ranks - 1}.")
    return coordinates(sizes)[rank]


def mesh_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())
