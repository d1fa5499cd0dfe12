"""Explorer 6: a tensor-parallel scheme, product by product."""

from __future__ import annotations

import math

from lessons_lib.errors import RefusedError
from lessons_lib.views import Figure
from lessons_lib.views.scheme_steps import SchemeSteps, scheme_step
from lessons_lib.widgets.explorer import Choice, Explorer, Slider, Values
from lessons_lib.widgets.recorded_schemes import RESULTS, record_scheme

SHOWN: dict[str, tuple[str, dict[str, int]]] = {
    "column on 4": ("column", {"tp": 4}),
    "row on 4": ("row", {"tp": 4}),
    "2D on 2 x 2": ("2d", {"row": 2, "col": 2}),
    "2D on 3 x 3": ("2d", {"row": 3, "col": 3}),
    "2D on 4 x 4": ("2d", {"row": 4, "col": 4}),
    "2.5D on 2 x 2, depth 2": ("2.5d", {"depth": 2, "row": 2, "col": 2}),
    "2.5D on 2 x 2, depth 3": ("2.5d", {"depth": 3, "row": 2, "col": 2}),
    "3D on 2 x 2 x 2": ("3d", {"i": 2, "j": 2, "k": 2}),
    "3D exchanged": ("3d exchanged", {"i": 2, "j": 2, "k": 2}),
}
MOST_RANKS, MOST_STAGES = 16, 5


def scheme_stepper(
    scheme: str = "2D on 3 x 3", result: str = "Y", stage: int = 2, rank: int = 6, *, theme: str = "light"
) -> Explorer:
    """Step through a scheme that really ran: what each rank multiplies, what travels, what it holds.

    >>> print(scheme_stepper("2D on 2 x 2", "Y", stage=1, rank=0).figure.alt)
    2D on row=2, col=2, Y = X · W, stage 1 of 2: X: broadcast over col, from ranks 0 and 2; \
W: broadcast over row, from ranks 0 and 1. Rank 0: X[0,0]: its own block; W[0,0]: its own block; \
Y[0,0]: 1/2 summed; it has sent 648 of 648 elements, and ranks hold 936 elements at rest and at most 1,584.

    It opens in the middle of SUMMA: from which ranks come the last two blocks that rank 6 multiplies?
    Then look at dX: who is summed, and where does the sum go?
    Raises RefusedError for a scheme or a result it does not show.
    """

    def steps(scheme: str, result: str) -> SchemeSteps:
        if scheme not in SHOWN:
            raise RefusedError(f"no scheme {scheme!r} to step through; there are {', '.join(SHOWN)}.")
        name, sizes = SHOWN[scheme]
        return record_scheme(name, tuple(sizes.items()), result)

    def draw(scheme: str, result: str, stage: int, rank: int) -> Figure:
        return scheme_step(steps(scheme, result), stage, rank=rank, theme=theme)

    def limits(values: Values) -> dict[str, int]:
        chosen = steps(values["scheme"], values["result"])
        return {"stage": len(chosen.stages), "rank": math.prod(chosen.sizes.values()) - 1}

    return Explorer(
        draw,
        {
            "scheme": Choice("Scheme", list(SHOWN)),
            "result": Choice("Result", list(RESULTS)),
            "stage": Slider("Stage", 1, MOST_STAGES),
            "rank": Slider("Rank", 0, MOST_RANKS - 1),
        },
        start={"scheme": scheme, "result": result, "stage": stage, "rank": rank},
        settings={
            "the sum over depth": {"scheme": "2.5D on 2 x 2, depth 2", "result": "dW", "stage": 3, "rank": 5},
            "the cube": {"scheme": "3D on 2 x 2 x 2", "result": "Y", "stage": 1, "rank": 2},
        },
        limits=limits,
    )
