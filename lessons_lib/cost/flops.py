"""Floating point operations of training, by convention: of the model, of the hardware, as they are counted.

* *model*: what the mathematics needs. 6 per weight and token (2 forward, 4 backward), and the products of
  attention. Recomputation does not raise it. The M of MFU.
* *hardware*: with what recomputation does again. The H of HFU.
* *counted*: what :class:`lessons_lib.spmd.recording.FlopMeter` sees the GPT do, to the last operation. A
  fused kernel makes its scores again on the way back, and a block that runs again stops once backward has
  all that it needs.

Weights are those of matrix products: an embedding that is looked up multiplies nothing. Norms, softmax and
activation functions are left out, here and by the counter.
"""

from __future__ import annotations

from fractions import Fraction

from lessons_lib.errors import RefusedError
from lessons_lib.models.gpt import GPTConfig
from lessons_lib.models.recompute import MADE_AGAIN

FORWARD, BACKWARD = 1, 2  # of a product: dX and dW are as much work as Y each
ATTENDED = {"full": Fraction(1), "causal": Fraction(1, 2)}
"""The pairs of positions that are counted: all, as a plain kernel computes them, or those that are seen."""


def model_flops_per_token(n_weights: int, L: int, D: int, S: int, attended: str = "full") -> Fraction:
    """6 N + 12 L D S; with half of the pairs 6 N + 6 L D S.

    >>> int(model_flops_per_token(10**9, L=24, D=2048, S=4096))
    8415919104
    >>> int(model_flops_per_token(10**9, L=24, D=2048, S=4096, attended="causal"))
    7207959552

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return _passes(FORWARD + BACKWARD, n_weights, L, D, S, attended)


def hardware_flops_per_token(n_weights: int, L: int, D: int, S: int, attended: str = "full") -> Fraction:
    """With full recomputation, one forward more: 8 N + 16 L D S.

    >>> int(hardware_flops_per_token(10**9, L=24, D=2048, S=4096))
    11221225472
    """
    return _passes(2 * FORWARD + BACKWARD, n_weights, L, D, S, attended)


def _passes(n_passes: int, n_weights: int, L: int, D: int, S: int, attended: str) -> Fraction:
    scores = 4 * L * D * S * ATTENDED[attended]  # two products of D x S, 2 operations each
    return n_passes * (2 * n_weights + scores)


def weights(config: GPTConfig, tp: int = 1) -> int:
    """Elements of the matrices that a rank of ``tp`` multiplies by; the head is whole on each.

    >>> weights(GPTConfig(L=2, D=16))
    10240
    """
    return config.L * (4 * config.D**2 + 2 * config.D * config.F) // tp + config.D * config.V


def step_flops(
    config: GPTConfig, n_sequences: int, tp: int = 1, attention: str = "fused", recompute: str = "none"
) -> int:
    """The floating point operations of a step of the GPT on one rank, as they are counted.

    >>> step_flops(GPTConfig(L=1, H=2, D=8, S=4), n_sequences=1)
    69376

    Attention does 2 products of D x S forward, and 4 backward from ``"scores"`` that were kept; a
    ``"fused"`` kernel makes the scores once more, which are 5. What recomputation does again: of the core of
    attention both products, or, from scores, one; of a block all but its last, or, where layers are
    tensor-parallel, all: such a layer is one operation, which keeps its input when it is done.
    """
    if attention not in ("fused", "scores") or recompute not in MADE_AGAIN:
        raise RefusedError(
            f"attention={attention!r}, recompute={recompute!r}: known are 'fused' and 'scores', and "
            f"{', '.join(map(repr, MADE_AGAIN))}."
        )
    D, S, F = config.D, config.S, config.F
    n_products = 2 + (5 if attention == "fused" else 4)
    again_products, again_weights = 0, 0
    if recompute == "selective":
        again_products = 2 if attention == "fused" else 1
    if recompute == "full":
        again_products = 2
        again_weights = 4 * D**2 + (2 if tp > 1 else 1) * D * F  # F x D is the last
    n_tokens = n_sequences * S
    attended = config.L * 2 * (n_products + again_products) * D * S // tp
    again = config.L * 2 * again_weights // tp
    return (6 * weights(config, tp) + attended + again) * n_tokens


def hfu_over_mfu(S: int, D: int, L: int, V: int) -> float:
    """Hardware over model utilisation where attention alone is recomputed.

        (1 + S/3D + V/12DL) / (1 + S/6D + V/12DL)

    >>> round(hfu_over_mfu(S=2048, D=6144, L=48, V=51200), 3)                # 22B
    1.052

    Source: Korthikanti et al. 2022, appendix A, equations 7 and 8.
    """
    head = V / (12 * D * L)
    return (1 + S / (3 * D) + head) / (1 + S / (6 * D) + head)
