"""Train the GPT across ranks: ``python -m lessons_lib.train --ranks 4 --tp 4 --steps 200``.

With ``--check`` it trains in float64 beside the serial model, compares every step's loss and every gradient
on every rank, and exits with status 1 if one differs.

This module reads the arguments, for which it needs nothing but Python: ``--help`` and a typing error need
not wait for torch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lessons_lib.errors import RefusedError

RANKS, STEPS, CHECK_STEPS, SAMPLE = 4, 200, 5, 200
LEAST_TO_SAMPLE = 50  # steps; bytes drawn from a model that has learnt less are noise


def main(arguments: Sequence[str] = ()) -> int:
    """Run the command; return its exit status: 0, or 1 if --check found a difference (2: refused)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _complete(options)
        from lessons_lib.train import report  # only now, since it brings torch

        settings = report.settings_of(options)
    except RefusedError as refusal:
        parser.error(str(refusal))
    report.announce(settings)
    if options.check:
        return report.report_check(settings)
    return report.report_training(settings, options.picture)


def _complete(options: argparse.Namespace) -> None:
    """Fill in what one option says about another."""
    options.ranks = options.ranks or options.tp or RANKS
    options.tp = options.tp or options.ranks
    options.steps = options.steps or (CHECK_STEPS if options.check else STEPS)
    if options.sample is None:
        options.sample = SAMPLE if options.steps >= LEAST_TO_SAMPLE else 0
    if options.check and options.picture:
        raise RefusedError("--check draws no picture; leave out --check or --picture")
    ranks, tp = options.ranks, options.tp
    if ranks % tp:
        legal = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise RefusedError(f"--tp {tp} does not divide --ranks {ranks}; try --tp {', '.join(legal)}")
    if ranks != tp:
        raise RefusedError(
            f"--ranks {ranks} --tp {tp} leaves {ranks // tp} groups of {tp} ranks that would need data "
            f"parallelism, which this command does not have; try --ranks {tp} --tp {tp}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lessons_lib.train",
        description="Train a small GPT on Python's documentation, tensor-parallel on ranks of this machine.",
    )

    def size(option: str, default: int, meaning: str) -> None:
        parser.add_argument(option, type=_whole(1), default=default, help=f"{meaning} (default: {default})")

    add = parser.add_argument
    add("--ranks", type=_whole(1), help=f"ranks to run (default: as --tp says, else {RANKS})")
    add("--tp", type=_whole(1), help="tensor-parallel degree (default: all ranks)")
    add("--steps", type=_whole(1), help=f"steps (default: {STEPS}; with --check {CHECK_STEPS})")
    add("--check", action="store_true", help="compare with the serial model, in float64")
    size("--layers", 8, "transformer blocks, L")
    size("--heads", 8, "attention heads, H")
    size("--width", 128, "model width, D")
    size("--seq", 64, "tokens in a sequence, S")
    size("--batch", 16, "sequences a step")
    add("--lr", type=_rate, default=1e-3, help="learning rate of AdamW (default: %(default)s)")
    add("--seed", type=_whole(0), default=0, help="decides weights and batches (default: %(default)s)")
    add(
        "--sample",
        type=_whole(0),
        help=f"bytes to generate (default: {SAMPLE}, after {LEAST_TO_SAMPLE} steps or more)",
    )
    add("--picture", type=_picture, metavar="FILE.svg", help="save a picture of what every rank did")
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {number}")
        return number

    return read


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"{text!r}: the picture is an SVG; try {path.stem or 'run'}.svg")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
