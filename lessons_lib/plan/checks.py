"""What of a plan is refused: before any communication, the same on every rank, with what would do."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod

from torch import nn

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.models.gpt import Attention
from lessons_lib.plan.plans import GPTPlan, Plan
from lessons_lib.tensor_parallel import SCHEMES, Scheme, TensorParallelLinear
from lessons_lib.tensor_parallel.linear import check_sizes

STREAM = Layout("B S D")  # the residual stream, and whatever else passes between layers, where all is whole


def check(
    model: nn.Module,
    plan: Plan | GPTPlan,
    sizes: Mapping[str, int],
    batch: tuple[int, int] | None = None,
) -> dict[str, Scheme]:
    """Refuse what ``parallelize`` would refuse on a mesh of ``sizes``; return each linear layer's scheme.

    Needs no ranks and, with a model on the meta device, no memory. With a ``batch`` of B sequences of S
    tokens it refuses, too, what the ranks cannot share of that.

    >>> check(nn.Sequential(nn.Linear(10, 6)), {"0": "row"}, {"tp": 4})
    Traceback (most recent call last):
    ...
    lessons_lib.errors.RefusedError: 0: Layout("D@tp") on a mesh of tp=4: dim D of size 10 \
cannot be cut evenly over tp=4, so into 4 blocks. Nearest sizes that can: 8, 12. \
Legal degrees for 10: 1, 2, 5, 10.
    """
    layers, stream = (plan.layers, plan.stream) if isinstance(plan, GPTPlan) else (plan, STREAM)
    schemes = assign(model, layers)
    _check_axes(schemes, sizes)
    _check_flow(model, schemes, stream)
    _check_heads(model, schemes, sizes)
    for name, scheme in schemes.items():
        layer = linear(model, name)
        try:
            check_sizes(scheme, layer.in_features, layer.out_features, sizes)
        except RefusedError as refusal:
            raise RefusedError(f"{name}: {refusal}") from None
    if isinstance(plan, GPTPlan):
        plan.vocabulary.check(sizes)
    if batch is not None:
        rows = [(layout, along) for scheme in schemes.values() for layout, along in _ends(scheme)]
        if isinstance(plan, GPTPlan):
            rows += [_as_rows(stream), (plan.vocabulary.logits, "B")]
        for layout, along in dict.fromkeys(rows):
            cuts = {along: layout.cuts[0]}
            Layout.of({dim: cuts.get(dim, ()) for dim in ("B", "S")}).local_shape(batch, sizes)
    return schemes


def assign(model: nn.Module, plan: Plan) -> dict[str, Scheme]:
    """Return the scheme of every module that ``plan`` names, in the model's order. Needs no ranks.

    >>> list(assign(nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2)), {"0": "column", "2": "row"}))
    ['0', '2']
    """
    claimed_by: dict[str, str] = {}
    scheme_of = {pattern: _scheme(pattern, entry) for pattern, entry in plan.items()}
    for pattern in plan:
        matches = named_as(model, pattern)
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


def named_as(model: nn.Module, pattern: str) -> list[str]:
    """The modules whose names fit ``pattern``."""
    wanted = pattern.split(".")
    found = ((name, name.split(".")) for name, _ in model.named_modules())
    return [
        name for name, parts in found if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
    ]


def linear(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer of that name, as :func:`assign` has seen it."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


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


# ---- what passes from layer to layer: a layout of [rows, D], and the dim along which its rows are cut

Rows = tuple[Layout, str]


def _ends(scheme: Scheme) -> tuple[Rows, Rows]:
    """What a scheme takes and what it leaves."""
    along = getattr(scheme, "rows", "B")
    return _cut_along(scheme.X, along), _cut_along(scheme.Y, along)


def _cut_along(layout: Layout, along: str) -> Rows:
    """Rows that nobody cuts are cut along no dim in particular."""
    return layout, along if layout.cuts[0] else "B"


def _as_rows(stream: Layout) -> Rows:
    """A stream [B, S, D] as rows."""
    along = "S" if stream.dim("S") else "B"
    return _cut_along(Layout.of({"B": stream.dim(along), "D": stream.dim("D")}), along)


def _check_flow(model: nn.Module, schemes: Mapping[str, Scheme], stream: Layout) -> None:
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
        giver, lies = "", _as_rows(stream)
        for layer in chain:
            scheme = _scheme_of(model, layer, schemes)
            takes, leaves = _ends(scheme) if scheme else ((Layout("B D"), "B"), (Layout("B F"), "B"))
            if not _alike(lies, takes):
                raise RefusedError(_unlike(giver, lies, layer, takes, layer in inside, stream))
            giver, lies = layer, leaves
        if not _alike(lies, _as_rows(stream)):
            raise RefusedError(_unlike(giver, lies, "", _as_rows(stream), giver in inside, stream))


def _unlike(giver: str, lies: Rows, taker: str, takes: Rows, in_branch: bool, stream: Layout) -> str:
    if giver and taker:
        return (
            f"the plan makes {giver} leave its output as {_text(lies)}, but {taker} takes its input as "
            f"{_text(takes)}. Plan both: in 1D a 'column' layer feeds a 'row' layer."
        )
    if stream.axes:
        end, wrong = ("begin", takes) if taker else ("end", lies)
        return (
            f"{taker or giver} makes its branch {end} as {_text(wrong)}, and the plan's stream lies as "
            f"{stream!r}: take the layers and the vocabulary of one scheme, as PLANS has them."
        )
    if taker:
        remedy = "begin the branch with a 'column' layer" if in_branch else f"leave {taker} out of the plan"
        return f'{taker} takes its input as "{takes[0]}", but what comes before leaves it whole: {remedy}.'
    remedy = "end the branch with a 'row' layer" if in_branch else f"leave {giver} out of the plan"
    if giver == "head":
        remedy += ", or take one of PLANS, which cut the loss, too"
    return f'{giver} leaves its output as "{lies[0]}", but what follows takes it whole: {remedy}.'


def _text(rows: Rows) -> str:
    layout, along = rows
    return repr(layout) + (", its rows counted along S" if along == "S" else "")


def _alike(one: Rows, other: Rows) -> bool:
    """Whether two layouts cut alike, whatever their dims are called."""
    return (one[0].cuts, one[0].partial, one[1]) == (other[0].cuts, other[0].partial, other[1])


def _check_heads(model: nn.Module, schemes: Mapping[str, Scheme], sizes: Mapping[str, int]) -> None:
    """A head stays whole, and so does a group of query heads with their one head of keys and values."""
    for name, module in model.named_modules():
        if not isinstance(module, Attention) or not isinstance(module.qkv, nn.Linear):
            continue
        scheme = _scheme_of(model, f"{name}.qkv".lstrip("."), schemes)
        axes = scheme.Y.dim("F") if scheme else ()
        n_groups = module.qkv.out_features // ((module.n_sharing + 2) * module.K)
        n_ranks = prod(sizes[axis] for axis in axes)
        if n_groups % n_ranks:
            *legal, last = [str(n) for n in range(1, n_groups + 1) if n_groups % n == 0]
            degrees = f"{', '.join(legal)} or {last}" if legal else last
            what = f"{n_groups} heads"
            if module.n_sharing > 1:
                what += f" of keys and values, for {n_groups * module.n_sharing} query heads,"
            raise RefusedError(
                f"{name or 'attention'}: {what} cannot be shared out to {n_ranks} ranks, "
                f"since a head stays whole: try {' x '.join(axes)}={degrees}"
            )


def _scheme_of(model: nn.Module, name: str, schemes: Mapping[str, Scheme]) -> Scheme | None:
    layer = model.get_submodule(name)  # which may be parallel already
    return layer.scheme if isinstance(layer, TensorParallelLinear) else schemes.get(name)


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())
