"""The exercise of lesson 06: layers that are gathered just in time, and freed after use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib.data_parallel.unit import Unit
from lessons_lib.data_parallel.zero import Zero
from lessons_lib.grading.exercise import (
    Axis,
    Budget,
    Claim,
    Deadline,
    Draw,
    Exercise,
    Output,
    Trial,
    each_block,
    sizes_text,
)
from lessons_lib.layout import Layout, coordinates
from lessons_lib.machines import Link, Machine
from lessons_lib.mesh import Group

# ---- the solution ----


def forward_ahead(x: Tensor, ws: list[Tensor], dp: Group) -> Tensor:
    """Return this rank's rows after all layers: each makes ``tanh(x @ W)`` of x.

    ``x`` is this rank's rows, B x D, and ``ws`` its piece of each layer's W, layout ``D@dp D``. While a layer
    computes the next one is on its way, and no more than these two are ever whole.
    """
    coming = _start(ws[0], dp)
    for following in [*ws[1:], None]:
        W, arrives = coming
        arrives.wait()
        if following is not None:
            coming = _start(following, dp)
        x = torch.tanh(x @ W)
    return x


def _start(w: Tensor, dp: Group) -> tuple[Tensor, dist.Work]:
    """Begin to gather a layer."""
    W = w.new_empty(dp.size * w.shape[0], w.shape[1])
    return W, dist.all_gather_single(W, w, group=dp.process_group, async_op=True)


# ---- the trials ----

MESHES: tuple[Mapping[str, int], ...] = ({"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}, {"dp": 4})
HELD = (
    "At most two layers may be whole at once: is a third in a list, or does a name or a work still hold one?"
)
GATHERED = "a rank gathers each layer once, and its rows stay"
LATE = (
    "the wait for a layer is hidden if its gather has begun, by async_op=True, before the layer in front of "
    "it computes"
)


def _trials(draw: Draw) -> list[Trial]:
    """For every mesh; the last one twice."""
    trials = []
    for sizes in MESHES:
        p = sizes["dp"]
        n_layers, D, B = draw.between(5, 7), p * draw.between(24 // p, 36 // p), draw.between(2, 3)
        trials.append(_trial(draw, sizes, n_layers, D, B))
    return [*trials, _trial(draw, sizes, n_layers, D, B)]


def _trial(draw: Draw, sizes: Mapping[str, int], n_layers: int, D: int, B: int) -> Trial:
    places, p = coordinates(sizes), sizes["dp"]
    models = [[draw.tensor(D, D) / D**0.5 for _ in range(n_layers)] for _ in range(sizes.get("tp", 1))]
    Ws = [models[place.get("tp", 0)] for place in places]
    x = [draw.tensor(B, D) for _ in places]
    cut = Layout("D@dp E")
    blocks = [[each_block(cut, W, sizes) for W in model] for model in models]
    ws = [[layer[rank].clone() for layer in blocks[place.get("tp", 0)]] for rank, place in enumerate(places)]
    compute, machine = _machine(p, D, B)
    gather = compute * GATHERS_TAKE
    return Trial(
        function="forward_ahead",
        sizes=sizes,
        facts=sizes_text(sizes, L=n_layers, D=D, B=B),
        args=[(rows, mine, Axis("dp")) for rows, mine in zip(x, ws, strict=True)],
        outputs=[
            Output(
                "the result",
                "values",
                [_serial(rows, layers) for rows, layers in zip(x, Ws, strict=True)],
                mistakes=_mistakes(x, Ws, ws),
            )
        ],
        budgets={"forward": Budget.even(Fraction(n_layers * (p - 1) * D * D, p), sizes, GATHERED)},
        wholes={"all layers": n_layers * D * D},
        spare=2 * D * D + D * D // 3 + 3 * B * D,
        too_much=HELD,
        deadline=Deadline(machine, float(gather * Fraction(3, 2) + n_layers * compute), LATE),
    )


GATHERS_TAKE = Fraction(7, 10)  # of the time a layer computes


def _machine(p: int, D: int, B: int) -> tuple[Fraction, Machine]:
    """A machine on which a layer computes for 10 µs, and gathers for 7."""
    compute = Fraction(1, 100_000)
    sent = Fraction(8 * D * D * (p - 1), p)
    link = Link(bandwidth_bytes_per_s=float(sent / (compute * GATHERS_TAKE)))
    return compute, Machine("small GPUs", flops_per_s=float(2 * B * D * D / compute), in_node=link)


def _serial(x: Tensor, layers: Sequence[Tensor]) -> Tensor:
    for W in layers:
        x = torch.tanh(x @ W)
    return x


def _mistakes(
    x: Sequence[Tensor], Ws: Sequence[Sequence[Tensor]], ws: Sequence[Sequence[Tensor]]
) -> dict[str, Sequence[Tensor]]:
    everywhere = list(zip(x, Ws, strict=True))
    linear = list(x)
    for at in range(len(Ws[0])):
        linear = [rows @ layers[at] for rows, layers in zip(linear, Ws, strict=True)]
    tiled = [
        [w.repeat(W.shape[0] // w.shape[0], 1) for w, W in zip(mine, layers, strict=True)]
        for mine, layers in zip(ws, Ws, strict=True)
    ]
    return {
        "the last layer was left out": [_serial(rows, layers[:-1]) for rows, layers in everywhere],
        "the first layer was left out": [_serial(rows, layers[1:]) for rows, layers in everywhere],
        "only the first layer was computed": [_serial(rows, layers[:1]) for rows, layers in everywhere],
        "the last layer was computed twice": [
            _serial(rows, [*layers, layers[-1]]) for rows, layers in everywhere
        ],
        "the layers were computed in the opposite order": [
            _serial(rows, layers[::-1]) for rows, layers in everywhere
        ],
        "every layer was computed with the weights of the first": [
            _serial(rows, [layers[0]] * len(layers)) for rows, layers in everywhere
        ],
        "tanh is missing": linear,
        "each rank has filled W with its own piece: nothing was gathered": [
            _serial(rows, layers) for rows, layers in zip(x, tiled, strict=True)
        ],
    }


EXERCISES = (
    Exercise(
        id="06-forward",
        title="Gather, free, one ahead",
        objective="Run layers that no rank holds: gather each one layer ahead, and free it after use.",
        functions=(forward_ahead,),
        claims=(
            Claim("values", "each rank's rows, after all layers", 3),
            Claim("traffic", "each layer is gathered once", 1),
            Claim("memory", "no more than two layers are whole at once", 3),
            Claim("time", "on a clock: no wait but for the first layer", 2),
            Claim("no deadlock", "no rank is left waiting, whoever begins", 1),
        ),
        trials=_trials,
        hints=(
            "When the first layer computes, what could the network do? And who still needs it afterwards?",
            "Begin to gather the first layer. Then, for each: wait for it, begin to gather the next one, "
            "compute. The last layer has no next one.",
            "W, arrives = coming; arrives.wait(); coming = start(following, dp); x = torch.tanh(x @ W). "
            "These names hold two layers; a list of all of them, or of works, would hold more.",
        ),
        shown=(Zero._before_forward, Zero._after_forward, Zero._gather, Unit.free),
    ),
)
