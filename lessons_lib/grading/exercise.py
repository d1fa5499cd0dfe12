"""What an exercise is: the functions it asks for, what is claimed of them, and trials drawn from a seed.

A :class:`Trial` is one call of one of the learner's functions on the ranks of a mesh, with what must come
out on every rank, computed by the serial program. Everything else, the table, the points, the stub in the
notebook, follows from the :class:`Exercise`.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lessons_lib.layout import Layout, coordinates
from lessons_lib.machines import Machine
from lessons_lib.mesh import Mesh
from lessons_lib.timeline import Event, elements_sent

FLOAT64_BYTES = 8


class Claim(NamedTuple):
    """A row of the table."""

    key: str
    what: str
    points: float


class Axis(NamedTuple):
    """Stands among the arguments of a trial for the group along this axis of its mesh."""

    name: str


@dataclass(frozen=True)
class WholeMesh:
    """Stands among the arguments of a trial for its mesh."""


Judged = Callable[[Sequence[Tensor]], str]  # what is wrong with the results of all ranks, or nothing


@dataclass(frozen=True)
class Output:
    """A tensor that a trial brings back."""

    name: str
    claim: str  # the row of the table it counts for
    expected: Sequence[Tensor]  # by rank
    whole: Tensor | None = None  # the tensor of which ranks hold blocks, if they do
    mistakes: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)  # what to say, and what it gives
    judged: Judged | None = None  # instead of comparing with ``expected``, where more than one is right


@dataclass(frozen=True)
class Budget:
    """The best known traffic of a trial, in elements of 8 bytes."""

    total: int  # sent by all ranks together
    busiest: int  # sent by the rank that sends most
    why: str  # one clause: what has to be sent
    possible: int | None = None  # less than this is impossible; less than the total, if it is not given

    @property
    def least(self) -> int:
        return self.total if self.possible is None else self.possible

    @classmethod
    def nothing(cls, why: str) -> Budget:
        return cls(0, 0, why)

    @classmethod
    def of(cls, kind: str, n_elements: int, sizes: Mapping[str, int], axis: str, why: str) -> Budget:
        """One collective of ``kind`` in every group along ``axis``, by the ring convention."""
        p = sizes[axis]
        sent = [elements_sent(kind, n_elements, p, rank) for rank in range(p)]
        return cls(sum(sent) * (len(coordinates(sizes)) // p), max(sent), why)

    @classmethod
    def even(
        cls, sent: int | Fraction, sizes: Mapping[str, int], why: str, possible: int | None = None
    ) -> Budget:
        """``sent`` elements by every rank."""
        if Fraction(sent).denominator != 1:
            raise ValueError(f"{sent} elements by every rank: draw sizes that divide evenly")
        return cls(int(sent) * len(coordinates(sizes)), int(sent), why, possible)


@dataclass(frozen=True)
class Deadline:
    """A machine whose clock counts in a trial, and when on it the last rank is done at the latest."""

    machine: Machine
    most_s: float
    why: str  # what one may have to do to be in time


Rule = Callable[["Trial", Sequence[Event]], str]  # what is wrong with the communication, or nothing
Then = Callable[[Any, Mesh], Any]


@dataclass(frozen=True)
class Trial:
    """One call of one function on all ranks of a mesh.

    If there is an ``upstream`` gradient, the first output is differentiated with it, and the gradients of
    the arguments that require one follow as further outputs.
    """

    function: str
    sizes: Mapping[str, int]
    facts: str  # the sizes, in words
    args: Sequence[tuple[Any, ...]]  # by rank
    outputs: Sequence[Output]
    upstream: Sequence[Tensor] | None = None  # by rank
    then: Then | None = None  # what every rank makes of what the function returned, before it is told
    keeps: bool = True  # whether arguments must stay as they are
    budgets: Mapping[str, Budget] = field(default_factory=dict)  # by phase, "forward" and "backward"
    wholes: Mapping[str, int] = field(default_factory=dict)  # elements of tensors no rank may hold whole
    spare: int = 0  # elements a rank may work on, besides its arguments and results
    too_much: str = ""  # what it is, most likely, where a rank holds more
    metered: Sequence[str] = ("forward", "backward")  # phases in which it counts what a rank holds
    deadline: Deadline | None = None
    rules: Sequence[Rule] = ()

    @property
    def n_ranks(self) -> int:
        return len(self.args)

    def most_bytes(self, rank: int) -> int:
        """The most bytes that a rank may hold besides its arguments: its results, and some to work on."""
        return FLOAT64_BYTES * (sum(output.expected[rank].numel() for output in self.outputs) + self.spare)


class Draw:
    """Sizes and tensors of a check, all from one seed.

    >>> one, same = Draw(7), Draw(7)
    >>> one.between(2, 9) == same.between(2, 9), torch.equal(one.tensor(3), same.tensor(3))
    (True, True)
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.random.randint(low, high)

    def indivisible(self, low: int, high: int, p: int) -> int:
        """A whole number that ``p`` does not divide."""
        return self.random.choice([n for n in range(low, high + 1) if n % p])

    def different(self, low: int, high: int, n: int) -> list[int]:
        """``n`` whole numbers of which no two are equal."""
        return self.random.sample(range(low, high + 1), n)

    def tensor(self, *shape: int) -> Tensor:
        """Numbers of a normal distribution, of which no two are equal."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)


@dataclass(frozen=True)
class Exercise:
    """What a learner is asked for. ``functions`` are the reference solutions, named as the learner's are."""

    id: str
    title: str
    objective: str  # one sentence: what whoever passes can do
    functions: tuple[Callable[..., Any], ...]
    claims: tuple[Claim, ...]
    trials: Callable[[Draw], list[Trial]]
    hints: tuple[str, str, str]
    shown: tuple[Any, ...] = ()  # what reveal prints the source of, where the library has it
    broken: tuple[Callable[..., Any], ...] = ()  # what the notebook gives to repair

    @property
    def lesson(self) -> str:
        return self.id[:2]

    @property
    def points(self) -> float:
        return sum(claim.points for claim in self.claims)

    @property
    def names(self) -> list[str]:
        return [function.__name__ for function in self.functions]

    @property
    def starter(self) -> str:
        """What stands in the notebook before the learner begins: the functions, empty or broken."""
        if self.broken:
            return "\n\n".join(inspect.getsource(function).rstrip() for function in self.broken)
        return "\n\n".join(map(_stub, self.functions))


def _stub(function: Callable[..., Any]) -> str:
    """The first line of a function, its docstring, and three dots.

    >>> def double(x):
    ...     \"\"\"Return x twice.\"\"\"
    ...     return x + x
    >>> print(_stub(double))
    def double(x):
        \"\"\"Return x twice.\"\"\"
        ...
    """
    parameters = ", ".join(inspect.signature(function).parameters)
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    lines = [f'"""{lines[0]}', *lines[1:]]
    lines = [f'{lines[0]}"""'] if len(lines) == 1 else [*lines, '"""']
    body = [f"    {line}".rstrip() for line in (*lines, "...")]
    return "\n".join([f"def {function.__name__}({parameters}):", *body])


def tensors_in(named: Iterable[tuple[Any, Any]]) -> list[tuple[str, Tensor]]:
    """The tensors among arguments that have names, and those in lists among them.

    >>> [name for name, _ in tensors_in([("x", torch.ones(1)), ("n", 3), ("ws", [torch.ones(1)] * 2)])]
    ['x', 'ws[0]', 'ws[1]']
    """
    found = []
    for name, value in named:
        if isinstance(value, Tensor):
            found.append((str(name), value))
        elif isinstance(value, list):
            found += tensors_in((f"{name}[{at}]", each) for at, each in enumerate(value))
    return found


def each_block(layout: Layout, whole: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
    """The block of every rank, in rank order."""
    return [layout.cut(whole, sizes, place) for place in coordinates(sizes)]


def sums_along(terms: Sequence[Tensor], sizes: Mapping[str, int], axes: Sequence[str]) -> list[Tensor]:
    """The sum of every rank's term over the ranks that differ from it in ``axes`` alone.

    >>> terms = [torch.tensor(float(rank)) for rank in range(4)]
    >>> [total.item() for total in sums_along(terms, {"row": 2, "col": 2}, ["col"])]
    [1.0, 1.0, 5.0, 5.0]
    """
    kept = [tuple(place[axis] for axis in place if axis not in axes) for place in coordinates(sizes)]
    return [
        torch.stack([term for term, other in zip(terms, kept, strict=True) if other == mine]).sum(0)
        for mine in kept
    ]


def sizes_text(sizes: Mapping[str, int], **dims: int) -> str:
    """``tp=2, B=4, D=6``."""
    return ", ".join(f"{name}={size}" for name, size in {**sizes, **dims}.items())
