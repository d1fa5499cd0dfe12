"""The GPT cut into stages: consecutive layers, so that the slowest stage is as fast as can be.

A pipeline goes at the pace of its slowest stage, and what has no layer on any stage is lost without a sound.
So layers are shared out by what they cost, and every one of them to exactly one stage.

The layers are the embedding (of tokens and positions), the blocks, and the head with the norm before it. A
stage keeps their names: the parameters of ``blocks.5`` are called so on whatever stage it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from lessons_lib.errors import RefusedError
from lessons_lib.models.gpt import GPT
from lessons_lib.pipeline_parallel.joined import Held


class GPTStage(nn.Module):
    """Consecutive layers of a GPT, by number: 0 is the embedding, L + 1 the norm and the head.

    It holds the model's own modules, not copies of them.
    """

    def __init__(self, model: GPT, layers: range) -> None:
        super().__init__()
        self.config, self.layers = model.config, layers
        numbers = [number for number in layers if 1 <= number <= model.config.L]
        if 0 in layers:
            self.embedding, self.position = model.embedding, model.position
        self.blocks = nn.ModuleDict({str(number - 1): model.blocks[number - 1] for number in numbers})
        if model.config.L + 1 in layers:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if 0 in self.layers:
            x = GPT.embed(self, x)  # type: ignore[arg-type]  # who has its modules can do what it does
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.config.L + 1 in self.layers else x


def cut_model(
    model: GPT,
    n_stages: int,
    costs: Sequence[float] | None = None,
    layers: Sequence[range] | None = None,
) -> list[GPTStage]:
    """Cut a GPT into stages, which together are the model.

    >>> from lessons_lib.models.gpt import GPTConfig
    >>> model = GPT(GPTConfig(L=6, D=16, H=2, S=8, V=512))
    >>> [list(stage.layers) for stage in cut_model(model, 4)]       # the head costs as much as two blocks
    [[0, 1, 2], [3, 4], [5, 6], [7]]

    ``costs`` are those of the layers, :func:`layer_costs` if not given; ``layers`` says which go where, if
    that is decided already. Raises RefusedError where a layer would be lost, or a stage have none.
    """
    n_layers = model.config.L + 2
    if layers is None:
        layers = cut_by_cost(layer_costs(model) if costs is None else costs, n_stages)
    placed = [layer for stage in layers for layer in stage]
    if placed != list(range(n_layers)) or len(layers) != n_stages or not all(map(len, layers)):
        raise RefusedError(
            f"the layers {[list(stage) for stage in layers]} on {n_stages} stages: every stage needs a "
            f"layer, and each of the layers 0 (embedding), 1 to {n_layers - 2} (blocks) and {n_layers - 1} "
            "(norm and head) stands once, in order."
        )
    return [GPTStage(model, stage) for stage in layers]


def cut_by_cost(costs: Sequence[float], n_stages: int) -> list[range]:
    """Cut layers into consecutive stages whose dearest is as cheap as can be.

    >>> cut_by_cost([0, 1, 1, 1, 1, 2], 3)
    [range(0, 3), range(3, 5), range(5, 6)]

    Of equally good cuts one with the smallest sum of squares, which is the most even.
    """
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise RefusedError(
            f"{n} layers cannot be cut into {n_stages} stages: take 1 to {n}, so that each has a layer."
        )
    until = [0, *accumulate(costs)]
    # best[end]: of the layers before end on so many stages, the dearest stage, the sum of squares, the cut
    best: list[tuple[float, float, list[range]]] = [(0, 0, [])] + [(math.inf, math.inf, [])] * n
    for _ in range(n_stages):
        better: list[tuple[float, float, list[range]]] = [(math.inf, math.inf, [])]
        for end in range(1, n + 1):
            found = (
                (max(dearest, cost), squares + cost**2, [*cut, range(start, end)])
                for start, (dearest, squares, cut) in enumerate(best[:end])
                for cost in (until[end] - until[start],)
            )
            better.append(min(found, key=lambda one: one[:2]))
        best = better
    return best[n][2]


def layer_costs(model: GPT) -> list[int]:
    """Count the FLOPs of every layer, forward, for one sequence; nothing is computed.

    >>> from lessons_lib.models.gpt import GPTConfig
    >>> layer_costs(GPT(GPTConfig(L=2, D=16, H=2, S=8, V=128)))
    [0, 53248, 53248, 32768]
    """
    counted: dict[tuple[torch.Size, ...], int] = {}  # layers of the same shapes cost the same
    costs = []
    for number in range(model.config.L + 2):
        layer = GPTStage(model, range(number, number + 1))
        shapes = tuple(parameter.shape for parameter in layer.parameters())
        if shapes not in counted:
            counted[shapes] = _count(layer)
        costs.append(counted[shapes])
    return costs


def _count(layer: GPTStage) -> int:
    """The FLOPs of a layer's forward for one sequence, by its shapes alone."""
    S, D = layer.config.S, layer.config.D
    weights = {name: torch.empty_like(p, device="meta") for name, p in layer.named_parameters()}
    if 0 in layer.layers:
        x = torch.empty(1, S, dtype=torch.int64, device="meta")
    else:
        x = torch.empty(1, S, D, dtype=next(iter(weights.values())).dtype, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        functional_call(layer, weights, (x,))
    return counter.get_total_flops()


def tied_places(stages: Sequence[nn.Module]) -> list[list[Held]]:
    """The parameters that several stages of a model share, each as the places that hold it.

    >>> first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> last.weight = first.weight
    >>> tied_places([first, nn.Linear(2, 2), last])
    [[(0, 'weight'), (2, 'weight')]]

    For ``execute(..., tied=tied_places(stages))``, of all stages, as a rank has them before it takes its own.
    """
    places: dict[nn.Parameter, list[Held]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            places.setdefault(parameter, []).append((number, name))
    return [held for held in places.values() if len({stage for stage, _ in held}) > 1]
