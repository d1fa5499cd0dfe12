"""Weights that change while micro-batches are under way: old versions, kept for who began with them.

A backward must use the weights of its forward. So an update does not change the newest version where
somebody still needs it; it makes the next one beside it. Which micro-batch uses which version, and hence how
many there are at a time, :func:`.weight_versions` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer


class StashedWeights:
    """The versions of the weights of a stage; the newest are those of the module itself.

    ``used[k]`` is the version for micro-batch ``k``.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, used: Sequence[int]) -> None:
        self.module, self.optimizer, self.used = module, optimizer, used
        self.newest = 0
        self.to_come = set(range(len(used)))  # micro-batches whose gradients are not there yet
        self.versions: dict[int, dict[str, Tensor]] = {}
        self._add()

    def _add(self) -> None:
        """Take up the module's weights as the newest version: the same memory, a leaf of its own."""
        self.versions[self.newest] = {
            name: p.data.requires_grad_(p.requires_grad) for name, p in self.module.named_parameters()
        }

    def run(self, k: int, x: Tensor) -> Any:
        """The stage with the weights for micro-batch ``k``."""
        return functional_call(self.module, self.versions[self.used[k]], (x,))

    def made(self, k: int) -> None:
        """All gradients of micro-batch ``k`` are there: move them to the parameters."""
        self.to_come.remove(k)
        for name, parameter in self.module.named_parameters():
            leaf = self.versions[self.used[k]][name]
            if leaf.grad is not None:
                torch.autograd.backward(parameter, leaf.grad)
                leaf.grad = None

    def update(self) -> None:
        """U: a step of the optimizer, by the gradients made since the last one."""
        needed = {self.used[k] for k in self.to_come}
        if self.newest in needed:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.newest += 1
        self._add()
        for version in set(self.versions) - needed - {self.newest}:
            del self.versions[version]
