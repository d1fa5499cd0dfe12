"""A tensor-parallel scheme beside the serial layer it computes: numbers, bytes and shapes, on every rank.

``assert_is_the_serial_layer`` knows no scheme: it derives everything from the three layouts. A new scheme
adds itself to ``SCHEMES`` and its meshes to ``MESHES``. What the literature says of shapes and traffic is
said a second time here, in ``BY_HAND``.
"""

from __future__ import annotations

import torch
from torch import nn

from lessons_lib import Mesh, region, run
from lessons_lib.layout import coordinates
from lessons_lib.tensor_parallel import TensorParallelLinear
from lessons_lib.timeline import ring_traffic

FLOAT64_BYTES = 8
MESHES = {
    ("tp",): [{"tp": p} for p in (1, 2, 3, 4)],
    ("row", "col"): [{"row": q, "col": q} for q in (1, 2, 3)],
    ("depth", "row", "col"): [
        {"depth": d, "row": q, "col": q} for q, d in ((1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2))
    ],
    ("i", "j", "k"): [
        {"i": i, "j": j, "k": k} for i, j, k in ((1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 2, 3), (2, 3, 2))
    ],
}

# Sizes that all differ, and that every mesh above divides.
B, D, F = 72, 36, 24

# What the literature says, in other words than the library's: local shapes and elements sent per rank.
BY_HAND = {
    "column": lambda B, D, F, p: {
        "x": (B, D),
        "w": (D, F // p),
        "y": (B, F // p),
        "forward": 0,
        "backward": 2 * (p - 1) * B * D // p,
    },
    "row": lambda B, D, F, p: {
        "x": (B, D // p),
        "w": (D // p, F),
        "y": (B, F),
        "forward": 2 * (p - 1) * B * F // p,
        "backward": 0,
    },
    "2d": lambda B, D, F, q, _: {
        "x": (B // q, D // q),
        "w": (D // q, F // q),
        "y": (B // q, F // q),
        "forward": (q - 1) * (B * D + D * F) // q**2,
        "backward": 2 * (q - 1) * (B * D + D * F) // q**2,
    },
    "2.5d": lambda B, D, F, d, q, _: {
        "x": (B // (d * q), D // q),
        "w": (D // q, F // q),
        "y": (B // (d * q), F // q),
        "forward": (q - 1) * (B * D // d + D * F) // q**2,
        "backward": 2 * (q - 1) * (B * D // d + D * F) // q**2 + 2 * (d - 1) * D * F // q**2 // d,
    },
    "3d": lambda B, D, F, i, j, k: {
        "x": (B // (i * j), D // k),
        "w": (D // (k * i), F // j),
        "y": (B // (i * k), F // j),
        "forward": ((j - 1) * B * D + (i - 1) * D * F + (k - 1) * B * F) // (i * j * k),
        "backward": (2 * (j - 1) * B * D + 2 * (i - 1) * D * F + (k - 1) * B * F) // (i * j * k),
    },
    "3d kept": lambda B, D, F, i, j, k: {
        "x": (B // (i * j), D // k),
        "w": (D // (k * i), F // j),
        "y": (B // (i * k), F // j),
        "forward": ((j - 1) * B * D + (i - 1) * D * F + (k - 1) * B * F) // (i * j * k),
        "backward": ((j - 1) * B * D + (i - 1) * D * F + (k - 1) * B * F) // (i * j * k),
    },
}


def relative_error(found, expected):
    assert found.shape == expected.shape, f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    return ((found - expected).norm() / expected.norm()).item()


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def serial_layer(D=D, F=F):
    layer = nn.Linear(D, F, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(random(F, D, seed=1))
        layer.bias.copy_(random(F, seed=2))
    return layer


def step_on_this_rank(make, scheme, sizes, layer, X, dY):
    """One forward and one backward on this rank; ``make``, a class or a function, builds its part of it."""
    mesh = Mesh(**sizes)
    parallel = getattr(make, "from_linear", make)(layer, scheme, mesh)
    x = scheme.X.shard(X, mesh).requires_grad_()
    with region("forward"):
        y = parallel(x)
    with region("backward"):
        y.backward(scheme.Y.shard(dY, mesh))
    found = {"Y": y.detach(), "dX": x.grad}
    return found | {f"d{name}": parameter.grad for name, parameter in parallel.named_parameters()}


def assert_is_the_serial_layer(
    scheme, sizes, make=TensorParallelLinear, by_hand=None, B=B, D=D, F=F, transport="threads"
):
    """On every rank, the output and all gradients are the serial layer's; the bytes are the formula's."""
    layer, X, dY = serial_layer(D, F), random(B, D, seed=3).requires_grad_(), random(B, F, seed=4)
    layer(X).backward(dY)
    bias_layout = scheme.Y.last()
    expected = {
        "Y": (scheme.Y, layer(X).detach()),
        "dX": (scheme.X, X.grad),
        "dweight": (scheme.W, layer.weight.grad.T),
        "dbias": (bias_layout, layer.bias.grad),
    }
    X = X.detach()
    places = coordinates(sizes)
    result = run(step_on_this_rank, make, scheme, sizes, layer, X, dY, ranks=len(places), transport=transport)

    for rank, (coordinate, found) in enumerate(zip(places, result.values, strict=True)):
        assert found.keys() == expected.keys()
        for name, (layout, whole) in expected.items():
            error = relative_error(found[name], layout.cut(whole, sizes, coordinate))
            assert error < 1e-10, f"{name} on rank {rank} is wrong by {error:.0e}"

    (f,) = bias_layout.local_shape((F,), sizes)
    for_bias = {
        "forward": 0,
        "backward": sum(ring_traffic("all_reduce", f, sizes[axis]) for axis in scheme.Y.dim("B")),
    }
    traffic = scheme.traffic(B, D, F, sizes)
    for direction in ("forward", "backward"):
        counted = sum(result.trace.bytes_sent(rank, direction) for rank in range(len(places)))
        formula = FLOAT64_BYTES * (traffic[direction] + for_bias[direction]) * len(places)
        assert counted == formula, f"{direction} traffic is not the formula's"
    if by_hand:
        hand = by_hand(B, D, F, *sizes.values())
        shapes = {"x": found["dX"].shape, "w": found["dweight"].shape, "y": found["Y"].shape}
        for name, shape in shapes.items():
            assert tuple(shape) == hand[name], f"{name} is not sharded as it should be"
        for direction in ("forward", "backward"):
            counted = sum(result.trace.bytes_sent(rank, direction) for rank in range(len(places)))
            published = FLOAT64_BYTES * (hand[direction] + for_bias[direction]) * len(places)
            assert counted == published, f"{direction} traffic is not as published"
