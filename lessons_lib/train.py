"""Train the GPT across ranks: ``python -m lessons_lib.train --ranks 4 --tp 4 --steps 200``.

With ``--check`` it trains in float64 beside the serial model, compares every step's loss and every gradient
on every rank, and exits with status 1 if one differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from lessons_lib import plan
from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Mesh
from lessons_lib.models import corpus
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.spmd import region, run
from lessons_lib.timeline import one_or_range

CHECK_STEPS = 5
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
    progress = tqdm(total=settings.steps, unit="step", disable=mesh.rank != 0, file=sys.stdout)
    with region("train"), progress as bar:
        for loss in train_steps(model, settings):
            losses.append(loss.item())
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
    elapsed_s = time.perf_counter() - started
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


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 1 if --check found a difference (2: refused)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = _settings(options)
    except RefusedError as refusal:
        parser.error(str(refusal))
    config = settings.config
    print(
        f"model         GPT: {config.L} layers, {config.H} heads, D={config.D}, S={config.S}, V={config.V}\n"
        f"data          the language reference of Python, {settings.n_sequences} sequences in a step\n"
        f"ranks         {settings.tp}, as Mesh(tp={settings.tp})"
    )
    return _report_check(settings) if options.check else _report_training(settings, options.picture)


def _report_training(settings: Settings, picture: Path | None) -> int:
    result = run(train, settings, ranks=settings.tp)
    outcome: Outcome = result.values[0]
    n_tokens = settings.steps * settings.n_sequences * settings.config.S
    with torch.device("meta"):
        serial_size = sum(parameter.numel() for parameter in GPT(settings.config).parameters())
    sent = [result.trace.bytes_sent(rank, "train") for rank in range(settings.tp)]
    print(f"parameters    {outcome.n_parameters:,} on each rank; the serial model has {serial_size:,}")
    first, last = outcome.losses[0], outcome.losses[-1]
    print(f"loss          {first:.3f} at step 1, {last:.3f} at step {settings.steps}")
    print(
        f"speed         {n_tokens / outcome.elapsed_s:,.0f} tokens per second on this machine, where ranks "
        f"take turns: more ranks do not make it faster here"
    )
    print(f"bytes sent    {one_or_range(sent)} by each rank in training, {sum(sent):,} by all together")
    if settings.n_sample:
        print(f"sample        {(PROMPT + outcome.sample).decode(errors='replace')}")
    if picture is not None:
        picture.write_text(result.picture().svg, encoding="utf-8")
        print(f"picture       {picture}")
    return 0


def _report_check(settings: Settings) -> int:
    result = run(check, settings, ranks=settings.tp)
    comparisons: list[Comparison] = [comparison for rank in result.values for comparison in rank]
    n_parameters = len({comparison.what for comparison in comparisons}) - 1
    different = [comparison for comparison in comparisons if comparison.differs]
    if not different:
        worst = max(comparison.error for comparison in comparisons)
        print(
            f"equal         {settings.steps} steps: the loss and the gradients of all {n_parameters} "
            f"parameters, on every rank, are the serial model's (relative error at most {worst:.0e})"
        )
        return 0
    step = min(comparison.step for comparison in different)
    first = [comparison for comparison in different if comparison.step == step]
    names = dict.fromkeys(comparison.what for comparison in first)
    print(f"DIFFERENT     from step {step} on, {len(names)} of the loss and {n_parameters} gradients:")
    for name in names:
        those = [comparison for comparison in first if comparison.what == name]
        ranks = ", ".join(str(comparison.rank) for comparison in those)
        print(f"    {name}: rank {ranks}, relative error up to {max(c.error for c in those):.1e}")
    return 1


def _settings(options: argparse.Namespace) -> Settings:
    """Settings from the command line; refused here, before any rank starts, if they cannot work."""
    tp = options.tp or options.ranks
    if options.ranks % tp:
        legal = [str(n) for n in range(1, options.ranks + 1) if options.ranks % n == 0]
        raise RefusedError(f"--tp {tp} does not divide --ranks {options.ranks}; try --tp {', '.join(legal)}")
    if options.ranks != tp:
        raise RefusedError(
            f"--ranks {options.ranks} --tp {tp} leaves {options.ranks // tp} groups of {tp} ranks that would "
            f"need data parallelism, which this command does not have; try --ranks {tp} --tp {tp}"
        )
    config = GPTConfig(L=options.layers, H=options.heads, D=options.width, S=options.seq)
    with torch.device("meta"):
        plan.check(GPT(config), plan.GPT_1D, {"tp": tp})
    return Settings(
        config=config,
        tp=tp,
        steps=options.steps or (CHECK_STEPS if options.check else Settings().steps),
        n_sequences=options.batch,
        lr=options.lr,
        seed=options.seed,
        n_sample=options.sample,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lessons_lib.train",
        description="Train a small GPT on Python's documentation, tensor-parallel on ranks of this machine.",
    )
    defaults, model = Settings(), GPTConfig()
    add = parser.add_argument
    add("--ranks", type=_count, default=4, help="ranks to run (default: %(default)s)")
    add("--tp", type=_count, help="tensor-parallel degree (default: all ranks)")
    add("--steps", type=_count, help=f"steps (default: {defaults.steps}; with --check {CHECK_STEPS})")
    add("--check", action="store_true", help="compare with the serial model, in float64")
    add("--layers", type=_count, default=model.L, help="transformer blocks, L (default: %(default)s)")
    add("--heads", type=_count, default=model.H, help="attention heads, H (default: %(default)s)")
    add("--width", type=_count, default=model.D, help="model width, D (default: %(default)s)")
    add("--seq", type=_count, default=model.S, help="tokens in a sequence, S (default: %(default)s)")
    add(
        "--batch",
        type=_count,
        default=defaults.n_sequences,
        help="sequences a step (default: %(default)s)",
    )
    add("--lr", type=float, default=defaults.lr, help="learning rate of AdamW (default: %(default)s)")
    add("--seed", type=int, default=defaults.seed, help="decides weights and batches (default: %(default)s)")
    add("--sample", type=int, default=defaults.n_sample, help="bytes to generate (default: %(default)s)")
    add("--picture", type=Path, metavar="FILE.svg", help="save a picture of what every rank did")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


if __name__ == "__main__":
    # Functions of __main__ travel to ranks by value, those of an imported module by reference: import it.
    from lessons_lib.train import main

    sys.exit(main())
