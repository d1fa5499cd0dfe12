"""Collectives from send and receive: each against torch's own, its messages counted one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lessons_lib import Mesh, rings, run
from lessons_lib.errors import MismatchError, RankError, RefusedError
from lessons_lib.mesh import PAIRS, Group
from lessons_lib.rings import (
    chain_broadcast,
    chain_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from lessons_lib.timeline import Event, elements_sent

RANKS = (1, 2, 3, 4, 7)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3))
OTHER_DTYPES = (torch.int64, torch.int32)

Collective = Callable[[Tensor, Group, int], Any]  # x, group, root
COLLECTIVES: dict[str, Collective] = {
    "ring_reduce_scatter": lambda x, group, root: ring_reduce_scatter(x, group),
    "ring_all_gather": lambda x, group, root: ring_all_gather(own_chunk(x, group), group, x.numel()),
    "ring_all_reduce": lambda x, group, root: ring_all_reduce(x, group),
    "chain_broadcast": chain_broadcast,
    "chain_reduce": chain_reduce,
    "tree_broadcast": tree_broadcast,
    "tree_reduce": tree_reduce,
}
ROOTED = [name for name in COLLECTIVES if not name.startswith("ring")]
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {  # the same numbers, in another order in memory
    "contiguous": lambda x: x,
    "every other": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "dims reversed": lambda x: reversed_dims(reversed_dims(x).contiguous()),
}


def data(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """What ``rank`` starts from: whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-(2**20), 2**20, tuple(shape), generator=generator).to(dtype)


def roots(name: str, p: int) -> list[int]:
    return sorted({0, 1 % p, p // 2, p - 1}) if name in ROOTED else [0]


def reversed_dims(x: Tensor) -> Tensor:
    return x.permute(tuple(reversed(range(x.dim()))))


def own_chunk(x: Tensor, group: Group) -> Tensor:
    return x.flatten().tensor_split(group.size)[group.rank]


def by_torch(name: str, x: Tensor, group: Group, root: int) -> Tensor | None:
    """The same by ``torch.distributed``, whose gathers and scatters cut evenly only."""
    y, on = x.clone(memory_format=torch.contiguous_format), group.process_group
    if name == "ring_all_gather":
        y = y.flatten()
        for owner, chunk in enumerate(y.tensor_split(group.size)):
            dist.broadcast(chunk, group=on, group_src=owner)
    elif name.endswith("broadcast"):
        dist.broadcast(y, group=on, group_src=root)
    elif name in ("chain_reduce", "tree_reduce"):
        dist.reduce(y, group=on, group_dst=root)
        return y if group.rank == root else None
    else:
        dist.all_reduce(y, group=on)
        if name == "ring_reduce_scatter":
            return own_chunk(y, group)
    return y


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# ---- what must hold; each of these returns in words what does not ----


def wrong_values(
    name: str,
    collective: Collective,
    p: int,
    shapes: Sequence[Sequence[int]] = ((7,), (3, 5)),
    root: int = 0,
    dtype: torch.dtype = torch.float64,
    transport: str = "threads",
) -> list[str]:
    """Where a collective differs from torch's, on any rank."""

    def step() -> tuple[list[str], list[int]]:
        group = Mesh(ring=p)["ring"]
        wrong, kept = [], []
        for shape in shapes:
            for order, reorder in ORDERS.items():
                x = reorder(data(group.rank, shape, dtype))
                y = collective(x, group, root)
                checks = {
                    "wrong value": same(y, by_torch(name, x, group, root)),
                    "its argument changed": torch.equal(x, data(group.rank, shape, dtype)),
                    "the result is strided": y is None or y.is_contiguous(),
                }
                wrong += [f"{what} on {list(shape)}, {order}" for what, holds in checks.items() if not holds]
                kept += [t for t in (x, y) if t is not None and t.numel()]
        return wrong, kept

    values = run(step, ranks=p, transport=transport).values
    found = [f"rank {rank}: {what}" for rank, (wrong, _) in enumerate(values) for what in wrong]
    storages = [t.untyped_storage().data_ptr() for _, kept in values for t in kept]
    return found + ["storage is shared"] * (len(set(storages)) < len(storages))


def expected_elements(name: str, n: int, p: int, rank: int, root: int) -> int:
    if name == "tree_broadcast":  # the one that differs from rank to rank, and from the ring convention
        behind = (rank - root) % p
        return n * sum(behind < 2**k < p - behind for k in range(p))
    return elements_sent(name.partition("_")[2], n, p, rank, root)


def expected_rounds(name: str, p: int) -> int:
    if name.startswith("tree"):
        return math.ceil(math.log2(p))
    return 2 * (p - 1) if name == "ring_all_reduce" else p - 1


def rounds(events: Sequence[Event]) -> int:
    """The longest row of messages of which each had to wait for the one before.

    A message waits for all that its sender did before, and for what its receiver received before: a rank
    sends and receives at the same time, but only one message each.
    """
    lanes: dict[int, list[tuple[int, int, int]]] = {}
    for event in events:
        assert event.peer is not None
        ends = (event.rank, event.peer) if event.kind == "send" else (event.peer, event.rank)
        lanes.setdefault(event.rank, []).append((*ends, event.sequence))

    @cache
    def round_of(message: tuple[int, int, int]) -> int:
        source, destination, _ = message
        before = lanes[source][: lanes[source].index(message)]
        before += [m for m in lanes[destination][: lanes[destination].index(message)] if m[1] == destination]
        return 1 + max(map(round_of, before), default=0)

    return max((round_of(message) for lane in lanes.values() for message in lane), default=0)


def wrong_traffic(name: str, collective: Collective, p: int, n: int = 7, root: int = 0) -> list[str]:
    """Messages of a collective that are not those of its algorithm."""

    def step() -> None:
        group = Mesh(ring=p)["ring"]
        collective(data(group.rank, (n,)), group, root)

    trace = run(step, ranks=p).trace
    found = [f"the log has {event.kind}" for event in trace.events if event.is_collective]
    for rank in range(p):
        sends = [event for event in trace.events if event.rank == rank and event.kind == "send"]
        expected = expected_elements(name, n, p, rank, root)
        if sum(event.n_elements for event in sends) != expected or trace.bytes_sent(rank) != 8 * expected:
            found.append(f"rank {rank} sends other than {expected} elements")
        if not name.startswith("tree"):
            found += [f"rank {rank} sends to {e.peer}" for e in sends if e.peer != (rank + 1) % p]
    if not found and rounds(trace.events) != expected_rounds(name, p):
        found.append(f"{rounds(trace.events)} rounds")
    return found


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_torchs_on_every_rank_for_any_root(name: str, p: int) -> None:
    for root in roots(name, p):
        assert wrong_values(name, COLLECTIVES[name], p, SHAPES, root) == []
    for dtype in OTHER_DTYPES:
        assert wrong_values(name, COLLECTIVES[name], p, root=p - 1, dtype=dtype) == []


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_rank_sends_what_the_formula_says_in_as_many_rounds(name: str, p: int) -> None:
    for n in (1, 7, 40):
        for root in roots(name, p):
            assert wrong_traffic(name, COLLECTIVES[name], p, n, root) == []


def test_on_process_ranks() -> None:
    assert wrong_values("ring_all_reduce", COLLECTIVES["ring_all_reduce"], 3, transport="processes") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_of_them_on_process_ranks(name: str) -> None:
    assert wrong_values(name, COLLECTIVES[name], 3, SHAPES, root=1, transport="processes") == []


@settings(max_examples=30)
@given(st.sampled_from((2, 3, 5)), st.integers(0, 20), st.data())
def test_laws(p: int, n: int, draw: st.DataObject) -> None:
    """Reduce-scatter then all-gather is all-reduce; so is reduce then broadcast, from any root."""
    root = draw.draw(st.integers(0, p - 1))

    def step() -> list[Tensor]:
        group = Mesh(ring=p)["ring"]
        x = data(group.rank, (n,))
        in_halves = ring_all_gather(ring_reduce_scatter(x, group), group, n)
        results = [in_halves, ring_all_reduce(x, group)]
        for reduce, broadcast in ((chain_reduce, tree_broadcast), (tree_reduce, chain_broadcast)):
            total = reduce(x, group, root)
            results.append(broadcast(x if total is None else total, group, root))
        return results

    X = sum(data(rank, (n,)) for rank in range(p))
    for results in run(step, ranks=p).values:
        assert all(same(result, X) for result in results)


def test_all_ranks_get_the_same_bits() -> None:
    """Chunks are added up in different orders, each on one rank."""

    def step() -> tuple[Tensor, Tensor]:
        group = Mesh(ring=5)["ring"]
        x = torch.randn(1003, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank))
        return ring_all_reduce(x, group), x

    values = run(step, ranks=5).values
    total = torch.stack([x for _, x in values]).sum(0)
    for y, _ in values:
        assert torch.equal(y, values[0][0]) and (y - total).norm() / total.norm() < 1e-15


def test_in_the_groups_of_a_mesh_ranks_and_roots_are_those_of_the_group() -> None:
    def step() -> list[bool]:
        mesh = Mesh(row=2, col=3)
        return [
            same(
                collective(data(mesh.rank, (7,)), mesh[axis], mesh.sizes[axis] - 1),
                by_torch(name, data(mesh.rank, (7,)), mesh[axis], mesh.sizes[axis] - 1),
            )
            for axis in ("row", "col")
            for name, collective in COLLECTIVES.items()
        ]

    assert run(step, ranks=6).values == [[True] * 2 * len(COLLECTIVES)] * 6


# ---- refusals ----


@pytest.mark.parametrize("root", [-1, 3, 7, 1.0, 0.5, True, None])
@pytest.mark.parametrize("name", ROOTED)
def test_a_root_outside_the_group_is_refused_before_any_communication(name: str, root: Any) -> None:
    message = rf"root={root} is no rank of this group: it counts its ranks from 0 to 2 \(global"
    with pytest.raises(RefusedError, match=message) as caught:
        run(lambda: COLLECTIVES[name](torch.ones(4), Mesh(ring=3)["ring"], root), ranks=3)
    assert isinstance(caught.value, RankError) and caught.value.run.trace.events == ()
    assert str(caught.value).count(f"root={root} is no rank") == 1


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_tensor_that_requires_grad_is_refused_and_the_pairs_are_named(name: str, p: int) -> None:
    def step(grad: bool) -> Any:
        with torch.set_grad_enabled(grad):
            return COLLECTIVES[name](torch.ones(4, requires_grad=True), Mesh(ring=p)["ring"], 0)

    message = rf"{name} is plain communication.*copy_sum, sum_copy.*x\.detach\(\) if no gradient is wanted"
    with pytest.raises(RefusedError, match=message) as caught:
        run(step, True, ranks=p)
    assert isinstance(caught.value, RankError) and caught.value.run.trace.events == ()
    assert all(pair in str(caught.value) for pair in PAIRS)
    assert all(y is None or not y.requires_grad for y in run(step, False, ranks=p).values)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_is_no_tensor_is_refused(name: str) -> None:
    collective = ring_all_gather if name == "ring_all_gather" else COLLECTIVES[name]
    with pytest.raises(RefusedError, match=rf"{name} takes a tensor and got 3\. Try torch\.tensor\(3\)"):
        run(lambda: collective(3, Mesh(ring=2)["ring"], 0), ranks=2)


def test_whole_numbers_of_numpy_and_torch_are_roots() -> None:
    for root in (np.int64(1), torch.tensor(1)):
        step = lambda: tree_broadcast(torch.tensor(dist.get_rank()), Mesh(tree=2)["tree"], root).item()  # noqa: B023
        assert run(step, ranks=2).values == [1, 1]


def test_a_chunk_of_the_wrong_size_is_refused_before_any_communication() -> None:
    message = (
        r"rank 0 of 4 has chunk 0 of 10 elements, which has 3, and x has 2\. .*as torch\.tensor_split cuts"
    )
    with pytest.raises(RefusedError, match=message) as caught:
        run(lambda: ring_all_gather(torch.ones(2), Mesh(ring=4)["ring"], 10), ranks=4)
    assert isinstance(caught.value, RankError) and caught.value.run.trace.events == ()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_different_sizes_on_different_ranks_are_no_number_and_no_hang(name: str) -> None:
    """S38."""

    def step(n: int) -> Any:
        return COLLECTIVES[name](data(0, (n if dist.get_rank() else 7,)), Mesh(ring=3)["ring"], 0)

    for n in (8, 9):
        with pytest.raises(MismatchError, match=r"send\(float64\["):
            run(step, n, ranks=3)


# ---- wrong versions, of which each must be caught ----


def pass_on(x: Tensor, like: Tensor, group: Group, by: int = 1) -> Tensor:
    y = torch.empty_like(like)
    peers = (group.rank + by) % group.size, (group.rank - by) % group.size
    operations = [
        dist.P2POp(operation, tensor, group=group.process_group, group_peer=peer)
        for operation, tensor, peer in zip((dist.isend, dist.irecv), (x, y), peers, strict=True)
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return y


def all_reduce(
    start: int = 1, hops: int = 0, by: int = 1, copies: bool = True, pads: bool = False
) -> Collective:
    """A ring all-reduce in one loop; with other arguments, a wrong one."""

    def collective(x: Tensor, group: Group, root: int) -> Tensor:
        p, r, n = group.size, group.rank, x.numel()
        flat = torch.cat([x.flatten(), x.new_zeros(-n % p if pads else 0)])
        chunks = list(flat.tensor_split(p))
        for step in range(2 * (p - 1) + hops):
            outgoing, incoming = (r - by * (start + step)) % p, (r - by * (start + step + 1)) % p
            arrived = pass_on(chunks[outgoing], chunks[incoming], group, by)
            chunks[incoming] = arrived if copies and step >= p - 1 else chunks[incoming] + arrived
        return torch.cat(chunks)[:n].view(x.shape)

    return collective


def reduce_scatter(start: int = 1, hops: int = 0, returns: int = 0, weight: int = 1) -> Collective:
    def collective(x: Tensor, group: Group, root: int) -> Tensor:
        p, r = group.size, group.rank
        chunks = [chunk.clone() for chunk in x.flatten().tensor_split(p)]
        for step in range(p - 1 + hops):
            outgoing, incoming = (r - start - step) % p, (r - start - step - 1) % p
            chunks[incoming] += weight * pass_on(chunks[outgoing], chunks[incoming], group)
        return chunks[(r + returns) % p].clone()

    return collective


def round_in_whole(x: Tensor, group: Group, root: int) -> Tensor:
    total, passing = x.clone(), x.contiguous()
    for _ in range(group.size - 1):
        passing = group.shift(passing, 1)
        total += passing
    return total.contiguous()


def in_memory_order(x: Tensor, group: Group, root: int) -> Tensor:
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    return ring_all_reduce(flat, group).view(x.shape)


def in_place(x: Tensor, group: Group, root: int) -> Tensor:
    return x.copy_(ring_all_reduce(x, group))


def star(x: Tensor, group: Group, root: int) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    for other in range(1, group.size):
        if group.rank == 0:
            y += group.recv(y, other)
        elif group.rank == other:
            group.send(y, 0)
    return chain_broadcast(y, group, 0)


def gather_by(first: int = 0, hops: int = 0) -> Collective:
    def collective(x: Tensor, group: Group, root: int) -> Tensor:
        p, r = group.size, group.rank
        y = torch.zeros_like(x, memory_format=torch.contiguous_format).flatten()
        chunks = y.tensor_split(p)
        chunks[r].copy_(own_chunk(x, group))
        for step in range(p - 1 + hops):
            outgoing, incoming = (r + first - step) % p, (r + first - step - 1) % p
            chunks[incoming].copy_(pass_on(chunks[outgoing], chunks[incoming], group))
        return y

    return collective


def tree(fault: str) -> Collective:
    """A binomial broadcast, and what is wrong with it."""

    def collective(x: Tensor, group: Group, root: int) -> Tensor:
        y, p, r = x.clone(memory_format=torch.contiguous_format), group.size, group.rank
        root = 0 if fault == "root ignored" else root
        behind = (r - root) % p
        widths = [2**k for k in range((p - 1).bit_length())]
        for have in widths[:-1] if fault == "last round missing" else widths:
            if behind < have and behind + have < p:
                group.send(y, (r + have) % p)
            elif have <= behind < 2 * have:
                y = group.recv(y, (r - have) % p)
        return y

    return collective


def reduce_by(fault: str) -> Collective:
    def collective(x: Tensor, group: Group, root: int) -> Tensor | None:
        y = chain_reduce(2 * x if fault == "root's term twice" and group.rank == root else x, group, root)
        return x.clone() if y is None and fault == "all return something" else y

    return collective


WRONG: dict[str, tuple[str, Collective, str]] = {  # what it should be, what it is, what gives it away
    "all-reduce: chunk off by one": ("ring_all_reduce", all_reduce(start=0), "traffic"),
    "all-reduce: last hop missing": ("ring_all_reduce", all_reduce(hops=-1), "both"),
    "all-reduce: one hop too many": ("ring_all_reduce", all_reduce(hops=1), "traffic"),
    "all-reduce: second half adds": ("ring_all_reduce", all_reduce(copies=False), "values"),
    "all-reduce: wrong direction": ("ring_all_reduce", all_reduce(by=-1), "traffic"),
    "all-reduce: padded": ("ring_all_reduce", all_reduce(pads=True), "traffic"),
    "all-reduce: whole tensors": ("ring_all_reduce", round_in_whole, "traffic"),
    "all-reduce: over rank 0": ("ring_all_reduce", star, "traffic"),
    "all-reduce: torch's own": ("ring_all_reduce", lambda x, group, root: group.all_reduce(x), "traffic"),
    "all-reduce: in place": ("ring_all_reduce", in_place, "values"),
    "all-reduce: strides ignored": ("ring_all_reduce", in_memory_order, "values"),
    "reduce-scatter: chunk off by one": ("ring_reduce_scatter", reduce_scatter(start=0), "both"),
    "reduce-scatter: returns the next": ("ring_reduce_scatter", reduce_scatter(0, returns=1), "both"),
    "reduce-scatter: last hop missing": ("ring_reduce_scatter", reduce_scatter(hops=-1), "both"),
    "reduce-scatter: doubled": ("ring_reduce_scatter", reduce_scatter(weight=2), "values"),
    "all-gather: chunk off by one": ("ring_all_gather", gather_by(first=1), "both"),
    "all-gather: last hop missing": ("ring_all_gather", gather_by(hops=-1), "both"),
    "tree: last round missing": ("tree_broadcast", tree("last round missing"), "both"),
    "tree: root ignored": ("tree_broadcast", tree("root ignored"), "both"),
    "chain instead of tree": ("tree_broadcast", chain_broadcast, "traffic"),
    "tree instead of chain": ("chain_broadcast", tree_broadcast, "traffic"),
    "broadcast, not reduced": ("chain_reduce", chain_broadcast, "both"),
    "reduce: root's term twice": ("chain_reduce", reduce_by("root's term twice"), "values"),
    "reduce: all return something": ("chain_reduce", reduce_by("all return something"), "values"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_version_is_caught(case: str) -> None:
    name, collective, caught_by = WRONG[case]
    values = wrong_values(name, collective, 4, root=2)
    traffic = wrong_traffic(name, collective, 4, root=2)
    caught = {(True, False): "values", (False, True): "traffic", (True, True): "both"}
    assert caught.get((bool(values), bool(traffic)), "nothing") == caught_by


def test_the_wrong_versions_without_their_fault_are_right() -> None:
    for name, collective in (
        ("ring_all_reduce", all_reduce()),
        ("ring_reduce_scatter", reduce_scatter()),
        ("ring_all_gather", gather_by()),
        ("tree_broadcast", tree("")),
        ("chain_reduce", reduce_by("")),
    ):
        assert wrong_values(name, collective, 4, root=2) == wrong_traffic(name, collective, 4, root=2) == []


def test_every_collective_of_the_module_is_tested() -> None:
    own = {name for name in vars(rings) if name.startswith(("ring_", "chain_", "tree_"))}
    assert own == set(COLLECTIVES)
