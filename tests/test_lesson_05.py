"""Lesson 05: every number its text states is what its cells measure."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read
from torch import nn
from torch.optim import SGD

from lessons_lib import run
from lessons_lib.cost.memory import RECIPES, messages, saving
from lessons_lib.data_parallel import traffic
from lessons_lib.errors import RefusedError
from lessons_lib.timeline import ring_traffic

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "05_zero_1.py"
LESSON = read(SOURCE)


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all of them have run."""
    names: dict[str, Any] = {"__name__": "lesson_05"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.", DeprecationWarning)  # torch.distributed.optim's
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


def serially(cells: dict[str, Any], max_norm: float | None = None, make: Any = None) -> torch.Tensor:
    """Ten steps of the lesson's training by torch alone, whose clipping is torch's."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model.load_state_dict(cells["MLP"].state_dict())
    optimizer = (make or cells["ADAM"])(model.parameters())
    for _ in range(10):
        model.zero_grad()
        ((model(cells["X"]) - cells["Y"]).square().sum() / 10).backward()
        if max_norm:
            assert nn.utils.clip_grad_norm_(model.parameters(), max_norm) > 2 * max_norm
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_stored_four_times(cells: dict[str, Any]) -> None:
    says("cut 73 parameters into four pieces")
    assert sum(p.numel() for p in cells["MLP"].parameters()) == 73
    for mine in cells["moments"]:
        assert sum(x.numel() for x in mine) == 2 * 73
        assert all(map(torch.equal, mine, cells["moments"][0]))
    says('B="nobody, if each moment is with one rank', "whoever has the moments of a parameter updates it")
    assert torch.equal(cells["by_pieces"], cells["adam"](cells["w"], cells["g"]))
    says("2 b + 2 b", "4 b + 4 b + 4 b", "12 of 16 bytes are the optimizer's state")
    assert RECIPES["mixed adam"] == (2, 2, 12)


def test_the_all_reduce_stopped_halfway(cells: dict[str, Any]) -> None:
    says('B="the same"', "reduce-scatter, update a piece, all-gather the parameters. Same bytes.")
    at_once, halfway = (run(cells[name], ranks=4) for name in ("at_once", "stopped_halfway"))
    for rank in range(4):
        assert at_once.trace.bytes_sent(rank) == halfway.trace.bytes_sent(rank) == 6000
        assert [e.kind for e in halfway.trace.collectives(rank)] == ["reduce_scatter", "all_gather"]
        assert torch.equal(halfway.values[rank], torch.full((1000,), 4 - 0.1))


def test_flat_padded_cut(cells: dict[str, Any]) -> None:
    says("Some have 3 or 7 elements.", "into 18¼ each?", "padded with zeros, to 76")
    assert {3, 7} <= {p.numel() for p in cells["MLP"].parameters()} and 73 / 4 == 18.25
    (refused,) = (cell.source for cell in LESSON.cells if has_tag(cell, "raises-exception"))
    with pytest.raises(RefusedError, match=r"has size 73, which 4 ranks cannot share evenly.*72 or 76"):
        exec(refused, dict(cells))
    says("Rank 0 has not one whole tensor, rank 3 a bit of everything.")
    names, whole = cells["names"], {name: p.numel() for name, p in cells["MLP"].named_parameters()}
    assert len(names) == 76 and set(names[:19]) == {"0.weight"} and whole["0.weight"] > 19
    assert set(names[57:]) == {"2.weight", "2.bias", "padding"}


def test_your_own_sharded_adam(cells: dict[str, Any]) -> None:
    truth = serially(cells)
    assert off(cells["serial"], truth) < 1e-12
    for ranks, held in ((2, 74), (3, 50), (4, 38)):
        result = run(cells["train"], cells["Sharded"], ranks=ranks)
        n = held // 2 * ranks  # padded
        for rank, (w, n_moments) in enumerate(result.values):
            assert off(w, truth) < 1e-12 and n_moments == held
            assert result.trace.bytes_sent(rank, "step") == 10 * 8 * sum(traffic(1, n, ranks).values())
    says("takes 876 bytes", "2 · ¾ · 76 · 8 = 912")
    assert 2 * 0.75 * 73 * 8 == 876 and result.trace.bytes_sent(0, "step") == 10 * 912


def test_gathered_gradients(cells: dict[str, Any]) -> None:
    says('C="what a rank holds, and nothing else"', "the numbers are right: a test of numbers passes it")
    result = cells["wrong"]
    assert all(off(w, serially(cells)) < 1e-12 and n == 146 for w, n in result.values)
    assert [result.trace.bytes_sent(rank, "step") for rank in range(4)] == [9120] * 4


def test_one_norm_for_all(cells: dict[str, Any]) -> None:
    says("with SGD and the limit 0.05", 'B="all ranks agree, and all are wrong"')
    truth = serially(cells, 0.05, partial(SGD, lr=0.3, momentum=0.9))
    assert off(cells["alone"], truth) < 1e-5  # torch adds 1e-6 to the norm
    says("On one rank the wrong version is right.")
    wrong, right = [w for w, _ in cells["mine"].values], [w for w, _ in cells["right"].values]
    assert all(torch.equal(w, wrong[0]) for w in wrong) and off(wrong[0], truth) > 0.1
    assert all(off(w, truth) < 1e-5 and off(w, cells["alone"]) < 1e-12 for w in right)
    says("an all-reduce of one number, in ten steps 80 to 160 bytes")
    sent = {
        sum(e.bytes_sent for e in cells["right"].trace.collectives(rank) if e.kind == "all_reduce")
        for rank in range(4)
    }
    assert (min(sent), max(sent)) == (80, 160)


def test_what_it_saves(cells: dict[str, Any]) -> None:
    says("2.29 times at 4 ranks, 2.91 at 8, 3.82 at 64.", "2.29 times less at 4 ranks, 3.82 at 64, never 4")
    for n, times in ((4, 2.29), (8, 2.91), (64, 3.82)):  # S54
        assert cells["saved"][n] == pytest.approx(times, abs=0.005)
    for n, times in cells["saved"].items():
        assert times == pytest.approx(float(saving(1, n)), rel=1e-3)  # Adam's counter
        assert float(saving(1, n)) == pytest.approx(16 / (4 + 12 / n))
    says('B="2.29 times"', 'A="only the 12 are cut: 16 / (4 + 12/4)"', 'C="1.23 times')
    assert round(16 / (16 - 12 / 4), 2) == 1.23
    says("With momentum, whose state is 8 of 12 bytes, the limit is 3, and with plain SGD, 4 of 8, it is 2.")
    for recipe, state, total, limit in (
        ("mixed adam", 12, 16, 4),
        ("mixed momentum", 8, 12, 3),
        ("mixed sgd", 4, 8, 2),
    ):
        assert (RECIPES[recipe].state, RECIPES[recipe].total) == (state, total)
        assert limit - 0.01 < saving(1, 10_000, recipe) < limit


def test_on_the_timeline(cells: dict[str, Any]) -> None:
    says("In time stage 1 is a little later done. Its bytes are the same")
    zero, one = cells["stage_0"].trace, cells["stage_1"].trace
    assert 1 < one.timeline.makespan / zero.timeline.makespan < 1.15
    assert zero.bytes_sent(0) == one.bytes_sent(0) == 2 * 4 * 2 * 3 * cells["n"] // 4
    says("four pieces of each with stage 0, one with stage 1")
    moments = 2 * 4 * cells["n"]
    assert zero.peak_bytes(0) - one.peak_bytes(0) == pytest.approx(moments * 3 / 4, rel=0.25)
    says("gathering begins when backward has ended")
    events = [e for e in one.collectives(0) if e.kind == "all_gather"][:4]
    reduced = [e for e in one.collectives(0) if e.kind == "reduce_scatter"][:4]
    assert min(e.issued_s for e in events) >= max(e.done_s for e in reduced)


def test_two_messages(cells: dict[str, Any]) -> None:
    says("7e9 parameters on 2 x 2 ranks", "21 GB of buffers, where an all-reduce in 32 bits", "halves of 14")
    bill = messages(1, 3_500_000_000, "mixed adam, fp32 gradients")  # S88
    assert [n_bytes / 1e9 for _, _, n_bytes in bill] == [14, 7]
    assert [float(ring_traffic(kind, n, 2)) / 1e9 for _, kind, n in bill] == [7, 3.5]


def test_another_number_of_ranks(cells: dict[str, Any]) -> None:
    says("Four ranks save, and three go on.", "They can, if a piece is saved as what it is")  # S19
    assert len(cells["continued"]) == 3
    assert all(off(w, cells["unbroken"]) < 1e-12 for w in cells["continued"])


def test_production(cells: dict[str, Any]) -> None:
    theirs, ours = cells["theirs"], cells["ours"]
    truth = serially(cells)
    for values in (theirs.values, ours.values):
        assert all(off(w, truth) < 1e-12 for w, _ in values)
    says("rank 0 has the moments of the largest, rank 3 those of a small one")
    assert [n for _, n in theirs.values] == [84, 42, 14, 6] and [n for _, n in ours.values] == [38] * 4
    says("an all-reduce and a half")
    sent = sum(theirs.trace.bytes_sent(rank, "last step") for rank in range(4))
    assert sent == 1.5 * 2 * 3 * 73 * 8
    assert [ours.trace.bytes_sent(rank, "last step") for rank in range(4)] == [912] * 4
    kinds = [event.kind for event in theirs.trace.collectives(0, "last step")]
    assert kinds == ["all_reduce"] + ["broadcast"] * 4
