"""Schedules as text: a grid to read and write by hand, and the CSV of torch.distributed.pipelining."""

from __future__ import annotations

import csv
import io
import re

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel.actions import KINDS, Action, Pair, Schedule
from lessons_lib.pipeline_parallel.legality import IllegalScheduleError
from lessons_lib.pipeline_parallel.simulate import simulate
from lessons_lib.pipeline_parallel.timeline import PipelineTimeline
from lessons_lib.pipeline_parallel.times import Times

ONE_SLOT = Times(F=1, I=1, W=1, B=1, FB=1, U=1)
_CELL = re.compile(rf"(\d+)([{''.join(KINDS)}])(\d+)")
_TORCH_PAIR = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


def write_grid(schedule: Schedule) -> str:
    """One row per rank and one column per action, with a dot where a rank must wait.

    >>> from lessons_lib.pipeline_parallel import zb_h1
    >>> print(write_grid(zb_h1(2, 2)))
    rank 0  0F0 0F1  .  0I0 0W0 0I1 0W1
    rank 1   .  1F0 1I0 1F1 1I1 1W0 1W1

    A cell is stage, kind and micro-batch; an overlapped pair is ``0F9&7B2``. Every action takes one column,
    however long it takes. The rows of a schedule that comes to a standstill have no dots.
    """
    try:
        columns = simulate(schedule, ONE_SLOT).starts
    except IllegalScheduleError:
        columns = [list(range(len(row))) for row in schedule.rows]
    n_columns = 1 + max(start for starts in columns for start in starts)
    width = max(len(str(action)) for row in schedule.rows for action in row)
    lines = []
    for rank, (row, starts) in enumerate(zip(schedule.rows, columns, strict=True)):
        cells = ["."] * n_columns
        for action, start in zip(row, starts, strict=True):
            cells[start] = str(action)
        name = f"rank {rank:<{len(str(schedule.n_ranks - 1))}}"
        lines.append(f"{name}  {' '.join(cell.center(width) for cell in cells)}".rstrip())
    return "\n".join(lines)


def read_grid(text: str, name: str = "from a grid") -> Schedule:
    """Read the order of every rank's actions from a grid; dots and ``rank 0`` may be there or not.

    >>> read_grid('''0F0 0F1  .  0B0 0B1
    ...               .  1F0 1B0 1F1 1B1''')
    <from a grid: p=2, m=2, 8 actions>
    """
    return Schedule.of(name, [[action for action in row if action is not None] for row in _cells(text)])


def read_slots(text: str, name: str = "from a grid") -> PipelineTimeline:
    """Read a grid as a drawing: every column is one unit of time, and an action stands where it starts.

    The result is what was drawn, possible or not: :func:`.first_early` says.
    """
    cells = _cells(text)
    rows = [[action for action in row if action is not None] for row in cells]
    starts = [[column for column, action in enumerate(row) if action is not None] for row in cells]
    ends = [[start + 1 for start in row] for row in starts]
    return PipelineTimeline(Schedule.of(name, rows), starts, ends, clock="drawn")


def _cells(text: str) -> list[list[Action | Pair | None]]:
    """The cells of a grid, ``None`` for a dot."""
    lines = [re.sub(r"^\s*rank\s+\d+", "", line).split() for line in text.splitlines()]
    return [
        [
            None if cell == "." else _read_cell(cell, f"rank {rank}, column {column}")
            for column, cell in enumerate(line)
        ]
        for rank, line in enumerate(line for line in lines if line)
    ]


def _read_cell(cell: str, where: str) -> Action | Pair:
    """Read ``0F3`` or ``0F9&7B2``."""
    parts = []
    for text in cell.split("&"):
        match = _CELL.fullmatch(text)
        if match is None:
            raise RefusedError(
                f"{where}: {cell!r} is no action. Write stage, kind ({', '.join(KINDS)}) and micro-batch, "
                "such as 0F3; an overlapped pair as 0F9&7B2; and a dot for waiting."
            )
        parts.append(Action(match[2], int(match[1]), int(match[3])))
    if len(parts) == 1:
        return parts[0]
    if [part.kind for part in parts] != ["F", "B"]:
        raise RefusedError(f"{where}: {cell!r} is no overlapped pair, which is one F and one B: 0F9&7B2.")
    return Pair(*parts)


# ---- torch.distributed.pipelining


def write_csv(schedule: Schedule) -> str:
    """The schedule as torch's ``compute_only`` CSV, which ``_load_csv`` of its runtime schedules reads.

    >>> from lessons_lib.pipeline_parallel import one_f_one_b
    >>> print(write_csv(one_f_one_b(2, 2)))
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

    One line per rank. torch knows no update of weights on the way.
    """
    if any(action.kind == "U" for row in schedule.rows for action in row):
        raise RefusedError(f"{schedule.name}: torch's schedules have no action for U, an update on the way.")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in schedule.rows:
        writer.writerow(
            str(action) if len(action) == 3 else "({};{})OVERLAP_F_B".format(*action) for action in row
        )
    return text.getvalue().rstrip("\n")


def read_csv(text: str, name: str = "from torch") -> Schedule:
    """Read torch's ``compute_only`` CSV; empty cells, which are slots in which a rank waits, are left out.

    >>> read_csv("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1").rows[1][:2]
    (Action(kind='F', stage=1, microbatch=0), Action(kind='B', stage=1, microbatch=0))
    """
    return Schedule.of(name, [[action for action in row if action] for row in read_csv_slots(text)])


def read_csv_slots(text: str) -> list[list[Action | Pair | None]]:
    """The cells of torch's CSV, with ``None`` where a rank waits."""
    rows: list[list[Action | Pair | None]] = []
    for rank, line in enumerate(csv.reader(io.StringIO(text))):
        where = f"rank {rank}, line {rank + 1}"
        rows.append([_read_torch_cell(cell.strip(), where) if cell.strip() else None for cell in line])
    return rows


def _read_torch_cell(cell: str, where: str) -> Action | Pair:
    if re.search("SEND|RECV|SHARD|REDUCE", cell):
        raise RefusedError(
            f"{where}: {cell!r} is a communication. Write the schedule without them, with "
            "format='compute_only'."
        )
    pair = _TORCH_PAIR.fullmatch(cell)
    return _read_cell(f"{pair[1]}&{pair[2]}" if pair else cell, where)
