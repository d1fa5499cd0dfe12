"""From any layout to any layout: the numbers arrive, the bill is what is counted, no detour is cheaper."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lessons_lib import Layout, Mesh, run
from lessons_lib.errors import RefusedError
from lessons_lib.layout import coordinates
from lessons_lib.redistribute import redistribute, redistribution
from tests.serial_layer import random, relative_error

FLOAT64_BYTES = 8


@st.composite
def meshes(draw):
    n = draw(st.integers(1, 3))
    return {axis: draw(st.integers(1, 3)) for axis in ("i", "j", "k")[:n]}


@st.composite
def layouts(draw, sizes, dims=("B", "D")):
    """Each axis cuts a dim, marks a partial sum, or is not named; in any order."""
    cuts, partial = {dim: [] for dim in dims}, []
    for axis in draw(st.permutations(sorted(sizes))):
        place = draw(st.sampled_from([*dims, "partial", "copy"]))
        if place in cuts:
            cuts[place].append(axis)
        elif place == "partial":
            partial.append(axis)
    return Layout.of({dim: tuple(cut) for dim, cut in cuts.items()}, partial)


@st.composite
def journeys(draw):
    sizes = draw(meshes())
    source, target = draw(layouts(sizes)), draw(layouts(sizes))
    blocks = [[layout.n_blocks(sizes)[dim] for layout in (source, target)] for dim in range(2)]
    shape = tuple(prod(pair) * draw(st.integers(1, 2)) for pair in blocks)
    return sizes, source, target, shape


def held(layout, X, sizes):
    """What each rank holds of X: its block, or for a partial sum a term of it, all terms different."""
    whole = Layout.of(dict(zip(layout.dims, layout.cuts, strict=True)))
    blocks = []
    for at in coordinates(sizes):
        terms = layout.n_terms(sizes)
        index = 0
        for axis in layout.partial:
            index = index * sizes[axis] + at[axis]
        weight = Fraction(2 * (index + 1), terms * (terms + 1))  # 1, 2, ... of 1 + 2 + ...
        blocks.append(whole.cut(X, sizes, at) * float(weight))
    return blocks


def truth(layout, blocks, sizes):
    """The tensor that all ranks together hold."""
    whole = Layout.of(dict(zip(layout.dims, layout.cuts, strict=True)))
    sums = []
    places = coordinates(sizes)
    for at in places:
        same = [
            block
            for block, other in zip(blocks, places, strict=True)
            if all(at[axis] == other[axis] for axis in sizes if axis not in layout.partial)
        ]
        sums.append(sum(same))
    return whole, sums


def assert_arrives(sizes, source, target, shape, transport="threads"):
    X = random(*shape, seed=7)
    blocks = held(source, X, sizes)
    places = coordinates(sizes)

    def step():
        mesh = Mesh(**sizes)
        return redistribute(blocks[mesh.rank], source, target, mesh)

    result = run(step, ranks=len(places), transport=transport)
    whole, sums = truth(target, result.values, sizes)
    for at, block in zip(places, sums, strict=True):
        assert relative_error(block, whole.cut(X, sizes, at)) < 1e-12, at
    bill = sum(step.sent for step in redistribution(source, target, shape, sizes))
    counted = sum(map(result.trace.bytes_sent, range(len(places))))
    assert counted == bill * FLOAT64_BYTES * len(places)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(journeys())
def test_numbers_arrive_and_the_bill_is_what_is_counted(journey):
    assert_arrives(*journey)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, target",
    [("B@i@j D", "B@j D@i"), ("B D +i +j", "B@i D@j"), ("B@i D +j", "B@j D +i"), ("B D@i", "B@j D +i")],
)
def test_on_process_ranks(source, target):
    assert_arrives({"i": 2, "j": 2}, Layout(source), Layout(target), (8, 4), transport="processes")


def cost(source, target, shape, sizes):
    return sum(step.sent for step in redistribution(source, target, shape, sizes))


@settings(max_examples=100, deadline=None)
@given(journeys(), st.data())
def test_a_detour_is_never_cheaper(journey, data):
    sizes, source, target, shape = journey
    between = data.draw(layouts(sizes))
    assume(all(size % n == 0 for size, n in zip(shape, between.n_blocks(sizes), strict=True)))
    direct = cost(source, target, shape, sizes)
    assert direct <= cost(source, between, shape, sizes) + cost(between, target, shape, sizes)


@settings(max_examples=50, deadline=None)
@given(journeys())
def test_steps_lead_from_source_to_target(journey):
    sizes, source, target, shape = journey
    steps = redistribution(source, target, shape, sizes)
    stations = [source, *(step.target for step in steps)]
    assert [step.source for step in steps] == stations[:-1] and stations[-1] == target
    assert len(set(stations)) == len(stations)
    assert (cost(source, target, shape, sizes) == 0) >= (source == target)


@pytest.mark.parametrize(
    "source, target, kinds, sent",
    [
        ("B D", "B D", [], 0),
        ("B D", "B D@tp", ["keep"], 0),  # copy -> cut costs nothing
        ("B D", "B D +tp", ["term"], 0),
        ("B D@tp", "B D", ["all_gather"], 3 * 32 // 4),
        ("B D +tp", "B D@tp", ["reduce_scatter"], 3 * 32 // 4),
        ("B D +tp", "B D", ["all_reduce"], 2 * 3 * 32 // 4),
        ("B@tp D", "B D@tp", ["all_to_all"], 3 * 8 // 4),
    ],
)
def test_one_axis(source, target, kinds, sent):
    steps = redistribution(Layout(source), Layout(target), (4, 8), {"tp": 4})
    assert [step.kind for step in steps] == kinds
    assert sum(step.sent for step in steps) == sent


def test_an_exchange_beats_gathering():
    """B@i -> B@j on a 2x2 grid: half the ranks swap a block; to gather and cut would cost each a block."""
    (step,) = redistribution(Layout("B@i"), Layout("B@j"), (8,), {"i": 2, "j": 2})
    assert (step.kind, step.sent) == ("exchange", 2)
    assert str(step) == "exchange: B@i -> B@j, 2 elements sent"


def test_partial_sums_over_two_axes_are_reduced_where_it_is_cheapest():
    """Reduce-scatter over one, all-reduce the quarter, all-gather: as cheap as one ring over all 8."""
    sizes = {"row": 2, "col": 4}
    assert cost(Layout("D +row +col"), Layout("D"), (64,), sizes) == 2 * 7 * 64 // 8


@pytest.mark.parametrize("layout, bill", [("column", 384), ("rows", 384), ("inner", 768), ("grid", 480)])
def test_one_product_four_layouts(layout, bill):
    """Y = X W at (32, 8, 16) on four ranks, Y wanted whole on all: what has to be sent."""
    B, D, F = 32, 8, 16
    if layout == "grid":
        from lessons_lib.tensor_parallel import SCHEMES

        sizes = {"row": 2, "col": 2}
        forward = SCHEMES["2d"].traffic(B, D, F, sizes)["forward"]
        assert forward + cost(Layout("B@row F@col"), Layout("B F"), (B, F), sizes) == bill
    else:
        Y = {"column": "B F@tp", "rows": "B@tp F", "inner": "B F +tp"}[layout]
        assert cost(Layout(Y), Layout("B F"), (B, F), {"tp": 4}) == bill


def test_the_result_is_never_the_argument():
    def step():
        mesh, x = Mesh(tp=2), torch.ones(4)
        y = [redistribute(x, Layout("D"), Layout(to), mesh) for to in ("D", "D@tp", "D +tp")]
        return all(t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for t in y)

    assert run(step, ranks=2).values == [True, True]


@pytest.mark.parametrize(
    "source, target, shape, message",
    [
        ("B D", "B F", (4, 4), "do not describe one tensor: their dims are B D and B F"),
        ("B@tp D", "B D@tp", (4, 6), "dim D of size 6 cannot be cut evenly over tp=4"),
        ("B@row D", "B D", (4, 6), "names the axis 'row', which the mesh does not have"),
    ],
)
def test_refusals(source, target, shape, message):
    with pytest.raises(RefusedError, match=message):
        redistribution(Layout(source), Layout(target), shape, {"tp": 4})

    def step():
        mesh = Mesh(tp=4)
        x = torch.ones(shape[0] // (4 if "B@tp" in source else 1), shape[1])
        redistribute(x, Layout(source), Layout(target), mesh)

    with pytest.raises(RefusedError, match=message) as refused:
        run(step, ranks=4)
    assert not refused.value.run.trace.events
