"""Lessons 18 and 19: rows of actions that are right pass, however written; wrong ones are told why."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from lessons_lib.errors import RefusedError
from lessons_lib.grading import check
from lessons_lib.grading.exercise import Draw, Trial
from lessons_lib.grading.lesson_18 import _parts, _row_trials, chunks_for, interleaved_row
from lessons_lib.grading.lesson_19 import _trials, place_w
from lessons_lib.grading.questions import ask
from lessons_lib.grading.rows import as_numbers, as_row
from lessons_lib.pipeline_parallel import Action, draw, interleaved, one_f_one_b, simulate, zb_h1


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "progress.json"))


def complaints(
    trials: list[Trial], function: Callable[..., Any], parts: Callable[..., Any]
) -> dict[str, str]:
    """What is said about each claim, of what ``function`` returns, without a child process."""
    said: dict[str, str] = {}
    for trial in trials:
        results = [parts(as_numbers(function(*args), rank)) for rank, args in enumerate(trial.args)]
        for output, found in zip(trial.outputs, zip(*results, strict=True), strict=False):
            assert output.judged is not None
            said.setdefault(output.claim, output.judged(found))
            said[output.claim] = said[output.claim] or output.judged(found)
    return {claim: what for claim, what in said.items() if what}


# ---- rows as numbers ----


def test_rows_come_back_from_numbers() -> None:
    for row in (*interleaved(3, 6, 2).rows, *zb_h1(4, 8).rows):
        assert as_row(as_numbers(row)) == row
        assert as_row(as_numbers([tuple(action) for action in row])) == row


@pytest.mark.parametrize(
    "row, words",
    [
        ("0F0", r"rank 2: a row is a list of actions such as \('F', 0, 3\), not '0F0'"),
        ([("F", 0)], r"rank 2: \('F', 0\) is no action"),
        ([("X", 0, 0)], r"rank 2: \('X', 0, 0\) is no action"),
        ([], r"has no action; write for each rank"),
    ],
)
def test_what_is_no_row_is_refused(row: Any, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        as_numbers(row, rank=2)


# ---- 18: interleaved ----


def ordered(p: int, m: int, v: int, r: int, **rules: Any) -> list[Action]:
    """Our row with another rule for one of its parts."""
    chunk = rules.get("chunk", lambda c: v - 1 - c)
    size = rules.get("group", p)
    warm = min(rules.get("warm", lambda p, v, r: 2 * (p - 1 - r) + (v - 1) * p)(p, v, r), m * v)
    groups = [range(first, min(first + size, m)) for first in range(0, m, size)]
    F = [Action("F", c * p + r, k) for group in groups for c in range(v) for k in group]
    B = [Action("B", chunk(c) * p + r, k) for group in groups for c in range(v) for k in group]
    pairs = zip(B, F[warm:], strict=False) if rules.get("backward_first") else zip(F[warm:], B, strict=False)
    return F[:warm] + [action for pair in pairs for action in pair] + B[len(F) - warm :]


WRONG_ROWS = {
    "plain warm-up": ({"warm": lambda p, v, r: p - 1 - r}, {"warm-up", "runs", "row"}, "as in plain 1F1B"),
    "one for each rank": (
        {"warm": lambda p, v, r: p - 1 - r + (v - 1) * p},
        {"warm-up", "row"},
        "take two for each rank behind",
    ),
    "first group forgotten": (
        {"warm": lambda p, v, r: 2 * (p - 1 - r)},
        {"warm-up", "runs", "row"},
        "the first group also goes through all chunks but the last",
    ),
    "one more": (
        {"warm": lambda p, v, r: 2 * (p - 1 - r) + (v - 1) * p + 1},
        {"warm-up", "row"},
        "one too many",
    ),
    "gpipe": ({"warm": lambda p, v, r: 10**6}, {"warm-up", "row"}, "this is GPipe's order"),
    "backward first": ({"backward_first": True}, {"warm-up", "runs", "row"}, "one too few"),
    "chunks not reversed": (
        {"chunk": lambda c: c},
        {"backwards", "runs", "row"},
        "backwards of rank 0: action 0 is",
    ),
    "breadth first": (
        {"group": 10**6},
        {"forwards", "backwards", "runs", "row"},
        "forwards of rank 0: action",
    ),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_a_wrong_row_is_told_by_name(name: str) -> None:
    rules, claims, words = WRONG_ROWS[name]
    said = complaints(_row_trials(Draw(3)), lambda *sizes: ordered(*sizes, **rules), _parts)
    assert set(said) == claims
    assert words in " ".join(said.values()), said


def test_a_right_row_is_said_nothing_about() -> None:
    for seed in range(3):
        assert not complaints(_row_trials(Draw(seed)), ordered, _parts)
        assert not complaints(_row_trials(Draw(seed)), interleaved_row, _parts)


def test_a_row_that_leaves_something_out() -> None:
    said = complaints(_row_trials(Draw(1)), lambda *sizes: ordered(*sizes)[:-1], _parts)
    assert re.search(r"it is not whole: no rank does \d+B\d+$", said["runs"])
    assert "actions, and" in said["row"] and "are to be done" in said["row"]


def test_a_row_without_backwards_is_not_called_gpipe() -> None:
    def split(*sizes: int) -> list[Action]:
        return [Action("I" if kind == "B" else kind, stage, k) for kind, stage, k in ordered(*sizes)]

    said = complaints(_row_trials(Draw(1)), split, _parts)
    assert set(said) == {"backwards", "warm-up", "runs", "row"}
    assert said["warm-up"] == 'rank 0 does no "B"' and "no rank does 0B0" in said["runs"]


def test_a_check_of_a_row_that_raises_or_is_none() -> None:
    for function, words in (
        (lambda p, m, v, r: None, "nothing came back. Is there still a ... in interleaved_row?"),
        (lambda p, m, v, r: ["0F0"], "'0F0' is no action"),
    ):
        report = check("18-interleaved", function, seed=4)
        assert report.points == 0 and all(words in line.message for line in report.lines), report


def test_a_check_tells_what_is_judged() -> None:
    def short(p: int, m: int, v: int, r: int) -> list[Action]:
        return ordered(p, m, v, r, warm=lambda p, v, r: p - 1 - r + (v - 1) * p)

    report = check("18-interleaved", short, seed=4)
    assert [line.passed for line in report.lines] == [True, True, False, True, False]
    assert "take two for each rank behind" in report.lines[2].message and "where" in report.lines[4].message
    assert {line.best for line in report.lines} == {""}  # no relative error of what is not compared


def test_the_finest_is_not_always_the_best() -> None:
    (line,) = check("18-chunks", lambda p, m, latency: 8, seed=2).lines
    assert not line.passed and "right where messages are free" in line.message


def test_a_number_of_chunks_is_told_when_it_ends_and_never_that_it_was_written_down() -> None:
    def one_latency_for_all(p: int, m: int, latency: Any) -> int:
        return chunks_for(p, m, 0 * latency)

    for function, words in (
        (one_latency_for_all, "8 has the smallest bubble"),
        (lambda p, m, latency: 1, "with v=1 it ends at"),
        (lambda p, m, latency: 2, ", with v="),
        (lambda p, m, latency: latency + 33, "none of 1, 2, 4 and 8: return v itself"),
        (lambda p, m, latency: "8", "one of 1, 2, 4 and 8 should come back, not '8'"),
    ):
        (line,) = check("18-chunks", function, seed=5).lines
        assert not line.passed and words in line.message, line
        assert "written down" not in line.message


def test_all_numbers_of_chunks_are_asked_for() -> None:
    from lessons_lib.grading.lesson_18 import _chunk_trials

    for seed in range(2):
        trials = _chunk_trials(Draw(seed))
        assert sorted(int(trial.outputs[0].expected[0]) for trial in trials) == [1, 1, 2, 2, 4, 4, 8, 8]
        assert len({trial.facts for trial in trials}) == len(trials), "each asks for something else"


# ---- 19: place W ----


@cache
def places(seed: int) -> list[Trial]:
    return _trials(Draw(seed))


def of_place(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return numbers, numbers, numbers


def with_w(row: Any, at_once: bool) -> list[Any]:
    """All W right behind their I, or all at the end."""
    placed = []
    for action in row:
        placed += [action, ("W", *action[1:])] if action[0] == "I" and at_once else [action]
    return placed if at_once else placed + [("W", *action[1:]) for action in row if action[0] == "I"]


WRONG_PLACES: dict[str, tuple[Callable[..., Any], set[str], str]] = {
    "each at once": (lambda row, *_: with_w(row, True), {"end"}, "and others waited for it"),
    "all at the end": (lambda row, *_: with_w(row, False), {"memory cap", "end"}, "stands still for"),
    "pauses not used": (
        lambda row, pauses, W, cap: place_w(row, [0] * len(row), W, cap),
        {"end"},
        "had a W to do",
    ),
    "cap not kept": (
        lambda row, pauses, W, cap: place_w(row, pauses, W, 99),
        {"memory cap"},
        "the cap is 2",
    ),
    "room for one more": (
        lambda row, pauses, W, cap: place_w(row, pauses, W, cap + 1),
        {"memory cap"},
        "keeps",
    ),
    "one left out": (
        lambda row, pauses, W, cap: place_w(row, pauses, W, cap)[:-1],
        {"order"},
        "it is missing",
    ),
    "F before I": (
        lambda row, pauses, W, cap: place_w(sorted(row), pauses, W, 99),
        {"order", "memory cap", "end"},
        "F and I are not those of the row that was given",
    ),
}


@pytest.mark.parametrize("name", WRONG_PLACES)
def test_w_in_a_wrong_place_is_told_why(name: str) -> None:
    function, claims, words = WRONG_PLACES[name]
    said: dict[str, str] = {}
    for seed in range(2):
        for trial in places(seed):
            try:
                said = complaints([trial], function, of_place) | said
            except RefusedError as error:  # it comes to a standstill, so nothing can be said about its end
                said.setdefault("order", str(error))
    assert set(said) >= claims and set(said) <= claims | {"end"}
    assert any(words in what for what in said.values()), said


def test_w_in_other_right_places_passes() -> None:
    """ZB-H1's own rows, which do not look at pauses, end no later."""

    def by_lag(row: Any, pauses: Any, W: int, cap: int) -> Any:
        m, r = sum(kind == "F" for kind, *_ in row), row[0][1]
        warm = [kind for kind, *_ in row].index("I")
        p = warm + r
        return zb_h1(p, m).rows[r] if warm == p - r and p == cap else place_w(row, pauses, W, cap)

    for seed in range(2):
        assert not complaints(places(seed), by_lag, of_place)
        assert not complaints(places(seed), place_w, of_place)


def test_gradients_of_rows_are_those_of_real_stages() -> None:
    """W before its I, and a W too few, are refused before anything is sent; nothing hangs."""

    def first_w_first(row, pauses, W, cap):  # type: ignore[no-untyped-def]
        placed = place_w(row, pauses, W, cap)
        return [placed[-1], *placed[:-1]]

    report = check("19-place", first_w_first, seed=6)
    assert report.points == 0
    assert all("it waits for the input gradient" in line.message for line in report.lines), report


def test_times_and_caps_differ() -> None:
    facts = {trial.facts for seed in range(2) for trial in places(seed)}
    assert len(facts) == 10
    for trial in places(1):
        assert all(max(pauses) > 0 for _, pauses, _, _ in trial.args[:-1])


# ---- the numbers of the notebooks, and of the recaps ----


def solved(name: str) -> tuple[str, dict[str, Any]]:
    from tests.test_exercises import solved  # not above: a check's child imports this file

    return solved(name)


def test_the_numbers_in_the_text_of_18() -> None:
    text, names = solved("18_pipeline_smaller_pieces")
    assert "Rank 1 should begin with 1F0 1F1 3F0 3B0, and rank 0 end with 2B3 0B2 0B3" in text
    rows = [[str(action) for action in row] for row in names["tried"].rows]
    assert rows[1][:4] == ["1F0", "1F1", "3F0", "3B0"] and rows[0][-3:] == ["2B3", "0B2", "0B3"]
    assert "On 4 ranks with 8 micro-batches: 8, 4, 2, 2 and 1 for these latencies" in text
    from fractions import Fraction

    latencies = [Fraction(text) for text in ("0", "1/10", "1/4", "1/2", "1")]
    assert [names["chunks_for"](4, 8, latency) for latency in latencies] == [8, 4, 2, 2, 1]
    assert [chunks_for(4, 8, latency) for latency in latencies] == [8, 4, 2, 2, 1]
    assert "Rank 0 of 4 does eleven forwards before its first backward: ten to warm up" in text
    assert [action.kind for action in interleaved(4, 8, 2).rows[0]].index("B") == 11


def test_the_numbers_in_the_text_of_19() -> None:
    text, names = solved("19_pipeline_split_the_backward")
    assert "It should end at 27 and keep four micro-batches on every rank" in text
    timeline = simulate(names["tried"])
    assert timeline.makespan == 27 and timeline.peak_in_flight() == [4] * 4
    assert draw(names["tried"]).title == "mine"
    assert "both end at 30" in text and "room for all eight micro-batches" in text
    from lessons_lib.pipeline_parallel import Schedule

    for at_once, kept in ((True, 4), (False, 8)):
        made = simulate(Schedule.of("mine", [with_w(row, at_once) for row in names["rows"]]))
        assert made.makespan == 30 and max(made.peak_in_flight()) == kept


@pytest.mark.parametrize("name", ["18-messages", "18-bubble", "19-bubble", "19-kept"])
def test_a_recap_s_answer_is_what_its_explanation_computes(name: str) -> None:
    for seed in range(5):
        question = ask(name, Draw(seed))
        sum_in_words = question.how.split(": ")[1].replace(" x ", "*")
        assert question.answer == pytest.approx(eval(sum_in_words))
    if name == "18-messages":
        assert len(simulate(one_f_one_b(4, 8)).messages) == 48
