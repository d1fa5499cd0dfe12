"""ZeRO 1, 2 and 3: one mechanism, and a row of the stage table.

A model is a list of units in the order in which forward uses them. Around each of them hang four hooks:

    before its forward      gather this unit, and begin to gather the next one
    after its forward       free it
    before its backward     gather it again, and begin to gather the one before
    a gradient has come     when it was the unit's last: free the unit, begin to reduce its gradients

Where the stage holds a copy, gathering and freeing do nothing. So at most two gathered units are alive, and
gradients of at most two: one that backward fills, one on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lessons_lib.data_parallel.stages import COPY, CUT, Stage, stage_of
from lessons_lib.data_parallel.unit import MakeOptimizer, Slot, Stretch, Unit
from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group


class Zero:
    """A model whose optimizer state, gradients and parameters lie as ``stage`` says; an optimizer for it.

    >>> from torch.optim import Adam
    >>> from lessons_lib import Mesh, run
    >>> def step():
    ...     model, group = nn.Linear(3, 2), Mesh(dp=4)["dp"]
    ...     zero = Zero(model, 3, group, Adam)
    ...     model(torch.ones(1, 3)).sum().backward()
    ...     zero.step()
    ...     return tuple(model.weight.shape), zero.stored_bytes()
    >>> run(step, ranks=4).values[0]                       # 8 parameters, 4 bytes each: 2 on each rank
    ((2, 3), {'parameters': 8, 'gradients': 8, 'state': 20})

    ``make_optimizer`` is one of torch's optimizers, which is given flat pieces in place of parameters. It
    must work on every element by itself, as SGD, Adam and AdamW do; one that needs a norm of each tensor
    (LAMB, Adafactor, Muon) would take the norms of pieces. ``state`` above are Adam's two moments, and its
    step.

    The loss has been divided by the number of all ranks' tokens (:mod:`lessons_lib.data_parallel.rows`), and
    gradients are summed. A rank without tokens runs its step on an empty batch: gathers need all ranks.

    With a ``compute_dtype`` parameters and gradients have it, and the optimizer keeps a master copy in the
    dtype the model came in, cut as its state is.

    Traffic: :func:`lessons_lib.data_parallel.stages.traffic`, of the parameters with their padding.
    Memory: :func:`lessons_lib.data_parallel.stages.stored`, and two units as buffers.
    Every rank makes it from the same model, whole; parameters that need no gradient stay whole.

    Raises RefusedError for an unknown stage, or a module of ``units`` that does not belong to the model.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: int | Stage,
        group: Group,
        make_optimizer: MakeOptimizer,
        units: Sequence[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self.stage = group, stage_of(stage)
        self.units: list[Unit] = []
        self._next = -1  # the unit to be reduced next, from the last to the first; -1 between two rounds
        self._reducing: Unit | None = None
        self._holding = False
        owned: set[nn.Parameter] = set()
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        for module in units_of(model) if units is None else units:
            mine = {names[p]: p for p in module.parameters() if p in names and p not in owned}
            if mine:
                self.units.append(Unit(mine, self.stage, group, make_optimizer, compute_dtype))
                owned.update(mine.values())
            self._hook(module, mine)
        left = [name for p, name in names.items() if p not in owned]
        if left or not owned:
            raise RefusedError(
                f"no unit holds {', '.join(left) or 'a parameter that needs a gradient'}; "
                f"units are modules of the model that together have all its parameters."
            )

    # ---- what a training loop calls

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all units' optimizers: a schedule sets ``group["lr"]`` as it would for one."""
        return [group for unit in self.units for group in unit.optimizer.param_groups]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Do not reduce yet, where the stage has room for whole gradients: a further micro-batch will add."""
        self._holding = self.stage.gradients == COPY
        try:
            yield
        finally:
            self._holding = False
            for unit in self.units:
                unit.expect_all()

    def reduce(self) -> None:
        """Wait until all gradients are summed. Every rank calls this after its last backward."""
        self._wait()
        if self._next >= 0 or any(unit.gradient is not None or unit.reduced is None for unit in self.units):
            self._reduce_the_rest()
        self._wait()
        for unit in self.units:
            unit.free()

    def update(self, factor: float = 1.0) -> None:
        """Take the optimizer's step with ``factor`` times the gradients; bring parameters to their place."""
        for work in [unit.update(factor) for unit in self.units]:
            if work is not None:
                work.wait()

    def step(self) -> None:
        self.reduce()
        self.update()

    def zero_grad(self) -> None:
        for unit in self.units:
            unit.gradient = unit.reduced = None

    # ---- what can be seen of it

    def gradients(self) -> list[Stretch]:
        """The parts of the reduced gradients that are on this rank."""
        return [
            stretch
            for unit in self.units
            if unit.reduced is not None
            for stretch in unit.stretches(unit.reduced)
        ]

    def whole_gradients(self) -> dict[str, Tensor]:
        """Every reduced gradient by its name, gathered on every rank: for comparing, not for training."""
        whole: dict[str, Tensor] = {}
        for unit in self.units:
            if unit.reduced is not None:
                whole |= unit.unflattened(unit.reduced)
        return whole

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter by its name, in the optimizer's precision, gathered on every rank."""
        whole: dict[str, Tensor] = {}
        for unit in self.units:
            whole |= unit.unflattened(unit.master.detach())
        return whole

    def stored_bytes(self) -> dict[str, int]:
        """Bytes of what this rank holds between steps, by kind, found at the tensors themselves."""
        held = {"parameters": 0, "gradients": 0, "state": 0}

        def add(kind: str, *tensors: Any) -> None:
            held[kind] += sum(x.untyped_storage().nbytes() for x in tensors if isinstance(x, Tensor))

        for unit in self.units:
            add("parameters", unit.held, unit.whole if unit.is_cut else None)
            add("gradients", unit.gradient, unit.reduced)
            add("state", *unit.optimizer.state.get(unit.master, {}).values())
            add("state", unit.master if unit.master.dtype != unit.held.dtype else None)
        return held

    def state(self) -> dict[str, Stretch | Tensor]:
        """What a checkpoint holds of this rank, by the names that a serial model and its optimizer have.

        ``model.NAME`` is the stretch of a parameter, in the optimizer's precision, ``optimizer.NAME.WHAT``
        that of a moment. What is one number for a whole unit, as Adam's step, is a tensor, the same on every
        rank. Loading fills these views in place; :meth:`loaded` then brings the parameters where they belong.
        """
        parts: dict[str, Stretch | Tensor] = {}
        for unit in self.units:
            parts |= {f"model.{s.name}": s for s in unit.stretches(unit.master.detach())}
            for what, value in unit.optimizer.state.get(unit.master, {}).items():
                if not isinstance(value, Tensor):
                    continue
                for stretch in unit.stretches(value if value.dim() else unit.master.detach()):
                    parts[f"optimizer.{stretch.name}.{what}"] = stretch if value.dim() else value
        return parts

    def loaded(self) -> None:
        """Bring parameters where they belong after their optimizer's parts were changed."""
        for work in [unit.spread() for unit in self.units]:
            if work is not None:
                work.wait()

    # ---- hooks

    def _hook(self, module: nn.Module, mine: Mapping[str, nn.Parameter]) -> None:
        """Gather what ``module`` needs: the unit it owns, or the owners of parameters that it shares."""
        parameters = set(module.parameters())
        needs = [
            at
            for at, unit in enumerate(self.units)
            if any(slot.parameter in parameters for slot in unit.slots)
        ]
        if not needs:
            return
        if self.stage.parameters == CUT:
            module.register_forward_pre_hook(partial(self._before_forward, needs))
            module.register_forward_hook(partial(self._after_forward, needs))
        if mine:
            at = len(self.units) - 1
            for slot in self.units[at].slots:
                slot.parameter.register_post_accumulate_grad_hook(partial(self._arrive, at, slot))

    def _before_forward(self, needs: Sequence[int], module: nn.Module, given: Any) -> None:
        again = any(self.units[at].in_backward for at in needs)  # a recomputation: the next unit is done
        self._gather(needs, ahead=-1 if again else max(needs) + 1)

    def _after_forward(self, needs: Sequence[int], module: nn.Module, given: Any, y: Any) -> None:
        if not isinstance(y, Tensor):
            raise RefusedError(
                f"{type(module).__name__} is a unit whose parameters are cut, and its forward returns "
                f"{type(y).__name__}: it must return one tensor, at whose gradient they are gathered again. "
                "Try other units=, or a stage that copies parameters."
            )
        for at in needs:
            if not self.units[at].in_backward:  # else backward is about to use them
                self.units[at].free()
        if y.requires_grad:
            y.register_hook(partial(self._before_backward, needs))

    def _before_backward(self, needs: Sequence[int], dy: Tensor) -> None:
        for at in needs:
            self.units[at].in_backward = True
        self._gather(needs, ahead=min(needs) - 1)

    def _gather(self, needs: Sequence[int], ahead: int) -> None:
        for at in needs:
            self.units[at].gather()
        if 0 <= ahead < len(self.units):
            self.units[ahead].start_gathering()

    def _arrive(self, at: int, slot: Slot, parameter: Tensor) -> None:
        unit = self.units[at]
        if not self._holding and at > self._next:  # a new round; of the last one, units may be left
            if self._next >= 0:
                self._reduce_the_rest()
            self._next = len(self.units) - 1
        unit.take(slot)
        if not unit.missing:
            unit.free()
            while not self._holding and self._next >= 0 and not self.units[self._next].missing:
                self._reduce()

    # ---- reductions: in one order on every rank, one on its way at a time

    def _reduce(self) -> None:
        self._wait()
        self._reducing = self.units[self._next]
        self._reducing.start_reducing()
        self._next -= 1

    def _reduce_the_rest(self) -> None:
        """Of the round that has begun; or all, where none has."""
        if self._next < 0:
            self._next = len(self.units) - 1
        while self._next >= 0:
            self._reduce()

    def _wait(self) -> None:
        if self._reducing is not None:
            self._reducing.finish_reducing()
            self._reducing = None


def units_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one after the other: the model's children, and those of its lists.

    >>> from lessons_lib.models.gpt import GPT, GPTConfig
    >>> [type(unit).__name__ for unit in units_of(GPT(GPTConfig(L=2)))]
    ['Embedding', 'Embedding', 'Block', 'Block', 'LayerNorm', 'Linear']

    A module that has parameters of its own is one unit. Forward should use units in this order: else what was
    gathered ahead waits, and its memory with it.
    """
    containers = (nn.ModuleList, nn.Sequential)
    if next(model.parameters(recurse=False), None) is not None:
        return [model]
    return [
        unit
        for child in model.children()
        if next(child.parameters(), None) is not None
        for unit in (units_of(child) if isinstance(child, containers) else [child])
    ]
