"""I and W together are B: the same gradients, the same work; and between them only x and dy are kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from lessons_lib import region, run
from lessons_lib.models.corpus import batch
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.models.recompute import recompute
from lessons_lib.pipeline_parallel import PutOff, cut_model
from tests.executed_stages import drawn

CONFIG = GPTConfig(L=2, H=2, D=8, S=6, V=256)


def gpt():
    return GPT(CONFIG, seed=1).double()


class Scaled(nn.Module):
    """An operation with a weight of its own, between two layers."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.after(self.scale * torch.tanh(self.before(x)))


class Twice(nn.Module):
    """One layer used two times, one below the other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        return torch.sin(self.layer(torch.tanh(self.layer(x))))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.second.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class ThroughAFunction(nn.Module):
    """The weight of a product is made from a parameter."""

    def __init__(self):
        super().__init__()
        self.raw, self.bias = nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return functional.linear(x, torch.tanh(self.raw), self.bias)


MODULES = {
    "linear": lambda: nn.Linear(5, 3),
    "without bias": lambda: nn.Linear(5, 3, bias=False),
    "norm": lambda: nn.Sequential(nn.LayerNorm(5), nn.Tanh()),
    "norm without bias": lambda: nn.LayerNorm(5, bias=False),
    "norm without weights": lambda: nn.LayerNorm(5, elementwise_affine=False),
    "mlp": lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5)),
    "a scale": Scaled,
    "used twice": Twice,
    "frozen": Frozen,
    "through a function": ThroughAFunction,
}


def randomised(make):
    module = make().double()
    with torch.no_grad():
        for seed, p in enumerate(module.parameters()):
            p.copy_(drawn(*p.shape, seed=seed))
    return module


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)], ids=str)
def test_the_gradients_are_those_of_backward(name, shape):
    whole, split = randomised(MODULES[name]), randomised(MODULES[name])
    x = drawn(*shape, seed=9).requires_grad_()
    y = whole(x)
    dy = drawn(*y.shape, seed=10)
    y.backward(dy)
    expected, x.grad = x.grad, None
    with PutOff() as later:
        again = split(x)
    assert torch.equal(again, y)
    again.backward(dy)
    assert_close(x.grad, expected)
    later.make_weight_gradients()
    for (name, p), q in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_close(q.grad, p.grad)


def assert_close(a, b):
    assert a.shape == b.shape and ((a - b).norm() / b.norm()).item() < 1e-12


def test_a_weight_gradient_left_out_is_caught():
    split = randomised(MODULES["mlp"])
    with PutOff() as later:
        y = split(drawn(4, 5, seed=9))
    y.sum().backward()
    assert all(p.grad is None for p in split.parameters())
    del later.waiting[0]
    later.make_weight_gradients()
    assert [name for name, p in split.named_parameters() if p.grad is None] == ["3.weight", "3.bias"]


@pytest.mark.parametrize("again", ["none", "full"])
def test_the_gpt_with_tokens_in_and_a_loss_out(again):
    """The first stage: its inputs have no gradient. Also with blocks that are run again on the way back."""
    tokens, targets = batch(step=0, n_sequences=2, S=6)
    whole, split = gpt(), recompute(gpt(), again)
    whole.loss(tokens, targets).backward()
    with PutOff() as later:
        loss = split.loss(tokens, targets)
    later.backward(get_gradient_edge(loss), torch.ones_like(loss))
    assert split.embedding.weight.grad is None and split.blocks[0].mlp.up.weight.grad is None
    later.make_weight_gradients()
    for p, q in zip(whole.parameters(), split.parameters(), strict=True):
        assert_close(q.grad, p.grad)


def test_gradients_are_added_up_and_hooks_run():
    layer, seen = randomised(MODULES["linear"]), []
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    x = drawn(4, 5, seed=9)
    for _ in range(2):
        with PutOff() as later:
            y = layer(x)
        y.sum().backward()
        later.make_weight_gradients()
    assert len(seen) == 2
    assert_close(layer.bias.grad, torch.full((3,), 8.0, dtype=torch.float64))


def test_under_autocast_nothing_is_put_off():
    layer, x = nn.Linear(5, 3), torch.ones(2, 5)
    with PutOff() as later, torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert later.waiting == [] and layer.weight.grad is not None


def step_in_parts(stage_number):
    """F, I and W of a stage of the GPT, each in a region of its own; or F and B."""
    stage = cut_model(gpt(), 3, layers=[range(2), range(2, 3), range(3, 4)])[stage_number]
    if stage_number:
        x = drawn(2, 6, 8, seed=3).requires_grad_()
    else:
        x, _ = batch(step=0, n_sequences=2, S=6)
    with PutOff() as later, region("F"):
        y = stage(x)
    dy = torch.ones_like(y)
    with region("I"):
        y.backward(dy)
    with region("W"):
        later.make_weight_gradients()
    with region("F again"):
        y = stage(x)
    with region("B"):
        y.backward(dy)


@pytest.mark.parametrize("number", range(3))
def test_i_and_w_are_as_much_work_as_b(number):
    """Of a block, W is its matrices alone: 2 per weight and token; I the same and what attention does."""
    trace = run(step_in_parts, number, ranks=1, record="flops").trace
    flops = {part: trace.flops_of(0, part) for part in ("F", "F again", "I", "W", "B")}
    assert flops["F"] == flops["F again"]
    assert flops["I"] + flops["W"] == flops["B"] > flops["F"]
    weights = {0: 12 * 8**2, 1: 12 * 8**2, 2: 8 * 256}[number]
    assert flops["W"] == 2 * weights * 2 * 6 and flops["I"] >= flops["W"] - 2 * weights * 2 * 6


def test_between_i_and_w_only_x_and_dy_of_every_operation_are_kept():
    """Of Linear(5, 9), GELU, Linear(9, 5): F keeps x, the product before GELU, and what came of it."""
    rows, f32 = 100, 4

    def step():
        module = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5))
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        x = torch.ones(rows, 5, requires_grad=True)
        with PutOff() as later:
            edge = get_gradient_edge(module(x))
        marked()
        torch.autograd.backward(edge, torch.ones(rows, 5))
        del edge
        marked()
        later.make_weight_gradients()
        marked()

    def marked():
        torch.empty(12_345_678, dtype=torch.uint8)  # seen in the curve by its size

    curve = [n for _, n in run(step, ranks=1, record="memory").trace.live_bytes[0]]
    live = [before for before, at in pairwise(curve) if at - before == 12_345_678]
    weights = 2 * (5 * 9 + 9 + 9 * 5 + 5) * f32
    x, dx, dy = (rows * 5 * f32,) * 3
    hidden = rows * 9 * f32
    assert [n - weights for n in live] == [x + 2 * hidden, x + dx + hidden + hidden + dy, x + dx]
