"""Attention tile by tile, so that what is in memory at once grows with the tokens and not with their square.

Source: Dao et al. 2022 (FlashAttention), algorithms 1 and 4, as a loop over tiles in plain torch. On a GPU
one kernel does this without writing a tile to memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lessons_lib.sequence_parallel.online_softmax import Partial, attend_part, gradients_of_part, merge
from lessons_lib.sequence_parallel.tokens import Tokens, hidden_pairs

TILE = 256  # queries, and keys, of one tile


class Tile(NamedTuple):
    """Some neighbouring queries, some neighbouring keys, and which of their pairs are hidden."""

    queries: slice
    keys: slice
    hidden: Tensor | None  # None where all is seen


def tiles(queries: Tokens, keys: Tokens, causal: bool, pieces: int = 1, size: int = TILE) -> Iterator[Tile]:
    """Cut queries x keys into tiles, and leave out those that are hidden wholly.

    No tile crosses the border of two ``pieces``, whose positions jump.

    >>> early, late = Tokens(torch.arange(0, 4)), Tokens(torch.arange(4, 8))
    >>> here_and_there = (early, early), (late, early), (early, late)
    >>> [len(list(tiles(queries, keys, causal=True, size=2))) for queries, keys in here_and_there]
    [3, 4, 0]
    """
    for rows in _runs(len(queries.positions), pieces, size):
        for columns in _runs(len(keys.positions), pieces, size):
            hidden = hidden_pairs(queries.at(rows), keys.at(columns), causal)
            if hidden is None or not hidden.any():
                yield Tile(rows, columns, None)
            elif not hidden.all():
                yield Tile(rows, columns, hidden)


def _runs(n: int, pieces: int, size: int) -> list[slice]:
    """
    >>> _runs(6, pieces=2, size=2)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 5, None), slice(5, 6, None)]
    """
    piece = n // pieces
    return [
        slice(first + at, first + min(at + size, piece))
        for first in range(0, n, piece)
        for at in range(0, piece, size)
    ]


def no_keys(q: Float[Tensor, "B h s K"]) -> Partial:
    """What every query has before it has seen any key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    m = torch.full_like(q[..., :1], -math.inf, dtype=wide)
    return Partial(m, torch.zeros_like(m), torch.zeros_like(q, dtype=wide))


def add_keys(
    running: Partial,
    q: Float[Tensor, "B h s K"],
    k: Float[Tensor, "B g t K"],
    v: Float[Tensor, "B g t K"],
    tiles: Iterable[Tile],
) -> None:
    """Merge into ``running``, in place, what these keys give to the queries."""
    for rows, columns, hidden in tiles:
        before = Partial(*(x[:, :, rows] for x in running))
        part = attend_part(q[:, :, rows], k[:, :, columns], v[:, :, columns], hidden)
        for old, new in zip(before, merge(before, part), strict=True):
            old.copy_(new)


def add_gradients(
    sums: tuple[Tensor, Tensor, Tensor],
    do: Float[Tensor, "B h s K"],
    q: Float[Tensor, "B h s K"],
    k: Float[Tensor, "B g t K"],
    v: Float[Tensor, "B g t K"],
    lse: Float[Tensor, "B h s 1"],
    delta: Float[Tensor, "B h s 1"],
    tiles: Iterable[Tile],
) -> None:
    """Add to dQ, dK and dV, ``sums``, in place, what these queries and keys give to them."""
    for rows, columns, hidden in tiles:
        do_r, q_r, lse_r, delta_r = (x[:, :, rows] for x in (do, q, lse, delta))
        k_c, v_c = (x[:, :, columns] for x in (k, v))
        terms = gradients_of_part(do_r, q_r, k_c, v_c, lse_r, delta_r, hidden)
        for total, term, where in zip(sums, terms, (rows, columns, columns), strict=True):
            total[:, :, where] += term
