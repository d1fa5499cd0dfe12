"""The memory curve of each rank, under its lane, all on one scale."""

from __future__ import annotations

from collections.abc import Sequence

from lessons_lib.views.axes import Rows, TimeAxis
from lessons_lib.views.svg import SMALL, Figure

Curve = Sequence[tuple[float, int]]  # (seconds, bytes from then on)


def draw_memory(
    figure: Figure, rows: Rows, axis: TimeAxis, memory: Sequence[Curve], ends: Sequence[float]
) -> None:
    """A filled step curve below each lane, up to where its rank ends."""
    theme = figure.theme
    most = max(map(peak, memory)) or 1
    room = rows.memory - 3
    for rank, curve in enumerate(memory):
        floor = rows.floor(rank)
        at = corners(curve, axis, ends[rank])
        if at:
            outline = [(at[0][0], floor)]
            for x, n_bytes in at:
                outline += [(x, outline[-1][1]), (x, floor - room * n_bytes / most)]
            end_x = max(axis.x(ends[rank]), at[-1][0])
            outline += [(end_x, outline[-1][1]), (end_x, floor)]
            figure.polygon(outline, theme.memory, tip=f"rank {rank}, memory: peak {bytes_text(peak(curve))}")
        figure.line([(axis.left, floor), (axis.right, floor)], theme.line)
    if rows.memory >= 16:
        figure.text(
            axis.left - 10,
            rows.floor(0) - rows.memory / 2 + 5,
            "memory",
            size=SMALL,
            anchor="end",
            fill=theme.muted,
        )


def corners(curve: Curve, axis: TimeAxis, until: float) -> list[tuple[float, int]]:
    """(x, bytes) where the curve changes; of the changes within a pixel the highest and the last.

    >>> corners([(0.0, 1), (0.5, 7), (0.501, 2), (2.0, 9)], TimeAxis.until(1.0, 0, 100), 1.0)
    [(0.0, 1), (50.0, 7), (51.0, 2)]
    """
    pixels: dict[int, tuple[int, int]] = {}
    for time, n_bytes in curve:
        if time <= until:
            pixel = int(axis.x(time))
            pixels[pixel] = max(n_bytes, pixels.get(pixel, (0, 0))[0]), n_bytes
    found: dict[float, int] = {}
    for pixel, (highest, last) in sorted(pixels.items()):
        found[float(pixel)] = highest
        found[pixel + 1.0] = last
    values = list(found.items())
    changes = [(x, n) for (x, n), (_, before) in zip(values[1:], values, strict=False) if n != before]
    return [*values[:1], *changes]


def peak(curve: Curve) -> int:
    return max((n_bytes for _, n_bytes in curve), default=0)


def peaks_text(memory: Sequence[Curve]) -> str:
    """The peaks of all ranks in words.

    >>> peaks_text([[(0.0, 2000)], [(0.0, 0), (0.5, 3000)]]), peaks_text([[(0.0, 2000)]])
    ('2 kB to 3 kB', '2 kB')
    """
    peaks = [peak(curve) for curve in memory]
    low, high = bytes_text(min(peaks)), bytes_text(max(peaks))
    return low if low == high else f"{low} to {high}"


def bytes_text(n_bytes: float) -> str:
    """Bytes in a handy unit.

    >>> bytes_text(980), bytes_text(16_777_216), bytes_text(999_999)
    ('980 B', '16.8 MB', '1 MB')
    """
    value, unit = float(n_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
