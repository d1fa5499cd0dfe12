"""Schedules as data: every generated one is legal, wrong ones are refused by name, text reads back."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons_lib import pipeline_parallel
from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel import (
    SCHEDULES,
    Action,
    IllegalScheduleError,
    Pair,
    Schedule,
    breadth_first,
    check,
    chimera,
    dualpipe,
    dualpipe_v,
    first_early,
    first_fault,
    gpipe,
    interleaved,
    legal_next,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    read_csv,
    read_grid,
    read_slots,
    simulate,
    weight_versions,
    write_csv,
    write_grid,
    zb_h1,
    zb_h2,
    zb_v,
)
from lessons_lib.schedule import main

WITH_CHUNKS = ("interleaved", "breadth-first")
IN_A_V = ("zb-v", "dualpipe-v")
BOTH_WAYS = ("dualpipe", "chimera")


@st.composite
def sizes(draw: st.DrawFn, name: str) -> tuple[int, ...]:
    """p and m, and v where there is one, for which a schedule exists."""
    p = draw(st.integers(1, 6))
    if name in BOTH_WAYS:
        p += p % 2
    if name in ("interleaved", "chimera"):
        m = p * draw(st.integers(1, 3))
    elif name in ("zb-h2", "zb-v", "dualpipe", "dualpipe-v"):
        m = 2 * p + 2 * draw(st.integers(0, 4)) - (name[:2] == "zb") * draw(st.integers(0, 1))
    else:
        m = draw(st.integers(p if name == "pipedream-2bw" else 1, 12))
    return (p, m, draw(st.integers(1, 4))) if name in WITH_CHUNKS else (p, m)


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES)) -> Schedule:
    name = draw(st.sampled_from(names))
    return SCHEDULES[name](*draw(sizes(name)))


def parts(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for rank, row in enumerate(schedule.rows):
        for action in row:
            for part in action.parts:
                yield rank, part


# ---- what is generated


@given(schedules())
def test_every_generated_schedule_is_legal(schedule: Schedule) -> None:
    assert first_fault(schedule) is None
    check(schedule)


@given(schedules())
def test_every_stage_does_every_micro_batch_once(schedule: Schedule) -> None:
    counts = Counter((part.kind, part.stage, part.microbatch) for _, part in parts(schedule))
    assert set(counts.values()) == {1}
    every = {(s, k) for s in range(schedule.n_stages) for k in range(schedule.n_microbatches)}
    done = {kind: {key[1:] for key in counts if key[0] == kind} for kind in "FBIW"}
    assert done["F"] == every
    assert done["B"] | done["I"] == done["B"] | done["W"] == every
    assert not done["B"] & done["I"] and done["I"] == done["W"]


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data())
def test_stages_are_where_they_belong(name: str, data: st.DataObject) -> None:
    p, m, *v = data.draw(sizes(name))
    schedule = SCHEDULES[name](p, m, *v)
    n_chunks = v[0] if v else 2 if name in IN_A_V else 1
    assert (schedule.n_ranks, schedule.n_stages) == (p, p * n_chunks)
    for rank, part in parts(schedule):
        if name in IN_A_V:
            assert part.stage in (rank, 2 * p - 1 - rank)
        elif name in BOTH_WAYS:
            up = (part.microbatch % p >= p // 2) if name == "chimera" else part.microbatch >= m // 2
            assert part.stage == (p - 1 - rank if up else rank)
        else:
            assert part.stage % p == rank


def test_the_phases_of_1f1b() -> None:
    def kinds(p: int, m: int, r: int) -> str:
        return "".join(action.kind for action in one_f_one_b(p, m).rows[r])

    assert kinds(4, 6, 0) == "FFF" + "FB" * 3 + "BBB"
    assert kinds(4, 6, 3) == "FB" * 6
    assert kinds(4, 2, 0) == "FFBB"  # fewer micro-batches than stages: no hang


def test_w_is_put_off_by_r_micro_batches_in_h1_and_by_2r_in_h2() -> None:
    for generator, per_rank in ((zb_h1, 1), (zb_h2, 2)):
        for r, row in enumerate(generator(4, 12).rows):
            at = {(action.kind, action.microbatch): index for index, action in enumerate(row)}
            between = [k for k in range(12) if at["I", k] < at["W", 0]]
            assert len(between) == 1 + per_rank * r


def test_only_dualpipe_has_pairs_and_only_pipedream_updates() -> None:
    made = {name: SCHEDULES[name](4, 12) for name in SCHEDULES}
    assert {name for name, s in made.items() if any(isinstance(a, Pair) for row in s.rows for a in row)} == {
        "dualpipe",
        "dualpipe-v",
    }
    assert {name for name, s in made.items() if any(part.kind == "U" for _, part in parts(s))} == {
        "pipedream",
        "pipedream-2bw",
    }


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: interleaved(4, 10),
            r"interleaved 1F1B: m=10 is not a multiple of p. Nearest: m=8 or m=12\.",
        ),
        (lambda: interleaved(4, 3), r"m=3 is not a multiple of p. Nearest: m=4\."),
        (lambda: chimera(4, 6), r"Chimera: m=6 is not a multiple of p. Nearest: m=4 or m=8\."),
        (lambda: chimera(5, 10), r"Chimera: p=5 is not a multiple of 2.*Nearest: p=4 or p=6\."),
        (lambda: dualpipe(3, 8), r"DualPipe: p=3 is not a multiple of 2.*Nearest: p=2 or p=4\."),
        (lambda: dualpipe(4, 9), r"DualPipe: m=9 is not a multiple of 2.*Nearest: m=8 or m=10\."),
        (lambda: dualpipe(4, 6), r"DualPipe needs m >= 2p micro-batches to fill, and m=6 < 8: try m=8\."),
        (lambda: dualpipe_v(4, 7), r"DualPipeV needs m >= 2p .*try m=8\."),
        (lambda: zb_v(4, 6), r"ZB-V needs m >= 2p-1 micro-batches to fill, and m=6 < 7: try m=7\."),
        (lambda: zb_h2(4, 6), r"ZB-H2 needs m >= 2p-1 .*try m=7\."),
        (lambda: pipedream_2bw(4, 3), r"PipeDream-2BW needs m >= p .*try m=4\."),
        (lambda: gpipe(0, 4), r"p=0: p, m and v are whole numbers from 1 on\."),
        (lambda: one_f_one_b(4, 2.0), r"m=2\.0: "),  # type: ignore[arg-type]
        (lambda: breadth_first(4, 4, True), r"v=True: "),
        (lambda: Schedule.of("mine", [[], []]), r"schedule 'mine' has no action; write for each rank a list"),
        (lambda: Schedule.of("mine", [[("X", 0, 0)]]), r"rank 0: \('X', 0, 0\) is no action\. An action is"),
        (lambda: Schedule.of("mine", [[("F", 0, 0)], [("F", 1)]]), r"rank 1: \('F', 1\) is no action"),
        (lambda: Schedule.of("mine", [[("F", -1, 0)]]), r"\('F', -1, 0\) is no action"),
        (lambda: Schedule.of("mine", [[("F", "a", 0)]]), r"\('F', 'a', 0\) is no action"),
        (lambda: Schedule.of("mine", [[(("B", 0, 0), ("F", 0, 1))]]), r"an overlapped pair is \(F, B\)"),
    ],
)
def test_choices_that_make_no_schedule_are_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        make()


def test_a_schedule_written_by_hand_is_the_generated_one() -> None:
    rows = [[tuple(part) for part in row] for row in one_f_one_b(2, 3).rows]
    assert Schedule.of("1F1B", rows) == one_f_one_b(2, 3)
    pair = Schedule.of("pair", [[("F", 0, 0), (("F", 0, 1), ("B", 0, 0)), ("B", 0, 1)]])
    assert pair.rows[0][1] == Pair(Action("F", 0, 1), Action("B", 0, 0))


# ---- the check


def changed(schedule: Schedule, rank: int, change: Callable[[list[Action]], object]) -> Schedule:
    """The schedule after a change of one rank's row."""
    row = list(schedule.rows[rank])
    change(row)
    rows = [*schedule.rows]
    rows[rank] = tuple(row)
    return dataclasses.replace(schedule, rows=tuple(rows))


def action(text: str) -> Action:
    stage, kind, k = re.fullmatch(r"(\d+)(\w)(\d+)", text).groups()  # type: ignore[union-attr]
    return Action(kind, int(stage), int(k))


def swapped(one: str, other: str) -> Callable[[list[Action]], None]:
    def change(row: list[Action]) -> None:
        a, b = row.index(action(one)), row.index(action(other))
        row[a], row[b] = row[b], row[a]

    return change


def without(text: str) -> Callable[[list[Action]], None]:
    return lambda row: row.remove(action(text))


def moved(text: str, index: int) -> Callable[[list[Action]], None]:
    def change(row: list[Action]) -> None:
        row.remove(action(text))
        row.insert(index, action(text))

    return change


WRONG = [  # schedule, rank, change of its row, then of the fault: rank, action, result it waits for, words
    pytest.param(
        zb_h1(4, 8), 0, swapped("0I0", "0W0"), 0, "0W0", "dx 0 0", "only after 0W0", id="W before I"
    ),
    pytest.param(
        zb_v(3, 6), 1, swapped("4I1", "4W1"), 1, "4W1", "dx 4 1", "only after 4W1", id="W before I, in a V"
    ),
    pytest.param(
        gpipe(3, 4), 2, moved("2B3", 0), 2, "2B3", "y 2 3", "only after 2B3", id="B before its own F"
    ),
    pytest.param(one_f_one_b(4, 8), 2, moved("2B0", 0), 2, "2B0", "y 2 0", "only after 2B0", id="B first"),
    pytest.param(
        gpipe(3, 4),
        0,
        moved("0B0", 1),
        0,
        "0B0",
        "dx 1 0",
        "which rank 1 makes by 1B0, its action 4; but before that rank 1 comes to 1F1, its action 1",
        id="B before the last F: a circle of two",
    ),
    pytest.param(
        interleaved(2, 4),
        1,
        swapped("1F0", "3F0"),
        1,
        "3F0",
        "y 2 0",
        "which rank 0 makes by 2F0, its action 2, which waits for the output of micro-batch 0 on stage 1, "
        "which rank 1 makes by 1F0, its action 2, only after 3F0$",
        id="chunk b before chunk a",
    ),
    pytest.param(
        one_f_one_b(4, 8), 1, without("1F5"), 2, "2F5", "y 1 5", "which nobody makes", id="F forgotten"
    ),
    pytest.param(
        one_f_one_b(4, 8), 2, without("2B3"), 1, "1B3", "dx 2 3", "which nobody makes", id="B forgotten"
    ),
    pytest.param(zb_h1(4, 8), 2, without("2I3"), 1, "1I3", "dx 2 3", "which nobody makes", id="I forgotten"),
    pytest.param(
        zb_h1(4, 8), 2, without("2W3"), 2, "2W3", None, "missing: nobody makes the weight", id="W forgotten"
    ),
    pytest.param(one_f_one_b(4, 8), 0, without("0B7"), 0, "0I7", None, "missing", id="last B forgotten"),
    pytest.param(
        gpipe(2, 4),
        1,
        lambda row: row.append(action("1F2")),
        1,
        "1F2",
        None,
        r"the output of micro-batch 2 on stage 1 was already made by rank 1, action 2",
        id="F twice",
    ),
    pytest.param(
        zb_h1(2, 4),
        1,
        lambda row: row.append(action("1B2")),
        1,
        "1B2",
        None,
        "already made",
        id="B beside I and W",
    ),
    pytest.param(
        gpipe(2, 4),
        1,
        lambda row: row.append(action("0W2")),
        1,
        "0W2",
        None,
        "stage 0 of micro-batch 2 is on rank 0, which has its forward",
        id="on the wrong rank",
    ),
    pytest.param(
        gpipe(2, 4),
        1,
        lambda row: row.append(action("1F4")),
        1,
        "1F4",
        None,
        "there is no such thing; .*stages 0 to 1 and micro-batches 0 to 3",
        id="a micro-batch too many",
    ),
    pytest.param(
        gpipe(2, 4),
        1,
        lambda row: row.append(action("2F0")),
        1,
        "2F0",
        None,
        "stages 0 to 1",
        id="a stage too many",
    ),
]


@pytest.mark.parametrize("schedule, changed_rank, change, rank, wrong, waits_for, words", WRONG)
def test_of_a_wrong_schedule_the_first_wrong_action_is_named(
    schedule: Schedule,
    changed_rank: int,
    change: Callable[[list[Action]], object],
    rank: int,
    wrong: str,
    waits_for: str | None,
    words: str,
) -> None:
    assert first_fault(schedule) is None
    broken = changed(schedule, changed_rank, change)
    fault = first_fault(broken)
    assert fault is not None
    assert (fault.rank, str(fault.action)) == (rank, wrong)
    row = broken.rows[rank]
    assert fault.index == len(row) or str(row[fault.index]) == wrong
    found = fault.waits_for and " ".join(map(str, fault.waits_for))
    assert found == waits_for
    assert re.search(words, fault.why), fault.why
    with pytest.raises(
        IllegalScheduleError, match=rf"is not legal: rank {rank}, action {fault.index}, {wrong}: "
    ):
        check(broken)
    if waits_for:
        with pytest.raises(IllegalScheduleError, match=re.escape(str(fault))):
            simulate(broken)


def test_a_long_circle_of_waiting_is_told_in_short() -> None:
    fault = first_fault(changed(interleaved(9, 9), 1, swapped("1F0", "10F0")))
    assert fault is not None
    assert fault.why == (
        "it waits for the output of micro-batch 0 on stage 9, which rank 0 makes by 9F0, its action 9, "
        "which waits for the output of micro-batch 0 on stage 8, which rank 8 makes by 8F0, its action 0, "
        "which waits for the output of micro-batch 0 on stage 7, and so on for 6 more ranks, the last of "
        "which waits for the output of micro-batch 0 on stage 1, which rank 1 makes by 1F0, its action 9, "
        "only after 10F0"
    )


@pytest.mark.parametrize(
    "schedule, rank, change",
    [
        (zb_h1(4, 8), 1, moved("1W2", 23)),  # W may come as late as one likes
        (gpipe(3, 4), 2, swapped("2B0", "2B3")),  # and backwards in any order
        (one_f_one_b(4, 8), 0, moved("0F4", 3)),  # and a forward too early, if memory allows
    ],
)
def test_a_change_that_leaves_a_schedule_legal_is_not_refused(
    schedule: Schedule, rank: int, change: Callable[[list[Action]], object]
) -> None:
    other = changed(schedule, rank, change)
    assert other.rows != schedule.rows
    assert first_fault(other) is None


def missing_of(action: Action, last: int) -> set[tuple[str, int, int]]:
    """What an action needs, said once more and otherwise: the actions that must be done before."""
    kind, s, k = action
    if kind == "F":
        return {("F", s - 1, k)} if s else set()
    if kind == "W":
        return {("I", s, k)}
    if kind == "U":
        return {("B", s, k)}
    return {("F", s, k)} | ({("BI", s + 1, k)} if s < last else set())


def run_as_far_as_possible(schedule: Schedule) -> list[int]:
    """How far each rank gets, found by trying again and again."""
    done: set[tuple[str, int, int]] = set()
    at = [0] * schedule.n_ranks
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row):
                before = {
                    need for part in row[at[rank]].parts for need in missing_of(part, schedule.n_stages - 1)
                }
                if not before <= done:
                    break
                for kind, s, k in row[at[rank]].parts:
                    done |= {(kind, s, k)} | ({("BI", s, k)} if kind in "BI" else set())
                at[rank] += 1
                progress = True
    return at


@given(schedules(), st.integers(0, 10**6), st.integers(1, 4))
def test_whatever_is_shuffled_the_check_agrees_with_trying(
    schedule: Schedule, seed: int, n_swaps: int
) -> None:
    rng = random.Random(seed)
    for _ in range(n_swaps):
        rank = rng.randrange(schedule.n_ranks)
        a, b = (rng.randrange(len(schedule.rows[rank])) for _ in range(2))

        def swap(row: list[Action], a: int = a, b: int = b) -> None:
            row[a], row[b] = row[b], row[a]

        schedule = changed(schedule, rank, swap)
    at = run_as_far_as_possible(schedule)
    fault = first_fault(schedule)
    assert (fault is None) == (at == list(map(len, schedule.rows)))
    if fault is not None:
        assert fault.index == at[fault.rank]  # it is where its rank comes to a standstill
        assert fault.waits_for is not None
        with pytest.raises(IllegalScheduleError):
            simulate(schedule)


# ---- legal moves


@settings(max_examples=20)
@given(schedules(tuple(name for name in SCHEDULES if name not in (*BOTH_WAYS, "dualpipe-v"))))
def test_every_schedule_is_a_sequence_of_legal_moves(schedule: Schedule) -> None:
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    going = True
    while going:
        going = False
        moves = legal_next(rows, schedule.stages, schedule.n_microbatches, kinds="FBIWU")
        for rank, row in enumerate(schedule.rows):
            if len(rows[rank]) < len(row) and row[len(rows[rank])] in moves[rank]:
                rows[rank].append(row[len(rows[rank])])  # type: ignore[arg-type]
                going = True
    assert tuple(map(tuple, rows)) == schedule.rows


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(["FB", "FIW"]), st.integers(0, 10**6))
def test_legal_moves_at_random_end_in_a_legal_schedule(p: int, m: int, kinds: str, seed: int) -> None:
    rng = random.Random(seed)
    rows: list[list[Action]] = [[] for _ in range(p)]
    stages = [[rank, 2 * p - 1 - rank] for rank in range(p)]
    while any(moves := legal_next(rows, stages, m, kinds)):
        rank = rng.choice([rank for rank in range(p) if moves[rank]])
        rows[rank].append(rng.choice(moves[rank]))
    assert sum(map(len, rows)) == 2 * p * m * len(kinds)
    check(Schedule.of("at random", rows))


# ---- drawings, with times of their own


def test_f5_a_drawn_1f1b_that_is_too_good_to_be_true() -> None:
    order = one_f_one_b(4, 8)
    drawn = read_slots(write_grid(order))
    assert first_early(drawn.schedule, drawn.starts, drawn.ends) is None
    # Rank 0 runs the backward of 0 right after its forward of 3, in the very next slot.
    early = re.sub(r"0F3 +\. +\. +\. +0B0", "0F3 0B0  .   .   . ", write_grid(order))
    assert early != write_grid(order)
    drawn = read_slots(early)
    assert first_fault(drawn.schedule) is None  # the order is right, and the times are not
    fault = first_early(drawn.schedule, drawn.starts, drawn.ends)
    assert fault is not None
    assert (fault.rank, str(fault.action)) == (0, "0B0")
    assert fault.why == "it starts at 4, and the input gradient of micro-batch 0 on stage 1 is there at 7"


def test_a_rank_cannot_do_two_things_at_once() -> None:
    schedule = one_f_one_b(2, 2)
    right = simulate(schedule)
    starts, ends = [list(row) for row in right.starts], [list(row) for row in right.ends]
    starts[1][2] -= 1  # 1F1 while 1B0 is on
    fault = first_early(schedule, starts, ends)
    assert fault is not None
    assert (str(fault.action), fault.why) == ("1F1", "it starts at 3, and the rank is busy until 4")


@given(schedules())
def test_a_simulation_starts_nothing_early(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    assert first_early(schedule, timeline.starts, timeline.ends) is None


# ---- text


@given(schedules())
def test_a_grid_reads_back(schedule: Schedule) -> None:
    assert read_grid(write_grid(schedule)).rows == schedule.rows
    assert read_grid(str(schedule).replace(".", "")).rows == schedule.rows


@given(schedules())
def test_the_columns_of_a_grid_are_slots(schedule: Schedule) -> None:
    drawn = read_slots(write_grid(schedule))
    assert drawn.schedule.rows == schedule.rows
    assert first_early(drawn.schedule, drawn.starts, drawn.ends) is None


@given(schedules(tuple(name for name in SCHEDULES if not name.startswith("pipedream"))))
def test_torchs_csv_reads_back(schedule: Schedule) -> None:
    assert read_csv(write_csv(schedule)).rows == schedule.rows


def test_the_grid_of_a_schedule_that_cannot_run_still_prints() -> None:
    broken = changed(gpipe(2, 2), 0, moved("0B0", 0))
    assert write_grid(broken).splitlines()[0] == "rank 0  0B0 0F0 0F1 0B1"


@pytest.mark.parametrize(
    "read, text, message",
    [
        (
            read_grid,
            "0F0 0B0\n1F0 1X0",
            r"rank 1, column 1: '1X0' is no action\. Write stage, kind \(F, B, I, W, U\)",
        ),
        (
            read_grid,
            "rank 0  0F0 0F0&0F1",
            r"rank 0, column 1: '0F0&0F1' is no overlapped pair, which is one F",
        ),
        (read_grid, " . \n . ", r"has no action"),
        (read_csv, "0F0,0SEND_F0", r"rank 0, line 1: '0SEND_F0' is a communication\. Write .*compute_only"),
        (read_csv, "0F0\n1G0", r"rank 1, line 2: '1G0' is no action"),
        (lambda text: write_csv(pipedream(2, 2)), "", r"PipeDream: torch's schedules have no action for U"),
    ],
)
def test_text_that_is_no_schedule_is_refused(read: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        read(text)


# ---- versions of the weights


@given(st.integers(1, 6), st.integers(1, 14))
def test_pipedream_keeps_p_minus_r_versions_and_is_p_minus_1_minus_r_updates_old(p: int, m: int) -> None:
    for r, rank in enumerate(weight_versions(pipedream(p, m))):
        assert rank.used == tuple(max(k - (p - 1 - r), 0) for k in range(m))
        assert rank.staleness == tuple(min(k, p - 1 - r) for k in range(m))
        assert rank.kept == p - r if m >= 2 * p else rank.kept <= p - r
    # Vertical sync: a micro-batch uses the same version on every stage, that of the first.
    same = dataclasses.replace(pipedream(p, m), versions=tuple(max(k - (p - 1), 0) for k in range(m)))
    for rank in weight_versions(same):
        assert rank.staleness == tuple(min(k, p - 1) for k in range(m))


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 4))
def test_2bw_keeps_two_versions_and_is_one_update_old(p: int, more: int, n_updates: int) -> None:
    m = p + more
    for rank in weight_versions(pipedream_2bw(p, m, n_updates)):
        # k from 0 here; with k from 1 this is max(floor((k-1)/m) - 1, 0)
        assert rank.used == tuple(max(k // m - 1, 0) for k in range(m * n_updates))
        assert rank.staleness == tuple(min(t, 1) for t in range(n_updates))
        assert rank.kept <= 2


def test_an_update_is_as_stale_as_the_oldest_of_its_gradients() -> None:
    rows = [["0F0", "0F1", "0B0", "0U0", "0F2", "0B1", "0B2", "0U2"]]
    (rank,) = weight_versions(Schedule.of("mixed", [[action(text) for text in row] for row in rows]))
    assert (rank.used, rank.staleness) == ((0, 0, 1), (0, 1))  # 0B1 still has the weights of before 0U0


def test_one_version_less_would_not_do() -> None:
    greedy = dataclasses.replace(pipedream_2bw(4, 4, 2), versions=(0,) * 4 + (1,) * 4)
    with pytest.raises(
        RefusedError, match=r"0F4 on rank 0 asks for version 1 of the weights, and the newest is 0"
    ):
        weight_versions(greedy)


# ---- the package and the command


def test_the_package_lists_its_names_and_needs_no_torch_but_to_execute() -> None:
    assert dir(pipeline_parallel) == sorted(pipeline_parallel.__all__)
    executing = {"Executed", "PutOff", "cut_batch", "cut_by_cost", "cut_model", "execute"}
    records = set(pipeline_parallel.__all__) - executing - {"layer_costs", "tied_places"}
    program = (
        f"import sys; from lessons_lib.pipeline_parallel import {', '.join(records)}; "
        "print(simulate(gpipe(2, 2)).makespan, *(name in sys.modules for name in ('torch', 'numpy')))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["9", "False", "False"]


def test_simulate_is_the_function_however_it_is_imported() -> None:
    program = (
        "import lessons_lib.pipeline_parallel.simulate, lessons_lib.pipeline_parallel as package; "
        "print(callable(package.simulate))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def test_the_command_prints_the_grid_and_writes_the_picture(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["zb-v", "--p", "4", "--m", "8", "--latency", "0.1"]) == 0
    out = capsys.readouterr().out
    assert write_grid(zb_v(4, 8)) in out
    assert "done at 52.3; " in out and "none claimed (0 holds for F = I = W and c = 0" in out
    assert (tmp_path / "zb-v.svg").read_text(encoding="utf-8").startswith("<svg")
    assert main(["1f1b", "--against", "zb-h1", "--picture", "both.svg", "--theme", "dark"]) == 0
    out = capsys.readouterr().out
    assert "= 9\n" in out and "= 3\n" in out and out.endswith("picture: both.svg\n")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_command_knows_every_schedule(name: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--p", "4", "--m", "8", "--picture", str(tmp_path / "x.svg")]) == 0
    assert "bubble " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["zb-w"], "invalid choice: 'zb-w' (choose from 'gpipe', '1f1b'"),
        (["zb-v", "--m", "3"], "ZB-V needs m >= 2p-1 micro-batches to fill, and m=3 < 7: try m=7."),
        (["interleaved", "--m", "10"], "m=10 is not a multiple of p. Nearest: m=8 or m=12."),
        (["zb-v", "--v", "3"], "--v 3: zb-v has no choice of chunks; interleaved and breadth-first have."),
        (["gpipe", "--latency", "soon"], "'soon' is no time; write a number such as 1, 0.1 or 1/3"),
        (["gpipe", "--F", "-1"], "-1 is less than 0; a time is a number from 0 on"),
        (["gpipe", "--picture", "/no/such/folder/x.svg"], "could not be written to '/no/such/folder/x.svg'"),
    ],
)
def test_the_command_refuses_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
