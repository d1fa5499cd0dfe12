"""Stages for the executor's tests, trained serially and on ranks.

Widths differ from border to border, weights and micro-batches are random, and micro-batches are uneven.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from lessons_lib import Mesh
from lessons_lib.pipeline_parallel import cut_batch, execute

WIDTHS = (3, 5, 7, 4, 6)  # between stages, over and over


class Layer(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(n_in), nn.Linear(n_in, n_out)

    def forward(self, x):
        return torch.tanh(self.linear(self.norm(x)))


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chain(n_stages):
    """All stages of the model."""
    ends = [WIDTHS[at % len(WIDTHS)] for at in range(n_stages + 1)]
    stages = [Layer(a, b).double() for a, b in pairwise(ends)]
    with torch.no_grad():
        for seed, p in enumerate(p for stage in stages for p in stage.parameters()):
            p.copy_(drawn(*p.shape, seed=seed))
    return stages


def data(n_stages, n_rows, step=0):
    """Inputs and targets of a step."""
    n_out = WIDTHS[n_stages % len(WIDTHS)]
    return drawn(n_rows, WIDTHS[0], seed=1000 + step), drawn(n_rows, n_out, seed=2000 + step)


def squares(Y, T):
    return (Y - T).square().sum()


def gradients(stages):
    """By stage and name."""
    named = ((number, *pair) for number, stage in stages.items() for pair in stage.named_parameters())
    return {f"{number}.{name}": p.grad for number, name, p in named}


def serially_trained(n_stages, n_rows, steps):
    """The loss of each step, and the gradients of all steps added up."""
    stages, losses = chain(n_stages), []
    for step in range(steps):
        Y, T = data(n_stages, n_rows, step)
        for stage in stages:
            Y = stage(Y)
        loss = (Y - T).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(dict(enumerate(stages)))


def trained(schedule, n_rows, steps, loss=squares, **options):
    """The same on this rank, by a schedule."""
    group = Mesh(pp=schedule.n_ranks)["pp"]
    every = chain(schedule.n_stages)
    stages = {number: every[number] for number in schedule.stages[group.rank]}
    losses = []
    for step in range(steps):
        batch = cut_batch(*data(schedule.n_stages, n_rows, step), schedule.n_microbatches)
        losses.append(execute(schedule, stages, batch, loss, group, **options).loss)
    return losses, gradients(stages)


def assert_as_serial(expected, schedule, values, tolerance=1e-10):
    """Every rank has the loss, and the gradients of all parameters of its stages."""
    losses, whole = expected
    for rank, (found, own) in enumerate(values):
        assert found == values[0][0], f"rank {rank} has another loss"
        for a, b in zip(found, losses, strict=True):
            assert abs(a - b) <= tolerance * abs(b), f"the loss is {a}, not {b}"
        names = {name for name in whole if int(name.split(".")[0]) in schedule.stages[rank]}
        assert own.keys() == names and names
        for name, gradient in own.items():
            assert gradient is not None, f"rank {rank}: {name} has no gradient"
            error = ((gradient - whole[name]).norm() / whole[name].norm()).item()
            assert error <= tolerance, f"rank {rank}: {name} has a relative error of {error:.0e}"
