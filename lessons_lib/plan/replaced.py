"""A serial model goes in, each rank's part of it comes out; and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Mesh
from lessons_lib.models.gpt import GPT
from lessons_lib.plan.checks import check, linear, named_as
from lessons_lib.plan.plans import GPTPlan, Plan
from lessons_lib.plan.state import unshard_state
from lessons_lib.tensor_parallel import (
    ParallelDropout,
    ParallelLayerNorm,
    ParallelPositionEmbedding,
    TensorParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    VocabParallelHead,
)


def parallelize(model: nn.Module, plan: Plan | GPTPlan, mesh: Mesh) -> nn.Module:
    """Replace the modules that ``plan`` names by this rank's parts of them; return ``model``.

    >>> from lessons_lib import run
    >>> from lessons_lib.models.gpt import GPTConfig
    >>> from lessons_lib.plan import GPT_1D, PLANS
    >>> def step(plan):
    ...     model = parallelize(GPT(GPTConfig(L=1, H=4, D=16)), plan, Mesh(tp=2))
    ...     names = ("embedding.weight", "blocks.0.attention.qkv.weight")
    ...     return {name: tuple(model.get_parameter(name).shape) for name in names}
    >>> run(step, GPT_1D, ranks=2).values[0]
    {'embedding.weight': (256, 16), 'blocks.0.attention.qkv.weight': (16, 24)}
    >>> run(step, PLANS["1d"], ranks=2).values[0]
    {'embedding.weight': (128, 16), 'blocks.0.attention.qkv.weight': (16, 24)}

    Every rank calls this with a copy of the same serial model, and then hands it the same whole batches.
    Parameters keep their names, and are shared where they were; modules that the plan does not name stay
    whole on every rank. There is no communication. On a mesh of one rank the parts are the whole modules.

    Where the plan cuts the vocabulary, ``model.generate`` gathers the serial model on every rank, once for
    each call: one sequence alone cannot be shared out.

    Raises RefusedError, before the model is changed, if a pattern matches nothing (and suggests the nearest
    names) or something that is no ``nn.Linear``, if two patterns match one module, if a scheme is unknown, if
    the mesh lacks a scheme's axis or does not divide a size or a number of heads, or if a layer would be
    handed its input, or leave its output, in another layout than its neighbours have it (as far as the
    modules of the model say, in ``branch``, which layers feed each other).
    """
    schemes = check(model, plan, mesh.sizes)
    shared = _shared_names(model)
    for name, scheme in schemes.items():
        model.set_submodule(name, TensorParallelLinear.from_linear(linear(model, name), scheme, mesh))
    if isinstance(plan, GPTPlan):
        for pattern, part_of in BETWEEN_THE_LAYERS.items():
            for name in named_as(model, pattern):
                model.set_submodule(name, part_of(model.get_submodule(name), plan, mesh))
        if isinstance(model, GPT):
            model.generate = partial(_generate, model, mesh)  # type: ignore[method-assign]
    for first, *others in shared:
        for other in others:
            module, _, kind = other.rpartition(".")
            setattr(model.get_submodule(module), kind, model.get_parameter(first))
    return model


def _norm(norm: Any, plan: GPTPlan, mesh: Mesh) -> nn.Module:
    return ParallelLayerNorm.from_layer_norm(norm, plan.stream, mesh)


BETWEEN_THE_LAYERS: Mapping[str, Callable[[Any, GPTPlan, Mesh], nn.Module]] = {
    "embedding": lambda words, plan, mesh: VocabParallelEmbedding.from_embedding(
        words, plan.vocabulary, mesh
    ),
    "position": lambda places, plan, mesh: ParallelPositionEmbedding.from_embedding(
        places, plan.stream, mesh
    ),
    "blocks.*.attention_norm": _norm,
    "blocks.*.mlp_norm": _norm,
    "blocks.*.dropout": lambda dropout, plan, mesh: ParallelDropout(dropout.p, plan.stream, mesh),
    "norm": _norm,
    "head": lambda head, plan, mesh: VocabParallelHead.from_linear(head, plan.vocabulary, mesh),
    "cross_entropy": lambda loss, plan, mesh: VocabParallelCrossEntropy(loss.V, plan.vocabulary, mesh),
}
"""What a rank's part is of the modules that are no layers of a branch; a model need not have them all."""


def _shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def serial(model: GPT, mesh: Mesh, state: Mapping[str, Tensor] | None = None) -> GPT:
    """Gather the serial model, whole, on every rank. All ranks call this.

    ``state`` has this rank's parts of its parameters, if they are not to be the model's: those that ZeRO 3
    has given back show not a number in the model, and are refused.
    """
    parts: Mapping[str, Tensor] = dict(model.named_parameters()) if state is None else state
    for name, part in parts.items():
        if part.isnan().all():
            raise RefusedError(
                f"{name} is not a number throughout. Does ZeRO 3 hold its parameters? Then try "
                f"serial(model, mesh, zero.whole_parameters())."
            )
    whole = GPT(model.config).to(next(iter(parts.values())))
    gathered = unshard_state(model, parts, mesh)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(gathered[name])
    return whole


def _generate(model: GPT, mesh: Mesh, *given: Any, **options: Any) -> bytes:
    return serial(model, mesh).generate(*given, **options)
