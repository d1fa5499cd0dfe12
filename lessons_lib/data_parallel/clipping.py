"""The norm of all gradients together, whoever holds them, and the factor that clips it.

An element may lie on one rank or on many. Each rank adds up the squares of what it holds, divided by the
number of ranks that hold the same, and all ranks' sums are added: what is cut counts once, and so does what
is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lessons_lib.mesh import Group

ONE: Mapping[str, int] = {}


def global_norm(
    gradients: Iterable[tuple[str, Tensor]],
    groups: Sequence[Group],
    n_copies: Mapping[str, int] = ONE,
) -> float:
    """The norm of all ranks' gradients, the same on every rank.

    >>> from lessons_lib import Mesh, run
    >>> def step():
    ...     mesh = Mesh(dp=4)
    ...     gradients = [("cut", torch.tensor([[1.0], [2.0], [0.0], [2.0]][mesh.rank])),
    ...                  ("copied", torch.tensor([4.0]))]
    ...     return global_norm(gradients, [mesh["dp"]], n_copies={"copied": 4})
    >>> run(step, ranks=4).values                               # of 1, 2, 0, 2 and 4
    [5.0, 5.0, 5.0, 5.0]

    ``groups`` are the axes over which ranks hold different things, or the same: all axes, in most cases.
    ``n_copies`` says of a name on how many of their ranks the same numbers lie; 1 where it says nothing.
    Squares are added up in float32, or in the gradients' own dtype if that is finer. The norm is not finite
    as soon as one element on one rank is not.
    Traffic: an all-reduce of one element over each group.
    """
    total = torch.zeros(())
    for name, gradient in gradients:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        total = total.to(wide) + wide.square().sum() / n_copies.get(name, 1)
    for group in groups:
        total = group.all_reduce(total)
    return total.sqrt().item()


def clip(norm: float, max_norm: float) -> float:
    """The factor for all gradients that brings their norm down to ``max_norm``; 1 where it is smaller.

    >>> clip(norm=5.0, max_norm=1.0), clip(norm=0.5, max_norm=1.0)
    (0.2, 1.0)
    """
    return min(1.0, max_norm / norm) if norm else 1.0
