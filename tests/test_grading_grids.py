"""Lessons 07, 13, 14 and 15: right solutions pass, however they are written; wrong ones are told by name."""

import re
from functools import cache

import pytest
import torch
import torch.distributed as dist

from lessons_lib import Layout
from lessons_lib import redistribute as library
from lessons_lib.grading import check
from lessons_lib.grading.catalogue import EXERCISES, find
from lessons_lib.grading.exercise import Draw
from lessons_lib.grading.lesson_07 import redistribute, redistribute_on_grid
from lessons_lib.grading.lesson_13 import summa_backward
from lessons_lib.grading.lesson_14 import norm_backward, tesseract_backward
from lessons_lib.grading.lesson_15 import cube_backward, cube_forward, two_linears
from lessons_lib.layout import coordinates
from lessons_lib.tensor_parallel import Cube, Summa, Tesseract

GRIDS = [id for id in EXERCISES if id[:2] in ("07", "13", "14", "15")]


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "progress.json"))


def stub(*args):
    """Do it."""


# ---- right solutions unlike ours ----


def redistribute_in_place(x, source, target, mesh):
    """The same calls by torch alone, and an all-to-all of lists."""
    group, p = mesh["tp"].process_group, mesh["tp"].size
    at = {
        layout: next((n for n, dim in enumerate("BD") if layout.dim(dim)), None)
        for layout in (source, target)
    }
    before, after = at[source], at[target]
    y = x.clone()
    if source.partial and after is None:
        dist.all_reduce(y, group=group)
    elif source.partial:
        parts = [part.contiguous() for part in x.chunk(p, after)]
        dist.reduce_scatter(y := torch.empty_like(parts[0]), parts, group=group)
    elif before is None and after is not None:
        y = x.chunk(p, after)[mesh["tp"].rank]
    elif before is not None and after is None:
        parts = [torch.empty_like(x) for _ in range(p)]
        dist.all_gather(parts, x, group=group)
        y = torch.cat(parts, before)
    elif before != after:
        parts = [part.contiguous() for part in x.chunk(p, after)]
        dist.all_to_all(arrived := [torch.empty_like(part) for part in parts], parts, group=group)
        y = torch.cat(arrived, before)
    return y


def redistribute_directly(x, source, target, mesh):
    """Every rank sends every other what that one lacks, and nothing else: less than by collectives."""
    if source.partial:
        return library.redistribute(x, source, target, mesh)
    sizes, shape = mesh.sizes, source.global_shape(x.shape, mesh.sizes)
    places = coordinates(sizes)
    has, wants = ([layout.slices(shape, sizes, at) for at in places] for layout in (source, target))
    whole, load, operations, buffers = x.new_zeros(shape), [0] * len(places), [], []
    whole[has[mesh.rank]] = x
    for to, goal in enumerate(wants):
        for held in dict.fromkeys(map(repr, has)):
            givers = [rank for rank, slices in enumerate(has) if repr(slices) == held]
            both = [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(has[givers[0]], goal, strict=True)
            ]
            if to in givers or any(part.start >= part.stop for part in both):
                continue
            giver = min(givers, key=load.__getitem__)
            part = whole[both[0], both[1]].contiguous()
            load[giver] += part.numel()
            if giver == mesh.rank:
                operations.append(dist.P2POp(dist.isend, part, to))
            elif to == mesh.rank:
                buffers.append((both, torch.empty_like(part)))
                operations.append(dist.P2POp(dist.irecv, buffers[-1][1], giver))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for both, part in buffers:
        whole[both[0], both[1]] = part
    return whole[wants[mesh.rank]]


def summa_as_in_the_lesson(x, w, mesh):
    y = 0
    for l in range(mesh["col"].size):
        x_l = mesh["col"].broadcast(x, root=l)
        w_l = mesh["row"].broadcast(w, root=l)
        y = y + x_l @ w_l
    return y


def summa_by_library(x, w, mesh):
    return Summa().forward(x, w, mesh)


def summa_backward_by_library(dy, x, w, mesh):
    return Summa().backward(dy, x, w, mesh)


def tesseract_at_once(dy, x, w, mesh):
    """The bias over depth and row in one sum: less than one after the other."""
    dx, dw = Tesseract().backward(dy, x, w, mesh)
    return dx, dw, over_rows_at_once(dy.sum(0), mesh)


def norm_at_once(dy, normed, mesh):
    both = torch.stack([(dy * normed).sum(0), dy.sum(0)])
    return tuple(over_rows_at_once(both, mesh))


def over_rows_at_once(term, mesh):
    q, groups = mesh.sizes["col"], {}
    for col in range(q):
        ranks = [rank for rank in range(dist.get_world_size()) if rank % q == col]
        groups[col] = dist.new_group(ranks)
    dist.all_reduce(term, group=groups[mesh.coordinate["col"]])
    return term


def cube_forward_by_library(x, w, mesh):
    return Cube().forward(x, w, mesh)


def cube_backward_by_library(dy, x, w, mesh):
    return Cube().backward(dy, x, w, mesh)


def two_by_library(x, w1, w2, mesh):
    h = Cube().forward(x, w1, mesh)
    return h, Cube().exchanged().forward(h, w2, mesh)


def two_step_by_step(x, w1, w2, mesh):
    """Every block under a name of its own, until the end."""
    x_ik, w_kj = mesh["j"].all_gather(x, 0), mesh["i"].all_gather(w1, 0)
    first = x_ik @ w_kj
    h = mesh["k"].reduce_scatter(first, 0)
    h_ij, w_jk = mesh["k"].all_gather(h, 0), mesh["i"].all_gather(w2, 0)
    second = h_ij @ w_jk
    return h, mesh["j"].reduce_scatter(second, 0)


OTHERS = [
    ("07-redistribute", (redistribute_in_place,)),
    ("07-redistribute", (library.redistribute,)),
    ("07-grid", (library.redistribute,)),
    ("07-grid", (redistribute_directly,)),
    ("13-summa", (summa_as_in_the_lesson,)),
    ("13-summa", (summa_by_library,)),
    ("13-backward", (summa_backward_by_library,)),
    ("14-linear", (tesseract_at_once,)),
    ("14-norm", (norm_at_once,)),
    ("15-cube", (cube_forward_by_library, cube_backward_by_library)),
    ("15-pair", (two_by_library,)),
    ("15-pair", (two_step_by_step,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "id, functions", OTHERS, ids=lambda value: value if isinstance(value, str) else value[0].__name__
)
def test_a_right_solution_unlike_ours_passes(id, functions):
    for seed in (1, 2, 3):
        report = check(id, *functions, seed=seed)
        assert report.passed, report


# ---- lesson 07, wrong ----


def leave_it(x, source, target, mesh):
    return x


def numbers_written_down(x, source, target, mesh):
    shape = target.local_shape(source.global_shape(x.shape, mesh.sizes), mesh.sizes)
    return torch.linspace(1, 2, shape[0] * shape[1], dtype=x.dtype).reshape(shape)


def whole_first(x, source, target, mesh):
    """Gather everything, then cut."""
    whole = mesh["tp"].all_reduce(x) if source.partial else source.unshard(x, mesh)
    return target.shard(whole, mesh)


def reduced_then_cut(x, source, target, mesh):
    if source.partial:
        return target.shard(mesh["tp"].all_reduce(x), mesh)
    return redistribute(x, source, target, mesh)


def terms_as_values(x, source, target, mesh):
    """The sum left out."""
    return target.shard(x, mesh) if source.partial else redistribute(x, source, target, mesh)


def mean_of_terms(x, source, target, mesh):
    if source.partial:
        return redistribute(x, source, target, mesh) / mesh["tp"].size
    return redistribute(x, source, target, mesh)


def scattered_from_one_rank(x, source, target, mesh):
    """A copy that is cut by sending."""
    if source.partial or source.axes or not target.axes:
        return redistribute(x, source, target, mesh)
    parts = [part.contiguous() for part in x.chunk(mesh["tp"].size, 0 if target.dim("B") else 1)]
    y = torch.empty_like(parts[0])
    dist.scatter(y, parts if mesh["tp"].rank == 0 else None, group=mesh["tp"].process_group, group_src=0)
    return y


def all_to_all_as_a_shift(x, source, target, mesh):
    """From cut to cut, each rank gets the block of another."""
    y = redistribute(x, source, target, mesh)
    return mesh["tp"].shift(y, 1) if source.axes and target.axes and source != target else y


def grid_whole_first(x, source, target, mesh):
    for axis in source.partial:
        x = mesh[axis].all_reduce(x)
    plain = Layout.of(dict(zip(source.dims, source.cuts, strict=True)))
    return target.shard(plain.unshard(x, mesh), mesh)


def grid_without_order(x, source, target, mesh):
    """Each dim cut by its axes in the order of the mesh, whatever the layout says."""
    y = redistribute_on_grid(x, source, target, mesh)
    if target.dim("B") == ("col", "row"):
        return Layout("B@row@col D").shard(target.unshard(y, mesh), mesh)
    return y


# ---- lesson 13, wrong ----


def own_blocks(x, w, mesh):
    return x @ w


def wrong_axes(x, w, mesh):
    y = x.new_zeros(x.shape[0], w.shape[1])
    for step in range(mesh["col"].size):
        y += mesh["row"].broadcast(x, step) @ mesh["col"].broadcast(w, step)
    return y


def one_step_short(x, w, mesh):
    y = x.new_zeros(x.shape[0], w.shape[1])
    for step in range(mesh["col"].size - 1):
        y += mesh["col"].broadcast(x, step) @ mesh["row"].broadcast(w, step)
    return y


def rows_gathered(x, w, mesh):
    """Right, and a whole row of blocks is held."""
    return mesh["col"].all_gather(x, 1) @ mesh["row"].all_gather(w, 0)


def everything_gathered(x, w, mesh):
    X, W = Layout("B@row D@col").unshard(x, mesh), Layout("D@row F@col").unshard(w, mesh)
    return Layout("B@row F@col").shard(X @ W, mesh)


def serial_answer(x, w, mesh):
    return Layout("B@row D@col").unshard(x, mesh) @ Layout("D@row F@col").unshard(w, mesh)


def broadcast_to_the_world(x, w, mesh):
    """Every block of X to every rank, which uses those of its row."""
    y, q = x.new_zeros(x.shape[0], w.shape[1]), mesh["col"].size
    for step in range(q):
        w_step = mesh["row"].broadcast(w, step)
        for row in range(q):
            dist.broadcast(panel := x.clone(), src=row * q + step)
            if row == mesh["row"].rank:
                y += panel @ w_step
    return y


def same_numbers(x, w, mesh):
    return torch.linspace(-3, 3, x.shape[0] * w.shape[1], dtype=x.dtype).view(x.shape[0], -1)


def terms_kept(dy, x, w, mesh):
    """The reduces left out."""
    for step in range(mesh["col"].size):
        w_step, x_step = mesh["row"].broadcast(w, step), mesh["col"].broadcast(x, step)
        if mesh["col"].rank == step:
            dx = dy @ w_step.T
        if mesh["row"].rank == step:
            dw = x_step.T @ dy
    return dx, dw


def reduced_everywhere(dy, x, w, mesh):
    """All-reduce, where a reduce to the owner would do."""
    for step in range(mesh["col"].size):
        total = mesh["col"].all_reduce(dy @ mesh["row"].broadcast(w, step).T)
        if mesh["col"].rank == step:
            dx = total
    _, dw = summa_backward(dy, x, w, mesh)
    return dx, dw


def own_terms_reduced(dy, x, w, mesh):
    """No panel comes: each rank multiplies what it has, and adds up along the line."""
    return mesh["col"].all_reduce(dy @ w.T), mesh["row"].all_reduce(x.T @ dy)


def added_up_along_the_other(dy, x, w, mesh):
    return mesh["row"].all_reduce(dy @ w.T), mesh["col"].all_reduce(x.T @ dy)


def all_terms_first(dy, x, w, mesh):
    """One reduce-scatter of all terms: as many bytes, and all of them are held."""
    row, col = mesh["row"], mesh["col"]
    terms = [dy @ row.broadcast(w, step).T for step in range(col.size)]
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    dist.reduce_scatter(dx, terms, group=col.process_group)
    terms = [col.broadcast(x, step).T @ dy for step in range(row.size)]
    dist.reduce_scatter(dw, terms, group=row.process_group)
    return [dx, dw]


def average_of_terms(dy, x, w, mesh):
    dx, dw = summa_backward(dy, x, w, mesh)
    return dx / mesh["col"].size, dw


def dw_transposed(dy, x, w, mesh):
    dx, dw = summa_backward(dy, x, w, mesh)
    return dx, dw.T


# ---- lesson 14, wrong ----


def no_depth(dy, x, w, mesh):
    dx, dw = Summa().backward(dy, x, w, mesh)
    return dx, dw, mesh["row"].all_reduce(dy.sum(0))


def mean_over_depth(dy, x, w, mesh):
    dx, dw = Summa().backward(dy, x, w, mesh)
    dbias = mesh["depth"].all_reduce(mesh["row"].all_reduce(dy.sum(0)), "avg")
    return dx, mesh["depth"].all_reduce(dw, "avg"), dbias


def dx_over_depth(dy, x, w, mesh):
    dx, dw, dbias = tesseract_backward(dy, x, w, mesh)
    return mesh["depth"].all_reduce(dx), dw, dbias


def bias_not_over_row(dy, x, w, mesh):
    dx, dw, _ = tesseract_backward(dy, x, w, mesh)
    return dx, dw, mesh["depth"].all_reduce(dy.sum(0))


def bias_over_all(dy, x, w, mesh):
    dx, dw, dbias = tesseract_backward(dy, x, w, mesh)
    return dx, dw, mesh["col"].all_reduce(dbias)


def bias_of_own_rows(dy, x, w, mesh):
    dx, dw, _ = tesseract_backward(dy, x, w, mesh)
    return dx, dw, dy.sum(0)


def weight_over_row_again(dy, x, w, mesh):
    dx, dw, dbias = tesseract_backward(dy, x, w, mesh)
    return dx, mesh["depth"].all_reduce(dw), dbias


def rows_of_all_layers(dy, x, w, mesh):
    """Everything gathered, and the serial answer cut."""
    X, W = Layout("B@depth@row D@col").unshard(x, mesh), Layout("D@row F@col").unshard(w, mesh)
    dY = Layout("B@depth@row F@col").unshard(dy, mesh)
    return (
        Layout("B@depth@row D@col").shard(dY @ W.T, mesh),
        Layout("D@row F@col").shard(X.T @ dY, mesh),
        Layout("F@col").shard(dY.sum(0), mesh),
    )


def norm_no_depth(dy, normed, mesh):
    return mesh["row"].all_reduce((dy * normed).sum(0)), mesh["row"].all_reduce(dy.sum(0))


def norm_no_row(dy, normed, mesh):
    return mesh["depth"].all_reduce((dy * normed).sum(0)), mesh["depth"].all_reduce(dy.sum(0))


def norm_over_all(dy, normed, mesh):
    return tuple(mesh["col"].all_reduce(each) for each in norm_backward(dy, normed, mesh))


def norm_rows_summed(dy, normed, mesh):
    """All rows fetched, where sums of a column would do."""
    for axis in ("row", "depth"):
        dy, normed = mesh[axis].all_gather(dy, 0), mesh[axis].all_gather(normed, 0)
    return (dy * normed).sum(0), dy.sum(0)


# ---- lesson 15, wrong ----


def no_sum_over_k(x, w, mesh):
    return mesh["k"].piece(mesh["j"].all_gather(x, 0) @ mesh["i"].all_gather(w, 0), 0)


def gathered_the_other_way(x, w, mesh):
    return mesh["k"].reduce_scatter(mesh["i"].all_gather(x, 0) @ mesh["j"].all_gather(w, 0), 0)


def scattered_along_j(x, w, mesh):
    return mesh["j"].reduce_scatter(mesh["j"].all_gather(x, 0) @ mesh["i"].all_gather(w, 0), 0)


def all_reduced_then_cut(x, w, mesh):
    y_ij = mesh["k"].all_reduce(mesh["j"].all_gather(x, 0) @ mesh["i"].all_gather(w, 0))
    return mesh["k"].piece(y_ij, 0)


def block_not_scattered(x, w, mesh):
    return mesh["k"].all_reduce(mesh["j"].all_gather(x, 0) @ mesh["i"].all_gather(w, 0))


def mean_over_k(x, w, mesh):
    return mesh["k"].reduce_scatter(mesh["j"].all_gather(x, 0) @ mesh["i"].all_gather(w, 0), 0, "avg")


def cube_gathered(x, w, mesh):
    X, W = Layout("B@i@j D@k").unshard(x, mesh), Layout("D@k@i F@j").unshard(w, mesh)
    return Layout("B@i@k F@j").shard(X @ W, mesh)


def cube_serial(x, w, mesh):
    return Layout("B@i@j D@k").unshard(x, mesh) @ Layout("D@k@i F@j").unshard(w, mesh)


def gradients_not_added_up(dy, x, w, mesh):
    dy_ij = mesh["k"].all_gather(dy, 0)
    dx = mesh["j"].piece(dy_ij @ mesh["i"].all_gather(w, 0).T, 0)
    return dx, mesh["i"].piece(mesh["j"].all_gather(x, 0).T @ dy_ij, 0)


def dw_along_j(dy, x, w, mesh):
    dx, _ = cube_backward(dy, x, w, mesh)
    dy_ij = mesh["k"].all_gather(dy, 0)
    return dx, mesh["j"].reduce_scatter(mesh["j"].all_gather(x, 0).T @ dy_ij, 0)


def roles_not_exchanged(x, w1, w2, mesh):
    h = cube_forward(x, w1, mesh)
    return h, cube_forward(h, w2, mesh)


def second_not_added_up(x, w1, w2, mesh):
    h = cube_forward(x, w1, mesh)
    return h, mesh["j"].piece(mesh["k"].all_gather(h, 0) @ mesh["i"].all_gather(w2, 0), 0)


def moved_between(x, w1, w2, mesh):
    """H brought into the layout of X, and Z back: right, and more is sent."""
    h, z = two_linears(x, w1, w2, mesh)
    there = library.redistribute(h, Layout("B@i@k F@j"), Layout("B@i@j F@k"), mesh)
    back = library.redistribute(there, Layout("B@i@j F@k"), Layout("B@i@k F@j"), mesh)
    return back, z


def only_h(x, w1, w2, mesh):
    return cube_forward(x, w1, mesh)


WRONG = [
    ("07-redistribute", (stub,), "copy", "nothing came back. Is there still a ... in redistribute"),
    ("07-redistribute", (leave_it,), "cut", "X has shape .* was asked"),
    ("07-redistribute", (numbers_written_down,), "sum", "the same numbers came for other arguments"),
    (
        "07-redistribute",
        (whole_first,),
        "traffic",
        "all_gather brought the whole of X to every rank: what a rank",
    ),
    (
        "07-redistribute",
        (reduced_then_cut,),
        "traffic",
        "2 times as much was sent .*: the terms have to be added",
    ),
    (
        "07-redistribute",
        (terms_as_values,),
        "sum",
        "a piece of each rank's own term: the terms were not added up",
    ),
    (
        "07-redistribute",
        (mean_of_terms,),
        "sum",
        r"exactly 1/\d of the right value .*: an average where a sum",
    ),
    (
        "07-redistribute",
        (scattered_from_one_rank,),
        "traffic",
        "where nothing is enough: whoever has a copy has",
    ),
    ("07-redistribute", (all_to_all_as_a_shift,), "cut", "the shards are on the wrong ranks|are swapped"),
    ("07-grid", (stub,), "copy", "nothing came back"),
    ("07-grid", (grid_whole_first,), "traffic", "times as much|all_gather brought the whole of X"),
    ("07-grid", (grid_without_order,), "cut|copy|sum", "the shards are on the wrong ranks|are swapped"),
    ("13-summa", (stub,), "Y", "nothing came back"),
    ("13-summa", (own_blocks,), "Y", "made of the rank's own blocks alone"),
    ("13-summa", (own_blocks,), "traffic", "nothing was sent, and a block of X goes to its grid row"),
    ("13-summa", (wrong_axes,), "Y", 'X came along the grid column .*: along a row runs mesh\\["col"\\]'),
    ("13-summa", (one_step_short,), "Y", "the term of the last step is missing"),
    ("13-summa", (rows_gathered,), "memory", r"right numbers, but rank \d held the whole of a grid row of X"),
    ("13-summa", (everything_gathered,), "traffic", "all_gather brought the whole of X to every rank"),
    ("13-summa", (everything_gathered,), "memory", r"right numbers, but rank \d held the whole of X"),
    ("13-summa", (serial_answer,), "Y", "each rank returned the serial answer, whole"),
    (
        "13-summa",
        (broadcast_to_the_world,),
        "traffic",
        "broadcast went over ranks 0 to 3, which differ in row and col; only along one axis",
    ),
    ("13-summa", (same_numbers,), "Y", "the same numbers came for other arguments"),
    (
        "13-backward",
        (terms_kept,),
        "dX",
        'own term: the terms were not added up along the grid row, mesh\\["col"\\]',
    ),
    ("13-backward", (terms_kept,), "dW", "own term: the terms were not added up along the grid column"),
    (
        "13-backward",
        (terms_kept,),
        "traffic",
        "only .* bytes were sent, and blocks come along one axis, and each",
    ),
    (
        "13-backward",
        (reduced_everywhere,),
        "traffic",
        "times as much was sent .*, and each sum goes to its owner",
    ),
    (
        "13-backward",
        (own_terms_reduced,),
        "dX",
        "the shards are on the wrong ranks: rank 1 has that of rank 0",
    ),
    (
        "13-backward",
        (own_terms_reduced,),
        "dW",
        "the shards are on the wrong ranks: rank 1 has that of rank 3",
    ),
    (
        "13-backward",
        (added_up_along_the_other,),
        "dX",
        "were added up along the grid column.* lie along the grid row",
    ),
    (
        "13-backward",
        (added_up_along_the_other,),
        "dW",
        "were added up along the grid row.* lie along the grid column",
    ),
    ("13-backward", (all_terms_first,), "memory", r"right numbers, but rank \d held"),
    ("13-backward", (average_of_terms,), "dX", "exactly 1/2 of the right value"),
    ("13-backward", (dw_transposed,), "dW", "dW is transposed"),
    (
        "14-linear",
        (no_depth,),
        "dW",
        "the sum over depth is missing: each layer has the term of its own rows",
    ),
    ("14-linear", (no_depth,), "dbias", "the sum over depth is missing"),
    ("14-linear", (no_depth,), "traffic", "only .* bytes were sent, and dW is a sum over depth"),
    ("14-linear", (mean_over_depth,), "dW", r"exactly 1/3 of the right value .*\(depth=3\): an average"),
    ("14-linear", (mean_over_depth,), "dbias", r"exactly 1/3 of the right value .*\(depth=3\): an average"),
    ("14-linear", (dx_over_depth,), "dX", "dX was added up over depth: its rows belong to one layer each"),
    ("14-linear", (bias_not_over_row,), "dbias", "the sum over row is missing"),
    ("14-linear", (bias_over_all,), "dbias", "columns that have nothing to do with each other were added up"),
    ("14-linear", (bias_of_own_rows,), "dbias", "the term of the rank's own rows"),
    ("14-linear", (weight_over_row_again,), "dW", r"exactly 3 times too large .*\(depth=3\): was a sum"),
    ("14-linear", (rows_of_all_layers,), "traffic", "all_gather brought the whole of X to every rank"),
    ("14-linear", (rows_of_all_layers,), "memory", r"right numbers, but rank \d held the whole of X"),
    ("14-norm", (norm_no_depth,), "dgain", "the sum over depth is missing"),
    ("14-norm", (norm_no_row,), "dbias", "the sum over row is missing"),
    ("14-norm", (norm_over_all,), "dgain", "columns that have nothing to do with each other were added up"),
    ("14-norm", (norm_rows_summed,), "traffic", "times as much was sent .*: dgain and dbias are sums"),
    ("14-norm", (norm_rows_summed,), "memory", r"right numbers, but rank \d held"),
    ("15-cube", (no_sum_over_k, cube_backward), "Y", "own term: the terms of Y were not added up along k"),
    (
        "15-cube",
        (gathered_the_other_way, cube_backward),
        "Y",
        "X was gathered along i and W along j: the ranks along",
    ),
    ("15-cube", (scattered_along_j, cube_backward), "Y", "added up along j: those of Y lie along k"),
    ("15-cube", (all_reduced_then_cut, cube_backward), "traffic", "times as much was sent"),
    ("15-cube", (block_not_scattered, cube_backward), "Y", "Y has shape .* was asked"),
    ("15-cube", (mean_over_k, cube_backward), "Y", "exactly 1/2 of the right value"),
    ("15-cube", (cube_gathered, cube_backward), "traffic", "all_gather brought the whole of X to every rank"),
    ("15-cube", (cube_gathered, cube_backward), "memory", r"right numbers, but rank \d held the whole of X"),
    ("15-cube", (cube_serial, cube_backward), "Y", "each rank returned the serial answer, whole"),
    ("15-cube", (cube_forward, gradients_not_added_up), "dX", "the terms of dX were not added up along j"),
    ("15-cube", (cube_forward, gradients_not_added_up), "dW", "the terms of dW were not added up along i"),
    ("15-cube", (cube_forward, dw_along_j), "dW", "were added up along j: those of dW lie along i"),
    ("15-pair", (roles_not_exchanged,), "Z", "the roles were not exchanged: H lies as B@i@k F@j"),
    ("15-pair", (second_not_added_up,), "Z", "the terms of Z were not added up along j"),
    ("15-pair", (moved_between,), "traffic", "send went over|times as much was sent"),
    ("15-pair", (only_h,), "Z", "Z: nothing came back"),
]
ALWAYS = (terms_as_values, rows_gathered, broadcast_to_the_world, dx_over_depth, roles_not_exchanged)


@cache
def checked(id, functions):
    """One check, however many lines of its table are looked at."""
    return check(id, *functions, seed=5)


@pytest.mark.parametrize(
    "id, functions, claim, words",
    [pytest.param(*each, marks=() if each[1][-1] in ALWAYS else pytest.mark.slow) for each in WRONG],
    ids=lambda value: "-".join(each.__name__ for each in value) if isinstance(value, tuple) else None,
)
def test_a_wrong_solution_is_told(id, functions, claim, words):
    report = checked(id, functions)
    assert not report.passed
    failed = {line.claim: line.message for line in report.lines if line.passed is False}
    messages = [failed.get(each, "") for each in claim.split("|")]
    assert any(re.search(words, message) for message in messages), f"{claim}: {messages}\n{report}"


# ---- what is drawn ----


def test_thirty_pairs_of_layouts_are_drawn_and_no_step_is_an_exchange():
    trials = find("07-grid").trials(Draw(1))
    pairs = [trial.args[0][1:3] for trial in trials[:30]]
    assert len(pairs) == 30 and len(set(pairs)) > 20
    kinds = {source.partial != () for source, _ in pairs}
    assert kinds == {True, False} and not any(target.partial for _, target in pairs)
    for trial, (source, target) in zip(trials, pairs, strict=False):
        shape = source.global_shape(trial.args[0][0].shape, trial.sizes)
        steps = library.redistribution(source, target, shape, trial.sizes)
        assert "exchange" not in [step.kind for step in steps]
        budget = trial.budgets["forward"]
        assert budget.total == sum(step.sent for step in steps) * trial.n_ranks
        assert budget.least <= budget.total
        if not source.axes:
            assert budget.total == 0  # a copy that is cut costs nothing


@pytest.mark.parametrize("id", [id for id in GRIDS if id[:2] != "07"])
def test_the_bills_are_the_library_s_and_sizes_differ(id):
    for seed in range(6):
        for trial in find(id).trials(Draw(seed)):
            sizes = [int(each.split("=")[1]) for each in trial.facts.split(", ") if each[0] in "BDF"]
            assert len(set(sizes)) == len(sizes), trial.facts
            assert trial.budgets["forward"].total > 0


def test_depth_and_grid_differ_and_layers_have_rows_of_their_own():
    trial = find("14-linear").trials(Draw(0))[0]
    assert trial.sizes == {"depth": 3, "row": 2, "col": 2}
    dy, x, w, _ = zip(*trial.args, strict=True)
    for below, above in ((0, 4), (4, 8)):
        assert torch.equal(w[below], w[above])
        assert not torch.equal(x[below], x[above]) and not torch.equal(dy[below], dy[above])


def test_a_cube_s_shares_are_an_eighth_and_it_works_on_a_quarter():
    trial = find("15-cube").trials(Draw(0))[0]
    x, w, _ = trial.args[0]
    X, W = trial.wholes["X"], trial.wholes["W"]
    y = trial.outputs[0].whole.numel()
    assert (x.numel(), w.numel(), trial.outputs[0].expected[0].numel()) == (X // 8, W // 8, y // 8)
    quarters = [X // 4, W // 4, y // 4]
    assert trial.spare == sum(quarters) + max(quarters)
