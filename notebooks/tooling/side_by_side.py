"""One check of many notebooks, as many at a time as this machine has cores."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

Check = Callable[[Path], Iterator[str]]


def check_side_by_side(check: Check, sources: list[Path]) -> list[str]:
    """Return what ``check`` finds wrong with each source; what it prints of one notebook stays together."""
    wrong = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for source, (printed, sentences) in zip(
            sources, pool.map(partial(_check_one, check), sources), strict=True
        ):
            print(f"{source.stem}\n{printed}", end="", flush=True)
            wrong += [f"{source.stem}: {sentence}" for sentence in sentences]
    return wrong


def _check_one(check: Check, source: Path) -> tuple[str, list[str]]:
    with redirect_stdout(io.StringIO()) as printed:
        sentences = list(check(source))
    return printed.getvalue(), sentences
