"""What a thread rank would share with its neighbours, swapped whenever the baton passes.

Random states, the default dtype and ``RANK`` belong to the process, so threads share them. Only
one rank runs at a time, so it is enough to put a rank's own values in place when it starts to run
and to keep them when it stops.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import get_bit_generator, set_bit_generator  # type: ignore[attr-defined]

from lessons_lib.spmd import _torch_internals


@dataclass(slots=True)
class NumpyRandom:
    """The random state of ``np.random``, swapped without copying it.

    numpy can swap its generator, which is far faster than copying 624 words. But one number lies
    outside the generator: normal numbers are drawn in pairs, and the second of a pair is kept for
    the next call. Asking for it copies everything after all, so that is done only after a draw.
    """

    generator: Any
    second_normal: tuple[int, float] = (0, 0.0)  # whether one is kept, and which
    mark: tuple[int, int] = (0, 0)  # tells whether numbers have been drawn since

    @classmethod
    def of_this_moment(cls) -> NumpyRandom:
        state = np.random.get_state(legacy=False)
        return cls(get_bit_generator(), (state["has_gauss"], state["gauss"]))

    @classmethod
    def seeded(cls, generator: Any, seed: int) -> NumpyRandom:
        """As after ``np.random.seed(seed)``; ``generator`` is an MT19937, as that of numpy is."""
        np.random.RandomState(generator).seed(seed)
        return cls(generator, mark=_mark(generator))

    def keep(self) -> None:
        mark = _mark(self.generator)
        if self.second_normal[0] or mark != self.mark:
            state = np.random.get_state(legacy=False)
            self.second_normal, self.mark = (state["has_gauss"], state["gauss"]), mark

    def put_in_place(self) -> None:
        set_bit_generator(self.generator)
        if self.second_normal[0]:
            state = np.random.get_state(legacy=False)
            state["has_gauss"], state["gauss"] = self.second_normal
            np.random.set_state(state)


def _mark(generator: Any) -> tuple[int, int]:
    """The first of the 624 words of an MT19937 and how many are used up, read from memory in 1 µs."""
    address = generator.ctypes.state_address
    return ctypes.c_uint32.from_address(address).value, ctypes.c_uint32.from_address(address + 4 * 624).value


@dataclass(slots=True)
class ProcessState:
    """The process-wide state that one rank, or the notebook, sees as its own.

    A class of the notebook is the same object in all ranks, so that what a rank returns is an
    instance of the notebook's class. Its attributes are each rank's own.
    """

    torch_random: torch.Tensor
    numpy_random: NumpyRandom
    python_random: Any
    default_dtype: torch.dtype
    class_attributes: dict[type, dict[str, Any]]

    @classmethod
    def of_this_moment(cls, classes: Iterable[type]) -> ProcessState:
        return cls(
            torch.default_generator.get_state(),
            NumpyRandom.of_this_moment(),
            random.getstate(),
            torch.get_default_dtype(),
            {each: dict(vars(each)) for each in classes},
        )

    def keep(self) -> None:
        """Take over what has become of the state that is in place."""
        self.torch_random = torch.default_generator.get_state()
        self.numpy_random.keep()
        self.python_random = random.getstate()
        self.default_dtype = torch.get_default_dtype()
        for each in self.class_attributes:
            self.class_attributes[each] = dict(vars(each))

    def put_in_place(self) -> None:
        torch.default_generator.set_state(self.torch_random)
        self.numpy_random.put_in_place()
        random.setstate(self.python_random)
        if torch.get_default_dtype() != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        for each, attributes in self.class_attributes.items():
            for name in vars(each).keys() - attributes.keys():
                type.__delattr__(each, name)
            for name, value in attributes.items():
                if vars(each).get(name) is not value:
                    type.__setattr__(each, name, value)


_numpy_generators: list[Any] = []  # one per rank, made once: making one takes as long as a small run


def seeded(n_ranks: int, seed: int, classes: Sequence[type] = ()) -> list[ProcessState]:
    """Where ranks start: all from the same seed, as the processes of torchrun do."""
    while len(_numpy_generators) < n_ranks:
        _numpy_generators.append(np.random.MT19937())
    torch_random = torch.Generator().manual_seed(seed).get_state()
    python_random = random.Random(seed).getstate()
    dtype = torch.get_default_dtype()
    return [
        ProcessState(
            torch_random,
            NumpyRandom.seeded(generator, seed),
            python_random,
            dtype,
            {each: dict(vars(each)) for each in classes},
        )
        for generator in _numpy_generators[:n_ranks]
    ]


def seed_all(seed: int) -> None:
    """Let all that draws random numbers in this process begin from ``seed``."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def name_rank(rank: int) -> None:
    """Make ``os.environ`` read as it would in the process of that rank."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)


def name_world(n_ranks: int) -> None:
    """Make ``os.environ`` read as a launcher of ``n_ranks`` processes on one host would leave it."""
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(n_ranks)


@contextlib.contextmanager
def restored(classes: Iterable[type]) -> Iterator[None]:
    """Put everything back that a run of ranks can change for the notebook."""
    process_state, environment = ProcessState.of_this_moment(classes), dict(os.environ)
    n_threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        with _torch_internals.module_hooks_restored():
            yield
    finally:
        process_state.put_in_place()
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        if torch.get_num_threads() != n_threads:
            torch.set_num_threads(n_threads)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
