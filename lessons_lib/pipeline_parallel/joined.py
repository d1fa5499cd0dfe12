"""Parameters that several places hold: their gradients are summed over all of them, once.

There are two reasons for such. Where micro-batches go in both directions, two ranks hold a copy of each
stage. And a model may use one matrix at both ends, to embed tokens and to predict them: its first and its
last stage then hold the same weights (on one rank, as in a V, they may simply be the same parameter).

Gradients of an earlier step, which this step adds to, were joined then: they are laid aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group
from lessons_lib.spmd import region

Held = tuple[int, str]  # a stage, and the name of one of its parameters


class Joined:
    """The parameters of this rank that other places hold, too. ``homes`` are the ranks of each stage."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        homes: Sequence[tuple[int, ...]],
        tied: Sequence[Sequence[Held]],
        group: Group,
        tag: int,
    ) -> None:
        self.group, self.tag = group, tag
        # For the ranks that join them: what is one parameter of the model, as the parameters it is here.
        self.shared: dict[tuple[int, ...], list[list[nn.Parameter]]] = {}
        _check(tied, stages, len(homes))
        among_tied = {held for places in tied for held in places}
        for stage in sorted(stages):
            for name, parameter in stages[stage].named_parameters():
                if len(homes[stage]) > 1 and (stage, name) not in among_tied:
                    self.shared.setdefault(homes[stage], []).append([parameter])
        for places in tied:
            ranks = tuple(sorted({rank for stage, _ in places for rank in homes[stage]}))
            if group.rank in ranks:
                here = {stages[stage].get_parameter(name): None for stage, name in places if stage in stages}
                if len(ranks) > 1 or len(here) > 1:
                    self.shared.setdefault(ranks, []).append(list(here))
        self._earlier = {p: p.grad for same in self.shared.values() for ones in same for p in ones}
        for parameter in self._earlier:
            parameter.grad = None

    def join(self) -> None:
        """Sum this step's gradients over the places, and add those of earlier steps.

        Traffic: each rank of a pair sends its gradients once, as in an all-reduce of two.
        """
        for ranks, same in self.shared.items():
            own = torch.cat([_sum([_gradient(p) for p in ones]).flatten() for ones in same])
            total = self._exchange(own, ranks)
            pieces = total.split([ones[0].numel() for ones in same])
            for ones, piece in zip(same, pieces, strict=True):
                for parameter in ones:
                    earlier = self._earlier[parameter]
                    joined = piece.view_as(parameter)
                    parameter.grad = joined.clone() if earlier is None else earlier + joined
        self._earlier.clear()

    def _exchange(self, own: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """The sum over ``ranks``, added up in the same order on each."""
        along, others = self.group.process_group, [rank for rank in ranks if rank != self.group.rank]
        terms = {rank: torch.empty_like(own) for rank in others}
        with region("join"):
            works = [dist.isend(own, group=along, group_dst=rank, tag=self.tag) for rank in others]
            works += [dist.irecv(terms[rank], group=along, group_src=rank, tag=self.tag) for rank in others]
            for work in works:
                assert work is not None
                work.wait()
        terms[self.group.rank] = own
        return _sum([terms[rank] for rank in ranks])


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, or zeros where none of this rank's micro-batches reached the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _check(tied: Sequence[Sequence[Held]], stages: Mapping[int, nn.Module], n_stages: int) -> None:
    for places in tied:
        for stage, name in places:
            if not 0 <= stage < n_stages:
                raise RefusedError(f"tied names stage {stage}, and there are stages 0 to {n_stages - 1}.")
            if stage in stages and name not in dict(stages[stage].named_parameters(remove_duplicate=False)):
                known = ", ".join(name for name, _ in stages[stage].named_parameters())
                raise RefusedError(f"tied names {name!r} on stage {stage}, whose parameters are {known}.")
