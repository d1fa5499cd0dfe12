"""Training steps on a rank, and the same steps beside the serial model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer
from tqdm import tqdm

from lessons_lib import checkpoint, plan
from lessons_lib.checkpoint import Checkpoint, Parts, Piece
from lessons_lib.data_parallel import Zero, rows_of_rank
from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.models import corpus
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.spmd import region

TOLERANCE = 1e-10  # the largest relative error that --check lets pass; float64 rounds at 1e-16
WARMUP = 20  # steps in which the learning rate grows from 0 to its value
PROMPT = b"The "


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a run is saved, how often, and the checkpoint it goes on from."""

    folder: Path
    every: int = 50  # steps; the last one is always saved
    start: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What to train, on how many ranks, and how. ``seed`` decides the weights and the batches."""

    config: GPTConfig = GPTConfig()
    dp: int = 1
    tp: int = 4
    zero: int = 0  # the stage of ZeRO that shares out over dp; 0 shares out nothing
    steps: int = 200
    n_sequences: int = 16  # per step
    lr: float = 1e-3
    seed: int = 0
    n_sample: int = 200  # bytes to generate at the end
    dtype: torch.dtype = torch.float32
    saving: Saving | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Of the mesh: an axis dp only where the batch is shared out."""
        return {"dp": self.dp, "tp": self.tp} if self.dp > 1 else {"tp": self.tp}

    def decisive(self) -> dict[str, Any]:
        """What decides the losses, by the names of the command's options: the same after a resumption."""
        sizes = asdict(self.config)
        names = dict(L="layers", H="heads", D="width", S="seq", V="vocabulary")
        return {
            **{names.get(name, name): size for name, size in sizes.items()},
            "batch": self.n_sequences,
            "lr": self.lr,
            "seed": self.seed,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank has to tell after training."""

    losses: tuple[float, ...]  # of all steps, those before a resumption too
    elapsed_s: float
    n_parameters: int  # that it holds
    sample: bytes
    n_before: int = 0  # steps that the checkpoint had done


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


class Training:
    """A model, serial or a rank's part, in training: all that a step changes, and a checkpoint holds."""

    def __init__(self, model: GPT, settings: Settings, mesh: Mesh | None = None) -> None:
        self.model, self.settings = model, settings
        self.replicas = mesh["dp"] if mesh and "dp" in mesh.sizes else None
        self.optimizer: Optimizer | Zero
        if self.replicas:
            self.optimizer = Zero(model, settings.zero, self.replicas, partial(AdamW, lr=settings.lr))
        else:
            self.optimizer = AdamW(model.parameters(), lr=settings.lr)
        self.losses: list[float] = []

    def steps(self) -> Iterator[Tensor]:
        """Do the steps that are left, and yield the loss of each, while its gradients are still there.

        Batch and learning rate are functions of the number of the step. The loss is divided once, by the
        tokens of the whole batch: what a rank has of it is its share of the mean, and shares add up.
        """
        settings, device = self.settings, self.model.head.weight.device
        for step in range(len(self.losses), settings.steps):
            batch = corpus.batch(step, settings.n_sequences, settings.config.S, seed=settings.seed)
            n_tokens = batch[0].numel()
            if self.replicas:
                batch = rows_of_rank(batch[0], self.replicas), rows_of_rank(batch[1], self.replicas)
            tokens, targets = (x.to(device) for x in batch)
            for group in self.optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, (step + 1) / WARMUP)
            self.optimizer.zero_grad()
            with region("forward"):
                loss = self.model.loss_sum(tokens, targets) / n_tokens
            with region("backward"):
                loss.backward()
            self.optimizer.step()
            loss = loss.detach()
            if self.replicas:
                with region("loss"):
                    loss = self.replicas.all_reduce(loss)
            self.losses.append(loss.item())
            yield loss

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients, of its tensor-parallel blocks, whole over dp. All ranks call this."""
        if isinstance(self.optimizer, Zero):
            return self.optimizer.whole_gradients()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    @property
    def n_parameters(self) -> int:
        """That this rank holds."""
        if isinstance(self.optimizer, Zero):
            return sum(unit.held.numel() for unit in self.optimizer.units)
        return sum(parameter.numel() for parameter in self.model.parameters())

    def save(self, mesh: Mesh, saving: Saving) -> None:
        """Save where the training stands. Every rank calls this."""
        about = {
            "settings": self.settings.decisive(),
            "steps": self.settings.steps,
            "zero": self.settings.zero,
            "losses": self.losses,
        }
        checkpoint.save(self._state(), saving.folder, mesh, len(self.losses), about)

    def resume(self, mesh: Mesh, start: Checkpoint) -> None:
        """Go back to where ``start`` was saved. Every rank calls this."""
        refuse_another(self.settings, start)
        state = self._state()
        random = state["random"]
        if _n_replicas(start) != self.settings.dp:  # without dropout, nothing is drawn
            del state["random"]
        checkpoint.load(state, start, mesh)
        if isinstance(self.optimizer, Zero):
            self.optimizer.loaded()
        assert isinstance(random, Piece)
        _set_random_state(self.model.head.weight.device, random.block.flatten())
        self.losses = list(start.about["losses"])

    def _state(self) -> dict[str, Piece | Parts]:
        state = checkpoint.pieces(self.model, self.optimizer)
        random = _random_state(self.model.head.weight.device)
        if self.replicas:
            state["random"] = Piece(random[None], Layout("R@dp N"))
        else:
            state["random"] = Piece(random, Layout("N"))
        return state


def refuse_another(settings: Settings, start: Checkpoint) -> None:
    """Refuse to go on from a checkpoint of other settings, or of more steps."""
    saved, asked = start.about.get("settings", {}), settings.decisive()
    different = [name for name in asked if saved.get(name) != asked[name]]
    if different:
        there = ", ".join(f"{name} {saved.get(name, 'unknown')}" for name in different)
        here = ", ".join(f"{name} {asked[name]}" for name in different)
        raise RefusedError(
            f"{str(start.path)!r} was trained with {there}, and this run asks for {here}: "
            f"ask for the same, or save in another folder"
        )
    if settings.config.dropout and _n_replicas(start) != settings.dp:
        raise RefusedError(
            f"{str(start.path)!r} was saved with dp={_n_replicas(start)}, and this run asks for "
            f"dp={settings.dp}: each rank of dp drops numbers of its own, so with dropout="
            f"{settings.config.dropout} the number of these ranks decides the losses; ask for the same dp"
        )
    if start.step > settings.steps:
        raise RefusedError(
            f"{str(start.path)!r} has done {start.step} steps, and this run asks for {settings.steps}: "
            f"ask for more, or save in another folder"
        )


def _n_replicas(start: Checkpoint) -> int:
    return start.sizes.get("dp", 1)


def _random_state(device: torch.device) -> Tensor:
    """What dropout draws from. The same along tp, where what it drops is whole; along dp rows differ."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def train(settings: Settings) -> Outcome:
    """Train on this rank. Rank 0 shows the progress."""
    mesh, saving = Mesh(**settings.sizes), settings.saving
    model = GPT(settings.config, settings.seed).to(settings.dtype)
    plan.parallelize(model, plan.GPT_1D, mesh)
    training = Training(model, settings, mesh)
    if training.replicas:
        torch.manual_seed(torch.initial_seed() + training.replicas.rank)  # rows of its own, masks of its own
    if saving and saving.start:
        with region("resume"):
            training.resume(mesh, saving.start)
    n_before = len(training.losses)
    started = time.perf_counter()
    shown = mesh.rank == 0
    progress = tqdm(
        total=settings.steps, initial=n_before, unit="step", disable=not shown, file=sys.stdout, leave=False
    )
    steps = training.steps()
    with progress as bar:
        for step in range(n_before + 1, settings.steps + 1):
            with region("train"):
                loss = next(steps)
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
            if saving and (step % saving.every == 0 or step == settings.steps):
                with region("save"):
                    training.save(mesh, saving)
    elapsed_s = time.perf_counter() - started
    if shown:
        print(progress)  # once more, as one whole line
    with region("sample"):
        sample = model.generate(PROMPT, settings.n_sample, temperature=0.8, seed=settings.seed)
    return Outcome(tuple(training.losses), elapsed_s, training.n_parameters, sample, n_before)


def check(settings: Settings) -> list[Comparison]:
    """Train on this rank in float64, and compare every step with the serial model, which rank 0 trains."""
    mesh = Mesh(**settings.sizes)
    serial = GPT(settings.config, settings.seed).double()
    model = GPT(settings.config, settings.seed).double()
    plan.parallelize(model, plan.GPT_1D, mesh)
    training = Training(model, settings, mesh)
    serial_steps = Training(serial, settings).steps()
    comparisons = []
    for step, loss in enumerate(training.steps(), start=1):
        serial_loss = next(serial_steps) if mesh.rank == 0 else torch.zeros_like(loss)
        with region("check"):
            expected = {
                name: torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in serial.named_parameters()
            }
            for tensor in (*expected.values(), serial_loss):
                dist.broadcast(tensor, src=0)
            expected = plan.shard_state(model, expected, mesh)
            found = {**training.gradients(), "loss": loss}
        expected["loss"] = serial_loss
        comparisons += [
            Comparison(step, mesh.rank, name, _relative_error(found.get(name), expected[name]))
            for name in ("loss", *dict(model.named_parameters()))
        ]
    return comparisons


def _relative_error(found: Tensor | None, expected: Tensor) -> float:
    if found is None:
        return float("inf")
    size, distance = expected.norm().item(), (found - expected).norm().item()
    return distance / size if size else distance
