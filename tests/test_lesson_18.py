"""Lesson 18: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel import (
    breadth_first,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
)

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "18_pipeline_smaller_pieces.py"
LESSON = read(SOURCE)
# What these draw stands in other cells as numbers.
SKIPPED = ("latency-curves", "explorer", "critical-path", "breadth-first-picture")
LATENCIES = ("0", "0.1", "0.25", "0.5", "1")


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after those that only draw were left out."""
    names: dict[str, Any] = {"__name__": "lesson_18"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and cell.id not in SKIPPED and not has_tag(cell, "raises-exception"):
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


def end(schedule: Any, v: int, latency: str | Fraction = "0") -> float:
    return float(simulate(schedule, pieces(v, latency)).makespan)


def pieces(v: int, latency: str | Fraction = "0") -> Any:
    from lessons_lib.pipeline_parallel import Times

    part = Fraction(1, v)
    return Times(F=part, I=part, W=part, send=Fraction(latency))


def test_where_the_bubble_comes_from(cells: dict[str, Any]) -> None:
    says("a forward takes 1, a backward 2")
    says("The last rank begins when one micro-batch has come through three")
    timeline = simulate(one_f_one_b(4, 8), cells["pieces"](1))
    assert timeline.starts[3][0] == 3 and timeline.ends[0][-1] - timeline.ends[3][-1] == 3 * 2
    says("That is all the bubble: (p−1)(F+B)")
    assert timeline.idle == [3 * 3] * 4
    assert pieces(2) == cells["pieces"](2)


def test_two_pieces(cells: dict[str, Any]) -> None:
    says("Rank 0 gets stages 0 and 4, rank 1 gets 1 and 5")
    assert interleaved(4, 8, 2).stages[:2] == [[0, 4], [1, 5]]
    says("idle 9 and 4.5; 48 and 112 messages; rank 0 keeps 4 and 5.5")
    one, two = cells["one"], cells["two"]
    assert [float(each.idle[0]) for each in (one, two)] == [9, 4.5]
    assert [len(each.messages) for each in (one, two)] == [48, 112]
    assert [float(each.peak_in_flight()[0]) for each in (one, two)] == [4, 5.5]
    says(
        'B="half the bubble, more than twice the messages, more memory"',
        "there are pv−1, each crossed twice by every micro-batch: 2 m (pv−1) messages",
    )
    for p, m, v in ((4, 8, 2), (4, 8, 4), (3, 6, 3), (2, 2, 5)):
        timeline = simulate(interleaved(p, m, v), pieces(v))
        assert len(timeline.messages) == 2 * m * (p * v - 1)
        assert timeline.idle == [Fraction((p - 1) * 3, v)] * p  # (p-1)(F+B)/v


def test_in_which_order(cells: dict[str, Any]) -> None:
    says("forwards to warm up", "(v−1)p. And then two for each rank behind this one.")
    says("By the time the fourth of a group is through chunk 0, the first one has come round.")
    timeline = simulate(interleaved(4, 8, 2), pieces(2))
    row = [str(action) for action in timeline.schedule.rows[0]]
    assert timeline.starts[0][row.index("4F0")] == timeline.ends[0][row.index("0F3")]
    for sizes in ((4, 8, 2), (4, 8, 4), (3, 9, 2), (2, 2, 5), (2, 4, 1)):
        assert cells["my_schedule"](*sizes).rows == interleaved(*sizes).rows


def test_break_it(cells: dict[str, Any]) -> None:
    says("1F1B warms up with p−1−r forwards", "Rank 0 wants the gradient of the last chunk first")
    says("and has not sent anything through it yet")
    fault = cells["fault"]
    assert (fault.rank, str(fault.action), str(fault.waits_for)) == (
        0,
        "4B0",
        "output of micro-batch 0 on stage 4",
    )
    says("with m = 6 on 4 ranks the second group is not whole")
    source = next(cell.source for cell in LESSON.cells if cell.id == "not-whole")
    with pytest.raises(RefusedError, match=r"m=6 is not a multiple of p. Nearest: m=4 or m=8"):
        exec(compile(source, "<cell not-whole>", "exec"), cells)


def test_who_keeps_what() -> None:
    says("Rank 0 of 1F1B keeps 4 micro-batches, with v = 2 it is 5.5")
    says("rank 0 keeps 5.5 with v = 2, 4.75 with v = 4, 4.375 with v = 8", 'B="4.75: less than with v = 2"')
    says("Rank 0 has 2(p−1) + (v−1)p chunks under way when it warms up, and one more")
    says("p + (p−1)/v micro-batches", "what is kept over 4 is p−1 = 3 chunks, with any v")
    for v, peak in ((2, 5.5), (4, 4.75), (8, 4.375)):
        kept = simulate(interleaved(4, 8, v), pieces(v)).peak_in_flight()
        assert kept[0] == peak == max(kept) == 4 + 3 / v == (2 * 3 + (v - 1) * 4 + 1) / v


def test_a_message_takes_time(cells: dict[str, Any]) -> None:
    says("A message takes half a forward.", 'B="v = 2"', "One latency, and another winner.")
    winners = {latency: min(of, key=of.get) for latency, of in cells["ends"].items()}
    assert winners == {"0": "v = 4", "0.1": "v = 4", "0.25": "v = 2", "0.5": "v = 2", "1": "GPipe"}
    assert cells["ends"]["0.5"] == {"GPipe": 36, "1F1B": 41, "v = 2": 35.5, "v = 4": 45}
    says("15 borders there and back cost more than the bubble saves")
    assert 4 * 4 - 1 == 15


def test_why_finer_pays_more(cells: dict[str, Any]) -> None:
    says("GPipe waits for 2(p−1) = 6 messages", "Interleaved waits for 2(pv−1): 14 with v = 2, 30 with v = 4")
    says("1F1B waits for 16, and the more, the more micro-batches there are")
    crossings, made = (
        cells["crossings"],
        [(gpipe(4, 8), 1), (one_f_one_b(4, 8), 1), (interleaved(4, 8, 2), 2), (interleaved(4, 8, 4), 4)],
    )
    assert [crossings(simulate(s, pieces(v, "0.1"))) for s, v in made] == [6, 16, 14, 30]
    assert crossings(simulate(one_f_one_b(4, 16), pieces(1, "0.1"))) > 16
    assert crossings(simulate(gpipe(4, 16), pieces(1, "0.1"))) == 6
    for s, v in made:  # and each of them costs its latency
        hops = crossings(simulate(s, pieces(v, "0.1")))
        assert end(s, v, "0.1") == pytest.approx(end(s, v) + 0.1 * hops)
    says("Cutting every piece in two saves half of the bubble, (p−1)(F+B)/2v, and puts 2pv more messages")
    says("a message takes less than 0.14 of a forward: there the two curves cross")
    crossing = Fraction(9, 4) / 16
    assert round(float(crossing), 2) == 0.14
    assert end(interleaved(4, 8, 2), 2, crossing) == end(interleaved(4, 8, 4), 4, crossing)


def test_how_long_is_a_message(cells: dict[str, Any]) -> None:
    says("32 layers of width 4096 on four H100s", "A rank's forward is the products of 8 layers")
    says("In a box finer is better, down to a single layer for a piece. Between boxes v = 4 wins")
    says("on 100 Gbit/s v = 2, and on 10 Gbit/s GPipe", "The 50 µs of Ethernet are an assumption")
    winners = []
    for wire in cells["WIRES"].values():
        ends = {name: cells["on_wire"](s, v, wire) for name, (s, v) in cells["made_of"].items()}
        winners.append(min(ends, key=lambda name: ends[name]))
    assert winners == ["v = 8", "v = 4", "v = 2", "GPipe"]
    assert [wire.latency_s for wire in cells["WIRES"].values()][2:] == [50e-6] * 2
    assert cells["layers"] * 4 == 32 and cells["layers"] // 8 == 1


def test_on_real_stages(cells: dict[str, Any]) -> None:
    says("Ends and messages are those that were simulated.", "each layer sees the same micro-batches")
    three = ((gpipe(4, 8), 1, 48), (one_f_one_b(4, 8), 1, 48), (interleaved(4, 8, 2), 2, 112))
    for made, v, messages in three:
        result = cells["run"](cells["train"], made, pieces(v), ranks=4, machine=cells["Machine"]("free"))
        timelines, gradients = zip(*result.values, strict=True)
        assert cells["error"](gradients) < 1e-14
        assert sorted(n for of_rank in gradients for n in of_rank) == list(range(8))
        assert timelines[0].makespan == end(made, v) and len(timelines[0].messages) == messages
        sends = [event for event in result.trace.events if event.kind == "send"]
        assert sum(event.n_elements == 12 for event in sends) == messages
    orders, gradients = zip(*cells["run"](cells["with_torch"], ranks=4).values, strict=True)
    assert cells["error"](gradients) < 1e-14
    assert list(orders) == [[str(action) for action in row] for row in interleaved(4, 8, 2).rows]


def test_pytorch_s_groups_are_larger_where_m_is_no_multiple(cells: dict[str, Any]) -> None:
    says("PyTorch takes larger groups by itself: here one of all six.")

    def order() -> list[str]:
        group = cells["Mesh"](pp=4)["pp"]
        mine = range(group.rank, 8, 4)
        stages = [cells["PipelineStage"](cells["LAYERS"][n], n, 8, torch.device("cpu")) for n in mine]
        theirs = cells["ScheduleInterleaved1F1B"](stages, 6, loss_fn=torch.nn.functional.mse_loss)
        return [str(action) for action in theirs.pipeline_order[group.rank] if action]

    first, *_ = cells["run"](order, ranks=4).values
    assert [action for action in first if "F" in action] == [f"{s}F{k}" for s in (0, 4) for k in range(6)]


def test_a_layer_lost_or_a_loss_not_divided_is_seen(cells: dict[str, Any]) -> None:
    """The lesson's own comparison is not blind."""
    right = {n: gradient.clone() for n, gradient in cells["SERIAL"].items()}
    assert cells["error"]([right]) == 0
    assert cells["error"]([right | {3: 8 * right[3]}]) > 1
    with pytest.raises(KeyError):
        cells["error"]([{n: right[n] for n in range(7)}])


def test_what_the_second_one_is_for(cells: dict[str, Any]) -> None:
    says("The warm-up has two forwards for each rank behind, 2(p−1−r). Plain 1F1B has one.")
    says("As long as messages are free: nothing, and it keeps less, 4 as plain 1F1B does")
    with_extra = cells["with_extra"]
    for v, free, slow in ((1, 33, 41), (2, 28.5, 43.5)):
        assert (end(with_extra(1, v), v), end(with_extra(1, v), v, "0.5")) == (free, slow)
        assert simulate(with_extra(1, v), pieces(v)).peak_in_flight()[0] == 4
        assert end(with_extra(2, v), v) == free and end(with_extra(2, v), v, "0.5") < slow
    says("1F1B with two for each rank behind ends with GPipe, at 36, and keeps 7 in place of 8")
    assert with_extra(1, 1).rows == one_f_one_b(4, 8).rows
    assert end(with_extra(2, 1), 1, "0.5") == end(gpipe(4, 8), 1, "0.5") == 36
    assert simulate(with_extra(2, 1), pieces(1)).peak_in_flight()[0] == 7
    assert simulate(gpipe(4, 8)).peak_in_flight()[0] == 8


def test_breadth_first() -> None:
    says("The same bubble, all m micro-batches kept")
    says("less harm from latency: 31.5 where interleaved has 35.5")
    broad, deep = breadth_first(4, 8, 2), interleaved(4, 8, 2)
    assert end(broad, 2) == end(deep, 2)
    assert (end(broad, 2, "0.5"), end(deep, 2, "0.5")) == (31.5, 35.5)
    assert simulate(broad, pieces(2)).peak_in_flight() == [8] * 4
    says("a chunk's weights are needed in one stretch", "gathered once forward and once backward")
    for schedule, stretches in ((broad, 2 * 2), (deep, 4 * 2)):
        chunks = [(action.kind, action.stage) for action in schedule.rows[3]]
        found = sum(a != b for a, b in zip(chunks, [None, *chunks], strict=False))
        assert found == stretches if schedule is broad else found > stretches


def test_to_remember() -> None:
    says("With v chunks on every rank it is (p−1)(F+B)/v.", "2(pv−1) on the path that decides")
    says("Rank 0 keeps p + (p−1)/v micro-batches: more than 1F1B's p, and less with more chunks.")
