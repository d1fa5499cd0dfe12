"""Machines: their names, where ranks sit, what a link and a collective take."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessons_lib import run
from lessons_lib.errors import RefusedError
from lessons_lib.machines import GPUS, Link, Machine, machine
from lessons_lib.timeline import COLLECTIVES, ring_traffic


@pytest.mark.parametrize("gpu", GPUS)
def test_names_give_the_numbers_of_the_data_sheets(gpu: str) -> None:
    one, many = machine(f"8x{gpu}"), machine(f"16x8x{gpu}")
    flops, memory, memory_bandwidth, in_node, between = GPUS[gpu]
    for each in (one, many):
        assert (each.flops_per_s, each.memory_bytes, each.memory_bytes_per_s) == (
            flops,
            memory,
            memory_bandwidth,
        )
        assert each.in_node == Link(3e-6, in_node) and each.between_nodes == Link(8e-6, between)
    assert (one.n_nodes, one.n_gpus, many.n_nodes, many.n_gpus) == (1, 8, 16, 128)
    assert between < in_node and many.name == f"16x8x{gpu}"


@pytest.mark.parametrize(
    "name", ["H100", "0xH100", "8xH1OO", "8 x H100", "2x0xH100", "-1xH100", "1x2x3xH100", ""]
)
def test_a_name_that_is_none_is_refused_with_the_way_to_write_it(name: str) -> None:
    with pytest.raises(
        RefusedError, match=r'write GPUs x name, "8xH100".*known GPUs: V100, A100, H100, H200'
    ):
        machine(name)
    with pytest.raises(RefusedError, match="known GPUs"):
        run(int, ranks=2, machine=name)


def test_a_machine_has_a_gpu_for_every_rank() -> None:
    with pytest.raises(RefusedError, match=r"ranks=5 and Machine\('2x2xH100': 2 nodes of 2 GPUs\)"):
        run(int, ranks=5, machine="2x2xH100")
    assert run(int, ranks=4, machine="2x2xH100").values == [0] * 4


def test_ranks_fill_one_node_after_the_other() -> None:
    grid = machine("3x4xA100")
    assert [grid.node(rank) for rank in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert grid.link(0, 3) == grid.link(4, 5, 7) == grid.link(9) == grid.in_node
    assert grid.link(3, 4) == grid.link(0, 1, 11) == grid.between_nodes


@given(
    st.sampled_from([kind for kind in COLLECTIVES if kind not in ("gather", "scatter")]),
    st.integers(1, 9),
    st.integers(1, 100),
)
def test_a_collective_takes_its_rounds_and_the_bytes_of_the_ring(kind: str, p: int, chunk: int) -> None:
    """Where p divides the buffer, a rank sends the bytes that are counted, but for the ends of chains."""
    box = Machine("box", in_node=Link(latency_s=0.5, bandwidth_bytes_per_s=4.0))
    n_bytes = p * chunk
    rounds = 0 if p == 1 else 2 * (p - 1) if kind in ("all_reduce", "barrier") else p - 1
    sent = Fraction(ring_traffic(kind, n_bytes, p))
    if kind in ("broadcast", "reduce") and p > 1:  # a chain: all but one of its ranks send everything
        sent = sent * p / (p - 1)
    assert box.collective_s(kind, n_bytes, tuple(range(p))) == pytest.approx(rounds * 0.5 + float(sent) / 4)


def test_a_collective_goes_as_fast_as_its_slowest_link() -> None:
    grid = machine("2x2xH100")
    inside, across = (grid.collective_s("all_reduce", 1e9, ranks) for ranks in ((0, 1), (1, 2)))
    assert inside == pytest.approx(2 * 3e-6 + 1e9 / 450e9) and across == pytest.approx(2 * 8e-6 + 1e9 / 50e9)


def test_the_machine_without_numbers_is_free() -> None:
    free = Machine("free")
    assert free.compute_s(1e18) == free.link(0, 1).message_s(1e18) == 0
    assert free.collective_s("all_reduce", 1e18, (0, 1, 2)) == 0 and math.isinf(free.memory_bytes)
