"""Train the GPT across ranks: ``python -m lessons_lib.train --dp 2 --tp 2 --zero 1``, ``--scheme 2d``,
``--cp 4 --attention zigzag``, ``--pp 4 --schedule zb-v --microbatches 8``.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lessons_lib.errors import RefusedError

if TYPE_CHECKING:
    from lessons_lib.checkpoint import Checkpoint

RANKS, STEPS, CHECK_STEPS, SAMPLE, EVERY = 4, 200, 5, 200, 50
AXES = ("pp", "dp", "cp", "tp")  # in the order in which ranks are numbered, the last one fastest
PLANS = ("1d", "1d-sp", "2d", "2.5d", "3d")  # lessons_lib.plan's
ATTENTIONS = ("ring", "zigzag", "striped", "ulysses", "rsa")  # lessons_lib.sequence_parallel's
SCHEDULES = (  # those of lessons_lib.pipeline_parallel that update once, when all micro-batches are done
    *("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v"),
    *("dualpipe", "dualpipe-v", "chimera"),
)
HOW = dict(scheme="1d", attention="zigzag", schedule="1f1b")  # an axis is used, if nothing is asked
OF_AXIS = dict(attention="cp", schedule="pp", microbatches="pp")  # options that say how an axis is used
DECISIVE = dict(  # the losses depend on them
    layers=8, heads=8, width=128, seq=64, batch=16, lr=1e-3, seed=0, tied=False
)
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
        _go_on(options, start)
    options.every = options.every or EVERY
    options.scheme, options.depth = options.scheme or HOW["scheme"], options.depth or 1
    for option, axis in OF_AXIS.items():
        if getattr(options, option) and not getattr(options, axis):
            given = f"--{option} {getattr(options, option)}"
            raise RefusedError(f"{given} says how to use the ranks of {axis}; give --{axis}, or leave it out")
    if options.cp:
        options.attention = options.attention or HOW["attention"]
    if options.pp:
        options.schedule = options.schedule or HOW["schedule"]
    _share_out(options)
    options.microbatches = options.microbatches or (2 * options.pp if options.schedule else 1)
    if options.zero is None:
        can = options.dp * options.cp > 1 and options.schedule is None
        options.zero = start.about.get("zero", 0) if start and can else 0
    options.steps = options.steps or (CHECK_STEPS if options.check else STEPS)
    if options.sample is None:
        options.sample = SAMPLE if options.steps >= LEAST_TO_SAMPLE else 0
    if options.check and options.picture:
        raise RefusedError("--check draws no picture; leave out --check or --picture")


def _go_on(options: argparse.Namespace, start: Checkpoint) -> None:
    """Take from the checkpoint what is not asked: how it was done, if no other ranks are asked for."""
    options.steps = options.steps or start.about.get("steps")
    degrees = {axis: start.sizes.get(axis, 1) for axis in ("pp", "dp", "cp")}
    degrees["tp"] = math.prod(start.sizes.values()) // math.prod(degrees.values())
    if options.scheme is None:
        options.scheme, options.depth = start.about.get("scheme"), start.sizes.get("depth")
    if any(getattr(options, axis) for axis in AXES):
        return
    if options.ranks:
        options.tp = degrees["tp"] if degrees["dp"] > 1 else None
        return
    for axis, degree in degrees.items():
        setattr(options, axis, degree if axis in start.sizes or axis in ("dp", "tp") else None)
    options.attention = options.attention or start.about.get("attention")
    options.schedule = options.schedule or start.about.get("schedule")
    if options.pp:
        options.microbatches = options.microbatches or start.about.get("n_microbatches")


def _share_out(options: argparse.Namespace) -> None:
    """Find ranks = pp x dp x cp x tp from those that are given. The rest is tp, or dp where tp is given."""
    asked = {axis: getattr(options, axis) for axis in AXES if getattr(options, axis)}
    n_asked = math.prod(asked.values())
    if not options.ranks:
        least = 8 if options.scheme == "3d" else RANKS
        options.ranks = n_asked if asked else int(os.environ.get("WORLD_SIZE", least))
    ranks = options.ranks
    for axis, degree in asked.items():
        if ranks % degree:
            legal = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
            raise RefusedError(
                f"--{axis} {degree} does not divide --ranks {ranks}; try --{axis} {', '.join(legal)}"
            )
    if ranks % n_asked or ({"dp", "tp"} <= asked.keys() and n_asked != ranks):
        last = list(asked)[-1]
        n_kept = n_asked // asked[last]
        better = asked | ({last: ranks // n_kept} if ranks % n_kept == 0 else {"ranks": n_asked})
        raise RefusedError(
            f"{_as_options(asked)} are {n_asked} ranks, and --ranks asks for {ranks}; "
            f"try {_as_options(better)}"
        )
    rest = "dp" if "dp" not in asked and ("tp" in asked or options.zero) else "tp"
    for axis in AXES:
        setattr(options, axis, asked.get(axis, 1) * (ranks // n_asked if axis == rest else 1))
    if options.zero and options.dp * options.cp == 1:
        raise RefusedError(
            f"--zero {options.zero} shares out over the ranks of dp and cp, and "
            f"{_as_options({'ranks': ranks, **asked})} leave dp 1; try --dp {ranks} --tp 1, or "
            "leave out --zero"
        )


def _as_options(numbers: Mapping[str, int]) -> str:
    return " ".join(f"--{name} {number}" for name, number in numbers.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lessons_lib.train",
        description="Train a small GPT on Python's documentation, on ranks of this machine: its batch (dp), "
        "its sequences (cp), its layers (tp) and its depth (pp) shared out over them, alone or together.",
    )

    def size(option: str, meaning: str, read: Callable[[str], float] | None = None) -> None:
        default = DECISIVE[option.lstrip("-")]
        add(option, type=read or _whole(1), help=f"{meaning} (default: {default})")

    add = parser.add_argument_group("ranks, and what they share out").add_argument
    add("--ranks", type=_whole(1), help=f"ranks to run (default: --pp x --dp x --cp x --tp, or {RANKS})")
    add("--dp", type=_whole(1), help="ranks that share out the batch (default: 1, or what --tp leaves)")
    add("--zero", type=int, choices=range(4), help="stage of ZeRO over the ranks of dp and cp (default: 0)")
    add(
        "--tp",
        type=_whole(1),
        help="ranks that share each layer, by --scheme (default: what the others leave)",
    )
    add("--scheme", choices=PLANS, help=f"how they share it (default: {HOW['scheme']}, or the checkpoint's)")
    add("--depth", type=_whole(1), help="square grids of ranks in 2.5d (default: 1)")
    add("--cp", type=_whole(1), help="ranks that share out each sequence, by --attention (default: 1)")
    add("--attention", choices=ATTENTIONS, help=f"over the tokens of cp (default: {HOW['attention']})")
    add("--pp", type=_whole(1), help="ranks of a pipeline of stages, by --schedule (default: 1)")
    add("--schedule", choices=SCHEDULES, help=f"of the pipeline (default: {HOW['schedule']})")
    add("--microbatches", type=_whole(1), metavar="M", help="that a batch is cut into (default: 2 x pp)")
    add = parser.add_argument_group("model and training").add_argument
    add("--steps", type=_whole(1), help=f"steps (default: {STEPS}; with --check {CHECK_STEPS})")
    size("--layers", "transformer blocks, L")
    size("--heads", "attention heads, H")
    size("--width", "model width, D")
    size("--seq", "tokens in a sequence, S")
    size("--batch", "sequences a step")
    add("--tied", action="store_const", const=True, help="use the embedding's weight for the head, too")
    size("--lr", "learning rate of AdamW", _rate)
    size("--seed", "decides weights and batches", _whole(0))
    add = parser.add_argument_group("what comes of it").add_argument
    add("--check", action="store_true", help="compare with the serial model, in float64")
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
