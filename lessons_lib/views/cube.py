"""The picture of a product on a cube of ranks, with the three tensors as its faces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout, coordinates
from lessons_lib.timeline import ranks_text
from lessons_lib.views.colours import MOST_RANK_COLOURS, axis_colour, mix, rank_colour, text_on
from lessons_lib.views.layouts import PANEL_ROW, mesh_words, rank_of
from lessons_lib.views.svg import MARGIN, SMALL, WIDTH, Figure, fit, text_width

PANEL = 610  # where the panel about one rank begins
ACROSS, DOWN = 0.95, 0.34  # of a step along an axis of a floor, in the picture
SPACED = 1.45  # from cube to cube
HEIGHT = 0.6  # of a cube
ASIDE = 0.5  # of the cubes: room between them and the walls
SHADES = (0.0, 0.12, 0.28)  # of a cube's top, left and right
FADED = 0.6  # opacity of what the rank in focus has no part in

Point = tuple[float, float]
Place = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Axes:
    """Which mesh axis cuts which dim of the product Y[B, F] = X[B, D] W[D, F] into blocks."""

    down: str  # B, from floor to floor
    right: str  # F
    left: str  # D, the dim that is summed over

    @classmethod
    def of(cls, X: Layout, W: Layout, Y: Layout, sizes: Mapping[str, int]) -> Axes:
        """Read the axes off three layouts: the first axis behind each dim, the same in both tensors."""
        found = []
        asked = (
            f"a cube of X as {str(X)!r}, W as {str(W)!r} and Y as {str(Y)!r} on a mesh of {mesh_words(sizes)}"
        )
        hint = "Draw it as a mesh: mesh_picture({'X': X, 'W': W, 'Y': Y}, sizes)."
        if not (
            len(X.dims) == len(W.dims) == 2 and Y.dims == (X.dims[0], W.dims[1]) and X.dims[1] == W.dims[0]
        ):
            raise RefusedError(
                f"{asked}: the dims are not those of a product, X[B, D] times W[D, F] gives Y[B, F]."
            )
        for dim, both in ((X.dims[0], (X, Y)), (W.dims[1], (W, Y)), (X.dims[1], (X, W))):
            first = [layout.dim(dim)[:1] for layout in both]
            if first[0] != first[1] or not first[0]:
                raise RefusedError(
                    f"{asked}: dim {dim} is not cut by one axis first in both its tensors. {hint}"
                )
            found.append(first[0][0])
        if len(set(found)) < 3 or set(sizes) != set(found):
            raise RefusedError(
                f"{asked}: its three dims need an axis each, of a mesh with three axes. {hint}"
            )
        return cls(*found)


@dataclass(frozen=True, slots=True)
class Face:
    """A tensor on the side of the cube that is flat along ``missing``, the axis that is not its dims'."""

    name: str
    layout: Layout
    first: str  # axes of its two dims
    second: str
    missing: str

    def block(self, place: Place) -> str:
        return f"{self.name}[{place[self.first]},{place[self.second]}]"

    def fate(self) -> str:
        """What the ranks along the missing axis hold of a block."""
        if self.missing in self.layout.partial:
            return f"terms of a sum along {self.missing}"
        if any(self.missing in cut for cut in self.layout.cuts):
            return f"cut over {self.missing}"
        return f"copies along {self.missing}"


def cube_picture(
    X: Layout | str,
    W: Layout | str,
    Y: Layout | str,
    sizes: Mapping[str, int],
    *,
    rank: int = 0,
    title: str = "",
    theme: str = "light",
) -> Figure:
    """Draw Y = X W on a mesh of three axes: every rank a cube, every tensor a face, ``rank`` in focus.

    >>> sizes = {"i": 2, "j": 2, "k": 2}
    >>> print(cube_picture("B@i@j D@k", "D@k@i F@j", "B@i@k F@j", sizes, rank=2).alt)
    A product on 8 ranks, i=2, j=2, k=2: rank (i, j, k) multiplies X[i,k] by W[k,j] into Y[i,j]; blocks of \
X are cut over j, of W are cut over i, of Y are cut over k. Rank 2 at i=0, j=1, k=0: all-gather X[0,0] \
along j; all-gather W[0,1] along i; multiply; reduce-scatter Y[0,1] along k; stores 1/8 of X, 1/8 of W and \
1/8 of Y.

    A face's block belongs to the ranks in line with it: cut, each has its part; a stack, each has a
    copy; dotted, each has a term of a sum. From nine ranks on, colours show the lines through ``rank``.
    Refuses layouts whose dims are not cut first by three different axes.
    """
    X, W, Y = (Layout(each) if isinstance(each, str) else each for each in (X, W, Y))
    place = rank_of(sizes, rank)
    axes = Axes.of(X, W, Y, sizes)
    faces = (
        Face("X", X, axes.down, axes.left, axes.right),
        Face("W", W, axes.left, axes.right, axes.down),
        Face("Y", Y, axes.down, axes.right, axes.left),
    )
    n_ranks = math.prod(sizes.values())
    names = ", ".join(sizes)
    does = _does(faces, place, sizes)
    stores = [f"{_share(face.layout.share(sizes))} of {face.name}" for face in faces]
    figure = Figure(
        title or f"X times W on {' × '.join(map(str, sizes.values()))} = {n_ranks} ranks",
        f"A product on {n_ranks} ranks, {mesh_words(sizes)}: rank ({names}) multiplies "
        f"{_generic(faces[0])} by {_generic(faces[1])} into {_generic(faces[2])}; "
        f"blocks of {', of '.join(f'{face.name} are {face.fate()}' for face in faces)}. "
        f"Rank {rank} at {mesh_words(place)}: {'; '.join(does)}; stores {_and(stores)}.",
        subtitle=f"Rank ({names}) multiplies {_generic(faces[0])} by {_generic(faces[1])}. "
        "A block belongs to the ranks in line with it.",
        theme=theme,
    )
    Drawing(figure, axes, sizes, rank, faces).draw()
    _panel(figure, axes, sizes, place, rank, does, _and(stores))
    return figure


def _does(faces: Sequence[Face], place: Place, sizes: Mapping[str, int]) -> list[str]:
    """What a rank does for the product, in order; who holds copies or keeps terms need not communicate."""
    X, W, Y = faces
    steps = []
    for face in (X, W):
        if sizes[face.missing] > 1 and any(face.missing in cut for cut in face.layout.cuts):
            steps.append(f"all-gather {face.block(place)} along {face.missing}")
        else:
            steps.append(f"has a whole {face.block(place)}")
    steps.append("multiply")
    if sizes[Y.missing] == 1:
        steps.append(f"has a whole {Y.block(place)}")
    elif Y.missing in Y.layout.partial:
        steps.append(f"keep its term of {Y.block(place)}")
    elif any(Y.missing in cut for cut in Y.layout.cuts):
        steps.append(f"reduce-scatter {Y.block(place)} along {Y.missing}")
    else:
        steps.append(f"all-reduce {Y.block(place)} along {Y.missing}")
    return steps


def _share(share: Fraction) -> str:
    return "all" if share == 1 else str(share)


def _generic(face: Face) -> str:
    return f"{face.name}[{face.first},{face.second}]"


def _and(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


class Drawing:
    """The cubes and the three faces around them, drawn from back to front."""

    def __init__(
        self,
        figure: Figure,
        axes: Axes,
        sizes: Mapping[str, int],
        rank: int,
        faces: Sequence[Face],
    ) -> None:
        self.figure, self.axes, self.sizes, self.rank, self.faces = figure, axes, sizes, rank, faces
        self.places = coordinates(sizes)
        self.n_ranks = len(self.places)
        right, left = _extent(sizes[axes.right]), _extent(sizes[axes.left])
        around = DOWN * (right + left)  # height of a floor
        self.scale = min(
            60.0, (PANEL - 24 - MARGIN) / (2 * ACROSS * (right + left) + 2 * ASIDE), 150 / around
        )
        self.pitch = around + HEIGHT + 0.12  # from floor to floor
        parts = max(sizes[axes.right], sizes[axes.left])
        self.rise = min(self.pitch - 0.4, max(0.95, 20 * parts / self.scale))  # height of a wall's block
        self.x = MARGIN + (2 * ACROSS * left + ASIDE) * self.scale
        # The walls' first blocks reach above the first cube.
        self.y = figure.top + 52 + DOWN * max(right, left) * self.scale

    def draw(self) -> None:
        self._walls()
        for place in sorted(self.places, key=self._depth):
            self._cube(self.places.index(place))
        self._bottom()

    def _depth(self, place: Place) -> tuple[int, int]:
        """What is drawn first: the upper floors, and on each the cubes at the back."""
        return place[self.axes.down], place[self.axes.right] + place[self.axes.left]

    def at(self, down: float, right: float, left: float) -> Point:
        """Where a point lies in the picture, in steps from the back corner of the first cube."""
        x = self.x + (right - left) * ACROSS * self.scale
        return x, self.y + ((right + left) * DOWN + down) * self.scale

    # Colours

    def _fill(self, rank: int) -> str:
        """A rank's own colour, or from nine ranks on that of the axis along which the focus meets it.

        Ranks out of focus are mixed with the card, so that the text on them can be black or white.
        """
        theme, focus, place = self.figure.theme, self.places[self.rank], self.places[rank]
        own = rank_colour(rank, self.n_ranks)
        if own:
            return own if rank == self.rank else mix(theme.card, own, FADED)
        differ = [axis for axis in self.sizes if place[axis] != focus[axis]]
        if len(differ) == 1:
            return axis_colour(differ[0], self.sizes)
        return mix(theme.panel, theme.hatch, 0.35) if differ else theme.ink

    def _polygon(self, points: Sequence[Point], fill: str, focus: bool, tip: str) -> None:
        line = self.figure.theme.ink if focus else self.figure.theme.card
        self.figure.polygon(points, fill, line=line, line_width=2.6 if focus else 1.2, tip=tip)

    def _number(self, middle: Point, rank: int, size: float) -> None:
        x, y = middle
        ink = text_on(self._fill(rank))
        self.figure.text(x, y + size * 0.36, str(rank), size=size, anchor="middle", fill=ink, bold=True)

    # Cubes

    def _cube(self, rank: int) -> None:
        place, fill = self.places[rank], self._fill(rank)
        top = place[self.axes.down] * self.pitch
        right, left = place[self.axes.right] * SPACED, place[self.axes.left] * SPACED
        bottom, right_end, left_end = top + HEIGHT, right + 1, left + 1
        sides = (
            [(top, right, left), (top, right_end, left), (top, right_end, left_end), (top, right, left_end)],
            [
                (top, right, left_end),
                (top, right_end, left_end),
                (bottom, right_end, left_end),
                (bottom, right, left_end),
            ],
            [
                (top, right_end, left),
                (top, right_end, left_end),
                (bottom, right_end, left_end),
                (bottom, right_end, left),
            ],
        )
        blocks = _and([face.block(place) for face in self.faces])
        tip = f"rank {rank} at {mesh_words(place)}, in line with {blocks}"
        for corners, shade in zip(sides, SHADES, strict=True):
            points = [self.at(*corner) for corner in corners]
            self._polygon(points, mix(fill, "#000000", shade), rank == self.rank, tip)
        self._number(self.at(top, right + 0.5, left + 0.5), rank, 14 if self.scale > 36 else SMALL)

    # Faces

    def _walls(self) -> None:
        X, _, Y = self.faces
        axes, sizes, figure = self.axes, self.sizes, self.figure
        beyond = {
            axis: _extent(sizes[axis]) + 0.42 for axis in (axes.left, axes.right)
        }  # the cubes, as the picture has it
        for floor in range(sizes[axes.down]):
            top = floor * self.pitch - 0.1
            for column in range(sizes[axes.left]):
                near = column * SPACED
                corners = [(top, -beyond[axes.left], near), (top, -beyond[axes.left], near + 1)]
                self._wall_block(X, {axes.down: floor, axes.left: column}, corners)
            for column in range(sizes[axes.right]):
                near = column * SPACED
                corners = [(top, near, -beyond[axes.right]), (top, near + 1, -beyond[axes.right])]
                self._wall_block(Y, {axes.down: floor, axes.right: column}, corners)
            x, y = self.at(top + HEIGHT, 0.0, _extent(sizes[axes.left]))
            words = f"{axes.down}={floor}"
            figure.text(
                x + 4, y + 0.9 * self.scale, words, size=SMALL, anchor="middle", fill=figure.theme.muted
            )
        self._caption(X, MARGIN, figure.top + 10)
        widest = text_width("Y ", 17, True) + text_width(Y.fate())
        x, _ = self.at(0.0, _extent(sizes[axes.right]), -beyond[axes.right])
        self._caption(Y, min(x, PANEL - 16) - widest, figure.top + 10)

    def _wall_block(self, face: Face, where: Place, upper: Sequence[tuple[float, float, float]]) -> None:
        """A block that stands upright: its first dim runs down from the edge between two corners."""
        (down, right, left), (_, right_end, left_end) = upper

        def point(u: float, v: float) -> Point:
            return self.at(
                down + u * self.rise, right + (right_end - right) * v, left + (left_end - left) * v
            )

        self._block(face, where, point, (self.rise * self.scale, ACROSS * self.scale))
        name, spacing = face.block(where), SPACED * ACROSS * self.scale
        if text_width(name, SMALL) <= spacing - 4 and (self.pitch - self.rise) * self.scale >= 34:
            x, y = point(0.0, 0.5)
            flat = any(face.missing in axes for axes in (*face.layout.cuts, face.layout.partial))
            lift = (5 if flat else 12) + text_width(name, SMALL) / 2 * DOWN / ACROSS
            self.figure.text(x, y - lift, name, size=SMALL, anchor="middle")

    def _bottom(self) -> None:
        """The face of W below the cubes, with the places along its two axes."""
        W, axes, figure = self.faces[1], self.axes, self.figure
        down = self.sizes[axes.down] * self.pitch + 0.35
        n_left, n_right = self.sizes[axes.left], self.sizes[axes.right]
        for row in range(n_left):
            for col in range(n_right):

                def point(u: float, v: float, row: int = row, col: int = col) -> Point:
                    return self.at(down, col * SPACED + v, row * SPACED + u)

                side = 2 * DOWN * self.scale
                self._block(W, {axes.left: row, axes.right: col}, point, (side, side))
        for at in range(n_right):
            x, y = self.at(down, at * SPACED + 0.5, _extent(n_left) + 0.12)
            words = f"{axes.right}={at}"
            figure.text(x, y + 12, words, size=SMALL, anchor="end", fill=figure.theme.muted)
        for at in range(n_left):
            x, y = self.at(down, _extent(n_right) + 0.12, at * SPACED + 0.5)
            figure.text(x, y + 12, f"{axes.left}={at}", size=SMALL, fill=figure.theme.muted)
        _, y = self.at(down, 0.0, _extent(n_left))
        self._caption(W, MARGIN, y - 10)

    def _caption(self, face: Face, x: float, y: float) -> None:
        self.figure.text(x, y, face.name, size=17, bold=True)
        self.figure.text(
            x + text_width(f"{face.name} ", 17, True), y, face.fate(), fill=self.figure.theme.muted
        )

    def _block(self, face: Face, where: Place, point: Callable[[float, float], Point], room: Point) -> None:
        """A block of a face, in the parts, copies or terms of the ranks in line with it.

        ``point(u, v)`` is where a point of it lies, u along its first dim and v along its second, and
        ``room`` how far the block reaches in the picture, along both.
        """
        ranks = [
            at for at, place in enumerate(self.places) if all(place[axis] == n for axis, n in where.items())
        ]
        cut = [dim for dim, axes in enumerate(face.layout.cuts) if face.missing in axes]
        if not cut:
            self._whole(face, where, [point(u, v) for u, v in ((0, 0), (0, 1), (1, 1), (1, 0))], ranks)
            return
        n = len(ranks)
        size = next((size for size in (14, SMALL) if size + 2 <= room[cut[0]] / n), 0)
        for part, rank in sorted(enumerate(ranks), key=lambda at: at[1] == self.rank):  # the outline on top
            low, high = part / n, (part + 1) / n
            corners = [(low, 0.0), (low, 1.0), (high, 1.0), (high, 0.0)]
            middle = (low + high) / 2, 0.5
            if cut[0] == 1:
                corners, middle = [(v, u) for u, v in corners], (0.5, (low + high) / 2)
            tip = f"{face.block(where)}, part {part} of {n}: on rank {rank}"
            self._polygon([point(u, v) for u, v in corners], self._fill(rank), rank == self.rank, tip)
            if size:
                self._number(point(*middle), rank, size)

    def _whole(self, face: Face, where: Place, points: Sequence[Point], ranks: Sequence[int]) -> None:
        """A block that several ranks hold: a stack of copies, or dotted, terms of a sum."""
        figure, theme = self.figure, self.figure.theme
        partial = face.missing in face.layout.partial
        tip = f"{face.block(where)}, {face.fate()}: on {ranks_text(ranks)}"
        focus = self.rank in ranks
        line = theme.ink if focus else theme.line
        if not partial and len(ranks) > 1:
            for behind in (6, 3):
                card = [(x + behind, y - behind) for x, y in points]
                figure.polygon(card, theme.panel, line=line, tip=tip)
        fill = figure.partial() if partial else theme.panel
        figure.polygon(points, fill, line=line, line_width=2.6 if focus else 1.2, tip=tip)
        xs = [x for x, _ in points]
        x, y = sum(xs) / 4, sum(y for _, y in points) / 4
        choices = (
            (" + " if partial else ", ").join(map(str, ranks)),
            f"{len(ranks)} {'terms' if partial else 'copies'}",
        )
        for words in choices:
            half = text_width(words, SMALL, True) / 2 + 2
            if 2 * half <= max(xs) - min(xs) - 2:
                figure.rect(x - half, y - 8, 2 * half, 16, theme.card if partial else theme.panel, radius=3)
                figure.text(x, y + 4.3, words, size=SMALL, anchor="middle", bold=True)
                return


def _extent(n: int) -> float:
    """How far a row of cubes reaches."""
    return n * SPACED - (SPACED - 1)


def _panel(
    figure: Figure,
    axes: Axes,
    sizes: Mapping[str, int],
    place: Place,
    rank: int,
    does: Sequence[str],
    stores: str,
) -> None:
    """What the rank in focus does and stores, and the directions of the axes."""
    theme, x, y, width = figure.theme, PANEL, figure.top, WIDTH - MARGIN - PANEL
    n_ranks = math.prod(sizes.values())
    coloured = n_ranks > MOST_RANK_COLOURS
    height = 92 + PANEL_ROW * len(does)
    figure.rect(x, y, width, height, theme.panel, radius=8)
    figure.chip(x + 14, y + 13, str(rank), rank_colour(rank, n_ranks) or theme.ink, width=34, height=22)
    head = fit(f"rank {rank}: {mesh_words(place)}", width - 68, 14, True)
    figure.text(x + 58, y + 29, head, size=14, bold=True)
    for number, step in enumerate(does, 1):
        at_y = y + 38 + PANEL_ROW * number
        figure.text(x + 14, at_y, fit(f"{number}. {step}", width - 24))
    figure.text(x + 14, y + height - 30, "stores", fill=theme.muted)
    figure.text(x + 14, y + height - 12, fit(stores, width - 24), fill=theme.muted)

    middle, top = x + width / 2, y + height + 36
    for axis, dx, dy, beyond_x, beyond_y in (
        (axes.right, 46, 16, 22, 4),
        (axes.left, -46, 16, -22, 4),
        (axes.down, 0, 46, 0, 16),
    ):
        figure.arrow((middle, top), (middle + dx, top + dy), theme.ink, width=2)
        fill = axis_colour(axis, sizes) if coloured else theme.panel
        wide = text_width(axis, SMALL, True) + 16
        outward = beyond_x and math.copysign(wide / 2 - 12, beyond_x)
        figure.chip(
            middle + dx + beyond_x + outward - wide / 2, top + dy + beyond_y - 9, axis, fill, width=wide
        )
