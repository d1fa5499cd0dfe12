"""The exercises of lesson 18: the order of interleaved 1F1B, and how finely to cut."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.grading.exercise import Claim, Draw, Exercise, Output, Trial, sizes_text
from lessons_lib.grading.rows import as_numbers, as_row, the_same_as
from lessons_lib.mesh import Mesh
from lessons_lib.pipeline_parallel import Schedule, Times, first_fault, interleaved, simulate
from lessons_lib.pipeline_parallel.actions import KINDS, Action

CHUNKS = (1, 2, 4, 8)

# ---- the solutions ----


def interleaved_row(p: int, m: int, v: int, r: int) -> list[tuple[str, int, int]]:
    """Return what rank ``r`` of ``p`` does in interleaved 1F1B, as a list of (kind, stage, micro-batch).

    Every rank has ``v`` chunks: chunk c of rank r is stage c p + r. Kinds are "F" and "B". There are ``m``
    micro-batches, a multiple of p.
    """
    groups = [range(first, first + p) for first in range(0, m, p)]
    F = [("F", c * p + r, k) for group in groups for c in range(v) for k in group]
    B = [("B", c * p + r, k) for group in groups for c in reversed(range(v)) for k in group]
    warm = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
    in_turn = [action for pair in zip(F[warm:], B, strict=False) for action in pair]
    return F[:warm] + in_turn + B[m * v - warm :]


def chunks_for(p: int, m: int, latency: Fraction) -> int:
    """Return the v, of 1, 2, 4 and 8, with which interleaved 1F1B ends first.

    A rank's whole share takes 1 for F, for I and for W, so a chunk takes 1/v. A message arrives ``latency``
    after it was sent.
    """

    def end(v: int) -> Any:
        part = Fraction(1, v)
        return simulate(interleaved(p, m, v), Times(F=part, I=part, W=part, send=latency)).makespan

    return min(CHUNKS, key=end)


# ---- the trials ----


def parts(row: Any, mesh: Mesh) -> tuple[Tensor, ...]:
    """What the lines of the table look at, in their order."""
    return _parts(as_numbers(row, mesh.rank))


def _parts(numbers: Tensor) -> tuple[Tensor, ...]:
    """Of a row: its forwards, its backwards, how many forwards come before the first backward, and all.

    The number is negative where no backward comes.
    """
    kinds = [KINDS[int(kind)] for kind in numbers[:, 0]]
    forwards, backwards = (numbers[torch.tensor([kind == which for kind in kinds])] for which in "FB")
    before = kinds[: kinds.index("B")].count("F") if "B" in kinds else -kinds.count("F")
    return forwards, backwards, torch.tensor(float(before)), numbers, numbers


def _row_trials(draw: Draw) -> list[Trial]:
    """All sizes differ; once the warm-up is everything, once there is one chunk."""
    sizes = [(p, p * draw.between(2, 4), draw.between(2, 4)) for p in draw.different(2, 5, 3)]
    p = draw.between(3, 5)
    return [_row_trial(*each) for each in (*sizes, (p, p, draw.between(2, 3)), (p, 2 * p, 1))]


def _row_trial(p: int, m: int, v: int) -> Trial:
    right = [_parts(as_numbers(interleaved_row(p, m, v, r))) for r in range(p)]
    forwards, backwards, warm, rows, _ = zip(*right, strict=True)
    return Trial(
        function="interleaved_row",
        sizes={"pp": p},
        facts=sizes_text({}, p=p, m=m, v=v),
        args=[(p, m, v, r) for r in range(p)],
        then=parts,
        outputs=[
            _same("forwards", forwards),
            _same("backwards", backwards),
            Output("forwards before the first backward", "warm-up", warm, judged=_warm_up(p, m, v)),
            Output("the schedule", "runs", rows, judged=_runs(m, p * v)),
            _same("row", rows),
        ],
    )


def _same(name: str, numbers: Sequence[Tensor]) -> Output:
    return Output(name, name, numbers, judged=the_same_as(list(map(as_row, numbers)), name))


def _runs(m: int, n_stages: int) -> Any:
    def judge(found: Sequence[Tensor]) -> str:
        rows: list[tuple[Action, ...]] = list(map(as_row, found))
        all_of_it = (Action(kind, s, k) for kind in "FB" for s in range(n_stages) for k in range(m))
        done = {action for row in rows for action in row}
        if missing := next((action for action in all_of_it if action not in done), None):
            return f"it is not whole: no rank does {missing}"
        fault = first_fault(Schedule.of("mine", rows))
        return f"it comes to a standstill, or does something twice: {fault}" if fault else ""

    return judge


def _warm_up(p: int, m: int, v: int) -> Any:
    """Judge the forwards before the first backward: those of the warm-up, and the first in turn."""
    rules = {
        "2(p-1-r) + (v-1)p": lambda r: 2 * (p - 1 - r) + (v - 1) * p,
        "p-1-r, as in plain 1F1B": lambda r: p - 1 - r,
        "p-1-r + (v-1)p: it runs, but waits for every message; take two for each rank behind": lambda r: (
            p - 1 - r + (v - 1) * p
        ),
        "2(p-1-r): the first group also goes through all chunks but the last": lambda r: 2 * (p - 1 - r),
        "one too many: the first backward follows the first forward after the warm-up": lambda r: (
            2 * (p - 1 - r) + (v - 1) * p + 1
        ),
        "one too few: after the warm-up comes a forward first, then a backward": lambda r: (
            2 * (p - 1 - r) + (v - 1) * p - 1
        ),
        "everything: this is GPipe's order": lambda r: m * v,
    }
    counts = {rule: [min(warm(r) + 1, m * v) for r in range(p)] for rule, warm in rules.items()}
    right, *wrong = counts.items()

    def judge(found: Sequence[Tensor]) -> str:
        mine = [int(count) for count in found]
        if list(map(abs, mine)) == right[1]:
            return ""
        if min(mine) < 0:
            return f'rank {mine.index(min(mine))} does no "B"'
        named = next((rule for rule, count in wrong if mine == count), "")
        return named or f"before its first backward each rank has {mine} forwards, where {right[1]} are right"

    return judge


def _chunk_trials(draw: Draw) -> list[Trial]:
    """Sizes and latencies, no two alike, with each number of chunks the best for two, and nothing ties."""
    wanted = [*CHUNKS, *CHUNKS]
    trials: dict[tuple[int, int, Fraction], Trial] = {}
    while wanted:
        p, m = draw.between(3, 5), draw.between(2, 3)
        latency = Fraction(draw.between(0, 40), 20) ** 2
        ends = {v: _end(p, m * p, v, latency) for v in CHUNKS}
        best, second, *_ = sorted(ends, key=lambda v: ends[v])
        if best in wanted and ends[second] > ends[best] and (p, m, latency) not in trials:
            wanted.remove(best)
            trials[p, m, latency] = _chunk_trial(p, m * p, latency, ends)
    return list(trials.values())


def _end(p: int, m: int, v: int, latency: Fraction) -> Any:
    part = Fraction(1, v)
    return simulate(interleaved(p, m, v), Times(F=part, I=part, W=part, send=latency)).makespan


def _chunk_trial(p: int, m: int, latency: Fraction, ends: dict[int, Any]) -> Trial:
    best = torch.tensor(float(min(ends, key=lambda v: ends[v])))
    return Trial(
        function="chunks_for",
        sizes={"pp": 1},
        facts=f"p={p}, m={m}, latency={latency}",
        args=[(p, m, latency)],
        then=_as_number,
        outputs=[Output("v", "values", [best], judged=_ends_first(ends))],
    )


def _as_number(v: Any, mesh: Mesh) -> Tensor:
    """What was returned, if it is a number, whatever its type."""
    if not isinstance(v, int | float | Fraction | Tensor):
        raise RefusedError(f"one of {_list(CHUNKS)} should come back, not {v!r}.")
    return torch.tensor(float(v))


def _ends_first(ends: dict[int, Any]) -> Any:
    """Judge a number of chunks, where ``ends`` tells when the schedule with so many ends."""
    best = min(ends, key=lambda v: ends[v])
    why = {
        CHUNKS[-1]: "8 has the smallest bubble, and is right where messages are free",
        CHUNKS[0]: "1 has the fewest messages, but these are short: a smaller bubble is worth more",
    }

    def judge(found: Sequence[Tensor]) -> str:
        v = found[0].item()
        if v not in ends:
            return f"{v:g} came back, which is none of {_list(CHUNKS)}: return v itself"
        if v == best:
            return ""
        compared = f"with v={v:g} it ends at {float(ends[int(v)]):g}, with v={best} at {float(ends[best]):g}"
        return f"{compared}. {why[int(v)]}" if v in why else compared

    return judge


def _list(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}"


EXERCISES = (
    Exercise(
        id="18-interleaved",
        title="Interleaved 1F1B",
        objective="Write down in which order a rank with several chunks works.",
        functions=(interleaved_row,),
        claims=(
            Claim("forwards", "forwards in groups of p, through one chunk after the other", 2),
            Claim("backwards", "backwards in the same groups, the last chunk first", 2),
            Claim("warm-up", "as many forwards first as the rule has", 2),
            Claim("runs", "no rank waits for ever, and nothing is left out", 2),
            Claim("row", "forwards and backwards in turn", 2),
        ),
        trials=_row_trials,
        hints=(
            "Write down the forwards alone first: which group, which chunk, which micro-batch? That is three "
            "loops.",
            "The backwards are the same three loops, with the chunks reversed. Then the warm-up: 2(p-1-r) + "
            "(v-1)p forwards, but no more than there are.",
            "F[:warm], then F[warm:] and B in turn, one of each, as zip gives them; then B[len(F) - warm:].",
        ),
        shown=(interleaved,),
    ),
    Exercise(
        id="18-chunks",
        title="How finely to cut",
        objective="Find the number of chunks that ends first, for a given latency.",
        functions=(chunks_for,),
        claims=(Claim("values", "the best v, for latencies from nothing to several forwards", 4),),
        trials=_chunk_trials,
        hints=(
            "Nothing has to be derived: four schedules can be simulated, and the earliest end is the answer.",
            "simulate(interleaved(p, m, v), Times(F=..., I=..., W=..., send=latency)).makespan, and an "
            "action of a chunk takes Fraction(1, v).",
            "min((1, 2, 4, 8), key=end), where end(v) is that makespan.",
        ),
    ),
)
