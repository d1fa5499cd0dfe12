"""Lesson 03: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read
from torch.utils.flop_counter import FlopCounterMode

from lessons_lib import run
from lessons_lib.cost.activations import kept, kept_by_layer, published
from lessons_lib.cost.flops import step_flops
from lessons_lib.cost.measured import memory_of_a_step
from lessons_lib.cost.memory import RECIPES
from lessons_lib.machines import machine
from lessons_lib.models import GPT, GPTConfig
from lessons_lib.models.recompute import keep_scores

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "03_memory_and_time.py"
LESSON = read(SOURCE)

pytestmark = pytest.mark.slow  # it runs the whole lesson


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all but its curves have run."""
    names: dict[str, Any] = {"__name__": "lesson_03"}
    for cell in LESSON.cells:
        if (
            cell.cell_type == "code"
            and not cell.id.endswith("-picture")
            and not has_tag(cell, "raises-exception")
        ):
            exec(compile(cell.source, f"<cell {cell.id}>", "exec"), names)
    return names


def says(*sentences: str) -> None:
    """The text has these words; a test that holds a number names the words it holds."""
    texts = [cell.source for cell in LESSON.cells if is_text(cell)]
    text = " ".join(re.sub(r"[*`]", "", " ".join(texts)).split())
    for sentence in sentences:
        assert sentence in text, sentence


def is_text(cell: Any) -> bool:
    """Whether a cell is read: prose, a guess, or what became of it."""
    return cell.cell_type == "markdown" or "predict(" in cell.source or ".reveal(" in cell.source


def off(ours: Any, truth: Any) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, truth, strict=True))


def activations(*arguments: Any, **more: Any) -> tuple[int, int]:
    """Predicted and measured."""
    rows = memory_of_a_step(*arguments, **more)
    return next((row.predicted, row.measured) for row in rows if row.kind == "activations")


def test_the_tour(cells: dict[str, Any]) -> None:
    says("12 D² and a little: 3 and 1 for attention, 4 and 4 for the MLP")
    small, block = cells["SMALL"], cells["model"].blocks[0]
    matrices = {n: p.numel() / small.D**2 for n, p in block.named_parameters() if p.ndim == 2}
    assert list(matrices.values()) == [3, 1, 4, 4]
    assert 12 < cells["n_parameters"](block) / small.D**2 < 12.25
    says(
        "| B | sequences of a batch | 16 |",
        "| S | tokens of a sequence | 64 |",
        "| D | width of the model | 64 |",
    )
    says(
        "| F | width inside the MLP, 4 D | 256 |",
        "| H | heads of attention | 4 |",
        "| K | width of a head, D / H | 16 |",
    )
    says("| V | vocabulary: a token is a byte | 256 |", "| L | layers | 4 |")
    assert (small.S, small.D, small.F, small.H, small.K, small.V, small.L) == (64, 64, 256, 4, 16, 256, 4)
    assert cells["tokens"].shape == (16, 64)


def test_bf16(cells: dict[str, Any]) -> None:
    says("the next number after 1 is 1.0078", "In bf16 it has not moved")
    assert cells["weight"].item() == 1.0 and cells["master"].item() == pytest.approx(2.0, abs=1e-4)
    assert 1 + torch.finfo(torch.bfloat16).eps == pytest.approx(1.0078, abs=5e-5)


def test_sixteen_bytes() -> None:
    """S52: from 8 to 20 bytes a parameter, each part named."""
    says("4 + 4 + 8, or 2 + 2 + 12", "Papers and tools say 12, 16, 18 or 20 bytes", "are 24 GB")
    assert RECIPES["fp32 adam"] == (4, 4, 8) and RECIPES["mixed adam"] == (2, 2, 12)
    assert 1_500_000_000 * RECIPES["mixed adam"].total == 24e9
    totals = {name: 6.7 * RECIPES[name].total for name in RECIPES}
    assert totals["fp32 adam, no stored gradients"] == pytest.approx(80.4)
    assert totals["fp32 adam"] == totals["mixed adam"] == pytest.approx(107.2)
    assert totals["mixed adam, fp32 gradients"] == pytest.approx(120.6)
    assert totals["mixed adam, both gradients"] == pytest.approx(134)
    assert totals["mixed sgd"] == pytest.approx(53.6)


def test_why_the_card_overflows(cells: dict[str, Any]) -> None:
    says(
        "14 more bytes for each parameter, and activations on top",
        "they are as large as the weights",
        "in both",
    )
    of_one = sum(kept(cells["XL"], B=1, itemsize=2).values())
    assert 0.8 < of_one / 3e9 < 1.2
    assert 24e9 + of_one > 24 * 2**30
    says("a GiB 2³⁰", "which is 7 % more")  # S17
    assert round(100 * (2**30 / 1e9 - 1)) == 7
    says("Weights are the small bar: 2 of 16 bytes")


def test_the_peak(cells: dict[str, Any]) -> None:
    says('C="less than a tenth"', "The peak is where the one turns into the other")
    result = run(cells["two_steps"], ranks=1, machine="1xH100", record="memory")
    weights = 4 * cells["n_parameters"](cells["model"])
    assert result.values[0] == weights < result.trace.peak_bytes(0) / 10
    at = max(result.trace.live_bytes[0], key=lambda point: point[1])[0]
    one_step = result.trace.timeline.makespan / 2
    assert 0.25 < (at - one_step) / one_step < 0.4  # in the second step, after its forward, a third of it


def test_a_smaller_batch(cells: dict[str, Any]) -> None:
    says(
        "activations are proportional to the batch",
        "From 16 sequences to 8 the sum falls by 41 %, from 2 to 1 by 19 %",
    )
    measured = cells["measured"]
    others = [{kind: n for kind, n in of.items() if kind != "activations"} for of in measured.values()]
    assert all(of == others[0] for of in others)
    assert measured[16]["activations"] / measured[8]["activations"] == pytest.approx(2, rel=1e-3)
    held = {B: sum(of.values()) for B, of in measured.items()}
    assert [round(100 * (1 - held[B // 2] / held[B])) for B in (16, 2)] == [41, 19]


def test_what_is_put_aside(cells: dict[str, Any]) -> None:
    says("B S D = 65,536 numbers here", "Each keeps its input", "A sum keeps nothing")
    meter, X = cells["stored_bytes"], torch.randn(16, 64, 64, dtype=torch.float64, requires_grad=True)
    H = torch.randn(16, 64, 256, dtype=torch.float64, requires_grad=True)
    assert X.numel() == 65_536
    layers = (cells["up"], X), (torch.nn.GELU(), H), (cells["down"], H)
    assert [meter(layer, x) / X.nbytes for layer, x in layers] == [1, 4, 4]
    assert meter(cells["Residual"](), X, X) == 0
    says(
        "compared with the meter, to the byte",
        "Sixteen streams and a little: half of it is the wide part of the MLP",
    )
    for config in (cells["SMALL"], GPTConfig(L=1, H=2, D=24, S=10)):
        x = torch.randn(3, config.S, config.D, dtype=torch.float64, requires_grad=True)
        terms = kept_by_layer(config, B=3)
        assert meter(GPT(config).double().blocks[0], x) == 8 * sum(terms.values())
        assert 16 < sum(terms.values()) / x.numel() < 17 and terms["around the activation"] == 8 * x.numel()
    says("32 B S D bytes for a layer, where the papers write 34")
    assert published("tp + sp, selective", S=64, D=64, H=4, tp=1) == 34
    with_scores = keep_scores(GPT(cells["SMALL"]).double()).blocks[0]
    assert meter(with_scores, X) > meter(GPT(cells["SMALL"]).double().blocks[0], X)


def test_again(cells: dict[str, Any]) -> None:
    plain, again, theirs = (cells[name] for name in ("plain", "again", "theirs"))
    says("The same gradients. What was 16 streams for each layer is 1", "The price is one forward, exactly")
    assert off(again.values[0], plain.values[0]) < 1e-14 and off(theirs.values[0], plain.values[0]) < 1e-14
    forward, backward = (plain.trace.flops_of(0, way) for way in ("forward", "backward"))
    assert again.trace.flops_of(0, "forward") == forward
    assert again.trace.flops_of(0, "backward") == backward + forward
    says('B="a third more"')
    assert again.trace.flops_of(0) / plain.trace.flops_of(0) == pytest.approx(4 / 3, abs=0.01)
    says("before the last product of each block")
    small = cells["SMALL"]
    last_products = small.L * 2 * 16 * small.S * small.F * small.D
    assert theirs.trace.flops_of(0, "backward") == backward + forward - last_products
    assert again.trace.peak_bytes(0) < plain.trace.peak_bytes(0) / 2


def test_a_block_keeps_its_input(cells: dict[str, Any]) -> None:
    """By the meter; it does more work; and the library's formula for it is what is measured."""
    small = cells["SMALL"]
    block = GPT(small).double().blocks[0]
    x = torch.randn(2, small.S, small.D, dtype=torch.float64, requires_grad=True)

    class Once(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cells["Again"].apply(block, x)

    assert cells["stored_bytes"](Once(), x) == x.nbytes
    with FlopCounterMode(display=False) as ours:
        Once()(x).sum().backward()
    with FlopCounterMode(display=False) as plain:
        block(x).sum().backward()
    assert ours.get_total_flops() > plain.get_total_flops()
    for what in ("none", "full"):
        predicted, measured = activations(small, 16, 0, 1, what_again=what)
        assert predicted == measured
    assert step_flops(small, 16, recompute="full") > step_flops(small, 16)


def test_other_masks(cells: dict[str, Any]) -> None:
    says("The second time dropout draws other numbers", "It puts the random numbers back")
    truth, through, config = cells["truth"], cells["through"], replace(cells["SMALL"], dropout=0.2)
    assert off(run(through, cells["Again"].apply, config, ranks=1).values[0], truth) > 0.1
    assert off(run(through, cells["by_torch"], config, ranks=1).values[0], truth) < 1e-14


def test_accumulation(cells: dict[str, Any]) -> None:
    says("One buffer, and the activations of one piece", "added up, is m times too much")
    gradients = cells["gradients"]
    assert all(off(gradients[m], gradients[1]) < 1e-13 for m in (2, 4, 8, 16))
    runs = {m: run(cells["accumulate"], m, ranks=1, record="memory") for m in (1, 4, 16)}
    n_bytes = sum(g.nbytes for g in gradients[1])
    assert all(sum(g.nbytes for g in result.values[0]) == n_bytes for result in runs.values())
    peaks = [result.trace.peak_bytes(0) for result in runs.values()]
    assert peaks[0] > 3 * peaks[1] and peaks[1] > 2 * peaks[2]
    model, (tokens, targets) = GPT(cells["SMALL"]).double(), (cells["tokens"], cells["targets"])
    for some, of_them in zip(tokens.chunk(4), targets.chunk(4), strict=True):
        model.loss(some, of_them).backward()
    assert off([p.grad for p in model.parameters()], [4 * g for g in gradients[1]]) < 1e-13


def test_time(cells: dict[str, Any]) -> None:
    says("6 per weight and token, and 12 L D S per token for attention", 'B="5 seconds"', "are 4.5e15")
    assert cells["step_s"]["plain"] == pytest.approx(5, abs=0.1) and 6 * 1.5e9 * 5e5 == 4.5e15
    says("one H100 at its 989 TFLOP/s")
    assert machine("1xH100").flops_per_s == 989e12
    says("Latency: 53 small messages")
    trace = run(cells["step"], ranks=4, machine="4xH100").trace
    assert len(trace.collectives(0)) == 53
    predicted = cells["compute_s"] + cells["bytes_s"]
    assert trace.timeline.makespan == pytest.approx(predicted, rel=1e-9)
    assert cells["latency_s"] > 0.98 * cells["bytes_s"]
    says("it is 42 to 56 %")  # the paper's MFU, held in test_cost_of_training.py


def test_scores(cells: dict[str, Any]) -> None:
    says("80 of 114 are scores: they are 70 %")
    sizes = dict(S=2048, D=12288, H=96)
    assert published("none", **sizes) - published("tp + sp, selective", **sizes) == 80
    assert round(100 * 80 / 114) == 70
    found = {}
    for attention, what in (("scores", "none"), ("scores", "selective"), ("fused", "none")):
        predicted, measured = activations(cells["SMALL"], 4, 0, 1, attention, what)
        assert predicted == measured
        found[attention, what] = measured
    says("A fused kernel has it built in.")
    assert found["scores", "selective"] == pytest.approx(found["fused", "none"], rel=0.01)
    assert found["scores", "none"] > 1.15 * found["fused", "none"]
