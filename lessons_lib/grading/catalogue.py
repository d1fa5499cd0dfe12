"""All exercises, by their id."""

from __future__ import annotations

from difflib import get_close_matches

from lessons_lib.errors import RefusedError
from lessons_lib.grading import (
    lesson_00,
    lesson_01,
    lesson_02,
    lesson_03,
    lesson_04,
    lesson_05,
    lesson_06,
    lesson_07,
    lesson_08,
    lesson_09,
    lesson_10,
    lesson_11,
    lesson_12,
    lesson_13,
    lesson_14,
    lesson_15,
    lesson_16,
    lesson_17,
    lesson_18,
    lesson_19,
)
from lessons_lib.grading.exercise import Exercise

EXERCISES: dict[str, Exercise] = {
    exercise.id: exercise
    for lesson in (
        lesson_00,
        lesson_01,
        lesson_02,
        lesson_03,
        lesson_04,
        lesson_05,
        lesson_06,
        lesson_07,
        lesson_08,
        lesson_09,
        lesson_10,
        lesson_11,
        lesson_12,
        lesson_13,
        lesson_14,
        lesson_15,
        lesson_16,
        lesson_17,
        lesson_18,
        lesson_19,
    )
    for exercise in lesson.EXERCISES
}


def find(id: str) -> Exercise:
    """The exercise with this id, or a RefusedError that names near ones.

    >>> find("08-row").names
    ['row_forward', 'row_backward']
    """
    if id in EXERCISES:
        return EXERCISES[id]
    near = get_close_matches(str(id), EXERCISES, n=3, cutoff=0.5)
    near = near or [name for name in EXERCISES if name[:2] == str(id)[:2]] or list(EXERCISES)
    raise RefusedError(f"there is no exercise {id!r}. Did you mean {' or '.join(map(repr, near))}?")
