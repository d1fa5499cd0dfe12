"""Tensor parallelism: every scheme is the serial layer; then 1D, the module, and wrong versions of both."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lessons_lib import Mesh, region, run
from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout, coordinates
from lessons_lib.mesh import copy_sum, sum_copy, sum_sum
from lessons_lib.tensor_parallel import (
    SCHEMES,
    VARIANTS,
    Column,
    Row,
    TensorParallelLinear,
    tensor_parallel_linear,
)
from lessons_lib.tensor_parallel.linear import parameter_layouts
from lessons_lib.timeline import ring_traffic
from tests.serial_layer import (
    BY_HAND,
    FLOAT64_BYTES,
    MESHES,
    B,
    D,
    F,
    assert_is_the_serial_layer,
    random,
    relative_error,
    serial_layer,
)

ALL = SCHEMES | VARIANTS


def small(scheme):
    """A mesh for this scheme with two ranks along every axis."""
    return dict.fromkeys(scheme.axes, 2)


def n_ranks(sizes):
    return len(coordinates(sizes))


CASES = [(name, sizes) for name, scheme in ALL.items() for sizes in MESHES[scheme.axes]]


@pytest.mark.parametrize("name, sizes", CASES)
def test_a_scheme_is_the_serial_layer(name, sizes):
    assert_is_the_serial_layer(ALL[name], sizes, by_hand=BY_HAND.get(name))


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name, D, F", [("column", 7, 12), ("row", 12, 7)])
def test_where_chunks_differ_the_formula_holds_for_the_sum_over_ranks(name, D, F, p):
    assert (5 * 7) % p, "this test is about buffers that p does not divide"
    assert_is_the_serial_layer(SCHEMES[name], {"tp": p}, B=5, D=D, F=F)


@pytest.mark.parametrize("name", ALL)
def test_leading_dims_are_rows(name):
    """A layer takes [B, S, D] as nn.Linear does; of several leading dims the first is cut."""
    scheme, layer, X = ALL[name], serial_layer(), random(8, 3, D, seed=3)
    sizes = small(scheme)

    def of_three_dims(layout):
        return Layout.of(dict(zip("BSD", [layout.cuts[0], (), layout.cuts[1]], strict=True)))

    def step():
        mesh = Mesh(**sizes)
        parallel = TensorParallelLinear.from_linear(layer, scheme, mesh)
        return parallel(of_three_dims(scheme.X).shard(X, mesh)).detach()

    values = run(step, ranks=n_ranks(sizes)).values
    for coordinate, y in zip(coordinates(sizes), values, strict=True):
        expected = of_three_dims(scheme.Y).cut(layer(X).detach(), sizes, coordinate)
        assert relative_error(y, expected) < 1e-10


@pytest.mark.parametrize("name", ["column", "row"])
def test_a_single_vector_has_no_rows(name):
    layer, scheme, x = serial_layer(), SCHEMES[name], random(D, seed=3)

    def step():
        mesh = Mesh(tp=2)
        return TensorParallelLinear.from_linear(layer, scheme, mesh)(scheme.X.last().shard(x, mesh)).detach()

    for rank, y in enumerate(run(step, ranks=2).values):
        expected = scheme.Y.last().cut(layer(x).detach(), {"tp": 2}, {"tp": rank})
        assert relative_error(y, expected) < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_a_layer_without_bias(name):
    layer, sizes = nn.Linear(D, F, bias=False, dtype=torch.float64), small(ALL[name])

    def step():
        parallel = TensorParallelLinear.from_linear(layer, ALL[name], Mesh(**sizes))
        return dict(parallel.named_parameters()).keys(), str(parallel)

    for names, text in run(step, ranks=n_ranks(sizes)).values:
        assert names == {"weight"}
        assert "bias" not in text


def test_a_frozen_layer_stays_frozen():
    layer = nn.Linear(D, F)
    layer.weight.requires_grad_(False)

    def step():
        parallel = TensorParallelLinear.from_linear(layer, SCHEMES["column"], Mesh(tp=2))
        parallel(torch.randn(3, D)).sum().backward()
        return parallel.weight.grad, parallel.bias.grad.tolist()

    assert run(step, ranks=2).values == [(None, [3.0] * (F // 2))] * 2


@pytest.mark.parametrize("name", SCHEMES)
def test_backward_keeps_this_rank_s_blocks_and_nothing_else(name):
    scheme, layer, X = SCHEMES[name], serial_layer(), random(B, D, seed=3)
    sizes = small(scheme)

    def step():
        mesh = Mesh(**sizes)
        parallel = TensorParallelLinear.from_linear(layer, scheme, mesh)
        x = scheme.X.shard(X, mesh).requires_grad_()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda index: kept[index]):
            tensor_parallel_linear(x, parallel.weight, scheme, mesh)
        return {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), parallel.weight.data_ptr()}

    assert all(run(step, ranks=n_ranks(sizes)).values)


@pytest.mark.parametrize("name", ALL)
def test_no_rank_shares_storage_with_another_or_with_the_serial_layer(name):
    scheme = ALL[name]

    def step():
        layer = serial_layer()
        parallel = TensorParallelLinear.from_linear(layer, scheme, Mesh(**dict.fromkeys(scheme.axes, 1)))
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        return all(parameter.any() for parameter in layer.parameters())

    assert run(step, ranks=1).values == [True]


# ---- pairs of layers


class MLP(nn.Module):
    """Two linear layers with something elementwise between them; D, F and E all differ."""

    def __init__(self, D=12, F=24, E=7):
        super().__init__()
        self.up, self.down = serial_layer(D, F), serial_layer(F, E)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_column_then_row_communicates_once_each_way(p):
    """Column leaves its output as row takes its input: the pair is Megatron's MLP."""
    serial, X, dY = MLP(), random(36, 12, seed=5).requires_grad_(), random(36, 7, seed=6)
    Y = serial(X)
    Y.backward(dY)
    whole_x = X.detach()

    def step():
        mesh, mlp = Mesh(tp=p), MLP()
        mlp.up = TensorParallelLinear.from_linear(mlp.up, SCHEMES["column"], mesh)
        mlp.down = TensorParallelLinear.from_linear(mlp.down, SCHEMES["row"], mesh)
        x = whole_x.clone().requires_grad_()
        with region("forward"):
            y = mlp(x)
        with region("backward"):
            y.backward(dY)
        return {"Y": y.detach(), "dX": x.grad} | {name: q.grad for name, q in mlp.named_parameters()}

    result = run(step, ranks=p)
    layouts = {f"{at}.{name}": layout for at, scheme in [("up", "column"), ("down", "row")]
               for name, layout in parameter_layouts(SCHEMES[scheme]).items()}  # fmt: skip
    for rank, found in enumerate(result.values):
        expected = {"Y": Y.detach(), "dX": X.grad}
        for name, parameter in serial.named_parameters():
            gradient = parameter.grad.T if name.endswith("weight") else parameter.grad
            expected[name] = layouts[name].cut(gradient, {"tp": p}, {"tp": rank})
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert relative_error(found[name], tensor) < 1e-10, (name, rank)
        assert result.trace.bytes_sent(rank, "forward") == FLOAT64_BYTES * 2 * (p - 1) * 36 * 7 // p
        assert result.trace.bytes_sent(rank, "backward") == FLOAT64_BYTES * 2 * (p - 1) * 36 * 12 // p
        assert [event.kind for event in result.trace.collectives(rank)] == ["all_reduce"] * 2


@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_pair_is_torch_s_colwise_and_rowwise_parallel(p):
    """The same program in torch's DTensor, on the same ranks: same blocks, same gradients."""
    X, dY = random(36, 12, seed=5), random(36, 7, seed=6)

    def gradients(mlp):
        x = X.clone().requires_grad_()
        y = mlp(x)
        y.backward(dY)
        return {"Y": y.detach(), "dX": x.grad} | {name: q.grad for name, q in mlp.named_parameters()}

    def step():
        mesh, ours = Mesh(tp=p), MLP()
        ours.up = TensorParallelLinear.from_linear(ours.up, SCHEMES["column"], mesh)
        ours.down = TensorParallelLinear.from_linear(ours.down, SCHEMES["row"], mesh)
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        theirs = gradients(parallelize_module(MLP(), mesh.device_mesh, styles))
        for name, tensor in theirs.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            theirs[name] = local.clone()  # which waits for it
        return gradients(ours), theirs

    for rank, (ours, theirs) in enumerate(run(step, ranks=p).values):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            wanted = tensor.T if name.endswith("weight") else tensor
            assert relative_error(ours[name], wanted) < 1e-10, (name, rank)


# ---- cases with a right value that can be checked by hand


@pytest.mark.parametrize("p", [2, 4])
def test_the_bias_of_a_row_layer_is_added_once(p):
    """S11: [1, 2, 3], not p times that; its gradient is 5 for 5 rows, on every rank."""

    def step():
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
        parallel = TensorParallelLinear.from_linear(layer, SCHEMES["row"], Mesh(tp=p))
        y = parallel(torch.randn(5, 4 // p))
        y.sum().backward()
        return y.tolist(), parallel.bias.grad.tolist()

    assert run(step, ranks=p).values == [([[1.0, 2.0, 3.0]] * 5, [5.0] * 3)] * p


def test_row_is_one_loss_seen_p_times():
    """S34: y = sum of w_r x_r with x_r = r + 1, and L = y on every rank: dL/dw_r is x_r, not 4 x_r."""

    def step():
        mesh, scheme = Mesh(tp=4), SCHEMES["row"]
        w = torch.ones(1, 1, requires_grad=True)
        y = tensor_parallel_linear(torch.tensor([[dist.get_rank() + 1.0]]), w, scheme, mesh)
        y.backward(torch.ones(1, 1))
        return y.item(), w.grad.item()

    assert run(step, ranks=4).values == [(10.0, 1.0), (10.0, 2.0), (10.0, 3.0), (10.0, 4.0)]


@pytest.mark.parametrize("name", ["column", "row"])
def test_1d_does_not_cut_the_batch(name):
    """S60: three rows on four ranks; every rank holds all three."""
    assert_is_the_serial_layer(SCHEMES[name], {"tp": 4}, B=3, by_hand=BY_HAND[name])


@pytest.mark.parametrize("name, sizes", [(name, dict.fromkeys(s.axes, 1)) for name, s in ALL.items()])
def test_degree_1_is_the_serial_layer_and_sends_nothing(name, sizes):
    """S71."""
    assert_is_the_serial_layer(ALL[name], sizes, by_hand=BY_HAND.get(name))
    assert set(ALL[name].traffic(B, D, F, sizes).values()) == {0}


class RowsOfX:
    """Data parallelism as a scheme: ranks have different rows of X, so the bias sees only some of them."""

    axes = ("dp",)
    X, W, Y = Layout("B@dp D"), Layout("D F"), Layout("B@dp F")

    def forward(self, x, w, mesh):
        return x @ w

    def backward(self, dy, x, w, mesh):
        return dy @ w.T, mesh["dp"].all_reduce(x.T @ dy)

    def traffic(self, B, D, F, sizes):
        return {"forward": 0, "backward": ring_traffic("all_reduce", D * F, sizes["dp"])}


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_where_b_is_cut_the_bias_gradient_is_summed_over_its_axis(p):
    assert_is_the_serial_layer(RowsOfX(), {"dp": p})


# ---- wrong versions: each is a bug that somebody shipped, and each is caught, for the reason given


class NoAllReduceInBackward(Column):
    """Megatron's f forgotten: dX holds this rank's part of the sum only."""

    def backward(self, dy, x, w, mesh):
        return dy @ w.T, x.T @ dy


class AllReduceTwice(Column):
    """The caller reduces dX, and so does the layer: p times too large."""

    def backward(self, dy, x, w, mesh):
        dx, dw = super().backward(dy, x, w, mesh)
        return mesh["tp"].all_reduce(dx), dw


class NoAllReduceInForward(Row):
    """Megatron's g forgotten: Y is this rank's part of the sum only."""

    def forward(self, x, w, mesh):
        return x @ w


class AllReduceBothWays(Row):
    """Backward through an all-reduce taken for an all-reduce: gradients p times too large (S34)."""

    def backward(self, dy, x, w, mesh):
        return super().backward(mesh["tp"].all_reduce(dy), x, w, mesh)


class MeanInsteadOfSum(Row):
    def forward(self, x, w, mesh):
        return super().forward(x, w, mesh) / mesh["tp"].size


class SumOnTheWeightGradient(Column):
    """dW all-reduced as data parallelism would: the blocks are different columns, nothing is to be added."""

    def backward(self, dy, x, w, mesh):
        dx, dw = super().backward(dy, x, w, mesh)
        return dx, mesh["tp"].all_reduce(dw)


class EveryRankComputesAll(Column):
    """Numbers right, nothing gained: the weight is gathered and every rank computes all of Y."""

    def forward(self, x, w, mesh):
        return mesh["tp"].piece(x @ mesh["tp"].all_gather(w, dim=1), dim=1)


class ReplicatedColumn(Column):
    """Numbers right, traffic 0, formula 0: only the local shapes tell that nothing is sharded."""

    W, Y = Layout("D F"), Layout("B F")

    def backward(self, dy, x, w, mesh):
        return dy @ w.T, x.T @ dy

    def traffic(self, B, D, F, sizes):
        return {"forward": 0, "backward": 0}


class HalfTheTraffic(Row):
    """An all-reduce priced as a reduce-scatter."""

    def traffic(self, B, D, F, sizes):
        return {key: n // 2 for key, n in super().traffic(B, D, F, sizes).items()}


class BiasOnEveryRank(TensorParallelLinear):
    """The bias goes in before the sum over ranks (S11)."""

    def forward(self, x):
        return sum_copy(x @ self.weight + self.bias, self.mesh["tp"])


class BiasGradientSummed(TensorParallelLinear):
    """The bias gradient all-reduced although every rank saw all rows: 10 and 20 instead of 5 (S11)."""

    def forward(self, x):
        y = tensor_parallel_linear(x, self.weight, self.scheme, self.mesh)
        return y + copy_sum(self.bias, self.mesh["tp"])


class BiasGradientOfOwnRows(TensorParallelLinear):
    """The bias gradient left as the sum over this rank's rows where B is cut."""

    def forward(self, x):
        return tensor_parallel_linear(x, self.weight, self.scheme, self.mesh) + self.bias


@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_bias_gradient_of_own_rows_only_is_caught(p):
    with pytest.raises(AssertionError, match="dbias on rank 0 is wrong"):
        assert_is_the_serial_layer(RowsOfX(), {"dp": p}, BiasGradientOfOwnRows)


def the_next_rank_s_block(layer, scheme, mesh):
    """Blocks dealt out in another order than X and Y have."""
    wrong = TensorParallelLinear.from_linear(layer, scheme, mesh)
    coordinate = {"tp": (mesh.coordinate["tp"] + 1) % mesh.sizes["tp"]}
    wrong.weight = nn.Parameter(scheme.W.cut(layer.weight.detach().T, mesh.sizes, coordinate).contiguous())
    return wrong


WRONG = [
    (NoAllReduceInBackward(), None, "column", "dX on rank 0 is wrong"),
    (AllReduceTwice(), None, "column", "dX on rank 0 is wrong"),
    (SumOnTheWeightGradient(), None, "column", "dweight on rank 0 is wrong"),
    (EveryRankComputesAll(), None, "column", "forward traffic is not the formula's"),
    (ReplicatedColumn(), None, "column", "w is not sharded"),
    (NoAllReduceInForward(), None, "row", "Y on rank 0 is wrong"),
    (MeanInsteadOfSum(), None, "row", "Y on rank 0 is wrong"),
    (AllReduceBothWays(), None, "row", "dX on rank 0 is wrong"),
    (HalfTheTraffic(), None, "row", "forward traffic is not the formula's"),
    (Row(), BiasOnEveryRank, "row", "Y on rank 0 is wrong"),
    (Row(), BiasGradientSummed, "row", "dbias on rank 0 is wrong"),
    (Column(), the_next_rank_s_block, "column", "Y on rank 0 is wrong"),
    (Row(), the_next_rank_s_block, "row", "Y on rank 0 is wrong"),
]


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize(
    "scheme, make, name, why", WRONG, ids=[getattr(m, "__qualname__", type(s).__name__) for s, m, *_ in WRONG]
)
def test_wrong_versions_are_caught(scheme, make, name, why, p):
    make = make or TensorParallelLinear
    with pytest.raises(AssertionError, match=why):
        assert_is_the_serial_layer(scheme, {"tp": p}, make, by_hand=BY_HAND[name])


def test_sum_sum_makes_the_gradient_p_times_too_large():
    """The doubled version of S34 in the words of autograd: 4 x_r."""

    def step():
        w = torch.ones(1, requires_grad=True)
        sum_sum(w * (dist.get_rank() + 1), Mesh(tp=4)["tp"]).backward()
        return w.grad.item()

    assert run(step, ranks=4).values == [4.0, 8.0, 12.0, 16.0]


# ---- refusals


@pytest.mark.parametrize(
    "name, D, F, p, message",
    [
        (
            "row",
            10,
            6,
            4,
            r"dim D of size 10 .* over tp=4.* Legal degrees for 10: 1, 2, 5, 10",
        ),
        (
            "column",
            10,
            11,
            2,
            r"dim F of size 11 .* over tp=2.* Legal degrees for 11: 1, 11",
        ),
    ],
)
def test_a_size_that_does_not_divide_is_refused_before_any_communication(name, D, F, p, message):
    """S04."""

    def step():
        TensorParallelLinear.from_linear(nn.Linear(D, F), SCHEMES[name], Mesh(tp=p))

    with pytest.raises(RefusedError, match=message) as refused:
        run(step, ranks=p)
    assert refused.value.run.trace.events == ()


def test_a_mesh_without_the_scheme_s_axis_is_refused():
    def step():
        TensorParallelLinear.from_linear(nn.Linear(4, 6), SCHEMES["column"], Mesh(row=2))

    with pytest.raises(RefusedError, match=r"names the axis 'tp', which the mesh does not have.* row=2"):
        run(step, ranks=2)


def test_an_input_that_lies_otherwise_is_refused():
    """A whole X handed to a row layer, which takes its D in pieces."""

    def step():
        TensorParallelLinear.from_linear(nn.Linear(8, 6), SCHEMES["row"], Mesh(tp=2))(torch.randn(3, 8))

    message = (
        r'Row layer with D=8, F=6: its input lies as Layout\("B D@tp"\), so 4 of D=8 columns on each rank of '
        r"Mesh\(tp=2\); rank 0 \(at tp=0\) was given shape \(3, 8\)\. Does the layer before it leave"
    )
    with pytest.raises(RefusedError, match=message) as refused:
        run(step, ranks=2)
    assert refused.value.run.trace.events == ()


def test_the_package_lists_its_names():
    import lessons_lib.tensor_parallel as package

    assert dir(package) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(
        AttributeError, match=r"has no attribute 'SCHEME'; it has SCHEMES, VARIANTS, Cannon, Column, "
    ):
        package.SCHEME  # noqa: B018
