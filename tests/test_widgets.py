"""Explorers: one picture, few updates, the last value, and a picture where no controls can be."""

from __future__ import annotations

import asyncio
import html
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import ipywidgets
import pytest
import torch.distributed as dist
from nbformat.v4 import new_code_cell, new_notebook
from tooling.execute import execute
from tooling.saved import WIDGET, clean
from tooling.source import NOTEBOOK_METADATA

from lessons_lib import run
from lessons_lib.errors import RefusedError, RunError
from lessons_lib.views import Figure, collective_step, layout_picture
from lessons_lib.views.scheme_steps import scheme_step
from lessons_lib.widgets import (
    Explorer,
    attention_explorer,
    bytes_memory_explorer,
    collective_stepper,
    layout_bill_explorer,
    layout_explorer,
    pipeline_explorer,
    scheme_stepper,
    wait_explorer,
)
from lessons_lib.widgets.explorer import Choice, Slider, Toggle
from lessons_lib.widgets.latest import Latest
from lessons_lib.widgets.recorded import record
from lessons_lib.widgets.recorded_schemes import record_scheme
from lessons_lib.widgets.schemes import SHOWN


def stood_still():
    with pytest.raises(RunError) as caught:
        run(lambda: dist.get_rank() == 1 or dist.barrier(), ranks=3)
    return caught.value


EXPLORERS = {
    "stepper": collective_stepper,
    "waits": lambda: wait_explorer(stood_still()),
    "layouts": layout_explorer,
    "pipelines": pipeline_explorer,
    "bills": layout_bill_explorer,
    "schemes": scheme_stepper,
    "bytes and memory": bytes_memory_explorer,
    "attention": attention_explorer,
}


def numbers(draw=None, **options):
    """An explorer of a number and a word."""
    drawn = []

    def plain(n, word):
        drawn.append((n, word))
        if word == "wrong":
            raise RefusedError(f"{word} <b>is</b> refused")
        return Figure(f"{n} {word}", f"It says {n} {word}.")

    explorer = Explorer(
        draw or plain,
        {"n": Slider("Number", 0, 9), "word": Choice("Word", ["one", "two", "wrong"])},
        {"n": 3, "word": "one"},
        {"two": {"n": 2, "word": "two"}},
        **options,
    )
    return explorer, drawn


def shown(explorer):
    """What the widgets on the page hold: error, picture, sentence."""
    _, _, wrong, picture, sentence = explorer.box.children
    return wrong.value, picture.value, sentence.value


def sentence(explorer):
    return html.unescape(re.search(r"<div role='status'[^>]*>(.*?)</div>", shown(explorer)[2])[1])


# ---- stale values ----


async def flood(ask, n_changes):
    """Changes that come from outside while the kernel may be busy, as messages on a socket do."""
    loop, last = asyncio.get_running_loop(), []

    def type_keys():
        for number in range(1, n_changes + 1):
            time.sleep(0.02)
            loop.call_soon_threadsafe(ask, number)
        last.append(time.monotonic())

    keys = threading.Thread(target=type_keys)
    keys.start()
    while keys.is_alive():
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.5)
    return last[0]


def flooded(scheduled, n_changes=50):
    """(value, when it was shown) of every update that 50 changes a second lead to; when the last came."""
    updates, value = [], [0]

    def work():
        now = value[0]
        time.sleep(0.3)
        updates.append((now, time.monotonic()))

    latest = Latest(work)

    def ask(number):
        value[0] = number
        (latest.ask if scheduled else work)()

    last_key = asyncio.run(flood(ask, n_changes))
    return updates, last_key


def test_fifty_changes_in_a_second_end_on_the_last_with_a_handful_of_updates():
    updates, last_key = flooded(scheduled=True)
    assert updates[-1][0] == 50
    assert 1 <= len(updates) <= 6
    assert updates[-1][1] - last_key < 2.5 * 0.3 + 0.3
    assert [value for value, _ in updates] == sorted(value for value, _ in updates)


@pytest.mark.slow
def test_an_update_for_every_change_would_be_noticed():
    """Drawn in the callback, a quarter of these changes already is seconds behind."""
    updates, last_key = flooded(scheduled=False, n_changes=12)
    assert len(updates) == 12
    assert updates[-1][1] - last_key > 2.5


def test_a_single_change_is_served_at_once():
    async def one():
        done = []
        latest = Latest(lambda: done.append(time.monotonic()))
        began = time.monotonic()
        latest.ask()
        await asyncio.sleep(0.3)
        return done[0] - began, len(done)

    took_s, times = asyncio.run(one())
    assert took_s < 0.1 and times == 1


def test_changes_that_never_pause_are_served_all_the_same():
    async def on_and_on():
        done = []
        latest = Latest(lambda: done.append(1))
        for _ in range(60):
            latest.ask()
            await asyncio.sleep(0.005)
        return len(done)

    assert 1 <= asyncio.run(on_and_on()) <= 10


def test_work_that_fails_is_asked_for_again():
    async def failing():
        calls = []

        def work():
            calls.append(1)
            raise ValueError("oh")

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)
        latest = Latest(work)
        for _ in range(2):
            latest.ask()
            await asyncio.sleep(0.05)
        return len(calls)

    assert asyncio.run(failing()) == 2


# ---- the frame ----


def test_a_control_that_changes_changes_picture_and_sentence_once():
    explorer, drawn = numbers()
    assert sentence(explorer) == "It says 3 one."
    explorer.widgets["n"].value = 5
    assert drawn == [(3, "one"), (5, "one")]
    assert sentence(explorer) == explorer.figure.alt == "It says 5 one."
    assert shown(explorer)[1] == explorer.figure.html
    assert explorer.figure.svg.count("<svg") == shown(explorer)[1].count("<svg") == 1


def test_reset_and_settings_change_all_controls_and_draw_once():
    explorer, drawn = numbers()
    reset, two = explorer.box.children[1].children
    assert (reset.description, two.description) == ("Reset", "Try: two")
    two.click()
    assert explorer.values == {"n": 2, "word": "two"}
    assert [explorer.widgets[name].value for name in ("n", "word")] == [2, "two"]
    reset.click()
    assert drawn == [(3, "one"), (2, "two"), (3, "one")]
    assert sentence(explorer) == "It says 3 one."


def test_what_goes_wrong_is_shown_and_the_next_value_recovers():
    explorer, _ = numbers()
    before = shown(explorer)[1]
    explorer.widgets["word"].value = "wrong"
    wrong, picture, _ = shown(explorer)
    assert "RefusedError: wrong &lt;b&gt;is&lt;/b&gt; refused" in wrong and "role='alert'" in wrong
    assert picture == before and sentence(explorer) == "It says 3 one."
    explorer.widgets["n"].value = 4
    assert shown(explorer)[0]  # still wrong
    explorer.widgets["word"].value = "two"
    assert shown(explorer)[0] == "" and sentence(explorer) == "It says 4 two."


def test_what_is_wrong_from_the_start_is_raised():
    with pytest.raises(RefusedError, match="nowhere"):
        layout_explorer("D@nowhere F")


def test_a_slider_ends_where_it_must_for_the_other_values():
    explorer, drawn = numbers(limits=lambda values: {"n": 9 if values["word"] == "one" else 2})
    explorer.widgets["n"].value = 7
    explorer.widgets["word"].value = "two"
    assert explorer.widgets["n"].max == 2 and explorer.widgets["n"].value == 2
    assert drawn[-1] == (2, "two")
    explorer.set(word="one", n=8)
    assert explorer.widgets["n"].max == 9 and explorer.widgets["n"].value == 8 and drawn[-1] == (8, "one")


def test_no_more_than_four_controls():
    controls = {f"n{i}": Slider("Number", 0, 9) for i in range(5)}
    with pytest.raises(RefusedError, match="5 controls: an explorer has at most 4"):
        Explorer(lambda **_: Figure("t", "a"), controls, dict.fromkeys(controls, 0))


@pytest.mark.parametrize("name", EXPLORERS)
def test_every_explorer_has_names_a_reset_and_two_settings_that_work(name):
    explorer = EXPLORERS[name]()
    controls = [control for control in explorer.controls.values() if not isinstance(control, Toggle)]
    assert 1 <= len(controls) <= 4 and len(explorer.settings) == 2
    assert all(len(widget.description) > 3 for widget in explorer.widgets.values())
    start = explorer.figure.alt
    for values in (*explorer.settings.values(), explorer.start):
        explorer.set(**values)
        assert explorer.error == "" and sentence(explorer) == explorer.figure.alt
        assert {**explorer.values, **values} == explorer.values
    assert explorer.figure.alt == start


def test_core_widgets_only():
    for make in EXPLORERS.values():
        boxes = [make().box]
        while boxes:
            widget = boxes.pop()
            boxes += getattr(widget, "children", ())
            assert type(widget).__module__.startswith("ipywidgets.")


# ---- what each explorer says ----


def test_the_stepper_shows_the_recording():
    explorer = collective_stepper("tree broadcast", 8, 3)
    assert explorer.figure.svg == collective_step(record("tree broadcast", 8), 3).svg
    explorer.widgets["step"].value = 1
    assert explorer.figure.svg == collective_step(record("tree broadcast", 8), 1).svg
    for collective in explorer.widgets["collective"].options:
        explorer.widgets["collective"].value = collective
        assert explorer.error == "" and collective in explorer.figure.title.lower()
    for ranks in range(2, 17):
        explorer.widgets["ranks"].value = ranks
        explorer.widgets["step"].value = explorer.widgets["step"].max
        assert explorer.error == ""
        n_rounds = len(record(explorer.values["collective"], ranks).rounds)
        assert f"on {ranks} ranks after round {n_rounds} of {n_rounds}:" in explorer.figure.alt


def test_the_layout_explorer_shows_who_owns_what():
    explorer = layout_explorer()
    explorer.widgets["layout"].value = "D@row F@col"
    wanted = layout_picture("D@row F@col", (8, 12), {"row": 2, "col": 2})
    assert explorer.figure.svg == wanted.svg
    explorer.widgets["mesh"].value = "row=2, col=3"
    explorer.widgets["rank"].value = 5
    wanted = layout_picture("D@row F@col", (8, 12), {"row": 2, "col": 3}, rank=5)
    assert explorer.figure.svg == wanted.svg
    for shape, words in (
        ("8, 13", "13"),
        ("eight", "write the sizes of the dims, for example 8, 12"),
        ("8", ""),
    ):
        explorer.widgets["shape"].value = shape
        assert words in explorer.error and explorer.error.startswith("RefusedError: ")


def test_every_moment_of_a_run_has_its_picture():
    explorer = wait_explorer(stood_still())
    last = explorer.widgets["moment"].max
    told = []
    for moment in range(last + 1):
        explorer.widgets["moment"].value = moment
        assert explorer.error == ""
        told.append(explorer.figure.alt)
    assert len(set(told)) == last + 1
    assert "Rank 1 has returned and will never join barrier #1." in explorer.figure.svg


# ---- where controls cannot live ----


@pytest.mark.parametrize("name", EXPLORERS)
def test_the_bundle_carries_the_picture_and_its_sentence(name):
    explorer = EXPLORERS[name]()
    bundle = explorer._repr_mimebundle_()
    assert bundle["image/svg+xml"] == explorer.figure.svg
    assert bundle["text/plain"] == explorer.figure.alt
    assert bundle[WIDGET]["model_id"] == explorer.box.model_id
    assert "need a running kernel (run the cell), and the package jupyterlab_widgets" in bundle["text/html"]


@pytest.mark.parametrize("name", EXPLORERS)
def test_without_ipywidgets_there_is_the_picture_and_a_line(name, monkeypatch):
    with_controls = EXPLORERS[name]()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explorer = EXPLORERS[name]()
    bundle = explorer._repr_mimebundle_()
    assert explorer.box is None and WIDGET not in bundle
    assert "<svg" in bundle["text/html"] and bundle["image/svg+xml"] == explorer.figure.svg
    line = f"the package ipywidgets is missing in {sys.executable}, the Python of this notebook"
    assert line in bundle["text/html"] and line in bundle["text/plain"]
    explorer.set(**next(iter(explorer.settings.values())))  # by hand it works all the same
    with_controls.set(**next(iter(with_controls.settings.values())))
    assert explorer.figure.title == with_controls.figure.title


def test_the_library_is_imported_without_ipywidgets():
    program = (
        "import sys; sys.modules['ipywidgets'] = None\n"
        "import lessons_lib.widgets as widgets\n"
        "print(widgets.layout_explorer().figure.alt)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("Layout D@row F of W") and not done.stderr


def test_a_saved_notebook_has_one_picture_and_no_widget(tmp_path: Path):
    sources = ["from lessons_lib.widgets import layout_explorer\nlayout_explorer()", "1 + 1"]
    notebook = new_notebook(cells=[new_code_cell(s) for s in sources], metadata=NOTEBOOK_METADATA)
    execute(notebook.cells, tmp_path)
    live, twin = notebook.cells[0].outputs
    assert WIDGET in live.data and "image/svg+xml" not in live.data
    assert re.search(r":root:has\(\.explorer-\w+\) \.twin-\w+ \{ display: none \}", twin.data["text/html"])
    saved = clean(notebook)
    assert clean(saved) == saved
    (output,) = saved.cells[0].outputs
    assert set(output.data) == {"image/png", "image/svg+xml", "text/plain"}
    assert output.data["text/plain"].startswith("Layout D@row F of W, 8 × 12")
    assert saved.cells[1].outputs == notebook.cells[1].outputs


def test_a_cell_run_again_closes_what_it_made_before(monkeypatch):
    class Shell:
        parent_header = None

    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", type("", (), {"get_ipython": staticmethod(lambda: shell)}))
    n_open = []
    for execution in range(4):
        shell.parent_header = {"metadata": {"cellId": "a cell"}, "header": {"msg_id": str(execution)}}
        first, drawn = numbers()
        second, _ = numbers()
        assert first.box is not None and second.box is not None  # a cell may make two
        n_open.append(len(ipywidgets.Widget._instances if hasattr(ipywidgets.Widget, "_instances") else []))
    assert len(set(n_open)) == 1
    first.widgets["n"].value = 8
    assert len(drawn) == 2


def test_a_closed_explorer_draws_no_more():
    explorer, drawn = numbers()
    widget = explorer.widgets["n"]
    explorer.close()
    widget.value = 7
    assert len(drawn) == 1


# ---- explorer 1: pipelines


def said(explorer):
    """What the captions of its picture say of each schedule: when it ends, and its bubble."""
    ends = [float(n) for n in re.findall(r"done at ([\d.]+)", explorer.figure.alt)]
    bubbles = [float(n) for n in re.findall(r"bubble ([\d.]+) % of total time", explorer.figure.alt)]
    return ends, bubbles


def test_the_same_bubble_and_another_memory():
    ends, bubbles = said(explorer := pipeline_explorer("gpipe", "1f1b", m=8))
    assert ends == [33, 33] and bubbles == [27.3, 27.3]  # (p-1)/(m+p-1)
    assert (
        "peak 8 micro-batches" in explorer.figure.alt and "peak 1 to 4 micro-batches" in explorer.figure.alt
    )
    explorer.set(m=12)
    assert said(explorer)[1] == [20, 20]


def test_with_slow_messages_the_winner_changes():
    explorer = pipeline_explorer("gpipe", "1f1b", m=8)
    explorer.set(latency="0.1")
    assert said(explorer)[0] == [33.6, 34.6]


@pytest.mark.parametrize("second", ["interleaved", "zb-v", "dualpipe-v", "breadth-first"])
def test_all_schedules_do_the_same_work(second):
    """A chunk is a part of a rank's share: the ideal time is m (F + B) whatever the schedule."""
    ends, bubbles = said(pipeline_explorer("gpipe", second, m=8))
    for end, bubble in zip(ends, bubbles, strict=True):
        assert end * (1 - bubble / 100) == pytest.approx(24, rel=0.003)


def axis_of(figure):
    """The numbers below the lanes, and where they stand."""
    texts = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)"[^>]*text-anchor="middle"[^>]*>([^<]+)</text>', figure.svg
    )
    lowest = max((float(y) for _, y, words in texts if words == "0"), default=0)
    return [(x, words) for x, y, words in texts if float(y) == lowest]


def test_its_axis_stays_when_a_slider_moves():
    explorer = pipeline_explorer("gpipe", "1f1b", m=4)
    before = axis_of(explorer.figure)
    assert len(before) > 4
    explorer.set(m=12, latency="1")
    assert axis_of(explorer.figure) == before


def test_a_number_that_a_schedule_cannot_have_is_told_and_the_next_one_recovers():
    explorer = pipeline_explorer("gpipe", "interleaved", m=8)
    explorer.set(m=9)
    assert "m=9 is not a multiple of p. Nearest: m=8 or m=12." in explorer.error
    explorer.set(m=12)
    assert not explorer.error and said(explorer)[1][0] == 20
    for wrong in ({"first": "gpip"}, {"latency": "0.3"}):
        with pytest.raises(RefusedError, match=r"there are gpipe|choose one of"):
            pipeline_explorer(**wrong)


def test_ranks_w_and_the_critical_path_are_toggles():
    explorer = pipeline_explorer()
    explorer.set(eight_ranks=True, m=16)
    assert "p = 8, m = 16" in explorer.figure.alt
    explorer.set(free_w=True)
    assert said(explorer)[0] == [(16 + 7) * 2] * 2
    assert "decides the end" not in explorer.figure.svg
    explorer.set(path=True)
    assert "decides the end" in explorer.figure.svg


# ---- explorer 5: layouts and bills


def bill_of(explorer):
    """What each rank sends, as the picture says it."""
    return float(re.search(r"Each rank sends ([\d,.]+) elements", explorer.figure.alt)[1].replace(",", ""))


def test_half_of_an_all_reduce_and_nothing():
    explorer = layout_bill_explorer()
    all_of_it = bill_of(explorer)
    explorer.set(y="B F@col")
    assert bill_of(explorer) == all_of_it / 2 and "reduce_scatter of Y over col" in explorer.figure.alt
    explorer.set(y="B F +col")
    assert bill_of(explorer) == 0


def test_a_bill_that_cannot_be_is_told_and_the_next_one_recovers():
    explorer = layout_bill_explorer()
    for values, words in (
        ({"x": "B D@tp"}, "names the axis 'tp', which the mesh does not have"),
        ({"x": "B F"}, "X has the dims B and D, in this order"),
        ({"x": "B,D"}, "there is no comma"),
    ):
        explorer.set(**values)
        assert words in explorer.error
    explorer.reset()
    assert not explorer.error
    explorer.set(mesh="row=4, col=4")
    assert "on a mesh of row=4, col=4" in explorer.figure.alt


def test_the_scale_of_bills_stays():
    explorer = layout_bill_explorer()
    for values in (*explorer.settings.values(), {"mesh": "row=4, col=4"}):
        explorer.set(**values)
        assert "elements each rank sends, 0 to 4,096" in explorer.figure.svg


# ---- explorer 6: schemes


def test_the_scheme_stepper_shows_the_recording():
    explorer = scheme_stepper()
    for scheme in explorer.widgets["scheme"].options:
        for result in ("Y", "dX", "dW"):
            explorer.set(scheme=scheme, result=result, stage=9, rank=99)
            assert explorer.error == ""
            name, sizes = SHOWN[scheme]
            steps = record_scheme(name, tuple(sizes.items()), result)
            stage, rank = len(steps.stages), len(steps.stages[0].products) - 1
            assert (explorer.values["stage"], explorer.values["rank"]) == (stage, rank)
            assert explorer.figure.svg == scheme_step(steps, stage, rank=rank).svg
    assert explorer.controls["stage"].high >= 4 and explorer.controls["rank"].high == 15
    with pytest.raises(RefusedError, match="no scheme '4D' to step through; there are column on 4"):
        scheme_stepper("4D")


def test_the_bar_of_memory_does_not_rescale():
    """All of X, W and Y is the same number whatever the scheme."""
    explorer = scheme_stepper()
    for scheme in explorer.widgets["scheme"].options:
        explorer.set(scheme=scheme)
        assert "a full bar is X, W and Y whole: 3,744" in explorer.figure.svg


# ---- explorer 8: bytes against memory


def bytes_sent(explorer):
    """What each way sends, as the sentence says it."""
    said = re.findall(r"sends ([\d.]+) (MB|GB)", explorer.figure.alt)
    return [float(n) * {"MB": 1e6, "GB": 1e9}[unit] for n, unit in said]


def test_with_few_tokens_1d_sends_least_and_with_many_it_does_not():
    one, two = bytes_sent(explorer := bytes_memory_explorer("4", "1/4 h"))
    assert one < two
    explorer.set(**explorer.settings["2D draws level"])  # at b s = 12 h
    one, two = bytes_sent(explorer)
    assert one == two


def test_what_the_frontier_refuses():
    for wrong, words in ((("5",), "ranks='5': choose one of 4, 8"), (("4", "3 h"), "tokens='3 h': choose")):
        with pytest.raises(RefusedError, match=words):
            bytes_memory_explorer(*wrong)
