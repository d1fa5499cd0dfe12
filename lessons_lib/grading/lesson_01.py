"""The exercises of lesson 01: collectives from send and receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lessons_lib import rings
from lessons_lib.grading import rules
from lessons_lib.grading.exercise import Axis, Budget, Claim, Draw, Exercise, Output, Trial, sizes_text
from lessons_lib.layout import coordinates
from lessons_lib.mesh import Group

# ---- the solutions, in the words of the lesson ----


def ring_reduce_scatter(x: Tensor, ring: Group) -> Tensor:
    """Return chunk r of the sum of every rank's ``x``, on rank r of ``ring``.

    ``x`` has one dim. Chunks are those of ``x.tensor_split(p)``, so their sizes may differ by one.
    """
    p, r = ring.size, ring.rank
    chunks = list(x.clone().tensor_split(p))
    for step in range(p - 1):
        outgoing, incoming = (r - 1 - step) % p, (r - 2 - step) % p
        chunks[incoming] += _exchange(chunks[outgoing], chunks[incoming], ring)
    return chunks[r]


def ring_all_gather(chunk: Tensor, ring: Group, n: int) -> Tensor:
    """Return all ranks' chunks, one after the other in one tensor of ``n`` elements, on every rank.

    Rank r of ``ring`` brings chunk r, as ``tensor_split`` cuts ``n`` elements.
    """
    p, r = ring.size, ring.rank
    y = chunk.new_empty(n)
    chunks = y.tensor_split(p)
    chunks[r].copy_(chunk)
    for step in range(p - 1):
        outgoing, incoming = (r - step) % p, (r - 1 - step) % p
        chunks[incoming].copy_(_exchange(chunks[outgoing], chunks[incoming], ring))
    return y


def ring_all_reduce(x: Tensor, ring: Group) -> Tensor:
    """Return the sum of every rank's ``x``, on every rank of ``ring``. ``x`` has one dim."""
    return ring_all_gather(ring_reduce_scatter(x, ring), ring, x.numel())


def tree_broadcast(x: Tensor, tree: Group, root: int) -> Tensor:
    """Return the ``x`` of rank ``root`` of ``tree``, on every rank.

    Every rank passes a tensor of the same shape. In each round, all ranks that have it send it on.
    """
    p = tree.size
    behind = (tree.rank - root) % p
    y, have = x.clone(), 1
    while have < p:
        if behind < have and behind + have < p:
            tree.send(y, (tree.rank + have) % p)
        elif have <= behind < 2 * have:
            y = tree.recv(y, (tree.rank - have) % p)
        have *= 2
    return y


def _exchange(outgoing: Tensor, like: Tensor, ring: Group) -> Tensor:
    """Send to the right while something like ``like`` comes from the left. Even ranks send first."""
    p, r = ring.size, ring.rank
    if r % 2 == 0:
        ring.send(outgoing, (r + 1) % p)
        return ring.recv(like, (r - 1) % p)
    arrived = ring.recv(like, (r - 1) % p)
    ring.send(outgoing, (r + 1) % p)
    return arrived


# ---- the trials ----

RINGS: tuple[Mapping[str, int], ...] = ({"ring": 2}, {"ring": 3}, {"ring": 4}, {"dp": 2, "ring": 3})


def _groups(sizes: Mapping[str, int]) -> list[int]:
    """For every rank, which group of the last axis it is in."""
    p = list(sizes.values())[-1]
    return [rank // p for rank in range(len(coordinates(sizes)))]


def _ring_trial(draw: Draw, sizes: Mapping[str, int], n: int, name: str) -> Trial:
    p, group = sizes["ring"], _groups(sizes)
    xs = [draw.tensor(n) for _ in group]
    sums = [torch.stack([x for x, g in zip(xs, group, strict=True) if g == mine]).sum(0) for mine in group]
    of_all = torch.stack(xs).sum(0)
    pieces = [total.tensor_split(p)[rank % p].clone() for rank, total in enumerate(sums)]
    own = [x.tensor_split(p)[rank % p] for rank, x in enumerate(xs)]
    kind = name.removeprefix("ring_")
    args: list[tuple[Any, ...]] = [(x, Axis("ring")) for x in xs]
    mistakes: dict[str, list[Tensor]]
    if name == "ring_reduce_scatter":
        expected = pieces
        mistakes = {"this is the rank's own chunk: nothing was added to it": own}
        if len(xs) > p:
            everybody = [of_all.tensor_split(p)[rank % p] for rank in range(len(xs))]
            mistakes[f"this is a sum over all {len(xs)} ranks, and the ring has {p}"] = everybody
    elif name == "ring_all_gather":
        expected = sums
        args = [(piece, Axis("ring"), n) for piece in pieces]
        mistakes = {}
    else:
        expected = sums
        mistakes = {"this is the rank's own tensor: nothing was added to it": xs}
        if len(xs) > p:
            mistakes[f"this is a sum over all {len(xs)} ranks, and the ring has {p}"] = [of_all] * len(xs)
    whole = sums[0] if name == "ring_reduce_scatter" else None
    rounds = "2 (p-1)" if kind == "all_reduce" else "p-1"
    return Trial(
        function=name,
        sizes=sizes,
        facts=sizes_text(sizes, n=n),
        args=args,
        outputs=[Output("the result", "values", expected, whole, mistakes)],
        budgets={"forward": Budget.of(kind, n, sizes, "ring", f"{rounds} rounds of a chunk")},
        spare=2 * n,
        rules=[rules.no_collective, rules.only_to_the_right],
    )


def _tree_trial(draw: Draw, sizes: Mapping[str, int]) -> Trial:
    p, group = sizes["tree"], _groups(sizes)
    n, root = draw.between(3, 9), draw.between(1, p - 1)
    xs = [draw.tensor(n) for _ in group]
    roots = [xs[mine * p + root] for mine in group]
    n_groups = len(group) // p
    return Trial(
        function="tree_broadcast",
        sizes=sizes,
        facts=sizes_text(sizes, n=n, root=root),
        args=[(x, Axis("tree"), root) for x in xs],
        outputs=[
            Output(
                "the result",
                "values",
                roots,
                mistakes={
                    "this is the tensor of rank 0 of the group: root was not looked at": [
                        xs[mine * p] for mine in group
                    ],
                    "this is each rank's own tensor: nothing arrived": xs,
                },
            )
        ],
        budgets={"forward": Budget(n_groups * (p - 1) * n, (p - 1).bit_length() * n, "once to every rank")},
        spare=2 * n,
        rules=[rules.no_collective, rules.few_rounds],
    )


def _on_rings(name: str) -> Callable[[Draw], list[Trial]]:
    """Trials of every ring; of the last sizes two, so that numbers that are written down are seen."""

    def trials(draw: Draw) -> list[Trial]:
        settings = [
            (sizes, draw.indivisible(2 * sizes["ring"] + 1, 4 * sizes["ring"], sizes["ring"]))
            for sizes in RINGS
        ]
        return [_ring_trial(draw, sizes, n, name) for sizes, n in (*settings, settings[-1])]

    return trials


def _on_trees(draw: Draw) -> list[Trial]:
    trees: tuple[Mapping[str, int], ...] = (
        {"tree": 2},
        {"tree": 4},
        {"tree": 7},
        {"tree": 8},
        {"dp": 2, "tree": 3},
    )
    return [_tree_trial(draw, sizes) for sizes in trees]


def _claims(values: str, traffic: str) -> tuple[Claim, ...]:
    return (
        Claim("values", values, 5),
        Claim("traffic", traffic, 3),
        Claim("memory", "no rank holds the tensors of the others", 1),
        Claim("no deadlock", "no rank is left waiting, whoever begins", 1),
    )


_RING = "messages r -> r+1 only, and as few bytes as a ring needs"

EXERCISES = (
    Exercise(
        id="01-reduce-scatter",
        title="Ring reduce-scatter",
        objective="Turn a partial sum into a cut, with p-1 messages from each rank to its right neighbour.",
        functions=(ring_reduce_scatter,),
        claims=_claims("chunk r of the sum, on rank r", _RING),
        trials=_on_rings("ring_reduce_scatter"),
        hints=(
            "Follow one chunk: it must end on rank c with everybody's term in it. Where does it set out?",
            "In step s, rank r sends chunk r-1-s and adds what arrives to chunk r-2-s, all modulo p.",
            "ring.shift sends a tensor and returns one of the same size, and here chunks differ: use "
            "ring.send and ring.recv(like, source), with the chunk that will be added to as `like`. Let even "
            "ranks send first and odd ranks receive first.",
        ),
        shown=(rings.ring_reduce_scatter, rings._pass_on),
    ),
    Exercise(
        id="01-all-gather",
        title="Ring all-gather",
        objective="Turn a cut into a copy, with p-1 messages from each rank to its right neighbour.",
        functions=(ring_all_gather,),
        claims=_claims("all chunks in order, on every rank", _RING),
        trials=_on_rings("ring_all_gather"),
        hints=(
            "At first a rank can send only its own chunk. What can it send in the second round?",
            "In step s, rank r sends chunk r-s and keeps what arrives as chunk r-s-1, all modulo p.",
            "y = chunk.new_empty(n) and y.tensor_split(p) are p views into y: copy into them with copy_. "
            "A view also says how large the chunk is that will arrive.",
        ),
        shown=(rings.ring_all_gather, rings._pass_on),
    ),
    Exercise(
        id="01-all-reduce",
        title="Ring all-reduce",
        objective="Add up a tensor over a ring in 2 (p-1) rounds, whatever its size.",
        functions=(ring_all_reduce,),
        claims=_claims("the sum, on every rank", _RING),
        trials=_on_rings("ring_all_reduce"),
        hints=(
            "partial sum -> cut -> copy: you have both halves already.",
            "A reduce-scatter leaves chunk r on rank r, which is what an all-gather starts from.",
            "ring_all_gather(ring_reduce_scatter(x, ring), ring, x.numel())",
        ),
        shown=(rings.ring_all_reduce,),
    ),
    Exercise(
        id="01-broadcast",
        title="Broadcast by a tree",
        objective="Bring a tensor from one rank to all in as few rounds as doubling takes.",
        functions=(tree_broadcast,),
        claims=_claims("the root's tensor, on every rank", "few rounds, and the tensor once to every rank"),
        trials=_on_trees,
        hints=(
            "After one round 2 ranks have it, after two rounds 4. Who sends to whom in round k?",
            "Count ranks from the root: behind = (rank - root) % p. While `have` ranks have it, the rank "
            "`behind` sends to `behind + have`, if there is one.",
            "A rank with have <= behind < 2 * have receives in this round, from the rank `have` places "
            "before it. Group.send and Group.recv count ranks within the group.",
        ),
        shown=(rings.tree_broadcast, rings._doubling),
    ),
)
