"""What every rank did: each communication with its bytes, its waiting and its line of code."""

from __future__ import annotations

import linecache
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from lessons_lib.timeline import COLLECTIVES, Event, Message, Span, Timeline, Traffic, Where, elements_sent

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(torch.__file__)
_WRAPPERS = ("contextlib.py", "threading.py", "typing_extensions.py")  # of torch's deprecated functions


def is_machinery(file: str) -> bool:
    """Whether a file belongs to torch, to this library or to the interpreter, not to the learner."""
    return file.startswith((_LIBRARY, _TORCH, "<")) or file.endswith(_WRAPPERS)


def display_name(file: str) -> str:
    """A notebook cell's ``Cell In[3]`` for the file name IPython gave it; other names as they are."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    named = shell.compile.format_code_name(file) if shell else None
    if named:
        return " ".join(named)
    nearby = os.path.relpath(file) if os.path.isabs(file) else file
    return file if nearby.startswith("..") else nearby


def line_of(file: str, line: int, function: str) -> Where:
    return Where(display_name(file), line, function, linecache.getline(file, line).strip())


class LineFinder:
    """Finds the learner's line behind a call; keeps what it has found, since loops repeat it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, int], Where] = {}

    def here(self) -> Where:
        """The innermost line that is neither torch's nor ours; if there is none, ours."""
        frame: FrameType | None = sys._getframe(1)
        ours: FrameType | None = None
        while frame is not None:
            file = frame.f_code.co_filename
            if not is_machinery(file):
                return self._where(frame)
            if ours is None and file.startswith(_LIBRARY) and f"{os.sep}spmd{os.sep}" not in file:
                ours = frame
            frame = frame.f_back
        return self._where(ours) if ours is not None else Where("?", 0, "?")

    def _where(self, frame: FrameType) -> Where:
        key = frame.f_code, frame.f_lineno
        if key not in self._known:
            self._known[key] = line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        return self._known[key]


@dataclass(slots=True)
class Operation:
    """A communication under way, as one rank issued it; :meth:`event` is its lasting record."""

    rank: int
    kind: str
    group: str
    members: tuple[int, ...]
    sequence: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    n_elements: int
    bytes_sent: int
    issued_s: float
    where: Where
    region: str
    peer: int | None = None
    root: int | None = None  # index in the group
    detail: str = ""  # the reduction, the tag: what else ranks must agree on
    met: bool = False  # whether the other side came: before that, nothing is sent
    done_s: float = math.inf
    waited_s: float = 0.0

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the ranks of a collective must agree on. In an all-to-all each cuts as it likes."""
        shapes = None if self.kind == "all_to_all" else self.shapes
        return self.kind, shapes, self.dtype, self.root, self.detail

    def __str__(self) -> str:
        tensors = ", ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes)
        root = f"root={self.members[self.root]}" if self.root is not None else ""
        inside = ", ".join(part for part in (tensors, root, self.detail) if part)
        return f"{self.kind}({inside})"

    def event(self) -> Event:
        return Event(
            rank=self.rank,
            kind=self.kind,
            group=self.group,
            members=self.members,
            sequence=self.sequence,
            shape=self.shapes[0] if self.shapes else (),
            dtype=self.dtype,
            n_elements=self.n_elements,
            bytes_sent=self.bytes_sent if self.met else 0,
            issued_s=self.issued_s,
            done_s=self.done_s,
            waited_s=self.waited_s,
            where=self.where,
            peer=self.peer,
            region=self.region,
        )


def bytes_by_ring(
    kind: str, n_elements: int, element_size: int, members: tuple[int, ...], index: int, root: int | None
) -> int:
    return element_size * elements_sent(kind, n_elements, len(members), index, root or 0)


@dataclass(frozen=True)
class Trace:
    """Every communication of a run, in the order in which it was issued."""

    n_ranks: int
    events: tuple[Event, ...]
    ended_s: tuple[float, ...] = field(default=(), repr=False)  # when each rank ended, on its clock
    clock: str = "measured"

    def bytes_sent(self, rank: int, region: str | None = None) -> int:
        """Bytes that ``rank`` sent, by the ring convention; inside ``region`` only, if one is named."""
        return sum(event.bytes_sent for event in self._of(rank, region))

    def collectives(self, rank: int, region: str | None = None) -> list[Event]:
        """The collectives of ``rank``, in order."""
        return [event for event in self._of(rank, region) if event.kind in COLLECTIVES]

    def _of(self, rank: int, region: str | None) -> Iterable[Event]:
        if not 0 <= rank < self.n_ranks:
            raise ValueError(
                f"rank {rank} is none of this run's {self.n_ranks} ranks (0 to {self.n_ranks - 1})"
            )
        return (
            event
            for event in self.events
            if event.rank == rank and (region is None or region in event.region.split("/"))
        )

    @property
    def traffic(self) -> Traffic:
        return Traffic.of(self.events, self.n_ranks)

    @property
    def timeline(self) -> Timeline:
        """Each rank's work, waiting and communication on one axis; messages as arrows."""
        spans: list[Span] = []
        free_since = [0.0] * self.n_ranks  # until when a rank's lane is filled
        ended = list(self.ended_s)
        horizon = max((*ended, *(event.issued_s for event in self.events)), default=0.0)
        waits = [event for event in self.events if event.waited_s > 0]
        for event in sorted(waits, key=lambda event: (event.done_s, event.issued_s)):
            rank = event.rank
            if math.isinf(event.waited_s):  # the rank stood in it when the run was stopped
                since, until = max(event.issued_s, free_since[rank]), horizon
                which = f"{event.kind} #{event.sequence} on {event.group}"
                label = f"waits in {which} for ever; {event.where}"
                ended[rank] = until
            else:
                since, until = max(event.done_s - event.waited_s, free_since[rank]), event.done_s
                label = f"waits in {event.kind}"
            if since > free_since[rank]:
                spans.append(Span(rank, free_since[rank], since, "compute", event.region))
            spans.append(Span(rank, since, until, "wait", label))
            free_since[rank] = until
        for event in self.events:
            if math.isfinite(event.done_s):
                label = f"{event.kind} #{event.sequence} on {event.group}, {event.bytes_sent:,} bytes sent"
                done = event.done_s
                spans.append(Span(event.rank, done, done, event.kind, f"{label}; {event.where}"))
        for rank, end in enumerate(ended):
            if end > free_since[rank]:
                spans.append(Span(rank, free_since[rank], end, "compute"))
        return Timeline(self.n_ranks, tuple(spans), tuple(self._messages()), self.clock)

    def _messages(self) -> Iterable[Message]:
        """Pair each recv with its send: the k-th between two ranks on a group belong together."""
        sends = {
            (event.group, event.members, event.rank, event.peer, event.sequence): event
            for event in self.events
            if event.kind == "send"
        }
        for event in self.events:
            if event.kind == "recv" and event.peer is not None:
                sent = sends.get((event.group, event.members, event.peer, event.rank, event.sequence))
                if sent is not None and math.isfinite(event.done_s):
                    label = f"{sent.bytes_sent:,} bytes from rank {event.peer} to rank {event.rank}"
                    yield Message(event.peer, sent.issued_s, event.rank, event.done_s, label)
