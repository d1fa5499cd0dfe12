"""What the child process of a check is asked to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lessons_lib.machines import Machine

TRIAL_S = 5.0  # after which a trial that still runs is stopped, and the line it is at is told


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
