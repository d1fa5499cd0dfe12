"""The serial model that the oracles compare with, and the comparison.

One model serves every family that does not cut it into stages. Its sizes all differ, so that a dim taken for
another does not fit; weights and data are functions of their seed, so that every rank makes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, Optimizer

B, S, D, FF, V, L = 12, 8, 6, 16, 20, 2
STEPS = 10
TOLERANCE = 1e-10  # of the norm: another order of summation stays far below it, a wrong term far above

# What a linear layer gives for [B S D] is a view, and nothing here is changed in place: a false alarm.
FSDP_ALARM = "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"

Named = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Model = TypeVar("Model", bound=nn.Module)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, FF)
        self.down = nn.Linear(FF, D)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Tokens [B S] in, logits [B S V] out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def randomised(model: Model, seed: int = 0) -> Model:
    """The model in float64 with weights that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The tokens and targets [B S] of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens, targets = torch.randint(V, (2, B, S), generator=generator)
    return tokens, targets


def whole(x: Tensor) -> Tensor:
    return x


def mine(x: Tensor) -> Tensor:
    """The rows of this rank, if the ranks share out the batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Unlike Adam, it shows a gradient that is right but for a factor."""
    return SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(parameters, lr=0.02)


def train(
    module: nn.Module, optimizer: Optimizer, share: Callable[[Tensor], Tensor], steps: Iterable[int]
) -> None:
    """Train on ``share`` of the batch of every step."""
    for step in steps:
        tokens, targets = batch(step)
        optimizer.zero_grad()
        mean_loss(module(share(tokens)), share(targets)).backward()
        optimizer.step()


def outcome(model: nn.Module) -> Named:
    """All weights and all gradients, whole on every rank."""
    weights = {name: full(parameter.detach()) for name, parameter in model.named_parameters()}
    return weights | gradients(model)


def gradients(model: nn.Module) -> Named:
    return {
        f"gradient of {name}": full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def serially_trained(make_optimizer: MakeOptimizer) -> Named:
    model = randomised(Net())
    train(model, make_optimizer(model.parameters()), whole, range(STEPS))
    return outcome(model)


def assert_every_rank_has(expected: Named, values: Sequence[Named]) -> None:
    for rank, found in enumerate(values):
        assert found.keys() == expected.keys(), f"rank {rank}: {sorted(found.keys() ^ expected.keys())}"
        for name, value in expected.items():
            assert found[name].shape == value.shape, f"rank {rank}, {name}"
            error = (found[name] - value).norm() / value.norm()
            assert error < TOLERANCE, f"rank {rank}, {name}: relative error {error:.1e}"


def caught() -> pytest.RaisesExc[AssertionError]:
    """A wrong version must fail the comparison, and by its numbers."""
    return pytest.raises(AssertionError, match="relative error")
