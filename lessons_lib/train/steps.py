"""Training steps on a rank, and the same steps beside the serial model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

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
from lessons_lib.spmd import region
from lessons_lib.train.parts import Part, gather, part_of_model, whole_model
from lessons_lib.train.settings import Saving, Settings

TOLERANCE = 1e-10  # the largest relative error that --check lets pass; float64 rounds at 1e-16
WARMUP = 20  # steps in which the learning rate grows from 0 to its value
PROMPT = b"The "


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
    """A part of the model, or the whole, in training: all that a step changes, and a checkpoint holds."""

    def __init__(self, part: Part, settings: Settings) -> None:
        self.part, self.model, self.settings = part, part.model, settings
        make_optimizer = partial(AdamW, lr=settings.lr)
        self.optimizer: Optimizer | Zero
        if part.replicas and settings.schedule is None:
            self.optimizer = Zero(self.model, settings.zero, part.replicas, make_optimizer)
        else:  # a pipeline sums its gradients itself
            self.optimizer = make_optimizer(self.model.parameters())
        self.losses: list[float] = []

    def steps(self) -> Iterator[Tensor]:
        """Do the steps that are left, and yield the loss of each, while its gradients are still there.

        Batch and learning rate are functions of the number of the step. The loss is divided once, by the
        tokens of the whole batch: what a rank has of it is its share of the mean, and shares add up.
        """
        settings, device = self.settings, next(self.model.parameters()).device
        for step in range(len(self.losses), settings.steps):
            batch = corpus.batch(step, settings.n_sequences, settings.config.S, seed=settings.seed)
            n_tokens = batch[0].numel()
            tokens, targets = (self._share_of(x).to(device) for x in batch)
            for group in self.optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, (step + 1) / WARMUP)
            self.optimizer.zero_grad()
            loss = self.part.passes(tokens, targets, n_tokens)
            self.optimizer.step()
            with region("loss"):
                loss = self._summed(loss)
            self.losses.append(loss.item())
            yield loss

    def _share_of(self, X: Tensor) -> Tensor:
        """The rows of a batch that this rank is given; ranks that share the model are given the same."""
        return rows_of_rank(X, self.part.rows) if self.part.rows else X

    def _summed(self, loss: Tensor) -> Tensor:
        """The sum of the shares of the loss that ranks with other tokens have."""
        return self.part.replicas.all_reduce(loss) if self.part.replicas else loss

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters, its tensor-parallel blocks, whole over replicas. All ranks call this."""
        if isinstance(self.optimizer, Zero):
            return self.optimizer.whole_parameters()
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients, of its tensor-parallel blocks, whole over replicas. All ranks call this."""
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
            "scheme": self.settings.scheme,
            "attention": self.settings.attention,
            "schedule": self.settings.schedule,
            "n_microbatches": self.settings.n_microbatches,
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
        torch.set_rng_state(random.block.flatten())
        self.losses = list(start.about["losses"])

    def _state(self) -> dict[str, Piece | Parts]:
        state = checkpoint.pieces(self.model, self.optimizer)
        random = torch.get_rng_state()  # which dropout draws from: alike on ranks that share the layers
        if self.part.rows:
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


def train(settings: Settings) -> Outcome:
    """Train on this rank. Rank 0 shows the progress."""
    mesh, saving = Mesh(**settings.sizes), settings.saving
    training = Training(part_of_model(settings, mesh), settings)
    if training.part.rows:
        torch.manual_seed(torch.initial_seed() + training.part.rows.rank)  # rows of its own, masks of its own
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
    sample = b""
    if settings.n_sample:
        with region("sample"):  # every rank gathers the whole model, once: one sequence cannot be shared out
            model = gather(training.model, settings, mesh, training.parameters())
            sample = model.generate(PROMPT, settings.n_sample, temperature=0.8, seed=settings.seed)
    return Outcome(tuple(training.losses), elapsed_s, training.n_parameters, sample, n_before)


def check(settings: Settings) -> list[Comparison]:
    """Train on this rank in float64, and compare every step with the serial model, which rank 0 trains."""
    mesh, settings = Mesh(**settings.sizes), replace(settings, dtype=torch.float64)
    serial, training = whole_model(settings), Training(part_of_model(settings, mesh), settings)
    serial_steps = Training(serial, settings).steps()
    names = list(dict(training.model.named_parameters()))
    comparisons = []
    for step, loss in enumerate(training.steps(), start=1):
        serial_loss = next(serial_steps) if mesh.rank == 0 else torch.zeros_like(loss)
        with region("check"):
            expected = {
                name: torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in serial.model.named_parameters()
            }
            for tensor in (*expected.values(), serial_loss):
                dist.broadcast(tensor, src=0)
            expected = plan.shard_state(training.model, {name: expected[name] for name in names}, mesh)
            found = {**training.gradients(), "loss": loss}
        expected["loss"] = serial_loss
        comparisons += [
            Comparison(step, mesh.rank, name, _relative_error(found.get(name), expected[name]))
            for name in ("loss", *names)
        ]
    return comparisons


def _relative_error(found: Tensor | None, expected: Tensor) -> float:
    if found is None:
        return float("inf")
    size, distance = expected.norm().item(), (found - expected).norm().item()
    return distance / size if size else distance
