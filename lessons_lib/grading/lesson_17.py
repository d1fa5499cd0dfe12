"""The exercises of lesson 17: the order of 1F1B, and a checker that names what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.grading.exercise import Claim, Draw, Exercise, Output, Trial, sizes_text
from lessons_lib.grading.rows import as_numbers, as_row
from lessons_lib.mesh import Mesh
from lessons_lib.pipeline_parallel import (
    Schedule,
    Times,
    breadth_first,
    first_early,
    first_fault,
    gpipe,
    interleaved,
    legal_next,
    one_f_one_b,
    simulate,
)
from lessons_lib.pipeline_parallel.actions import Action
from lessons_lib.pipeline_parallel.schedule import _one_forward_one_backward

Slots = list[list[tuple[str, int, int] | None]]  # for each rank what it does in each slot

# ---- the solutions ----


def one_f_one_b_row(p: int, m: int, r: int) -> list[tuple[str, int, int]]:
    """Return what rank ``r`` of ``p`` does in 1F1B, as a list of (kind, stage, micro-batch).

    Rank r has stage r. Kinds are "F" and "B". There are ``m`` micro-batches, any number from 1 on.
    """
    F, B = ([(kind, r, k) for k in range(m)] for kind in "FB")
    first = min(p - r, m)
    row = F[:first]
    for k in range(m):
        row.append(B[k])
        row += F[first + k : first + k + 1]
    return row


def first_illegal(slots: Slots) -> tuple[int, int] | tuple[()]:
    """Return (rank, slot) of the first action that cannot be where it is, or () if all can.

    ``slots[r][t]`` is what rank r does in slot t: (kind, stage, micro-batch), or None where it waits. An
    action can be where it is if all it needs was made in *earlier* slots, and if it has not been done before.
    F needs the F of the stage before; B needs its own F and, unless its stage is the last, the B of the stage
    after. First is the earliest slot, and in it the lowest rank. Stages are numbered from 0, and a rank may
    have several; the last is the largest number that there is.
    """
    last = max(action[1] for row in slots for action in row if action)
    done: set[tuple[str, int, int]] = set()
    for t in range(max(map(len, slots))):
        now = {r: action for r, row in enumerate(slots) if t < len(row) and (action := row[t])}
        for r, action in now.items():
            if action in done or not done.issuperset(_needs(*action, last)):
                return r, t
        done.update(now.values())
    return ()


def _needs(kind: str, stage: int, k: int, last: int) -> list[tuple[str, int, int]]:
    if kind == "F":
        return [("F", stage - 1, k)] if stage > 0 else []
    return [("F", stage, k), *([("B", stage + 1, k)] if stage < last else [])]


# ---- the trials: the order ----


def the_row(row: Any, mesh: Mesh) -> tuple[Tensor, ...]:
    """What a rank returned, once for each line of the table."""
    numbers = as_numbers(row, mesh.rank)
    return numbers, numbers, numbers


def _row_trials(draw: Draw) -> list[Trial]:
    """Several times as many micro-batches as ranks, not a multiple; fewer; as many; one rank."""
    p = draw.between(3, 4)
    sizes = [(p, 2 * p + draw.between(1, p - 1)), (5, draw.between(2, 4)), (4, 1), (p, p), (1, 3)]
    return [_row_trial(*each) for each in sizes]


def _row_trial(p: int, m: int) -> Trial:
    right = [as_numbers(list(_one_forward_one_backward(p, m, r))) for r in range(p)]
    judges: dict[str, Callable[[Sequence[Tensor]], str]] = {
        "legal": lambda found: _is_legal(found, m),
        "time kept": lambda found: _is_in_time(found, p, m),
        "little kept": lambda found: _keeps_little(found, p, m),
    }
    return Trial(
        function="one_f_one_b_row",
        sizes={"pp": p},
        facts=sizes_text({}, p=p, m=m),
        args=[(p, m, r) for r in range(p)],
        then=the_row,
        outputs=[Output("the schedule", claim, right, judged=judge) for claim, judge in judges.items()],
    )


def _schedule(found: Sequence[Tensor]) -> Schedule:
    return Schedule.of("yours", list(map(as_row, found)))


def _is_legal(found: Sequence[Tensor], m: int) -> str:
    schedule = _schedule(found)
    for rank, row in enumerate(schedule.rows):
        right = [Action(kind, rank, k) for k in range(m) for kind in "FB"]
        strange = [action for action in row if action not in right]
        missing = [action for action in right if action not in row]
        if strange:
            return (
                f"rank {rank} does {strange[0]}, which is not among its actions, {right[0]} to {right[-1]}: "
                f"kind F or B, stage {rank}, micro-batch 0 to {m - 1}"
            )
        if missing:
            return f"rank {rank} never does {missing[0]}, and every rank has {m} forwards and {m} backwards"
    fault = first_fault(schedule)
    return f"it comes to a standstill or is not whole: {fault}" if fault else ""


def _is_in_time(found: Sequence[Tensor], p: int, m: int) -> str:
    if _is_legal(found, m):
        return f"there is no legal schedule of {m} micro-batches to time"
    ends, right = (simulate(schedule).makespan for schedule in (_schedule(found), gpipe(p, m)))
    if ends > right:
        return f"with F = 1 and B = 2 it is done at {ends}, and GPipe at {right}: {_warm_up(found, p, m)}"
    return ""


def _keeps_little(found: Sequence[Tensor], p: int, m: int) -> str:
    if _is_in_time(found, p, m):
        return "counts for a schedule that is done in time"
    kept = simulate(_schedule(found)).peak_in_flight()
    right = [min(p - r, m) for r in range(p)]
    if any(have > want for have, want in zip(kept, right, strict=True)):
        return f"ranks keep {kept} micro-batches, and {right} are enough: {_warm_up(found, p, m)}"
    return ""


def _warm_up(found: Sequence[Tensor], p: int, m: int) -> str:
    """How many forwards there are before the first backward, and how many there should be."""
    mine = [[part.kind for part in row].index("B") for row in map(as_row, found)]
    right = [min(p - r, m) for r in range(p)]
    return f"before its first backward each rank has {mine} forwards, and 1F1B has {right}"


# ---- the trials: the checker ----

N_SCHEDULES = 200


def place(value: Any, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """What was named as rank and slot, -1 where nothing was; once for each line of the table."""
    if not isinstance(value, tuple | list) or len(value) not in (0, 2):
        raise RefusedError(f"return (rank, slot), or () where all is legal, not {value!r}.")
    named = torch.tensor([float(number) for number in value] or [-1.0, -1.0])
    return named, named


def _checked(draw: Draw) -> list[Trial]:
    """Half of them legal, half broken, no two the same; the smallest first, so that what is told is short."""
    trials: list[Trial] = []
    seen: list[Slots] = []
    for broken in draw.random.sample([False, True] * (N_SCHEDULES // 2), N_SCHEDULES):
        slots, how = _broken(draw) if broken else (_legal(draw), "")
        while slots in seen:
            slots, how = _broken(draw) if broken else (_legal(draw), "")
        seen.append(slots)
        trials.append(_checked_trial(slots, how))
    return sorted(trials, key=lambda trial: sum(map(len, trial.args[0][0])))


def _legal(draw: Draw) -> Slots:
    """A schedule in slots, where messages may take a slot or two."""
    p, m, v = draw.between(2, 4), draw.between(2, 4), draw.between(1, 2)
    made = draw.random.choice(
        (
            lambda: gpipe(p, m),
            lambda: one_f_one_b(p, m),
            lambda: interleaved(p, p, v),
            lambda: breadth_first(p, 2, v),
            lambda: _walk(draw, p, m, v),
            lambda: _walk(draw, p, m, v),
        )
    )()
    timeline = simulate(made, Times(B=1, send=draw.between(0, 2)))
    slots: Slots = [[None for _ in range(int(timeline.makespan))] for _ in made.rows]
    for row, actions, starts in zip(slots, made.rows, timeline.starts, strict=True):
        for action, start in zip(actions, starts, strict=True):
            row[start] = tuple(action)  # type: ignore[assignment]  # no pairs here
    return slots


def _walk(draw: Draw, p: int, m: int, v: int) -> Schedule:
    """One legal action after the other, each drawn."""
    stages = [[chunk * p + r for chunk in range(v)] for r in range(p)]
    rows: list[list[Action]] = [[] for _ in range(p)]
    while any(moves := legal_next(rows, stages, m)):
        rank = draw.random.choice([rank for rank in range(p) if moves[rank]])
        rows[rank].append(draw.random.choice(moves[rank]))
    return Schedule.of("drawn", rows)


def _broken(draw: Draw) -> tuple[Slots, str]:
    """A legal one with one mistake in it, and what that is."""
    while True:
        slots = [list(row) for row in _legal(draw)]
        how = draw.random.choice(list(MISTAKES))
        row = draw.random.choice(slots)
        MISTAKES[how](draw, row)
        if any(action for row in slots for action in row) and first_illegal(slots) != ():
            return slots, how


def _exchange(draw: Draw, row: list[Any]) -> None:
    one, other = draw.random.sample([t for t, action in enumerate(row) if action], 2)
    row[one], row[other] = row[other], row[one]


def _earlier(draw: Draw, row: list[Any]) -> None:
    t = draw.random.choice([t for t, action in enumerate(row) if action])
    free = [s for s in range(t) if row[s] is None]
    if free:
        row[free[-1]], row[t] = row[t], None


def _forget(draw: Draw, row: list[Any]) -> None:
    row[draw.random.choice([t for t, action in enumerate(row) if action])] = None


def _repeat(draw: Draw, row: list[Any]) -> None:
    done = [t for t, action in enumerate(row) if action]
    row.append(row[draw.random.choice(done)])


MISTAKES: dict[str, Callable[[Draw, list[Any]], None]] = {
    "two actions of a rank are exchanged": _exchange,
    "an action is drawn too early": _earlier,
    "an action is missing": _forget,
    "an action is done twice": _repeat,
}


def _checked_trial(slots: Slots, how: str) -> Trial:
    right = first_illegal(slots)
    numbers = torch.tensor(right or (-1, -1), dtype=torch.float64)

    def told_apart(found: Sequence[Tensor]) -> str:
        if right and found[0][0] < 0:
            return f"it was called legal, but {_why(slots, *right)}. {_text(slots)}"
        if not right and found[0][0] >= 0:
            return f"it is legal, and you named {_named(slots, found[0])}. {_text(slots)}"
        return ""

    def first(found: Sequence[Tensor]) -> str:
        if tuple(found[0].tolist()) == right:
            return ""
        if found[0][0] < 0:
            return f"nothing was named, and {_why(slots, *right)}. {_text(slots)}"
        return f"you named {_named(slots, found[0])}, and before that {_why(slots, *right)}. {_text(slots)}"

    outputs = [Output("the schedule", "told apart", [numbers], judged=told_apart)]
    if right:
        outputs.append(Output("the first illegal action", "first", [numbers], judged=first))
    return Trial(
        function="first_illegal",
        sizes={"dp": 1},
        facts=f"a schedule in which {how}" if how else "a legal schedule",
        args=[(slots,)],
        then=place,
        outputs=outputs,
    )


def _why(slots: Slots, rank: int, slot: int) -> str:
    """Why an action cannot be where it is, as the library's own check of drawings has it."""
    action = slots[rank][slot]
    assert action is not None
    kind, stage, k = action
    if any(action in row[:slot] for row in slots):
        return f"{Action(*action)} in slot {slot} of rank {rank} has been done before"
    last = max(each[1] for row in slots for each in row if each)
    made = {each: t for row in slots for t, each in enumerate(row) if each}
    lacks = next(need for need in _needs(kind, stage, k, last) if made.get(need, slot) >= slot)
    when = f"comes in slot {made[lacks]}" if lacks in made else "is nowhere"
    return f"{Action(*action)} in slot {slot} of rank {rank} needs {Action(*lacks)}, which {when}"


def _named(slots: Slots, found: Tensor) -> str:
    rank, slot = (int(number) for number in found)
    there = rank < len(slots) and 0 <= slot < len(slots[rank]) and slots[rank][slot]
    what = Action(*there) if there else "no action"
    return f"slot {slot} of rank {rank}, {what}"


def _text(slots: Slots) -> str:
    rows = (" ".join(str(Action(*action)) if action else "." for action in row) for row in slots)
    return "; ".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))


EXERCISES = (
    Exercise(
        id="17-1f1b",
        title="The order of 1F1B",
        objective="Write the order of 1F1B for any rank, from the warm-up rule.",
        functions=(one_f_one_b_row,),
        claims=(
            Claim("legal", "legal: every action of the rank once, and nobody waits in a circle", 2),
            Claim("time kept", "done when GPipe is", 3),
            Claim("little kept", "rank r keeps at most p - r micro-batches", 3),
        ),
        trials=_row_trials,
        hints=(
            "How long does the first gradient take to come back to rank r? So much forward work it needs.",
            "min(p - r, m) forwards first. Then one backward and one forward in turn, as long as there are "
            "forwards; then the rest of the backwards.",
            "F and B are lists of all forwards and all backwards of the rank. Begin with F[:first]; for "
            "every k take B[k], and then F[first + k] if there is one.",
        ),
        shown=(_one_forward_one_backward,),
    ),
    Exercise(
        id="17-check",
        title="A checker for drawn schedules",
        objective="Name the first action of a drawn schedule that cannot be where it is.",
        functions=(first_illegal,),
        claims=(
            Claim("told apart", f"{N_SCHEDULES} schedules, half of them broken: which are legal", 4),
            Claim("first", "of every broken one, the first action that cannot be", 4),
        ),
        trials=_checked,
        hints=(
            "Go through the slots, not through the ranks: which actions are done when slot t begins?",
            "Keep a set of all actions done in earlier slots. Look at all ranks of a slot before you add any "
            "of its actions: what is made in a slot is there in the next.",
            "needs of (F, s, k): (F, s-1, k) if s > 0. Of (B, s, k): (F, s, k), and (B, s+1, k) if s is not "
            "the last. Return (r, t) if one is not in the set, or if the action itself is; () at the end.",
        ),
        shown=(first_early,),
    ),
)
