"""The GPT on a share of the tokens is the serial GPT: loss and every gradient, on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lessons_lib import Mesh, run
from lessons_lib.data_parallel import Bucketed, reduce_each, rows_of_rank
from lessons_lib.errors import RefusedError
from lessons_lib.models import GPT, GPTConfig, corpus
from lessons_lib.models.gpt import IGNORED
from lessons_lib.models.recompute import recompute
from lessons_lib.sequence_parallel import (
    ATTENTION_VARIANTS,
    ATTENTIONS,
    Contiguous,
    Striped,
    Tokens,
    Zigzag,
    context_parallel,
    gather_tokens,
    shard_tokens,
    share,
)
from tests.serial_layer import random, relative_error
from tests.test_ring_attention import full_attention

EVERY = ATTENTIONS | ATTENTION_VARIANTS
CONFIG = GPTConfig(L=1, H=4, D=16, S=24, n_kv_heads=2)
TOKENS, TARGETS = corpus.batch(0, 4, CONFIG.S)


def sharded(model, method, mesh, tokens, targets):
    """This rank's part of the loss, a sum over its tokens."""
    return context_parallel(model, method, mesh).loss_sum(tokens, targets)


def assert_is_the_serial_model(name, sizes, loss_sum=sharded, prepare=lambda model: model):
    serial = GPT(CONFIG).double()
    serial.loss(TOKENS, TARGETS).backward()
    expected = {name: p.grad for name, p in serial.named_parameters()}

    def step():
        mesh = Mesh(**sizes)
        model = GPT(CONFIG).double()
        tokens, targets = (rows_of_rank(X, mesh["dp"]) for X in (TOKENS, TARGETS))
        loss = loss_sum(model, EVERY[name], mesh, tokens, targets) / TARGETS.numel()
        prepare(model)
        loss.backward()
        for axis in sizes:
            reduce_each(model, mesh[axis])
        total = loss.detach()
        for axis in sizes:
            total = mesh[axis].all_reduce(total)
        return total, {name: p.grad for name, p in model.named_parameters()}

    for rank, (loss, found) in enumerate(run(step, ranks=sizes["dp"] * sizes["cp"]).values):
        error = relative_error(loss, serial.loss(TOKENS, TARGETS).detach())
        assert error < 1e-10, f"the loss on rank {rank} is wrong by {error:.0e}"
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            error = relative_error(found[parameter], gradient)
            assert error < 1e-10, f"the gradient of {parameter} on rank {rank} is wrong by {error:.0e}"


@pytest.mark.parametrize("name", EVERY)
def test_the_gpt_runs_on_a_share_of_the_tokens(name):
    assert_is_the_serial_model(name, {"dp": 1, "cp": 4})


@pytest.mark.parametrize("name", ["zigzag", "ulysses"])
def test_the_gpt_runs_on_a_share_of_the_tokens_of_some_sequences(name):
    assert_is_the_serial_model(name, {"dp": 2, "cp": 2})


def test_buckets_and_recomputation_go_with_it():
    """The same wrappers as for replicas; blocks that run again send their keys again."""

    def step():
        mesh, method = Mesh(cp=2), ATTENTIONS["zigzag"]
        model = recompute(context_parallel(GPT(CONFIG).double(), method, mesh), "full")
        replicas = Bucketed(model, mesh["cp"], bucket_bytes=20_000)
        model.loss(TOKENS, TARGETS).backward()
        replicas.reduce()
        return {name: p.grad for name, p in model.named_parameters()}

    serial = GPT(CONFIG).double()
    serial.loss(TOKENS, TARGETS).backward()
    for found in run(step, ranks=2).values:
        for name, parameter in serial.named_parameters():
            assert relative_error(found[name], parameter.grad) < 1e-10


@pytest.mark.parametrize("right", [True, False])
def test_dropout_drops_what_it_drops_on_one_device(right):
    """And, the wrong version: ranks that draw alike drop one pattern in every piece of the sequence."""
    config = replace(CONFIG, dropout=0.3)

    def gradient(prepare):
        torch.manual_seed(3)
        model = prepare(GPT(config).double())
        model.loss(TOKENS, TARGETS).backward()
        return model.position.weight.grad

    def step():
        mesh = Mesh(cp=4)

        def prepare(model):
            positions = model.blocks[0].dropout.positions
            model = context_parallel(model, ATTENTIONS["zigzag"], mesh)
            if not right:
                model.blocks[0].dropout.positions = positions
            return model

        return mesh["cp"].all_reduce(gradient(prepare))

    expected = gradient(lambda model: model)
    for found in run(step, ranks=4).values:
        assert (relative_error(found, expected) < 1e-10) == right


# ---- wrong versions ----


def restarted(model, method, mesh, tokens, targets):
    """Every rank gives its first token the embedding of position 0."""
    position = model.position.forward
    model = context_parallel(model, method, mesh)
    model.position.forward = lambda places: position(places[: len(places) // mesh.sizes["cp"]])
    return model.loss_sum(tokens, targets)


def lost_at_borders(model, method, mesh, tokens, targets):
    """Labels are made after the cut, from the rank's own tokens: those of a piece's last token are lost."""
    labels = targets.clone()
    for rank in range(mesh.sizes["cp"]):
        labels[:, method.assignment.positions(CONFIG.S, mesh.sizes["cp"], rank)[-1]] = IGNORED
    return sharded(model, method, mesh, tokens, labels)


def other_labels(model, method, mesh, tokens, targets):
    """Tokens go in zigzag, labels in contiguous pieces."""
    cross_entropy = model.cross_entropy.forward
    model = context_parallel(model, method, mesh)
    cut = lambda targets: shard_tokens(targets, Contiguous(), mesh["cp"])
    model.cross_entropy.forward = lambda logits, targets: cross_entropy(logits, cut(targets))
    return model.loss_sum(tokens, targets)


def mean_of_means(model, method, mesh, tokens, targets):
    """Each rank divides by the number of its own tokens, and the sum over ranks is taken."""
    return sharded(model, method, mesh, tokens, targets) * mesh.sizes["cp"]


@pytest.mark.parametrize("wrong", [restarted, lost_at_borders, other_labels, mean_of_means])
def test_a_wrong_share_is_caught(wrong):
    with pytest.raises(AssertionError, match="the loss on rank 0 is wrong"):
        assert_is_the_serial_model("zigzag", {"dp": 1, "cp": 2}, wrong)


def frozen_position(model):
    model.position.weight.register_hook(torch.zeros_like)


def test_a_gradient_that_is_missing_is_caught():
    with pytest.raises(AssertionError, match=r"position.weight on rank 0 is wrong"):
        assert_is_the_serial_model("ring", {"dp": 1, "cp": 2}, prepare=frozen_position)


# ---- what cannot be cut ----


def test_lengths_that_do_not_divide():
    """S39: 2999 tokens on 4 ranks, 32769 on 8: refused on every rank alike, with the nearest that go."""
    for assignment, S, P, near in (
        (Contiguous(), 2999, 4, (2996, 3000)),
        (Striped(), 2999, 4, (2996, 3000)),
        (Zigzag(), 2999, 4, (2992, 3000)),
        (Zigzag(), 32769, 8, (32768, 32784)),
    ):
        for rank in range(P):
            with pytest.raises(RefusedError, match=rf"S={S} .* Try S={near[0]}, or pad .* to S={near[1]} "):
                assignment.positions(S, P, rank)
        assert share(near[1], P, assignment.pieces_per_rank) == near[1] // P
    with pytest.raises(RefusedError, match=r"S=3 tokens cannot .* 4 equal pieces.* Try S=4, or pad"):
        share(3, 4)

    def step():
        context_parallel(GPT(GPTConfig(L=1, S=30)), ATTENTIONS["zigzag"], Mesh(cp=4))

    with pytest.raises(RefusedError, match="S=30 tokens cannot be cut into 8 equal pieces, 2 for each of 4"):
        run(step, ranks=4)


@pytest.mark.parametrize("name", EVERY)
def test_padding_changes_nothing(name):
    """S39: 13 tokens padded to 16: pads are a document of their own, and no gradient comes from them."""
    S, padded, P = 13, 16, 4
    q, k, v, do = (random(1, 4, padded, 3, seed=seed) for seed in range(4))
    documents = (torch.arange(padded) >= S).long()[None]
    do[:, :, S:] = 0
    real = [x[:, :, :S].clone().requires_grad_() for x in (q, k, v)]
    o = full_attention(*real, causal=False, documents=None)
    o.backward(do[:, :, :S])

    def step():
        group, method = Mesh(cp=P)["cp"], EVERY[name]
        mine = [shard_tokens(x, method.assignment, group, 2).requires_grad_() for x in (q, k, v)]
        numbers = shard_tokens(documents, method.assignment, group)
        found = method.attend(*mine, group, causal=False, documents=numbers)
        found.backward(shard_tokens(do, method.assignment, group, 2))
        return [
            gather_tokens(x, method.assignment, group, 2) for x in (found.detach(), *(x.grad for x in mine))
        ]

    for found in run(step, ranks=P).values:
        for x, expected in zip(found, (o.detach(), *(x.grad for x in real)), strict=True):
            assert relative_error(x[:, :, :S], expected) < 1e-10


def test_a_share_is_not_taken_for_a_whole_sequence_nor_a_whole_one_for_a_share():
    """S77: given whole on each of 4 ranks, 24 tokens stay 24, of which a rank has 6; and 6 are refused."""

    def step(tokens, S):
        model = context_parallel(GPT(CONFIG), ATTENTIONS["ring"], Mesh(cp=4), S=S)
        return model(tokens).shape[1]

    assert run(step, TOKENS, 24, ranks=4).values == [6] * 4
    assert run(step, TOKENS[:, :8], 8, ranks=4).values == [2] * 4
    with pytest.raises(RefusedError, match=r"of 6 tokens was given to a model that is cut for S=24"):
        run(step, TOKENS[:, :6], 24, ranks=4)
    with pytest.raises(RefusedError, match=r"sequence of 24 tokens .* S=8 .* whole sequences of 8 tokens"):
        run(step, TOKENS, 8, ranks=4)
    with pytest.raises(RefusedError, match=r"S=25 .* a model with S=24 .* GPTConfig\(S=25\)"):
        run(step, TOKENS, 25, ranks=4)


def test_heads_that_cannot_be_shared_out_are_known_when_the_model_is_prepared():
    def step():
        context_parallel(GPT(CONFIG), ATTENTIONS["ulysses"], Mesh(cp=3))

    with pytest.raises(RefusedError, match="H=4 heads cannot be shared out to 3 ranks"):
        run(step, ranks=3)


@pytest.mark.parametrize(
    "P, H, G, why",
    [
        (
            3,
            8,
            8,
            r"H=8 heads cannot be shared out to 3 ranks.* Try 1 or 2 or 4 or 8 ranks, or ring attention",
        ),
        (16, 8, 8, r"H=8 heads cannot be shared out to 16 ranks.* Try 1 or 2 or 4 or 8 ranks"),
        (
            4,
            12,
            3,
            r"G=3 heads of keys and values cannot be shared out to 4 ranks, .* Try 1 or 3 or 6 or 12",
        ),
        (
            2,
            8,
            3,
            r"H=8 heads of queries cannot share G=3 heads of keys evenly. Try G=1 or 2 or 4 or 8",
        ),
    ],
)
def test_heads_that_ulysses_cannot_share_out(P, H, G, why):
    """Known before any communication, and ring attention takes what Ulysses refuses."""
    with pytest.raises(RefusedError, match=why):
        ATTENTIONS["ulysses"].check(48, P, H, G)

    def step():
        q, k = (torch.zeros(1, h, 2, 3) for h in (H, G))
        ATTENTIONS["ulysses"].attend(q, k, k, Mesh(cp=P)["cp"])

    with pytest.raises(RefusedError, match=why) as caught:
        run(step, ranks=P)
    assert not caught.value.run.trace.collectives(0)
    if H % G == 0:
        ATTENTIONS["ring"].check(48, P, H, G)


def test_tensors_that_do_not_belong_together():
    def step(k_shape, documents=None):
        q, k = torch.zeros(2, 4, 6, 3), torch.zeros(k_shape)
        ATTENTIONS["ring"].attend(q, k, k, Mesh(cp=2)["cp"], documents=documents)

    for wrong in ((2, 4, 12, 3), (2, 4, 6, 5), (1, 4, 6, 3)):
        with pytest.raises(RefusedError, match=r"q \[2, 4, 6, 3\], k .* do not belong together"):
            run(step, wrong, ranks=2)
    with pytest.raises(RefusedError, match=r"documents has shape \[2, 12\].* 2 x 6 tokens.* shard_tokens"):
        run(step, (2, 4, 6, 3), torch.zeros(2, 12).long(), ranks=2)


def test_gathered_tokens_are_in_order():
    def step(assignment):
        group = Mesh(cp=3)["cp"]
        return gather_tokens(shard_tokens(TOKENS, assignment, group), assignment, group)

    for assignment in (Contiguous(), Zigzag(), Striped()):
        assert all(torch.equal(found, TOKENS) for found in run(step, assignment, ranks=3).values)


def test_tokens_of_a_slice_keep_their_documents():
    tokens = Tokens(torch.arange(4), torch.tensor([[0, 0, 1, 1]]))
    assert [x.tolist() for x in tokens.at(slice(1, 3))] == [[1, 2], [[0, 1]]]
    assert Tokens(torch.arange(4)).numbers == ()
