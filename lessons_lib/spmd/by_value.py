"""Functions travel to ranks by value, so that ranks share no variable of the notebook.

cloudpickle copies a function of a notebook cell with what it uses. Two things are added here: the
copy keeps the name of its file, so that tracebacks still show the cell and its lines; and what
cannot be copied is named.
"""

from __future__ import annotations

import collections
import io
import pickle
import types
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle
from cloudpickle.cloudpickle import _code_reduce

from lessons_lib.errors import RefusedError


def _code_with_file_name(code: types.CodeType) -> Any:
    """Reduce a code object as cloudpickle does, but keep the file name that it erases."""
    rebuild, fields = _code_reduce(code)
    return rebuild, tuple(code.co_filename if field == "<dynamic-code>" else field for field in fields)


_EMPTY = types.CellType()  # of a variable that a closure names and nothing has set yet


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        {types.CodeType: _code_with_file_name}, cloudpickle.Pickler.dispatch_table
    )


def _dumps(thing: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(thing)
    return buffer.getvalue()


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Copy a function and its arguments into bytes that :func:`unpack` makes new objects of."""
    try:
        return _dumps((fn, args))
    except Exception as error:
        culprit = _culprit(fn, args)
        raise RefusedError(
            f"run sends the function and its arguments to every rank by value, and {culprit} cannot be "
            f"copied: {error}. Create it inside the function."
        ) from error


def unpack(packed: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return pickle.loads(packed)


def _culprit(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Name what in a function or its arguments cannot be copied."""
    used: dict[str, Any] = {f"argument {index}": value for index, value in enumerate(args)}
    code = getattr(fn, "__code__", None)
    if code is not None:
        cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
        used |= {f"the variable {name!r}": cell.cell_contents for name, cell in cells if cell != _EMPTY}
        module = fn.__globals__
        used |= {f"the variable {name!r}": module[name] for name in code.co_names if name in module}
    for name, value in used.items():
        try:
            _dumps(value)
        except Exception:
            return f"{name} ({type(value).__name__})"
    return "something it uses"
