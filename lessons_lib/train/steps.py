"""Training steps on a rank, and the same steps beside the serial model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from lessons_lib import plan
from lessons_lib.mesh import Mesh
from lessons_lib.models import corpus
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.spmd import region

TOLERANCE = 1e-10  # the largest relative error that --check lets pass; float64 rounds at 1e-16
WARMUP = 20  # steps in which the learning rate grows from 0 to its value
PROMPT = b"The "


@dataclass(frozen=True, slots=True)
class Settings:
    """What to train, on how many ranks, and how. ``seed`` decides the weights and the batches."""

    config: GPTConfig = GPTConfig()
    tp: int = 4
    steps: int = 200
    n_sequences: int = 16  # per step
    lr: float = 1e-3
    seed: int = 0
    n_sample: int = 200  # bytes to generate at the end
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank has to tell after training."""

    losses: tuple[float, ...]
    elapsed_s: float
    n_parameters: int  # that it holds
    sample: bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    """A loss, or a rank's part of a gradient, beside the serial model's."""

    step: int
    rank: int
    what: str  # "loss", or the name of the parameter
    error: float  # |found - expected| / |expected|

    @property
    def differs(self) -> bool:
        return not self.error <= TOLERANCE  # not a number differs, too


def train_steps(model: GPT, settings: Settings) -> Iterator[Tensor]:
    """Train ``model``, which may be serial or a rank's part, and yield the loss of each step.

    At each yield the gradients of the step are still there.
    """
    device = model.head.weight.device
    optimizer = AdamW(model.parameters(), lr=settings.lr)
    warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    for step in range(settings.steps):
        tokens, targets = corpus.batch(step, settings.n_sequences, settings.config.S, seed=settings.seed)
        optimizer.zero_grad()
        with region("forward"):
            loss = model.loss(tokens.to(device), targets.to(device))
        with region("backward"):
            loss.backward()
        optimizer.step()
        warmup.step()
        yield loss.detach()


def train(settings: Settings) -> Outcome:
    """Train on this rank. Rank 0 shows the progress."""
    mesh = Mesh(tp=settings.tp)
    model = GPT(settings.config, settings.seed).to(settings.dtype)
    plan.parallelize(model, plan.GPT_1D, mesh)
    losses = []
    started = time.perf_counter()
    shown = mesh.rank == 0
    progress = tqdm(total=settings.steps, unit="step", disable=not shown, file=sys.stdout, leave=False)
    with region("train"), progress as bar:
        for loss in train_steps(model, settings):
            losses.append(loss.item())
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
    elapsed_s = time.perf_counter() - started
    if shown:
        print(progress)  # once more, as one whole line
    with region("sample"):
        sample = model.generate(PROMPT, settings.n_sample, temperature=0.8, seed=settings.seed)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Outcome(tuple(losses), elapsed_s, n_parameters, sample)


def check(settings: Settings) -> list[Comparison]:
    """Train on this rank in float64, and compare every step with the serial model, which rank 0 trains."""
    mesh = Mesh(tp=settings.tp)
    serial = GPT(settings.config, settings.seed).double()
    model = GPT(settings.config, settings.seed).double()
    plan.parallelize(model, plan.GPT_1D, mesh)
    serial_steps = train_steps(serial, settings)
    comparisons = []
    for step, loss in enumerate(train_steps(model, settings), start=1):
        serial_loss = next(serial_steps) if mesh.rank == 0 else torch.zeros_like(loss)
        with region("check"):
            expected = {
                name: mesh["tp"].broadcast(torch.zeros_like(p) if p.grad is None else p.grad, root=0)
                for name, p in serial.named_parameters()
            }
            expected = plan.shard_state(model, expected, mesh)
            expected["loss"] = mesh["tp"].broadcast(serial_loss, root=0)
        found = {name: p.grad for name, p in model.named_parameters()} | {"loss": loss}
        comparisons += [
            Comparison(step, mesh.rank, name, _relative_error(found[name], expected[name]))
            for name in ("loss", *dict(model.named_parameters()))
        ]
    return comparisons


def _relative_error(found: Tensor | None, expected: Tensor) -> float:
    if found is None:
        return float("inf")
    size, distance = expected.norm().item(), (found - expected).norm().item()
    return distance / size if size else distance
