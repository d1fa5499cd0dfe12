"""The exercises of lesson 03: what a model keeps for its backward, and how to keep less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lessons_lib.cost.activations import kept, kept_by_layer
from lessons_lib.grading.exercise import Claim, Deadline, Draw, Exercise, Output, Trial, sizes_text
from lessons_lib.machines import Machine
from lessons_lib.models.gpt import GPTConfig
from lessons_lib.models.recompute import recompute

# ---- the solutions ----


def stored_bytes(config: GPTConfig, B: int, itemsize: int) -> int:
    """Return the bytes that the L blocks of a GPT keep for the backward of ``B`` sequences.

    A number has ``itemsize`` bytes. Every block keeps what the meter of the lesson finds: of attention only
    what a fused kernel keeps, and nothing for dropout.
    """
    stream, n_tokens = B * config.S * config.D, B * config.S
    norms = 2 * (2 * stream + 2 * n_tokens)
    attention = 3 * stream + stream + n_tokens * config.H
    mlp = 2 * B * config.S * config.F
    return config.L * (norms + attention + mlp) * itemsize


def run_again(block: Callable[..., Tensor], x: Tensor, ws: list[Tensor]) -> Tensor:
    """Return ``block(x, *ws)``, of which nothing is kept for backward but ``x`` and ``ws``.

    Backward runs the block once more, and gives ``x`` and all of ``ws`` their gradients.
    """
    y: Tensor = Again.apply(block, x, *ws)
    return y


class Again(torch.autograd.Function):
    """Keeps its inputs, and makes the rest again."""

    @staticmethod
    def forward(ctx: Any, block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(*inputs)
        return block(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.block(*inputs)
        return None, *torch.autograd.grad(y, inputs, dy)


# ---- the trials ----

ONE_RANK = {"dp": 1}
N_CONFIGURATIONS = 30


def _configurations(draw: Draw) -> list[Trial]:
    return [_configuration(draw) for _ in range(N_CONFIGURATIONS)]


def _configuration(draw: Draw) -> Trial:
    H = draw.between(2, 12)
    config = GPTConfig(
        L=draw.between(2, 48), H=H, D=4 * H * draw.between(1, 8), S=8 * draw.between(1, 32), V=256
    )
    B, itemsize = draw.between(1, 4), draw.random.choice((2, 4, 8))
    terms = kept_by_layer(config, B)
    right = kept(config, B, itemsize)["layers"]
    layer = right // config.L

    def without(name: str) -> int:
        return right - config.L * itemsize * terms[name]

    mistakes = {
        "these are the bytes of one block, and there are L": layer,
        "these are numbers, and each has itemsize bytes": right // itemsize,
        "the statistics of norms are missing: a mean and a deviation for each token, of two norms": without(
            "statistics of norms"
        ),
        "what is inside attention is missing: a fused kernel keeps one number per head and token": without(
            "inside attention"
        ),
        "the outputs of norms are missing: the linear layers behind them keep their inputs": without(
            "outputs of norms"
        ),
        "a block keeps what is around GELU twice 4 D wide: its input, and that of the layer behind it": right
        - config.L * itemsize * terms["around the activation"] // 2,
        "scores of S x S are in it: a fused kernel makes them again": right
        + config.L * itemsize * terms["inside attention"] * (config.S - 1),
        "this is the input of every block, which is kept where blocks run again; here they do not": kept(
            config, B, itemsize, recompute="full"
        )["layers"],
        "this is 16 B S D for a block: the small terms are missing": config.L
        * itemsize
        * 16
        * B
        * config.S
        * config.D,
    }
    return Trial(
        function="stored_bytes",
        sizes=ONE_RANK,
        facts=sizes_text({}, L=config.L, H=H, D=config.D, S=config.S, B=B, itemsize=itemsize),
        args=[(config, B, itemsize)],
        outputs=[
            Output(
                "the number of bytes",
                "values",
                [_number(right)],
                mistakes={what: [_number(wrong)] for what, wrong in mistakes.items()},
            )
        ],
    )


def _number(n: int) -> Tensor:
    return torch.tensor(n, dtype=torch.float64)


def layers(x: Tensor, *ws: Tensor) -> Tensor:
    """A block of several layers, all of the same width."""
    for w in ws:
        x = torch.tanh(x @ w)
    return x


def _blocks(draw: Draw) -> list[Trial]:
    """Three sizes, and the last one twice."""
    sizes = [(draw.between(9, 12), draw.between(6, 9), draw.between(12, 16)) for _ in range(3)]
    return [_block(draw, *each) for each in (*sizes, sizes[-1])]


def _block(draw: Draw, n_layers: int, D: int, B: int) -> Trial:
    x, dy = draw.tensor(B, D), draw.tensor(B, D)
    ws = [draw.tensor(D, D) / D**0.5 for _ in range(n_layers)]
    y, gradients = _serial(x, ws, dy)
    _, of_a_sum = _serial(x, ws, torch.ones_like(dy))
    forward_flops = 2 * B * D * D * n_layers
    machine = Machine("a GPU on which this forward takes 1 µs", flops_per_s=1e6 * forward_flops)
    outputs = [Output("y", "forward", [y])]
    for at, gradient in enumerate(gradients):
        outputs.append(
            Output(
                f"dws[{at - 1}]" if at else "dx",
                "dws" if at else "dx",
                [gradient],
                mistakes={"this is the gradient of y.sum(): dy was not looked at": [of_a_sum[at]]},
            )
        )
    return Trial(
        function="run_again",
        sizes=ONE_RANK,
        facts=sizes_text({}, layers=n_layers, B=B, D=D),
        args=[(layers, x.clone().requires_grad_(), [w.clone().requires_grad_() for w in ws])],
        outputs=outputs,
        upstream=[dy],
        spare=4 * B * D - sum(gradient.numel() for gradient in gradients),
        too_much="Does autograd keep what is inside the block?",
        metered=("forward",),
        deadline=Deadline(
            machine,
            4.001e-6,
            "1 µs for a forward, 2 for its backward, and 1 to run the block once more; it ran more often",
        ),
    )


def _serial(x: Tensor, ws: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """y, and the gradients of x and of all weights, by autograd."""
    x, *inside = (tensor.clone().requires_grad_() for tensor in (x, *ws))
    y = layers(x, *inside)
    return y.detach(), torch.autograd.grad(y, (x, *inside), dy)


EXERCISES = (
    Exercise(
        id="03-stored",
        title="Stored bytes",
        objective="Predict to the byte what the blocks of a GPT keep for backward.",
        functions=(stored_bytes,),
        claims=(Claim("values", f"the bytes of {N_CONFIGURATIONS} drawn configurations", 5),),
        trials=_configurations,
        hints=(
            "A layer keeps its input. Go through a block and ask of each step: how wide is its input?",
            "Two norms, each with its input and two numbers per token; qkv, proj, up and down with their "
            "inputs; GELU with its own; attention with q, k, v and one number per head and token. What two "
            "steps share counts once.",
            "Norms: 2 (B S D + 2 B S). Outputs of norms: 2 B S D. q, k, v: 3 B S D. Attention: B S H inside, "
            "and its output B S D. The MLP: 2 B S F. Times L, times itemsize.",
        ),
        shown=(kept_by_layer,),
    ),
    Exercise(
        id="03-again",
        title="Run a block again",
        objective="Keep of a block its inputs only, and run it once more in backward.",
        functions=(run_again,),
        claims=(
            Claim("forward", "y", 1),
            Claim("dx", "dx", 2),
            Claim("dws", "the gradient of every weight", 2),
            Claim("memory", "forward keeps nothing that is inside the block", 3),
            Claim("time", "FLOPs: those of one more forward, and not of two", 2),
        ),
        trials=_blocks,
        hints=(
            "Inside the forward of a torch.autograd.Function autograd keeps nothing: what must be saved by "
            "hand, so that backward can run the block again?",
            "forward(ctx, block, *inputs) saves its inputs. backward(ctx, dy) detaches them, runs the block "
            "under torch.enable_grad(), and takes the gradients of all inputs in one call.",
            "torch.autograd.grad(y, inputs, dy) gives all of them; backward returns None for block, and then "
            "those. run_again returns Again.apply(block, x, *ws).",
        ),
        shown=(recompute,),
    ),
)
