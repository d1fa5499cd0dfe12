"""A pipeline schedule as a grid and a picture: ``python -m lessons_lib.schedule zb-v --p 4 --m 8``.

Prints who does what in which order and what that costs, and writes the picture.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel import SCHEDULES, Schedule, Times, draw, simulate, write_grid
from lessons_lib.pipeline_parallel.forms import bubble_form
from lessons_lib.views.pipeline_words import Words, number_text


def main(arguments: Sequence[str] = ()) -> int:
    """Run the command; return its exit status: 0, or 2 where it was refused."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        names = [options.name, *([options.against] if options.against else [])]
        schedules = [_make(name, options.p, options.m, options.v) for name in names]
        times = Times(F=options.F, I=options.I, W=options.W, FB=options.FB, send=options.latency)
        for name, schedule in zip(names, schedules, strict=True):
            _report(name, schedule, times)
        figure = draw(*schedules, times=times, theme=options.theme, critical_path=options.critical_path)
        path = options.picture or Path("-".join(names) + ".svg")
        path.write_text(figure.svg, encoding="utf-8")
    except RefusedError as refusal:
        parser.error(str(refusal))
    except OSError as failure:
        parser.error(
            f"the picture could not be written to {str(path)!r}: {failure.strerror}; try --picture FILE"
        )
    print(f"picture: {path}")
    return 0


def _make(name: str, p: int, m: int, v: int | None) -> Schedule:
    generator = SCHEDULES[name]
    takes_v = [other for other, each in SCHEDULES.items() if "v" in inspect.signature(each).parameters]
    if v is None:
        return generator(p, m)
    if name not in takes_v:
        raise RefusedError(f"--v {v}: {name} has no choice of chunks; {' and '.join(takes_v)} have.")
    return generator(p, m, v)


def _report(name: str, schedule: Schedule, times: Times) -> None:
    timeline = simulate(schedule, times)
    print(f"{schedule.name}\n\n{write_grid(schedule)}\n\n{Words(timeline).sentence}")
    form = bubble_form(name, schedule.n_ranks, schedule.n_microbatches, schedule.n_chunks, times)
    what = {"idle": "longest idle time of a rank", "span": "longest own span less work"}[form.measure]
    if form.value is None:
        print(f"closed form of the {what}: none claimed ({form.why})")
    else:
        print(f"closed form of the {what}: {form.why} = {number_text(form.value)}")
    print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lessons_lib.schedule", description=__doc__)
    parser.add_argument("name", choices=SCHEDULES, metavar="SCHEDULE", help=", ".join(SCHEDULES))
    parser.add_argument("--p", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--m", type=int, default=8, help="micro-batches (default 8)")
    parser.add_argument("--v", type=int, help="chunks per rank, of interleaved and breadth-first (default 2)")
    for kind, what in (("F", "a forward"), ("I", "an input gradient"), ("W", "a weight gradient")):
        parser.add_argument(
            f"--{kind}", type=_time, default=1, metavar="TIME", help=f"time of {what} (default 1)"
        )
    parser.add_argument(
        "--FB", type=_time, metavar="TIME", help="time of an overlapped pair (default F + I + W)"
    )
    parser.add_argument("--latency", type=_time, default=0, metavar="TIME", help="of a message (default 0)")
    parser.add_argument(
        "--against", choices=SCHEDULES, metavar="SCHEDULE", help="a second one, on the same axis"
    )
    parser.add_argument("--critical-path", action="store_true", help="outline what decides the end")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="where to (default SCHEDULE.svg)")
    return parser


def _time(text: str) -> Fraction:
    """An exact time: ``0.1`` is a tenth."""
    try:
        time = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; write a number such as 1, 0.1 or 1/3"
        ) from None
    if time < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0; a time is a number from 0 on")
    return time


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
