"""The records that everything else produces, prices, draws or judges.

Ranks that communicate leave :class:`Event` records; a :class:`Timeline` of :class:`Span` and
:class:`Message` records is what gets drawn, whether it was measured on ranks or computed from a
schedule; :class:`Traffic` adds events up. Nothing here knows where ranks run, and nothing but the
standard library is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from lessons_lib.errors import RefusedError

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)


@dataclass(frozen=True, slots=True)
class Where:
    """A line of the learner's code. ``file`` is a path, or the name of a notebook cell."""

    file: str
    line: int
    function: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, in {self.function}: {self.source}".rstrip(": ")


@dataclass(frozen=True, slots=True)
class Event:
    """One communication, as one rank saw it.

    Times are seconds on the clock of that rank (``Timeline.clock`` says which clock):
    ``issued_s`` when it called the operation, ``done_s`` when it had the result, and ``waited_s``
    how long it stood still in between. ``done_s`` is infinite if it never had it, and so is
    ``waited_s`` if it stood in the operation when the run was stopped.
    """

    rank: int
    kind: str  # a name in COLLECTIVES, "send" or "recv"
    group: str  # "world", or how the group calls itself
    members: tuple[int, ...]  # global ranks, in group order
    sequence: int  # this is the sequence-th operation of its sort on the group, from 1
    shape: tuple[int, ...]
    dtype: str
    n_elements: int
    bytes_sent: int  # by the ring convention, see elements_sent
    issued_s: float
    done_s: float
    waited_s: float
    where: Where
    peer: int | None = None  # global rank of the other side of a send or recv
    region: str = ""
    pieces: tuple[int, ...] = ()  # bytes for each member, where they go straight there: see sent_to

    @property
    def is_collective(self) -> bool:
        return self.kind in COLLECTIVES

    @property
    def sent_to(self) -> dict[int, int]:
        """Bytes for each global rank that got any: together ``bytes_sent``.

        A send goes to its peer. An all-to-all, a gather and a scatter go straight to the members they
        are for; all other collectives go to the next member of the ring.
        """
        if self.pieces:
            return {rank: n for rank, n in zip(self.members, self.pieces, strict=True) if n}
        if not self.bytes_sent:
            return {}
        if self.peer is not None:
            return {self.peer: self.bytes_sent}
        following = (self.members.index(self.rank) + 1) % len(self.members)
        return {self.members[following]: self.bytes_sent}


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank that stands still in a run that cannot go on."""

    rank: int
    operation: str
    group: str
    sequence: int
    missing: tuple[int, ...]  # global ranks it waits for
    where: Where


@dataclass(frozen=True, slots=True)
class Span:
    """Something a rank did from ``start`` to ``end``.

    ``kind`` decides the colour: ``"compute"``, ``"wait"``, the kind of a communication, or a
    schedule's ``"F"``, ``"B"``, ``"I"``, ``"W"``.
    """

    rank: int
    start: float
    end: float
    kind: str
    label: str = ""  # for a hover title


@dataclass(frozen=True, slots=True)
class Message:
    """An arrow from one rank's lane to another's."""

    source: int
    sent: float
    destination: int
    received: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What ``n_ranks`` ranks did, on one time axis.

    ``clock`` names the axis and goes into every title: ``"measured"`` or ``"virtual"``.
    """

    n_ranks: int
    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    clock: str = "measured"

    @property
    def makespan(self) -> float:
        """When the last rank ends."""
        return max((span.end for span in self.spans), default=0.0)

    def end_of(self, rank: int) -> float:
        """When ``rank`` ends."""
        return max((span.end for span in self.spans if span.rank == rank), default=0.0)


def elements_sent(kind: str, n_elements: int, n_ranks: int, rank: int, root: int = 0) -> int:
    """Elements one rank of a group sends in a collective, by the ring convention.

    >>> [elements_sent("all_reduce", 12, 4, rank) for rank in range(4)]     # 2 (p-1)/p n
    [18, 18, 18, 18]
    >>> [elements_sent("all_gather", 10, 4, rank) for rank in range(4)]     # chunks of 3, 3, 2, 2
    [7, 8, 8, 7]
    >>> [elements_sent("broadcast", 12, 4, rank, root=1) for rank in range(4)]
    [0, 12, 12, 12]

    ``n_elements`` is the whole buffer: what an all-gather ends with, what a reduce-scatter starts
    from, what every rank holds otherwise. ``rank`` and ``root`` are indices in the group. A ring
    cuts the buffer into chunks as ``torch.tensor_split`` does, so ranks differ by a chunk where
    ``n_ranks`` does not divide it; the sum over ranks is the closed form times ``n_ranks`` always.

    A reduce-scatter leaves chunk r on rank r, which is the one chunk rank r never sends. An
    all-gather starts from there, and rank r never sends the chunk of its right neighbour. An
    all-reduce is both. Broadcast and reduce are chains along the ring: the last rank of a
    broadcast sends nothing, nor does the root of a reduce. Gather and scatter go straight to and
    from the root. A barrier carries no data. Source: Patarasuk and Yuan 2009, section 3.
    """
    if n_ranks == 1 or kind == "barrier":
        return 0
    small, larger = divmod(n_elements, n_ranks)

    def chunk(index: int) -> int:
        return small + (index % n_ranks < larger)

    if kind == "reduce_scatter" or kind == "all_to_all":
        return n_elements - chunk(rank)
    if kind == "all_gather":
        return n_elements - chunk(rank + 1)
    if kind == "all_reduce":
        return 2 * n_elements - chunk(rank) - chunk(rank + 1)
    if kind == "broadcast":
        return 0 if (rank + 1) % n_ranks == root else n_elements
    if kind == "reduce":
        return 0 if rank == root else n_elements
    if kind == "gather":
        return 0 if rank == root else chunk(rank)
    if kind == "scatter":
        return n_elements - chunk(root) if rank == root else 0
    raise RefusedError(f"no ring convention for {kind!r}; known: {', '.join(COLLECTIVES)}")


def ring_traffic(kind: str, n_elements: int, n_ranks: int) -> int | Fraction:
    """Elements per rank of a collective in closed form: the mean of :func:`elements_sent`.

    >>> ring_traffic("all_reduce", 12, 4), ring_traffic("all_gather", 10, 4)
    (18, Fraction(15, 2))
    """
    total = sum(elements_sent(kind, n_elements, n_ranks, rank) for rank in range(n_ranks))
    return total // n_ranks if total % n_ranks == 0 else Fraction(total, n_ranks)


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Calls of one kind on groups of one name, added up."""

    kind: str
    group: str
    calls: tuple[int, ...]  # one entry per rank
    bytes_sent: tuple[int, ...]  # one entry per rank


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who sent how much: one row per kind and group, one column per rank.

    ``between[source][destination]`` are the bytes that went from one rank to another, in all.
    """

    n_ranks: int
    rows: tuple[TrafficRow, ...] = field(default=())
    between: tuple[tuple[int, ...], ...] = field(default=())

    @classmethod
    def of(cls, events: Iterable[Event], n_ranks: int) -> Traffic:
        calls: dict[tuple[str, str], list[int]] = {}
        sent: dict[tuple[str, str], list[int]] = {}
        between = [[0] * n_ranks for _ in range(n_ranks)]
        for event in events:
            key = event.kind, event.group
            calls.setdefault(key, [0] * n_ranks)[event.rank] += 1
            sent.setdefault(key, [0] * n_ranks)[event.rank] += event.bytes_sent
            for destination, n_bytes in event.sent_to.items():
                between[event.rank][destination] += n_bytes
        rows = tuple(TrafficRow(*key, tuple(calls[key]), tuple(sent[key])) for key in calls)
        return cls(n_ranks, rows, tuple(map(tuple, between)))

    def bytes_sent(self, rank: int) -> int:
        return sum(row.bytes_sent[rank] for row in self.rows)


def one_or_range(numbers: Sequence[int]) -> str:
    """``"6"`` where all agree, else ``"4 to 6"``: how tables show one number per rank.

    >>> one_or_range([6, 6]), one_or_range([4, 6, 5])
    ('6', '4 to 6')
    """
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


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
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
