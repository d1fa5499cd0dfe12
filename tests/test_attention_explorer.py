"""Explorer 7: what its picture says of a method is what ranks compute and send."""

from __future__ import annotations

import re

import pytest
import torch

from lessons_lib import Mesh, run
from lessons_lib.errors import RefusedError
from lessons_lib.sequence_parallel import ATTENTIONS
from lessons_lib.widgets import attention_explorer
from lessons_lib.widgets.attention import MASKS, METHODS, RANKS, H, K, S, shared_out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_visible_pair_is_computed_once(method, mask):
    for P in map(int, RANKS):
        shared = shared_out(method, P, mask)
        n_pairs = S * (S + 1) // 2 if mask == "causal" else S * S
        assert sum(map(sum, shared.pairs)) == n_pairs
        assert max(map(sum, zip(*shared.pairs, strict=True))) <= shared.axis
        for each in shared.masks:
            drawn = [(each.computed_by[q], when) for q, row in enumerate(each.steps) for when in row]
            for step, counts in enumerate(shared.pairs):
                for rank, counted in enumerate(counts):
                    if method == "ulysses":  # one mask for each rank, of its share of the heads
                        assert len(shared.masks) == P and sum(when == 0 for _, when in drawn) == n_pairs
                    else:
                        assert drawn.count((rank, step)) == counted


@pytest.mark.parametrize("method", METHODS)
def test_what_is_sent_is_what_a_run_sends(method):
    def step():
        q, k, v = (torch.randn(1, H, S // 4, K, requires_grad=True) for _ in range(3))
        ATTENTIONS[method].attend(q, k, v, Mesh(cp=4)["cp"]).sum().backward()

    trace = run(step, ranks=4).trace
    for rank in range(4):
        assert f"{trace.bytes_sent(rank) // 4:,} elements" == shared_out(method, 4, "causal").sent


def test_load_bars_flatten():
    """From 58.6 % to 100 % busy; every rank is said to wait as long as it does."""
    found = {
        method: re.search(r"([\d.]+) % busy", attention_explorer(method, "4").figure.alt)[1]
        for method in METHODS
    }
    assert found == {"ring": "58.6", "zigzag": "100.0", "striped": "85.0", "ulysses": "100.0"}


def test_bars_keep_their_axis_under_every_control():
    explorer = attention_explorer()

    def pixels_of_a_pair():
        tips = r'width="([\d.]+)"[^>]*><title>rank \d, step \d: (\d+) pairs'
        widths = {round(float(width) / int(n), 1) for width, n in re.findall(tips, explorer.figure.svg)}
        assert len(widths) == 1
        return widths

    before = pixels_of_a_pair()
    for values in ({"method": "zigzag"}, {"mask": "none"}, {"method": "striped"}, {"step": 2}):
        explorer.set(**values)
        assert not explorer.error and pixels_of_a_pair() == before


def test_the_step_ends_where_the_ring_does():
    explorer = attention_explorer("ring", "8")
    explorer.set(step=8)
    assert "in step 7" in explorer.figure.alt and explorer.values["step"] == 8
    explorer.set(ranks="2")
    assert "in step 1" in explorer.figure.alt and explorer.values["step"] == 2
    explorer.set(method="ulysses")
    assert "in step 0" in explorer.figure.alt and explorer.values["step"] == 1


@pytest.mark.parametrize("wrong", [{"method": "rings"}, {"ranks": "3"}, {"mask": "full"}])
def test_what_is_unknown_is_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(RefusedError, match=f"{name}='{value}' is unknown; known: "):
        attention_explorer(**wrong)
