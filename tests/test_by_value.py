"""What travels to ranks is a copy: classes of the notebook, tensors and the memory they share, results."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lessons_lib import run
from lessons_lib.errors import RefusedError


def notebook_class() -> type:
    """A class as a cell defines it: no module holds it by its name."""

    class Counter:
        n = 10
        seen: dict[int, int] = {}  # noqa: RUF012  (what a learner writes)

        def up(self) -> int:
            type(self).n += 1
            return self.n

    return Counter


def test_class_attributes_are_each_ranks_own_also_when_ranks_take_turns():
    Counter = notebook_class()

    def step():
        Counter.seen[dist.get_rank()] = Counter().up()
        dist.barrier()
        Counter.new = dist.get_rank()
        dist.barrier()
        return Counter.n, Counter.seen, Counter.new

    assert run(step, ranks=3).values == [(11, {rank: 11}, rank) for rank in range(3)]
    assert (Counter.n, Counter.seen, hasattr(Counter, "new")) == (10, {}, False)


def test_a_failed_run_leaves_the_class_as_it_was():
    Counter = notebook_class()
    up = Counter.up

    def step():
        Counter.n = 7
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(step, ranks=2)
    assert Counter.n == 10 and Counter.up is up


def test_a_returned_object_is_of_the_notebooks_class():
    Counter = notebook_class()
    assert all(isinstance(value, Counter) for value in run(lambda: Counter(), ranks=2).values)


def test_tensors_arrive_equal_and_as_copies():
    sent = {
        "float64": torch.randn(3, 4, dtype=torch.float64),
        "strided": torch.arange(12.0).reshape(3, 4).T[1:],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.randn(5).bfloat16(),
        "complex": torch.randn(2, dtype=torch.complex64),
        "leaf": torch.ones(2, requires_grad=True),
    }

    def step():
        got = {name: (tensor.clone(), tensor.stride(), tensor.requires_grad) for name, tensor in sent.items()}
        for tensor in sent.values():
            tensor.detach().zero_()
        return got

    before = {name: tensor.clone() for name, tensor in sent.items()}
    for values in run(step, ranks=2).values:
        for name, (tensor, stride, requires_grad) in values.items():
            assert torch.equal(tensor, before[name]), name
            assert (stride, requires_grad) == (sent[name].stride(), sent[name].requires_grad), name
    assert all(torch.equal(sent[name], before[name]) for name in sent)


def test_tensors_that_share_memory_still_share_it():
    whole = torch.zeros(4)
    part = whole[1:3]

    def step():
        part.fill_(1.0)
        return whole.tolist()

    assert run(step, ranks=2).values == [[0, 1, 1, 0]] * 2
    assert whole.tolist() == [0, 0, 0, 0]


def test_many_tensors_travel_fast():
    """300 small tensors took torch's own pickling two seconds on three ranks."""
    tensors = [torch.randn(10) for _ in range(300)]
    began = time.perf_counter()
    assert run(lambda: len(tensors), ranks=3).values == [300] * 3
    assert time.perf_counter() - began < 0.5


def test_a_result_that_nobody_waited_for_has_arrived_when_it_is_returned():
    def step():
        mesh = init_device_mesh("cpu", (2,))
        one = torch.ones(2)
        summed = functional.all_reduce(one, "sum", mesh)
        placed = distribute_tensor(one, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        return summed, placed

    for summed, placed in run(step, ranks=2).values:
        assert summed.tolist() == [2, 2]
        assert placed.to_local().tolist() == [1, 1]


def test_any_source_in_a_sub_group_names_the_global_rank():
    def step():
        group = dist.new_group([1, 3])
        if dist.get_rank() == 1:
            return dist.recv(torch.zeros(1), group=group)
        if dist.get_rank() == 3:
            dist.send(torch.ones(1), dst=1, group=group)
        return None

    assert run(step, ranks=4).values[1] == 3


def test_an_async_function_is_refused():
    async def step():
        return 1

    with pytest.raises(RefusedError, match="an async function would return a coroutine"):
        run(step, ranks=2)


def test_a_module_of_a_class_of_its_own_travels_by_name():
    """``torch.ops`` is one: a function that mentions it was refused."""
    assert run(lambda: torch.ops.aten.add(torch.ones(2), 1).tolist(), ranks=2).values == [[2.0, 2.0]] * 2
