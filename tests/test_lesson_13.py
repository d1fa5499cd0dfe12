"""Lesson 13: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read

from lessons_lib import run
from lessons_lib.cost import formula, rounds, time_s, ways
from lessons_lib.errors import RefusedError
from lessons_lib.layout import coordinates

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "13_tensor_parallel_2d.py"
LESSON = read(SOURCE)
# What these count, test_compare.py holds against the formulas.
SKIPPED = ("who-sends-less", "who-seen", "crossovers", "crossover-curve", "rounds")


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all that do not take long have run."""
    names: dict[str, Any] = {"__name__": "lesson_13"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and cell.id not in SKIPPED and not has_tag(cell, "raises-exception"):
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


def off(blocks: Any, truth: torch.Tensor, layout: Any) -> float:
    """The largest relative error of a block."""
    q = round(len(blocks) ** 0.5)
    sizes = {"row": q, "col": q}
    pairs = zip(blocks, coordinates(sizes), strict=True)
    wholes = [(block, layout.cut(truth, sizes, place)) for block, place in pairs]
    return max(((block - whole).norm() / whole.norm()).item() for block, whole in wholes)


def sent(result: Any) -> list[int]:
    return [result.trace.bytes_sent(rank) // 8 for rank in range(result.ranks)]


def test_gathered_or_step_by_step(cells: dict[str, Any]) -> None:
    says("The same. Each block still has to get to the other ranks", "q−1 blocks of X and q−1 of W are sent")
    X, W, Y = (cells["LAYOUTS"][name] for name in "XWY")
    for q in (2, 3):
        sizes = {"row": q, "col": q}
        blocks = X.n_local((12, 24), sizes) + W.n_local((24, 36), sizes)
        for way in ("gathered", "summa"):
            result = run(cells["on_grid"], cells[way], q, ranks=q * q)
            assert off(result.values, cells["X"] @ cells["W"], Y) < 1e-14
            assert sent(result) == [(q - 1) * blocks] * q**2
    says("A wrong number, in silence.")
    assert (
        off(run(cells["on_grid"], cells["wrong_axes"], 3, ranks=9).values, cells["X"] @ cells["W"], Y) > 0.5
    )
    with pytest.raises(RefusedError, match=r"Try row=2, col=2 or row=3, col=3") as refused:
        exec(compile(cell("not-square"), "<cell not-square>", "exec"), cells)
    says("The library says so before anything is sent")
    assert not refused.value.run.trace.events


def test_is_something_whole_somewhere(cells: dict[str, Any]) -> None:
    def peaks(step: Any, multiply: Any) -> list[float]:
        runs = [run(step, multiply, q, ranks=q * q, record=("memory",)) for q in (2, 3, 4)]
        return [max(map(result.trace.peak_bytes, range(result.ranks))) / 4 / 144**2 for result in runs]

    says("With 1D the peak never falls below one whole X.")
    assert peaks(cells["held_in_1d"], None) == pytest.approx([1 + 2 / p for p in (4, 9, 16)])
    says("Gathered rows fall with the side of the grid, 1/q")
    by_gathering = peaks(cells["held"], cells["gathered"])
    assert by_gathering == pytest.approx([2 / q + 3 / q**2 for q in (2, 3, 4)], rel=0.01)
    says("SUMMA falls with the number of ranks: no row of X, nor anything else, is whole anywhere")
    says('C="yes, and no rank ever needs more than a few blocks"', "and so nobody needs a whole row")
    assert revealed("multiply-seen") == "C"
    by_summa = peaks(cells["held"], cells["Summa"]().forward)
    assert by_summa == pytest.approx([5 / 4, 7 / 9, 7 / 16], rel=0.01)
    says("The library keeps two panels of each")
    ours = peaks(cells["held"], cells["summa"])
    assert ours[1:] == pytest.approx(by_summa[1:], rel=0.01) and ours[0] > by_summa[0]


def test_backward(cells: dict[str, Any]) -> None:
    says(
        'B="reduce along the row, to its rank in column l"', "The sum belongs to the rank that owns the block"
    )
    assert revealed("terms-seen") == "B"
    says("so backward sends twice what forward does")
    for q in (2, 3):
        result = run(cells["backward_on_grid"], q, ranks=q * q)
        dxs, dws = zip(*result.values, strict=True)
        assert off(dxs, cells["dY"] @ cells["W"].T, cells["LAYOUTS"]["X"]) < 1e-14
        assert off(dws, cells["X"].T @ cells["dY"], cells["LAYOUTS"]["W"]) < 1e-14
        traffic = cells["SCHEMES"]["2d"].traffic(12, 24, 36, {"row": q, "col": q})
        assert sent(result) == [traffic["backward"]] * q**2
        assert traffic["backward"] == 2 * traffic["forward"]


def test_layers_follow_each_other(cells: dict[str, Any]) -> None:
    says("any number of such layers follow each other without a word between them")
    Y = cells["down"](torch.nn.functional.gelu(cells["up"](cells["X"]))).detach()
    assert off(cells["by_library"].values, Y, cells["LAYOUTS"]["X"]) < 1e-14
    assert {event.kind for event in cells["by_library"].trace.events} == {"broadcast"}
    assert len(cells["by_library"].trace.collectives(0)) == 2 * 2 * 2  # layers, steps, X and W


def test_who_sends_less() -> None:
    assert revealed("who-seen") == "B"
    says('B="1D, each time"', "but with so few tokens 16 do not suffice", "a layer has 12 h² of those")
    says("at 4 ranks from 12 h on, at 9 from 3.3 h, at 16 from 1.9 h")
    says("It beats 1D in bytes from b·s = 12 h at 4 ranks, 1.9 h at 16, and always has more rounds.")
    says("1D sends nearly 8 b·s·h whatever p")
    for n_ranks, at in ((4, 12.0), (9, 3.3), (16, 1.9)):
        one, two = (way for way in ways(n_ranks) if way.name in ("1D", "2D"))
        h = 10 * n_ranks
        assert formula(one, h, h).sent < formula(two, h, h).sent
        assert 6 <= formula(one, h, h).sent / h**2 < 8
        wins = [formula(two, t, h).sent <= formula(one, t, h).sent for t in range(0, 16 * h + 1, n_ranks)]
        assert wins == sorted(wins) and round(wins.index(True) * n_ranks / h, 1) == at
        assert rounds(one) < rounds(two)
    says("a small layer is sooner done in 1D, even where 2D sends less")
    one, two = (way for way in ways(16) if way.name in ("1D", "2D"))
    assert formula(two, 256, 64).sent < formula(one, 256, 64).sent
    assert time_s(one, 256, 64, "16xH100") < time_s(two, 256, 64, "16xH100")
    says("what a rank sends falls with the grid, about 1/q")
    by_side = {q: formula(ways(q * q)[-1], 1440, 24 * q).sent / (1440 * 24 * q) for q in (2, 3)}
    assert by_side[3] < by_side[2]


def test_layer_norm(cells: dict[str, Any]) -> None:
    says("A rank has a third of the row.", "Each block is a perfect LayerNorm, of the wrong thing.")
    says('The right one adds up two numbers per row over mesh["col"]')
    alone, together = zip(*cells["normed"].values, strict=True)
    whole = torch.nn.functional.layer_norm(cells["X"], (24,))
    assert off(alone, whole, cells["LAYOUTS"]["X"]) > 0.1
    assert off(together, whole, cells["LAYOUTS"]["X"]) < 1e-14
    assert [(e.group, e.n_elements) for e in cells["normed"].trace.collectives(0)] == [("col", 4)] * 2


def test_cannon(cells: dict[str, Any]) -> None:
    result = cells["by_cannon"]
    assert off(result.values, cells["X"] @ cells["W"], cells["LAYOUTS"]["Y"]) < 1e-14
    says("rank 0 stays where it is in the first shift and sends what SUMMA does, 256; the others pay")
    (by_summa,) = set(sent(run(cells["on_grid"], cells["summa"], 3, ranks=9)))
    assert sent(result)[0] == by_summa == 256 and all(n > 256 for n in sent(result)[1:])


def test_production(cells: dict[str, Any]) -> None:
    says("It gathers a whole row of X and a whole column of W, as we did first.")
    result = cells["by_torch"]
    blocks, placements, of_gradient = zip(*result.values, strict=True)
    assert off(blocks, cells["X"] @ cells["W"], cells["LAYOUTS"]["Y"]) < 1e-14
    gathers = result.trace.collectives(0, "forward")
    assert [event.kind for event in gathers] == ["all_gather"] * 2
    assert sorted(event.n_elements for event in gathers) == [12 * 24 // 3, 24 * 36 // 3]
    assert result.trace.bytes_sent(0, "forward") == cells["by_summa"].trace.bytes_sent(0)
    says("the gradient of W comes back as a partial sum over row")
    assert set(placements) == {"(Shard(dim=0), Shard(dim=1))"}
    assert set(of_gradient) == {"(Partial(sum), Shard(dim=1))"}
