"""Lesson 17: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tooling.source import has_tag, read

from lessons_lib import run
from lessons_lib.errors import DeadlockError
from lessons_lib.pipeline_parallel import (
    IllegalScheduleError,
    Schedule,
    Times,
    bubble_form,
    check,
    first_early,
    first_fault,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
)

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "17_pipeline_1f1b.py"
LESSON = read(SOURCE)


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all that do not raise have run."""
    names: dict[str, Any] = {"__name__": "lesson_17"}
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


def ends(generator: Any, c: Any = 0, m: int = 8, **times: Any) -> float:
    return float(simulate(generator(4, m), Times(send=c, **times)).makespan)


def test_a_schedule_is_data(cells: dict[str, Any]) -> None:
    for p, m in ((3, 4), (4, 8)):
        assert Schedule.of("GPipe", cells["all_then_all"](p, m)).rows == gpipe(p, m).rows
    says("All eight, on every rank.")
    assert simulate(gpipe(4, 8)).peak_in_flight() == [8] * 4


def test_how_many_forwards_first(cells: dict[str, Any]) -> None:
    says('B="4 − r: four on rank 0, one on rank 3"', "rank r after p − r")
    in_turn = cells["in_turn"]
    for p, m in ((4, 8), (3, 7), (5, 2), (4, 4), (1, 3)):
        assert [tuple(in_turn(p, m, r, p - r)) for r in range(p)] == list(map(tuple, one_f_one_b(p, m).rows))
    found = {name: simulate(schedule) for name, schedule in cells["made"].items()}
    assert {name: timeline.makespan for name, timeline in found.items()} == {
        "one": 96,
        "4 - r": 33,
        "four": 69,
    }
    says("then one micro-batch at a time walks down and back up")
    assert 96 == 8 * 4 * 3
    says("a rank keeps p − r micro-batches and never more")
    assert [simulate(one_f_one_b(4, m)).peak_in_flight() for m in (4, 40)] == [[4, 3, 2, 1]] * 2


def test_it_is_not_earlier_done() -> None:
    """S10."""
    says("3 + 24 + 6 = 33", "1F1B does not shrink the bubble")
    assert ends(gpipe) == ends(one_f_one_b) == 33
    assert simulate(one_f_one_b(4, 8)).starts[3][0] == 3 and simulate(one_f_one_b(4, 8)).ends[3][-1] == 27
    for B, slots in ((1, 78), (2, 117)):
        for generator in (gpipe, one_f_one_b):
            assert simulate(generator(8, 32), Times(B=B)).makespan == slots


def test_what_it_is_for(cells: dict[str, Any]) -> None:
    says('C="32 and 4"', "GPipe stands still 43 % of the time; 1F1B takes 32 of them, and 9 %")
    assert cells["kept"] == [[32] * 4, [4, 3, 2, 1]]
    assert f"{float(simulate(gpipe(4, 4)).bubble):.0%}" == "43%"
    assert f"{float(simulate(one_f_one_b(4, 32)).bubble):.0%}" == "9%"
    says("rank 0 keeps four, rank 3 one")


def test_what_happens_before_what(cells: dict[str, Any]) -> None:
    how_far, mixed = cells["how_far"], cells["mixed"]
    says('C="all of them stop"', "GPipe's row is right among GPipe's rows")
    assert how_far(one_f_one_b(4, 8).rows) == how_far(gpipe(4, 8).rows) == [16] * 4
    assert how_far(mixed) == [4, 3, 2, 2]
    assert [str(mixed[r][n]) for r, n in enumerate(how_far(mixed))] == ["0B0", "1B0", "2B0", "3F2"]
    with pytest.raises(IllegalScheduleError, match=r"rank 2, action 2, 2B0: it waits.* rank 3 comes to 3F2"):
        check(Schedule.of("mixed", mixed))
    for wrong in range(1, 4):  # rank 0 may well do all its forwards first; then it keeps them
        rows = [gpipe(4, 8).rows[r] if r == wrong else row for r, row in enumerate(one_f_one_b(4, 8).rows)]
        assert min(how_far(rows)) < 16 and first_fault(Schedule.of("mixed", rows)) is not None
    legal = [gpipe(4, 8).rows[0], *one_f_one_b(4, 8).rows[1:]]
    assert how_far(legal) == [16] * 4 and simulate(Schedule.of("mixed", legal)).makespan == 33


def test_too_good_to_be_true(cells: dict[str, Any]) -> None:
    """F5."""
    says("It is three slots shorter than the right one.", "The order is legal; the times are not.")
    drawn, right = cells["drawn"], simulate(one_f_one_b(4, 4), Times(B=1))
    assert (drawn.makespan, right.makespan) == (11, 14)
    assert drawn.bubble < right.bubble
    assert drawn.schedule.rows == one_f_one_b(4, 4).rows and first_fault(drawn.schedule) is None
    fault = first_early(drawn.schedule, drawn.starts, drawn.ends)
    assert fault is not None and (fault.rank, str(fault.action)) == (0, "0B0")


def test_legal_and_it_hangs(cells: dict[str, Any]) -> None:
    """S49, in a pipeline."""
    carry_out, free = cells["carry_out"], cells["FREE"]
    says(
        'B="1F1B"',
        "Both sides send first, as in lesson 02.",
        "an output goes down a border while a gradient comes up",
    )
    for schedule, send in ((gpipe, dist.send), (gpipe, dist.isend), (one_f_one_b, dist.isend)):
        assert run(carry_out, schedule(4, 8), send, ranks=4, machine=free).trace.timeline.makespan == 33
    with pytest.raises(DeadlockError, match="each waits for the next in the cycle 2 -> 3 -> 2"):
        run(carry_out, one_f_one_b(4, 8), dist.send, ranks=4, machine=free)


def test_slow_messages(cells: dict[str, Any]) -> None:
    tenth = Fraction(1, 10)
    assert cells["found"][tenth] == [33.6, 34.6] == [ends(gpipe, tenth), ends(one_f_one_b, tenth)]
    assert all(one < other for c, (one, other) in cells["found"].items() if c)
    says(
        "it waits for 2 (p − 1) messages, here 6", "16 messages here", "more the more micro-batches there are"
    )
    assert ends(gpipe, 1) - 33 == 6 and ends(one_f_one_b, 1) - 33 == 16
    assert ends(one_f_one_b, 1, m=16) - ends(one_f_one_b, 0, m=16) > 16
    assert ends(gpipe, 1, m=16) - ends(gpipe, 0, m=16) == 6
    for name, generator in (("gpipe", gpipe), ("1f1b", one_f_one_b)):
        claim = bubble_form(name, 4, 8, times=Times(send=1)).value
        assert claim == ends(generator, 1) - 24  # idle, by the closed form
    says("In 1F1B rank 0 has four micro-batches on their way and begins the fifth when the first is back")
    rows = [str(action) for action in one_f_one_b(4, 8).rows[0]]
    assert rows[3:6] == ["0F3", "0B0", "0F4"]
    says("Now find a latency at which interleaving (lesson 18) beats both, and one at which it does not")
    half = Fraction(1, 2)
    v2 = {
        c: float(simulate(interleaved(4, 8, 2), Times(half, half, half, send=c)).makespan) for c in (tenth, 1)
    }
    assert v2[tenth] < 33.6 and v2[1] > 39


def test_each_p_micro_batches_wait_for_one_more_round_trip() -> None:
    says("each p micro-batches wait for one more round trip")
    assert [ends(one_f_one_b, 1, m=m) - ends(one_f_one_b, 0, m=m) for m in (8, 12, 16)] == [
        16,
        22,
        28,
    ]  # 2 x 3


def test_a_little_more_warm_up(cells: dict[str, Any]) -> None:
    says(
        "as early as GPipe, even where a message takes as long as a forward, and keeps 7, 5, 3 and 1 instead "
        "of 4, 3, 2 and 1"
    )
    patient = cells["patient"]
    for c in (0, Fraction(1, 10), Fraction(1, 2), 1):
        assert ends(patient, c) == ends(gpipe, c)
    for m in (8, 24):
        assert simulate(patient(4, m)).peak_in_flight() == [7, 5, 3, 1]


def test_on_real_stages(cells: dict[str, Any]) -> None:
    """S72: what is kept does not grow with the number of micro-batches."""
    says("GPipe grows with the batch, and 1F1B does not.", "the gradients of two layers, 67 kB")
    LAYERS, X, T = cells["LAYERS"], cells["X"], cells["T"]
    assert round(sum(parameter.nbytes for parameter in LAYERS[:2].parameters()) / 1e3) == 67
    peak_kB = cells["peak_kB"]
    ours = [peak_kB(one_f_one_b, m) for m in (8, 16)]
    assert ours[0] == ours[1] < 0.8 * peak_kB(gpipe, 8)
    grown = peak_kB(gpipe, 16) - peak_kB(gpipe, 8)
    assert grown == pytest.approx(8 * 2 * 16 * 64 * 8 / 1e3)  # eight more micro-batches, two activations each
    loss = (LAYERS(X) - T).square().sum() / X.numel()
    serial = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(LAYERS.parameters()))])
    for name in ("ours", "gpipes", "torchs"):
        assert (cells[name] - serial).norm() / serial.norm() < 1e-14
