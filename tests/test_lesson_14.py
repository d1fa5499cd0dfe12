"""Lesson 14: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tooling.source import has_tag, read

from lessons_lib import Layout, run
from lessons_lib.cost import formula, ways
from lessons_lib.errors import RefusedError
from lessons_lib.layout import coordinates
from lessons_lib.tensor_parallel import SCHEMES, Summa, Tesseract
from lessons_lib.tensor_parallel.scheme import check_grid

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "14_tensor_parallel_25d.py"
LESSON = read(SOURCE)
SKIPPED = ("train-run", "train-curves", "loss-seen", "copies")  # many steps: a test takes fewer


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all that do not take long have run."""
    names: dict[str, Any] = {"__name__": "lesson_14"}
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


def test_forward(cells: dict[str, Any]) -> None:
    says("Nothing. Each layer runs SUMMA over its own rows, and the table knows only row and col.")
    result = cells["result"]
    assert cells["error"](result.values, cells["X"] @ cells["W"], cells["LAYOUTS"]["Y"]) < 1e-14
    assert {event.group for event in result.trace.events} == {"row", "col"}
    says("Rank 4 has the same block of W as rank 0, and other rows of X.")
    X, W = cells["LAYOUTS"]["X"], cells["LAYOUTS"]["W"]
    places = [{"depth": 0, "row": 0, "col": 0}, {"depth": 1, "row": 0, "col": 0}]
    assert W.owners(cells["SIZES"])[(0, 0)] == (0, 4)
    assert len({X.block(cells["SIZES"], place) for place in places}) == 2
    assert revealed("eight-seen") == "B" and cells["owners"] == {"X": (0,), "W": (0, 4), "Y": (0,)}


def test_what_a_rank_holds(cells: dict[str, Any]) -> None:
    says("X shrinks with every rank. W does not shrink at all: a quarter, whatever the depth.")
    held = {}
    for d in (1, 2, 3):
        (held[d],) = set(run(cells["held"], cells["SIZES"] | {"depth": d}, ranks=4 * d).values)
    assert held == {1: (48, 24), 2: (24, 24), 3: (16, 24)}
    assert cells["W"].numel() == 24 * 4
    says('A="1/4, 1/8, 1/12: the more ranks, the less"', 'B="1/4, 1/4, 1/4"', "that is X.")
    assert revealed("shares-seen") == "B"
    assert [192 // x for x, _ in held.values()] == [4, 8, 12] and cells["X"].numel() == 192


def test_half_of_x_and_half_of_w() -> None:
    """What option C of the first question leaves out, and option A."""
    says("two squares would make half of it", "on 2 x 4 the blocks of X and W would not meet")
    sizes, X, W = {"depth": 2, "row": 2, "col": 2}, Layout("B@depth@row D@col"), Layout("D@row F@depth@col")
    blocks = {
        (X.block(sizes, one)[0], W.block(sizes, other)[1])
        for one in coordinates(sizes)
        for other in coordinates(sizes)
        if one["depth"] == other["depth"]
    }
    assert len(blocks) == 4 * 4 / 2
    with pytest.raises(RefusedError, match=r"Try row=2, col=2"):
        check_grid(Summa(), {"row": 2, "col": 4})


def test_what_depth_is_owed(cells: dict[str, Any]) -> None:
    def errors(rows: str) -> dict[str, float]:
        truth, layout = cells["X"].T @ cells["dY"], cells["LAYOUTS"]["W"]
        return {
            name: cells["error"](run(cells["weight_gradient"], rows, reduce, ranks=8).values, truth, layout)
            for name, reduce in cells["WAYS"].items()
        }

    says("It is content with nothing, and with a mean. The only one it objects to is the sum.")
    same = errors("B@row")
    assert same["nothing"] < 1e-14 and same["a mean"] < 1e-14 and same["a sum"] == pytest.approx(1)
    says("The verdict is turned round. Without the sum the gradient is off by 83 % on some rank")
    own = errors("B@depth@row")
    assert round(own["nothing"], 2) == 0.83
    assert own["a sum"] < 1e-14 and own["a mean"] == pytest.approx(0.5)


def test_the_loss_does_not_tell(cells: dict[str, Any]) -> None:
    """After 20 of the lesson's steps."""
    says(
        'B="it falls further"',
        "It falls further. Each layer fits its own 12 rows",
        "there are two models now",
    )
    assert revealed("loss-seen") == "B"
    assert cells["B"] // 2 == 12
    ends, apart = {}, {}
    for over_depth in (True, False):
        values = run(cells["train"], over_depth, 20, ranks=8).values
        ends[over_depth] = sum(losses[-1] for losses, _ in values)
        w = [w for _, w in values]
        apart[over_depth] = [((w[rank] - w[rank + 4]).norm() / w[rank].norm()).item() for rank in range(4)]
    assert ends[False] < 0.9 * ends[True]
    assert max(apart[True]) < 1e-12 and min(apart[False]) > 0.1


def test_bias(cells: dict[str, Any]) -> None:
    says("Over every axis that cuts the rows: B@depth@row says which.")
    Layout, found = cells["Layout"], zip(*run(cells["bias_gradients"], ranks=8).values, strict=True)
    mine, over_row, over_both = (cells["error"](f, cells["dY"].sum(0), Layout("F@col")) for f in found)
    assert mine > 0.5 and over_row > 0.5 and over_both < 1e-14


def test_the_bill(cells: dict[str, Any]) -> None:
    says("Depth 1 is lesson 13, to the element.")
    for d in (1, 2, 3):
        sizes = cells["SIZES"] | {"depth": d}
        trace, traffic = (
            run(cells["as_scheme"], sizes, ranks=4 * d).trace,
            Tesseract().traffic(24, 8, 12, sizes),
        )
        for way in ("forward", "backward"):
            assert sum(trace.bytes_sent(rank, way) for rank in range(4 * d)) == 8 * 4 * d * traffic[way]
    flat = {"row": 2, "col": 2}
    assert Tesseract().traffic(24, 8, 12, flat | {"depth": 1}) == Summa().traffic(24, 8, 12, flat)
    says("The last line in the picture is the all-reduce over depth.")
    last = run(cells["as_scheme"], cells["SIZES"], ranks=8).trace.collectives(0)[-1]
    assert (last.kind, last.group) == ("all_reduce", "depth")


def test_which_depth() -> None:
    says("with few tokens it loses, and from b·s = 3 h on it wins", "from b·s = 3 h on.")
    square, deep = (next(way for way in ways(64) if way.name == name) for name in ("2D", "2.5D"))
    for times in range(1, 17):
        ours, theirs = formula(deep, 64 * times, 64).sent, formula(square, 64 * times, 64).sent
        assert (ours > theirs) == (times < 3) and (ours == theirs) == (times == 3)
    says("always it holds 1/16 of the weights where the square holds 1/64")
    assert [way.schemes[0].W.share(way.sizes).denominator for way in (deep, square)] == [16, 64]


def test_the_published_table(cells: dict[str, Any]) -> None:
    """The cell's last row; test_compare.py has the others."""
    says("By hops, our count is the table's number plus what goes over depth.")
    by_hops, over_depth, _ = cells["prices"]
    assert by_hops == cells["published_2_5d"](3, 2) + over_depth and over_depth > 0


def test_it_is_not_3d(cells: dict[str, Any]) -> None:
    says("It has copies of W, 1/q² on each rank, where the cube has 1/q³; and it sends another amount.")
    deep, cube = (next(way for way in ways(8) if way.name == name) for name in ("2.5D", "3D"))
    assert [way.schemes[0].W.share(way.sizes).denominator for way in (deep, cube)] == [4, 8]
    assert formula(deep, 64, 64).sent != formula(cube, 64, 64).sent
    assert SCHEMES["2.5d"].W != SCHEMES["3d"].W
    assert revealed("cube-seen") == "C"
    says("In the cube no two ranks hold the same of W")
    owners = SCHEMES["3d"].W.owners({"i": 2, "j": 2, "k": 2})
    assert len(owners) == 8 and all(len(ranks) == 1 for ranks in owners.values())
    for way, said in zip((deep, cube), cells["measured"], strict=True):
        assert said.startswith(f"{way.name} holds {way.schemes[0].W.share(way.sizes)} of W and sends")
        assert said.endswith(f" {float(formula(way, 64, 64).sent / 64**2):.2f} b·s·h")


def test_production(cells: dict[str, Any]) -> None:
    says("The same gradients and the same bytes, the bias's in one bucket with those of W.")
    says("DDP takes the mean over its ranks, so with our dY we have to multiply by d.")
    truth = ((cells["X"].T @ cells["dY"], "D@row F@col"), (cells["dY"].sum(0), "F@col"))
    for result, times in ((cells["ours"], 1), (cells["theirs"], 2)):
        for at, (whole, layout) in enumerate(truth):
            found = [times * gradients[at] for gradients in result.values]
            assert cells["error"](found, whole, cells["Layout"](layout)) < 1e-14
    sent = [
        [r.trace.bytes_sent(rank, "backward") for rank in range(8)] for r in (cells["ours"], cells["theirs"])
    ]
    assert sent[0] == sent[1]
    over_depth = [e for e in cells["theirs"].trace.collectives(0, "backward") if e.group == "depth"]
    assert [event.n_elements for event in over_depth] == [8 * 12 // 4 + 12 // 2]
