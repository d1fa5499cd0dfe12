"""The vocabulary over ranks: embedding, head and positions where words lie on different ranks.

One table E [V, D] serves twice. The embedding looks words up in it, X = onehot(tokens) E; the head compares
with it, logits = X E.T. Both are products, so a scheme cuts them as it cuts a linear layer. A
:class:`Vocabulary` says by three layouts how the residual stream, the table and the logits lie; what is
gathered, summed or scattered follows from them. The loss on cut logits is in
:mod:`lessons_lib.tensor_parallel.cross_entropy`.

Every rank is handed all token ids, which are small, and takes out what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh, copy_sum, gather_reduce_scatter, reduce_scatter_gather, sum_copy
from lessons_lib.tensor_parallel.panels import panels, reduce_each
from lessons_lib.tensor_parallel.scheme import check_grid
from lessons_lib.tensor_parallel.summa import Summa
from lessons_lib.timeline import ring_traffic

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class Vocabulary:
    """How the residual stream, the table [V, D] and the logits of one scheme lie.

    >>> for name, vocabulary in VOCABULARIES.items():
    ...     print(f"{name:5}  {vocabulary.table}  makes  {vocabulary.stream}, then  {vocabulary.logits}")
    1d     V@tp D  makes  B D, then  B V@tp
    1d-sp  V@tp D  makes  B S@tp D, then  B V@tp
    2d     V@row D@col  makes  B@row D@col, then  B@row V@col
    2.5d   V@row D@col  makes  B@depth@row D@col, then  B@depth@row V@col
    3d     V@j@i D@k  makes  B@i@j D@k, then  B@i@k V@j

    What follows, axis by axis. The embedding sums over the *first* axis that cuts V, for a word lies on one
    of its ranks: where that axis cuts rows of the stream, too, the sum is scattered over them, else all have
    it. Every other axis that cuts V is gathered. The head gathers what does not lie with the logits, and sums
    over the axis that cuts D.

    Traffic: :meth:`embedding_traffic` and :meth:`head_traffic`.
    Source: Shoeybi et al. 2019, section 3 (1D); Korthikanti et al. 2022 (1d-sp); Colossal-AI's
    ``VocabParallelEmbedding2D`` and ``3D``; Xu et al. 2021 (the head of 2D).
    """

    stream: Layout
    table: Layout
    logits: Layout

    def rows(self, layout: Layout, n_dims: int, without: str = "") -> Layout:
        """How token ids of ``n_dims`` dims lie beside ``layout``; dims it does not name are whole.

        >>> VOCABULARIES["3d"].rows(VOCABULARIES["3d"].stream, n_dims=2, without="j")
        Layout("B@i S")
        """
        cuts = dict(zip(layout.dims[:-1], layout.cuts[:-1], strict=True))
        unnamed = [name for name in ("S", "T", "U") if name not in cuts]
        cuts |= dict.fromkeys(unnamed[: max(0, n_dims - len(cuts))], ())
        return Layout.of({dim: [axis for axis in cut if axis != without] for dim, cut in cuts.items()})

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuse a mesh without the axes of the layouts."""
        for layout in (self.stream, self.table, self.logits):
            layout.n_blocks(sizes)

    # The embedding

    def embed(
        self, tokens: Int[Tensor, "*B"], table: Float[Tensor, "v d"], mesh: Mesh
    ) -> Float[Tensor, "*b d"]:
        """Return this rank's block of the stream, differentiably: the table's rows of all ``tokens``.

        Each rank looks up the words it has and puts zeros for all others; the sum over ranks is the answer.
        Memory kept for backward: the token ids, and nothing of the table.
        """
        summed, *gathered = self.table.dim("V")
        self.rows(self.stream, tokens.dim()).local_shape(tokens.shape, mesh.sizes)
        for axis in reversed(gathered):
            table = gather_reduce_scatter(table, mesh[axis])
        for axis in self._unknown_to_table():
            table = copy_sum(table, mesh[axis])
        wanted = self.rows(self.stream, tokens.dim(), without=summed).shard(tokens, mesh)
        wanted = wanted - mesh[summed].rank * len(table)
        here = (wanted >= 0) & (wanted < len(table))
        x = functional.embedding(wanted.where(here, 0), table).masked_fill(~here[..., None], 0)
        dim = _dim_cut_by(summed, self.stream)
        return sum_copy(x, mesh[summed]) if dim is None else reduce_scatter_gather(x, mesh[summed], dim)

    def embedding_traffic(
        self, n_tokens: int, V: int, D: int, sizes: Mapping[str, int]
    ) -> dict[str, int | Fraction]:
        """Elements each rank sends to embed ``n_tokens``, by the ring convention; or their mean.

        >>> VOCABULARIES["1d"].embedding_traffic(100, V=50, D=4, sizes={"tp": 2})
        {'forward': 400, 'backward': 0}
        >>> VOCABULARIES["3d"].embedding_traffic(16, V=20, D=4, sizes={"i": 2, "j": 2, "k": 2})
        {'forward': 18, 'backward': 18}
        """
        summed, *gathered = self.table.dim("V")
        n_table = self.table.n_local((V, D), sizes)
        steps: list[Step] = []
        for axis in reversed(gathered):
            n_table *= sizes[axis]
            steps.append((gather_reduce_scatter, n_table, axis))
        steps += [(copy_sum, n_table, axis) for axis in self._unknown_to_table()]
        n_blocks = prod(self.rows(self.stream, 1, without=summed).n_blocks(sizes))
        n_x = n_tokens * D // n_blocks // prod(sizes[axis] for axis in self.stream.dim("D"))
        whole = _dim_cut_by(summed, self.stream) is None
        steps.append((sum_copy if whole else reduce_scatter_gather, n_x, summed))
        return sent(steps, sizes)

    # The head

    def project(
        self, x: Float[Tensor, "*b d"], table: Float[Tensor, "v_e d"], mesh: Mesh
    ) -> Float[Tensor, "*b_y v"]:
        """Return this rank's block of the logits X E.T, differentiably.

        The gathered blocks of x and of the table are kept for backward, so nothing is gathered twice.
        """
        self.check(mesh.sizes)
        for axis in reversed(self._gathered_by_head()):
            table = gather_reduce_scatter(table, mesh[axis])
        for axis in self.logits.dim("V"):
            dim = _dim_cut_by(axis, self.stream)
            x = copy_sum(x, mesh[axis]) if dim is None else gather_reduce_scatter(x, mesh[axis], dim)
        y = x @ table.T
        for axis in self.stream.dim("D"):
            y = reduce_scatter_gather(y, mesh[axis], _dim_cut_by(axis, self.logits) or 0)
        return y

    def head_traffic(
        self, n_tokens: int, V: int, D: int, sizes: Mapping[str, int]
    ) -> dict[str, int | Fraction]:
        """Elements each rank sends for the logits of ``n_tokens``, by the ring convention, or their mean.

        >>> VOCABULARIES["1d"].head_traffic(100, V=50, D=4, sizes={"tp": 2})
        {'forward': 0, 'backward': 400}
        >>> VOCABULARIES["2d"].head_traffic(100, V=50, D=4, sizes={"row": 2, "col": 2})
        {'forward': 1300, 'backward': 2600}
        """
        n_table = self.table.n_local((V, D), sizes)
        n_x = n_tokens * D // prod(sizes[axis] for axis in self.stream.axes)
        n_logits = n_tokens * V // prod(sizes[axis] for axis in self.logits.axes)
        steps: list[Step] = []
        for axis in reversed(self._gathered_by_head()):
            n_table *= sizes[axis]
            steps.append((gather_reduce_scatter, n_table, axis))
        for axis in self.logits.dim("V"):
            if _dim_cut_by(axis, self.stream) is None:
                steps.append((copy_sum, n_x, axis))
            else:
                n_x *= sizes[axis]
                steps.append((gather_reduce_scatter, n_x, axis))
        for axis in self.stream.dim("D"):
            n_logits *= sizes[axis]
            steps.append((reduce_scatter_gather, n_logits, axis))
        return sent(steps, sizes)

    def _gathered_by_head(self) -> list[str]:
        return [axis for axis in self.table.dim("V") if axis not in self.logits.dim("V")]

    def _unknown_to_table(self) -> list[str]:
        """Axes that cut the rows of the stream and not the table: its gradient is summed over them."""
        rows = [axis for cut in self.stream.cuts[:-1] for axis in cut]
        return [axis for axis in rows if axis not in self.table.axes]


class PanelVocabulary(Vocabulary):
    """2D and 2.5D: the head moves panels, as SUMMA does, and no rank ever holds a whole row of logits.

    The head is the layer from logits to stream run backwards: its forward is SUMMA's dX, its dX is SUMMA's
    forward. Blocks at (row, column), q steps l:

        forward     logits_il = sum over j  X_ij E_lj.T             E_lj comes along column j
        backward    dX_ij     = sum over l  dlogits_il E_lj         SUMMA
                    dE_lj     = sum over i  dlogits_il.T X_ij       the sum goes to row l
    """

    def check(self, sizes: Mapping[str, int]) -> None:
        super().check(sizes)
        check_grid(Summa(), sizes)

    def project(
        self, x: Float[Tensor, "*b d"], table: Float[Tensor, "v d"], mesh: Mesh
    ) -> Float[Tensor, "*b v"]:
        self.check(mesh.sizes)
        for axis in self._unknown_to_table():
            table = copy_sum(table, mesh[axis])
        y = _PanelHead.apply(x.reshape(-1, x.shape[-1]), table, mesh)
        return y.reshape(*x.shape[:-1], -1)

    def head_traffic(
        self, n_tokens: int, V: int, D: int, sizes: Mapping[str, int]
    ) -> dict[str, int | Fraction]:
        others = self._unknown_to_table()
        n_table = self.table.n_local((V, D), sizes)
        product = Summa().traffic(n_tokens // prod(sizes[axis] for axis in others), V, D, sizes)
        summed = sent([(copy_sum, n_table, axis) for axis in others], sizes)
        return {way: product[way] + summed[way] for way in summed}


class _PanelHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, mesh: Mesh) -> Tensor:
        ctx.save_for_backward(x, table)
        ctx.mesh = mesh
        x, table = x.detach(), table.detach()
        return reduce_each((x @ e_l.T for e_l in panels(table, mesh["row"])), mesh["col"])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, table = ctx.saved_tensors
        dx = Summa().forward(dy, table, ctx.mesh)
        moved = panels(dy, ctx.mesh["col"])
        dtable = reduce_each((dy_l.T @ x for dy_l in moved), ctx.mesh["row"])
        return dx, dtable, None


VOCABULARIES: dict[str, Vocabulary] = {
    "1d": Vocabulary(Layout("B D"), Layout("V@tp D"), Layout("B V@tp")),
    "1d-sp": Vocabulary(Layout("B S@tp D"), Layout("V@tp D"), Layout("B V@tp")),
    "2d": PanelVocabulary(Layout("B@row D@col"), Layout("V@row D@col"), Layout("B@row V@col")),
    "2.5d": PanelVocabulary(Layout("B@depth@row D@col"), Layout("V@row D@col"), Layout("B@depth@row V@col")),
    "3d": Vocabulary(Layout("B@i@j D@k"), Layout("V@j@i D@k"), Layout("B@i@k V@j")),
}
"""The vocabulary of every scheme, by its name."""


# ---- padding ----


def padded(V: int, multiple_of: int = 1, n_ranks: int = 1) -> int:
    """Return the next vocabulary size of which each rank gets a multiple of ``multiple_of`` words.

    >>> [padded(50257, multiple_of=128, n_ranks=p) for p in (1, 2, 4, 8)]
    [50304, 50432, 50688, 51200]
    >>> padded(151552, n_ranks=6), padded(151552, 128, 6), padded(32001, n_ranks=2)
    (151554, 152064, 32002)

    Source: Shoeybi et al. 2019, section 3: V is made a multiple of 128 per rank, for faster products.
    """
    for name, n in (("V", V), ("multiple_of", multiple_of), ("n_ranks", n_ranks)):
        if n < 1:
            raise RefusedError(f"padded: {name}={n}, and it must be 1 or more.")
    step = multiple_of * n_ranks
    return -(-V // step) * step


def shard_table(
    table: Float[Tensor, "V D"], vocabulary: Vocabulary, mesh: Mesh, multiple_of: int = 1
) -> Float[Tensor, "v d"]:
    """Pad the table with zeros, rows that no token and no label reaches, and cut out this rank's block."""
    n_ranks, _ = vocabulary.table.n_blocks(mesh.sizes)
    table = table.detach()
    extra = padded(len(table), multiple_of, n_ranks) - len(table)
    return vocabulary.table.shard(functional.pad(table, (0, 0, 0, extra)), mesh)


def unshard_table(
    block: Float[Tensor, "v d"], V: int, vocabulary: Vocabulary, mesh: Mesh
) -> Float[Tensor, "V D"]:
    """Gather the table on every rank and drop the padding: the inverse of :func:`shard_table`."""
    return vocabulary.table.unshard(block.detach(), mesh)[:V].contiguous()


def check_words(words: Tensor, V: int, name: str, ignore_index: int | None = None) -> None:
    """Refuse ids outside of the vocabulary, which would be nobody's word: its row would be zeros.

    >>> check_words(torch.tensor([[3, 256]]), V=256, name="tokens")
    Traceback (most recent call last):
    ...
    lessons_lib.errors.RefusedError: tokens[0, 1] is 256, and V=256 words are numbered 0 to 255. \
Was the text tokenized for another vocabulary?
    """
    if words.is_floating_point() or words.is_complex() or words.dtype == torch.bool:
        raise RefusedError(f"{name} are ids of words, whole numbers, and came as {words.dtype}. Try .long().")
    wrong = (words < 0) | (words >= V)
    if ignore_index is not None:
        wrong &= words != ignore_index
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        left_out = "" if ignore_index is None else f" (only {ignore_index} is left out of the loss)"
        raise RefusedError(
            f"{name}{place} is {words[tuple(place)].item()}, and V={V} words are numbered 0 to {V - 1}"
            f"{left_out}. Was the text tokenized for another vocabulary?"
        )


# ---- modules ----


class _Table(nn.Module):
    """A block of a padded table, and what its words are."""

    def __init__(self, weight: Float[Tensor, "v d"], V: int, vocabulary: Vocabulary, mesh: Mesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.V, self.vocabulary, self.mesh = V, vocabulary, mesh

    @property
    def V_padded(self) -> int:
        return self.vocabulary.table.global_shape(self.weight.shape, self.mesh.sizes)[0]

    def extra_repr(self) -> str:
        here = " x ".join(map(str, self.weight.shape))
        return f"V={self.V}, padded to {self.V_padded}, weight {self.vocabulary.table}: {here} here"


class VocabParallelEmbedding(_Table):
    """An ``nn.Embedding`` of which every rank holds a block.

    >>> from lessons_lib import run
    >>> def step():
    ...     words, mesh = nn.Embedding(10, 4), Mesh(tp=4)
    ...     part = VocabParallelEmbedding.from_embedding(words, VOCABULARIES["1d"], mesh)
    ...     return str(part), tuple(part(torch.tensor([[3, 9, 0]])).shape)
    >>> run(step, ranks=4).values[3]
    ('VocabParallelEmbedding(V=10, padded to 12, weight V@tp D: 3 x 4 here)', (1, 3, 4))

    Takes all token ids on every rank, and leaves its output as the scheme's residual stream lies.
    Traffic: ``vocabulary.embedding_traffic``.
    Raises RefusedError, before any communication, for an id outside of the V words.
    """

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, vocabulary: Vocabulary, mesh: Mesh, multiple_of: int = 1
    ) -> VocabParallelEmbedding:
        """Pad and cut a serial embedding, of which every rank has a copy. No communication."""
        check_plain(embedding)
        vocabulary.check(mesh.sizes)
        block = shard_table(embedding.weight, vocabulary, mesh, multiple_of)
        return _like(cls(block, embedding.num_embeddings, vocabulary, mesh), embedding)

    def forward(self, tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*b d"]:
        check_words(tokens, self.V, "tokens")
        return self.vocabulary.embed(tokens, self.weight, self.mesh)


class VocabParallelHead(_Table):
    """The last ``nn.Linear``, from D to the V words, of which every rank holds a block; logits stay cut.

    >>> from lessons_lib import run
    >>> def step():
    ...     vocabulary, mesh = VOCABULARIES["2d"], Mesh(row=2, col=2)
    ...     embedding = VocabParallelEmbedding.from_embedding(nn.Embedding(10, 4), vocabulary, mesh)
    ...     head = VocabParallelHead.tied(embedding)
    ...     return tuple(head(torch.zeros(3, 2)).shape), head.weight is embedding.weight
    >>> run(step, ranks=4).values[0]
    ((3, 5), True)

    ``weight`` is stored [V, D] as ``nn.Linear`` and ``nn.Embedding`` do, and lies as the embedding's, so
    tying the two costs nothing. Columns of padding words are part of the logits; the loss leaves them out.
    Traffic: ``vocabulary.head_traffic``.
    """

    @classmethod
    def from_linear(
        cls, head: nn.Linear, vocabulary: Vocabulary, mesh: Mesh, multiple_of: int = 1
    ) -> VocabParallelHead:
        """Pad and cut a serial head, of which every rank has a copy. No communication."""
        if head.bias is not None:
            raise RefusedError("the head has a bias, which none here has. Try nn.Linear(D, V, bias=False).")
        vocabulary.check(mesh.sizes)
        block = shard_table(head.weight, vocabulary, mesh, multiple_of)
        return _like(cls(block, head.out_features, vocabulary, mesh), head)

    @classmethod
    def tied(cls, embedding: VocabParallelEmbedding) -> VocabParallelHead:
        """The head whose weight *is* the embedding's: both gradients add up in one parameter."""
        head = cls(embedding.weight.detach(), embedding.V, embedding.vocabulary, embedding.mesh)
        head.weight = embedding.weight
        return head

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b_y v"]:
        return self.vocabulary.project(x, self.weight, self.mesh)


class ParallelPositionEmbedding(nn.Module):
    """An ``nn.Embedding`` of positions beside a stream of which D, rows or S are cut.

    Every rank holds the columns that its stream has, of all positions, and looks up those of its part of the
    sequence. Where rows are cut over an axis, each rank's gradient is a sum over its own rows (or positions),
    and ``copy_sum`` adds these up: backward one all-reduce of the block per such axis.
    """

    def __init__(self, weight: Float[Tensor, "S d"], stream: Layout, mesh: Mesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.stream, self.mesh = stream, mesh

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, stream: Layout, mesh: Mesh) -> ParallelPositionEmbedding:
        """Cut a serial embedding, of which every rank has a copy. No communication."""
        check_plain(embedding)
        block = position_layout(stream).shard(embedding.weight.detach(), mesh)
        return _like(cls(block, stream, mesh), embedding)

    def forward(self, positions: Int[Tensor, " S"]) -> Float[Tensor, "s d"]:
        check_words(positions, len(self.weight), "positions")
        weight: Tensor = self.weight
        for cut in self.stream.cuts[:-1]:
            for axis in cut:
                weight = copy_sum(weight, self.mesh[axis])
        if "S" in self.stream.dims:
            positions = Layout.of({"S": self.stream.dim("S")}).shard(positions, self.mesh)
        return functional.embedding(positions, weight)

    def extra_repr(self) -> str:
        return f"weight {position_layout(self.stream)}: {' x '.join(map(str, self.weight.shape))} here"


def position_layout(stream: Layout) -> Layout:
    """How the table of positions lies beside a stream.

    >>> position_layout(VOCABULARIES["3d"].stream)
    Layout("S D@k")
    """
    return Layout.of({"S": (), "D": stream.dim("D")})


def position_traffic(S: int, D: int, stream: Layout, sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
    """Elements each rank sends for a table of ``S`` positions: its gradient, per axis that cuts rows.

    >>> position_traffic(8, 6, VOCABULARIES["2d"].stream, {"row": 2, "col": 2})
    {'forward': 0, 'backward': 24}
    """
    n = position_layout(stream).n_local((S, D), sizes)
    axes = [axis for cut in stream.cuts[:-1] for axis in cut]
    return sent([(copy_sum, n, axis) for axis in axes], sizes)


def check_plain(embedding: nn.Embedding) -> None:
    """Refuse an embedding that does more than look up."""
    for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
        value = getattr(embedding, name)
        if value is not None and value is not False:
            raise RefusedError(f"an embedding with {name}={value} cannot be cut here; leave {name} out.")


def _like(part: Part, serial: nn.Module) -> Part:
    """Freeze what is frozen in the serial module."""
    for name, parameter in serial.named_parameters():
        part.get_parameter(name).requires_grad_(parameter.requires_grad)
    return part


Step = tuple[Callable[..., Tensor], int, str]
"""A pair of :mod:`lessons_lib.mesh`, the elements of the larger side of it, and the axis it runs along."""

SENT_BY = {
    copy_sum: {"backward": "all_reduce"},
    sum_copy: {"forward": "all_reduce"},
    gather_reduce_scatter: {"forward": "all_gather", "backward": "reduce_scatter"},
    reduce_scatter_gather: {"forward": "reduce_scatter", "backward": "all_gather"},
}


def sent(steps: Iterable[Step], sizes: Mapping[str, int]) -> dict[str, int | Fraction]:
    """Elements each rank sends in pairs of communications, forward and backward."""
    total: dict[str, int | Fraction] = {"forward": 0, "backward": 0}
    for pair, n, axis in steps:
        for way, kind in SENT_BY[pair].items():
            total[way] += ring_traffic(kind, n, sizes[axis])
    return total


def _dim_cut_by(axis: str, layout: Layout) -> int | None:
    """Which dim of the rows, if any, an axis cuts."""
    for dim, cut in enumerate(layout.cuts[:-1]):
        if axis in cut:
            return dim
    return None
