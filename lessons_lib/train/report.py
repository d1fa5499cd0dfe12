"""From the options of the command to settings, and from what ran to the lines it prints."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from lessons_lib.checkpoint import Checkpoint, unfinished
from lessons_lib.cost.flops import step_flops
from lessons_lib.errors import RefusedError
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.spmd import run
from lessons_lib.spmd.torchrun import is_first
from lessons_lib.timeline import one_or_range
from lessons_lib.train.parts import refuse_unfit
from lessons_lib.train.settings import Saving, Settings
from lessons_lib.train.steps import PROMPT, Comparison, Outcome, check, refuse_another, train

MOST_FLOPS = 1e12  # in a step: some ten seconds on the cores of a laptop


def say(text: str) -> None:
    """Print once, also where torchrun has started this program for every rank."""
    if is_first():
        print(text, flush=True)


def settings_of(options: argparse.Namespace, start: Checkpoint | None = None) -> Settings:
    """Settings from complete options; raises RefusedError where sizes do not fit each other or ``start``."""
    config = GPTConfig(L=options.layers, H=options.heads, D=options.width, S=options.seq, tied=options.tied)
    flops = step_flops(config, options.batch)
    if flops > MOST_FLOPS:
        raise RefusedError(
            f"{options.batch} sequences of {config.S} tokens through {config.L} layers of width {config.D} "
            f"are {flops:.0e} floating point operations in a step, and this command takes up to "
            f"{MOST_FLOPS:.0e}; try a smaller --seq, --batch, --width or --layers"
        )
    settings = Settings(
        config=config,
        pp=options.pp,
        schedule=options.schedule,
        n_microbatches=options.microbatches,
        dp=options.dp,
        cp=options.cp,
        attention=options.attention,
        tp=options.tp,
        scheme=options.scheme,
        depth=options.depth,
        zero=options.zero,
        steps=options.steps,
        n_sequences=options.batch,
        lr=options.lr,
        seed=options.seed,
        n_sample=options.sample,
        saving=options.checkpoint and Saving(options.checkpoint, options.every, start),
    )
    if start:
        refuse_another(settings, start)
    refuse_unfit(settings)
    return settings


def announce(settings: Settings) -> None:
    """Say what is about to run."""
    config = settings.config
    axes = ", ".join(f"{axis}={size}" for axis, size in settings.sizes.items())
    shared = ""
    if settings.pipeline is not None:
        n = settings.n_microbatches
        shared += f", {settings.pipeline.name} with {n} micro-batch{'es' * (n > 1)} over pp"
    if settings.attention is not None:
        shared += f", attention by {settings.attention} over cp"
    if settings.zero:
        replicated = [axis for axis in ("dp", "cp") if axis in settings.sizes]
        shared += f", ZeRO {settings.zero} over {' and '.join(replicated)}"
    if settings.scheme != "1d":
        shared += f", layers by {settings.scheme}"
    say(
        f"model         GPT: {config.L} layers, {config.H} heads, D={config.D}, S={config.S}, V={config.V}\n"
        f"data          the language reference of Python, {settings.n_sequences} sequences in a step\n"
        f"ranks         {settings.n_ranks}, as Mesh({axes}){shared}"
    )
    if settings.saving:
        say(f"checkpoint    {_account_of(settings.saving)}")


def _account_of(saving: Saving) -> str:
    start = saving.start
    left = [f"{name} was never finished, and is passed over" for name in unfinished(saving.folder)]
    if start is None:
        return "; ".join([f"every {saving.every} steps in {saving.folder}", *left])
    n_ranks = math.prod(start.sizes.values())
    where = f"goes on after step {start.step}: {start.path}, saved by {n_ranks} rank{'s' * (n_ranks > 1)}"
    return "; ".join([where, *(f"damaged and passed over is {why}" for why in start.passed_over), *left])


def report_training(settings: Settings, picture: Path | None) -> int:
    """Train, print what came of it, and save its picture."""
    n_ranks = settings.n_ranks
    result = run(train, settings, ranks=n_ranks)
    outcome: Outcome = result.values[0]
    held = one_or_range([each.n_parameters for each in result.values])
    n_steps = settings.steps - outcome.n_before
    n_tokens = n_steps * settings.n_sequences * settings.config.S
    with torch.device("meta"):
        serial_size = sum(parameter.numel() for parameter in GPT(settings.config).parameters())
    sent = [result.trace.bytes_sent(rank, "train") for rank in range(n_ranks)]
    say(f"parameters    {held} on each rank; the serial model has {serial_size:,}")
    first, last = outcome.losses[0], outcome.losses[-1]
    say(f"loss          {first:.3f} at step 1, {last:.3f} at step {settings.steps}")
    if n_steps:
        turns = ", where ranks take turns: more ranks do not make it faster here"
        where = turns if result.transport == "threads" else ""
        say(f"speed         {n_tokens / outcome.elapsed_s:,.0f} tokens per second on this machine{where}")
        sends = one_or_range(sent)
        say(f"bytes sent    {sends} by each rank in training, {sum(sent):,} by all together")
    else:
        say(f"nothing left  all {settings.steps} steps were done before; ask for more --steps")
    if settings.n_sample:
        say(f"sample        {(PROMPT + outcome.sample).decode(errors='replace')}")
    if picture is not None and is_first():
        picture.write_text(result.picture().svg, encoding="utf-8")
        say(f"picture       {picture}")
    return 0


def report_check(settings: Settings) -> int:
    """Compare every step with the serial model's, and print what differs; return 1 if anything does."""
    result = run(check, settings, ranks=settings.n_ranks)
    comparisons: list[Comparison] = [comparison for rank in result.values for comparison in rank]
    n_parameters = len({comparison.what for comparison in comparisons}) - 1
    different = [comparison for comparison in comparisons if comparison.differs]
    if not different:
        worst = max(comparison.error for comparison in comparisons)
        say(
            f"equal         {settings.steps} steps: the loss and the gradients of all {n_parameters} "
            f"parameters, on every rank, are the serial model's (relative error at most {worst:.0e})"
        )
        return 0
    step = min(comparison.step for comparison in different)
    first = [comparison for comparison in different if comparison.step == step]
    names = dict.fromkeys(comparison.what for comparison in first)
    say(f"DIFFERENT     from step {step} on, {len(names)} of the loss and {n_parameters} gradients:")
    for name in names:
        those = [comparison for comparison in first if comparison.what == name]
        ranks = ", ".join(str(comparison.rank) for comparison in those)
        say(f"    {name}: rank {ranks}, relative error up to {max(c.error for c in those):.1e}")
    return 1
