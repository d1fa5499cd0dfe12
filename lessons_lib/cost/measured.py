"""Predictions beside what a step of the GPT is found to hold and to take, and a name for every difference.

>>> rows = memory_of_a_step(GPTConfig(L=2, H=2, D=8, S=4), n_sequences=2, stage=3, dp=2)
>>> for row in rows[:4]:
...     print(f"{row.kind}: {row.predicted:,} predicted, {row.measured:,} measured")
parameters: 23,552 predicted, 23,552 measured
gradients: 23,552 predicted, 23,552 measured
state: 47,104 predicted, 47,104 measured
activations: 34,736 predicted, 34,736 measured
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lessons_lib.cost.activations import kept
from lessons_lib.cost.flops import step_flops
from lessons_lib.cost.memory import RECIPES, model_states
from lessons_lib.data_parallel.stages import padded
from lessons_lib.data_parallel.zero import Zero, units_of
from lessons_lib.machines import Machine, machine
from lessons_lib.mesh import Mesh
from lessons_lib.models import corpus
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.models.recompute import keep_scores, recompute
from lessons_lib.spmd import compute, region, run

FREE = Machine("free")  # on which only `compute` takes time: its seconds number the phases of a step
DTYPE, RECIPE = torch.float64, RECIPES["fp64 adam"]


class Row(NamedTuple):
    """Bytes on rank 0, by prediction and by measurement."""

    kind: str
    predicted: int
    measured: int
    difference: str  # its name; empty where there is none


def memory_of_a_step(
    config: GPTConfig,
    n_sequences: int,
    stage: int,
    dp: int,
    attention: str = "fused",
    what_again: str = "none",
) -> list[Row]:
    """What a rank with ``n_sequences`` of its own holds in a step with AdamW, in float64, by kind."""
    result = run(
        _step,
        config,
        n_sequences,
        stage,
        dp,
        attention,
        what_again,
        ranks=dp,
        record="memory",
        machine=FREE,
    )
    held: Mapping[str, int] = result.values[0]
    before, after_forward = (live_bytes(result.trace.live_bytes[0], phase)[-1] for phase in (1, 2))
    peak = max(n for phase in (2, 3, 4) for n in live_bytes(result.trace.live_bytes[0], phase))
    states = model_states(padded_parameters(config, dp), stage, dp, RECIPE)
    counters = 4 * len(units_of(_on_meta(config)))
    activations = sum(kept(config, n_sequences, DTYPE.itemsize, 1, attention, what_again).values())
    everything = int(sum(states.values())) + activations
    others = before - held["parameters"] - held["state"]  # the text that is trained on, for one
    return [
        Row("parameters", int(states["parameters"]), held["parameters"], ""),
        Row("gradients", int(states["gradients"]), held["gradients"], ""),
        Row("state", int(states["state"]), held["state"] - counters, ""),
        Row("activations", activations, after_forward - before, ""),
        Row("step counters", counters, counters, ""),
        Row("peak", everything, peak - others, "buffers, and what the backward of a block works with"),
    ]


def live_bytes(curve: Sequence[tuple[float, int]], phase: int) -> list[int]:
    """The bytes that were live in one phase of a step, beginning with those it was entered with."""
    entered = [n for time, n in curve if time < phase][-1:]
    return entered + [n for time, n in curve if phase <= time < phase + 1]


def padded_parameters(config: GPTConfig, n_ranks: int) -> int:
    """The parameters of the GPT with the padding of its units."""
    model = _on_meta(config)
    return sum(padded(sum(p.numel() for p in unit.parameters()), n_ranks) for unit in units_of(model))


def _on_meta(config: GPTConfig) -> nn.Module:
    with torch.device("meta"):
        return GPT(config)


def _prepared(config: GPTConfig, attention: str, what_again: str) -> GPT:
    model = GPT(config).to(DTYPE)
    return recompute(keep_scores(model) if attention == "scores" else model, what_again)


def _step(
    config: GPTConfig, n_sequences: int, stage: int, dp: int, attention: str, what_again: str
) -> dict[str, int]:
    """Two steps, of which the second is looked at: phase 1 before it, 2 forward, 3 backward, 4 update."""
    group, model = Mesh(dp=dp)["dp"], _prepared(config, attention, what_again)
    zero = Zero(model, stage, group, partial(AdamW, lr=1e-3, foreach=False))
    tokens, targets = corpus.batch(group.rank, n_sequences, config.S)
    n_tokens = dp * tokens.numel()
    (model.loss_sum(tokens, targets) / n_tokens).backward()
    zero.step()
    zero.zero_grad()
    compute(2.0)
    loss: Tensor = model.loss_sum(tokens, targets) / n_tokens
    compute(1.0)
    loss.backward()
    zero.reduce()
    held = zero.stored_bytes()
    compute(1.0)
    zero.update()
    compute(1.0)
    return held


# ---- time


class StepTime(NamedTuple):
    """Seconds of a step on a machine: predicted from its numbers, and measured on its virtual clock."""

    compute_s: float  # FLOPs / FLOP/s
    communication_s: float  # of all collectives, one after the other
    measured_s: float

    @property
    def overlapped_s(self) -> float:
        """What communication did not cost, because ranks computed meanwhile: names the whole difference."""
        return self.compute_s + self.communication_s - self.measured_s


def time_of_a_step(config: GPTConfig, n_sequences: int, stage: int, dp: int, on: Machine | str) -> StepTime:
    """A step of ``dp`` ranks with ``n_sequences`` each, on a machine.

    >>> time = time_of_a_step(GPTConfig(L=4, H=2, D=32, S=16), n_sequences=4, stage=3, dp=4, on="4xV100")
    >>> time.overlapped_s > 0 and time.measured_s > time.compute_s
    True
    """
    hardware = machine(on) if isinstance(on, str) else on
    trace = run(_timed_step, config, n_sequences, stage, dp, ranks=dp, machine=hardware).trace
    communication_s = sum(
        hardware.collective_s(event.kind, event.n_elements * DTYPE.itemsize, event.members)
        for event in trace.collectives(0, "step")
    )
    compute_s = hardware.compute_s(step_flops(config, n_sequences))
    return StepTime(compute_s, communication_s, trace.timeline.makespan)


def _timed_step(config: GPTConfig, n_sequences: int, stage: int, dp: int) -> None:
    group, model = Mesh(dp=dp)["dp"], GPT(config).to(DTYPE)
    zero = Zero(model, stage, group, partial(AdamW, lr=1e-3, foreach=False))
    tokens, targets = corpus.batch(group.rank, n_sequences, config.S)
    with region("step"):
        (model.loss_sum(tokens, targets) / (dp * tokens.numel())).backward()
        zero.step()
