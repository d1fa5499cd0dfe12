"""Judges what a child told: one line of the table for every claim of the exercise.

Values come first. What is counted, bytes, memory, time, waiting, earns its points once the numbers are
right: a function that does nothing sends nothing too much.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from lessons_lib.grading.diagnosis import TOLERANCE, complaint, largest_error
from lessons_lib.grading.exercise import FLOAT64_BYTES, Claim, Exercise, Trial, tensors_in
from lessons_lib.grading.report import Line
from lessons_lib.grading.sandbox import Outcome
from lessons_lib.timeline import Event, Where

Told = Mapping[str, Any]
COUNTED = ("traffic", "memory", "time", "no deadlock")  # claims that are about no output
NOWHERE = Where("", 0, "")
OUT_OF_MEMORY = "it asked for more than the 1 GiB of memory that a check allows"


def judge(exercise: Exercise, trials: Sequence[Trial], outcome: Outcome) -> list[Line]:
    """The lines of the table, in the order of the claims."""
    judged = _Judged(exercise, trials, outcome)
    values = [_values_line(judged, claim) for claim in exercise.claims if claim.key not in COUNTED]
    all_right = all(line.passed for line in values)
    some_right = any(line.passed for line in values)
    counted = {
        "traffic": lambda claim: _traffic_line(judged, claim, all_right),
        "memory": lambda claim: _memory_line(judged, claim, all_right),
        "time": lambda claim: _time_line(judged, claim, all_right),
        "no deadlock": lambda claim: _deadlock_line(judged, claim, some_right),
    }
    lines = iter(values)
    return [counted[claim.key](claim) if claim.key in counted else next(lines) for claim in exercise.claims]


def details(exercise: Exercise, trials: Sequence[Trial], outcome: Outcome) -> str:
    """The whole report of the first trial that did not end well, or nothing."""
    for trial, told in zip(trials, outcome.told, strict=False):
        if told["error"]:
            return f"{trial.function} with {trial.facts}:\n\n{told['error'][1]}"
    return ""


class _Judged:
    """The trials with what each told, and why one did not end, if it did not."""

    def __init__(self, exercise: Exercise, trials: Sequence[Trial], outcome: Outcome) -> None:
        self.exercise, self.outcome = exercise, outcome
        ended = outcome.ended or "an earlier call was stopped, so this one was not made"
        self.trials: list[tuple[Trial, Told | None, str]] = []
        for number, trial in enumerate(trials):
            told = outcome.told[number] if number < len(outcome.told) else None
            self.trials.append((trial, told, _failure(trial, told, exercise) if told else ended))
            if told is None:
                ended = "an earlier call was stopped, so this one was not made"
        if outcome.replaced:
            names = ", ".join(sorted({name.split(" ")[1] for name in outcome.replaced}))
            why = f"your code has replaced {names}, so what was counted and told means nothing"
            self.trials = [(trial, None, why) for trial in trials]

    def finished(self) -> list[tuple[Trial, Told]]:
        return [(trial, told) for trial, told, why in self.trials if told is not None and not why]

    def unfinished(self) -> list[tuple[Trial, Told | None, str]]:
        return [each for each in self.trials if each[2]]


def _failure(trial: Trial, told: Told, exercise: Exercise) -> str:
    """Why a trial did not end, in one sentence, or nothing."""
    if not told["error"]:
        return ""
    kind, report = told["error"]
    lines = report.splitlines() or [kind]
    why = next((line.removeprefix("Why: ") for line in lines if line.startswith("Why: ")), "")
    if told["cause"] == "MemoryError" or "can't allocate memory" in report:
        return OUT_OF_MEMORY
    if told["cause"] == "TypeError" and "argument" in lines[0]:
        function = exercise.functions[exercise.names.index(trial.function)]
        names = ", ".join(function.__code__.co_varnames[: function.__code__.co_argcount])
        return f"{lines[0]}. It is called as {trial.function}({names})"
    if kind == "DeadlockError":
        return f"no rank can go on. {why[:1].upper()}{why[1:]}"
    if kind == "RunTimeoutError":
        look = next((line for line in lines if line.startswith("Try: ")), "").removeprefix("Try: ")
        return f"it did not end within {told['seconds']:.0f} s and was stopped: {look}".rstrip(": ")
    return f"{lines[0]}{_innermost(lines)}"


def _innermost(report: Sequence[str]) -> str:
    """Where the learner's own lines of a rank's report end: ``, in Cell In[3], line 5``."""
    own = [line.strip() for line in itertools.takewhile(str.strip, report[1:]) if ", line " in line]
    own = [line for line in own if not line.startswith("in ")]  # torch's lines, and ours
    return f", in {own[-1].split(', in ')[0]}" if own else ""


# ---- values ----


def _values_line(judged: _Judged, claim: Claim) -> Line:
    outputs = [each for trial, *_ in judged.trials for each in trial.outputs if each.claim == claim.key]
    compared = any(output.judged is None for output in outputs)
    wanted = f"≤ {TOLERANCE:.0e}" if compared else ""
    worst = 0.0
    for trial, told, why in judged.trials:
        numbered = [(n, output) for n, output in enumerate(trial.outputs) if output.claim == claim.key]
        if not numbered:
            continue
        if why or told is None:
            return Line.failed(claim, f"with {trial.facts}: {why}", best=wanted)
        for number, output in numbered:
            results = _results(told, number, trial)
            wrong = complaint(results, output, trial) or _argument_changed(
                judged.exercise, trial, told, number
            )
            if wrong:
                error = largest_error(results, output)
                measured = f"relative error {error:.2g}" if error < float("inf") else ""
                same = _written_down(judged, trial.function, number)
                return Line.failed(claim, f"with {trial.facts}: {same or wrong}", measured, wanted)
            worst = max(worst, largest_error(results, output))
    if not compared:
        return Line.earned(claim)
    return Line.earned(claim, f"relative error ≤ {worst:.0e}" if worst else "relative error 0", wanted)


def _results(told: Told, number: int, trial: Trial) -> list[Mapping[str, Any]]:
    """What every rank has to tell of one output; nothing where a rank returned fewer."""
    n_returned = len(trial.outputs) - (_n_gradients(trial) if trial.upstream is not None else 0)
    results = []
    for value in told["values"]:
        value = value or {"results": [], "gradients": []}
        given, at = (
            (value["results"], number) if number < n_returned else (value["gradients"], number - n_returned)
        )
        results.append(given[at] if at < len(given) else {"nothing": True})
    return results


def _n_gradients(trial: Trial) -> int:
    return sum(tensor.requires_grad for _, tensor in tensors_in(enumerate(trial.args[0])))


def _argument_changed(exercise: Exercise, trial: Trial, told: Told, number: int) -> str:
    if not trial.keeps or number:
        return ""
    for rank, value in enumerate(told["values"]):
        if value and value["changed"]:
            function = exercise.functions[exercise.names.index(trial.function)]
            named = zip(function.__code__.co_varnames, trial.args[rank], strict=False)
            name, _ = tensors_in(named)[value["changed"][0]]
            return (
                f"{trial.function} changed its argument {name} on rank {rank}: work on a copy, {name}.clone()"
            )
    return ""


def _written_down(judged: _Judged, function: str, number: int) -> str:
    """Whether the same numbers came for different arguments of the same shapes."""
    seen: list[tuple[Any, ...]] = []
    for trial, told in judged.finished():
        has_tensors = any(True for args in trial.args for _ in tensors_in(enumerate(args)))
        if trial.function != function or not has_tensors:  # equal arguments may give equal numbers
            continue
        numbers = [each.get("data") for each in _results(told, number, trial)]
        shapes = [list(map(_without_numbers, args)) for args in trial.args]
        flat = [number for each in numbers for number in each or ()]
        if any(flat) and all(map(isfinite, flat)):  # zeros, or no numbers at all, are other mistakes
            if (shapes, numbers) in seen:
                return (
                    f"{trial.outputs[number].name}: the same numbers came for other arguments of the same "
                    "shapes. Were they written down instead of computed?"
                )
            seen.append((shapes, numbers))
    return ""


def _without_numbers(arg: Any) -> Any:
    """An argument with shapes in place of its tensors."""
    return list(map(_without_numbers, arg)) if isinstance(arg, list) else getattr(arg, "shape", arg)


# ---- what is counted ----


def _events(told: Told, phase: str) -> list[Event]:
    return [
        Event(
            rank=each["rank"],
            kind=each["kind"],
            group="",
            members=tuple(each["members"]),
            sequence=each["sequence"],
            shape=(),
            dtype="",
            n_elements=each["n_elements"],
            bytes_sent=each["bytes_sent"],
            issued_s=0.0,
            done_s=0.0,
            waited_s=0.0,
            where=NOWHERE,
            peer=each["peer"],
            region=each["region"],
        )
        for each in told["events"]
        if each["region"].split("/")[0] == phase
    ]


def _sent(told: Told, phase: str, n_ranks: int) -> list[int]:
    sent = [0] * n_ranks
    for event in _events(told, phase):
        sent[event.rank] += event.bytes_sent
    return sent


def _traffic_line(judged: _Judged, claim: Claim, all_right: bool) -> Line:
    measured, best = _traffic_texts(judged)
    for trial, told in judged.finished():
        wrong = _traffic_complaint(trial, told)
        if wrong:
            return Line.failed(claim, f"{trial.function} with {trial.facts}: {wrong}", measured, best)
    return _once_right(judged, claim, all_right, measured, best)


def _traffic_complaint(trial: Trial, told: Told) -> str:
    for phase, budget in trial.budgets.items():
        sent, events = _sent(told, phase, trial.n_ranks), _events(told, phase)
        where = "" if list(trial.budgets) == ["forward"] else f"{phase}, "
        total, least, possible = sum(sent), FLOAT64_BYTES * budget.total, FLOAT64_BYTES * budget.least
        if total < possible:
            what = "nothing was sent" if not total else f"only {total:,} of {possible:,} bytes were sent"
            return f"{where}{what}, and {budget.why}"
        for rule in trial.rules:
            broken = rule(trial, events)
            if broken:
                return broken
        whole, kind = _whole_gathered(trial, events)
        most = FLOAT64_BYTES * budget.busiest
        if whole and (total > least or max(sent) > most):
            return f"{where}{kind} brought the whole of {whole} to every rank: {budget.why}"
        if total > least:
            much = f"{total / least:.3g} times as much" if least else f"{total:,} bytes"
            what = f"{least:,} bytes are" if least else "nothing is"
            return f"{where}{much} was sent by all ranks together, where {what} enough: {budget.why}"
        if max(sent) > most:
            busiest = sent.index(max(sent))
            return (
                f"{where}rank {busiest} sends {max(sent):,} bytes, and {most:,} would do: "
                "share the work out evenly"
            )
    if not trial.budgets:
        for rule in trial.rules:
            broken = rule(trial, _events(told, "forward"))
            if broken:
                return broken
    return ""


def _whole_gathered(trial: Trial, events: Sequence[Event]) -> tuple[str, str]:
    """The tensor that came whole to a rank, and by which collective, if one did."""
    for name, n_elements in trial.wholes.items():
        for event in events:
            if event.kind in ("all_gather", "gather", "broadcast") and event.n_elements >= n_elements:
                return name, event.kind
    return "", ""


def _traffic_texts(judged: _Judged) -> tuple[str, str]:
    """What was sent, and what is best, in the largest trial of each function."""
    measured, best = [], []
    largest: dict[str, tuple[Trial, Told]] = {}
    for trial, told in judged.finished():
        if trial.function not in largest or trial.n_ranks > largest[trial.function][0].n_ranks:
            largest[trial.function] = trial, told
    for trial, told in largest.values():
        for phase, budget in trial.budgets.items():
            events = _events(told, phase)
            kinds = [event.kind for event in events if event.rank == 0 and event.kind != "recv"]
            calls = " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "no call"
            names = [trial.function] * (len(largest) > 1) + [phase] * (len(trial.budgets) > 1)
            name = f"{', '.join(names)}: " if names else ""
            measured.append(f"{name}{calls}, {sum(_sent(told, phase, trial.n_ranks)):,} bytes in all")
            best.append(f"{FLOAT64_BYTES * budget.total:,} bytes")
    return "\n".join(measured), "\n".join(best)


def _memory_line(judged: _Judged, claim: Claim, all_right: bool) -> Line:
    worst: tuple[float, str, str] = (0.0, "", "")
    for trial, told in judged.finished():
        for rank, value in enumerate(told["values"]):
            for phase, peak in value["peaks"].items():
                if phase not in trial.metered:
                    continue
                most = trial.most_bytes(rank)
                share = peak / most
                if share > worst[0]:
                    worst = share, f"{peak:,} bytes at most besides its arguments", f"≤ {most:,} bytes"
                if peak > most:
                    whole, _ = _whole_gathered(trial, _events(told, phase))
                    held = f"{peak:,} bytes besides its arguments, and {most:,} are plenty"
                    what = f"rank {rank} held " + (f"the whole of {whole}: {held}" if whole else held)
                    if trial.too_much:
                        what += f". {trial.too_much}"
                    if all_right:
                        what = f"right numbers, but {what}"
                    return Line.failed(claim, f"{trial.function} with {trial.facts}: {what}", *worst[1:])
    return _once_right(judged, claim, all_right, *worst[1:])


def _time_line(judged: _Judged, claim: Claim, all_right: bool) -> Line:
    """When the last rank was done, on the virtual clock of the trial's machine."""
    measured, best = "", ""
    for trial, told in judged.finished():
        if trial.deadline is None:
            continue
        done, most = 1e6 * told["done_s"], 1e6 * trial.deadline.most_s
        measured, best = f"{done:.1f} µs on a virtual clock", f"≤ {most:.1f} µs"
        if done > most and all_right:
            why = f"it took {done:.1f} µs, and {most:.1f} are enough: {trial.deadline.why}"
            return Line.failed(claim, f"{trial.function} with {trial.facts}: {why}", measured, best)
    return _once_right(judged, claim, all_right, measured, best)


def _deadlock_line(judged: _Judged, claim: Claim, some_right: bool) -> Line:
    n = len(judged.finished())
    measured, best = f"{n} of {len(judged.trials)} calls ended", "all, in any order of turns"
    for trial, told, why in judged.unfinished():
        hung = told is not None and told["error"][0] in ("DeadlockError", "MismatchError", "RunTimeoutError")
        if hung or (told is None and judged.outcome.ended):
            return Line.failed(claim, f"{trial.function} with {trial.facts}: {why}", measured, best)
        return Line.not_judged(claim, "not judged: a call did not end", measured, best)
    for trial, told in judged.finished():
        if told["notes"]:
            return Line.failed(
                claim, f"{trial.function} with {trial.facts}: {told['notes'][0]}", measured, best
            )
    if not some_right:
        return Line.not_judged(claim, "counts once some of the numbers are right", measured, best)
    return Line.earned(claim, measured, best)


def _once_right(judged: _Judged, claim: Claim, all_right: bool, measured: str, best: str) -> Line:
    if not all_right:
        return Line.not_judged(claim, "counts once all numbers are right", measured, best)
    return Line.earned(claim, measured, best)
