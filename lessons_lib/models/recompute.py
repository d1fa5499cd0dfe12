"""Recomputation: keep less of a block's forward pass, and make it again when backward asks for it.

What a block keeps for its backward is most of what training holds. Two ways to keep less:

* ``"selective"``: of attention's core only q, k and v; its scores, S x S of every head, are made again. They
  are much memory and little work. A fused kernel, as the GPT's own, never keeps them: it is this, built in.
* ``"full"``: of a whole block only its input.

Source: Chen et al. 2016 (Training Deep Nets with Sublinear Memory Cost); Korthikanti et al. 2022, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lessons_lib.errors import RefusedError
from lessons_lib.models.gpt import GPT, Block

MADE_AGAIN: Mapping[str, Callable[[Block], list[tuple[nn.Module, str]]]] = {
    "none": lambda block: [],
    "selective": lambda block: [(block.attention, "attend")],
    "full": lambda block: [(block, "forward")],
}
"""For each way, the methods of a block whose insides are not kept."""


def recompute(model: GPT, what: str) -> GPT:
    """Let backward make again what ``what`` names in :data:`MADE_AGAIN`; return ``model``.

    >>> from lessons_lib.models.gpt import GPTConfig
    >>> from lessons_lib.models.corpus import batch
    >>> model, (tokens, targets) = GPT(GPTConfig(L=1)), batch(step=0, n_sequences=2, S=8)
    >>> before = model.loss(tokens, targets).item()
    >>> recompute(model, "full").loss(tokens, targets).item() == before
    True

    Dropout draws the same numbers again. A block that runs again stops where backward has all it needs: its
    last product, whose result nobody keeps, is left out. Tensor-parallel layers compute theirs, and send all
    that they send forward once more.
    Apply it before the model is wrapped by anything that hangs hooks on its modules.
    """
    if what not in MADE_AGAIN:
        raise RefusedError(f"recompute {what!r} is unknown; known: {', '.join(map(repr, MADE_AGAIN))}.")
    for block in model.blocks:
        assert isinstance(block, Block)
        for owner, method in MADE_AGAIN[what](block):
            setattr(owner, method, partial(checkpoint, getattr(owner, method), use_reentrant=False))
    return model


def keep_scores(model: GPT) -> GPT:
    """Let attention be computed from its scores, which are kept for backward, as before there were fused
    kernels; return ``model``. What "selective" then saves can be seen.
    """
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.attend = attend_by_scores  # type: ignore[method-assign]
    return model


def attend_by_scores(
    q: Float[Tensor, "B h S K"], k: Float[Tensor, "B g S K"], v: Float[Tensor, "B g S K"]
) -> Float[Tensor, "B h S K"]:
    """Causal attention in three steps: scores, their softmax, the mean of v that it weighs."""
    S, K = q.shape[-2:]
    n_sharing = q.shape[1] // k.shape[1]
    if n_sharing > 1:
        k, v = (heads.repeat_interleave(n_sharing, dim=1) for heads in (k, v))
    later = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT / math.sqrt(K)).masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v
