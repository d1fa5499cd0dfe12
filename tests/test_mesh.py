"""``Mesh``, ``Group`` and the pairs: each against its definition, each gradient against autograd."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lessons_lib.mesh
from lessons_lib import Mesh, run
from lessons_lib.errors import RankError, RefusedError
from lessons_lib.mesh import (
    PAIRS,
    REDUCTIONS,
    Group,
    copy_sum,
    exchange_exchange,
    gather_reduce_scatter,
    gather_split,
    reduce_scatter_gather,
    split_gather,
    sum_copy,
    sum_sum,
)

TOLERANCE = 1e-12


def me() -> int:
    return dist.get_rank()


def data(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """What ``rank`` holds: different on every rank, no two entries alike."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


# ---- Mesh ----


@pytest.mark.parametrize(
    "sizes", [{"tp": 1}, {"tp": 4}, {"row": 2, "col": 3}, {"row": 3, "col": 2}, {"i": 2, "j": 3, "k": 2}]
)
def test_ranks_are_numbered_row_major_and_a_group_differs_in_its_axis_alone(sizes: dict[str, int]) -> None:
    def step() -> tuple[Any, ...]:
        mesh = Mesh(**sizes)
        groups = {}
        for axis in sizes:
            group = mesh[axis]
            groups[axis] = dist.get_process_group_ranks(group.process_group), group.size, group.rank
        return mesh.coordinate, mesh.rank, mesh.sizes, groups

    n_ranks = math.prod(sizes.values())
    places = [
        dict(zip(sizes, place, strict=True)) for place in itertools.product(*map(range, sizes.values()))
    ]
    for rank, (coordinate, own, found_sizes, groups) in enumerate(run(step, ranks=n_ranks).values):
        assert own == rank and coordinate == places[rank] and list(coordinate) == list(sizes)
        assert found_sizes == sizes
        for axis in sizes:
            members = [
                other
                for other in range(n_ranks)
                if all(places[other][a] == coordinate[a] for a in sizes if a != axis)
            ]
            assert groups[axis] == (members, sizes[axis], coordinate[axis])


def test_a_mesh_is_torchs_device_mesh_and_shows_itself() -> None:
    def step() -> tuple[Any, ...]:
        mesh = Mesh(row=2, col=3)
        return (
            mesh.device_mesh.mesh_dim_names,
            mesh.device_mesh.get_coordinate(),
            repr(mesh),
            repr(mesh["col"]),
        )

    names, coordinate, text, group = run(step, ranks=6).values[4]
    assert names == ("row", "col") and list(coordinate) == [1, 1]
    assert text == "Mesh(row=2, col=3)" and group == "Group(ranks=[3, 4, 5], rank=1)"


@pytest.mark.parametrize(
    "sizes, ranks, message",
    [
        (
            {"row": 2, "col": 2},
            6,
            r"Mesh\(row=2, col=2\) has 4 places and this run has 6 ranks\. "
            r"Try Mesh\(row=2, col=3\), or run with ranks=4\.",
        ),
        ({"row": 4, "col": 2}, 6, r"has 8 places.*Try Mesh\(row=2, col=3\), or run with ranks=8"),
        ({"tp": 3}, 4, r"Try Mesh\(tp=4\), or run with ranks=3"),
        ({}, 4, r"Try Mesh\(tp=4\)"),
        ({"tp": 0}, 2, r"Mesh\(tp=0\): the size of axis 'tp' is 0; it must be 1 or more"),
        ({"tp": -2}, 2, r"the size of axis 'tp' is -2"),
        ({"tp": 2.0}, 2, r"the size of axis 'tp' is 2\.0"),
        ({"tp": True}, 1, r"the size of axis 'tp' is True"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_any_communication(
    sizes: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(RefusedError, match=message) as caught:
        run(lambda: Mesh(**sizes), ranks=ranks)
    assert isinstance(caught.value, RankError) and caught.value.run.trace.events == ()
    assert str(caught.value).count("Mesh(") <= 4  # told once


def test_a_mesh_outside_ranks_and_an_unknown_axis_are_refused() -> None:
    with pytest.raises(RefusedError, match="make it inside the function given to run"):
        Mesh(tp=1)
    with pytest.raises(RefusedError, match="this mesh has no axis 'tp'; it has 'row', 'col'"):
        run(lambda: Mesh(row=1, col=2)["tp"], ranks=2)


def test_groups_that_differ_between_ranks_need_no_care() -> None:
    """S36: every rank asks for its own groups alone, in its own order."""

    def step() -> list[float]:
        mesh = Mesh(row=2, col=2)
        group = mesh["row"] if me() in (0, 2) else mesh["col"]
        assert group.size == 2
        return [mesh["col"].all_reduce(torch.tensor(float(me()))).item()]

    assert run(step, ranks=4).values == [[1], [1], [5], [5]]


# ---- Group: every method against its definition, on every group of a 2 x 3 mesh ----

SHAPE = (6, 12)  # cut in 2 and in 3 along both dims

Method = Callable[[Group, Tensor], Any]
Meaning = Callable[[list[Tensor], int], Any]


def cat(X: list[Tensor], dim: int) -> Tensor:
    return torch.cat(X, dim)


def pieces(X: list[Tensor], dim: int, index: int) -> list[Tensor]:
    return [x.chunk(len(X), dim)[index] for x in X]


def total(X: list[Tensor]) -> Tensor:
    return torch.stack(X).sum(0)


METHODS: dict[str, tuple[Method, Meaning]] = {
    "all_reduce": (lambda g, x: g.all_reduce(x), lambda X, r: total(X)),
    "all_reduce max": (lambda g, x: g.all_reduce(x, "max"), lambda X, r: torch.stack(X).amax(0)),
    "all_reduce min": (lambda g, x: g.all_reduce(x, "min"), lambda X, r: torch.stack(X).amin(0)),
    "all_reduce avg": (lambda g, x: g.all_reduce(x, "avg"), lambda X, r: torch.stack(X).mean(0)),
    "all_reduce product": (lambda g, x: g.all_reduce(x, "product"), lambda X, r: torch.stack(X).prod(0)),
    "all_gather 0": (lambda g, x: g.all_gather(x, 0), lambda X, r: cat(X, 0)),
    "all_gather -1": (lambda g, x: g.all_gather(x, -1), lambda X, r: cat(X, 1)),
    "reduce_scatter 0": (lambda g, x: g.reduce_scatter(x, 0), lambda X, r: total(pieces(X, 0, r))),
    "reduce_scatter 1": (lambda g, x: g.reduce_scatter(x, 1), lambda X, r: total(pieces(X, 1, r))),
    "reduce_scatter max": (
        lambda g, x: g.reduce_scatter(x, 1, "max"),
        lambda X, r: torch.stack(pieces(X, 1, r)).amax(0),
    ),
    "broadcast first": (lambda g, x: g.broadcast(x, 0), lambda X, r: X[0]),
    "broadcast last": (lambda g, x: g.broadcast(x, g.size - 1), lambda X, r: X[-1]),
    "reduce": (lambda g, x: g.reduce(x, g.size - 1), lambda X, r: total(X) if r == len(X) - 1 else None),
    "reduce max": (lambda g, x: g.reduce(x, 0, "max"), lambda X, r: None if r else torch.stack(X).amax(0)),
    "all_to_all 0 1": (lambda g, x: g.all_to_all(x, 0, 1), lambda X, r: cat(pieces(X, 0, r), 1)),
    "all_to_all 1 0": (lambda g, x: g.all_to_all(x, 1, 0), lambda X, r: cat(pieces(X, 1, r), 0)),
    "all_to_all -1 -1": (lambda g, x: g.all_to_all(x, -1, -1), lambda X, r: cat(pieces(X, 1, r), 1)),
    "shift 1": (lambda g, x: g.shift(x, 1), lambda X, r: X[(r - 1) % len(X)]),
    "shift -1": (lambda g, x: g.shift(x, -1), lambda X, r: X[(r + 1) % len(X)]),
    "shift 2": (lambda g, x: g.shift(x, 2), lambda X, r: X[(r - 2) % len(X)]),
    "shift 0": (lambda g, x: g.shift(x, 0), lambda X, r: X[r]),
    "piece 0": (lambda g, x: g.piece(x, 0), lambda X, r: X[r].chunk(len(X), 0)[r]),
    "piece -1": (lambda g, x: g.piece(x, -1), lambda X, r: X[r].chunk(len(X), 1)[r]),
    "barrier": (lambda g, x: g.barrier(), lambda X, r: None),
}


def check_method(
    method: Method, meaning: Meaning, sizes: dict[str, int], make: Callable[[int], Tensor]
) -> Any:
    """The method on the group of every axis, on every rank; ``x`` stays as it was."""

    def step() -> list[Any]:
        mesh = Mesh(**sizes)
        got = []
        for axis in sizes:
            x = make(me())
            y = method(mesh[axis], x)
            assert torch.equal(x, make(me())), "the method changed its argument"
            got.append((dist.get_process_group_ranks(mesh[axis].process_group), y, x))
        return got

    result = run(step, ranks=math.prod(sizes.values()))
    for rank, got in enumerate(result.values):
        for members, y, _ in got:
            expected = meaning([make(member) for member in members], members.index(rank))
            if expected is None:
                assert y is None
            else:
                assert y.dtype == torch.float64 and not y.requires_grad
                assert torch.allclose(y, expected, rtol=TOLERANCE, atol=0) and y.shape == expected.shape
                assert y.is_contiguous()
    return result


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_definition(name: str) -> None:
    method, meaning = METHODS[name]
    result = check_method(method, meaning, {"row": 2, "col": 3}, lambda rank: data(rank, *SHAPE))
    storages = [
        tensor.untyped_storage().data_ptr()
        for got in result.values
        for _, *tensors in got
        for tensor in tensors
        if tensor is not None
    ]
    assert len(set(storages)) == len(storages), "two results, or a result and its argument, share storage"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_a_strided_tensor_and_on_one_rank(name: str) -> None:
    method, meaning = METHODS[name]
    check_method(method, meaning, {"i": 1, "j": 2}, lambda rank: data(rank, *SHAPE[::-1]).t())


def test_send_and_recv_count_ranks_in_the_group() -> None:
    def step() -> Tensor | None:
        group = Mesh(row=2, col=3)["col"]
        x = data(me(), 2, 3).t()
        if group.rank == 2:
            group.send(x, 0)
        return group.recv(torch.empty(3, 2, dtype=torch.float64), 2) if group.rank == 0 else None

    values = run(step, ranks=6).values
    for rank, value in enumerate(values):
        if rank % 3:
            assert value is None
        else:
            assert torch.equal(value, data(rank + 2, 2, 3).t())


@given(st.sampled_from([(2, 1), (3, 2), (4, 1)]), st.integers(1, 3), st.integers(0, 1))
def test_reduce_scatter_then_all_gather_is_all_reduce(sizes: tuple[int, int], n: int, dim: int) -> None:
    tp, dp = sizes

    def step() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        group = Mesh(tp=tp, dp=dp)["tp"]
        x = data(me(), n * tp, n * tp)
        back = group.all_to_all(group.all_to_all(x, dim, 1 - dim), 1 - dim, dim)
        return group.all_gather(group.reduce_scatter(x, dim), dim), group.all_reduce(x), back, x

    for value, expected, back, x in run(step, ranks=tp * dp).values:
        assert torch.equal(value, expected) and torch.equal(back, x)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda g: g.broadcast(torch.ones(1), 3),
            r"root=3 is no rank of this group: it counts its ranks from 0",
        ),
        (lambda g: g.broadcast(torch.ones(1), -1), r"root=-1 .*from 0 to 2 \(global ranks \[0, 1, 2\]\)"),
        (lambda g: g.reduce(torch.ones(1), 5), r"root=5"),
        (lambda g: g.broadcast(torch.ones(1), 1.0), r"root=1\.0 is no rank of this group.*from 0 to 2"),
        (lambda g: g.reduce(torch.ones(1), True), r"root=True is no rank"),
        (lambda g: g.send(torch.ones(1), 0.5), r"to=0\.5 is no rank"),
        (lambda g: g.recv(torch.ones(1), None), r"source=None is no rank"),
        (lambda g: g.shift(torch.ones(1), 1.0), r"by=1\.0: give a whole number of places"),
        (lambda g: g.all_gather(torch.ones(3), 0.0), r"dim=0\.0: give a whole number, a dim of .*\[3\]"),
        (lambda g: g.piece(torch.ones(3), False), r"dim=False: give a whole number"),
        (lambda g: g.all_reduce(3), r"Group\.all_reduce takes a tensor and got 3\. Try torch\.tensor\(3\)"),
        (lambda g: g.send(torch.ones(1), 3), r"to=3"),
        (lambda g: g.recv(torch.ones(1), 7), r"source=7"),
        (
            lambda g: g.all_reduce(torch.ones(1), "median"),
            r"op='median' is unknown; known: 'sum', 'avg', 'max'",
        ),
        (lambda g: g.reduce(torch.ones(1), 0, "x"), r"op='x'"),
        (lambda g: g.reduce_scatter(torch.ones(3), 0, "x"), r"op='x'"),
        (
            lambda g: g.reduce_scatter(torch.ones(2, 7), 1),
            r"dim 1 of a tensor of shape \[2, 7\] has size 7, which 3 ranks cannot share evenly\. "
            r"Nearest sizes that they can: 6 or 9\.",
        ),
        (lambda g: g.piece(torch.ones(2), 0), r"size 2, which 3 ranks.*can: 3\."),
        (lambda g: g.all_to_all(torch.ones(4, 3), 0, 1), r"dim 0 of a tensor of shape \[4, 3\] has size 4"),
        (
            lambda g: g.all_to_all(torch.ones(3, 3), 0, 2),
            r"dim=2 is out of range for a tensor of shape \[3, 3\]",
        ),
        (lambda g: g.all_to_all(torch.ones(3, 3), -3, 0), r"dim=-3 is out of range"),
        (lambda g: g.all_gather(torch.ones(3), 1), r"dim=1 is out of range for a tensor of shape \[3\]"),
        (lambda g: g.all_gather(torch.tensor(1.0), 0), r"dim=0 is out of range for a tensor of shape \[\]"),
        (lambda g: g.reduce_scatter(torch.ones(3), 1), r"dim=1 is out of range"),
        (lambda g: g.piece(torch.ones(3), -2), r"dim=-2 is out of range"),
    ],
)
def test_a_wrong_argument_is_refused_before_any_communication(
    call: Callable[[Group], Any], message: str
) -> None:
    with pytest.raises(RefusedError, match=message) as caught:
        run(lambda: call(Mesh(tp=3)["tp"]), ranks=3)
    assert isinstance(caught.value, RankError) and caught.value.run.trace.events == ()


@pytest.mark.parametrize("name", [name for name in METHODS if name != "barrier"])
def test_a_tensor_that_requires_grad_is_refused_and_the_pairs_are_named(name: str) -> None:
    method, _ = METHODS[name]
    called = name.split()[0]

    def step() -> Any:
        return method(Mesh(tp=2)["tp"], data(me(), *SHAPE).requires_grad_())

    with pytest.raises(
        RefusedError, match=rf"Group\.{called} is plain.*copy_sum, sum_copy.*x\.detach\(\)"
    ) as e:
        run(step, ranks=2)
    assert all(pair in str(e.value) for pair in PAIRS)

    def without_grad() -> Any:
        with torch.no_grad():
            return method(Mesh(tp=2)["tp"], data(me(), *SHAPE).requires_grad_())

    assert all(value is None or not value.requires_grad for value in run(without_grad, ranks=2).values)


def test_send_and_recv_refuse_too() -> None:
    for call in (lambda g, x: g.send(x, 0), lambda g, x: g.recv(x, 0)):
        with pytest.raises(RefusedError, match="Use a pair that says what the backward is"):
            run(lambda: call(Mesh(tp=2)["tp"], torch.ones(1, requires_grad=True)), ranks=2)  # noqa: B023


def test_every_reduction_has_a_test() -> None:
    assert {f"all_reduce {op}" for op in REDUCTIONS if op != "sum"} <= set(METHODS)


# ---- pairs ----
#
# The oracle is autograd over one program that plays all ranks: x_0 ... x_p-1 are its inputs, the
# forward its definition. What the *losses* are is the convention of the pair:
#   one loss:   all ranks go on alike with equal tensors (or with pieces of one), and dy is the gradient of
#               the one loss: the oracle uses rank 0's dy once, for whole tensors.
#   p losses:   every rank has a loss of its own and they are added up: the oracle adds up all of them.

Forward = Callable[[list[Tensor]], list[Tensor]]  # what every rank holds afterwards
ONE, MANY = "one loss", "p losses"

DEFINITIONS: dict[str, tuple[Callable[..., Tensor], dict[str, int], Forward, str, str]] = {
    # name: pair, its dims, forward of all ranks, is X one tensor that all hold?, losses
    "copy_sum": (copy_sum, {}, lambda X: list(X), "shared", MANY),
    "sum_copy": (sum_copy, {}, lambda X: [total(X)] * len(X), "own", ONE),
    "sum_sum": (sum_sum, {}, lambda X: [total(X)] * len(X), "own", MANY),
    "gather_split": (gather_split, {"dim": 1}, lambda X: [cat(X, 1)] * len(X), "own", ONE),
    "gather_reduce_scatter": (
        gather_reduce_scatter,
        {"dim": 1},
        lambda X: [cat(X, 1)] * len(X),
        "own",
        MANY,
    ),
    "reduce_scatter_gather": (
        reduce_scatter_gather,
        {"dim": 1},
        lambda X: [total(pieces(X, 1, r)) for r in range(len(X))],
        "own",
        MANY,
    ),
    "split_gather": (
        split_gather,
        {"dim": 1},
        lambda X: [X[r].chunk(len(X), 1)[r] for r in range(len(X))],
        "shared",
        MANY,
    ),
    "exchange_exchange": (
        exchange_exchange,
        {"split_dim": 0, "concat_dim": 1},
        lambda X: [cat(pieces(X, 0, r), 1) for r in range(len(X))],
        "own",
        MANY,
    ),
}
IN_DIM_0 = {
    name: {"dim": 0} if dims.keys() == {"dim"} else {"split_dim": 1, "concat_dim": 0}
    for name, (_, dims, *_) in DEFINITIONS.items()
    if dims
}


def inputs(name: str, members: list[int]) -> list[Tensor]:
    shared = DEFINITIONS[name][3] == "shared"
    return [data(members[0] if shared else member, *SHAPE) for member in members]


def upstream(name: str, members: list[int], shapes: list[torch.Size]) -> list[Tensor]:
    """Random dy of every rank; equal where all ranks see the same loss."""
    one = DEFINITIONS[name][4] == ONE
    return [
        data(members[0] if one else member, *shape, seed=1)
        for member, shape in zip(members, shapes, strict=True)
    ]


def oracle(name: str, members: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Forward and gradient of every rank, by autograd in one process."""
    _, _, forward, kind, losses = DEFINITIONS[name]
    X = [x.requires_grad_() for x in inputs(name, members)]
    if kind == "shared":
        X = [X[0]] * len(X)
    Y = forward(X)
    dY = upstream(name, members, [y.shape for y in Y])
    terms = [(y * dy).sum() for y, dy in zip(Y, dY, strict=True)]
    (terms[0] if losses == ONE else torch.stack(terms).sum()).backward()
    gradients = [x.grad for x in X if x.grad is not None]
    assert len(gradients) == len(X)
    return [y.detach() for y in Y], gradients


def pair_errors(
    name: str, group_of: Callable[[Mesh], Group], sizes: dict[str, int]
) -> list[tuple[float, float]]:
    """Relative error of forward and gradient on every rank."""
    pair, dims, *_ = DEFINITIONS[name]

    def step() -> tuple[list[int], Tensor, Tensor]:
        group = group_of(Mesh(**sizes))
        members = dist.get_process_group_ranks(group.process_group)
        x = inputs(name, members)[group.rank].requires_grad_()
        before = x.detach().clone()
        y = pair(x, group, **dims)
        assert y.requires_grad and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        dy = upstream(name, members, [y.shape] * group.size)[group.rank]
        y.backward(dy)
        assert torch.equal(x, before) and x.grad is not None
        return members, y.detach(), x.grad

    errors = []
    for rank, (members, y, dx) in enumerate(run(step, ranks=math.prod(sizes.values())).values):
        Y, dX = oracle(name, members)
        index = members.index(rank)
        errors.append((error(y, Y[index]), error(dx, dX[index])))
    return errors


def test_every_pair_is_tested() -> None:
    assert list(DEFINITIONS) == list(PAIRS) and all(PAIRS[name] is DEFINITIONS[name][0] for name in PAIRS)


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("axis", ["row", "col"])
def test_a_pair_is_its_forward_and_its_gradient(name: str, axis: str) -> None:
    for forward, backward in pair_errors(name, lambda mesh: mesh[axis], {"row": 2, "col": 3}):
        assert forward < TOLERANCE and backward < TOLERANCE


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_pair_on_one_rank_is_the_identity(name: str) -> None:
    """S71."""
    assert pair_errors(name, lambda mesh: mesh["tp"], {"tp": 1}) == [(0.0, 0.0)]


@pytest.mark.parametrize("name", IN_DIM_0)
def test_a_pair_along_the_other_dim(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(X: list[Tensor]) -> list[Tensor]:
        return [y.t() for y in forward([x.t() for x in X])]

    pair, _, forward, kind, losses = DEFINITIONS[name]
    monkeypatch.setitem(DEFINITIONS, name, (pair, IN_DIM_0[name], transposed, kind, losses))
    for found in pair_errors(name, lambda mesh: mesh["tp"], {"tp": 3}):
        assert max(found) < TOLERANCE


ALL_REDUCE, ALL_GATHER, ALL_TO_ALL = Group.all_reduce, Group.all_gather, Group.all_to_all

# Every pair done wrong: one of its two communications left out, doubled or taken for another.
WRONG: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "no sum of the gradients": ("copy_sum", "all_reduce", lambda group, x, op="sum": x.clone()),
    "gradients averaged": (
        "copy_sum",
        "all_reduce",
        lambda group, x, op="sum": ALL_REDUCE(group, x) / group.size,
    ),
    "gradients summed twice": (
        "copy_sum",
        "all_reduce",
        lambda group, x, op="sum": ALL_REDUCE(group, ALL_REDUCE(group, x)),
    ),
    "no sum forward": ("sum_copy", "all_reduce", lambda group, x, op="sum": x.clone()),
    "no sum at all": ("sum_sum", "all_reduce", lambda group, x, op="sum": x.clone()),
    "gathered in another order": (
        "gather_split",
        "all_gather",
        lambda group, x, dim: torch.cat(ALL_GATHER(group, x, dim).chunk(group.size, dim)[::-1], dim),
    ),
    "the neighbour's piece of the gradient": (
        "gather_split",
        "piece",
        lambda group, x, dim: x.chunk(group.size, dim)[(group.rank + 1) % group.size].clone(),
    ),
    "a piece in place of the reduce-scatter": (
        "gather_reduce_scatter",
        "reduce_scatter",
        lambda group, x, dim, op="sum": x.chunk(group.size, dim)[group.rank].clone(),
    ),
    "a piece in place of the forward reduce-scatter": (
        "reduce_scatter_gather",
        "reduce_scatter",
        lambda group, x, dim, op="sum": x.chunk(group.size, dim)[group.rank].clone(),
    ),
    "the gradient gathered as copies of one's own": (
        "reduce_scatter_gather",
        "all_gather",
        lambda group, x, dim: torch.cat([x] * group.size, dim),
    ),
    "zeros in place of the others' gradients": (
        "split_gather",
        "all_gather",
        lambda group, x, dim: torch.cat(
            [x if index == group.rank else torch.zeros_like(x) for index in range(group.size)], dim
        ),
    ),
    "exchanged with dims swapped": (
        "exchange_exchange",
        "all_to_all",
        lambda group, x, split_dim, concat_dim: ALL_TO_ALL(group, x, concat_dim, split_dim),
    ),
    "not exchanged": (
        "exchange_exchange",
        "all_to_all",
        lambda group, x, split_dim, concat_dim: torch.cat(x.chunk(group.size, split_dim), concat_dim),
    ),
}


@pytest.mark.parametrize("name, method, wrong", WRONG.values(), ids=WRONG)
def test_a_pair_with_a_wrong_communication_is_caught(
    name: str, method: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, method, wrong)
    caught = []
    for axis in ("row", "col"):
        try:
            errors = pair_errors(name, lambda mesh: mesh[axis], {"row": 2, "col": 3})  # noqa: B023
            caught.append(any(max(found) > 1e-3 for found in errors))
        except (AssertionError, RankError):
            caught.append(True)  # a wrong shape
    assert caught == [True, True]


@pytest.mark.parametrize(
    "name, other",
    [
        ("copy_sum", "sum_copy"),
        ("sum_copy", "copy_sum"),
        ("sum_copy", "sum_sum"),
        ("sum_sum", "sum_copy"),
        ("gather_split", "gather_reduce_scatter"),
        ("gather_reduce_scatter", "gather_split"),
        ("reduce_scatter_gather", "split_gather"),
        ("split_gather", "reduce_scatter_gather"),
    ],
)
def test_one_pair_taken_for_another_is_caught(name: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *rest = DEFINITIONS[name]
    monkeypatch.setitem(DEFINITIONS, name, (PAIRS[other], *rest))
    errors = pair_errors(name, lambda mesh: mesh["tp"], {"tp": 3})
    assert max(max(found) for found in errors) > 1e-2


def test_back_propagation_through_an_all_reduce() -> None:
    """S34: y = all_reduce(w_r x_r), x_r = r + 1, and the same loss y on each of 4 ranks."""

    def gradient(pair: Callable[[Tensor, Group], Tensor]) -> tuple[float, float]:
        group = Mesh(tp=4)["tp"]
        w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        y = pair(w * (me() + 1), group)
        y.backward()
        assert w.grad is not None
        return y.item(), w.grad.item()

    one = run(gradient, sum_copy, ranks=4).values
    many = run(gradient, sum_sum, ranks=4).values
    assert one == [(20, 1), (20, 2), (20, 3), (20, 4)]  # one loss, seen four times
    assert many == [(20, 4), (20, 8), (20, 12), (20, 16)]  # four losses, added up


def test_a_pair_is_differentiable_once_and_says_so() -> None:
    def step() -> None:
        x = torch.ones(2, requires_grad=True)
        y = sum_copy(x, Mesh(tp=2)["tp"]) ** 2
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        dx.sum().backward()

    with pytest.raises(RankError, match="once_differentiable"):
        run(step, ranks=2)


def test_a_pair_communicates_backward_only_what_its_name_says() -> None:
    def step(name: str) -> list[str]:
        group = Mesh(tp=2)["tp"]
        pair, dims, *_ = DEFINITIONS[name]
        x = data(me(), *SHAPE).requires_grad_()
        pair(x, group, **dims).sum().backward()
        return []

    kinds = {
        "copy_sum": ["all_reduce"],
        "sum_copy": ["all_reduce"],
        "sum_sum": ["all_reduce", "all_reduce"],
        "gather_split": ["all_gather"],
        "gather_reduce_scatter": ["all_gather", "reduce_scatter"],
        "reduce_scatter_gather": ["reduce_scatter", "all_gather"],
        "split_gather": ["all_gather"],
        "exchange_exchange": ["all_to_all", "all_to_all"],
    }
    for name in PAIRS:
        trace = run(step, name, ranks=2).trace
        for rank in range(2):
            assert [event.kind for event in trace.collectives(rank)] == kinds[name], name


def test_the_module_names_its_pairs_in_one_table() -> None:
    assert all(getattr(lessons_lib.mesh, name) is pair for name, pair in PAIRS.items())
