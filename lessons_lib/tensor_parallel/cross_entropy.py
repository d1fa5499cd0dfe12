"""Cross-entropy where the logits of a token lie on several ranks: three numbers travel, and no logit."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group, Mesh, sum_copy
from lessons_lib.models.gpt import IGNORED
from lessons_lib.tensor_parallel.vocabulary import Vocabulary, check_words
from lessons_lib.timeline import ring_traffic


def token_losses(
    logits: Float[Tensor, "*b v"],
    labels: Int[Tensor, "*b"],
    V: int,
    group: Group,
    ignore_index: int = IGNORED,
) -> Float[Tensor, "*b"]:
    """Return the loss of every token of this rank's rows, in nats, differentiably; 0 where ignored.

    Over the ranks that share the words of the same rows, for each token:

        m = max of the logits            all-reduce (max): exp never sees more than 0
        s = sum of exp(logit - m)        all-reduce
        t = logit of the label - m       all-reduce: one rank has it, the others add 0
        loss = log s - t
        dlogit = (exp(logit - m) / s - [word is the label]) dloss         local

    The last columns are padding where the ranks hold more than ``V`` words: they are no part of m and s, and
    their gradient is 0. Of 16-bit logits all this is computed in float32.
    Traffic per rank: forward three all-reduces of one number per token, backward nothing.
    Memory kept for backward: this rank's softmax, in the size of its logits.
    Source: Shoeybi et al. 2019, section 3; Megatron-LM ``core/tensor_parallel/cross_entropy.py``.
    """
    return _TokenLosses.apply(logits, labels, V, group, ignore_index)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, V: int, group: Group, ignore_index: int) -> Tensor:
        n_words = logits.shape[-1]
        first = group.rank * n_words
        word = torch.arange(first, first + n_words, device=logits.device)
        scores = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        scores = scores.masked_fill(word >= V, -torch.inf)

        scores = scores - group.all_reduce(scores.amax(-1), "max")[..., None]
        softmax = scores.exp()
        total = group.all_reduce(softmax.sum(-1))
        counts = labels != ignore_index
        here = (labels >= first) & (labels < first + n_words)
        at = (labels - first).where(here, 0)[..., None]
        own = scores.gather(-1, at).squeeze(-1).masked_fill(~here, 0)
        target = group.all_reduce(own)

        ctx.save_for_backward(softmax.div_(total[..., None]), at, here, counts)
        ctx.dtype = logits.dtype
        return (total.log() - target).masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, at, here, counts = ctx.saved_tensors
        difference = softmax.scatter_add(-1, at, -here[..., None].to(softmax.dtype))
        dlogits = difference * (dloss * counts)[..., None]
        return dlogits.to(ctx.dtype), None, None, None, None


def loss_sum(
    logits: Float[Tensor, "*b v"],
    labels: Int[Tensor, "*B"],
    V: int,
    vocabulary: Vocabulary,
    mesh: Mesh,
    ignore_index: int = IGNORED,
) -> Float[Tensor, ""]:
    """Return the losses of all tokens added up: the whole sum, on every rank, differentiably.

    >>> import torch
    >>> from lessons_lib import Layout, run
    >>> from lessons_lib.tensor_parallel import VOCABULARIES
    >>> logits, labels = torch.tensor([[0.0, 1000.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([1, 2])
    >>> padding = torch.full((2, 1), 5000.0)
    >>> def step():
    ...     mesh, vocabulary = Mesh(tp=2), VOCABULARIES["1d"]
    ...     own = vocabulary.logits.shard(torch.cat([logits, padding], 1), mesh)
    ...     return round(loss_sum(own, labels, 3, vocabulary, mesh).item(), 4)         # 0 + log 3
    >>> run(step, ranks=2).values
    [1.0986, 1.0986]

    ``logits`` are this rank's block, ``labels`` all of them, on every rank. For the mean divide by
    :func:`n_counted` of all labels: by the tokens of the whole batch, never by a rank's own.
    Every rank has the same sum and calls ``backward`` on it; the sum over the axes that cut rows therefore
    has the identity for its backward.
    Traffic: :func:`loss_traffic`.
    Raises RefusedError, before any communication and alike on every rank, for a label that is no word.
    """
    check_words(labels, V, "labels", ignore_index)
    rows = vocabulary.rows(vocabulary.logits, labels.dim())
    own = rows.shard(labels, mesh)
    if own.shape != logits.shape[:-1]:
        raise RefusedError(
            f"labels of shape {tuple(labels.shape)} lie as {rows!r}, so {tuple(own.shape)} on each rank of "
            f"{mesh!r}, beside logits of {tuple(logits.shape[:-1])} rows. Give all labels on every rank."
        )
    (words,) = vocabulary.logits.dim("V")
    total = token_losses(logits, own, V, mesh[words], ignore_index).sum()
    for axis in rows.axes:
        total = sum_copy(total, mesh[axis])
    return total


def n_counted(labels: Int[Tensor, "*B"], ignore_index: int = IGNORED) -> int:
    """How many of all labels count: what the mean divides by.

    >>> n_counted(torch.tensor([5, IGNORED, 7]))
    2
    """
    return int((labels != ignore_index).sum())


def loss_traffic(
    n_tokens: int, vocabulary: Vocabulary, sizes: Mapping[str, int]
) -> dict[str, int | Fraction]:
    """Elements each rank sends for the loss of ``n_tokens``, by the ring convention; or their mean.

    >>> from lessons_lib.tensor_parallel import VOCABULARIES
    >>> loss_traffic(1000, VOCABULARIES["1d"], {"tp": 4})           # whatever V is
    {'forward': 4500, 'backward': 0}
    """
    (words,) = vocabulary.logits.dim("V")
    row_axes = vocabulary.rows(vocabulary.logits, 1).axes
    rows = n_tokens // prod(sizes[axis] for axis in row_axes)
    forward = 3 * ring_traffic("all_reduce", rows, sizes[words])
    forward += sum(ring_traffic("all_reduce", 1, sizes[axis]) for axis in row_axes)
    return {"forward": forward, "backward": 0}


class VocabParallelCrossEntropy(nn.Module):
    """The cross-entropy of cut logits, added up over all tokens: :func:`loss_sum` as a module."""

    def __init__(self, V: int, vocabulary: Vocabulary, mesh: Mesh, ignore_index: int = IGNORED) -> None:
        super().__init__()
        self.V, self.vocabulary, self.mesh, self.ignore_index = V, vocabulary, mesh, ignore_index

    def forward(self, logits: Float[Tensor, "*b v"], labels: Int[Tensor, "*B"]) -> Float[Tensor, ""]:
        return loss_sum(logits, labels, self.V, self.vocabulary, self.mesh, self.ignore_index)

    def extra_repr(self) -> str:
        return f"V={self.V}, logits {self.vocabulary.logits}"
