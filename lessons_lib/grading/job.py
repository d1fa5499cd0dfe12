"""What the child process of a check is asked to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lessons_lib.machines import Machine

TRIAL_S = 5.0  # after which a trial that still runs is stopped, and the line it is at is told
MOST_PATIENCE = 6.0


def patience() -> float:
    """How many times longer than on an idle machine to wait: with twice as much to do as cores, twice.

    >>> 1.0 <= patience() <= MOST_PATIENCE
    True
    """
    with suppress(OSError, AttributeError):  # Windows does not say
        return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), MOST_PATIENCE)
    return 1.0


@dataclass(frozen=True)
class Call:
    """What the child needs of a trial: everything but what is right."""

    function: str
    sizes: Mapping[str, int]
    args: list[bytes]  # by rank, so that no rank has the tensors of the others
    upstream: list[bytes] | None
    turns: int  # the seed of the order in which ranks take turns
    machine: Machine | None = None  # whose clock counts
    then: Callable[..., Any] | None = None  # what every rank makes of what the function returned


@dataclass(frozen=True)
class Job:
    functions: bytes  # by value: {name: function}
    calls: list[Call]
    cells: dict[str, tuple[str, str]]
    path: list[str]
    working_directory: str
    trial_s: float  # how long a trial may take
