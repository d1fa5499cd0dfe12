"""Explorer 2: a collective, round by round."""

from __future__ import annotations

from lessons_lib.views import Figure
from lessons_lib.views.steps import collective_step
from lessons_lib.widgets.explorer import Choice, Explorer, Slider, Values
from lessons_lib.widgets.recorded import COLLECTIVES, MOST_RANKS, record


def collective_stepper(
    collective: str = "ring all-reduce", ranks: int = 4, step: int = 2, *, theme: str = "light"
) -> Explorer:
    """Step through a collective that really ran: what each rank holds, what travels, what was sent.

    >>> print(collective_stepper(step=6).figure.alt)
    Ring all-reduce on 4 ranks after round 6 of 6: copy, every rank holds the whole result; \
...192 bytes sent per rank, 768 by all.

    The collectives are those of :mod:`lessons_lib.rings`, and the naive star, each run on ``ranks`` thread
    ranks. It opens halfway through the first half of a ring: when will some chunk be complete, and where?
    Raises RefusedError for a collective it does not know, or another number of ranks than 2 to 16.
    """

    def draw(collective: str, ranks: int, step: int) -> Figure:
        return collective_step(record(collective, ranks), step, theme=theme)

    def limits(values: Values) -> dict[str, int]:
        return {"step": len(record(values["collective"], values["ranks"]).rounds)}

    return Explorer(
        draw,
        {
            "collective": Choice("Collective", list(COLLECTIVES)),
            "ranks": Slider("Ranks", 2, MOST_RANKS),
            "step": Slider("Round", 0, 2 * (MOST_RANKS - 1)),
        },
        start={"collective": collective, "ranks": ranks, "step": step},
        settings={
            "the ring is cut": {"collective": "ring all-reduce", "ranks": 8, "step": 7},
            "all through one rank": {"collective": "star all-reduce", "ranks": 8, "step": 7},
        },
        limits=limits,
    )
