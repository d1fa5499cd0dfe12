"""2D, 2.5D and 3D: what is theirs alone. That they are the serial layer, test_tensor_parallel.py shows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lessons_lib import Mesh, run
from lessons_lib.errors import RefusedError, RunError
from lessons_lib.layout import Layout, coordinates
from lessons_lib.mesh import Group
from lessons_lib.tensor_parallel import (
    SCHEMES,
    VARIANTS,
    Cannon,
    Cube,
    CubeKept,
    Summa,
    TensorParallelLinear,
    Tesseract,
    tensor_parallel_linear,
)
from lessons_lib.tensor_parallel.grids import grid
from lessons_lib.tensor_parallel.panels import panels, reduce_each
from lessons_lib.tensor_parallel.scheme import blocks
from tests.serial_layer import (
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
GRIDS = {name: scheme for name, scheme in ALL.items() if scheme.axes != ("tp",)}


def n_ranks(sizes):
    return len(coordinates(sizes))


# ---- the same on processes


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_on_process_ranks(name):
    scheme = GRIDS[name]
    assert_is_the_serial_layer(scheme, dict.fromkeys(scheme.axes, 2), transport="processes")


# ---- memory: the formula is what is counted


def peak_elements(step, sizes):
    """The peak of the fullest rank, in float64 elements, without the mesh's own list of ranks (int32)."""
    n = n_ranks(sizes)
    result = run(step, ranks=n, record=("memory",))
    return (max(map(result.trace.peak_bytes, range(n))) - 4 * n) / FLOAT64_BYTES


CASES = [(name, sizes) for name, scheme in ALL.items() for sizes in MESHES[scheme.axes]]
SHAPES = [(72, 36, 144), (144, 36, 72), (36, 144, 72)]  # each of X, W and Y is the largest once


@pytest.mark.parametrize(
    "B, D, F", [SHAPES[0], *(pytest.param(*s, marks=pytest.mark.slow) for s in SHAPES[1:])]
)
@pytest.mark.parametrize("name, sizes", CASES)
def test_memory_is_the_formula_s(name, sizes, B, D, F):
    scheme = ALL[name]
    shapes = [
        layout.local_shape(shape, sizes)
        for layout, shape in ((scheme.X, (B, D)), (scheme.W, (D, F)), (scheme.Y, (B, F)))
    ]
    memory = scheme.memory(B, D, F, sizes)
    assert memory["rest"] == sum(blocks(scheme, B, D, F, sizes))

    def forward():
        mesh, x, w = Mesh(**sizes), *(torch.ones(shape, dtype=torch.float64) for shape in shapes[:2])
        y = scheme.forward(x, w, mesh)
        return y.shape

    def backward():
        mesh, x, w, dy = Mesh(**sizes), *(torch.ones(shape, dtype=torch.float64) for shape in shapes)
        dx, dw = scheme.backward(dy, x, w, mesh)
        return dx.shape, dw.shape

    def kept():
        mesh, x, w, dy = Mesh(**sizes), *(torch.ones(shape, dtype=torch.float64) for shape in shapes)
        y = tensor_parallel_linear(x.requires_grad_(), w.requires_grad_(), scheme, mesh)
        y.backward(dy)

    assert peak_elements(forward, sizes) == memory["forward"]
    if name == "3d kept":
        _, _, y = blocks(scheme, B, D, F, sizes)
        assert peak_elements(kept, sizes) == memory["backward"] + y  # which autograd is called on
    else:
        assert peak_elements(backward, sizes) == memory["backward"]


def test_3d_is_an_eighth_at_rest_and_a_quarter_while_it_computes():
    """S62."""
    memory = SCHEMES["3d"].memory(16, 256, 64, {"i": 2, "j": 2, "k": 2})
    x, w, y = 16 * 256, 256 * 64, 16 * 64
    assert memory["rest"] == (x + w + y) // 8
    assert memory["forward"] == (x + w + y) // 8 + (x + w + y) // 4
    assert blocks(SCHEMES["3d"], 16, 256, 64, {"i": 2, "j": 2, "k": 2})[0] == 512

    def saved(scheme):
        def step():
            mesh, kept = Mesh(i=2, j=2, k=2), []
            x = torch.ones(scheme.X.local_shape((16, 256), mesh.sizes), requires_grad=True)
            w = torch.ones(scheme.W.local_shape((256, 64), mesh.sizes), requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda index: kept[index]):
                tensor_parallel_linear(x, w, scheme, mesh)
            return sorted(tensor.numel() for tensor in kept)

        return run(step, ranks=8).values

    assert saved(Cube()) == [[512, 2048]] * 8
    assert saved(CubeKept()) == [[1024, 4096]] * 8


def test_depth_does_not_thin_the_weights():
    """S63: W takes 1/q^2, whatever d; d = 1 is 2D."""
    w = {d: blocks(Tesseract(), 24, 8, 8, {"depth": d, "row": 2, "col": 2})[1] for d in (1, 2, 3)}
    assert set(w.values()) == {16}
    flat = {"row": 2, "col": 2}
    assert Tesseract().traffic(B, D, F, {"depth": 1, **flat}) == Summa().traffic(B, D, F, flat)
    for way in ("rest", "forward"):
        assert Tesseract().memory(B, D, F, {"depth": 1, **flat})[way] == Summa().memory(B, D, F, flat)[way]


# ---- traffic: who talks to whom


@pytest.mark.parametrize("name", ["2d", "2.5d", "2d by Cannon"])
def test_x_moves_along_rows_and_w_along_columns(name):
    """And nothing is larger than a block: no rank ever has a whole row of X."""
    scheme = ALL[name]
    sizes = dict.fromkeys(scheme.axes, 2) | {"row": 3, "col": 3}
    x, w, _ = blocks(scheme, B, D, F, sizes)

    def step():
        mesh = Mesh(**sizes)
        scheme.forward(
            torch.ones(scheme.X.local_shape((B, D), sizes)),
            torch.ones(scheme.W.local_shape((D, F), sizes)),
            mesh,
        )

    events = run(step, ranks=n_ranks(sizes)).trace.events
    places = coordinates(sizes)
    assert events
    for event in events:
        peers = event.members if event.is_collective else (event.rank, event.peer)
        (axis,) = {axis for a in peers for b in peers for axis in sizes if places[a][axis] != places[b][axis]}
        assert (axis, event.n_elements) in {("col", x), ("row", w)}


def test_cannon_s_ranks_differ_by_their_first_shift():
    sizes = {"row": 3, "col": 3}
    x, w, _ = blocks(Cannon(), B, D, F, sizes)

    def step():
        mesh = Mesh(**sizes)
        Cannon().forward(torch.ones(B // 3, D // 3), torch.ones(D // 3, F // 3), mesh)

    trace = run(step, ranks=9).trace
    for rank, at in enumerate(coordinates(sizes)):
        shifts_x, shifts_w = 2 + (at["row"] > 0), 2 + (at["col"] > 0)
        assert trace.bytes_sent(rank) == 4 * (shifts_x * x + shifts_w * w)


def test_gathering_again_costs_what_methods_say():
    """(q-1)/q^3 (3 X + 3 W + 2 Y) against twice (X + W + Y)."""
    sizes = {"i": 2, "j": 2, "k": 2}
    assert sum(Cube().traffic(8, 24, 16, sizes).values()) == 248
    assert sum(CubeKept().traffic(8, 24, 16, sizes).values()) == 176


# ---- panels


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_panels_are_every_rank_s_block_and_take_two_buffers(p):
    def step():
        group = Group(dist.group.WORLD)
        block = torch.arange(3.0) + 10 * group.rank
        seen, where = [], set()
        for panel in panels(block, group):
            seen.append(panel.tolist())
            where.add(panel.data_ptr())
        return seen, len(where), block.tolist()

    everything = [[10.0 * r + k for k in range(3)] for r in range(p)]
    for rank, (seen, n_places, block) in enumerate(run(step, ranks=p).values):
        assert seen == everything and block == everything[rank]
        assert n_places <= min(3, p)  # its own block, and at most two buffers


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_reduce_each_gives_each_rank_its_sum(p):
    def step():
        group = Group(dist.group.WORLD)
        return reduce_each((torch.tensor([float(l + 10 * group.rank)]) for l in range(p)), group).item()

    assert run(step, ranks=p).values == [float(p * l + 10 * sum(range(p))) for l in range(p)]


def test_the_next_panel_travels_while_this_one_is_used():
    """On the clock: q steps of work, and only the first panels are waited for."""
    from lessons_lib import compute

    def step():
        group = Group(dist.group.WORLD)
        for _ in panels(torch.ones(10_000), group):
            compute(1e-3)

    trace = run(step, ranks=4, machine="4xH100").trace
    assert 4e-3 < trace.timeline.makespan < 4e-3 + 2e-5


# ---- two layers in a row


class MLP(nn.Module):
    def __init__(self, D=36, F=72, E=24):
        super().__init__()
        self.up, self.down = serial_layer(D, F), serial_layer(F, E)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


PAIRS = [
    (SCHEMES["2d"], SCHEMES["2d"]),
    (SCHEMES["2.5d"], SCHEMES["2.5d"]),
    (Cube(), Cube().exchanged()),
    (CubeKept(), CubeKept().exchanged()),
]


@pytest.mark.parametrize("first, second", PAIRS, ids=["2d", "2.5d", "3d", "3d kept"])
def test_two_layers_in_a_row(first, second):
    """The second takes its input as the first leaves it, and 3D is back where it began."""
    sizes = MESHES[tuple(first.axes)][-1] if "i" in first.axes else dict.fromkeys(first.axes, 2)
    assert [first.Y.dim(name) for name in "BF"] == [second.X.dim(name) for name in "BD"]
    assert [second.Y.dim(name) for name in "BF"] == [first.X.dim(name) for name in "BD"]
    serial, X, dY = MLP(), random(B, 36, seed=5).requires_grad_(), random(B, 24, seed=6)
    Y = serial(X)
    Y.backward(dY)
    whole_x = X.detach()

    def step():
        mesh, mlp = Mesh(**sizes), MLP()
        mlp.up = TensorParallelLinear.from_linear(mlp.up, first, mesh)
        mlp.down = TensorParallelLinear.from_linear(mlp.down, second, mesh)
        x = first.X.shard(whole_x, mesh).requires_grad_()
        y = mlp(x)
        y.backward(second.Y.shard(dY, mesh))
        return {"Y": y.detach(), "dX": x.grad} | {name: q.grad for name, q in mlp.named_parameters()}

    layouts = {"Y": second.Y, "dX": first.X}
    layouts |= {"up.weight": first.W, "up.bias": first.Y.last()}
    layouts |= {"down.weight": second.W, "down.bias": second.Y.last()}
    wholes = {"Y": Y.detach(), "dX": X.grad}
    wholes |= {name: q.grad.T if q.dim() == 2 else q.grad for name, q in serial.named_parameters()}
    values = run(step, ranks=n_ranks(sizes)).values
    for coordinate, found in zip(coordinates(sizes), values, strict=True):
        for name, whole in wholes.items():
            expected = layouts[name].cut(whole, sizes, coordinate)
            assert relative_error(found[name], expected) < 1e-10, (name, coordinate)


# ---- wrong versions: each is caught, for the reason given


class BroadcastsOverTheWrongAxis(Summa):
    """Rows and columns of the grid taken for each other."""

    def forward(self, x, w, mesh):
        y = x.new_zeros(x.shape[0], w.shape[1])
        for x_l, w_l in zip(panels(x, mesh["row"]), panels(w, mesh["col"]), strict=True):
            y.addmm_(x_l, w_l)
        return y


class ForgetsTheLastStep(Summa):
    def forward(self, x, w, mesh):
        y = x.new_zeros(x.shape[0], w.shape[1])
        for step, (x_l, w_l) in enumerate(zip(panels(x, mesh["col"]), panels(w, mesh["row"]), strict=True)):
            if step < mesh["col"].size - 1:
                y.addmm_(x_l, w_l)
        return y


class NoReduceForDW(Summa):
    """dW of this rank's rows only."""

    def backward(self, dy, x, w, mesh):
        dx, _ = super().backward(dy, x, w, mesh)
        terms = [x_l.T @ dy for x_l in panels(x, mesh["col"])]
        return dx, terms[mesh["row"].rank]


class SumsGoHomeToTheWrongColumn(Summa):
    def backward(self, dy, x, w, mesh):
        dx, dw = super().backward(dy, x, w, mesh)
        return mesh["col"].shift(dx, 1), dw


class GathersWholeRows(Summa):
    """Numbers right: but every rank holds q blocks of X at once, and of W."""

    def forward(self, x, w, mesh):
        return mesh["col"].all_gather(x, 1) @ mesh["row"].all_gather(w, 0)


class NoDepthReduction(Tesseract):
    """As in Colossal-AI's code: every number plausible, dW wrong as soon as layers see different rows."""

    def backward(self, dy, x, w, mesh):
        return self.layer.backward(dy, x, w, mesh)


class DepthMean(Tesseract):
    def backward(self, dy, x, w, mesh):
        dx, dw = super().backward(dy, x, w, mesh)
        return dx, dw / mesh["depth"].size


class DepthReductionOfDX(Tesseract):
    """Rows of different layers added to each other."""

    def backward(self, dy, x, w, mesh):
        dx, dw = super().backward(dy, x, w, mesh)
        return mesh["depth"].all_reduce(dx), dw


class DepthReducedTwice(Tesseract):
    def backward(self, dy, x, w, mesh):
        dx, dw = super().backward(dy, x, w, mesh)
        return dx, mesh["depth"].all_reduce(dw)


class EveryLayerComputesAllRows(Tesseract):
    """Right numbers, and d times the work: depth cuts nothing."""

    X, Y = Layout("B@row D@col"), Layout("B@row F@col")

    def backward(self, dy, x, w, mesh):
        return self.layer.backward(dy, x, w, mesh)


class AllReduceOfY(Cube):
    """Colossal-AI's other way, kept whole: Y is q times as large as its layout says."""

    def forward(self, x, w, mesh):
        x_ik, w_kj = mesh[self.j].all_gather(x, 0), mesh[self.i].all_gather(w, 0)
        return mesh[self.k].all_reduce(x_ik @ w_kj)


class RolesNotExchanged(Cube):
    """Y is scattered over j, as if it had the layout of X."""

    def forward(self, x, w, mesh):
        x_ik, w_kj = mesh[self.j].all_gather(x, 0), mesh[self.i].all_gather(w, 0)
        y_ij = mesh[self.k].all_reduce(x_ik @ w_kj)
        return mesh[self.j].piece(y_ij, 0)


class NoSumOverK(Cube):
    def forward(self, x, w, mesh):
        x_ik, w_kj = mesh[self.j].all_gather(x, 0), mesh[self.i].all_gather(w, 0)
        return mesh[self.k].piece(x_ik @ w_kj, 0)


class PieceOfDW(Cube):
    """dW is cut and not summed over i."""

    def backward(self, dy, x, w, mesh):
        dx, _ = super().backward(dy, x, w, mesh)
        dy_ij = mesh[self.k].all_gather(dy, 0)
        return dx, mesh[self.i].piece(mesh[self.j].all_gather(x, 0).T @ dy_ij, 0)


class GatheredAlongTheWrongDim(Cube):
    def forward(self, x, w, mesh):
        x_ik, w_kj = mesh[self.j].all_gather(x, 0), mesh[self.i].all_gather(w, 0)
        y = mesh[self.k].reduce_scatter(x_ik @ w_kj, 1)
        return y.reshape(-1, w.shape[1])


class FirstShiftForgotten(Cannon):
    def forward(self, x, w, mesh):
        row, col = mesh["row"], mesh["col"]
        y = x @ w
        for _ in range(col.size - 1):
            x, w = col.shift(x, -1), row.shift(w, -1)
            y.addmm_(x, w)
        return y


class SumsLeftAbroad(Cannon):
    """The sums are not shifted home."""

    def backward(self, dy, x, w, mesh):
        dx, dw = super().backward(dy, x, w, mesh)
        return mesh["col"].shift(dx, 1 - mesh["row"].rank), dw


class OneStepTooFew(Cannon):
    def forward(self, x, w, mesh):
        row, col = mesh["row"], mesh["col"]
        x, w = col.shift(x, -row.rank), row.shift(w, -col.rank)
        y = x @ w
        for _ in range(col.size - 2):
            x, w = col.shift(x, -1), row.shift(w, -1)
            y.addmm_(x, w)
        return y


class BothTheSameWay(Cannon):
    """W moves down where it should move up."""

    def forward(self, x, w, mesh):
        row, col = mesh["row"], mesh["col"]
        x, w = col.shift(x, -row.rank), row.shift(w, -col.rank)
        y = x @ w
        for _ in range(col.size - 1):
            x, w = col.shift(x, -1), row.shift(w, 1)
            y.addmm_(x, w)
        return y


class KeptButNotReduced(CubeKept):
    """The gather of X undone by cutting: dX of this rank's term only."""

    def differentiable(self, x, w, mesh):
        from lessons_lib.mesh import gather_reduce_scatter, gather_split, reduce_scatter_gather

        x_ik = gather_split(x, mesh[self.j])
        w_kj = gather_reduce_scatter(w, mesh[self.i])
        return reduce_scatter_gather(x_ik @ w_kj, mesh[self.k])


def without_bias_sum(layer, scheme, mesh):
    """The bias gradient of this rank's rows only (S64)."""

    class OwnRows(TensorParallelLinear):
        def forward(self, x):
            return tensor_parallel_linear(x, self.weight, self.scheme, self.mesh) + self.bias

    return OwnRows.from_linear(layer, scheme, mesh)


def transposed_blocks(layer, scheme, mesh):
    """Blocks dealt out with the grid's axes exchanged."""
    wrong = TensorParallelLinear.from_linear(layer, scheme, mesh)
    a, b = scheme.axes[-2:]
    at = dict(mesh.coordinate)
    at[a], at[b] = at[b], at[a]
    wrong.weight = nn.Parameter(scheme.W.cut(layer.weight.detach().T, mesh.sizes, at).contiguous())
    return wrong


GRID, DEPTH, CUBE = {"row": 3, "col": 3}, {"depth": 3, "row": 2, "col": 2}, {"i": 2, "j": 2, "k": 2}
WRONG = [
    (BroadcastsOverTheWrongAxis(), None, GRID, r"Y on rank \d is wrong"),
    (ForgetsTheLastStep(), None, GRID, "Y on rank 0 is wrong"),
    (NoReduceForDW(), None, GRID, "dweight on rank 0 is wrong"),
    (SumsGoHomeToTheWrongColumn(), None, GRID, "dX on rank 0 is wrong"),
    (GathersWholeRows(), None, GRID, "forward memory is not the formula's"),
    (Summa(), transposed_blocks, GRID, "Y on rank 0 is wrong"),
    (Summa(), without_bias_sum, GRID, "dbias on rank 0 is wrong"),
    (NoDepthReduction(), None, DEPTH, "dweight on rank 0 is wrong"),
    (DepthMean(), None, DEPTH, "dweight on rank 0 is wrong"),
    (DepthReductionOfDX(), None, DEPTH, "dX on rank 0 is wrong"),
    (DepthReducedTwice(), None, DEPTH, "dweight on rank 0 is wrong"),
    (EveryLayerComputesAllRows(), None, DEPTH, "forward traffic is not the formula's"),
    (Tesseract(), without_bias_sum, DEPTH, "dbias on rank 0 is wrong"),
    (AllReduceOfY(), None, CUBE, "shape"),
    (RolesNotExchanged(), None, CUBE, "Y on rank 1 is wrong"),
    (NoSumOverK(), None, CUBE, "Y on rank 0 is wrong"),
    (PieceOfDW(), None, CUBE, "dweight on rank 0 is wrong"),
    (GatheredAlongTheWrongDim(), None, CUBE, "Y on rank 0 is wrong"),
    (Cube(), transposed_blocks, CUBE, "Y on rank 0 is wrong"),
    (Cube(), without_bias_sum, CUBE, "dbias on rank 0 is wrong"),
    (KeptButNotReduced(), None, CUBE, "dX on rank 0 is wrong"),
    (FirstShiftForgotten(), None, GRID, "Y on rank 1 is wrong"),
    (SumsLeftAbroad(), None, GRID, "dX on rank 0 is wrong"),
    (OneStepTooFew(), None, GRID, "Y on rank 0 is wrong"),
    (BothTheSameWay(), None, GRID, "Y on rank 0 is wrong"),
]


def tried(scheme, make, sizes):
    """Everything this file and its neighbour ask of a scheme."""
    assert_is_the_serial_layer(scheme, sizes, make or TensorParallelLinear)

    def forward():
        mesh = Mesh(**sizes)
        x = torch.ones(scheme.X.local_shape((B, D), sizes), dtype=torch.float64)
        w = torch.ones(scheme.W.local_shape((D, F), sizes), dtype=torch.float64)
        y = scheme.forward(x, w, mesh)
        return y.shape

    assert peak_elements(forward, sizes) == scheme.memory(B, D, F, sizes)["forward"], (
        "forward memory is not the formula's"
    )


@pytest.mark.parametrize(
    "scheme, make, sizes, why",
    WRONG,
    ids=[f"{type(s).__name__}-{getattr(m, '__name__', '')}" for s, m, *_ in WRONG],
)
def test_wrong_versions_are_caught(scheme, make, sizes, why):
    with pytest.raises((AssertionError, RunError), match=why):
        tried(scheme, make, sizes)


@pytest.mark.parametrize("name", ["2d", "2.5d", "3d"])
def test_the_right_ones_pass_what_catches_the_wrong(name):
    tried(SCHEMES[name], None, {"2d": GRID, "2.5d": DEPTH, "3d": CUBE}[name])


# ---- refusals, before any communication


@pytest.mark.parametrize(
    "name, sizes, rows, refused",
    [
        ("3d", CUBE, (1, 2, 6), r"dim B of size \d .* over i=2 x j=2, so into 4 blocks"),
        ("2d", {"row": 2, "col": 2}, (3,), r"dim B of size 3 .* over row=2"),
        (
            "2.5d",
            {"depth": 2, "row": 2, "col": 2},
            (2,),
            r"dim B of size 2 .* over depth=2 x row=2, .* Nearest .* 4",
        ),
    ],
)
def test_rows_that_a_grid_cannot_cut(name, sizes, rows, refused):
    """S59: 3D needs a multiple of 4, 2D of 2, 2.5D of 4."""
    for n in rows:
        with pytest.raises(RefusedError, match=refused):
            SCHEMES[name].X.local_shape((n, 8), sizes)
    SCHEMES[name].X.local_shape((4, 8), sizes)
    SCHEMES[name].X.local_shape((8, 8), sizes)


def test_widths_that_a_grid_cannot_cut():
    """S59: hidden 8 will do on a 2x2x2 cube, 6 will not: q^2 divides W's D, and of stacked layers F."""

    def cut(D, F, scheme):
        TensorParallelLinear.from_linear(nn.Linear(D, F), scheme, Mesh(**CUBE))

    run(cut, 8, 16, Cube(), ranks=8)
    with pytest.raises(RefusedError, match=r"dim D of size 6 cannot be cut evenly over k=2 x i=2"):
        run(cut, 6, 8, Cube(), ranks=8)
    with pytest.raises(RefusedError, match=r"dim D of size 6 cannot be cut evenly over j=2 x i=2"):
        run(cut, 6, 8, Cube().exchanged(), ranks=8)


@pytest.mark.parametrize("make", ["layer", "function"])
@pytest.mark.parametrize(
    "name, sizes", [("2d", {"row": 2, "col": 3}), ("2.5d", {"depth": 1, "row": 3, "col": 2})]
)
def test_a_grid_that_is_not_square_is_refused_before_any_communication(name, sizes, make):
    def step():
        mesh, scheme = Mesh(**sizes), SCHEMES[name]
        if make == "layer":
            TensorParallelLinear.from_linear(nn.Linear(12, 6), scheme, mesh)
        else:
            tensor_parallel_linear(torch.ones(6, 6), torch.ones(4, 6), scheme, mesh)

    with pytest.raises(
        RefusedError, match=r"over col=\d in X and over row=\d in W, and these must be equal"
    ) as refused:
        run(step, ranks=6)
    assert not refused.value.run.trace.events
    assert "Try row=2, col=2 or row=3, col=3." in str(refused.value)


def test_rows_that_y_cannot_take_are_refused_before_any_communication():
    """On a box that is no cube the rows of X may divide and those of Y not."""

    def step():
        mesh = Mesh(i=1, j=2, k=3)
        layer = TensorParallelLinear.from_linear(nn.Linear(6, 4), Cube(), mesh)
        layer(torch.ones(2, 2))

    with pytest.raises(RefusedError, match=r"dim B of size 4 cannot be cut evenly over i=1 x k=3") as refused:
        run(step, ranks=6)
    assert not refused.value.run.trace.events


@pytest.mark.parametrize("name", ["2d", "2.5d", "3d"])
def test_a_shard_of_the_wrong_width_is_named(name):
    scheme = SCHEMES[name]
    sizes = dict.fromkeys(scheme.axes, 2)

    def step():
        TensorParallelLinear.from_linear(nn.Linear(8, 8), scheme, Mesh(**sizes))(torch.ones(4, 8))

    with pytest.raises(
        RefusedError, match=r"4 of D=8 columns on each rank .* was given shape \(4, 8\)"
    ) as refused:
        run(step, ranks=n_ranks(sizes))
    assert not refused.value.run.trace.events


# ---- how many ranks


@pytest.mark.parametrize(
    "scheme, n_ranks, depth, sizes",
    [
        ("2d", 9, 1, {"row": 3, "col": 3}),
        ("2d", 1, 1, {"row": 1, "col": 1}),
        ("3d", 8, 1, {"i": 2, "j": 2, "k": 2}),
        ("3d", 27, 1, {"i": 3, "j": 3, "k": 3}),
        ("2.5d", 8, 2, {"depth": 2, "row": 2, "col": 2}),
        ("2.5d", 18, 2, {"depth": 2, "row": 3, "col": 3}),
    ],
)
def test_world_sizes_that_fit(scheme, n_ranks, depth, sizes):
    """S35."""
    assert grid(scheme, n_ranks, depth) == sizes
    assert set(sizes) == set(SCHEMES[scheme].axes)


@pytest.mark.parametrize("n_ranks, depth", [(12, 3), (16, 4)])
def test_more_layers_than_rows_are_warned_of(n_ranks, depth):
    """S35."""
    with pytest.warns(UserWarning, match=f"depth={depth} and q=2: more layers than a grid has rows"):
        assert grid("2.5d", n_ranks, depth) == {"depth": depth, "row": 2, "col": 2}


@pytest.mark.parametrize(
    "scheme, n_ranks, depth, words",
    [
        ("2d", 6, 1, r"2d needs q x q ranks, and 6 is not that. Nearest: 4 \(2 x 2\) or 9 \(3 x 3\)"),
        ("2d", 8, 1, r"Nearest: 4 \(2 x 2\) or 9 \(3 x 3\)"),
        ("3d", 4, 1, r"Nearest: 1 \(1 x 1 x 1\) or 8 \(2 x 2 x 2\)"),
        ("3d", 12, 1, r"Nearest: 8 \(2 x 2 x 2\) or 27 \(3 x 3 x 3\)"),
        ("2.5d", 8, 1, r"8 is not 1 squares. With 8 ranks: depth=2 \(q=2\), depth=8 \(q=1\)"),
        ("2.5d", 12, 2, r"With 12 ranks: depth=3 \(q=2\), depth=12 \(q=1\)"),
        ("4d", 8, 1, "no scheme is called '4d'"),
    ],
)
def test_world_sizes_that_do_not_fit(scheme, n_ranks, depth, words):
    """S35."""
    with pytest.raises(RefusedError, match=words):
        grid(scheme, n_ranks, depth)
