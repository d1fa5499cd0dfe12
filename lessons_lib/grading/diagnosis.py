"""Says what is wrong with a result, in the words of the mistake that makes it.

A right result is right on every rank, in float64, by relative error. A wrong one is compared with what the
usual mistakes would give: a missing sum, a sum too many, an average, blocks in the wrong places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lessons_lib.grading.exercise import Output, Trial
from lessons_lib.timeline import ranks_text

TOLERANCE = 1e-10
LIKE_FLOAT32 = 1e-4  # an error below this is one of rounding
Told = Mapping[str, Any]  # what a rank returned, in numbers and text


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, over that of what is expected.

    >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    """
    scale = expected.norm().item() or 1.0
    return (found - expected).norm().item() / scale


def largest_error(told: Sequence[Told], output: Output) -> float:
    """Over all ranks; infinite where there is nothing to compare."""
    found = [_tensor(each, want) for each, want in zip(told, output.expected, strict=True)]
    if output.judged is not None:
        tensors = [each for each in found if each is not None]
        return 0.0 if len(tensors) == len(found) and not output.judged(tensors) else float("inf")
    errors = [
        relative_error(have, want.detach()) if have is not None and have.shape == want.shape else float("inf")
        for have, want in zip(found, output.expected, strict=True)
    ]
    return max(error if error == error else float("inf") for error in errors)


def complaint(told: Sequence[Told], output: Output, trial: Trial) -> str:
    """What is wrong with one output on the ranks of one trial, or nothing."""
    expected = [each.detach() for each in output.expected]
    unusable = _unusable(told, output, trial)
    if unusable:
        return unusable
    found = [_tensor(each, want) for each, want in zip(told, expected, strict=True)]
    tensors = [each for each in found if each is not None]
    if output.judged is not None:
        return output.judged(tensors)
    shapes = [want.shape for want in expected]
    misplaced = _misplaced(tensors, expected, output.name)
    if misplaced:
        return misplaced
    if [each.shape for each in tensors] != shapes:
        return _shape(tensors, expected, output)
    wrong = [r for r, (a, b) in enumerate(zip(tensors, expected, strict=True)) if not _equal(a, b)]
    if not wrong:
        return _dtype(told, output)
    nan = [rank for rank in wrong if not tensors[rank].isfinite().all()]
    if nan:
        bad = int((~tensors[nan[0]].isfinite()).sum())
        return (
            f"{output.name} on rank {nan[0]} is not a finite number in {bad} of {tensors[nan[0]].numel()} "
            "places: the exp of a large number, a log of 0, or something used before it was filled?"
        )
    return (
        _known_mistake(tensors, expected, output)
        or _multiple(tensors, expected, wrong, trial)
        or (_unknown(tensors, expected, wrong, told, output))
    )


def _tensor(told: Told, expected: Tensor) -> Tensor | None:
    """What a rank returned as a tensor; one number passes for a tensor of one element."""
    if "data" not in told:
        return None
    tensor = torch.tensor(told["data"], dtype=torch.float64).reshape(told["shape"])
    return tensor.reshape(expected.shape) if tensor.numel() == expected.numel() == 1 else tensor


def _equal(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    return found.shape == expected.shape and relative_error(found, expected) <= tolerance


def _all_equal(found: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(_equal(a, b.detach()) for a, b in zip(found, others, strict=True))


def _unusable(told: Sequence[Told], output: Output, trial: Trial) -> str:
    """Whether there are no numbers to look at."""
    for kind, what in (("nothing", "nothing"), ("what", "no tensor")):
        ranks = [rank for rank, each in enumerate(told) if kind in each]
        if len(ranks) == len(told) and kind == "nothing":
            return f"{output.name}: nothing came back. {_why_nothing(output, trial)}"
        if ranks:
            what = f"a {told[ranks[0]]['what']}, not a tensor" if kind == "what" else what
            return f"{output.name}: {trial.function} returned {what} on {ranks_text(ranks)}"
    for rank, each in enumerate(told):
        if "data" not in each:
            return f"{output.name} on rank {rank} has shape {tuple(each['shape'])}, far too large or complex"
    return ""


def _why_nothing(output: Output, trial: Trial) -> str:
    unwritten, first = f"Is there still a ... in {trial.function}?", trial.outputs[0]
    if trial.upstream is None or output is first:
        return unwritten
    return (
        f"{unwritten} Or does autograd not find its way from {first.name} to it, after a detach or because "
        f"{first.name} has another shape?"
    )


def _dtype(told: Sequence[Told], output: Output) -> str:
    for rank, each in enumerate(told):
        if each["dtype"] not in ("float64", "float", "int", "int64"):
            return (
                f"{output.name} on rank {rank} is {each['dtype']}, and float64 went in: "
                "make new tensors with empty_like or new_empty"
            )
    return ""


def _misplaced(found: Sequence[Tensor], expected: Sequence[Tensor], name: str) -> str:
    """Whether each rank has the right block of another rank."""
    if _all_equal(found, expected):
        return ""
    holds = [next((s for s, want in enumerate(expected) if _equal(have, want)), None) for have in found]
    right = [r for r, (a, b) in enumerate(zip(found, expected, strict=True)) if _equal(a, b)]
    moved = [rank for rank in range(len(found)) if rank not in right]
    if any(holds[rank] is None for rank in moved):
        return ""
    if len(moved) == 2 and [holds[rank] for rank in moved] == moved[::-1]:
        return f"{name}: the shards of {ranks_text(moved)} are swapped"
    if len({holds[rank] for rank in range(len(found))}) == 1:
        return f"{name}: every rank has the shard of rank {holds[0]}"
    pairs = ", ".join(f"rank {rank} has that of rank {holds[rank]}" for rank in moved[:3])
    return f"{name}: the shards are on the wrong ranks: {pairs}"


def _shape(found: Sequence[Tensor], expected: Sequence[Tensor], output: Output) -> str:
    rank = next(r for r, (a, b) in enumerate(zip(found, expected, strict=True)) if a.shape != b.shape)
    have, want = found[rank], expected[rank]
    shapes = f"shape {tuple(have.shape)} on rank {rank}, and {tuple(want.shape)} was asked"
    if have.dim() == 2 and have.T.shape == want.shape and _equal(have.T, want):
        return f"{output.name} is transposed: {shapes}"
    if output.whole is not None and have.shape == output.whole.shape:
        right = "the serial answer, whole" if _equal(have, output.whole.detach()) else "a whole tensor"
        return f"{output.name}: each rank returned {right}, where its own block was asked: {shapes}"
    return f"{output.name} has {shapes}"


def _known_mistake(found: Sequence[Tensor], expected: Sequence[Tensor], output: Output) -> str:
    for what, wrong in output.mistakes.items():
        if _all_equal(found, wrong):
            return f"{output.name}: {what}"
    if all(not have.any() for have in found):
        return f"{output.name} is zero everywhere"
    if _all_equal([-have for have in found], expected):
        return f"{output.name} has the wrong sign"
    if all(have.dim() == 2 for have in found) and _all_equal([have.T for have in found], expected):
        return f"{output.name} is transposed"
    if all(
        _equal(a.flatten().sort()[0], b.flatten().sort()[0]) for a, b in zip(found, expected, strict=True)
    ):
        return f"{output.name} has the right numbers in another order"
    return ""


def _multiple(found: Sequence[Tensor], expected: Sequence[Tensor], wrong: Sequence[int], trial: Trial) -> str:
    """Whether the result is the right one times a number that tells what happened."""
    factors = [
        (a * b).sum().item() / ((b * b).sum().item() or 1.0) for a, b in zip(found, expected, strict=True)
    ]
    factor = factors[wrong[0]]
    same = all(
        _equal(found[rank], factor * expected[rank], 1e-9) if rank in wrong else False
        for rank in range(len(found))
    )
    if not same:
        return ""
    axes = {axis: size for axis, size in trial.sizes.items() if size > 1}
    counts = {**axes, "ranks": trial.n_ranks}
    where = "on every rank"
    for axis, p in counts.items():
        size = f"{axis}={p}" if axis != "ranks" else f"{p} ranks"
        if abs(factor - p) < 1e-9:
            return f"exactly {p} times too large {where} ({size}): was a sum taken once too often?"
        if abs(factor * p - 1) < 1e-9:
            return f"exactly 1/{p} of the right value {where} ({size}): an average where a sum belongs?"
        if abs(factor - p * p) < 1e-9:
            return f"exactly {p * p} times too large {where} ({size} squared): were two sums too many?"
    if [each.numel() for each in expected] == [1]:  # a number is always a multiple of another
        return ""
    return f"exactly {factor:.6g} times the right value {where}"


def _unknown(
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    wrong: Sequence[int],
    told: Sequence[Told],
    output: Output,
) -> str:
    errors = {rank: relative_error(found[rank], expected[rank]) for rank in wrong}
    worst = max(errors, key=lambda rank: errors[rank])
    if told[worst]["dtype"] == "int":
        have, want = found[worst].item(), expected[worst].item()
        return f"{output.name} is {have:,.16g} on rank {worst}, where {want:,.16g} is right"
    if errors[worst] < LIKE_FLOAT32:
        return _dtype(told, output) or (
            f"{output.name} is nearly right: relative error {errors[worst]:.0e}, as in float32; "
            f"{TOLERANCE:.0e} is allowed"
        )
    right = [rank for rank in range(len(found)) if rank not in wrong]
    where = f", and right on {ranks_text(right)}" if right else ""
    return f"{output.name} is wrong on {ranks_text(list(wrong))}{where}: relative error {errors[worst]:.2g}"
