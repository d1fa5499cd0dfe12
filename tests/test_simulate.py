"""The simulation: against a naive one, against closed forms, exact in rationals, linear in actions."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel import (
    SCHEDULES,
    Action,
    PipelineTimeline,
    Schedule,
    Times,
    bubble_form,
    chimera,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_form,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)
from lessons_lib.pipeline_parallel.arrays import in_arrays
from lessons_lib.pipeline_parallel.forms import FORMS, PEAKS, case_of
from lessons_lib.pipeline_parallel.simulate import one_by_one
from lessons_lib.pipeline_parallel.times import Ticks
from tests.test_schedule import WITH_CHUNKS, changed, moved, schedules, sizes

FRACTIONS = st.fractions(min_value=0, max_value=4, max_denominator=12)
POSITIVE = st.fractions(min_value=Fraction(1, 4), max_value=4, max_denominator=12)


# ---- a naive simulation: raise every start until nothing is too early


def naive_starts(schedule: Schedule, times: Times) -> list[list[Any]]:
    last = schedule.n_stages - 1
    duration = times.durations(schedule.n_stages)
    home = {
        (part.stage, part.microbatch): rank
        for rank, row in enumerate(schedule.rows)
        for action in row
        for part in action.parts
    }

    def takes(action: Any) -> Any:
        if len(action.parts) == 2 and times.FB is not None:
            return duration["FB"][action.parts[1].stage]
        return sum(duration[part.kind][part.stage] for part in action.parts)

    starts: list[list[Any]] = [[0] * len(row) for row in schedule.rows]
    while True:
        end = {}
        for rank, row in enumerate(schedule.rows):
            for index, action in enumerate(row):
                for kind, s, k in action.parts:
                    end["dx" if kind in "BI" else kind, s, k] = starts[rank][index] + takes(action)
        better: list[list[Any]] = []
        for rank, row in enumerate(schedule.rows):
            now = 0
            better.append([])
            for action in row:
                for kind, s, k in action.parts:
                    if kind == "F" and s > 0:
                        now = max(now, end["F", s - 1, k] + times.send * (home[s - 1, k] != rank))
                    if kind in "BI" and s < last:
                        now = max(now, end["dx", s + 1, k] + times.send * (home[s + 1, k] != rank))
                better[-1].append(now)
                now += takes(action)
        if better == starts:
            return starts
        starts = better


@st.composite
def some_times(draw: st.DrawFn, n_stages: int) -> Times:
    """Times that may differ from stage to stage."""

    def time() -> Any:
        return draw(st.one_of(POSITIVE, st.lists(POSITIVE, min_size=n_stages, max_size=n_stages)))

    pair = draw(st.one_of(st.none(), POSITIVE))
    return Times(F=time(), I=time(), W=time(), U=draw(FRACTIONS), FB=pair, send=draw(FRACTIONS))


@settings(max_examples=30)
@given(st.data(), schedules())
def test_starts_equal_those_of_a_naive_simulation(data: st.DataObject, schedule: Schedule) -> None:
    times = data.draw(some_times(schedule.n_stages))
    timeline = simulate(schedule, times)
    found = [[timeline.time(start) for start in row] for row in timeline.starts]
    assert found == naive_starts(schedule, times)


@settings(max_examples=60)
@given(st.data(), schedules(tuple(name for name in SCHEDULES if not name.startswith("dualpipe"))))
def test_arrays_give_the_same_as_going_one_by_one(data: st.DataObject, schedule: Schedule) -> None:
    times = data.draw(some_times(schedule.n_stages))
    if data.draw(st.booleans()):
        times = Times(F=0.1, I=0.2, W=float(data.draw(POSITIVE)), send=float(data.draw(FRACTIONS)))
    ticks = Ticks.of(times, schedule.n_stages)
    for one, other in zip(one_by_one(schedule, ticks)[:2], in_arrays(schedule, ticks)[:2], strict=True):
        assert [list(row) for row in one] == [list(row) for row in other]
    slow, fast = (PipelineTimeline(schedule, *how(schedule, ticks)[:2]) for how in (one_by_one, in_arrays))
    assert (slow.makespan, slow.work, slow.bubble) == (fast.makespan, fast.work, fast.bubble)
    assert type(slow.makespan) is type(fast.makespan)


@pytest.mark.parametrize(
    "broken",
    [
        changed(one_f_one_b(4, 8), 1, moved("1B0", 0)),
        changed(gpipe(3, 4), 0, moved("0B2", 1)),
        changed(zb_h1(4, 8), 3, moved("3W2", 3)),
    ],
)
def test_arrays_stop_where_going_one_by_one_stops(broken: Schedule) -> None:
    ticks = Ticks.of(Times(), broken.n_stages)
    one, other = ([list(row) for row in how(broken, ticks)[1]] for how in (one_by_one, in_arrays))
    assert one == other
    assert any(len(row) < len(whole) for row, whole in zip(one, broken.rows, strict=True))


def test_a_large_schedule_goes_through_arrays_and_has_messages_and_a_critical_path() -> None:
    timeline = simulate(one_f_one_b(32, 832), Times(send=Fraction(1, 3)))
    assert isinstance(timeline.starts[0], memoryview)
    form = bubble_form("1f1b", 32, 832, times=Times(send=Fraction(1, 3)))
    assert max(timeline.idle) == form.value
    assert timeline.peak_in_flight() == [32 - r for r in range(32)]
    assert timeline.critical_path[-1] == (0, 1663)


# ---- exact closed forms


@st.composite
def inside(draw: st.DrawFn, name: str) -> Times:
    """Times for which forms may be claimed, often on the edge."""
    alike = draw(st.booleans())
    F = draw(POSITIVE)
    I = F if alike else draw(POSITIVE)
    W = F if alike else draw(st.one_of(st.just(min(F, I)), POSITIVE))
    c = draw(st.one_of(st.just(0), st.just(W / 2), st.just(F), FRACTIONS))
    if name == "chimera":
        return Times(F=F, B=draw(st.one_of(st.just(F), POSITIVE)), send=c if draw(st.booleans()) else 0)
    FB = draw(st.one_of(st.none(), st.just(F + I + W), st.just(Fraction(5, 6) * (F + I + W)), POSITIVE))
    return Times(F=F, I=I, W=W, FB=FB if name.startswith("dualpipe") else None, send=c)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=50)
@given(data=st.data())
def test_every_bubble_equals_its_closed_form_inside_its_domain(name: str, data: st.DataObject) -> None:
    size = data.draw(sizes(name))
    times = data.draw(inside(name))
    claim = bubble_form(name, *size, times=times)
    timeline = simulate(SCHEDULES[name](*size), times)
    if claim.value is None:
        assert claim.why.endswith("; beyond, simulate")
    elif claim.measure == "idle":
        assert max(timeline.idle) == claim.value
    else:
        assert max(timeline.spans_of_ranks) - timeline.work[0] == claim.value


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_claimed_where_the_course_uses_them(name: str) -> None:
    m, v = (20, ()) if name != "chimera" else (16, ())
    if name in WITH_CHUNKS:
        v = (2,)  # type: ignore[assignment]
    assert bubble_form(name, 4, m, *v, times=Times() if name != "chimera" else Times(B=1)).value is not None


@pytest.mark.parametrize(
    "name, size, times",
    [
        ("1f1b", (4, 6), Times(send=1)),  # m not a multiple of p
        (
            "interleaved",
            (4, 8, 4),
            Times(F=Fraction(1, 4), I=Fraction(1, 4), W=Fraction(1, 4), send=Fraction(1, 2)),
        ),
        ("zb-h1", (4, 4), Times(send=Fraction(1, 4))),  # m < 2p
        ("zb-h1", (4, 8), Times(F=1, I=2, W=2)),  # W > F
        ("zb-h2", (4, 8), Times(F=2, I=1, W=2)),
        ("zb-v", (4, 8), Times(F=1, I=Fraction(6, 5), W=Fraction(7, 10))),
        ("dualpipe", (4, 8), Times(F=1, I=2, W=1)),
        ("dualpipe-v", (4, 8), Times(FB=4)),
        ("chimera", (4, 8), Times()),  # B = 2F, m > p
    ],
)
def test_outside_its_domain_a_form_would_be_wrong_and_is_not_claimed(
    name: str, size: tuple[int, ...], times: Times
) -> None:
    claim = bubble_form(name, *size, times=times)
    assert claim.value is None and claim.why == (
        f"{FORMS[name].formula} holds for {FORMS[name].domain}; beyond, simulate"
    )
    p, m, v = (*size, 1)[:3]
    case = case_of(p, m, v, times)
    assert case is not None
    timeline = simulate(SCHEDULES[name](*size), times)
    found = max(timeline.idle) if claim.measure == "idle" else max(timeline.spans_of_ranks) - timeline.work[0]
    assert FORMS[name].value(case) != found


def test_no_form_is_claimed_for_what_forms_know_nothing_of() -> None:
    for times in (Times(F=[1, 2, 1, 1]), Times(message_bytes=8, bandwidth=4)):
        claim = bubble_form("gpipe", 4, 8, times=times)
        assert claim.value is None and "for stages that are all alike, without bandwidth" in claim.why
    assert "no form is known for pipedream" in bubble_form("pipedream", 4, 8).why


@pytest.mark.parametrize("name", PEAKS)
@settings(max_examples=25)
@given(data=st.data())
def test_every_peak_equals_its_closed_form(name: str, data: st.DataObject) -> None:
    size = data.draw(sizes(name))
    mb = data.draw(POSITIVE)
    mw = data.draw(st.one_of(st.just(mb), st.just(0), FRACTIONS))
    times = Times(
        F=data.draw(POSITIVE), I=data.draw(POSITIVE), W=data.draw(POSITIVE), send=data.draw(FRACTIONS)
    )
    form = peak_form(name, *size, mb=mb, mw=mw)
    if form is None:
        assert mw > mb or (name == "zb-h1" and size[1] < size[0])
    else:
        assert simulate(SCHEDULES[name](*size), times).peak_in_flight(mb, mw) == form


# ---- the measures


@given(schedules())
def test_the_measures_are_what_they_say(schedule: Schedule) -> None:
    timeline = simulate(schedule, Times(F=2, I=3, W=1, send=Fraction(1, 2)))
    p, total = schedule.n_ranks, timeline.makespan * schedule.n_ranks
    assert timeline.bubble == 1 - Fraction(sum(timeline.work)) / Fraction(total)
    assert timeline.bubble_ratio == Fraction(sum(timeline.idle)) / Fraction(sum(timeline.work))
    longest = max(timeline.spans_of_ranks)
    assert timeline.span_bubble == Fraction(longest - Fraction(sum(timeline.work)) / p) / Fraction(longest)
    assert 0 <= timeline.span_bubble <= timeline.bubble < 1


@given(schedules(), POSITIVE)
def test_nothing_is_kept_in_the_end_and_never_less_than_nothing(schedule: Schedule, mw: Fraction) -> None:
    timeline = simulate(schedule)
    for rank in range(schedule.n_ranks):
        curve = timeline.in_flight(rank, mw=mw)
        assert curve[-1][1] == 0
        assert all(amount >= 0 for _, amount in curve)
        assert all(a <= b for (a, _), (b, _) in pairwise(curve))
        assert timeline.peak_in_flight(mw=mw)[rank] == max(amount for _, amount in curve)


def test_peaks_in_bytes() -> None:
    timeline = simulate(zb_h1(4, 8))
    assert timeline.peak_in_flight(mb=34_000, mw=32_000) == [(4 - r) * 34_000 + r * 32_000 for r in range(4)]
    assert simulate(interleaved(4, 8, 2)).peak_in_flight(mb=1_000)[0] == 5_500


def test_messages_go_where_a_stage_is_on_another_rank() -> None:
    counts = {
        name: len(simulate(SCHEDULES[name](4, 8)).messages)
        for name in ("gpipe", "1f1b", "interleaved", "zb-v")
    }
    assert counts == {
        "gpipe": 48,
        "1f1b": 48,
        "interleaved": 112,
        "zb-v": 96,
    }  # 2m (stages - 1), less at the turn
    timeline = simulate(gpipe(2, 1), Times(send=Fraction(1, 2), message_bytes=10))
    there, back = timeline.messages
    assert (there.source, there.sent, there.destination, there.received) == (0, 1, 1, Fraction(3, 2))
    assert (back.source, back.sent, back.destination, back.received) == (1, Fraction(9, 2), 0, 5)
    assert there.label == "output of micro-batch 0 on stage 0, for 1F0"
    assert timeline.bytes_sent == 20


@given(schedules(), POSITIVE)
def test_every_action_starts_when_its_rank_is_free_and_all_it_needs_is_there(
    schedule: Schedule, send: Fraction
) -> None:
    timeline = simulate(schedule, Times(send=send))
    for rank, row in enumerate(schedule.rows):
        for index in range(len(row)):
            free = timeline.time(timeline.ends[rank][index - 1]) if index else 0
            needed = timeline.needed(rank, index)
            assert timeline.time(timeline.starts[rank][index]) == max(
                [free, *(there for _, _, there in needed)]
            )
            for result, source, there in needed:
                made_by, at = timeline.makers[result]
                assert made_by == source
                assert there == timeline.time(timeline.ends[source][at]) + send * (source != rank)


@given(schedules(), st.data())
def test_the_critical_path_fills_the_time_and_a_longer_action_on_it_makes_all_longer(
    schedule: Schedule, data: st.DataObject
) -> None:
    times = Times(F=2, I=2, W=1, send=data.draw(FRACTIONS))
    timeline = simulate(schedule, times)
    path = timeline.critical_path
    at = [(timeline.time(timeline.starts[r][i]), timeline.time(timeline.ends[r][i]), r) for r, i in path]
    assert at[0][0] == 0 and at[-1][1] == timeline.makespan
    for (_, end, rank), (start, _, following) in pairwise(at):
        assert start - end == (times.send if rank != following else 0)
    rank, index = data.draw(st.sampled_from(path))
    stage = schedule.rows[rank][index].parts[-1].stage
    kind = schedule.rows[rank][index].parts[-1].kind
    longer: dict[str, Any] = {"B": "W"}
    lengthened = [getattr(times, longer.get(kind, kind))] * schedule.n_stages
    lengthened[stage] += 1
    slower = Times(**{"F": 2, "I": 2, "W": 1, "send": times.send, longer.get(kind, kind): lengthened})
    assert simulate(schedule, slower).makespan > timeline.makespan


# ---- times


def test_rational_times_stay_exact() -> None:
    tenth = simulate(one_f_one_b(4, 8), Times(send=Fraction(1, 10)))
    assert tenth.makespan == Fraction(173, 5)
    assert float(simulate(one_f_one_b(4, 8), Times(send=0.1)).makespan) == pytest.approx(34.6)
    third = Fraction(1, 3)
    thirds = simulate(interleaved(4, 8, 3), Times(F=third, I=third, W=third))
    assert (thirds.makespan, thirds.bubble_ratio) == (27, Fraction(1, 8))
    assert isinstance(thirds.makespan, int)


def test_a_tie_in_floats_is_no_bubble() -> None:
    """A sum of tenths is not exact in floats; in fractions every rank of ZB-H2 is busy from start to end."""
    exact, inexact = (simulate(zb_h2(4, 20), Times(F=t, I=t, W=t)) for t in (Fraction(1, 10), 0.1))
    assert exact.span_bubble == 0
    assert inexact.span_bubble == pytest.approx(0, abs=1e-12)


def test_stages_may_differ() -> None:
    timeline = simulate(gpipe(3, 4), Times(F=[1, 3, 1], I=1, W=[1, 2, 0]))
    assert timeline.work == [4 * 3, 4 * 6, 4 * 2]
    assert timeline.makespan == 1 + 4 * 3 + 1 + 1 + 4 * 3 + 2


@given(st.integers(2, 5), st.integers(1, 8), st.integers(1, 4))
def test_a_narrow_link_delays_what_stands_behind(p: int, m: int, slow: int) -> None:
    """Messages that take as long as ``slow`` forwards come one after another; the first waits for none."""
    timeline = simulate(gpipe(p, m), Times(message_bytes=slow * 6, bandwidth=6))
    first = timeline.time(timeline.starts[1][0])
    assert first == 1 + slow
    for k in range(m):
        start = timeline.time(timeline.starts[1][k])
        assert start == (k + 1) + slow if slow <= 1 else start == 1 + slow * (k + 1)
    assert timeline.bytes_sent == 2 * m * (p - 1) * slow * 6


def test_both_directions_of_a_link_are_apart() -> None:
    wide, narrow = (Times(message_bytes=1, bandwidth=w) for w in (math.inf, 1))
    one_way = Schedule.of("one", [[("F", 0, 0)], [("F", 1, 0)]])
    assert [simulate(one_way, times).makespan for times in (wide, narrow)] == [2, 3]
    assert simulate(chimera(2, 2), narrow).makespan == simulate(chimera(2, 2), Times(send=1)).makespan


@pytest.mark.parametrize(
    "times, message",
    [
        (Times(F=[1, 2]), r"F has 2 times, and there are 4 stages: give one for each"),
        (Times(I=-1), r"I=-1: a time is a number from 0 on"),
        (Times(W=math.inf), r"W=inf: a time is a number"),
        (Times(F=[1, 1, math.nan, 1]), r"F=\[1, 1, nan, 1\]: a time is a number"),
    ],
)
def test_times_that_are_none_are_refused(times: Times, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        simulate(gpipe(4, 2), times)


@pytest.mark.parametrize(
    "given_", [{"send": -1}, {"bandwidth": 0}, {"message_bytes": -8}, {"send": math.nan}]
)
def test_links_that_are_none_are_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=rf"{next(iter(given_))}="):
        Times(**given_)


def test_an_overlapped_pair_takes_what_is_given_or_the_sum() -> None:
    pair = [[("F", 0, 0), (("F", 0, 1), ("B", 0, 0)), ("B", 0, 1)]]
    schedule = Schedule.of("pair", pair)
    assert simulate(schedule, Times(F=1, I=2, W=3)).makespan == 1 + 6 + 5
    assert simulate(schedule, Times(F=1, I=2, W=3, FB=4)).makespan == 1 + 4 + 5
    assert simulate(schedule).peak_in_flight() == [2]  # the forward keeps before the backward lets go


def test_the_cost_is_linear_in_the_actions() -> None:
    """Counted, not timed: how often an action is looked at, started or not."""
    looked_at = 0

    class Counting(tuple):
        def __getitem__(self, index: Any) -> Any:
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(index)

    for p, m in ((4, 16), (8, 64), (16, 128)):
        for generator in (gpipe, one_f_one_b, zb_h1, zb_v, dualpipe):
            schedule = generator(p, m)
            looked_at = 0
            rows = tuple(Counting(row) for row in schedule.rows)
            one_by_one(
                Schedule("counted", rows, schedule.n_stages, m), Ticks.of(Times(send=1), schedule.n_stages)
            )
            assert looked_at <= 2 * schedule.n_actions


def test_span_and_repr() -> None:
    timeline = simulate(gpipe(2, 1))
    assert [(span.rank, span.start, span.end, span.kind, span.label) for span in timeline.spans] == [
        (0, 0, 1, "F", "0F0"),
        (0, 4, 6, "B", "0B0"),
        (1, 1, 2, "F", "1F0"),
        (1, 2, 4, "B", "1B0"),
    ]
    assert repr(timeline) == "<timeline of GPipe, simulated: 6 long>"
    assert Action("F", 0, 0) in timeline.schedule.rows[0]
    assert set(timeline._repr_mimebundle_()) == {"text/html", "image/svg+xml", "text/plain"}
