"""Embedding, positions, head and loss on a cut vocabulary are the serial ones: numbers, gradients, bytes.

``assert_is_the_serial_vocabulary`` knows no scheme: it derives everything from the layouts. Wrong versions of
each part are kept below, and must be caught by it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.errors import RefusedError
from lessons_lib.layout import coordinates
from lessons_lib.mesh import copy_sum, gather_split, reduce_scatter_gather, sum_copy, sum_sum
from lessons_lib.models.gpt import IGNORED
from lessons_lib.tensor_parallel import (
    VOCABULARIES,
    ParallelPositionEmbedding,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    VocabParallelHead,
    Vocabulary,
    padded,
)
from lessons_lib.tensor_parallel.cross_entropy import loss_sum, loss_traffic, n_counted, token_losses
from lessons_lib.tensor_parallel.vocabulary import (
    check_words,
    position_layout,
    position_traffic,
    shard_table,
    unshard_table,
)
from tests.serial_layer import FLOAT64_BYTES, MESHES, random, relative_error

B, S, D = 36, 12, 12
AXES = {"1d": ("tp",), "1d-sp": ("tp",), "2d": ("row", "col"), "2.5d": ("depth", "row", "col")}
CASES = [(name, sizes) for name in VOCABULARIES for sizes in MESHES[AXES.get(name, ("i", "j", "k"))]]
QUICK = [{"tp": 4}, {"row": 2, "col": 2}, {"depth": 3, "row": 1, "col": 1}, {"i": 2, "j": 2, "k": 2}]
CASES = [pytest.param(name, sizes, marks=() if sizes in QUICK else pytest.mark.slow) for name, sizes in CASES]
SMALL = {
    "1d": {"tp": 3},
    "1d-sp": {"tp": 3},
    "2d": {"row": 2, "col": 2},
    "2.5d": {"depth": 3, "row": 2, "col": 2},
    "3d": {"i": 2, "j": 3, "k": 2},
}


class Serial:
    """The first and the last of a language model, and a stream that depends on the place between them."""

    def __init__(self, V, tied, scale=1.0):
        generator = torch.Generator().manual_seed(V)
        self.V = V
        self.tokens, self.labels = torch.randint(0, V, (2, B, S), generator=generator)
        self.labels[torch.rand(B, S, generator=generator) < 0.3] = IGNORED
        self.labels[:2] = IGNORED  # whole rows, so that ranks count different numbers of tokens
        self.embedding = nn.Embedding(V, D, dtype=torch.float64)
        self.position = nn.Embedding(S, D, dtype=torch.float64)
        self.head = nn.Linear(D, V, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.embedding.weight.copy_(random(V, D, seed=1))
            self.position.weight.copy_(random(S, D, seed=2))
            self.head.weight.copy_(random(V, D, seed=3) * scale)
        if tied:
            self.head.weight = self.embedding.weight
        self.tied = tied
        self.between = random(B, S, D, seed=4)

    def expected(self, vocabulary):
        x = self.embedding(self.tokens) + self.position(torch.arange(S))
        x.retain_grad()
        logits = self.head(x * self.between)
        loss = functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        rows = vocabulary.rows(vocabulary.stream, 2)
        whole = {
            "x": (with_last(rows, vocabulary.stream), x.detach()),
            "dx": (with_last(rows, vocabulary.stream), x.grad),
            "loss": (None, loss.detach()),
            "dposition": (position_layout(vocabulary.stream), self.position.weight.grad),
            "dtable": (vocabulary.table, self.embedding.weight.grad),
        }
        return whole if self.tied else whole | {"dhead": (vocabulary.table, self.head.weight.grad)}


def with_last(rows, layout):
    return Layout(f"{rows} {layout.last()}")


RIGHT = {
    "embed": lambda tokens, part: part(tokens),
    "position": lambda positions, part: part(positions),
    "project": lambda x, part: part(x),
    "loss": lambda logits, labels, V, v, mesh: loss_sum(logits, labels, V, v, mesh) / n_counted(labels),
}


def assert_is_the_serial_vocabulary(
    name, sizes, V=11, tied=True, transport="threads", multiple_of=1, scale=1.0, **wrong
):
    serial, vocabulary, parts = Serial(V, tied, scale), VOCABULARIES[name], RIGHT | wrong
    expected = serial.expected(vocabulary)

    def step():
        mesh = Mesh(**sizes)
        embedding = VocabParallelEmbedding.from_embedding(serial.embedding, vocabulary, mesh, multiple_of)
        position = ParallelPositionEmbedding.from_embedding(serial.position, vocabulary.stream, mesh)
        if tied:
            head = VocabParallelHead.tied(embedding)
        else:
            head = VocabParallelHead.from_linear(serial.head, vocabulary, mesh, multiple_of)
        stream = with_last(vocabulary.rows(vocabulary.stream, 2), vocabulary.stream)
        with region("forward"):
            x = parts["embed"](serial.tokens, embedding) + parts["position"](torch.arange(S), position)
            x.retain_grad()
            logits = parts["project"](x * stream.shard(serial.between, mesh), head)
            loss = parts["loss"](logits, serial.labels, V, vocabulary, mesh)
        with region("backward"):
            loss.backward()
        found = {"x": x.detach(), "dx": x.grad, "loss": loss.detach(), "dposition": position.weight.grad}
        found["dtable"] = embedding.weight.grad
        return found if tied else found | {"dhead": head.weight.grad}

    places = coordinates(sizes)
    result = run(step, ranks=len(places), transport=transport)
    n_ranks, _ = vocabulary.table.n_blocks(sizes)
    V_padded = padded(V, multiple_of, n_ranks)
    for at, found in zip(places, result.values, strict=True):
        assert found.keys() == expected.keys()
        for what, (layout, whole) in expected.items():
            if layout is vocabulary.table:
                whole = functional.pad(whole, (0, 0, 0, V_padded - V))
            block = layout.cut(whole, sizes, at) if layout else whole
            error = (found[what] - block).norm() / max(block.norm(), 1e-3 * whole.norm())
            assert found[what].shape == block.shape and error < 1e-10, f"{what} at {at} is wrong"

    bills = [
        vocabulary.embedding_traffic(B * S, V_padded, D, sizes),
        position_traffic(S, D, vocabulary.stream, sizes),
        vocabulary.head_traffic(B * S, V_padded, D, sizes),
        loss_traffic(B * S, vocabulary, sizes),
    ]
    for way in ("forward", "backward"):
        counted = sum(result.trace.bytes_sent(rank, way) for rank in range(len(places)))
        formula = FLOAT64_BYTES * sum(bill[way] for bill in bills) * len(places)
        assert counted == formula, f"{way} traffic is not the formula's"
    return result


@pytest.mark.parametrize("name, sizes", CASES)
def test_every_scheme_s_vocabulary_is_the_serial_one(name, sizes):
    """V = 11 divides over no mesh; rows with ignored labels differ; every gradient on every rank."""
    assert_is_the_serial_vocabulary(name, sizes, tied=True)


@pytest.mark.parametrize("name", SMALL)
def test_head_of_its_own(name):
    assert_is_the_serial_vocabulary(name, SMALL[name], tied=False)


@pytest.mark.parametrize("name, V", [("1d", 5), ("3d", 7)])
def test_ranks_with_nothing_but_padding(name, V):
    """S14: 5 words over 4 ranks, 2 each, leave rank 3 without a word."""
    sizes, multiple_of = {"1d": ({"tp": 4}, 1), "3d": (SMALL["3d"], 5)}[name]
    assert_is_the_serial_vocabulary(name, sizes, V=V, multiple_of=multiple_of)


@pytest.mark.parametrize("name", ["1d", "2d"])
def test_logits_near_a_thousand(name):
    assert_is_the_serial_vocabulary(name, SMALL[name], tied=False, scale=300.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1d-sp", "2d"])
def test_on_process_ranks(name):
    assert_is_the_serial_vocabulary(name, SMALL[name], transport="processes")


def test_the_published_traffic():
    """METHODS: lookup and scatter, table gathered in 3D, SUMMA's head; said again, by hand."""
    M, V, D, q, d, p = 144, 72, 36, 2, 3, 4
    one, two, three = (VOCABULARIES[name] for name in ("1d", "2d", "3d"))
    deep = VOCABULARIES["2.5d"]
    flat, grid, cube = {"tp": p}, {"row": q, "col": q}, {"i": q, "j": q, "k": q}
    layers = {"depth": d, **grid}
    by_hand = [
        (one.embedding_traffic, flat, 2 * (p - 1) * M * D // p, 0),
        (one.head_traffic, flat, 0, 2 * (p - 1) * M * D // p),
        (VOCABULARIES["1d-sp"].embedding_traffic, flat, (p - 1) * M * D // p, (p - 1) * M * D // p),
        (VOCABULARIES["1d-sp"].head_traffic, flat, (p - 1) * M * D // p, (p - 1) * M * D // p),
        (two.embedding_traffic, grid, (q - 1) * M * D // q**2, (q - 1) * M * D // q**2),
        (
            two.head_traffic,
            grid,
            (q - 1) * (M * V + V * D) // q**2,
            2 * (q - 1) * (M * V + V * D) // q**2,
        ),
        (
            deep.embedding_traffic,
            layers,
            (q - 1) * M * D // (d * q**2),
            (q - 1) * M * D // (d * q**2) + 2 * (d - 1) * V * D // (d * q**2),
        ),
        (
            deep.head_traffic,
            layers,
            (q - 1) * (M * V // d + V * D) // q**2,
            2 * (q - 1) * (M * V // d + V * D) // q**2 + 2 * (d - 1) * V * D // (d * q**2),
        ),
        (three.embedding_traffic, cube, *2 * [(q - 1) * (V * D + M * D) // q**3]),
        (three.head_traffic, cube, *2 * [(q - 1) * (V * D + M * D + M * V) // q**3]),
    ]
    for formula, sizes, forward, backward in by_hand:
        assert formula(M, V, D, sizes) == {"forward": forward, "backward": backward}
    assert loss_traffic(M, one, flat) == {"forward": 3 * 2 * (p - 1) * M // p, "backward": 0}


def gathered_head(vocabulary, x, table, mesh):
    """2D without panels: the same bytes, and a moment with all words of this rank's rows."""
    partial = x @ mesh["row"].all_gather(table, 0).T
    return mesh["col"].reduce_scatter(partial, 1)


def test_2d_never_holds_all_logits_of_a_row():
    """The head of 2D moves panels: its peak falls with p, and with q only if a column of E is gathered."""
    vocabulary, V, n = VOCABULARIES["2d"], 240, 90
    sizes = {"row": 3, "col": 3}
    x, e = (
        layout.n_local((rows, 6), sizes) for layout, rows in ((vocabulary.stream, n), (vocabulary.table, V))
    )
    block = vocabulary.logits.n_local((n, V), sizes)

    def step(project):
        mesh = Mesh(**sizes)
        x_here, e_here = random(n // 3, 2, seed=mesh.rank), random(V // 3, 2, seed=mesh.rank + 9)
        return project(vocabulary, x_here, e_here, mesh)

    by_panels, gathered = (
        run(step, project, ranks=9, record=("memory",))
        for project in (type(vocabulary).project, gathered_head)
    )
    for rank in range(9):
        assert relative_error(by_panels.values[rank], gathered.values[rank]) < 1e-12
        assert by_panels.trace.bytes_sent(rank) == gathered.trace.bytes_sent(rank)
        most = 2 * x + 2 * e + 2 * e + 3 * block  # inputs drawn, two panels, two terms and a sum
        assert by_panels.trace.peak_bytes(rank) <= FLOAT64_BYTES * most
        assert (
            gathered.trace.peak_bytes(rank)
            >= FLOAT64_BYTES * (3 * e + 3 * block + block)
            > FLOAT64_BYTES * most
        )


# ---- wrong versions, each caught ----


def without(part):
    """A wrong ``embed`` or ``project`` of a Vocabulary, as the oracle takes it."""
    return lambda x, module: part(module.vocabulary, x, module.weight, module.mesh)


def unmasked(vocabulary, tokens, table, mesh):
    """Words of other ranks counted as this rank's word 0."""
    (summed,) = vocabulary.table.dim("V")
    at = tokens - mesh[summed].rank * len(table)
    return sum_copy(functional.embedding(at.where((at >= 0) & (at < len(table)), 0), table), mesh[summed])


def gradient_of_every_copy(vocabulary, tokens, table, mesh):
    """All-reduce both ways: the table's gradient p times too large."""
    at = tokens - mesh["tp"].rank * len(table)
    here = (at >= 0) & (at < len(table))
    return sum_sum(
        functional.embedding(at.where(here, 0), table).masked_fill(~here[..., None], 0), mesh["tp"]
    )


class Layers(type(VOCABULARIES["2.5d"])):
    """2.5D without the sum over depth."""

    def _unknown_to_table(self):
        return []


def layers_alone(name):
    def part(x, module):
        v = module.vocabulary
        return getattr(Layers(v.stream, v.table, v.logits), name)(x, module.weight, module.mesh)

    return part


class OtherRows(Vocabulary):
    """3D with the rows of j looked up, and scattered over j, where those of i were meant."""

    def rows(self, layout, n_dims, without=""):
        return super().rows(Layout("B@j D@k") if without else layout, n_dims)


def other_rows(tokens, module):
    v = module.vocabulary
    return OtherRows(v.stream, v.table, v.logits).embed(tokens, module.weight, module.mesh)


def backward_without_sum(vocabulary, x, table, mesh):
    """1D: each rank's words have a part of dX, and nobody adds them up."""
    return x @ table.T


def gather_and_split(vocabulary, x, table, mesh):
    """1d-sp: of the gradient of the gathered stream each rank takes its piece, of its own words only."""
    return gather_split(x, mesh["tp"], 1) @ table.T


def restarted(positions, part):
    """1d-sp: positions begin at 0 on every rank."""
    n = len(positions) // part.mesh["tp"].size
    return functional.embedding(positions[:n], copy_sum(part.weight, part.mesh["tp"]))


def own_rows(positions, part):
    """The gradient of the positions is summed over this rank's rows only."""
    return functional.embedding(positions, part.weight)


WRONG_PARTS = [
    ("1d", {"embed": without(unmasked)}, "x at .* is wrong"),
    ("1d", {"embed": without(gradient_of_every_copy)}, "dtable at .* is wrong"),
    ("2.5d", {"embed": layers_alone("embed")}, "dtable at .* is wrong"),
    ("3d", {"embed": other_rows}, "x at .* is wrong"),
    ("1d", {"project": without(backward_without_sum)}, "dx at .* is wrong"),
    ("1d-sp", {"project": without(gather_and_split)}, "dx at .* is wrong"),
    ("2.5d", {"project": layers_alone("project")}, "dtable at .* is wrong"),
    ("1d-sp", {"position": restarted}, "loss at .* is wrong"),
    ("2d", {"position": own_rows}, "dposition at .* is wrong"),
]


@pytest.mark.parametrize("name, part, why", WRONG_PARTS)
def test_wrong_parts_are_caught(name, part, why):
    sizes = {"3d": {"i": 2, "j": 2, "k": 1}, "2.5d": {"depth": 2, "row": 1, "col": 1}}.get(name, SMALL[name])
    with pytest.raises(AssertionError, match=why):
        assert_is_the_serial_vocabulary(name, sizes, **part)


def by_hand(
    highest=lambda scores, group: group.all_reduce(scores.detach().amax(-1), "max"),
    add=sum_copy,
    words=lambda n_words, V, first: torch.arange(first, first + n_words) < V,
    elsewhere=0.0,
    over_rows=sum_copy,
    divisor=lambda own, labels: n_counted(labels),
):
    """The loss once more, from differentiable parts; each argument can be a wrong one."""

    def loss(logits, labels, V, vocabulary, mesh):
        (axis,) = vocabulary.logits.dim("V")
        rows, group = vocabulary.rows(vocabulary.logits, labels.dim()), mesh[axis]
        own, n_words = rows.shard(labels, mesh), logits.shape[-1]
        first = group.rank * n_words
        scores = logits.masked_fill(~words(n_words, V, first), -torch.inf)
        m = highest(scores, group)[..., None]
        total = add((scores - m).exp().sum(-1), group)
        here = (own >= first) & (own < first + n_words)
        target = (logits - m).gather(-1, (own - first).where(here, 0)[..., None])[..., 0]
        if elsewhere is not None:
            target = target.masked_fill(~here, elsewhere)
        losses = (total.log() - add(target, group)).masked_fill(own == IGNORED, 0)
        summed = losses.sum()
        for axis in rows.axes:
            summed = over_rows(summed, mesh[axis])
        return summed / divisor(own, labels)

    return loss


def test_loss_from_differentiable_parts():
    """The frame of the wrong versions is right by itself, and as good as the library's."""
    assert_is_the_serial_vocabulary("2d", SMALL["2d"], loss=by_hand())


WRONG_LOSSES = {
    "max not reduced": by_hand(highest=lambda scores, group: scores.detach().amax(-1)),
    "no max": by_hand(highest=lambda scores, group: torch.zeros_like(scores[..., 0])),
    "padding counted": by_hand(words=lambda n_words, V, first: torch.ones(n_words, dtype=torch.bool)),
    "label of another rank taken for word 0": by_hand(elsewhere=None),
    "sum of exp not summed": by_hand(add=lambda x, group: x),
    "gradient of every copy": by_hand(add=sum_sum),
    "rows not summed": by_hand(over_rows=lambda x, group: x),
    "gradient of every row's copy": by_hand(over_rows=sum_sum),
    "divisor of own rows": by_hand(divisor=lambda own, labels: max(1, n_counted(own))),
    "ignored tokens in the divisor": by_hand(divisor=lambda own, labels: labels.numel()),
}


COMMON = (
    "max not reduced",
    "padding counted",
    "label of another rank taken for word 0",
    "divisor of own rows",
)


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(wrong, marks=() if wrong in COMMON else pytest.mark.slow) for wrong in WRONG_LOSSES],
)
def test_wrong_losses_are_caught(wrong):
    scale = 300.0 if wrong == "no max" else 1.0
    name = "2d" if "row" in wrong else "1d"
    with pytest.raises(AssertionError, match="is wrong"):
        assert_is_the_serial_vocabulary(name, SMALL[name], tied=False, scale=scale, loss=WRONG_LOSSES[wrong])


def gathered_logits(logits, labels, V, vocabulary, mesh):
    """Right numbers, and somebody sees all logits."""
    whole = gather_split(logits, mesh["tp"], logits.dim() - 1)[..., :V]
    total = functional.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / n_counted(labels)


def test_gathered_logits_are_caught_by_their_bytes():
    with pytest.raises(AssertionError, match="forward traffic is not the formula's"):
        assert_is_the_serial_vocabulary("1d", {"tp": 3}, loss=gathered_logits)


def scattered_then_gathered(tokens, module):
    """1D: right numbers, another bill: the sum is scattered, and gathered again."""
    at = tokens - module.mesh["tp"].rank * len(module.weight)
    here = (at >= 0) & (at < len(module.weight))
    x = functional.embedding(at.where(here, 0), module.weight).masked_fill(~here[..., None], 0)
    return gather_split(reduce_scatter_gather(x, module.mesh["tp"], 0), module.mesh["tp"], 0)


def test_a_backward_that_communicates_is_caught_by_its_bytes():
    with pytest.raises(AssertionError, match="backward traffic is not the formula's"):
        assert_is_the_serial_vocabulary("1d", {"tp": 3}, embed=scattered_then_gathered)


# ---- padding ----


def test_s14_padded_vocabularies():
    """S14: 50257 with base 128 on 1, 2, 4, 8 ranks; 151552 over 6; 32001 over 2."""
    assert [padded(50257, 128, p) for p in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]
    assert (padded(151552, n_ranks=6), padded(151552, 128, 6)) == (151554, 152064)
    assert padded(32001, n_ranks=2) == 32002
    assert padded(256, 128, 2) == 256
    for V, multiple_of, n_ranks in ((0, 1, 1), (5, 0, 1), (5, 1, -2)):
        with pytest.raises(RefusedError, match="must be 1 or more"):
            padded(V, multiple_of, n_ranks)


@pytest.mark.parametrize("name", SMALL)
def test_s14_padding_is_dropped_again(name):
    """S14: a checkpoint holds V rows, whatever the ranks held; the padding began as zeros."""
    vocabulary, table = VOCABULARIES[name], random(11, D, seed=1)

    def step():
        mesh = Mesh(**SMALL[name])
        block = shard_table(table, vocabulary, mesh, multiple_of=4)
        return unshard_table(block, 11, vocabulary, mesh), vocabulary.table.unshard(block, mesh)

    n_ranks = 1
    for size in SMALL[name].values():
        n_ranks *= size
    for whole, with_padding in run(step, ranks=n_ranks).values:
        assert torch.equal(whole, table)
        assert len(with_padding) == padded(11, 4, vocabulary.table.n_blocks(SMALL[name])[0])
        assert not with_padding[11:].any()


def test_s14_both_sizes_are_reported():
    def step():
        embedding = nn.Embedding(50257, 2)
        return str(VocabParallelEmbedding.from_embedding(embedding, VOCABULARIES["1d"], Mesh(tp=4), 128))

    assert "V=50257, padded to 50688, weight V@tp D: 12672 x 2 here" in run(step, ranks=4).values[2]


@pytest.mark.parametrize("scale", [0.0, 1e3, -1e3])
def test_padding_gets_no_gradient_and_no_share_whatever_it_holds(scale):
    logits, labels = random(6, 8, seed=1), torch.tensor([0, 4, 2, IGNORED, 1, 3])

    def step():
        mesh = Mesh(tp=4)
        own = VOCABULARIES["1d"].logits.shard(torch.cat([logits[:, :5], logits[:, 5:] * scale], 1), mesh)
        own.requires_grad_()
        total = loss_sum(own, labels, 5, VOCABULARIES["1d"], mesh)
        total.backward()
        return total.item(), own.grad

    result = run(step, ranks=4)
    whole = logits[:, :5].clone().requires_grad_()
    serial = functional.cross_entropy(whole, labels, reduction="sum")
    serial.backward()
    assert [found for found, _ in result.values] == pytest.approx([serial.item()] * 4, rel=1e-12)
    gradient = torch.cat([grad for _, grad in result.values], 1)
    assert relative_error(gradient[:, :5], whole.grad) < 1e-12
    assert not gradient[:, 5:].any()


# ---- the loss alone ----


def test_sixteen_bit_logits_are_added_up_in_32_bits():
    """In bfloat16, to 3 digits, a sum of 300 terms would lose most of them."""
    logits, labels = random(8, 300, seed=1).bfloat16(), torch.arange(8)

    def step():
        mesh = Mesh(tp=3)
        own = VOCABULARIES["1d"].logits.shard(logits, mesh).requires_grad_()
        loss = loss_sum(own, labels, 300, VOCABULARIES["1d"], mesh)
        loss.backward()
        return loss.detach(), own.grad.dtype

    exact = functional.cross_entropy(logits.double(), labels, reduction="sum")
    for loss, dtype in run(step, ranks=3).values:
        assert dtype == torch.bfloat16 and loss.dtype == torch.float32
        assert abs(loss.double() - exact) / exact < 1e-6


def test_an_ignore_index_that_is_a_word():
    logits, labels = random(6, 8, seed=1), torch.tensor([3, 0, 3, 7, 1, 2])

    def step():
        mesh = Mesh(tp=2)
        own = VOCABULARIES["1d"].logits.shard(logits, mesh)
        return VocabParallelCrossEntropy(8, VOCABULARIES["1d"], mesh, ignore_index=3)(own, labels).item()

    serial = functional.cross_entropy(logits, labels, reduction="sum", ignore_index=3).item()
    assert run(step, ranks=2).values == pytest.approx([serial] * 2, rel=1e-12)
    assert n_counted(labels, ignore_index=3) == 4


def test_nothing_counts_where_all_labels_are_ignored():
    def step():
        own = torch.zeros(2, 4, requires_grad=True)
        total = loss_sum(own, torch.tensor([IGNORED] * 2), 8, VOCABULARIES["1d"], Mesh(tp=2))
        total.backward()
        return total.item(), own.grad.abs().max().item()

    assert run(step, ranks=2).values == [(0.0, 0.0)] * 2


def test_losses_of_tokens_stay_with_their_rows():
    logits, labels = random(6, 8, seed=1), torch.tensor([3, 0, IGNORED, 7, 1, 2])

    def step():
        mesh = Mesh(tp=2)
        return token_losses(VOCABULARIES["1d"].logits.shard(logits, mesh), labels, 8, mesh["tp"])

    serial = functional.cross_entropy(logits, labels, reduction="none")
    for found in run(step, ranks=2).values:
        assert relative_error(found, serial) < 1e-12


# ---- refusals ----


@pytest.mark.parametrize("label", [8, -1, 4000])
def test_labels_that_are_no_words_are_refused(label):
    def step():
        labels = torch.tensor([[3, 0], [5, label]])
        loss_sum(torch.zeros(2, 2, 4), labels, 8, VOCABULARIES["1d"], Mesh(tp=2))

    with pytest.raises(
        RefusedError, match=rf"labels\[1, 1\] is {label}, and V=8 words are numbered 0 to 7"
    ) as e:
        run(step, ranks=2)
    assert not e.value.run.trace.events


def test_refusals():
    one = VOCABULARIES["1d"]

    def refused(step, why, ranks=2):
        with pytest.raises(RefusedError, match=why) as found:
            run(step, ranks=ranks)
        assert not found.value.run.trace.events

    def embedding(mesh, vocabulary=one, **more):
        return VocabParallelEmbedding.from_embedding(nn.Embedding(8, 4, **more), vocabulary, mesh)

    refused(lambda: embedding(Mesh(tp=2))(torch.tensor([8])), r"tokens\[0\] is 8, and V=8 words")
    with pytest.raises(
        RefusedError, match=r"tokens are ids of words, whole numbers, and came as torch\.float32"
    ):
        check_words(torch.tensor([0.5]), 8, "tokens")
    refused(lambda: embedding(Mesh(tp=2), padding_idx=1), "an embedding with padding_idx=1 cannot be cut")
    refused(lambda: embedding(Mesh(row=2)), "names the axis 'tp', which the mesh does not have")
    refused(
        lambda: embedding(Mesh(row=2, col=1), VOCABULARIES["2d"]), "these must be equal. Try row=1, col=1 or"
    )
    refused(
        lambda: embedding(Mesh(row=2, col=2), VOCABULARIES["2d"])(torch.tensor([[1], [2], [3]])),
        "dim B of size 3 cannot be cut evenly over row=2",
        ranks=4,
    )
    refused(
        lambda: VocabParallelHead.from_linear(nn.Linear(4, 8), one, Mesh(tp=2)),
        r"the head has a bias.*Try nn.Linear\(D, V, bias=False\)",
    )
    refused(
        lambda: loss_sum(torch.zeros(3, 4), torch.tensor([1, 2]), 8, one, Mesh(tp=2)),
        r"labels of shape \(2,\) lie as Layout\(\"B\"\).*beside logits of \(3,\) rows",
    )


def test_frozen_tables_stay_frozen():
    def step():
        words = nn.Embedding(8, 4).requires_grad_(False)
        return VocabParallelEmbedding.from_embedding(
            words, VOCABULARIES["1d"], Mesh(tp=2)
        ).weight.requires_grad

    assert run(step, ranks=2).values == [False, False]
