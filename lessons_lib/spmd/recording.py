"""Counts FLOPs and live bytes of a rank while it runs, for runs that ask for it.

Both are dispatch modes of torch: they see every operation of the rank, forward and backward, with
the tensors it takes and makes. Communication moves data with all modes off, so that what is moved
is charged to nobody twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lessons_lib.errors import RefusedError
from lessons_lib.machines import Machine
from lessons_lib.spmd._torch_internals import DispatchMode, resizing_watched, tree_leaves
from lessons_lib.spmd.clock import Clock

KINDS = ("flops", "memory")

# Attention has operations of its own on CPUs, for which torch has no formula; they do the same products.
_aten = torch.ops.aten
SAME_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}


@dataclass
class Ledger:
    """What was counted of one rank."""

    flops: dict[str, int] = field(default_factory=dict)  # by region
    live_bytes: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes) at every change


@contextmanager
def recording(
    record: Sequence[str],
    machine: Machine | None,
    clock: Clock,
    region: Callable[[], str],
    ledger: Ledger,
    arguments: Any,
) -> Iterator[None]:
    """Count into ``ledger`` what this thread does; on a machine, let its clock run by FLOPs."""
    with ExitStack() as modes:
        if "memory" in record:
            meter = modes.enter_context(MemoryMeter(clock, ledger, arguments))
            modes.enter_context(resizing_watched(meter.see))
        if "flops" in record or machine is not None:
            modes.enter_context(FlopMeter(machine, clock, region, ledger))
        yield


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this type, like DTensor, hold others and have neither memory nor shape of their own
    on this rank. Their operations are left to them: what they do with the tensors they hold is counted.
    """
    return hasattr(kind, "__tensor_flatten__")


def is_real(leaf: Any) -> bool:
    """Whether this is a tensor with memory: DTensor, for one, computes shapes with tensors that have none."""
    try:
        return isinstance(leaf, Tensor) and leaf.untyped_storage().device.type != "meta"
    except NotImplementedError:
        return False


class FlopMeter(DispatchMode):
    """Counts matrix products and attention by torch's own formulas; the rest counts nothing."""

    def __init__(
        self, machine: Machine | None, clock: Clock, region: Callable[[], str], ledger: Ledger
    ) -> None:
        super().__init__()
        self.machine, self.clock, self.region, self.ledger = machine, clock, region, ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented
        kwargs = kwargs or {}
        formula = flop_registry.get(SAME_AS.get(func.overloadpacket, func.overloadpacket))
        if formula is None:
            with self:  # an operation made of others is counted as those
                result = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        result = func(*args, **kwargs)
        if not any(map(is_real, tree_leaves(result))):
            return result
        flops = formula(*args, **kwargs, out_val=result)
        region = self.region()
        self.ledger.flops[region] = self.ledger.flops.get(region, 0) + flops
        if self.machine is not None:
            self.clock.advance(self.machine.compute_s(flops))
        return result


class MemoryMeter(DispatchMode):
    """Counts the memory of tensors: each once, however many views it has, until it is released.

    Charged is the rank whose operation made it. The arguments of the function count from the start.
    What a kernel needs inside is not seen.
    """

    def __init__(self, clock: Clock, ledger: Ledger, arguments: Any) -> None:
        super().__init__()
        self.clock, self.ledger = clock, ledger
        self._sizes: dict[int, int] = {}  # of live storages
        for leaf in tree_leaves(tensors_of(arguments)):
            self._see(leaf)
        if not ledger.live_bytes:
            ledger.live_bytes.append((clock.now(), 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            self._see(leaf)
        return result

    def _see(self, leaf: Any) -> None:
        if not isinstance(leaf, Tensor):
            return
        if is_wrapper(type(leaf)):
            for name in leaf.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                self._see(getattr(leaf, name))
        elif is_real(leaf):
            self.see(leaf.untyped_storage())

    def see(self, storage: Any) -> None:
        """Note what a storage holds now: it may be new, or have been resized."""
        key, size = id(storage), storage.nbytes()
        before = self._sizes.get(key)
        if before is None:
            weakref.finalize(storage, self._release, key).atexit = False
        if before != size:
            self._sizes[key] = size
            self._note(size - (before or 0))

    def _release(self, key: int) -> None:
        self._note(-self._sizes.pop(key, 0))

    def _note(self, change: int) -> None:
        if change:
            live = self.ledger.live_bytes[-1][1] if self.ledger.live_bytes else 0
            self.ledger.live_bytes.append((self.clock.now(), live + change))


def tensors_of(arguments: Any) -> list[Any]:
    """The tensors a function was given: its arguments, its closure, and the parameters of modules in them."""
    fn, args = arguments
    given = list(args)
    for cell in getattr(fn, "__closure__", None) or ():
        with suppress(ValueError):  # a variable that is not set yet
            given.append(cell.cell_contents)
    tensors: list[Any] = []
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.nn.Module):
            tensors += [*leaf.parameters(), *leaf.buffers()]
        else:
            tensors.append(leaf)
    return tensors


def refuse_unknown(record: Any) -> tuple[str, ...]:
    """``record`` as a tuple, or a RefusedError that says what can be recorded."""
    asked = (record,) if isinstance(record, str) else tuple(record)
    for kind in asked:
        if kind not in KINDS:
            raise RefusedError(
                f"record={record!r}: what can be recorded is {' and '.join(map(repr, KINDS))}."
            )
    return asked
