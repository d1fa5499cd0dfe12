"""Lesson 09: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read
from torch.nn.functional import cross_entropy

from lessons_lib import run
from lessons_lib.tensor_parallel import VOCABULARIES, padded
from lessons_lib.tensor_parallel.cross_entropy import loss_traffic
from lessons_lib.timeline import ring_traffic

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "09_attention_and_vocabulary.py"
LESSON = read(SOURCE)
LARGE = "sent"  # 150 MB a rank: its two ways are counted below, on fewer words


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all but the large one have run."""
    names: dict[str, Any] = {"__name__": "lesson_09", "kB": 18.0}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and cell.id != LARGE and not has_tag(cell, "raises-exception"):
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


def test_heads(cells: dict[str, Any]) -> None:
    says("Guess: how often do the ranks meet?", "Once. Nothing of attention is sent: no score, no key.")
    result = run(cells["by_heads"], ranks=4)
    assert [event.kind for event in result.trace.events] == ["all_reduce"] * 4
    assert all(off(y, cells["serial"]) < 1e-14 for y in result.values)
    says("Every shape fits, and the numbers are wrong: rank 0 got queries only, rank 3 values only.")
    assert all(off(y, cells["serial"]) > 0.5 for y in run(cells["cut_apart"], ranks=4).values)
    D, columns = cells["D"], torch.arange(3 * cells["D"])
    first, *_, last = columns.chunk(4)
    assert first.max() < D and last.min() >= 2 * D  # queries first, values last


def test_the_inside_of_a_head(cells: dict[str, Any]) -> None:
    says('B="a wrong number"', "each rank has a term of every score")
    assert off(cells["joined"], cells["head_by_head"]) > 0.1
    X, TWO, K = cells["X"], cells["TWO"], cells["K"]
    q, k, _ = torch.einsum("bsd,dhck->chbsk", X, TWO.unflatten(1, (2, 3, K)))
    halves = [q[..., part] @ k[..., part].mT for part in (slice(None, K // 2), slice(K // 2, None))]
    assert off(halves[0] + halves[1], q @ k.mT) < 1e-14  # terms, whose sum is the scores


def test_the_embedding(cells: dict[str, Any]) -> None:
    says("Zeros. One rank has the row, the others add nothing, and the sum is the answer")
    TABLE, TOKENS = cells["TABLE"], cells["TOKENS"]
    right, wrong = (run(cells["look_up"], masked, ranks=4) for masked in (True, False))
    assert all(torch.equal(x, TABLE[TOKENS]) for x in right.values)
    says("Without the mask every rank adds its first row, where it has nothing to say.")
    firsts = TABLE[::3].sum(0)
    added = torch.stack([firsts - TABLE[token // 3 * 3] for token in TOKENS])
    assert all(off(x, TABLE[TOKENS] + added) < 1e-14 for x in wrong.values)
    says("an all-reduce of the output, however long the table", "Backward is silent")
    D, n = cells["D"], len(TOKENS)
    for V in (12, 1200):
        sent = VOCABULARIES["1d"].embedding_traffic(n, V, D, {"tp": 4})
        assert sent == {"forward": ring_traffic("all_reduce", n * D, 4), "backward": 0}
    assert right.trace.bytes_sent(0) == 8 * sent["forward"]


def test_numbers_too_large(cells: dict[str, Any]) -> None:
    says("exp(1000) is infinite.")
    x = cells["x"]
    assert x.exp().isinf().all() and x.exp().sum().log().isinf()
    for m in (x.max(), torch.tensor(900.0), torch.tensor(1100.0)):  # for any number m
        assert torch.isclose(m + (x - m).exp().sum().log(), x.logsumexp(0), rtol=1e-14)


def test_three_numbers(cells: dict[str, Any]) -> None:
    result = run(cells["cut_losses"], cells["LOGITS"], ranks=4)
    truth = cross_entropy(cells["LOGITS"], cells["LABELS"], reduction="none")
    assert all(off(each, truth) < 1e-14 for each in result.values)
    says("each rank ends with the same loss, to the last bit")
    assert all(torch.equal(each, result.values[0]) for each in result.values)
    says("Three all-reduces of one number per token, 2·(p−1)/p each. The number of words is not in it.")
    says("Six numbers do not divide by four, so the ranks send 192 to 240 bytes.")
    sent = [result.trace.bytes_sent(rank) for rank in range(4)]
    assert (min(sent), max(sent), sum(sent)) == (192, 240, 4 * 8 * 3 * ring_traffic("all_reduce", 6, 4))
    kinds = [(event.kind, event.n_elements) for event in result.trace.collectives(0)]
    assert kinds == [("all_reduce", 6)] * 3


def test_what_is_sent(cells: dict[str, Any]) -> None:
    """COURSE: kB sent with and without gathering, 1000 tokens, 50 000 words, 4 ranks."""
    says("1000 tokens, 50,000 words, 4 ranks, 4 bytes a number", 'A="150,000", B="50,000", C="18"')
    flat = {"tp": 4}
    assert 4 * loss_traffic(1000, VOCABULARIES["1d"], flat)["forward"] / 1000 == 18
    assert 4 * ring_traffic("all_gather", 1000 * 50_000, 4) / 1000 == 150_000
    says("three quarters of 200 MB")
    assert 4 * 1000 * 50_000 / 1e6 == 200
    assert 4 * 1000 * 50_000 / 4 / 1000 == 50_000

    def small(way: Any) -> None:
        torch.manual_seed(0)
        labels = torch.randint(400, (20,))
        way(torch.randn(20, 100), labels, cells["Mesh"](tp=4)["tp"])

    for way, formula in (
        ("gathered", ring_traffic("all_gather", 20 * 400, 4)),
        ("losses", loss_traffic(20, VOCABULARIES["1d"], flat)["forward"]),
    ):
        trace = run(small, cells[way], ranks=4).trace
        assert [trace.bytes_sent(rank) for rank in range(4)] == [4 * formula] * 4


@pytest.mark.slow
def test_the_large_cell(cells: dict[str, Any], capsys: Any) -> None:
    exec(compile(next(c.source for c in LESSON.cells if c.id == LARGE), "<cell sent>", "exec"), cells)
    assert "150,000 kB per 1000 tokens" in capsys.readouterr().out and cells["kB"] == 18


def test_another_m(cells: dict[str, Any]) -> None:
    says("and such sums cannot be added", "right until logits get large, and then infinite")
    for scale in (1, 300):
        logits = scale * cells["LOGITS"]
        truth = cross_entropy(logits, cells["LABELS"], reduction="none")
        found = {
            name: run(cells["cut_losses"], logits, highest, ranks=4).values[0]
            for name, highest in cells["ways"].items()
        }
        assert off(found["max over ranks"], truth) < 1e-14
        assert off(found["each its own"], truth) > 0.05
        if scale == 1:
            assert off(found["none"], truth) < 1e-14
        else:
            assert not found["none"].isfinite().all()


def test_backward(cells: dict[str, Any]) -> None:
    says("Nothing. Each rank makes the gradient of its own logits.", "m and s are there, from forward")
    result = run(cells["gradient"], ranks=4)
    assert off(torch.cat(result.values, 1), cells["whole"].grad) < 1e-14
    assert all(result.trace.bytes_sent(rank, "backward") == 0 for rank in range(4))
    says("What is sent comes one layer further down", "its dX is a sum over ranks")
    assert VOCABULARIES["1d"].head_traffic(100, 12, 8, {"tp": 4})["backward"] > 0


def test_padding(cells: dict[str, Any]) -> None:
    """S14."""
    says("GPT-2 has 50,257 words, which is 29 · 1733", "no power of 2 divides it")
    assert 29 * 1733 == 50_257 and 50_257 % 2
    assert cells["left_out"] == pytest.approx(cells["truth"].item(), rel=1e-14)
    says('B="it is too large"', "a larger sum gives every real word a smaller share, so a larger loss")
    assert cells["counted"] > cells["truth"] + 1e-3
    says("Megatron rounds up to 128 for each")
    assert [padded(50_257, 128, p) for p in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]
    says("a padding column takes a share of the softmax and gets a gradient")
    logits = cells["PADDED"].clone().requires_grad_()
    cross_entropy(logits, cells["TEN"]).backward()
    assert (logits.grad[:, 10:] > 0).all()


def test_library_and_torch(cells: dict[str, Any]) -> None:
    says("Five all-reduces, the thin lines: the embedding's output and the three numbers forward")
    calls = [(event.region, event.n_elements) for event in cells["by_library"].trace.collectives(0)]
    n, D = len(cells["TOKENS"]), cells["D"]
    assert calls == [("forward", n * D), *[("forward", n)] * 3, ("backward", n * D)]
    found, blocks = zip(*cells["by_library"].values, strict=True)
    assert all(each == pytest.approx(cells["loss"].item(), rel=1e-14) for each in found)
    assert off(torch.cat(blocks), cells["words"].weight.grad) < 1e-13
    theirs, ours = cells["by_torch"], cells["by_us"]
    assert theirs.values == pytest.approx(ours.values, rel=1e-14)
    for rank in range(4):
        both = [
            [(event.kind, event.n_elements) for event in result.trace.collectives(rank, "loss")]
            for result in (theirs, ours)
        ]
        assert both[0] == both[1] == [("all_reduce", 6)] * 3


def test_grouped_queries(cells: dict[str, Any]) -> None:
    says("8 query heads and 2 of these take a quarter of the memory")
    copy_sum, grouped = cells["copy_sum"], cells["grouped"]
    y, dwkv = run(grouped, {"kv": 1, "copy": 1}, ranks=1).values[0]
    right = run(grouped, {"kv": 2, "copy": 2}, copy_sum, ranks=4).values
    wrong = run(grouped, {"kv": 2, "copy": 2}, lambda w, group: w, ranks=4).values
    halves = dwkv.chunk(2, -1)
    for rank in range(4):
        for values in (right, wrong):
            assert off(values[rank][0], y.chunk(4, -1)[rank]) < 1e-13
        assert off(right[rank][1], halves[rank // 2]) < 1e-12
        assert off(wrong[rank][1], halves[rank // 2]) > 0.1
    says("its gradient is a term")
    assert off(wrong[0][1] + wrong[1][1], halves[0]) < 1e-12
    says("two copies of one weight go different ways")
    assert off(wrong[0][1], wrong[1][1]) > 0.1


def test_on_a_grid(cells: dict[str, Any]) -> None:
    says("By those of the whole batch: rank 0 has none of its own.")
    truth = cross_entropy(cells["LOGITS"], cells["LEFT_OUT"]).item()
    for rank, (by_all, by_own) in enumerate(run(cells["on_grid"], ranks=4).values):
        assert by_all == pytest.approx(truth, rel=1e-14)
        assert (by_own == pytest.approx(truth)) == (rank >= 2)
    assert (cells["LEFT_OUT"][:3] == -100).all() and len(cells["LEFT_OUT"]) == 6
