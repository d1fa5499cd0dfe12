"""Pictures of collectives: what they show is what a run did, and what a formula says."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise
from math import ceil, log2

import pytest
import torch
import torch.distributed as dist

from lessons_lib import Mesh, run
from lessons_lib.errors import RefusedError
from lessons_lib.rings import ring_reduce_scatter
from lessons_lib.timeline import elements_sent
from lessons_lib.views import collective_step
from lessons_lib.views.colours import RANK_COLOURS, operation_colour
from lessons_lib.views.steps import Steps, Transfer
from lessons_lib.views.svg import WIDTH
from lessons_lib.widgets import recorded
from lessons_lib.widgets.recorded import COLLECTIVES, Collective, decoded, encoded, record

SVG = "{http://www.w3.org/2000/svg}"
SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16)
BYTES = 8  # of an element


def tree_rounds(p):
    return ceil(log2(p))


# What METHODS and the docstrings of rings.py claim: rounds, and elements that all ranks send together.
CLAIMS = {
    "ring all-reduce": (lambda p: 2 * (p - 1), lambda p, n: 2 * (p - 1) * n),
    "ring reduce-scatter": (lambda p: p - 1, lambda p, n: (p - 1) * n),
    "ring all-gather": (lambda p: p - 1, lambda p, n: (p - 1) * n),
    "star all-reduce": (lambda p: 2 * (p - 1), lambda p, n: 2 * (p - 1) * n),
    "tree broadcast": (tree_rounds, lambda p, n: (p - 1) * n),
    "tree reduce": (tree_rounds, lambda p, n: (p - 1) * n),
    "chain broadcast": (lambda p: p - 1, lambda p, n: (p - 1) * n),
    "chain reduce": (lambda p: p - 1, lambda p, n: (p - 1) * n),
}
RING_KINDS = {
    "ring all-reduce": "all_reduce",
    "ring reduce-scatter": "reduce_scatter",
    "ring all-gather": "all_gather",
    "chain broadcast": "broadcast",
    "chain reduce": "reduce",
}


def traced(name, ranks, n):
    """The bytes that each rank really sent, of a plain run that nobody watches."""
    collective = COLLECTIVES[name]

    def program():
        group = Mesh(ring=ranks)["ring"]
        pieces = ranks if collective.brings == "piece" else 1
        return collective.program(torch.ones(n // pieces, dtype=torch.long), group)

    trace = run(program, ranks=ranks).trace
    return [trace.bytes_sent(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_rounds_and_bytes_are_those_of_the_trace_and_of_the_formula(name, ranks):
    steps, n = record(name, ranks), 4 * ranks
    n_rounds, n_elements = CLAIMS[name]
    last = len(steps.rounds)
    sent = [steps.bytes_sent(rank, last) for rank in range(ranks)]
    assert last == n_rounds(ranks)
    assert sent == traced(name, ranks, n)
    assert sum(sent) == BYTES * n_elements(ranks, n)
    if name in RING_KINDS:
        assert sent == [BYTES * elements_sent(RING_KINDS[name], n, ranks, rank) for rank in range(ranks)]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_numbers_in_the_picture_are_those_of_the_trace(name):
    steps = record(name, 6)
    sent = traced(name, 6, 24)
    low, high = (f"{each:,}" for each in (min(sent), max(sent)))
    figure = collective_step(steps, len(steps.rounds))
    words = low if low == high else f"{low} to {high}"
    assert f"{words} bytes sent per rank, {sum(sent):,} by all." in figure.alt
    written = [each.text or "" for each in ET.fromstring(figure.svg).iter(f"{SVG}text")]
    tips = [each.text or "" for each in ET.fromstring(figure.svg).iter(f"{SVG}title")]
    assert any(each.startswith(f"{words} bytes = ") for each in tips)
    assert f"{len(steps.rounds)} rounds of {len(steps.rounds)}" in written


@pytest.mark.parametrize("n", [4, 7, 10, 33])
def test_sizes_that_ranks_do_not_divide(n):
    steps = record("ring all-reduce", 4, n)
    sent = [steps.bytes_sent(rank, len(steps.rounds)) for rank in range(4)]
    assert steps.chunk_bytes == tuple(BYTES * len(c) for c in torch.arange(n).tensor_split(4) if len(c))
    assert sent == [BYTES * elements_sent("all_reduce", n, 4, rank) for rank in range(4)]
    assert steps.state(len(steps.rounds)) == "copy"
    assert collective_step(steps, 2).svg


def test_what_ranks_hold_is_what_the_program_of_the_lesson_holds():
    """Lesson 01 writes the first half of the ring by hand, and stops it after some rounds."""

    def first_half(n_rounds):
        ring = Mesh(ring=4)["ring"]
        p, r = ring.size, ring.rank
        chunks = list(torch.full((p,), 10**r).chunk(p))
        for step in range(n_rounds):
            outgoing, incoming = (r - 1 - step) % p, (r - 2 - step) % p
            chunks[incoming] = chunks[incoming] + ring.shift(chunks[outgoing], by=1)
        return [frozenset(rank for rank in range(p) if int(chunk) // 10**rank % 10) for chunk in chunks]

    steps = record("ring reduce-scatter", 4)
    for n_rounds in range(3):  # after the last, a rank holds what it returned
        assert list(map(list, steps.held[n_rounds])) == run(first_half, n_rounds, ranks=4).values
    everybody = frozenset(range(4))
    assert steps.held[3] == tuple(
        tuple(everybody if chunk == rank else frozenset() for chunk in range(4)) for rank in range(4)
    )


def test_states_follow_the_thread_of_the_course():
    states = {
        name: [record(name, 4).state(s) for s in range(len(record(name, 4).rounds) + 1)]
        for name in COLLECTIVES
    }
    assert states["ring all-reduce"] == ["partial"] * 3 + ["cut"] * 3 + ["copy"]
    assert states["ring reduce-scatter"] == ["partial"] * 3 + ["cut"]
    assert states["ring all-gather"] == ["cut"] * 3 + ["copy"]
    assert states["star all-reduce"] == ["partial"] * 3 + ["root"] * 3 + ["copy"]
    assert states["tree broadcast"] == ["root", "root", "copy"]
    assert states["tree reduce"] == ["partial", "partial", "root"]
    doubling = [len(record("tree broadcast", 16).owners(step)) for step in range(5)]
    assert doubling == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("ranks", SIZES)
def test_a_ring_sends_only_to_the_neighbour_and_a_round_is_one_message_each(ranks):
    for name in COLLECTIVES:
        for sent in record(name, ranks).rounds:
            assert (
                len({each.source for each in sent}) == len({each.destination for each in sent}) == len(sent)
            )
            if name.startswith(("ring", "chain")):
                assert all((each.source + 1) % ranks == each.destination for each in sent)
            if name.startswith("ring"):
                assert len(sent) == ranks


# Programs that are not what they should be


def wrong(program, brings="all"):
    collective = Collective("wrong", program, brings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recorded.COLLECTIVES, "wrong", collective)
        return recorded.record.__wrapped__("wrong", 4)


def test_a_term_that_is_added_twice_is_noticed():
    def twice(x, group):
        if group.rank:
            group.send(x + x, 0)
            return None
        return sum((group.recv(x, other) for other in range(1, group.size)), x)

    with pytest.raises(RefusedError, match="rank 1 is in a sum 2 times"):
        wrong(twice)


def test_a_rank_that_sends_other_than_it_holds_is_noticed():
    def swapped(x, group):
        x = ring_reduce_scatter(x, group)
        if group.rank == 0:
            group.send(encoded(torch.tensor([0]), 0), 1)  # rank 0 holds more than its own by now
        if group.rank == 1:
            group.recv(torch.zeros(1, dtype=torch.long), 0)
        return x

    with pytest.raises(RefusedError, match=r"rank 0 sent element 0 with the contributions \[0\] and holds"):
        wrong(swapped)


def test_a_result_that_was_not_held_is_noticed():
    def short(x, group):
        ring_reduce_scatter(x, group)
        return x  # and not the sum

    with pytest.raises(RefusedError, match=r"returned element \d+ with \[\d\] and held"):
        wrong(short)


def test_values_say_where_they_stand_and_what_is_in_them():
    x = sum(encoded(torch.arange(64), rank) for rank in range(16))
    assert [decoded(int(v)) for v in x] == [(index, frozenset(range(16))) for index in range(64)]
    assert decoded(0) == (-1, frozenset())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("bubble sort", 4), "no collective is called 'bubble sort'; there are ring all-reduce"),
        (("ring all-reduce", 1), "ranks=1: a collective is shown on 2 to 16 ranks"),
        (("ring all-reduce", 17), "ranks=17"),
        (("ring all-gather", 4, 10), "n_elements=10: give 4 or more; an all-gather needs a multiple of 4"),
        (("ring all-reduce", 4, 3), "n_elements=3: give 4 or more"),
    ],
)
def test_what_a_recording_refuses(arguments, words):
    with pytest.raises(RefusedError, match=words):
        record(*arguments)


def test_what_a_picture_refuses():
    with pytest.raises(RefusedError, match="step=7: ring all-reduce has the steps 0 to 6"):
        collective_step(record("ring all-reduce", 4), 7)
    chunk = (frozenset({0}),)
    many = Steps("many", 27, (8,), ((Transfer(0, 1, (0,), 8, False),),), ((chunk,) * 27,) * 2, chunk)
    with pytest.raises(RefusedError, match="27 ranks with 1 chunks: a picture of a step shows 2 to 16 ranks"):
        collective_step(many, 0)


# The drawing


def cards(figure):
    """The boxes of the ranks."""
    found = [each for each in ET.fromstring(figure.svg).iter(f"{SVG}rect") if each.get("rx") == "8"]
    boxes = [tuple(float(each.get(k, 0)) for k in ("x", "y", "width", "height")) for each in found]
    return [box for box in boxes if box[2] < WIDTH]


def arrows(figure):
    """The points of all arrows, heads included."""
    for each in ET.fromstring(figure.svg):
        if (
            each.tag in (f"{SVG}polyline", f"{SVG}polygon")
            and operation_colour("send") in each.attrib.values()
        ):
            yield [tuple(map(float, point.split(","))) for point in each.get("points").split()]


@pytest.mark.parametrize("ranks", range(2, 17))
@pytest.mark.parametrize(
    "name", ["ring all-reduce", "tree broadcast", "tree reduce", "star all-reduce", "chain reduce"]
)
def test_no_arrow_passes_a_card(name, ranks):
    """The old picture of six ranks hid its arrows under the cards."""
    steps = record(name, ranks)
    for step in {1, 2, len(steps.rounds) // 2 + 1, len(steps.rounds)} & {*range(1, len(steps.rounds) + 1)}:
        figure = collective_step(steps, step)
        boxes = cards(figure)
        assert len(boxes) == ranks
        assert len(list(arrows(figure))) >= 2 * len(steps.rounds[step - 1])
        for points in arrows(figure):
            for (x0, y0), (x1, y1) in pairwise(points):
                for at in range(41):
                    px, py = x0 + (x1 - x0) * at / 40, y0 + (y1 - y0) * at / 40
                    assert 0 <= px <= WIDTH and 0 <= py <= figure.height
                    assert not any(x < px < x + w and y < py < y + h for x, y, w, h in boxes), (step, px, py)


def test_cards_do_not_overlap_and_stay_on_the_page():
    for name in COLLECTIVES:
        for ranks in range(2, 17):
            figure = collective_step(record(name, ranks), 1)
            boxes = cards(figure)
            for at, (x, y, w, h) in enumerate(boxes):
                assert x > 0 and x + w < WIDTH and y + h < figure.height
                for u, v, s, t in boxes[:at]:
                    assert x >= u + s or u >= x + w or y >= v + t or v >= y + h


def test_bars_fill_with_the_contributions():
    steps = record("ring reduce-scatter", 4)
    for step in range(4):
        for rank in range(4):
            for chunk, inside in enumerate(steps.held[step][rank]):
                letter = "ABCD"[chunk]
                tips = [t.text for t in ET.fromstring(collective_step(steps, step).svg).iter(f"{SVG}title")]
                what = "nothing" if not inside else "complete" if len(inside) == 4 else f"{len(inside)} of 4"
                assert any(tip.startswith(f"{letter} on rank {rank}: {what}") for tip in tips if tip)


def test_chunks_have_letters_and_no_colour_of_a_rank():
    figure = collective_step(record("ring all-reduce", 8), 9)
    root = ET.fromstring(figure.svg)
    coloured = [each for each in root.iter(f"{SVG}rect") if each.get("fill") in RANK_COLOURS]
    assert len(coloured) == 8  # the chips with the ranks' numbers
    letters = [each.text for each in root.iter(f"{SVG}text") if each.text in list("ABCDEFGH")]
    assert len(letters) == 8 * 8 + 8 + 1  # in the cards, on the arrows, in the legend


def test_a_golden_sentence():
    assert collective_step(record("ring all-reduce", 3), 3).alt == (
        "Ring all-reduce on 3 ranks after round 3 of 4: cut, each chunk is complete somewhere, and "
        "no rank holds all; A goes from rank 0 to 1 and is kept; B goes from rank 1 to 2 and is kept; C goes "
        "from rank 2 to 0 and is kept; 96 bytes sent per rank, 288 by all."
    )


def test_the_recording_of_a_learner_leaves_no_trace_behind():
    """The group that is watched belongs to one run."""
    record("chain broadcast", 2)
    sends = run(lambda: "send" in vars(dist.group.WORLD), ranks=2).values
    assert sends == [False, False]
