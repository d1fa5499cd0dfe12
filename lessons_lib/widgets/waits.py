"""Explorer 3: who waits for whom, moment by moment."""

from __future__ import annotations

from lessons_lib.errors import RunError
from lessons_lib.spmd.result import Run
from lessons_lib.views import Figure
from lessons_lib.views.waits import wait_graph
from lessons_lib.widgets.explorer import Explorer, Slider
from lessons_lib.widgets.moments import change, moments


def wait_explorer(run: Run | RunError, *, theme: str = "light") -> Explorer:
    """Go through a recorded run, or the one that an error came from, up to where it stood still.

    >>> import torch.distributed as dist
    >>> from lessons_lib import run
    >>> try:
    ...     run(lambda: dist.get_rank() == 1 or dist.barrier(), ranks=3)
    ... except RunError as error:
    ...     print(wait_explorer(error).figure.alt)
    <lambda> on 3 ranks, moment 3 of 3: ranks 0 and 2 wait for rank 1 in barrier(), #1 on world, ...; \
rank 1 has returned; ranks 0 and 2 wait in vain for rank 1, which has ended.

    The ranks that report are those that came. Who is at fault is who is missing: marked in red.
    Raises RefusedError for anything else than a run or its error.
    """
    stood = moments(run)
    result = run.run if isinstance(run, RunError) else run
    last = len(stood) - 1

    def draw(moment: int) -> Figure:
        happened = change(stood[moment - 1], stood[moment]) if moment else "every rank begins"
        return wait_graph(
            stood[moment],
            title=f"{result.name} on {result.ranks} ranks",
            subtitle=_sentence((moment == last and _why(result)) or happened),
            moments=stood,
            moment=moment,
            theme=theme,
        )

    first = next((at for at, each in enumerate(stood) if each.waiting), 0)
    return Explorer(
        draw,
        {"moment": Slider("Moment", 0, last)},
        start={"moment": last},
        settings={
            "the first that waits": {"moment": first},
            "one moment before the end": {"moment": max(0, last - 1)},
        },
    )


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def _why(run: Run) -> str:
    """The sentence of a report that says why."""
    lines = str(run.error or "").splitlines()
    return next((line.removeprefix("Why: ") for line in lines if line.startswith("Why: ")), "")
