"""A right solution passes, however it is written; a wrong one fails, with the name of its mistake.

Every cheat and every usual mistake is kept here. What it is caught by, and by which words, is part of the
test: a check that only says "wrong" teaches nothing.
"""

import contextlib
import ctypes
import os
import re
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import gelu

from lessons_lib import mesh as pairs
from lessons_lib.errors import RefusedError
from lessons_lib.grading import check, records, sandbox
from lessons_lib.grading.catalogue import EXERCISES, find
from lessons_lib.grading.exercise import Draw
from lessons_lib.grading.job import patience
from lessons_lib.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast
from lessons_lib.spmd import processes
from lessons_lib.tensor_parallel import SCHEMES, tensor_parallel_linear


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "progress.json"))


def lines(report):
    return {line.claim: line for line in report.lines}


def failed(report):
    """What does not hold, by claim."""
    return {line.claim: line.message for line in report.lines if line.passed is False}


# ---- right solutions ----


@pytest.mark.parametrize(
    "exercise",
    [pytest.param(each, marks=() if id < "07" else pytest.mark.slow) for id, each in EXERCISES.items()],
    ids=list(EXERCISES),
)
def test_a_reference_solution_passes(exercise):
    report = check(exercise.id, *exercise.functions, seed=0)
    assert report.passed, report
    assert report.points == report.possible == exercise.points
    assert report.seconds < 30  # S28


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=list(EXERCISES))
def test_a_reference_solution_passes_with_many_seeds(exercise):
    for seed in range(1, 6):
        assert check(exercise.id, *exercise.functions, seed=seed).passed, seed


def relay_by_isend(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    before = torch.zeros_like(x)
    if rank:
        dist.irecv(before, src=rank - 1).wait()
    if rank + 1 < p:
        dist.isend(before + x, dst=rank + 1).wait()
    return (before + x).item()  # a number will do


def reduce_scatter_by_objects(x, ring):
    """A ring that keeps one running chunk, and talks by batches."""
    p, r = ring.size, ring.rank
    pieces = [piece.clone() for piece in x.tensor_split(p)]
    running = pieces[(r - 1) % p]
    for step in range(2, p + 1):
        like = torch.empty_like(pieces[(r - step) % p])
        send = dist.P2POp(dist.isend, running, group=ring.process_group, group_peer=(r + 1) % p)
        recv = dist.P2POp(dist.irecv, like, group=ring.process_group, group_peer=(r - 1) % p)
        for work in dist.batch_isend_irecv([send, recv]):
            work.wait()
        running = like + pieces[(r - step) % p]
    return running


def broadcast_by_halves(x, tree, root):
    """A tree that gives away the upper half of a span first."""
    p, behind = tree.size, (tree.rank - root) % tree.size
    low, high, y = 0, 1 << (p - 1).bit_length(), x
    while high - low > 1:
        middle = (low + high) // 2
        if behind == low and middle < p:
            tree.send(y, (middle + root) % p)
        elif behind == middle:
            y = tree.recv(x, (low + root) % p)
        low, high = (low, middle) if behind < middle else (middle, high)
    return y


def mean_by_gathering(scores):
    """Every rank's sum and count, gathered."""
    mine = torch.tensor([scores.sum(), len(scores)], dtype=scores.dtype)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    both = torch.stack(everyone).sum(0)
    return both[0] / both[1]


def left_by_two_calls(x):
    r, p = dist.get_rank(), dist.get_world_size()
    y = torch.empty_like(x)
    works = [dist.irecv(y, src=(r - 1) % p), dist.isend(x, dst=(r + 1) % p)]
    for work in works:
        work.wait()
    return y


def column_by_torch(x, w, tp):
    return torch.einsum("bd,df->bf", x, w)


def column_back_by_halves(dy, x, w, tp):
    """The all-reduce as its two halves, on a padded buffer where p does not divide it."""
    dx = (dy @ w.T).flatten()
    shape, n = (dy.shape[0], w.shape[0]), dx.numel()
    if n % tp.size:
        dist.all_reduce(dx, group=tp.process_group)
        return dx.view(shape), torch.einsum("bd,bf->df", x, dy)
    cut = torch.empty(n // tp.size, dtype=dx.dtype)
    dist.reduce_scatter_single(cut, dx, group=tp.process_group)
    whole = torch.empty_like(dx)
    dist.all_gather_single(whole, cut, group=tp.process_group)
    return whole.view(shape), (dy.T @ x).T


def row_by_async(x, w, tp):
    y = x @ w
    dist.all_reduce(y, group=tp.process_group, async_op=True).wait()
    return y


def row_back_by_autograd(dy, x, w, tp):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    return torch.autograd.grad(x @ w, (x, w), dy)


def bias_on_one_rank(x, w, bias, tp):
    """Only the first rank adds it, before the sum."""
    y = x @ w
    if tp.rank == 0:
        y = y + bias
    return tp.all_reduce(y)


def bias_back(dy, x, w, tp):
    return [dy @ w.T, x.T @ dy, dy.sum(dim=0)]


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.group = tp.process_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dx = dy.clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


def enter(x, tp):
    return Enter.apply(x, tp)


def leave(x, tp):
    """No autograd.Function at all: the sum is added to x as a constant."""
    return x + (tp.all_reduce(x.detach()) - x.detach())


def mlp_by_schemes(x, w1, w2, tp):
    """The library's two schemes, as differentiable operations."""

    class OnTp:
        def __init__(self):
            self.sizes = {"tp": tp.size}

        def __getitem__(self, axis):
            return tp

    h = gelu(tensor_parallel_linear(x, w1, SCHEMES["column"], OnTp()))
    return tensor_parallel_linear(h, w2, SCHEMES["row"], OnTp())


def mlp_by_dtensor(x, w1, w2, tp):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh.from_group(tp.process_group, "cpu", mesh_dim_names=("only",))
    X = DTensor.from_local(x, mesh, [Replicate()])
    W1, W2 = DTensor.from_local(w1, mesh, [Shard(1)]), DTensor.from_local(w2, mesh, [Shard(0)])
    return (gelu(X @ W1) @ W2).redistribute(placements=[Replicate()]).to_local()


OTHERS = {
    "00-relay": [(relay_by_isend,)],
    "01-reduce-scatter": [(ring_reduce_scatter,), (reduce_scatter_by_objects,)],
    "01-all-gather": [(ring_all_gather,)],
    "01-all-reduce": [(ring_all_reduce,)],
    "01-broadcast": [(tree_broadcast,), (broadcast_by_halves,)],
    "02-repair-3": [(left_by_two_calls,)],
    "02-repair-5": [(mean_by_gathering,)],
    "08-column": [(column_by_torch, column_back_by_halves)],
    "08-row": [(row_by_async, row_back_by_autograd)],
    "08-bias": [(bias_on_one_rank, bias_back)],
    "08-pair": [(pairs.copy_sum, pairs.sum_copy), (enter, leave)],
    "08-mlp": [(mlp_by_schemes,), (mlp_by_dtensor,)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "id, functions",
    [(id, functions) for id, solutions in OTHERS.items() for functions in solutions],
    ids=lambda value: value if isinstance(value, str) else value[0].__name__,
)
def test_a_right_solution_unlike_ours_passes(id, functions):
    for seed in (1, 2):
        report = check(id, *functions, seed=seed)
        assert report.passed, report


# ---- wrong solutions: a mistake each, and the words it is told by ----


def stub(*args):
    """Do it."""


def all_gathered(x, tp, dim):
    return tp.all_gather(x.detach(), dim)


# 08-column


def column_forward(x, w, tp):
    return x @ w


def column_backward(dy, x, w, tp):
    return tp.all_reduce(dy @ w.T), x.T @ dy


def column_serial_forward(x, w, tp):
    """The full gather: the serial answer on every rank, then its own piece of it."""
    return tp.piece(x @ all_gathered(w, tp, 1), 1)


def column_whole_forward(x, w, tp):
    """The serial answer, and every rank returns all of it."""
    return x @ all_gathered(w, tp, 1)


def column_serial_backward(dy, x, w, tp):
    """Everything replicated: W and dY gathered, the whole dW computed on each rank."""
    W, dY = all_gathered(w, tp, 1), all_gathered(dy, tp, 1)
    return dY @ W.T, tp.piece(x.T @ dY, 1)


def column_no_sum(dy, x, w, tp):
    return dy @ w.T, x.T @ dy


def column_two_sums(dy, x, w, tp):
    return tp.all_reduce(tp.all_reduce(dy @ w.T)), x.T @ dy


def column_average(dy, x, w, tp):
    return tp.all_reduce(dy @ w.T, op="avg"), x.T @ dy


def column_world(dy, x, w, tp):
    dx = dy @ w.T
    dist.all_reduce(dx)
    return dx, x.T @ dy


def column_dw_summed(dy, x, w, tp):
    return tp.all_reduce(dy @ w.T), tp.all_reduce(x.T @ dy)


def column_swapped_dw(dy, x, w, tp):
    """The shards in the wrong places."""
    return tp.all_reduce(dy @ w.T), tp.shift(x.T @ dy, 1)


def column_transposed_dw(dy, x, w, tp):
    return tp.all_reduce(dy @ w.T), dy.T @ x


def column_rank_0(x, w, tp):
    """Rank 0's shard on every rank."""
    return tp.broadcast(x @ w, 0)


def column_only_dx(dy, x, w, tp):
    return tp.all_reduce(dy @ w.T)


def column_float32(x, w, tp):
    return (x.float() @ w.float()).double()


def column_in_float32(x, w, tp):
    return (x @ w).float()


def column_in_place(x, w, tp):
    y = x @ w
    x.mul_(0)
    return y


def column_nan(x, w, tp):
    return torch.full((x.shape[0], w.shape[1]), float("nan"), dtype=x.dtype)


def column_numbers(x, w, tp):
    """Numbers that somebody has written down."""
    return torch.linspace(-3, 3, x.shape[0] * w.shape[1], dtype=x.dtype).view(x.shape[0], -1)


def column_says_passed(x, w, tp):
    print("08-column: passed, 10 of 10 points")
    return x


def column_list(x, w, tp):
    return {"y": x @ w}


def column_wasteful(dy, x, w, tp):
    """Right, and the sum goes through the first rank."""
    dx = dy @ w.T
    total = tp.reduce(dx, 0)
    return tp.broadcast(dx if total is None else total, 0), x.T @ dy


def column_two_arguments(x, w):
    return x @ w


N_ALWAYS = 11  # of these are tried with the fast tests
WRONG_COLUMNS = [
    (stub, stub, "forward", "nothing came back. Is there still a ... in column_forward"),
    (column_forward, stub, "dX", "nothing came back. Is there still a ... in column_backward"),
    (column_forward, column_two_sums, "dX", r"exactly 2 times too large on every rank \(tp=2\): was a sum"),
    (column_forward, column_swapped_dw, "dW", "the shards of ranks 0 and 1 are swapped"),
    (column_numbers, column_backward, "forward", "the same numbers came for other arguments"),
    (column_serial_forward, column_backward, "traffic", "all_gather brought the whole of W to every rank"),
    (
        column_serial_forward,
        column_backward,
        "memory",
        r"right numbers, but rank \d held the whole of W: .* are plenty",
    ),
    (column_forward, column_serial_backward, "traffic", "all_gather brought the whole of W to every rank"),
    (column_forward, column_serial_backward, "memory", r"right numbers, but rank \d held the whole of W"),
    (column_whole_forward, column_backward, "forward", "each rank returned the serial answer, whole"),
    (column_forward, column_no_sum, "dX", "this is each rank's partial sum: the terms were not added up"),
    (column_forward, column_no_sum, "traffic", "nothing was sent, and dX is a sum over ranks"),
    (column_forward, column_two_sums, "traffic", "2 times as much was sent"),
    (column_forward, column_average, "dX", r"exactly 1/2 of the right value .*: an average where a sum"),
    (column_forward, column_world, "dX", "a sum over all ranks of the mesh: tp is one axis of it"),
    (column_forward, column_dw_summed, "dW", "blocks of different ranks were added up"),
    (column_forward, column_transposed_dw, "dW", "dW is transposed: shape"),
    (column_rank_0, column_backward, "forward", "every rank has the shard of rank 0"),
    (column_forward, column_only_dx, "dW", "dW: nothing came back"),
    (
        column_float32,
        column_backward,
        "forward",
        "nearly right: relative error .* as in float32",
    ),
    (column_in_float32, column_backward, "forward", "is float32, and float64 went in"),
    (column_in_place, column_backward, "forward", "column_forward changed its argument x on rank 0"),
    (column_nan, column_backward, "forward", "is not a finite number in .* places"),
    (column_says_passed, column_backward, "forward", "Y has shape"),
    (column_list, column_backward, "forward", "a dict, not a tensor"),
    (
        column_forward,
        column_wasteful,
        "traffic",
        "sends .* bytes, and .* would do: share the work out evenly",
    ),
    (column_two_arguments, column_backward, "forward", r"It is called as column_forward\(x, w, tp\)"),
]


def assert_told(report, claim, words):
    assert not report.passed
    message = failed(report).get(claim, "")
    assert re.search(words, message), f"{claim}: {message!r}\n{report}"


@pytest.mark.parametrize(
    "forward, backward, claim, words",
    [
        pytest.param(*each, marks=() if n < N_ALWAYS else pytest.mark.slow)
        for n, each in enumerate(WRONG_COLUMNS)
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_column_is_told(forward, backward, claim, words):
    assert_told(check("08-column", forward, backward, seed=5), claim, words)


def test_credit_is_partial_and_visible():
    report = check("08-column", column_forward, column_no_sum, seed=5)
    assert {claim: line.points for claim, line in lines(report).items()} == {
        "forward": 2,
        "dX": 0,
        "dW": 2,
        "traffic": 0,
        "memory": 0,
        "no deadlock": 1,
    }
    assert (report.points, report.possible) == (5, 10)
    assert "not yet, 5 of 10 points" in str(report)
    assert lines(report)["memory"].passed is None
    assert lines(report)["memory"].message == "counts once all numbers are right"


@pytest.mark.slow
def test_who_does_nothing_earns_nothing():
    """Not even for having sent no byte too much, or for not having waited."""
    for exercise in EXERCISES.values():
        report = check(exercise.id, *([stub] * len(exercise.functions)), seed=1)
        assert report.points == 0, report
        assert not any(line.passed for line in report.lines)


# The other exercises. Each entry: exercise, functions, claim, words.


def relay_of_nothing(x):
    return x


def relay_backwards(x):
    """The sum of all those behind."""
    rank, p = dist.get_rank(), dist.get_world_size()
    total = torch.zeros_like(x)
    if rank < p - 1:
        dist.recv(total, src=rank + 1)
    total += x
    if rank > 0:
        dist.send(total, dst=rank - 1)
    return total


def relay_by_all_reduce(x):
    """Right numbers, and no relay."""
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x)
    return torch.stack(everyone[: dist.get_rank() + 1]).sum(0)


def relay_through_the_module(x):
    """Ranks share modules here, and on no cluster."""
    board = torch.__dict__.setdefault("_board", {})
    board[dist.get_rank()] = x
    dist.barrier()
    return torch.stack([board[r] for r in range(dist.get_rank() + 1)]).sum(0)


def relay_of_neighbours(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    before = torch.zeros_like(x)
    if rank % 2 == 0:
        if rank + 1 < p:
            dist.send(x, dst=rank + 1)
        if rank:
            dist.recv(before, src=rank - 1)
    else:
        dist.recv(before, src=rank - 1)
        if rank + 1 < p:
            dist.send(x, dst=rank + 1)
    return before + x


def relay_waiting_for_the_last(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    total = torch.zeros_like(x)
    dist.recv(total, src=(rank - 1) % p)
    dist.send(total + x, dst=(rank + 1) % p)
    return total + x


def reduce_scatter_by_all_reduce(x, ring):
    return ring.all_reduce(x).tensor_split(ring.size)[ring.rank].clone()


def reduce_scatter_by_nobody(x, ring):
    return x.tensor_split(ring.size)[ring.rank].clone()


def reduce_scatter_one_off(x, ring):
    """The textbook's other ring: chunk r+1 ends on rank r."""
    total = ring_all_reduce(x, ring).tensor_split(ring.size)
    return total[(ring.rank + 1) % ring.size].clone()


def all_reduce_by_star(x, ring):
    y = x.clone()
    if ring.rank == 0:
        for other in range(1, ring.size):
            y += ring.recv(x, other)
        for other in range(1, ring.size):
            ring.send(y, other)
        return y
    ring.send(x, 0)
    return ring.recv(x, 0)


def all_reduce_by_carousel(x, ring):
    """Whole tensors go round: right, to the right only, and p/2 times too many bytes."""
    total, passing = x.clone(), x.clone()
    for _ in range(ring.size - 1):
        passing = ring.shift(passing, 1)
        total += passing
    return total


def all_reduce_of_the_world(x, ring):
    """Counts ranks over all, as dist does, where the group counts its own."""
    from lessons_lib.mesh import Group

    return ring_all_reduce(x, Group(dist.group.WORLD))


def broadcast_by_chain(x, tree, root):
    from lessons_lib.rings import chain_broadcast

    return chain_broadcast(x, tree, root)


def broadcast_from_0(x, tree, root):
    return tree_broadcast(x, tree, 0)


def norm_of_all(x, pair):
    square = x.square().sum().reshape(1)
    dist.all_reduce(square)
    return square.sqrt()


def norm_of_norms(x, pair):
    return pair.all_reduce(x.norm().reshape(1))


def average_of_averages(scores):
    mean = scores.mean().reshape(1)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean


def bias_on_every_rank(x, w, bias, tp):
    return tp.all_reduce(x @ w + bias)


def bias_shared_out(x, w, bias, tp):
    return tp.all_reduce(x @ w) + bias / tp.size


def bias_forgotten(x, w, bias, tp):
    return tp.all_reduce(x @ w)


def bias_back_summed(dy, x, w, tp):
    return dy @ w.T, x.T @ dy, tp.all_reduce(dy.sum(0))


def row_replicated(x, w, tp):
    return all_gathered(x, tp, 1) @ all_gathered(w, tp, 0)


def row_back(dy, x, w, tp):
    return dy @ w.T, x.T @ dy


def row_no_sum(x, w, tp):
    return x @ w


def sum_sum_for_sum_copy(x, tp):
    return pairs.sum_sum(x, tp)


def copy_copy(x, tp):
    return x.clone()


def sum_without_gradient(x, tp):
    return tp.all_reduce(x.detach())


class LateReduce(torch.autograd.Function):
    """Adds up a contiguous copy in place, and returns what was not added up: a bug with a history."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.group = tp.process_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dist.all_reduce(dy.contiguous(), group=ctx.group)
        return dy, None


def late_reduce(x, tp):
    return LateReduce.apply(x, tp)


def mlp_without_f(x, w1, w2, tp):
    return pairs.sum_copy(gelu(x @ w1) @ w2, tp)


def mlp_summed_both_ways(x, w1, w2, tp):
    """All-reduce in both directions at the output: forward right, gradients p times too large."""
    return pairs.sum_sum(gelu(pairs.copy_sum(x, tp) @ w1) @ w2, tp)


def mlp_replicated(x, w1, w2, tp):
    W1 = pairs.gather_split(w1, tp, 1)
    W2 = pairs.gather_split(w2, tp, 0)
    return gelu(x @ W1) @ W2


def mlp_two_sums(x, w1, w2, tp):
    """The hidden layer is made whole between the products."""
    h = pairs.gather_split(gelu(pairs.copy_sum(x, tp) @ w1), tp, 1)
    return pairs.sum_copy(pairs.split_gather(h, tp, 1) @ w2, tp)


ALWAYS = (relay_by_all_reduce, all_reduce_by_star, bias_on_every_rank, row_replicated)  # with the fast tests
WRONG = [
    ("00-relay", (relay_of_nothing,), "values", "the rank's own number: nothing was added"),
    ("00-relay", (relay_backwards,), "values", "are swapped|wrong on"),
    ("00-relay", (relay_by_all_reduce,), "traffic", "all_gather was called, and this exercise builds it"),
    ("00-relay", (relay_through_the_module,), "traffic", "nothing was sent, and one number from each"),
    ("00-relay", (relay_of_neighbours,), "values", "only the left neighbour's own number was added"),
    ("00-relay", (relay_waiting_for_the_last,), "no deadlock", "no rank can go on. Each waits for the next"),
    ("01-reduce-scatter", (reduce_scatter_by_all_reduce,), "traffic", "all_reduce was called, and this"),
    ("01-reduce-scatter", (reduce_scatter_by_nobody,), "values", "own chunk: nothing was added"),
    ("01-reduce-scatter", (reduce_scatter_one_off,), "values", "the shards of ranks 0 and 1 are swapped"),
    ("01-all-reduce", (all_reduce_by_star,), "traffic", "in a ring it sends to its right neighbour only"),
    ("01-all-reduce", (all_reduce_by_carousel,), "traffic", "times as much was sent by all ranks together"),
    ("01-all-reduce", (all_reduce_of_the_world,), "values", "a sum over all 6 ranks, and the ring has 3"),
    ("01-broadcast", (broadcast_by_chain,), "traffic", "had it after 3 rounds, and 2 are enough"),
    ("01-broadcast", (broadcast_from_0,), "values", "the tensor of rank 0 of the group: root was not"),
    ("02-repair-4", (norm_of_all,), "values", "over all ranks, not over the pair"),
    ("02-repair-4", (norm_of_norms,), "values", "the two norms added up"),
    ("02-repair-5", (average_of_averages,), "values", "the average of the averages"),
    ("08-row", (row_no_sum, row_back), "forward", "this is each rank's partial sum"),
    ("08-row", (row_replicated, row_back), "traffic", "all_gather brought the whole of W"),
    ("08-row", (row_replicated, row_back), "memory", r"right numbers, but rank \d held the whole of W"),
    ("08-bias", (bias_on_every_rank, bias_back), "forward", "the bias was added 2 times: once on every rank"),
    ("08-bias", (bias_shared_out, bias_back), "forward", "bias/2 was added"),
    ("08-bias", (bias_forgotten, bias_back), "forward", "the bias is missing"),
    ("08-bias", (bias_on_one_rank, bias_back_summed), "dbias", "exactly 2 times too large"),
    ("08-pair", (copy_copy, pairs.sum_copy), "f backward", "each rank's partial sum"),
    ("08-pair", (late_reduce, pairs.sum_copy), "f backward", "each rank's partial sum"),
    ("08-pair", (pairs.sum_sum, pairs.sum_copy), "f forward", "x was added up: forward, f is a copy"),
    ("08-pair", (pairs.copy_sum, sum_sum_for_sum_copy), "g backward", "exactly 2 times too large"),
    ("08-pair", (pairs.copy_sum, sum_without_gradient), "g backward", "nothing came back"),
    ("08-mlp", (mlp_without_f,), "dX", "each rank's partial sum"),
    ("08-mlp", (mlp_summed_both_ways,), "dX", "exactly 2 times too large"),
    ("08-mlp", (mlp_summed_both_ways,), "dW1", "exactly 2 times too large"),
    ("08-mlp", (mlp_replicated,), "traffic", "all_gather brought the whole of W1"),
    ("08-mlp", (mlp_replicated,), "memory", r"right numbers, but rank \d held the whole of W"),
    ("08-mlp", (mlp_two_sums,), "traffic", "times as much was sent"),
]


@pytest.mark.parametrize(
    "id, functions, claim, words",
    [pytest.param(*each, marks=() if each[1][0] in ALWAYS else pytest.mark.slow) for each in WRONG],
    ids=lambda value: value[0].__name__ if isinstance(value, tuple) else None,
)
def test_a_wrong_solution_is_told(id, functions, claim, words):
    assert_told(check(id, *functions, seed=5), claim, words)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 6))
def test_the_five_programs_are_broken_before_they_are_repaired(number):
    exercise = find(f"02-repair-{number}")
    report = check(exercise.id, *exercise.broken, seed=3)
    assert failed(report), report
    words = {
        1: ("no deadlock", "no rank can go on"),
        2: ("values", "the last rank's other number was added in"),
        3: ("no deadlock", "no rank can go on"),
        4: ("no deadlock", "no rank can go on"),
        5: ("no deadlock", "Mismatch"),
    }
    assert_told(report, *words[number])


# ---- solutions that do harm: they cost seconds, and never this process ----


def loop(x):
    while True:
        pass


def loop_that_catches(x):
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def loop_in_native_code(x):
    pattern = re.compile("(a+)+b")
    return pattern.match("a" * 64)  # holds the interpreter for ever


def end(x):
    os._exit(3)


def end_well(x):
    os._exit(0)


def leave_politely(x):
    sys.exit()


def crash(x):
    ctypes.string_at(0)


def eat(x):
    return torch.ones(2**31)


def eat_in_python(x):
    everything = []
    while True:
        everything.append(bytearray(2**26))


def raise_something(x):
    raise LookupError("where is it?")


class Loops:
    """Loops before any rank runs, when it arrives in the other process."""

    def __call__(self, x):
        return x

    def __reduce__(self):
        return eval, ("sum(0 for _ in iter(int, 1))",)


HARM = [
    (loop, "no deadlock", r"did not end within \d+ s and was stopped: look at .*line", 12),
    pytest.param(
        loop_that_catches,
        "no deadlock",
        r"did not end within \d+ s and was stopped",
        15,
        marks=pytest.mark.slow,
    ),
    pytest.param(
        loop_in_native_code, "no deadlock", r"nothing was heard of it for \d+ s", 15, marks=pytest.mark.slow
    ),
    pytest.param(Loops(), "values", r"nothing was heard of it for \d+ s", 15, marks=pytest.mark.slow),
    (end, "values", "ended its process with exit code 3", 6),
    (end_well, "values", "nothing more was heard|ended its process with exit code 0", 6),
    (leave_politely, "values", r"sys.exit\(None\) was called: return instead", 6),
    (crash, "values", r"killed by signal 11 \(SIGSEGV\)", 6),
    (eat, "values", "more than the 1 GiB of memory", 6),
    (eat_in_python, "values", "more than the 1 GiB of memory", 12),
    (
        raise_something,
        "values",
        r"rank \d raised LookupError: where is it\?, in .*test_grading.py, line \d+$",
        6,
    ),
]


@pytest.mark.parametrize(
    "function, claim, words, at_most_s", HARM, ids=lambda value: getattr(value, "__name__", None)
)
def test_harm_costs_seconds_and_is_told(function, claim, words, at_most_s):
    began = time.perf_counter()
    report = check("00-relay", function)
    assert time.perf_counter() - began < (at_most_s + 8) * patience()
    assert_told(report, claim, words)
    assert check("00-relay", relay_by_isend).passed  # the next check is as good as ever


@pytest.mark.slow
def test_a_loop_is_told_with_its_line():
    report = check("00-relay", loop)
    assert "test_grading.py, line" in report.details and "in loop: while True" in report.details


def test_what_is_printed_is_shown_once_and_cut():
    def chatty(x):
        print("here I am")
        print("x" * 5_000_000)
        os.write(1, b"past every stream\n")
        return relay_by_isend(x)

    report = check("00-relay", chatty)
    assert report.passed
    assert "here I am" in report.printed and len(report.printed) < 3_000
    assert "more characters" in report.printed


def test_what_counts_cannot_be_replaced_unnoticed():
    def relay(x):
        from lessons_lib.spmd.rank_group import RankGroup

        RankGroup.send = lambda *args: None
        return relay_by_isend(x)

    def quiet(x):
        dist.all_reduce = dist.distributed_c10d.all_reduce = lambda *args, **kwargs: None
        return x

    for function, name in ((relay, "send"), (quiet, "all_reduce")):
        assert_told(check("00-relay", function), "values", f"your code has replaced .*{name}")


def test_the_oracle_is_out_of_reach():
    """What is right is computed and compared in this process; the child can only spoil its own copy."""

    def patched(x):
        from lessons_lib.grading import diagnosis, exercise, judge

        diagnosis.relative_error = lambda *_: 0.0
        diagnosis.complaint = judge.complaint = lambda *_: ""
        judge.largest_error = lambda *_: 0.0
        exercise.Draw.tensor = lambda *_: torch.zeros(1)
        torch.equal = torch.allclose = lambda *_, **__: True
        return x

    assert_told(check("00-relay", patched), "values", "the rank's own number")


def test_what_comes_back_is_only_read():
    """An object that would act where it is unpickled is named by its type, and stays where it is."""

    class Bomb:
        def __reduce__(self):
            return os._exit, (7,)

    def relay(x):
        return Bomb()

    assert_told(check("00-relay", relay), "values", "a Bomb, not a tensor")


def test_a_function_that_cannot_travel_is_named():
    import threading

    lock = threading.Lock()

    def relay(x):
        with lock:
            return x

    assert_told(check("00-relay", relay), "values", "the variable 'lock' .* cannot be copied")


def test_unfinished_communication_is_told():
    def from_the_left(x):
        r, p = dist.get_rank(), dist.get_world_size()
        y = torch.empty_like(x)
        dist.isend(x, dst=(r + 1) % p)
        dist.recv(y, src=(r - 1) % p)
        dist.all_reduce(torch.ones(1), async_op=True)
        return y

    assert_told(check("02-repair-3", from_the_left), "no deadlock", "and never waited for it")


@pytest.mark.slow
def test_where_nothing_can_fork_a_new_python_does_it(monkeypatch):
    monkeypatch.setattr(processes, "default_start", lambda: processes.spawned)
    assert check("00-relay", relay_by_isend).passed
    assert_told(check("00-relay", end), "values", "ended its process with exit code 3")


def test_turns_are_drawn():
    """A relay that only works if rank 0 always comes first shares a board with the others, and is caught."""
    seen = set()
    for seed in range(8):
        trials = find("00-relay").trials(Draw(seed))[:1]
        outcome = sandbox.run_in_child({"relay": who_came_first}, trials, [seed])
        seen.add(tuple(value["results"][0]["data"][0] for value in outcome.told[0]["values"]))
    assert len(seen) > 1, "ranks always take their turns in the same order"


def who_came_first(x):
    board = torch.__dict__.setdefault("_first", [])
    board.append(dist.get_rank())
    return torch.tensor([float(board[0])])


# ---- how check is called ----


def test_a_misspelt_id_is_refused_with_near_ones():
    with pytest.raises(RefusedError, match=r"no exercise '08-colum'\. Did you mean '08-column'"):
        check("08-colum", stub)
    with pytest.raises(RefusedError, match=r"no exercise '01-xyz'\. Did you mean '01-"):
        check("01-xyz", stub)


def test_a_wrong_number_of_functions_is_refused():
    with pytest.raises(
        RefusedError, match=r"asks for 2 functions \(column_forward, column_backward\) and was"
    ):
        check("08-column", stub)
    with pytest.raises(RefusedError, match=r"asks for 1 function \(relay\) and was given 2"):
        check("00-relay", stub, stub)
    with pytest.raises(RefusedError, match="it knows no forward"):
        check("00-relay", forward=stub)
    with pytest.raises(RefusedError, match="needs the function relay itself and got 6"):
        check("00-relay", 6)


def test_functions_come_in_order_or_by_name():
    by_name = check("08-row", row_backward=row_back, row_forward=row_by_async, seed=3)
    mixed = check("08-row", row_by_async, row_backward=row_back, seed=3)
    assert by_name.passed and mixed.passed


def test_a_seed_draws_the_same_again_and_no_seed_draws_anew():
    wrong = [str(check("08-row", row_no_sum, row_back, seed=11).lines[0]) for _ in range(2)]
    assert wrong[0] == wrong[1]
    seeds = {check("00-relay", relay_by_isend).seed for _ in range(3)}
    assert len(seeds) == 3
    report = check("00-relay", relay_by_isend, seed=12)
    assert 'check("00-relay", ..., seed=12)' in str(report)


def test_check_notes_progress():
    check("00-relay", stub)
    check("00-relay", relay_by_isend)
    check("00-relay", stub)
    noted = records.read()["exercises"]["00-relay"]
    assert (noted["points"], noted["possible"], noted["checks"]) == (10, 10, 3)
    assert noted["passed"]
    table = records.progress()
    assert table.records[0]["state"] == "passed" and table.records[1]["state"] == "not begun"
    points = f"10 of {sum(exercise.points for exercise in EXERCISES.values()):g} points"
    assert f"1 of {len(EXERCISES)} exercises passed, {points}" in str(table)
    assert "relay" in table._repr_mimebundle_()["text/html"]
