"""The picture of one stage of a tensor-parallel scheme: what ranks multiply, and what travels for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout, coordinates
from lessons_lib.timeline import ranks_text
from lessons_lib.views.colours import mix, operation_colour, operation_name, rank_colour, text_on
from lessons_lib.views.layouts import mesh_words, rank_of
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, Key, fit, text_width

RIGHT = 462.0  # where the result and the matrix above it begin
GAP = 92.0  # left of it, for arrows
BESIDE = RIGHT - GAP - MARGIN  # width of the left matrix
PANEL_WIDTH = RIGHT - MARGIN - 24
ABOVE = 50.0  # between the upper matrix and the result
PANEL_HEIGHT = 232.0

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a matrix, or several in a rectangle: from which row and column of blocks to which.

    >>> str(Part("X", (1, 2), (0, 1))), str(Part("X", (0, 2), (1, 2)))
    ('X[1,0]', 'X[0:2,1]')
    """

    tensor: str
    rows: tuple[int, int]
    cols: tuple[int, int]

    def __str__(self) -> str:
        index = (f"{low}" if high == low + 1 else f"{low}:{high}" for low, high in (self.rows, self.cols))
        return f"{self.tensor}[{','.join(index)}]"

    def __contains__(self, block: tuple[int, int]) -> bool:
        return self.rows[0] <= block[0] < self.rows[1] and self.cols[0] <= block[1] < self.cols[1]


@dataclass(frozen=True, slots=True)
class Carried:
    """A collective of a stage: what it brings, or what it adds up."""

    kind: str
    axis: str
    members: tuple[int, ...]
    root: int | None
    part: Part
    sent: Mapping[int, int]  # elements, by rank

    def __str__(self) -> str:
        return f"{self.part} by {self.kind} over {self.axis}"


@dataclass(frozen=True, slots=True)
class Product:
    """What a rank multiplies in a stage, and of which part of the result that is a term."""

    left: Part
    right: Part
    out: Part
    summed: range  # the indices of the dim that is summed over

    def __str__(self) -> str:
        return f"{self.left} · {self.right} -> {self.out}"


@dataclass(frozen=True, slots=True)
class Stage:
    """A product on every rank (or, at the end, on none) and the collectives around it."""

    products: tuple[Product | None, ...]
    fetched: tuple[Carried, ...]
    given: tuple[Carried, ...]
    summed: Mapping[Part, Fraction]  # of each block of the result: how much of its sum an owner has

    def sent(self, rank: int) -> int:
        """Elements that a rank sends in this stage."""
        return sum(each.sent.get(rank, 0) for each in (*self.fetched, *self.given))


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix, how it lies on the ranks, and whether it is multiplied turned (transposed)."""

    name: str
    layout: str
    shape: tuple[int, int]
    turned: bool

    @property
    def title(self) -> str:
        return f"{self.name}.T" if self.turned else self.name


@dataclass(frozen=True, slots=True)
class SchemeSteps:
    """How the ranks of a mesh come to a product, stage by stage; memory in elements of the fullest rank."""

    name: str
    sizes: Mapping[str, int]
    left: Matrix
    above: Matrix
    result: Matrix
    stages: tuple[Stage, ...]
    direction: str
    rest: int
    peak: int
    serial: int  # X, W and Y whole

    def sent(self, rank: int, n_stages: int) -> int:
        return sum(stage.sent(rank) for stage in self.stages[:n_stages])


def scheme_step(steps: SchemeSteps, stage: int, *, rank: int = 0, theme: str = "light") -> Figure:
    """Draw stage ``stage`` (from 1) of a scheme: left matrix, matrix above, and the result in the corner.

    A row of the left matrix and a column of the upper one meet in a block of the result. Blocks in use
    are strong, and those that ``rank`` multiplies and makes outlined; arrows are what travels. The bar in
    a block of the result shows how much of its sum there is. From nine ranks on, blocks in use have the
    colour of what brings them.
    """
    if not 1 <= stage <= len(steps.stages):
        raise RefusedError(f"stage={stage}: this scheme has the stages 1 to {len(steps.stages)}.")
    now, place = steps.stages[stage - 1], rank_of(steps.sizes, rank)
    figure = Figure(
        f"{_scheme(steps)}: {steps.result.name} = {steps.left.title} · {steps.above.title}",
        _alt(steps, stage, rank),
        subtitle=f"Stage {stage} of {len(steps.stages)}: {_happens(now)}.",
        theme=theme,
    )
    product = now.products[rank]
    top = figure.top + 4
    grids = {each: _blocks(each, steps.sizes) for each in (steps.left, steps.above, steps.result)}
    height = {each: _cell_height(len(rows)) * len(rows) for each, rows in grids.items()}
    corner = max(top + 26 + height[steps.above], top + PANEL_HEIGHT) + ABOVE
    wide = WIDTH - MARGIN - RIGHT
    boxes: dict[Matrix, Box] = {
        steps.above: (RIGHT, corner - ABOVE - height[steps.above], wide, height[steps.above]),
        steps.result: (RIGHT, corner, wide, height[steps.result]),
        steps.left: (MARGIN, corner, BESIDE, height[steps.result]),
    }
    for matrix, part in (
        (steps.left, product.left if product else None),
        (steps.above, product.right if product else None),
        (steps.result, product.out if product else None),
    ):
        _matrix(figure, steps, now, matrix, grids[matrix], boxes[matrix], part, rank)
    _arrows(figure, steps, now, boxes)
    _panel(figure, steps, stage, rank, place, (MARGIN, top, PANEL_WIDTH, PANEL_HEIGHT))
    bottom = max(y + h for _, y, _, h in boxes.values()) + 16
    keys = [Key(operation_colour(kind), words) for kind, words, _ in _collectives(now)]
    figure.legend(keys or [Key(figure.theme.lane, "nothing travels in this stage")], bottom)
    return figure


# ---- matrices


def _blocks(matrix: Matrix, sizes: Mapping[str, int]) -> list[list[tuple[int, int]]]:
    """The blocks of a matrix as they are drawn."""
    rows, cols = Layout(matrix.layout).n_blocks(sizes)
    if matrix.turned:
        return [[(row, col) for row in range(rows)] for col in range(cols)]
    return [[(row, col) for col in range(cols)] for row in range(rows)]


def _cell_height(n_rows: int) -> float:
    return min(66.0, max(33.0, 196 / n_rows))


def _matrix(
    figure: Figure,
    steps: SchemeSteps,
    stage: Stage,
    matrix: Matrix,
    grid: Sequence[Sequence[tuple[int, int]]],
    box: Box,
    mine: Part | None,
    rank: int,
) -> None:
    x, y, width, height = box
    figure.text(x, y - 9, matrix.title, size=14, bold=True)
    owners = Layout(matrix.layout).owners(steps.sizes)
    used = _used(steps, stage, matrix)
    carriers = {each.part: each.kind for each in stage.fetched if each.part.tensor == matrix.name}
    order = sorted(
        ((block, row, col) for row, blocks in enumerate(grid) for col, block in enumerate(blocks)),
        key=lambda at: mine is not None and at[0] in mine,
    )
    for block, row, col in order:
        each_w, each_h = width / len(grid[0]), height / len(grid)
        cell = (x + col * each_w + 2, y + row * each_h + 2, each_w - 4, each_h - 4)
        kind = next((kind for part, kind in carriers.items() if block in part), "")
        strong, ours = any(block in part for part in used), mine is not None and block in mine
        part = Part(matrix.name, (block[0], block[0] + 1), (block[1], block[1] + 1))
        fraction = stage.summed.get(part) if matrix is steps.result else None
        _cell(figure, cell, part, owners[block], steps, kind, strong, ours, fraction)


def _used(steps: SchemeSteps, stage: Stage, matrix: Matrix) -> set[Part]:
    """The parts of a matrix that some rank multiplies or makes; at the end, those that are added up."""
    made = [each for each in stage.products if each]
    if matrix is steps.left:
        return {each.left for each in made}
    if matrix is steps.above:
        return {each.right for each in made}
    return {each.out for each in made} or {each.part for each in stage.given}


def _cell(
    figure: Figure,
    box: Box,
    part: Part,
    owners: Sequence[int],
    steps: SchemeSteps,
    kind: str,
    strong: bool,
    ours: bool,
    fraction: Fraction | None,
) -> None:
    theme, (x, y, width, height) = figure.theme, box
    n_ranks = math.prod(steps.sizes.values())
    share = 1.0 if strong else 0.28
    colours = [rank_colour(rank, n_ranks) for rank in owners]
    if colours[0] is None:
        colours = [operation_colour(kind) if kind else theme.hatch]
        share = (0.5 if kind else 0.75) if strong else 0.14
    fills = [mix(theme.card, colour or theme.line, share) for colour in colours]
    tip = f"{part}: on {ranks_text(owners)}"
    if fraction is not None:
        tip += f", {_terms(fraction)} summed"
    for at, fill in enumerate(fills):
        strip = width / len(fills)
        figure.rect(x + at * strip, y, strip, height, fill, tip=tip)
    ink = text_on(fills[0])
    words, who = str(part), ranks_text(owners)
    middle = x + width / 2
    room = height - (14 if fraction is not None else 0)
    two_lines = room >= 30
    if two_lines:
        lines = [(words, room / 2 - 2, strong), (fit(who, width - 8, SMALL), room / 2 + 12.5, False)]
    else:
        one = f"{words}  {who}"
        shown = one if text_width(one, SMALL, strong) <= width - 8 else words
        lines = [(shown, room / 2 + 4.3, strong)]
    if len(fills) > 1:
        ink = theme.ink
        broad = max(text_width(line, SMALL, bold) for line, _, bold in lines) + 10
        high = 32 if two_lines else 17
        plate = (middle - broad / 2, y + room / 2 + 0.5 - high / 2, broad, high)
        figure.rect(*plate, theme.card, radius=4, tip=tip)
    for line, down, bold in lines:
        figure.text(middle, y + down, line, size=SMALL, anchor="middle", fill=ink, bold=bold)
    if fraction is not None:
        _sum_bar(figure, (x + 6, y + height - 13, width - 12, 8), fraction, tip)
    if ours:
        figure.rect(x - 1, y - 1, width + 2, height + 2, "none", line=theme.ink, line_width=3, radius=3)
    else:
        figure.rect(x, y, width, height, "none", line=theme.line, radius=1)


def _sum_bar(figure: Figure, box: Box, fraction: Fraction, tip: str) -> None:
    """Dotted while terms are missing, solid when the sum is complete."""
    x, y, width, height = box
    theme = figure.theme
    figure.rect(x, y, width, height, theme.card, line=theme.ink, radius=2, tip=tip)
    if fraction == 1:
        figure.rect(x, y, width, height, theme.ink, radius=2, tip=tip)
    elif fraction:
        figure.rect(x, y, width * float(fraction), height, theme.hatch, line=theme.ink, radius=2)
        figure.rect(x, y, width * float(fraction), height, figure.partial(), radius=2, opacity=0.7, tip=tip)


# ---- what travels


def _arrows(figure: Figure, steps: SchemeSteps, stage: Stage, boxes: Mapping[Matrix, Box]) -> None:
    """From the left matrix to the right, from the upper one down: a line for each row or column of it."""
    sums = stage.given if any(stage.products) else ()
    for matrix in (steps.left, steps.above):
        x, y, width, height = boxes[matrix]
        travels = [each for each in stage.fetched if each.part.tensor == matrix.name]
        if not travels:  # what is added up on the way
            travels, sums = list(sums), ()
        if not travels:
            continue
        drawn = matrix if travels[0].part.tensor == matrix.name else steps.result
        rows_run = (matrix is steps.left) != drawn.turned
        n = Layout(drawn.layout).n_blocks(steps.sizes)[0 if rows_run else 1]
        parts: dict[tuple[int, int], list[Part]] = {}
        for each in travels:
            parts.setdefault(each.part.rows if rows_run else each.part.cols, []).append(each.part)
        kind = travels[0].kind
        colour = operation_colour(kind)
        for (low, high), which in parts.items():
            words = str(_together(which)) if drawn is matrix else "sum"
            tip = f"{operation_name(kind)}: {_together(which)}"
            middle = (low + high) / 2 / n
            if matrix is steps.left:
                at = y + middle * height + 6
                figure.arrow((x + width + 8, at), (RIGHT - 8, at), colour, width=4, tip=tip)
                shown = fit(words, GAP - 8, SMALL, True)
                figure.text(x + width + GAP / 2, at - 9, shown, size=SMALL, anchor="middle", bold=True)
            else:
                at = x + middle * width
                figure.arrow((at, y + height + 6), (at, y + height + ABOVE - 8), colour, width=4, tip=tip)
                shown = fit(words, width / len(parts) / 2 - 8, SMALL, True)
                figure.text(at + 11, y + height + 24, shown, size=SMALL, bold=True)


def _together(parts: Sequence[Part]) -> Part:
    rows = min(part.rows[0] for part in parts), max(part.rows[1] for part in parts)
    cols = min(part.cols[0] for part in parts), max(part.cols[1] for part in parts)
    return Part(parts[0].tensor, rows, cols)


def _collectives(stage: Stage) -> list[tuple[str, str, str]]:
    """Kind, what it does, and from or onto which ranks: the collectives of a stage, one of each sort."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for each in (*stage.fetched, *stage.given):
        roots = found.setdefault((each.kind, each.axis, each.part.tensor), [])
        roots += [each.root] if each.root is not None else []
    return [
        (kind, f"{tensor}: {operation_name(kind)} over {axis}", _ends(kind, roots))
        for (kind, axis, tensor), roots in found.items()
    ]


def _ends(kind: str, roots: Sequence[int]) -> str:
    if not roots:
        return ""
    return f", {'onto' if kind == 'reduce' else 'from'} {ranks_text(sorted(set(roots)))}"


# ---- the rank that is followed


def _panel(
    figure: Figure, steps: SchemeSteps, stage: int, rank: int, place: Mapping[str, int], box: Box
) -> None:
    theme, (x, y, width, height) = figure.theme, box
    now = steps.stages[stage - 1]
    figure.rect(x, y, width, height, theme.panel, radius=8)
    colour = rank_colour(rank, math.prod(steps.sizes.values())) or theme.line
    figure.chip(x + 12, y + 12, str(rank), colour, width=34, height=22)
    figure.text(x + 56, y + 28, f"rank {rank} at {mesh_words(place)}", size=14, bold=True)
    column = x + 104
    for row, (name, words) in enumerate(_follows(steps, now, rank)):
        at = y + 60 + 23 * row
        figure.text(x + 14, at, fit(name, 88, bold=True), bold=True, tip=name)
        shown = fit(words, x + width - 8 - column)
        figure.text(column, at, shown, fill=theme.muted, tip="" if shown == words else words)
    at = y + 142
    figure.text(x + 14, at, "sends", fill=theme.muted)
    so_far, in_all = steps.sent(rank, stage), steps.sent(rank, len(steps.stages))
    figure.text(column, at, f"{now.sent(rank):,} elements, so far {so_far:,} of {in_all:,}")
    for row, (words, n) in enumerate((("at rest", steps.rest), (f"in {steps.direction}", steps.peak))):
        at = y + 158 + 25 * row
        figure.text(x + 14, at + 13, words, fill=theme.muted)
        full = x + width - 70 - column
        figure.rect(column, at + 2, full, 14, theme.card, line=theme.line, radius=2)
        figure.rect(column, at + 2, full * n / steps.serial, 14, theme.memory, radius=2)
        figure.text(x + width - 10, at + 13, f"{n:,}", anchor="end")
    words = f"elements held at most; a full bar is X, W and Y whole: {steps.serial:,}"
    figure.text(x + 14, y + height - 9, fit(words, width - 20, SMALL), size=SMALL, fill=theme.muted)


def _follows(steps: SchemeSteps, now: Stage, rank: int) -> list[tuple[str, str]]:
    """What a rank multiplies and makes, and where that comes from and goes."""
    product = now.products[rank]
    rows = []
    if product:
        for matrix, part in ((steps.left, product.left), (steps.above, product.right)):
            rows.append((str(part), _origin(steps, now, matrix, part, rank)))
        rows.append((str(product.out), _fate(now, product.out, rank)))
    else:
        part = next(each.part for each in now.given if rank in each.members)
        rows.append((str(part), _fate(now, part, rank)))
    return rows


def _origin(steps: SchemeSteps, now: Stage, matrix: Matrix, part: Part, rank: int) -> str:
    if _own(matrix, steps.sizes, rank) == part:
        return "its own block"
    for each in now.fetched:
        if rank in each.members and each.part == part:
            source = (each.root,) if each.root is not None else each.members
            others = [int(other) for other in source if other != rank]
            return f"{operation_name(each.kind)} over {each.axis}, from {ranks_text(others)}"
    return "came earlier"


def _fate(now: Stage, part: Part, rank: int) -> str:
    for each in now.given:
        if rank in each.members and each.part == part:
            to = (each.root,) if each.root is not None else each.members
            onto = "itself" if to == (rank,) else ranks_text([int(other) for other in to])
            return f"{operation_name(each.kind)} over {each.axis}, onto {onto}"
    summed = now.summed.get(part)
    return f"{_terms(summed)} summed" if summed is not None else "a term"


def _own(matrix: Matrix, sizes: Mapping[str, int], rank: int) -> Part:
    row, col = Layout(matrix.layout).block(sizes, coordinates(sizes)[rank])
    return Part(matrix.name, (row, row + 1), (col, col + 1))


# ---- words


def _scheme(steps: SchemeSteps) -> str:
    name = steps.name.replace("2d", "2D").replace("2.5d", "2.5D").replace("3d", "3D")
    return f"{name[:1].upper()}{name[1:]} on {mesh_words(steps.sizes)}"


def _terms(fraction: Fraction) -> str:
    return "all" if fraction == 1 else "nothing" if fraction == 0 else str(fraction)


def _happens(stage: Stage) -> str:
    if not any(stage.products):
        return f"no product; {_and(words for _, words, _ in _collectives(stage))}"
    fetched = list(dict.fromkeys(each.part.tensor for each in stage.fetched))
    given = list(dict.fromkeys((each.part.tensor, operation_name(each.kind)) for each in stage.given))
    brings = f"{_and(fetched)} travel{'s' if len(fetched) == 1 else ''}, then " if fetched else ""
    takes = f", then {_and(f'{kind} of {tensor}' for tensor, kind in given)}" if given else ""
    return f"{brings}each rank multiplies two blocks{takes}"


def _alt(steps: SchemeSteps, stage: int, rank: int) -> str:
    now = steps.stages[stage - 1]
    title = f"{_scheme(steps)}, {steps.result.name} = {steps.left.title} · {steps.above.title}"
    travels = "; ".join(words + ends for _, words, ends in _collectives(now)) or "nothing travels"
    does = "; ".join(f"{name}: {words}" for name, words in _follows(steps, now, rank))
    return (
        f"{title}, stage {stage} of {len(steps.stages)}: {travels}. Rank {rank}: {does}; it has sent "
        f"{steps.sent(rank, stage):,} of {steps.sent(rank, len(steps.stages)):,} elements, and ranks hold "
        f"{steps.rest:,} elements at rest and at most {steps.peak:,}."
    )


def _and(words: Iterable[str]) -> str:
    every = list(words)
    return every[0] if len(every) == 1 else f"{', '.join(every[:-1])} and {every[-1]}"
