"""Lesson 15: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tooling.source import has_tag, read

from lessons_lib import run
from lessons_lib.cost import formula, time_s, ways
from lessons_lib.cost.compare import Way
from lessons_lib.layout import coordinates
from lessons_lib.tensor_parallel import Cube, CubeKept

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "15_tensor_parallel_3d.py"
LESSON = read(SOURCE)
# 64 ranks take long. That what they count is what the formulas say, test_compare.py holds.
SKIPPED = ("counted", "counted-wide", "counted-picture", "by-shape", "seconds")


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all that do not take long have run."""
    names: dict[str, Any] = {"__name__": "lesson_15"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and cell.id not in SKIPPED and not has_tag(cell, "raises-exception"):
            exec(compile(cell.source, f"<cell {cell.id}>", "exec"), names)
    return names


def says(*sentences: str) -> None:
    """The text has these words; a test that holds a number names the words it holds."""
    texts = [cell.source for cell in LESSON.cells if is_text(cell)]
    text = " ".join(re.sub(r"[*`]", "", " ".join(texts)).split())
    for sentence in sentences:
        assert sentence in text, sentence


def is_text(cell: Any) -> bool:
    """Whether a cell is read: prose, a guess, or what became of it."""
    return cell.cell_type == "markdown" or "predict(" in cell.source or ".reveal(" in cell.source


def revealed(name: str) -> str:
    """The option that the cell called ``name`` reveals as right."""
    (source,) = (cell.source for cell in LESSON.cells if cell.id == name)
    return re.search(r'answer="(\w)"', source)[1]


def off(cells: dict[str, Any], blocks: Any, truth: Any, layout: Any) -> float:
    sizes = cells["SIZES"]
    pairs = zip(blocks, coordinates(sizes), strict=True)
    wholes = [(block, layout.cut(truth, sizes, place)) for block, place in pairs]
    return max(((block - whole).norm() / whole.norm()).item() for block, whole in wholes)


def test_who_keeps_what(cells: dict[str, Any]) -> None:
    says(
        "Those are 1/4 of X and 1/4 of W, and two ranks need the same.",
        "1/8, and the two of a pair",
        "a rank of eight would hold as much as one of four",
    )
    assert revealed("keeps-seen") == "B"
    says("X[0,1] is needed by the ranks along j", "W[1,0] is shared along i, and Y[0,0] along k")
    sizes, layouts = cells["SIZES"], cells["LAYOUTS"]
    assert {layout.share(sizes).denominator for layout in layouts.values()} == {8}
    at = coordinates(sizes)[1]
    blocks = {"X": ("B@i D@k", (0, 1)), "W": ("D@k F@j", (1, 0)), "Y": ("B@i F@j", (0, 0))}
    for text, block in blocks.values():
        layout = cells["Layout"](text)
        assert layout.block(sizes, at) == block and layout.share(sizes).denominator == 4


def test_one_product(cells: dict[str, Any]) -> None:
    says("No steps, no panels: three collectives.")
    result = run(cells["in_cube"], cells["forward"], ranks=8)
    assert off(cells, result.values, cells["X"] @ cells["W"], cells["LAYOUTS"]["Y"]) < 1e-14
    events = [(event.kind, event.group) for event in result.trace.collectives(0)]
    assert events == [("all_gather", "j"), ("all_gather", "i"), ("reduce_scatter", "k")]
    says("Nobody. In a cube all groups have the same size, so every shape fits.")
    wrong = run(cells["in_cube"], cells["wrong_axes"], ranks=8).values
    assert off(cells, wrong, cells["X"] @ cells["W"], cells["LAYOUTS"]["Y"]) > 0.5


def test_at_rest_and_while_computing(cells: dict[str, Any]) -> None:
    """S62."""
    says(
        "X is 16 x 256 and W is 256 x 64.",
        "Its own 1/8, and on top of it 1/4 of all, gathered or not yet scattered.",
    )
    result = run(cells["one_product"], ranks=8, record=("memory",))
    assert result.values == [(512, 2048, 128)] * 8
    everything = cells["everything"]
    assert sum(result.values[0]) * 8 == everything
    peak = max(map(result.trace.peak_bytes, range(8))) / 4
    assert peak / everything == pytest.approx(1 / 8 + 1 / 4, rel=0.001)


def test_backward(cells: dict[str, Any]) -> None:
    says("Each along the axis its tensor does not depend on", "Three blocks, three gathers and two products")
    result = run(cells["backward_in_cube"], ranks=8)
    dxs, dws = zip(*result.values, strict=True)
    assert off(cells, dxs, cells["dY"] @ cells["W"].T, cells["LAYOUTS"]["X"]) < 1e-14
    assert off(cells, dws, cells["X"].T @ cells["dY"], cells["LAYOUTS"]["W"]) < 1e-14
    kinds = [event.kind for event in result.trace.collectives(0)]
    assert kinds.count("all_gather") == 3 and kinds.count("reduce_scatter") == 2
    says("176 elements instead of 248, and three times the memory (1 + q times), in every layer.")
    again, kept = (
        formula(Way("", (cube,), cells["SIZES"]), 8, 8, ((3, 2),)) for cube in (Cube(), CubeKept())
    )
    assert (again.sent, kept.sent) == (248, 176) and kept.kept == 3 * again.kept
    assert (cells["bill"].sent, cells["bill"].kept) == (kept.sent, kept.kept)
    four = {way.name: formula(way, 64, 64).kept for way in ways(64)}
    assert four["3D kept"] == 5 * four["3D"]


def test_two_in_a_row(cells: dict[str, Any]) -> None:
    says('C="a wrong number, and no error"', "both blocks have B/4 rows and half of the columns")
    assert revealed("row-seen") == "C"
    says("The output does not have the layout of the input: j and k have changed places.")
    shapes = {layout.local_shape((12, 8), cells["SIZES"]) for layout in (Cube().X, Cube().Y)}
    assert shapes == {(12 // 4, 8 // 2)} and [str(Cube().X), str(Cube().Y)] == ["B@i@j D@k", "B@i@k F@j"]
    whole = cells["X"] @ cells["W"] @ cells["W2"]
    assert off(cells, cells["again"], whole, Cube().Y) > 0.5
    assert off(cells, cells["turned"], whole, Cube().exchanged().Y) < 1e-14
    says("After two layers everything lies as in the beginning.")
    assert str(Cube().exchanged().Y).replace("F", "D") == str(Cube().X)
    square = cells["square"]
    one, two = cells["X"] + cells["X"] @ square, cells["X"] + cells["X"] @ square @ square
    says("Wrong, whichever layout you take it for")
    assert off(cells, cells["behind_one"], one, Cube().Y) > 0.5
    assert off(cells, cells["behind_one"], one, Cube().X) > 0.5
    assert off(cells, cells["behind_two"], two, Cube().X) < 1e-14


def order(by: str, tokens: int, h: int) -> list[str]:
    bills = {way.name: getattr(formula(way, tokens, h), by) for way in ways(64)}
    return sorted(bills, key=lambda name: bills[name])


def test_the_five_at_64_ranks() -> None:
    """By the formulas, which test_compare.py holds against counted runs of all five."""
    says('B="3D kept least, 2.5D most"', "so its blocks are four times as large")
    assert revealed("counted") == "B"
    flat, deep = (next(way for way in ways(64) if way.name == name) for name in ("2D", "2.5D"))
    assert deep.schemes[0].W.share(deep.sizes) == 4 * flat.schemes[0].W.share(flat.sizes)
    says('B="1D"', "1D sends activations only, and these grow with h; weights grow with h²")
    assert revealed("counted-wide") == "B"
    sent = {way.name: [formula(way, 64, h).sent / (64 * h) for h in (64, 256)] for way in ways(64)}
    assert sent["1D"][0] == sent["1D"][1]
    assert all(wide > before for name, (before, wide) in sent.items() if name != "1D")
    says("With h = b·s the order of bytes is 3D kept, 3D, 2D, 1D, 2.5D.")
    assert order("sent", 64, 64) == ["3D kept", "3D", "2D", "1D", "2.5D"]
    says("With h = 4 b·s 1D has overtaken all but one")
    assert order("sent", 64, 256) == ["3D kept", "1D", "3D", "2D", "2.5D"]
    says("In memory 2D and 3D are equal and the smallest, both times")
    for h in (64, 256):
        kept = {way.name: formula(way, 64, h).kept for way in ways(64)}
        assert kept["2D"] == kept["3D"] == min(kept.values())
        assert all(kept[name] > 2 * kept["2D"] for name in ("1D", "2.5D", "3D kept"))
    says("Three different winners.", "2.5D for very many tokens, 3D in between, 1D for very few")
    shapes = ((1024, 64), (256, 64), (64, 64), (64, 256), (64, 512))
    assert [order("sent", *shape)[0] for shape in shapes] == ["2.5D", "3D kept", "3D kept", "3D kept", "1D"]


def test_seconds() -> None:
    def seconds(tokens: int, h: int) -> dict[str, float]:
        return {way.name: time_s(way, tokens, h, "8xH100") for way in ways(8)}

    sent = {way.name: formula(way, 16384, 4096).sent for way in ways(8)}
    says('for 16384 tokens 2.5D sends more than "3D kept" and is done sooner')
    many = seconds(16384, 4096)
    assert (
        min(sent, key=lambda name: sent[name]) == "3D kept"
        and min(many, key=lambda name: many[name]) == "2.5D"
    )
    says("for 256 tokens of a wide model 1D takes a third of what the next one takes")
    first, second, *_ = sorted(seconds(256, 8192).items(), key=lambda item: item[1])
    assert first[0] == "1D" and second[1] / first[1] == pytest.approx(3, abs=0.1)


def test_production(cells: dict[str, Any]) -> None:
    says("It finds by itself that the product is a partial sum over k, and scatters it as we do.")
    theirs, ours = cells["by_torch"], cells["by_hand"]
    for (y, placements), mine in zip(theirs.values, ours.values, strict=True):
        assert ((y - mine).norm() / mine.norm()).item() < 1e-14
        assert placements == "(Shard(dim=0), Shard(dim=1), Partial(sum))"
    assert cells["equal"] and cells["sent"] == [[24], [24]]
