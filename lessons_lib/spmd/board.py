"""A board in shared memory on which rank processes post what they do, for each other and the launcher.

Every rank has a slot that it alone writes. A reader never waits for a writer: the slot begins with
a number that is odd while it is written, and a reader that saw it change reads again.
"""

from __future__ import annotations

import mmap
import pickle
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lessons_lib.spmd.doctor import Creation
from lessons_lib.spmd.operation import Operation

SLOT = 1 << 17  # bytes of a rank
RECENT = 32  # operations of a rank that can be looked up
_HEADER = 16  # bytes before the notice: two words, its version and its size

Key = tuple[Any, ...]  # names one side of an operation, see ProcessGroup


@dataclass
class Notice:
    """What a rank has posted."""

    state: str = "starting"  # starting, running, waiting, ended
    waits_for: Key = ()
    counts: dict[Key, int] = field(default_factory=dict)  # how often it has issued what
    groups: dict[str, Creation] = field(default_factory=dict)
    recent: list[bytes] = field(default_factory=list)  # (key, operation, when it is ready), pickled
    version: int = 0

    def find(self, key: Key) -> tuple[Operation, float] | None:
        """The operation posted under ``key``, and when its rank was ready for it on the clock."""
        for pickled in reversed(self.recent):
            posted, operation, ready_s = pickle.loads(pickled)
            if posted == key:
                return operation, ready_s
        return None

    def latest(self) -> Operation | None:
        return pickle.loads(self.recent[-1])[1] if self.recent else None


class Board:
    """The slots of all ranks, in a file that every process of the run has mapped.

    A slot holds its version, the size of the notice, and the notice. The version is stored as one
    machine word, so that no reader sees half of it; ``struct`` would store byte by byte.
    """

    def __init__(self, path: Path, n_ranks: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(SLOT * n_ranks))
        self._file = path.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), SLOT * n_ranks)
        self._words = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        self._file.close()

    def write(self, rank: int, notice: Notice) -> None:
        data = pickle.dumps(notice, protocol=5)
        if len(data) > SLOT - _HEADER:
            raise ValueError(f"rank {rank} posts {len(data):,} bytes; its slot holds {SLOT:,}")
        at, word = rank * SLOT, rank * SLOT // 8
        version = self._words[word]
        self._words[word] = version + 1
        self._words[word + 1] = len(data)
        self._memory[at + _HEADER : at + _HEADER + len(data)] = data
        self._words[word] = version + 2

    def read(self, rank: int) -> Notice:
        at, word = rank * SLOT, rank * SLOT // 8
        while True:
            version = self._words[word]
            if version == 0:
                return Notice()
            size = self._words[word + 1]
            data = self._memory[at + _HEADER : at + _HEADER + size]
            if version % 2 == 0 and self._words[word] == version:
                notice: Notice = pickle.loads(data)
                notice.version = version
                return notice


class Poster:
    """One rank's pen on the board."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.notice = Notice("running")
        self._recent: deque[bytes] = deque(maxlen=RECENT)
        self.post()

    def post(self) -> None:
        self.notice.recent = list(self._recent)
        self.board.write(self.rank, self.notice)

    def issue(self, count: Key, operation: Operation, ready_s: float) -> Key:
        """Post a new operation; returns the key under which others find it."""
        number = self.notice.counts[count] = self.notice.counts.get(count, 0) + 1
        key = (*count, number)
        self._recent.append(pickle.dumps((key, operation, ready_s), protocol=5))
        self.post()
        return key

    def state(self, state: str, waits_for: Key = ()) -> None:
        self.notice.state, self.notice.waits_for = state, waits_for
        self.post()
