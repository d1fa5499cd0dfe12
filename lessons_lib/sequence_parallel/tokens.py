"""What a rank must know of its tokens: where in the sequence they stand, and to which document they belong.

Two tokens may look at each other or not, depending on both. So positions and documents are dealt out as the
tokens are, and whoever meets keys from elsewhere asks theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lessons_lib.mesh import Group
from lessons_lib.sequence_parallel.assignment import Assignment


class Tokens(NamedTuple):
    """Places in the sequence of some tokens and, of packed sequences, the number of each one's document."""

    positions: Int[Tensor, " s"]
    documents: Int[Tensor, "B s"] | None = None

    def at(self, where: slice) -> Tokens:
        """Some of these tokens."""
        return Tokens(self.positions[where], *(numbers[:, where] for numbers in self.numbers))

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        """What travels with the keys of these tokens: the document numbers, if there are any."""
        return () if self.documents is None else (self.documents,)


def hidden_pairs(queries: Tokens, keys: Tokens, causal: bool) -> Bool[Tensor, "*_ s t"] | None:
    """Mark the keys that a query must not see: later ones, if ``causal``, and those of other documents.

    >>> tokens = Tokens(torch.tensor([0, 1, 2]), torch.tensor([[0, 0, 1]]))
    >>> hidden_pairs(tokens, tokens, causal=True).int()
    tensor([[[[0, 1, 1],
              [0, 0, 1],
              [1, 1, 0]]]], dtype=torch.int32)
    """
    hidden = None
    if causal:
        hidden = keys.positions > queries.positions[:, None]
    if queries.documents is not None and keys.documents is not None:
        others = (keys.documents[:, None] != queries.documents[:, :, None])[:, None]  # B 1 s t
        hidden = others if hidden is None else hidden | others
    return hidden


def shard_tokens(X: Tensor, assignment: Assignment, group: Group, dim: int = 1) -> Tensor:
    """This rank's tokens of a tensor that every rank has whole, with the sequence in ``dim``. No
    communication.

    >>> from lessons_lib import Mesh, run
    >>> from lessons_lib.sequence_parallel.assignment import Zigzag
    >>> text = torch.arange(9)[None]
    >>> def step():
    ...     cut = lambda X: shard_tokens(X, Zigzag(), Mesh(cp=2)["cp"]).tolist()
    ...     return cut(text[:, :-1]), cut(text[:, 1:])                  # tokens and their labels
    >>> run(step, ranks=2).values
    [([[0, 1, 6, 7]], [[1, 2, 7, 8]]), ([[2, 3, 4, 5]], [[3, 4, 5, 6]])]

    Labels are shifted *before* they are cut: the label of a piece's last token is the first token of another
    rank's piece. Whatever belongs to tokens is cut alike: labels, masks, document numbers, upstream
    gradients.
    Raises RefusedError where the tokens cannot be dealt out equally.
    """
    positions = assignment.positions(X.shape[dim], group.size, group.rank)
    return X.index_select(dim, torch.tensor(positions, device=X.device))


def gather_tokens(x: Tensor, assignment: Assignment, group: Group, dim: int = 1) -> Tensor:
    """The whole tensor, in the order of the sequence, on every rank: what :func:`shard_tokens` cut.

    Traffic per rank: an all-gather. It serves to look at results; training needs none.
    Raises RefusedError for a tensor that requires grad.
    """
    S = x.shape[dim] * group.size
    order = [at for rank in range(group.size) for at in assignment.positions(S, group.size, rank)]
    return group.all_gather(x, dim).index_select(dim, torch.tensor(order, device=x.device).argsort())
