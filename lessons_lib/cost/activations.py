"""Activations that a layer keeps for its backward: by published formulas, and as the GPT keeps them.

Published: Korthikanti et al. 2022, Table 2, in bytes over ``S B D``: 16-bit activations, dropout in three
places (a byte per element of its masks), attention by kept scores.

As kept: term by term in elements, by name, for the GPT of this course: no dropout, a fused kernel or kept
scores, any dtype. It is what a meter finds between forward and backward, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from lessons_lib.errors import RefusedError
from lessons_lib.models.gpt import GPTConfig
from lessons_lib.models.recompute import MADE_AGAIN

PUBLISHED: Mapping[str, Callable[[Fraction, int], Fraction]] = {
    "none": lambda scores, t: 34 + scores,
    "tp": lambda scores, t: 10 + Fraction(24, t) + scores / t,
    "tp + sp": lambda scores, t: (34 + scores) / t,
    "tp, selective": lambda scores, t: 10 + Fraction(24, t),
    "tp + sp, selective": lambda scores, t: Fraction(34, t),
    "full": lambda scores, t: Fraction(2),
}
"""Bytes over S B D; ``scores`` is 5 H S / D, ``t`` the tensor-parallel degree."""


STREAMS: Mapping[str, Callable[[int], tuple[int, int]]] = {
    "whole": lambda tp: (1, 1),
    "cut": lambda tp: (tp, tp),
    "cut, gathered kept": lambda tp: (tp, 1),
}
"""Into how many parts what norms take, and what column layers keep of what norms give, is cut over ranks:
1D; Megatron's sequence parallelism; and that where the gathered inputs of column layers are kept."""


def published(way: str, S: int, D: int, H: int, tp: int = 1) -> Fraction:
    """Bytes of a layer's activations over S B D, as Korthikanti et al. print them.

    >>> [float(published(way, S=2048, D=12288, H=96, tp=8)) for way in PUBLISHED]      # GPT-3
    [114.0, 23.0, 14.25, 13.0, 4.25, 2.0]
    """
    if way not in PUBLISHED:
        raise RefusedError(f"way={way!r} is unknown; known: {', '.join(map(repr, PUBLISHED))}.")
    return PUBLISHED[way](Fraction(5 * H * S, D), tp)


def kept_by_layer(
    config: GPTConfig,
    B: int,
    tp: int = 1,
    attention: str = "fused",
    recompute: str = "none",
    stream: str = "whole",
) -> dict[str, int]:
    """Elements that a block of the GPT keeps for ``B`` sequences on a rank, by name.

    >>> kept_by_layer(GPTConfig(H=4, D=16, S=8), B=3)
    {'inputs of norms': 768, 'outputs of norms': 768, 'statistics of norms': 96, 'q, k, v': 1152,
     'output of attention': 384, 'inside attention': 96, 'around the activation': 3072}
    >>> kept_by_layer(GPTConfig(H=4, D=16, S=8), B=3, recompute="full")
    {'input of the block': 384}

    Without ``inside attention`` and the statistics these are 16 S B D elements, the 32 of the published 34
    bytes: 2 are dropout's masks. Between a column and a row layer everything is cut over ``tp``; what norms
    take and give is whole on each rank, or as :data:`STREAMS` says. Inside attention a fused kernel keeps one
    number per head and position; kept scores are S for each, in place of the published 5/2 S with their
    dropout.

    >>> whole, cut = (sum(kept_by_layer(GPTConfig(H=4, D=16, S=8), 3, 4, stream=way).values())
    ...               for way in ("whole", "cut"))
    >>> whole, cut
    (2808, 1648)
    """
    if attention not in ("fused", "scores") or recompute not in MADE_AGAIN or stream not in STREAMS:
        raise RefusedError(
            f"attention={attention!r}, recompute={recompute!r}, stream={stream!r}: known are 'fused' and "
            f"'scores', {', '.join(map(repr, MADE_AGAIN))}, and {', '.join(map(repr, STREAMS))}."
        )
    whole, S = B * config.S * config.D, config.S
    taken, given = STREAMS[stream](tp)
    if recompute == "full":
        return {"input of the block": whole // taken}
    inside = {"fused": B * S * config.H, "scores": B * S * config.H * S}[attention]
    terms = {
        "inputs of norms": 2 * whole // taken,
        "outputs of norms": 2 * whole // given,
        "statistics of norms": 2 * 2 * B * S // taken,
        "q, k, v": 3 * whole // tp,
        "output of attention": whole // tp,
        "inside attention": 0 if recompute == "selective" else inside // tp,
        "around the activation": 2 * 4 * whole // tp,
    }
    if stream != "whole":
        terms["weights and biases of norms, copied"] = 2 * 2 * config.D
    return terms


def kept(
    config: GPTConfig,
    B: int,
    itemsize: int,
    tp: int = 1,
    attention: str = "fused",
    recompute: str = "none",
) -> dict[str, int]:
    """Bytes that the GPT keeps between forward and backward of ``B`` sequences on a rank, by name.

    >>> sum(kept(GPTConfig(L=2, H=4, D=16, S=8), B=3, itemsize=4).values())
    78600

    On top of the layers: the last norm and the head, whose logarithms of probabilities, V for each token, are
    often the largest tensor of all; and small change (positions, which are whole numbers of 8 bytes, the
    loss, masks of kept scores, a byte for each pair of positions and layer).
    """
    n_tokens, stream = B * config.S, B * config.S * config.D
    layer = kept_by_layer(config, B, tp, attention, recompute)
    masks = config.S**2 if attention == "scores" and recompute == "none" else 0
    return {
        "layers": config.L * sum(layer.values()) * itemsize,
        "last norm": (2 * stream + 2 * n_tokens) * itemsize,
        "log-probabilities": n_tokens * config.V * itemsize,
        "small change": 8 * config.S + 2 * itemsize + config.L * masks,
    }
