"""Functions travel to ranks by value, so that ranks share no variable of the notebook.

cloudpickle copies a function of a notebook cell with what it uses. Three things are added here: the
copy keeps the name of its file, so that tracebacks still show the cell and its lines; tensors are
copied fast; and what cannot be copied is named.
"""

from __future__ import annotations

import collections
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as _classes_by_id
from cloudpickle.cloudpickle import _code_reduce

from lessons_lib.errors import RefusedError
from lessons_lib.spmd import _torch_internals


class Packed(NamedTuple):
    """A function and its arguments as bytes, and the notebook's classes that they use."""

    pickled: bytes
    classes: list[type]


def _code_with_file_name(code: types.CodeType) -> Any:
    """Reduce a code object as cloudpickle does, but keep the file name that it erases."""
    rebuild, fields = _code_reduce(code)
    return rebuild, tuple(code.co_filename if field == "<dynamic-code>" else field for field in fields)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        {types.CodeType: _code_with_file_name, **_torch_internals.storage_reducers()},
        cloudpickle.Pickler.dispatch_table,
    )

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.classes: list[type] = []

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, types.ModuleType) and _is_taken_apart(thing):
            return importlib.import_module, (thing.__name__,)
        reduced = super().reducer_override(thing)
        if isinstance(thing, type) and reduced is not NotImplemented:
            self.classes.append(thing)  # a class of the notebook: others are found by their name
        return reduced


def _is_taken_apart(module: types.ModuleType) -> bool:
    """Whether cloudpickle would copy an imported module, as it does where its class is its own: torch.ops."""
    return type(module) is not types.ModuleType and sys.modules.get(module.__name__) is module


def _pack(thing: Any) -> Packed:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(thing)
    return Packed(buffer.getvalue(), pickler.classes)


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> Packed:
    """Copy a function and its arguments into bytes that :func:`unpack` makes new objects of."""
    try:
        return _pack((fn, args))
    except Exception as error:
        culprit = _culprit(fn, args)
        raise RefusedError(
            f"run sends the function and its arguments to every rank by value, and {culprit} cannot be "
            f"copied: {error}. Create it inside the function."
        ) from error


def dumps(thing: Any) -> bytes:
    """Copy anything into bytes that ``pickle.loads`` makes a new object of."""
    return _pack(thing).pickled


def unpack(pickled: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return pickle.loads(pickled)


def classes_that_came() -> list[type]:
    """Classes that have travelled to this process by value."""
    return list(_classes_by_id.values())


def _culprit(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Name what in a function or its arguments cannot be copied."""
    used: dict[str, Any] = {f"argument {index}": value for index, value in enumerate(args)}
    code = getattr(fn, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                used[f"the variable {name!r}"] = cell.cell_contents
            except ValueError:  # not set yet
                continue
        module = fn.__globals__
        used |= {f"the variable {name!r}": module[name] for name in code.co_names if name in module}
    for name, value in used.items():
        try:
            _pack(value)
        except Exception:
            return f"{name} ({type(value).__name__})"
    return "something it uses"
