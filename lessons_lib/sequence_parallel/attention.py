"""What an attention over a cut sequence is, and the one place where it meets autograd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group
from lessons_lib.sequence_parallel.assignment import Assignment, Contiguous, share
from lessons_lib.sequence_parallel.tokens import Tokens


class SequenceAttention(ABC):
    """One way for ranks that each hold a share of the tokens to let every token look at all.

    Layouts: q, k, v, o and their gradients ``B H S@cp K``, where ``assignment`` says which tokens of S a rank
    holds; k and v may have fewer heads, G (grouped-query attention: H / G neighbouring heads of queries
    look at one head of keys).

    A method says how forward and backward are computed, each on plain tensors. Autograd comes from here, once
    for all methods.
    """

    assignment: Assignment = Contiguous()

    def attend(
        self,
        q: Float[Tensor, "B h s K"],
        k: Float[Tensor, "B_k h_k s_k K_k"],
        v: Float[Tensor, "B_v h_v s_v K_v"],
        group: Group,
        causal: bool = True,
        documents: Int[Tensor, "B_d s_d"] | None = None,
    ) -> Float[Tensor, "B h s K"]:
        """Compute the attention of this rank's queries to all keys, differentiably.

        ``documents`` numbers the document of each of this rank's tokens: tokens see their own document alone.
        Raises RefusedError, before any communication, for shapes with which the method cannot work.
        """
        _check_shapes(q, k, v, documents)
        self.check(q.shape[2] * group.size, group.size, q.shape[1], k.shape[1])
        mine = self.tokens(group.rank, q, group, documents)
        return _Attend.apply(q, k, v, self, mine, group, causal)

    def check(self, S: int, P: int, H: int, G: int | None = None) -> None:
        """Refuse sizes with which the method cannot work. The same on every rank; no communication."""
        share(S, P, self.assignment.pieces_per_rank)
        if H % (G or H):
            raise RefusedError(
                f"H={H} heads of queries cannot share G={G} heads of keys evenly. "
                f"Try G={' or '.join(str(n) for n in range(1, H + 1) if H % n == 0)}."
            )

    def tokens(self, rank: int, q: Tensor, group: Group, documents: Tensor | None = None) -> Tokens:
        """The tokens that ``rank`` of the group holds, given this rank's q, and their documents if known."""
        positions = self.assignment.positions(q.shape[2] * group.size, group.size, rank)
        return Tokens(torch.tensor(positions, device=q.device), documents)

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mine: Tokens, group: Group, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return this rank's o, and what backward needs."""

    @abstractmethod
    def backward(
        self, do: Tensor, kept: Sequence[Tensor], mine: Tokens, group: Group, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's dq, dk and dv, complete: nothing is left to be summed or divided."""

    @abstractmethod
    def traffic(
        self, B: int, S: int, H: int, K: int, P: int, G: int | None = None, documents: bool = False
    ) -> dict[str, int | Fraction]:
        """Return the elements each rank sends, by the ring convention; document numbers count one each."""

    @abstractmethod
    def kept(self, B: int, S: int, H: int, K: int, P: int, G: int | None = None) -> int:
        """Return the elements each rank keeps from forward to backward."""


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        method: SequenceAttention,
        mine: Tokens,
        group: Group,
        causal: bool,
    ) -> Tensor:
        ctx.method, ctx.around = method, (mine, group, causal)
        o, kept = method.forward(q.detach(), k.detach(), v.detach(), *ctx.around)
        ctx.save_for_backward(*kept)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.method.backward(do, ctx.saved_tensors, *ctx.around), None, None, None, None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> None:
    B, _, s, K = q.shape
    if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (B, s, K):
        raise RefusedError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not belong together: each is "
            "B, heads, tokens of this rank, K; only heads may be fewer in k and v, in both alike."
        )
    if documents is not None and documents.shape != (B, s):
        raise RefusedError(
            f"documents has shape {list(documents.shape)}; it numbers the document of each of this rank's "
            f"{B} x {s} tokens. Cut it as the tokens were cut: shard_tokens(documents, ...)."
        )
