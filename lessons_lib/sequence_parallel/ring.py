"""Ring attention: keys and values travel, and the softmax is put together on the way."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from lessons_lib.mesh import Group
from lessons_lib.sequence_parallel.assignment import Assignment
from lessons_lib.sequence_parallel.attention import SequenceAttention
from lessons_lib.sequence_parallel.blockwise import add_gradients, add_keys, no_keys, tiles
from lessons_lib.sequence_parallel.online_softmax import finish
from lessons_lib.sequence_parallel.tokens import Tokens
from lessons_lib.sequence_parallel.visits import Hop, visits


class RingAttention(SequenceAttention):
    """Every rank's keys and values visit every rank; a rank merges what each visit gives to its queries.

    >>> from lessons_lib.sequence_parallel import ATTENTIONS
    >>> ATTENTIONS["ring"].traffic(B=1, S=16, H=2, K=4, P=4)
    {'forward': 192, 'backward': 448}

    Equations, on rank r with queries Q_r; c runs over r, r-1, ..., as the ring brings them:

        forward     (m, l, o) = merge over c of attend_part(Q_r, K_c, V_c)
                    O_r = o / l     lse_r = m + log l
        backward    P_rc  = exp(Q_r K_c.T / sqrt(K) - lse_r)      no second softmax: lse is the final one
                    dS_rc = P_rc (dO_r V_c.T - delta_r)           delta_r = sum of dO_r O_r
                    dQ_r  = sum over c of dS_rc K_c / sqrt(K)     stays here
                    dV_c  = sum over r of P_rc.T dO_r             dK_c = sum over r of dS_rc.T Q_r / sqrt(K)

    dK_c and dV_c are sums over all ranks: the two travel with K_c and V_c, each rank adds its term, and one
    more hop, the p-th, brings them home.

    Layouts: all ``B H S@cp K``; the assignment says which tokens. Masks ask the tokens' own positions, so
    every assignment gives the same numbers, and only the work of the ranks differs. Tiles that the mask hides
    wholly are not computed.
    Traffic per rank, with n = B S/p G K: 2 (p-1) n elements forward; backward 2 (p-1) n for the keys and
    values and 2 p n for their gradients, which travel in float32 where q is coarser. Hops begin before
    the work on what is here already.
    Memory kept for backward per rank: q, k, v, o and lse. Besides, two sets of keys and values, and backward
    two of their gradients: nothing of S x S/p elements, and no tile larger than 256 x 256 per head.
    Raises RefusedError where S cannot be dealt out equally.
    Source: Liu et al. 2023 (Ring Attention with Blockwise Transformers), section 3.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mine: Tokens, group: Group, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        running = no_keys(q)
        for source, ((k_c, v_c), *documents_c) in visits([torch.stack((k, v)), *mine.numbers], group):
            theirs = self.tokens(source, q, group, *documents_c)
            add_keys(running, q, k_c, v_c, tiles(mine, theirs, causal, self.assignment.pieces_per_rank))
        o, lse = finish(running)
        return o.to(q.dtype), (q, k, v, o.to(q.dtype), lse)

    def backward(
        self, do: Tensor, kept: Sequence[Tensor], mine: Tokens, group: Group, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o, lse = kept
        delta = (do.to(lse.dtype) * o).sum(-1, keepdim=True)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        travelling = None  # dK_c and dV_c, of the keys that are here
        for source, ((k_c, v_c), *documents_c) in visits([torch.stack((k, v)), *mine.numbers], group):
            theirs = self.tokens(source, q, group, *documents_c)
            seen = tiles(mine, theirs, causal, self.assignment.pieces_per_rank)
            terms = dq.new_zeros(2, *k.shape)
            add_gradients((dq, terms[0], terms[1]), do, q, k_c, v_c, lse, delta, seen)
            if travelling:
                (sum_so_far,) = travelling.wait()
                terms += sum_so_far
            travelling = Hop([terms], group)
        assert travelling
        ((dk, dv),) = travelling.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def traffic(
        self, B: int, S: int, H: int, K: int, P: int, G: int | None = None, documents: bool = False
    ) -> dict[str, int | Fraction]:
        n, ids = B * S // P * (G or H) * K, B * S // P * documents
        home = 2 * P * n if P > 1 else 0
        visiting = (P - 1) * (2 * n + ids)
        return {"forward": visiting, "backward": visiting + home}

    def kept(self, B: int, S: int, H: int, K: int, P: int, G: int | None = None) -> int:
        return B * S // P * (2 * H * K + 2 * (G or H) * K + H)
