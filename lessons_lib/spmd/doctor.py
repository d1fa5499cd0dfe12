"""Says why a run cannot go on: which rank waits in which operation, for whom, at which line.

Pure text from the state of a :class:`~lessons_lib.spmd.threads.World`; decides nothing.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lessons_lib.errors import RankError, RunTimeoutError
from lessons_lib.spmd.trace import Operation, is_machinery, line_of
from lessons_lib.timeline import Waiting, Where

if TYPE_CHECKING:
    from torch import Tensor

    from lessons_lib.spmd.threads import Rank, World

LONGEST_MESSAGE = 4_000
MOST_FRAMES = 10  # lines of a traceback shown at either end: a recursion has a thousand

# What a message of torch means for somebody whose ranks were started by run.
_HINTS = (
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


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0 and 3``, ``ranks 0 to 6``.

    >>> ranks_text([2]), ranks_text([0, 3]), ranks_text([0, 1, 2, 3, 5])
    ('rank 2', 'ranks 0 and 3', 'ranks 0 to 3 and 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        part
        for run in runs
        for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run])
    ]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def count(number: int, thing: str) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def group_text(operation: Operation) -> str:
    """``world``; ``group tp (ranks 0 and 1)``; ``group of ranks 0 and 3``."""
    if operation.group == "world":
        return "world"
    if operation.group.startswith("ranks "):
        return f"the group of {ranks_text(operation.members)}"
    return f"group {operation.group} ({ranks_text(operation.members)})"


def operation_text(operation: Operation) -> str:
    if operation.kind == "send":
        return f"{operation} to rank {operation.peer}"
    if operation.kind == "recv":
        return f"{operation} from {'any rank' if operation.peer is None else f'rank {operation.peer}'}"
    return f"{operation}, #{operation.sequence} on {group_text(operation)}"


# ---- standing still ----


def waiting(world: World) -> tuple[Waiting, ...]:
    """What every rank that stands still waits for, those left out whose wait has just ended."""
    return tuple(
        Waiting(
            rank.number,
            operation_text(rank.waits_for.operation),
            rank.waits_for.operation.group,
            rank.waits_for.operation.sequence,
            rank.waits_for.missing(),
            rank.waits_for.operation.where,
        )
        for rank in world.ranks
        if rank.state == "waiting" and not rank.may_go_on()
    )


def deadlock(world: World) -> str:
    waits = waiting(world)
    still = [wait.rank for wait in waits]
    verb = "waits" if len(still) == 1 else "wait"
    lines = [f"Deadlock: {ranks_text(still)} of {len(world.ranks)} {verb}, and no rank can go on.", ""]
    lines += standing_ranks(world)
    lines += ["", *_diagnosis(waits, world)]
    return "\n".join(lines)


def standing_ranks(world: World) -> list[str]:
    """Where every rank is, those that do the same together."""
    same: dict[Any, list[int]] = {}
    for wait in waiting(world):
        same.setdefault((wait.operation, wait.missing, wait.where), []).append(wait.rank)
    lines = []
    for (operation, missing, where), ranks in same.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        whom = ranks_text(missing) if missing else "the others"
        lines += [f"  {ranks_text(ranks)} {verb} for {whom} in {operation}", f"      {where}"]
    for rank in world.ranks:
        if rank.state == "done":
            last = next((o for o in reversed(world.operations) if o.rank == rank.number), None)
            lines.append(
                f"  rank {rank.number} has returned"
                + (
                    f"; its last communication was {operation_text(last)}"
                    if last
                    else " without communicating"
                )
            )
            if last:
                lines.append(f"      {last.where}")
    return lines


def _diagnosis(waits: Sequence[Waiting], world: World) -> list[str]:
    """The reason in one sentence, and the way out in another."""
    cycle = find_cycle({wait.rank: wait.missing for wait in waits})
    gone = sorted({m for wait in waits for m in wait.missing if world.ranks[m].state == "done"})
    by_rank = {wait.rank: wait for wait in waits}
    if gone:
        waited_for = next(wait for wait in waits if set(wait.missing) & set(gone))
        missing = [rank for rank in gone if rank in waited_for.missing]
        verb = "has" if len(missing) == 1 else "have"
        kind = waited_for.operation.split("(")[0]
        never, remedy = {
            "send": ("receive it", "pair every send with a recv on the other side."),
            "recv": ("send it", "pair every recv with a send on the other side."),
        }.get(
            kind,
            (
                f"join {kind} #{waited_for.sequence}",
                "let every rank of the group make the same calls in the same order.",
            ),
        )
        return [f"Why: {ranks_text(missing)} {verb} returned and will never {never}.", f"Try: {remedy}"]
    if cycle:
        path = " -> ".join(str(rank) for rank in [*cycle, cycle[0]])
        kinds = {by_rank[rank].operation.split("(")[0] for rank in cycle}
        if kinds == {"send"}:
            remedy = "let one of them receive first, or use isend or batch_isend_irecv and wait afterwards."
        elif kinds == {"recv"}:
            remedy = "let one of them send first: every one waits for a message that nobody has sent yet."
        else:
            remedy = "bring the calls of these ranks into the same order."
        return [f"Why: each waits for the next in the cycle {path}.", f"Try: {remedy}"]
    return ["Why: what they wait for is never called.", "Try: pair every call with its other side."]


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


def cleaning_up(world: World) -> str:
    """Exceptions in flight in ranks that communicate while cleaning up: what went wrong first."""
    lines = []
    for rank in world.ranks:
        if rank.cleaning_up_after is not None:
            lines += [*_report_of(rank, rank.cleaning_up_after), ""]
            lines += [f"Cleaning up after that, rank {rank.number} began a communication of its own.", "", ""]
    return "\n".join(lines)


# ---- disagreement ----


def disagreement(world: World) -> str:
    """The first collective under way whose ranks disagree, or nothing."""
    for meeting in world.meetings.values():
        text = disagreement_in(meeting.operations.values())
        if text:
            missing = meeting.missing(next(iter(meeting.operations.values())).members)
            return f"{text}\n  {ranks_text(missing)} did not arrive" if missing else text
    return ""


def disagreement_in(operations: Iterable[Operation]) -> str:
    """How the ranks of one collective disagree, or nothing."""
    every = list(operations)
    if len({operation.signature for operation in every}) < 2:
        return ""
    first = every[0]
    what = _what_differs(every)
    which = f"collective #{first.sequence} on {group_text(first)}"
    lines = [f"Mismatch: the ranks disagree about the {what} of {which}.", ""]
    same: dict[Any, list[int]] = {}
    for operation in every:
        same.setdefault((str(operation), operation.where), []).append(operation.rank)
    for (text, where), ranks in same.items():
        verb = "calls" if len(ranks) == 1 else "call"
        lines += [f"  {ranks_text(ranks)} {verb} {text}", f"      {where}"]
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
        ("dtype", lambda o: o.dtype),
        ("shape", lambda o: o.shapes),
    ):
        if len({of(operation) for operation in operations}) > 1:
            return name
    return "reduction"


def different_groups(first: tuple[Any, ...], second: tuple[Any, ...]) -> str:
    (members, rank, where), (other_members, other_rank, other_where) = first, second
    return "\n".join([
        "Mismatch: the ranks create different groups with the same call of new_group.",
        "",
        f"  rank {rank} creates the group of {ranks_text(members)}",
        f"      {where}",
        f"  rank {other_rank} creates the group of {ranks_text(other_members)}",
        f"      {other_where}",
        "",
        "Try: every rank creates every group, also those it is not in, in the same order; "
        "or use Mesh, which does.",
    ])  # fmt: skip


def different_message(sent: Operation, received: Operation) -> str:
    what = "dtype" if sent.dtype != received.dtype else "size"
    return "\n".join([
        f"Mismatch: a message is sent and received with another {what}.",
        "",
        f"  rank {sent.rank} calls {operation_text(sent)}",
        f"      {sent.where}",
        f"  rank {received.rank} calls {operation_text(received)}",
        f"      {received.where}",
        "",
        f"Try: receive into a tensor of the {what} that is sent.",
    ])  # fmt: skip


def wrong_buffer(operation: Operation, output: Tensor, result: Tensor) -> str:
    def text(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    return "\n".join([
        f"Mismatch: rank {operation.rank} receives {text(result)} from {operation_text(operation)} "
        f"into a buffer of {text(output)}.",
        f"      {operation.where}",
        "",
        "Try: make the buffer as large as what arrives.",
    ])  # fmt: skip


# ---- a rank that raised, a run that took too long ----


def raised(world: World, rank: Rank, error: BaseException) -> RankError:
    """The error of a run in which ``rank`` raised ``error``: its own traceback comes first."""
    lines = _report_of(rank, error)
    others = standing_ranks(world)
    if others:
        lines += ["", *others]
    return RankError.of(rank.number, error, "\n".join(lines))


def _report_of(rank: Rank, error: BaseException) -> list[str]:
    name = type(error).__name__
    if isinstance(error, SystemExit):
        headline = f"rank {rank.number} called sys.exit({error.code!r})"
    else:
        message = shortened(text_of(error))
        headline = (
            f"rank {rank.number} raised {name}: {message}" if message else f"rank {rank.number} raised {name}"
        )
    lines = [headline]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_machinery(frame.filename)]
    for number, frame in enumerate(own):
        if number < MOST_FRAMES or number >= len(own) - MOST_FRAMES:
            lines.append(f"      {line_of(frame.filename, frame.lineno or 0, frame.name)}")
        elif number == MOST_FRAMES:
            lines.append(f"      ... {len(own) - 2 * MOST_FRAMES:,} calls left out ...")
    if frames and (not own or frames[-1] is not own[-1]):
        last = frames[-1]
        lines.append(f"      in {last.name} ({'/'.join(last.filename.split('/')[-3:])}, line {last.lineno})")
    for pattern, hint in _HINTS:
        if re.search(pattern, text_of(error)):
            lines.append(f"Try: {hint}")
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and type(cause).__name__ != "Stopped":
        lines.append(f"  while handling {type(cause).__name__}: {shortened(text_of(cause))}")
    return lines


def text_of(error: BaseException) -> str:
    """``str(error)``, also of an exception whose own ``__str__`` fails."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be shown: __str__ raised {type(failure).__name__})"


def shortened(message: str) -> str:
    if len(message) <= LONGEST_MESSAGE:
        return message
    return (
        f"{message[:LONGEST_MESSAGE]} ... (message cut, {len(message) - LONGEST_MESSAGE:,} more characters)"
    )


def too_long(world: World, timeout_s: float) -> RunTimeoutError:
    running = [rank.number for rank in world.ranks if rank.state == "running"]
    lines = [f"The run took longer than its timeout_s={timeout_s:g} and was stopped.", ""]
    for rank in world.ranks:
        if rank.state == "running":
            lines += [f"  rank {rank.number} was running", f"      {_line_of_thread(rank)}"]
    lines += standing_ranks(world)
    if running:
        lines += [
            "",
            f"Try: look at the line above; {ranks_text(running)} did not come to a next communication.",
        ]
    return RunTimeoutError("\n".join(lines))


def still_busy(stuck: Sequence[Rank]) -> str:
    """What is left of a run whose ranks could not be stopped."""
    if not stuck:
        return ""
    who = ranks_text([rank.number for rank in stuck])
    return f"\n{who} could not be stopped inside native code and will end when that call returns."


def _line_of_thread(rank: Rank) -> Where:
    frame = sys._current_frames().get(rank.thread.ident if rank.thread and rank.thread.ident else -1)
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return Where("?", 0, "?")
    return line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
