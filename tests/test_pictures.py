"""What every picture of the library must be, over the table of all of them in tests/pictures.py."""

import io
import itertools
import re
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.image import imread

from lessons_lib import run
from lessons_lib.layout import Layout, coordinates
from lessons_lib.mesh import Mesh
from lessons_lib.tensor_parallel import SCHEMES
from lessons_lib.views import Figure, colours, cube_picture, layout_picture, mesh_picture
from lessons_lib.views.svg import WIDTH, text_width
from notebooks.tooling.saved import fonts
from tests.pictures import CUBES, MESHES, PICTURES, png, ran, relay

SVG = "{http://www.w3.org/2000/svg}"


def written(text):
    """The words of a text element, without its hover title."""
    return "".join([text.text or "", *(child.tail or "" for child in text)])


def box(text, wide=1.0):
    """Where a text stands: left, top, right, bottom. ``wide`` scales the estimate of its width."""
    x, y, size = (float(text.get(name, 0)) for name in ("x", "y", "font-size"))
    width = text_width(written(text), size, text.get("font-weight") == "700") * wide
    start = {"middle": -width / 2, "end": -width}.get(text.get("text-anchor", ""), 0.0)
    if "rotate(-90" in text.get("transform", ""):
        return x - 0.72 * size, y - start - width, x, y - start
    return x + start, y - 0.72 * size, x + start + width, y


def pixels(svg):
    """The picture as rows of red, green, blue from 0 to 1."""
    return imread(io.BytesIO(png(svg, WIDTH, fonts())))[..., :3]


def luminance(image):
    linear = np.where(image <= 0.04045, image / 12.92, ((image + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def unreadable(svg):
    """The texts that do not stand out from what lies below them, or that something covers.

    Measured on pixels, so that it holds for any shape and texture: the ground is the picture without
    its texts, and a text that is seen changes it.
    """
    root = ET.fromstring(svg)
    found = [text for text in root.iter(f"{SVG}text") if written(text).strip()]
    bare = re.sub(r"<text .*?</text>", "", svg, flags=re.DOTALL)
    with_text, ground = pixels(svg), pixels(bare)
    light = luminance(ground)
    for text in found:
        left, top, right, bottom = (round(at) for at in box(text, wide=0.9))
        place = slice(max(top, 0), bottom), slice(max(left, 0), right)
        ink = colours.luminance(text.get("fill", ""))
        below = light[place]
        contrast = (np.maximum(below, ink) + 0.05) / (np.minimum(below, ink) + 0.05)
        if (contrast < 4.5).mean() > 0.05:
            worst = np.quantile(contrast, 0.05)
            yield f"{written(text)!r} in {text.get('fill')} has a contrast of {worst:.1f}"
        elif (np.abs(with_text[place] - ground[place]).sum(-1) > 0.1).mean() < 0.05:
            yield f"{written(text)!r} is covered"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PICTURES)
def test_every_picture(name, theme):
    figure = PICTURES[name](theme)
    root = ET.fromstring(figure.svg)
    assert colours.THEMES[theme].card in figure.svg
    assert figure.alt.endswith(".") and "  " not in figure.alt and figure.alt in [d.text for d in root]
    boxes = []
    for text in root.iter(f"{SVG}text"):
        words = written(text)
        assert float(text.get("font-size", 0)) in (12, 13, 14, 17), words
        left, top, right, bottom = box(text)
        assert left >= 0 and right <= WIDTH + 0.5 and top >= 0 and bottom <= figure.height, words
        boxes.append((*box(text, wide=0.88), words))
    for one, other in itertools.combinations(sorted(boxes), 2):
        if other[0] >= one[2]:
            continue
        apart = one[1] >= other[3] or other[1] >= one[3]
        assert apart, f"{one[4]!r} and {other[4]!r} overlap"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PICTURES)
def test_every_text_can_be_read(name, theme):
    assert list(unreadable(PICTURES[name](theme).svg)) == []


def test_the_check_sees_what_nobody_could_read():
    figure = Figure("Title", "A sentence.")
    figure.rect(100, 100, 200, 40, "#0072B2")
    figure.text(110, 125, "dark on dark", fill="#1f2328")
    figure.text(110, 165, "fine")
    figure.text(110, 200, "hidden")
    figure.rect(100, 180, 200, 40, "#ffffff")
    figure.rect(100, 240, 200, 40, figure.waiting())
    figure.text(110, 265, "hatched", fill="#8a8f94")
    problems = list(unreadable(figure.svg))
    assert [problem.split("'")[1] for problem in problems] == ["dark on dark", "hidden", "hatched"]
    assert "covered" in problems[1]


# Who holds what


def shape_titles(figure, containing=""):
    found = (each.findtext(f"{SVG}title") for each in ET.fromstring(figure.svg))
    return [title for title in found if title is not None and containing in title]


def texts(figure):
    return [written(each) for each in ET.fromstring(figure.svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_shows_the_block_of_every_rank(name):
    layouts, sizes, rank = MESHES[name]
    figure = mesh_picture(layouts, sizes, rank=rank)
    held = {}
    for title in dict.fromkeys(shape_titles(figure, "rank ")):
        number, blocks = re.fullmatch(r"rank (\d+): (.*)", title).groups()
        held[int(number)] = re.findall(r"(\w+)(?:\[([\d:,]+)\])?", blocks)
    assert sorted(held) == list(range(len(coordinates(sizes))))
    for at, place in enumerate(coordinates(sizes)):
        for (tensor, index), notation in zip(held[at], layouts.values(), strict=True):
            layout = Layout(notation)
            assert layouts[tensor] == notation
            shown = [0 if part in (":", "") else int(part) for part in index.split(",")]
            assert tuple(shown) == layout.block(sizes, place) or (not index and not any(layout.cuts))


def test_a_2_5d_mesh_has_layers_with_rows_of_x_of_their_own_and_the_same_w():
    layouts = {"X": "B@depth@row D@col", "W": "D@row F@col", "dW": "D@row F@col +depth"}
    figure = mesh_picture(layouts, {"depth": 2, "row": 2, "col": 2}, rank=5)
    words = texts(figure)
    assert words.count("depth=0") == words.count("depth=1") == 1
    assert [words.count(f"X[{row},0]") for row in range(4)] == [1] * 4
    assert words.count("W[0,1]") == 3 and words.count("W[1,1]") == 2  # one more in the panel of rank 5
    assert {"on several ranks: W", "a term of a sum: dW", "1/8 of X", "1/4 of W"} <= set(words)
    assert {"copy on rank 1", "other term on rank 1"} <= set(words)
    assert figure.alt == (
        "What 8 ranks hold on a mesh of depth=2, row=2, col=2: X as B@depth@row D@col, in 8 blocks; W as "
        "D@row F@col, in 4 blocks, 2 copies along depth; dW as D@row F@col +depth, in 4 blocks, 2 terms "
        "along depth. Rank 5 at depth=1, row=0, col=1 holds X[2,1], W[0,1] and dW[0,1]."
    )
    dotted = [each for each in ET.fromstring(figure.svg) if "partial" in each.get("fill", "")]
    assert len(dotted) == 9  # eight ranks and the legend


def test_what_the_focus_holds_is_outlined_wherever_it_is():
    layouts = {"X": "B@depth@row D@col", "W": "D@row F@col"}
    figure = mesh_picture(layouts, {"depth": 3, "row": 2, "col": 2}, rank=5)
    ink = colours.THEMES["light"].ink
    outlined = [each for each in ET.fromstring(figure.svg) if each.get("stroke") == ink]
    # the cell of rank 5 and its block of X; on three ranks the block of W and the card behind it
    assert len(outlined) == 2 + 2 * 3


def test_of_very_many_layers_the_one_of_the_rank_is_shown():
    figure = mesh_picture({"X": "B@dp D@col"}, {"dp": 12, "row": 2, "col": 2}, rank=21)
    assert "A mesh of dp=12, row=2, col=2. Shown: dp=5." in texts(figure)
    assert {title.split(":")[0] for title in shape_titles(figure, ": X")} == {
        f"rank {at}" for at in range(20, 24)
    }


def test_three_cut_dims_are_layers():
    sizes = {"dp": 2, "cp": 3, "tp": 2}
    figure = layout_picture("B@dp S@cp H@tp", (4, 6, 8), sizes, name="X", rank=7)
    titles = shape_titles(figure, "X[")
    assert sorted(titles) == [
        f"X[{b}, {s}, {h}] on rank {b * 6 + s * 2 + h}: the only copy"
        for b in range(2)
        for s in range(3)
        for h in range(2)
    ]
    words = texts(figure)
    assert {"B 0:2 · dp=0", "B 2:4 · dp=1"} <= set(words) and words.count("S = 6") == words.count(
        "H = 8"
    ) == 2
    many = layout_picture("B@dp S@cp H@tp", (16, 2, 2), {"dp": 8, "cp": 2, "tp": 2}, name="X", rank=21)
    assert {title[:4] for title in shape_titles(many, "X[")} == {"X[5,"}
    assert "B 10:12 · dp=5" in texts(many)


# Cubes


def parts(figure):
    """``(block name, its first and second index, part, of how many, rank)`` of all parts drawn."""
    for title in shape_titles(figure, ", part "):
        found = re.fullmatch(r"(\w)\[(\d+),(\d+)\], part (\d+) of (\d+): on rank (\d+)", title)
        name, *numbers = found.groups()
        yield name, *map(int, numbers)


@pytest.mark.parametrize("name", CUBES)
def test_a_cube_shows_where_every_shard_lies_in_its_tensor(name):
    notations, sizes, rank = CUBES[name]
    figure = cube_picture(*notations, sizes, rank=rank)
    places = coordinates(sizes)
    layouts = dict(zip("XWY", map(Layout, notations), strict=True))
    seen = {tensor: {} for tensor in layouts}
    for tensor, first, second, part, n, at in parts(figure):
        layout = layouts[tensor]
        lead = [cut[0] for cut in layout.cuts]
        assert (places[at][lead[0]], places[at][lead[1]]) == (first, second)
        block = [first, second]
        (subdivided,) = [dim for dim, cut in enumerate(layout.cuts) if len(cut) > 1]
        block[subdivided] = block[subdivided] * n + part
        seen[tensor][at] = tuple(block)
    for tensor, layout in layouts.items():
        whole = {at: layout.block(sizes, place) for at, place in enumerate(places)}
        assert seen[tensor] in (whole, {})
        assert (seen[tensor] == {}) == (len(layout.cuts[0] + layout.cuts[1]) == 2)
    cubes = {title.split(",")[0] for title in shape_titles(figure, "in line with")}
    assert len({title.split(" at ")[0] for title in cubes}) == len(places)


def test_parts_of_a_block_lie_as_its_layout_cuts_it():
    for X, down in (("B@i@j D@k", True), ("B@i D@k@j", False)):
        figure = cube_picture(X, "D@k@i F@j", "B@i@k F@j", {"i": 2, "j": 2, "k": 2})
        middles = []
        for part in range(2):
            (shape,) = (
                each
                for each in ET.fromstring(figure.svg)
                if (each.findtext(f"{SVG}title") or "").startswith(f"X[0,0], part {part}")
            )
            points = [tuple(map(float, point.split(","))) for point in shape.get("points", "").split()]
            middles.append([sum(at) / 4 for at in zip(*points, strict=True)])
        (x0, y0), (x1, y1) = middles
        if down:
            assert x0 == pytest.approx(x1, abs=0.1) and y0 < y1  # rows: the second below the first
        else:
            assert x1 < x0  # columns: D runs to the left


def test_a_cube_says_what_its_focus_does():
    figure = cube_picture("B@i@j D@k", "D@k@i F@j", "B@i@k F@j", {"i": 2, "j": 2, "k": 2}, rank=2)
    words = texts(figure)
    assert [word for word in words if re.match(r"\d\. ", word)] == [
        "1. all-gather X[0,0] along j",
        "2. all-gather W[0,1] along i",
        "3. multiply",
        "4. reduce-scatter Y[0,1] along k",
    ]
    assert "1/8 of X, 1/8 of W and 1/8 of Y" in words


def test_what_a_cube_says_is_what_the_scheme_does():
    """The steps are read off three layouts; here they meet a run of the scheme that has them."""
    scheme, sizes = SCHEMES["3d"], {"i": 2, "j": 2, "k": 2}

    def forward():
        import torch

        mesh = Mesh(**sizes)
        scheme.forward(*(t.shard(torch.ones(8, 8), mesh) for t in (scheme.X, scheme.W)), mesh)

    events = run(forward, ranks=8).trace.collectives(3)
    figure = cube_picture(scheme.X, scheme.W, scheme.Y, sizes, rank=3)
    said = [re.search(r"([a-z-]+) \w\[.* along (\w)", word) for word in texts(figure)]
    steps = [(found[1].replace("-", "_"), found[2]) for found in said if found]
    assert sorted(steps[:2]) == sorted((event.kind, event.group) for event in events[:2])
    assert steps[2:] == [(event.kind, event.group) for event in events[2:]] != []


def test_copies_and_terms_of_a_cube_are_marked():
    sizes = {"i": 2, "j": 2, "k": 2}
    figure = cube_picture("B@i D@k", "D@k@i F@j", "B@i F@j +k", sizes, rank=5)
    words = texts(figure)
    assert {
        "0, 2",
        "1, 3",
        "0 + 1",
        "6 + 7",
        "copies along j",
        "cut over i",
        "terms of a sum along k",
    } <= set(words)
    assert {"1. has a whole X[1,1]", "4. keep its term of Y[1,0]"} <= set(words)
    assert sum("partial" in each.get("fill", "") for each in ET.fromstring(figure.svg)) == 4
    reduced = cube_picture("B@i D@k", "D@k F@j", "B@i F@j", sizes)
    assert "4. all-reduce Y[0,0] along k" in texts(reduced)


def test_what_a_cube_refuses():
    from lessons_lib.errors import RefusedError

    sizes = {"depth": 2, "row": 2, "col": 2}
    with pytest.raises(RefusedError, match=r"dim D is not cut by one axis first in both.*mesh_picture"):
        cube_picture("B@depth@row D@col", "D@row F@col", "B@depth@row F@col", sizes)
    with pytest.raises(RefusedError, match=r"X\[B, D\] times W\[D, F\] gives Y\[B, F\]"):
        cube_picture("B@depth D@row", "F@col D@row", "B@depth F@col", sizes)
    with pytest.raises(RefusedError, match="an axis each, of a mesh with three axes"):
        cube_picture("B@i D@k", "D@k F@j", "B@i F@j", {"i": 2, "j": 2, "k": 2, "dp": 2})
    with pytest.raises(RefusedError, match="rank=8: a mesh of i=2, j=2, k=2 has the ranks 0 to 7"):
        cube_picture("B@i D@k", "D@k F@j", "B@i F@j", {"i": 2, "j": 2, "k": 2}, rank=8)


def test_pictures_of_layouts_are_quick():
    def seconds(draw):
        def once():  # of this thread: the machine may be busy with others
            began = time.thread_time()
            draw()._repr_mimebundle_()
            return time.thread_time() - began

        return sorted(once() for _ in range(5))[2]

    names = [name for name in PICTURES if name.startswith(("layout", "mesh", "cube"))]
    assert len(names) > 35
    slow = {
        name: took for name in names if (took := seconds(lambda name=name: PICTURES[name]("light"))) > 0.025
    }
    assert slow == {}


def test_a_long_name_leaves_room_for_what_the_time_is():
    result = ran(relay, 8)
    object.__setattr__(result, "name", "n" * 200)
    try:
        title = result.picture().title
    finally:
        object.__setattr__(result, "name", "relay")
    assert title.endswith("… on 8 ranks, measured") and text_width(title, 17, True) <= WIDTH - 32
