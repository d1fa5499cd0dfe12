"""Collectives of :mod:`lessons_lib.rings`, run on thread ranks and recorded round by round.

What a picture of a step shows comes out of a real run. Every element says by its value where it stands
in the tensor and which ranks' contributions are in it, so each message explains itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.machines import Link, Machine
from lessons_lib.mesh import Group, Mesh
from lessons_lib.rings import (
    chain_broadcast,
    chain_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from lessons_lib.spmd import run
from lessons_lib.timeline import Event
from lessons_lib.views.steps import Steps, Transfer

PLACES = 4  # a number of a rank's contributions, 0 to 3, is a digit in base 4
MOST_RANKS = 16
SHIFT = PLACES**MOST_RANKS  # above the digits stands the element's index, once for each contribution

# A message takes a second and nothing else takes time, so that a virtual clock tells what a rank had
# received when it sent.
ROUNDS = Machine("a second per message", in_node=Link(latency_s=1.0))


def star_all_reduce(x: Tensor, group: Group) -> Tensor:
    """The naive way: all send to rank 0, which adds up and sends the sum back.

    >>> run(lambda: star_all_reduce(torch.ones(1), Mesh(star=3)["star"]).item(), ranks=3).values
    [3.0, 3.0, 3.0]
    """
    if group.rank:
        group.send(x, 0)
        return group.recv(x, 0)
    y = x.clone()
    for other in range(1, group.size):
        y += group.recv(y, other)
    for other in range(1, group.size):
        group.send(y, other)
    return y


Program = Callable[[Tensor, Group], Any]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective to step through: its program, and who brings what."""

    name: str
    program: Program
    brings: str = "all"  # all ranks a term of the sum, the "root" all of it, or each a "piece"


COLLECTIVES = {
    each.name: each
    for each in (
        Collective("ring all-reduce", ring_all_reduce),
        Collective("ring reduce-scatter", ring_reduce_scatter),
        Collective("ring all-gather", ring_all_gather, "piece"),
        Collective("star all-reduce", star_all_reduce),
        Collective("tree broadcast", lambda x, group: tree_broadcast(x, group, 0), "root"),
        Collective("tree reduce", lambda x, group: tree_reduce(x, group, 0)),
        Collective("chain broadcast", lambda x, group: chain_broadcast(x, group, 0), "root"),
        Collective("chain reduce", lambda x, group: chain_reduce(x, group, 0)),
    )
}


@cache
def record(name: str, ranks: int, n_elements: int | None = None) -> Steps:
    """Run a collective on ``ranks`` thread ranks; what each rank held after every round.

    >>> steps = record("ring all-reduce", 4)
    >>> len(steps.rounds), [steps.state(step) for step in range(7)]
    (6, ['partial', 'partial', 'partial', 'cut', 'cut', 'cut', 'copy'])

    A round is as much as can happen while every rank sends at most one message and receives at most one.
    Elements that share their fate are one chunk.
    """
    if name not in COLLECTIVES:
        raise RefusedError(f"no collective is called {name!r}; there are {', '.join(COLLECTIVES)}.")
    if not 2 <= ranks <= MOST_RANKS:
        raise RefusedError(f"ranks={ranks}: a collective is shown on 2 to {MOST_RANKS} ranks.")
    collective, n = COLLECTIVES[name], 4 * ranks if n_elements is None else n_elements
    if n < ranks or (collective.brings == "piece" and n % ranks):
        raise RefusedError(
            f"n_elements={n}: give {ranks} or more; an all-gather needs a multiple of {ranks}."
        )
    result = run(_recorded, collective, n, ranks=ranks, machine=ROUNDS)
    replay = Replay([_start(collective, n, rank, ranks) for rank in range(ranks)])
    sent: dict[int, list[list[int]]] = {rank: list(result.values[rank][0]) for rank in range(ranks)}
    messages: list[list[Message]] = []
    for number, event in rounds_of(result.trace.events):
        while len(messages) < number:
            messages.append([])
        assert event.peer is not None
        values = sent[event.rank].pop(0)
        messages[number - 1].append(
            Message(event.rank, event.peer, tuple(map(decoded, values)), event.bytes_sent)
        )
    for each in messages:
        replay.round(sorted(each, key=lambda message: message.source))
    replay.end([value for _, value in result.values])
    return replay.steps(name)


# ---- values that say what is in them ----


Element = tuple[int, frozenset[int]]  # its index, and the ranks whose contributions are in it


def encoded(indices: Tensor, rank: int) -> Tensor:
    """What ``rank`` contributes to the elements at ``indices``.

    >>> decoded(int((encoded(torch.tensor([5]), 0) + encoded(torch.tensor([5]), 3))[0]))
    (5, frozenset({0, 3}))
    """
    return indices * SHIFT + PLACES**rank


def decoded(value: int) -> Element:
    places, digits = divmod(value, SHIFT)
    counts = [digits // PLACES**rank % PLACES for rank in range(MOST_RANKS)]
    if not sum(counts):
        return -1, frozenset()
    if max(counts) > 1:
        raise RefusedError(f"rank {counts.index(max(counts))} is in a sum {max(counts)} times.")
    return places // sum(counts), frozenset(rank for rank, count in enumerate(counts) if count)


def _recorded(collective: Collective, n: int) -> tuple[list[list[int]], list[int] | None]:
    """What a rank sends, message by message, and what it returns."""
    group = Mesh(ring=dist.get_world_size())["ring"]
    indices = torch.arange(n)
    if collective.brings == "piece":
        indices = indices.tensor_split(group.size)[group.rank]
    x = encoded(indices, group.rank)
    if collective.brings == "root" and group.rank:
        x = torch.zeros_like(x)
    sent: list[list[int]] = []
    send = group.process_group.send

    def send_and_keep(tensors: list[Tensor], *where: Any) -> Any:
        sent.append(tensors[0].flatten().tolist())
        return send(tensors, *where)

    setattr(group.process_group, "send", send_and_keep)  # noqa: B010  this rank's own group, of this run
    y = collective.program(x, group)
    return sent, None if y is None else y.flatten().tolist()


def _start(collective: Collective, n: int, rank: int, ranks: int) -> list[frozenset[int]]:
    """Whose contributions each element of a rank begins with."""
    mine, nothing = frozenset({rank}), frozenset[int]()
    if collective.brings == "root":
        return [nothing if rank else mine] * n
    if collective.brings == "piece":
        return [mine if index // (n // ranks) == rank else nothing for index in range(n)]
    return [mine] * n


# ---- rounds ----


def rounds_of(events: Sequence[Event]) -> list[tuple[int, Event]]:
    """The sends of a run in order, each with the number of its round, from 1.

    A message goes in the first round after those of all messages that its sender sent before or had
    received by then, and that its receiver received before.
    """
    sends = {_message(each): each for each in events if each.kind == "send"}
    receives = {_message(each): each for each in events if each.kind == "recv"}
    by_sender, by_receiver = (
        {rank: [key for key, each in side.items() if each.rank == rank] for rank in range(MOST_RANKS)}
        for side in (sends, receives)
    )
    numbers: dict[tuple[int, ...], int] = {}

    def number(key: tuple[int, ...]) -> int:
        if key not in numbers:
            sender, receiver, _ = key
            before = _before(key, by_sender[sender]) + _before(key, by_receiver[receiver])
            before += [each for each in by_receiver[sender] if receives[each].done_s <= sends[key].issued_s]
            numbers[key] = 1 + max(map(number, before), default=0)
        return numbers[key]

    return [(number(key), send) for key, send in sends.items()]


def _message(event: Event) -> tuple[int, ...]:
    """What a send and its receive have in common: sender, receiver, and which message between them."""
    assert event.peer is not None
    ends = (event.rank, event.peer) if event.kind == "send" else (event.peer, event.rank)
    return (*ends, event.sequence)


def _before(key: tuple[int, ...], keys: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The one just before ``key``, if there is one."""
    at = keys.index(key)
    return keys[max(0, at - 1) : at]


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sent another."""

    source: int
    destination: int
    elements: tuple[Element, ...]
    n_bytes: int


class Replay:
    """What every rank holds, followed through the messages and held against what was really sent.

    What arrives without a contribution that is there already is added, anything else kept in its place.
    """

    def __init__(self, start: list[list[frozenset[int]]]) -> None:
        self.now = start
        self.held = [[list(each) for each in start]]
        self.rounds: list[list[tuple[Message, bool]]] = []

    def round(self, messages: list[Message]) -> None:
        for each in messages:
            for index, inside in each.elements:
                if self.now[each.source][index] != inside:
                    raise RefusedError(
                        f"rank {each.source} sent element {index} with the contributions {sorted(inside)} "
                        f"and holds {sorted(self.now[each.source][index])}."
                    )
        before = [list(each) for each in self.now]
        happened = []
        for each in messages:
            adds = all(not before[each.destination][i] & inside for i, inside in each.elements)
            adds = adds and all(before[each.destination][i] for i, _ in each.elements)
            for index, inside in each.elements:
                self.now[each.destination][index] = (
                    before[each.destination][index] | inside if adds else inside
                )
            happened.append((each, adds))
        self.rounds.append(happened)
        self.held.append([list(each) for each in self.now])

    def end(self, returned: list[list[int] | None]) -> None:
        """Ranks hold what they returned, and no more."""
        last = self.held[-1]
        for rank, values in enumerate(returned):
            kept = dict(map(decoded, values)) if values is not None else {}
            for index, inside in kept.items():
                if last[rank][index] != inside:
                    raise RefusedError(
                        f"rank {rank} returned element {index} with {sorted(inside)} and held "
                        f"{sorted(last[rank][index])}."
                    )
            last[rank] = [kept.get(index, frozenset()) for index in range(len(last[rank]))]

    def steps(self, name: str) -> Steps:
        n_ranks, n = len(self.now), len(self.now[0])
        first = self.rounds[0][0][0]
        element_bytes = first.n_bytes // len(first.elements)
        fates = [
            (
                tuple(each[rank][index] for each in self.held for rank in range(n_ranks)),
                tuple(index in dict(message.elements) for messages in self.rounds for message, _ in messages),
            )
            for index in range(n)
        ]
        starts = [0, *(after for before, after in pairwise(range(n)) if fates[before] != fates[after])]
        whole = tuple(
            max((held[rank][i] for held in self.held for rank in range(n_ranks)), key=len) for i in starts
        )
        ends = [*starts[1:], n]
        return Steps(
            name,
            n_ranks,
            tuple(element_bytes * (end - start) for start, end in zip(starts, ends, strict=True)),
            tuple(
                tuple(
                    Transfer(
                        message.source,
                        message.destination,
                        tuple(c for c, start in enumerate(starts) if start in dict(message.elements)),
                        message.n_bytes,
                        adds,
                    )
                    for message, adds in messages
                )
                for messages in self.rounds
            ),
            tuple(
                tuple(tuple(held[rank][i] for i in starts) for rank in range(n_ranks)) for held in self.held
            ),
            whole,
        )
