"""What a learner has done, in one file on this machine: nothing is sent anywhere.

The file is ``my_work/progress.json`` beside the course, which git ignores; where the library is installed
without the course, it is in the user's folder. ``LESSONS_PROGRESS`` names another one, or ``off``.
"""

from __future__ import annotations

import csv
import html
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lessons_lib.grading.report import Report

COURSE = Path(__file__).parents[2]
VARIABLE = "LESSONS_PROGRESS"


def place() -> Path | None:
    """Where the file is, or would be; ``None`` if it is switched off."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        return None if asked == "off" else Path(asked)
    if (COURSE / "exercises").is_dir():
        return COURSE / "my_work" / "progress.json"
    return Path.home() / ".shards_and_bubbles" / "progress.json"


def read() -> dict[str, Any]:
    """What the file says: ``{"exercises": {id: record}, "guesses": {question: letter}}``."""
    empty: dict[str, Any] = {"exercises": {}, "guesses": {}}
    file = place()
    if file is None:
        return empty
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return empty
    return empty | found if isinstance(found, dict) else empty


def _write(what: Mapping[str, Any]) -> None:
    """Write the file, in one step; a folder that cannot be written to is no reason to fail."""
    file = place()
    if file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(what, indent=1), encoding="utf-8")
        draft.replace(file)


def note_check(report: Report) -> None:
    """Keep the best result of an exercise, when it was reached, and how often it was checked."""
    what = read()
    before = what["exercises"].get(report.id, {"points": -1.0, "checks": 0, "passed": ""})
    best = max(before["points"], report.points)
    today = time.strftime("%Y-%m-%d")
    what["exercises"][report.id] = {
        "points": best,
        "possible": report.possible,
        "checks": before["checks"] + 1,
        "last": today,
        "passed": before["passed"] or (today if report.passed else ""),
    }
    _write(what)


def note_guess(question: str, letter: str) -> None:
    what = read()
    what["guesses"][question] = letter
    _write(what)


@dataclass(frozen=True)
class Progress:
    """A table of the exercises and what has been reached in them."""

    records: tuple[dict[str, Any], ...]
    file: Path | None

    def save(self, path: str | Path) -> None:
        """Export the table: ``.csv`` for a spreadsheet, anything else as JSON."""
        if str(path).endswith(".csv"):
            with open(path, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, fieldnames=list(self.records[0]))
                writer.writeheader()
                writer.writerows(self.records)
        else:
            Path(path).write_text(json.dumps(list(self.records), indent=1), encoding="utf-8")

    @property
    def headline(self) -> str:
        passed = sum(record["state"] == "passed" for record in self.records)
        points = sum(record["points"] for record in self.records)
        possible = sum(record["possible"] for record in self.records)
        return f"{passed} of {len(self.records)} exercises passed, {points:g} of {possible:g} points"

    @property
    def footer(self) -> str:
        if self.file is None:
            return f"Nothing is kept: {VARIABLE} is off."
        return f"Kept in {self.file}, and nowhere else. progress().save('progress.csv') exports it."

    def __str__(self) -> str:
        rows = [self.headline, ""]
        for record in self.records:
            points = f"{record['points']:g}/{record['possible']:g}"
            rows.append(f"  {record['exercise']:18}{record['title']:34}{points:>8}  {record['state']}")
        return "\n".join([*rows, "", self.footer])

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        cell = "text-align:left;padding:3px 10px"
        rows = "".join(
            f'<tr><td style="{cell}">{record["lesson"]}</td><td style="{cell}">{record["exercise"]}</td>'
            f'<td style="{cell}">{html.escape(record["title"])}</td>'
            f'<td style="{cell}">{record["points"]:g} / {record["possible"]:g}</td>'
            f'<td style="{cell}">{record["state"]}</td></tr>'
            for record in self.records
        )
        names = "".join(
            f'<th scope=col style="{cell}">{name}</th>'
            for name in ("lesson", "exercise", "", "points", "state")
        )
        table = (
            f"<div><b>{self.headline}</b><table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>"
            f"{html.escape(self.footer)}</div>"
        )
        return {"text/plain": str(self), "text/html": table}


def progress() -> Progress:
    """Show what has been reached so far in every exercise.

    >>> progress().records[0]["exercise"]
    '00-relay'
    """
    from lessons_lib.grading.catalogue import EXERCISES

    kept = read()["exercises"]
    records = []
    for exercise in EXERCISES.values():
        mine = kept.get(exercise.id)
        state = "not begun"
        if mine:
            state = "passed" if mine["passed"] else "begun"
        records.append(
            {
                "lesson": exercise.lesson,
                "exercise": exercise.id,
                "title": exercise.title,
                "points": mine["points"] if mine else 0.0,
                "possible": exercise.points,
                "checks": mine["checks"] if mine else 0,
                "last": mine["last"] if mine else "",
                "state": state,
            }
        )
    return Progress(tuple(records), place())
