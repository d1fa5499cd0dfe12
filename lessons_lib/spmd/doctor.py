"""Says why a run cannot go on: which rank waits in which operation, for whom, at which line.

Pure text from plain records; it knows no transport and decides nothing.
"""

from __future__ import annotations

import itertools
import math
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lessons_lib.spmd.lines import is_machinery, line_of, path_in_package
from lessons_lib.spmd.operation import Operation
from lessons_lib.timeline import Waiting, Where, ranks_text

if TYPE_CHECKING:
    from torch import Tensor

LONGEST_MESSAGE = 4_000
MOST_FRAMES = 10  # lines of a traceback shown at either end: a recursion has a thousand

# What a message of torch means for somebody whose ranks were started by run.
_HINTS = (
    (
        r"missing \d+ required positional argument",
        "give the function's arguments after it: run(step, 10, ranks=4).",
    ),
    (
        r"unsupported operand .*NoneType|'NoneType' object",
        "all_reduce and its like change x in place and return None; with async_op they return a handle.",
    ),
    (
        r"incompatible function arguments.*(op|reduce)",
        "op is one of dist.ReduceOp: op=dist.ReduceOp.MAX.",
    ),
    (
        r"not compiled with CUDA|_cuda_setDevice|No CUDA GPUs|NVIDIA driver",
        "ranks here live on the CPU: leave the device out.",
    ),
    (
        r"Only.* GLOO|monitored_barrier",
        "use dist.barrier(): run explains hangs by itself.",
    ),
    (
        r"initialize the default process group twice",
        "run has initialised it for every rank: leave that line out.",
    ),
    (
        r"is not part of group|isn't in group|not in group",
        "in torch's own calls src and dst are global ranks, also in a sub-group; "
        "group_src, and root of a Group, are indices in the group.",
    ),
)


@dataclass(frozen=True)
class RankStatus:
    """Where one rank is. ``waits_in`` is the operation it stands in, ``last`` its latest one."""

    rank: int
    ended: bool = False
    waits_in: Operation | None = None
    missing: tuple[int, ...] = ()  # global ranks it waits for
    last: Operation | None = None

    @property
    def waiting(self) -> Waiting | None:
        """The lasting record of a rank that stands still."""
        if self.waits_in is None:
            return None
        operation = self.waits_in
        return Waiting(
            self.rank, str(operation), operation.group, operation.sequence, self.missing, operation.where
        )


# ---- standing still ----


def deadlock(ranks: Sequence[RankStatus]) -> str:
    still = [rank.rank for rank in ranks if rank.waits_in]
    verb = "waits" if len(still) == 1 else "wait"
    lines = [f"Deadlock: {ranks_text(still)} of {len(ranks)} {verb}, and no rank can go on.", ""]
    return "\n".join([*lines, *where_ranks_stand(ranks), "", *_diagnosis(ranks)])


def where_ranks_stand(ranks: Sequence[RankStatus]) -> list[str]:
    """Where every rank is that waits or has ended, those that do the same together."""
    same: dict[tuple[str, tuple[int, ...], Where], list[int]] = {}
    for rank in ranks:
        if rank.waits_in:
            same.setdefault((str(rank.waits_in), rank.missing, rank.waits_in.where), []).append(rank.rank)
    busy = {rank.rank for rank in ranks if not rank.ended and not rank.waits_in}
    at: dict[Where, list[str]] = {}  # what ranks do at one line stands together
    for (operation, missing, where), numbers in same.items():
        verb = "waits" if len(numbers) == 1 else "wait"
        whom = ranks_text(missing) if missing else "the others"
        on_the_way = sorted(busy & set(missing))
        note = f" ({ranks_text(on_the_way)} still on the way)" if on_the_way else ""
        at.setdefault(where, []).append(f"  {ranks_text(numbers)} {verb} for {whom} in {operation}{note}")
    lines = [line for where, group in at.items() for line in (*group, f"      {where}")]
    for rank in ranks:
        if rank.ended and rank.last is None:
            lines.append(f"  rank {rank.rank} has returned without communicating")
        elif rank.ended and rank.last is not None:
            lines.append(f"  rank {rank.rank} has returned; its last communication was {rank.last}")
            lines.append(f"      {rank.last.where}")
    return lines


def _diagnosis(ranks: Sequence[RankStatus]) -> list[str]:
    """The reason in one sentence, and the way out in another."""
    ended = {rank.rank for rank in ranks if rank.ended}
    for rank in ranks:
        gone = [other for other in rank.missing if other in ended]
        if rank.waits_in and gone:
            return _waits_for_the_gone(rank.waits_in, gone)
    tags = _different_tags(ranks)
    if tags:
        return tags
    cycle = find_cycle({rank.rank: rank.missing for rank in ranks if rank.waits_in})
    if cycle:
        path = " -> ".join(str(rank) for rank in [*cycle, cycle[0]])
        kinds = {rank.waits_in.kind for rank in ranks if rank.waits_in and rank.rank in cycle}
        if kinds == {"send"}:
            remedy = "let one of them receive first, or use isend or batch_isend_irecv and wait afterwards."
        elif kinds == {"recv"}:
            remedy = "let one of them send first: every one waits for a message that nobody has sent yet."
        else:
            remedy = "bring the calls of these ranks into the same order."
        return [f"Why: each waits for the next in the cycle {path}.", f"Try: {remedy}"]
    return ["Why: what they wait for is never called.", "Try: pair every call with its other side."]


def _different_tags(ranks: Sequence[RankStatus]) -> list[str]:
    """A send and a receive that would meet, were it not for their tags."""
    waits = [rank.waits_in for rank in ranks if rank.waits_in]
    for sent in waits:
        for received in waits:
            pair = (sent.kind, received.kind) == ("send", "recv") and sent.group == received.group
            if (
                pair
                and (sent.peer, sent.rank) == (received.rank, received.peer)
                and sent.detail != received.detail
            ):
                tags = [operation.detail.removeprefix("tag=") or "0" for operation in (sent, received)]
                return [
                    f"Why: the tags differ: the send has {tags[0]}, the recv has {tags[1]}.",
                    "Try: one tag.",
                ]
    return []


def _waits_for_the_gone(operation: Operation, gone: list[int]) -> list[str]:
    match operation.kind:
        case "send":
            never, remedy = "receive it", "pair every send with a recv on the other side."
        case "recv":
            never, remedy = "send it", "pair every recv with a send on the other side."
        case kind:
            never = f"join {kind} #{operation.sequence}"
            remedy = "let every rank of the group make the same calls in the same order."
    verb = "has" if len(gone) == 1 else "have"
    return [f"Why: {ranks_text(gone)} {verb} returned and will never {never}.", f"Try: {remedy}"]


def find_cycle(waits_for: dict[int, tuple[int, ...]]) -> list[int]:
    """A shortest cycle of ranks that wait for each other, starting at its lowest rank.

    >>> find_cycle({0: (1,), 1: (2,), 2: (1, 3)})
    [1, 2]
    """
    best: list[int] = []
    for start in sorted(waits_for):
        paths, seen = [[start]], {start}
        while paths:
            path = paths.pop(0)
            for following in waits_for.get(path[-1], ()):
                if following == start and (not best or len(path) < len(best)):
                    best = path
                    paths = []
                    break
                if following not in seen and following in waits_for:
                    seen.add(following)
                    paths.append([*path, following])
    return best


def cleaning_up(rank: int, error: BaseException, what: str = "began a communication of its own") -> str:
    """What opens the report when a rank got stuck while cleaning up: the error that came first."""
    then = f"Cleaning up after that, rank {rank} {what}."
    return "\n".join([*traceback_of(rank, error), "", then, "", ""])


# ---- disagreement ----


def disagreement(operations: Sequence[Operation], missing: tuple[int, ...] = ()) -> str:
    """How the ranks of one collective disagree, or nothing."""
    if len({operation.signature for operation in operations}) < 2:
        return ""
    first, what = operations[0], _what_differs(operations)
    which = f"collective #{first.sequence} on {first.group_text}"
    lines = [f"Mismatch: the ranks disagree about the {what} of {which}.", ""]
    same: dict[tuple[str, Where], list[int]] = {}
    for operation in operations:
        same.setdefault((str(operation).split(", #")[0], operation.where), []).append(operation.rank)
    for (call, where), numbers in same.items():
        verb = "calls" if len(numbers) == 1 else "call"
        lines += [f"  {ranks_text(numbers)} {verb} {call}", f"      {where}"]
    if missing:
        lines.append(f"  {ranks_text(missing)} did not arrive")
    remedy = (
        "all ranks of a group must make the same calls in the same order."
        if what == "operation"
        else f"give every rank the same {what}."
    )
    return "\n".join([*lines, "", f"Try: {remedy}"])


def _what_differs(operations: Sequence[Operation]) -> str:
    for name, of in (
        ("operation", lambda o: o.kind),
        ("root", lambda o: o.root),
        ("dtype", lambda o: o.dtypes),
        ("shape", lambda o: o.shapes),
    ):
        if len({of(operation) for operation in operations}) > 1:
            return name
    return "reduction"


class Creation(NamedTuple):
    """A call of ``new_group`` on one rank."""

    members: tuple[int, ...]
    rank: int
    where: Where


def different_groups(first: Creation, second: Creation) -> str:
    lines = ["Mismatch: the ranks create different groups with the same call of new_group.", ""]
    for creation in (first, second):
        lines.append(f"  rank {creation.rank} creates the group of {ranks_text(creation.members)}")
        lines.append(f"      {creation.where}")
    rule = "every rank creates every group, also those it is not in, in the same order"
    return "\n".join([*lines, "", f"Try: {rule}; or use Mesh, which does."])


def different_message(sent: Operation, received: Operation) -> str:
    what = "dtype" if sent.dtypes != received.dtypes else "size"
    lines = [f"Mismatch: a message is sent and received with another {what}.", ""]
    for operation in (sent, received):
        lines += [f"  rank {operation.rank} calls {operation}", f"      {operation.where}"]
    return "\n".join([*lines, "", f"Try: receive into a tensor of the {what} that is sent."])


def wrong_buffer(operation: Operation, output: Tensor, result: Tensor) -> str:
    def text(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    what = f"receives {text(result)} from {operation} into a buffer of {text(output)}"
    lines = [f"Mismatch: rank {operation.rank} {what}.", f"      {operation.where}"]
    what = "dtype" if output.dtype != result.dtype else "size"
    return "\n".join([*lines, "", f"Try: give the buffer the {what} of what arrives."])


# ---- a rank that raised, a run that took too long ----


def raised(rank: int, error: BaseException, ranks: Sequence[RankStatus]) -> str:
    """``rank`` raised ``error``: its own traceback comes first, then where the others stand."""
    others = where_ranks_stand(ranks)
    return "\n".join([*traceback_of(rank, error), *(["", *others] if others else [])])


def traceback_of(rank: int, error: BaseException) -> list[str]:
    """What a rank raised, and the learner's lines on the way to it."""
    lines = [_headline(rank, error)]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_machinery(frame.filename)]
    for number, frame in enumerate(own):
        if number < MOST_FRAMES or number >= len(own) - MOST_FRAMES:
            lines.append(f"      {line_of(frame.filename, frame.lineno or 0, frame.name)}")
        elif number == MOST_FRAMES:
            lines.append(f"      ... {len(own) - 2 * MOST_FRAMES:,} calls left out ...")
    if frames and (not own or frames[-1] is not own[-1]):
        last = frames[-1]
        lines.append(f"      in {last.name} ({path_in_package(last.filename)}, line {last.lineno})")
    lines += [f"Try: {hint}" for pattern, hint in _HINTS if re.search(pattern, text_of(error), re.DOTALL)]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and type(cause).__name__ != "Stopped":
        lines.append(f"  while handling {type(cause).__name__}: {text_of(cause)}")
    return lines


def _headline(rank: int, error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"rank {rank} called sys.exit({error.code!r})"
    text = text_of(error)
    return f"rank {rank} raised {type(error).__name__}" + (f": {text}" if text else "")


def text_of(error: BaseException) -> str:
    """``str(error)``, also of an exception whose own ``__str__`` fails; a very long one is cut."""
    try:
        text = str(error)
    except Exception as failure:
        return f"(its text cannot be shown: __str__ raised {type(failure).__name__})"
    more = len(text) - LONGEST_MESSAGE
    return text if more <= 0 else f"{text[:LONGEST_MESSAGE]} ... (message cut, {more:,} more characters)"


Running = Sequence[tuple[int, Where]]  # ranks that were running, and where


def too_long(timeout_s: float, running: Running, ranks: Sequence[RankStatus]) -> str:
    lines = [f"The run took longer than its timeout_s={timeout_s:g} and was stopped.", ""]
    lines += where_all_were(running, ranks)
    if running:
        who, where = ranks_text([rank for rank, _ in running]), running[0][1]
        lines += ["", f"Try: look at {where.file}, line {where.line}: {who} came to no next communication."]
    return "\n".join(lines)


def where_all_were(running: Running, ranks: Sequence[RankStatus]) -> list[str]:
    at: dict[Where, list[int]] = {}
    for rank, where in running:
        at.setdefault(where, []).append(rank)
    lines = []
    for where, numbers in at.items():
        lines += [
            f"  {ranks_text(numbers)} {'was' if len(numbers) == 1 else 'were'} running",
            f"      {where}",
        ]
    return [*lines, *where_ranks_stand(ranks)]


def interrupted(running: Running, ranks: Sequence[RankStatus]) -> str:
    return "\n".join(["the ranks were stopped", "", *where_all_were(running, ranks)])


def unfinished(operations: Sequence[Operation]) -> list[str]:
    """What ranks began and left: a sentence for each, of a run that ended well otherwise."""
    notes = []
    for operation in operations:
        if math.isinf(operation.done_s):
            where = f"{operation.where.file}, line {operation.where.line}"
            if not operation.met:
                left = "and the other side never came"
            elif operation.kind == "send":
                continue
            else:
                left = "and never waited for it: its tensor still holds the old numbers"
            notes.append(f"rank {operation.rank} called {operation} ({where}), {left}.")
    return notes


def swapped(operations: Sequence[Operation]) -> list[str]:
    """Two collectives in a row that some ranks issue from two lines in one order and others in the other.

    If they look the same, nothing else betrays that each rank gets the other's numbers. Ranks may well
    call one collective from different lines, so only the same two lines in both orders are told, once.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Operation]]] = {}
    for operation in operations:
        if operation.kind not in ("send", "recv", "barrier"):
            ranks = groups.setdefault((operation.group, operation.members), {})
            ranks.setdefault(operation.rank, []).append(operation)
    notes: dict[frozenset[Where], str] = {}
    for ranks in groups.values():
        pairs: dict[tuple[int, Where, Where], list[Operation]] = {}  # by number and the two lines
        for issued in ranks.values():
            for first, second in itertools.pairwise(issued):
                alike = first.signature == second.signature and second.sequence == first.sequence + 1
                if alike and first.where != second.where:
                    pairs.setdefault((first.sequence, first.where, second.where), []).append(first)
        for (number, one, two), some in pairs.items():
            others = pairs.get((number, two, one))
            if others and frozenset((one, two)) not in notes:
                notes[frozenset((one, two))] = _in_both_orders(some, others, one, two)
    return list(notes.values())


def _in_both_orders(some: list[Operation], others: list[Operation], one: Where, two: Where) -> str:
    first = some[0]
    call, number = str(first).split(", #")[0], first.sequence
    orders = (
        f"{ranks_text([each.rank for each in ranks])} from line {a.line} and then from line {b.line}"
        for ranks, a, b in ((some, one, two), (others, two, one))
    )
    return (
        f"Is this order meant? #{number} and #{number + 1} on {first.group_text} are both {call}, called by "
        f"{', but by '.join(orders)}. If these lines are two different sums, their numbers are mixed up.\n"
        f"      {one}\n      {two}"
    )


def still_busy(stuck: Sequence[int]) -> str:
    """What is left of a run some of whose ranks did not stop."""
    if not stuck:
        return ""
    return (
        f"\n{ranks_text(list(stuck))} could not be stopped: busy in native code, or catching every exception."
    )
