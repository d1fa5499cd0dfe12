"""The doctor: every way in which ranks fail to come together has its own sentence, and comes at once."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor, nn

from lessons_lib import Mesh, run
from lessons_lib.errors import DeadlockError, MismatchError, RankError, RunError, UnfinishedWarning
from lessons_lib.spmd.doctor import find_cycle
from lessons_lib.tensor_parallel import SCHEMES
from lessons_lib.tensor_parallel.linear import TensorParallelLinear
from lessons_lib.timeline import Waiting, ranks_text

SOON_S = 0.3  # from the launch to the report

Step = Callable[[], Any]


def me() -> int:
    return dist.get_rank()


def one() -> torch.Tensor:
    return torch.ones(1)


def report(step: Step, ranks: int, kind: type[RunError]) -> str:
    """The report of a run that must fail, checked for what every report has."""
    took = []
    for _ in range(3):  # the machine may be busy with something else
        began = time.perf_counter()
        with pytest.raises(kind) as caught:
            run(step, ranks=ranks)
        took.append(time.perf_counter() - began)
    assert type(caught.value) is kind and min(took) < SOON_S
    error, text = caught.value, str(caught.value)
    assert error.run.ranks == ranks and error.run.error is error and len(error.run.values) == ranks
    assert error.run.trace.timeline.n_ranks == ranks and error.run.picture().alt
    assert re.search(r"tests/test_doctor\.py, line \d+, in ", text)
    assert "lessons_lib/" not in text and "site-packages" not in text and "Try: " in text
    assert run(lambda: dist.get_rank(), ranks=ranks).values == list(range(ranks))
    return text


# ---- deadlocks ----


def skipped() -> None:
    if me() != 2:
        dist.all_reduce(one())


def skipped_then_more() -> None:
    if me() != 1:
        dist.all_reduce(one())
    dist.recv(one(), 0) if me() == 1 else None


def early_return() -> None:
    for step in range(3):
        if me() == 1 and step == 2:
            return
        dist.all_reduce(one())


def send_ring() -> None:
    dist.send(one(), (me() + 1) % dist.get_world_size())
    dist.recv(one(), (me() - 1) % dist.get_world_size())


def recv_ring() -> None:
    dist.recv(one(), (me() - 1) % dist.get_world_size())
    dist.send(one(), (me() + 1) % dist.get_world_size())


def large_send_ring() -> None:
    dist.send(torch.ones(100_000), (me() + 1) % dist.get_world_size())
    dist.recv(torch.ones(100_000), (me() - 1) % dist.get_world_size())


def crossed_groups() -> None:
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (a, b) if me() == 0 else (b, a):
        dist.all_reduce(one(), group=group)


def send_to_one_that_returned() -> None:
    if me() == 0:
        dist.send(one(), 1)


def recv_from_nobody() -> None:
    if me() == 0:
        dist.recv(one())


def message_against_collective() -> None:
    dist.recv(one(), 1) if me() == 0 else dist.all_reduce(one())


def wrong_tags() -> None:
    dist.send(one(), 1, tag=1) if me() == 0 else dist.recv(one(), 0, tag=2)


def crossed_mesh() -> None:
    mesh = Mesh(row=2, col=2)
    for axis in ("row", "col") if me() in (0, 3) else ("col", "row"):
        mesh[axis].all_reduce(one())


CALLS = "Try: let every rank of the group make the same calls in the same order."

DEADLOCKS: dict[str, tuple[Step, int, list[str]]] = {
    "a skipped collective": (
        skipped,
        4,
        [
            "Deadlock: ranks 0, 1 and 3 of 4 wait, and no rank can go on.",
            "ranks 0, 1 and 3 wait for rank 2 in all_reduce(float32[1]), #1 on world",
            "rank 2 has returned without communicating",
            "Why: rank 2 has returned and will never join all_reduce #1.",
            CALLS,
        ],
    ),
    "a skipped collective, then waiting elsewhere": (
        skipped_then_more,
        3,
        [
            "Deadlock: ranks 0 to 2 of 3 wait, and no rank can go on.",
            "ranks 0 and 2 wait for rank 1 in all_reduce(float32[1]), #1 on world",
            "rank 1 waits for rank 0 in recv(float32[1]) from rank 0",
            "Why: each waits for the next in the cycle 0 -> 1 -> 0.",
            "Try: bring the calls of these ranks into the same order.",
        ],
    ),
    "an early return": (
        early_return,
        3,
        [
            "ranks 0 and 2 wait for rank 1 in all_reduce(float32[1]), #3 on world",
            "rank 1 has returned; its last communication was all_reduce(float32[1]), #2 on world",
            "Why: rank 1 has returned and will never join all_reduce #3.",
            CALLS,
        ],
    ),
    "both send first": (
        send_ring,
        2,
        [
            "Deadlock: ranks 0 and 1 of 2 wait, and no rank can go on.",
            "rank 0 waits for rank 1 in send(float32[1]) to rank 1",
            "rank 1 waits for rank 0 in send(float32[1]) to rank 0",
            "Why: each waits for the next in the cycle 0 -> 1 -> 0.",
            "Try: let one of them receive first, or use isend or batch_isend_irecv and wait afterwards.",
        ],
    ),
    "a ring of sends": (
        send_ring,
        4,
        [
            "Deadlock: ranks 0 to 3 of 4 wait",
            "Why: each waits for the next in the cycle 0 -> 1 -> 2 -> 3 -> 0.",
        ],
    ),
    "a ring of large sends": (large_send_ring, 2, ["send(float32[100000]) to rank 1", "cycle 0 -> 1 -> 0."]),
    "both receive first": (
        recv_ring,
        2,
        [
            "rank 0 waits for rank 1 in recv(float32[1]) from rank 1",
            "Why: each waits for the next in the cycle 0 -> 1 -> 0.",
            "Try: let one of them send first: every one waits for a message that nobody has sent yet.",
        ],
    ),
    "a ring of receives": (recv_ring, 3, ["Why: each waits for the next in the cycle 0 -> 2 -> 1 -> 0."]),
    "crossed collectives on two groups": (
        crossed_groups,
        2,
        [
            "rank 0 waits for rank 1 in all_reduce(float32[1]), #1 on the group of ranks 0 and 1",
            "Why: each waits for the next in the cycle 0 -> 1 -> 0.",
            "Try: bring the calls of these ranks into the same order.",
        ],
    ),
    "crossed collectives on a mesh": (
        crossed_mesh,
        4,
        [
            "rank 0 waits for rank 2 in all_reduce(float32[1]), #1 on group row (ranks 0 and 2)",
            "rank 1 waits for rank 0 in all_reduce(float32[1]), #1 on group col (ranks 0 and 1)",
            "cycle 0 -> 2 -> 3 -> 1 -> 0.",
        ],
    ),
    "a send to a rank that has returned": (
        send_to_one_that_returned,
        2,
        [
            "Deadlock: rank 0 of 2 waits, and no rank can go on.",
            "rank 0 waits for rank 1 in send(float32[1]) to rank 1",
            "rank 1 has returned without communicating",
            "Why: rank 1 has returned and will never receive it.",
            "Try: pair every send with a recv on the other side.",
        ],
    ),
    "a recv from nobody": (
        recv_from_nobody,
        3,
        [
            "rank 0 waits for ranks 1 and 2 in recv(float32[1]) from any rank",
            "Why: ranks 1 and 2 have returned and will never send it.",
        ],
    ),
    "a message against a collective": (
        message_against_collective,
        2,
        [
            "rank 0 waits for rank 1 in recv(float32[1]) from rank 1",
            "rank 1 waits for rank 0 in all_reduce(float32[1]), #1 on world",
            "cycle 0 -> 1 -> 0.",
            "Try: bring the calls of these ranks into the same order.",
        ],
    ),
    "different tags": (
        wrong_tags,
        2,
        [
            "send(float32[1], tag=1) to rank 1",
            "recv(float32[1], tag=2) from rank 0",
            "the send has 1, the recv has 2.",
        ],
    ),
}


@pytest.mark.parametrize("step, ranks, sentences", DEADLOCKS.values(), ids=DEADLOCKS)
def test_a_deadlock_is_proved_and_explained(step: Step, ranks: int, sentences: list[str]) -> None:
    text = report(step, ranks, DeadlockError)
    for sentence in sentences:
        assert sentence in text, text


def test_who_waits_is_data_too() -> None:
    with pytest.raises(DeadlockError) as caught:
        run(early_return, ranks=3)
    first, second = caught.value.waiting
    assert isinstance(first, Waiting)
    assert (first.rank, second.rank) == (0, 2)
    assert first.missing == second.missing == (1,)
    assert (first.group, first.sequence, first.operation) == (
        "world",
        3,
        "all_reduce(float32[1]), #3 on world",
    )
    assert first.where.source == "dist.all_reduce(one())" and first.where.function == "early_return"
    assert first.where.file == "tests/test_doctor.py"
    assert len(caught.value.run.trace.collectives(0)) == 3
    assert len(caught.value.run.trace.collectives(1)) == 2


def test_64_ranks_are_told_in_a_few_lines() -> None:
    text = report(skipped, 64, DeadlockError)
    assert "Deadlock: ranks 0, 1 and 3 to 63 of 64 wait, and no rank can go on." in text
    assert len(text.splitlines()) < 12


def test_an_asynchronous_operation_is_missed_where_it_is_awaited() -> None:
    def step() -> None:
        if me() == 0:
            work = dist.all_reduce(one(), async_op=True)
            assert work is not None
            work.wait()

    assert "rank 0 waits for rank 1 in all_reduce" in report(step, 2, DeadlockError)


def test_a_deadlock_among_some_ranks_waits_for_the_others_to_end() -> None:
    """Ranks 0 and 1 block each other; what ranks 2 and 3 have returned is kept."""

    def step() -> int:
        if me() < 2:
            dist.recv(one(), 1 - me())
        else:
            dist.send(one(), 3) if me() == 2 else dist.recv(one(), 2)
        return me()

    with pytest.raises(DeadlockError, match="ranks 0 and 1 of 4 wait") as caught:
        run(step, ranks=4)
    assert caught.value.run.values == [None, None, 2, 3]


# ---- mismatches ----


def by_rank(*steps: Step) -> Step:
    """Rank r does ``steps[r]``, the last step standing for all further ranks."""

    def step() -> None:
        steps[min(me(), len(steps) - 1)]()

    return step


def in_group(step: Callable[[dist.ProcessGroup], Any]) -> Step:
    def inside() -> None:
        group = dist.new_group([0, 2])
        if me() in (0, 2):
            step(group)

    return inside


def reduce_scatter_rows(rows: int) -> None:
    dist.reduce_scatter(torch.empty(rows), [torch.ones(rows)] * dist.get_world_size())


def gather_rows(rows: int) -> None:
    dist.all_gather([torch.empty(rows, 2)] * dist.get_world_size(), torch.empty(rows, 2))


SAME_CALLS = "Try: all ranks of a group must make the same calls in the same order."

MISMATCHES: dict[str, tuple[Step, int, list[str]]] = {
    "operation": (
        by_rank(lambda: dist.all_reduce(one()), lambda: dist.reduce(one(), 0)),
        3,
        [
            "Mismatch: the ranks disagree about the operation of collective #1 on world.",
            "rank 0 calls all_reduce(float32[1])",
            "ranks 1 and 2 call reduce(float32[1], root=0)",
            SAME_CALLS,
        ],
    ),
    "operation, before all are there": (
        by_rank(lambda: dist.all_reduce(one()), lambda: dist.barrier(), lambda: None),
        3,
        [
            "Mismatch: the ranks disagree about the operation of collective #1 on world.",
            "rank 0 calls all_reduce(float32[1])",
            "rank 1 calls barrier()",
            "rank 2 did not arrive",
        ],
    ),
    "shape": (
        by_rank(lambda: dist.all_reduce(torch.ones(100, 2)), lambda: dist.all_reduce(torch.ones(200, 2))),
        3,
        [
            "Mismatch: the ranks disagree about the shape of collective #1 on world.",
            "rank 0 calls all_reduce(float32[100, 2])",
            "ranks 1 and 2 call all_reduce(float32[200, 2])",
            "Try: give every rank the same shape.",
        ],
    ),
    "shape of as many elements": (
        by_rank(lambda: dist.all_reduce(torch.ones(2, 3)), lambda: dist.all_reduce(torch.ones(3, 2))),
        2,
        [
            "about the shape of",
            "rank 0 calls all_reduce(float32[2, 3])",
            "rank 1 calls all_reduce(float32[3, 2])",
        ],
    ),
    "rows of an all-gather": (
        by_rank(lambda: gather_rows(3), lambda: gather_rows(4)),
        2,
        [
            "about the shape of",
            "rank 0 calls all_gather(float32[3, 2])",
            "rank 1 calls all_gather(float32[4, 2])",
        ],
    ),
    "rows of a reduce-scatter": (
        by_rank(lambda: reduce_scatter_rows(3), lambda: reduce_scatter_rows(4)),
        2,
        ["about the shape of", "rank 0 calls reduce_scatter(float32[3], float32[3])"],
    ),
    "dtype": (
        by_rank(lambda: dist.all_reduce(one()), lambda: dist.all_reduce(one().double())),
        2,
        [
            "Mismatch: the ranks disagree about the dtype of collective #1 on world.",
            "rank 0 calls all_reduce(float32[1])",
            "rank 1 calls all_reduce(float64[1])",
            "Try: give every rank the same dtype.",
        ],
    ),
    "root": (
        by_rank(lambda: dist.broadcast(one(), 0), lambda: dist.broadcast(one(), 1)),
        3,
        [
            "Mismatch: the ranks disagree about the root of collective #1 on world.",
            "rank 0 calls broadcast(float32[1], root=0)",
            "ranks 1 and 2 call broadcast(float32[1], root=1)",
            "Try: give every rank the same root.",
        ],
    ),
    "root of a group, by its global rank": (
        in_group(lambda group: dist.broadcast(one(), me(), group=group)),
        3,
        [
            "about the root of collective #1 on the group of ranks 0 and 2.",
            "rank 0 calls broadcast(float32[1], root=0)",
            "rank 2 calls broadcast(float32[1], root=2)",
        ],
    ),
    "reduction": (
        by_rank(lambda: dist.all_reduce(one()), lambda: dist.all_reduce(one(), dist.ReduceOp.MAX)),
        2,
        [
            "Mismatch: the ranks disagree about the reduction of collective #1 on world.",
            "rank 0 calls all_reduce(float32[1])",
            "rank 1 calls all_reduce(float32[1], max)",
            "Try: give every rank the same reduction.",
        ],
    ),
    "second call": (
        by_rank(
            lambda: (dist.barrier(), dist.all_reduce(one())),
            lambda: (dist.barrier(), dist.broadcast(one(), 0)),
        ),
        2,
        ["about the operation of collective #2 on world."],
    ),
    "dtype of an all-to-all": (
        by_rank(
            lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2)),
            lambda: dist.all_to_all_single(torch.empty(2).double(), torch.ones(2).double()),
        ),
        2,
        ["about the dtype of collective #1 on world."],
    ),
    "what an all-to-all sends and expects": (
        by_rank(
            lambda: dist.all_to_all_single(torch.empty(4), torch.ones(3), [2, 2], [1, 2]),
            lambda: dist.all_to_all_single(torch.empty(2), torch.ones(3), [1, 1], [2, 1]),
        ),
        2,
        ["receives float32[2] from all_to_all(", "into a buffer of float32[1]", "the size of what arrives."],
    ),
    "groups of new_group (S36)": (
        by_rank(lambda: dist.barrier(group=dist.new_group([[0, 3], [1, 2], [1, 2], [0, 3]][me()]))),
        4,
        [
            "Mismatch: the ranks create different groups with the same call of new_group.",
            "creates the group of ranks 0 and 3",
            "creates the group of ranks 1 and 2",
            "Try: every rank creates every group, also those it is not in, in the same order; or use Mesh",
        ],
    ),
    "size of a message": (
        by_rank(lambda: dist.send(torch.ones(3), 1), lambda: dist.recv(torch.empty(2), 0)),
        2,
        [
            "Mismatch: a message is sent and received with another size.",
            "rank 0 calls send(float32[3]) to rank 1",
            "rank 1 calls recv(float32[2]) from rank 0",
            "Try: receive into a tensor of the size that is sent.",
        ],
    ),
    "dtype of a message": (
        by_rank(lambda: dist.recv(torch.empty(2).int(), 1), lambda: dist.send(torch.ones(2), 0)),
        2,
        [
            "Mismatch: a message is sent and received with another dtype.",
            "rank 1 calls send(float32[2]) to rank 0",
            "rank 0 calls recv(int32[2]) from rank 1",
            "Try: receive into a tensor of the dtype that is sent.",
        ],
    ),
}


@pytest.mark.parametrize("step, ranks, sentences", MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_explained(step: Step, ranks: int, sentences: list[str]) -> None:
    text = report(step, ranks, MismatchError)
    for sentence in sentences:
        assert sentence in text, text


def test_a_mismatch_gives_no_number() -> None:
    """Also to ranks whose part of the collective was right."""

    def step() -> str:
        dist.all_reduce(torch.ones(2 if me() == 3 else 1))
        return "a number"

    with pytest.raises(MismatchError) as caught:
        run(step, ranks=4)
    assert caught.value.run.values == [None] * 4


@pytest.mark.parametrize(
    "step, message",
    [
        (lambda: dist.all_to_all_single(torch.empty(5), torch.ones(5)), "2 equal pieces.*5 rows"),
        (
            lambda: dist.reduce_scatter_single(torch.empty(2), torch.ones(5)),
            r"reduce_scatter cuts its tensor into 2 equal pieces.*it has 5 elements",
        ),
        (
            lambda: dist.all_gather([one()], one()),
            "all_gather receives one tensor for each of the.*2 ranks.*got 1",
        ),
        (lambda: dist.reduce_scatter(one(), [one()] * 3), "reduce_scatter sends one tensor for each.*got 3"),
        (
            lambda: dist.gather(one(), [one()] if me() == 0 else None, dst=0),
            "the root of gather receives one tensor for each.*got 1",
        ),
        (
            lambda: dist.scatter(one(), [one()] * 3 if me() == 0 else None, src=0),
            "the root of scatter sends one tensor for each.*got 3",
        ),
        (lambda: dist.all_to_all([one()], [one()]), "all_to_all receives one tensor for each.*got 1"),
    ],
)
def test_a_call_that_is_wrong_alone_is_refused_before_it_is_sent(step: Step, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run(step, ranks=2)
    assert isinstance(caught.value, RankError) and caught.value.run.trace.events == ()


def test_a_root_outside_the_group_is_explained() -> None:
    def step() -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dist.broadcast(one(), 0, group=groups[me() // 2])

    with pytest.raises(ValueError, match=r"0.*group(.|\n)*Try: in torch's own calls src and dst are global"):
        run(step, ranks=4)


# ---- legal programs pass ----


def even_odd() -> float:
    size, x, y = dist.get_world_size(), torch.tensor([float(me())]), one()
    to, source = (me() + 1) % size, (me() - 1) % size
    if me() % 2 == 0:
        dist.send(x, to)
        dist.recv(y, source)
    else:
        dist.recv(y, source)
        dist.send(x, to)
    return y.item()


def with_isend() -> float:
    size, y = dist.get_world_size(), one()
    work = dist.isend(torch.tensor([float(me())]), (me() + 1) % size)
    dist.recv(y, (me() - 1) % size)
    assert work is not None
    work.wait()
    return y.item()


def batched() -> float:
    size, y = dist.get_world_size(), one()
    operations = [
        dist.P2POp(dist.isend, torch.tensor([float(me())]), (me() + 1) % size),
        dist.P2POp(dist.irecv, y, (me() - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return y.item()


@pytest.mark.parametrize("step", [even_odd, with_isend, batched])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_that_does_not_block_itself_passes(step: Step, ranks: int) -> None:
    assert run(step, ranks=ranks).values == [(rank - 1) % ranks for rank in range(ranks)]


def test_a_send_may_be_received_after_its_sender_has_returned() -> None:
    def step() -> float | None:
        if me() == 0:
            dist.isend(torch.tensor([7.0]), 1)
            return None
        dist.barrier(group=dist.new_group([1, 2], use_local_synchronization=True)) if me() else None
        y = one()
        if me() == 1:
            dist.recv(y, 0)
        return y.item()

    assert run(step, ranks=3).values == [None, 7.0, 1.0]


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[tuple[int, ...]], list[list[tuple[Any, ...]]]]:
    """A legal program: a global order of collectives and messages, as each rank sees its part.

    A collective, or a blocking message, stands at one place of the global order, so no two ranks
    can wait for each other. A message that is not blocking may be received at any later place.
    """
    n_ranks = draw(st.integers(2, 5))
    ranks = st.integers(0, n_ranks - 1)
    groups = draw(st.lists(st.sets(ranks, min_size=1).map(lambda group: tuple(sorted(group))), max_size=3))
    program: list[list[tuple[Any, ...]]] = [[] for _ in range(n_ranks)]
    late: list[tuple[int, tuple[Any, ...]]] = []
    for number in range(draw(st.integers(1, 10))):
        kind = draw(
            st.sampled_from(["all_reduce", "broadcast", "all_gather", "barrier", "send", "isend", "receive"])
        )
        if kind in ("send", "isend"):
            source, to = draw(st.lists(ranks, min_size=2, max_size=2, unique=True))
            # messages that may overtake each other need tags of their own
            tag = draw(st.integers(0, 2)) if kind == "send" else 10 + number
            program[source].append((kind, to, number, tag))
            if kind == "send":
                program[to].append(("recv", source, number, tag))
            else:
                late.append((to, ("recv", source, number, tag)))
        elif kind == "receive":
            for _ in range(draw(st.integers(0, len(late)))):
                to, receive = late.pop(draw(st.integers(0, len(late) - 1)))
                program[to].append(receive)
        else:
            which = draw(st.integers(-1, len(groups) - 1))
            members = tuple(range(n_ranks)) if which < 0 else groups[which]
            root, is_async = draw(st.sampled_from(members)), draw(st.booleans())
            for member in members:
                program[member].append((kind, which, number, root, is_async))
    for to, receive in draw(st.permutations(late)) if late else ():
        program[to].append(receive)
    return n_ranks, groups, program


def execute(groups: list[tuple[int, ...]], program: list[list[tuple[Any, ...]]]) -> list[tuple[int, float]]:
    """Do this rank's part; what each step gave, by the number of the step."""
    made: list[Any] = [*(dist.new_group(list(members)) for members in groups), None]  # [-1] is the world
    works, got = [], []
    for kind, which, number, *rest in program[me()]:
        x = torch.tensor([100.0 * number + me()])
        if kind == "send":
            dist.send(x, which, tag=rest[0])
        elif kind == "isend":
            works.append(dist.isend(x, which, tag=rest[0]))
        elif kind == "recv":
            dist.recv(x, which, tag=rest[0])
            got.append((number, [x]))
        else:
            root, is_async = rest
            group = made[which]
            parts = [torch.empty(1) for _ in range(dist.get_world_size(group))]
            work = {
                "all_reduce": lambda: dist.all_reduce(x, group=group, async_op=is_async),  # noqa: B023
                "broadcast": lambda: dist.broadcast(x, root, group=group, async_op=is_async),  # noqa: B023
                "all_gather": lambda: dist.all_gather(parts, x, group=group, async_op=is_async),  # noqa: B023
                "barrier": lambda: dist.barrier(group=group, async_op=is_async),  # noqa: B023
            }[kind]()
            works.append(work)
            got.append((number, parts if kind == "all_gather" else [x]))
    for work in works:
        if work is not None:
            work.wait()
    return [(number, sum(x.item() for x in parts)) for number, parts in got]


def expected(
    groups: list[tuple[int, ...]], program: list[list[tuple[Any, ...]]]
) -> list[list[tuple[int, float]]]:
    values = []
    for rank, steps in enumerate(program):
        got: list[tuple[int, float]] = []
        for kind, which, number, *rest in steps:
            own = 100.0 * number
            if kind == "recv":
                got.append((number, own + which))
            elif kind in ("all_reduce", "all_gather"):
                members = groups[which] if which >= 0 else range(len(program))
                got.append((number, sum(own + member for member in members)))
            elif kind == "broadcast":
                got.append((number, own + rest[0]))
            elif kind == "barrier":
                got.append((number, own + rank))
        values.append(got)
    return values


@settings(max_examples=120)
@given(programs())
def test_no_false_alarm_and_the_right_values_in_any_legal_program(
    drawn: tuple[int, list[tuple[int, ...]], list[list[tuple[Any, ...]]]],
) -> None:
    n_ranks, groups, program = drawn
    result = run(execute, groups, program, ranks=n_ranks)
    assert result.values == expected(groups, program)
    assert len(result.trace.timeline.messages) == sum(
        step[0] == "recv" for steps in program for step in steps
    )


@settings(max_examples=40)
@given(programs(), st.data())
def test_leaving_out_a_collective_of_the_world_is_always_caught(
    drawn: tuple[int, list[tuple[int, ...]], list[list[tuple[Any, ...]]]], data: st.DataObject
) -> None:
    n_ranks, groups, program = drawn
    lazy = data.draw(st.integers(0, n_ranks - 1))
    for steps in program:
        steps.append(("all_reduce", -1, 99, 0, False))
        steps.append(("barrier", -1, 100, 0, False))
    del program[lazy][-2]
    with pytest.raises((DeadlockError, MismatchError)):
        run(execute, groups, program, ranks=n_ranks)


# ---- the words ----


@pytest.mark.parametrize(
    "ranks, text",
    [
        ([0], "rank 0"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([0, 2, 3, 5, 6, 7], "ranks 0, 2, 3 and 5 to 7"),
    ],
)
def test_ranks_are_listed_as_people_do(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


@given(st.dictionaries(st.integers(0, 6), st.sets(st.integers(0, 6), max_size=3).map(tuple), max_size=7))
def test_find_cycle_finds_a_shortest_cycle_if_there_is_one(edges: dict[int, tuple[int, ...]]) -> None:
    def distance_back(start: int) -> int | None:
        seen, front, steps = {start}, {start}, 0
        while front:
            front, steps = {b for a in front for b in edges.get(a, ())}, steps + 1
            if start in front:
                return steps
            front = {a for a in front if a in edges} - seen
            seen |= front
        return None

    cycle = find_cycle(edges)
    lengths = [length for start in edges if (length := distance_back(start)) is not None]
    assert len(cycle) == min(lengths, default=0)
    for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        assert b in edges[a]
    if cycle:
        assert cycle[0] == min(cycle)


@jaxtyped(typechecker=beartype)
def doubled_sum(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    dist.all_reduce(x)
    return 2 * x


def test_lines_of_what_checks_shapes_are_not_the_learners() -> None:
    """jaxtyping and beartype stand between a call and its function."""

    def step() -> str:
        linear = TensorParallelLinear.from_linear(nn.Linear(4, 6), SCHEMES["row"], Mesh(tp=2))
        linear(torch.ones(3, 2))
        doubled_sum(torch.ones(3, 1))
        return TensorParallelLinear.forward.__code__.co_filename

    result = run(step, ranks=2)
    assert "jaxtyping" in result.values[0]  # see conftest.py
    events = result.trace.events
    assert len(events) == 4 and {event.where.file for event in events} == {"tests/test_doctor.py"}
    with pytest.raises(TypeCheckError) as caught:
        run(lambda: doubled_sum(torch.ones(2)), ranks=2)
    lines = [line.strip() for line in str(caught.value).splitlines() if re.match(r" {6}\S", line)]
    own = [line for line in lines if ", line " in line and not line.startswith("in ")]
    assert own and all(line.startswith("tests/test_doctor.py, line ") for line in own), caught.value


# ---- calls that name a rank outside of their group ----

OUTSIDE: dict[str, Step] = {
    "broadcast": lambda: dist.broadcast(one(), 2),
    "broadcast, negative": lambda: dist.broadcast(one(), -1),
    "reduce": lambda: dist.reduce(one(), 7),
    "gather": lambda: dist.gather(one(), None, dst=2),
    "scatter": lambda: dist.scatter(one(), None, src=2),
    "send": lambda: dist.send(one(), 5),
    "send, negative": lambda: dist.send(one(), -1),
    "recv": lambda: dist.recv(one(), -3),
}


@pytest.mark.parametrize("step", OUTSIDE.values(), ids=OUTSIDE)
def test_a_rank_outside_of_the_group_is_refused_before_anything_is_sent(step: Step) -> None:
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"which has ranks 0 and 1|[Ii]nvalid|rank|root") as caught:
        run(step, ranks=2, timeout_s=5)
    assert time.perf_counter() - began < 2 and not caught.value.run.trace.events  # type: ignore[attr-defined]


def test_a_report_that_fails_ends_the_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> str:
        raise RuntimeError("the doctor is ill")

    monkeypatch.setattr("lessons_lib.spmd.doctor.deadlock", broken)
    monkeypatch.setattr("lessons_lib.spmd.doctor.raised", broken)
    with pytest.raises(RunError, match=r"no rank can go on, and the report about it failed.*doctor is ill"):
        run(lambda: dist.recv(one(), 1 - me()), ranks=2, timeout_s=5)
    with pytest.raises(ZeroDivisionError, match=r"and so did the report about it.*doctor is ill"):
        run(lambda: 1 // 0, ranks=2, timeout_s=5)


def test_asking_for_ever_is_a_deadlock_too() -> None:
    def step() -> None:
        if me() == 0:
            work = dist.irecv(one(), 1)
            while not work.is_completed():
                pass

    text = report(step, 2, DeadlockError)
    assert "rank 0 waits for rank 1 in recv(float32[1]) from rank 1" in text
    assert "rank 1 has returned and will never send it" in text


def test_two_groups_of_the_same_ranks_are_told_apart() -> None:
    def step() -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (first, second) if me() == 0 else (second, first):
            dist.all_reduce(one(), group=group)

    text = report(step, 2, DeadlockError)
    assert "rank 0 waits for rank 1 in all_reduce(float32[1]), #1 on the group of ranks 0 and 1\n" in text
    assert (
        "rank 1 waits for rank 0 in all_reduce(float32[1]), #1 on the second group of ranks 0 and 1" in text
    )


def test_a_failed_run_counts_no_bytes_of_what_never_happened() -> None:
    with pytest.raises(DeadlockError) as caught:
        run(lambda: dist.all_reduce(torch.ones(100)) if me() else None, ranks=3)
    assert [caught.value.run.trace.bytes_sent(rank) for rank in range(3)] == [0, 0, 0]


STUBBORN = """
import os
import torch, torch.distributed as dist
from lessons_lib import run
from lessons_lib.errors import RunError

def stubborn():
    while True:
        try:
            while True:
                try:
                    while True:
                        try: dist.recv(torch.ones(1), 1 - dist.get_rank())
                        except BaseException: pass
                except BaseException: pass
        except BaseException: pass

try:
    run(stubborn, ranks=2, timeout_s=0.5)
except RunError:
    print(run(lambda: dist.get_rank(), ranks=2).values, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_that_swallows_everything_does_not_hold_up_the_notebook() -> None:
    """In a process of its own, whose threads end with it."""
    done = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0, 1]\n", done.stderr


def test_what_was_begun_and_left_is_told() -> None:
    def left() -> float:
        x = one()
        dist.all_reduce(x, async_op=True)
        return x.item()

    def never_joined() -> None:
        if me() == 0:
            dist.all_reduce(one(), async_op=True)

    def never_received() -> None:
        if me() == 0:
            dist.isend(one(), 1)

    for step, sentence in (
        (left, "rank 1 called all_reduce.*never waited for it: its tensor still holds the old numbers"),
        (never_joined, "rank 0 called all_reduce.*and the other side never came"),
        (never_received, r"rank 0 called send\(float32\[1\]\) to rank 1 .*and the other side never came"),
    ):
        with pytest.warns(UnfinishedWarning, match=sentence):
            result = run(step, ranks=2)
        assert result.notes and result.notes[0] in result.picture().svg.replace("&quot;", '"')
