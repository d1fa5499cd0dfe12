"""What a launch costs, as ratios against what people would use instead, measured in one run.

    make bench                     everything that takes seconds
    python -m tests.bench --all    also 64 processes started by spawn, which takes minutes

Absolute times depend on the machine and on what else it does; the ratio and the spread are the
result. "goal" is what this project asks of itself on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import sync_playwright
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lessons_lib import Mesh, run
from lessons_lib.errors import DeadlockError
from lessons_lib.grading import check
from lessons_lib.grading.catalogue import EXERCISES
from lessons_lib.models import corpus
from lessons_lib.models.gpt import GPT, Block, GPTConfig
from lessons_lib.pipeline_parallel import (
    cut_batch,
    cut_model,
    execute,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_v,
)
from lessons_lib.plan import PLANS, parallelize
from lessons_lib.sequence_parallel import ATTENTIONS, SequenceColumnKept, SequenceParallelBlock
from lessons_lib.spmd.operation import Operation
from lessons_lib.spmd.rank_group import RankGroup
from lessons_lib.tensor_parallel import SCHEMES, Cube, TensorParallelLinear
from lessons_lib.timeline import Where
from tests.browser.run_notebook import CHROMIUM_FLAGS, find_chromium, jupyterlab, run_all, wait_until_idle


def work() -> float:
    """What a first cell does on every rank."""
    x = torch.full((8,), float(dist.get_rank()))
    dist.all_reduce(x)
    return x.sum().item()


def _process(rank: int, n_ranks: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=n_ranks)
    work()
    dist.destroy_process_group()


def start_processes(method: str, n_ranks: int) -> None:
    """The same work on processes, as the documentation of torch.multiprocessing shows it."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _process, args=(n_ranks, f"{folder}/rendezvous"), nprocs=n_ranks, start_method=method
        )


def run_threads(n_ranks: int) -> None:
    assert run(lambda: work(), ranks=n_ranks).values == [8 * sum(range(n_ranks))] * n_ranks


def run_mesh(n_ranks: int) -> None:
    rows = {8: 2, 64: 8}[n_ranks]
    run(lambda: Mesh(row=rows, col=n_ranks // rows)["col"].all_reduce(torch.ones(8)), ranks=n_ranks)


def run_processes(n_ranks: int) -> None:
    result = run(lambda: work(), ranks=n_ranks, transport="processes")
    assert result.values == [8 * sum(range(n_ranks))] * n_ranks


def deadlock(transport: str) -> None:
    def skipped() -> None:
        if dist.get_rank() != 2:
            dist.barrier()

    try:
        run(skipped, ranks=8, transport=transport)
    except DeadlockError:
        return
    raise AssertionError("no deadlock was reported")


def all_reduces(n_bytes: int, repeats: int) -> float:
    """Median seconds of an all-reduce, on rank 0."""
    x = torch.ones(n_bytes // 4)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _plain_gloo(rank: int, n_ranks: int, rendezvous: str, n_bytes: int, repeats: int, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=n_ranks)
    seconds = all_reduces(n_bytes, repeats)
    if rank == 0:
        with open(results, "w") as file:
            file.write(repr(seconds))
    dist.destroy_process_group()


def plain_gloo(n_ranks: int, n_bytes: int, repeats: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (n_ranks, f"{folder}/rendezvous", n_bytes, repeats, f"{folder}/seconds")
        multiprocessing.start_processes(_plain_gloo, args=arguments, nprocs=n_ranks, start_method="fork")
        with open(f"{folder}/seconds") as file:
            return float(file.read())


NOWHERE = Where("", 0, "")


def not_written_down(
    group: RankGroup, kind: str, sequence: int, *_: Any, root: Any = None, **__: Any
) -> Operation:
    """In place of ``RankGroup._operation``: no shapes, no bytes, no line, no record."""
    return Operation(
        group.owner.number, kind, "", group.members, sequence, (), (), 0, 0, 0, 0.0, NOWHERE, "", root=root
    )


def mlp_step(D: int, record: tuple[str, ...] = ()) -> float:
    """Seconds of forward and backward of a column and a row layer on two thread ranks, without the launch."""

    def steps(n_steps: int) -> None:
        mesh = Mesh(tp=2)
        up = TensorParallelLinear.from_linear(torch.nn.Linear(D, 4 * D), SCHEMES["column"], mesh)
        down = TensorParallelLinear.from_linear(torch.nn.Linear(4 * D, D), SCHEMES["row"], mesh)
        x = torch.randn(1024, D)
        for _ in range(n_steps):
            down(torch.nn.functional.gelu(up(x))).square().mean().backward()

    return (run(steps, 20, ranks=2, record=record).seconds - run(steps, 0, ranks=2).seconds) / 20


def untraced_mlp_step(D: int) -> float:
    with mock.patch.object(RankGroup, "_operation", not_written_down):
        return mlp_step(D)


# The same 8 lanes of 64 blocks under a slider: our frame with SVG, and ipywidgets' interactive with a PNG.
SLIDERS = [
    """
import matplotlib.pyplot as plt
from ipywidgets import IntSlider, interactive
from lessons_lib.timeline import Span, Timeline
from lessons_lib.views import lanes
from lessons_lib.views.colours import OPERATIONS
from lessons_lib.widgets.explorer import Explorer, Slider

def blocks(late):
    kinds = ["F", "B"] * 32
    starts = [[rank * late / 20 + at for at in range(64)] for rank in range(8)]
    return tuple(Span(r, s, s + 0.9, kind) for r in range(8) for s, kind in zip(starts[r], kinds))

def ours(late):
    return lanes(Timeline(8, blocks(late), clock="virtual"), title=f"{late} late", until=90)

def theirs(late):
    figure, axes = plt.subplots(figsize=(9, 4))
    for rank in range(8):
        mine = [span for span in blocks(late) if span.rank == rank]
        boxes = [(span.start, span.end - span.start) for span in mine]
        axes.broken_barh(boxes, (rank - 0.4, 0.8), color=[OPERATIONS[span.kind][0] for span in mine])
    axes.set(title=f"{late} late", xlim=(0, 90), yticks=range(8), xlabel="time")
    axes.invert_yaxis()
    plt.show()
""",
    'Explorer(ours, {"late": Slider("Late", 0, 40)}, {"late": 0})',
    'interactive(theirs, late=IntSlider(description="Late", min=0, max=40, value=0))',
]
FROM_KEY_TO_PICTURE = """index => {
    const cell = document.querySelectorAll(".jp-Notebook .jp-Cell")[index];
    const image = () => cell.querySelector("img[src^='data:image/png']");
    const picture = () => image()?.src ?? cell.querySelector(".explorer svg[role=img] title")?.textContent;
    const before = picture();
    window.took = new Promise(resolve => {
        let start;
        const key = () => { start = performance.now(); };
        document.addEventListener("keydown", key, {capture: true, once: true});
        const observer = new MutationObserver(async () => {
            if (!picture() || picture() === before) return;
            observer.disconnect();
            await image()?.decode();
            requestAnimationFrame(() => resolve((performance.now() - start) / 1000));
        });
        observer.observe(cell, {childList: true, subtree: true, characterData: true, attributes: true});
    });
}"""


def slider_keys(chromium: str, presses: int = 15) -> tuple[list[float], list[float]]:
    """Seconds from a key on a slider to the changed picture in a browser: ours, and matplotlib's."""
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS) as browser,
    ):
        notebook = Path(folder, "sliders.ipynb")
        cells = [new_code_cell(source.strip()) for source in SLIDERS]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
        nbformat.write(new_notebook(cells=cells, metadata=kernel), notebook)
        with jupyterlab(Path(folder), notebook) as url:
            page = browser.new_page(viewport={"width": 1200, "height": 1600})
            page.goto(url)
            wait_until_idle(page)
            run_all(page, [])
            results: list[list[float]] = [[], []]
            for _ in range(presses + 2):
                for which, times in enumerate(results):
                    cell = page.locator(".jp-Notebook .jp-Cell").nth(1 + which)
                    cell.get_by_role("slider").focus()
                    page.evaluate(FROM_KEY_TO_PICTURE, 1 + which)
                    page.keyboard.press("ArrowRight")
                    times.append(page.evaluate("window.took"))
                    page.wait_for_timeout(200)
    return results[0][2:], results[1][2:]


def right_solution(id: str) -> None:
    """Check the reference solution of an exercise."""
    assert check(id, *EXERCISES[id].functions).passed


FIRST_CHECK = """
import time
from lessons_lib.grading import check
from lessons_lib.grading.catalogue import EXERCISES
began = time.perf_counter()
assert check("08-column", *EXERCISES["08-column"].functions).passed
print(time.perf_counter() - began)
"""


def first_check() -> float:
    """Seconds of the first check in a new kernel, which also starts the process that forks its children."""
    command = [sys.executable, "-c", FIRST_CHECK]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cube_mlp() -> None:
    """Forward and backward of two 3D layers on 27 ranks, launch and mesh included."""

    def step() -> None:
        mesh, first = Mesh(i=3, j=3, k=3), Cube()
        up = TensorParallelLinear.from_linear(torch.nn.Linear(108, 432), first, mesh)
        down = TensorParallelLinear.from_linear(torch.nn.Linear(432, 108), first.exchanged(), mesh)
        x = torch.randn(first.X.local_shape((108, 108), mesh.sizes))
        down(torch.nn.functional.gelu(up(x))).square().mean().backward()

    run(step, ranks=27)


def cube_gpt() -> None:
    """A training step of a whole GPT of two layers on 27 ranks, launch, mesh and cutting included."""

    def step() -> None:
        config = GPTConfig(L=2, H=6, D=108, S=16)
        model = GPT(config)
        parallelize(model, PLANS["3d"], Mesh(i=3, j=3, k=3))
        optimizer = torch.optim.AdamW(model.parameters())
        model.loss(*corpus.batch(0, 9, config.S)).backward()
        optimizer.step()

    run(step, ranks=27)


def by_hand(up: torch.nn.Linear, down: torch.nn.Linear) -> torch.nn.Module:
    mesh = Mesh(tp=dist.get_world_size())
    layers = zip((up, down), ("column", "row"), strict=True)
    first, second = (TensorParallelLinear.from_linear(layer, SCHEMES[name], mesh) for layer, name in layers)
    return torch.nn.Sequential(first, torch.nn.GELU(), second)


def by_styles(up: torch.nn.Linear, down: torch.nn.Linear) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(up, torch.nn.GELU(), down)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def block_by_hand(block: Block) -> torch.nn.Module:
    """Megatron's sequence parallelism, its gathered inputs kept, as DTensor keeps them."""
    return SequenceParallelBlock(block, BLOCK.S, Mesh(tp=dist.get_world_size()), SequenceColumnKept())


def block_by_styles(block: Block) -> torch.nn.Module:
    first, last = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    styles = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    styles |= {"attention.qkv": first, "attention.proj": last, "mlp.up": first, "mlp.down": last}
    return parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), styles)


BLOCK = GPTConfig(L=1, H=8, D=64, S=64)


def sequence_parallel_step(make: Callable[[Block], torch.nn.Module], n_ranks: int) -> float:
    """Seconds of forward and backward of a block whose stream is cut, on thread ranks, once it is made."""

    def steps() -> float:
        block = make(Block(BLOCK))
        x = torch.randn(2, BLOCK.S // n_ranks, BLOCK.D)
        block(x).square().mean().backward()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(10):
            block(x).square().mean().backward()
        dist.barrier()
        return (time.perf_counter() - began) / 10

    return max(run(steps, ranks=n_ranks).values)


def long_sequence(S: int, n_ranks: int = 8) -> int:
    """Bytes that a rank holds at most in zigzag attention over ``S`` tokens, forward and backward."""

    def step() -> None:
        q, k, v = (torch.randn(1, 2, S // n_ranks, 16, requires_grad=True) for _ in range(3))
        ATTENTIONS["zigzag"].attend(q, k, v, Mesh(cp=n_ranks)["cp"]).sum().backward()

    trace = run(step, ranks=n_ranks, record="memory", timeout_s=600).trace
    return max(map(trace.peak_bytes, range(n_ranks)))


def mlp_of(make: Callable[..., torch.nn.Module], n_ranks: int) -> float:
    """Seconds of forward and backward of a column and a row layer on thread ranks, once they are made."""

    def steps() -> float:
        model = make(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        x = torch.randn(64, 64)
        model(x).square().mean().backward()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(20):
            model(x).square().mean().backward()
        dist.barrier()
        return (time.perf_counter() - began) / 20

    return max(run(steps, ranks=n_ranks).values)


PIPELINES = {
    "ScheduleGPipe": gpipe(4, 8),
    "Schedule1F1B": one_f_one_b(4, 8),
    "ScheduleInterleaved1F1B": interleaved(4, 8, 2),
    "ScheduleZBVZeroBubble": zb_v(4, 8),
}
Stages = dict[int, torch.nn.Module]


def pipeline_step(name: str, prepare: Callable[..., Callable[[], object]]) -> float:
    """Seconds of a step of a small GPT in a pipeline of four thread ranks."""
    schedule = PIPELINES[name]
    tokens = torch.randint(256, (2, 16, 32), generator=torch.Generator().manual_seed(0))

    def steps() -> float:
        model = GPT(GPTConfig(L=8, D=64, H=4, S=32))
        stages = cut_model(model, schedule.n_stages, costs=[1] * 10)
        mine = {number: stages[number] for number in schedule.stages[dist.get_rank()]}
        step = prepare(name, model, mine, *tokens)
        step()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(4):
            step()
        dist.barrier()
        return (time.perf_counter() - began) / 4

    return max(run(steps, ranks=4).values)


def pipeline_by_us(
    name: str, model: GPT, mine: Stages, X: torch.Tensor, Y: torch.Tensor
) -> Callable[[], object]:
    schedule, group = PIPELINES[name], Mesh(pp=4)["pp"]
    microbatches = cut_batch(X, Y, schedule.n_microbatches)
    return lambda: execute(schedule, mine, microbatches, model.cross_entropy, group)


def pipeline_by_torch(
    name: str, model: GPT, mine: Stages, X: torch.Tensor, Y: torch.Tensor
) -> Callable[[], object]:
    schedule, cpu = PIPELINES[name], torch.device("cpu")
    stages: list[Any] = [
        pipelining.PipelineStage(module, number, schedule.n_stages, cpu) for number, module in mine.items()
    ]
    theirs = getattr(pipelining, name)(
        stages[0] if len(stages) == 1 else stages,
        schedule.n_microbatches,
        loss_fn=lambda logits, targets: model.cross_entropy(logits, targets) / targets.numel(),
    )
    inputs = [X] if any(stage.is_first for stage in stages) else []
    targets = {"target": Y, "losses": []} if any(stage.is_last for stage in stages) else {}
    return lambda: theirs.step(*inputs, **targets)


def import_in_new_process(statement: str) -> None:
    subprocess.run([sys.executable, "-c", statement], check=True)


def seconds(action: Callable[[], object], repeats: int, warm_up: int = 1) -> list[float]:
    for _ in range(warm_up):
        action()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return times


def text(times: list[float]) -> str:
    low, middle, high = (1000 * time for time in (min(times), statistics.median(times), max(times)))
    return f"{middle:9.1f} ms ({low:.1f} to {high:.1f}, n={len(times)})"


def report(what: str, times: list[float], goal_ms: float | None = None) -> None:
    reached = ""
    if goal_ms is not None:
        reached = (
            f"   goal {goal_ms:g} ms: {'reached' if statistics.median(times) * 1000 <= goal_ms else 'MISSED'}"
        )
    print(f"{what:44}{text(times):42}{reached}", flush=True)


def ratio(what: str, times: list[float], ours: list[float], goal: float | None = None) -> None:
    factor = statistics.median(times) / statistics.median(ours)
    reached = "" if goal is None else f"   goal {goal:.3g} times: {'reached' if factor >= goal else 'MISSED'}"
    number = f"{factor:,.0f}" if factor >= 10 else f"{factor:.2f}"
    print(f"  {what:42}{text(times):42}   {number} times ours{reached}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="also start 64 processes by spawn")
    options = parser.parse_args()

    for n_ranks, goal in ((2, None), (8, 10), (64, 60)):
        ours = seconds(lambda n=n_ranks: run_threads(n), repeats=20, warm_up=3)
        report(f"launch {n_ranks} thread ranks", ours, goal)
        ratio("fork with gloo", seconds(lambda n=n_ranks: start_processes("fork", n), 3), ours)
        if n_ranks < 64 or options.all:
            spawned = seconds(lambda n=n_ranks: start_processes("spawn", n), repeats=3, warm_up=0)
            ratio("torch.multiprocessing.spawn with gloo", spawned, ours, 600 if n_ranks == 8 else None)
            if n_ranks == 8:
                spawned_8 = spawned
    for n_ranks, goal in ((8, 20), (64, 200)):
        report(
            f"launch {n_ranks} thread ranks and a Mesh", seconds(lambda n=n_ranks: run_mesh(n), 10, 2), goal
        )
    processes = seconds(lambda: run_processes(8), repeats=10, warm_up=2)
    report("launch 8 process ranks", processes)
    ratio("fork with gloo", seconds(lambda: start_processes("fork", 8), 5), processes, 1 / 1.5)
    ratio("torch.multiprocessing.spawn with gloo", spawned_8, processes, 30)
    report("deadlock of 8 thread ranks, launch to report", seconds(lambda: deadlock("threads"), 10, 2), 300)
    report("deadlock of 8 process ranks", seconds(lambda: deadlock("processes"), 5, 1), 1500)
    for n_bytes, repeats in ((4_096, 100), (4_194_304, 20)):
        for transport in ("threads", "processes"):
            values = [
                run(all_reduces, n_bytes, repeats, ranks=4, transport=transport).values[0] for _ in range(3)
            ]
            report(f"all_reduce of {n_bytes:,} bytes, 4 {transport}", values)
        ratio("plain gloo on 4 processes", [plain_gloo(4, n_bytes, repeats) for _ in range(3)], values)
    for D, record, goal in ((128, (), 1.1), (256, ("flops", "memory"), 1.5)):
        pairs = [(mlp_step(D, record), untraced_mlp_step(D)) for _ in range(9)]
        traced, plain = map(list, zip(*pairs, strict=True))
        what = " and ".join(record) or "communication"
        report(f"a step of an MLP at d={D}, recording {what}", traced)
        factor = statistics.median(traced) / statistics.median(plain)
        reached = "reached" if factor <= goal else "MISSED"
        print(f"  {'the same, not recorded':42}{text(plain):42}  {factor:.2f} times   goal {goal}: {reached}")
    chromium = find_chromium()
    if chromium is None:
        print("no Chromium: sliders are not measured")
    else:
        ours, theirs = slider_keys(chromium)
        report("a slider's key to the changed picture", ours, 120)
        ratio("interactive with a matplotlib PNG", theirs, ours, 3)
    os.environ["LESSONS_PROGRESS"] = "off"
    report("first check of a right solution", [first_check() for _ in range(3)], 3000)
    for id in EXERCISES:
        report(f"check of a right solution, {id}", seconds(lambda id=id: right_solution(id), 5), 3000)
    report("a 27-rank cube MLP, forward and backward", seconds(cube_mlp, 5), 1500)
    report("a step of a GPT of two layers on a cube of 27", seconds(cube_gpt, 5), 5000)
    for n_ranks in (4, 8):
        pairs = [(mlp_of(by_hand, n_ranks), mlp_of(by_styles, n_ranks)) for _ in range(9)]
        ours, theirs = map(list, zip(*pairs, strict=True))
        report(f"a step of a column and a row layer, {n_ranks} threads", ours)
        ratio("the same with DTensor's parallel styles", theirs, ours, 1)
    for n_ranks in (4, 8):
        pairs = [
            (sequence_parallel_step(block_by_hand, n_ranks), sequence_parallel_step(block_by_styles, n_ranks))
            for _ in range(9)
        ]
        ours, theirs = map(list, zip(*pairs, strict=True))
        report(f"a step of a sequence-parallel block, {n_ranks} threads", ours)
        ratio("the same with DTensor's parallel styles", theirs, ours, 1)
    peaks: dict[int, int] = {}
    for S in (4096, 8192, 16384):
        times = seconds(lambda S=S: peaks.update({S: long_sequence(S)}), repeats=1, warm_up=0)
        report(f"zigzag attention, {S:,} tokens on 8 threads", times)
    grown = peaks[8192] - peaks[4096]
    linear = "reached" if peaks[16384] - peaks[8192] == 2 * grown else "MISSED"
    held = ", ".join(f"{n_bytes / 1e6:.2f}" for n_bytes in peaks.values())
    print(f"  peak of a rank: {held} MB; twice the tokens add twice the bytes   goal: {linear}", flush=True)
    for name, schedule in PIPELINES.items():
        pairs = [
            (pipeline_step(name, pipeline_by_us), pipeline_step(name, pipeline_by_torch)) for _ in range(9)
        ]
        ours, theirs = map(list, zip(*pairs, strict=True))
        report(f"a step of a GPT by {schedule.name}, 4 threads", ours)
        ratio(f"the same by torch's {name}", theirs, ours, 1)
    empty = seconds(lambda: import_in_new_process("pass"), 5)
    report("a Python that does nothing", empty)
    report(
        "a Python that imports lessons_lib",
        seconds(lambda: import_in_new_process("import lessons_lib"), 5),
        300,
    )
    report("a Python that imports torch", seconds(lambda: import_in_new_process("import torch"), 3))


if __name__ == "__main__":
    main()
