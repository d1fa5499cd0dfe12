"""The backward pass in two: I, the gradient of the input, and W, the gradients of the weights.

An operation with weights has two products to make on its way back. Only one of them is awaited by others:

    Y = X Wᵀ          forward
    dX = dY W         I: the operation below waits for it, and with it the stage before
    dW = dYᵀ X        W: nobody waits for it; it takes X and dY, and nothing else

Inside ``with PutOff() as later:`` linear layers, layer norms and embeddings make only dX when autograd comes
to them, and leave ``(X, dY)`` behind; ``later.make_weight_gradients()`` makes every dW of them. So I frees
all that the forward pass kept, as any backward pass does, but for X and dY of these operations; W frees
those; and I and W are together as much work as the backward pass in one.

Why not walk torch's own graph twice, as torch.distributed.pipelining does? The second walk needs the nodes of
the first, and a node that is kept keeps everything below it: scores of attention, inputs of activation
functions. What waits for W would be as much as what waits for I.

Weights that are used in any other way (by operations of your own, under autocast, through a function of the
parameter) get their gradients in I, as always: nothing is lost, W only has less to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Tensors = tuple[Tensor, ...]


class Operation(NamedTuple):
    """An operation with weights: what it keeps, and its two products on the way back.

    ``run(x, weights, options)`` gives y and what dX and dW need besides; ``dx`` and ``dw`` take dy, x,
    that, the weights and the options.
    """

    run: Callable[..., tuple[Tensor, Tensors]]
    dx: Callable[..., Tensor | None]
    dw: Callable[..., list[Tensor]]


class PutOff(TorchFunctionMode):
    """Inside, gradients of weights are put off.

    >>> layer, x = torch.nn.Linear(3, 2), torch.ones(5, 3, requires_grad=True)
    >>> with PutOff() as later:
    ...     y = layer(x)
    >>> y.sum().backward()
    >>> x.grad.shape, layer.weight.grad
    (torch.Size([5, 3]), None)
    >>> later.make_weight_gradients()
    >>> layer.weight.grad.shape, layer.bias.grad
    (torch.Size([2, 3]), tensor([5., 5.]))

    Where blocks run again on the way back (recomputation), call :meth:`backward`: they must find what they
    found forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.empty(0, requires_grad=True)
        self.waiting: list[tuple[Operation, Tensor, Tensor, Tensors, Tensors, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _READ.get(func)
        found = read(*args, **(kwargs or {})) if read and torch.is_grad_enabled() else None
        if found is None:
            return func(*args, **(kwargs or {}))
        return _InputFirst.apply(self.trained, self, *found)

    def backward(self, y: GradientEdge, dy: Tensor) -> None:
        """I: go back from ``y``, a place in the graph, with its gradient."""
        with self:
            torch.autograd.backward(y, dy)  # of a tensor, torch would leave the mode first

    def make_weight_gradients(self) -> None:
        """W: add to the weights' ``.grad``, as backward does, and let go of what they were made from."""
        while self.waiting:
            operation, dy, x, kept, weights, options = self.waiting.pop()
            gradients = operation.dw(dy, x, kept, weights, options)
            torch.autograd.backward(weights, gradients)  # the leaves themselves: their hooks run


class _InputFirst(torch.autograd.Function):
    """An operation whose backward makes dX alone, and leaves dW to :class:`PutOff`.

    To autograd the weights are no inputs: it would tell them of a gradient that is not there yet. That there
    is something to train, even where x needs no gradient, the empty ``trained`` says.
    """

    @staticmethod
    def forward(
        ctx: Any,
        trained: Tensor,
        later: PutOff,
        operation: Operation,
        x: Tensor,
        weights: Tensors,
        options: Any,
    ) -> Tensor:
        y, kept = operation.run(x, weights, options)
        ctx.later, ctx.operation, ctx.options = later, operation, options
        ctx.weights, ctx.n_kept = weights, len(kept)  # the parameters themselves, to which W adds
        ctx.save_for_backward(x, *kept, *weights)  # their numbers, which must not have changed until I
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *others = ctx.saved_tensors
        kept, numbers = tuple(others[: ctx.n_kept]), tuple(others[ctx.n_kept :])
        operation, options = ctx.operation, ctx.options
        dx = operation.dx(dy, x, kept, numbers, options) if ctx.needs_input_grad[3] else None
        ctx.later.waiting.append((operation, dy, x.detach(), kept, ctx.weights, options))
        return None, None, None, dx, None, None


# ---- the operations


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


LINEAR = Operation(
    run=lambda x, weights, _: (functional.linear(x, *weights), ()),
    dx=lambda dy, x, kept, weights, _: dy @ weights[0],
    dw=lambda dy, x, kept, weights, _: [_rows(dy).T @ _rows(x), _rows(dy).sum(0)][: len(weights)],
)


def _normalise(x: Tensor, weights: Tensors, options: Any) -> tuple[Tensor, Tensors]:
    shape, eps = options
    y, *kept = torch.native_layer_norm(x, shape, weights[0], weights[1] if len(weights) > 1 else None, eps)
    return y, tuple(kept)


def _norm_backward(
    dy: Tensor, x: Tensor, kept: Tensors, weights: Tensors, options: Any, wanted: tuple[bool, bool, bool]
) -> tuple[Any, ...]:
    bias = weights[1] if len(weights) > 1 else None
    return torch.ops.aten.native_layer_norm_backward(dy, x, options[0], *kept, weights[0], bias, wanted)


NORM = Operation(
    run=_normalise,
    dx=lambda dy, x, kept, weights, options: _norm_backward(
        dy, x, kept, weights, options, (True, False, False)
    )[0],
    dw=lambda dy, x, kept, weights, options: list(
        _norm_backward(dy, x, kept, weights, options, (False, True, len(weights) > 1))[1 : 1 + len(weights)]
    ),
)

EMBEDDING = Operation(
    run=lambda tokens, weights, padding: (functional.embedding(tokens, weights[0], padding), ()),
    dx=lambda *asked: None,
    dw=lambda dy, tokens, kept, weights, padding: [
        torch.ops.aten.embedding_dense_backward(
            dy, tokens, len(weights[0]), -1 if padding is None else padding, False
        )
    ],
)


# ---- their calls, as torch's modules and functions make them; None where one is not put off


def _own(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether the weights are parameters that are trained, used as they are."""
    given = [weight for weight in weights if weight is not None]
    return all(weight.requires_grad and weight.is_leaf for weight in given) and not (
        torch.is_autocast_enabled(x.device.type)
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not _own(input, weight, bias):
        return None
    return LINEAR, input, (weight,) if bias is None else (weight, bias), None


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if weight is None or not _own(input, weight, bias):
        return None
    return NORM, input, (weight,) if bias is None else (weight, bias), (normalized_shape, eps)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse or not _own(input, weight):
        return None
    return EMBEDDING, input, (weight,), padding_idx


_READ: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.layer_norm: _layer_norm,
    functional.embedding: _embedding,
}
