"""Layouts: the notation, the laws of cutting and joining, and what is refused in which words."""

import copy
import pickle
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout, coordinates

AXES = ("row", "col", "depth")


@st.composite
def layouts_on_meshes(draw, partial=False):
    """A layout, the shape of a tensor that it cuts evenly, and a mesh whose axis sizes may all differ."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in draw(st.permutations(AXES))[: draw(st.integers(1, 3))]}
    dims = ("B", "D", "F")[: draw(st.integers(1, 3))]
    cuts: dict[str, list[str]] = {dim: [] for dim in dims}
    terms = []
    for axis in draw(st.permutations(list(sizes))):
        at = draw(st.integers(-2 if partial else -1, len(dims) - 1))
        if at >= 0:
            cuts[dims[at]].append(axis)
        elif at == -2:
            terms.append(axis)
    shape = tuple(draw(st.integers(1, 3)) * prod(sizes[axis] for axis in cuts[dim]) for dim in dims)
    return Layout.of(cuts, terms), shape, sizes


def numbers(shape):
    return torch.arange(float(prod(shape)), dtype=torch.float64).reshape(shape)


def cut_for_all(layout, X, sizes):
    return [layout.cut(X, sizes, coordinate) for coordinate in coordinates(sizes)]


# A mesh without ranks, for shard and unshard: its groups look into the other ranks' values, which a
# real all-gather would receive. The real Mesh is tested against this module in the tests of the schemes.


@dataclass
class SimulatedMesh:
    """The mesh as one rank sees it, while a test computes all ranks one after the other.

    ``held`` says what every rank holds at the moment; each all-gather is one step in which all take part.
    """

    sizes: dict
    rank: int
    held: list
    gathered: list

    @property
    def coordinate(self):
        return coordinates(self.sizes)[self.rank]

    def __getitem__(self, axis):
        return SimulatedGroup(self, axis)


@dataclass
class SimulatedGroup:
    mesh: SimulatedMesh
    axis: str

    @property
    def members(self):
        mine = self.mesh.coordinate
        return [
            rank
            for rank, place in enumerate(coordinates(self.mesh.sizes))
            if all(place[axis] == mine[axis] for axis in mine if axis != self.axis)
        ]

    @property
    def size(self):
        return len(self.members)

    @property
    def rank(self):
        return self.members.index(self.mesh.rank)

    def all_gather(self, x, dim):
        step = len(self.mesh.gathered)
        self.mesh.gathered.append(self.axis)
        assert torch.equal(self.mesh.held[step][self.mesh.rank], x), "a rank gathers what it holds"
        return torch.cat([self.mesh.held[step][member] for member in self.members], dim)


def unshard_on_all(layout, blocks, sizes):
    """What ``unshard`` returns on every rank, and the axes it gathered over on rank 0."""
    steps = [(at, axis) for at, cut in enumerate(layout.cuts) for axis in reversed(cut)]
    held = [blocks]
    for at, axis in steps:  # what everybody holds after each all-gather
        before = held[-1]
        held.append(
            [
                SimulatedGroup(SimulatedMesh(sizes, rank, [before], []), axis).all_gather(before[rank], at)
                for rank in range(len(blocks))
            ]
        )
    results, gathered = [], []
    for rank, block in enumerate(blocks):
        mesh = SimulatedMesh(sizes, rank, held, [])
        results.append(layout.unshard(block, mesh))
        gathered.append(mesh.gathered)
    assert all(axes == gathered[0] for axes in gathered)
    return results, gathered[0]


# Notation


@pytest.mark.parametrize(
    "notation",
    ["B D", "B@row D@col", "B@i@k F@j", "B F +tp", "B@dp +cp +tp", "F@tp", "+dp", "", "hidden_2@tp"],
)
def test_notation_round_trips(notation):
    layout = Layout(notation)
    assert str(layout) == notation
    assert repr(layout) == f'Layout("{notation}")'
    assert eval(repr(layout)) == layout


@given(layouts_on_meshes(partial=True))
def test_a_layout_is_a_value(case):
    layout, _, _ = case
    for same in (Layout(str(layout)), pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert same == layout and hash(same) == hash(layout) and {layout: 1}[same] == 1


def test_order_of_axes_counts_and_order_of_partial_marks_does_not():
    assert Layout("B@i@k") != Layout("B@k@i")
    assert Layout("B@i D") != Layout("D B@i")
    assert Layout("B +i +k") == Layout("B +k +i")
    assert Layout("B") != Layout("B +k")
    assert Layout("B") != "B"  # type: ignore[comparison-overlap]


def test_the_parts_of_a_layout():
    layout = Layout("B@i@k F@j D +tp")
    assert layout.dims == ("B", "F", "D")
    assert layout.cuts == (("i", "k"), ("j",), ())
    assert layout.partial == ("tp",)
    assert layout.axes == ("i", "k", "j", "tp")
    assert layout.replicated({"dp": 2, "i": 1, "j": 1, "k": 1, "tp": 1}) == ("dp",)
    with pytest.raises(AttributeError):
        layout.dims = ()  # type: ignore[misc]


def test_layouts_that_follow():
    Y = Layout("B@i@k S F@j +tp")
    assert Y.drop("B") == Layout("S F@j +tp")
    assert Y.last() == Layout("F@j +tp")
    assert Y.summed("B", "S") == Layout("F@j +i +k +tp")
    assert Layout("").drop() == Layout("")


@pytest.mark.parametrize(
    "notation, token, why",
    [
        ("B@row,D@col", "B@row,D@col", "there is no comma, dims are parted by a blank"),
        ("B@row, D@col", "B@row,", "there is no comma, dims are parted by a blank"),
        ("B@", "B@", "@ needs an axis behind it"),
        ("B D@", "D@", "@ needs an axis behind it"),
        ("B@i@ D", "B@i@", "@ needs an axis behind it"),
        ("@row", "@row", "@ needs a dim before it"),
        ("B @row", "@row", "there is no blank before @"),
        ("B@row-1", "B@row-1", "'row-1' is no name for an axis"),
        ("B[row]", "B[row]", "'B[row]' is no name for a dim"),
        ("B 2", "2", "'2' is no name for a dim"),
        ("B +", "+", "+ needs an axis behind it"),
        ("B+tp", "B+tp", "'B+tp' is no name for a dim"),
        ("B +tp D", "D", "a dim cannot follow a partial sum"),
        ("B B@tp", "B@tp", "there is a dim B already"),
        ("B@tp D@tp", "D@tp", "axis tp is used already"),
        ("B@tp@tp", "B@tp@tp", "axis tp is used already"),
        ("B@tp +tp", "+tp", "axis tp is used already"),
    ],
)
def test_bad_notation_is_refused_at_the_token(notation, token, why):
    with pytest.raises(RefusedError) as refused:
        Layout(notation)
    message = str(refused.value)
    assert message.startswith(f'Layout("{notation}"): cannot read {token!r}, {why}')
    assert message.endswith('Layout("B@row D@col"), Layout("B@i@k F@j"), Layout("B F +tp").')


def test_not_a_string_is_refused():
    with pytest.raises(
        RefusedError, match=r"^Layout takes a string, not \('B', 'D'\)\. Write the dims in order"
    ):
        Layout(("B", "D"))  # type: ignore[arg-type]


# Laws


@given(layouts_on_meshes())
def test_join_after_cut_is_the_identity(case):
    layout, shape, sizes = case
    X = numbers(shape)
    assert torch.equal(layout.join(cut_for_all(layout, X, sizes), sizes), X)


@given(layouts_on_meshes())
def test_numpy_is_cut_like_torch(case):
    layout, shape, sizes = case
    X = numbers(shape)
    for coordinate in coordinates(sizes):
        x = layout.cut(X.numpy(), sizes, coordinate)
        assert isinstance(x, numpy.ndarray) and x.base is None
        assert numpy.array_equal(x, layout.cut(X, sizes, coordinate).numpy())
    joined = layout.join([block.numpy() for block in cut_for_all(layout, X, sizes)], sizes)
    assert numpy.array_equal(joined, X.numpy()) and joined.dtype == X.numpy().dtype


@given(layouts_on_meshes())
def test_unshard_after_shard_is_the_identity_on_every_rank(case):
    layout, shape, sizes = case
    X = numbers(shape)
    blocks = [layout.shard(X, SimulatedMesh(sizes, rank, [], [])) for rank in range(prod(sizes.values()))]
    wholes, gathered = unshard_on_all(layout, blocks, sizes)
    assert all(torch.equal(whole, X) for whole in wholes)
    assert gathered == [axis for cut in layout.cuts for axis in reversed(cut)]


@given(layouts_on_meshes(partial=True))
def test_shapes_shares_and_counts_agree(case):
    layout, shape, sizes = case
    local = layout.local_shape(shape, sizes)
    assert prod(local) == prod(shape) * layout.share(sizes)
    assert layout.global_shape(local, sizes) == shape
    n_ranks = prod(sizes.values())
    assert prod(layout.n_blocks(sizes)) * layout.n_terms(sizes) * layout.n_copies(sizes) == n_ranks


@given(layouts_on_meshes(partial=True))
def test_owners_share_out_all_ranks(case):
    layout, _, sizes = case
    owners = layout.owners(sizes)
    assert sorted(rank for ranks in owners.values() for rank in ranks) == list(range(prod(sizes.values())))
    assert list(owners) == list(product(*map(range, layout.n_blocks(sizes))))
    for index, ranks in owners.items():
        assert len(ranks) == layout.n_terms(sizes) * layout.n_copies(sizes)
        assert all(layout.block(sizes, coordinates(sizes)[rank]) == index for rank in ranks)


@given(layouts_on_meshes())
def test_ranks_that_differ_along_a_replicated_axis_only_hold_equal_blocks(case):
    layout, shape, sizes = case
    X = numbers(shape)
    replicated = layout.replicated(sizes)
    for one, other in product(coordinates(sizes), repeat=2):
        same = all(one[axis] == other[axis] for axis in sizes if axis not in replicated)
        assert torch.equal(layout.cut(X, sizes, one), layout.cut(X, sizes, other)) == same


def test_ranks_are_numbered_row_major():
    sizes = {"row": 2, "col": 3}
    assert [place["row"] * 3 + place["col"] for place in coordinates(sizes)] == list(range(6))
    assert coordinates({}) == [{}]


def test_the_first_axis_cuts_first():
    X = torch.arange(4)
    sizes = {"a": 2, "b": 2}
    assert [int(x) for x in cut_for_all(Layout("B@a@b"), X, sizes)] == [0, 1, 2, 3]
    assert [int(x) for x in cut_for_all(Layout("B@b@a"), X, sizes)] == [0, 2, 1, 3]


def test_rows_and_columns_of_a_grid():
    X = torch.arange(24).reshape(4, 6)
    blocks = cut_for_all(Layout("B@row D@col"), X, {"row": 2, "col": 3})
    assert torch.equal(blocks[4], X[2:4, 2:4])  # rank 4 is at row 1, column 1


def test_blocks_of_a_scalar():
    X = torch.tensor(3.0)
    blocks = cut_for_all(Layout(""), X, {"dp": 2})
    assert [float(x) for x in blocks] == [3.0, 3.0]
    assert torch.equal(Layout("").join(blocks, {"dp": 2}), X)


@given(layouts_on_meshes())
def test_nobody_shares_storage(case):
    layout, shape, sizes = case
    X = numbers(shape)
    blocks = cut_for_all(layout, X, sizes)
    owned: list[Tensor] = [X, *blocks, layout.join(blocks, sizes), *unshard_on_all(layout, blocks, sizes)[0]]
    assert len({x.untyped_storage().data_ptr() for x in owned}) == len(owned)


def test_of_copies_the_lowest_rank_is_joined():
    joined = Layout("B").join([torch.tensor([1.0]), torch.tensor([2.0])], {"dp": 2})
    assert joined.tolist() == [1.0]


# Refusals


def test_an_indivisible_size_names_everything():
    """Case S04: hidden = 10 over 4."""
    with pytest.raises(RefusedError) as refused:
        Layout("B hidden@tp").local_shape((3, 10), {"tp": 4})
    assert str(refused.value) == (
        'Layout("B hidden@tp") on a mesh of tp=4: dim hidden of size 10 cannot be cut evenly over tp=4, '
        "so into 4 blocks. Nearest sizes that can: 8, 12. Legal degrees for 10: 1, 2, 5, 10."
    )


@pytest.mark.parametrize(
    "notation, shape, sizes, words",
    [
        (
            "H@tp",
            (28,),
            {"tp": 8},
            r"Nearest sizes that can: 24, 32\. Legal degrees for 28: 1, 2, 4, 7, 14, 28\.",
        ),
        ("F@tp", (11,), {"tp": 2}, r"Nearest sizes that can: 10, 12\. Legal degrees for 11: 1, 11\."),
        (
            "B@i@k D",
            (6, 5),
            {"i": 2, "k": 2},
            r"dim B of size 6 .* over i=2 x k=2, so into 4 blocks\. .*: 4, 8\.",
        ),
        ("D@tp", (3,), {"tp": 4}, r"Nearest sizes that can: 4\. Legal degrees for 3: 1, 3\."),
        (
            "V@tp",
            (50400,),
            {"tp": 11},
            r"Legal degrees for 50400: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, \.\.\., 50400\.",
        ),
    ],
)
def test_other_indivisible_sizes(notation, shape, sizes, words):
    with pytest.raises(RefusedError, match=words):
        Layout(notation).local_shape(shape, sizes)


def test_an_indivisible_size_is_refused_in_the_same_words_on_every_rank():
    layout, sizes, X = Layout("B@row D@col"), {"row": 2, "col": 3}, torch.zeros(4, 7)
    messages = set()
    for rank in range(6):
        with pytest.raises(RefusedError) as refused:
            layout.shard(X, SimulatedMesh(sizes, rank, [], []))
        messages.add(str(refused.value))
    assert len(messages) == 1


def test_an_axis_the_mesh_does_not_have():
    layout = Layout("B D@col")
    words = r"names the axis 'col', which the mesh does not have: its axes are row=2, tp=4\.$"
    sizes = {"row": 2, "tp": 4}
    for ask in (
        lambda: layout.local_shape((2, 8), sizes),
        lambda: layout.owners(sizes),
        lambda: layout.replicated(sizes),
        lambda: Layout("B +col").n_terms(sizes),
        lambda: layout.join([], sizes),
        lambda: layout.shard(torch.zeros(2, 8), SimulatedMesh(sizes, 0, [], [])),
        lambda: layout.unshard(torch.zeros(2, 8), SimulatedMesh(sizes, 0, [], [])),
    ):
        with pytest.raises(RefusedError, match=words):
            ask()


def test_the_wrong_number_of_dims():
    words = r'^Layout\("B D"\) has 2 dims \(B, D\), but the tensor has 3: its shape is \(2, 3, 4\)\.$'
    with pytest.raises(RefusedError, match=words):
        Layout("B D").cut(torch.zeros(2, 3, 4), {"tp": 1}, {"tp": 0})
    with pytest.raises(RefusedError, match=r"but the block has 1: its shape is \(2,\)"):
        Layout("B D").unshard(torch.zeros(2), SimulatedMesh({"tp": 1}, 0, [], []))


def test_a_partial_sum_is_neither_cut_nor_joined():
    layout, sizes = Layout("B F@row +tp"), {"row": 1, "tp": 2}
    mesh = SimulatedMesh(sizes, 0, [], [])
    result = r'is a partial sum over tp: a partial sum is the result of .*Cut by Layout\("B F@row"\)'
    resolve = r"is a partial sum over tp: only redistribute resolves"
    with pytest.raises(RefusedError, match=result):
        layout.cut(torch.zeros(2, 2), sizes, {"row": 0, "tp": 0})
    with pytest.raises(RefusedError, match=result):
        layout.shard(torch.zeros(2, 2), mesh)
    with pytest.raises(RefusedError, match=resolve):
        layout.join([torch.zeros(2, 2)] * 2, sizes)
    with pytest.raises(RefusedError, match=resolve):
        layout.unshard(torch.zeros(2, 2), mesh)
    assert mesh.gathered == []


def test_blocks_that_do_not_fit_together():
    layout, sizes = Layout("B@row D"), {"row": 2, "col": 1}
    with pytest.raises(RefusedError, match=r"joins 2 blocks, one per rank in rank order; got 3\.$"):
        layout.join([torch.zeros(1, 2)] * 3, sizes)
    with pytest.raises(
        RefusedError, match=r"rank 0 has \(1, 2\), rank 1 \(at row=1, col=0\) has \(2, 2\)\.$"
    ):
        layout.join([torch.zeros(1, 2), torch.zeros(2, 2)], sizes)


def test_other_mistakes():
    with pytest.raises(RefusedError, match=r"^A layout is about tensors \(or numpy arrays\), not list\.$"):
        Layout("B").cut([1, 2], {"tp": 1}, {"tp": 0})
    with pytest.raises(RefusedError, match=r"the coordinate tp=2 needs tp from 0 to 1\.$"):
        Layout("B@tp").block({"tp": 2}, {"tp": 2})
    with pytest.raises(RefusedError, match=r"the coordinate \(\) needs tp from 0 to 1\.$"):
        Layout("B@tp").block({"tp": 2}, {})
    with pytest.raises(RefusedError, match=r"has no dim 'F': its dims are B, D\.$"):
        Layout("B D").dim("F")
    with pytest.raises(RefusedError, match=r"has no dim 'F': its dims are none\.$"):
        Layout("").summed("F")
    with pytest.raises(RefusedError, match=r"axis 'tp' has no ranks\.$"):
        Layout("B@tp").local_shape((2,), {"tp": 0})
