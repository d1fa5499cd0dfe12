"""Train real stages by a schedule: every rank carries out its row, action by action."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group
from lessons_lib.models.gpt import IGNORED
from lessons_lib.pipeline_parallel.actions import Action, Pair, Schedule
from lessons_lib.pipeline_parallel.joined import Held, Joined
from lessons_lib.pipeline_parallel.messages import Messages
from lessons_lib.pipeline_parallel.program import Program, program_of
from lessons_lib.pipeline_parallel.rules import Result, makes, needs
from lessons_lib.pipeline_parallel.stage_passes import Stage
from lessons_lib.pipeline_parallel.stashed import StashedWeights
from lessons_lib.pipeline_parallel.timeline import PipelineTimeline
from lessons_lib.pipeline_parallel.times import Number, Times
from lessons_lib.spmd import compute, region
from lessons_lib.spmd.current import current

Microbatch = tuple[Tensor, Tensor]  # inputs and targets, their rows in dim 0
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Executed:
    """What a step gave. ``loss`` is the mean over all tokens, the same on every rank.

    ``losses`` are the sums of the micro-batches whose loss this rank made: none on a rank without the last
    stage.
    """

    loss: float
    timeline: PipelineTimeline
    losses: Mapping[int, float] = field(repr=False)


def cut_batch(X: Tensor, Y: Tensor, n_microbatches: int) -> list[Microbatch]:
    """Cut a batch into micro-batches, as even as it goes: pairs of inputs and targets.

    >>> [len(x) for x, _ in cut_batch(torch.zeros(10, 3), torch.zeros(10), 4)]
    [3, 3, 2, 2]
    """
    if not 1 <= n_microbatches <= len(X) or len(X) != len(Y):
        raise RefusedError(
            f"{len(X)} rows of inputs and {len(Y)} of targets cannot be cut into {n_microbatches} "
            "micro-batches: every one needs a row, and every row its target."
        )
    return list(zip(X.tensor_split(n_microbatches), Y.tensor_split(n_microbatches), strict=True))


def execute(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    microbatches: Sequence[Microbatch],
    loss: Loss,
    group: Group,
    *,
    n_tokens: int | None = None,
    times: Times | None = None,
    tied: Sequence[Sequence[Held]] = (),
    optimizers: Mapping[int, Optimizer] | None = None,
) -> Executed:
    """Train the stages of this rank for one step; every rank of ``group`` calls it with the same schedule.

    >>> from lessons_lib import Mesh, run
    >>> from lessons_lib.pipeline_parallel import one_f_one_b
    >>> def step():
    ...     group = Mesh(pp=2)["pp"]
    ...     layer = nn.Linear(2, 2)
    ...     nn.init.eye_(layer.weight), nn.init.zeros_(layer.bias)
    ...     batch = cut_batch(torch.ones(5, 2), torch.zeros(5, 2), 2)
    ...     squares = lambda Y, T: (Y - T).square().sum()
    ...     done = execute(one_f_one_b(2, 2), {group.rank: layer}, batch, squares, group)
    ...     return done.loss, layer.bias.grad.tolist()
    >>> run(step, ranks=2).values[0]                # the mean of 10 squares of 1; of 5 rows, each 2/10
    (1.0, [1.0, 1.0])

    ``stages`` are modules by stage number: all that the schedule gives to this rank, and no others. A stage
    takes a tensor and gives one, whose dim 0 holds the rows of the micro-batch.
    ``microbatches`` are pairs of inputs and targets of any sizes, as :func:`cut_batch` makes them. Every rank
    gives all of them: the first stage uses the inputs, the last the targets, the others the shapes.
    ``loss(output, targets)`` is the *sum* over the tokens of a micro-batch. It is divided here and nowhere
    else, by ``n_tokens``: if not given, the number of targets of all micro-batches, without those that are
    none (-100). With data parallel it is the number of targets of all replicas.

    Gradients are added to ``.grad``; nobody wipes them. A stage that two ranks hold, and the places ``tied``
    names (``[[(0, "embedding.weight"), (3, "head.weight")]]``), get the sum over all that hold them.
    A schedule with updates on the way needs ``optimizers`` by stage; it then divides by the number of targets
    of each update.

    The timeline holds the clock of the run. On a virtual clock, ``times`` assumes that actions take so many
    seconds each; stages may also call :func:`lessons_lib.compute` themselves.

    Traffic: an output per micro-batch and border, and an input gradient back; in the region ``"shapes"`` 80
    bytes for each border and shape; in ``"join"`` the gradients held by two ranks; and in ``"timeline"`` the
    loss and the times, gathered once at the end.

    Raises RefusedError, before anything is sent, where schedule, stages, micro-batches and group do not fit,
    and IllegalScheduleError for a schedule that would come to a standstill.
    """
    program = program_of(schedule)
    _check(program, stages, microbatches, group, n_tokens, tied, optimizers or {})
    rank = _Rank(program, stages, microbatches, loss, group, n_tokens, times, optimizers or {})
    joined = Joined(stages, program.homes, tied, group, 2 * program.n_tags) if program.trains else None
    with torch.set_grad_enabled(program.trains):
        for action in schedule.rows[group.rank]:
            rank.do(action)
    rank.messages.finish()
    if joined is not None:
        joined.join()
    return rank.gather()


class _Rank:
    """One rank while it carries out its row."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, nn.Module],
        microbatches: Sequence[Microbatch],
        loss: Loss,
        group: Group,
        n_tokens: int | None,
        times: Times | None,
        optimizers: Mapping[int, Optimizer],
    ) -> None:
        self.program, self.schedule, self.group = program, program.schedule, group
        self.microbatches, self.loss = microbatches, loss
        self.stages = {number: Stage(number, module) for number, module in stages.items()}
        self.device = next(iter(self.stages.values())).device
        kinds = [(x.shape, x.dtype) for x, _ in microbatches]
        self.messages = Messages(program, group, kinds, self.device)
        self.takes = times.durations(self.schedule.n_stages) if times is not None else None
        self.handed_on: dict[Result, Tensor] = {}  # to another stage of this rank
        self.losses: dict[int, float] = {}
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.arrivals: list[list[float]] = []  # of what each action sent
        counts = [_count(targets) for _, targets in microbatches]
        self.n_tokens = n_tokens or sum(counts)
        self.divisors = {
            k: n_tokens or sum(counts[each] for each in together)
            for together in program.together
            for k in together
        }
        self.stashed = {
            number: StashedWeights(module, optimizers[number], program.versions[group.rank])
            for number, module in stages.items()
            if program.updates
        }

    def do(self, action: Action | Pair) -> None:
        """Wait for what an action needs, do it, and send what it has made to who needs it."""
        arrived = [self._await(part) for part in action.parts]
        self.starts.append(_now())
        made = [self._perform(part, given) for part, given in zip(action.parts, arrived, strict=True)]
        del arrived
        if self.takes is not None:
            compute(_duration(self.takes, action))
        self.ends.append(_now())
        sent = [self._hand_on(part, x) for part, x in zip(action.parts, made, strict=True)]
        self.arrivals.append((sent * 2)[:2])

    def _await(self, part: Action) -> Tensor | None:
        """The result of a neighbouring stage that an action needs, if it needs one."""
        for result in needs(part, self.schedule.n_stages):
            if result.stage != part.stage:
                if self.messages.home(result) == self.group.rank:
                    return self.handed_on.pop(result)
                kept = self.stages[part.stage].kept.get(part.microbatch)
                return self.messages.receive(result, None if kept is None else kept.like)
        return None

    def _perform(self, part: Action, given: Tensor | None) -> Tensor | None:
        """What an action makes for another stage, if it makes that."""
        kind, number, k = part
        stage = self.stages[number]
        made = None
        if kind == "F":
            made = self._forward(stage, k, given)
        elif kind in ("B", "I"):
            made = stage.backward(k, given)
        elif kind == "W":
            stage.weight_gradients(k)
        elif kind == "U":
            self.stashed[number].update()
        if kind in ("B", "W") and number in self.stashed:
            self.stashed[number].made(k)
        return made

    def _forward(self, stage: Stage, k: int, given: Tensor | None) -> Tensor:
        inputs, targets = self.microbatches[k]
        stashed = self.stashed.get(stage.number)
        return stage.forward(
            k,
            inputs.detach() if given is None else given,
            n_rows=len(inputs),
            run=partial(stashed.run, k) if stashed else stage.module,
            loss_of=partial(self._share, k, targets) if self._is_last(stage) else None,
            split=(stage.number, k) in self.program.split,
        )

    def _is_last(self, stage: Stage) -> bool:
        return stage.number == self.schedule.n_stages - 1

    def _share(self, k: int, targets: Tensor, y: Tensor) -> Tensor:
        """What a micro-batch adds to the mean: the only place where anything is divided."""
        loss = self.loss(y, targets)
        self.losses[k] = float(loss.detach())
        return loss / self.divisors[k]

    def _hand_on(self, part: Action, made: Tensor | None) -> float:
        """Send a result to who needs it; return when it will be there."""
        now = _now()
        for result in makes(part):
            taker = self.program.takers.get(result)
            if taker is None:
                continue
            assert made is not None
            if taker[0] == self.group.rank:
                self.handed_on[result] = made
            else:
                self.messages.send(result, made)
                now = self._arrives(taker[0], made, now)
        return now

    def _arrives(self, to: int, x: Tensor, now: float) -> float:
        rank = current()
        if rank is None or rank.machine is None:
            return now
        members = torch.distributed.get_process_group_ranks(self.group.process_group)
        return now + rank.machine.link(members[self.group.rank], members[to]).message_s(x.nbytes)

    def gather(self) -> Executed:
        """What every rank did and when, on every rank; and the one loss."""
        rows = self.schedule.rows
        longest = max(map(len, rows))
        own = torch.zeros(2 + 4 * longest, dtype=torch.float64)
        own[0], own[1] = sum(self.losses.values()), self.messages.bytes_sent
        times = [
            [start, end, *arrivals]
            for start, end, arrivals in zip(self.starts, self.ends, self.arrivals, strict=True)
        ]
        own[2 : 2 + 4 * len(times)] = torch.tensor(times, dtype=torch.float64).flatten()
        with region("timeline"):
            every = self.group.all_gather(own.to(self.device), dim=0).cpu().view(self.group.size, -1)
        table = every[:, 2:].view(self.group.size, longest, 4)
        began = min(float(table[rank, 0, 0]) for rank, row in enumerate(rows) if row)
        found = [(table[rank, : len(row)] - began).tolist() for rank, row in enumerate(rows)]
        arrivals = {
            result: found[rank][index][2 + part]
            for rank, row in enumerate(rows)
            for index, action in enumerate(row)
            for part, each in enumerate(action.parts)
            for result in makes(each)
            if result in self.program.takers
        }
        timeline = PipelineTimeline(
            self.schedule,
            [[each[0] for each in row] for row in found],
            [[each[1] for each in row] for row in found],
            arrivals=arrivals,
            message_bytes=self._message_bytes(int(every[:, 1].sum())),
            clock="measured" if getattr(current(), "machine", None) is None else "virtual",
        )
        return Executed(float(every[:, 0].sum()) / self.n_tokens, timeline, self.losses)

    def _message_bytes(self, bytes_sent: int) -> int:
        """What a message carries, of all ranks' messages; 0 where that is no whole number."""
        makers, takers = self.program.makers, self.program.takers
        n_messages = sum(makers[result][0] != to for result, (to, _) in takers.items())
        return 0 if not n_messages or bytes_sent % n_messages else bytes_sent // n_messages


def _count(targets: Tensor) -> int:
    """How many targets there are: tokens without those that are none, or numbers."""
    return targets.numel() if targets.is_floating_point() else int((targets != IGNORED).sum())


def _now() -> float:
    """Seconds on the clock of this rank."""
    rank = current()
    return time.perf_counter() if rank is None else rank.clock.now()


def _duration(takes: Mapping[str, Sequence[Number]], action: Action | Pair) -> float:
    if action.kind in takes:
        return float(takes[action.kind][action.parts[-1].stage])
    return float(sum(takes[part.kind][part.stage] for part in action.parts))


def _check(
    program: Program,
    stages: Mapping[int, nn.Module],
    microbatches: Sequence[Microbatch],
    group: Group,
    n_tokens: int | None,
    tied: Sequence[Sequence[Held]],
    optimizers: Mapping[int, Optimizer],
) -> None:
    schedule = program.schedule
    p, m = schedule.n_ranks, schedule.n_microbatches
    if group.size != p:
        raise RefusedError(
            f"{schedule!r} is for {p} ranks and the group has {group.size}: make the schedule with "
            f"p={group.size}, or the mesh with pp={p}."
        )
    if len(microbatches) != m:
        raise RefusedError(
            f"{schedule!r} is for {m} micro-batches and {len(microbatches)} were given: cut the batch into "
            f"{m}, or make the schedule with m={len(microbatches)}."
        )
    for k, (inputs, targets) in enumerate(microbatches):
        if not inputs.numel() or len(inputs) != len(targets):
            raise RefusedError(
                f"micro-batch {k} has inputs of shape {list(inputs.shape)} and targets of shape "
                f"{list(targets.shape)}: every micro-batch has rows, and each row its target."
            )
    if n_tokens is None:
        n_tokens = sum(_count(targets) for _, targets in microbatches)
    if n_tokens < 1:
        raise RefusedError(
            f"n_tokens={n_tokens}: the loss is divided by the number of all targets; one at least must be "
            "there, and not -100, which is none."
        )
    mine = schedule.stages[group.rank]
    if sorted(stages) != mine:
        raise RefusedError(
            f"rank {group.rank} was given the stages {sorted(stages)}, and {schedule.name} gives it {mine}: "
            f"pass {{stage: module for stage in schedule.stages[group.rank]}}."
        )
    if not program.updates:
        return
    if any(len(homes) > 1 for homes in program.homes) or tied:
        raise RefusedError(
            f"{schedule.name} updates weights on the way, and some are held in two places, whose gradients "
            "are joined only at the end: the copies would become different models."
        )
    missing = [stage for stage in mine if stage not in optimizers]
    if missing:
        raise RefusedError(
            f"{schedule.name} updates weights on the way (U), and no optimizer was given for stage "
            f"{missing[0]}: pass optimizers={{stage: SGD(module.parameters(), lr=...)}}."
        )
