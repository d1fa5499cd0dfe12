"""An explorer of layouts: who owns which block of a tensor."""

from __future__ import annotations

import re

from lessons_lib.errors import RefusedError
from lessons_lib.views import Figure, layout_picture
from lessons_lib.widgets.explorer import Choice, Explorer, Slider, Written

MESHES = ("dp=4", "row=2, col=2", "row=2, col=3", "dp=2, tp=4", "i=2, j=2, k=2", "row=4, col=4")


def layout_explorer(
    layout: str = "D@row F",
    mesh: str = "row=2, col=2",
    shape: str = "8, 12",
    *,
    name: str = "W",
    theme: str = "light",
) -> Explorer:
    """Write layouts of a tensor on a mesh; see which rank owns what.

    >>> print(layout_explorer("D F@col", "row=2, col=3").figure.alt)
    Layout D F@col of W, 8 × 12, on a mesh of row=2, col=3: dim F is cut over col into 3 blocks of 4; \
2 copies along row; each rank holds 8 × 4, which is 1/3 of the elements.

    Opens with copies along ``col``: what must be added to the layout so that each rank owns a quarter?
    Raises RefusedError for a layout, a mesh or a shape that does not fit the others.
    """
    meshes = MESHES if mesh in MESHES else (mesh, *MESHES)

    def draw(layout: str, mesh: str, shape: str, rank: int) -> Figure:
        return layout_picture(layout, read_shape(shape), read_mesh(mesh), name=name, rank=rank, theme=theme)

    def limits(values: dict[str, object]) -> dict[str, int]:
        n_ranks = 1
        for size in read_mesh(str(values["mesh"])).values():
            n_ranks *= size
        return {"rank": n_ranks - 1}

    return Explorer(
        draw,
        {
            "layout": Written("Layout"),
            "mesh": Choice("Mesh", meshes),
            "shape": Written("Shape"),
            "rank": Slider("Rank", 0, 63),
        },
        start={"layout": layout, "mesh": mesh, "shape": shape, "rank": 0},
        settings={
            "2D": {"layout": "D@row F@col", "mesh": "row=2, col=3", "shape": "8, 12"},
            "a partial sum": {"layout": "B F +tp", "mesh": "dp=2, tp=4", "shape": "8, 12"},
        },
        limits=limits,
    )


def read_shape(text: str) -> tuple[int, ...]:
    """
    >>> read_shape("8, 12"), read_shape("(4, 16, 8)"), read_shape("8 x 12")
    ((8, 12), (4, 16, 8), (8, 12))
    """
    if not re.fullmatch(r"[\d\s,x×()]*", text):
        raise RefusedError(f"shape {text!r}: write the sizes of the dims, for example 8, 12.")
    return tuple(map(int, re.findall(r"\d+", text)))


def read_mesh(text: str) -> dict[str, int]:
    """
    >>> read_mesh("row=2, col=3")
    {'row': 2, 'col': 3}
    """
    return {axis: int(size) for axis, size in re.findall(r"(\w+)\s*=\s*(\d+)", text)}
