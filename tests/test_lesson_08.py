"""Lesson 08: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read
from torch.nn.functional import gelu

from lessons_lib import run
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.plan import GPT_1D, parallelize

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "08_tensor_parallel_1d.py"
LESSON = read(SOURCE)


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all of them have run."""
    names: dict[str, Any] = {"__name__": "lesson_08"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and not has_tag(cell, "raises-exception"):
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


def off(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


def test_columns(cells: dict[str, Any]) -> None:
    X, W1, dY = (cells[name] for name in ("X", "W1", "dY"))
    result = run(cells["by_columns"], ranks=4)
    assert off(torch.cat(result.values, 1), X @ W1) < 1e-14
    says("Nothing. A column of the product needs one column of W1")
    assert not result.trace.events
    says('A="nothing"', "My columns of dW1 need only my columns of dY.")
    result = run(cells["columns_backward"], ranks=4)
    dw1s, terms, sums = zip(*result.values, strict=True)
    assert off(torch.cat(dw1s, 1), X.T @ dY) < 1e-14
    says("a partial sum: of the right shape, and nowhere near right")
    assert all(off(term, dY @ W1.T) > 0.5 for term in terms)
    assert all(off(total, dY @ W1.T) < 1e-14 for total in sums)


def test_rows(cells: dict[str, Any]) -> None:
    H, W2, dY2 = (cells[name] for name in ("H", "W2", "dY2"))
    terms, sums = zip(*run(cells["by_rows"], ranks=4).values, strict=True)
    assert all(off(term, H @ W2) > 0.5 for term in terms)
    assert all(off(total, H @ W2) < 1e-14 for total in sums)
    says("And backward? Each rank then has all of dY.", "The two are mirror images")
    result = run(cells["rows_backward"], ranks=4)
    dw2s, dhs = zip(*result.values, strict=True)
    assert off(torch.cat(dw2s, 0), H.T @ dY2) < 1e-14 and off(torch.cat(dhs, 1), dY2 @ W2.T) < 1e-14
    assert not result.trace.events


def test_the_bias(cells: dict[str, Any]) -> None:
    says("The bias is added once per rank. On one rank it is right")
    for ranks in (1, 2, 4):  # S11
        assert run(cells["bias_too_early"], ranks=ranks).values == [[ranks, 2 * ranks, 3 * ranks]] * ranks
        assert run(cells["bias_in_time"], ranks=ranks).values == [[1, 2, 3]] * ranks


def test_the_pair(cells: dict[str, Any]) -> None:
    X, W1, W2 = (cells[name] for name in ("X", "W1", "W2"))
    says("Guess: how often do the ranks meet?", "Once. The row-cut layer wants its input")
    result = run(cells["pair"], ranks=4)
    assert [event.kind for event in result.trace.events] == ["all_reduce"] * 4
    assert all(off(y, gelu(X @ W1) @ W2) < 1e-14 for y in result.values)
    says("It does. The GELU of a sum is not the sum of the GELUs.")
    assert off(run(cells["gelu_of_a_term"], ranks=4).values[0], gelu(X @ W1)) > 0.1


def test_the_answer_and_the_mistake(cells: dict[str, Any]) -> None:
    says(
        'B="two, one forward and one backward"', "One all-reduce forward, one backward, whatever the width F."
    )
    says("Both are of the size of X.", "The wide H is never sent")
    mlp, serial = cells["mlp"], cells["serial"]
    for ranks in (2, 4):
        result = run(mlp, ranks=ranks)
        for rank in range(ranks):
            mine = [event for event in result.trace.events if event.rank == rank]
            assert [(event.region, event.kind) for event in mine] == [
                ("forward", "all_reduce"),
                ("backward", "all_reduce"),
            ]
            assert {event.n_elements for event in mine} == {cells["X"].numel()}
        for rank, (y, dx, dw1, dw2) in enumerate(result.values):
            assert off(y, serial[0]) < 1e-14 and off(dx, serial[1]) < 1e-14
            assert off(dw1, serial[2].chunk(ranks, 1)[rank]) < 1e-14
            assert off(dw2, serial[3].chunk(ranks, 0)[rank]) < 1e-14
        says("Forward is perfect. Every gradient is p times too large: four on four ranks.")
        for wrong, right in zip(
            run(mlp, cells["copy_sum"], cells["sum_sum"], ranks=ranks).values, result.values, strict=True
        ):
            assert off(wrong[0], right[0]) < 1e-14
            assert all(off(w, ranks * r) < 1e-14 for w, r in zip(wrong[1:], right[1:], strict=True))


def test_who_waits_for_dx(cells: dict[str, Any]) -> None:
    says("A third. Remember that backward is two products")
    apart, together = (
        run(cells[name], ranks=4, machine="4xH100").trace.timeline.makespan
        for name in ("one_after_the_other", "at_the_same_time")
    )
    assert 1 - together / apart == pytest.approx(1 / 3, abs=0.02)


def test_who_holds_what(cells: dict[str, Any]) -> None:
    says("The weights are, and so is all that has the width F. X and Y are whole on every rank")
    one, eight = (run(cells["large"], ranks=ranks, record=("memory",)) for ranks in (1, 8))
    assert one.values[0] == 8 * eight.values[0]
    share = eight.trace.peak_bytes(0) / one.trace.peak_bytes(0)
    assert 1 / 8 < share < 1 / 5


def test_library_and_torch(cells: dict[str, Any]) -> None:
    ours, theirs = cells["by_library"], cells["by_torch"]
    for mine, their in zip(ours.values, theirs.values, strict=True):
        assert all(off(a, b) < 1e-14 for a, b in zip(mine, their, strict=True))
    for way in ("forward", "backward"):
        counted = {trace.bytes_sent(rank, way) for trace in (ours.trace, theirs.trace) for rank in range(4)}
        assert counted == {72 * 8}
    says("It has 4 all-reduces in every block, two for the attention and two for the MLP.")

    def step(L: int) -> None:
        from lessons_lib import Mesh

        model = parallelize(GPT(GPTConfig(L=L, H=4, D=16)), GPT_1D, Mesh(tp=2))
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()

    calls = [sum(event.rank == 0 for event in run(step, L, ranks=2).trace.events) for L in (1, 2)]
    assert calls[1] - calls[0] == 4
