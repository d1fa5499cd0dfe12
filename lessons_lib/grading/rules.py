"""What an exercise may demand of the communication besides its bytes: each rule looks at what was sent.

A rule takes a trial and the communications of its ranks, and returns what is wrong, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from lessons_lib.grading.exercise import Trial
from lessons_lib.layout import coordinates
from lessons_lib.timeline import Event, ranks_text


def no_collective(trial: Trial, events: Sequence[Event]) -> str:
    """Only messages from one rank to another."""
    kinds = sorted({event.kind for event in events if event.is_collective})
    return (
        f"{', '.join(kinds)} was called, and this exercise builds it from send and receive" if kinds else ""
    )


def only_to_the_right(trial: Trial, events: Sequence[Event]) -> str:
    """Every message goes from a rank to the next of its group, the last one's to the first."""
    for event in events:
        if event.kind == "send" and event.peer is not None:
            members = event.members
            place = members.index(event.rank)
            right = members[(place + 1) % len(members)]
            if event.peer != right:
                return (
                    f"rank {event.rank} sent to rank {event.peer}; "
                    f"in a ring it sends to its right neighbour only, rank {right}"
                )
    return ""


def one_number_from_each_to_the_next(trial: Trial, events: Sequence[Event]) -> str:
    """p-1 messages of one element, from rank 0 to 1, from 1 to 2, and so on."""
    sends = sorted((event.rank, event.peer) for event in events if event.kind == "send")
    larger = [event for event in events if event.kind == "send" and event.n_elements != 1]
    if larger:
        return f"rank {larger[0].rank} sent {larger[0].n_elements} elements; one is enough"
    if sends != [(rank, rank + 1) for rank in range(trial.n_ranks - 1)]:
        arrows = ", ".join(f"{source} -> {to}" for source, to in sends) or "none"
        return f"{trial.n_ranks} ranks need one message from each to the next, and there were: {arrows}"
    return ""


def few_rounds(trial: Trial, events: Sequence[Event]) -> str:
    """As many rounds as doubling takes: in a round every rank sends at most once."""
    p = list(trial.sizes.values())[-1]
    least = (p - 1).bit_length()
    rounds = max(_rounds(events).values(), default=0)
    if rounds > least:
        return (
            f"the last of {p} ranks had it after {rounds} rounds, and {least} are enough: "
            "let every rank that has it send it on"
        )
    return ""


def _rounds(events: Sequence[Event]) -> dict[int, int]:
    """After how many rounds each rank had received or sent its last message."""
    rounds: dict[int, int] = {}
    sent_in: dict[tuple[object, ...], int] = {}
    waiting = [event for event in events if event.kind in ("send", "recv")]
    while waiting:
        later = []
        blocked: set[int] = set()  # ranks whose earlier operation has to come first
        for event in waiting:
            if event.kind == "send" and event.rank not in blocked:
                rounds[event.rank] = rounds.get(event.rank, 0) + 1
                sent_in[event.members, event.rank, event.peer, event.sequence] = rounds[event.rank]
            elif (event.members, event.peer, event.rank, event.sequence) in sent_in and (
                event.rank not in blocked
            ):
                at = sent_in[event.members, event.peer, event.rank, event.sequence]
                rounds[event.rank] = max(rounds.get(event.rank, 0), at)
            else:
                blocked.add(event.rank)
                later.append(event)
        if len(later) == len(waiting):
            break
        waiting = later
    return rounds


def something_is_sent(trial: Trial, events: Sequence[Event]) -> str:
    """The numbers of other ranks can only have come by communication."""
    if trial.n_ranks > 1 and not any(event.bytes_sent for event in events):
        return "no rank has sent a byte; on a cluster nothing else brings numbers from one rank to another"
    return ""


def along_one_axis(trial: Trial, events: Sequence[Event]) -> str:
    """Ranks talk only to ranks that differ from them in one coordinate of the mesh."""
    places = coordinates(trial.sizes)
    for event in events:
        members = event.members if event.peer is None else (event.rank, event.peer)
        differ = [axis for axis in trial.sizes if len({places[rank][axis] for rank in members}) > 1]
        if len(differ) > 1:
            axes = " or ".join(f'mesh["{axis}"]' for axis in trial.sizes)
            return (
                f"{event.kind} went over {ranks_text(list(members))}, which differ in "
                f"{' and '.join(differ)}; "
                f"only along one axis at a time, {axes}"
            )
    return ""
