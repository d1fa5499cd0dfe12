"""Context parallelism: a whole model on a share of the tokens.

A transformer mixes tokens in its attention and nowhere else. Give every rank the whole model and some of the
tokens, tell the position embedding where these stand, let attention reach the others: each rank computes its
tokens' part of the serial model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group, Mesh
from lessons_lib.models.gpt import GPT, Block
from lessons_lib.sequence_parallel.attention import SequenceAttention
from lessons_lib.sequence_parallel.tokens import shard_tokens


def context_parallel(
    model: GPT, attention: SequenceAttention, mesh: Mesh, axis: str = "cp", S: int | None = None
) -> GPT:
    """Let ``model`` work on this rank's share of sequences of ``S`` tokens; return ``model``.

    >>> from lessons_lib import run
    >>> from lessons_lib.models import GPTConfig
    >>> from lessons_lib.models.corpus import batch
    >>> from lessons_lib.sequence_parallel import ATTENTIONS
    >>> tokens, targets = batch(step=0, n_sequences=2, S=64)
    >>> def step():
    ...     mesh = Mesh(cp=4)
    ...     model = context_parallel(GPT(GPTConfig(L=1)), ATTENTIONS["zigzag"], mesh)
    ...     loss = model.loss(tokens, targets)                              # of this rank's tokens
    ...     return round(mesh["cp"].all_reduce(loss.detach()).item(), 4)    # of all
    >>> run(step, ranks=4).values == [round(GPT(GPTConfig(L=1)).loss(tokens, targets).item(), 4)] * 4
    True

    Every rank is given all tokens and targets of its sequences, few bytes as they are, and takes its own out
    of them. So labels are shifted before they are cut, and the loss is divided by the number of all. From
    the embedding on everything is ``B S@cp D``; parameters are whole. The losses and *all* gradients are sums
    over a rank's own tokens: both are added up over ``axis``, as over ``dp``. Dropout drops what it drops on
    one device, if the ranks' generators are in step.

    ``S`` is the longest sequence of the model if not given. Raises RefusedError where it cannot be dealt out,
    where heads cannot be shared out, and for sequences that are not ``S`` tokens long: a share, given for the
    whole, would be cut again.
    Source: context parallelism in Megatron core, whose users cut the batch themselves.
    """
    group, config = mesh[axis], model.config
    S = config.S if S is None else S
    if S > config.S:
        raise RefusedError(
            f"sequences of S={S} tokens were asked of a model with S={config.S} learned positions; "
            f"build GPTConfig(S={S})."
        )
    attention.check(S, group.size, config.H, config.G)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.attend = partial(attention.attend, group=group)  # type: ignore[method-assign]
        block.dropout.positions = partial(_positions, attention, group, S)  # type: ignore[method-assign]
    own = partial(_own, attention, group, S)
    for module in (model.embedding, model.position):
        module.forward = partial(_on_own, module.forward, own)  # type: ignore[method-assign]
    loss = model.cross_entropy
    loss.forward = partial(_with_own, loss.forward, own)  # type: ignore[method-assign]
    return model


def _own(attention: SequenceAttention, group: Group, S: int, X: Tensor) -> Tensor:
    """This rank's tokens of what is numbered along S: tokens, their places, their targets."""
    if X.shape[-1] != S:
        raise RefusedError(
            f"a sequence of {X.shape[-1]} tokens was given to a model that is cut for S={S} over "
            f"{group.size} ranks. Give every rank whole sequences of {S} tokens, not its share of them; or "
            "prepare the model for another S."
        )
    return shard_tokens(X, attention.assignment, group, dim=-1)


def _positions(attention: SequenceAttention, group: Group, S: int, x: Tensor) -> Tensor:
    """Where the elements of this rank's x [B, s, D] stand in the whole X [B, S, D]: what dropout asks."""
    B, _, D = x.shape
    places = torch.arange(B * S, device=x.device).view(B, S)
    return _own(attention, group, S, places)[..., None] * D + torch.arange(D, device=x.device)


def _on_own(embed: Callable[[Tensor], Tensor], own: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    return embed(own(X))


def _with_own(
    loss: Callable[[Tensor, Tensor], Tensor], own: Callable[[Tensor], Tensor], logits: Tensor, targets: Tensor
) -> Tensor:
    return loss(logits, own(targets))
