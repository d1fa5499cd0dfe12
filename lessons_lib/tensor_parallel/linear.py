"""The wrapper that makes any tensor-parallel scheme an autograd operation and a module.

A scheme says how blocks of Y, dX and dW are computed; here, and only here, it meets autograd, ``nn.Module``
and the bias. A new scheme needs nothing from this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh, copy_sum
from lessons_lib.tensor_parallel.scheme import Scheme, check_grid


def tensor_parallel_linear(
    x: Float[Tensor, "b_x d_x"], w: Float[Tensor, "d_w f"], scheme: Scheme, mesh: Mesh
) -> Float[Tensor, "b_y f"]:
    """Compute this rank's block of Y = X W, differentiably.

    Layouts: x, w and the result lie as ``scheme.X``, ``scheme.W`` and ``scheme.Y`` say.
    Traffic: ``scheme.traffic``.
    Memory kept for backward: x and w, this rank's blocks and nothing that was gathered from others; a scheme
    that keeps more is put together from differentiable parts, and brings its own ``differentiable``.
    Raises RefusedError, before any communication, where the mesh has not the grid that the scheme needs.
    """
    check_grid(scheme, mesh.sizes)
    if hasattr(scheme, "differentiable"):
        return scheme.differentiable(x, w, mesh)
    return _Linear.apply(x, w, scheme, mesh)


class _Linear(torch.autograd.Function):
    """Both gradients come from one call of ``scheme.backward``: they may share what they gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scheme: Scheme, mesh: Mesh) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.scheme, ctx.mesh = scheme, mesh
        return scheme.forward(x.detach(), w.detach(), mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, w = ctx.saved_tensors
        dx, dw = ctx.scheme.backward(dy, x, w, ctx.mesh)
        return dx, dw, None, None


class TensorParallelLinear(nn.Module):
    """An ``nn.Linear`` of which every rank holds the blocks that a scheme gives it.

    >>> from lessons_lib import run
    >>> from lessons_lib.tensor_parallel import SCHEMES
    >>> def step():
    ...     return str(TensorParallelLinear.from_linear(nn.Linear(4, 6), SCHEMES["column"], Mesh(tp=2)))
    >>> run(step, ranks=2).values[0]
    'TensorParallelLinear(Column, D=4, F=6, weight D F@tp: 4 x 3 here, bias F@tp: 3 here)'

    Parameters have the names of ``nn.Linear``'s: ``weight``, a block of W [D, F] (``nn.Linear`` stores the
    transpose), and ``bias``, a block of a vector that lies as the last dim of Y does.

    The bias is added once, after the scheme's forward, when every sum over ranks is complete. Its gradient is
    the sum of dY over all rows of B: a scheme that cuts B leaves every rank with a sum over its own rows, and
    ``copy_sum`` adds these up.

    Input ``[..., d]``, output ``[..., f]``; the leading dims together are the scheme's B, and of several the
    first is cut; or the second, S of ``[B, S, d]``, by a scheme whose ``rows`` are "S".
    Traffic: the scheme's. Where Y's B is cut (not in 1D), and for each axis of p ranks that cuts it, also one
    all-reduce of the bias gradient, 2 (p-1)/p f elements backward.
    """

    def __init__(
        self, weight: Float[Tensor, "d f"], bias: Float[Tensor, " f"] | None, scheme: Scheme, mesh: Mesh
    ) -> None:
        super().__init__()
        self.scheme, self.mesh = scheme, mesh
        self.D, self.F = scheme.W.global_shape(weight.shape, mesh.sizes)
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def from_linear(cls, layer: nn.Linear, scheme: Scheme, mesh: Mesh) -> TensorParallelLinear:
        """Cut a serial layer, of which every rank has a copy, into the blocks of ``scheme``.

        No communication. Raises RefusedError, in the layouts' words, if the mesh does not divide a size.
        """
        F, D = layer.weight.shape
        check_sizes(scheme, D, F, mesh.sizes)
        blocks = {
            name: shard_parameter(name, parameter, scheme, mesh)
            for name, parameter in layer.named_parameters()
        }
        parallel = cls(blocks["weight"], blocks.get("bias"), scheme, mesh)
        for name, parameter in layer.named_parameters():
            parallel.get_parameter(name).requires_grad_(parameter.requires_grad)
        return parallel

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows_of_y f"]:
        self._check(x)
        x = self._first_is_cut(x)
        y = tensor_parallel_linear(x.reshape(-1, x.shape[-1]), self.weight, self.scheme, self.mesh)
        if self.bias is not None:
            bias: Tensor = self.bias
            for axis in self.scheme.Y.dim("B"):
                bias = copy_sum(bias, self.mesh[axis])
            y = y + bias
        rows = (-1, *x.shape[1:-1]) if x.dim() > 1 else ()  # of 3D's Y another number may lie here
        return self._first_is_cut(y.reshape(*rows, y.shape[-1]))

    def _first_is_cut(self, x: Tensor) -> Tensor:
        """[B, S, D] as [S, B, D], and back, for a scheme that counts its rows sequence first."""
        return x.transpose(0, 1) if x.dim() > 2 and getattr(self.scheme, "rows", "B") == "S" else x

    def _check(self, x: Tensor) -> None:
        layout, mesh = self.scheme.X.last(), self.mesh
        (d,) = layout.local_shape((self.D,), mesh.sizes)
        if x.shape[-1] != d:
            place = ", ".join(f"{axis}={at}" for axis, at in mesh.coordinate.items())
            raise RefusedError(
                f"{type(self.scheme).__name__} layer with D={self.D}, F={self.F}: its input lies as "
                f"{self.scheme.X!r}, so {d} of D={self.D} columns on each rank of {mesh!r}; "
                f"rank {mesh.rank} (at {place}) was given shape {tuple(x.shape)}. "
                f"Does the layer before it leave its Y as {layout!r}?"
            )
        if x.dim() > 1:
            B = self._first_is_cut(x).shape[0] * self.scheme.X.n_blocks(mesh.sizes)[0]
            self.scheme.Y.local_shape((B, self.F), mesh.sizes)

    def extra_repr(self) -> str:
        blocks = [
            f"{name} {layout}: {' x '.join(map(str, self.get_parameter(name).shape))} here"
            for name, layout in parameter_layouts(self.scheme).items()
            if getattr(self, name) is not None
        ]
        return ", ".join([type(self.scheme).__name__, f"D={self.D}", f"F={self.F}", *blocks])


def check_sizes(scheme: Scheme, D: int, F: int, sizes: Mapping[str, int]) -> None:
    """Refuse, in the layouts' words, a layer of which the ranks of a mesh cannot have equal blocks.

    All but the number of rows B, which a layer learns only with its input.
    """
    check_grid(scheme, sizes)
    scheme.X.last().local_shape((D,), sizes)
    scheme.W.local_shape((D, F), sizes)
    scheme.Y.last().local_shape((F,), sizes)


def parameter_layouts(scheme: Scheme) -> dict[str, Layout]:
    """How the parameters of a layer lie: the weight [D, F] as W, the bias as the last dim of Y.

    >>> from lessons_lib.tensor_parallel import SCHEMES
    >>> parameter_layouts(SCHEMES["column"])
    {'weight': Layout("D F@tp"), 'bias': Layout("F@tp")}
    """
    return {"weight": scheme.W, "bias": scheme.Y.last()}


def shard_parameter(name: str, tensor: Tensor, scheme: Scheme, mesh: Mesh) -> Tensor:
    """Return this rank's block of a tensor shaped like ``nn.Linear``'s parameter ``name``: a copy."""
    whole = tensor.detach().T if name == "weight" else tensor.detach()
    return parameter_layouts(scheme)[name].shard(whole, mesh).contiguous()


def unshard_parameter(name: str, block: Tensor, scheme: Scheme, mesh: Mesh) -> Tensor:
    """Gather, on every rank, the tensor shaped like ``nn.Linear``'s parameter ``name`` from its blocks."""
    whole = parameter_layouts(scheme)[name].unshard(block, mesh)
    return whole.T.contiguous() if name == "weight" else whole
