"""Every attention over a cut sequence is full attention: output, gradients, every rank, bytes, memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lessons_lib import Mesh, region, run
from lessons_lib.machines import Link, Machine
from lessons_lib.sequence_parallel import (
    ATTENTION_VARIANTS,
    ATTENTIONS,
    Contiguous,
    Hop,
    RingAttention,
    RingSelfAttention,
    Striped,
    Tokens,
    Ulysses,
    Zigzag,
    attend_part,
    busy,
    finish,
    gather_tokens,
    merge,
    pairs,
    shard_tokens,
)
from lessons_lib.sequence_parallel.blockwise import TILE, add_keys, no_keys, tiles
from tests.serial_layer import random, relative_error

EVERY = ATTENTIONS | ATTENTION_VARIANTS
B, S, H, K = 2, 48, 8, 3
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 30 + [2] * 13, [0] * 47 + [1]])  # two rows, packed differently


def full_attention(q, k, v, causal, documents):
    """The definition, in one device's memory, with autograd's gradients."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    places = torch.arange(q.shape[2])
    if causal:
        scores = scores.masked_fill(places > places[:, None], -math.inf)
    if documents is not None:
        other = documents[:, :, None] != documents[:, None, :]
        scores = scores.masked_fill(other[:, None], -math.inf)
    return scores.softmax(-1) @ v


def on_this_rank(method, whole, documents, causal):
    group = Mesh(cp=torch.distributed.get_world_size())["cp"]
    cut = lambda X, dim: shard_tokens(X, method.assignment, group, dim)
    q, k, v, do = (cut(X, 2) for X in whole)
    for x in (q, k, v):
        x.requires_grad_()
    numbers = None if documents is None else cut(documents, 1)
    with region("forward"):
        o = method.attend(q, k, v, group, causal, numbers)
    with region("backward"):
        o.backward(do)
    return o.detach(), q.grad, k.grad, v.grad


def assert_is_full_attention(
    method, P, causal=True, documents=None, G=H, S=S, transport="threads", B=B, H=H, K=K
):
    Q, KEYS, V, dO = (random(B, h, S, K, seed=seed) for seed, h in enumerate((H, G, G, H)))
    whole = [X.clone().requires_grad_() for X in (Q, KEYS, V)]
    O = full_attention(*whole, causal, documents)
    O.backward(dO)
    expected = dict(O=O.detach(), dQ=whole[0].grad, dK=whole[1].grad, dV=whole[2].grad)

    result = run(on_this_rank, method, (Q, KEYS, V, dO), documents, causal, ranks=P, transport=transport)
    for rank, found in enumerate(result.values):
        own = torch.tensor(method.assignment.positions(S, P, rank))
        for (name, tensor), block in zip(expected.items(), found, strict=True):
            error = relative_error(block, tensor[:, :, own])
            assert error < 1e-10, f"{name} on rank {rank} is wrong by {error:.0e}"
    traffic = method.traffic(B, S, H, K, P, G, documents is not None)
    for way, elements in traffic.items():
        counted = [result.trace.bytes_sent(rank, way) for rank in range(P)]
        assert counted == [8 * elements] * P, f"{way} traffic is not the formula's"
    return result


LEGAL = [case for case in itertools.product(EVERY, (1, 2, 3, 4, 8)) if case != ("ulysses", 3)]


@pytest.mark.parametrize(
    "name, P", [pytest.param(*case, marks=[] if case[1] > 1 else pytest.mark.slow) for case in LEGAL]
)
def test_every_attention_is_full_attention(name, P):
    """F8: float64, a random upstream gradient, relative errors: a gradient 74 % wrong does not pass."""
    assert_is_full_attention(EVERY[name], P)


@pytest.mark.parametrize(
    "name, P", [pytest.param(*case, marks=[] if case[1] == 4 else pytest.mark.slow) for case in LEGAL]
)
def test_without_a_mask(name, P):
    assert_is_full_attention(EVERY[name], P, causal=False)


@pytest.mark.parametrize("name", EVERY)
def test_packed_documents_do_not_see_each_other(name):
    assert_is_full_attention(EVERY[name], 4, causal=False, documents=DOCUMENTS)


@pytest.mark.parametrize(
    "name, G", [*itertools.product(EVERY, [2]), ("ulysses", 1), ("ulysses", 4), ("ring", 1)]
)
def test_grouped_query_heads(name, G):
    """Ulysses on 4 ranks: 4 heads of keys are cut, 2 and 1 are copied, and the copies' gradients added."""
    assert_is_full_attention(EVERY[name], 4, documents=DOCUMENTS, G=G)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_on_process_ranks(name):
    assert_is_full_attention(EVERY[name], 4, documents=DOCUMENTS, G=2, transport="processes")


@pytest.mark.parametrize("name", ["ring", "zigzag", "striped"])
def test_a_rank_s_tokens_are_cut_into_tiles(name):
    """Shares larger than a tile, and not a multiple of it."""
    assert_is_full_attention(ATTENTIONS[name], 2, S=2 * (2 * TILE + 20), B=1, H=2, G=1)


@pytest.mark.parametrize("name", EVERY)
def test_low_precision_adds_up_in_float32(name):
    """bfloat16 in and out; the error is that of rounding once, not that of a sum in bfloat16."""
    q, k, v = (random(1, 4, 64, 8, seed=seed).bfloat16() for seed in range(3))

    def step():
        group, method = Mesh(cp=4)["cp"], EVERY[name]
        mine = [shard_tokens(x, method.assignment, group, dim=2).requires_grad_() for x in (q, k, v)]
        o = method.attend(*mine, group)
        o.sum().backward()
        assert all(x.grad.dtype == x.dtype for x in mine)
        return gather_tokens(o.detach(), method.assignment, group, dim=2)

    expected = full_attention(q.double(), k.double(), v.double(), True, None)
    for found in run(step, ranks=4).values:
        assert found.dtype == torch.bfloat16 and relative_error(found.double(), expected) < 1e-2


# ---- merging ----


def scored(score, value, B=1):
    """One query, one key with this score, and its value."""
    x = lambda number: torch.full((B, 1, 1, 1), float(number), dtype=torch.float64)
    return attend_part(x(1), x(score), x(value))


def test_two_halves_and_two_numbers_make_the_exact_answer():
    """S75: 4, not the plain mean 3; in any order; with scores of 1000; a hidden block adds nothing."""
    parts = [scored(0, 1), scored(math.log(3), 5)]
    assert finish(merge(*parts))[0].item() == pytest.approx(4, rel=1e-14)
    assert sum(finish(part)[0].item() for part in parts) / 2 == 3
    one, all_hidden = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    parts.append(attend_part(one, one, 7 * one, all_hidden))
    for order in itertools.permutations(parts):
        o, lse = finish(merge(merge(order[0], order[1]), order[2]))
        assert o.item() == pytest.approx(4, rel=1e-14) and lse.item() == pytest.approx(math.log(4), rel=1e-14)
    assert [x.item() for x in finish(parts[2])] == [0, -math.inf]
    assert [x.item() for x in finish(merge(parts[2], parts[2]))] == [0, -math.inf]
    for large in (1000, -1000):
        o, lse = finish(merge(scored(large, 1), scored(large + math.log(3), 5)))
        assert o.item() == pytest.approx(4, rel=1e-12) and lse.item() == pytest.approx(large + math.log(4))
    assert finish(merge(scored(1000, 1), scored(-1000, 5)))[0].item() == 1


def test_keys_in_any_order_and_any_pieces():
    q, k, v = (random(1, 2, n, 3, seed=n) for n in (5, 12, 12))
    v = random(1, 2, 12, 3, seed=1)
    expected = (q @ k.mT / math.sqrt(3)).softmax(-1) @ v
    for cuts in ((12,), (1, 11), (3, 4, 5), (1,) * 12):
        parts = [attend_part(q, *piece) for piece in zip(k.split(cuts, 2), v.split(cuts, 2), strict=True)]
        for ordered in (parts, parts[::-1]):
            whole = ordered[0]
            for part in ordered[1:]:
                whole = merge(whole, part)
            assert relative_error(finish(whole)[0], expected) < 1e-14


# ---- work ----


def test_causal_work():
    """S76: contiguous pieces 3, 7, 11, 15 pairs, the slowest rank setting the pace; zigzag 9, 9, 9, 9."""
    by_rank = lambda assignment: [sum(steps) for steps in zip(*pairs(assignment, S=8, P=4), strict=True)]
    assert by_rank(Contiguous()) == [3, 7, 11, 15] and sum(map(max, pairs(Contiguous(), 8, 4))) == 15
    assert by_rank(Zigzag()) == [9, 9, 9, 9]
    assert by_rank(Striped()) == [6, 8, 10, 12]
    for P in (2, 4, 8):
        for step in pairs(Zigzag(), S=16 * P, P=P):
            assert len(set(step)) == 1  # balanced in every step, not in the sum alone


@pytest.mark.parametrize("assignment", [Contiguous(), Zigzag(), Striped()])
def test_pairs_are_those_that_the_mask_shows(assignment):
    S, P = 24, 3
    held = [Tokens(torch.tensor(assignment.positions(S, P, rank))) for rank in range(P)]
    for step, counted in enumerate(pairs(assignment, S, P)):
        for rank in range(P):
            keys = held[(rank - step) % P].positions
            assert counted[rank] == (keys <= held[rank].positions[:, None]).sum()


def test_published_efficiency():
    """T12: 8 GPUs, share of the ideal speed, H800 and A100, forward and backward, by ring-flash-attention."""
    printed = {"ring": (0.539, 0.525), "zigzag": (0.902, 0.898), "striped": (0.829, 0.826)}
    model = {name: float(busy(pairs(ATTENTIONS[name].assignment, S=8192, P=8))) for name in printed}
    assert model["ring"] == pytest.approx(8 / 15, rel=1e-2)
    assert all(abs(model["ring"] / measured - 1) < 0.03 for measured in printed["ring"])
    assert model["zigzag"] == 1 and model["striped"] > 0.99  # what is lost there is not imbalance
    for name in printed:
        assert all(model[name] > 0.97 * measured for measured in printed[name])


def test_work_is_computed_where_it_is_counted():
    """Tiles that the mask hides are not computed: the products follow the pairs, but for halves of tiles."""
    S, P, tile_pairs = 8 * TILE, 4, TILE * TILE

    def step(name):
        group = Mesh(cp=P)["cp"]
        x = torch.zeros(1, 1, S // P, 4)
        ATTENTIONS[name].attend(x, x, x, group)

    for name in ("ring", "zigzag"):
        trace = run(step, name, ranks=P, record="flops").trace
        counted = [sum(steps) for steps in zip(*pairs(ATTENTIONS[name].assignment, S, P), strict=True)]
        for rank in range(P):
            diagonal = S // P // TILE * (tile_pairs - TILE) // 2  # pairs in tiles that are hidden half
            assert trace.flops_of(rank) == 2 * 2 * 4 * (counted[rank] + diagonal)


# ---- memory ----


def biggest_tensor(trace, rank):
    """The largest growth of a rank's memory at once, in bytes."""
    curve = [n_bytes for _, n_bytes in trace.live_bytes[rank]]
    return max(after - before for before, after in itertools.pairwise(curve))


@pytest.mark.parametrize("name", ["ring", "zigzag", "striped", "rsa"])
def test_no_tensor_of_scores(name):
    """Ring attention never holds S x S/p elements; ring self-attention does, forward and backward."""
    S, P = 8 * TILE, 4

    def step():
        group = Mesh(cp=P)["cp"]
        q, k, v = (torch.randn(1, 1, S // P, 8, requires_grad=True) for _ in range(3))
        ATTENTIONS[name].attend(q, k, v, group).sum().backward()

    trace = run(step, ranks=P, record="memory").trace
    for rank in range(P):
        if name == "rsa":
            assert biggest_tensor(trace, rank) >= 4 * S * S // P
        else:
            assert biggest_tensor(trace, rank) <= 4 * TILE * TILE < 4 * S * S // P


@pytest.mark.parametrize("name", EVERY)
def test_what_is_kept_is_the_formula_s(name):
    S, P, H, K = 32, 4, 4, 5

    def step():
        method, kept = EVERY[name], {}

        def keep(x):
            kept[x.data_ptr()] = x.numel()
            return x

        q, k, v = (torch.randn(2, h, S // P, K, requires_grad=True) for h in (H, G, G))
        with saved_tensors_hooks(keep, lambda x: x):
            method.attend(q, k, v, Mesh(cp=P)["cp"])
        return sum(kept.values())

    for G in (4, 2):
        assert run(step, ranks=P).values == [EVERY[name].kept(2, S, H, K, P, G)] * P


@pytest.mark.slow
def test_memory_is_linear_in_the_local_length():
    """Twice as many tokens add twice as much, to the byte. Longer ones are in `make bench`."""

    def step(S):
        q, k, v = (torch.randn(1, 4, S // 4, 8, requires_grad=True) for _ in range(3))
        ATTENTIONS["zigzag"].attend(q, k, v, Mesh(cp=4)["cp"]).sum().backward()

    traces = [run(step, n * TILE, ranks=4, record="memory").trace for n in (8, 16, 32)]
    for rank in range(4):
        short, middle, long = (trace.peak_bytes(rank) for trace in traces)
        assert long - middle == 2 * (middle - short) > 0


# ---- time ----


def late_visits(tensors, group):
    """The next keys set out when the work on these is done."""
    for step in range(group.size):
        yield (group.rank - step) % group.size, tensors
        if step < group.size - 1:
            tensors = Hop(tensors, group).wait()


def test_travelling_is_hidden_behind_work(monkeypatch):
    """In virtual time: where work takes longer than a hop, of all hops only the last one home is seen."""

    def seconds(bandwidth):
        machine = Machine("test", flops_per_s=1e9, in_node=Link(bandwidth_bytes_per_s=bandwidth))

        def step():
            q, k, v = (torch.zeros(1, 1, 64, 16, requires_grad=True) for _ in range(3))
            ATTENTIONS["ring"].attend(q, k, v, Mesh(cp=4)["cp"], causal=False).sum().backward()

        return max(run(step, ranks=4, machine=machine).trace.ended_s)

    hop_s = 2 * 64 * 16 * 4 / 1e8
    free = seconds(math.inf)
    assert seconds(1e8) - free == pytest.approx(hop_s)
    monkeypatch.setattr("lessons_lib.sequence_parallel.ring.visits", late_visits)
    assert seconds(1e8) - free == pytest.approx((3 + 3 + 1) * hop_s)


# ---- wrong versions ----


class StaleKeys(RingAttention):
    """Backward starts from what forward has left in the buffers: the keys of the last visitor."""

    def forward(self, q, k, v, mine, group, causal):
        o, (q, k, v, o, lse) = super().forward(q, k, v, mine, group, causal)
        return o, (q, group.shift(k, -1), group.shift(v, -1), o, lse)


class OneHopFromHome(RingAttention):
    """dK and dV stay on the last rank that added to them."""

    def backward(self, do, kept, mine, group, causal):
        dq, dk, dv = super().backward(do, kept, mine, group, causal)
        return dq, group.shift(dk, -1), group.shift(dv, -1)


class RestartedPositions(RingAttention):
    """Every rank counts its tokens from 0 on."""

    def tokens(self, rank, q, group, documents=None):
        return Tokens(torch.arange(q.shape[2]), documents)


class KeysPositions(RingAttention):
    """The mask is the one of the rank's own tokens, whoever's keys are here."""

    def tokens(self, rank, q, group, documents=None):
        return super().tokens(group.rank, q, group, documents)


class MeanOfSoftmaxes(RingAttention):
    """Each visit's answer counts alike, however much of the softmax it has seen."""

    def forward(self, q, k, v, mine, group, causal):
        whole = mean = None
        for source in range(group.size):
            theirs = self.tokens(source, q, group)
            part = no_keys(q)
            k_c, v_c = (group.broadcast(x, source) for x in (k, v))
            add_keys(part, q, k_c, v_c, tiles(mine, theirs, causal))
            mean = finish(part)[0] + (0 if mean is None else mean)
            whole = part if whole is None else merge(whole, part)
        return mean / group.size, (q, k, v, mean / group.size, finish(whole)[1])


class OwnSums(RingAttention):
    """Backward divides by the softmax's sums over the rank's own keys alone."""

    def forward(self, q, k, v, mine, group, causal):
        o, _ = super().forward(q, k, v, mine, group, causal)
        part = no_keys(q)
        add_keys(part, q, k, v, tiles(mine, mine, causal))
        return o, (q, k, v, o, finish(part)[1])


class ForgottenDocuments(RingAttention):
    """The document numbers stay at home: visiting keys are taken for the rank's own documents'."""

    def tokens(self, rank, q, group, documents=None):
        if rank == group.rank:
            self.own = documents
        return super().tokens(rank, q, group, self.own)


class DividedByP(RingSelfAttention):
    """Colossal-AI's: the gradients of q, k and v are divided by the number of ranks."""

    def backward(self, do, kept, mine, group, causal):
        return tuple(x / group.size for x in super().backward(do, kept, mine, group, causal))


class TermsNotSums(RingSelfAttention):
    """Each rank keeps its own term of dK and dV."""

    def sum_of_mine(self, terms, group):
        return group.piece(terms, 2)


class CopiesNotAdded(Ulysses):
    """Copied heads of keys: the gradient of one copy is taken for the head's."""

    def attend(self, q, k, v, group, causal=True, documents=None):
        copies = group.size // k.shape[1]
        k, v = (torch.stack([x, *[x.detach()] * (copies - 1)], 2).flatten(1, 2) for x in (k, v))
        return super().attend(q, k, v, group, causal, documents)


@pytest.mark.parametrize(
    "wrong, why",
    [
        (StaleKeys(Contiguous()), "dQ on rank . is wrong"),
        (StaleKeys(Zigzag()), "dQ on rank . is wrong"),
        (OneHopFromHome(Contiguous()), "dK on rank . is wrong"),
        (OneHopFromHome(Striped()), "dK on rank . is wrong"),
        (RestartedPositions(Contiguous()), "O on rank . is wrong"),
        (KeysPositions(Zigzag()), "O on rank . is wrong"),
        (MeanOfSoftmaxes(Contiguous()), "O on rank . is wrong"),
        (OwnSums(Contiguous()), "dK on rank . is wrong"),
        (ForgottenDocuments(Contiguous()), "dK on rank . is wrong"),
        (DividedByP(), "dQ on rank . is wrong"),
        (TermsNotSums(), "dK on rank . is wrong"),
        (CopiesNotAdded(), "dK on rank . is wrong"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_wrong_versions_are_caught(wrong, why):
    documents = DOCUMENTS if isinstance(wrong, ForgottenDocuments) else None
    with pytest.raises(AssertionError, match=why):
        assert_is_full_attention(wrong, 4, documents=documents, G=2)
