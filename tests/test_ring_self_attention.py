"""Ring self-attention against what was published of it: traffic, memory, and a factor that is wrong."""

from __future__ import annotations

import pytest
import torch

from lessons_lib import Mesh, region, run
from lessons_lib.sequence_parallel import (
    ATTENTION_VARIANTS,
    ATTENTIONS,
    shard_tokens,
)
from lessons_lib.sequence_parallel.ring_self_attention import published_memory
from lessons_lib.timeline import ring_traffic
from tests.serial_layer import random, relative_error
from tests.test_ring_attention import DividedByP, full_attention


@pytest.mark.parametrize("P", [2, 3, 4, 8])
def test_published_traffic(P):
    """8 (N-1) B Z (L/N) A with all-reduces, 6 (N-1) with reduce-scatters; 1D's all-reduces are as much."""
    B, S, H, K = 2, 24, 24, 3
    each = B * H * S // P * K
    total = lambda method: sum(method.traffic(B, S, H, K, P).values())
    assert total(ATTENTIONS["rsa"]) == 8 * (P - 1) * each
    assert total(ATTENTION_VARIANTS["rsa scattered"]) == 6 * (P - 1) * each
    assert total(ATTENTIONS["ring"]) == (4 * (P - 1) + 2 * P) * each
    assert total(ATTENTIONS["ulysses"]) * P == 8 * (P - 1) * each
    assert 4 * ring_traffic("all_reduce", B * S * H * K, P) == total(ATTENTIONS["rsa"])


def test_a_ring_sends_more_than_ulysses_unless_keys_have_few_heads():
    """Ulysses sends less, and with more ranks less and less; but few heads of keys travel cheaply."""
    send = lambda name, P, G: sum(ATTENTIONS[name].traffic(1, 64, 32, 16, P, G).values())
    for P in (2, 4, 8):
        assert send("ulysses", P, 32) < send("zigzag", P, 32)
    assert send("ulysses", 2, 2) > send("zigzag", 2, 2)
    assert send("ulysses", 4, 1) > send("zigzag", 4, 1)


# Li et al. 2021, table 4, with 8 pipeline stages: ranks, batch, length; then MB per GPU of tensor parallelism
# (None: out of memory) and of ring self-attention.
TABLE_4 = [
    (1, 64, 512, 8477.28, 8477.53),
    (2, 128, 512, 9520.47, 8478.76),
    (4, 256, 512, 12232.52, 8481.26),
    (8, 512, 512, None, 8490.75),
    (1, 64, 256, 3707.39, 3707.01),
    (2, 64, 512, 4993.43, 4670.64),
    (4, 64, 1024, 8175.93, 6601.88),
    (8, 64, 2048, 14862.09, 10536.38),
]
BERT_BASE = {"H": 12, "K": 64}


def layer(which, N, B, L):
    return sum(published_memory(part, B=B, S=L, P=N, **BERT_BASE)[which] for part in ("mlp", "attention"))


def test_published_memory_has_its_crossovers():
    """T8: the sequence is the better cut where B L > 32 D (MLP) or 16 H K (attention), for any N."""
    H, K, B = 12, 64, 16
    D = H * K
    for N in (2, 4, 8, 64):
        for part, factor in (("mlp", 32), ("attention", 16)):
            at = lambda S, part=part, N=N: published_memory(part, B=B, S=S, H=H, K=K, P=N)
            even = factor * D // B
            assert at(even)["tensor"] == at(even)["sequence"]
            assert at(even - N)["tensor"] < at(even - N)["sequence"]
            assert at(even + N)["tensor"] > at(even + N)["sequence"]


def test_published_memory_follows_table_4():
    """T8: flat where the batch grows with the ranks; with the length it grows, and slower than in 1D."""
    batch, length = TABLE_4[:4], TABLE_4[4:]
    assert len({layer("sequence", N, B, L) for N, B, L, *_ in batch}) == 1
    assert max(mb for *_, mb in batch) / min(mb for *_, mb in batch) < 1.002
    for rows in (batch, length):
        for which, column in (("tensor", 3), ("sequence", 4)):
            printed = [row[column] for row in rows if row[column] is not None]
            assert printed == sorted(printed)
            model = [layer(which, *row[:3]) for row in rows]
            assert model == sorted(model)
        for N, B, L, tensor, sequence in rows:
            if N > 1:
                assert layer("tensor", N, B, L) > layer("sequence", N, B, L)
                assert tensor is None or tensor > sequence


# ---- Colossal-AI's division by the number of ranks ----


def gradients_of_a_residual_block(method, P=4):
    """dX of X + attention(X) on every rank, and the serial one."""
    X, W, dY = random(2, 4, 24, 3, seed=1), random(3, 3, 3, seed=2), random(2, 4, 24, 3, seed=3)
    whole = X.clone().requires_grad_()
    (whole + full_attention(*(whole @ w for w in W), True, None)).backward(dY)

    def step():
        group = Mesh(cp=P)["cp"]
        x, dy = (shard_tokens(x, method.assignment, group, 2) for x in (X, dY))
        x.requires_grad_()
        with region("forward"):
            y = x + method.attend(*(x @ w for w in W), group)
        y.backward(dy)
        return x.grad

    return torch.cat(run(step, ranks=P).values, 2), whole.grad


def test_dividing_by_the_number_of_ranks_is_no_change_of_scale():
    """The residual path is not divided: no factor on the whole gradient makes it right again."""
    found, expected = gradients_of_a_residual_block(ATTENTIONS["rsa"])
    assert relative_error(found, expected) < 1e-12
    found, expected = gradients_of_a_residual_block(DividedByP())
    best = (found * expected).sum() / found.square().sum()
    assert relative_error(found * best, expected) > 0.2


def test_a_check_with_an_absolute_tolerance_sees_nothing():
    """F8: after mean(), no gradient exceeds 1e-2; a tolerance of 1e-2 then passes zeros, and 74 % too."""
    q, k, v = (random(2, 4, 24, 8, seed=seed).requires_grad_() for seed in range(3))
    full_attention(q, k, v, True, None).mean().backward()
    for x in (q, k, v):
        assert x.grad.abs().max() < 1e-2
        for wrong in (torch.zeros_like(x), 0.26 * x.grad, x.grad / 4):
            assert torch.allclose(wrong, x.grad, atol=1e-2)
            assert relative_error(wrong, x.grad) > 0.7
