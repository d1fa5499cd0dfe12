"""Lessons 11 and 12: right solutions pass, however they are written; wrong ones are told by name."""

import re
from functools import cache

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lessons_lib.grading import check
from lessons_lib.grading.catalogue import find
from lessons_lib.grading.exercise import Draw
from lessons_lib.grading.lesson_11 import attend_in_blocks, ring_backward, ring_forward
from lessons_lib.grading.lesson_12 import deal, pairs, ulysses
from lessons_lib.mesh import exchange_exchange, gather_reduce_scatter
from lessons_lib.sequence_parallel import ATTENTIONS, shard_tokens
from lessons_lib.sequence_parallel.assignment import Zigzag
from lessons_lib.sequence_parallel.online_softmax import attend_part, finish, merge


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "progress.json"))


@pytest.fixture(autouse=True)
def _one_thread():
    """As a check draws its trials: small tensors are slow with a team of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stub(*args):
    """Do it."""


# ---- right solutions unlike ours ----


def blocks_by_library(q, ks, vs, visible):
    """The running maximum and sum, from the last block to the first."""
    parts = [
        attend_part(q[None], k[None], v[None], ~seen)
        for k, v, seen in reversed(list(zip(ks, vs, visible, strict=True)))
    ]
    running = parts[0]
    for part in parts[1:]:
        running = merge(running, part)
    return finish(running)[0][0]


def seen_from(source, at, cp):
    return at[cp.rank][:, None] >= at[source]


def scores_of(q, k, seen):
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)


def ring_with_sends(q, k, v, at, cp):
    """Even ranks send first, odd ones receive first; the running maximum instead of lse."""
    m = torch.full_like(q[..., :1], -torch.inf)
    total, o = torch.zeros_like(m), torch.zeros_like(q)
    right, left = (cp.rank + 1) % cp.size, (cp.rank - 1) % cp.size
    for hop in range(cp.size):
        scores = scores_of(q, k, seen_from((cp.rank - hop) % cp.size, at, cp))
        new = torch.maximum(m, scores.amax(-1, keepdim=True))
        old, weights = (m - new).exp(), (scores - new).exp()
        total, o, m = old * total + weights.sum(-1, keepdim=True), old * o + weights @ v, new
        if hop == cp.size - 1:
            break
        both = torch.stack([k, v])
        if cp.rank % 2:
            arrived = cp.recv(both, left)
            cp.send(both, right)
        else:
            cp.send(both, right)
            arrived = cp.recv(both, left)
        k, v = arrived
    return o / total, m + total.log()


def home_in_fewer_hops(do, q, k, v, o, lse, at, cp):
    """The term of one's own keys stays at home: the sums begin at the neighbour, and need P - 1 hops."""
    delta, scale = (do * o).sum(-1, keepdim=True), q.shape[-1] ** 0.5

    def terms(k, v, source):
        weights = (scores_of(q, k, seen_from(source, at, cp)) - lse).exp()
        dz = weights * (do @ v.mT - delta) / scale
        return dz @ k, torch.stack([dz.mT @ q, weights.mT @ do])

    dq, own = terms(k, v, cp.rank)
    travelling = None
    for hop in range(1, cp.size):
        k, v = cp.shift(torch.stack([k, v]), 1)
        if travelling is not None:
            travelling = cp.shift(travelling, 1)
        more, sums = terms(k, v, (cp.rank - hop) % cp.size)
        dq += more
        travelling = sums if travelling is None else travelling + sums
    if travelling is not None:
        own += cp.shift(travelling, 1)
    return dq, *own


def deal_by_library(text, cp):
    at = torch.tensor(Zigzag().positions(text.shape[1] - 1, cp.size, cp.rank))
    return shard_tokens(text[:, :-1], Zigzag(), cp), shard_tokens(text[:, 1:], Zigzag(), cp), at


def pairs_in_a_loop(at):
    return sum(int(place) + 1 for place in at)


def ulysses_by_library(q, k, v, cp):
    return ATTENTIONS["ulysses"].attend(q, k, v, cp)


def ulysses_by_hand(q, k, v, cp):
    """A softmax written out, and heads of keys repeated."""
    q, k, v = (exchange_exchange(x, cp, 1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    S = q.shape[2]
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    return exchange_exchange(scores.softmax(-1) @ v, cp, 2, 1)


RIGHT = [
    ("11-merge", (blocks_by_library,)),
    ("11-ring", (ring_with_sends, home_in_fewer_hops)),
    ("12-zigzag", (deal_by_library, pairs_in_a_loop)),
    ("12-ulysses", (ulysses_by_hand,)),
]
OURS = [
    ("11-merge", (attend_in_blocks,)),
    ("11-ring", (ring_forward, ring_backward)),
    ("12-zigzag", (deal, pairs)),
    ("12-ulysses", (ulysses,)),
    ("12-ulysses", (ulysses_by_library,)),
]


@pytest.mark.parametrize(
    "id, functions",
    [*RIGHT, *(pytest.param(*each, marks=pytest.mark.slow) for each in OURS)],
    ids=lambda value: value[-1].__name__ if isinstance(value, tuple) else None,
)
def test_a_right_solution_passes(id, functions):
    report = check(id, *functions, seed=3)
    assert report.passed and report.points == find(id).points, report


# ---- lesson 11, wrong ----


def mean_of_answers(q, ks, vs, visible):
    answers = [
        (scores_of(q, k, seen).softmax(-1) @ v).nan_to_num()
        for k, v, seen in zip(ks, vs, visible, strict=True)
    ]
    return torch.stack(answers).mean(0)


def without_guard(q, ks, vs, visible):
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for k, v, seen in zip(ks, vs, visible, strict=True):
        scores = scores_of(q, k, seen)
        more = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        o, lse = (lse - more).exp() * o + (scores - more).exp() @ v, more
    return o


def not_scaled_down(q, ks, vs, visible):
    """What came before keeps its weight."""
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for k, v, seen in zip(ks, vs, visible, strict=True):
        scores = scores_of(q, k, seen)
        lse = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        o = o + (scores - lse.masked_fill(lse == -torch.inf, 0)).exp() @ v
    return o


def from_0(q, ks, vs, visible):
    """The sum of exp(score) begins with exp(0)."""
    o, lse = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    for k, v, seen in zip(ks, vs, visible, strict=True):
        scores = scores_of(q, k, seen)
        more = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        o, lse = (lse - more).exp() * o + (scores - more).exp() @ v, more
    return o


def all_visible(q, ks, vs, visible):
    return attend_in_blocks(q, ks, vs, [torch.ones_like(seen) for seen in visible])


def without_scale(q, ks, vs, visible):
    return attend_in_blocks(q * q.shape[-1] ** 0.5, ks, vs, visible)


def without_logarithm(q, ks, vs, visible):
    o, total = 0, 0
    for k, v, seen in zip(ks, vs, visible, strict=True):
        weights = scores_of(q, k, seen).exp()
        o, total = o + weights @ v, total + weights.sum(-1, keepdim=True)
    return o / total


def all_at_once(q, ks, vs, visible):
    return scores_of(q, torch.cat(ks, 1), torch.cat(visible, 1)).softmax(-1) @ torch.cat(vs, 1)


def restarted(q, k, v, at, cp):
    return ring_forward(q, k, v, torch.arange(at.shape[1]).expand_as(at), cp)


def without_mask(q, k, v, at, cp):
    return ring_forward(q, k, v, torch.zeros_like(at), cp)


def ring_of(q, k, v, at, cp, source):
    """The reference, with a mask of one's own."""
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for hop in range(cp.size):
        scores = scores_of(q, k, seen_from(source(cp, hop), at, cp))
        more = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        finite = more.masked_fill(more == -torch.inf, 0)
        o, lse = (lse - finite).exp() * o + (scores - finite).exp() @ v, more
        if hop < cp.size - 1:
            k, v = cp.shift(torch.stack([k, v]), 1)
    return o, lse


def own_places(*args):
    return ring_of(*args, source=lambda cp, hop: cp.rank)


def other_way_round(*args):
    return ring_of(*args, source=lambda cp, hop: (cp.rank + hop) % cp.size)


def ring_without_scale(q, *args):
    return ring_forward(q * q.shape[-1] ** 0.5, *args)


def own_keys(q, k, v, at, cp):
    scores = scores_of(q, k, seen_from(cp.rank, at, cp))
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def gathered(q, k, v, at, cp):
    K, V = cp.all_gather(k, 1), cp.all_gather(v, 1)
    scores = scores_of(q, K, at[cp.rank][:, None] >= at.flatten())
    return scores.softmax(-1) @ V, scores.logsumexp(-1, keepdim=True)


def whole_rows(q, k, v, at, cp):
    """Ring self-attention: all scores first, then a softmax."""
    scores = []
    for hop in range(cp.size):
        scores.append(scores_of(q, k, seen_from((cp.rank - hop) % cp.size, at, cp)))
        if hop < cp.size - 1:
            k = cp.shift(k, 1)
    rows = torch.cat(scores, -1)
    o = 0
    for hop, weights in enumerate(rows.softmax(-1).chunk(cp.size, -1)):
        o = o + weights @ v
        if hop < cp.size - 1:
            v = cp.shift(v, 1)
    return o, rows.logsumexp(-1, keepdim=True)


def to_the_left(q, k, v, at, cp):
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for hop in range(cp.size):
        scores = scores_of(q, k, seen_from((cp.rank + hop) % cp.size, at, cp))
        more = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        finite = more.masked_fill(more == -torch.inf, 0)
        o, lse = (lse - finite).exp() * o + (scores - finite).exp() @ v, more
        if hop < cp.size - 1:
            k, v = cp.shift(torch.stack([k, v]), -1)
    return o, lse


def one_hop_too_many(q, k, v, at, cp):
    o, lse = ring_forward(q, k, v, at, cp)
    cp.shift(torch.stack([k, v]), 1)
    return o, lse


def one_hop_from_home(*args):
    dq, dk, dv = ring_backward(*args)
    return dq, args[-1].shift(dk, -1), args[-1].shift(dv, -1)


def divided_by_ranks(*args):
    return tuple(x / args[-1].size for x in ring_backward(*args))


def backward_of(
    do, q, k, v, o, lse, at, cp, *, keys="those that come", rows="final", delta=True, scaled=True
):
    """The reference, with a fault."""
    scale = q.shape[-1] ** 0.5
    of_row = (do * o).sum(-1, keepdim=True) if delta else 0
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    mine = k, v
    for hop in range(cp.size):
        scores = scores_of(q, k, seen_from((cp.rank - hop) % cp.size, at, cp))
        weights = (scores - lse).exp() if rows != "of each block" else scores.softmax(-1).nan_to_num()
        if rows == "unmasked":
            weights = (q @ k.mT / scale - lse).exp()
        dz = weights * (do @ v.mT - of_row) / (scale if scaled else 1)
        dq += dz @ k
        dk, dv = cp.shift(torch.stack([dk + dz.mT @ q, dv + weights.mT @ do]), 1)
        if hop < cp.size - 1:
            k, v = cp.shift(torch.stack([k, v]), 1)
            if keys == "stale":
                k, v = mine
    return dq, dk, dv


def stale_keys(*args):
    return backward_of(*args, keys="stale")


def softmax_of_each_block(*args):
    return backward_of(*args, rows="of each block")


def without_delta(*args):
    return backward_of(*args, delta=False)


def unscaled_gradients(*args):
    return backward_of(*args, scaled=False)


def mask_forgotten(*args):
    return backward_of(*args, rows="unmasked")


def terms_stay(do, q, k, v, o, lse, at, cp):
    """Every rank works out what its own queries give to its own keys."""
    weights = (scores_of(q, k, seen_from(cp.rank, at, cp)) - lse).exp()
    dz = weights * (do @ v.mT - (do * o).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    return dz @ k, dz.mT @ q, weights.mT @ do


def all_reduced(do, q, k, v, o, lse, at, cp):
    """dK and dV of all tokens, added up on every rank."""
    K, V = cp.all_gather(k, 1), cp.all_gather(v, 1)
    weights = (scores_of(q, K, at[cp.rank][:, None] >= at.flatten()) - lse).exp()
    dz = weights * (do @ V.mT - (do * o).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    dk, dv = (cp.piece(cp.all_reduce(x), 1) for x in (dz.mT @ q, weights.mT @ do))
    return dz @ K, dk, dv


# ---- lesson 12, wrong ----


def dealt(text, at):
    return text[:, at], text[:, at + 1], at


def contiguous(text, cp):
    return dealt(text, torch.arange(text.shape[1] - 1).chunk(cp.size)[cp.rank])


def striped(text, cp):
    return dealt(text, torch.arange(cp.rank, text.shape[1] - 1, cp.size))


def back_piece_first(text, cp):
    return dealt(text, deal(text, cp)[2].unflatten(0, (2, -1)).flip(0).flatten())


def half_a_text_apart(text, cp):
    pieces = torch.arange(text.shape[1] - 1).chunk(2 * cp.size)
    return dealt(text, torch.cat([pieces[cp.rank], pieces[cp.rank + cp.size]]))


def shifted_after_the_cut(text, cp):
    tokens, _, at = deal(text, cp)
    return tokens, tokens.roll(-1, 1), at


def places_restart(text, cp):
    tokens, labels, at = deal(text, cp)
    return tokens, labels, torch.arange(len(at))


def fetched_and_dropped(text, cp):
    cp.all_gather(text, 0)
    return deal(text, cp)


def not_itself(at):
    return at.sum()


def own_pairs(at):
    return (at[:, None] >= at).sum()


def alone(q, k, v, cp):
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def no_mask(q, k, v, cp):
    q, k, v = (exchange_exchange(x, cp, 1, 2) for x in (q, k, v))
    return exchange_exchange(scaled_dot_product_attention(q, k, v, enable_gqa=True), cp, 2, 1)


def every_other_head(q, k, v, cp):
    q, k, v = (exchange_exchange(x, cp, 1, 2) for x in (q, k, v))
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
    return exchange_exchange(scaled_dot_product_attention(q, k, v, is_causal=True), cp, 2, 1)


def dims_swapped(q, k, v, cp):
    q, k, v = (exchange_exchange(x, cp, 2, 1) for x in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return exchange_exchange(o, cp, 1, 2)


def not_exchanged_back(q, k, v, cp):
    q, k, v = (exchange_exchange(x, cp, 1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def without_gradients(q, k, v, cp):
    q, k, v = (cp.all_to_all(x.detach(), 1, 2) for x in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return cp.all_to_all(o, 2, 1)


def all_gathered(q, k, v, cp):
    """Everything on every rank; it keeps its tokens."""
    q, k, v = (gather_reduce_scatter(x, cp, 2) for x in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.chunk(cp.size, 2)[cp.rank].contiguous()


def keys_repeated_first(q, k, v, cp):
    """As many heads of keys as of queries are exchanged: right, and more is sent."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return ulysses(q, k, v, cp)


def scaled_by_ranks(q, k, v, cp):
    q, k, v = (x / cp.size + (x * (1 - 1 / cp.size)).detach() for x in (q, k, v))
    return ulysses(q, k, v, cp)


WRONG = [
    ("11-merge", (stub,), "order", "nothing came back"),
    ("11-merge", (mean_of_answers,), "order", "mean of the blocks' answers"),
    ("11-merge", (without_guard,), "hidden", "is not a finite number"),
    ("11-merge", (not_scaled_down,), "order", "what came before was not scaled down"),
    ("11-merge", (from_0,), "order", "it begins with -inf"),
    ("11-merge", (all_visible,), "order", "keys that visible hides"),
    ("11-merge", (without_scale,), "order", r"not divided by sqrt\(K\)"),
    ("11-merge", (without_logarithm,), "large", "is not a finite number"),
    (
        "11-merge",
        (all_at_once,),
        "memory",
        r"right numbers, but rank \d held .* Are the scores of all keys in",
    ),
    ("11-ring", (stub, ring_backward), "forward", "nothing came back"),
    ("11-ring", (restarted, ring_backward), "forward", "places that restart at 0 on every rank"),
    ("11-ring", (without_mask, ring_backward), "forward", "tokens look at what comes after them"),
    ("11-ring", (own_places, ring_backward), "forward", "places of this rank's own tokens were taken"),
    ("11-ring", (other_way_round, ring_backward), "forward", r"those of rank \(cp.rank - hop\) % cp.size"),
    ("11-ring", (other_way_round, ring_backward), "lse", "keys come from the left"),
    ("11-ring", (ring_without_scale, ring_backward), "forward", r"not divided by sqrt\(K\)"),
    ("11-ring", (own_keys, ring_backward), "forward", "each rank has looked at its own keys alone"),
    (
        "11-ring",
        (own_keys, ring_backward),
        "traffic",
        "nothing was sent, and keys and values are passed on P - 1",
    ),
    ("11-ring", (gathered, ring_backward), "traffic", "all_gather was called, and this exercise builds it"),
    ("11-ring", (whole_rows, ring_backward), "memory", "Are the scores of all keys in one tensor"),
    ("11-ring", (to_the_left, ring_backward), "traffic", "in a ring it sends to its right neighbour only"),
    (
        "11-ring",
        (one_hop_too_many, ring_backward),
        "traffic",
        "times as much was sent .*: keys and values are",
    ),
    ("11-ring", (ring_forward, one_hop_from_home), "dK", "swapped|wrong ranks: rank 0 has that of rank 1"),
    ("11-ring", (ring_forward, one_hop_from_home), "dV", "swapped|wrong ranks: rank 0 has that of rank 1"),
    ("11-ring", (ring_forward, divided_by_ranks), "dQ", r"exactly 1/2 of the right value"),
    ("11-ring", (ring_forward, divided_by_ranks), "dK", r"exactly 1/2 of the right value"),
    ("11-ring", (ring_forward, stale_keys), "dQ", "dQ is wrong on ranks 0 and 1"),
    ("11-ring", (ring_forward, softmax_of_each_block), "dV", "each block had a softmax of its own"),
    ("11-ring", (ring_forward, without_delta), "dQ", "delta is missing"),
    ("11-ring", (ring_forward, unscaled_gradients), "dQ", r"dZ was not divided by sqrt\(K\)"),
    ("11-ring", (ring_forward, mask_forgotten), "dV", "hidden scores are -inf in the backward, too"),
    ("11-ring", (ring_forward, terms_stay), "dK", "dK is wrong on"),
    ("11-ring", (ring_forward, terms_stay), "traffic", "nothing was sent, and keys and values are passed on"),
    ("11-ring", (ring_forward, all_reduced), "traffic", "all_gather, all_reduce was called"),
    ("12-zigzag", (stub, pairs), "tokens", "nothing came back"),
    ("12-zigzag", (contiguous, pairs), "tokens", "contiguous pieces, so the last rank works most"),
    ("12-zigzag", (striped, pairs), "places", "striped, and not zigzag"),
    ("12-zigzag", (back_piece_first, pairs), "tokens", "the piece from the back lies in front of the other"),
    ("12-zigzag", (half_a_text_apart, pairs), "tokens", r"rank r has pieces r and r \+ P"),
    ("12-zigzag", (shifted_after_the_cut, pairs), "labels", "they were shifted after the cut"),
    ("12-zigzag", (places_restart, pairs), "places", "they restart at 0 on every rank"),
    (
        "12-zigzag",
        (fetched_and_dropped, pairs),
        "traffic",
        "nothing is enough: every rank has the whole text",
    ),
    ("12-zigzag", (deal, not_itself), "pairs", "a token sees itself, too"),
    ("12-zigzag", (deal, own_pairs), "pairs", "pairs among the rank's own tokens"),
    ("12-ulysses", (stub,), "forward", "nothing came back"),
    ("12-ulysses", (alone,), "forward", "each rank has looked at its own tokens alone"),
    ("12-ulysses", (no_mask,), "forward", "tokens look at what comes after them"),
    ("12-ulysses", (every_other_head,), "forward", "neighbouring heads of queries, not with every other"),
    ("12-ulysses", (without_gradients,), "gradients", "autograd not find its way from O to it"),
    ("12-ulysses", (not_exchanged_back,), "forward", "O has shape .* was asked"),
    ("12-ulysses", (all_gathered,), "traffic", "all_gather brought the whole of Q to every rank"),
    ("12-ulysses", (all_gathered,), "memory", r"right numbers, but rank \d held"),
    ("12-ulysses", (keys_repeated_first,), "traffic", "times as much was sent"),
    ("12-ulysses", (scaled_by_ranks,), "gradients", "exactly 1/2 of the right value"),
]
ALWAYS = (without_guard, one_hop_from_home, shifted_after_the_cut)


@cache
def checked(id, functions):
    """One check, however many lines of its table are looked at."""
    return check(id, *functions, seed=5)


@pytest.mark.parametrize(
    "id, functions, claim, words",
    [pytest.param(*each, marks=() if set(each[1]) & set(ALWAYS) else pytest.mark.slow) for each in WRONG],
    ids=lambda value: "-".join(each.__name__ for each in value) if isinstance(value, tuple) else None,
)
def test_a_wrong_solution_is_told(id, functions, claim, words):
    report = checked(id, functions)
    assert not report.passed
    message = next(line.message for line in report.lines if line.claim == claim and line.passed is False)
    assert re.search(words, message), f"{claim}: {message}\n{report}"


# ---- what is drawn ----


def test_blocks_are_hidden_wholly_and_come_in_any_order():
    trials = find("11-merge").trials(Draw(1))
    hidden = [[not seen.any() for seen in trial.args[0][3]] for trial in trials]
    assert hidden[1][0] and not any(hidden[0])
    assert all(seen.any(-1).all() for trial in trials for seen in [torch.cat(trial.args[0][3], -1)])
    rings = [trial for trial in find("11-ring").trials(Draw(1)) if trial.function == "ring_forward"]
    orders = [trial.args[0][3].flatten() for trial in rings]
    in_order = [bool(order.diff().eq(1).all()) for order in orders]
    assert in_order == [False, True, False, True]


def test_no_room_for_the_scores_of_all_keys():
    for trial in find("11-ring").trials(Draw(2)):
        if trial.sizes == {"cp": 6}:
            H, s, _ = trial.args[0][0].shape
            rows = H * s * 6 * s
            assert trial.spare < 2 * rows  # the scores and their softmax


def test_all_ranks_have_equally_many_pairs():
    for trial in find("12-zigzag").trials(Draw(3)):
        if trial.function == "deal":
            n_pairs = {int((places + 1).sum()) for places in trial.outputs[2].expected}
            assert len(n_pairs) == 1


def test_exchanges_the_wrong_way_round_are_told_where_tokens_can_be_split():
    """Where they cannot, the exchange itself refuses them."""
    for seed in range(20):
        trial = next(t for t in find("12-ulysses").trials(Draw(seed)) if t.sizes == {"cp": 2})
        s = trial.args[0][0].shape[2]
        if s == 4:
            break
    report = check("12-ulysses", dims_swapped, seed=seed)
    assert "split_dim and concat_dim are the wrong way round" in report.lines[0].message
