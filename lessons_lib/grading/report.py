"""The table in which a check shows itself, in a notebook and as text."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass, field
from typing import Any

from lessons_lib.grading.exercise import Claim

WIDTH = 100  # characters of a line of text


@dataclass(frozen=True)
class Line:
    """One row: a claim, whether it holds (``None``: not judged), what was measured, and the best known."""

    claim: str
    what: str
    passed: bool | None
    message: str
    measured: str
    best: str
    points: float
    possible: float

    @classmethod
    def earned(cls, claim: Claim, measured: str = "", best: str = "") -> Line:
        return cls(claim.key, claim.what, True, "", measured, best, claim.points, claim.points)

    @classmethod
    def failed(cls, claim: Claim, message: str, measured: str = "", best: str = "") -> Line:
        return cls(claim.key, claim.what, False, message, measured, best, 0.0, claim.points)

    @classmethod
    def not_judged(cls, claim: Claim, message: str, measured: str = "", best: str = "") -> Line:
        return cls(claim.key, claim.what, None, message, measured, best, 0.0, claim.points)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Everything that was measured, beside what it should be."""
        return list(zip(self.measured.split("\n"), self.best.split("\n"), strict=True))

    @property
    def sign(self) -> str:
        return {True: "✓", False: "✗", None: "–"}[self.passed]


@dataclass(frozen=True)
class Report:
    """What a check found. It shows itself as a table; ``points`` of ``possible``, ``lines`` to read on."""

    id: str
    title: str
    lines: tuple[Line, ...]
    seed: int
    seconds: float
    details: str = field(default="", repr=False)  # the report of a run that failed
    printed: str = field(default="", repr=False)  # what the functions printed in the first call

    @property
    def passed(self) -> bool:
        return all(line.passed for line in self.lines)

    @property
    def points(self) -> float:
        return round(sum(line.points for line in self.lines), 2)

    @property
    def possible(self) -> float:
        return round(sum(line.possible for line in self.lines), 2)

    @property
    def headline(self) -> str:
        verdict = "passed" if self.passed else "not yet"
        return f"{self.id} · {self.title}: {verdict}, {self.points:g} of {self.possible:g} points"

    @property
    def footer(self) -> str:
        return (
            f"Sizes, values and turns were drawn from seed={self.seed}; "
            f'check("{self.id}", ..., seed={self.seed}) draws them again. {self.seconds:.1f} s.'
        )

    def __str__(self) -> str:
        rows = [self.headline, ""]
        for line in self.lines:
            rows.append(f"  {line.sign} {line.what}  [{line.points:g}/{line.possible:g}]")
            rows += _indented(line.message)
            for measured, best in line.pairs:
                if measured:
                    rows += _indented(f"{measured}   (should be: {best})")
        rows += ["", *textwrap.wrap(self.footer, WIDTH)]
        if self.printed:
            rows += ["", "In the first call was printed:", textwrap.indent(self.printed, "  | ")]
        if self.details:
            rows += ["", "The whole report:", textwrap.indent(self.details, "  | ")]
        return "\n".join(rows)

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html}

    @property
    def html(self) -> str:
        head = "".join(
            f'<th scope="col" style="{_HEAD};width:{width}">{name}</th>'
            for name, width in zip(_COLUMNS, _WIDTHS, strict=True)
        )
        rows = "".join(map(_row, self.lines))
        return (
            f'<div style="{_STYLE}">'
            f'<div style="{_TITLE}">{_badge(self.passed)} {_text(self.headline)}</div>'
            f'<table style="{_TABLE}" aria-label="{_text(self.headline)}">'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f'<div style="margin-top:6px;{_MUTED}">{_text(self.footer)}</div>'
            f"{_folded('Printed in the first call', self.printed)}"
            f"{_folded('The whole report', self.details)}</div>"
        )


# Colours are JupyterLab's own, with a fallback for where it is not; a verdict has a ground of its own.
_STYLE = (
    "max-width:900px;margin:4px 0 14px;font-family:var(--jp-ui-font-family,system-ui,sans-serif);"
    "font-size:13px;line-height:1.4;"
    "color:var(--jp-ui-font-color1,inherit);text-align:left"
)
_MUTED = "color:var(--jp-ui-font-color2,inherit);font-size:12px"
_TITLE = "font-weight:600;margin-bottom:6px"
_TABLE = "border-collapse:collapse;width:100%;margin:0;font-size:13px;table-layout:fixed"
_WIDTHS = ("26px", "auto", "30%", "15%", "56px")
_PRE = "white-space:pre-wrap;font-size:12px;margin:4px 0;color:inherit;background:transparent"
_LINE = "border-bottom:1px solid var(--jp-border-color2,#8886)"
_HEAD = f"text-align:left;font-weight:600;padding:4px 8px;{_LINE}"
_CELL = f"text-align:left;vertical-align:top;padding:5px 8px;white-space:normal;{_LINE}"
_BADGES = {  # verdict: ground, ink, sign, name
    True: ("#1a7f37", "#ffffff", "✓", "holds"),
    False: ("#c4202c", "#ffffff", "✗", "does not hold"),
    None: ("#6e7781", "#ffffff", "–", "not judged"),
}
_COLUMNS = ("", "what must hold", "measured", "should be", "points")


def _row(line: Line) -> str:
    """A row; where several things were measured for one claim, each stands beside what it should be."""
    message = f'<div style="margin-top:2px">{_text(line.message)}</div>' if line.message else ""
    pairs = line.pairs or [("", "")]
    across = f' rowspan="{len(pairs)}"' if len(pairs) > 1 else ""
    rows = ""
    for number, pair in enumerate(pairs):
        style = _CELL if number == len(pairs) - 1 else f"{_CELL};border-bottom:none;padding-bottom:0"
        style = style if number == 0 else f"{style};padding-top:0"
        cells = "".join(f'<td style="{style}">{_text(each)}</td>' for each in pair)
        if number == 0:
            cells = (
                f'<td{across} style="{_CELL}">{_badge(line.passed)}</td>'
                f'<td{across} style="{_CELL}"><b>{_text(line.what)}</b>{message}</td>{cells}'
                f'<td{across} style="{_CELL};white-space:nowrap">{line.points:g} / {line.possible:g}</td>'
            )
        rows += f"<tr>{cells}</tr>"
    return rows


def _badge(state: bool | None) -> str:
    ground, ink, sign, name = _BADGES[state]
    return (
        f'<span role="img" aria-label="{name}" title="{name}" style="display:inline-block;min-width:18px;'
        f'text-align:center;border-radius:4px;background:{ground};color:{ink};font-weight:700">{sign}</span>'
    )


def _folded(name: str, text: str) -> str:
    if not text:
        return ""
    return (
        f'<details style="margin-top:6px"><summary>{name}</summary>'
        f'<pre style="{_PRE}">{_text(text)}</pre></details>'
    )


def _text(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="      ", subsequent_indent="      ")
