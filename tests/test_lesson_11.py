"""Lesson 11: every number its text states is what its cells measure."""

from __future__ import annotations

import math
import random
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read
from torch.nn.functional import scaled_dot_product_attention

from lessons_lib import run
from lessons_lib.sequence_parallel import ATTENTIONS

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "11_attention_in_pieces.py"
LESSON = read(SOURCE)


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all of them have run."""
    names: dict[str, Any] = {"__name__": "lesson_11"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and not has_tag(cell, "raises-exception"):
            exec(compile(cell.source, f"<cell {cell.id}>", "exec"), names)
    return names


def says(*sentences: str) -> None:
    """The text has these words; a test that holds a number names the words it holds."""
    texts = [cell.source for cell in LESSON.cells if is_text(cell)]
    text = " ".join(re.sub(r"[*`#]", "", " ".join(texts)).split())
    for sentence in sentences:
        assert sentence in text, sentence


def is_text(cell: Any) -> bool:
    """Whether a cell is read: prose, a guess, or what became of it."""
    return cell.cell_type == "markdown" or "predict(" in cell.source or ".reveal(" in cell.source


def off(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


def messages(result: Any, rank: int) -> list[int]:
    return [event.n_elements for event in result.trace.events if event.rank == rank and event.kind == "send"]


def test_the_first_question(cells: dict[str, Any]) -> None:
    """S75: scores 0 and ln 3, values 1 and 5."""
    says('A="3, the mean of 1 and 5"', 'B="4"', "the lower score still has a quarter of the weight")
    attend, merge, d = cells["attend"], cells["merge"], cells["WIDTH"]
    q = torch.full((1, d), 1 / d**0.5, dtype=torch.float64)  # so that a key of equal numbers is its score

    def half(score: float, value: float) -> Any:
        return attend(q, torch.full((1, d), score, dtype=torch.float64), torch.tensor([[value]]).double())

    one, other = half(0.0, 1.0), half(math.log(3), 5.0)
    assert (one[0].item(), other[0].item()) == (1, 5)
    assert merge(*one, *other)[0].item() == pytest.approx(4, rel=1e-14)
    assert (merge(*one, *other)[1] - other[1]).exp().item() == pytest.approx(4 / 3)
    says("of 100,000 tokens has 10,000,000,000 scores in every head, 20 GB in bf16")
    assert (100_000**2, 2 * 100_000**2 / 1e9) == (10_000_000_000, 20)


def test_two_halves(cells: dict[str, Any]) -> None:
    """S75: any pieces, in any order, scores of a thousand, and a piece in which nothing is seen."""
    says("Two wrong halves plus two numbers a row make the exact answer.")
    Q, K, V, attend, merge = (cells[name] for name in ("Q", "K", "V", "attend", "merge"))
    truth = scaled_dot_product_attention(Q, K, V)
    halves = [attend(Q, k, v) for k, v in zip(K.chunk(2, 2), V.chunk(2, 2), strict=True)]
    assert all(off(half[0], truth) > 0.3 for half in halves)
    assert off((halves[0][0] + halves[1][0]) / 2, truth) > 0.1
    assert off(merge(*halves[0], *halves[1])[0], truth) < 1e-15
    says("of this row the first half has 13 % of the weight")
    share = cells["row"].softmax(0)[:8].sum()
    assert round(100 * share.item()) == 13
    says("does the order change the answer? And scores of 1000 and -1000, do they overflow?", "Neither.")
    for scale in (1, 1000):
        pieces = [attend(scale * Q, k, v) for k, v in zip(K.chunk(4, 2), V.chunk(4, 2), strict=True)]
        random.Random(scale).shuffle(pieces)
        merged = reduce(lambda a, b: merge(*a, *b), pieces)[0]
        assert off(merged, scaled_dot_product_attention(scale * Q, K, V)) < 1e-12
    says("Where nothing was seen, the answer is to be 0 and its share 0.")
    hidden = torch.zeros(16, 16, dtype=torch.bool)
    nothing = attend(Q, K, V, hidden)
    assert not nothing[0].any() and (nothing[1] == -torch.inf).all()
    for pair in ((nothing, halves[0]), (halves[0], nothing)):
        assert torch.equal(merge(*pair[0], *pair[1])[0], halves[0][0])
    assert not merge(*nothing, *nothing)[0].any()
    names: dict[str, Any] = {**cells}
    for cell in LESSON.cells:  # without the guard, as first written
        if cell.id in ("attend-and-merge", "nothing-to-see"):
            exec(compile(cell.source, f"<cell {cell.id}>", "exec"), names)
    says("-inf minus -inf is no number, and one NaN spoils the row for good.")
    empty = torch.full_like(nothing[1], -torch.inf)
    assert names["merge"](nothing[0], empty, nothing[0], empty)[0].isnan().all()


def test_two_passes(cells: dict[str, Any]) -> None:
    says("Exact, with 2 (P - 1) blocks sent.", "each has S/P x S of them, whole rows")
    truth = scaled_dot_product_attention(cells["Q"], cells["K"], cells["V"])
    result = run(cells["on_ring"], cells["two_passes"], ranks=4)
    block = cells["Q"].numel() // 4
    for rank, o in enumerate(result.values):
        assert off(o, truth.chunk(4, 2)[rank]) < 1e-14
        assert messages(result, rank) == [block] * 6


def test_one_pass(cells: dict[str, Any]) -> None:
    says('B="as far as rounding"', "The same bytes as two passes.")
    truth = scaled_dot_product_attention(cells["Q"], cells["K"], cells["V"])
    result = run(cells["on_ring"], cells["ring_attention"], ranks=4)
    for rank, o in enumerate(result.values):
        assert off(o, truth.chunk(4, 2)[rank]) < 1e-14
        assert messages(result, rank) == [2 * cells["Q"].numel() // 4] * 3
    says("a hop is nothing but latency, 3 µs")
    assert cells["ring"].trace.timeline.makespan == pytest.approx(3 * 3e-6, rel=0.01)
    says("so that each always has 128 tokens", "Whole rows of scores grow with the text; blocks do not.")
    two, one = (cells["peaks"][name] for name in ("two passes", "one pass"))
    assert one == pytest.approx([one[0]] * 3, rel=1e-3)
    scores = 128 * 128 * 4 / 1e3  # of a block, in kB; the rows and their softmax are held
    assert two[2] - two[1] == pytest.approx(2 * 4 * scores, rel=0.02)
    assert two[1] - two[0] == pytest.approx(2 * 2 * scores, rel=0.02)


def test_positions(cells: dict[str, Any]) -> None:
    says("Plausible numbers, all wrong, rank 0's too: it looks into the future. Nothing is raised.")
    truth = scaled_dot_product_attention(cells["Q"], cells["K"], cells["V"], is_causal=True).chunk(4, 2)

    def causal(positions: Any) -> list[float]:
        result = run(cells["on_ring"], lambda *args: cells["causal_ring"](*args, positions), ranks=4)
        return [off(o, want) for o, want in zip(result.values, truth, strict=True)]

    assert max(causal(cells["global_positions"])) < 1e-14
    assert min(causal(cells["restarted"])) > 0.5
    says("rank 0 got three blocks in which it may see nothing")


def test_backward(cells: dict[str, Any]) -> None:
    says('C="P times"', "2 (P - 1) blocks forward, 2 (P - 1) + 2 P backward")
    leaves = [cells[name].clone().requires_grad_() for name in ("Q", "K", "V")]
    truths = torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, cells["dO"])
    blocks = [truth.chunk(4, 2) for truth in truths]
    result = run(cells["backward"], ranks=4)
    for rank, gradients in enumerate(result.values):
        assert all(off(ours, block[rank]) < 1e-13 for ours, block in zip(gradients, blocks, strict=True))
        assert messages(result, rank) == [2 * cells["Q"].numel() // 4] * 7
    says("The right numbers, on the wrong rank: the gradient of rank 1's keys.")
    says("the norm over all ranks is, too")
    short = run(cells["backward"], cells["one_hop_short"], ranks=4).values
    for rank, (dq, dk, dv) in enumerate(short):
        assert off(dq, blocks[0][rank]) < 1e-13
        for ours, block in ((dk, blocks[1]), (dv, blocks[2])):
            assert off(ours, block[(rank + 1) % 4]) < 1e-13 and off(ours, block[rank]) > 0.5
    assert torch.cat([dk for _, dk, _ in short], 2).norm().item() == pytest.approx(truths[1].norm().item())


def test_a_test_that_zeros_pass(cells: dict[str, Any]) -> None:
    """F8: an absolute tolerance on the gradient of a mean."""
    says("The gradient of a mean is tiny, and the tolerance was absolute: zeros pass.")
    dq = cells["dq"]
    assert dq.abs().max() < 1e-2
    for wrong, error in ((dq / 4, 0.75), (0 * dq, 1.0)):
        assert torch.allclose(wrong, dq, atol=1e-2)
        assert off(wrong, dq) == pytest.approx(error)


def test_library_and_torch(cells: dict[str, Any]) -> None:
    says("adds them up by all-reduces: 18 blocks, where the ring sends 14")
    backward = {
        name: {event.kind for event in result.trace.events if event.region == "backward"}
        for name, result in cells["by_library"].items()
    }
    assert "all_reduce" in backward["rsa"] and "all_reduce" not in backward["ring"]
    blocks = {name: ATTENTIONS[name].traffic(1, 16, 2, 8, 4)["backward"] / 64 for name in backward}
    assert blocks == {"rsa": 18, "ring": 14}
    truths = cells["truths"]
    for name, result in cells["by_library"].items():
        for rank, values in enumerate(result.values):
            for ours, truth in zip(values, truths, strict=True):
                assert off(ours, truth.chunk(4, 2)[rank]) < 1e-13
            for way, n in ATTENTIONS[name].traffic(1, 16, 2, 8, 4).items():
                assert result.trace.bytes_sent(rank, way) == 8 * n
    says("It cuts the sequence, sends nothing, and says nothing: every rank looks at its own tokens alone.")
    on_cpus = cells["on_cpus"]
    assert not on_cpus.trace.events
    wholes = [cells[name] for name in ("Q", "K", "V")]
    truth = scaled_dot_product_attention(*wholes, is_causal=True)
    for rank, (q, o) in enumerate(on_cpus.values):
        at = ATTENTIONS["zigzag"].assignment.positions(16, 4, rank)
        assert torch.equal(q, wholes[0][:, :, at])
        alone = scaled_dot_product_attention(*(x[:, :, at] for x in wholes), is_causal=True)
        assert off(o, alone) < 1e-14 and off(o, truth[:, :, at]) > 0.3
    says("it does what ours does")
    by_torch = cells["by_torch"]
    for rank, o in enumerate(by_torch.values):
        assert off(o, truth.chunk(4, 2)[rank]) < 1e-14
        assert by_torch.trace.bytes_sent(rank) == cells["ours"].trace.bytes_sent(rank) > 0
