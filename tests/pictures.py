"""Renders every picture of the library in its variants, so that a person can look at all of them.

    python tests/pictures.py FOLDER              all of them
    python tests/pictures.py FOLDER layout cube  those whose names begin like that

Every picture is rendered light and dark, as it is on a page (900 pixels), in a narrow column (640)
and on a projector (1920). ``FOLDER/index.html`` shows all. The tests of what every picture must be
(contrast, text that fits, a true sentence) run over the same table.

A new picture is a line: ``PICTURES["its-name"] = lambda theme: the_function(..., theme=theme)``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from lessons_lib import Mesh, compute, region, run
from lessons_lib.errors import RunError
from lessons_lib.layout import Layout
from lessons_lib.pipeline_parallel import SCHEDULES, Times, simulate
from lessons_lib.spmd.result import Run
from lessons_lib.tensor_parallel import SCHEMES
from lessons_lib.tensor_parallel.schemes import VARIANTS
from lessons_lib.timeline import Message, Span, Timeline
from lessons_lib.views import (
    Figure,
    Step,
    branches_picture,
    collective_step,
    cube_picture,
    heads_picture,
    lanes,
    layout_picture,
    mesh_picture,
    pipeline_picture,
    traffic_matrix,
    words_picture,
)
from lessons_lib.views.attention import attention_picture
from lessons_lib.views.bills import bill_picture
from lessons_lib.views.colours import OPERATIONS
from lessons_lib.views.frontier import frontier_picture
from lessons_lib.views.scheme_steps import scheme_step
from lessons_lib.widgets import wait_explorer
from lessons_lib.widgets.attention import shared_out
from lessons_lib.widgets.bills import product_bill
from lessons_lib.widgets.frontier import frontier
from lessons_lib.widgets.recorded import record
from lessons_lib.widgets.recorded_schemes import record_scheme

THEMES = ("light", "dark")
WIDTHS = {"page": 900, "narrow": 640, "projector": 1920}
PICTURES: dict[str, Callable[[str], Figure]] = {}


def main(folder: str, *beginnings: str) -> None:
    from tooling.saved import fonts  # of the notebook build: any machine draws the same pixels

    chosen = [name for name in PICTURES if name.startswith(beginnings or ("",))]
    rows = []
    for name in chosen:
        for theme in THEMES:
            figure = PICTURES[name](theme)
            for size, width in WIDTHS.items():
                path = Path(folder, size, f"{name}-{theme}.png")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(png(figure.svg, width, fonts()))
            rows.append(f'<h2>{name}, {theme}</h2><p>{figure.alt}</p><img src="page/{name}-{theme}.png">')
    Path(folder, "index.html").write_text("<meta charset=utf-8>" + "\n".join(rows), encoding="utf-8")
    print(f"{len(chosen)} pictures, in {len(THEMES)} themes and {len(WIDTHS)} widths: {folder}/index.html")


def png(svg: str, width: int, font_files: list[str]) -> bytes:
    import resvg_py

    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg,
            width=width,
            font_files=font_files,
            skip_system_fonts=True,
            font_family="DejaVu Sans",
            sans_serif_family="DejaVu Sans",
        )
    )


# Runs: everything the rank timeline has to show


def relay() -> float:
    """A message from rank to rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.zeros(256)
    if rank > 0:
        dist.recv(x, rank - 1)
    x = torch.ones(256, 256) @ torch.full((256, 256), x[0].item() + rank)
    if rank < last:
        dist.send(x[0], rank + 1)
    return x[0, 0].item()


def uneven_steps(n_steps: int) -> None:
    """Ranks that have different amounts of work before they meet."""
    x = torch.ones(1000)
    for step in range(n_steps):
        with region("forward"):
            compute(1e-4 * (1 + (dist.get_rank() * 7 + step * 3) % 5))
        dist.all_reduce(x)


def every_collective() -> None:
    """Each collective on the world and on the axes of a mesh, with uneven pieces where that is allowed."""
    mesh = Mesh(row=2, col=dist.get_world_size() // 2)
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(float(24 * n))
    mesh["row"].all_reduce(x)
    mesh["col"].all_gather(x, 0)
    mesh["col"].reduce_scatter(x, 0)
    mesh["row"].broadcast(x, 1)
    mesh["col"].reduce(x, 1)
    dist.gather(x, [torch.empty_like(x) for _ in range(n)] if rank == 1 else None, dst=1)
    dist.scatter(torch.empty(3), [torch.ones(3)] * n if rank == 2 else None, src=2)
    dist.all_to_all_single(
        torch.empty(n * (rank + 1)),
        torch.ones(n * (n + 1) // 2),
        [rank + 1] * n,
        [peer + 1 for peer in range(n)],
    )
    mesh["row"].shift(x, 1)
    dist.barrier()


def tensor_parallel_step() -> None:
    """Two linear layers with matrix products, as the machine counts them."""
    mesh = Mesh(tp=dist.get_world_size())
    for name in ("column", "row") * 3:
        scheme = SCHEMES[name]
        X, W = torch.ones(512, 1024), torch.ones(1024, 1024)
        x, w = scheme.X.shard(X, mesh), scheme.W.shard(W, mesh)
        with region("forward"):
            y = scheme.forward(x, w, mesh)
        with region("backward"):
            scheme.backward(y, x, w, mesh)


def one_stays_away() -> None:
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(1000))


def one_raises() -> None:
    compute(1e-4 * dist.get_rank())
    if dist.get_rank() == 3:
        raise ValueError("the samples of this rank have 3 features, and its weights expect 4")
    dist.barrier()


def a_function_whose_name_says_everything_that_anybody_could_ever_want_to_know_about_what_it_does() -> dict:
    group = Mesh(the_axis_along_which_the_hidden_units_of_the_feed_forward_layers_are_cut=4)
    axis = next(iter(group.sizes))
    group[axis].all_reduce(torch.ones(7))
    return {"loss": 1.23456789, "accuracy": 0.5, "step": 17}


def chatty(n_steps: int) -> None:
    """Thousands of messages and collectives."""
    mesh = Mesh(row=2, col=dist.get_world_size() // 2)
    x = torch.ones(8)
    for _ in range(n_steps):
        compute(2e-5)
        mesh["col"].shift(x, 1)
        mesh["row"].all_reduce(x)


@cache
def ran(fn: Callable, ranks: int, *args: object, **options: object) -> Run:
    """The run, made once for both themes; a failed run too."""
    try:
        return run(fn, *args, ranks=ranks, **options)
    except RunError as error:
        return error.run


def everything(theme: str) -> Figure:
    """All kinds of spans, one unknown, with failed ranks and a cursor."""
    spans = tuple(Span(0, at, at + 1, kind) for at, kind in enumerate([*OPERATIONS, "wait", "odd"]))
    notes = [(0, 12, "raised ValueError"), (1, 7, "returned 3"), (2, 7, "")]
    timeline = Timeline(3, spans, (Message(0, 1.0, 2, 3.0, "32 bytes"),))
    return lanes(timeline, title="Every kind of span", notes=notes, failed=[0], cursor=2, theme=theme)


PICTURES["run-one"] = lambda theme: ran(uneven_steps, 1, 2, machine="1xH100").picture(theme)
PICTURES["run-relay"] = lambda theme: ran(relay, 8).picture(theme)
PICTURES["run-relay-virtual"] = lambda theme: ran(relay, 8, machine="8xH100").picture(theme)
PICTURES["run-uneven"] = lambda theme: ran(uneven_steps, 4, 5, machine="4xH100").picture(theme)
PICTURES["run-nine"] = lambda theme: ran(uneven_steps, 9, 3, machine="2x8xH100").picture(theme)
PICTURES["run-64"] = lambda theme: ran(uneven_steps, 64, 4, machine="8x8xH100").picture(theme)
PICTURES["run-collectives"] = lambda theme: ran(every_collective, 4).picture(theme)
PICTURES["run-memory"] = lambda theme: ran(
    tensor_parallel_step, 4, machine="4xH100", record=("memory",)
).picture(theme)
PICTURES["run-memory-measured"] = lambda theme: ran(tensor_parallel_step, 2, record="memory").picture(theme)
PICTURES["run-memory-16"] = lambda theme: ran(
    tensor_parallel_step, 16, machine="2x8xH100", record="memory"
).picture(theme)
PICTURES["run-chatty-8"] = lambda theme: ran(chatty, 8, 150, machine="8xH100").picture(theme)
PICTURES["run-chatty-64"] = lambda theme: ran(chatty, 64, 40, machine="8x8xH100").picture(theme)
PICTURES["run-stuck"] = lambda theme: ran(one_stays_away, 4).picture(theme)
PICTURES["run-stuck-64"] = lambda theme: ran(one_stays_away, 64).picture(theme)
PICTURES["run-raised"] = lambda theme: ran(one_raises, 5, machine="8xH100").picture(theme)
PICTURES["run-long-names"] = lambda theme: ran(
    a_function_whose_name_says_everything_that_anybody_could_ever_want_to_know_about_what_it_does, 4
).picture(theme)
PICTURES["run-everything"] = everything

# Traffic

PICTURES["traffic-relay"] = lambda theme: traffic_matrix(ran(relay, 8).trace.traffic, theme=theme)
PICTURES["traffic-collectives"] = lambda theme: traffic_matrix(
    ran(every_collective, 4).trace.traffic, theme=theme
)
PICTURES["traffic-chatty-16"] = lambda theme: traffic_matrix(
    ran(chatty, 16, 10, machine="2x8xH100").trace.traffic, theme=theme
)
PICTURES["traffic-chatty-64"] = lambda theme: traffic_matrix(
    ran(chatty, 64, 40, machine="8x8xH100").trace.traffic, theme=theme
)
PICTURES["traffic-none"] = lambda theme: traffic_matrix(ran(one_stays_away, 4).trace.traffic, theme=theme)
PICTURES["traffic-alone"] = lambda theme: traffic_matrix(
    ran(uneven_steps, 1, 2, machine="1xH100").trace.traffic, theme=theme
)

# Layouts: (notation, shape, mesh, rank)

LAYOUTS: dict[str, tuple[str, tuple[int, ...], dict[str, int], int]] = {
    "cut": ("D F@col", (4, 6), {"row": 2, "col": 3}, 4),
    "cut-both": ("D@row F@col", (4, 6), {"row": 2, "col": 3}, 4),
    "order-ik": ("B@i@k D@j", (8, 6), {"i": 2, "j": 2, "k": 2}, 3),
    "order-ki": ("B@k@i D@j", (8, 6), {"i": 2, "j": 2, "k": 2}, 3),
    "both-over-two": ("B@i@j D@k@l", (8, 12), {"i": 2, "j": 2, "k": 2, "l": 2}, 9),
    "copies": ("B D", (4, 6), {"dp": 16}, 0),
    "partial": ("B F +tp", (4, 6), {"dp": 2, "tp": 3}, 1),
    "partial-alone": ("D +dp", (8,), {"dp": 4}, 2),
    "partial-cut": ("D@col +row", (8,), {"row": 2, "col": 4}, 5),
    "one-dim": ("V@tp", (12,), {"tp": 4}, 1),
    "nine": ("B@row D@col", (6, 9), {"row": 3, "col": 3}, 4),
    "wide-64": ("B D@tp", (4, 64), {"tp": 64}, 17),
    "high-64": ("B@tp D", (64, 4), {"tp": 64}, 17),
    "square-64": ("B@row D@col", (64, 64), {"row": 8, "col": 8}, 27),
    "partial-64": ("B F@row +col", (64, 64), {"row": 8, "col": 8}, 27),
    "2.5d-x": ("B@depth@row D@col", (12, 4), {"depth": 3, "row": 2, "col": 2}, 5),
    "2.5d-w": ("D@row F@col", (4, 6), {"depth": 2, "row": 2, "col": 2}, 5),
    "3d-x": ("B@i@j D@k", (8, 4), {"i": 2, "j": 2, "k": 2}, 6),
    "four-dims": ("B@dp S H@tp K", (4, 16, 8, 32), {"dp": 2, "tp": 4}, 6),
    "three-cut": ("B@dp S@cp H@tp", (4, 6, 8), {"dp": 2, "cp": 3, "tp": 4}, 17),
    "three-cut-small": ("B@dp S@cp D@tp", (4, 4, 8), {"dp": 2, "cp": 2, "tp": 2}, 6),
    "three-cut-copies": ("B@dp S@cp H@tp", (4, 4, 8), {"dp": 2, "cp": 2, "tp": 2, "pp": 2}, 3),
    "three-cut-many": ("B@dp S@cp H@tp +ep", (32, 4, 8), {"dp": 16, "cp": 2, "tp": 2, "ep": 2}, 77),
    "scalar": ("+dp", (), {"dp": 4}, 0),
}
for _name, (_notation, _shape, _sizes, _rank) in LAYOUTS.items():
    PICTURES[f"layout-{_name}"] = lambda theme, at=(_notation, _shape, _sizes), rank=_rank: layout_picture(
        *at, rank=rank, theme=theme
    )

# Meshes: what every rank holds of several tensors

MESHES: dict[str, tuple[dict[str, str], dict[str, int], int]] = {
    "1d-column": ({"X": "B D", "W": "D F@tp", "Y": "B F@tp"}, {"tp": 4}, 1),
    "1d-row": ({"X": "B D@tp", "W": "D@tp F", "Y": "B F +tp"}, {"tp": 8}, 5),
    "2d": ({"X": "B@row D@col", "W": "D@row F@col", "Y": "B@row F@col"}, {"row": 3, "col": 3}, 6),
    "2.5d": (
        {"X": "B@depth@row D@col", "W": "D@row F@col", "Y": "B@depth@row F@col"},
        {"depth": 2, "row": 2, "col": 2},
        5,
    ),
    "2.5d-q3": (
        {"X": "B@depth@row D@col", "W": "D@row F@col", "Y": "B@depth@row F@col"},
        {"depth": 2, "row": 3, "col": 3},
        13,
    ),
    "2.5d-gradient": (
        {"dX": "B@depth@row D@col", "dW": "D@row F@col +depth"},
        {"depth": 3, "row": 2, "col": 2},
        5,
    ),
    "2.5d-64": (
        {"X": "B@depth@row D@col", "W": "D@row F@col", "Y": "B@depth@row F@col"},
        {"depth": 4, "row": 4, "col": 4},
        21,
    ),
    "3d": (
        {"X": "B@i@j D@k", "W": "D@k@i F@j", "Y": "B@i@k F@j"},
        {"i": 2, "j": 2, "k": 2},
        2,
    ),
    "dp-tp": ({"X": "B@dp D", "W": "D F@tp"}, {"dp": 16, "tp": 16}, 40),
}
for _name, (_layouts, _sizes, _rank) in MESHES.items():
    PICTURES[f"mesh-{_name}"] = lambda theme, at=(_layouts, _sizes), rank=_rank: mesh_picture(
        *at, rank=rank, theme=theme
    )

for _name, _scheme in {**SCHEMES, **VARIANTS}.items():  # a new scheme needs no new picture
    PICTURES[f"scheme-{_name}"] = lambda theme, scheme=_scheme: mesh_picture(
        {"X": scheme.X, "W": scheme.W, "Y": scheme.Y}, dict.fromkeys(scheme.axes, 2), rank=1, theme=theme
    )

# Cubes: layouts of X, W and Y with three axes

FIRST = ("B@i@j D@k", "D@k@i F@j", "B@i@k F@j")
SECOND = ("B@i@k D@j", "D@j@i F@k", "B@i@j F@k")
CUBES: dict[str, tuple[tuple[str, str, str], dict[str, int], int]] = {
    "first": (FIRST, {"i": 2, "j": 2, "k": 2}, 2),
    "second": (SECOND, {"i": 2, "j": 2, "k": 2}, 2),
    "uneven": (FIRST, {"i": 2, "j": 3, "k": 2}, 8),
    "27": (FIRST, {"i": 3, "j": 3, "k": 3}, 13),
    "64": (FIRST, {"i": 4, "j": 4, "k": 4}, 41),
    "copied": (("B@i D@k", "D@k F@j", "B@i F@j"), {"i": 2, "j": 2, "k": 2}, 5),
    "partial": (("B@i D@k", "D@k F@j", "B@i F@j +k"), {"i": 2, "j": 2, "k": 2}, 5),
    "flat": (FIRST, {"i": 1, "j": 2, "k": 2}, 3),
}
for _name, (_three, _sizes, _rank) in CUBES.items():
    PICTURES[f"cube-{_name}"] = lambda theme, three=_three, sizes=_sizes, rank=_rank: cube_picture(
        *three, sizes, rank=rank, theme=theme
    )

# Pipelines: schedules, p and m

PIPELINES: dict[str, tuple[tuple[str, ...], int, int]] = {
    "1f1b": (("1f1b",), 4, 8),
    "gpipe-1f1b": (("gpipe", "1f1b"), 4, 8),
    "interleaved": (("interleaved",), 4, 8),
    "zb-h1": (("zb-h1",), 4, 8),
    "zb-v": (("zb-v",), 4, 8),
    "dualpipe": (("dualpipe",), 8, 16),
    "1f1b-16": (("1f1b",), 16, 32),
}
for _name, (_schedules, _p, _m) in PIPELINES.items():
    PICTURES[f"pipeline-{_name}"] = lambda theme, names=_schedules, p=_p, m=_m: pipeline_picture(
        *(simulate(SCHEDULES[name](p, m), Times()) for name in names), theme=theme
    )

# Collectives: name, ranks and round

COLLECTIVES = {
    "ring-4": ("ring all-reduce", 4, 2),
    "ring-16": ("ring all-reduce", 16, 9),
    "star-8": ("star all-reduce", 8, 7),
    "tree-8": ("tree broadcast", 8, 2),
}
for _name, (_collective, _ranks, _round) in COLLECTIVES.items():
    PICTURES[f"step-{_name}"] = lambda theme, at=(_collective, _ranks), step=_round: collective_step(
        record(*at), step, theme=theme
    )
PICTURES["waits-stuck"] = lambda theme: wait_explorer(ran(one_stays_away, 4), theme=theme).figure
PICTURES["waits-returned"] = lambda theme: wait_explorer(ran(relay, 8), theme=theme).figure

# Schemes: name, mesh, result, stage and rank

STAGES: dict[str, tuple[str, dict[str, int], str, int, int]] = {
    "column": ("column", {"tp": 4}, "dX", 1, 1),
    "row": ("row", {"tp": 4}, "Y", 1, 3),
    "summa-y": ("2d", {"row": 3, "col": 3}, "Y", 2, 6),
    "summa-dx": ("2d", {"row": 2, "col": 2}, "dX", 1, 1),
    "summa-dw-16": ("2d", {"row": 4, "col": 4}, "dW", 4, 15),
    "depth-y": ("2.5d", {"depth": 3, "row": 2, "col": 2}, "Y", 1, 11),
    "depth-dw": ("2.5d", {"depth": 2, "row": 2, "col": 2}, "dW", 2, 5),
    "depth-sum": ("2.5d", {"depth": 2, "row": 2, "col": 2}, "dW", 3, 5),
    "cube-y": ("3d", {"i": 2, "j": 2, "k": 2}, "Y", 1, 2),
    "cube-dw": ("3d", {"i": 2, "j": 2, "k": 2}, "dW", 1, 7),
}
for _name, (_of, _sizes, _result, _stage, _rank) in STAGES.items():
    _at = _of, tuple(_sizes.items()), _result
    PICTURES[f"stage-{_name}"] = lambda theme, at=_at, stage=_stage, rank=_rank: scheme_step(
        record_scheme(*at), stage, rank=rank, theme=theme
    )

# Bills: X, W, wanted Y and mesh

BILLS: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "sum": ("B D@col", "D@col F", "B F", {"row": 1, "col": 4}),
    "nothing": ("B D", "D F", "B F", {"row": 2, "col": 2}),
    "2d": ("B@row D@col", "D@row F@col", "B@row F@col", {"row": 2, "col": 2}),
    "many": ("B@row@col D", "D@col@row F", "B F@row@col", {"row": 4, "col": 4}),
}
for _name, (*_three_layouts, _sizes) in BILLS.items():
    PICTURES[f"bill-{_name}"] = lambda theme, at=(*_three_layouts,), sizes=_sizes: bill_picture(
        product_bill(*map(Layout, at), tuple(sizes.items())), theme=theme
    )

# Bytes against memory: ranks, tokens, which memory and GPU

SEQUENCE_CUT = [
    Step("norm", "B S@tp D"),
    Step("input of qkv", "B S D", by="all_gather"),
    Step("q, k, v", "B S F@tp", 3),
    Step("heads", "B S D@tp"),
    Step("proj, terms", "B S D +tp"),
    Step("to the stream", "B S@tp D", by="reduce_scatter"),
]
for _p in (1, 4, 8):
    PICTURES[f"branches-{_p}"] = lambda theme, p=_p: branches_picture(
        {"Attention": SEQUENCE_CUT}, p, title="Megatron's sequence parallelism", theme=theme
    )
PICTURES["words-padded"] = lambda theme: words_picture([2, 7, -100, 9, 0, 4], 10, 12, 4, theme=theme)
PICTURES["words-many"] = lambda theme: words_picture([47, 3, 20], 48, 48, 8, theme=theme)
PICTURES["heads-own"] = lambda theme: heads_picture(
    [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]], theme=theme
)
PICTURES["heads-shared"] = lambda theme: heads_picture(
    [[rank] for rank in range(8)], [[rank // 4] for rank in range(8)], theme=theme
)
PICTURES["frontier-8"] = lambda theme: frontier_picture(frontier(8, 2304, "kept", "H100"), theme=theme)
PICTURES["frontier-64"] = lambda theme: frontier_picture(frontier(64, 9216, "peak", "V100"), theme=theme)

# Attention shared out: method, ranks, mask; all steps or one

PICTURES["attention-ring"] = lambda theme: attention_picture(shared_out("ring", 4, "causal"), theme=theme)
PICTURES["attention-step"] = lambda theme: attention_picture(
    shared_out("zigzag", 8, "causal"), 3, theme=theme
)
PICTURES["attention-heads"] = lambda theme: attention_picture(shared_out("ulysses", 8, "none"), theme=theme)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "notebooks"))
    main(*sys.argv[1:])
