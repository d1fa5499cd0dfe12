"""Pictures: they show what they were given, everybody can see it, and no text breaks out of the SVG."""

import itertools
import re
import time
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessons_lib import views
from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.timeline import Event, Message, Span, Timeline, Traffic, Where
from lessons_lib.views import colours, lanes, layout_picture
from lessons_lib.views.axes import Rows, TimeAxis
from lessons_lib.views.bars import CLOSE, MARK, bars, is_crowded
from lessons_lib.views.cube import FADED
from lessons_lib.views.ranks import APART, LEFT, MOST_ROWS, RIGHT
from lessons_lib.views.svg import WIDTH, Figure, escape, fit, text_width

SVG = "{http://www.w3.org/2000/svg}"
HERE = Where("Cell In[3]", 4, "step", "dist.all_reduce(x)")


def parsed(figure):
    return ET.fromstring(figure.svg)


def titles(figure, containing=""):
    found = (each.findtext(f"{SVG}title") for each in parsed(figure))
    return [title for title in found if title is not None and containing in title]


def shapes(figure, containing):
    """The shapes whose hover title contains some words."""
    return [each for each in parsed(figure) if containing in (each.findtext(f"{SVG}title") or "")]


def texts(figure):
    return [written(each) for each in parsed(figure).iter(f"{SVG}text")]


def written(text):
    """The words of a text element, without its hover title."""
    return "".join([text.text or "", *(child.tail or "" for child in text)])


def event(rank, kind="all_reduce", group="world", members=(0, 1), sequence=1, bytes_sent=96, done=1.0):
    return Event(rank, kind, group, members, sequence, (4,), "float32", 4, bytes_sent, done, done, 0.0, HERE)


def steps(n_ranks, n_steps, kind="all_reduce"):
    """Ranks that compute, wait for the slowest and communicate, again and again."""
    spans, events, now = [], [], [0.0] * n_ranks
    for step in range(n_steps):
        for rank in range(n_ranks):
            length = 1e-4 * (1 + (rank * 7 + step * 3) % 5)
            spans.append(Span(rank, now[rank], now[rank] + length, "compute", "forward"))
            now[rank] += length
        together = max(now)
        for rank in range(n_ranks):
            if now[rank] < together:
                spans.append(Span(rank, now[rank], together, "wait"))
            spans.append(Span(rank, together, together + 2e-5, kind, f"step {step}"))
            now[rank] = together + 2e-5
            events.append(event(rank, kind, members=tuple(range(n_ranks)), sequence=step + 1, done=now[rank]))
    return Timeline(n_ranks, tuple(spans), (), "virtual"), events


def some_figures(theme):
    """One of everything, small and large, plain and hostile."""
    for n_ranks, n_steps in ((1, 1), (2, 3), (8, 5), (9, 2), (16, 4), (64, 3)):
        timeline, events = steps(n_ranks, n_steps)
        traffic = Traffic.of(events, n_ranks)
        yield lanes(timeline, traffic, title=f"{n_ranks} ranks, virtual", events=events, theme=theme)
    every = tuple(Span(0, at, at + 1, kind) for at, kind in enumerate([*colours.OPERATIONS, "wait", "odd"]))
    notes = [(0, 12, "raised ValueError"), (1, 7, "returned 3"), (2, 7, "")]
    message = Message(0, 1.0, 2, 3.0, "32 bytes")
    yield lanes(
        Timeline(3, every, (message,)), Traffic(3), title="t", notes=notes, failed=[0], cursor=2, theme=theme
    )
    for notation, shape, sizes in (
        ("D@row F@col", (4, 6), {"row": 2, "col": 3}),
        ("B@i@k D@j", (8, 6), {"i": 2, "j": 2, "k": 2}),
        ("B F +tp", (4, 6), {"dp": 2, "tp": 3}),
        ("B D", (4, 6), {"dp": 16}),
        ("B D@tp", (4, 64), {"tp": 64}),
        ("B@tp D", (64, 4), {"tp": 64}),
        ("B@row D@col", (64, 64), {"row": 8, "col": 8}),
        ("B F@row +col", (64, 64), {"row": 8, "col": 8}),
        ("B@dp S H@tp K", (4, 16, 8, 32), {"dp": 2, "tp": 4}),
        ("+dp", (), {"dp": 4}),
    ):
        yield layout_picture(Layout(notation), shape, sizes, theme=theme)


# Colours


def srgb(colour):
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


# Machado, Oliveira and Fernandes 2009, severity 1, on linear light.
SEEN = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "deuteranopia": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "tritanopia": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}


def lab(colour, sight):
    """CIE L*a*b* of a colour as someone sees it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb(colour)]
    r, g, b = (min(1, max(0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in SEEN[sight])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one, other, sight):
    return sum((a - b) ** 2 for a, b in zip(lab(one, sight), lab(other, sight), strict=True)) ** 0.5


@pytest.mark.parametrize("sight", SEEN)
def test_everybody_tells_colours_apart(sight):
    operations = {colour for colour, _ in colours.OPERATIONS.values()}
    for palette, least in ((operations, 9.5), (colours.RANK_COLOURS, 16), (colours.AXIS_COLOURS, 18)):
        for one, other in itertools.combinations(sorted(palette), 2):
            assert distance(one, other, sight) >= least, (one, other)


@pytest.mark.parametrize("sight", SEEN)
@pytest.mark.parametrize("theme", colours.THEMES.values(), ids=colours.THEMES)
def test_everybody_sees_what_a_cube_has_in_focus(sight, theme):
    """Axes against each other, against the ranks on none of them and the one in focus; pale ranks."""
    others = colours.mix(theme.panel, theme.hatch, 0.35), theme.ink
    for one, other in itertools.combinations([*colours.AXIS_COLOURS, *others], 2):
        assert distance(one, other, sight) >= 14, (one, other)
    pale = [colours.mix(theme.card, colour, FADED) for colour in colours.RANK_COLOURS]
    for one, other in itertools.combinations(pale, 2):
        assert distance(one, other, sight) >= 7, (one, other)


def test_families_and_passes_differ_in_lightness():
    for kinds in (
        "FIW",
        ("all_reduce", "reduce_scatter", "reduce"),
        ("send", "recv"),
        ("all_gather", "gather"),
    ):
        light = [lab(colours.operation_colour(kind), "normal")[0] for kind in kinds]
        assert all(abs(a - b) >= 15 for a, b in itertools.combinations(light, 2)), kinds


def test_a_colour_means_one_thing():
    named = {
        kind: colour for kind, (colour, _) in colours.OPERATIONS.items() if kind != "I"
    }  # I is part of B
    assert len(set(named.values())) == len(named)
    assert not set(named.values()) & {*colours.RANK_COLOURS, *colours.AXIS_COLOURS}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast_with_what_it_stands_on(theme):
    ground = colours.THEMES[theme]
    for figure in some_figures(theme):
        below = []
        for each in parsed(figure):
            kind = each.tag.removeprefix(SVG)
            if kind == "rect":
                x, y, w, h = (float(each.get(name, 0)) for name in ("x", "y", "width", "height"))
                fill = each.get("fill", "")
                below.append((x, y, w, h, ground.lane if fill.startswith("url") else fill))
            if kind == "text":
                x, y = float(each.get("x", 0)), float(each.get("y", 0))
                shift = {"end": -4, "middle": 0}.get(each.get("text-anchor", ""), 4)
                at_x, at_y = (x - 4, y) if each.get("transform") else (x + shift, y - 4)
                fill = next(
                    f for bx, by, w, h, f in reversed(below) if bx <= at_x <= bx + w and by <= at_y <= by + h
                )
                assert colours.contrast(each.get("fill", ""), fill) >= 4.5, (
                    each.text,
                    each.get("fill"),
                    fill,
                )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_a_readable_size_and_stays_on_the_card(theme):
    for figure in some_figures(theme):
        for each in parsed(figure).iter(f"{SVG}text"):
            size = float(each.get("font-size", 0))
            assert size in (12, 13, 14, 17)
            x, words = float(each.get("x", 0)), written(each)
            if not each.get("transform"):
                width = text_width(words, size, each.get("font-weight") == "700")
                left = x - width * {"middle": 0.5, "end": 1}.get(each.get("text-anchor", ""), 0)
                assert left >= 0 and left + width <= WIDTH, words


# The figure


def test_a_figure_describes_itself():
    figure = Figure("Title", "It shows this.", theme="dark")
    figure.rect(0, 50, 10, 10, "#000000")
    root = parsed(figure)
    assert (
        root.get("role") == "img" and root.get("width") == "900" and root.get("height") == str(figure.height)
    )
    by_id = {each.get("id"): each.text for each in root.iter() if each.get("id")}
    assert [by_id[name] for name in root.get("aria-labelledby", "").split()] == ["Title", "It shows this."]
    bundle = figure._repr_mimebundle_()
    assert bundle == {"text/html": figure.html, "image/svg+xml": figure.svg, "text/plain": "It shows this."}
    assert colours.THEMES["dark"].card in figure.svg
    with pytest.raises(RefusedError, match="theme='blue': there are 'light' and 'dark'"):
        Figure("Title", "", theme="blue")


def test_on_a_page_a_figure_is_never_too_small_to_read_and_as_an_image_never_cut():
    figure = Figure("Title", "It shows this.")
    box = ET.fromstring(figure.html)
    (picture,) = box
    assert box.get("style") == "overflow-x:auto"  # in a column of 470 pixels it scrolls
    assert picture.get("style") == "width:100%;max-width:900px;min-width:640px;height:auto"
    assert 12 * 640 / WIDTH > 8  # pixels of the smallest text
    style = parsed(figure).get("style") or ""
    assert "min-width" not in style and not re.search(r"(?<!-)width", style)  # a browser would crop it


def test_ids_are_the_same_for_the_same_figure_and_differ_between_figures():
    def draw(label, theme="light"):
        return lanes(Timeline(1, (Span(0, 0, 1, "wait", label),)), title="t", theme=theme)

    ids = [
        set(re.findall(r'id="([^"]+)"', draw(*args).svg)) for args in (("a",), ("a",), ("b",), ("a", "dark"))
    ]
    assert len(ids[0]) == 3 and ids[0] == ids[1]
    assert not ids[0] & ids[2] and not ids[0] & ids[3]
    svg = draw("a").svg
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids[0]


HOSTILE = "<script>alert('x')</script> & \"quoted\" ]]> \x00\x07 \ud800 é 漢字"


def test_hostile_labels_stay_text():
    timeline = Timeline(2, (Span(0, 0, 1, HOSTILE, HOSTILE),), (Message(0, 0, 1, 1, HOSTILE),))
    traffic = Traffic.of([event(0, HOSTILE, HOSTILE)], 2)
    figures = [
        lanes(timeline, traffic, title=HOSTILE, subtitle=HOSTILE, notes=[(0, 1, HOSTILE)]),
        layout_picture(Layout("B@tp"), (4,), {"tp": 2}, name=HOSTILE),
    ]
    for figure in figures:
        assert "<script" not in figure.svg
        assert {each.tag for each in parsed(figure).iter()} <= {
            SVG + name
            for name in ("svg", "title", "desc", "defs", "pattern", "rect", "text", "polyline", "polygon")
        }
        assert any("<script>" in text for text in texts(figure))


@given(st.text(st.characters(codec=None)))
def test_whatever_is_escaped_parses(text):
    assert ET.fromstring(f'<a b="{escape(text)}">{escape(text)}</a>') is not None


@given(st.text(max_size=40), st.integers(0, 400), st.booleans())
def test_text_that_is_fitted_fits(text, width, bold):
    shown = fit(text, width, 13, bold)
    assert text_width(shown, 13, bold) <= width or shown == ""
    assert shown == text or shown == "" or shown.endswith("…")


def test_text_width_is_not_below_that_of_a_wide_font():
    from matplotlib.font_manager import FontProperties, findfont  # brings DejaVu Sans along
    from matplotlib.ft2font import FT2Font, LoadFlags

    words = [
        "all_reduce",
        "reduce_scatter",
        "bytes sent per rank",
        "1,234,567",
        "row=1, col=2",
        "rank 63",
        "8 × 12 = 96",
    ]
    for bold in (False, True):
        font = FT2Font(findfont(FontProperties(family="DejaVu Sans", weight=700 if bold else 400)))
        font.set_size(1000, 72)
        for text in words:
            font.set_text(text, 0, flags=LoadFlags.NO_HINTING)
            true = font.get_width_height()[0] / 64 / 1000 * 13
            assert true - 1 <= text_width(text, 13, bold) <= 1.12 * true + 2


# Lanes


def test_widths_are_proportional_to_durations():
    spans = (
        Span(0, 0.0, 1.0, "compute", "a"),
        Span(0, 1.0, 4.0, "wait", "b"),
        Span(1, 2.0, 4.0, "all_reduce", "c"),
    )
    figure = lanes(Timeline(2, spans), title="t")
    per_second = (RIGHT - LEFT) / 4
    for span in spans:
        (bar,) = shapes(figure, f": {span.label}")
        x, width = float(bar.get("x", 0)), float(bar.get("width", 0))
        assert x == pytest.approx(LEFT + span.start * per_second, abs=0.1)
        assert width == pytest.approx((span.end - span.start) * per_second, abs=0.7)
    assert shapes(figure, "waiting, 1 to 4 s, 3 s: b")[0].get("fill", "").startswith("url(#")


def test_every_rank_has_its_lane_and_every_span_lies_in_it():
    timeline, events = steps(8, 5)
    figure = lanes(timeline, title="t", events=events)
    chips = {
        int(title.split()[1]): float(bar.get("y", 0))
        for title in titles(figure)
        if re.fullmatch(r"rank \d", title)
        for bar in shapes(figure, title)
        if bar.findtext(f"{SVG}title") == title
    }
    assert sorted(chips) == list(range(8))
    for rank, top in chips.items():
        bars = shapes(figure, f"rank {rank}, ")
        assert len(bars) == sum(span.rank == rank for span in timeline.spans)
        assert {round(float(bar.get("y", 0)) + float(bar.get("height", 0)) / 2 - top) for bar in bars} == {9}


def test_what_takes_no_time_is_seen():
    spans = tuple(Span(0, at, at, "all_reduce", f"number {at}") for at in (0.0, 0.5, 1.0))
    for bar in shapes(lanes(Timeline(1, spans), title="t"), "number"):
        x, width = float(bar.get("x", 0)), float(bar.get("width", 0))
        assert width == MARK and LEFT <= x <= RIGHT - MARK + 0.1


def test_short_spans_are_merged_and_counted():
    spans = (Span(1, 0, 10_000, "compute"), *(Span(0, at, at + 1, "compute") for at in range(10_000)))
    figure = lanes(Timeline(2, spans), title="t")
    (bar,) = shapes(figure, "10000 × compute, 0 to 10,000 s")
    assert float(bar.get("width", 0)) == pytest.approx(RIGHT - LEFT, abs=1)


def test_short_spans_far_apart_stay_apart():
    spans = (Span(0, 0, 1, "compute"), Span(0, 5000, 5001, "compute"), Span(1, 0, 10_000, "compute"))
    assert len(shapes(lanes(Timeline(2, spans), title="t"), "rank 0, compute")) == 2


def test_two_kinds_of_short_spans_are_not_mixed_up():
    spans = tuple(Span(0, at, at + 1, "wait" if at % 2 else "compute") for at in range(4000))
    kinds = [
        title.split(" × ")[1].split(",")[0] for title in titles(lanes(Timeline(1, spans), title="t"), " × ")
    ]
    assert set(kinds) == {"waiting", "compute"}


def busy(n_ranks, n_steps):
    """Ranks that work, and meet in collectives that take no time."""
    spans, events = [], []
    for step in range(n_steps):
        for rank in range(n_ranks):
            spans.append(Span(rank, step, step + 1.0, "compute"))
            spans.append(Span(rank, step + 0.5, step + 0.5, "all_reduce"))
            events.append(
                event(rank, members=tuple(range(n_ranks)), sequence=step + 1, done=step + 0.5, bytes_sent=1)
            )
    return Timeline(n_ranks, tuple(spans)), events


def areas(figure, colour):
    """The rectangles of a colour that bars and ticks cover: x, y, width, height."""
    for each in parsed(figure):
        if each.get("fill") == colour and each.tag == f"{SVG}rect":
            yield tuple(float(each.get(name, 0)) for name in ("x", "y", "width", "height"))
        elif each.get("fill") == colour and each.tag == f"{SVG}path":
            for x, y, width, height in re.findall(
                r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h", each.get("d", "")
            ):
                yield float(x), float(y), float(width), float(height)


VIOLET = colours.operation_colour("all_reduce")


@pytest.mark.parametrize("n_ranks, n_steps", [(4, 500), (16, 300), (4, 3000)])
def test_many_collectives_are_ticks_above_the_lanes_and_hide_no_work(n_ranks, n_steps):
    timeline, events = busy(n_ranks, n_steps)
    figure = lanes(timeline, title="t", events=events)
    tops = {y: height for _, y, width, height in areas(figure, colours.THEMES["light"].lane) if width > 700}
    assert len(tops) == n_ranks
    ticks = [box for box in areas(figure, VIOLET) if box[1] > 70]  # without the key in the legend
    assert len(ticks) >= n_ranks * min(n_steps, 400)
    for _, y, width, height in ticks:
        assert width <= 1.0 and height <= 6.1
        assert any(y + height == pytest.approx(top, abs=0.15) for top in tops)
    lines = shapes(figure, "all_reduce on world")
    assert len(lines) <= (RIGHT - LEFT) / APART + 1
    assert sum(float(line.get("stroke-width", 1)) for line in lines) <= 0.1 * (RIGHT - LEFT)
    assert f"{n_steps:,} all_reduce per rank" in texts(figure)
    assert "all_reduce" not in texts(figure)


def test_lines_are_thinned_where_there_are_many_and_only_there():
    few, many = (shapes(lanes(t, title="t", events=e), " on world") for t, e in (busy(4, 40), busy(4, 500)))
    assert len(few) == 40  # 20 pixels apart
    assert 10 <= len(many) <= 40
    xs = [float(line.get("points", "").split(",")[0]) for line in many]
    assert min(b - a for a, b in itertools.pairwise(xs)) >= APART - 0.1


def test_three_marks_in_a_row_make_a_crowd_two_do_not():
    axis = TimeAxis.until(100.0, 0, 100)  # a pixel is a second

    def crowd(*times, rank=0):
        return is_crowded([Span(rank, at, at, "all_reduce") for at in times], axis)

    assert not crowd(10, 11) and not crowd(10, 11, 10 + 2 * CLOSE) and crowd(10, 11, 9 + 2 * CLOSE)
    assert not is_crowded([Span(at, at, at, "send") for at in range(8)], axis)  # each in its own lane
    assert not is_crowded([Span(0, at, at + 3, "send") for at in range(0, 90, 3)], axis)  # it takes time
    assert not is_crowded([Span(0, at, at, "compute") for at in range(8)], axis)


def test_few_collectives_are_bars_through_their_lanes_and_the_legend_says_so():
    timeline, events = busy(2, 5)
    figure = lanes(timeline, title="t", events=events)
    bars_ = [box for box in areas(figure, VIOLET) if box[1] > 70]
    assert len(bars_) == 10 and all(height > 27 for *_, height in bars_)
    assert "all_reduce" in texts(figure) and not any("per rank" in text for text in texts(figure))


def test_stripes_are_as_wide_as_their_time_is_long():
    spans = []
    for at in range(3000):  # one part work, three parts waiting
        spans += [Span(0, at, at + 0.25, "compute"), Span(0, at + 0.25, at + 1, "wait")]
    drawn = bars(spans, TimeAxis.until(3000.0, LEFT, RIGHT), 1)
    for kind, share in (("compute", 0.25), ("wait", 0.75)):
        width = sum(bar.end_x - bar.x for bar in drawn if bar.span.kind == kind)
        assert width == pytest.approx(share * (RIGHT - LEFT), rel=0.02)
        assert sum(bar.n_spans for bar in drawn if bar.span.kind == kind) == pytest.approx(3000, rel=0.05)
    half = [bar for bar in drawn if bar.end_x < (LEFT + RIGHT) / 2 and bar.span.kind == "compute"]
    assert sum(bar.end_x - bar.x for bar in half) == pytest.approx((RIGHT - LEFT) / 8, rel=0.05)


def test_the_legend_has_only_what_occurs():
    def legend(*kinds, messages=()):
        figure = lanes(Timeline(1, tuple(Span(0, 0, 1, kind) for kind in kinds), messages), title="t")
        return [text for text in texts(figure) if not re.fullmatch(r"t|rank|[\d.]+|.* time \(.*\)", text)]

    assert legend() == []
    assert legend("wait", "all_reduce", "compute") == ["compute", "all_reduce", "waiting"]
    assert legend("compute", messages=(Message(0, 0, 0, 1),)) == ["compute", "message"]
    assert legend("F", "W", "I", "odd") == ["forward", "input gradient", "weight gradient", "odd"]


def test_messages_are_arrows_from_lane_to_lane():
    spans = (Span(0, 0, 4, "compute"), Span(1, 0, 4, "compute"))
    figure = lanes(
        Timeline(2, spans, (Message(0, 1.0, 1, 3.0, "down"), Message(1, 1.0, 0, 1.0, "up"))), title="t"
    )
    line, head = shapes(figure, "rank 0 to rank 1, sent at 1 s: down")
    (x0, y0), _ = (map(float, point.split(",")) for point in line.get("points", "").split())
    x1, y1 = map(float, head.get("points", "").split()[0].split(","))
    per_second = (RIGHT - LEFT) / 4
    assert x0 == pytest.approx(LEFT + per_second, abs=0.1) and x1 == pytest.approx(
        LEFT + 3 * per_second, abs=0.1
    )
    assert y1 > y0
    _, head = shapes(figure, "rank 1 to rank 0")
    assert float(head.get("points", "").split()[0].split(",")[1]) < y1


def test_of_very_many_messages_some_are_drawn_and_the_legend_says_how_many():
    def chatter(n):
        spans = [Span(rank, at, at, kind) for rank, kind in ((0, "send"), (1, "recv")) for at in range(n)]
        messages = tuple(Message(0, float(at), 1, float(at)) for at in range(n))
        return lanes(Timeline(2, (*spans, Span(0, 0, n, "compute")), messages), title="t")

    few, many = chatter(20), chatter(1000)
    drawn = len(shapes(many, "rank 0 to rank 1")) // 2  # a line and a head
    assert len(shapes(few, "rank 0 to rank 1")) == 40 and not any("messages" in word for word in texts(few))
    assert 20 <= drawn <= (RIGHT - LEFT) / APART + 1
    assert f"{drawn} of 1,000 messages" in texts(many) and "with 1,000 messages between them" in many.alt


def test_lanes_that_meet_are_joined_and_others_are_not():
    timeline = Timeline(4, tuple(Span(rank, 0.0, 1.0, "all_reduce") for rank in range(4)))
    events = [event(rank, group="row", members=(rank // 2 * 2, rank // 2 * 2 + 1)) for rank in range(4)]
    joined = shapes(lanes(timeline, title="t", events=events), "all_reduce on row, ranks ")
    assert [
        title.split(", ")[1] for title in titles(lanes(timeline, title="t", events=events), " on row")
    ] == [
        "ranks 0 and 1",
        "ranks 2 and 3",
    ]
    ends = [[float(point.split(",")[1]) for point in line.get("points", "").split()] for line in joined]
    assert len(joined) == 2 and max(ends[0]) < min(ends[1])
    stuck = lanes(timeline, title="t", events=[event(rank, members=(0, 1, 2, 3)) for rank in (0, 1, 3)])
    assert shapes(stuck, "all_reduce on world") == []


def test_the_line_of_a_collective_has_no_gaps():
    timeline, events = busy(4, 3)
    figure = lanes(timeline, title="t", events=events)
    tops = sorted(y for _, y, width, _ in areas(figure, colours.THEMES["light"].lane) if width > 700)
    for line in shapes(figure, "all_reduce on world, ranks 0 to 3"):
        (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in line.get("points", "").split())
        assert x0 == x1 and y0 < tops[0] and y1 > tops[-1] + 27
        marks = [box for box in areas(figure, VIOLET) if abs(box[0] + box[2] / 2 - x0) < 0.2]
        assert len(marks) == 4  # the bars of the lanes stand on the line, and are as wide
        assert {box[2] for box in marks} == {float(line.get("stroke-width", 0))}


def test_a_line_passes_behind_the_lanes_that_are_not_in_the_group():
    spans = tuple(Span(rank, 0.0, 2.0, "compute") for rank in range(3))
    events = [event(rank, members=(0, 2)) for rank in (0, 2)]
    figure = lanes(Timeline(3, spans), title="t", events=events)
    pieces = shapes(figure, "all_reduce on world, ranks 0 and 2")
    ends = [[float(point.split(",")[1]) for point in each.get("points", "").split()] for each in pieces]
    (lane,) = shapes(figure, "rank 1, compute")
    top, bottom = float(lane.get("y", 0)), float(lane.get("y", 0)) + float(lane.get("height", 0))
    assert len(ends) == 2 and max(ends[0]) < top and bottom < min(ends[1])
    order = list(parsed(figure))
    at = [n for n, each in enumerate(order) if each.get("stroke") == VIOLET]
    (work,) = [n for n, each in enumerate(order) if "rank 1, compute" in (each.findtext(f"{SVG}title") or "")]
    assert at[0] < work < at[1]  # first the piece between, below the work; then those of the members
    assert [float(p.split(",")[1]) for p in order[at[0]].get("points", "").split()] == [
        ends[0][1],
        ends[1][0],
    ]


def test_the_axis_of_a_virtual_clock_reads_well():
    timeline = Timeline(
        2, (Span(0, 0.0, 4e-3, "compute"), Span(1, 0.0, 4e-3, "wait")), (), "virtual (4xH100)"
    )
    figure = lanes(timeline, title="step on 2 ranks, virtual (4xH100)")
    assert "time on 4xH100 (ms), virtual" in texts(figure)
    assert figure.alt == (
        "step on 2 ranks, virtual (4xH100): lanes of 2 ranks over 4 ms of virtual time on 4xH100."
    )


def test_notes_stand_in_a_column_beside_the_lanes():
    long = "returned {'loss': 1.2345678, 'accuracy': 0.5}"
    notes = [(0, 1.0, "stopped"), (1, 4.0, long)]
    figure = lanes(Timeline(2, (Span(0, 0, 1, "compute"), Span(1, 0, 4, "compute"))), title="t", notes=notes)
    lanes_end = max(x + width for x, _, width, _ in areas(figure, colours.THEMES["light"].lane))
    column = [each for each in parsed(figure).iter(f"{SVG}text") if float(each.get("x", 0)) > lanes_end]
    assert len({each.get("x") for each in column}) == 1
    short, cut = column
    assert written(short) == "stopped" and short.find(f"{SVG}title") is None
    assert written(cut).endswith("…") and cut.findtext(f"{SVG}title") == long
    assert len(shapes(figure, f"rank 1 at 4 s: {long}")) == 1


def curve_of(figure, rank):
    (area,) = shapes(figure, f"rank {rank}, memory: ")
    return [tuple(map(float, point.split(","))) for point in area.get("points", "").split()]


def test_memory_lies_below_its_own_lane_on_one_scale():
    spans = (Span(0, 0.0, 4.0, "compute"), Span(1, 0.0, 3.0, "compute"))
    memory = [[(0.0, 0), (1.0, 8_000_000), (2.0, 2_000_000), (9.0, 99)], [(0.0, 4_000_000)]]
    figure = lanes(Timeline(2, spans), title="t, measured", memory=memory)
    lane = [float(shapes(figure, f"rank {rank}, compute")[0].get("y", 0)) for rank in (0, 1)]
    outlines = [curve_of(figure, rank) for rank in (0, 1)]
    for rank, outline in enumerate(outlines):
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(outline))  # steps, no slopes
        floor = max(y for _, y in outline)
        assert lane[rank] + 27 <= min(y for _, y in outline)
        assert rank == 1 or floor < lane[1]
    heights = [max(y for _, y in outline) - min(y for _, y in outline) for outline in outlines]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)  # 8 MB and 4 MB
    end_x = shapes(figure, "rank 0, compute")[0]
    per_second = (float(end_x.get("width", 0)) + 0.6) / 4
    at = {round((x - LEFT) / per_second, 1) for x, _ in outlines[0]}
    assert at == {0.0, 1.0, 2.0, 4.0}  # what is released after the end is not drawn
    assert {round((x - LEFT) / per_second, 1) for x, _ in outlines[1]} == {0.0, 3.0}
    floor = max(y for _, y in outlines[0])
    level = {x: floor - y for x, y in outlines[0]}  # after the step at x
    assert level[outlines[0][-2][0]] == 0
    assert (floor - outlines[0][-2][1]) == pytest.approx(heights[0] / 4, abs=0.2)  # 2 MB at the end
    assert {"peak 8 MB", "peak 4 MB", "memory, at most 8 MB", "memory"} <= set(texts(figure))
    assert figure.alt == (
        "t, measured: lanes of 2 ranks over 4 s of measured time; memory peaks at 4 MB to 8 MB on each rank."
    )
    without = lanes(Timeline(2, spans), title="t, measured")
    assert "memory" not in without.svg and "peak" not in without.svg


def test_a_peak_of_memory_shorter_than_a_pixel_is_seen():
    memory = [[(at / 1000, 5 if at != 4321 else 10) for at in range(10_000)]]
    figure = lanes(Timeline(1, (Span(0, 0.0, 10.0, "compute"),)), title="t", memory=memory)
    ys = sorted({y for _, y in curve_of(figure, 0)})
    assert len(ys) == 3 and ys[2] - ys[0] == pytest.approx(2 * (ys[2] - ys[1]), abs=0.2)
    assert len(curve_of(figure, 0)) < 20


@pytest.mark.parametrize("n_ranks", [1, 8, 16, 64])
def test_lanes_ticks_and_memory_do_not_overlap(n_ranks):
    for rows in (Rows.below(0, n_ranks, ticks=True, memory=memory) for memory in (False, True)):
        for rank in range(n_ranks - 1):
            assert rows.floor(rank) <= rows.y(rank + 1) - rows.tick - 0.5
        assert rows.floor(n_ranks - 1) <= rows.bottom


def test_a_run_shows_its_memory_if_it_was_recorded():
    from lessons_lib import run

    def step():
        import torch

        return float(torch.ones(1000).sum())

    assert "memory peaks at 4" in run(step, ranks=2, record="memory").picture().alt
    assert "memory" not in run(step, ranks=2).picture().alt


def test_the_traffic_table():
    events = [
        event(0, bytes_sent=1000),
        event(1, bytes_sent=2000),
        event(0, "send", "a group", bytes_sent=5),
        event(1, "recv", "a group", bytes_sent=0),
    ]
    figure = lanes(Timeline(2, ()), Traffic.of(events, 2), title="t, measured")
    table = texts(figure)[texts(figure).index("communication") :]
    assert table == [
        *("communication", "group", "calls per rank", "bytes sent per rank"),
        *("all_reduce", "world", "1", "1,000 to 2,000"),
        *("send", "a group", "0 to 1", "0 to 5"),
        *("recv", "a group", "0 to 1", "0"),
        *("total", "2", "1,005 to 2,000"),
    ]
    assert figure.alt == (
        "t, measured: lanes of 2 ranks over 0 µs of measured time; each rank sends 1,005 to 2,000 bytes in "
        "1 all_reduce on world, 0 to 1 send on a group, 0 to 1 recv on a group."
    )


def test_no_communication_is_said():
    figure = lanes(Timeline(2, ()), Traffic(2), title="t")
    assert "No communication: no rank sent anything." in texts(figure)
    assert figure.alt == "t: lanes of 2 ranks over 0 µs of measured time; the ranks did not communicate."


def test_a_long_table_is_cut_but_its_total_is_not():
    events = [event(0, group=f"group {at}", members=(0,), bytes_sent=10) for at in range(MOST_ROWS + 5)]
    figure = lanes(Timeline(1, ()), Traffic.of(events, 1), title="t")
    words = texts(figure)
    assert words.count("all_reduce") == MOST_ROWS and "5 further rows, in the total" in words
    assert words[-3:] == ["total", "21", "210"]


def test_a_long_group_name_is_cut_and_whole_on_hover():
    name = "the tensor parallel group of the third replica of the data parallel mesh"
    figure = lanes(Timeline(1, ()), Traffic.of([event(0, group=name, members=(0,))], 1), title="t")
    (shown,) = (each for each in parsed(figure).iter(f"{SVG}text") if each.findtext(f"{SVG}title") == name)
    words = written(shown)
    assert words.endswith("…") and name.startswith(words[:-1]) and len(words) > 25


def test_a_failed_run_says_how_each_rank_ended():
    notes = [(0, 1.0, "waits for rank 2"), (1, 1.0, "waits for rank 2"), (2, 0.5, "raised ValueError")]
    figure = lanes(Timeline(3, ()), title="t", notes=notes, failed=[2])
    assert [text for text in texts(figure) if "rank 2" in text or "raised" in text] == [
        text for *_, text in notes
    ]
    assert figure.alt.endswith("; ranks 0 and 1: waits for rank 2; rank 2: raised ValueError.")
    marks = {mark.get("fill") for mark in shapes(figure, "rank 2 at 0.5 s: raised ValueError")}
    assert colours.THEMES["light"].alarm in marks
    assert colours.THEMES["light"].alarm not in {mark.get("fill") for mark in shapes(figure, "rank 0 at 1 s")}


def test_notes_and_rank_labels_do_not_overlap_at_64_ranks():
    notes = [(rank, 1.0, "stands still") for rank in range(64)]
    figure = lanes(Timeline(64, ()), title="t", notes=notes, failed=range(64))
    for words in ("stands still", "rank "):
        found = [each for each in parsed(figure).iter(f"{SVG}text") if written(each).startswith(words)]
        ys = sorted(float(each.get("y", 0)) for each in found)
        assert len(ys) >= 16 and min(b - a for a, b in itertools.pairwise(ys)) >= 14
    assert len(shapes(figure, "stands still")) >= 64


def test_pictures_can_share_an_axis():
    short, long = Timeline(1, (Span(0, 0, 1, "compute"),)), Timeline(1, (Span(0, 0, 2, "compute"),))
    widths = [
        float(shapes(lanes(t, title="t", until=2), "compute")[0].get("width", 0)) for t in (short, long)
    ]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.8)


@given(st.floats(1e-9, 1e6))
def test_ticks_are_few_round_and_inside(end):
    axis = TimeAxis.until(end, 0, 100)
    ticks = axis.ticks()
    assert ticks[0] == 0 and ticks[-1] <= end * (1 + 1e-9) and 4 <= len(ticks) <= 11
    step = f"{(ticks[1] - ticks[0]) / axis.per_unit:.0e}"
    assert step[0] in "125"
    assert len({axis.number(tick) for tick in ticks}) == len(ticks)


@pytest.mark.parametrize(
    "end, unit", [(0.0, "µs"), (9e-4, "µs"), (1e-3, "ms"), (0.5, "ms"), (1.0, "s"), (90.0, "s")]
)
def test_the_unit_fits_the_size(end, unit):
    assert TimeAxis.until(end, 0, 1).unit == unit


def test_a_large_picture_is_quick_and_small():
    timeline, events = steps(8, 64)
    traffic = Traffic.of(events, 8)

    def seconds():  # of this thread: the machine may be busy with others
        began = time.thread_time()
        lanes(timeline, traffic, title="t", events=events)._repr_mimebundle_()
        return time.thread_time() - began

    assert sorted(seconds() for _ in range(5))[2] < 0.025
    assert len(timeline.spans) > 1000 and len(lanes(timeline, traffic, title="t").svg) < 400_000
    timeline, events = steps(64, 100)
    assert len(timeline.spans) > 15_000
    assert len(lanes(timeline, Traffic.of(events, 64), title="t", events=events).svg) < 1_000_000


# Layouts


def test_the_picture_of_a_layout_names_every_owner():
    figure = layout_picture(Layout("B D@col"), (4, 6), {"row": 2, "col": 2}, name="X", rank=3)
    assert set(titles(figure, "X[")) == {
        "X[0, 0] on ranks 0 and 2: 2 copies",
        "X[0, 1] on ranks 1 and 3: 2 copies",
    }
    assert texts(figure).count("and") == 2 and texts(figure).count("2 copies") == 2
    assert "=" not in texts(figure)  # copies are not an equation
    assert figure.alt == (
        "Layout B D@col of X, 4 × 6, on a mesh of row=2, col=2: dim D is cut over col into 2 blocks of 3; "
        "2 copies along row; each rank holds 4 × 3, which is 1/2 of the elements."
    )


def test_a_layout_may_be_given_as_its_notation():
    sizes = {"row": 2, "col": 3}
    by_notation, by_layout = (layout_picture(w, (4, 6), sizes) for w in ("D F@col", Layout("D F@col")))
    assert by_notation.svg == by_layout.svg


def test_many_copies_are_listed_with_commas():
    words = texts(layout_picture("D", (8,), {"dp": 4}))
    at = words.index("4 copies")
    assert words[at - 7 : at] == ["0", ",", "1", ",", "2", "and", "3"]


def test_names_of_dims_stand_beside_the_blocks_and_blocks_fill_the_card():
    for notation in ("D F@col", "D@row F@col", "D F"):
        figure = layout_picture(notation, (4, 6), {"row": 2, "col": 3})
        boxes = [
            [float(box.get(name, 0)) for name in ("x", "y", "width", "height")]
            for box in shapes(figure, "W[")
        ]
        left, top = min(box[0] for box in boxes), min(box[1] for box in boxes)
        bottom = max(y + height for _, y, _, height in boxes)
        (name,) = (each for each in parsed(figure).iter(f"{SVG}text") if each.text == "D = 4")
        assert "rotate(-90" in name.get("transform", "")
        assert float(name.get("x", 0)) < left < float(name.get("x", 0)) + 85
        assert float(name.get("y", 0)) == pytest.approx((top + bottom) / 2, abs=15)
        assert figure.height - bottom < 45


def test_blocks_lie_where_the_tensor_is_cut():
    layout, shape, sizes = Layout("B@a@b D@c"), (8, 6), {"a": 2, "b": 2, "c": 3}
    figure = layout_picture(layout, shape, sizes, rank=7)
    boxes = {}
    for box in shapes(figure, "W["):
        index = tuple(map(int, re.findall(r"\d+", (box.findtext(f"{SVG}title") or "").split("]")[0])))
        boxes[index] = float(box.get("x", 0)), float(box.get("y", 0))
    assert sorted(boxes) == [(row, col) for row in range(4) for col in range(3)]
    for (row, col), (x, y) in boxes.items():
        if row:
            assert y > boxes[row - 1, col][1] and x == boxes[row - 1, col][0]
        if col:
            assert x > boxes[row, col - 1][0] and y == boxes[row, col - 1][1]
    outer, inner = (float(shapes(figure, words)[0].get("x", 0)) for words in ("a=1", "b=1"))
    assert outer + 20 <= inner < inner + 20 <= boxes[0, 0][0]  # brackets, 20 wide, beside the blocks
    words = texts(figure)
    assert {"0:2", "2:4", "4:6", "6:8"} <= set(words)
    assert {"B 4:6", "D 2:4", "cut over a then b", "8 × 6 = 48", "2 × 2 = 4", "1/12 of its elements"} <= set(
        words
    )
    assert words.count("a=0") == 1 and words.count("b=0") == 2  # b cuts what a has cut


def test_a_partial_sum_has_its_own_texture_and_plus_signs():
    figure = layout_picture(Layout("B F +tp"), (4, 6), {"dp": 2, "tp": 3}, name="Y")
    assert texts(figure).count("+") == 4 and texts(figure).count("and") == 1
    assert "2 copies of a sum of 3 terms" in texts(figure)
    assert any("partial" in (box.get("fill") or "") for box in shapes(figure, "Y[0, 0]"))
    assert (
        "every block is a sum of 3 terms along tp; 2 copies along dp; each rank holds 4 × 6, which is all"
        in figure.alt
    )
    assert "partial" not in layout_picture(Layout("B F"), (4, 6), {"dp": 2}).svg


def test_the_bar_shows_the_share():
    for sizes, share in (({"row": 2, "col": 3}, 1 / 6), ({"row": 1, "col": 2}, 1 / 2)):
        figure = layout_picture(Layout("B@row D@col"), (4, 6), sizes)
        whole, part = (shapes(figure, words)[-1] for words in ("all elements", " of the elements"))
        assert float(part.get("width", 0)) == pytest.approx(float(whole.get("width", 0)) * share, abs=0.1)


@pytest.mark.parametrize("n_ranks", [2, 8, 9, 64])
def test_from_nine_ranks_on_axes_are_coloured(n_ranks):
    svg = layout_picture(Layout("B@dp D@tp"), (128, 576), {"dp": 1, "tp": n_ranks}).svg
    timeline, _ = steps(n_ranks, 1)
    assert (
        (colours.RANK_COLOURS[1] in svg)
        == (colours.RANK_COLOURS[1] in lanes(timeline, title="t").svg)
        == (n_ranks <= 8)
    )
    assert (colours.AXIS_COLOURS[1] in svg) == (n_ranks > 8)


def test_what_a_picture_of_a_layout_refuses():
    with pytest.raises(RefusedError, match=r"rank=4: a mesh of row=2, col=2 has the ranks 0 to 3\."):
        layout_picture(Layout("B"), (4,), {"row": 2, "col": 2}, rank=4)
    with pytest.raises(
        RefusedError,
        match=r"is cut in 4 dims \(B, S, D, K\); a picture shows three.*Layout\(\"S@b D@c K@d\"\)",
    ):
        layout_picture(Layout("B@a S@b D@c K@d"), (2, 2, 2, 2), {"a": 1, "b": 1, "c": 1, "d": 1})
    with pytest.raises(RefusedError, match=r"Legal degrees for 10: 1, 2, 5, 10\."):
        layout_picture(Layout("B@tp"), (10,), {"tp": 4})


# The package


def test_the_package_is_lazy_and_lists_its_names():
    assert dir(views) == views.__all__
    assert all(getattr(views, name).__name__ == name for name in views.__all__)
    with pytest.raises(
        AttributeError, match=r"has no attribute 'gantt'; it has Figure, .*lanes, layout_picture"
    ):
        views.gantt  # noqa: B018
