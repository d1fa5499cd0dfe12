"""Curves: the one kind of picture that matplotlib draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # as of ranks, see colours


def loss_curves(losses: Mapping[str, Sequence[float]]) -> Any:
    """Draw the loss of every step, one curve for each training, the first one broad under the others.

    Where two trainings agree, the second runs inside the first. Returns a matplotlib figure, which shows
    itself in a notebook.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, values) in enumerate(losses.items()):
        broad = {"linewidth": 7, "alpha": 0.35} if number == 0 else {"linewidth": 1.5}
        axes.plot(range(1, len(values) + 1), values, color=COLOURS[number % 4], label=name, **broad)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"Training loss: {', '.join(losses)}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
