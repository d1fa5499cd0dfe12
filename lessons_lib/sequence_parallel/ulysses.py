"""Ulysses: instead of a part of every head, a rank gets the whole sequence of some heads."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group
from lessons_lib.sequence_parallel.attention import SequenceAttention
from lessons_lib.sequence_parallel.blockwise import add_gradients, add_keys, no_keys, tiles
from lessons_lib.sequence_parallel.online_softmax import finish
from lessons_lib.sequence_parallel.tokens import Tokens, gather_tokens
from lessons_lib.timeline import ring_traffic

HEADS, TOKENS = 1, 2  # dims of q, k, v and o


class Ulysses(SequenceAttention):
    """Exchange, so that heads are cut instead of tokens; attend to whole sequences; exchange back.

    >>> Ulysses().traffic(B=1, S=16, H=4, K=4, P=4)
    {'forward': 192, 'backward': 192}

    Equations, for p ranks and the all-to-all x -> x', whose backward is the all-to-all back:

        forward     q', k', v' = q, k, v exchanged       B H S@cp K  to  B H@cp S K
                    o' = attention(q', k', v')           any serial attention, of a rank's own heads
                    o  = o' exchanged                    B H@cp S K  to  B H S@cp K
        backward    do' = do exchanged;  dq', dk', dv' = the serial gradients;  each exchanged back

    Layouts: outside ``B H S@cp K``, inside ``B H@cp S K``, in contiguous pieces.
    Grouped-query heads: where p does not divide G but G divides p, each head of k and v goes to
    p / G ranks, as copies, whose gradients are added up; they count as p heads.
    Traffic per rank, with n = B S/p H K: 4 (p-1)/p n elements forward and as much backward: with more ranks,
    less. Of G heads: 2 (p-1)/p (1 + G/H) n each way.
    Memory kept for backward per rank: q', k', v', o' and lse, as much as a p-th of the serial one's.
    Raises RefusedError where p does not divide S or H, or where of p and G neither divides the other.
    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3.
    """

    def attend(
        self,
        q: Float[Tensor, "B h s K"],
        k: Float[Tensor, "B_k h_k s_k K_k"],
        v: Float[Tensor, "B_v h_v s_v K_v"],
        group: Group,
        causal: bool = True,
        documents: Int[Tensor, "B_d s_d"] | None = None,
    ) -> Float[Tensor, "B h s K"]:
        self.check(q.shape[TOKENS] * group.size, group.size, q.shape[HEADS], k.shape[HEADS])
        copies = _copies(k.shape[HEADS], group.size)
        k, v = (x.repeat_interleave(copies, HEADS) for x in (k, v))  # whose backward adds the copies up
        return super().attend(q, k, v, group, causal, documents)

    def check(self, S: int, P: int, H: int, G: int | None = None) -> None:
        super().check(S, P, H, G)
        G = G or H
        legal = [p for p in range(1, H + 1) if H % p == 0 and (G % p == 0 or p % G == 0)]
        if H % P:
            raise RefusedError(
                f"H={H} heads cannot be shared out to {P} ranks: with Ulysses a rank gets whole heads. "
                f"Try {_numbers(legal)} ranks, or ring attention, which does not cut heads."
            )
        if G % P and P % G:
            raise RefusedError(
                f"G={G} heads of keys and values cannot be shared out to {P} ranks, nor each be copied "
                f"to equally many of them. Try {_numbers(legal)} ranks, or ring attention."
            )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mine: Tokens, group: Group, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = (group.all_to_all(x, HEADS, TOKENS) for x in (q, k, v))
        every = _every(q, *(gather_tokens(numbers, self.assignment, group) for numbers in mine.numbers))
        running = no_keys(q)
        add_keys(running, q, k, v, tiles(every, every, causal))
        o, lse = finish(running)
        o = o.to(q.dtype)
        return group.all_to_all(o, TOKENS, HEADS), (q, k, v, o, lse, *every.numbers)

    def backward(
        self, do: Tensor, kept: Sequence[Tensor], mine: Tokens, group: Group, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o, lse, *documents = kept
        do = group.all_to_all(do, HEADS, TOKENS)
        delta = (do.to(lse.dtype) * o).sum(-1, keepdim=True)
        every = _every(q, *documents)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        add_gradients((dq, dk, dv), do, q, k, v, lse, delta, tiles(every, every, causal))
        dq, dk, dv = (group.all_to_all(x.to(q.dtype), TOKENS, HEADS) for x in (dq, dk, dv))
        return dq, dk, dv

    def traffic(
        self, B: int, S: int, H: int, K: int, P: int, G: int | None = None, documents: bool = False
    ) -> dict[str, int | Fraction]:
        G = G or H
        heads = 2 * H + 2 * G * _copies(G, P)
        each_way = ring_traffic("all_to_all", B * S // P * heads * K, P)
        return {
            "forward": each_way + documents * ring_traffic("all_gather", B * S, P),
            "backward": each_way,
        }

    def kept(self, B: int, S: int, H: int, K: int, P: int, G: int | None = None) -> int:
        G = G or H
        return B * S * (2 * H * K + 2 * G * _copies(G, P) * K + H) // P


def _numbers(choices: list[int]) -> str:
    return " or ".join(map(str, choices))


def _copies(G: int, P: int) -> int:
    """How many ranks get each head of keys and values.

    >>> _copies(G=8, P=4), _copies(G=2, P=4)
    (1, 2)
    """
    return P // G if P % G == 0 else 1


def _every(q: Tensor, documents: Tensor | None = None) -> Tokens:
    """All tokens of the sequence, in order."""
    return Tokens(torch.arange(q.shape[TOKENS], device=q.device), documents)
