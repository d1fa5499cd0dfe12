"""Dropout where the stream is cut, and the two random streams by which Megatron-LM does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.models.dropout import Dropout


class ParallelDropout(Dropout):
    """The serial dropout of a tensor of which this rank holds the block that ``layout`` gives it.

    >>> from lessons_lib import run
    >>> def step():
    ...     return ParallelDropout(0.5, Layout("B D@tp"), Mesh(tp=2))(torch.ones(2, 4)).tolist()
    >>> for kept in run(step, ranks=2).values:
    ...     print(kept)
    [[0.0, 0.0, 0.0, 2.0], [2.0, 0.0, 0.0, 2.0]]
    [[2.0, 0.0, 2.0, 2.0], [0.0, 2.0, 0.0, 0.0]]

    Its mask is the block of the serial mask: ranks that hold copies drop alike, and others do not. All of
    them draw the key, so their generators must have been seeded alike and stay in step.
    Traffic: none. Memory: no mask but this block's.
    """

    def __init__(self, p: float, layout: Layout, mesh: Mesh) -> None:
        super().__init__(p)
        self.layout, self.mesh = layout, mesh

    def positions(self, x: Float[Tensor, "*dims"]) -> Int64[Tensor, "*dims"]:
        whole = self.layout.global_shape(x.shape, self.mesh.sizes)
        block = self.layout.slices(whole, self.mesh.sizes, self.mesh.coordinate)
        at = torch.zeros((), dtype=torch.int64, device=x.device)
        for dim, cut in enumerate(block):
            index = torch.arange(cut.start, cut.stop, device=x.device) * prod(whole[dim + 1 :])
            at = at[..., None] + index
        return at

    def extra_repr(self) -> str:
        return f"p={self.p}, {self.layout}"


class RandomStreams:
    """Two states of torch's generator: ranks that hold the same draw the same, and in a fork their own.

    >>> from lessons_lib import run
    >>> def step():
    ...     tp = Mesh(tp=2)["tp"]
    ...     streams = RandomStreams(seed=5, rank=tp.rank)
    ...     shared = torch.rand(()).item()
    ...     with streams.fork():
    ...         own = torch.rand(()).item()
    ...     return shared, own, torch.rand(()).item()
    >>> one, other = run(step, ranks=2).values
    >>> [a == b for a, b in zip(one, other)]
    [True, False, True]

    The common way: a layer that works on what is whole on every rank calls dropout as it is, and one that
    works on a part calls it inside :meth:`fork`. Masks depend on the number of ranks, so nothing can be
    compared with the serial model, and who recomputes must put both states back.
    Source: Megatron-LM, ``core/tensor_parallel/random.py``, whose offset for the ranks' own stream is this.
    """

    OFFSET = 2718

    def __init__(self, seed: int, rank: int) -> None:
        self.own = torch.Generator().manual_seed(seed + self.OFFSET + rank).get_state()
        torch.manual_seed(seed)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Draw from this rank's own stream; then go on with the common one, where it was left."""
        common = torch.get_rng_state()
        torch.set_rng_state(self.own)
        try:
            yield
        finally:
            self.own = torch.get_rng_state()
            torch.set_rng_state(common)
