"""What rank processes post for each other and for the launcher: a log per rank, and a board of words.

A rank appends everything it issues to its log, a file that it alone writes. The board is memory
that all processes share: for each rank a few whole numbers that it alone writes, one at a time, so
that a reader never sees half of one and nobody waits for anybody. What a reader has seen posted
stays posted; that is why looking at the board proves a deadlock.
"""

from __future__ import annotations

import mmap
import pickle
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lessons_lib.spmd.operation import Operation

Key = tuple[Any, ...]  # one side of an operation: its sort and place, and how many of these there were before

STARTING, RUNNING, ENDED, FAILED = -1, -2, -3, -4  # a status; any other: where in its log it waits
_STATUS, _POSTED, _CHANGES, _CLEANING, _READY, _WORDS = range(6)
_SIZES = struct.Struct("II")


@dataclass(frozen=True)
class Posted:
    """An operation as its rank has posted it."""

    operation: Operation
    outputs: tuple[tuple[tuple[int, ...], str], ...] = ()  # shapes and dtypes of what it is to receive


class Log:
    """What one rank has posted, as another process reads it."""

    def __init__(self, path: Path, keep: Callable[[Posted], bool]) -> None:
        self.counts: dict[Key, int] = {}  # how often it has issued what
        self._path, self._keep = path, keep
        self._file: Any = None
        self._read = 0
        self._lock = threading.Lock()
        self._posted: dict[Key, Posted] = {}
        self._last: Posted | None = None

    def find(self, key: Key) -> Posted | None:
        return self._posted.get(key)

    def forget(self, key: Key) -> None:
        self._posted.pop(key, None)

    def latest(self) -> Operation | None:
        return self._last.operation if self._last else None

    def at(self, place: int) -> tuple[Key, Any]:
        """The entry that begins at byte ``place``."""
        with self._lock:
            n_key, n_body = _SIZES.unpack(self._bytes(place, _SIZES.size))
            data = self._bytes(place + _SIZES.size, n_key + n_body)
        return pickle.loads(data[:n_key]), pickle.loads(data[n_key:])

    def catch_up(self, posted: int) -> Log:
        """Read on to byte ``posted``."""
        if posted > self._read:
            with self._lock:
                data = self._bytes(self._read, posted - self._read)
                at, self._read = 0, self._read + len(data)
                while at < len(data):
                    n_key, n_body = _SIZES.unpack_from(data, at)
                    key_at, body_at = at + _SIZES.size, at + _SIZES.size + n_key
                    at = body_at + n_body
                    self._take(pickle.loads(data[key_at:body_at]), pickle.loads(data[body_at:at]))
        return self

    def _take(self, key: Key, entry: Any) -> None:
        if key:
            *count, number = key
            self.counts[tuple(count)] = number
        if isinstance(entry, Posted):
            self._last = entry if entry.operation.kind != "new_group" else self._last
            if self._keep(entry):
                self._posted[key] = entry

    def _bytes(self, place: int, n_bytes: int) -> bytes:
        if self._file is None:
            self._file = self._path.open("rb", buffering=0)
        self._file.seek(place)
        return self._file.read(n_bytes)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class Look:
    """What the board says at one moment: a status and the number of its changes for every rank."""

    status: tuple[int, ...]
    changes: tuple[int, ...] = field(default=())

    @property
    def waiting(self) -> list[int]:
        return [rank for rank, status in enumerate(self.status) if status >= 0]

    @property
    def nobody_runs(self) -> bool:
        return not any(status in (STARTING, RUNNING) for status in self.status)


class Board:
    """The words and logs of all ranks, in a folder of the run. ``reader`` is the rank that looks."""

    def __init__(self, folder: Path, n_ranks: int, reader: int | None = None) -> None:
        path = folder / "board"
        if reader is None:
            path.write_bytes(struct.pack(f"{_WORDS}q", STARTING, 0, 0, -1, 0) * n_ranks)
            for rank in range(n_ranks):
                self.log_path(folder, rank).touch()
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._memory).cast("q")
        self.n_ranks, self._reader = n_ranks, reader
        self._logs = [Log(self.log_path(folder, rank), self._keep) for rank in range(n_ranks)]

    @staticmethod
    def log_path(folder: Path, rank: int) -> Path:
        return folder / f"log-{rank}"

    def _keep(self, entry: Posted) -> bool:
        """Whether this reader may ever look it up."""
        operation = entry.operation
        if self._reader is None or operation.kind == "new_group":
            return True
        return self._reader in operation.members and operation.peer in (None, self._reader)

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        for log in self._logs:
            log.close()

    def write(self, rank: int, word: int, value: int) -> None:
        self._words[rank * _WORDS + word] = value

    def read(self, rank: int, word: int) -> int:
        return self._words[rank * _WORDS + word]

    def log(self, rank: int) -> Log:
        return self._logs[rank].catch_up(self.read(rank, _POSTED))

    def status(self, rank: int) -> int:
        return self.read(rank, _STATUS)

    def look(self) -> Look:
        changes = tuple(self.read(rank, _CHANGES) for rank in range(self.n_ranks))
        return Look(tuple(self.status(rank) for rank in range(self.n_ranks)), changes)

    def all_ready_ns(self) -> int | None:
        """When the last rank became ready to begin, if all are."""
        ready = [self.read(rank, _READY) for rank in range(self.n_ranks)]
        return max(ready) if all(ready) else None

    def waits_in(self, rank: int) -> tuple[Key, Operation] | None:
        """The operation that a rank waits in."""
        status = self.status(rank)
        if status < 0:
            return None
        key, entry = self._logs[rank].at(status)
        return key, entry.operation

    def cleaning_up(self, rank: int) -> str:
        """The exception that was in flight when ``rank`` began to wait, as the doctor tells it."""
        place = self.read(rank, _CLEANING)
        return "" if place < 0 else self._logs[rank].at(place)[1]

    def missing(self, rank: int, key: Key, operation: Operation) -> tuple[int, ...]:
        """The ranks that ``rank`` waits for in an operation and that have not posted their side."""
        if key[0] in ("collective", "new_group"):
            *count, number = key
            return tuple(
                member
                for member in operation.members
                if self.log(member).counts.get(tuple(count), 0) < number
            )
        kind, name, sender, receiver, tag, number = key
        others = tuple(member for member in operation.members if member != rank)
        if kind == "send":
            assert operation.peer is not None
            counts = self.log(operation.peer).counts
            met = counts.get(("recv", name, sender, receiver, tag), 0) >= number
            return () if met or self._from_anyone(counts, name, receiver, tag) else (operation.peer,)
        if operation.peer is not None:
            sent = self.log(operation.peer).counts.get(("send", name, sender, receiver, tag), 0)
            return () if sent >= number else (operation.peer,)
        received = self.log(rank).counts  # from anyone: messages that nothing else has received
        on_the_way = 0
        for index, member in enumerate(operation.members):
            where = (name, index, receiver, tag)
            sent = self.log(member).counts.get(("send", *where), 0)
            on_the_way += max(0, sent - received.get(("recv", *where), 0))
        before = received.get(("resolved", name, None, receiver, tag), 0)
        return () if on_the_way >= number - before else others

    @staticmethod
    def _from_anyone(counts: dict[Key, int], name: str, receiver: int, tag: int) -> bool:
        """Whether a receive from anyone is open: it may be for any message."""
        where = (name, None, receiver, tag)
        return counts.get(("recv", *where), 0) > counts.get(("resolved", *where), 0)


class Poster:
    """One rank's pen: its log, and its words on the board."""

    def __init__(self, board: Board, folder: Path, rank: int) -> None:
        self.board, self.rank = board, rank
        self.counts: dict[Key, int] = {}
        self._file = board.log_path(folder, rank).open("ab", buffering=0)
        self._length = 0
        self._lock = threading.Lock()  # threads of the learner may communicate, too

    def issue(self, count: Key, entry: Posted | None) -> tuple[Key, int]:
        """Post a new operation; returns the key under which others find it, and its place in the log."""
        with self._lock:
            number = self.counts[count] = self.counts.get(count, 0) + 1
            key = (*count, number)
            return key, self._append(key, entry)

    def waits(self, place: int, cleaning_up: str = "") -> None:
        """Say that this rank waits in the operation at ``place`` of its log."""
        with self._lock:
            self._word(_CLEANING, self._append((), cleaning_up) if cleaning_up else -1)
            self._status(place)

    def status(self, status: int) -> None:
        with self._lock:
            self._status(status)

    def close(self) -> None:
        self._file.close()

    def ready(self, at_ns: int) -> None:
        self._word(_READY, at_ns)

    def _status(self, status: int) -> None:
        self._word(_STATUS, status)
        self._word(_CHANGES, self.board.read(self.rank, _CHANGES) + 1)

    def _append(self, key: Key, entry: Any) -> int:
        body, name = pickle.dumps(entry, protocol=5), pickle.dumps(key, protocol=5)
        place = self._length
        data = _SIZES.pack(len(name), len(body)) + name + body
        self._length += self._file.write(data)
        self._word(_POSTED, self._length)
        return place

    def _word(self, word: int, value: int) -> None:
        self.board.write(self.rank, word, value)
