"""Bytes in words: one unit in a view, always named, and a device compared in the same one.

A GB is 10^9 bytes, a GiB 2^30; data sheets and this course count in GB, many tools print GiB and write GB.
"""

from __future__ import annotations

from fractions import Fraction

from lessons_lib.errors import RefusedError
from lessons_lib.machines import Machine

UNITS = {f"{prefix}B": 1000**power for power, prefix in enumerate(("", "k", "M", "G", "T"))}
UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)}


def in_unit(n_bytes: float | Fraction, unit: str = "GB") -> float:
    """
    >>> in_unit(7_500_000_000 * 16, "GB"), round(in_unit(7_500_000_000 * 16, "GiB"), 2)
    (120.0, 111.76)
    """
    if unit not in UNITS:
        raise RefusedError(f"unit={unit!r} is unknown; known: {', '.join(UNITS)}.")
    return float(n_bytes / Fraction(UNITS[unit]))


def text(n_bytes: float | Fraction, unit: str = "GB", digits: int = 4) -> str:
    """
    >>> text(120_000_000_000), text(120_000_000_000, "GiB", digits=5)
    ('120 GB', '111.76 GiB')
    """
    return f"{in_unit(n_bytes, unit):.{digits}g} {unit}"


def beside_device(n_bytes: float | Fraction, device: Machine, unit: str = "GB") -> str:
    """What is needed beside what one device of a machine has.

    >>> from lessons_lib.machines import machine
    >>> beside_device(83_000_000_000, machine("8xH100"))
    '83 GB of 80 GB: 3 GB too much'
    >>> beside_device(83_000_000_000, machine("8xH100"), "GiB")
    '77.3 GiB of 74.51 GiB: 2.794 GiB too much'
    """
    left = device.memory_bytes - float(n_bytes)
    verdict = "too much" if left < 0 else "left"
    sizes = f"{text(n_bytes, unit)} of {text(device.memory_bytes, unit)}"
    return f"{sizes}: {text(abs(left), unit)} {verdict}"
