"""Lesson 06: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tooling.source import has_tag, read
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lessons_lib import run
from lessons_lib.cost.memory import model_states
from lessons_lib.cost.units import in_unit
from lessons_lib.data_parallel import STAGES, stored, traffic
from lessons_lib.mesh import gather_reduce_scatter

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "06_zero_2_and_3.py"
LESSON = read(SOURCE)
L, D, LAYER = 6, 256, 8 * 256 * 256


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all of them have run."""
    names: dict[str, Any] = {"__name__": "lesson_06"}
    for cell in LESSON.cells:
        if cell.cell_type == "code" and not has_tag(cell, "raises-exception"):
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


def off(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


def layers_sent(result: Any, region: str | None = None) -> float:
    (sent,) = {result.trace.bytes_sent(rank, region) for rank in range(4)}
    return sent / LAYER


def test_zero_2(cells: dict[str, Any]) -> None:
    says('B="four times as much"', "A quarter of the gradients stays", "stages 0, 1 and 2 send the same")
    peaks, bills = {}, {}
    for when in ("at the end", "as it is made"):
        for n in (1, 4):
            result = run(cells["backward"], when, n, ranks=4, record=("memory",))
            peaks[when, n], bills[when, n] = result.trace.peak_bytes(0) / LAYER, layers_sent(result)
    assert bills["at the end", 1] == bills["at the end", 4] == bills["as it is made", 1] == 3 / 4 * L
    assert bills["as it is made", 4] == 4 * 3 / 4 * L
    for n in (1, 4):
        assert peaks["at the end", n] - peaks["as it is made", n] == pytest.approx(3 / 4 * L, abs=1)
    assert len({sum(traffic(stage, 400, 4).values()) for stage in (0, 1, 2)}) == 1


def test_gather_just_in_time(cells: dict[str, Any]) -> None:
    says('B="it borrows the other quarters, one layer at a time"')
    for result in (cells["zero_3"], cells["forgotten"], cells["kept"]):
        for rank, pieces in enumerate(result.values):
            for dw, W in zip(pieces, cells["WS"], strict=True):
                assert off(dw, W.grad.chunk(4)[rank]) < 1e-12 and dw.numel() == D * D / 4
    assert cells["errors"](cells["zero_3"].values) < 1e-12


def test_what_it_costs(cells: dict[str, Any]) -> None:
    says('B="one and a half times as much"', "gather, gather, reduce-scatter, 3 Ψ", "2, 2, 3 times (N−1)/N Ψ")
    zero_3, plain = cells["zero_3"], run(cells["data_parallel"], ranks=4)
    assert layers_sent(plain) == 2 * 3 / 4 * L and layers_sent(zero_3) == 3 * 3 / 4 * L
    assert (layers_sent(zero_3, "forward"), layers_sent(zero_3, "backward")) == (3 / 4 * L, 2 * 3 / 4 * L)
    assert [sum(traffic(stage, 400, 4).values()) for stage in (1, 2, 3)] == [600, 600, 900]
    says("forward has one whole layer at a time, backward one and its gradient")
    begins = min(e.done_s for e in zero_3.trace.collectives(0, "backward"))
    forward = [n for t, n in zero_3.trace.live_bytes[0] if 0 < t < begins]
    outputs, pieces = L / 8 + 1 / 8, L / 4  # of all layers, and the rows: a layer has D, a rank D / 8
    assert max(forward) / LAYER == pytest.approx(1 + pieces + outputs, abs=0.2)
    assert zero_3.trace.peak_bytes(0) / LAYER == pytest.approx(2 + 2 * pieces + outputs, abs=0.5)


def test_free_forgotten(cells: dict[str, Any]) -> None:
    says(
        'C="memory alone, whole layers of it"',
        "The numbers are right, and the memory is that of whole layers.",
    )
    zero_3, forgotten, kept = (cells[name] for name in ("zero_3", "forgotten", "kept"))
    assert layers_sent(forgotten) == layers_sent(zero_3)
    assert (forgotten.trace.peak_bytes(0) - zero_3.trace.peak_bytes(0)) / LAYER > L - 1
    says("9 layers' worth, as data parallel training")
    assert layers_sent(kept) == 9 == 2 * 3 / 4 * L
    assert kept.trace.peak_bytes(0) - zero_3.trace.peak_bytes(0) > (L - 2) * LAYER
    says("A plain x @ gathered in autograd does it, too")
    plain = run(
        cells["network"],
        lambda x, w, group: x @ gather_reduce_scatter(w, group, 0),
        ranks=4,
        record=("memory",),
    )
    assert (
        plain.trace.peak_bytes(0) > (L + L / 4) * LAYER > zero_3.trace.peak_bytes(0)
    )  # until backward begins
    assert cells["errors"](plain.values) < 1e-12


def test_prefetch(cells: dict[str, Any]) -> None:
    late, ahead = cells["late"].trace, cells["ahead"].trace
    says("Of six waits one is left, the first.")
    gpus = cells["GPUS"]
    gather_s = gpus.collective_s("all_gather", LAYER, (0, 1, 2, 3))
    product_s = gpus.compute_s(2 * 32 * D * D)
    assert gather_s < product_s  # "where a gather takes no longer than a layer"
    assert late.timeline.makespan == pytest.approx(L * (gather_s + product_s), rel=1e-9)
    assert ahead.timeline.makespan == pytest.approx(gather_s + L * product_s, rel=1e-9)
    says("memory for one layer more: at most two gathered layers are alive")
    assert (ahead.peak_bytes(0) - late.peak_bytes(0)) / LAYER == pytest.approx(1, abs=0.05)
    assert ahead.peak_bytes(0) / LAYER == pytest.approx(2 + L / 4 + 2 / 8, abs=0.05)
    assert ahead.bytes_sent(0) == late.bytes_sent(0)


def test_it_is_data_parallelism(cells: dict[str, Any]) -> None:
    says("64, then 128, then 256 rows", 'B="tensor parallel only"', "What it sends does not know how many.")
    sent = {
        way: [run(cells[way], n, ranks=4).trace.bytes_sent(0) for n in (64, 128, 256)]
        for way in ("by_zero_3", "by_tensor_parallel")
    }
    assert len(set(sent["by_zero_3"])) == 1
    first = sent["by_tensor_parallel"][0]
    assert sent["by_tensor_parallel"] == [first, 2 * first, 4 * first] and first > 0


def test_a_step_of_each_stage(cells: dict[str, Any]) -> None:
    says(
        "From stage to stage one row of the table is cut.",
        "two vectors of moments, and a counter for each layer",
    )
    stages = cells["stages"]
    for stage, result in stages.items():
        expected = stored(stage, L * D * D, 4)
        for held in result.values:
            assert held["parameters"] == 4 * expected["parameters"]
            assert held["gradients"] == 4 * expected["gradients"]
            assert held["state"] == 4 * 2 * expected["state"] + 4 * L
        if stage:
            changed = [a != b for a, b in zip(STAGES[stage], STAGES[stage - 1], strict=True)]
            assert sum(changed) == 1
            assert result.trace.peak_bytes(0) < stages[stage - 1].trace.peak_bytes(0)
    says(
        "stage 3 hides nearly all of its gathers",
        "at the beginning of forward and of backward",
        "the last sum",
    )
    gpus, ranks = cells["GPUS"], (0, 1, 2, 3)
    busy_s = 2 * (3 * L - 1) * gpus.compute_s(2 * 32 * D * D)
    wait_s = 2 * 3 * gpus.collective_s("all_gather", LAYER // 2, ranks)
    assert stages[3].trace.timeline.makespan == pytest.approx(busy_s + wait_s, rel=1e-9)


def test_activations(cells: dict[str, Any]) -> None:
    says('B="nothing"', "ZeRO cuts what is copied. Activations are no copies.")
    kinds = cells["kinds"]
    assert len({kinds[stage]["activations"] for stage in range(4)}) == 1
    for kind, first in (("state", 1), ("gradients", 2), ("parameters", 3)):
        shares = [kinds[stage][kind] / kinds[0][kind] for stage in range(4)]
        assert shares == pytest.approx([1.0 if stage < first else 0.25 for stage in range(4)], rel=1e-3)


def test_the_papers_table(cells: dict[str, Any]) -> None:
    says(
        "7.5 billion parameters in mixed precision, 16 bytes each.",
        "2 for the parameter, 2 for the gradient, 12",
    )
    gigabytes = cells["gigabytes"]
    printed = {  # T4
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", ".47"),
        1024: ("30.1", "15.1", ".12"),
    }
    for n_ranks, row in printed.items():
        for stage, cell in enumerate(row, start=1):
            digits = len(cell.partition(".")[2])
            assert abs(gigabytes(stage, n_ranks) - float(cell)) <= 0.5000001 * 10**-digits
            states = model_states(7_500_000_000, stage, n_ranks, "mixed adam")
            assert gigabytes(stage, n_ranks) == pytest.approx(float(sum(states.values())) / 1e9)
    says("Stage 1 fits from 45 ranks on, stage 2 from 7, stage 3 from 4.")
    for stage, first in ((1, 45), (2, 7), (3, 4)):
        assert gigabytes(stage, first) <= 32 < gigabytes(stage, first - 1)
    says("4 and 2 bytes a parameter: 30 and 15 GB. Stage 3 has none.")
    assert [round(gigabytes(stage, 10**6), 3) for stage in (1, 2, 3)] == [30, 15, 0]


def test_three_formulas(cells: dict[str, Any]) -> None:
    says("Three formulas for the memory of stage 2", "A factor of two. None is wrong")
    estimates = {
        name: cells["estimate"](name, 2, 7_500_000_000, 64) for name in ("paper", "old helper", "helper")
    }
    assert [round(float(n) / 1e9, 2) for n in estimates.values()] == [16.64, 31.88, 17.11]  # S09
    assert (
        1.8 < estimates["old helper"] / estimates["helper"] < estimates["old helper"] / estimates["paper"] < 2
    )
    for name, whole, shared in (("paper", 2, 14), ("old helper", 4, 16), ("helper", 2, 18)):
        assert float(estimates[name]) == 7.5e9 * (whole + shared / 64)
    assert round(in_unit(120e9, "GiB"), 2) == 111.76  # S17


def test_a_small_model(cells: dict[str, Any]) -> None:
    says(
        "on a small model, stage 2 needs more memory", "A piece in place of a vector saves with every layer."
    )
    peaks = cells["peaks"]  # S82
    assert peaks[2, 2] > peaks[2, 1] and peaks[1, 3] > peaks[1, 1]
    assert peaks[8, 3] < peaks[8, 2] < peaks[8, 1]
    says("two gathered layers, are there from the first layer on, and do not grow")
    for stage, per_layer in ((1, 2), (2, 1.25), (3, 0.5)):
        grows = (peaks[8, stage] - peaks[4, stage]) / 4
        assert grows == pytest.approx(per_layer, abs=0.2)


def shard(only_the_model: bool) -> list[int]:
    """The sizes of the gathers of FSDP2, in layers."""

    def step() -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(L)))
        mesh = init_device_mesh("cpu", (4,))
        for layer in () if only_the_model else model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(1, 8)).sum().backward()
        dist.barrier()

    events = run(step, ranks=4).trace.collectives(0)
    return [event.n_elements // 64 for event in events if event.kind == "all_gather"]


def test_production(cells: dict[str, Any]) -> None:
    says("Equal gradients, equal bytes.", "The last six gathers are not FSDP's")
    theirs, ours = cells["theirs"], cells["ours"]
    for mine, their in zip(ours.values, theirs.values, strict=True):
        assert all(off(a, b) < 1e-12 for a, b in zip(mine, their, strict=True))
    assert layers_sent(theirs, "step") == layers_sent(ours, "step") == 13.5
    everything = [e.kind for e in theirs.trace.collectives(0)]
    assert everything[-6:] == ["all_gather"] * 6 and len(everything) == 12 + 6 + 6
    says("call it on the model alone, and all six are whole at once")
    assert shard(only_the_model=False) == [1] * 12 and shard(only_the_model=True)[0] == 6
