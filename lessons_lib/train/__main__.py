"""Train the GPT across ranks: ``python -m lessons_lib.train --dp 2 --tp 2 --zero 1``.

With ``--check`` it trains in float64 beside the serial model, compares every step's loss and every gradient
on every rank, and exits with status 1 if one differs. With ``--checkpoint DIR`` it saves as it goes, and the
same command, given again, goes on from what was saved.

This module reads the arguments, for which it needs nothing but Python: ``--help`` and a typing error need
not wait for torch.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lessons_lib.errors import RefusedError

if TYPE_CHECKING:
    from lessons_lib.checkpoint import Checkpoint

RANKS, STEPS, CHECK_STEPS, SAMPLE, EVERY = 4, 200, 5, 200, 50
DECISIVE = dict(layers=8, heads=8, width=128, seq=64, batch=16, lr=1e-3, seed=0)  # the losses depend on them
LEAST_TO_SAMPLE = 50  # steps; bytes drawn from a model that has learnt less are noise


def main(arguments: Sequence[str] = ()) -> int:
    """Run the command; return its exit status: 0, or 1 if --check found a difference (2: refused)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        start = _start(options)
        _complete(options, start)
        from lessons_lib.train import report  # only now, since it brings torch

        settings = report.settings_of(options, start)
    except RefusedError as refusal:
        parser.error(str(refusal))
    report.announce(settings)
    if options.check:
        return report.report_check(settings)
    return report.report_training(settings, options.picture)


def _start(options: argparse.Namespace) -> Checkpoint | None:
    """The checkpoint to go on from, if there is one and it is asked for."""
    folder: Path | None = options.checkpoint
    if folder is None:
        for option in ("resume", "every"):
            if getattr(options, option):
                raise RefusedError(f"--{option} needs --checkpoint DIR, the folder of the checkpoints")
        return None
    if options.check:
        raise RefusedError("--check saves nothing; leave out --check or --checkpoint")
    from lessons_lib import checkpoint  # which brings torch

    start = checkpoint.latest(folder)
    if start is None and options.resume:
        killed = checkpoint.unfinished(folder)
        found = "there is no such folder"
        if folder.is_dir():
            found = f"only {', '.join(killed)}, never finished" if killed else "no step-N in it"
        raise RefusedError(
            f"--resume: {str(folder)!r} holds no checkpoint ({found}); leave out --resume to begin anew"
        )
    return start


def _complete(options: argparse.Namespace, start: Checkpoint | None) -> None:
    """Fill in what the checkpoint says, what one option says about another, and the defaults."""
    saved = start.about.get("settings", {}) if start else {}
    for name, default in DECISIVE.items():
        if getattr(options, name) is None:
            setattr(options, name, saved.get(name, default))
    if start:
        options.steps = options.steps or start.about.get("steps")
        dp, tp = start.sizes.get("dp", 1), start.sizes.get("tp", 1)
        if not (options.tp or options.dp) and (dp > 1 or not options.ranks):
            options.tp = tp
            options.dp = None if options.ranks else dp
    options.every = options.every or EVERY
    _share_out(options)
    if options.zero is None:
        options.zero = start.about.get("zero", 0) if start and options.dp > 1 else 0
    options.steps = options.steps or (CHECK_STEPS if options.check else STEPS)
    if options.sample is None:
        options.sample = SAMPLE if options.steps >= LEAST_TO_SAMPLE else 0
    if options.check and options.picture:
        raise RefusedError("--check draws no picture; leave out --check or --picture")


def _share_out(options: argparse.Namespace) -> None:
    """Find ranks = dp x tp from those that were given; ZeRO shares out over dp, and all else goes to tp."""
    asked = {name: getattr(options, name) for name in ("dp", "tp") if getattr(options, name)}
    if not options.ranks:
        given = math.prod(asked.values())
        options.ranks = given if asked else int(os.environ.get("WORLD_SIZE", RANKS))
    ranks = options.ranks
    for name, degree in asked.items():
        if ranks % degree:
            legal = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
            raise RefusedError(
                f"--{name} {degree} does not divide --ranks {ranks}; try --{name} {', '.join(legal)}"
            )
    if len(asked) == 2 and options.dp * options.tp != ranks:
        raise RefusedError(
            f"--dp {options.dp} --tp {options.tp} are {options.dp * options.tp} ranks, and --ranks asks for "
            f"{ranks}; try --dp {options.dp} --tp {ranks // options.dp}"
        )
    if not asked:
        asked = {"dp": ranks} if options.zero else {"tp": ranks}
    options.dp = asked.get("dp") or ranks // asked["tp"]
    options.tp = ranks // options.dp
    if options.zero and options.dp == 1:
        raise RefusedError(
            f"--zero {options.zero} shares out over the ranks of dp, and --ranks {ranks} --tp {options.tp} "
            f"leave dp 1; try --dp {ranks} --tp 1, or leave out --zero"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lessons_lib.train",
        description="Train a small GPT on Python's documentation, on ranks of this machine: tensor-parallel, "
        "data-parallel, or both.",
    )

    def size(option: str, meaning: str, read: Callable[[str], float] | None = None) -> None:
        default = DECISIVE[option.lstrip("-")]
        add(option, type=read or _whole(1), help=f"{meaning} (default: {default})")

    add = parser.add_argument
    add("--ranks", type=_whole(1), help=f"ranks to run (default: as --dp and --tp say, else {RANKS})")
    add("--dp", type=_whole(1), help="data-parallel degree (default: ranks / tp)")
    add("--tp", type=_whole(1), help="tensor-parallel degree (default: ranks / dp; without both, all ranks)")
    add("--zero", type=int, choices=range(4), help="stage of ZeRO over the ranks of dp (default: 0)")
    add("--steps", type=_whole(1), help=f"steps (default: {STEPS}; with --check {CHECK_STEPS})")
    add("--check", action="store_true", help="compare with the serial model, in float64")
    size("--layers", "transformer blocks, L")
    size("--heads", "attention heads, H")
    size("--width", "model width, D")
    size("--seq", "tokens in a sequence, S")
    size("--batch", "sequences a step")
    size("--lr", "learning rate of AdamW", _rate)
    size("--seed", "decides weights and batches", _whole(0))
    add(
        "--sample",
        type=_whole(0),
        help=f"bytes to generate (default: {SAMPLE}, after {LEAST_TO_SAMPLE} steps or more)",
    )
    add("--picture", type=_picture, metavar="FILE.svg", help="save a picture of what every rank did")
    add(
        "--checkpoint",
        type=_folder,
        metavar="DIR",
        help="save in this folder, and keep the two newest checkpoints; if it holds one already, go on from "
        "the newest: on any number of ranks, to --steps in all, with the options it was saved with",
    )
    add("--every", type=_whole(1), help=f"steps between two checkpoints, besides the last (default: {EVERY})")
    add("--resume", action="store_true", help="refuse to begin anew where --checkpoint DIR holds nothing")
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


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; name one, which need not exist")
    return path


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
