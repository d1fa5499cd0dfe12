"""What to train, on how many ranks, and how; and which of that does not go together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from lessons_lib import plan
from lessons_lib.checkpoint import Checkpoint
from lessons_lib.errors import RefusedError
from lessons_lib.models.gpt import GPTConfig
from lessons_lib.pipeline_parallel import SCHEDULES, Schedule
from lessons_lib.plan import GPTPlan
from lessons_lib.sequence_parallel import ATTENTIONS, SequenceAttention

OF_AXIS = dict(schedule="pp", attention="cp")
UPDATING = ("pipedream", "pipedream-2bw")  # schedules by which no step is one of the serial training
IN_STAGES = ("1d", "1d-sp")  # schemes of tp that leave a stage all rows of a micro-batch, to hand on


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a run is saved, how often, and the checkpoint it goes on from."""

    folder: Path
    every: int = 50  # steps; the last one is always saved
    start: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What to train, on how many ranks, and how. ``seed`` decides the weights and the batches.

    Raises RefusedError for what does not go together, whatever the sizes.
    """

    config: GPTConfig = GPTConfig()
    pp: int = 1
    schedule: str | None = None  # of the pipeline, one of SCHEDULES; None: there is no pipeline
    n_microbatches: int = 1
    dp: int = 1
    cp: int = 1
    attention: str | None = None  # over cp, one of ATTENTIONS; None: sequences are not cut
    tp: int = 4  # ranks that share each layer, whatever the scheme
    scheme: str = "1d"  # one of plan.PLANS
    depth: int = 1  # square grids of 2.5D
    zero: int = 0  # the stage of ZeRO that shares out over dp and cp; 0 shares out nothing
    steps: int = 200
    n_sequences: int = 16  # per step
    lr: float = 1e-3
    seed: int = 0
    n_sample: int = 200  # bytes to generate at the end
    dtype: torch.dtype = torch.float32
    saving: Saving | None = None

    def __post_init__(self) -> None:
        once = [name for name in SCHEDULES if name not in UPDATING]
        _check_name("schedule", self.schedule, once, needed=self.pp > 1)
        _check_name("attention", self.attention, ATTENTIONS, needed=self.cp > 1)
        if self.schedule is None:
            return
        if self.tp > 1 and self.scheme not in IN_STAGES:
            raise RefusedError(
                f"layers by {self.scheme} do not go with a pipeline: a stage hands on all rows of a "
                f"micro-batch, and {self.scheme} shares them out. Try {' or '.join(IN_STAGES)}, or tp=1"
            )
        if self.zero:
            raise RefusedError(
                f"ZeRO {self.zero} does not go with a pipeline: it would sum gradients while micro-batches "
                "still add to them, and to another copy of the stage. Try zero=0, or no pipeline"
            )
        if self.config.dropout:
            raise RefusedError(
                f"dropout={self.config.dropout} does not go with a pipeline: which numbers it drops would "
                "depend on the order of micro-batches. Try dropout=0"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Of the mesh: an axis only where something is shared out over it; dp and cp are neighbours."""
        shared_out = {"pp": self.pp} if self.schedule is not None else {}
        shared_out |= {"dp": self.dp} if self.dp > 1 else {}
        shared_out |= {"cp": self.cp} if self.attention is not None else {}
        return shared_out | plan.mesh_sizes(self.scheme, self.tp, self.depth)

    @property
    def n_ranks(self) -> int:
        return prod(self.sizes.values())

    @property
    def plan(self) -> GPTPlan:
        return plan.PLANS[self.scheme]

    @property
    def pipeline(self) -> Schedule | None:
        """The schedule itself. Raises RefusedError for numbers of ranks and micro-batches it cannot have."""
        return None if self.schedule is None else SCHEDULES[self.schedule](self.pp, self.n_microbatches)

    @property
    def over_cp(self) -> SequenceAttention | None:
        return None if self.attention is None else ATTENTIONS[self.attention]

    def decisive(self) -> dict[str, Any]:
        """What decides the losses, by the names of the command's options: the same after a resumption."""
        sizes = asdict(self.config)
        names = dict(L="layers", H="heads", D="width", S="seq", V="vocabulary")
        return {
            **{names.get(name, name): size for name, size in sizes.items()},
            "batch": self.n_sequences,
            "lr": self.lr,
            "seed": self.seed,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def _check_name(what: str, name: str | None, known: Iterable[str], needed: bool) -> None:
    if name is None and needed:
        raise RefusedError(f"more than one rank of {OF_AXIS[what]} needs {what}=; try {', '.join(known)}")
    if name is not None and name not in known:
        raise RefusedError(f"no {what} is called {name!r}; there are {', '.join(known)}")
