"""LayerNorm over a cut width is the serial LayerNorm: output, every gradient, every rank, bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.errors import RefusedError
from lessons_lib.layout import coordinates
from lessons_lib.mesh import sum_copy
from lessons_lib.tensor_parallel import SCHEMES, Cube
from lessons_lib.tensor_parallel.layer_norm import ParallelLayerNorm, layer_norm, layer_norm_traffic
from tests.serial_layer import MESHES, random, relative_error

B, D = 36, 18
EVERY = {"column": SCHEMES["column"].X, "row": SCHEMES["row"].X, "2d": SCHEMES["2d"].X}
EVERY |= {"2.5d": SCHEMES["2.5d"].X, "3d": Cube().X, "3d exchanged": Cube().exchanged().X}
AXES = {"column": ("tp",), "row": ("tp",), "2d": ("row", "col"), "2.5d": ("depth", "row", "col")}
CASES = [(name, sizes) for name in EVERY for sizes in MESHES[AXES.get(name, ("i", "j", "k"))]]
CASES = [
    (name, sizes)
    for name, sizes in CASES
    if all(size % n == 0 for size, n in zip((B, D), EVERY[name].n_blocks(sizes), strict=True))
]


def assert_is_the_serial_norm(layout, sizes, norm=layer_norm, offset=0.0):
    X, dY = random(B, D, seed=1) + offset, random(B, D, seed=2)
    serial = nn.LayerNorm(D, dtype=torch.float64)
    with torch.no_grad():
        serial.weight.copy_(random(D, seed=3))
        serial.bias.copy_(random(D, seed=4))
    whole = X.clone().requires_grad_()
    Y = serial(whole)
    Y.backward(dY)

    def step():
        mesh = Mesh(**sizes)
        part = ParallelLayerNorm.from_layer_norm(serial, layout, mesh)
        x = layout.shard(X, mesh).requires_grad_()
        with region("forward"):
            y = norm(x, part.weight, part.bias, layout, mesh, part.eps)
        with region("backward"):
            y.backward(layout.shard(dY, mesh))
        return y.detach(), x.grad, part.weight.grad, part.bias.grad

    places = coordinates(sizes)
    result = run(step, ranks=len(places))
    wholes = (
        ("Y", Y.detach()),
        ("dX", whole.grad),
        ("dweight", serial.weight.grad),
        ("dbias", serial.bias.grad),
    )
    for at, found in zip(places, result.values, strict=True):
        for (name, tensor), block in zip(wholes, found, strict=True):
            expected = (layout if tensor.dim() == 2 else layout.last()).cut(tensor, sizes, at)
            assert relative_error(block, expected) < 1e-10, f"{name} at {at} is wrong"
    traffic = layer_norm_traffic(B, D, layout, sizes)
    for way in ("forward", "backward"):
        counted = sum(result.trace.bytes_sent(rank, way) for rank in range(len(places)))
        assert counted == 8 * traffic[way] * len(places), f"{way} traffic is not the formula's"


@pytest.mark.parametrize("name, sizes", CASES)
def test_every_scheme_s_norm_is_the_serial_one(name, sizes):
    """S64: mean and variance over the full width, gradients summed over rows and depth."""
    assert_is_the_serial_norm(EVERY[name], sizes)


def test_a_mean_far_from_zero_does_not_lose_the_variance():
    """What one all-reduce of the sums of x and x^2 would do: in float32 a variance of 1 is lost."""
    X = random(4, 8, seed=1).float() + 1e4

    def step():
        mesh = Mesh(row=1, col=2)
        layout = Layout("B@row D@col")
        one, zero = torch.ones(4), torch.zeros(4)
        return layer_norm(layout.shard(X, mesh), one, zero, layout, mesh)

    found = torch.cat(run(step, ranks=2).values, 1)
    expected = nn.functional.layer_norm(X.double(), (8,)).float()
    assert relative_error(found, expected) < 1e-2
    naive = (X - X.mean(-1, keepdim=True)) * torch.rsqrt(
        (X.square().mean(-1, keepdim=True) - X.mean(-1, keepdim=True).square()).clamp(min=0) + 1e-5
    )
    assert relative_error(naive, expected) > 0.1


def own_columns(x, weight, bias, layout, mesh, eps):
    return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def one_loss(x, weight, bias, layout, mesh, eps):
    """The backward of the statistics taken for a copy: each rank misses the others' gradient."""
    (_, (axis,)) = layout.cuts
    size = x.shape[-1] * mesh.sizes[axis]
    mean = sum_copy(x.sum(-1, keepdim=True), mesh[axis]) / size
    variance = sum_copy((x - mean).square().sum(-1, keepdim=True), mesh[axis]) / size
    return (x - mean) * torch.rsqrt(variance + eps) * weight + bias


def own_rows(x, weight, bias, layout, mesh, eps):
    """Gradients of weight and bias of this rank's rows only."""
    columns = Layout.of({"B": (), "D": layout.cuts[1]})
    return layer_norm(x, weight, bias, columns, mesh, eps)


def local_width(x, weight, bias, layout, mesh, eps):
    """The sums are over all columns and divided by this rank's."""
    (_, (axis,)) = layout.cuts
    factor = mesh.sizes[axis]
    return layer_norm(x * factor, weight, bias, layout, mesh, eps) / factor


@pytest.mark.parametrize(
    "norm, why",
    [
        (own_columns, "Y at .* is wrong"),
        (one_loss, "dX at .* is wrong"),
        (own_rows, "dweight at .* is wrong"),
        (local_width, "Y at .* is wrong"),
    ],
)
def test_wrong_versions_are_caught(norm, why):
    with pytest.raises(AssertionError, match=why):
        assert_is_the_serial_norm(Layout("B@row D@col"), {"row": 2, "col": 3}, norm)


def test_a_width_that_does_not_divide_is_refused():
    def step():
        ParallelLayerNorm.from_layer_norm(nn.LayerNorm(5), Layout("B@row D@col"), Mesh(row=1, col=2))

    with pytest.raises(RefusedError, match="dim D of size 5 cannot be cut evenly over col=2"):
        run(step, ranks=2)
