"""Lesson 04: every number its text states is what its cells measure."""

from __future__ import annotations

import math
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import Mesh, region, run
from lessons_lib.data_parallel import Bucketed, rows_of_rank, total
from lessons_lib.errors import DeadlockError, RefusedError
from lessons_lib.models import corpus

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "04_data_parallel.py"
LESSON = read(SOURCE)


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all that do not raise have run."""
    names: dict[str, Any] = {"__name__": "lesson_04"}
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


def off(ours: Any, truth: Any) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, truth, strict=True))


def test_the_same_step(cells: dict[str, Any]) -> None:
    says("One and a half times n: 2 (p−1)/p", "never more than twice")
    result, truth = run(cells["naive"], ranks=4), cells["serial"]()
    n = sum(gradient.numel() for gradient in truth)
    for rank, found in enumerate(result.values):
        assert off(found, truth) < 1e-13
        assert result.trace.bytes_sent(rank, "gradients") == 8 * 3 * n // 2


def test_two_and_six(cells: dict[str, Any]) -> None:
    """S12."""
    says('A="2.0, the average of the two", B="2.5, the mean of the eight tokens", C="4.0, the sum"')
    means, tokens = cells["two_and_six"], cells["mean_of_tokens"]
    assert run(means, tokens, ranks=2).values == [2.5, 2.5]

    def of_means(losses: torch.Tensor, group: Any) -> torch.Tensor:
        return losses.mean() / group.size

    assert run(means, of_means, ranks=2).values == [2.0, 2.0]
    assert run(means, lambda losses, group: losses.mean(), ranks=2).values == [4.0, 4.0]
    says("each token of rank 0 counts as much as three of rank 1")
    assert pytest.approx(3) == (1 / 2 / 2) / (1 / 2 / 6)
    says("the gradient is half of what it should be", "A sum of nothing is 0, and all is well")
    nothing = cells["one_has_none"]
    assert run(nothing, tokens, ranks=2).values == [{"loss": 3.0, "gradient": 3.0}] * 2
    for found in run(nothing, of_means, ranks=2).values:
        assert math.isnan(found["loss"]) and found["gradient"] == 1.5


def test_hooks(cells: dict[str, Any]) -> None:
    says("The last layer's come first, and the embedding's last")
    order = cells["order"]
    assert order[0] == "head.weight" and order[-1] == "embedding.weight"
    assert len(order) == len(list(cells["model"].parameters()))
    blocks = [int(name.split(".")[1]) for name in order if name.startswith("blocks")]
    assert all(later <= earlier for earlier, later in pairwise(blocks))


def test_overlap(cells: dict[str, Any]) -> None:
    says('B="most of the waiting; only for the last gradients ranks wait"')
    waited = cells["waited"]
    assert 0 < waited["eager"] < waited["afterwards"] / 4
    traces = [
        run(cells["six_layers"], cells[way], ranks=4, machine=cells["SLOW"]).trace
        for way in ("afterwards", "eager")
    ]
    assert {trace.bytes_sent(rank) for trace in traces for rank in range(4)} == {6 * 4 * 64 * 64 * 3 // 2}

    def gradients(prepare: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, group = torch.nn.Linear(4, 3).double(), Mesh(dp=4)["dp"]
        finish = prepare(model, group)
        model(torch.arange(4.0, dtype=torch.float64) + group.rank).sum().backward()
        finish()
        return [p.grad for p in model.parameters() if p.grad is not None]

    after, eager = (run(gradients, cells[way], ranks=4).values for way in ("afterwards", "eager"))
    assert all(off(a, b) < 1e-14 and off(a, after[0]) < 1e-14 for a, b in zip(after, eager, strict=True))


def test_buckets(cells: dict[str, Any]) -> None:
    says("A layer has 16.6 kB", "Something between", "In PyTorch the default is 25 MB")
    assert round(4 * (64 * 64 + 64) / 1000, 1) == 16.6
    times, calls = cells["times"], cells["calls"]
    assert calls == sorted(calls, reverse=True) and (calls[0], calls[-1]) == (24, 1)
    best = min(times)
    assert times[0] > 1.2 * best and times[-1] > 1.1 * best and 1 < calls[times.index(best)] < 24

    def default() -> int:
        model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=Mesh(dp=1)["dp"].process_group)
        return model.bucket_bytes_cap

    assert run(default, ranks=1).values == [25 * 2**20]


def test_no_backward(cells: dict[str, Any]) -> None:
    says("No backward, no hook, no all-reduce, and three ranks wait for ever")
    names = dict(cells)
    with pytest.raises(DeadlockError, match=r"ranks 0, 2 and 3 wait for rank 1 in all_reduce"):
        exec(cell("no-backward"), names)
    assert run(cells["zeros_from_rank_1"], ranks=4).values == [[6.0] * 3] * 4


def test_accumulation(cells: dict[str, Any]) -> None:
    says("Four times the bytes, and wrong", "the first counts 4 x 4 x 4 times")
    truth, way = cells["serial"](), cells["in_micro_batches"]
    every, once = (run(way, every_time, ranks=4) for every_time in (True, False))
    for rank in range(4):
        assert off(once.values[rank], truth) < 1e-13
        assert every.trace.bytes_sent(rank) == 4 * once.trace.bytes_sent(rank)

    def piece(m: int) -> list[torch.Tensor]:
        """What micro-batch m of all ranks adds to the gradient."""
        model = cells["GPT"](cells["CONFIG"]).double()
        tokens, targets = (torch.stack(x.chunk(4), 0)[:, m] for x in cells["BATCH"])
        (model.loss_sum(tokens, targets) / cells["BATCH"][1].numel()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    counted = [
        sum(4 ** (3 - m) * g for m, g in enumerate(each)) for each in zip(*map(piece, range(4)), strict=True)
    ]
    assert all(off(found, counted) < 1e-13 for found in every.values)
    with pytest.raises(RefusedError, match=r"with replicas\.accumulating\(\)"):
        exec(cell("refused"), dict(cells))


def test_four_times_too_much(cells: dict[str, Any]) -> None:
    """F1, as data parallelism has it."""
    says(
        "Adam does not move.", "SGD's curve, with a wrong gradient, falls faster", "here it even falls faster"
    )
    curves, apart = cells["curves"], cells["apart"]
    assert apart["Adam"] < 1e-3 < 0.5 < apart["SGD"]
    right, wrong = curves["SGD"], curves["SGD, gradients x4"]
    assert wrong[-1] < right[-1] and sum(w < r for w, r in zip(wrong, right, strict=True)) > 30
    gradients, equal = cells["gradients"], (4, 4, 4, 4)
    found = run(gradients, cells["not_divided"], equal, ranks=4).values
    assert all(off(four, [4 * g for g in cells["serial"]()]) < 1e-13 for four in found)


def test_no_curve_shows_it(cells: dict[str, Any]) -> None:
    says(
        "Of 16 sequences, rank 0 has one, and the others have five each",
        "All four fall, and the two of a pair are never 0.05 apart",
    )
    assert sum(cells["UNEQUAL"]) == 16 and cells["BATCH"][0].shape[0] == 16
    unequal, gaps, truth = cells["unequal"], cells["gaps"], cells["serial"]()
    for name in ("Adam", "SGD"):
        right, wrong = unequal[name], unequal[f"{name}, mean of means"]
        assert max(right[-1], wrong[-1]) < right[0] - 2
        says("less than the loss jumps from step to step")
        assert 1e-3 < gaps[name] < min(0.05, median(abs(b - a) for a, b in pairwise(right)))
    says("Adam hides a factor, and nothing else: here the direction is wrong")
    says("its curve moves more than SGD's")
    assert gaps["Adam"] > gaps["SGD"]
    assert off(run(cells["gradients"], cells["divided"], ranks=4).values[0], truth) < 1e-13
    assert off(run(cells["gradients"], cells["mean_of_means"], ranks=4).values[0], truth) > 0.3


def test_the_curves_are_the_serial_ones(cells: dict[str, Any]) -> None:
    """What is called right is what one rank does, with either optimizer, however rows are dealt out."""
    says("divided once, it does not matter how rows are dealt out")
    for name in ("Adam", "SGD"):
        model = cells["GPT"](cells["CONFIG"])
        optimizer = {"Adam": cells["ADAM"], "SGD": cells["SGD"]}[name](model.parameters())
        losses = []
        for step in range(8):
            optimizer.zero_grad()
            loss = model.loss(*corpus.batch(step, 16, cells["CONFIG"].S))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert cells["curves"][name][:8] == pytest.approx(losses, rel=1e-3)
        counts, way = cells["UNEQUAL"], {"Adam": cells["ADAM"], "SGD": cells["SGD"]}[name]
        dealt = run(cells["train"], way, cells["divided"], counts, 8, ranks=4).values
        assert all(found == pytest.approx(losses, rel=1e-3) for found in dealt)


def test_production(cells: dict[str, Any]) -> None:
    says("Equal numbers and equal bytes.", "it averages over ranks")
    truth = cells["serial"]()
    for result in (cells["by_torch"], cells["by_library"]):
        assert all(off(found, truth) < 1e-13 for found in result.values)
    traces = [cells[name].trace for name in ("by_torch", "by_library")]
    sent = [[trace.bytes_sent(rank, "gradients") for rank in range(4)] for trace in traces]
    assert sent[0] == sent[1] == [8 * 3 * sum(g.numel() for g in truth) // 2] * 4
    says("no_sync() is our accumulating()")

    def last_of_two() -> list[int]:
        model, group = torch.nn.Linear(3, 2), Mesh(dp=2)["dp"]
        theirs = DistributedDataParallel(model, process_group=group.process_group)
        with region("first"), theirs.no_sync():
            theirs(torch.ones(2, 3)).sum().backward()
        with region("last"):
            theirs(torch.ones(2, 3)).sum().backward()
        return [group.rank]

    trace = run(last_of_two, ranks=2).trace
    assert trace.bytes_sent(0, "first") == 0 < trace.bytes_sent(0, "last")
    says("What else it sends, once, are the weights of rank 0")
    broadcast = [event for event in traces[0].collectives(0) if event.kind == "broadcast"]
    assert sum(event.n_elements for event in broadcast) >= sum(g.numel() for g in truth)


def test_a_metric(cells: dict[str, Any]) -> None:
    """S45."""
    says("83 %: on four ranks two samples are drawn again", "90 % are right")
    for found in run(partial(cells["accuracy"], 4), ranks=4).values:
        assert found == {"filled up": pytest.approx(10 / 12), "each once": 0.9}


def test_the_library_is_one_sitting() -> None:
    says("is ours, in one sitting")
    assert {Bucketed.__module__, rows_of_rank.__module__, total.__module__} == {
        "lessons_lib.data_parallel.replicated",
        "lessons_lib.data_parallel.rows",
    }
