"""Lesson 19: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read

from lessons_lib.pipeline_parallel import (
    IllegalScheduleError,
    Schedule,
    Times,
    chimera,
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "19_pipeline_split_the_backward.py"
LESSON = read(SOURCE)
SKIPPED = ("explorer", "split-picture", "h1-picture", "h2-picture", "steps-picture", "chimera", "dualpipe")
HALF = Fraction(1, 2)


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after those that only draw were left out."""
    names: dict[str, Any] = {"__name__": "lesson_19"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and (cell.id not in SKIPPED or "import" in cell.source):
            assert not has_tag(cell, "raises-exception")
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


def test_two_products(cells: dict[str, Any]) -> None:
    says("Three products of the same three sizes.", "a backward B = I + W takes two forwards")
    assert off(cells["dW"], cells["W"].grad) < 1e-14
    assert all(off(dX, X.grad) < 1e-14 for dX, X in zip(cells["dXs"], cells["inputs"], strict=True))
    from torch.utils.flop_counter import FlopCounterMode

    X, W = torch.randn(4, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    counts = []
    for work in (lambda: X @ W, lambda: (X @ W).sum().backward()):
        with FlopCounterMode(display=False) as counter:
            work()
        counts.append(counter.get_total_flops())
    assert counts == [2 * 4 * 6 * 5, 3 * 2 * 4 * 6 * 5]  # F; and F, I and W


def test_who_waits() -> None:
    says('D="nobody, until the optimizer comes"', "An output is awaited by the next stage and by its own I.")
    says("An input gradient, by the stage before and by its own W. A weight gradient by nobody")
    from lessons_lib.pipeline_parallel.rules import makes, needs

    actions = [action for row in zb_h1(4, 8).rows for action in row]
    needed: dict[str, set[str]] = {}
    for action in actions:
        for result in needs(action, 4):
            needed.setdefault(result.what, set()).add(action.kind)
    assert needed == {"y": {"F", "I"}, "dx": {"I", "W"}}
    assert {result.what for action in actions for result in makes(action)} == {"y", "dx", "dw"}


def test_split_and_move_nothing(cells: dict[str, Any]) -> None:
    says("1F1B takes 33, of which 24 are work.", 'B="30"')
    whole, parts = cells["whole"], cells["parts"]
    assert (whole.makespan, whole.work[0], parts.makespan) == (33, 24, 30)
    says("The bubble is (p−1)(F+I), 6 in place of 9.")
    assert (whole.idle, parts.idle) == ([9] * 4, [6] * 4)
    order = [[action.kind for action in row] for row in parts.schedule.rows]
    assert all("".join(row).count("IW") == 8 for row in order)  # no W has moved


def test_put_it_off(cells: dict[str, Any]) -> None:
    says("27 for r; 30 for all others", 'B="rank r by r: the last rank most, the first not at all"')
    ends = {name: simulate(cells["put_off"](name, lag)).makespan for name, lag in cells["LAGS"].items()}
    assert ends == {"not at all": 30, "by 1": 30, "rank r by r": 27, "by 2r": 30, "all": 30}
    assert cells["put_off"]("mine", lambda r: r).rows == zb_h1(4, 8).rows
    says("3 of 27, where 1F1B has 9 of 33", "every rank keeps p micro-batches, as much as rank 0 of 1F1B")
    h1 = simulate(zb_h1(4, 8))
    assert h1.idle == [3] * 4 and h1.peak_in_flight() == [4] * 4
    says("the last I of each rank is one earlier than that of the rank before, so it needs one W more")
    last_I = [row.index(("I", r, 7)) for r, row in enumerate(h1.schedule.rows)]
    assert [ends[at] for ends, at in zip(h1.ends, last_I, strict=True)] == [26, 25, 24, 23]
    says("between two of them there is room for just one W", "ends with the three W that it has put off")
    last_of_0 = "".join(action.kind for action in h1.schedule.rows[0])[-8:]
    assert last_of_0 == "IWIWIWIW"
    assert "".join(action.kind for action in h1.schedule.rows[3]).endswith("IWWWW")
    assert [str(action) for action in h1.schedule.rows[3][-3:]] == ["3W5", "3W6", "3W7"]
    says("Rank r has r micro-batches fewer under way than rank 0")
    assert simulate(one_f_one_b(4, 8)).peak_in_flight() == [4, 3, 2, 1]
    says("all W at the end", "there are then eight W in a row on every rank")
    late = cells["put_off"]("late", lambda r: 8)
    assert all("".join(action.kind for action in row).endswith("W" * 8) for row in late.rows)


def test_the_rest_of_the_bubble() -> None:
    says("both end at 27; the longest span of a rank is 27 and 24; rank 0 keeps 4 and 7")
    h1, h2 = simulate(zb_h1(4, 8)), simulate(zb_h2(4, 8))
    assert h1.makespan == h2.makespan == 27 and h1.idle == h2.idle == [3] * 4
    assert (max(h1.spans_of_ranks), h2.spans_of_ranks) == (27, [24] * 4)
    assert (h1.peak_in_flight()[0], h2.peak_in_flight()[0]) == (4, 7)
    says("rank r begins at r and works 24 without a pause")
    assert [(starts[0], ends[-1]) for starts, ends in zip(h2.starts, h2.ends, strict=True)] == [
        (r, r + 24) for r in range(4)
    ]
    says("the last rank cannot begin before 3, and it has 24 to do")
    assert h2.work == [24] * 4
    says("2(p−r)−1 before the first I, and puts W off by 2r")
    for r, row in enumerate(zb_h2(4, 8).rows):
        kinds = "".join(action.kind for action in row)
        assert kinds.index("I") == 2 * (4 - r) - 1
        assert kinds[: kinds.index("W")].count("I") == 2 * r + 1


def test_two_steps_in_a_row(cells: dict[str, Any]) -> None:
    says("Each further step takes 27 with H1, and 24 with H2")
    in_a_row = cells["in_a_row"]
    for schedule, each in ((one_f_one_b(4, 8), 33), (zb_h1(4, 8), 27), (zb_h2(4, 8), 24)):
        ends = [simulate(in_a_row(schedule, n)).makespan for n in (1, 2, 3, 10)]
        assert ends == [ends[0] + each * n for n in (0, 1, 2, 9)]


def test_s58_zero_bubble_is_not_free(cells: dict[str, Any]) -> None:
    says("ZB-H2 nearly doubles what rank 0 keeps: 2p−1 micro-batches in place of p.")
    found = {}
    for schedule in (one_f_one_b(4, 8), interleaved(4, 8, 2), zb_h1(4, 8), zb_h2(4, 8), zb_v(4, 8)):
        timeline = simulate(schedule, cells["HALVES"] if schedule.n_chunks == 2 else Times())
        found[schedule.name] = [float(x) for x in (timeline.makespan, timeline.peak_in_flight()[0])]
    assert found == {
        "1F1B": [33, 4],
        "interleaved 1F1B": [28.5, 5.5],
        "ZB-H1": [27, 4],
        "ZB-H2": [27, 7],
        "ZB-V": [25.5, 4],
    }
    says("in units of s·b·h (without the S x S scores of attention)", "Nearly as much.")
    assert simulate(zb_h1(4, 8)).peak_in_flight(34, 32) == [136, 134, 132, 130]
    says("the later ranks would keep less; on rank 0, which puts nothing off, it changes nothing")
    for schedule in (zb_h1(4, 8), zb_h2(4, 8)):
        with_w, without = simulate(schedule).peak_in_flight(34, 32), simulate(schedule).peak_in_flight(34, 0)
        assert with_w[0] == without[0] and all(a > b for a, b in zip(with_w[1:], without[1:], strict=True))


def test_a_forgotten_w(cells: dict[str, Any]) -> None:
    says("Nothing would wait for it, nothing would hang", "A checker must ask.")
    forgotten = Schedule.of("forgotten", cells["without"])
    assert simulate(forgotten).makespan <= 27
    refused = r"2W5: it is missing: nobody makes the weight gradient of micro-batch 5 on stage 2"
    with pytest.raises(IllegalScheduleError, match=refused):
        cells["run"](cells["train"], forgotten, Times(), ranks=4)


def test_one_number_does_not_say_all() -> None:
    says("H2's 6.7 % of the span is 10.7 % of the total", "To four digits, ours is the paper's.")
    times = Times(F=11.347, I=11.248, W=8.132, send=0.377)
    found = [simulate(s, times) for s in (one_f_one_b(16, 48), zb_h1(16, 48), zb_h2(16, 48))]
    assert [round(float(each.span_bubble), 4) for each in found] == [0.2552, 0.1397, 0.0672]
    assert round(float(found[2].bubble), 3) == 0.107
    says("(p−1)(F+I−2W) remains")
    exact = Times(F=11347, I=11248, W=8132)
    h2 = simulate(zb_h2(16, 48), exact)
    assert max(h2.spans_of_ranks) - h2.work[0] == 15 * (11347 + 11248 - 2 * 8132)
    for schedule, three in (
        (one_f_one_b(4, 8), (Fraction(3, 11), Fraction(3, 8), Fraction(3, 11))),
        (zb_h1(4, 8), (Fraction(1, 9), Fraction(1, 8), Fraction(1, 9))),
        (zb_h2(4, 8), (Fraction(1, 9), Fraction(1, 8), 0)),
    ):
        timeline = simulate(schedule)
        assert (timeline.bubble, timeline.bubble_ratio, timeline.span_bubble) == three


def test_on_real_stages(cells: dict[str, Any]) -> None:
    says("On a virtual clock each action takes 1, a message nothing.")
    for schedule, times in ((zb_h1(4, 8), Times()), (zb_v(4, 8), cells["HALVES"])):
        result = cells["run"](cells["train"], schedule, times, ranks=4, machine=cells["Machine"]("free"))
        timelines, gradients = zip(*result.values, strict=True)
        assert cells["error"](gradients) < 1e-14
        assert timelines[0].makespan == float(simulate(schedule, times).makespan)
        assert sorted(n for of_rank in gradients for n in of_rank) == list(range(8))


def test_in_production(cells: dict[str, Any]) -> None:
    for name, stages in (("ScheduleInterleavedZeroBubble", "LOOP"), ("ScheduleZBVZeroBubble", "V")):
        result = cells["run"](cells["with_torch"], cells[name], cells[stages], ranks=4)
        orders, gradients = zip(*result.values, strict=True)
        assert cells["error"](gradients) < 1e-14
    assert list(orders) == [[str(action) for action in row] for row in zb_v(4, 8).rows]


def test_zb_v(cells: dict[str, Any]) -> None:
    says("rank r has stages r and 2p−1−r")
    schedule = zb_v(4, 8)
    assert schedule.stages == [[r, 7 - r] for r in range(4)]
    says("No pause in any rank's span, and p micro-batches on every rank")
    timeline = simulate(schedule, cells["HALVES"])
    assert timeline.spans_of_ranks == [24] * 4 and timeline.peak_in_flight() == [4] * 4
    says("twice the messages", "it is zero only where F = I = W")
    assert len(timeline.messages) == 2 * len(simulate(zb_h1(4, 8)).messages)
    uneven = simulate(schedule, cells["uneven"])
    assert max(uneven.spans_of_ranks) > uneven.work[0]


def test_from_both_ends() -> None:
    says("Every rank holds two stages, one of each copy of the model.")
    for schedule in (chimera(4, 8), dualpipe(4, 8)):
        assert [sorted(stages) for stages in schedule.stages] == [[0, 3], [1, 2], [1, 2], [0, 3]]
        assert schedule.entrances == [0, 3]
    says("Bubbles (p−1)(F+B), (p−1)(F+B−2W) and (p/2−1)(FB+B−3W), as the table has them.")
    for pair in (3, Fraction(5, 2)):  # T3
        found = [
            (simulate(s, Times(FB=pair)), s)
            for s in (one_f_one_b(8, 20), zb_h1(8, 20), dualpipe(8, 20), dualpipe_v(4, 20))
        ]
        assert [max(t.idle) for t, _ in found] == [7 * 3, 7 * (3 - 2), 3 * (pair + 2 - 3), 3 * (pair + 2 - 3)]
        says("DualPipe pays with a second copy of the weights and one more micro-batch")
        assert [max(t.peak_in_flight()) * s.n_stages / s.n_ranks for t, s in found] == [8, 8, 9, 9]
        assert [len(s.stages[0]) for _, s in found] == [1, 1, 2, 2]
    says('DualPipeV, "cut in half", does the same on half as many ranks with a single copy')
    assert len(dualpipe_v(4, 20).entrances) == 1


def test_to_remember() -> None:
    says("ZB-H1: rank r puts its W off by r. Bubble (p−1)(F+I−W), memory as rank 0 of 1F1B.")
    for F, I, W in ((1, 1, 1), (5, 4, 3), (7, 6, 2)):
        assert simulate(zb_h1(4, 8), Times(F, I, W)).idle[0] == 3 * (F + I - W)
    says("keeps 2p−1 in place of p micro-batches")
    for p in (2, 3, 5):
        assert simulate(zb_h2(p, 2 * p)).peak_in_flight() == [2 * p - 1] * p
    assert simulate(gpipe(4, 8)).makespan == 33
