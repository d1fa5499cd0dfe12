"""The passes of one stage: F, B, I and W of its micro-batches, and what is kept in between.

A stage is cut out of the model: its input is a leaf, and backward begins with the gradient of its output,
which the next stage sends. The last stage makes its own, from the loss. Of an output only the place in the
graph is kept, not its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel.messages import Like
from lessons_lib.pipeline_parallel.split_backward import PutOff

LossOf = Callable[[Tensor], Tensor]  # from the last stage's output


@dataclass
class Kept:
    """What is kept of a micro-batch until its backward."""

    x: Tensor
    y: GradientEdge | None  # None where nothing on the way is trained
    later: PutOff | None  # where W is apart
    like: Like  # the output


@dataclass
class Stage:
    """A stage, and its micro-batches under way. ``number`` counts the stages of the model from 0."""

    number: int
    module: nn.Module
    kept: dict[int, Kept] = field(default_factory=dict)  # from F to B or I
    waiting: dict[int, PutOff] = field(default_factory=dict)  # from I to W

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.get_default_device())

    def forward(
        self,
        k: int,
        x: Tensor,
        n_rows: int,
        run: Callable[[Tensor], Any],
        loss_of: LossOf | None = None,
        split: bool = False,
    ) -> Tensor:
        """F: the output of micro-batch ``k``; on the last stage its loss, divided, for backward."""
        if self.number > 0:
            x.requires_grad_(torch.is_grad_enabled())
        later = PutOff() if split else None
        with later or nullcontext():
            y = run(x)
            self._check(k, y, n_rows)
            if loss_of is not None:
                y = loss_of(y)
        if torch.is_grad_enabled():
            edge = get_gradient_edge(y) if y.requires_grad else None
            self.kept[k] = Kept(x, edge, later, Like.of(y))
        return y.detach()

    def _check(self, k: int, y: Any, n_rows: int) -> None:
        if not isinstance(y, Tensor):
            raise RefusedError(
                f"stage {self.number} gave {type(y).__name__} for micro-batch {k}: a stage takes one tensor "
                "and gives one."
            )
        if y.dim() == 0 or len(y) != n_rows:
            rest = y.shape if n_rows == 1 else y.shape[1:]
            raise RefusedError(
                f"stage {self.number} gave shape {list(y.shape)} for micro-batch {k}, which has "
                f"{n_rows} row{'s' * (n_rows != 1)}; expected {[n_rows, *rest]}: dim 0 of an output holds "
                "the rows. If the stage squeezes, name the dim that is meant: y.squeeze(1)."
            )

    def backward(self, k: int, dy: Tensor | None) -> Tensor | None:
        """B, or I where W is put off: the gradient of the input of micro-batch ``k``, if it has one."""
        kept = self.kept.pop(k)
        if kept.later is not None:
            self.waiting[k] = kept.later
        if dy is None:
            dy = torch.ones(kept.like.shape, dtype=kept.like.dtype, device=self.device)
        if kept.y is not None:
            backward = torch.autograd.backward if kept.later is None else kept.later.backward
            backward(kept.y, dy)
        if self.number == 0:
            return None
        dx, kept.x.grad = kept.x.grad, None
        return torch.zeros_like(kept.x) if dx is None else dx

    def weight_gradients(self, k: int) -> None:
        """W: what I has left of micro-batch ``k``."""
        self.waiting.pop(k).make_weight_gradients()
