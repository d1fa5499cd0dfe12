"""The table of tensor-parallel schemes."""

from __future__ import annotations

from lessons_lib.tensor_parallel.cannon import Cannon
from lessons_lib.tensor_parallel.column import Column
from lessons_lib.tensor_parallel.cube import Cube, CubeKept
from lessons_lib.tensor_parallel.row import Row
from lessons_lib.tensor_parallel.scheme import PricedScheme
from lessons_lib.tensor_parallel.summa import Summa
from lessons_lib.tensor_parallel.tesseract import Tesseract

SCHEMES: dict[str, PricedScheme] = {
    "column": Column(),
    "row": Row(),
    "2d": Summa(),
    "2.5d": Tesseract(),
    "3d": Cube(),
}
VARIANTS: dict[str, PricedScheme] = {
    "2d by Cannon": Cannon(),
    "3d exchanged": Cube().exchanged(),
    "3d kept": CubeKept(),
}
"""The same layouts, or roles exchanged, with another forward or backward."""
