"""Every collective of ``torch.distributed`` on emulated ranks, against its definition; and what torch builds
on them, against the serial gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import Layout, Mesh, region, rings, run
from lessons_lib.errors import MismatchError, RankError, RefusedError
from lessons_lib.mesh import sum_sum
from lessons_lib.timeline import elements_sent

BOTH = ("threads", pytest.param("processes", marks=pytest.mark.slow))
RANKS = (1, 2, 3, 4)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """What ``rank`` starts from: small whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    x = torch.randint(1, 5, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(x.double(), torch.randint(1, 5, shape, generator=generator).double()).to(dtype)
    return x.to(dtype)


def same(a: Any, b: Any) -> bool:
    """Equal in value, shape and dtype, also inside lists."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return bool(a == b)


Collective = Callable[[Tensor], Any]  # what a rank calls, given its data
Meaning = Callable[[list[Tensor], int], Any]  # what rank r then has, given the data of all


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def all_reduce_coalesced(x: Tensor) -> list[Tensor]:
    tensors = [x, 2 * x]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def reduce(x: Tensor) -> Tensor:
    dist.reduce(x, size() - 1)
    return x


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, size() - 1)
    return x


def all_gather(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(size())]
    dist.all_gather(parts, x)
    return parts


def all_gather_single(x: Tensor) -> Tensor:
    y = x.new_empty(size() * len(x), *x.shape[1:])
    dist.all_gather_single(y, x)
    return y


def all_gather_stacked(x: Tensor) -> Tensor:
    y = x.new_empty(size(), *x.shape)
    dist.all_gather_single(y, x)
    return y


def reduce_scatter(x: Tensor) -> Tensor:
    parts = [part.clone() for part in x.chunk(size())]
    y = torch.empty_like(parts[0])
    dist.reduce_scatter(y, parts)
    return y


def reduce_scatter_single(x: Tensor) -> Tensor:
    y = x.new_empty(len(x) // size(), *x.shape[1:])
    dist.reduce_scatter_single(y, x)
    return y


def gather(x: Tensor) -> list[Tensor] | None:
    parts = [torch.empty_like(x) for _ in range(size())] if me() == size() - 1 else None
    dist.gather(x, parts, dst=size() - 1)
    return parts


def scatter(x: Tensor) -> Tensor:
    parts = [part.clone() for part in x.chunk(size())]
    y = torch.empty_like(parts[0])
    dist.scatter(y, parts if me() == size() - 1 else None, src=size() - 1)
    return y


def all_to_all(x: Tensor) -> list[Tensor]:
    parts = [part.clone() for part in x.chunk(size())]
    received = [torch.empty_like(part) for part in parts]
    dist.all_to_all(received, parts)
    return received


def all_to_all_single(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    return y


def rows(X: list[Tensor], r: int) -> list[Tensor]:
    return [x.chunk(len(X))[r] for x in X]


def total(X: Sequence[Tensor]) -> Tensor:
    result = X[0].clone()
    for x in X[1:]:
        result = result | x if x.dtype == torch.bool else result + x
    return result


COLLECTIVES: dict[str, tuple[Collective, Meaning]] = {
    "all_reduce": (all_reduce, lambda X, r: total(X)),
    "reduce": (reduce, lambda X, r: total(X) if r == len(X) - 1 else X[r]),
    "broadcast": (broadcast, lambda X, r: X[-1]),
    "all_gather": (all_gather, lambda X, r: X),
    "all_gather_single": (all_gather_single, lambda X, r: torch.cat(X)),
    "all_gather_single, stacked": (all_gather_stacked, lambda X, r: torch.stack(X)),
    "reduce_scatter": (reduce_scatter, lambda X, r: total(rows(X, r))),
    "reduce_scatter_single": (reduce_scatter_single, lambda X, r: total(rows(X, r))),
    "gather": (gather, lambda X, r: X if r == len(X) - 1 else None),
    "scatter": (scatter, lambda X, r: rows(X, r)[-1]),
    "all_to_all": (all_to_all, lambda X, r: rows(X, r)),
    "all_to_all_single": (all_to_all_single, lambda X, r: torch.cat(rows(X, r))),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_its_definition(name: str) -> None:
    collective, meaning = COLLECTIVES[name]
    for ranks in RANKS:
        for dtype in DTYPES:
            values = run(lambda d: collective(data(me(), 12, 2, dtype=d)), dtype, ranks=ranks).values
            X = [data(rank, 12, 2, dtype=dtype) for rank in range(ranks)]
            for rank in range(ranks):
                assert same(values[rank], meaning(X, rank)), (name, ranks, dtype, rank)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_strided_tensors(name: str) -> None:
    """A transposed tensor, and every other column: memory does not lie in the order of the values."""
    collective, meaning = COLLECTIVES[name]

    def view(rank: int, which: int) -> Tensor:
        return data(rank, 5, 6).t() if which else data(rank, 6, 10)[:, ::2]

    for which in (0, 1):
        values = run(lambda w: collective(view(me(), w)), which, ranks=3).values
        X = [view(rank, which) for rank in range(3)]
        assert all(same(values[rank], meaning(X, rank)) for rank in range(3))


def test_writing_into_a_view_changes_nothing_beside_it() -> None:
    def step() -> Tensor:
        x = torch.full((4, 4), -1.0)
        x[:, 1] = me() + 1
        dist.all_reduce(x[:, 1])
        parts = x[2:, 2:].unbind()
        dist.all_gather(list(parts), torch.full((2,), float(me())))
        return x

    for value in run(step, ranks=2).values:
        expected = torch.full((4, 4), -1.0)
        expected[:, 1] = 3
        expected[2, 2:], expected[3, 2:] = 0, 1
        assert torch.equal(value, expected)


@pytest.mark.parametrize(
    "name", ["all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single, stacked"]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_tensors_without_dims_and_without_elements(name: str, shape: tuple[int, ...]) -> None:
    collective, meaning = COLLECTIVES[name]
    values = run(lambda: collective(data(me(), *shape)), ranks=3).values
    X = [data(rank, *shape) for rank in range(3)]
    assert all(same(values[rank], meaning(X, rank)) for rank in range(3))


OPS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "sum": (ReduceOp.SUM, lambda X: X.sum(0)),
    "avg": (ReduceOp.AVG, lambda X: X.mean(0)),
    "product": (ReduceOp.PRODUCT, lambda X: X.prod(0)),
    "min": (ReduceOp.MIN, lambda X: X.amin(0)),
    "max": (ReduceOp.MAX, lambda X: X.amax(0)),
}
BIT_OPS: dict[str, tuple[Any, Callable[[int, int], int]]] = {
    "band": (ReduceOp.BAND, lambda a, b: a & b),
    "bor": (ReduceOp.BOR, lambda a, b: a | b),
    "bxor": (ReduceOp.BXOR, lambda a, b: a ^ b),
}


@pytest.mark.parametrize("name", OPS)
def test_reductions(name: str) -> None:
    op, meaning = OPS[name]

    def step() -> tuple[Tensor, ...]:
        x, y, z, w = (data(me(), 6) for _ in range(4))
        dist.all_reduce(x, op)
        dist.reduce(y, 1, op)
        parts, single = torch.empty(2).double(), torch.empty(2).double()
        dist.reduce_scatter(parts, list(z.chunk(3)), op)
        dist.reduce_scatter_single(single, w, op)
        return x, y, parts, single

    X = torch.stack([data(rank, 6) for rank in range(3)])
    for rank, (x, y, parts, single) in enumerate(run(step, ranks=3).values):
        assert torch.equal(x, meaning(X))
        assert torch.equal(y, meaning(X) if rank == 1 else X[rank])
        assert torch.equal(parts, meaning(X)[2 * rank : 2 * rank + 2]) and torch.equal(parts, single)


@pytest.mark.parametrize("name", BIT_OPS)
def test_bitwise_reductions(name: str) -> None:
    op, meaning = BIT_OPS[name]

    def step() -> list[int]:
        x = torch.tensor([0b1100 >> me(), 7 * me(), 5])
        dist.all_reduce(x, op)
        return x.tolist()

    a, b, c = ([0b1100 >> rank, 7 * rank, 5] for rank in range(3))
    expected = [meaning(meaning(x, y), z) for x, y, z in zip(a, b, c, strict=True)]
    assert run(step, ranks=3).values == [expected] * 3


def test_an_average_of_whole_numbers_stays_whole_and_an_unknown_reduction_is_named() -> None:
    def average() -> Tensor:
        x = torch.tensor([me() + 1, 4])
        dist.all_reduce(x, ReduceOp.AVG)
        return x

    def scaled() -> None:
        dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]

    assert all(same(value, torch.tensor([1, 4])) for value in run(average, ranks=2).values)
    with pytest.raises(ValueError, match=r"ranks cannot reduce with .*; they know SUM, AVG, PRODUCT"):
        run(scaled, ranks=2)


def test_the_sum_is_the_same_on_every_rank_to_the_last_bit() -> None:
    def step() -> Tensor:
        x = torch.rand(100, generator=torch.Generator().manual_seed(me()))
        dist.all_reduce(x)
        return x

    first, *others = run(step, ranks=5).values
    assert all(torch.equal(first, other) for other in others)


def test_coalesced() -> None:
    for rank, (x, y) in enumerate(run(lambda: all_reduce_coalesced(data(me(), 3)), ranks=3).values):
        X = total([data(r, 3) for r in range(3)])
        assert same(x, X) and same(y, 2 * X), rank


@pytest.mark.parametrize("single", [True, False])
def test_uneven_all_to_all(single: bool) -> None:
    """Rank r sends r + 2 s elements to rank s; nothing from 0 to 0."""
    ranks = 3

    def sent(source: int, to: int) -> Tensor:
        return data(source, source + 2 * to, seed=to)

    def step() -> Tensor:
        inputs = [sent(me(), to) for to in range(ranks)]
        outputs = [torch.empty_like(sent(source, me())) for source in range(ranks)]
        if not single:
            dist.all_to_all(outputs, inputs)
            return torch.cat(outputs)
        y = torch.cat(outputs)
        dist.all_to_all_single(y, torch.cat(inputs), [len(x) for x in outputs], [len(x) for x in inputs])
        return y

    result = run(step, ranks=ranks)
    for rank, value in enumerate(result.values):
        assert same(value, torch.cat([sent(source, rank) for source in range(ranks)]))
        kept = len(sent(rank, rank))
        assert result.trace.bytes_sent(rank) == 8 * (sum(len(sent(rank, to)) for to in range(ranks)) - kept)


def test_objects() -> None:
    def step() -> tuple[Any, ...]:
        gathered: list[Any] = [None] * size()
        dist.all_gather_object(gathered, {"rank": me(), "text": "x" * me()})
        shown = [("a", 1), None] if me() == 1 else [None, None]
        dist.broadcast_object_list(shown, src=1)
        to_root: list[Any] | None = [None] * size() if me() == 2 else None
        dist.gather_object(me(), to_root, dst=2)
        part: list[Any] = [None]
        dist.scatter_object_list(part, ["p", "q", "r"] if me() == 0 else None, src=0)
        message: list[Any] = [{"from": 0}]
        if me() == 0:
            dist.send_object_list(message, 2)
        elif me() == 2:
            message = [None]
            dist.recv_object_list(message, 0)
        return gathered, shown, to_root, part, message

    for rank, value in enumerate(run(step, ranks=3).values):
        assert value == (
            [{"rank": r, "text": "x" * r} for r in range(3)],
            [("a", 1), None],
            [0, 1, 2] if rank == 2 else None,
            ["pqr"[rank]],
            [{"from": 0}],
        )


# ---- averages (S67) ----


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce:FutureWarning")
@pytest.mark.parametrize("transport", BOTH)
def test_the_average_of_1_2_3_4_is_2_and_a_half_forward_and_backward(transport: str) -> None:
    """Each value is a quarter of every average: from separate losses it gets a quarter of all gradients."""

    def step() -> list[float]:
        v, group = me() + 1.0, Mesh(dp=4)["dp"]
        x, part = torch.tensor([v]), torch.empty(1)
        dist.all_reduce(x, ReduceOp.AVG)
        dist.reduce_scatter(part, [torch.tensor([v])] * 4, ReduceOp.AVG)
        found = [x.item(), part.item(), group.all_reduce(torch.tensor(v), "avg").item()]
        for average in (
            lambda t: torch.distributed.nn.functional.all_reduce(t, op=ReduceOp.AVG),
            lambda t: sum_sum(t, group) / 4,
        ):
            w = torch.tensor([v], requires_grad=True)
            y = average(w)
            (y * 10 * v).backward()  # upstream gradients 10, 20, 30, 40
            assert w.grad is not None
            found += [y.item(), w.grad.item()]
        return found

    assert run(step, ranks=4, transport=transport).values == [[2.5, 2.5, 2.5, 2.5, 25, 2.5, 25]] * 4


# ---- pieces of different sizes (S30, S89) ----


@pytest.mark.parametrize("transport", BOTH)
@pytest.mark.parametrize(
    "n, sizes", [(5, [3, 2]), (16, [3, 3, 3, 3, 3, 1]), (10, [3, 3, 3, 1]), (5, [2, 2, 1, 0])]
)
def test_uneven_shards_are_exact_or_refused_and_never_padded(
    transport: str, n: int, sizes: list[int]
) -> None:
    p, X = len(sizes), torch.arange(float(n))

    def step() -> tuple[Tensor, ...]:
        mesh = init_device_mesh("cpu", (p,))
        sharded = distribute_tensor(X, mesh, [Shard(0)])
        group = Mesh(tp=p)["tp"]
        scattered = rings.ring_reduce_scatter(X, group)
        return (
            sharded.to_local(),
            sharded.full_tensor(),
            scattered,
            rings.ring_all_gather(scattered, group, n),
        )

    for rank, (local, full, scattered, gathered) in enumerate(run(step, ranks=p, transport=transport).values):
        assert same(local, X.split(sizes)[rank] if sizes[rank] else X[:0]) and same(full, X)
        assert same(scattered, p * X.tensor_split(p)[rank]) and same(gathered, p * X)
    for refused in (
        lambda: Layout("F@tp").shard(X, Mesh(tp=p)),
        lambda: Mesh(tp=p)["tp"].reduce_scatter(X, 0),
    ):
        near = n // p * p or p
        with pytest.raises(RefusedError, match=rf"size {n}\b.*Nearest sizes that (they )?can: {near}\b"):
            run(refused, ranks=p, transport=transport)


@pytest.mark.parametrize("transport", BOTH)
def test_nested_shards_come_back_in_order(transport: str) -> None:
    """5 rows cut over one axis and then over the other are 2, 1, 1, 1 rows, not 2, 2, 1, 0."""
    X = torch.arange(5.0)

    def local() -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return distribute_tensor(X, mesh, [Shard(0), Shard(0)]).to_local()

    def by_rings() -> Tensor:
        mesh = Mesh(a=2, b=2)
        rows = X.tensor_split(2)[mesh["a"].rank]
        mine = rows.tensor_split(2)[mesh["b"].rank]
        outer = rings.ring_all_gather(mine, mesh["b"], rows.numel())
        return rings.ring_all_gather(outer, mesh["a"], X.numel())

    def full() -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return distribute_tensor(X, mesh, [Shard(0), Shard(0)]).full_tensor()

    rows = run(local, ranks=4, transport=transport).values
    assert [len(each) for each in rows] == [2, 1, 1, 1] and same(torch.cat(rows), X)
    assert all(same(each, X) for each in run(by_rings, ranks=4, transport=transport).values)
    with pytest.raises(RefusedError, match=r"dim B of size 5 cannot be cut.*Nearest sizes that can: 4, 8"):
        run(lambda: Layout("B@a@b").shard(X, Mesh(a=2, b=2)), ranks=4, transport=transport)
    try:  # torch 2.13 gathers pieces of two sizes; a library would put them together wrongly
        values = run(full, ranks=4, transport=transport).values
    except MismatchError as error:
        assert "about the shape of collective" in str(error) and "all_gather" in str(error)  # noqa: PT017
    else:
        assert all(same(each, X) for each in values)


# ---- the ring's factor (S44) ----


@pytest.mark.parametrize("transport", BOTH)
@pytest.mark.parametrize("p, each, half", [(4, 150_000, 75_000), (8, 175_000, 87_500)])
def test_what_a_ring_sends_of_100_kilobytes(transport: str, p: int, each: int, half: int) -> None:
    """By the convention, and by send and receive; a sum on one rank that is sent back has the same total."""

    def step() -> None:
        x, group = torch.ones(25_000), Mesh(dp=p)["dp"]
        with region("all-reduce"):
            group.all_reduce(x)
        with region("halves"):
            group.all_gather(group.reduce_scatter(x, 0), 0)
        with region("messages"):
            rings.ring_all_reduce(x, group)
        with region("over one rank"):
            total = group.reduce(x, 0)
            group.broadcast(x if total is None else total, 0)

    trace = run(step, ranks=p, transport=transport).trace
    for rank in range(p):
        assert [trace.bytes_sent(rank, name) for name in ("all-reduce", "halves", "messages")] == [each] * 3
        scattered, gathered = trace.collectives(rank, "halves")
        assert scattered.bytes_sent == gathered.bytes_sent == half
    naive = [trace.bytes_sent(rank, "over one rank") for rank in range(p)]
    assert sum(naive) == p * each == {4: 600_000, 8: 1_400_000}[p]
    assert max(naive) == 200_000 and min(naive) == 100_000
    assert elements_sent("all_reduce", 10**8, p, 0) == 1000 * each


# ---- asynchronous (S90) ----


def test_an_asynchronous_result_is_delivered_in_wait_and_never_before() -> None:
    """Also on the rank that arrives last, where the result exists already."""

    def step() -> list[Any]:
        x, y = torch.tensor([me() + 1.0]), torch.zeros(1)
        parts = [torch.full((1,), -1.0) for _ in range(size())]
        handles: list[Any] = [
            dist.all_reduce(x, async_op=True),
            dist.all_gather(parts, x, async_op=True),
            dist.irecv(y, (me() - 1) % size()),
            dist.isend(x, (me() + 1) % size()),
        ]
        early = [x.item(), y.item(), *(part.item() for part in parts)]
        dist.barrier()  # by now everybody has arrived
        still = [x.item(), y.item(), *(part.item() for part in parts)]
        for handle in reversed(handles):
            handle.wait()
            handle.wait()  # twice is once
        return [early, still, x.item(), y.item(), [part.item() for part in parts]]

    for rank, (early, still, x, y, parts) in enumerate(run(step, ranks=3).values):
        assert early == still == [rank + 1.0, 0.0, -1.0, -1.0, -1.0]
        assert (x, y, parts) == (6.0, (rank - 1) % 3 + 1.0, [1.0, 2.0, 3.0])


def test_what_is_sent_is_what_the_buffer_held_when_it_was_sent() -> None:
    def step() -> tuple[float, float, float]:
        x, y, z = torch.tensor([me() + 1.0]), torch.zeros(1), torch.tensor([me() + 1.0])
        send = dist.isend(x, 1 - me())
        x.fill_(-100)
        dist.recv(y, 1 - me())
        work = dist.all_reduce(z, async_op=True)
        z.fill_(50)
        before = z.item()
        assert send is not None and work is not None
        send.wait()
        work.wait()
        return y.item(), before, z.item()

    assert run(step, ranks=2).values == [(2.0, 50.0, 3.0), (1.0, 50.0, 3.0)]


def test_a_completed_operation_is_in_its_buffer() -> None:
    def step() -> tuple[float, bool, Any]:
        x = torch.tensor([me() + 1.0])
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        while not work.is_completed():
            pass
        return x.item(), work.is_success(), work.result()

    for x, success, result in run(step, ranks=3).values:
        assert x == 6.0 and success and same(result, [torch.tensor([6.0])])


def test_futures() -> None:
    def step() -> list[float]:
        x = torch.tensor([me() + 1.0])
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        return [doubled.wait().item(), x.item()]

    assert run(step, ranks=3).values == [[12.0, 6.0]] * 3


def test_the_results_of_ranks_share_no_storage() -> None:
    def step() -> Any:
        return [collective(data(me(), 6)) for collective, _ in COLLECTIVES.values()]

    def storages(value: Any) -> set[int]:
        if isinstance(value, Tensor):
            return {value.untyped_storage().data_ptr()}
        return set().union(*(storages(v) for v in value or []))

    first, second, third = (storages(value) for value in run(step, ranks=3).values)
    assert not first & second and not first & third and not second & third


# ---- messages ----


def test_send_and_recv_with_shapes_tags_and_any_source() -> None:
    def step() -> list[Any]:
        if me() == 0:
            for tag in (1, 2):
                dist.isend(torch.tensor([[10.0 * tag, 1]]), 1, tag=tag)
            return []
        if me() == 2:
            dist.send(torch.tensor([7.0, 8]), 1)
            return []
        x, y, z = torch.zeros(1, 2), torch.zeros(2), torch.zeros(2).view(2, 1)
        sources = [dist.recv(y, 0, tag=2), dist.recv(x, 0, tag=1), dist.recv(z)]
        return [x.tolist(), y.tolist(), z.tolist(), sources]

    assert run(step, ranks=3).values[1] == [[[10, 1]], [20, 1], [[7], [8]], [0, 0, 2]]


def test_messages_between_two_ranks_keep_their_order() -> None:
    def step() -> list[float]:
        if me() == 0:
            works = [dist.isend(torch.tensor([float(k)]), 1) for k in range(5)]
            for work in works:
                assert work is not None
                work.wait()
            return []
        buffers = [torch.zeros(1) for _ in range(5)]
        works = [dist.irecv(buffer, 0) for buffer in buffers]
        for work in reversed(works):
            assert work is not None
            work.wait()
        return [buffer.item() for buffer in buffers]

    assert run(step, ranks=2).values[1] == [0, 1, 2, 3, 4]


def test_any_source_takes_whoever_has_sent_and_leaves_the_rest_to_others() -> None:
    def step() -> list[Any]:
        if me():
            dist.send(torch.tensor([float(me())]), 0)
            return []
        got: list[Any] = []
        x = torch.zeros(1)
        dist.recv(x, 2)
        got.append(x.item())
        for _ in range(2):
            got.append((dist.recv(x), x.item()))
        return got

    first, *others = run(step, ranks=4).values[0]
    assert first == 2 and sorted(others) == [(1, 1.0), (3, 3.0)]


def test_batches_in_both_directions() -> None:
    def step() -> list[float]:
        left, right = (me() - 1) % size(), (me() + 1) % size()
        from_left, from_right = torch.zeros(1), torch.zeros(1)
        operations = [
            dist.P2POp(dist.irecv, from_left, left),
            dist.P2POp(dist.irecv, from_right, right),
            dist.P2POp(dist.isend, torch.tensor([10.0 + me()]), left),
            dist.P2POp(dist.isend, torch.tensor([20.0 + me()]), right),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [from_left.item(), from_right.item()]

    values = run(step, ranks=3).values
    assert values == [[20 + (rank - 1) % 3, 10 + (rank + 1) % 3] for rank in range(3)]


# ---- groups ----


def test_new_groups_have_their_own_ranks_roots_and_counts() -> None:
    def step() -> tuple[Any, ...]:
        even, odd = dist.new_group([0, 2, 4]), dist.new_group([1, 3])
        mine = (even, odd)[me() % 2]
        x, y, z = torch.tensor([float(me())]), torch.tensor([float(me())]), torch.tensor([float(me())])
        dist.all_reduce(x, group=mine)
        dist.broadcast(y, (4, 3)[me() % 2], group=mine)  # a global rank
        dist.broadcast(z, group=mine, group_src=1)  # an index in the group
        return (
            x.item(),
            y.item(),
            z.item(),
            dist.get_rank(mine),
            dist.get_world_size(mine),
            dist.get_process_group_ranks(mine),
            dist.get_rank((odd, even)[me() % 2]),
        )

    for rank, value in enumerate(run(step, ranks=5).values):
        if rank % 2:
            assert value == (4, 3, 3, rank // 2, 2, [1, 3], -1)
        else:
            assert value == (6, 4, 2, rank // 2, 3, [0, 2, 4], -1)


def test_the_root_of_torchs_own_calls_is_a_global_rank() -> None:
    """S37: groups [0, 1] and [2, 3]; rank 2 is a root in the second, rank 0 is not."""

    def step(src: tuple[int, int]) -> float:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        x = torch.tensor([float(me())])
        dist.broadcast(x, src[me() // 2], group=groups[me() // 2])
        return x.item()

    assert run(step, (1, 2), ranks=4).values == [1, 1, 2, 2]
    with pytest.raises(RankError, match=r"0 is not part of group|isn't in group|not in group"):
        run(step, (0, 0), ranks=4)


def test_subgroups() -> None:
    def step() -> tuple[float, list[int]]:
        mine, _ = dist.new_subgroups(2)
        x = torch.tensor([float(me())])
        dist.all_reduce(x, group=mine)
        mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        return x.item(), dist.get_process_group_ranks(mine)

    assert run(step, ranks=4).values == [(1, [0, 3]), (1, [1, 2]), (5, [1, 2]), (5, [0, 3])]


def test_functional_collectives() -> None:
    def step() -> list[Tensor]:
        x = data(me(), 6)
        group = dist.group.WORLD
        assert group is not None
        results = [
            functional.all_reduce(x, "sum", group),
            functional.all_gather_single(x, 0, group),
            functional.reduce_scatter_single(x, "sum", 0, group),
            functional.all_to_all_single(x, None, None, group),
            functional.broadcast(x, 2, group),
        ]
        return [functional.wait_tensor(result).clone() for result in results]

    X = [data(rank, 6) for rank in range(3)]
    for rank, value in enumerate(run(step, ranks=3).values):
        expected = [total(X), torch.cat(X), total(rows(X, rank)), torch.cat(rows(X, rank)), X[2]]
        assert same([torch.as_tensor(v) for v in value], expected)


# ---- what torch builds on collectives ----

B, D, FF, V = 12, 6, 8, 5  # all different, and rows enough for 1, 2, 3 and 4 ranks


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, FF)
        self.down = nn.Linear(FF, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def problem() -> tuple[MLP, Tensor, Tensor]:
    """A model, its input and what its output should be, in float64."""
    generator = torch.Generator().manual_seed(5)
    model = MLP().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(B, D, generator=generator, dtype=torch.float64)
    y = torch.randn(B, V, generator=generator, dtype=torch.float64)
    return model, x, y


def serial_gradients() -> dict[str, Tensor]:
    model, x, y = problem()
    F.mse_loss(model(x), y).backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and len(expected) == 4
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error = (found[name] - value).norm() / value.norm()
        assert error < 1e-12, f"{name}: relative error {error:.1e}"


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("ranks", RANKS)
def test_distributed_data_parallel(ranks: int) -> None:
    def step() -> dict[str, Tensor]:
        model, X, Y = problem()
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.0001)  # several buckets
        mine = slice(me() * B // size(), (me() + 1) * B // size())
        F.mse_loss(parallel(X[mine]), Y[mine]).backward()
        return {name: full(parameter.grad) for name, parameter in model.named_parameters()}

    for value in run(step, ranks=ranks).values:
        assert_close(value, serial_gradients())


@pytest.mark.parametrize("ranks", RANKS)
def test_fully_sharded_data_parallel(ranks: int) -> None:
    def step() -> tuple[dict[str, Tensor], int]:
        model, X, Y = problem()
        mesh = init_device_mesh("cpu", (size(),))
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        mine = slice(me() * B // size(), (me() + 1) * B // size())
        F.mse_loss(model(X[mine]), Y[mine]).backward()
        held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        return {name: full(parameter.grad) for name, parameter in model.named_parameters()}, held

    values = run(step, ranks=ranks).values
    for value, _ in values:
        assert_close(value, serial_gradients())
    assert sum(held for _, held in values) == sum(p.numel() for p in MLP().parameters())
    assert ranks == 1 or all(held < sum(p.numel() for p in MLP().parameters()) for _, held in values)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_column_and_row_of_dtensor(ranks: int) -> None:
    def step() -> tuple[dict[str, Tensor], Tensor, tuple[int, ...]]:
        model, X, Y = problem()
        mesh = init_device_mesh("cpu", (size(),), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        x = X.clone().requires_grad_()
        F.mse_loss(model(x), Y).backward()
        up = model.up.weight
        assert isinstance(up, DTensor)
        gradients = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
        return gradients, full(x.grad), tuple(up.to_local().shape)

    model, X, Y = problem()
    X.requires_grad_()
    F.mse_loss(model(X), Y).backward()
    for gradients, dx, shape in run(step, ranks=ranks).values:
        assert_close(gradients, serial_gradients())
        assert X.grad is not None and (dx - X.grad).norm() / X.grad.norm() < 1e-12
        assert shape == (FF // ranks, D)


def test_a_row_parallel_linear_without_its_all_reduce_is_wrong() -> None:
    """The comparison above can fail: partial sums are far from the sum."""

    def step() -> Tensor:
        model, X, _ = problem()
        mesh = init_device_mesh("cpu", (2,))
        up = distribute_tensor(model.up.weight.detach(), mesh, [Shard(0)]).to_local()
        hidden = torch.tanh(X @ up.t() + model.up.bias.detach().chunk(2)[me()])
        return hidden @ model.down.weight.detach().chunk(2, dim=1)[me()].t() + model.down.bias.detach()

    model, X, _ = problem()
    for value in run(step, ranks=2).values:
        assert (value - model(X)).norm() / model(X).norm() > 1e-2


def test_device_mesh_and_dtensor_redistribute() -> None:
    def step() -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("row", "col"))
        X = torch.arange(24.0, dtype=torch.float64).view(4, 6)
        both = distribute_tensor(X, mesh, [Shard(0), Shard(1)])
        local = both.to_local().clone()
        turned = both.redistribute(placements=[Shard(1), Replicate()]).to_local()
        product = full(both @ both.t())
        return mesh.get_coordinate(), local, turned, product, both.full_tensor()

    X = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    for rank, (coordinate, local, turned, product, whole) in enumerate(run(step, ranks=6).values):
        row, col = divmod(rank, 3)
        assert list(coordinate) == [row, col]
        assert same(local, X[2 * row : 2 * row + 2, 2 * col : 2 * col + 2])
        assert same(turned, X[:, 3 * row : 3 * row + 3])
        assert same(product, X @ X.t()) and same(whole, X)


def test_training_with_data_parallel_and_an_optimizer_gives_the_serial_weights() -> None:
    def step(parallel: bool) -> dict[str, Tensor]:
        model, X, Y = problem()
        module: nn.Module = DistributedDataParallel(model) if parallel else model
        mine = slice(me() * B // size(), (me() + 1) * B // size()) if parallel else slice(None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            F.mse_loss(module(X[mine]), Y[mine]).backward()
            optimizer.step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    alone = copy.deepcopy(run(step, False, ranks=1).values[0])
    for value in run(step, True, ranks=3).values:
        for name, parameter in alone.items():
            assert (value[name] - parameter).norm() / parameter.norm() < 1e-9
