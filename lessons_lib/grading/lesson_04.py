"""The exercise of lesson 04: gradients averaged over tokens, in buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod

import torch
from torch import Tensor

from lessons_lib.data_parallel.replicated import Bucketed, fill_buckets
from lessons_lib.data_parallel.rows import total
from lessons_lib.grading.exercise import Axis, Budget, Claim, Draw, Exercise, Output, Trial, sizes_text
from lessons_lib.grading.exercise import sums_along as sums
from lessons_lib.layout import coordinates
from lessons_lib.mesh import Group
from lessons_lib.timeline import Event

# ---- the solution ----


def averaged_gradients(
    gradients: list[Tensor], n_tokens: int, bucket_elements: int, dp: Group
) -> list[Tensor]:
    """Return the gradients of the mean over the tokens of all ranks, in the shapes of ``gradients``.

    ``gradients`` are those of the mean over this rank's ``n_tokens`` tokens, and zeros if it has none. They
    travel in buckets: a bucket takes one gradient after the other, and is sent as one vector as soon as it
    holds ``bucket_elements`` elements.
    """
    share = n_tokens / dp.all_reduce(torch.tensor(float(n_tokens))).item()
    averaged: list[Tensor] = []
    bucket: list[Tensor] = []
    for at, gradient in enumerate(gradients, start=1):
        bucket.append(gradient)
        sizes = [each.numel() for each in bucket]
        if sum(sizes) >= bucket_elements or at == len(gradients):
            vector = dp.all_reduce(share * torch.cat([each.flatten() for each in bucket]))
            averaged += [piece.view_as(like) for piece, like in zip(vector.split(sizes), bucket, strict=True)]
            bucket = []
    return averaged


# ---- the trials ----

MESHES: tuple[Mapping[str, int], ...] = ({"dp": 2}, {"dp": 3}, {"dp": 4}, {"dp": 2, "tp": 2})


def _trials(draw: Draw) -> list[Trial]:
    """For every mesh, with tokens everywhere and with a rank without; the last one twice."""
    trials = []
    for sizes in MESHES:
        p = sizes["dp"]
        counts = draw.different(1, 9, p)
        shapes = _shapes(draw)
        trials.append(_trial(draw, sizes, shapes, counts))
        counts = draw.different(1, 9, p)
        counts[draw.between(0, p - 1)] = 0
        trials.append(_trial(draw, sizes, shapes, counts))
    return [*trials, _trial(draw, sizes, shapes, counts)]


def _shapes(draw: Draw) -> list[tuple[int, ...]]:
    """Of the layers of a small network: a matrix and a bias each."""
    D, F = draw.different(3, 6, 2)
    return [(D, F), (F,), (F, D), (D,), (D, D), (D,), (D, 2), (2,)]


def _trial(
    draw: Draw, sizes: Mapping[str, int], shapes: Sequence[tuple[int, ...]], counts: list[int]
) -> Trial:
    places, p, n = coordinates(sizes), sizes["dp"], sum(map(prod, shapes))
    bucket_elements = n // 3 + draw.between(-3, 3) if min(counts) else n // 4
    mine = [counts[place["dp"]] for place in places]
    gradients = [[draw.tensor(*shape) * bool(count) for shape in shapes] for count in mine]
    claim = "values" if min(counts) else "no tokens"
    outputs = [
        _output(f"gradient {at}", claim, [each[at] for each in gradients], mine, sizes)
        for at in range(len(shapes))
    ]
    n_groups = len(places) // p
    by_one = 2 * (p - 1) * n // p + 2 * ceil(n / bucket_elements) + 2 * p  # chunks may be uneven
    return Trial(
        function="averaged_gradients",
        sizes=sizes,
        facts=f"{sizes_text(sizes)}, tokens by rank of dp: {', '.join(map(str, counts))}",
        args=[(own, count, bucket_elements, Axis("dp")) for own, count in zip(gradients, mine, strict=True)],
        outputs=outputs,
        budgets={
            "forward": Budget(
                n_groups * (2 * (p - 1) * n + p * (p - 1)),  # and the numbers of tokens
                by_one,
                "every gradient is a sum over ranks",
                possible=n_groups * 2 * (p - 1) * n,
            )
        },
        spare=5 * n,
        rules=[in_buckets],
    )


def _output(
    name: str, claim: str, means: Sequence[Tensor], counts: Sequence[int], sizes: Mapping[str, int]
) -> Output:
    """One gradient: right, and as the usual mistakes have it."""
    p = sizes["dp"]
    weighted = [count * mean for count, mean in zip(counts, means, strict=True)]
    totals = [int(n) for n in sums([torch.tensor(count) for count in counts], sizes, ["dp"])]
    added = sums(weighted, sizes, ["dp"])
    right = [one / n for one, n in zip(added, totals, strict=True)]
    mistakes: dict[str, Sequence[Tensor]] = {
        "this is the mean of the ranks' means: a token of a rank with few of them counts more": [
            one / p for one in sums(means, sizes, ["dp"])
        ],
        "divided twice, by the number of all tokens and then by the number of ranks": [
            one / p for one in right
        ],
        "this is a sum over all tokens: it was not divided by their number": added,
        "the ranks' means were added up: each counts by its share of the tokens": sums(means, sizes, ["dp"]),
        "this is each rank's own gradient: nothing was added up": means,
        "this is each rank's own term: the terms were not added up": [
            one / n for one, n in zip(weighted, totals, strict=True)
        ],
    }
    if min(counts):
        mistakes["divided by this rank's own number of tokens, not by that of all ranks"] = [
            one / n for one, n in zip(added, counts, strict=True)
        ]
    if len(counts) > p:
        everyone = sum(counts)
        mistakes["this is a mean over all ranks of the mesh: dp is one axis of it"] = [
            torch.stack(weighted).sum(0) / everyone
        ] * len(counts)
    return Output(name, claim, right, mistakes=mistakes)


def in_buckets(trial: Trial, events: Sequence[Event]) -> str:
    """As few calls as full buckets take, one for the tokens, and no bucket that goes on once it is full."""
    gradients, _, bucket_elements, _ = trial.args[0]
    n, largest = sum(each.numel() for each in gradients), max(each.numel() for each in gradients)
    calls = [event for event in events if event.rank == 0 and event.kind != "recv"]
    enough = ceil(n / bucket_elements) + 1
    if len(calls) > enough:
        return (
            f"{len(calls)} calls for {n} elements in buckets of {bucket_elements}, where {enough} are "
            "enough: put gradients together before they are sent"
        )
    most = max((event.n_elements for event in calls if event.kind == "all_reduce"), default=0)
    if most > bucket_elements + largest:
        return (
            f"{most} elements were sent in one call, where a bucket is full with {bucket_elements}: "
            "what waits for the last gradient cannot be sent while backward goes on"
        )
    return ""


EXERCISES = (
    Exercise(
        id="04-buckets",
        title="Averaged gradients, in buckets",
        objective="Average gradients over the tokens of all ranks, in buckets, also where a rank has none.",
        functions=(averaged_gradients,),
        claims=(
            Claim("values", "each gradient is that of the mean over all tokens", 4),
            Claim("no tokens", "also where a rank has no tokens", 2),
            Claim("traffic", "full buckets: at most n/bucket + 1 calls, and no byte twice", 3),
            Claim("no deadlock", "no rank is left waiting, whoever begins", 1),
        ),
        trials=_trials,
        hints=(
            "A mean over 2 tokens and one over 6: what are the weights of the two in the mean over 8?",
            "Multiply by n_tokens, add up, divide by the tokens of all ranks: another all-reduce, of one "
            "number. A rank without tokens takes part in all of it.",
            "For each bucket: torch.cat([g.flatten() for g in bucket]), dp.all_reduce, then .split(sizes) "
            "and .view_as(g). Do not forget the last bucket, which may not be full.",
        ),
        shown=(fill_buckets, Bucketed._send, total),
    ),
)
