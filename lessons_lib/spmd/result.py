"""What comes back from a run, and how it shows itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from lessons_lib.spmd.trace import Trace
from lessons_lib.views import Figure, lanes


@dataclass(frozen=True)
class Run:
    """What ``ranks`` ranks returned and did. In a notebook it shows itself as a picture.

    ``values`` holds what each rank returned, in rank order (``None`` for one that did not get so
    far), ``trace`` every communication, ``seconds`` the time the run took on this machine, in which
    thread ranks took turns.
    """

    ranks: int
    values: list[Any]
    endings: tuple[str, ...] = field(repr=False)  # what became of each rank, in a few words
    trace: Trace = field(repr=False)
    seconds: float
    name: str = "run"  # of the function
    transport: str = "threads"
    error: BaseException | None = field(default=None, repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)  # what ranks began and left unfinished
    questions: tuple[str, ...] = field(default=(), repr=False)  # calls that may be in the wrong order

    def picture(self, theme: str = "light") -> Figure:
        """One lane per rank, with messages as arrows and what each returned; the traffic table below."""
        timeline = self.trace.timeline
        name = self.name if len(self.name) <= 36 else f"{self.name[:35]}…"
        who = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        took = f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{self.seconds * 1000:.3g} ms"
        if self.error is not None:
            meaning = _reason(self.error)
        elif self.notes:
            meaning = self.notes[0]
        elif timeline.clock != "measured":
            meaning = "Time on that machine: counted FLOPs over its peak, and what its links take."
        elif self.transport == "threads":
            meaning = (
                "Each lane counts its rank's own time; communication takes none, but is counted in bytes. "
                f"It took {took} here."
            )
        else:
            meaning = f"One process per rank; the whole run took {took}."
        return lanes(
            timeline,
            self.trace.traffic,
            title=f"{name} on {who}, {timeline.clock}",
            subtitle=meaning,
            notes=[(rank, timeline.end_of(rank), ending) for rank, ending in enumerate(self.endings)],
            failed=[rank for rank, ending in enumerate(self.endings) if not ending.startswith("returned")],
            events=[event for event in self.trace.events if math.isfinite(event.done_s)],
            memory=self.trace.live_bytes,
            theme=theme,
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return self.picture()._repr_mimebundle_()


def _reason(error: BaseException) -> str:
    """The one line of a report that says why, or its first."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if line.startswith("Why: ")), lines[0]).removeprefix("Why: ")


def returned(value: Any) -> str:
    """``returned 3.5``, ``returned tensor[64, 64]``, ``returned``: at most some 30 characters.

    >>> returned(None), returned(0.1 + 0.2), returned({"loss": 1.0}), returned("x" * 100)
    ('returned', 'returned 0.3', "returned {'loss': 1.0}", "returned 'xxxxxxxxxxxxxxxxxxxxxx…")
    """
    if value is None:
        return "returned"
    if hasattr(value, "shape") and hasattr(value, "tolist"):
        if math.prod(value.shape) > 4:
            return f"returned {type(value).__name__.lower()}{list(value.shape)}"
        value = value.tolist()
    if not isinstance(value, bool | int | float | complex | str | bytes | tuple | list | dict | set):
        return f"returned {type(value).__name__}"
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return f"returned {text if len(text) <= 24 else f'{text[:23]}…'}"
