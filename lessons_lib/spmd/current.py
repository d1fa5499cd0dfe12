"""Which rank the running code is."""

from __future__ import annotations

import threading
from typing import Any

_this_thread = threading.local()
_this_process: list[Any] = []  # in the process of a rank: that rank


def current() -> Any:
    """The rank that the calling thread is, or whose process this is; ``None`` outside of a run."""
    return getattr(_this_thread, "rank", None) or (_this_process[0] if _this_process else None)


def current_number() -> int | None:
    rank = current()
    return None if rank is None else rank.number


def be_in_this_thread(rank: Any) -> None:
    _this_thread.rank = rank


def be_in_this_process(rank: Any) -> None:
    _this_process[:] = [rank]
