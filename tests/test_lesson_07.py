"""Lesson 07: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read

from lessons_lib import Layout, run
from lessons_lib.errors import RefusedError
from lessons_lib.redistribute import redistribution

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "07_layouts.py"
LESSON = read(SOURCE)


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all of them have run."""
    names: dict[str, Any] = {"__name__": "lesson_07"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and not has_tag(cell, "raises-exception"):
            exec(compile(cell.source, f"<cell {cell.id}>", "exec"), names)
    return names


def cell(name: str) -> str:
    return next(cell.source for cell in LESSON.cells if cell.id == name)


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


def bill(source: str, target: str, sizes: dict[str, int]) -> int:
    steps = redistribution(Layout(source), Layout(target), (32, 16), sizes)
    return sum(step.sent for step in steps)


def test_is_it_wrong(cells: dict[str, Any]) -> None:
    says("X has 8 columns, so every number of Y is 8. Rank 1 holds Y[0,0] = 2.")
    says('C="from the number alone, nobody can say"', "four ranks hold 2 each, which makes 8")
    assert revealed("is-wrong-seen") == "C" and cells["held"] == [8, 8, 2]
    assert torch.equal(cells["X"] @ cells["W"], torch.full((32, 16), 8.0, dtype=torch.float64))
    inner = run(cells["product"], "B D@tp", "D@tp F", ranks=4).values
    assert all(torch.equal(y, torch.full((32, 16), 2.0, dtype=torch.float64)) for y in inner)
    says(
        "where each rank multiplies two columns of X with two rows of W", "The only product of the full shape"
    )
    for layouts in (("B D", "D F@tp"), ("B@tp D", "D F")):
        (y, *_) = run(cells["product"], *layouts, ranks=4).values
        assert y.shape != (32, 16) and bool((y == 8).all())


def test_what_a_term_may_do(cells: dict[str, Any]) -> None:
    says("Scaling, adding two partial sums, another product: what is linear may come before the sum.")
    says("A constant is added once per rank")
    whole = cells["X"] @ cells["W"]
    right = [operation(whole)[0, 0].item() for operation in cells["OPERATIONS"].values()]
    for found in run(cells["on_terms"], ranks=4).values:
        assert [a == b for a, b in zip(found, right, strict=True)] == [True, True, True, False, False, False]
        assert found[3] == right[3] + 3
        assert (found[3], right[3]) == (12, 9)
    says('B="3 y, y + y and y V"', "so 12 comes out and not 9")
    assert revealed("on-terms-seen") == "B" and list(cells["OPERATIONS"])[:3] == ["3 y", "y + y", "y V"]
    with pytest.raises(RefusedError, match="only redistribute resolves a partial sum"):
        exec(compile(cell("no-value"), "<cell no-value>", "exec"), cells)


def test_the_order_of_axes(cells: dict[str, Any]) -> None:
    says("Row 2. The same shapes, the same sizes, and two of four ranks hold something else.")
    values = run(cells["orders"], ranks=4).values
    assert values == [[0, 0], [1, 2], [2, 1], [3, 3]]
    says('C="two rows change places, and nobody notices"', "On every rank alike, and nobody complains")
    assert run(cells["wrong_order"], ranks=4).values == [[0, 2, 1, 3]] * 4
    assert revealed("wrong-order-seen") == "C"
    says("ranks 1 and 2 get different rows")
    assert [rank for rank, (one, other) in enumerate(values) if one != other] == [1, 2]


def test_from_any_layout_to_any_other(cells: dict[str, Any]) -> None:
    says("Y has 512 elements.", "From a copy every way is free", "is an all-gather, 3/4 of Y.")
    says("each rank keeps a quarter of its quarter and sends the rest, 96.")
    says("to a copy is an all-reduce, twice an all-gather. To a cut it is half of that.")
    tp = {"tp": 4}
    assert [bill("B F", to, tp) for to in ("B F", "B@tp F", "B F@tp", "B F +tp")] == [0] * 4
    assert bill("B@tp F", "B F", tp) == bill("B F@tp", "B F", tp) == 512 * 3 // 4 == 384
    assert bill("B@tp F", "B F@tp", tp) == 512 // 4 * 3 // 4 == 96
    assert bill("B F +tp", "B F", tp) == 2 * 384 and bill("B F +tp", "B@tp F", tp) == 384
    says("96 elements of 8 bytes are 768")
    assert [cells["moved"].trace.bytes_sent(rank) for rank in range(4)] == [768] * 4
    whole = cells["X"] @ cells["W"]
    assert all(torch.equal(y, whole[:8]) for y in cells["moved"].values)


def test_two_axes(cells: dict[str, Any]) -> None:
    says("Two of four ranks swap their blocks of 128, so on average a rank sends 64.", "have been 384 each")
    sizes = {"i": 2, "k": 2}
    assert Layout("B@i@k F").n_local((32, 16), sizes) == 128
    assert bill("B@i@k F", "B@k@i F", sizes) == 64 and bill("B@i@k F", "B F", sizes) == 384
    says("Reduce-scatter, all-reduce of the part, all-gather")
    steps = redistribution(Layout("B F +row +col"), Layout("B F"), (32, 16), {"row": 2, "col": 2})
    assert [step.kind for step in steps] == ["reduce_scatter", "all_reduce", "all_gather"]


def test_four_bills(cells: dict[str, Any]) -> None:
    says("Four times the same Y, and bills from 384 to 768.", "gathers Y, too, and 96 more")
    bills = cells["bills"]
    first = bills(32, 8, 16)
    assert first == {"columns of W": 384, "rows of X": 384, "inner dim": 768, "grid": 480}
    assert first["grid"] - first["rows of X"] == 96
    says("B = 8, D = 32, F = 16. Who sends most now?", "Now Y is the smallest of the three.")
    says("Y was the largest of the three and is now the smallest", "D is four times as long")
    says("Y has a quarter of its size")
    (x, w, y), (x_now, w_now, y_now) = ((B * D, D * F, B * F) for B, D, F in ((32, 8, 16), (8, 32, 16)))
    assert y > max(x, w) and y_now < min(x_now, w_now) and y == 4 * y_now
    turned = bills(8, 32, 16)
    assert turned == {"columns of W": 96, "rows of X": 96, "inner dim": 192, "grid": 288}
    assert max(first, key=first.get) == "inner dim" and max(turned, key=turned.get) == "grid"
    assert revealed("bills-turned") == "B" and cells["turned"] == turned
    says("however long D is")
    assert bills(8, 64, 16)["inner dim"] == turned["inner dim"]
    says("Nothing, for who had cut the rows from the start.")
    rows = bills(32, 8, 16, wish="B@tp F", wish_on_grid="B@row@col F")
    assert rows == {"columns of W": 96, "rows of X": 0, "inner dim": 384, "grid": 160}


def test_other_wishes_are_right_numbers_too(cells: dict[str, Any]) -> None:
    X, W = torch.randn(32, 8, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)
    runs = [run(cells["in_1d"], *each, "B@tp F", X, W, ranks=4) for each in cells["IN_1D"].values()]
    runs.append(run(cells["in_2d"], "B@row@col F", X, W, ranks=4))
    for result in runs:
        for y, whole in zip(result.values, (X @ W).chunk(4), strict=True):
            torch.testing.assert_close(y, whole, rtol=1e-12, atol=1e-12)


def test_production(cells: dict[str, Any]) -> None:
    def both(source: str, target: str) -> tuple[Any, Any]:
        return tuple(run(cells[how], source, target, ranks=4) for how in ("by_lesson", "by_torch"))

    for move in cells["MOVES"]:
        ours, theirs = both(*move)
        assert all(torch.equal(a, b) for a, b in zip(ours.values, theirs.values, strict=True))
        assert ours.trace.bytes_sent(0) == theirs.trace.bytes_sent(0) == 4 * bill(*move, {"tp": 4})
    says(
        "From one cut to another, DTensor uses an all-to-all on GPUs; on CPUs, as here, it gathers and cuts."
    )
    ours, theirs = both("B@tp F", "B F@tp")
    assert [event.kind for event in theirs.trace.collectives(0)] == ["all_gather"]
    assert [event.kind for event in ours.trace.collectives(0)] == ["all_to_all"]


def test_placements_have_the_order_of_the_mesh(cells: dict[str, Any]) -> None:
    says("they can say only the one that has the mesh's own order")

    def by_torch() -> int:
        mesh = cells["init_device_mesh"]("cpu", (2, 2), mesh_dim_names=("i", "k"))
        shard = cells["Shard"](0)
        rows = cells["DTensor"].from_local(torch.arange(4), mesh, [cells["Replicate"]()] * 2, run_check=False)
        return rows.redistribute(mesh, [shard, shard]).to_local().item()

    i_first, k_first = zip(*run(cells["orders"], ranks=4).values, strict=True)
    assert run(by_torch, ranks=4).values == list(i_first) != list(k_first)
