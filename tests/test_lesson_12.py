"""Lesson 12: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read
from torch.nn.functional import scaled_dot_product_attention

from lessons_lib import run
from lessons_lib.errors import RefusedError
from lessons_lib.machines import Machine
from lessons_lib.sequence_parallel import ATTENTIONS
from lessons_lib.sequence_parallel.assignment import Contiguous, Striped, Zigzag, busy, pairs
from lessons_lib.widgets import attention_explorer
from lessons_lib.widgets.attention import METHODS

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "12_who_works_who_talks.py"
LESSON = read(SOURCE)


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all of them have run."""
    names: dict[str, Any] = {"__name__": "lesson_12"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and not has_tag(cell, "raises-exception"):
            exec(compile(cell.source, f"<cell {cell.id}>", "exec"), names)
    return names


def cell(name: str) -> str:
    return next(cell.source for cell in LESSON.cells if cell.id == name)


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


def sent(result: Any, way: str | None = None) -> set[float]:
    return {result.trace.bytes_sent(rank, way) / 8 for rank in range(result.ranks)}


def test_count_the_pairs(cells: dict[str, Any]) -> None:
    says('C="rank 3, its tokens see the most"', "the last token looks at 16 keys, the first at one")
    assert cells["work"] == [10, 26, 42, 58]
    says("rank 3 has 58 of 136 pairs")
    assert sum(cells["work"]) == 136
    says('B="about 59 %"')
    assert cells["waiting"].trace.timeline.makespan == pytest.approx(58e-6)
    assert round(136 / (4 * 58), 3) == 0.586
    assert busy(pairs(Contiguous(), 16, 4)) == Fraction(136, 4 * 58)
    says("towards P / (2P - 1), that is 57 % on 4 ranks and 53 % on 8")
    for P, percent in ((4, 57), (8, 53)):
        assert round(100 * P / (2 * P - 1)) == percent
        shares = [float(busy(pairs(Contiguous(), S, P))) for S in (2 * P, 16 * P, 128 * P)]
        assert shares == sorted(shares, reverse=True) and 0 < shares[-1] - P / (2 * P - 1) < 0.01


def test_zigzag(cells: dict[str, Any]) -> None:
    """S76: 8 tokens on 4 ranks, and the lesson's 16."""
    zigzag, contiguous = cells["zigzag"], cells["contiguous"]

    def work(deal: Any, S: int) -> list[int]:
        return [int((deal(S, 4, rank) + 1).sum()) for rank in range(4)]

    assert work(contiguous, 8) == [3, 7, 11, 15] and work(zigzag, 8) == [9, 9, 9, 9]
    says("34 pairs for everyone")
    assert work(zigzag, 16) == [34] * 4
    says("In every step, too. From 58.6 % to 100 % busy")
    assert cells["by_step"](zigzag) == [[10] * 4, [8] * 4, [8] * 4, [8] * 4] == pairs(Zigzag(), 16, 4)
    assert cells["by_step"](contiguous) == pairs(Contiguous(), 16, 4)
    machine = Machine("ideal links")
    done = run(cells["on_the_clock"], zigzag, ranks=4, machine=machine).trace
    assert done.timeline.makespan == pytest.approx(34e-6)
    says("with as many messages and bytes as before")
    before = run(cells["on_the_clock"], contiguous, ranks=4, machine=machine).trace
    assert [event.kind for event in done.collectives(0)] == [event.kind for event in before.collectives(0)]
    assert done.bytes_sent(0) == before.bytes_sent(0)
    for rank in range(4):
        assert zigzag(16, 4, rank).tolist() == Zigzag().positions(16, 4, rank)


def test_the_explorer() -> None:
    says("Which of the four let no rank wait on 8 ranks? And without a mask?")
    says("Zigzag and Ulysses; without a mask all four.")

    def all_work(mask: str) -> list[str]:
        alts = {name: attention_explorer(name, "8", mask).figure.alt for name in METHODS}
        return [name for name, alt in alts.items() if "are 100.0 % busy" in alt]

    assert all_work("causal") == ["zigzag", "ulysses"] and all_work("none") == list(METHODS)
    says("Heads are 16 numbers wide there and 8 in this lesson, so it sends twice as much.")
    elements = 2 * sum(ATTENTIONS["zigzag"].traffic(1, 16, 8, 8, 4).values())
    assert f"{elements:,} elements" in attention_explorer("zigzag", "4").figure.alt


def test_labels(cells: dict[str, Any]) -> None:
    """S39 too: what zigzag wants of the number of tokens."""
    says("Seven of them, and four where the pieces are contiguous", "only rank 3's two pieces touch")
    assert run(cells["wrong_labels"], Contiguous(), ranks=4).values == [1, 1, 1, 1]
    assert run(cells["wrong_labels"], Zigzag(), ranks=4).values == [2, 2, 2, 1]
    says("Zigzag wants a multiple of 2P.", "names the next one")
    with pytest.raises(RefusedError, match=r"cannot be cut into 16 equal pieces.* S=32784"):
        exec(compile(cell("indivisible"), "<cell indivisible>", "exec"), cells)


def test_padding(cells: dict[str, Any]) -> None:
    """S39: 13 tokens padded to 16 are the 13 alone, on every rank."""
    says("With a causal mask no true token looks at the padding", "13 tokens, padded to 16")
    assert cells["alone"].shape[2] == 13
    assert all(off(o, cells["alone"]) < 1e-14 for o in run(cells["padded"], ranks=4).values)


def test_ulysses(cells: dict[str, Any]) -> None:
    says("Three on the way in, one on the way out", "Alike: each has as many heads")
    Q, K, V, dO = (cells[name] for name in ("Q", "K", "V", "dO"))
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    O = scaled_dot_product_attention(*leaves, is_causal=True)
    truths = torch.autograd.grad(O, leaves, dO)
    result = run(cells["on_ranks"], cells["ulysses"], ranks=4)
    assert [event.kind for event in result.trace.collectives(0)] == ["all_to_all"] * 4
    for rank, o in enumerate(result.values):
        assert off(o, O.detach().chunk(4, 2)[rank]) < 1e-14
    says("Backward is the same four exchanges the other way round.")
    for rank, gradients in enumerate(cells["both"].values):
        for ours, truth in zip(gradients, truths, strict=True):
            assert off(ours, truth.chunk(4, 2)[rank]) < 1e-14
    for way in ("forward", "backward"):
        kinds = [event.kind for event in cells["both"].trace.collectives(0, way)]
        assert kinds == ["all_to_all"] * 4
        assert sent(cells["both"], way) == {ATTENTIONS["ulysses"].traffic(1, 16, 8, 8, 4)[way]}


def test_who_sends_less(cells: dict[str, Any]) -> None:
    says("| ring | 2 (P-1) | 2 (P-1) + 2 P | 6 + 14 |", "| Ulysses | 4 (P-1)/P | 4 (P-1)/P | 3 + 3 |")
    block = 16 // 4 * 8 * 8
    for name, forward, backward in (("ring", 6, 14), ("zigzag", 6, 14), ("ulysses", 3, 3)):
        elements = {"forward": forward * block, "backward": backward * block}
        assert ATTENTIONS[name].traffic(1, 16, 8, 8, 4) == elements
    says("With 32 heads of queries and 4 of keys, K and V are an eighth of Q.", 'B="the ring"')
    measured = cells["sent"]
    assert {kv: measured["zigzag", kv] for kv in (32, 16, 8, 4)} == {32: 20, 16: 10, 8: 5, 4: 2.5}
    assert {kv: measured["ulysses", kv] for kv in (32, 16, 8, 4)} == {32: 6, 16: 4.5, 8: 3.75, 4: 3.375}
    says("the ring sends 3.3 times as much as Ulysses")
    assert round(measured["zigzag", 32] / measured["ulysses", 32], 1) == 3.3
    says("on 8 ranks an eighth is too many")

    def both_ways(name: str, P: int, H_kv: int) -> float:
        return float(sum(ATTENTIONS[name].traffic(1, 8 * P, 64, 4, P, H_kv).values()))

    assert both_ways("ring", 4, 8) < both_ways("ulysses", 4, 8)
    assert both_ways("ring", 8, 8) > both_ways("ulysses", 8, 8)


def test_heads_limit(cells: dict[str, Any]) -> None:
    says("Ulysses copies them, and they count as one for each rank")
    two, four = (run(cells["step"], "ulysses", 32, kv, ranks=4) for kv in (2, 4))
    assert sent(two) == sent(four)
    says("Ulysses hands out whole heads, so they limit the ranks. The ring cuts tokens")
    with pytest.raises(RefusedError, match=r"H=6 heads .* Try 1 or 2 or 3 or 6 ranks, or ring") as refused:
        exec(compile(cell("too-few-heads"), "<cell too-few-heads>", "exec"), cells)
    assert not refused.value.run.trace.events
    assert len(run(cells["step"], "zigzag", 6, 6, ranks=4).values) == 4


def test_the_model_beside_what_was_measured() -> None:
    """T12: the printed shares of eight H800, and the count."""
    says(
        "counted for 8 ranks and 8,192 tokens", "For long texts the count says that it is as good as zigzag."
    )
    counted = {type(way): float(busy(pairs(way, 8192, 8))) for way in (Contiguous(), Striped(), Zigzag())}
    assert counted[Contiguous] == pytest.approx(8 / 15, abs=1e-3)
    assert counted[Striped] > 0.998 and counted[Zigzag] == 1
    says("The contiguous ring is where the count says. The others are below")
    assert all(f'("{name}", {printed})' in cell("measured") for name, printed in MEASURED.items())
    assert abs(100 * counted[Contiguous] - MEASURED["ring"]) < 1
    assert MEASURED["striped"] < 100 * counted[Striped] and MEASURED["zigzag"] < 100 * counted[Zigzag]


MEASURED = {"ring": 53.9, "striped": 82.9, "zigzag": 90.2}  # per cent of the ideal speed


def test_library_and_torch(cells: dict[str, Any]) -> None:
    truth = scaled_dot_product_attention(cells["Q"], cells["K"], cells["V"], is_causal=True).chunk(4, 2)
    for result in (cells["ours"], cells["theirs"]):
        assert all(off(o, want) < 1e-14 for o, want in zip(result.values, truth, strict=True))
        assert sent(result) == {768}
    says("PyTorch's context_parallel deals it by itself.", "but it cuts")
    for rank, places in enumerate(run(cells["dealt_by_torch"], ranks=4).values):
        assert places == Zigzag().positions(16, 4, rank)
