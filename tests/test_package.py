"""import lessons_lib is instant; its names arrive when they are used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lessons_lib

PROJECT = Path(__file__).parents[1]


def in_a_new_process(program: str) -> str:
    line = [sys.executable, "-c", program]
    return subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=60).stdout


def test_import_is_instant_and_without_torch() -> None:
    report = in_a_new_process(
        "import sys, time; start = time.perf_counter(); import lessons_lib; "
        "print(time.perf_counter() - start, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    seconds, *heavy = report.split()
    assert heavy == ["False", "False"]
    assert float(seconds) < 0.05


@pytest.mark.parametrize(
    "module", ["errors", "timeline", "layout", "views", "selfcheck", "__main__", "train", "train.__main__"]
)
def test_light_modules_need_only_the_standard_library(module: str) -> None:
    loaded = in_a_new_process(f"import sys, lessons_lib.{module}; print(*sys.modules)").split()
    assert {"torch", "numpy", "matplotlib", "ipywidgets"}.isdisjoint(loaded)


def test_every_name_arrives() -> None:
    assert dir(lessons_lib) == lessons_lib.__all__ == sorted(lessons_lib.__all__)
    for name in lessons_lib.__all__:
        assert callable(getattr(lessons_lib, name)), name


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'mesh_of'; it has Layout, Mesh, "):
        lessons_lib.mesh_of  # noqa: B018


@pytest.mark.parametrize("package", ["models", "spmd", "tensor_parallel", "train", "views"])
def test_the_names_of_every_package_arrive(package: str) -> None:
    module = import_module(f"lessons_lib.{package}")
    assert dir(module) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is vars(module)[name], "found once, then kept"
    with pytest.raises(AttributeError, match=rf"'lessons_lib.{package}' has no attribute 'no'; it has "):
        module.no  # noqa: B018
