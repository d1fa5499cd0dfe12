"""An answer to a puzzle, carried out: real stages on ranks, on the puzzle's clock, beside a serial model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lessons_lib.machines import Link, Machine
from lessons_lib.mesh import Mesh
from lessons_lib.pipeline_parallel.actions import Schedule
from lessons_lib.pipeline_parallel.executor import cut_batch, execute
from lessons_lib.pipeline_parallel.timeline import PipelineTimeline
from lessons_lib.spmd import run

if TYPE_CHECKING:
    from lessons_lib.pipeline_parallel.puzzles import Puzzle

WIDTH, ROWS = 16, 8  # of a stage, and of a micro-batch

Gradients = dict[int, list[Tensor | None]]  # of each stage, in the order of its parameters


@dataclass(frozen=True)
class OnRanks:
    """What became of an answer on ranks."""

    timeline: PipelineTimeline
    error: float  # the largest relative difference of any gradient, on any rank, from the serial one
    bytes_sent: int  # outputs and input gradients, by all ranks together
    peak_bytes: list[int]  # of each rank: the batch, its weights and their gradients, and what it keeps

    def __str__(self) -> str:
        peaks = ", ".join(f"{peak:,}" for peak in self.peak_bytes)
        return (
            f"Executed: done at {self.timeline.makespan:.4g}, still {self.timeline.bubble:.0%} of the time; "
            f"all gradients are the serial ones to {self.error:.0e}; {self.bytes_sent:,} bytes sent; "
            f"peak of each rank {peaks} bytes."
        ).replace("%", " %")


def train_stages(puzzle: Puzzle, schedule: Schedule) -> OnRanks:
    """Train small stages by ``schedule``, and compare every gradient of every rank with the serial model's.

    Actions take the puzzle's times on the virtual clock, and messages what the puzzle says; the tensors,
    their gradients, the bytes and the memory are real.
    """

    X, Y = _batch(puzzle.m)

    def step() -> tuple[PipelineTimeline, Gradients]:
        group = Mesh(pp=puzzle.p)["pp"]
        stages = {stage: _stage(stage) for stage in schedule.stages[group.rank]}
        done = execute(schedule, stages, cut_batch(X, Y, puzzle.m), _squares, group, times=puzzle.times)
        return done.timeline, {stage: _gradients(module) for stage, module in stages.items()}

    machine = Machine("puzzle", in_node=Link(latency_s=float(puzzle.times.send)))
    done = run(step, ranks=puzzle.p, machine=machine, record=("memory",))
    timelines, gradients = zip(*done.values, strict=True)
    expected = _serial_gradients(puzzle.n_stages, X, Y)
    messages = [event for event in done.trace.events if event.kind == "send" and not event.region]
    return OnRanks(
        timelines[0],
        max(_error(found, expected) for found in gradients),
        sum(event.bytes_sent for event in messages),
        [done.trace.peak_bytes(rank) for rank in range(puzzle.p)],
    )


def _stage(number: int) -> nn.Module:
    """A layer and a bend, the same wherever it is made."""
    generator = torch.Generator().manual_seed(number)
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return nn.Sequential(layer, nn.Tanh())


def _batch(m: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m)
    X, Y = torch.randn(2, m * ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return X, Y


def _squares(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().sum()


def _gradients(stage: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in stage.parameters()]


def _serial_gradients(n_stages: int, X: Tensor, Y: Tensor) -> Gradients:
    """The gradients of every parameter of every stage, from the whole batch at once."""
    stages = [_stage(number) for number in range(n_stages)]
    (_squares(nn.Sequential(*stages)(X), Y) / Y.numel()).backward()
    return {number: _gradients(stage) for number, stage in enumerate(stages)}


def _error(found: Gradients, expected: Gradients) -> float:
    """The largest relative error of any gradient; infinite where one is missing."""
    return max(
        float("inf") if mine is None or wanted is None else float((mine - wanted).norm() / wanted.norm())
        for stage, gradients in found.items()
        for mine, wanted in zip(gradients, expected[stage], strict=True)
    )
