"""Real text that every Python carries: the language reference behind ``help("assert")``.

The standard library's ``pydoc_data.topics`` holds some 450 kB of it. Nothing needs to be downloaded, and a
token is a byte, so nothing needs to be tokenized. Python versions differ in a few sentences: losses agree
between two machines to all digits only where the Python version does.
"""

from __future__ import annotations

import zlib
from functools import cache
from pydoc_data.topics import topics
from typing import Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from lessons_lib.errors import RefusedError

HELD_OUT = 0.1  # the share of the text, at its end, that training never sees


@cache
def text() -> bytes:
    """Return the whole text: all topics, sorted by name.

    >>> text()[:22]
    b'The "assert" statement'
    """
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


@cache
def part(name: Literal["train", "held_out"]) -> Int64[Tensor, " N"]:
    """Return the tokens of one part of the text: what is trained on, or the tail held out."""
    tokens = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    cut = round(len(tokens) * (1 - HELD_OUT))
    return {"train": tokens[:cut], "held_out": tokens[cut:]}[name]


def batch(
    step: int, n_sequences: int, S: int, *, seed: int = 0, split: Literal["train", "held_out"] = "train"
) -> tuple[Int64[Tensor, "B S"], Int64[Tensor, "B S"]]:
    """Return the tokens of a step and, for each of them, the token that follows it.

    The same ``step``, sizes and ``seed`` give the same batch on every rank and in every run; every step
    cuts its sequences at places of its own.

    >>> tokens, targets = batch(step=0, n_sequences=16, S=64)
    >>> tokens.shape, torch.equal(tokens[:, 1:], targets[:, :-1])
    (torch.Size([16, 64]), True)
    """
    tokens = part(split)
    if S < 1 or n_sequences < 1 or len(tokens) <= S:
        raise RefusedError(
            f"{n_sequences} sequences of S={S} tokens were asked for; "
            f"the part {split!r} of the corpus has sequences of 1 to {len(tokens) - 1} tokens"
        )
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode()))
    starts = torch.randint(len(tokens) - S, (n_sequences,), generator=generator, device="cpu")
    positions = starts[:, None] + torch.arange(S, device="cpu")
    return tokens[positions], tokens[positions + 1]
