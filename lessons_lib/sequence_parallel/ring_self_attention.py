"""Ring self-attention: keys go round once, then values; the scores of a rank's queries are kept whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from lessons_lib.mesh import Group
from lessons_lib.sequence_parallel.attention import SequenceAttention
from lessons_lib.sequence_parallel.online_softmax import as_heads, as_rows
from lessons_lib.sequence_parallel.tokens import Tokens, hidden_pairs
from lessons_lib.sequence_parallel.visits import visits
from lessons_lib.timeline import ring_traffic


class RingSelfAttention(SequenceAttention):
    """Two passes forward: all keys for the scores, an ordinary softmax, then all values.

    >>> RingSelfAttention().traffic(B=1, S=16, H=2, K=4, P=4)
    {'forward': 192, 'backward': 576}

    Equations, on rank r with queries Q_r; c runs round the ring:

        forward     S_r = [Q_r K_c.T / sqrt(K) for each c]      pass 1: K travels
                    P_r = softmax(S_r)                          whole rows are here
                    O_r = sum over c of P_rc V_c                pass 2: V travels
        backward    dP_r = [dO_r V_c.T for each c]              V travels
                    dV   = sum over r of P_r.T dO_r             all-reduce, of which a rank keeps its piece
                    dS_r = P_r (dP_r - sum of dP_r P_r)
                    dK   = sum over r of dS_r.T Q_r / sqrt(K)   all-reduce
                    dQ_r = sum over c of dS_rc K_c / sqrt(K)    K travels

    Layouts: all ``B H S@cp K``, in contiguous pieces.
    Traffic per rank, with n = B S/p H K: 2 (p-1) n elements forward, 6 (p-1) n backward: 8 (p-1) n, as much
    as Megatron's 1D tensor parallelism sends for a whole layer.
    Memory kept for backward per rank: q, k, v, and P_r, B H S/p S elements: it grows with the square of S.
    Raises RefusedError where p does not divide S.
    Source: Li et al. 2021 (Sequence Parallelism: Long Sequence Training from System Perspective), section
    3.2, without masks. Their code, in Colossal-AI, divides dQ, dK and dV by p; these here are the gradients.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mine: Tokens, group: Group, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        B, h, s, K = q.shape
        weights = q.new_empty(B, h, s, s * group.size)
        for source, (k_c, *documents_c) in visits([k, *mine.numbers], group):
            scores = as_heads(as_rows(q, k) @ k_c.mT, q) / math.sqrt(K)
            hidden = hidden_pairs(mine, self.tokens(source, q, group, *documents_c), causal)
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            weights[..., _columns(source, s)] = scores
        weights = weights.softmax(-1)
        o = torch.zeros_like(q)
        for source, (v_c,) in visits([v], group):
            o += as_heads(as_rows(weights[..., _columns(source, s)], v) @ v_c, q)
        return o, (q, k, v, weights)

    def backward(
        self, do: Tensor, kept: Sequence[Tensor], mine: Tokens, group: Group, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, weights = kept
        s, K = q.shape[-2:]
        dscores = torch.empty_like(weights)
        for source, (v_c,) in visits([v], group):
            dscores[..., _columns(source, s)] = as_heads(as_rows(do, v) @ v_c.mT, q)
        dv = self.sum_of_mine(as_rows(weights, v).mT @ as_rows(do, v), group)
        dscores = weights * (dscores - (dscores * weights).sum(-1, keepdim=True)) / math.sqrt(K)
        dk = self.sum_of_mine(as_rows(dscores, k).mT @ as_rows(q, k), group)
        dq = torch.zeros_like(q)
        for source, (k_c,) in visits([k], group):
            dq += as_heads(as_rows(dscores[..., _columns(source, s)], k) @ k_c, q)
        return dq, dk, dv

    def sum_of_mine(self, terms: Tensor, group: Group) -> Tensor:
        """Add up all ranks' terms for all tokens, of which this rank keeps its own tokens' sums."""
        return group.piece(group.all_reduce(terms), 2)

    collective = "all_reduce"  # of sum_of_mine

    def traffic(
        self, B: int, S: int, H: int, K: int, P: int, G: int | None = None, documents: bool = False
    ) -> dict[str, int | Fraction]:
        n, ids = B * S // P * (G or H) * K, B * S // P * documents
        return {
            "forward": (P - 1) * (2 * n + ids),
            "backward": (P - 1) * 2 * n + 2 * ring_traffic(self.collective, P * n, P),
        }

    def kept(self, B: int, S: int, H: int, K: int, P: int, G: int | None = None) -> int:
        return B * S // P * (H * K + 2 * (G or H) * K + H * S)


class RingSelfAttentionScattered(RingSelfAttention):
    """The same, with dK and dV reduce-scattered: an all-reduce of which a rank keeps a piece is half wasted.

    >>> RingSelfAttentionScattered().traffic(B=1, S=16, H=2, K=4, P=4)
    {'forward': 192, 'backward': 384}

    Traffic per rank, with n = B S/p H K: 2 (p-1) n elements forward, 4 (p-1) n backward.
    """

    collective = "reduce_scatter"

    def sum_of_mine(self, terms: Tensor, group: Group) -> Tensor:
        return group.reduce_scatter(terms, 2)


def published_memory(part: str, B: int, S: int, H: int, K: int, P: int) -> dict[str, Fraction]:
    """What the paper counts for a layer's ``"mlp"`` or ``"attention"``: elements per rank, in 1D and here.

    >>> published_memory("mlp", B=32, S=64, H=4, K=16, P=4)             # B S = 32 D: no difference
    {'tensor': Fraction(294912, 1), 'sequence': Fraction(294912, 1)}

    Weights count four times, with their gradients and Adam's two moments. 1D cuts weights and keeps whole
    what enters and leaves; here it is the other way round. So the sequence is the better cut where B S > 32 D
    (MLP), or B S > 16 H K (attention), whatever P.
    Source: Li et al. 2021, tables 1 and 2, of which D = H K is one case.
    """
    D = H * K
    whole = B * S * D
    weights, inside = {
        "mlp": (32 * D * D, 4 * whole),
        "attention": (16 * H * K * D, 4 * whole + B * H * S * S),
    }[part]
    return {
        "tensor": Fraction(weights + inside, P) + whole,
        "sequence": weights + Fraction(inside + whole, P),
    }


def _columns(rank: int, s: int) -> slice:
    """Where, among the keys of all ranks, those of ``rank`` stand."""
    return slice(rank * s, (rank + 1) * s)
