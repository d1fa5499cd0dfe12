"""A small model trained serially, and the same steps on ranks that share out its batch.

All sizes are odd and differ, so no vector of parameters can be cut evenly without padding; the last layer
shares its weight with the embedding. The batch is dealt out row by row, so ranks have different numbers of
tokens.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW

from lessons_lib import Mesh, region
from lessons_lib.data_parallel import Zero, rows_of_rank, total

V, D, F, B, S = 11, 5, 7, 13, 3
STEPS = 10

# Adam with so large an eps shows a gradient that is wrong by a factor; with the usual one it hides it.
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.3),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "adam": partial(Adam, lr=0.02, eps=1e-2),
    "adamw": partial(AdamW, lr=0.02, eps=1e-2, weight_decay=0.1),
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Tokens [B S] in, the loss of each token out."""

    def __init__(self, n_layers=2, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Layer() for _ in range(n_layers))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        generator = torch.Generator().manual_seed(0)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def losses(self, tokens, targets):
        logits = self(tokens).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), reduction="none")


class Sometimes(nn.Module):
    """A middle layer that only some ranks use."""

    def __init__(self, used):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers, self.used = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(3)), used
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))

    def forward(self, x):
        for at, layer in enumerate(self.layers):
            if at != 1 or self.used:
                x = torch.tanh(layer(x))
        return x


def batch(step, n_rows=B):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(V, (2, n_rows, S), generator=generator)


def serially_trained(make_optimizer, steps=STEPS, n_rows=B, make=Net):
    """Parameters after the last step, and the gradients of the first and the last step."""
    model = make()
    optimizer = make_optimizer(model.parameters())
    found = {}
    for step in range(steps):
        tokens, targets = batch(step, n_rows)
        optimizer.zero_grad()
        model.losses(tokens, targets).mean().backward()
        if step in (0, steps - 1):
            found |= {f"gradient {step} of {name}": p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return found | {name: p.detach() for name, p in model.named_parameters()}


def trained_by_zero(stage, make_optimizer, steps=STEPS, n_rows=B, make=Net, kind=Zero):
    """The same on this rank, from what it and the others hold."""
    group, model = Mesh(dp=torch.distributed.get_world_size())["dp"], make()
    zero = kind(model, stage, group, make_optimizer)
    found = {}
    for step in range(steps):
        tokens, targets = (rows_of_rank(x, group) for x in batch(step, n_rows))
        with region("count"):
            n = total(targets.numel(), group)
        zero.zero_grad()
        with region("step"):
            (model.losses(tokens, targets).sum() / n).backward()
            zero.reduce()
        if step in (0, steps - 1):
            found |= {f"gradient {step} of {name}": g for name, g in zero.whole_gradients().items()}
        with region("step"):
            zero.update()
    return found | zero.whole_parameters()


def fast_or_slow(cases, fast):
    """Parameters of a test: those cases that are not in ``fast`` belong to the slow tests."""
    assert set(fast) <= set(cases)
    return [pytest.param(*case, marks=[] if case in fast else pytest.mark.slow) for case in cases]


def assert_same(expected, values, tolerance=1e-10):
    for rank, found in enumerate(values):
        assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
        for name, tensor in expected.items():
            assert found[name].shape == tensor.shape, (rank, name)
            error = ((found[name] - tensor).norm() / tensor.norm()).item()
            assert error <= tolerance, f"rank {rank}: {name} has a relative error of {error:.0e}"
