"""What a thread rank would share with its neighbours, swapped whenever the baton passes.

Random states, the default dtype and ``RANK`` belong to the process, so threads share them. Only
one rank runs at a time, so it is enough to put a rank's own values in place when it starts to run
and to keep them when it stops.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import get_bit_generator, set_bit_generator  # type: ignore[attr-defined]

from lessons_lib.spmd import _torch_internals


@dataclass(slots=True)
class Ambient:
    """The process-wide state that one rank, or the notebook, sees as its own."""

    torch_random: torch.Tensor
    numpy_random: Any  # the generator itself: numpy swaps generators far faster than their states
    python_random: Any
    default_dtype: torch.dtype

    @classmethod
    def of_this_moment(cls) -> Ambient:
        return cls(
            torch.default_generator.get_state(),
            get_bit_generator(),
            random.getstate(),
            torch.get_default_dtype(),
        )

    def keep(self) -> None:
        """Take over what has become of the state that is in place."""
        self.torch_random = torch.default_generator.get_state()
        self.python_random = random.getstate()
        self.default_dtype = torch.get_default_dtype()

    def put_in_place(self) -> None:
        torch.default_generator.set_state(self.torch_random)
        set_bit_generator(self.numpy_random)
        random.setstate(self.python_random)
        if torch.get_default_dtype() != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)


_numpy_generators: list[Any] = []  # one per rank, made once: making one takes as long as a small run


def seeded(n_ranks: int, seed: int) -> list[Ambient]:
    """Where ranks start: all from the same seed, as the processes of torchrun do."""
    while len(_numpy_generators) < n_ranks:
        _numpy_generators.append(np.random.MT19937())
    before = get_bit_generator()
    for generator in _numpy_generators[:n_ranks]:
        set_bit_generator(generator)
        np.random.seed(seed)
    set_bit_generator(before)
    torch_random = torch.Generator().manual_seed(seed).get_state()
    python_random = random.Random(seed).getstate()
    dtype = torch.get_default_dtype()
    return [Ambient(torch_random, _numpy_generators[rank], python_random, dtype) for rank in range(n_ranks)]


def name_rank(rank: int) -> None:
    """Make ``os.environ`` read as it would in the process of that rank."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)


def name_world(n_ranks: int) -> None:
    """Make ``os.environ`` read as a launcher of ``n_ranks`` processes on one host would leave it."""
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(n_ranks)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Put everything back that a run of ranks can change for the notebook."""
    ambient, environment, n_threads = Ambient.of_this_moment(), dict(os.environ), torch.get_num_threads()
    try:
        with _torch_internals.module_hooks_restored():
            yield
    finally:
        ambient.put_in_place()
        if torch.get_num_threads() != n_threads:
            torch.set_num_threads(n_threads)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
