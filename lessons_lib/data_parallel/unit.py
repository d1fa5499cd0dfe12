"""A unit of ZeRO: the parameters of one module as a flat vector that ranks can cut evenly.

The vector has the parameters one after the other, and zeros at the end to make it divisible. Who holds which
part of it stands in the row of the stage table; this class brings its vectors from one place of the row to
the next, and knows nothing of when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lessons_lib.data_parallel.stages import COPY, CUT, TERMS, Stage, padded, send
from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Stretch(NamedTuple):
    """Elements ``start`` to ``start + len(tensor)`` of a flattened parameter: what of it is on this rank."""

    name: str
    tensor: Tensor  # a view, one dim; empty where all of the parameter is on other ranks
    start: int
    shape: torch.Size  # of the parameter


class Slot(NamedTuple):
    """Where a parameter lies in the vector."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


class Unit:
    """Parameters that are gathered, reduced and updated together.

    ``held``      the parameters, as the stage holds them
    ``whole``     all of them, for computing: the same vector, or, where they are cut, one that has memory
                  only between :meth:`gather` and :meth:`free`
    ``gradient``  what this rank's backward has made so far: terms of a sum
    ``reduced``   the sum, as the state lies
    ``master``    the part that this rank's optimizer updates; in a dtype of its own, or a view of ``held``
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        stage: Stage,
        group: Group,
        make_optimizer: MakeOptimizer,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.stage, self.group = stage, group
        self.slots: list[Slot] = []
        for name, parameter in parameters.items():
            start = self.slots[-1].stop if self.slots else 0
            self.slots.append(Slot(name, parameter, parameter.shape, start))
        self.n_elements = self.slots[-1].stop
        self.n_padded = padded(self.n_elements, group.size)
        self.missing: set[str] = set()  # gradients that backward has yet to make
        self.expect_all()

        vector = self._flattened()
        whole = vector.to(compute_dtype or vector.dtype)
        n = self.n_padded // group.size
        self.piece = slice(group.rank * n, (group.rank + 1) * n)  # of this rank, where the vector is cut
        self.held = whole if stage.parameters == COPY else whole[self.piece].clone()
        updated = self._updated()
        lower = whole.dtype != vector.dtype  # the optimizer works on what was not rounded
        self.master = nn.Parameter(self._as_state(vector).clone() if lower else updated)
        self.optimizer = make_optimizer([self.master])
        self.whole = whole
        self.gradient: Tensor | None = None
        self.reduced: Tensor | None = None
        self._arriving: Tensor | None = None
        self._gathering: dist.Work | None = None
        self._reducing: dist.Work | None = None
        self.is_gathered = True
        self.in_backward = False
        self._lend()
        self.free()

    def _flattened(self) -> Tensor:
        dtypes = {slot.parameter.dtype for slot in self.slots}
        if len(dtypes) > 1:
            raise RefusedError(
                f"{', '.join(slot.name for slot in self.slots)} have the dtypes "
                f"{', '.join(map(str, dtypes))}; a unit is one vector, of one dtype. Try model.to(...), or "
                "other units."
            )
        first = self.slots[0].parameter
        vector = first.new_zeros(self.n_padded, requires_grad=False)
        for slot in self.slots:
            vector[slot.start : slot.stop] = slot.parameter.detach().flatten()
        return vector

    def _as_state(self, whole: Tensor) -> Tensor:
        """The part of a whole vector that this rank's optimizer works on."""
        return whole[self.piece] if self.stage.state == CUT else whole

    def _updated(self) -> Tensor:
        """The part of ``held`` that this rank's optimizer works on."""
        return self.held if self.stage.parameters == self.stage.state else self._as_state(self.held)

    # ---- parameters: as they are held -> copy, and back

    @property
    def is_cut(self) -> bool:
        return self.stage.parameters == CUT

    def start_gathering(self) -> None:
        if not self.is_gathered:
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.itemsize)
            self._gathering = send(CUT, COPY, self.held, self.whole, self.group)
            self.is_gathered = True

    def gather(self) -> None:
        """Have all parameters here."""
        if not self.is_cut:
            return
        self.start_gathering()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._lend()

    def _lend(self) -> None:
        for slot in self.slots:
            slot.parameter.data = self.whole[slot.start : slot.stop].view(slot.shape)

    def free(self) -> None:
        """Where parameters are cut, give back the memory of those that other ranks hold.

        A parameter keeps its shape and shows NaN: whoever uses it outside of its module's forward will see.
        """
        if not self.is_cut or not self.is_gathered:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        nothing = self.whole.new_full((), math.nan)
        for slot in self.slots:
            slot.parameter.data = nothing.expand(slot.shape)
        self.whole.untyped_storage().resize_(0)
        self.is_gathered = self.in_backward = False

    # ---- gradients: terms of a sum -> as the state lies

    def expect_all(self) -> None:
        self.missing = {slot.name for slot in self.slots}

    def take(self, slot: Slot) -> None:
        """Add the gradient that backward has just made for one parameter."""
        gradient = slot.parameter.grad
        assert gradient is not None
        if self.gradient is None:
            self.gradient = torch.zeros(self.n_padded, dtype=gradient.dtype, device=gradient.device)
        self.gradient[slot.start : slot.stop].view(slot.shape).add_(gradient)
        slot.parameter.grad = None
        self.missing.discard(slot.name)

    def start_reducing(self) -> None:
        self.expect_all()
        if self.gradient is None:  # this rank had no tokens, or they did not come here
            self.gradient = torch.zeros(self.n_padded, dtype=self.held.dtype, device=self.held.device)
        if self.stage.gradients == COPY:  # there is a place for them: the vector itself
            self._arriving = self._as_state(self.gradient)
        else:
            self._arriving = self.gradient.new_empty(self.n_padded // self.group.size)
        self._reducing = send(TERMS, self.stage.state, self.gradient, self._arriving, self.group)

    def finish_reducing(self) -> None:
        if self._reducing is None:
            return
        self._reducing.wait()
        assert self._arriving is not None
        self.reduced = self._arriving if self.reduced is None else self.reduced.add_(self._arriving)
        self.gradient = self._arriving = self._reducing = None

    # ---- the step: as the state lies -> as parameters are held

    @torch.no_grad()
    def update(self, factor: float = 1.0) -> dist.Work | None:
        """Let the optimizer update this rank's part, and begin to bring it where the stage holds it."""
        if self.reduced is None:
            raise RefusedError("update() without gradients: call loss.backward() and reduce() before it.")
        gradient = self.reduced.to(self.master.dtype)
        self.master.grad = gradient * factor if factor != 1.0 else gradient
        self.optimizer.step()
        self.master.grad = None
        return self.spread()

    @torch.no_grad()
    def spread(self) -> dist.Work | None:
        updated = self._updated()
        if self.master.dtype != updated.dtype:
            updated.copy_(self.master)
        return send(self.stage.state, self.stage.parameters, updated, self.held, self.group)

    # ---- parts by name

    def stretches(self, vector: Tensor) -> Iterator[Stretch]:
        """The parts of the parameters in ``vector``, which lies as the state does. The padding is no part."""
        offset = self.piece.start if self.stage.state == CUT else 0
        for name, _, shape, start in self.slots:
            low = min(max(start - offset, 0), len(vector))
            high = min(max(start + math.prod(shape) - offset, 0), len(vector))
            yield Stretch(name, vector[low:high], low + offset - start, shape)

    def unflattened(self, vector: Tensor) -> dict[str, Tensor]:
        """Every parameter's part of a vector that lies as the state does, whole on every rank."""
        whole = self.group.all_gather(vector, 0) if self.stage.state == CUT else vector.clone()
        return {slot.name: whole[slot.start : slot.stop].view(slot.shape) for slot in self.slots}
