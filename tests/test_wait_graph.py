"""Who waits for whom: the graph says what the records say, and ends in what the deadlock was proved by."""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from lessons_lib import Mesh, compute, run
from lessons_lib.errors import DeadlockError, RankError, RefusedError, RunError
from lessons_lib.timeline import Waiting, Where
from lessons_lib.views import wait_graph
from lessons_lib.views.colours import THEMES
from lessons_lib.views.svg import WIDTH
from lessons_lib.views.waits import Standstill
from lessons_lib.widgets import wait_explorer
from lessons_lib.widgets.moments import change, moments

SVG = "{http://www.w3.org/2000/svg}"
HERE = Where("Cell In[3]", 4, "step", "dist.recv(x, src=1)")


def all_send_first():
    r, p = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(1)
    dist.all_reduce(x)
    dist.send(x, (r + 1) % p)
    dist.recv(x, (r - 1) % p)


def one_is_away():
    x = torch.ones(3)
    dist.all_reduce(x)
    if dist.get_rank() != 2:
        dist.all_reduce(x)
    return 7


def crossed():
    mesh = Mesh(row=2, col=2)
    for axis in ("row", "col") if mesh.rank in (0, 3) else ("col", "row"):
        mesh[axis].all_reduce(torch.ones(1))


def from_anyone():
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1))


def wait_too_early():
    r, p = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(torch.zeros(1), (r + 1) % p)
    sending.wait()
    dist.recv(torch.zeros(1), (r - 1) % p)


def one_behind():
    """Rank 0 waits for a collective that rank 1 has not come to, because it waits for a message."""
    r = dist.get_rank()
    if r == 1:
        dist.recv(torch.zeros(1), src=2)
    if r < 3:
        dist.barrier()


DEADLOCKS = [all_send_first, one_is_away, crossed, from_anyone, wait_too_early, one_behind]


def stopped(program, ranks=4):
    with pytest.raises(RunError) as caught:
        run(program, ranks=ranks)
    return caught.value


@pytest.mark.parametrize("program", DEADLOCKS)
def test_the_end_follows_from_the_records_and_is_what_the_deadlock_was_proved_by(program):
    error = stopped(program)
    assert isinstance(error, DeadlockError)
    from_records = moments(dataclasses.replace(error.run, error=None))[-1]
    proved = {each.rank: each for each in error.waiting}
    assert {each.rank: each for each in from_records.waiting} == proved
    assert moments(error)[-1].waiting == tuple(proved[rank] for rank in sorted(proved))


@pytest.mark.parametrize("program", DEADLOCKS)
@pytest.mark.parametrize("machine", [None, "4xH100"])
def test_moments_agree_with_the_lanes_of_the_run(program, machine):
    """The timeline is drawn from the same records by other code: who waits when must be the same."""
    with pytest.raises(DeadlockError) as caught:
        run(program, ranks=4, machine=machine)
    result = caught.value.run
    from lessons_lib.widgets.moments import _waits

    ours = sorted((each.event.rank, each.since) for each in _waits(result.trace))
    theirs = sorted((span.rank, span.start) for span in result.trace.timeline.spans if span.kind == "wait")
    assert [rank for rank, _ in ours] == [rank for rank, _ in theirs]
    assert [since for _, since in ours] == pytest.approx([since for _, since in theirs])


def test_a_circle_closes_at_the_end_and_not_before():
    stood = moments(stopped(all_send_first))
    assert stood[-1].cycle == (0, 1, 2, 3)
    assert all(each.cycle == () for each in stood[:-1])
    assert [each.missing for each in stood] == [[]] * len(stood)
    assert stood[0].waiting == ()


def test_the_rank_at_fault_is_not_among_those_that_report():
    error = stopped(one_is_away)
    last = moments(error)[-1]
    assert [each.rank for each in error.waiting] == [0, 1, 3]
    assert last.missing == [2] and last.what(2) == "ended" and last.cycle == ()
    alt = wait_explorer(error).figure.alt
    assert "rank 2 has returned; ranks 0, 1 and 3 wait in vain for rank 2, which has ended." in alt


def test_while_a_run_goes_well_ranks_wait_for_the_slower_ones_only():
    def slow_rank_2():
        if dist.get_rank() == 2:
            torch.ones(400, 400) @ torch.ones(400, 400)
        dist.barrier()
        return dist.get_rank()

    result = run(slow_rank_2, ranks=4, machine="4xH100")
    stood = moments(result)
    waiting = [{each.rank: each.missing for each in moment.waiting} for moment in stood]
    assert {0: (2,), 1: (2,), 3: (2,)} in waiting
    assert stood[-1].waiting == () and list(stood[-1].ended.values()) == [
        f"returned {rank}" for rank in range(4)
    ]


def test_data_on_the_way_are_waited_for_without_anybody_missing():
    result = run(lambda: dist.all_reduce(torch.ones(1000)), ranks=2, machine="2xH100")
    waiting = [each for moment in moments(result) for each in moment.waiting]
    assert waiting and all(each.missing == () for each in waiting)


def test_a_message_is_waited_for_until_it_is_sent_and_then_is_on_its_way():
    def late():
        x = torch.zeros(1)
        if dist.get_rank() == 0:
            compute(1e-3)
            dist.send(x, 1)
            compute(1e-3)
        else:
            dist.recv(x, 0)

    stood = moments(run(late, ranks=2, machine="2xH100"))
    assert [[(each.rank, each.missing) for each in moment.waiting] for moment in stood] == [
        [(1, (0,))],
        [(1, ())],
        [],
        [],
    ]
    assert change(stood[0], stood[1]) == "rank 0 has come"


def test_a_rank_that_raised_is_marked():
    def raises():
        if dist.get_rank() == 1:
            raise ValueError("oh")
        dist.barrier()

    error = stopped(raises, ranks=3)
    assert isinstance(error, RankError)
    last = moments(error)[-1]
    assert last.ended == {1: "raised ValueError"} and last.what(1) == "failed"
    assert last.missing == [1]


def test_changes_are_told():
    stood = moments(stopped(one_is_away))
    told = [change(before, after) for before, after in pairwise(stood)]
    assert any("rank 2 returned 7" in each for each in told)
    assert any("begins to wait for" in each for each in told)
    assert all(told)


def test_what_is_no_run_is_refused():
    with pytest.raises(
        RefusedError, match=r"got str: give the result of run\(...\), or the error that it raised"
    ):
        moments("all_send_first")


# The drawing


def waits(rank, *missing, operation="barrier(), #1 on world", where=HERE):
    return Waiting(rank, operation, "world", 1, missing, where)


def lines(figure):
    return list(ET.fromstring(figure.svg).iter(f"{SVG}polyline"))


def tips(figure):
    return [each.text or "" for each in ET.fromstring(figure.svg).iter(f"{SVG}title")]


def test_every_edge_is_an_arrow_and_alarming_ones_are_red():
    standstill = Standstill(4, (waits(0, 2), waits(1, 2, 3), waits(3, 1)), {2: "returned"}, cycle=(1, 3))
    figure = wait_graph(standstill, title="t")
    edges = {tip.partition(" in ")[0] for tip in tips(figure) if " waits for " in tip}
    assert edges == {
        "rank 0 waits for rank 2",
        "rank 1 waits for rank 2",
        "rank 1 waits for rank 3",
        "rank 3 waits for rank 1",
    }
    alarm = THEMES["light"].alarm
    assert [each.get("stroke") for each in lines(figure)].count(alarm) == 4
    harmless = wait_graph(Standstill(4, (waits(0, 2), waits(1, 3))), title="t")
    assert alarm not in [each.get("stroke") for each in lines(harmless)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_no_arrow_passes_a_rank_that_it_does_not_mean(ranks):
    every = tuple(waits(r, *(o for o in range(ranks) if o != r)) for r in range(ranks))
    figure = wait_graph(Standstill(ranks, every), title="t")
    root = ET.fromstring(figure.svg)
    discs = {}
    for each in root.iter(f"{SVG}rect"):
        tip = each.findtext(f"{SVG}title") or ""
        if tip.startswith("rank ") and tip.endswith(" waits") and each.get("width") == each.get("height"):
            radius = float(each.get("width")) / 2
            discs[int(tip.split()[1])] = float(each.get("x")) + radius, float(each.get("y")) + radius, radius
    assert sorted(discs) == list(range(ranks))
    for each in lines(figure):
        tip = each.findtext(f"{SVG}title") or ""
        ends = [int(word) for word in tip.partition(" in ")[0].split() if word.isdigit()]
        (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in each.get("points").split())
        for rank, (x, y, radius) in discs.items():
            if rank not in ends:
                near = min(
                    math.hypot(x0 + (x1 - x0) * k / 50 - x, y0 + (y1 - y0) * k / 50 - y) for k in range(51)
                )
                assert near >= radius, (tip, rank)


@pytest.mark.parametrize("ranks", [2, 9, 16, 64])
def test_large_groups_stay_on_the_page_and_are_quick(ranks):
    stood = moments(stopped(all_send_first, ranks=ranks))
    figure = wait_graph(stood[-1], title="t", moments=stood, moment=len(stood) - 1)
    for each in ET.fromstring(figure.svg).iter(f"{SVG}rect"):
        assert float(each.get("x", 0)) + float(each.get("width")) <= WIDTH
    assert figure.height < 800


def test_the_list_names_operation_and_line_and_goes_together():
    standstill = Standstill(4, (waits(0, 2), waits(1, 2), waits(3, 2)), {2: "returned 5"})
    figure = wait_graph(standstill, title="t")
    written = [each.text for each in ET.fromstring(figure.svg).iter(f"{SVG}text")]
    assert "ranks 0, 1 and 3 wait for rank 2" in written
    assert "in barrier(), #1 on world" in written
    assert "Cell In[3], line 4: dist.recv(x, src=1)" in written
    assert "rank 2 has returned" in written


def test_hostile_words_stay_text():
    where = Where("<b>", 1, "f", "</svg><script>alert(1)</script>")
    figure = wait_graph(Standstill(2, (waits(0, 1, operation="<x>", where=where),)), title="<t>")
    ET.fromstring(figure.svg)
    assert "<script>" not in figure.svg


def test_the_strip_shows_a_window_of_many_moments():
    stood = [Standstill(2, (waits(0, 1),) if at % 2 else ()) for at in range(400)]
    figure = wait_graph(stood[399], title="t", moments=stood, moment=399)
    shown = {tip for tip in tips(figure) if " at moment " in tip}
    assert len(shown) == 2 * 60 and "rank 0 waits at moment 399" in shown
