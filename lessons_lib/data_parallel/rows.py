"""Who gets which rows, and who divides: the mean over all tokens is divided by their number, once.

The loss of a step is the mean over the tokens of all ranks:

    loss = sum over ranks (sum over its tokens of their losses) / (number of all ranks' tokens)

So each rank's backward starts from *its sum divided by the number of all*, gradients are summed over ranks,
and nobody divides again. The mean of the ranks' means is another number as soon as ranks have not equally
many tokens, and a rank that has none has no mean; its sum is 0, and it takes part like all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lessons_lib.mesh import Group


def rows_of_rank(X: Tensor, group: Group) -> Tensor:
    """This rank's rows of a batch that all ranks have: a piece of dim 0. No communication.

    Rows are dealt out as ``torch.tensor_split`` does: each exactly once, whether or not the ranks divide
    them; the last ranks may have none.

    >>> from lessons_lib import Mesh, run
    >>> run(lambda: rows_of_rank(torch.arange(5), Mesh(dp=3)["dp"]).tolist(), ranks=3).values
    [[0, 1], [2, 3], [4]]
    """
    return X.tensor_split(group.size)[group.rank]


def total(n: int, group: Group) -> int:
    """The sum of the ranks' counts. Traffic: an all-reduce of one element.

    >>> from lessons_lib import Mesh, run
    >>> def step():
    ...     group = Mesh(dp=2)["dp"]
    ...     losses = torch.tensor([[1.0, 1.0], [3.0] * 6][group.rank])      # 2 tokens here, 6 there
    ...     share = losses.sum() / total(losses.numel(), group)             # what backward starts from
    ...     return group.all_reduce(share).item(), group.all_reduce(losses.mean() / 2).item()
    >>> run(step, ranks=2).values[0]                                        # the mean, the mean of the means
    (2.5, 2.0)
    """
    return int(group.all_reduce(torch.tensor(n)))


def mean_over_ranks(values: Tensor, group: Group) -> float:
    """The mean of the elements that all ranks have together, however they are shared out.

    For metrics: right answers per sample, losses per token. Traffic: an all-reduce of one element, and one of
    the count.
    """
    return (group.all_reduce(values.sum()) / total(values.numel(), group)).item()
