"""Data parallelism: every rank works on rows of its own, and all take the same step.

``Bucketed`` sums the gradients of replicas while backward goes on; ``Zero`` also shares out what replicas
would hold twice: the optimizer's state, the gradients, the parameters.

>>> from lessons_lib.data_parallel import STAGES
>>> STAGES[2]
Stage(parameters=Layout("N"), gradients=Layout("N@dp"), state=Layout("N@dp"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.data_parallel.clipping import clip, global_norm
    from lessons_lib.data_parallel.replicated import Bucketed, reduce_each
    from lessons_lib.data_parallel.rows import mean_over_ranks, rows_of_rank, total
    from lessons_lib.data_parallel.scaler import LossScaler
    from lessons_lib.data_parallel.stages import STAGES, Stage, stored, traffic
    from lessons_lib.data_parallel.unit import Unit
    from lessons_lib.data_parallel.zero import Zero, units_of

__all__ = [
    "STAGES",
    "Bucketed",
    "LossScaler",
    "Stage",
    "Unit",
    "Zero",
    "clip",
    "global_norm",
    "mean_over_ranks",
    "reduce_each",
    "rows_of_rank",
    "stored",
    "total",
    "traffic",
    "units_of",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "STAGES": ".stages",
        "Bucketed": ".replicated",
        "LossScaler": ".scaler",
        "Stage": ".stages",
        "Unit": ".unit",
        "Zero": ".zero",
        "clip": ".clipping",
        "global_norm": ".clipping",
        "mean_over_ranks": ".rows",
        "reduce_each": ".replicated",
        "rows_of_rank": ".rows",
        "stored": ".stages",
        "total": ".rows",
        "traffic": ".stages",
        "units_of": ".zero",
    },
)
