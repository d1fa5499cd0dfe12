"""Lesson 10: every number its text states is what its cells measure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import has_tag, read

from lessons_lib import Layout, Mesh, run
from lessons_lib.cost.activations import kept_by_layer, published
from lessons_lib.models.gpt import GPT
from lessons_lib.plan import GPT_1D, parallelize
from lessons_lib.sequence_parallel import SequenceColumn, SequenceColumnKept, SequenceParallelBlock

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "10_megatron_sequence_parallel.py"
LESSON = read(SOURCE)

pytestmark = pytest.mark.slow  # it runs the whole lesson


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names the lesson's cells define, after all of them have run."""
    names: dict[str, Any] = {"__name__": "lesson_10"}
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


@pytest.mark.parametrize("cut", [False, True])
def test_the_pictures_show_what_a_run_does(cells: dict[str, Any], cut: bool) -> None:
    """Every tensor of both pictures, its shape on every rank, and the collectives between."""
    config, B = cells["CONFIG"], cells["B"]
    branches = cells["sp_branches" if cut else "branches"]

    def step() -> dict[str, tuple[int, ...]]:
        mesh, model = Mesh(tp=4), GPT(config)
        block = parallelize(model, GPT_1D, mesh).blocks[0]
        if cut:
            block = SequenceParallelBlock(GPT(config).blocks[0], config.S, mesh)
        shapes: dict[str, tuple[int, ...]] = {}

        def note(name: str) -> Any:
            return lambda _module, inputs, y: shapes.update({name: y.shape, f"into {name}": inputs[0].shape})

        for name, module in block.named_modules():
            module.register_forward_hook(note(name))
        block(torch.randn(B, config.S // (4 if cut else 1), config.D))
        return shapes

    result = run(step, ranks=4)
    names = {"Attention": ("attention_norm", "attention.qkv", "attention.proj", "into attention.proj")}
    names["MLP"] = ("mlp_norm", "mlp.up", "mlp.down", "into mlp.down")
    for branch, (norm, first, last, before_last) in names.items():
        steps = branches[branch]
        shown = [
            Layout(each.layout).local_shape((B, config.S, each.width * config.D), {"tp": 4})
            for each in steps
            if not Layout(each.layout).partial and each.name[:8] != "input of"
        ]
        for shapes in result.values:
            inside = [shapes[first], shapes[before_last]] if branch == "Attention" else [shapes[first]]
            assert shown == [tuple(shape) for shape in (shapes[norm], *inside, shapes[last])]
    kinds = [each.by for steps in branches.values() for each in steps if each.by]
    assert [event.kind for event in result.trace.collectives(0)] == kinds
    for event in result.trace.collectives(0):
        assert event.n_elements == B * config.S * config.D


def test_what_is_kept(cells: dict[str, Any]) -> None:
    of_1d, config, B = cells["of_1d"], cells["CONFIG"], cells["B"]
    for p, n_bytes in of_1d.items():
        formula = sum(kept_by_layer(config, B, p).values())
        assert n_bytes / 4 == pytest.approx(formula, rel=0.03)
    says("not 12 %", "What norms take and give is a quarter of what one rank keeps.")
    says("On eight ranks it is most of it: it has not become less, while all else has.")
    for p, low, high in ((1, 0.24, 0.26), (8, 0.6, 0.8)):
        terms = kept_by_layer(config, B, p)
        norms = terms["inputs of norms"] + terms["outputs of norms"]
        assert low < norms / sum(terms.values()) < high
    assert of_1d[8] / of_1d[1] > 0.3
    says("Gathered again, it is an eighth on eight ranks: all that is kept is cut.")
    says("Kept, half of the profit is gone.")
    again, keeps = (
        run(cells["kept_sp"], column, ranks=8).values[0]
        for column in (SequenceColumn(), SequenceColumnKept())
    )
    assert again / of_1d[1] == pytest.approx(1 / 8, rel=0.05)
    assert (of_1d[8] - keeps) / (of_1d[8] - again) == pytest.approx(0.5, abs=0.05)


def test_halfway(cells: dict[str, Any]) -> None:
    says("The same numbers for the same bytes, and each rank has normed a quarter of the tokens.")
    says("each of the two is half of an all-reduce")
    results = cells["results"]
    truth = torch.nn.functional.layer_norm(cells["TERMS"].sum(0), (cells["CONFIG"].D,))
    for result in results.values():
        assert all(off(y, truth) < 1e-14 for y in result.values)
        assert {result.trace.bytes_sent(rank) for rank in range(4)} == {2 * 3 * cells["TERMS"][0].nbytes // 4}
    halves = [event.bytes_sent for event in results["halfway"].trace.collectives(0)]
    assert len(halves) == 2 and len(set(halves)) == 1


def test_what_is_sent(cells: dict[str, Any]) -> None:
    says("In units of (p−1)/p · B·S·D: 8, 8 and 10.")
    sent = [
        sum(cells["of_the_stream"](trace, way) for way in ("forward", "backward"))
        for trace in cells["traces"].values()
    ]
    assert list(cells["traces"]) == ["1D", "input kept", "gathered again"] and sent == [8, 8, 10]
    says("who wants all of the memory gathers two more times")
    gathers = [
        sum(event.kind == "all_gather" for event in cells["traces"][name].collectives(0))
        for name in ("input kept", "gathered again")
    ]
    assert gathers[1] - gathers[0] == 2


def test_sums_of_vectors_take_time(cells: dict[str, Any]) -> None:
    says("Left out are six sums of vectors of D numbers.")
    says("hardly any bytes, and in the picture more than half of the time")
    trace = run(cells["sent_sp"], SequenceColumn(), ranks=4, machine="4xH100").trace
    sums = [event for event in trace.collectives(0) if event.kind == "all_reduce"]
    assert len(sums) == 6 and all(event.n_elements == cells["CONFIG"].D for event in sums)
    assert sum(event.bytes_sent for event in sums) < 0.01 * trace.bytes_sent(0)
    assert sum(event.done_s - event.issued_s for event in sums) > 0.5 * trace.timeline.makespan


def test_the_pair(cells: dict[str, Any]) -> None:
    says("Y is right, and dX is one rank's opinion: three of four terms are lost.")
    X, W1, W2, dY = (cells[name] for name in ("X", "W1", "W2", "dY"))
    right, wrong = (
        [torch.cat(each) for each in zip(*run(cells["mlp"], cells[pair], ranks=4).values, strict=True)]
        for pair in ("gather_reduce_scatter", "gather_split")
    )
    assert all(off(y, X @ W1 @ W2) < 1e-14 for y in (right[0], wrong[0]))
    assert off(right[1], dY @ W2.T @ W1.T) < 1e-14 and off(wrong[1], dY @ W2.T @ W1.T) > 0.5


def test_the_norms_drift(cells: dict[str, Any]) -> None:
    """S23: the ranks differ after one step, and the loss does not say so."""
    right, wrong = cells["right"], cells["wrong"]
    says("All ranks report the same loss, and it falls.")
    for values in (right, wrong):
        assert all(losses == values[0][0] for losses, _, _ in values)
        assert values[0][0][-1] < 0.6 * values[0][0][0]
    says('C="not in 40 steps"', "the ranks' norms differ from step 1 on")
    assert len(right[0][0]) == 40
    assert max(abs(a - b) / a for a, b in zip(right[0][0], wrong[0][0], strict=True)) < 0.01
    assert set(right[0][1]) == {0.0} and min(wrong[0][1]) > 0.005
    says("With the sum they are one model, to the last bit. Without it there are four")
    assert len({loss for *_, loss in right}) == 1 and len({loss for *_, loss in wrong}) == 4


def test_attention_sees_all_tokens(cells: dict[str, Any]) -> None:
    says('B="32 tokens, 2 heads"')
    assert (cells["tokens"], cells["heads"]) == (32, 2)


def test_the_size_of_gpt_3() -> None:
    says("GPT-3, with 96 heads, on eight ranks", "The 23 of 1D are 10 that do not shrink and 104/8 that do")
    says("with the sequence cut all 114 are over 8", "and 34/8 are left")
    none, one_d, cut, selective = (
        float(published(way, S=2048, D=12288, H=96, tp=8))
        for way in ("none", "tp", "tp + sp", "tp + sp, selective")
    )
    assert (none, one_d, cut, selective) == (114, 10 + 104 / 8, 114 / 8, 34 / 8) and one_d == 23


def test_dropout(cells: dict[str, Any]) -> None:
    says(
        "a common one and, in a fork, each rank's own",
        "else tokens 0, 8, 16 and 24 of 32 lose the same numbers",
    )
    common, own = zip(*run(cells["masks"], ranks=4).values, strict=True)
    assert all(each == common[0] for each in common)
    assert len(set(map(tuple, own))) == 4  # seen at a glance


def test_torch_does_the_same(cells: dict[str, Any]) -> None:
    ours, theirs = cells["by_us"], cells["by_torch"]
    assert all(off(a, b) < 1e-14 for a, b in zip(ours.values, theirs.values, strict=True))
    says("Forward the same. Backward torch's count ends earlier")
    sent = [[result.trace.bytes_sent(0, way) for way in ("forward", "backward")] for result in (ours, theirs)]
    vectors = 6 * 2 * 3 * cells["CONFIG"].D // 4 * 8  # of two norms, two numbers each, and two biases
    assert sent[0][0] == sent[1][0] and sent[0][1] - vectors == sent[1][1]
