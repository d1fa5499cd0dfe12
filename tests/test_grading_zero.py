"""Lessons 03 to 06: a right solution passes, however it is written; each wrong one is told by its name."""

import re
from functools import partial
from math import ceil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint

from lessons_lib.cost.activations import kept, kept_by_layer
from lessons_lib.data_parallel import Zero
from lessons_lib.grading import check
from lessons_lib.grading.catalogue import find
from lessons_lib.grading.exercise import Draw


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "progress.json"))


# ---- 03: right, and unlike ours ----


def counted_by_step(config, B, itemsize):
    widths = {"norms": 2 * config.D, "qkv": config.D, "attention": 3 * config.D + config.H}
    widths |= {"proj": config.D, "up": config.D, "gelu": config.F, "down": config.F, "mean and deviation": 4}
    return float(sum(widths.values()) * B * config.S * config.L * itemsize)


def by_the_formula(config, B, itemsize):
    return kept(config, B, itemsize)["layers"]


def by_checkpoint(block, x, ws):
    return checkpoint(block, x, *ws, use_reentrant=False)


class ByBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *ws):
        ctx.block, ctx.inputs = block, (x, *ws)  # no copies: the arguments themselves
        return block(x, *ws)

    @staticmethod
    def backward(ctx, dy):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.inputs]
        with torch.enable_grad():
            ctx.block(*inputs).backward(dy)
        return (None, *(tensor.grad for tensor in inputs))


def by_backward(block, x, ws):
    return ByBackward.apply(block, x, *ws)


# ---- 03: wrong ----


def one_block(config, B, itemsize):
    return by_the_formula(config, B, itemsize) // config.L


def numbers_for_bytes(config, B, itemsize):
    return by_the_formula(config, B, 1)


def only_sixteen(config, B, itemsize):
    return 16 * B * config.S * config.D * config.L * itemsize


def less(name, share=1):
    def stored_bytes(config, B, itemsize):
        terms = kept_by_layer(config, B)
        return config.L * itemsize * (sum(terms.values()) - terms[name] // share)

    stored_bytes.__name__ = f"less_{name.replace(' ', '_')}"
    return stored_bytes


def with_scores(config, B, itemsize):
    return kept(config, B, itemsize, attention="scores")["layers"]


def as_if_run_again(config, B, itemsize):
    return kept(config, B, itemsize, recompute="full")["layers"]


def one_byte_more(config, B, itemsize):
    return by_the_formula(config, B, itemsize) + 1


def one_number(config, B, itemsize):
    return 187200


def keeps_all(block, x, ws):
    return block(x, *ws)


class Variant(torch.autograd.Function):
    """Right, but for what ``how`` names."""

    @staticmethod
    def forward(ctx, how, block, *inputs):
        ctx.how, ctx.block = how, block
        ctx.save_for_backward(*inputs)
        if how == "keeps what is inside":
            with torch.enable_grad():
                ctx.y = block(*(tensor.detach().requires_grad_() for tensor in inputs))
            return ctx.y.detach()
        return block(*inputs)

    @staticmethod
    def backward(ctx, dy):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        if ctx.how == "takes ones for dy":
            dy = torch.ones_like(dy)
        if ctx.how == "once for each":
            gradients = []
            for tensor in inputs:
                with torch.enable_grad():
                    y = ctx.block(*inputs)
                gradients += torch.autograd.grad(y, [tensor], dy)
            return None, None, *gradients
        with torch.enable_grad():
            y = ctx.block(*inputs)
        gradients = list(torch.autograd.grad(y, inputs, dy))
        if ctx.how == "forgets the weights":
            gradients[1:] = [None] * len(gradients[1:])
        return None, None, *gradients


def variant(how):
    def run_again(block, x, ws):
        return Variant.apply(how, block, x, *ws)

    run_again.__name__ = how.replace(" ", "_")
    return run_again


def cut_off(block, x, ws):
    with torch.no_grad():
        return block(x, *ws)


# ---- 04: right, and unlike ours ----


def in_slices(gradients, n_tokens, bucket_elements, dp):
    """Buckets are slices of one flat vector, sent without waiting; the tokens travel as a last element."""
    flat = torch.cat([gradient.flatten() for gradient in gradients]) * n_tokens
    flat = torch.cat([flat, flat.new_tensor([n_tokens])])
    works = [
        dist.all_reduce(piece, group=dp.process_group, async_op=True) for piece in flat.split(bucket_elements)
    ]
    for work in works:
        work.wait()
    flat /= flat[-1].clone()
    pieces = flat[:-1].split([gradient.numel() for gradient in gradients])
    return [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]


def last_first(gradients, n_tokens, bucket_elements, dp):
    """As backward makes them; the counts of tokens are gathered."""
    total = dp.all_gather(torch.tensor([n_tokens]), 0).sum()
    buckets, room = [], 0
    for at in reversed(range(len(gradients))):
        if room <= 0:
            buckets.append([])
            room = bucket_elements
        buckets[-1].append(at)
        room -= gradients[at].numel()
    averaged = [torch.empty_like(gradient) for gradient in gradients]
    for bucket in buckets:
        vector = torch.cat([gradients[at].flatten() for at in bucket])
        vector = dp.all_reduce(vector * n_tokens) / total
        for at, piece in zip(bucket, vector.split([gradients[at].numel() for at in bucket]), strict=True):
            averaged[at].view(-1).copy_(piece)
    return averaged


# ---- 04: wrong ----


def buckets(gradients, bucket_elements, reduce):
    """What all the wrong ones have in common."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat = torch.cat([reduce(piece) for piece in flat.split(bucket_elements)])
    pieces = flat.split([gradient.numel() for gradient in gradients])
    return [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]


def mean_of_means(gradients, n_tokens, bucket_elements, dp):
    return buckets(gradients, bucket_elements, lambda piece: dp.all_reduce(piece) / dp.size)


def divided_twice(gradients, n_tokens, bucket_elements, dp):
    total = dp.all_reduce(torch.tensor(n_tokens))
    return buckets(
        gradients, bucket_elements, lambda piece: dp.all_reduce(piece * n_tokens, op="avg") / total
    )


def not_divided(gradients, n_tokens, bucket_elements, dp):
    return buckets(gradients, bucket_elements, lambda piece: dp.all_reduce(piece * n_tokens))


def not_weighted(gradients, n_tokens, bucket_elements, dp):
    return buckets(gradients, bucket_elements, dp.all_reduce)


def by_its_own_tokens(gradients, n_tokens, bucket_elements, dp):
    return buckets(gradients, bucket_elements, lambda piece: dp.all_reduce(piece * n_tokens) / n_tokens)


def over_the_world(gradients, n_tokens, bucket_elements, dp):
    total = torch.tensor(n_tokens)
    dist.all_reduce(total)

    def reduce(piece):
        piece = piece * n_tokens
        dist.all_reduce(piece)
        return piece / total

    return buckets(gradients, bucket_elements, reduce)


def nothing_added(gradients, n_tokens, bucket_elements, dp):
    return list(gradients)


def each_for_itself(gradients, n_tokens, bucket_elements, dp):
    """One all-reduce for every tensor."""
    total = dp.all_reduce(torch.tensor(n_tokens))
    return [dp.all_reduce(gradient * n_tokens) / total for gradient in gradients]


def one_bucket(gradients, n_tokens, bucket_elements, dp):
    total = dp.all_reduce(torch.tensor(n_tokens))
    return buckets(gradients, 10**6, lambda piece: dp.all_reduce(piece * n_tokens) / total)


def absent_without_tokens(gradients, n_tokens, bucket_elements, dp):
    if not n_tokens:
        return gradients
    return in_slices(gradients, n_tokens, bucket_elements, dp)


def gathered_from_all(gradients, n_tokens, bucket_elements, dp):
    """Everybody's gradients on every rank."""
    counts = dp.all_gather(torch.tensor([n_tokens]), 0)

    def reduce(piece):
        everyone = dp.all_gather(piece[None], 0)
        return (counts[:, None] * everyone).sum(0) / counts.sum()

    return buckets(gradients, bucket_elements, reduce)


def in_place(gradients, n_tokens, bucket_elements, dp):
    for gradient in gradients:
        gradient.mul_(n_tokens)
    total = dp.all_reduce(torch.tensor(n_tokens))
    return buckets(gradients, bucket_elements, lambda piece: dp.all_reduce(piece) / total)


def last_bucket_forgotten(gradients, n_tokens, bucket_elements, dp):
    averaged = in_slices(gradients, n_tokens, bucket_elements, dp)
    averaged[-1] = gradients[-1]
    return averaged


def written_down_gradients(gradients, n_tokens, bucket_elements, dp):
    return [torch.linspace(1, 2, g.numel(), dtype=g.dtype).view(g.shape) for g in gradients]


# ---- 05: right, and unlike ours ----


def by_hand(W, x, y, n_steps, dp):
    """Adam in formulas, and one buffer for all that is sent."""
    n, share = len(W), -(-len(W) // dp.size)
    buffer = W.new_zeros(share * dp.size)
    W = buffer[:n].copy_(W)
    mine = slice(dp.rank * share, (dp.rank + 1) * share)
    piece = buffer[mine].clone()
    m, v, gradient = (torch.zeros_like(piece) for _ in range(3))
    for t in range(1, n_steps + 1):
        buffer[:n] = x.T @ (x @ W - y)
        dist.reduce_scatter_single(gradient, buffer, group=dp.process_group)
        m.lerp_(gradient, 0.1)
        v.mul_(0.999).add_(0.001 * gradient.square())
        piece -= 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 0.1)
        dist.all_gather_single(buffer, piece, group=dp.process_group)
    return W.clone()


def by_the_library(W, x, y, n_steps, dp):
    model = nn.Linear(len(W), 1, bias=False, dtype=W.dtype)
    model.weight.data.copy_(W)
    zero = Zero(model, 1, dp, partial(Adam, lr=0.1, eps=0.1))
    for _ in range(n_steps):
        zero.zero_grad()
        ((model(x).squeeze(1) - y).square().sum() / 2).backward()
        zero.step()
    return model.weight.detach().flatten()


# ---- 05: wrong ----


def pieces(W, x, y, n_steps, dp, reduce=None, gather=None, at=None, forgetful=False):
    """What most of the wrong ones have in common: right, but for one thing."""

    def pad(vector):
        return nn.functional.pad(vector, (0, -len(W) % dp.size))

    piece, now = nn.Parameter(dp.piece(pad(W), 0)), W
    optimizer = Adam([piece], lr=0.1, eps=0.1)
    for _ in range(n_steps):
        term = pad(x.T @ (x @ (now if at is None else at) - y))
        piece.grad = dp.reduce_scatter(term, 0) if reduce is None else reduce(term)
        if forgetful:
            optimizer = Adam([piece], lr=0.1, eps=0.1)
        optimizer.step()
        whole = dp.all_gather(piece.detach(), 0) if gather is None else gather(piece.detach(), pad(now))
        now = whole[: len(W)]
    return now


def own_term(W, x, y, n_steps, dp):
    return pieces(W, x, y, n_steps, dp, reduce=lambda term: dp.piece(term, 0))


def averaged(W, x, y, n_steps, dp):
    return pieces(W, x, y, n_steps, dp, reduce=lambda term: dp.reduce_scatter(term, 0, op="avg"))


def summed_twice(W, x, y, n_steps, dp):
    return pieces(W, x, y, n_steps, dp, reduce=lambda term: dp.reduce_scatter(dp.all_reduce(term), 0))


def never_gathered(W, x, y, n_steps, dp):
    def gather(piece, now):
        now = now.clone()
        now.chunk(dp.size)[dp.rank].copy_(piece)
        return now

    return pieces(W, x, y, n_steps, dp, gather=gather)


def stale(W, x, y, n_steps, dp):
    return pieces(W, x, y, n_steps, dp, at=W)


def moments_forgotten(W, x, y, n_steps, dp):
    return pieces(W, x, y, n_steps, dp, forgetful=True)


def reduced_and_cut(W, x, y, n_steps, dp):
    """Right, by a whole all-reduce."""
    return pieces(W, x, y, n_steps, dp, reduce=lambda term: dp.piece(dp.all_reduce(term), 0))


def replicated(W, x, y, n_steps, dp, reduce=None):
    """Plain data parallel training: every rank has the state of everything."""
    w = nn.Parameter(W.clone())
    optimizer = Adam([w], lr=0.1, eps=0.1, foreach=False)
    for _ in range(n_steps):
        term = x.T @ (x @ w.detach() - y)
        w.grad = dp.all_reduce(term) if reduce is None else reduce(term)
        optimizer.step()
    return w.detach()


def alone(W, x, y, n_steps, dp):
    return replicated(W, x, y, n_steps, dp, reduce=torch.clone)


def world_adam(W, x, y, n_steps, dp):
    def reduce(term):
        dist.all_reduce(term)
        return term

    return replicated(W, x, y, n_steps, dp, reduce=reduce)


def gathered_gradients(W, x, y, n_steps, dp):
    """The bytes of ZeRO 1, and nothing saved."""

    def reduce(term):
        padded = nn.functional.pad(term, (0, -len(W) % dp.size))
        return dp.all_gather(dp.reduce_scatter(padded, 0), 0)[: len(W)]

    return replicated(W, x, y, n_steps, dp, reduce=reduce)


def serial_adam(W, x, y, n_steps, dp):
    """The serial program, with everybody's rows, on every rank."""
    return replicated(W, dp.all_gather(x, 0), dp.all_gather(y, 0), n_steps, dp, reduce=torch.clone)


def even_only(W, x, y, n_steps, dp):
    piece = nn.Parameter(dp.piece(W, 0))
    optimizer = Adam([piece], lr=0.1, eps=0.1)
    for _ in range(n_steps):
        piece.grad = dp.reduce_scatter(x.T @ (x @ W - y), 0)
        optimizer.step()
        W = dp.all_gather(piece.detach(), 0)
    return W


def padding_returned(W, x, y, n_steps, dp):
    return nn.functional.pad(pieces(W, x, y, n_steps, dp), (0, -len(W) % dp.size))


def changes_W(W, x, y, n_steps, dp):
    return W.copy_(pieces(W, x, y, n_steps, dp))


def only_a_piece(W, x, y, n_steps, dp):
    return dp.piece(nn.functional.pad(pieces(W, x, y, n_steps, dp), (0, -len(W) % dp.size)), 0)


def written_down_weights(W, x, y, n_steps, dp):
    return torch.linspace(-1, 1, len(W), dtype=W.dtype)


# ---- 06: right, and unlike ours ----


def start(w, dp):
    W = w.new_empty(dp.size * w.shape[0], w.shape[1])
    return W, dist.all_gather_single(W, w, group=dp.process_group, async_op=True)


def in_two_buffers(x, ws, dp):
    """Two buffers, filled in turns; the next gather begins before this one is waited for."""
    D = ws[0].shape[1]
    buffers, works = [x.new_empty(D, D) for _ in range(2)], [None, None]

    def gather(at):
        parts = list(buffers[at % 2].chunk(dp.size))
        works[at % 2] = dist.all_gather(parts, ws[at], group=dp.process_group, async_op=True)

    gather(0)
    for at in range(len(ws)):
        if at + 1 < len(ws):
            gather(at + 1)
        works[at % 2].wait()
        x = (x @ buffers[at % 2]).tanh()
    return x


def in_a_queue(x, ws, dp):
    queue, left = [], list(ws)
    while queue or left:
        while left and len(queue) < 2:
            queue.append(start(left.pop(0), dp))
        W, work = queue.pop(0)
        work.wait()
        del work
        x = torch.tanh(x @ W)
        del W
    return x


# ---- 06: wrong ----


def just_in_time(x, ws, dp):
    for w in ws:
        x = torch.tanh(x @ dp.all_gather(w, 0))
    return x


def waits_at_once(x, ws, dp):
    """Async in name only."""
    W, work = start(ws[0], dp)
    work.wait()
    for following in [*ws[1:], None]:
        if following is not None:
            coming, work = start(following, dp)
            work.wait()
        x = torch.tanh(x @ W)
        W = coming
    return x


def ahead(x, ws, dp, kept=None, order=None, layer=lambda x, W: torch.tanh(x @ W)):
    """Right, but for one thing."""
    ws = [ws[at] for at in order] if order else ws
    coming = start(ws[0], dp)
    for following in [*ws[1:], None]:
        W, arrives = coming
        if kept is not None:
            kept.append(W)
        arrives.wait()
        if following is not None:
            coming = start(following, dp)
        x = layer(x, W)
    return x


def never_freed(x, ws, dp):
    return ahead(x, ws, dp, kept=[])


def works_kept(x, ws, dp):
    """Not the layers, but works, each of which holds one."""
    works, coming = [], start(ws[0], dp)
    for following in [*ws[1:], None]:
        W, arrives = coming
        works.append(arrives)
        arrives.wait()
        if following is not None:
            coming = start(following, dp)
        x = torch.tanh(x @ W)
    return x


def all_at_once(x, ws, dp):
    every = [start(w, dp) for w in ws]
    for W, work in every:
        work.wait()
        x = torch.tanh(x @ W)
    return x


def in_one_call(x, ws, dp):
    for W in dp.all_gather(torch.stack(ws), 1):
        x = torch.tanh(x @ W)
    return x


def two_ahead(x, ws, dp):
    queue, left = [], list(ws)
    while queue or left:
        while left and len(queue) < 3:
            queue.append(start(left.pop(0), dp))
        W, work = queue.pop(0)
        work.wait()
        x = torch.tanh(x @ W)
    return x


def gathered_twice(x, ws, dp):
    """The next layer on its way, and then again, to be sure."""
    for at, w in enumerate(ws):
        if at + 1 < len(ws):
            _, work = start(ws[at + 1], dp)
        x = torch.tanh(x @ dp.all_gather(w, 0))
        work.wait()
    return x


def rows_travel(x, ws, dp):
    """Tensor parallel: the rows go to the layers."""
    X = dp.all_gather(x, 0)
    for w in ws:
        X = torch.tanh(dp.all_reduce(dp.piece(X, 1) @ w))
    return dp.piece(X, 0)


def rows_gathered(x, ws, dp):
    """The serial answer: everybody's rows, on every rank."""
    return ahead(dp.all_gather(x, 0), ws, dp)


def own_pieces(x, ws, dp):
    for w in ws:
        x = torch.tanh(x @ w.repeat(dp.size, 1))
    return x


def backwards(x, ws, dp):
    return ahead(x, ws, dp, order=list(range(len(ws)))[::-1])


def last_left_out(x, ws, dp):
    return ahead(x, ws[:-1], dp)


def no_tanh(x, ws, dp):
    return ahead(x, ws, dp, layer=lambda x, W: x @ W)


def last_never_gathered(x, ws, dp):
    """The loop ends with the last one on its way."""
    W, arrives = start(ws[0], dp)
    for following in ws[1:]:
        arrives.wait()
        coming, arrives = start(following, dp)
        x = torch.tanh(x @ W)
        W = coming
    arrives.wait()
    return x


def written_down_rows(x, ws, dp):
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)


WRONG = [
    ("04-buckets", mean_of_means, "values", r"gradient 0: this is the mean of the ranks' means"),
    ("04-buckets", divided_twice, "values", "divided twice, by the number of all tokens and then"),
    ("04-buckets", not_divided, "values", "a sum over all tokens: it was not divided"),
    ("04-buckets", not_weighted, "values", "the ranks' means were added up: each counts by its share"),
    ("04-buckets", by_its_own_tokens, "values", "divided by this rank's own number of tokens"),
    (
        "04-buckets",
        over_the_world,
        "values",
        r"dp=2, tp=2.*a mean over all ranks of the mesh: dp is one axis",
    ),
    ("04-buckets", nothing_added, "values", "each rank's own gradient: nothing was added up"),
    ("04-buckets", each_for_itself, "traffic", r"9 calls for \d+ elements in buckets of \d+, where [45] are"),
    ("04-buckets", one_bucket, "traffic", r"\d+ elements were sent in one call, where a bucket is full with"),
    ("04-buckets", absent_without_tokens, "no tokens", "no rank can go on"),
    ("04-buckets", absent_without_tokens, "no deadlock", "no rank can go on"),
    ("04-buckets", gathered_from_all, "traffic", "times as much was sent by all ranks together"),
    ("04-buckets", in_place, "values", r"changed its argument gradients\[0\] on rank 0"),
    ("04-buckets", last_bucket_forgotten, "values", "gradient 7: this is each rank's own gradient"),
    ("04-buckets", written_down_gradients, "values", "the same numbers came for other arguments"),
    ("05-adam", own_term, "even", "each rank took its own term for the gradient: the terms were not"),
    ("05-adam", alone, "even", "no rank took a gradient from the others"),
    ("05-adam", alone, "traffic", "nothing was sent, and in every step terms become a sum"),
    ("05-adam", averaged, "even", "the gradient was averaged over the ranks, and the loss is a sum"),
    ("05-adam", summed_twice, "even", "the gradient is p times too large"),
    ("05-adam", never_gathered, "even", "has updated its piece, and kept the others as they were"),
    ("05-adam", stale, "even", "the gradient was always taken at the first weights"),
    ("05-adam", moments_forgotten, "even", "the moments were forgotten after each step"),
    ("05-adam", world_adam, "even", "dp=2, tp=2.*a sum over all ranks of the mesh: dp is one axis"),
    ("05-adam", reduced_and_cut, "traffic", r"1\.5 times as much was sent by all ranks together"),
    ("05-adam", replicated, "memory", "right numbers, but rank 0 held .* bytes .* Does every rank keep"),
    ("05-adam", gathered_gradients, "memory", "right numbers, but rank 0 held .* Gathered must be updated"),
    ("05-adam", serial_adam, "traffic", "all_gather brought the whole of X to every rank"),
    ("05-adam", serial_adam, "memory", "right numbers, but rank 0 held the whole of X"),
    ("05-adam", even_only, "odd", "which 2 ranks cannot share evenly"),
    ("05-adam", padding_returned, "odd", r"W has shape \(\d+,\) on rank 0, and \(\d+,\) was asked"),
    ("05-adam", only_a_piece, "even", r"W has shape \(\d+,\) on rank 0, and \(\d+,\) was asked"),
    ("05-adam", changes_W, "even", r"changed its argument W on rank 0: work on a copy, W\.clone\(\)"),
    ("05-adam", written_down_weights, "odd", "the same numbers came for other arguments"),
]
WRONG += [
    ("06-forward", just_in_time, "time", r"it took .* µs, and .* are enough: the wait for a layer is hidden"),
    ("06-forward", waits_at_once, "time", "the wait for a layer is hidden if its gather has begun"),
    ("06-forward", never_freed, "memory", "right numbers, but rank 0 held .*is a third in a list, or does"),
    ("06-forward", works_kept, "memory", "right numbers, but rank 0 held .* or a work still hold one"),
    ("06-forward", all_at_once, "memory", "right numbers, but rank 0 held .* At most two layers may"),
    ("06-forward", in_one_call, "memory", "right numbers, but rank 0 held the whole of all layers"),
    ("06-forward", two_ahead, "memory", "right numbers, but rank 0 held .* At most two layers may be whole"),
    ("06-forward", gathered_twice, "traffic", "times as much was sent .*: a rank gathers each layer once"),
    ("06-forward", rows_travel, "traffic", "only .* bytes were sent, and a rank gathers each layer once"),
    ("06-forward", rows_gathered, "values", r"the result has shape \(\d+, \d+\) on rank 0, and \(\d, "),
    ("06-forward", own_pieces, "values", "each rank has filled W with its own piece: nothing was gathered"),
    ("06-forward", backwards, "values", "the layers were computed in the opposite order"),
    ("06-forward", last_left_out, "values", "the last layer was left out"),
    ("06-forward", last_never_gathered, "values", "the last layer was left out"),
    ("06-forward", no_tanh, "values", "tanh is missing"),
    ("06-forward", written_down_rows, "values", "the same numbers came for other arguments"),
]
WRONG += [
    ("03-stored", one_block, "values", "these are the bytes of one block, and there are L"),
    ("03-stored", numbers_for_bytes, "values", "these are numbers, and each has itemsize bytes"),
    ("03-stored", only_sixteen, "values", "this is 16 B S D for a block: the small terms are missing"),
    ("03-stored", less("statistics of norms"), "values", "the statistics of norms are missing"),
    ("03-stored", less("inside attention"), "values", "what is inside attention is missing"),
    ("03-stored", less("outputs of norms"), "values", "the outputs of norms are missing"),
    ("03-stored", less("around the activation", 2), "values", "around GELU twice 4 D wide"),
    ("03-stored", with_scores, "values", "scores of S x S are in it"),
    ("03-stored", as_if_run_again, "values", "the input of every block, which is kept where blocks run"),
    ("03-stored", one_byte_more, "values", r"is 9,766,657 on rank 0, where 9,766,656 is right"),
    ("03-stored", one_number, "values", "the number of bytes is 187,200 on rank 0, where"),
    ("03-again", keeps_all, "memory", "right numbers, but rank 0 held .* Does autograd keep what is inside"),
    ("03-again", variant("keeps what is inside"), "memory", "right numbers, but rank 0 held"),
    ("03-again", variant("takes ones for dy"), "dx", "the gradient of y.sum\\(\\): dy was not looked at"),
    ("03-again", variant("once for each"), "time", "it took .* µs, and 4.0 are enough: .* it ran more often"),
    ("03-again", variant("forgets the weights"), "dws", "nothing came back"),
    ("03-again", cut_off, "dx", "nothing came back"),
]
RIGHT_NUMBERS = [replicated, gathered_gradients]  # and all bytes: only what is held tells
OTHERS = [
    ("03-stored", counted_by_step),
    ("03-stored", by_the_formula),
    ("03-again", by_checkpoint),
    ("03-again", by_backward),
    ("04-buckets", in_slices),
    ("04-buckets", last_first),
    ("05-adam", by_hand),
    ("05-adam", by_the_library),
    ("06-forward", in_two_buffers),
    ("06-forward", in_a_queue),
]
ALWAYS = {  # with the fast tests
    with_scores,
    keeps_all,
    mean_of_means,
    each_for_itself,
    gathered_gradients,
    never_freed,
    just_in_time,
}


def by_speed(cases):
    return [pytest.param(*case, marks=() if case[1] in ALWAYS else pytest.mark.slow) for case in cases]


def named(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("id, function, claim, words", by_speed(WRONG), ids=named)
def test_a_wrong_solution_is_told(id, function, claim, words):
    report = check(id, function, seed=5)
    message = {line.claim: line.message for line in report.lines if line.passed is False}.get(claim, "")
    assert not report.passed
    assert re.search(words, message), f"{claim}: {message!r}\n{report}"


@pytest.mark.parametrize("id, function", by_speed(OTHERS), ids=named)
def test_a_right_solution_unlike_ours_passes(id, function):
    for seed in (1, 2):
        report = check(id, function, seed=seed)
        assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("function", RIGHT_NUMBERS, ids=named)
def test_numbers_and_bytes_do_not_show_that_nothing_is_sharded(function):
    for seed in range(4):
        report = check("05-adam", function, seed=seed)
        assert [line.claim for line in report.lines if line.passed is False] == ["memory"], report


# ---- what is drawn ----


def test_buckets_are_smaller_than_all_and_larger_than_a_gradient():
    for seed in range(20):
        for trial in find("04-buckets").trials(Draw(seed)):
            gradients, _, bucket_elements, _ = trial.args[0]
            sizes = [gradient.numel() for gradient in gradients]
            assert 2 < ceil(sum(sizes) / bucket_elements) < len(sizes) - 1
            assert len({args[1] for args in trial.args}) > 1
