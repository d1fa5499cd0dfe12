"""Dropout whose mask a rank can make for its own block alone.

A mask is a function of one key, drawn from torch's generator for each mask, and of each element's position in
the whole tensor. So ranks whose generators are in step need no message, and no mask of the whole, to drop
what one device would drop: where ranks hold copies of an element they drop it together, and where they hold
different elements they draw differently.

Recomputation that puts torch's generator back, as ``torch.utils.checkpoint`` does, draws the same key.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class Dropout(nn.Module):
    """Set a share ``p`` of the elements to 0 in training, and divide the others by 1 - p.

    >>> dropout, x = Dropout(0.25), torch.ones(2, 4000)
    >>> round(dropout(x).mean().item(), 1), torch.equal(dropout(x), dropout(x)), dropout.eval()(x) is x
    (1.0, False, True)

    Kept for backward: x's mask, one byte per element.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        if not self.training or not self.p:
            return x
        key = int(torch.randint(2**62, (), device="cpu"))
        return x * keeps(key, self.positions(x), self.p) / (1 - self.p)

    def positions(self, x: Float[Tensor, "*dims"]) -> Int64[Tensor, "*dims"]:
        """Where each element of ``x`` stands in the whole tensor, which here ``x`` is."""
        return torch.arange(x.numel(), device=x.device).view(x.shape)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def keeps(key: int, positions: Int64[Tensor, "*dims"], p: float) -> Bool[Tensor, "*dims"]:
    """Say of every position whether it is kept, which the share 1 - ``p`` of them is.

    >>> keeps(7, torch.arange(8), p=0.5).tolist() == keeps(7, torch.arange(8).flip(0), p=0.5).flip(0).tolist()
    True

    The numbers that decide are SplitMix64's: its n-th number can be had without those before it.
    Source: Steele, Lea, Flood 2014 (Fast Splittable Pseudorandom Number Generators), figure 17.
    """
    z = (positions + 1) * GOLDEN + key  # in 64 bits, which wrap round
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    return _shifted(z ^ _shifted(z, 31), 11) >= int(p * 2**53)


def _shifted(z: Int64[Tensor, "*dims"], by: int) -> Int64[Tensor, "*dims"]:
    """To the right, as an unsigned number is."""
    return (z >> by) & ((1 << (64 - by)) - 1)
