"""How long actions and messages take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any

from lessons_lib.errors import RefusedError

Number = int | float | Fraction
PerStage = Number | Sequence[Number]


@dataclass(frozen=True)
class Times:
    """How long actions and messages take, in any unit.

    >>> Times(F=1, I=1.5, W=1).durations(n_stages=2)["B"]
    [2.5, 2.5]

    Times are per action: with v chunks an action is 1/v of a rank's stage. A time may be one number for all
    stages or a list with one for each. ``B`` takes I + W unless given. An overlapped pair takes ``FB``, which
    is F + B unless given; where it differs from stage to stage, that of its backward counts. A message keeps
    its link busy for ``message_bytes / bandwidth``, those behind it wait, and arrives ``send`` later.
    """

    F: PerStage = 1
    I: PerStage = 1
    W: PerStage = 1
    send: Number = 0
    B: PerStage | None = None
    FB: PerStage | None = None
    U: PerStage = 0
    message_bytes: int = 0
    bandwidth: Number = math.inf

    def __post_init__(self) -> None:
        for name in ("send", "message_bytes", "bandwidth"):
            if not getattr(self, name) >= 0 or (name == "bandwidth" and not self.bandwidth):
                raise RefusedError(
                    f"{name}={getattr(self, name)!r}: give a number from 0 on (bandwidth: above 0)."
                )

    def durations(self, n_stages: int) -> dict[str, list[Number]]:
        """For each kind of action, how long it takes on each stage; ``FB`` only if it is given."""
        found = {kind: self._per_stage(kind, n_stages) for kind in "FIWU"}
        both = zip(found["I"], found["W"], strict=True)
        found["B"] = [i + w for i, w in both] if self.B is None else self._per_stage("B", n_stages)
        if self.FB is not None:
            found["FB"] = self._per_stage("FB", n_stages)
        return found

    def _per_stage(self, kind: str, n_stages: int) -> list[Number]:
        given = getattr(self, kind)
        times = list(given) if isinstance(given, Sequence) else [given] * n_stages
        if len(times) != n_stages:
            raise RefusedError(
                f"{kind} has {len(times)} times, and there are {n_stages} stages: give one for each."
            )
        if not all(0 <= time < math.inf for time in times):
            raise RefusedError(f"{kind}={given!r}: a time is a number from 0 on.")
        return times

    @property
    def on_link(self) -> Number:
        """How long a message keeps its link busy."""
        if self.bandwidth == math.inf or not self.message_bytes:
            return 0
        exact = isinstance(self.bandwidth, Rational)
        return Fraction(self.message_bytes) / self.bandwidth if exact else self.message_bytes / self.bandwidth


@dataclass(frozen=True)
class Ticks:
    """Times as whole numbers of ticks, each ``length`` long.

    With a float among them nothing is exact anyway: then they stay as they are, and a tick is 1.
    """

    durations: dict[str, list[Any]]
    send: Any
    on_link: Any
    length: Number

    @classmethod
    def of(cls, times: Times, n_stages: int) -> Ticks:
        durations = times.durations(n_stages)
        everything = [
            *(time for of_kind in durations.values() for time in of_kind),
            times.send,
            times.on_link,
        ]
        if not all(isinstance(time, Rational) for time in everything):
            return cls(durations, times.send, times.on_link, 1)
        per_unit = math.lcm(*(Fraction(time).denominator for time in everything))
        whole = {kind: [int(time * per_unit) for time in of_kind] for kind, of_kind in durations.items()}
        return cls(
            whole, int(times.send * per_unit), int(times.on_link * per_unit), neat(Fraction(1, per_unit))
        )


def neat(number: Any) -> Number:
    """A fraction that is whole, as an int.

    >>> neat(Fraction(4, 2)), neat(Fraction(1, 2)), neat(0.5)
    (2, Fraction(1, 2), 0.5)
    """
    return int(number) if isinstance(number, Fraction) and number.denominator == 1 else number
