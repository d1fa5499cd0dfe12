"""Curves: the one kind of picture that matplotlib draws."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lessons_lib.views.colours import RANK_COLOURS


@dataclass(frozen=True)
class Curves:
    """A drawn picture and the sentence that says what it shows."""

    png: bytes
    alt: str

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/png": base64.b64encode(self.png).decode(), "text/plain": self.alt}


def loss_curves(losses: Mapping[str, Sequence[float]]) -> Curves:
    """Draw the loss of every step, one curve for each training, the first one broad under the others.

    Where two trainings agree, the second runs inside the first.

    >>> print(loss_curves({"1 rank": [5.5, 4.0, 3.0], "4 ranks": [5.5, 4.0, 3.0]}).alt)
    Training loss over 3 steps: 1 rank falls from 5.50 to 3.00, 4 ranks falls from 5.50 to 3.00.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    for number, (name, values) in enumerate(losses.items()):
        broad: dict[str, Any] = {"linewidth": 7, "alpha": 0.35} if number == 0 else {"linewidth": 1.5}
        axes.plot(range(1, len(values) + 1), values, color=RANK_COLOURS[number], label=name, **broad)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    ends = [f"{name} falls from {values[0]:.2f} to {values[-1]:.2f}" for name, values in losses.items()]
    n_steps = max(len(values) for values in losses.values())
    return Curves(image.getvalue(), f"Training loss over {n_steps} steps: {', '.join(ends)}.")
