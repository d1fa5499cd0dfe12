"""What ranks print arrives at once, in whole lines, each with the number of its rank.

While ranks run, ``sys.stdout`` and ``sys.stderr`` are :class:`LabelledStream` objects, and so are
the streams of logging handlers that were set up before. A stream that is written to from a thread
that is no rank passes the text on unchanged.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

LONGEST_LINE = 2_000  # characters shown of one line
MOST_PER_RANK = 50_000  # characters shown of one rank's output in one run


class LabelledStream(io.TextIOBase):
    """A text stream in front of ``base`` that labels what a rank writes to it.

    >>> LabelledStream.of(sys.stdout, lambda: 3).write("two lines\\nof rank 3\\n")
    [rank 3] two lines
    [rank 3] of rank 3
    20
    """

    def __init__(self, base: TextIO, rank_of_thread: Callable[[], int | None]) -> None:
        self.base = base
        self.rank_of_thread = rank_of_thread
        self.begin()

    @classmethod
    def of(cls, stream: TextIO, rank_of_thread: Callable[[], int | None]) -> LabelledStream:
        """The labelled form of a stream; of one that is labelled already, itself."""
        if isinstance(stream, LabelledStream):
            return stream
        return cls(stream, rank_of_thread)

    def begin(self) -> None:
        """Forget what earlier runs have written."""
        self._unfinished: dict[int, str] = {}  # rank -> the line it has begun
        self._shown: dict[int, int] = {}  # rank -> characters shown
        self._hidden: dict[int, int] = {}  # rank -> characters not shown
        self._bar_of: int | None = None  # rank whose progress bar holds the cursor

    def write(self, text: str) -> int:
        rank = self.rank_of_thread()
        if rank is None:
            return self.base.write(text)
        *lines, rest = (self._unfinished.pop(rank, "") + text).split("\n")
        for line in lines:
            self._show(rank, line)
        if "\r" in rest:  # a progress bar redraws one line: show its state now, begin anew
            self._redraw(rank, rest)
        elif rest:
            self._unfinished[rank] = rest
        return len(text)

    def finish(self, rank: int) -> None:
        """Show the line a rank has begun, and say how much of its output was not shown."""
        if self._unfinished.get(rank):
            self._show(rank, self._unfinished.pop(rank))
        if self._bar_of == rank:
            self.base.write("\n")
            self._bar_of = None
        if self._hidden.get(rank):
            self.base.write(
                f"[rank {rank}] ... {self._hidden.pop(rank):,} more characters not shown "
                f"(a run shows {MOST_PER_RANK:,} of each rank)\n"
            )

    def _show(self, rank: int, line: str) -> None:
        line = _drawn_last(line)
        if self._shown.get(rank, 0) >= MOST_PER_RANK:
            self._hidden[rank] = self._hidden.get(rank, 0) + len(line) + 1
            return
        if len(line) > LONGEST_LINE:
            line = f"{line[:LONGEST_LINE]} ... (line cut, {len(line) - LONGEST_LINE:,} more characters)"
        self._shown[rank] = self._shown.get(rank, 0) + len(line) + 1
        start = "" if self._bar_of is None else "\r" if self._bar_of == rank else "\n"
        self._bar_of = None
        self.base.write(f"{start}[rank {rank}] {line}\n")

    def _redraw(self, rank: int, text: str) -> None:
        state = _drawn_last(text)
        if state:
            start = "\r" if self._bar_of in (None, rank) else "\n"
            self.base.write(f"{start}[rank {rank}] {state}")
            self._bar_of = rank

    def flush(self) -> None:
        self.base.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.base.isatty()

    def fileno(self) -> int:
        return self.base.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.base.encoding


def _drawn_last(text: str) -> str:
    """What a line shows after its carriage returns: ``print(step, end="\\r")`` ends with one."""
    return text.rstrip("\r").rsplit("\r", 1)[-1]


@contextlib.contextmanager
def labelled(rank_of_thread: Callable[[], int | None]) -> Iterator[Callable[[int], None]]:
    """Label stdout, stderr and logging while ranks run; yields what to call when a rank ends."""
    stdout, stderr = sys.stdout, sys.stderr
    streams = {id(stream): LabelledStream.of(stream, rank_of_thread) for stream in (stdout, stderr)}
    handlers = [handler for handler in _stream_handlers() if id(handler.stream) in streams]
    for stream in streams.values():
        stream.begin()
    sys.stdout, sys.stderr = streams[id(stdout)], streams[id(stderr)]
    for handler in handlers:
        handler.setStream(streams[id(handler.stream)])  # type: ignore[arg-type]

    def finish(rank: int) -> None:
        for stream in streams.values():
            stream.finish(rank)

    try:
        yield finish
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        # also handlers that ranks have set up: after the run they write to the plain stream
        for handler in _stream_handlers():
            if isinstance(handler.stream, LabelledStream):
                handler.setStream(handler.stream.base)


def _stream_handlers() -> list[logging.StreamHandler[TextIO]]:
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    return [
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
    ]
