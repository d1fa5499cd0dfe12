"""Lesson 16: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read

from lessons_lib import run
from lessons_lib.errors import MismatchError
from lessons_lib.pipeline_parallel import gpipe, simulate
from lessons_lib.tensor_parallel import SCHEMES
from tests import test_published_schedules as published

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "16_pipeline_stages.py"
LESSON = read(SOURCE)
TRAININGS = ("forget-curves", "forget-seen")  # they take long; a slow test runs them
SHOWN_ONLY = ("recap", "gpipe-compared", "gpipe-seen", "cut-picture")  # what they show, tests measure


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all that do not raise or take long have run."""
    names: dict[str, Any] = {"__name__": "lesson_16"}
    skipped = (*TRAININGS, *SHOWN_ONLY)
    for cell in LESSON.cells:
        if cell.cell_type == "code" and cell.id not in skipped and not has_tag(cell, "raises-exception"):
            exec(compile(cell.source, f"<cell {cell.id}>", "exec"), names)
            if cell.id == "gpipe-run":  # what a skipped cell also defines
                names["all_gradients"] = lambda run: [g for gradients, _ in run.values for g in gradients]
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


def off(ours: Iterable[torch.Tensor], truth: Iterable[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, truth, strict=True))


def serial(cells: dict[str, Any]) -> list[torch.Tensor]:
    """The gradients of the whole batch, in one graph."""
    parameters = list(cells["LAYERS"].parameters())
    loss = cells["loss_share"](cells["LAYERS"](cells["tokens"]), cells["targets"])
    return list(torch.autograd.grad(loss, parameters))


def test_a_border(cells: dict[str, Any]) -> None:
    says("The model has eight layers", "Now the last four shall be on another rank")
    assert len(cells["LAYERS"]) == 8 and len(cells["second"]) == 4
    says("One tensor forward, and one of the same shape back")
    assert off(cells["in_two"], serial(cells)) < 1e-14
    first, second = cells["stage"](0, 2), cells["stage"](1, 2)
    y = first(cells["tokens"])
    x = y.detach().requires_grad_()
    (dx,) = torch.autograd.grad(cells["loss_share"](second(x), cells["targets"]), x)
    assert dx.shape == y.shape == (24, 8, 32)
    (uncut,) = torch.autograd.grad(
        cells["loss_share"](second(y.detach()), cells["targets"]), second[0][0].bias
    )
    assert uncut.any()  # the second half alone; nothing of the first is in its graph


def test_stairs(cells: dict[str, Any]) -> None:
    says("and at any time one rank works", 'B="not at all"')
    one, four = cells["one"], cells["four"]
    assert one.trace.timeline.makespan == four.trace.timeline.makespan == 24 * 8 * 3
    assert cells["idle"](four) == pytest.approx(3 / 4)
    spans = sorted((s.start, s.end) for s in four.trace.timeline.spans if s.kind == "compute")
    assert all(start >= end for (_, end), (start, _) in pairwise(spans))


def test_in_micro_batches(cells: dict[str, Any]) -> None:
    """S68: fewer micro-batches than stages; S93: one loss, on the last stage."""
    says("a mean over all is a sum of shares: the mathematics is the same")
    says("Also with 3 micro-batches, fewer than stages, and with 7, which are not of one size.")
    truth, step = serial(cells), cells["gpipe_step"]
    assert {len(x) for x in cells["tokens"].tensor_split(7)} == {3, 4}
    loss = cells["loss_share"](cells["LAYERS"](cells["tokens"]), cells["targets"]).item()
    for p, m in ((4, 3), (4, 7), (2, 5)):
        result = run(step, m, ranks=p, machine=cells["FREE"])
        assert off([g for grads, _ in result.values for g in grads], truth) < 1e-14
        losses = [losses for _, losses in result.values]
        assert losses[:-1] == [[]] * (p - 1) and len(losses[-1]) == m
        assert sum(losses[-1]) == pytest.approx(loss, rel=1e-12)
    says("Only the last stage has one, in shares. Rank 0 prints none")


def test_the_bubble(cells: dict[str, Any]) -> None:
    """S56: of all time, or of the ideal; each by its name."""
    says(
        "(p − 1) / (m + p − 1) of the time",
        "divide by the ideal time instead",
        "(p − 1) / m. It can be more than 100 %",
    )
    says("rank 0 stands still in the middle, and rank 3 at both ends, for the same time")
    end = cells["by_gpipe"].trace.timeline.makespan
    first, last = (
        sorted(
            (s.start, s.end)
            for s in cells["by_gpipe"].trace.timeline.spans
            if (s.rank, s.kind) == (r, "compute")
        )
        for r in (0, 3)
    )
    waits = [b[0] - a[1] for a, b in pairwise(first) if b[0] > a[1]]
    assert first[0][0] == 0 and first[-1][1] == end and len(waits) == 1
    assert last[0][0] > 0 and last[-1][1] < end and all(a[1] == b[0] for a, b in pairwise(last))
    assert waits[0] == last[0][0] + end - last[-1][1] == end * 3 / 15
    for m in (1, 4):
        result = run(cells["gpipe_step"], m, ranks=4, machine=cells["FREE"])
        assert cells["idle"](result) == pytest.approx(3 / (m + 3))
        timeline = simulate(gpipe(4, m))
        assert (timeline.bubble, timeline.bubble_ratio) == (pytest.approx(3 / (m + 3)), pytest.approx(3 / m))
        assert result.trace.timeline.makespan * m * 4 == pytest.approx(24 * 8 * float(timeline.makespan))
    says("with m = 4 p the bubble stays below a fifth")
    assert all(simulate(gpipe(p, 4 * p)).bubble < 0.2 for p in (2, 4, 8, 16, 64))


def test_twice_the_stages(cells: dict[str, Any]) -> None:
    says(
        'B="1.58 times"', "15 slots become 19, half as long", "2 · 15 / 19 = 1.58", "1.58 times, from 4 to 8"
    )
    assert cells["makespan"] == {1: 576, 2: 312, 4: 180, 8: 114}
    assert f"{180 / 114:.2f}" == f"{2 * 15 / 19:.2f}" == "1.58"


def test_what_travels(cells: dict[str, Any]) -> None:
    says("2 m messages and the same bytes: one activation of the batch, and its gradient.")
    says("1D tensor parallelism sends at least twice that, from every rank, in every block")
    for p in (2, 4, 8):  # a block: two pairs of a column and a row layer
        sizes = {"tp": p}
        pair = [SCHEMES["column"].traffic(24, 32, 128, sizes), SCHEMES["row"].traffic(24, 128, 32, sizes)]
        assert 2 * sum(sum(scheme.values()) for scheme in pair) >= 2 * (2 * 24 * 32)
    for m in (1, 5):
        trace = run(cells["gpipe_step"], m, ranks=4, machine=cells["FREE"]).trace
        assert {event.kind for event in trace.events} == {"send", "recv"}
        for border in range(3):
            sent = [e for e in trace.events if e.kind == "send" and {e.rank, e.peer} == {border, border + 1}]
            assert len(sent) == 2 * m
            assert sum(event.bytes_sent for event in sent) == 2 * 24 * 8 * 32 * 8


def test_forget_1_over_m(cells: dict[str, Any]) -> None:
    """F1: gradients m times too large, which Adam hides."""
    says("Exactly 12 times.")
    truth = serial(cells)
    wrong = run(cells["gpipe_step"], 12, cells["own_mean"], ranks=4, machine=cells["FREE"])
    wrongs = [gradient for gradients, _ in wrong.values for gradient in gradients]
    assert off(wrongs, [12 * gradient for gradient in truth]) < 1e-14
    assert off(wrongs, truth) > 10


@pytest.mark.slow
def test_which_curve_moves(cells: dict[str, Any]) -> None:
    """F1."""
    names = dict(cells)
    for cell in LESSON.cells:
        if cell.id in TRAININGS:
            exec(compile(cell.source, f"<cell {cell.id}>", "exec"), names)
    says("SGD takes steps twelve times as long, and here that even looks like progress")
    curves, apart = names["curves"], names["apart"]
    says("a factor of 12 goes away")
    assert apart["Adam"] < 0.002 < 1 < apart["SGD"]
    assert curves["SGD, 1/m forgotten"][-1] < curves["SGD"][-1] - 1
    for curve in curves.values():
        assert curve[0] == pytest.approx(
            curves["Adam"][0], rel=1e-12
        )  # the log is right before a step is taken


def test_the_printed_table(cells: dict[str, Any]) -> None:
    """GPipe's table 2, with what the model does not allow named."""
    assert cells["PRINTED"] == published.TRANSFORMER
    allowed = cells["allowed"]
    for m in published.TRANSFORMER:
        for k in published.K:
            assert allowed(k, m) == pytest.approx(published.ideal_speedup(k, m))
    says('B="2.91, less than printed"')
    assert f"{allowed(8, 4):.2f}" == "2.91"
    ratios = {
        m: [printed / allowed(k, m) for k, printed in zip((2, 4, 8), row, strict=True)]
        for m, row in cells["PRINTED"].items()
    }
    says("The row with 32 micro-batches is the bubble, and 4 to 7 % for everything else.")
    assert all(0.93 <= round(ratio, 2) <= 0.96 for ratio in ratios[32])
    says("prints up to 1.65 times what is possible", "with one micro-batch more TPUs cannot help at all")
    assert round(max(ratios[4]), 2) == 1.65
    assert [allowed(k, 1) for k in (2, 4, 8)] == [1, 1, 1] and max(ratios[1]) > 1


def test_library_and_torch(cells: dict[str, Any]) -> None:
    truth = serial(cells)
    ours = cells["ours"]
    assert off([gradient for gradients, _ in ours.values for gradient in gradients], truth) < 1e-14
    loss = cells["loss_share"](cells["LAYERS"](cells["tokens"]), cells["targets"]).item()
    assert [done.loss for _, done in ours.values] == pytest.approx([loss] * 4, rel=1e-12)
    says("The same fifteen slots.", "Here these are all twelve, on every rank")
    timeline = ours.values[0][1].timeline
    assert timeline.makespan == 3 * 15 and timeline.peak_in_flight() == [12] * 4
    assert off(cells["by_torch"], truth) < 1e-14
    says("PyTorch takes the first micro-batch for the size of all.")
    with pytest.raises(MismatchError, match=r"float64\[3, 8, 32\].*\n.*\n.*float64\[4, 8, 32\]"):
        run(cells["with_torch"], 7, ranks=4)
    says("divided by 7, were an average of averages", "every micro-batch may have its own size")
    sevenths = [torch.zeros_like(gradient) for gradient in truth]
    for x, t in zip(cells["tokens"].tensor_split(7), cells["targets"].tensor_split(7), strict=True):
        loss = cells["mean"](cells["LAYERS"](x), t) / 7
        for total, one in zip(
            sevenths, torch.autograd.grad(loss, list(cells["LAYERS"].parameters())), strict=True
        ):
            total += one
    assert off(sevenths, truth) > 1e-3
    uneven = run(cells["by_library"], 7, ranks=4, machine=cells["FREE"])
    assert off([gradient for gradients, _ in uneven.values for gradient in gradients], truth) < 1e-14
