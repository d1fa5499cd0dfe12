"""The drawing primitives: shapes with hover titles, text that fits, a card with a heading.

A figure is the same text for the same data, everything written into it is escaped, and it needs
nothing but the standard library.
"""

from __future__ import annotations

import html
import math
import re
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from lessons_lib.errors import RefusedError
from lessons_lib.views.colours import THEMES, Theme, text_on

WIDTH = 900
NARROWEST = 640  # on a page; text of 12 pixels is then drawn with 8.5
MARGIN = 16
TITLE, TEXT, SMALL = 17, 13, 12  # text sizes in pixels

_FONTS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_FILE_STYLE = "max-width:100%;height:auto"
_SPECIAL = re.compile(r"[^\w .,:;()/+*=#%@-]")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ID = "\0"  # stands for the figure's id until the figure is complete; no text can hold it

# Widths in em of a wide font (DejaVu Sans), so that text that fits here fits everywhere.
_EM = {
    character: width
    for width, characters in ((0.3, "'ijlIJ"), (0.36, " ,./:;\\|f-·"), (0.41, "()[]t!r"), (0.53, '"*_`szc?'))
    for character in characters
} | {
    character: width
    for width, characters in (
        (0.6, "aLFkvxyPTY"),
        (0.7, "KAVBRXZC"),
        (0.84, "DGHNOQUw&#+<=>^~×−"),
        (1.0, "%mMW@…"),
    )
    for character in characters
}


def text_width(text: str, size: float = TEXT, bold: bool = False) -> float:
    """About how many pixels wide ``text`` is; rather too many than too few.

    >>> round(text_width("all_reduce"))
    68
    """
    em = sum(_EM.get(character, 0.64 if character < "\u1100" else 1.1) for character in text)
    return em * size * (1.12 if bold else 1)


def fit(text: str, width: float, size: float = TEXT, bold: bool = False) -> str:
    """``text``, or as much of its beginning as ``width`` pixels hold, with an ellipsis.

    >>> fit("tensor parallel", 200), fit("tensor parallel", 60)
    ('tensor parallel', 'tensor…')
    """
    if text_width(text, size, bold) <= width:
        return text
    room, kept = width - text_width("…", size, bold), ""
    for character in text:
        room -= text_width(character, size, bold)
        if room < 0:
            break
        kept += character
    return kept.rstrip() + "…" if kept else ""


def escape(text: object) -> str:
    """Text for XML: markup escaped, characters that XML does not know replaced.

    >>> escape('<b> & "'), escape("a\\0b")
    ('&lt;b&gt; &amp; &quot;', 'a\ufffdb')
    """
    text = str(text)
    return html.escape(_NOT_XML.sub("\ufffd", text)) if _SPECIAL.search(text) else text


class Key(NamedTuple):
    """An entry of a legend."""

    fill: str
    name: str
    form: str = "block"  # or "ticks", which stand on a lane, or "stack"


class Figure:
    """A picture with a heading, on a card of its own, with one sentence that says what it shows.

    >>> figure = Figure("Two blocks", "Two blocks side by side.")
    >>> figure.rect(16, figure.top, 40, 20, "#0072B2", tip="the left one")
    >>> figure.rect(60, figure.top, 40, 20, "#E69F00", tip="the right one")
    >>> figure.alt, figure.svg.count("<rect"), figure.svg[:4]
    ('Two blocks side by side.', 3, '<svg')

    Coordinates are pixels, y downwards. The card is 900 wide and as high as what is drawn on it.
    """

    def __init__(self, title: str, alt: str, *, subtitle: str = "", theme: str = "light") -> None:
        if theme not in THEMES:
            raise RefusedError(f"theme={theme!r}: there are {' and '.join(map(repr, THEMES))}.")
        self.title, self.alt = title, alt
        self.theme: Theme = THEMES[theme]
        self._body: list[str] = []
        self._textures: dict[str, str] = {}
        self._bottom = 0.0
        self.top = 44.0  # where the drawing may begin
        self._heading(title, 29, TITLE, self.theme.ink, bold=True)
        if subtitle:
            self._heading(subtitle, 51, TEXT, self.theme.muted)
            self.top = 68.0

    def _heading(self, text: str, y: float, size: float, fill: str, bold: bool = False) -> None:
        shown = fit(text, WIDTH - 2 * MARGIN, size, bold)
        self.text(MARGIN, y, shown, size=size, fill=fill, bold=bold, tip="" if shown == text else text)

    # Shapes. `tip` is shown on hover.

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        line: str = "",
        line_width: float = 1,
        radius: float = 0,
        opacity: float = 1,
        tip: str = "",
    ) -> None:
        extra = f' rx="{radius:g}"' if radius else ""
        if line:
            extra += f' stroke="{line}" stroke-width="{line_width:g}"'
        if opacity < 1:
            extra += f' fill-opacity="{opacity:g}"'
        self._add(
            f'rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{extra}',
            y + height,
            tip=tip,
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = TEXT,
        anchor: str = "start",
        fill: str = "",
        bold: bool = False,
        turn: float = 0,
        tip: str = "",
    ) -> None:
        """Write ``text`` with its baseline at y; ``turn`` degrees clockwise around (x, y)."""
        extra = f' text-anchor="{anchor}"' if anchor != "start" else ""
        if bold:
            extra += ' font-weight="700"'
        if turn:
            extra += f' transform="rotate({turn:g} {x:.1f} {y:.1f})"'
        if not tip:
            extra += ' pointer-events="none"'  # the shape below answers the hover
        self._add(
            f'text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill or self.theme.ink}"{extra}',
            y + 4,
            content=escape(text),
            tip=tip,
        )

    def boxes(self, boxes: Iterable[tuple[float, float, float, float]], fill: str, *, tip: str = "") -> None:
        """Draw many rectangles (x, y, width, height) as one shape."""
        places = list(boxes)
        path = "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z" for x, y, w, h in places)
        self._add(f'path d="{path}" fill="{fill}"', max(y + h for _, y, _, h in places), tip=tip)

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        *,
        width: float = 1,
        dash: str = "",
        tip: str = "",
    ) -> None:
        """Draw a line through points."""
        places = list(points)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        self._add(
            f'polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{extra}',
            max(y for _, y in places),
            tip=tip,
        )

    def polygon(
        self,
        points: Iterable[tuple[float, float]],
        fill: str,
        *,
        line: str = "",
        line_width: float = 1,
        opacity: float = 1,
        tip: str = "",
    ) -> None:
        places = list(points)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        extra = ""
        if line:
            extra = f' stroke="{line}" stroke-width="{line_width:g}" stroke-linejoin="round"'
        if opacity < 1:
            extra += f' fill-opacity="{opacity:g}"'
        self._add(f'polygon points="{path}" fill="{fill}"{extra}', max(y for _, y in places), tip=tip)

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        colour: str,
        *,
        width: float = 1.5,
        tip: str = "",
    ) -> None:
        """Draw a straight arrow whose tip touches ``end``."""
        (x0, y0), (x1, y1) = start, end
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        head = min(4 + 2 * width, length)
        bx, by = x1 - head * ux, y1 - head * uy
        self.line([start, (bx, by)], colour, width=width, tip=tip)
        self.polygon(
            [
                (x1, y1),
                (bx - head / 2.4 * uy, by + head / 2.4 * ux),
                (bx + head / 2.4 * uy, by - head / 2.4 * ux),
            ],
            colour,
            tip=tip,
        )

    # Pieces that pictures share

    def chip(
        self, x: float, y: float, text: str, fill: str, *, width: float, height: float = 18, tip: str = ""
    ) -> None:
        """A small label on a colour, its left upper corner at (x, y)."""
        self.rect(x, y, width, height, fill, radius=4, tip=tip)
        size = SMALL if height < 20 else TEXT
        self.text(
            x + width / 2,
            y + height / 2 + size * 0.36,
            text,
            size=size,
            anchor="middle",
            fill=text_on(fill),
            bold=True,
        )

    def legend(self, keys: Iterable[Key], y: float) -> float:
        """Explain fills in a row (rows, if need be) starting at y; return where the next thing may begin."""
        x = float(MARGIN)
        row_y = y
        for key in keys:
            shown = fit(key.name, 300, TEXT)
            width = 19 + text_width(shown) + 18
            if x + width > WIDTH and x > MARGIN:
                x, row_y = float(MARGIN), row_y + 22
            if key.form == "ticks":
                self.rect(x, row_y + 6, 13, 7, self.theme.lane, line=self.theme.line, radius=1)
                self.boxes([(x + 1.5 + 4 * at, row_y, 1.6, 6) for at in range(3)], key.fill)
            elif key.form == "stack":
                self.rect(x + 3, row_y, 11, 11, self.theme.lane, line=self.theme.muted, radius=2)
                self.rect(x, row_y + 3, 11, 11, key.fill, line=self.theme.muted, radius=2)
            else:
                self.rect(x, row_y, 13, 13, key.fill, line=self.theme.line, radius=2)
            self.text(x + 19, row_y + 11, shown, tip="" if shown == key.name else key.name)
            x += width
        return row_y + 26

    def waiting(self) -> str:
        """The fill of time in which nothing gets done: hatched."""
        lines = f'<path d="M0 0V6" stroke="{self.theme.hatch}" stroke-width="2.4"/>'
        return self._texture(
            "wait",
            'width="6" height="6" patternTransform="rotate(45)"',
            f'<rect width="6" height="6" fill="{self.theme.lane}"/>{lines}',
        )

    def partial(self) -> str:
        """The fill of a term of a sum that is not added up: dotted."""
        dots = "".join(f'<circle cx="{at}" cy="{at}" r="1.3" fill="{self.theme.hatch}"/>' for at in (2, 6))
        return self._texture(
            "partial", 'width="8" height="8"', f'<rect width="8" height="8" fill="{self.theme.card}"/>{dots}'
        )

    def _texture(self, name: str, box: str, content: str) -> str:
        self._textures[name] = (
            f'<pattern id="{_ID}-{name}" patternUnits="userSpaceOnUse" {box}>{content}</pattern>'
        )
        return f"url(#{_ID}-{name})"

    def _add(self, opening: str, bottom: float, content: str = "", tip: str = "") -> None:
        if tip:
            content = f"<title>{escape(tip)}</title>{content}"
        self._bottom = max(self._bottom, bottom)
        tag = opening.split(" ", 1)[0]
        self._body.append(f"<{opening}>{content}</{tag}>" if content else f"<{opening}/>")

    # The result

    @property
    def height(self) -> int:
        return math.ceil(self._bottom) + MARGIN

    @property
    def svg(self) -> str:
        height = self.height
        whole = "".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
                f'height="{height}" style="{_FILE_STYLE}" role="img" '
                f'aria-labelledby="{_ID}-title {_ID}-desc" font-family="{_FONTS}">',
                f'<title id="{_ID}-title">{escape(self.title)}</title>',
                f'<desc id="{_ID}-desc">{escape(self.alt)}</desc>',
                f"<defs>{''.join(self._textures.values())}</defs>" if self._textures else "",
                f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{self.theme.card}"/>',
                *self._body,
                "</svg>",
            ]
        )
        # Two different figures on one page must not share ids: the id is a checksum of the figure.
        return whole.replace(_ID, f"figure-{zlib.crc32(whole.encode()):08x}")

    @property
    def html(self) -> str:
        """The picture for a page: as wide as its column, but never so small that it cannot be read.

        In a column narrower than 640 pixels it scrolls sideways. The style is not part of ``svg``, which
        as an image would be cut off by it.
        """
        style = f"width:100%;max-width:{WIDTH}px;min-width:{NARROWEST}px;height:auto"
        svg = self.svg.replace(_FILE_STYLE, style, 1)
        return f'<div style="overflow-x:auto">{svg}</div>'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        # As HTML a picture fits the column, shows what lies under the pointer and can be read aloud;
        # as an image it is what is left where a page may not contain that.
        return {"text/html": self.html, "image/svg+xml": self.svg, "text/plain": self.alt}

    def __repr__(self) -> str:
        return self.alt
