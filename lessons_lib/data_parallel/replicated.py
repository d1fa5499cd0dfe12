"""Replicas: every rank holds the whole model, and gradients are summed over the ranks.

The loss has been divided by the number of all tokens (:mod:`lessons_lib.data_parallel.rows`), so the sum is
the gradient of the mean. Any optimizer then takes the same step on every rank.

Traffic per rank, ring algorithm: 2 (p-1)/p n elements for n parameters, in one piece or in many.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group

SECOND_BACKWARD = (
    "a second backward has reached gradients that are being summed over the ranks already. Put every "
    "micro-batch but the last into `with replicas.accumulating():`, or call reduce() and zero_grad() between."
)


def reduce_each(model: nn.Module, group: Group) -> None:
    """Sum the gradients when backward is over: one all-reduce per parameter, one after the other.

    The network stands still during backward, and the ranks during the all-reduces; small parameters cost a
    round of messages each.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = group.all_reduce(_gradient(parameter))


class Bucketed:
    """Sum the gradients in buckets, each sent as soon as backward has filled it.

    >>> from lessons_lib import Mesh, run
    >>> def step():
    ...     model, group = nn.Linear(3, 2), Mesh(dp=2)["dp"]
    ...     replicas = Bucketed(model, group)
    ...     model(torch.ones(group.rank + 1, 3)).sum().backward()           # 1 row here, 2 there
    ...     replicas.reduce()
    ...     return model.bias.grad.tolist()
    >>> run(step, ranks=2).values
    [[3.0, 3.0], [3.0, 3.0]]

    Parameters go into buckets last one first, as backward reaches them; a bucket is closed once it holds
    ``bucket_bytes``, so there are at most n_bytes / bucket_bytes + 1 of them. Every rank sends its buckets in
    this order and no other: one that is full early waits for those before it, and one that is not full when
    backward ends (its parameters were not used, or this rank had no tokens) is sent by :meth:`reduce`.

    Memory: a bucket's gradients become views of the vector that is sent; while it is copied they exist twice.
    Source: Li et al. 2020 (PyTorch Distributed), section 3.2; they average, here the loss is divided.
    """

    def __init__(self, model: nn.Module, group: Group, bucket_bytes: int = 25_000_000) -> None:
        if bucket_bytes < 1:
            raise RefusedError(f"bucket_bytes={bucket_bytes}: a bucket holds one byte or more.")
        self.group = group
        self.buckets = fill_buckets([p for p in model.parameters() if p.requires_grad], bucket_bytes)
        self._bucket_of = {p: at for at, bucket in enumerate(self.buckets) for p in bucket}
        self._missing = [set(bucket) for bucket in self.buckets]  # gradients that backward has yet to make
        self._sent: list[dist.Work] = []
        self._holding = False
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Send nothing: a further micro-batch will add to these gradients."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def reduce(self) -> None:
        """Send what has not been sent, and wait for all. Every rank calls this, before the optimizer."""
        while len(self._sent) < len(self.buckets):
            self._send()
        for work in self._sent:
            work.wait()
        self._sent.clear()
        self._missing = [set(bucket) for bucket in self.buckets]

    def _arrive(self, parameter: nn.Parameter) -> None:
        if self._holding:
            return
        missing = self._missing[self._bucket_of[parameter]]
        if parameter not in missing:
            raise RefusedError(SECOND_BACKWARD)
        missing.remove(parameter)
        while len(self._sent) < len(self.buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        """Begin to sum the next bucket, as one vector."""
        bucket = self.buckets[len(self._sent)]
        vector = torch.cat([_gradient(parameter).flatten() for parameter in bucket])
        for parameter, piece in zip(bucket, vector.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = piece.view_as(parameter)
        self._sent.append(dist.all_reduce(vector, group=self.group.process_group, async_op=True))


def fill_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Deal parameters out, the last one first, into buckets of one dtype.

    >>> sizes = [nn.Parameter(torch.zeros(n)) for n in (5, 1, 2, 3)]
    >>> [[p.numel() for p in bucket] for bucket in fill_buckets(sizes, bucket_bytes=16)]
    [[3, 2], [1, 5]]
    """
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        if room <= 0 or parameter.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, or zeros where this rank's tokens did not reach the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
