"""Pictures of schemes, bills and frontiers: what they show is what a run did, and what a formula says."""

from __future__ import annotations

import itertools
import math
import time
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.cost import compare, count, formula, ways
from lessons_lib.errors import RefusedError
from lessons_lib.layout import coordinates
from lessons_lib.redistribute import redistribute, redistribution
from lessons_lib.tensor_parallel import SCHEMES, Summa, Tesseract
from lessons_lib.tensor_parallel.schemes import VARIANTS
from lessons_lib.views.bills import bill_picture, number
from lessons_lib.views.frontier import (
    MARK,
    _around,
    _names,
    _overlap,
    _staircase,
    _x,
    _y,
    bytes_text,
    frontier_picture,
)
from lessons_lib.views.scheme_steps import Part, scheme_step
from lessons_lib.views.svg import WIDTH
from lessons_lib.widgets import frontier as frontiers
from lessons_lib.widgets.bills import SHAPE, product_bill
from lessons_lib.widgets.recorded_schemes import RESULTS, SHAPES, B, D, F, _record, record_scheme, whole
from lessons_lib.widgets.schemes import SHOWN
from tests.test_pictures import SVG, box, texts, written

ALL = {**SCHEMES, **VARIANTS}
STEPS = [(name, tuple(sizes.items()), result) for name, sizes in SHOWN.values() for result in RESULTS]


def plain(name, sizes):
    """The trace of a run of a scheme that nobody watches."""
    scheme = ALL[name]

    def step():
        mesh = Mesh(**sizes)
        x, w, dy = (
            layout.shard(torch.ones(shape, dtype=torch.float64), mesh)
            for layout, shape in ((scheme.X, (B, D)), (scheme.W, (D, F)), (scheme.Y, (B, F)))
        )
        with region("forward"):
            scheme.forward(x, w, mesh)
        with region("backward"):
            scheme.backward(dy, x, w, mesh)

    return run(step, ranks=math.prod(sizes.values())).trace


def carried(steps, rank):
    """The collectives in which a rank takes part, and what it sends in them."""
    return [
        (each.kind, each.axis, each.members, each.sent[rank])
        for stage in steps.stages
        for each in (*stage.fetched, *stage.given)
        if rank in each.members
    ]


def blocks(part, layout, sizes):
    """The slices of a matrix that a part stands for."""
    height, width = layout.local_shape(SHAPES[part.tensor], sizes)
    return (
        slice(part.rows[0] * height, part.rows[1] * height),
        slice(part.cols[0] * width, part.cols[1] * width),
    )


# ---- schemes


@pytest.mark.parametrize("shown", SHOWN)
def test_stages_have_the_collectives_of_the_trace_each_once(shown):
    name, sizes = SHOWN[shown]
    trace = plain(name, sizes)
    steps = {result: record_scheme(name, tuple(sizes.items()), result) for result in RESULTS}
    for rank in range(trace.n_ranks):
        for direction, results in (("forward", ["Y"]), ("backward", ["dX", "dW"])):
            wanted = Counter(
                (event.kind, event.group, event.members, event.bytes_sent // 8)
                for event in trace.collectives(rank, direction)
            )
            got = Counter(each for result in results for each in carried(steps[result], rank))
            assert got == wanted
            sent = sum(steps[result].sent(rank, len(steps[result].stages)) for result in results)
            assert sent == trace.bytes_sent(rank, direction) // 8


@pytest.mark.parametrize("shown", SHOWN)
def test_what_a_scheme_sends_and_holds_is_the_formula_s(shown):
    name, sizes = SHOWN[shown]
    traffic, memory = ALL[name].traffic(B, D, F, sizes), ALL[name].memory(B, D, F, sizes)
    steps = {result: record_scheme(name, tuple(sizes.items()), result) for result in RESULTS}
    n = math.prod(sizes.values())

    def sent(*results):
        return sum(
            steps[result].sent(rank, len(steps[result].stages)) for result in results for rank in range(n)
        )

    assert sent("Y") == n * traffic["forward"]
    assert sent("dX", "dW") == n * traffic["backward"]
    assert {each.rest for each in steps.values()} == {memory["rest"]}
    assert steps["Y"].peak == memory["forward"]
    assert steps["dX"].peak == steps["dW"].peak == memory["backward"]


@pytest.mark.parametrize("name, mesh, result", STEPS)
def test_the_products_of_all_stages_are_the_result(name, mesh, result):
    """Every term of every block once: taken from whole matrices by what the picture says."""
    sizes, steps = dict(mesh), record_scheme(name, mesh, result)
    layouts = {each.name: Layout(each.layout) for each in (steps.left, steps.above, steps.result)}
    terms = {}
    for stage in steps.stages:
        for product in filter(None, stage.products):
            left, right = (
                whole(part.tensor)[blocks(part, layouts[part.tensor], sizes)]
                for part in (product.left, product.right)
            )
            left, right = (left.T if result == "dW" else left), (right.T if result == "dX" else right)
            terms[product.out, product.summed] = left @ right
    got = torch.zeros(SHAPES[result], dtype=torch.float64)
    for (out, _), term in terms.items():
        got[blocks(out, layouts[result], sizes)] += term
    left, right = (whole(each) for each in RESULTS[result])
    assert torch.equal(got, (left.T if result == "dW" else left) @ (right.T if result == "dX" else right))


@pytest.mark.parametrize("name, mesh, result", STEPS)
def test_what_is_not_a_rank_s_own_was_brought_by_those_who_have_it(name, mesh, result):
    sizes, steps = dict(mesh), record_scheme(name, mesh, result)
    places = coordinates(sizes)
    for stage in steps.stages:
        for each in stage.fetched:
            matrix = steps.left if each.part.tensor == steps.left.name else steps.above
            own = {rank: Layout(matrix.layout).block(sizes, places[rank]) for rank in each.members}
            if each.kind == "broadcast":
                assert own[each.root] in each.part and str(each.part).count(":") == 0
            else:
                n = math.prod(high - low for low, high in (each.part.rows, each.part.cols))
                assert all(block in each.part for block in own.values()) and len(set(own.values())) == n
        for rank, product in enumerate(stage.products):
            if product is None:
                continue
            for matrix, part in ((steps.left, product.left), (steps.above, product.right)):
                row, col = Layout(matrix.layout).block(sizes, places[rank])
                own_part = Part(matrix.name, (row, row + 1), (col, col + 1))
                brought = any(rank in each.members and each.part == part for each in stage.fetched)
                assert part == own_part or brought or (result == "dW" and part.tensor == "dY")


@pytest.mark.parametrize("name, mesh, result", STEPS)
def test_in_the_end_all_is_summed_and_not_before(name, mesh, result):
    stages = record_scheme(name, mesh, result).stages
    assert set(stages[-1].summed.values()) == {1}
    assert all(min(stage.summed.values()) < 1 for stage in stages[:-1])


def test_the_sum_over_depth_is_the_last_stage_of_dw_and_is_missed():
    mesh = (("depth", 3), ("row", 2), ("col", 2))
    *layers, depth = record_scheme("2.5d", mesh, "dW").stages
    assert len(layers) == 2 and {each.axis for each in depth.given} == {"depth"}
    assert {str(share) for share in layers[-1].summed.values()} == {"1/3"}


class Forgets(Tesseract):
    def backward(self, dy, x, w, mesh):
        return self.layer.backward(dy, x, w, mesh)


class Spoils(Summa):
    """Multiplies what nobody gave it."""

    def forward(self, x, w, mesh):
        return super().forward(x + 0.5, w, mesh)


def test_wrong_schemes_look_wrong(monkeypatch):
    monkeypatch.setitem(VARIANTS, "forgets", Forgets())
    monkeypatch.setitem(VARIANTS, "spoils", Spoils())
    mesh = (("depth", 2), ("row", 2), ("col", 2))
    stages = record_scheme("forgets", mesh, "dW").stages
    assert max(stages[-1].summed.values()) == 0.5
    with pytest.raises(RefusedError, match="is no part of X, W or dY"):
        record_scheme("spoils", mesh[1:], "Y")


def test_summa_step_2_of_3_says_what_the_standard_does():
    figure = scheme_step(record_scheme("2d", (("row", 3), ("col", 3)), "Y"), 2, rank=6)
    words = texts(figure)
    assert {"X[2,1]", "W[1,0]", "Y[2,0]", "broadcast over col, from rank 7"} <= set(words)
    assert {"broadcast over row, from rank 3", "2/3 summed", "Y[2,2]", "rank 8"} <= set(words)
    arrows = list(ET.fromstring(figure.svg).iter(f"{SVG}polygon"))
    assert [arrow.findtext(f"{SVG}title") for arrow in arrows] == [
        *(f"broadcast: X[{row},1]" for row in range(3)),
        *(f"broadcast: W[1,{col}]" for col in range(3)),
    ]
    assert figure.alt == (
        "2D on row=3, col=3, Y = X · W, stage 2 of 3: X: broadcast over col, from ranks 1, 4 and 7; "
        "W: broadcast over row, from ranks 3 to 5. Rank 6: X[2,1]: broadcast over col, from rank 7; "
        "W[1,0]: broadcast over row, from rank 3; Y[2,0]: 2/3 summed; it has sent 288 of 576 elements, "
        "and ranks hold 416 elements at rest and at most 992."
    )


def test_what_the_cube_uses_again_came_earlier():
    mesh = (("i", 2), ("j", 2), ("k", 2))
    assert "dY[0:2,0]: came earlier" in scheme_step(record_scheme("3d", mesh, "dW"), 1, rank=1).alt


@pytest.mark.parametrize("name, mesh, result", STEPS)
def test_no_stage_of_any_scheme_has_texts_that_overlap(name, mesh, result):
    steps = record_scheme(name, mesh, result)
    slow = []
    for stage in range(1, len(steps.stages) + 1):
        for rank in (0, len(steps.stages[0].products) - 1):
            began = time.thread_time()
            figure = scheme_step(steps, stage, rank=rank)
            root = ET.fromstring(figure.svg)
            slow.append(time.thread_time() - began)
            apart(root)
    assert sorted(slow)[len(slow) // 2] < 0.025


def apart(root):
    found = [(*box(text, wide=0.88), written(text)) for text in root.iter(f"{SVG}text")]
    assert all(text[2] <= WIDTH for text in found)
    for one, other in itertools.combinations(found, 2):
        meet = all(one[at] < other[at + 2] and other[at] < one[at + 2] for at in (0, 1))
        assert not meet, f"{one[4]!r} and {other[4]!r} overlap"


def test_what_a_step_refuses():
    steps = record_scheme("2d", (("row", 2), ("col", 2)), "Y")
    with pytest.raises(RefusedError, match="stage=3: this scheme has the stages 1 to 2"):
        scheme_step(steps, 3)
    with pytest.raises(RefusedError, match="rank=4"):
        scheme_step(steps, 1, rank=4)
    with pytest.raises(RefusedError, match="no scheme is called '4d'; there are column, row"):
        record_scheme("4d", (("row", 2),), "Y")
    with pytest.raises(RefusedError, match="result='Z': choose one of Y, dX, dW"):
        record_scheme("2d", (("row", 2), ("col", 2)), "Z")


# ---- bills

FLAT, GRID = (("row", 1), ("col", 4)), (("row", 2), ("col", 2))


def bill(x, w, y, mesh=FLAT):
    return product_bill(Layout(x), Layout(w), Layout(y), mesh)


def paid(found):
    """Go the way of a bill on ranks: what each had of Y in the end, right or not, and elements sent."""
    sizes, (rows, inner, cols) = found.sizes, found.shape
    (X, W), (x_as, w_as, out), Y = found.given, found.multiplied, found.wanted
    torch.manual_seed(0)
    whole_x, whole_w = (torch.randn(shape, dtype=torch.float64) for shape in ((rows, inner), (inner, cols)))

    def step():
        mesh = Mesh(**sizes)
        x, w = X.shard(whole_x, mesh), W.shard(whole_w, mesh)
        x, w = redistribute(x, X, x_as, mesh), redistribute(w, W, w_as, mesh)
        y = redistribute(x @ w, out, Y, mesh)
        wanted = Y.shard(whole_x @ whole_w, mesh)
        return ((y - wanted).norm() / wanted.norm()).item(), tuple(x.shape), w.shape[1]

    result = run(step, ranks=found.n_ranks)
    sent = sum(result.trace.bytes_sent(rank) for rank in range(found.n_ranks)) // 8
    return result.values, sent


def layouts(dims):
    places = st.sampled_from([(row, col) for row in (*dims, "") for col in (*dims, "")])

    def written(at, turned):
        axes = [("row", at[0]), ("col", at[1])][:: -1 if turned else 1]
        return " ".join(dim + "".join(f"@{axis}" for axis, on in axes if on == dim) for dim in dims)

    return st.builds(written, places, st.booleans())


@settings(max_examples=25, deadline=None)
@given(layouts("BD"), layouts("DF"), layouts("BF"), st.sampled_from([FLAT, GRID, (("row", 2), ("col", 4))]))
def test_a_bill_leads_to_y_and_is_what_ranks_send(x, w, y, mesh):
    found = bill(x, w, y, mesh)
    values, sent = paid(found)
    b, d, f = found.local
    assert all(error < 1e-12 and shape == (b, d) and cols == f for error, shape, cols in values)
    assert sent == found.sent * found.n_ranks
    assert found.sent <= found.gathered
    assert found.n_ranks * b * d * f == found.times * math.prod(SHAPE)
    assert max(float(each.sent) for each in (*found.before, *found.after, found)) <= found.scale


def test_the_four_cases():
    """Nothing, gather, add up (all or a piece), and the cut that X and W share, moved."""
    rows, inner, cols = SHAPE
    kinds = {
        ("B@col D", "D F", "B@col F"): ([], 0),
        ("B D@col", "D F", "B F"): (["all_gather"], 3 * rows * inner // 4),
        ("B D@col", "D@col F", "B F"): (["all_reduce"], 6 * rows * cols // 4),
        ("B D@col", "D@col F", "B F@col"): (["reduce_scatter"], 3 * rows * cols // 4),
        ("B D@col", "D@col F", "B F +col"): ([], 0),
        ("B@col D", "D F@col", "B F@col"): (["all_gather"], 3 * rows * inner // 4),
    }
    for (x, w, y), (steps, sent) in kinds.items():
        found = bill(x, w, y)
        assert ([each.kind for each in (*found.before, *found.after)], found.sent) == (steps, sent)


@pytest.mark.parametrize(
    "x, w, y", [("B@row D@col", "D@row F@col", "B@row F@col"), ("B D", "D@row@col F", "B F")]
)
def test_no_other_pair_of_layouts_sends_less(x, w, y):
    """Written out again, without care for work and steps: all that X and W can be multiplied as."""
    sizes, (rows, inner, cols) = dict(GRID), SHAPE

    def every(dims):
        for row, col, turned in itertools.product((*dims, ""), (*dims, ""), (False, True)):
            axes = [("row", row), ("col", col)][:: -1 if turned else 1]
            yield Layout(" ".join(d + "".join(f"@{axis}" for axis, on in axes if on == d) for d in dims))

    def cost(source, target, shape):
        return sum(step.sent for step in redistribution(source, target, shape, sizes))

    least = min(
        cost(Layout(x), x_as, (rows, inner))
        + cost(Layout(w), w_as, (inner, cols))
        + cost(Layout.of({"B": x_as.dim("B"), "F": w_as.dim("F")}, x_as.dim("D")), Layout(y), (rows, cols))
        for x_as in set(every("BD"))
        for w_as in set(every("DF"))
        if x_as.dim("D") == w_as.dim("D") and not set(x_as.dim("B")) & set(w_as.dim("F"))
    )
    assert bill(x, w, y, GRID).sent == least


def test_a_bill_shows_its_lines():
    found = bill("B@row D@col", "D@row F@col", "B@row F@col", GRID)
    figure = bill_picture(found)
    words = texts(figure)
    for each in (*found.before, *found.after):
        assert f"{each.source}  →  {each.target}" in words and number(each.sent) in words
    assert number(found.sent) in words and number(found.gathered) in words
    assert f"elements each rank sends, 0 to {found.scale:,}" in words
    assert figure.alt.count(";") == len(found.before) + len(found.after) + 1
    apart(ET.fromstring(figure.svg))


def test_all_ranks_that_compute_the_same_are_told():
    found = bill("B D", "D F", "B F", GRID)
    assert found.times == 4 and "4 ranks at a time compute the same" in bill_picture(found).svg


def test_what_a_bill_refuses():
    with pytest.raises(RefusedError, match=r"W has the dims D and F, in this order; Layout\(\"F D\"\) does"):
        bill("B D", "F D", "B F")
    with pytest.raises(RefusedError, match="dim B of size 16 cannot be cut evenly"):
        bill("B@col D", "D F", "B F", (("row", 1), ("col", 3)))
    with pytest.raises(RefusedError, match="3 axes: a bill is found for meshes of one or two"):
        bill("B D", "D F", "B F", (("a", 2), ("b", 2), ("c", 2)))


# ---- bytes against memory


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks, tokens", [(4, "12 h"), (8, "1/4 h"), (9, "h")])
def test_dots_are_counted_runs(n_ranks, tokens):
    n = frontiers.n_tokens(tokens)
    for memory in frontiers.MEMORY:
        dots = frontiers.frontier(n_ranks, n, memory, "H100").dots
        for dot, way in zip(dots, ways(n_ranks), strict=True):
            said = formula(way, n, frontiers.H)
            assert (dot.name, dot.counted) == (way.name, True)
            assert (dot.held, dot.sent) == (2 * getattr(said, memory), 2 * said.sent)
            assert count(way, n, frontiers.H) == said


def test_up_to_16_ranks_are_counted_and_64_are_said(monkeypatch):
    asked = []
    monkeypatch.setattr(frontiers, "bill", frontiers.bill.__wrapped__)
    for name in ("count", "formula"):
        monkeypatch.setattr(
            frontiers, name, lambda way, *sizes, name=name: asked.append(name) or formula(way, *sizes)
        )
    for n_ranks in frontiers.RANKS:
        asked.clear()
        dots = frontiers.frontier(int(n_ranks), frontiers.H, "kept", "H100").dots
        assert set(asked) == {"count" if int(n_ranks) <= 16 else "formula"}
        assert {dot.counted for dot in dots} == {int(n_ranks) <= 16}


@pytest.fixture
def every_state(monkeypatch):
    """All that the controls can show, from formulas: the tests above hold them equal to runs."""
    monkeypatch.setattr(frontiers, "count", formula)
    monkeypatch.setattr(frontiers, "bill", frontiers.bill.__wrapped__)
    return [
        frontiers.frontier(int(n_ranks), frontiers.n_tokens(tokens), memory, "H100")
        for n_ranks in frontiers.RANKS
        for tokens in frontiers.TOKENS
        for memory in frontiers.MEMORY
    ]


def test_axes_never_move_and_hold_every_dot(every_state):
    assert {(each.held_axis, each.sent_axis) for each in every_state} == {
        (frontiers.HELD_AXIS, frontiers.SENT_AXIS)
    }
    for each in every_state:
        for dot in each.dots:
            assert frontiers.HELD_AXIS[0] < dot.held < frontiers.HELD_AXIS[1]
            assert frontiers.SENT_AXIS[0] < dot.sent < frontiers.SENT_AXIS[1]


def test_no_name_of_a_dot_hides_another(every_state):
    for each in every_state:
        places = [(_x(each, dot.held), _y(each, dot.sent, 0)) for dot in each.dots]
        dots = [(x - MARK, y - MARK, 2 * MARK, 2 * MARK) for x, y in places]
        best = sorted(place for place, best in zip(places, each.best, strict=True) if best)
        lines = [_around(*line) for line in itertools.pairwise(_staircase(best))]
        names = _names(each, places, lines)
        for one, other in (*itertools.combinations(names, 2), *itertools.product(names, (*dots, *lines))):
            assert not _overlap(one, other), each.title
        apart(ET.fromstring(frontier_picture(each).svg))


def test_who_is_beaten(every_state):
    for each in every_state:
        for dot, best in zip(each.dots, each.best, strict=True):
            better = [d for d in each.dots if d.held <= dot.held and d.sent <= dot.sent and d is not dot]
            assert best == (not better)
    beaten = {
        dot.name for each in every_state for dot, best in zip(each.dots, each.best, strict=True) if not best
    }
    assert beaten == {"1D", "2D", "2.5D", "3D", "3D kept"}  # each somewhere, so the question is worth asking


def test_on_the_line_sending_takes_as_long_as_multiplying():
    """FLOPs as a run of the layer counts them; the speed of the slowest link."""
    way, tokens, h = ways(4)[0], 16, 32
    trace = run(
        compare._forward_and_backward, way, tokens, h, compare.TRANSFORMER, ranks=4, record=("flops",)
    ).trace
    counted = sum(trace.flops_of(rank) for rank in range(4))
    assert counted == frontiers.layer_flops(tokens, h)
    for n_ranks, bandwidth in ((8, 450e9), (16, 50e9)):
        found = frontiers.frontier(n_ranks, frontiers.H, "kept", "H100")
        multiply_s = frontiers.layer_flops(frontiers.H, frontiers.H) / n_ranks / 989e12
        assert found.line / bandwidth == pytest.approx(multiply_s)


def test_numbers_of_every_dot_are_in_the_picture():
    found = frontiers.frontier(64, frontiers.H, "peak", "H100")
    figure = frontier_picture(found)
    for dot in found.dots:
        assert f"{bytes_text(dot.held)} held, {bytes_text(dot.sent)} sent" in texts(figure)
        assert f"{dot.name} on {dot.mesh} holds {bytes_text(dot.held)}" in figure.alt
    assert "all dots from the formulas" in texts(figure) and "by formula" in figure.alt


def test_recordings_are_made_once():
    before = _record.cache_info().misses
    record_scheme("2d", (("row", 2), ("col", 2)), "dX")
    record_scheme("2d", (("row", 2), ("col", 2)), "dW")
    assert _record.cache_info().misses - before <= 1
