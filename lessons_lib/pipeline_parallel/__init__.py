"""Pipeline schedules as data: made, checked, simulated, drawn.

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
    from lessons_lib.pipeline_parallel.forms import bubble_form, peak_form
    from lessons_lib.pipeline_parallel.legality import (
        Fault,
        IllegalScheduleError,
        check,
        first_early,
        first_fault,
    )
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
    from lessons_lib.pipeline_parallel.text import read_csv, read_grid, read_slots, write_csv, write_grid
    from lessons_lib.pipeline_parallel.timeline import PipelineTimeline
    from lessons_lib.pipeline_parallel.times import Times
    from lessons_lib.pipeline_parallel.versions import WeightVersions, weight_versions

__all__ = [
    "SCHEDULES",
    "Action",
    "Fault",
    "IllegalScheduleError",
    "Pair",
    "PipelineTimeline",
    "Schedule",
    "Times",
    "WeightVersions",
    "breadth_first",
    "bubble_form",
    "check",
    "chimera",
    "draw",
    "dualpipe",
    "dualpipe_v",
    "first_early",
    "first_fault",
    "gpipe",
    "interleaved",
    "legal_next",
    "one_f_one_b",
    "peak_form",
    "pipedream",
    "pipedream_2bw",
    "read_csv",
    "read_grid",
    "read_slots",
    "simulate",
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
    ".forms": "bubble_form peak_form",
    ".legality": "Fault IllegalScheduleError check first_early first_fault",
    ".rules": "legal_next",
    ".schedule": (
        "SCHEDULES breadth_first chimera dualpipe dualpipe_v gpipe interleaved one_f_one_b "
        "pipedream pipedream_2bw zb_h1 zb_h2 zb_v"
    ),
    ".simulate": "simulate",
    ".text": "read_csv read_grid read_slots write_csv write_grid",
    ".timeline": "PipelineTimeline",
    ".times": "Times",
    ".versions": "WeightVersions weight_versions",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__getattr__, __dir__ = lazy(__name__, {name: _HOME_OF[name] for name in __all__})
