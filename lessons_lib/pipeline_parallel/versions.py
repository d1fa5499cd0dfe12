"""Asynchronous pipelines: which version of the weights each micro-batch meets, and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel.actions import Schedule


@dataclass(frozen=True)
class WeightVersions:
    """What one rank does with the versions of its weights; version 0 is the initial one, U makes the next.

    ``used[k]`` is the version that forward and backward of micro-batch k use. ``staleness[n]`` is how many
    updates the weights that update n is applied to are ahead of those its gradients were computed with.
    ``kept`` is how many versions the rank holds at most.
    """

    used: tuple[int, ...]
    staleness: tuple[int, ...]
    kept: int


def weight_versions(schedule: Schedule) -> list[WeightVersions]:
    """Follow the weights of every rank.

    >>> from lessons_lib.pipeline_parallel import pipedream, pipedream_2bw
    >>> [(rank.kept, rank.staleness[-1]) for rank in weight_versions(pipedream(4, 8))]
    [(4, 3), (3, 2), (2, 1), (1, 0)]
    >>> [(rank.kept, rank.staleness[-1]) for rank in weight_versions(pipedream_2bw(4, 8))]
    [(2, 1), (2, 1), (2, 1), (2, 1)]

    Raises RefusedError where a forward asks for a version that its rank has not made yet.
    """
    return [_of_rank(schedule, rank) for rank in range(schedule.n_ranks)]


def _of_rank(schedule: Schedule, rank: int) -> WeightVersions:
    newest, kept = 0, 1
    used: dict[int, int] = {}
    in_flight: set[int] = set()
    since_update: list[int] = []  # micro-batches whose gradients wait for the next U
    staleness = []
    for part in (part for action in schedule.rows[rank] for part in action.parts):
        k = part.microbatch
        if part.kind == "F":
            used[k] = schedule.versions[k] if schedule.versions else newest
            if used[k] > newest:
                raise RefusedError(
                    f"{schedule.name}: {part} on rank {rank} asks for version {used[k]} of the weights, and "
                    f"the newest is {newest}. Let micro-batch {k} use version {newest} or an older one."
                )
            in_flight.add(k)
        elif part.kind in ("B", "W"):
            in_flight.remove(k)
            since_update.append(k)
        elif part.kind == "U":
            staleness.append(newest - min(used[k] for k in since_update))
            since_update.clear()
            newest += 1
        kept = max(kept, len({newest, *(used[k] for k in in_flight)}))
    return WeightVersions(tuple(used[k] for k in sorted(used)), tuple(staleness), kept)
