"""Lesson 02: what its text says of five broken programs is what their runs do."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tooling.source import has_tag, read
from torch.distributed.constants import default_pg_timeout

from lessons_lib import run
from lessons_lib.errors import DeadlockError, MismatchError, RunError, RunTimeoutError, UnfinishedWarning

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "02_waiting_and_deadlock.py"
LESSON = read(SOURCE)


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all of them have run; and what cells raised, by id."""
    names: dict[str, Any] = {"__name__": "lesson_02"}
    raised: dict[str, RunError] = {}
    for cell in LESSON.cells:
        if cell.cell_type == "code":
            code = compile(cell.source, f"<cell {cell.id}>", "exec")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if cell.id == "forgotten" else "error", UnfinishedWarning)
                if has_tag(cell, "raises-exception"):
                    with pytest.raises(RunError) as caught:
                        exec(code, names)
                    raised[cell.id] = caught.value
                else:
                    exec(code, names)
    return names | {"raised": raised}


def says(*sentences: str) -> None:
    """The text has these words; a test that holds a number names the words it holds."""
    texts = [cell.source for cell in LESSON.cells if is_text(cell)]
    text = " ".join(re.sub(r"[*`]", "", " ".join(texts)).split())
    for sentence in sentences:
        assert sentence in text, sentence


def is_text(cell: Any) -> bool:
    """Whether a cell is read: prose, a guess, or what became of it."""
    return cell.cell_type == "markdown" or "predict(" in cell.source or ".reveal(" in cell.source


def stand_still(error: RunError) -> list[int]:
    assert isinstance(error, DeadlockError)
    return [each.rank for each in error.waiting]


def test_a_rank_stays_away(cells: dict[str, Any]) -> None:
    says("The ranks have 2, 1, 0 and 3 samples", 'C="three"', "The report says who waits")
    assert stand_still(cells["raised"]["stays-away"]) == [0, 1, 3]
    assert run(cells["all_come"], ranks=4).values == [6.0] * 4


def test_the_rank_that_reports(cells: dict[str, Any]) -> None:
    says("for ten minutes with NCCL, for thirty with gloo", "Then ranks 0, 1 and 3 write")
    assert default_pg_timeout.total_seconds() == 30 * 60
    documented = " ".join(str(dist.init_process_group.__doc__).split())
    assert "10 minutes for NCCL and 30 minutes for other" in documented
    says("the one that all of them miss", "Nobody sent a byte")
    failed = cells["failed"]
    assert stand_still(failed) == [0, 1, 3] and {each.missing for each in failed.waiting} == {(2,)}
    assert [failed.run.trace.bytes_sent(rank) for rank in range(4)] == [0] * 4
    says("This is no deadlock: run says that rank 3 was running")
    slow = cells["raised"]["slow"]
    assert isinstance(slow, RunTimeoutError) and "rank 3 was running" in str(slow)


def test_another_order(cells: dict[str, Any]) -> None:
    says("2 + 2 + 2 + 1000 = 1006", "The right sums are 8 and 4000, and no rank has either")
    crossed = run(cells["crossed"], torch.tensor([1000.0]), ranks=4).values
    assert crossed == [(1006.0, 3002.0)] * 3 + [(3002.0, 1006.0)]
    assert isinstance(cells["raised"]["crossed-types"], MismatchError)
    assert run(cells["same_order"], ranks=4).values == [(8.0, 4000)] * 4


@pytest.mark.parametrize("transport", ["threads", "processes"])
@pytest.mark.parametrize("n", [1, 10**6])
def test_all_send_first(cells: dict[str, Any], n: int, transport: str) -> None:
    says("The size does not matter, here and in gloo")
    with pytest.raises(DeadlockError, match="0 -> 1 -> 2 -> 3 -> 0"):
        run(cells["all_send"], n, ranks=4, transport=transport)


def test_one_that_receives_first_is_enough(cells: dict[str, Any]) -> None:
    def one_receives() -> float:
        r, p = dist.get_rank(), dist.get_world_size()
        x, y = torch.full((1,), float(r)), torch.empty(1)
        if r == 0:
            dist.recv(y, src=p - 1)
        dist.send(x, dst=(r + 1) % p)
        if r > 0:
            dist.recv(y, src=r - 1)
        return y.item()

    says(
        "With five ranks, 4 and 0 are neighbours and both send first",
        "one rank that receives first is enough",
    )
    assert run(cells["even_odd"], ranks=5).values == run(one_receives, ranks=5).values == [4, 0, 1, 2, 3]


def test_a_branch_and_a_shape(cells: dict[str, Any]) -> None:
    says("Two, one in each pair")
    assert stand_still(cells["raised"]["in-a-branch"]) == [0, 2]
    says("A sum and a count: 21 / 15", "The average of the four averages would be 1.5")
    assert isinstance(cells["raised"]["other-shape"], MismatchError)
    assert run(cells["same_shape"], ranks=4).values == pytest.approx([21 / 15] * 4)


def test_calls_that_return_at_once(cells: dict[str, Any]) -> None:
    says("The old number. Here that is certain")
    assert run(cells["early"], ranks=4).values == [(1.0, 4.0)] * 4
    says("one million numbers and 20 µs of work", "The longer of the two, no longer their sum")
    blocking, at_once = (
        run(cells["overlap"], async_op, ranks=4, machine="8xH100").trace.timeline.makespan
        for async_op in (False, True)
    )
    assert at_once > 20e-6 and blocking == pytest.approx(at_once + 20e-6)
    says("No error: each rank goes on with its own number")
    with pytest.warns(UnfinishedWarning):
        assert run(cells["forgotten"], ranks=4).values == [1.0] * 4


def test_the_buffer(cells: dict[str, Any]) -> None:
    says("The same program, two answers", "by then it holds 99")
    for transport, received in (("threads", 0.0), ("processes", 99.0)):
        assert run(cells["changed"], ranks=2, transport=transport).values[1] == received
        assert run(cells["unchanged"], ranks=2, transport=transport).values[1] == 0.0


def test_waiting_too_early(cells: dict[str, Any]) -> None:
    says("It does. A call that returns at once does not remove the waiting")
    assert stand_still(cells["raised"]["wait-too-early"]) == [0, 1, 2, 3]
    assert run(cells["wait_afterwards"], ranks=4).values == [3, 0, 1, 2]


def test_which_of_the_five_are_rescued(cells: dict[str, Any]) -> None:
    says("One of five", "1, 3 and 4 hang. 2 and 5 are refused here", "rescue 3, and no other")
    hang = [cells["raised"][name] for name in ("stays-away", "all-send", "in-a-branch")]
    refused = [cells["raised"][name] for name in ("crossed-types", "other-shape")]
    assert {type(error) for error in hang} == {DeadlockError}
    assert {type(error) for error in refused} == {MismatchError}
    run(cells["begin_then_wait"], cells["sends"], ranks=4)
    for name, kind in (
        ("away", DeadlockError),
        ("order", MismatchError),
        ("branch", DeadlockError),
        ("shape", MismatchError),
    ):
        with pytest.raises(kind):
            run(cells["begin_then_wait"], cells[name], ranks=4)


def test_what_came_before_what(cells: dict[str, Any]) -> None:
    says("rank 2 has heard of 0 and 1")
    heard = run(cells["heard"], ranks=4).values
    assert heard == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]


def test_groups(cells: dict[str, Any]) -> None:
    says("a circle through all four", "Here it does, because nobody waits before everything has begun")
    assert stand_still(cells["raised"]["two-groups"]) == [0, 1, 2, 3]
    assert run(cells["two_groups_async"], ranks=4).values == [(2.0, 2.0)] * 4
    assert isinstance(cells["raised"]["own-group"], MismatchError)
    assert run(cells["both_groups"], ranks=4).values == [3] * 4


def test_production(cells: dict[str, Any]) -> None:
    assert run(cells["exchange"], ranks=4).values == [True] * 4
