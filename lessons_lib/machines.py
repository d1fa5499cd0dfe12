"""Named machines: what a rank can compute, hold and send, each number with its source.

A machine is nodes of GPUs. Rank r sits on GPU r of the first node, of the second, and so on. Two
kinds of link join them, inside a node and between nodes, each with a latency and a bandwidth; a
collective goes as fast as the slowest link of its ring.

>>> machine("2x8xH100")
Machine('2x8xH100': 2 nodes of 8 GPUs)
>>> machine("8xA100").flops_per_s
312000000000000.0

FLOP/s, memory and bandwidths are from the vendors' data sheets: dense bf16 (V100: fp16) FLOP/s, per
GPU and per direction. Latencies are *assumed*: 3 microseconds in a node, 8 between nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lessons_lib.errors import RefusedError


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes: the time a message takes is latency + bytes / bandwidth."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = float("inf")

    def message_s(self, n_bytes: float) -> float:
        """
        >>> Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9).message_s(1000)
        2e-06
        """
        return self.latency_s + n_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, repr=False)
class Machine:
    """Nodes of GPUs and the links between them. The defaults are a machine in which all is free.

    >>> slow = Machine("two boxes", flops_per_s=1e12, n_nodes=2, gpus_per_node=2,
    ...                in_node=Link(1e-6, 100e9), between_nodes=Link(10e-6, 10e9))
    >>> slow.link(0, 1) == slow.in_node, slow.link(1, 2) == slow.between_nodes
    (True, True)
    """

    name: str
    flops_per_s: float = float("inf")
    memory_bytes: float = float("inf")
    memory_bytes_per_s: float = float("inf")
    in_node: Link = Link()
    between_nodes: Link = Link()
    n_nodes: int = 1
    gpus_per_node: int = 1_000_000

    def __repr__(self) -> str:
        nodes = "1 node" if self.n_nodes == 1 else f"{self.n_nodes} nodes"
        return f"Machine({self.name!r}: {nodes} of {self.gpus_per_node} GPUs)"

    @property
    def n_gpus(self) -> int:
        return self.n_nodes * self.gpus_per_node

    def node(self, rank: int) -> int:
        """The node that ``rank`` sits on."""
        return rank // self.gpus_per_node

    def link(self, *ranks: int) -> Link:
        """The slowest link of a ring through ``ranks``: inside a node, or between nodes."""
        return self.in_node if len({self.node(rank) for rank in ranks}) == 1 else self.between_nodes

    def compute_s(self, flops: float) -> float:
        return flops / self.flops_per_s

    def collective_s(self, kind: str, n_bytes: float, ranks: tuple[int, ...]) -> float:
        """Seconds of a collective over ``ranks`` by the ring: its rounds, and the bytes a rank sends.

        ``n_bytes`` is the whole buffer, as in :func:`lessons_lib.timeline.elements_sent`.

        >>> box = Machine("box", in_node=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9))
        >>> box.collective_s("all_reduce", 4000, (0, 1, 2, 3))       # 6 rounds, 6000 bytes
        1.2e-05
        """
        p = len(ranks)
        if p == 1:
            return 0.0
        rounds = 2 * (p - 1) if kind in ("all_reduce", "barrier") else p - 1
        share = {"all_reduce": 2 * (p - 1) / p, "barrier": 0.0, "broadcast": 1.0, "reduce": 1.0}
        link = self.link(*ranks)
        sent = n_bytes * share.get(kind, (p - 1) / p)
        return rounds * link.latency_s + sent / link.bandwidth_bytes_per_s


_IN_NODE_LATENCY_S, _BETWEEN_NODES_LATENCY_S = 3e-6, 8e-6  # assumed

# FLOP/s, memory bytes, memory bytes/s, link in a node, link between nodes (bytes/s).
# Data sheets: NVIDIA V100 (2020), A100 80GB (2021), H100 (2023), H200 (2024), DGX B200 (2024).
GPUS: dict[str, tuple[float, float, float, float, float]] = {
    "V100": (125e12, 32e9, 0.9e12, 150e9, 12.5e9),
    "A100": (312e12, 80e9, 2.0e12, 300e9, 25e9),
    "H100": (989e12, 80e9, 3.35e12, 450e9, 50e9),
    "H200": (989e12, 141e9, 4.8e12, 450e9, 50e9),
    "B200": (2250e12, 180e9, 8e12, 900e9, 50e9),
}


def machine(name: str) -> Machine:
    """The machine called ``"8xH100"`` (GPUs) or ``"2x8xH100"`` (nodes x GPUs).

    >>> machine("9xM100")
    Traceback (most recent call last):
    ...
    lessons_lib.errors.RefusedError: machine='9xM100': write GPUs x name, "8xH100", or nodes x GPUs x name, \
"2x8xH100"; known GPUs: V100, A100, H100, H200, B200. Or build a Machine(...).
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\w+)", name)
    if not match or match[3] not in GPUS or int(match[2]) < 1 or int(match[1] or 1) < 1:
        raise RefusedError(
            f'machine={name!r}: write GPUs x name, "8xH100", or nodes x GPUs x name, "2x8xH100"; '
            f"known GPUs: {', '.join(GPUS)}. Or build a Machine(...)."
        )
    flops_per_s, memory_bytes, memory_bytes_per_s, in_node, between_nodes = GPUS[match[3]]
    return Machine(
        name,
        flops_per_s,
        memory_bytes,
        memory_bytes_per_s,
        Link(_IN_NODE_LATENCY_S, in_node),
        Link(_BETWEEN_NODES_LATENCY_S, between_nodes),
        n_nodes=int(match[1] or 1),
        gpus_per_node=int(match[2]),
    )
