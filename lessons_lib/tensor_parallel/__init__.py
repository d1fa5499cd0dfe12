"""Tensor parallelism: one linear layer, computed by several ranks that each hold blocks of it.

``SCHEMES`` maps the name of a scheme to the scheme; ``TensorParallelLinear`` makes a module of any of them.

>>> SCHEMES["row"].W
Layout("D@tp F")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons_lib.tensor_parallel.column import Column
    from lessons_lib.tensor_parallel.linear import TensorParallelLinear, tensor_parallel_linear
    from lessons_lib.tensor_parallel.row import Row
    from lessons_lib.tensor_parallel.schemes import SCHEMES, Scheme

__all__ = ["SCHEMES", "Column", "Row", "Scheme", "TensorParallelLinear", "tensor_parallel_linear"]

_HOME = {
    "SCHEMES": "schemes",
    "Column": "column",
    "Row": "row",
    "Scheme": "schemes",
    "TensorParallelLinear": "linear",
    "tensor_parallel_linear": "linear",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
