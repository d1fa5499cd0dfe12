"""Runs a learner's functions in a child process, and waits no longer than it must.

Whatever the functions do, loop, crash, exit, allocate, print, costs seconds and never this process: what
comes back are numbers and text, read from JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from lessons_lib.errors import RunError
from lessons_lib.grading.exercise import Trial
from lessons_lib.grading.job import TRIAL_S, Call, Job, patience
from lessons_lib.spmd import by_value, processes
from lessons_lib.spmd.lines import notebook_cells

CHILD = "lessons_lib.grading.child"
DIED = "died"
STARTING_S = 60.0  # a new Python that loads torch takes its time
SILENT_S = TRIAL_S + 3.0  # a child that says nothing for so long is not coming back, on an idle machine
AT_MOST_S = 30.0  # for all trials together
LONGEST_MESSAGE = 64 * 2**20  # bytes

Start = Callable[[int, str], processes.Ranks]


@dataclass
class Outcome:
    """What became of a job. ``told`` has what each trial told, as far as the child got."""

    told: list[dict[str, Any]] = field(default_factory=list)
    patience: float = 1.0  # how many times longer than on an idle machine was waited
    ended: str = ""  # why it did not get to the end
    printed: str = ""
    n_printed: int = 0
    replaced: list[str] = field(default_factory=list)  # what counts and tells, and was replaced


def run_in_child(
    functions: dict[str, Callable[..., Any]],
    trials: Sequence[Trial],
    turns: Sequence[int],
    start: Start | None = None,
) -> Outcome:
    """Run every trial with the learner's ``functions``; raise RefusedError if they cannot be sent."""
    outcome = Outcome(patience=patience())
    job = Job(
        functions=_packed(functions),
        calls=[_call(trial, seed) for trial, seed in zip(trials, turns, strict=True)],
        cells=notebook_cells(),
        path=list(sys.path),
        working_directory=os.getcwd(),
        trial_s=TRIAL_S * outcome.patience,
    )
    try:
        ((connection, process),) = (start or _default_start())(1, CHILD)
    except RunError as error:
        outcome.ended = f"no child process could be started: {error}"
        return outcome
    try:
        connection.send_bytes(pickle.dumps(job))
        outcome.ended = _listen(connection, outcome)
        if outcome.ended == DIED:
            outcome.ended = _how_it_ended(process)
    finally:
        connection.close()
        with suppress(OSError, AttributeError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    return outcome


def _packed(functions: dict[str, Callable[..., Any]]) -> bytes:
    try:
        return by_value.dumps(functions)
    except Exception:
        for function in functions.values():
            by_value.pack(function, ())  # names what cannot be copied
        raise


def _call(trial: Trial, turns: int) -> Call:
    return Call(
        trial.function,
        trial.sizes,
        [pickle.dumps(args) for args in trial.args],
        None if trial.upstream is None else [pickle.dumps(each) for each in trial.upstream],
        turns,
        None if trial.deadline is None else trial.deadline.machine,
        trial.then,
    )


def _default_start() -> Start:
    return processes.forked if processes.default_start() is processes.forked else processes.spawned


def _listen(connection: Connection, outcome: Outcome) -> str:
    """Take down what the child tells until it is done; say why if it does not get so far."""
    silent_s, until = STARTING_S, time.perf_counter() + STARTING_S
    while True:
        if not connection.poll(max(0.0, min(silent_s, until - time.perf_counter()))):
            return f"it was stopped: nothing was heard of it for {silent_s:.0f} s. Is it in a loop?"
        try:
            message = json.loads(connection.recv_bytes(LONGEST_MESSAGE))
        except (EOFError, OSError, ValueError):
            return DIED
        if "ready" in message:
            silent_s = SILENT_S * outcome.patience
            until = time.perf_counter() + AT_MOST_S * outcome.patience
        elif "trial" in message:
            outcome.told.append(message)
        elif "printed" in message:
            outcome.printed, outcome.n_printed = message["printed"], message["n_characters"]
        elif "replaced" in message:
            outcome.replaced = message["replaced"]
        elif "broke" in message:
            return f"it broke off before any rank ran, or after all had: {message['broke']}"
        elif "done" in message:
            return ""


def _how_it_ended(process: processes.Process) -> str:
    until = time.perf_counter() + 1.0
    while process.exit_code is None and time.perf_counter() < until:
        time.sleep(0.005)
    match process.exit_code:
        case None:
            return "it closed its connection, so nothing more was heard of it"
        case code if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
            return f"it was killed by signal {-code} ({name}), as a crash or a lack of memory does"
        case code:
            return f"it ended its process with exit code {code}: return instead"
