"""Lesson 01: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read
from torch.distributed.tensor import Partial, Replicate, Shard

from lessons_lib import Layout, run
from lessons_lib.timeline import elements_sent

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "01_collectives.py"
LESSON = read(SOURCE)
DRAWS = "curve"  # it shows what "table" holds


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all of them have run."""
    names: dict[str, Any] = {"__name__": "lesson_01"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and cell.id != DRAWS and not has_tag(cell, "raises-exception"):
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


def sent(result: Any, of: float = 1) -> list[float]:
    return [result.trace.bytes_sent(rank) / of for rank in range(result.ranks)]


def test_the_first_question(cells: dict[str, Any]) -> None:
    says('B="1.75 GB"', "Four times as many ranks send not even twice as much each.")
    of_p = {p: sent(run(cells["add_up"], ranks=p), 1e6) for p in (2, 4, 8)}
    assert of_p == {2: [1.0] * 2, 4: [1.5] * 4, 8: [1.75] * 8}
    says(
        'A="1 GB, its own gradients',
        'C="7 GB, its own gradients to each of the seven others',
        "sends 7 GB and the others 1",
    )
    assert elements_sent("all_reduce", 10**9, 8, rank=0) == 1.75e9  # S44, in GB


def test_the_states_are_those_of_the_pictures(cells: dict[str, Any]) -> None:
    values = run(cells["changes"], ranks=4).values
    whole = torch.arange(1, 9) * 1111
    for rank, (copy, cut, equal) in enumerate(values):
        assert torch.equal(copy, whole) and equal
        assert torch.equal(cut, Layout("D@dp").cut(whole, {"dp": 4}, {"dp": rank}))
    says("Replicate() is a copy, Shard(0) a cut of dim 0, Partial() a partial sum")
    assert Replicate().is_replicate() and Shard(0).is_shard(0) and Partial().is_partial()


def test_the_star(cells: dict[str, Any]) -> None:
    says("seven ranks look on while rank 0 sends 7 MB", "the same 14 MB are 1.75 MB each")
    assert sent(cells["by_star"], 1e6) == [7.0] + [1.0] * 7
    assert sent(cells["by_all_reduce"], 1e6) == [1.75] * 8
    assert cells["by_star"].values == [8.0] * 8


def test_the_halves_of_the_ring(cells: dict[str, Any]) -> None:
    says("After three rounds each rank has one complete chunk: rank 0 has A, rank 1 has B")
    complete = [[c == 1111 for c in chunks] for chunks in run(cells["first_half"], 3, ranks=4).values]
    assert complete == torch.eye(4).bool().tolist()
    assert all(1111 not in chunks for chunks in run(cells["first_half"], 2, ranks=4).values)
    says("chunk A: it sets out on rank 1, and ends on rank 0 with all four digits")
    path = [run(cells["first_half"], n, ranks=4).values[(1 + n) % 4][0] for n in range(4)]
    assert path == [10, 110, 1110, 1111]
    says("one number of 8 bytes, so 24 bytes are three chunks of the four")
    assert sent(run(cells["first_half"], 3, ranks=4)) == [24] * 4
    says("all four have it in the same round", "again each rank sent three chunks of four")
    assert run(cells["second_half"], 3, ranks=4).values == [[1111] * 4] * 4
    assert all(0 in chunks for chunks in run(cells["second_half"], 2, ranks=4).values)
    assert sent(run(cells["second_half"], 3, ranks=4)) == [24] * 4


def test_both_halves(cells: dict[str, Any]) -> None:
    says("The chunks have 3, 3, 2 and 2 numbers", "together 2(p−1)n = 60", "each rank sends six times")
    assert [len(chunk) for chunk in torch.ones(10).tensor_split(4)] == [3, 3, 2, 2]
    assert sum(sent(cells["both"], 4)) == 60
    sends = [event.rank for event in cells["both"].trace.events if event.kind == "send"]
    assert [sends.count(rank) for rank in range(4)] == [6] * 4
    says("2(p−1) rounds, and each rank sends 2(p−1)/p of the tensor", "The bytes never reach 2 n")
    assert cells["rounds"] == {p: 2 * (p - 1) for p in range(2, 17)}
    for p, n in cells["tensors_sent"].items():
        assert n == pytest.approx(2 * (p - 1) / p, abs=2 / 8000) and n < 2


def test_a_collective_computes(cells: dict[str, Any]) -> None:
    says('B="7 MB"', 'answer="B"', "Four times an all-reduce.")
    assert sent(run(cells["gather_and_add"], ranks=8), 1e6) == [7.0] * 8 == [4 * 1.75] * 8
    says("the sum is 2", "All ranks make the same mistake")
    assert run(cells["rounding"], ranks=4).values == [[0.0, 1.0, 0.0, 1.0]] * 4


def test_chain_and_tree(cells: dict[str, Any]) -> None:
    says("seven ranks need the tensor, so it travels seven times")
    says("The chain takes seven rounds, the tree three: 1, 2, 4, 8 ranks have it")
    says("In the tree it sends the tensor three times, in the chain once")
    assert sent(cells["by_chain"], 4000) == [1] * 7 + [0]
    assert sent(cells["by_tree"], 4000) == [3, 2, 1, 1, 0, 0, 0, 0]
    says("one tensor for each rank but the last")
    assert [elements_sent("broadcast", 1, 8, rank) for rank in range(8)] == [1] * 7 + [0]


def test_groups(cells: dict[str, Any]) -> None:
    says('B="1 and 5"', "root=1 is rank 1 for some, and rank 5 for others")
    assert run(cells["groups"], ranks=8).values[5][0] == [1, 5]
    assert run(cells["from_the_second"], ranks=8).values == [1] * 4 + [5] * 4
    says("Each rank has a quarter", "a partial sum over the two boxes", "only 0.25 MB of it crosses")
    assert Layout("D@col +row").local_shape((8,), {"row": 2, "col": 4}) == (2,)
    result = run(cells["by_axes"], ranks=8)
    assert sent(result, 1e6) == [1.75] * 8 and result.values == [28.0] * 8
    (row,) = [row for row in result.trace.traffic.rows if row.group == "row"]
    assert row.bytes_sent == (250_000,) * 8
    assert {abs(a - b) for e in result.trace.events if e.group == "row" for a, b in [e.members]} == {4}


def test_production(cells: dict[str, Any]) -> None:
    assert cells["compared"].values == run(cells["halves"], ranks=4).values == [True] * 4
    assert (
        len({cells["compared"].trace.bytes_sent(rank, how) for rank in range(4) for how in ("ring", "torch")})
        == 1
    )


def time_us(fn: Any, *args: Any, machine: str) -> float:
    return run(fn, *args, ranks=8, machine=machine).trace.timeline.makespan * 1e6


def test_seconds(cells: dict[str, Any]) -> None:
    says(
        "the 3 µs are assumed",
        "Fourteen rounds of 3 µs are 42 µs",
        "the million adds 16",
        'C="about 1.4 times"',
    )
    times = {n: time_us(cells["all_reduce_of"], n, machine="8xH100") for n in (1, 10**6)}
    assert cells["wire"].latency_s == 3e-6 and cells["rounds"][8] == 14
    assert times[1] == pytest.approx(42, abs=0.01)
    assert round(times[10**6] - times[1]) == 16 and round(times[10**6] / times[1], 1) == 1.4
    for n, measured_us in cells["time_us"].items():  # the formula that the cell prints beside it
        wire = cells["wire"]
        formula_us = 1e6 * (14 * wire.latency_s + 1.75 * 4 * n / wire.bandwidth_bytes_per_s)
        assert measured_us == pytest.approx(formula_us, rel=0.01)  # sizes that 8 does not divide
    says('B="4 times, as a single message would"')
    alone = cells["wire"].message_s(4 * 10**6) / cells["wire"].message_s(4)
    assert round(alone) == 4


def test_a_hundred_at_once(cells: dict[str, Any]) -> None:
    says("The same bytes, ninety-six times sooner.")
    apart, at_once = cells["apart"], cells["at_once"]
    assert apart.bytes_sent(0) == at_once.bytes_sent(0)
    assert round(apart.timeline.makespan / at_once.timeline.makespan) == 96


def test_two_boxes(cells: dict[str, Any]) -> None:
    says("By axes, the slow wire is used for two rounds of the eight.")
    by_axes, one_ring = (time_us(cells[name], machine="2x4xH100") for name in ("by_axes", "one_ring"))
    assert one_ring > 3 * by_axes
    rounds = {"reduce_scatter": 3, "all_reduce": 2, "all_gather": 3}
    crossing = [event for event in run(cells["by_axes"], ranks=8).trace.events if event.group == "row"]
    assert sum(rounds.values()) == 8 and {event.kind for event in crossing} == {"all_reduce"}
