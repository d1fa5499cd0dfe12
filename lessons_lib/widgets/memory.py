"""Explorer 4: what fills the memory of a rank, and what ZeRO takes out of it."""

from __future__ import annotations

from functools import cache

from lessons_lib.cost.measured import memory_of_a_step
from lessons_lib.models.gpt import GPTConfig
from lessons_lib.views import Figure
from lessons_lib.views.kinds import KINDS, Filled, memory_bars
from lessons_lib.widgets.explorer import Choice, Explorer, Slider

MODEL = GPTConfig(L=1, H=2, D=16, S=16)
RANKS = ("1", "2", "4", "8")
AGAIN = ("none", "selective", "full")
MOST_SEQUENCES = 4
STAGES = {0: "data parallel", 1: "ZeRO 1", 2: "ZeRO 2", 3: "ZeRO 3"}


def memory_explorer(
    ranks: str = "4", sequences: int = 2, recompute: str = "none", *, theme: str = "light"
) -> Explorer:
    """See what a rank holds at each stage of ZeRO: by formula, and as measured on ranks that train a GPT.

    >>> explorer = memory_explorer("2", 1)
    >>> print(explorer.figure.title)
    What a rank of 2 holds, with 1 sequence of its own

    Every change trains the GPT on that many ranks for a step, at all four stages, in float64 with AdamW. The
    model is small; the shares are those of a large one with as many tokens for each of its parameters.
    Recomputation acts where attention keeps its scores, so here they are kept. It opens with a question:
    which of the four kinds does no stage of ZeRO touch?
    """

    def draw(ranks: str, sequences: int, recompute: str) -> Figure:
        bars = [filled(int(ranks), sequences, recompute, stage) for stage in STAGES]
        its_own = "1 sequence" if sequences == 1 else f"{sequences} sequences"
        return memory_bars(
            bars,
            until=axis_end(),
            title=f"What a rank of {ranks} holds, with {its_own} of its own",
            subtitle="Bars are what formulas predict; ticks were measured in a step of these ranks.",
            theme=theme,
        )

    return Explorer(
        draw,
        {
            "ranks": Choice("Ranks", RANKS),
            "sequences": Slider("Sequences per rank", 1, MOST_SEQUENCES),
            "recompute": Choice("Recomputation", AGAIN),
        },
        start={"ranks": ranks, "sequences": sequences, "recompute": recompute},
        settings={
            "as many ranks as there are": {"ranks": "8", "sequences": 2, "recompute": "none"},
            "what ZeRO cannot": {"ranks": "8", "sequences": 4, "recompute": "full"},
        },
    )


@cache
def filled(ranks: int, sequences: int, recompute: str, stage: int) -> Filled:
    """What a rank holds at a stage, predicted and measured."""
    rows = memory_of_a_step(MODEL, sequences, stage, ranks, "scores", recompute)
    return Filled(
        STAGES[stage], tuple((row.kind, row.predicted, row.measured) for row in rows if row.kind in KINDS)
    )


@cache
def axis_end() -> float:
    """A little more than the most that the controls can show."""
    return 1.05 * filled(1, MOST_SEQUENCES, "none", 0).predicted
