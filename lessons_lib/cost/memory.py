"""Memory of parameters, gradients and optimizer state on a rank, by kind, in bytes.

How many bytes a parameter takes is decided by a recipe: which vectors there are, and in which dtype. How many
parameters of each vector a rank holds is decided by the stage of ZeRO: the layouts of
:mod:`lessons_lib.data_parallel.stages`, and no formula of its own stands here.

>>> {kind: float(n) for kind, n in model_states(7_500_000_000, stage=1, n_ranks=64).items()}
{'parameters': 15000000000.0, 'gradients': 15000000000.0, 'state': 1406250000.0}

Left out of all of this: activations (:mod:`lessons_lib.cost.activations`), buffers
(:func:`lessons_lib.data_parallel.stages.buffers`), what the allocator cannot use.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from lessons_lib.data_parallel.stages import Stage, moves, stage_of
from lessons_lib.errors import RefusedError
from lessons_lib.timeline import ring_traffic


class Recipe(NamedTuple):
    """Bytes of each kind that a parameter takes."""

    parameters: int
    gradients: int
    state: int  # master copy and moments

    @property
    def total(self) -> int:
        return sum(self)


RECIPES: Mapping[str, Recipe] = {
    "fp32 adam": Recipe(4, 4, 4 + 4),
    "fp32 adam, no stored gradients": Recipe(4, 0, 4 + 4),
    "mixed adam": Recipe(2, 2, 4 + 4 + 4),
    "mixed adam, fp32 gradients": Recipe(2, 4, 4 + 4 + 4),
    "mixed adam, both gradients": Recipe(2, 2 + 4, 4 + 4 + 4),
    "mixed momentum": Recipe(2, 2, 4 + 4),
    "mixed sgd": Recipe(2, 2, 4),
    "fp64 adam": Recipe(8, 8, 8 + 8),
    "fp64 sgd": Recipe(8, 8, 0),
}
"""Mixed: parameters and gradients in 16 bits, and a 32-bit master copy in the optimizer's state."""


def recipe_of(recipe: str | Recipe) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise RefusedError(f"recipe={recipe!r} is unknown; known: {', '.join(map(repr, RECIPES))}.")
    return RECIPES[recipe]


def model_states(
    n: int, stage: int | Stage, n_ranks: int, recipe: str | Recipe = "mixed adam"
) -> dict[str, Fraction]:
    """Bytes of each kind that a rank of ``n_ranks`` holds, of ``n`` parameters; ZeRO's Table 1.

    >>> [float(sum(model_states(7_500_000_000, stage, 64).values())) / 1e9 for stage in range(4)]
    [120.0, 31.40625, 16.640625, 1.875]

    Exact fractions, without the padding that makes n divisible: give n padded to compare with a run.
    """
    sizes, rows = {"dp": n_ranks}, stage_of(stage)._asdict()
    return {
        what: n * n_bytes * rows[what].share(sizes) for what, n_bytes in recipe_of(recipe)._asdict().items()
    }


def saving(stage: int | Stage, n_ranks: int, recipe: str | Recipe = "mixed adam") -> Fraction:
    """How many times less a rank holds than where all is copied.

    >>> [round(float(saving(1, n)), 2) for n in (4, 8, 64)]                  # "saves 4x": in the limit
    [2.29, 2.91, 3.82]
    """
    return recipe_of(recipe).total / sum(model_states(1, stage, n_ranks, recipe).values(), Fraction())


def messages(stage: int | Stage, n: int, recipe: str | Recipe = "mixed adam") -> list[tuple[str, str, int]]:
    """What a step sends: of which vector, by which collective, and the bytes of its whole buffer.

    >>> for what, kind, n_bytes in messages(1, 3_500_000_000, "mixed adam, fp32 gradients"):
    ...     print(f"{kind} of {what}: {n_bytes / 1e9:g} GB")
    reduce_scatter of gradients: 14 GB
    all_gather of parameters: 7 GB
    """
    bytes_of = recipe_of(recipe)._asdict()
    return [(move.what, move.kind, n * bytes_of[move.what]) for move in moves(stage)]


def bytes_sent(
    stage: int | Stage, n: int, n_ranks: int, recipe: str | Recipe = "mixed adam"
) -> int | Fraction:
    """Bytes a rank sends in a step of one micro-batch, by the ring convention.

    >>> [bytes_sent(stage, 1000, 4) for stage in range(4)]
    [3000, 3000, 3000, 4500]
    """
    return sum(ring_traffic(kind, n_bytes, n_ranks) for _, kind, n_bytes in messages(stage, n, recipe))


# ---- estimates in circulation, which differ, and are told apart by their names


class Estimate(NamedTuple):
    """Bytes per parameter: those that every rank holds, those that ranks share out, those of the largest
    layer, which is whole while it computes."""

    copied: int
    shared: int
    largest: int = 0


ESTIMATES: Mapping[tuple[str, int], Estimate] = {
    **{
        ("paper", stage): estimate
        for stage, estimate in enumerate((Estimate(16, 0), Estimate(4, 12), Estimate(2, 14), Estimate(0, 16)))
    },
    ("old helper", 2): Estimate(4, 16),
    ("helper", 2): Estimate(2, 18),
    ("helper", 3): Estimate(0, 18, 4),
    ("helper, optimizer on CPU", 3): Estimate(0, 2, 4),
    ("helper, all on CPU", 3): Estimate(0, 0, 4),
}
"""``paper``: Rajbhandari et al. 2020, section 3.1, gradients in 16 bits. ``old helper`` and ``helper``: what
DeepSpeed's estimate functions printed before and print since gradients are counted as partitioned; they keep
a 32-bit copy of the gradients (2 + 4 + 12 = 18), and print GiB with the label GB."""  # fmt: skip


def estimate(convention: str, stage: int, n: int, n_ranks: int, largest: int = 0) -> Fraction:
    """Bytes per rank by an estimate in circulation; mixed precision and Adam in all of them.

    >>> from lessons_lib.cost.units import text
    >>> for name in ("paper", "old helper", "helper"):
    ...     print(name, text(estimate(name, 2, 7_500_000_000, 64)))
    paper 16.64 GB
    old helper 31.88 GB
    helper 17.11 GB

    ``largest`` is the number of parameters of the largest layer, which only the helper's stage 3 asks for.
    Left out: activations, buffers, what the allocator cannot use.
    """
    if (convention, stage) not in ESTIMATES:
        known = "; ".join(f"{name} for stage {at}" for name, at in ESTIMATES)
        raise RefusedError(f"no estimate {convention!r} for stage {stage}; known: {known}.")
    copied, shared, of_largest = ESTIMATES[convention, stage]
    return Fraction(copied * n) + Fraction(shared * n, n_ranks) + of_largest * largest
