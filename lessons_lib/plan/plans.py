"""Which module of the GPT is computed by which scheme, and how what passes between them lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.sequence_parallel import SequenceColumn, SequenceRow
from lessons_lib.tensor_parallel import VOCABULARIES, Cube, Scheme, Vocabulary
from lessons_lib.tensor_parallel.grids import grid

Plan = Mapping[str, str | Scheme]


def in_pairs(first: str | Scheme, second: str | Scheme) -> Plan:
    """Plan both branches of every block: the first layer of each feeds the second.

    >>> in_pairs("column", "row")["blocks.*.mlp.down"]
    'row'
    """
    return {
        "blocks.*.attention.qkv": first,
        "blocks.*.attention.proj": second,
        "blocks.*.mlp.up": first,
        "blocks.*.mlp.down": second,
    }


GPT_1D: Plan = in_pairs("column", "row")
"""Megatron's 1D tensor parallelism of the blocks: in each branch of a block a column layer feeds a row layer.

Embeddings, norms and the head stay whole on every rank, and so do the tokens. :data:`PLANS` cuts the
vocabulary, too.
"""


@dataclass(frozen=True)
class GPTPlan:
    """A plan for the whole GPT: the linear layers of its blocks, and all that stands between them.

    The layout of the residual stream decides what becomes of norms, dropout and positions; the
    :class:`~lessons_lib.tensor_parallel.Vocabulary` says it, and how the table of words and the logits lie.

    >>> {name: str(plan.stream) for name, plan in PLANS.items()}
    {'1d': 'B S D', '1d-sp': 'B S@tp D', '2d': 'B@row S D@col', '2.5d': 'B@depth@row S D@col',
     '3d': 'B@i@j S D@k'}
    """

    layers: Plan
    vocabulary: Vocabulary

    @property
    def stream(self) -> Layout:
        """How the residual stream [B, S, D] lies."""
        stream = self.vocabulary.stream
        cuts = dict(zip(stream.dims, stream.cuts, strict=True))
        return Layout.of({dim: cuts.get(dim, ()) for dim in ("B", "S", "D")})


PLANS: dict[str, GPTPlan] = {
    "1d": GPTPlan(GPT_1D, VOCABULARIES["1d"]),
    "1d-sp": GPTPlan(in_pairs(SequenceColumn(), SequenceRow()), VOCABULARIES["1d-sp"]),
    "2d": GPTPlan(in_pairs("2d", "2d"), VOCABULARIES["2d"]),
    "2.5d": GPTPlan(in_pairs("2.5d", "2.5d"), VOCABULARIES["2.5d"]),
    "3d": GPTPlan(in_pairs("3d", Cube().exchanged()), VOCABULARIES["3d"]),
}
"""The whole GPT under every scheme."""


def mesh_sizes(name: str, n_ranks: int, depth: int = 1) -> dict[str, int]:
    """Sizes of the mesh on which the plan called ``name`` uses ``n_ranks`` ranks.

    >>> mesh_sizes("1d", 6), mesh_sizes("2d", 9)
    ({'tp': 6}, {'row': 3, 'col': 3})

    Raises RefusedError for an unknown name, or a number of ranks of which there is no such grid.
    """
    if name not in PLANS:
        raise RefusedError(f"no plan is called {name!r}; there are {', '.join(PLANS)}.")
    if depth != 1 and name != "2.5d":
        raise RefusedError(
            f"depth={depth} is the number of grids of 2.5d, and {name} has none; leave it out."
        )
    return grid("column" if name.startswith("1d") else name, n_ranks, depth)
