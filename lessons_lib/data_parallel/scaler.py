"""A loss scale for half precision, on which all ranks agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lessons_lib.errors import RefusedError


@dataclass
class LossScaler:
    """Multiply the loss so that small gradients do not vanish in half precision; skip steps that overflow.

        loss = scaler.scale * loss              before backward
        norm = global_norm(...) / scaler.scale  the same on every rank
        if scaler.accepts(norm): update(clip(norm, most) / scaler.scale)

    >>> scaler = LossScaler(scale=1024.0, growth_interval=2)
    >>> [(scaler.accepts(norm), scaler.scale) for norm in (1.0, float("inf"), 1.0, 1.0)]
    [(True, 1024.0), (False, 512.0), (True, 512.0), (True, 1024.0)]

    A step is left out by all ranks or by none: an overflow on one rank makes the global norm infinite on all.
    The norm of a rank's own gradients would let ranks decide differently, and their parameters part.
    Source: Micikevicius et al. 2018 (Mixed Precision Training), section 3.2.
    """

    scale: float = 65536.0
    growth_interval: int = 2000  # steps without overflow, after which the scale doubles
    n_good: int = 0  # such steps since it last changed

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf or self.growth_interval < 1:
            raise RefusedError(
                f"LossScaler(scale={self.scale}, growth_interval={self.growth_interval}): the scale is above "
                "0 and finite, the interval 1 step or more."
            )

    def accepts(self, norm: float) -> bool:
        """Whether the step is to be taken; adapts the scale for the next one."""
        if not math.isfinite(norm):
            self.scale, self.n_good = self.scale / 2, 0
            return False
        self.n_good += 1
        if self.n_good == self.growth_interval:
            self.scale, self.n_good = self.scale * 2, 0
        return True
