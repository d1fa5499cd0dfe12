"""All schemes side by side: what is counted is what the formulas say, and what others have published."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from lessons_lib.cost.compare import (
    TRANSFORMER,
    Way,
    compare_ways,
    count,
    crossover,
    formula,
    rounds,
    time_s,
    trace,
    ways,
)
from lessons_lib.cost.conventions import (
    hops,
    megatron_by_optimus,
    optimus,
    priced,
    published_1d,
    published_2_5d,
    published_2d,
    published_3d,
    ring,
    tree,
)
from lessons_lib.errors import RefusedError
from lessons_lib.machines import Link, Machine
from lessons_lib.tensor_parallel import SCHEMES, CubeKept, Tesseract

SQUARE = ((1, 1),)  # one linear: with as many tokens as h, X, W and Y are equally large


def way(name: str, n_ranks: int) -> Way:
    (found,) = [way for way in ways(n_ranks) if way.name == name]
    return found


def tesseract(q: int, d: int) -> Way:
    return Way("2.5D", (SCHEMES["2.5d"],), {"depth": d, "row": q, "col": q})


# ---- counted is said


@pytest.mark.parametrize(
    "n_ranks", [1, 2, 4, 8, 9, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 18, 27))]
)
@pytest.mark.parametrize("tokens, h", [(1, 1), (3, 1), (1, 2)])
def test_every_way_costs_what_its_formulas_say(n_ranks: int, tokens: int, h: int) -> None:
    for each in ways(n_ranks):
        sizes = tokens * 2 * n_ranks, h * 2 * n_ranks
        assert count(each, *sizes) == formula(each, *sizes), each


@pytest.mark.slow
@pytest.mark.parametrize("h", [64, 256])
@pytest.mark.parametrize("name", ["1D", "2D", "2.5D", "3D", "3D kept"])
def test_and_on_64_ranks(name: str, h: int) -> None:
    assert count(way(name, 64), 64, h) == formula(way(name, 64), 64, h)


def test_a_small_model_is_counted_for_a_large_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and memory go with the square of the scale, seconds with what the machine is slowed by."""
    small = {each.name: (count(each, 32, 16), time_s(each, 32, 16, "4xH100")) for each in ways(4)}
    large = {each.name: (count(each, 320, 160), time_s(each, 320, 160, "4xH100")) for each in ways(4)}
    monkeypatch.setattr("lessons_lib.cost.compare._model", lambda way, tokens, h: (tokens, h, 1))
    for each in ways(4):
        assert count(each, 32, 16) == small[each.name][0]
        assert count(each, 320, 160) == large[each.name][0]
        assert time_s(each, 32, 16, "4xH100") == pytest.approx(small[each.name][1], rel=1e-12)
        assert time_s(each, 320, 160, "4xH100") == pytest.approx(large[each.name][1], rel=1e-12)
    assert large["2D"][0].sent == 100 * small["2D"][0].sent


def test_a_wrong_formula_and_a_wrong_scheme_are_caught() -> None:
    class Forgets(Tesseract):  # dW of this layer of the grid only
        def backward(self, dy, x, w, mesh):
            return self.layer.backward(dy, x, w, mesh)

    class SaysTooLittle(CubeKept):  # what Colossal-AI's table says of memory
        def memory(self, B, D, F, sizes):
            memory = super().memory(B, D, F, sizes)
            return memory | {"kept": memory["rest"] * 2 // 3}

    grid, cube = {"depth": 2, "row": 2, "col": 2}, {"i": 2, "j": 2, "k": 2}
    for scheme, sizes, what in (
        (Forgets(), grid, "backward"),
        (SaysTooLittle(), cube, "kept"),
    ):
        wrong = Way("wrong", (scheme,), sizes)
        counted, said = count(wrong, 8, 8, SQUARE), formula(wrong, 8, 8, SQUARE)
        assert getattr(counted, what) != getattr(said, what)


# ---- 64 ranks, and who wins when


def test_what_64_ranks_send_for_a_layer() -> None:
    """In units of b s h, where h = b s. 2.62 needs the gathered blocks kept; gathering again: 3.52."""
    sent = {each.name: formula(each, 64, 64).sent / 64**2 for each in ways(64)}
    assert {name: round(n, 2) for name, n in sent.items()} == {
        "1D": 7.88,
        "2D": 6.23,
        "2.5D": 8.86,
        "3D": 3.52,
        "3D kept": 2.62,
    }


@pytest.mark.parametrize(
    "n_ranks, h, at",
    [(4, 8, 12.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((9, 90, 3.3), (16, 160, 1.9)))],
)
def test_where_2d_begins_to_win_is_found_by_counting(n_ranks: int, h: int, at: float) -> None:
    one, two = way("1D", n_ranks), way("2D", n_ranks)
    found = crossover(one, two, h)
    assert float(found) == pytest.approx(at, abs=1e-9)
    step = Fraction(n_ranks, h)
    before, after = ((found - step) * h, found * h)
    assert formula(two, int(before), h).sent > formula(one, int(before), h).sent
    assert formula(two, int(after), h).sent <= formula(one, int(after), h).sent


@pytest.mark.parametrize("q, exactly", [(2, 12), (3, Fraction(36, 11)), (4, Fraction(36, 19))])
def test_the_crossovers_in_closed_form(q: int, exactly: Fraction) -> None:
    """3 (q-1)/q^2 (7 + 12 h/bs) = 8 (p-1)/p."""
    p = q * q
    ours = Fraction(3 * (q - 1) * 12, q * q) / (Fraction(8 * (p - 1), p) - Fraction(3 * (q - 1) * 7, q * q))
    assert ours == exactly
    assert [round(float(ours), 1)] == [{2: 12.0, 3: 3.3, 4: 1.9}[q]]


def test_a_crossover_that_does_not_come_is_refused() -> None:
    one, two = way("1D", 4), way("2D", 4)
    with pytest.raises(RefusedError, match=r"2D on row=2, col=2 sends more than 1D on tp=4 up to b s = 8 h"):
        crossover(one, two, h=8, most=8)


def test_ways_that_ranks_have() -> None:
    """S35: a square for 2D, a cube for 3D, q x q x d for 2.5D."""
    names = {n: [each.name for each in ways(n)] for n in (1, 6, 8, 9, 12, 16, 18, 27, 32, 64)}
    assert names[1] == names[6] == names[12] == ["1D"]
    assert names[8] == ["1D", "2.5D", "3D", "3D kept"]
    assert names[9] == names[16] == ["1D", "2D"]
    assert names[18] == names[32] == ["1D", "2.5D"]
    assert names[27] == ["1D", "2.5D", "3D", "3D kept"]  # 3 x 3 x 3 is a depth, too
    assert names[64] == ["1D", "2.5D", "2D", "3D", "3D kept"]


# ---- rounds and time


@pytest.mark.parametrize("n_ranks", [4, 8, 9])
def test_rounds(n_ranks: int) -> None:
    """All-reduces of 2(p-1) rounds; panels and sums of q-1, X beside W; gathers and scatters of q-1."""
    q2, q3 = round(n_ranks**0.5), round(n_ranks ** (1 / 3))
    by_hand = {
        "1D": 4 * 2 * (n_ranks - 1),
        # forward q panels; backward the same for each gradient, and the last sum cannot hide behind a panel
        "2D": 4 * (q2 * (q2 - 1) + 2 * (q2 + 1) * (q2 - 1)),
        "3D": 4 * (3 + 5) * (q3 - 1),
        "3D kept": 4 * (3 + 3) * (q3 - 1),
    }
    for each in ways(n_ranks):
        if each.name in by_hand:
            assert rounds(each) == by_hand[each.name], each


def test_time_is_that_of_the_machine() -> None:
    """With links that take nothing, what is left are the FLOPs; with FLOPs that take nothing, the links."""
    cube = way("3D kept", 8)
    tokens, h, free = 64, 32, Machine("free")
    flops = 6 * sum(tokens * d * h * f * h for d, f in TRANSFORMER) / 8
    assert time_s(cube, tokens, h, replace(free, flops_per_s=1e9)) == pytest.approx(flops / 1e9)
    link = Link(bandwidth_bytes_per_s=1e6)
    sent = formula(cube, tokens, h).sent
    assert time_s(cube, tokens, h, replace(free, in_node=link)) == pytest.approx(2 * sent / 1e6)
    link = Link(latency_s=1e-3)
    assert time_s(cube, tokens, h, replace(free, in_node=link)) == pytest.approx(1e-3 * rounds(cube))


def test_comparison_is_of_counted_bills() -> None:
    rows = compare_ways(tokens=128, h=64, n_ranks=4, on="4xH100")
    assert [row.way.name for row in rows] == ["1D", "2D"]
    for row in rows:
        assert row.bill == formula(row.way, 128, 64)
        assert row.rounds == rounds(row.way)
        assert row.time_s == time_s(row.way, 128, 64, "4xH100")


# ---- published tables, under their own conventions


@pytest.mark.parametrize(
    "each, convention, published",
    [
        (way("1D", 4), ring, published_1d(4)),
        (way("1D", 8), ring, published_1d(8)),
        (way("2D", 4), hops, published_2d(2)),
        (way("2D", 9), hops, published_2d(3)),
        (way("2D", 16), hops, published_2d(4)),
        (way("3D kept", 8), ring, published_3d(2)),
        (way("3D kept", 27), ring, published_3d(3)),
        *((tesseract(q, d), hops, published_2_5d(q, d)) for q, d in ((2, 1), (2, 2), (3, 2), (2, 3), (4, 2))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_colossal_ai_s_table(each: Way, convention, published: Fraction) -> None:
    """Per linear, forward and backward, X, W and Y of one element: and without the sum over depth."""
    n = 24 if each.n_ranks % 9 else 72  # which all of these can cut
    events = trace(each, n, n, SQUARE).events
    over_depth = [event for event in events if event.group == "depth"]
    told = [event for event in events if event not in over_depth]
    assert priced(told, convention, each.n_ranks) / n**2 == published
    d = each.sizes.get("depth", 1)
    left_out = Fraction(2 * (d - 1), d * each.sizes.get("row", 1) ** 2)
    assert priced(over_depth, convention, each.n_ranks) / n**2 == left_out
    assert bool(over_depth) == ("depth" in each.sizes)


def test_colossal_ai_s_3d_leaves_gathering_again_out() -> None:
    """Blocks that are not kept are gathered again: 8/6 of the table for X, W and Y of one size."""
    events = trace(way("3D", 8), 24, 24, SQUARE).events
    assert priced(events, ring, 8) / 24**2 == published_3d(2) * Fraction(8, 6)


def test_the_published_values() -> None:
    """S63, and d = 1 is 2D."""
    values = {(2, 1): 3.0, (2, 2): 2.25, (4, 1): 4.5, (4, 2): 3.375, (3, 2): 3.0}
    assert {at: float(published_2_5d(*at)) for at in values} == values
    assert published_3d(2) == 0.75
    assert all(published_2_5d(q, 1) == published_2d(q) for q in range(1, 9))


@pytest.mark.parametrize("n_ranks", [4, 16])
@pytest.mark.parametrize("tokens, h", [(16, 16), (64, 32)])
def test_optimus_formulas(n_ranks: int, tokens: int, h: int) -> None:
    """T9. Backward with recomputation: the counted backward, and the counted forward once more."""
    q = round(n_ranks**0.5)
    for name, convention, published in (
        ("1D", ring, megatron_by_optimus(n_ranks, tokens, h)),
        ("2D", tree, optimus(q, tokens, h)),
    ):
        events = trace(way(name, n_ranks), tokens, h).events
        forward, backward = (
            priced([event for event in events if event.region == region], convention, n_ranks)
            for region in ("forward", "backward")
        )
        assert (forward, backward + forward) == published, name


def test_a_tree_needs_a_power_of_two() -> None:
    with pytest.raises(RefusedError, match="Try 4 or 8 ranks in a group"):
        tree("broadcast", 10, 6)


def test_the_ring_is_what_a_run_counts() -> None:
    each = way("2D", 9)
    events = trace(each, 18, 18).events
    assert priced(events, ring, 9) == formula(each, 18, 18).sent == count(each, 18, 18).sent
