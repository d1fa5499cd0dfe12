"""The ladder of schedule puzzles: solutions, judgements, reasons, and what becomes of answers on ranks."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel import (
    PUZZLES,
    Action,
    Puzzle,
    Schedule,
    gpipe,
    interleaved,
    legal_next,
    one_f_one_b,
    simulate,
    write_grid,
    zb_h1,
    zb_v,
)

LADDER = pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=lambda puzzle: puzzle.name)


def at_random(puzzle: Puzzle, rng: random.Random) -> Schedule:
    """A legal schedule: again and again some rank does something that it can do next."""
    rows: list[list[Action]] = [[] for _ in range(puzzle.p)]
    while any(choices := legal_next(rows, puzzle.stages, puzzle.m, puzzle.kinds)):
        rank = rng.choice([rank for rank, actions in enumerate(choices) if actions])
        rows[rank].append(rng.choice(choices[rank]))
    return Schedule.of("at random", rows)


def test_the_ladder_is_long_and_asks_for_all_that_it_should() -> None:
    assert len(PUZZLES) >= 10 and list(PUZZLES) == list(range(1, len(PUZZLES) + 1))
    puzzles = PUZZLES.values()
    assert any(puzzle.cap for puzzle in puzzles) and any(puzzle.times.send for puzzle in puzzles)
    assert any(isinstance(puzzle.times.F, list) for puzzle in puzzles)
    assert any("W" in puzzle.kinds for puzzle in puzzles)
    assert any(puzzle.stages[0] == [0, puzzle.n_stages - 1] and puzzle.p > 1 for puzzle in puzzles)
    sizes = [puzzle.n_stages * puzzle.m * len(puzzle.kinds) for puzzle in puzzles]
    assert sizes[0] == min(sizes) and sizes[-1] == max(sizes)


@LADDER
def test_the_solution_is_legal_keeps_to_the_memory_and_is_not_beaten_by_the_bound(puzzle: Puzzle) -> None:
    attempt = puzzle.play(puzzle.solution)
    assert attempt.legal and not attempt.too_much and attempt.score == 3, attempt
    assert puzzle.at_least <= puzzle.best_known
    assert puzzle.play(write_grid(puzzle.solution)).score == 3, "the text means the same"
    assert len(puzzle.hints) == 3


@LADDER
def test_no_legal_schedule_is_earlier_than_at_least(puzzle: Puzzle) -> None:
    rng = random.Random(puzzle.number)
    for _ in range(8):
        attempt = puzzle.play(at_random(puzzle, rng))
        assert attempt.legal, attempt
        assert attempt.timeline is not None and attempt.timeline.makespan >= puzzle.at_least


@LADDER
def test_what_it_starts_from_is_legal_and_within_the_memory(puzzle: Puzzle) -> None:
    attempt = puzzle.play(puzzle.start)
    assert attempt.score == 2 and attempt.timeline is not None
    assert attempt.timeline.makespan > puzzle.best_known
    assert f"the best known is done at {float(puzzle.best_known):.4g}" in str(attempt)


def test_what_the_hints_say_of_known_schedules() -> None:
    def makespan(number: int, schedule: Schedule) -> object:
        return simulate(schedule, PUZZLES[number].times).makespan

    assert makespan(4, one_f_one_b(3, 6)) == 34 > PUZZLES[4].best_known == 28
    assert "1F1B is done at 41" in PUZZLES[6].hint(1) and makespan(6, one_f_one_b(4, 8)) == 41
    assert "Interleaved 1F1B is done at 30" in PUZZLES[8].hint(1) and makespan(8, interleaved(2, 4, 2)) == 30
    assert makespan(9, zb_h1(3, 4)) == PUZZLES[9].best_known == 14
    assert PUZZLES[11].play(zb_h1(4, 6)).too_much == [0, 1, 2, 3], "ZB-H1 keeps four, and three are allowed"
    assert makespan(12, zb_v(2, 4)) == PUZZLES[12].best_known
    assert makespan(14, zb_v(4, 8)) == Fraction(529, 10) > PUZZLES[14].best_known


@pytest.mark.parametrize(
    "number, hint, beginning",
    [
        (1, 3, "0F0 0F1 0B0"),
        (3, 3, "0F0 0F1 0F2 0B0 0F3 0B1"),
        (7, 3, "0F0 0F1 0B0 0F2 0B1 0F3"),
        (8, 3, "0F0 0F1 0F2 2F0"),
        (11, 3, "0F0 0F1 0F2 0I0 0W0"),
        (12, 3, "0F0 0F1 0F2 3F0 3I0 3W0"),
    ],
)
def test_the_last_hint_begins_as_the_solution_does(number: int, hint: int, beginning: str) -> None:
    puzzle = PUZZLES[number]
    assert beginning in puzzle.hint(hint)
    assert " ".join(map(str, puzzle.solution.rows[0])).startswith(beginning)


def after_warm_up(m: int, warm: list[int]) -> list[list[tuple[str, int, int]]]:
    """Rank r does ``warm[r]`` forwards, then a backward and a forward in turn."""
    rows = []
    for r, n in enumerate(warm):
        F, B = ([(kind, r, k) for k in range(m)] for kind in "FB")
        rows.append(F[:n] + [a for k in range(m) for a in (B[k], *F[n + k : n + k + 1])])
    return rows


# What the last hint says, written out.
FOLLOWED = {
    5: (
        after_warm_up(6, [4, 4, 3, 1]),
        "Ranks 0 and 1 do four forwards before their first backward, rank 2 three; then all take turns",
    ),
    6: (
        after_warm_up(8, [5, 4, 3, 1]),
        "Rank 0 begins with five forwards, rank 1 with four, rank 2 with three; rank 3 takes one in turn",
    ),
    7: (
        """
        0F0 0F1 0B0 0F2 0B1 0F3 0B2 0F4 0B3 0F5 0B4 0B5
        1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3 1F4 1F5 1B4 1B5
        2F0 2F1 2B0 2B1 2F2 2F3 2B2 2B3 2F4 2F5 2B4 2B5
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
        """,
        "The others do both backwards of a pair before they begin the next",
    ),
    8: (
        """
        0F0 0F1 0F2 2F0 0F3 2F1 2B0 2F2 2B1 2F3 2B2 0B0 2B3 0B1 0B2 0B3
        1F0 1F1 1F2 3F0 3B0 1F3 3F1 3B1 3F2 3B2 1B0 3F3 3B3 1B1 1B2 1B3
        """,
        "What the other rank waits for goes first: near the end, 2B3 before 0B1",
    ),
    9: (
        """
        0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3
        """,
        "Rank 0 does all its forwards first. The last rank takes a forward and an I in turn, and then",
    ),
    11: (
        """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0F5 0I3 0W3 0I4 0W4 0I5 0W5
        1F0 1F1 1F2 1I0 1I1 1W0 1F3 1W1 1I2 1W2 1F4 1I3 1F5 1W3 1I4 1I5 1W4 1W5
        2F0 2F1 2I0 2F2 2I1 2W0 2W1 2I2 2F3 2W2 2I3 2F4 2F5 2I4 2W3 2I5 2W4 2W5
        3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 3W2 3F3 3I3 3F4 3I4 3F5 3I5 3W3 3W4 3W5
        """,
        "ends with 3F4 3I4 3F5 3I5 3W3 3W4 3W5",
    ),
}


@pytest.mark.parametrize("number", FOLLOWED)
def test_who_follows_the_last_hint_gets_there(number: int) -> None:
    answer, words = FOLLOWED[number]
    assert words in PUZZLES[number].hint(3)
    assert PUZZLES[number].play(answer).score == 3
    assert PUZZLES[number].play(one_f_one_b).score < 3


@pytest.mark.parametrize(
    "number, answer, says",
    [
        (1, "0F0 0B0 0F1 0B1 0F2 0B2\n1F0 1F1 1F2 1B0 1B1 1B2", "it waits for the input gradient"),
        (1, "0F0 0F0 0B0 0F1 0B1 0F2\n1F0 1B0 1F1 1B1 1F2 1B2", "was already made by rank 0, action 0"),
        (1, "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", "rank 0, action 4, 0F2: it is missing"),
        (1, "1F0 1B0\n0F0 0B0", "stage 1 is on rank 1"),
        (1, "0F0 0I0 0W0\n1F0 1B0", "rank 0, action 1, 0I0: this puzzle is played with F, B"),
        (1, "0F7\n1F0", "this puzzle has stages 0 to 1 and micro-batches 0 to 2"),
        (1, "0F0&0B1\n1F0", "0F0&0B1"),
        (1, "0F0 0F1 0F2 0B0 0B1\n1F0 1B0 1F1 1B1 1F2 1B2", "rank 0, action 5, 0B2: it is missing"),
    ],
)
def test_an_illegal_answer_is_told_the_first_reason(number: int, answer: str, says: str) -> None:
    attempt = PUZZLES[number].play(answer)
    assert attempt.score == 0 and not attempt.legal and attempt.picture() is None
    assert str(attempt).startswith("Not legal: ") and says in str(attempt)
    with pytest.raises(RefusedError, match="Not legal"):
        attempt.execute()


def test_too_much_memory_is_named() -> None:
    attempt = PUZZLES[3].play(
        lambda p, m: [[(kind, r, k) for kind in "FB" for k in range(m)] for r in range(p)]
    )
    assert attempt.score == 1 and attempt.too_much == [0, 1, 2]
    assert "Done at 24, which does not count." in str(attempt)
    assert (
        "Legal, but too large: rank 0 keeps 6 of 3, rank 1 keeps 6 of 2, rank 2 keeps 6 of 1 micro-batches. "
        in str(attempt)
    )


def test_an_answer_may_be_text_rows_a_schedule_or_a_function() -> None:
    puzzle = PUZZLES[3]
    answers = [one_f_one_b, one_f_one_b(3, 6), write_grid(one_f_one_b(3, 6)), one_f_one_b(3, 6).rows]
    assert {puzzle.play(answer).score for answer in answers} == {3}
    with pytest.raises(RefusedError, match=r"3 ranks, and the answer has 2 rows(.|\n)*0F0 0B0"):
        puzzle.play(one_f_one_b(2, 6))
    with pytest.raises(RefusedError, match=r"the answer has 1 row: write"):
        puzzle.play("0F0 0B0")
    with pytest.raises(RefusedError, match="rank 0, column 1: '0X0' is no action"):
        puzzle.play("0F0 0X0\n1F0\n2F0")
    with pytest.raises(RefusedError, match=r"puzzle 3: the answer is None. Does your function return"):
        puzzle.play(lambda p, m: None)


def test_legal_next_actions_lead_to_the_end_and_reasons_to_nowhere() -> None:
    puzzle = PUZZLES[2]
    assert (
        puzzle.next()
        == "rank 0: 0F0 0F1 0F2 0F3\nrank 1: nothing, it must wait\nrank 2: nothing, it must wait"
    )
    so_far = "0F0 0F1\n1F0\n2F0 2B0"
    assert puzzle.next(so_far) == "rank 0: 0F2 0F3\nrank 1: 1B0 1F1\nrank 2: nothing, it must wait"
    everything = [f"{stage}{kind}{k}" for stage in range(3) for kind in "FB" for k in range(4)]
    can = {name for line in puzzle.next(so_far).splitlines() for name in line.split()[2:]} & set(everything)
    for action in everything:
        assert (puzzle.why_not(action, so_far) == f"{action} can come next.") == (action in can)
    assert puzzle.why_not("0F1", so_far) == "0F1 was already done."
    assert "which 1F1 makes" in puzzle.why_not("2F1", so_far)
    assert puzzle.why_not("0W0") == "0W0: this puzzle is played with F, B."
    for not_one in ("", "0F0 1F0"):
        with pytest.raises(RefusedError, match="ask about one action at a time"):
            puzzle.why_not(not_one)


@LADDER
def test_a_puzzle_says_all_that_is_needed_to_play_it(puzzle: Puzzle) -> None:
    text = repr(puzzle)
    assert f"{puzzle.m} micro-batches; " in text
    assert ("may keep" in text.splitlines()[2]) == bool(puzzle.cap)
    if puzzle.cap:
        assert f"each from its F to its {puzzle.kinds[-1]}" in text
        assert ("on one of its 2 stages it counts 1/2" in text) == (puzzle.n_stages == 2 * puzzle.p)


@LADDER
def test_the_pause_to_begin_with_is_one_and_waits_for_what_it_says(puzzle: Puzzle) -> None:
    attempt = puzzle.play(puzzle.start)
    timeline = attempt.timeline
    assert timeline is not None and str(attempt).endswith(f"to begin with: {attempt.pause}.")
    match = re.fullmatch(r"(\S+) on rank (\d) before (\w+), which waits for (\w+)", attempt.pause)
    assert match
    rank = int(match[2])
    row, starts, ends = (each[rank] for each in (timeline.schedule.rows, timeline.starts, timeline.ends))
    index = [str(action) for action in row].index(match[3])
    assert float(timeline.time(starts[index] - ends[index - 1])) == pytest.approx(float(match[1]), rel=1e-3)
    assert (rank, index) in timeline.critical_path
    there = {str(timeline.schedule.rows[r][i]) for r, i in timeline.critical_path}
    assert match[4] in there and int(match[4][0]) not in puzzle.stages[rank]
    assert "to begin with" not in str(puzzle.play(puzzle.solution)), "nobody asks for more"


def test_the_pause_to_begin_with_is_the_busiest_rank_s() -> None:
    pause = PUZZLES[5].play(one_f_one_b).pause
    assert pause == "1 on rank 2 before 2B0, which waits for 3B0", "not 2 on rank 1: it has little to do"


def test_hints_are_three() -> None:
    with pytest.raises(RefusedError, match=r"hint\(4\): there are hints 1 to 3"):
        PUZZLES[1].hint(4)


@pytest.mark.parametrize("number", [1, 4, 5, 8, 11, 13])
def test_on_ranks_an_answer_takes_the_time_that_was_simulated(number: int) -> None:
    attempt = PUZZLES[number].play(PUZZLES[number].solution)
    assert attempt.timeline is not None
    done, expected = attempt.execute(), attempt.timeline
    for found, wanted in ((done.timeline.starts, expected.starts), (done.timeline.ends, expected.ends)):
        for rank in range(PUZZLES[number].p):
            wanted_s = [float(expected.time(ticks)) for ticks in wanted[rank]]
            assert found[rank] == pytest.approx(wanted_s, abs=1e-9)
    assert done.error < 1e-12
    assert done.bytes_sent == len(expected.messages) * 8 * 16 * 8, "rows, width, bytes of a number"
    assert "all gradients are the serial ones" in str(done)


def test_a_smaller_store_is_smaller_on_ranks() -> None:
    puzzle = PUZZLES[3]
    small, large = (puzzle.play(answer).execute() for answer in (puzzle.solution, gpipe))
    assert all(few < many for few, many in zip(small.peak_bytes, large.peak_bytes, strict=True))
