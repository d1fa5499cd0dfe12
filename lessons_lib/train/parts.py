"""What a rank trains: its part of the serial model, and how a batch goes through it.

    tp    cuts layers: the part has blocks of their weights (lessons_lib.plan)
    cp    cuts sequences: embeddings and loss take this rank's tokens, attention reaches the others'
    pp    cuts the model into stages: the part has those of this rank, and a schedule goes through them
    dp    cuts the batch: the part is the same, and its rows are others

Each goes with each, save for what :class:`~lessons_lib.train.settings.Settings` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons_lib import plan
from lessons_lib.data_parallel import reduce_each
from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group, Mesh
from lessons_lib.models.gpt import GPT
from lessons_lib.pipeline_parallel import Schedule, cut_batch, cut_model, execute, tied_places
from lessons_lib.sequence_parallel import context_parallel
from lessons_lib.spmd import region
from lessons_lib.train.settings import Settings

Passes = Callable[[Tensor, Tensor, int], Tensor]
"""Forward and backward: from tokens, targets and the number of all targets to this rank's share of the mean
loss, its gradients added to the parameters."""


@dataclass(frozen=True)
class Part:
    """What a rank trains. ``model`` has its parameters, by the names that they have in the serial model."""

    model: GPT
    passes: Passes
    rows: Group | None = None  # the ranks that are given other rows of the batch
    replicas: Group | None = None  # those that see other tokens, of these rows or others


def serial_model(settings: Settings) -> GPT:
    return GPT(settings.config, settings.seed).to(settings.dtype)


def whole_model(settings: Settings) -> Part:
    """The serial model, on one rank."""
    model = serial_model(settings)
    return Part(model, partial(at_once, model))


def part_of_model(settings: Settings, mesh: Mesh) -> Part:
    """The part of the model that this rank of ``mesh`` trains. Every rank calls this."""
    model = serial_model(settings)
    schedule, attention = settings.pipeline, settings.over_cp
    if settings.tp > 1:
        plan.parallelize(model, settings.plan, mesh)
    if attention is not None:
        context_parallel(model, attention, mesh)
    rows = mesh["dp"] if "dp" in mesh.sizes else None
    replicas = replicas_of(mesh)
    if schedule is None:
        return Part(model, partial(at_once, model), rows, replicas)
    stages = layers_of_stages(settings)
    return Part(model, Pipeline(model, schedule, stages, mesh["pp"], replicas), rows, replicas)


def replicas_of(mesh: Mesh) -> Group | None:
    """The ranks that hold the same parameters and see other tokens: those along dp and along cp together.

    >>> from lessons_lib import run
    >>> run(lambda: str(replicas_of(Mesh(dp=2, cp=2, tp=2))), ranks=8).values[3]
    'Group(ranks=[1, 3, 5, 7], rank=1)'
    """
    axes = [axis for axis in ("dp", "cp") if axis in mesh.sizes]
    if len(axes) < 2:
        return mesh[axes[0]] if axes else None
    # The two are neighbours in the numbering of the ranks: one axis in their place holds the same ranks.
    joined = {"replica" if axis == "dp" else axis: n for axis, n in mesh.sizes.items() if axis != "cp"}
    joined["replica"] *= mesh.sizes["cp"]
    return Mesh(**joined)["replica"]


def at_once(model: GPT, tokens: Tensor, targets: Tensor, n_targets: int) -> Tensor:
    """The passes of a whole model."""
    with region("forward"):
        loss = model.loss_sum(tokens, targets) / n_targets
    with region("backward"):
        loss.backward()
    return loss.detach()


class Pipeline:
    """The passes of a rank's stages, by a schedule; afterwards the gradients are summed over ``replicas``.

    Of ``model`` it leaves what this rank's stages hold; all else gives way to modules without parameters.
    A stage that two ranks hold, and a tied weight, has the same gradient on both: both take the same step.
    Layers that tp cuts make their weights' gradients in I, where the schedule has a W of its own.
    """

    def __init__(
        self,
        model: GPT,
        schedule: Schedule,
        layers: list[range],
        group: Group,
        replicas: Group | None,
    ) -> None:
        stages = cut_model(model, len(layers), layers=layers)
        self.model, self.schedule, self.group, self.replicas = model, schedule, group, replicas
        self.tied = tied_places(stages)
        self.stages = {number: stages[number] for number in schedule.stages[group.rank]}
        held = {parameter for stage in self.stages.values() for parameter in stage.parameters()}
        for name, module in list(model.named_modules()):
            own = list(module.parameters(recurse=False))
            if own and held.isdisjoint(own):
                model.set_submodule(name, nn.Identity())

    def __call__(self, tokens: Tensor, targets: Tensor, n_targets: int) -> Tensor:
        microbatches = cut_batch(tokens, targets, self.schedule.n_microbatches)
        done = execute(
            self.schedule,
            self.stages,
            microbatches,
            self.model.cross_entropy,
            self.group,
            n_tokens=n_targets,
            tied=self.tied,
        )
        if self.replicas is not None:
            with region("replicas"):
                reduce_each(self.model, self.replicas)
        return torch.tensor(done.loss, dtype=torch.float64, device=tokens.device)


def layers_of_stages(settings: Settings) -> list[range]:
    """The layers of each stage of the pipeline, by what they cost."""
    schedule = settings.pipeline
    assert schedule is not None
    n_stages, n_layers = schedule.n_stages, settings.config.L + 2
    if n_stages > n_layers:
        raise RefusedError(
            f"{settings.schedule} on {settings.pp} ranks has {n_stages} stages, and the model {n_layers} "
            f"layers: the embedding, {settings.config.L} blocks, and the head. Every stage needs one: try "
            f"{n_stages - 2} blocks or more, or fewer ranks"
        )
    with torch.device("meta"):
        return [stage.layers for stage in cut_model(GPT(settings.config), n_stages)]


def gather(model: GPT, settings: Settings, mesh: Mesh, state: Mapping[str, Tensor]) -> GPT:
    """The serial model, whole, on every rank, from the parameters that each has. All ranks call this."""
    if "pp" not in mesh.sizes:
        return plan.serial(model, mesh, state)
    own, group = plan.unshard_state(model, state, mesh), mesh["pp"]
    names: list[list[str]] = [[]] * group.size
    dist.all_gather_object(names, list(own), group=group.process_group)
    whole = serial_model(settings).to(next(iter(own.values())))
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            root = next(rank for rank, held in enumerate(names) if name in held)
            parameter.copy_(group.broadcast(own.get(name, torch.empty_like(parameter)), root))
    return whole


def refuse_unfit(settings: Settings) -> None:
    """Refuse, before any rank starts, what a :class:`Part` and its passes would refuse on every rank."""
    config, sizes = settings.config, settings.sizes
    with torch.device("meta"):
        model = GPT(config)
    layers = plan.check(model, settings.plan, sizes)
    if settings.over_cp is not None:
        heads_over = layers["blocks.0.attention.qkv"].Y.dim("F")
        n = prod(sizes[axis] for axis in heads_over)
        settings.over_cp.check(config.S, settings.cp, config.H // n, config.G // n)
    sequences = torch.arange(settings.n_sequences).tensor_split(settings.dp)
    fewest, *more = sorted({len(rows) for rows in sequences})
    for n_rows in (fewest, *more):
        plan.check(model, settings.plan, sizes, batch=(n_rows, config.S // settings.cp))
    if settings.schedule is None:
        return
    layers_of_stages(settings)
    if fewest < settings.n_microbatches:
        shared = f", shared out over dp={settings.dp}, leave a rank {fewest}" if settings.dp > 1 else ""
        raise RefusedError(
            f"{settings.n_sequences} sequences{shared}: {settings.n_microbatches} micro-batches cannot each "
            f"have one. Try a batch of {settings.n_microbatches * settings.dp} or more, or fewer of them"
        )
