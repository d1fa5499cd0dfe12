"""Attention over some of the keys, and how two such answers become one.

A softmax needs all scores of its row, so an answer from half of the keys is wrong. Two numbers per row, the
largest score ``m`` and the sum ``l`` that the softmax divides by, say how wrong, and with them two wrong
halves make the exact answer: whatever way the keys are cut, and in whatever order the pieces come.

Source: Milakov and Gimelshein 2018, section 3, and, for the gradients, Dao et al. 2022 (FlashAttention),
appendix B.4. Scores and sums are float32 or finer, whatever q, k and v are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Partial(NamedTuple):
    """What some of the keys give to every query.

        m = max of its scores    l = sum of exp(score - m)    o = sum of exp(score - m) v

    A row that sees none of these keys has m = -inf, l = 0 and o = 0: merged with any other, it adds nothing.
    """

    m: Float[Tensor, "B h s 1"]
    l: Float[Tensor, "B h s 1"]
    o: Float[Tensor, "B h s K"]


def attend_part(
    q: Float[Tensor, "B h s K"],
    k: Float[Tensor, "B g t K"],
    v: Float[Tensor, "B g t K"],
    hidden: Bool[Tensor, "*_ s t"] | None = None,
) -> Partial:
    """Let ``s`` queries look at ``t`` keys, save those that ``hidden`` marks.

    Scores are q k / sqrt(K). With fewer heads of keys than of queries, h / g neighbouring heads of queries
    look at the same keys (grouped-query attention).
    """
    scores = _scores(q, k, hidden)
    m = scores.amax(-1, keepdim=True)
    weights = (scores - _finite(m)).exp()
    o = as_heads(as_rows(weights.to(v.dtype), v) @ v, q)
    return Partial(m, weights.sum(-1, keepdim=True), o.to(m.dtype))


def merge(a: Partial, b: Partial) -> Partial:
    """What the keys of ``a`` and those of ``b`` give together: both are brought to one maximum, and added.

    Score 0 with value 1 here, score ln 3 with value 5 there; the mean of the two answers would be 3:

    >>> q, one, five = (torch.tensor(x).view(1, 1, 1, 1) for x in (1.0, 1.0, 5.0))
    >>> here = attend_part(q, k=torch.zeros_like(q), v=one)
    >>> there = attend_part(q, k=torch.full_like(q, math.log(3)), v=five)
    >>> round(finish(merge(here, there))[0].item(), 5)                           # (1 x 1 + 3 x 5) / 4
    4.0
    """
    m = torch.maximum(a.m, b.m)
    of_a, of_b = (a.m - _finite(m)).exp(), (b.m - _finite(m)).exp()
    return Partial(m, of_a * a.l + of_b * b.l, of_a * a.o + of_b * b.o)


def finish(part: Partial) -> tuple[Float[Tensor, "B h s K"], Float[Tensor, "B h s 1"]]:
    """The output, and the logarithm of the sum of exp(score), of which backward makes all weights again.

        O = o / l        lse = m + log l

    A row that has seen no key at all gets zeros.
    """
    return part.o / part.l.masked_fill(part.l == 0, 1), part.m + part.l.log()


def gradients_of_part(
    do: Float[Tensor, "B h s K"],
    q: Float[Tensor, "B h s K"],
    k: Float[Tensor, "B g t K"],
    v: Float[Tensor, "B g t K"],
    lse: Float[Tensor, "B h s 1"],
    delta: Float[Tensor, "B h s 1"],
    hidden: Bool[Tensor, "*_ s t"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys give to dQ, and what these queries give to dK and dV: terms of sums, all three.

    P  = exp(scores - lse)        the weights of the whole softmax, piece by piece: lse is the final one
    dV = P.T dO                   dP = dO V.T
    dS = P (dP - delta)           delta = sum over K of dO O, of the final O
    dQ = dS K / sqrt(K)           dK = dS.T Q / sqrt(K)
    """
    p = (_scores(q, k, hidden) - _finite(lse)).exp()
    do_rows = as_rows(do, k).to(p.dtype)
    dv = as_rows(p, v).mT @ do_rows
    dp = as_heads(do_rows @ v.to(p.dtype).mT, q)
    ds = p * (dp - delta) / math.sqrt(q.shape[-1])
    dq = as_heads(as_rows(ds, k) @ k.to(p.dtype), q)
    dk = as_rows(ds, k).mT @ as_rows(q, k).to(p.dtype)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None) -> Float[Tensor, "B h s t"]:
    scores = as_heads(as_rows(q, k) @ k.mT, q) / math.sqrt(q.shape[-1])
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def as_rows(x: Tensor, k: Tensor) -> Tensor:
    """Heads that look at the same keys, one below the other: B h s _ to B g (h/g s) _."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def as_heads(rows: Tensor, q: Tensor) -> Tensor:
    """Back from :func:`as_rows` to the heads of q: B h s _."""
    return rows.unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def _finite(m: Tensor) -> Tensor:
    """0 for the -inf of a row that sees nothing: -inf - 0 is -inf, while -inf - -inf is not a number."""
    return m.masked_fill(m == -math.inf, 0)
