"""Who sent how much to whom: from the records of real runs to the picture."""

import pytest
import torch
import torch.distributed as dist

from lessons_lib import Mesh, run
from lessons_lib.timeline import COLLECTIVES, Traffic
from lessons_lib.views import traffic_matrix
from tests.pictures import every_collective, ran
from tests.test_pictures import shape_titles, texts

N = 4


def ring(n_bytes):
    """What each rank sends to the next."""
    return [[n_bytes if to == (rank + 1) % N else 0 for to in range(N)] for rank in range(N)]


def all_reduce():
    dist.all_reduce(torch.ones(8))


def broadcast():
    dist.broadcast(torch.ones(8), src=2)


def reduce():
    dist.reduce(torch.ones(8), dst=2)


def gather():
    rank = dist.get_rank()
    dist.gather(torch.ones(3), [torch.empty(3) for _ in range(N)] if rank == 1 else None, dst=1)


def scatter():
    rank = dist.get_rank()
    dist.scatter(torch.empty(3), [torch.ones(3)] * N if rank == 2 else None, src=2)


def uneven_all_to_all():
    """Rank r sends r + 1 numbers to rank 0, 10 to rank 1, none to rank 2, and 2 to rank 3."""
    rank = dist.get_rank()
    sends = [rank + 1, 10, 0, 2]
    receives = {0: [1, 2, 3, 4], 1: [10] * N, 2: [0] * N, 3: [2] * N}[rank]
    dist.all_to_all_single(torch.empty(sum(receives)), torch.ones(sum(sends)), receives, sends)


def send():
    rank = dist.get_rank()
    if rank == 3:
        dist.send(torch.ones(5), dst=1)
    if rank == 1:
        dist.recv(torch.ones(5), src=3)


def along_columns():
    """The rings of an axis: ranks 0 and 2, ranks 1 and 3."""
    Mesh(row=2, col=2)["row"].all_reduce(torch.ones(4))


def barrier():
    dist.barrier()


WHO_SENDS_WHAT = [
    (all_reduce, ring(48)),
    (broadcast, [[0, 32, 0, 0], [0] * 4, [0, 0, 0, 32], [32, 0, 0, 0]]),  # from rank 2 around to rank 1
    (reduce, [[0, 32, 0, 0], [0, 0, 32, 0], [0] * 4, [32, 0, 0, 0]]),  # from rank 3 around to rank 2
    (gather, [[0, 12, 0, 0], [0] * 4, [0, 12, 0, 0], [0, 12, 0, 0]]),
    (scatter, [[0] * 4, [0] * 4, [12, 12, 0, 12], [0] * 4]),
    (uneven_all_to_all, [[0, 40, 0, 8], [8, 0, 0, 8], [12, 40, 0, 8], [16, 40, 0, 0]]),
    (send, [[0] * 4, [0] * 4, [0] * 4, [0, 20, 0, 0]]),
    (along_columns, [[0, 0, 16, 0], [0, 0, 0, 16], [16, 0, 0, 0], [0, 16, 0, 0]]),
    (barrier, [[0] * 4] * 4),
]


@pytest.mark.parametrize("fn, between", WHO_SENDS_WHAT)
def test_bytes_go_to_whom_they_are_for(fn, between):
    assert run(fn, ranks=N).trace.traffic.between == tuple(map(tuple, between))


@pytest.mark.slow
def test_between_processes_too():
    def everything():
        for fn, _ in WHO_SENDS_WHAT:
            fn()

    between = run(everything, ranks=N, transport="processes").trace.traffic.between
    matrices = [expected for _, expected in WHO_SENDS_WHAT]
    assert between == tuple(
        tuple(sum(matrix[source][to] for matrix in matrices) for to in range(N)) for source in range(N)
    )


def test_rows_of_the_matrix_add_up_to_the_bytes_that_are_counted():
    trace = ran(every_collective, 6).trace
    assert {event.kind for event in trace.events} == {*COLLECTIVES, "send", "recv"}
    for event in trace.events:
        assert sum(event.sent_to.values()) == event.bytes_sent and event.rank not in event.sent_to
    between = trace.traffic.between
    assert [sum(row) for row in between] == [trace.bytes_sent(rank) for rank in range(6)]
    assert all(between[rank][rank] == 0 for rank in range(6)) and sum(map(sum, between)) > 0


def test_nothing_is_sent_where_the_others_never_came():
    def stuck():
        if dist.get_rank() != 2:
            dist.gather(torch.ones(3), [torch.ones(3)] * N if dist.get_rank() == 1 else None, dst=1)

    from lessons_lib.errors import DeadlockError

    with pytest.raises(DeadlockError) as caught:
        run(stuck, ranks=N)
    assert sum(map(sum, caught.value.run.trace.traffic.between)) == 0


def test_the_matrix_shows_every_pair():
    traffic = ran(every_collective, 4).trace.traffic
    figure = traffic_matrix(traffic)
    expected = {
        f"rank {source} to rank {to}: {n_bytes:,} bytes"
        for source, row in enumerate(traffic.between)
        for to, n_bytes in enumerate(row)
        if source != to
    }
    assert set(shape_titles(figure, " to rank ")) == expected
    words = texts(figure)
    for row in traffic.between:
        assert {f"{n_bytes:,}" for n_bytes in row if n_bytes} | {f"{sum(row):,}"} <= set(words)
    received = [f"{sum(column):,}" for column in zip(*traffic.between, strict=True)]
    assert words[words.index("receives") + 1 :] == received


def test_more_bytes_are_drawn_darker():
    traffic = Traffic(3, between=((0, 100, 50), (1, 0, 0), (0, 0, 0)))
    figure = traffic_matrix(traffic)
    from lessons_lib.views.colours import THEMES, luminance
    from tests.test_views import shapes

    light = [
        luminance(shapes(figure, f": {n_bytes} bytes")[0].get("fill", "")) for n_bytes in (100, 50, 1, 0)
    ]
    assert light == sorted(set(light)) and light[-1] == luminance(THEMES["light"].lane)
    assert figure.alt == (
        "Who sends to whom: bytes between 3 ranks; each sends 0 to 150 bytes, to 0 to 2 other ranks; "
        "the most is 100 bytes, from rank 0 to rank 1."
    )


def test_a_silent_run_says_so():
    figure = traffic_matrix(Traffic(2))
    assert "No rank sent anything." in texts(figure)
    assert figure.alt == "Who sends to whom: bytes between 2 ranks; no rank sends anything."
