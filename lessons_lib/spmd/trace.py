"""What every rank did: each communication with its bytes, its waiting and its line of code."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lessons_lib.errors import RefusedError
from lessons_lib.timeline import COLLECTIVES, Event, Message, Span, Timeline, Traffic


@dataclass(frozen=True)
class Trace:
    """Every communication of a run, in the order in which it was issued."""

    n_ranks: int
    events: tuple[Event, ...]
    ended_s: tuple[float, ...] = field(default=(), repr=False)  # when each rank ended, on its clock
    clock: str = "measured"
    flops: tuple[dict[str, int], ...] = field(default=(), repr=False)  # of each rank, by region
    live_bytes: tuple[list[tuple[float, int]], ...] = field(default=(), repr=False)  # of each rank

    def bytes_sent(self, rank: int, region: str | None = None) -> int:
        """Bytes that ``rank`` sent, by the ring convention; inside ``region`` only, if one is named."""
        return sum(event.bytes_sent for event in self._of(rank, region))

    def collectives(self, rank: int, region: str | None = None) -> list[Event]:
        """The collectives of ``rank``, in order."""
        return [event for event in self._of(rank, region) if event.kind in COLLECTIVES]

    def flops_of(self, rank: int, region: str | None = None) -> int:
        """Floating point operations of ``rank``; for a run with ``record="flops"``."""
        if not self.flops:
            raise RefusedError('FLOPs were not recorded. Try run(..., record="flops").')
        self._check(rank)
        return sum(n for where, n in self.flops[rank].items() if region is None or region in where.split("/"))

    def peak_bytes(self, rank: int) -> int:
        """The most memory that tensors of ``rank`` held at once; for a run with ``record="memory"``."""
        if not self.live_bytes:
            raise RefusedError('Memory was not recorded. Try run(..., record="memory").')
        self._check(rank)
        return max(n_bytes for _, n_bytes in self.live_bytes[rank])

    def save_chrome(self, path: str | Path) -> None:
        """Save the timeline in the format that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        events: list[dict[str, Any]] = []
        for rank in range(self.n_ranks):
            events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
            for lane, name in enumerate(("work and waiting", "communication")):
                events.append(
                    {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
                )
        for span in self.timeline.spans:
            lane = 0 if span.kind in ("compute", "wait") else 1
            events.append(
                {
                    "ph": "X",
                    "pid": span.rank,
                    "tid": lane,
                    "name": span.kind,
                    "ts": span.start * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"label": span.label},
                }
            )
        for number, message in enumerate(self.timeline.messages):
            ends = (("s", message.source, message.sent), ("f", message.destination, message.received))
            for phase, rank, at in ends:
                event = {"ph": phase, "id": number, "pid": rank, "tid": 1, "ts": at * 1e6, "name": "message"}
                events.append(event | ({"bp": "e"} if phase == "f" else {}))
        for rank, curve in enumerate(self.live_bytes):
            for at, n_bytes in curve:
                events.append(
                    {"ph": "C", "pid": rank, "name": "memory", "ts": at * 1e6, "args": {"bytes": n_bytes}}
                )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.n_ranks:
            raise RefusedError(
                f"rank {rank} is none of this run's {self.n_ranks} ranks (0 to {self.n_ranks - 1})"
            )

    def _of(self, rank: int, region: str | None) -> Iterable[Event]:
        self._check(rank)
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
