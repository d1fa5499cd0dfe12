"""From names of modules to parallel schemes: a serial model goes in, each rank's part of it comes out.

A plan is a dict from patterns to schemes. A pattern is the name of a module, in which ``*`` stands for any
one part between dots:

>>> GPT_1D["blocks.*.mlp.up"]
'column'

The model itself stays as it is written; :func:`parallelize` replaces the linear layers that the plan names.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from fractions import Fraction
from math import prod

from torch import Tensor, nn

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.models.gpt import Attention
from lessons_lib.tensor_parallel import SCHEMES, Scheme, TensorParallelLinear
from lessons_lib.tensor_parallel.linear import (
    check_sizes,
    parameter_layouts,
    shard_parameter,
    unshard_parameter,
)

Plan = Mapping[str, str | Scheme]

GPT_1D: Plan = {
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.proj": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
}
"""Megatron's 1D tensor parallelism: in each branch of a block a column layer feeds a row layer.

Embeddings, norms and the head stay whole on every rank, and so do the tokens.
"""


def parallelize(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Replace the linear layers that ``plan`` names by this rank's blocks of them; return ``model``.

    >>> from lessons_lib import run
    >>> from lessons_lib.models.gpt import GPT, GPTConfig
    >>> def step():
    ...     model = parallelize(GPT(GPTConfig(L=1, H=4, D=16)), GPT_1D, Mesh(tp=2))
    ...     return {name: tuple(p.shape) for name, p in model.named_parameters() if "attention." in name}
    >>> run(step, ranks=2).values[0]["blocks.0.attention.qkv.weight"]
    (16, 24)

    Every rank calls this with a copy of the same serial model. Parameters keep their names; modules that the
    plan does not name stay whole on every rank. There is no communication. On a mesh of one rank the blocks
    are the whole layers.

    Raises RefusedError, before the model is changed, if a pattern matches nothing (and suggests the nearest
    names) or something that is no ``nn.Linear``, if two patterns match one module, if a scheme is unknown, if
    the mesh lacks a scheme's axis or does not divide a size or a number of heads, or if a layer would be
    handed its input, or leave its output, in another layout than its neighbours have it (as far as the
    modules of the model say, in ``branch``, which layers feed each other).
    """
    for name, scheme in check(model, plan, mesh.sizes).items():
        model.set_submodule(name, TensorParallelLinear.from_linear(_linear(model, name), scheme, mesh))
    return model


def check(model: nn.Module, plan: Plan, sizes: Mapping[str, int]) -> dict[str, Scheme]:
    """Refuse what :func:`parallelize` would refuse on a mesh of ``sizes``; return each layer's scheme.

    Needs no ranks and, with a model on the meta device, no memory.

    >>> check(nn.Sequential(nn.Linear(10, 6)), {"0": "row"}, {"tp": 4})
    Traceback (most recent call last):
    ...
    lessons_lib.errors.RefusedError: 0: Layout("D@tp") on a mesh of tp=4: dim D of size 10 \
cannot be cut evenly over tp=4, so into 4 blocks. Nearest sizes that can: 8, 12. \
Legal degrees for 10: 1, 2, 5, 10.
    """
    schemes = assign(model, plan)
    _check_axes(schemes, sizes)
    _check_flow(model, schemes)
    _check_heads(model, schemes, sizes)
    for name, scheme in schemes.items():
        layer = _linear(model, name)
        try:
            check_sizes(scheme, layer.in_features, layer.out_features, sizes)
        except RefusedError as refusal:
            raise RefusedError(f"{name}: {refusal}") from None
    return schemes


def assign(model: nn.Module, plan: Plan) -> dict[str, Scheme]:
    """Return the scheme of every module that ``plan`` names, in the model's order. Needs no ranks.

    >>> list(assign(nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2)), {"0": "column", "2": "row"}))
    ['0', '2']
    """
    claimed_by: dict[str, str] = {}
    scheme_of = {pattern: _scheme(pattern, entry) for pattern, entry in plan.items()}
    for pattern in plan:
        matches = [name for name, _ in model.named_modules() if _fits(name, pattern)]
        if not matches:
            layers = _linear_patterns(model)
            raise RefusedError(
                f"the plan names {pattern!r}, but the model has no module of that name. "
                f"{_suggest(pattern, layers)}Linear layers of this model: {', '.join(layers) or 'none'}. "
                f"('*' stands for one part between dots.)"
            )
        for name in matches:
            if name in claimed_by:
                raise RefusedError(
                    f"two patterns of the plan, {claimed_by[name]!r} and {pattern!r}, match the module "
                    f"{name!r}; a module has one scheme. Make one of them narrower."
                )
            claimed_by[name] = pattern
            _check_is_linear(model, name, pattern)
    return {name: scheme_of[claimed_by[name]] for name, _ in model.named_modules() if name in claimed_by}


def shard_state(model: nn.Module, state: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Cut tensors that are shaped like the serial model's parameters into this rank's blocks of them.

    ``state`` maps names of parameters to tensors: the parameters themselves, gradients, an optimizer's
    moments. No communication.
    """
    layers = _parallel_layers(model)
    return {
        name: shard_parameter(name.rpartition(".")[2], tensor, layers[name].scheme, mesh)
        if name in layers
        else tensor.clone()
        for name, tensor in state.items()
    }


def unshard_state(model: nn.Module, state: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Gather, on every rank, the serial form of tensors shaped like this rank's parameters of ``model``.

    For what must not depend on the number of ranks: a checkpoint that any mesh can open, a comparison with
    the serial model. The inverse of :func:`shard_state`. Tensors of layers that are whole on every rank are
    copied, not compared: each rank returns its own.
    """
    layers = _parallel_layers(model)
    return {
        name: unshard_parameter(name.rpartition(".")[2], tensor, layers[name].scheme, mesh)
        if name in layers
        else tensor.clone()
        for name, tensor in state.items()
    }


def serial_gradients(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """Gather every parameter's gradient, on every rank, in the shape the serial model has it.

    For comparing, name by name, with the gradients of the serial model after the same step.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return unshard_state(model, gradients, mesh)


def n_copies(model: nn.Module, sizes: Mapping[str, int]) -> dict[str, int]:
    """On how many ranks, of those along the axes of ``sizes``, each parameter's numbers lie.

    What a norm over all ranks has to know, which counts a number once.

    >>> from lessons_lib import run
    >>> def step():
    ...     model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6))
    ...     return n_copies(parallelize(model, {"1": "column"}, Mesh(tp=2)), {"tp": 2})
    >>> run(step, ranks=2).values[0]
    {'0.weight': 2, '0.bias': 2, '1.weight': 1, '1.bias': 1}
    """
    layers, everywhere = _parallel_layers(model), prod(sizes.values())
    return {
        name: parameter_layouts(layers[name].scheme)[name.rpartition(".")[2]].n_copies(sizes)
        if name in layers
        else everywhere
        for name, _ in model.named_parameters()
    }


def traffic(model: nn.Module, n_tokens: int, mesh: Mesh) -> dict[str, int | Fraction]:
    """Return the elements a rank sends in one forward and one backward pass over ``n_tokens``, by formula.

    The sum of its layers' ``scheme.traffic``, by the ring convention; bias gradients that are summed over
    ranks come on top, in the schemes that have any.
    """
    total: dict[str, int | Fraction] = {"forward": 0, "backward": 0}
    for layer in model.modules():
        if isinstance(layer, TensorParallelLinear):
            for direction, n in layer.scheme.traffic(n_tokens, layer.D, layer.F, mesh.sizes).items():
                total[direction] += n
    return total


def _scheme(pattern: str, entry: str | Scheme) -> Scheme:
    if isinstance(entry, str) and entry in SCHEMES:
        return SCHEMES[entry]
    if not isinstance(entry, str | type) and isinstance(entry, Scheme):
        return entry
    near = _suggest(entry, SCHEMES) if isinstance(entry, str) else ""
    raise RefusedError(
        f"the plan gives {pattern!r} the scheme {entry!r}, which does not exist. {near}There are: "
        f"{', '.join(SCHEMES)}; an instance of a class of your own will do, too."
    )


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)  # assign has seen to it
    return layer


def _parallel_layers(model: nn.Module) -> dict[str, TensorParallelLinear]:
    """Each cut parameter's name, with the layer it belongs to."""
    return {
        f"{prefix}.{name}" if prefix else name: layer
        for prefix, layer in model.named_modules()
        if isinstance(layer, TensorParallelLinear)
        for name, _ in layer.named_parameters()
    }


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _linear_patterns(model: nn.Module) -> list[str]:
    """The names of the linear layers, their numbers replaced by ``*``, each once."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return list(dict.fromkeys(map(_starred, names)))


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _suggest(word: str, known: Mapping[str, object] | list[str]) -> str:
    near = get_close_matches(_starred(word), known, n=2)
    return f"Did you mean {' or '.join(map(repr, near))}? " if near else ""


def _check_is_linear(model: nn.Module, name: str, pattern: str) -> None:
    module = model.get_submodule(name)
    if isinstance(module, TensorParallelLinear):
        raise RefusedError(
            f"the plan's {pattern!r} matches {name!r}, which is cut already "
            f"({type(module.scheme).__name__}); parallelize a serial model, and once."
        )
    if not isinstance(module, nn.Linear):
        inside = _linear_patterns(module)
        hint = f"Inside it are: {', '.join(f'{pattern}.{layer}' for layer in inside)}." if inside else ""
        raise RefusedError(
            f"the plan's {pattern!r} matches {name!r}, which is of type {type(module).__name__}; "
            f"a scheme takes the place of an nn.Linear. {hint}".rstrip()
        )


def _check_axes(schemes: Mapping[str, Scheme], sizes: Mapping[str, int]) -> None:
    for name, scheme in schemes.items():
        missing = [axis for axis in scheme.axes if axis not in sizes]
        if missing:
            whole = {**sizes, **dict.fromkeys(missing, 1)}
            cut = {axis: n for axis, n in whole.items() if axis in scheme.axes}
            cut[missing[0]] = prod(sizes.values())
            raise RefusedError(
                f"the plan cuts {name} over the axis {missing[0]!r} ({type(scheme).__name__}), which "
                f"the mesh does not have: its axes are {_sizes(sizes)}. Try Mesh({_sizes(cut)}), "
                f"or Mesh({_sizes(whole)}), where the layer stays whole."
            )


STREAM = Layout("B D")  # the residual stream, and whatever else passes between layers: whole on every rank


def _check_flow(model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
    """Refuse a layer that needs its input as nobody leaves it, or leaves its output as nobody needs it.

    Inside a branch a layer feeds the next one. A branch begins and ends in the stream, and so does each layer
    that is in no branch. Of a model that declares no branches nothing is known, and nothing is refused.
    """
    chains = [
        [f"{name}.{layer}".lstrip(".") for layer in type(module).branch]
        for name, module in model.named_modules()
        if hasattr(type(module), "branch")
    ]
    if not chains:
        return
    inside = {layer for chain in chains for layer in chain}
    for chain in [*chains, *([layer] for layer in schemes if layer not in inside)]:
        giver, lies = "", STREAM
        for layer in chain:
            scheme = _scheme_of(model, layer, schemes)
            takes, leaves = (scheme.X, scheme.Y) if scheme else (STREAM, Layout("B F"))
            if not _alike(lies, takes):
                raise RefusedError(_unlike(giver, lies, layer, takes, layer in inside))
            giver, lies = layer, leaves
        if not _alike(lies, STREAM):
            raise RefusedError(_unlike(giver, lies, "", STREAM, giver in inside))


def _unlike(giver: str, lies: Layout, taker: str, takes: Layout, in_branch: bool) -> str:
    if giver and taker:
        return (
            f"the plan makes {giver} leave its output as {lies!r}, but {taker} takes its input as "
            f"{takes!r}. Plan both: in 1D a 'column' layer feeds a 'row' layer."
        )
    if taker:
        remedy = "begin the branch with a 'column' layer" if in_branch else f"leave {taker} out of the plan"
        return f'{taker} takes its input as "{takes}", but what comes before leaves it whole: {remedy}.'
    remedy = "end the branch with a 'row' layer" if in_branch else f"leave {giver} out of the plan"
    if giver == "head":
        remedy = f"a vocabulary-parallel loss is not here yet; {remedy}"
    return f'{giver} leaves its output as "{lies}", but what follows takes it whole: {remedy}.'


def _alike(one: Layout, other: Layout) -> bool:
    """Whether two layouts cut alike, whatever their dims are called."""
    return (one.cuts, one.partial) == (other.cuts, other.partial)


def _check_heads(model: nn.Module, schemes: Mapping[str, Scheme], sizes: Mapping[str, int]) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, Attention) or not isinstance(module.qkv, nn.Linear):
            continue
        scheme = _scheme_of(model, f"{name}.qkv".lstrip("."), schemes)
        axes = scheme.Y.dim("F") if scheme else ()
        n_heads, n_ranks = module.qkv.out_features // (3 * module.K), prod(sizes[axis] for axis in axes)
        if n_heads % n_ranks:
            *legal, last = [str(n) for n in range(1, n_heads + 1) if n_heads % n == 0]
            degrees = f"{', '.join(legal)} or {last}" if legal else last
            raise RefusedError(
                f"{name or 'attention'}: {n_heads} heads cannot be shared out to {n_ranks} ranks, "
                f"since a head stays whole: try {' x '.join(axes)}={degrees}"
            )


def _scheme_of(model: nn.Module, name: str, schemes: Mapping[str, Scheme]) -> Scheme | None:
    layer = model.get_submodule(name)  # which may be parallel already
    return layer.scheme if isinstance(layer, TensorParallelLinear) else schemes.get(name)


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())
