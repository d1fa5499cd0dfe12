"""Schedules as a picture, in one call: simulate, then draw."""

from __future__ import annotations

from typing import Any

from lessons_lib.pipeline_parallel.actions import Schedule
from lessons_lib.pipeline_parallel.simulate import simulate
from lessons_lib.pipeline_parallel.times import Times
from lessons_lib.views.pipeline import pipeline_picture
from lessons_lib.views.svg import Figure


def draw(*schedules: Schedule, times: Times = Times(), **options: Any) -> Figure:
    """Draw schedules below each other on one time axis, all with the same times.

    >>> from lessons_lib.pipeline_parallel import gpipe, one_f_one_b
    >>> draw(gpipe(4, 8), one_f_one_b(4, 8), times=Times(F=1, I=1, W=0)).title
    'GPipe and 1F1B'

    ``options`` are those of :func:`lessons_lib.views.pipeline.pipeline_picture`.
    """
    return pipeline_picture(*(simulate(schedule, times) for schedule in schedules), **options)
