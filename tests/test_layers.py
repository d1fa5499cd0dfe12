"""What import-linter cannot see: only lessons_lib.spmd._torch_internals touches private torch API.

A name or module under torch is private if a part of it begins with an underscore, or if torch's own
documentation does not know it. The layers themselves are contracts in pyproject.toml: make layers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[1] / "lessons_lib"
THE_EXCEPTION = LIBRARY / "spmd" / "_torch_internals.py"
UNDOCUMENTED = ("torch.distributed.distributed_c10d", "torch.testing._internal")


def private_torch(source: str) -> Iterator[str]:
    """Yield what ``source`` uses of private torch, as 'line: dotted name'."""
    tree = ast.parse(source)
    torch_names: dict[str, str] = {}  # what a name in this file stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    torch_names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield from private(alias.name, node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                torch_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from private(f"{node.module}.{alias.name}", node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            *parts, root = dotted(node)
            if root in torch_names:
                yield from private(".".join([torch_names[root], *reversed(parts)]), node)


def private(name: str, node: ast.stmt | ast.expr) -> Iterator[str]:
    hidden = any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    if hidden or name.startswith(UNDOCUMENTED):
        yield f"{node.lineno}: {name}"


def dotted(node: ast.expr) -> list[str]:
    """The names of a.b.c, last first; the root is '' if it is not a plain name."""
    if isinstance(node, ast.Attribute):
        return [node.attr, *dotted(node.value)]
    return [node.id if isinstance(node, ast.Name) else ""]


@pytest.mark.parametrize(
    "source, found",
    [
        ("import torch._C", "1: torch._C"),
        ("import torch\ntorch._C._dynamo", "2: torch._C._dynamo"),
        ("import torch.distributed as dist\ndist._tensor", "2: torch.distributed._tensor"),
        ("from torch.distributed import distributed_c10d as c", "1: torch.distributed.distributed_c10d"),
        ("def f():\n  from torch.distributed.distributed_c10d import new", "2: torch.distributed"),
        ("from torch.testing._internal.common_distributed import spawn", "1: torch.testing._internal"),
        ("from torch import nn\nnn.Module._call_impl", "2: torch.nn.Module._call_impl"),
    ],
)
def test_private_torch_is_found(source: str, found: str) -> None:
    assert any(use.startswith(found) for use in private_torch(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__, torch.nn.Linear",
        "from lessons_lib.spmd import _torch_internals\n_torch_internals._anything",
        "import torch.distributed as dist\ndist.all_reduce\nself._torch",
    ],
)
def test_public_torch_is_left_alone(source: str) -> None:
    assert list(private_torch(source)) == []


def test_only_one_module_uses_private_torch() -> None:
    found = {module: list(private_torch(module.read_text())) for module in LIBRARY.rglob("*.py")}
    assert {module: uses for module, uses in found.items() if uses and module != THE_EXCEPTION} == {}
