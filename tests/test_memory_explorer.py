"""Explorer 4: what fills the memory of a rank, by formula and as measured."""

from __future__ import annotations

import re

import pytest

from lessons_lib.views.kinds import KINDS, Filled, memory_bars
from lessons_lib.widgets import memory_explorer
from lessons_lib.widgets.memory import STAGES, axis_end, filled


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_predicted_is_what_is_measured(stage, recompute):
    for kind, predicted, measured in filled(2, 1, recompute, stage).kinds:
        assert predicted == measured > 0, kind


def test_zero_does_not_touch_activations_and_recomputation_nothing_else():
    def held(stage, recompute):
        return {kind: measured for kind, _, measured in filled(2, 1, recompute, stage).kinds}

    assert {held(stage, "none")["activations"] for stage in STAGES} == {held(0, "none")["activations"]}
    cut = {1: ["state"], 2: ["gradients", "state"], 3: ["parameters", "gradients", "state"]}
    for stage, kinds in cut.items():
        for kind in ("parameters", "gradients", "state"):
            whole = held(0, "none")[kind]
            assert held(stage, "none")[kind] == (whole // 2 if kind in kinds else whole)
    for kind in KINDS:
        less = held(3, "full")[kind] < held(3, "none")[kind]
        assert less == (kind == "activations")


def test_the_picture_says_what_was_found_and_keeps_its_axis():
    explorer = memory_explorer("2", 1)
    bars = [filled(2, 1, "none", stage) for stage in STAGES]
    assert [bar.measured for bar in bars] == sorted({bar.measured for bar in bars}, reverse=True)
    for bar in bars:
        for kind, predicted, measured in bar.kinds:
            tip = f"{bar.name}, {kind}: {predicted:,} bytes predicted, {measured:,} measured"
            assert tip in explorer.figure.svg
    widths = re.findall(r'<rect x="150.0" y="[\d.]+" width="([\d.]+)"', explorer.figure.svg)
    explorer.set(sequences=2)
    assert not explorer.error
    assert re.findall(r'<rect x="150.0" y="[\d.]+" width="([\d.]+)"', explorer.figure.svg) == widths
    assert axis_end() > max(filled(1, 4, "none", 0).measured, 0)


def test_a_measurement_that_differs_is_seen():
    bar = Filled("x", (("state", 100, 300),))
    figure = memory_bars([bar], until=400, title="One")
    assert "100 B predicted, 300 B measured" in figure.alt
    (tick,) = re.findall(r'polyline points="([\d.]+),', figure.svg)
    ((left, width),) = re.findall(
        r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*><title>x, state', figure.svg
    )
    assert float(tick) - float(left) == pytest.approx(3 * float(width), abs=0.2)
