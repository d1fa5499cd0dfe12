"""From names of modules to parallel schemes: a serial model goes in, each rank's part of it comes out.

A plan is a dict from patterns to schemes. A pattern is the name of a module, in which ``*`` stands for any
one part between dots:

>>> GPT_1D["blocks.*.mlp.up"]
'column'

The model itself stays as it is written; :func:`parallelize` replaces the linear layers that the plan names.
A :class:`GPTPlan` is a plan and a layout of the residual stream: all that stands between the layers follows.
:data:`PLANS` has one for every scheme:

>>> list(PLANS)
['1d', '1d-sp', '2d', '2.5d', '3d']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons_lib._lazy import lazy

if TYPE_CHECKING:
    from lessons_lib.plan.bill import module_traffic, traffic
    from lessons_lib.plan.checks import assign, check
    from lessons_lib.plan.plans import GPT_1D, PLANS, GPTPlan, Plan, in_pairs, mesh_sizes
    from lessons_lib.plan.replaced import parallelize, serial
    from lessons_lib.plan.state import (
        Stored,
        global_norm,
        n_copies,
        serial_gradients,
        shard_state,
        stored,
        unshard_state,
        whole,
    )

__all__ = [
    "GPT_1D",
    "PLANS",
    "GPTPlan",
    "Plan",
    "Stored",
    "assign",
    "check",
    "global_norm",
    "in_pairs",
    "mesh_sizes",
    "module_traffic",
    "n_copies",
    "parallelize",
    "serial",
    "serial_gradients",
    "shard_state",
    "stored",
    "traffic",
    "unshard_state",
    "whole",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "GPT_1D": ".plans",
        "PLANS": ".plans",
        "GPTPlan": ".plans",
        "Plan": ".plans",
        "Stored": ".state",
        "assign": ".checks",
        "check": ".checks",
        "global_norm": ".state",
        "in_pairs": ".plans",
        "mesh_sizes": ".plans",
        "module_traffic": ".bill",
        "n_copies": ".state",
        "parallelize": ".replaced",
        "serial": ".replaced",
        "serial_gradients": ".state",
        "shard_state": ".state",
        "stored": ".state",
        "traffic": ".bill",
        "unshard_state": ".state",
        "whole": ".state",
    },
)
