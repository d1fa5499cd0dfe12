"""How each rank stores what the serial model has: its parameters, and whatever is shaped like them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from lessons_lib.data_parallel import global_norm as norm_over_ranks
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel import (
    ParallelLayerNorm,
    ParallelPositionEmbedding,
    TensorParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from lessons_lib.tensor_parallel.linear import parameter_layouts
from lessons_lib.tensor_parallel.vocabulary import position_layout


class Stored(NamedTuple):
    """How a rank stores a parameter."""

    layout: Layout  # of the tensor as it is stored
    turned: bool = False  # whether that is the transpose of the serial model's
    n_padding: int = 0  # rows of no word that follow those of the serial model

    def serial_layout(self) -> Layout:
        """The layout with dims in the serial model's order."""
        if not self.turned:
            return self.layout
        return Layout.of(dict(zip(self.layout.dims[::-1], self.layout.cuts[::-1], strict=True)))


def stored(model: nn.Module) -> dict[str, Stored]:
    """Say of each parameter of ``model``, serial or a rank's part, how it is stored.

    >>> stored(nn.Linear(3, 2))
    {'weight': Stored(layout=Layout("dim0 dim1"), turned=False, n_padding=0),
     'bias': Stored(layout=Layout("dim0"), turned=False, n_padding=0)}
    """
    found: dict[str, Stored] = {}
    for name, parameter in model.named_parameters():
        prefix, _, kind = name.rpartition(".")
        module = model.get_submodule(prefix)
        if isinstance(module, TensorParallelLinear):
            found[name] = Stored(parameter_layouts(module.scheme)[kind], turned=kind == "weight")
        elif isinstance(module, ParallelLayerNorm):
            found[name] = Stored(module.layout.last())
        elif isinstance(module, ParallelPositionEmbedding):
            found[name] = Stored(position_layout(module.stream))
        elif isinstance(module, VocabParallelEmbedding | VocabParallelHead):
            found[name] = Stored(module.vocabulary.table, n_padding=module.V_padded - module.V)
        else:
            found[name] = Stored(whole(parameter))
    return found


def whole(tensor: Tensor) -> Layout:
    """The layout of a tensor that every rank holds a copy of.

    >>> import torch
    >>> whole(torch.zeros(2, 3))
    Layout("dim0 dim1")
    """
    return Layout(" ".join(f"dim{at}" for at in range(tensor.ndim)))


def shard_state(model: nn.Module, state: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Cut tensors that are shaped like the serial model's parameters into this rank's blocks of them.

    ``state`` maps names of parameters to tensors: the parameters themselves, gradients, an optimizer's
    moments. No communication.
    """
    how = stored(model)
    return {name: _shard(tensor.detach(), how[name], mesh) for name, tensor in state.items()}


def _shard(tensor: Tensor, how: Stored, mesh: Mesh) -> Tensor:
    tensor = tensor.T if how.turned else tensor
    if how.n_padding:
        tensor = functional.pad(tensor, (0, 0, 0, how.n_padding))
    return how.layout.shard(tensor, mesh).contiguous()


def unshard_state(model: nn.Module, state: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Gather, on every rank, the serial form of tensors shaped like this rank's parameters of ``model``.

    For what must not depend on the number of ranks: a checkpoint that any mesh can open, a comparison with
    the serial model. The inverse of :func:`shard_state`. Tensors that are whole on every rank are copied, not
    compared: each rank returns its own.
    """
    how = stored(model)
    return {name: _unshard(tensor.detach(), how[name], mesh) for name, tensor in state.items()}


def _unshard(block: Tensor, how: Stored, mesh: Mesh) -> Tensor:
    tensor = how.layout.unshard(block, mesh)
    tensor = tensor.T if how.turned else tensor
    return tensor[: len(tensor) - how.n_padding].contiguous()


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
    >>> from lessons_lib.plan import parallelize
    >>> def step():
    ...     model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6))
    ...     return n_copies(parallelize(model, {"1": "column"}, Mesh(tp=2)), {"tp": 2})
    >>> run(step, ranks=2).values[0]
    {'0.weight': 2, '0.bias': 2, '1.weight': 1, '1.bias': 1}
    """
    return {name: how.layout.n_copies(sizes) for name, how in stored(model).items()}


def global_norm(model: nn.Module, mesh: Mesh) -> float:
    """The norm of the serial model's gradients, on every rank, from the parts that ranks have of them.

    What is cut counts once, what is copied counts once, and so does a parameter that has two names.
    Traffic: an all-reduce of one element over each axis of the mesh.
    """
    gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return norm_over_ranks(gradients, [mesh[axis] for axis in mesh.sizes], n_copies(model, mesh.sizes))
