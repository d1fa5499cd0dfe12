"""Pipeline schedules as data: made, checked, simulated, drawn; and executed on real stages.

>>> from lessons_lib.pipeline_parallel import Times, one_f_one_b, simulate
>>> simulate(one_f_one_b(p=4, m=8), Times(F=1, I=1, W=1)).makespan
33
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

# Not lazily: a module and a function share this name, and the name is to mean the function.
from lessons_lib.pipeline_parallel.simulate import simulate

if TYPE_CHECKING:
    from lessons_lib.pipeline_parallel.actions import Action, Pair, Schedule
    from lessons_lib.pipeline_parallel.drawing import draw
    from lessons_lib.pipeline_parallel.executor import Executed, cut_batch, execute
    from lessons_lib.pipeline_parallel.forms import bubble_form, peak_form
    from lessons_lib.pipeline_parallel.legality import (
        Fault,
        IllegalScheduleError,
        check,
        first_early,
        first_fault,
    )
    from lessons_lib.pipeline_parallel.partition import cut_by_cost, cut_model, layer_costs, tied_places
    from lessons_lib.pipeline_parallel.puzzles import PUZZLES, Attempt, Puzzle
    from lessons_lib.pipeline_parallel.rules import legal_next
    from lessons_lib.pipeline_parallel.schedule import (
        SCHEDULES,
        breadth_first,
        chimera,
        dualpipe,
        dualpipe_v,
        gpipe,
        interleaved,
        one_f_one_b,
        pipedream,
        pipedream_2bw,
        zb_h1,
        zb_h2,
        zb_v,
    )
    from lessons_lib.pipeline_parallel.split_backward import PutOff
    from lessons_lib.pipeline_parallel.text import read_csv, read_grid, read_slots, write_csv, write_grid
    from lessons_lib.pipeline_parallel.timeline import PipelineTimeline
    from lessons_lib.pipeline_parallel.times import Times
    from lessons_lib.pipeline_parallel.versions import WeightVersions, weight_versions

__all__ = [
    "PUZZLES",
    "SCHEDULES",
    "Action",
    "Attempt",
    "Executed",
    "Fault",
    "IllegalScheduleError",
    "Pair",
    "PipelineTimeline",
    "PutOff",
    "Puzzle",
    "Schedule",
    "Times",
    "WeightVersions",
    "breadth_first",
    "bubble_form",
    "check",
    "chimera",
    "cut_batch",
    "cut_by_cost",
    "cut_model",
    "draw",
    "dualpipe",
    "dualpipe_v",
    "execute",
    "first_early",
    "first_fault",
    "gpipe",
    "interleaved",
    "layer_costs",
    "legal_next",
    "one_f_one_b",
    "peak_form",
    "pipedream",
    "pipedream_2bw",
    "read_csv",
    "read_grid",
    "read_slots",
    "simulate",
    "tied_places",
    "weight_versions",
    "write_csv",
    "write_grid",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

_HOMES = {
    ".actions": "Action Pair Schedule",
    ".drawing": "draw",
    ".executor": "Executed cut_batch execute",
    ".forms": "bubble_form peak_form",
    ".legality": "Fault IllegalScheduleError check first_early first_fault",
    ".partition": "cut_by_cost cut_model layer_costs tied_places",
    ".puzzles": "PUZZLES Attempt Puzzle",
    ".rules": "legal_next",
    ".schedule": (
        "SCHEDULES breadth_first chimera dualpipe dualpipe_v gpipe interleaved one_f_one_b "
        "pipedream pipedream_2bw zb_h1 zb_h2 zb_v"
    ),
    ".simulate": "simulate",
    ".split_backward": "PutOff",
    ".text": "read_csv read_grid read_slots write_csv write_grid",
    ".timeline": "PipelineTimeline",
    ".times": "Times",
    ".versions": "WeightVersions weight_versions",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__getattr__, __dir__ = lazy(__name__, {name: _HOME_OF[name] for name in __all__})
