"""Explorer 1: two pipeline schedules on one time axis."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel import SCHEDULES, PipelineTimeline, Times, simulate
from lessons_lib.views import Figure
from lessons_lib.views.pipeline import pipeline_picture
from lessons_lib.widgets.explorer import Choice, Explorer, Slider, Toggle, Values

LATENCIES = ("0", "0.1", "0.25", "0.5", "1")  # in units of a rank's forward
NOTHING = "nothing"
SHOWN = [name for name in SCHEDULES if not name.startswith("pipedream")]  # those that end with all updates


def pipeline_explorer(
    first: str = "gpipe", second: str = "1f1b", m: int = 8, latency: str = "0", *, theme: str = "light"
) -> Explorer:
    """Compare two schedules for the same model and batch, of which each rank has an equal share.

    >>> print(pipeline_explorer(m=12).figure.title)
    GPipe and 1F1B

    A rank's whole share takes 1 for F, for I and for W, so with v chunks an action takes 1/v of that; a
    message takes ``latency`` to arrive. The axis ends where the longest run does that the sliders can show,
    and stays there. It opens with a question: the bubble is the same, so what does 1F1B buy?
    Raises RefusedError for a schedule or a latency it does not know, or for m that a schedule cannot have.
    """
    for name in (first, second):
        if name not in (*SHOWN, NOTHING):
            raise RefusedError(f"no schedule {name!r} to explore; there are {', '.join(SHOWN)}.")
    if latency not in LATENCIES:
        raise RefusedError(f"latency={latency!r}: choose one of {', '.join(LATENCIES)}.")

    def draw(
        first: str, second: str, m: int, latency: str, eight_ranks: bool, free_w: bool, path: bool
    ) -> Figure:
        names = [first] if second == NOTHING else [first, second]
        p, W = n_ranks(eight_ranks), int(not free_w)
        timelines = [timeline(name, p, m, latency, W) for name in names]
        until = max(axis_end(name, p, W) for name in names)
        return pipeline_picture(*timelines, theme=theme, critical_path=path, until=float(until))

    def limits(values: Values) -> dict[str, int]:
        return {"m": most_microbatches(n_ranks(values["eight_ranks"]))}

    return Explorer(
        draw,
        {
            "first": Choice("Schedule", SHOWN),
            "second": Choice("compared with", [*SHOWN, NOTHING]),
            "m": Slider("Micro-batches", 1, most_microbatches(8)),
            "latency": Choice("Latency of a message", LATENCIES),
            "eight_ranks": Toggle("8 ranks"),
            "free_w": Toggle("W takes no time"),
            "path": Toggle("what decides the end"),
        },
        start={"first": first, "second": second, "m": m, "latency": latency}
        | dict.fromkeys(("eight_ranks", "free_w", "path"), False),
        settings={
            "slow messages": {"first": "gpipe", "second": "1f1b", "latency": "1"},
            "split the backward": {"first": "1f1b", "second": "zb-h1", "latency": "0"},
        },
        limits=limits,
    )


def n_ranks(eight_ranks: bool) -> int:
    return 8 if eight_ranks else 4


def most_microbatches(p: int) -> int:
    return max(12, 2 * p)


@cache
def timeline(name: str, p: int, m: int, latency: str, W: int) -> PipelineTimeline:
    """Simulate a schedule whose ranks each have 1/p of one model, in however many chunks.

    >>> [int(timeline(name, 4, 8, "0.5", 1).makespan) for name in ("gpipe", "1f1b")]
    [36, 41]
    """
    schedule = SCHEDULES[name](p, m)
    part = Fraction(schedule.n_ranks, schedule.n_stages)  # of a rank's share that one action does
    times = Times(F=part, I=part, W=W * part, send=Fraction(latency))
    return simulate(schedule, times)


@cache
def axis_end(name: str, p: int, W: int) -> Fraction:
    """When the longest run of a schedule ends that the controls can show."""
    return Fraction(timeline(name, p, most_microbatches(p), LATENCIES[-1], W).makespan)
