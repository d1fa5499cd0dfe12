"""Recomputation: the same gradients from less memory, on one rank and on several; and wrong versions."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lessons_lib import Mesh, plan, region, run
from lessons_lib.errors import RefusedError
from lessons_lib.models import corpus
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.models.recompute import MADE_AGAIN, attend_by_scores, keep_scores, recompute

CONFIG = GPTConfig(L=2, H=4, D=16, S=8, dropout=0.2)
BATCH = corpus.batch(0, 3, CONFIG.S)


def gradients(model):
    torch.manual_seed(0)  # what dropout draws
    loss = model.loss(*BATCH)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = ((found[name] - tensor).norm() / tensor.norm()).item()
        assert error <= tolerance, f"{name} has a relative error of {error:.0e}"


@pytest.mark.parametrize("attention", ["fused", "scores"])
@pytest.mark.parametrize("what", MADE_AGAIN)
def test_gradients_are_the_same(what, attention):
    """Dropout draws the same numbers the second time."""
    model = GPT(CONFIG).double()
    if attention == "scores":
        keep_scores(model)
    assert_same(gradients(recompute(model, what)), gradients(GPT(CONFIG).double()))


def test_scores_are_fused_attention():
    q, k, v = torch.randn(3, 2, 4, 8, 5, dtype=torch.float64, requires_grad=True).unbind()
    dy = torch.randn(2, 4, 8, 5, dtype=torch.float64)
    fused = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    ours = attend_by_scores(q, k, v)
    assert torch.allclose(ours, fused, rtol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (q, k, v), dy), torch.autograd.grad(fused, (q, k, v), dy), strict=True
    ):
        assert ((mine - theirs).norm() / theirs.norm()).item() < 1e-12


def with_other_masks(model):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def cut_off(model):
    """A checkpoint that cuts the graph at its input: what is above alone gets a gradient."""
    block = model.blocks[1]
    inner = block.forward
    block.forward = lambda x: x + (inner(x.detach()) - x.detach())
    return model


@pytest.mark.parametrize("wrong", [with_other_masks, cut_off])
def test_a_wrong_recomputation_is_caught(wrong):
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(gradients(wrong(GPT(CONFIG).double())), gradients(GPT(CONFIG).double()))


@pytest.mark.parametrize("what, n_again", [("none", 0), ("selective", 0), ("full", 2)])
def test_tensor_parallel_blocks_run_again_with_their_all_reduces(what, n_again):
    """8 (p-1)/p b s h in each layer, and 12 where blocks run again."""
    plain = GPTConfig(L=2, H=4, D=16, S=8)

    def step():
        mesh = Mesh(tp=2)
        model = recompute(plan.parallelize(GPT(plain).double(), plan.GPT_1D, mesh), what)
        with region("step"):
            model.loss(*BATCH).backward()
        return plan.serial_gradients(model, mesh)

    result = run(step, ranks=2)
    serial = GPT(plain).double()
    serial.loss(*BATCH).backward()
    for found in result.values:
        assert_same(found, {name: p.grad for name, p in serial.named_parameters()})
    for rank in range(2):
        assert [event.kind for event in result.trace.collectives(rank, "step")] == ["all_reduce"] * (
            plain.L * (4 + n_again)
        )
        bsh = 3 * plain.S * plain.D
        assert result.trace.bytes_sent(rank, "step") == 8 * plain.L * (4 + n_again) * bsh  # 2 (p-1)/p is 1


def test_what_is_refused():
    with pytest.raises(RefusedError, match=r"recompute 'all' is unknown; known: 'none', 'selective', 'full'"):
        recompute(GPT(CONFIG), "all")
