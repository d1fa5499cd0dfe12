"""A notebook as it is saved: every picture there, nothing of the machine that ran it.

GitHub and an untrusted JupyterLab withhold SVG, as an image and inside HTML, so every SVG gets a PNG
twin and loses its HTML one. Widgets live only as long as their kernel, so what is saved of them is
the picture they carry.
"""

from __future__ import annotations

import base64
import copy
import re
import sys
from functools import cache
from pathlib import Path

import resvg_py
from nbformat import NotebookNode

PROJECT = Path(__file__).parents[2]
PIXELS_PER_UNIT = 2  # the twin stays sharp on a dense screen, and is shown at the SVG's own size
WIDGET = "application/vnd.jupyter.widget-view+json"


def clean(notebook: NotebookNode) -> NotebookNode:
    """Return ``notebook`` as it is saved. Cleaning what is clean changes nothing."""
    result = copy.deepcopy(notebook)
    result.metadata.pop("widgets", None)
    for cell in result.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            clean_output(output)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("data") != {}]
    return result


def clean_output(output: NotebookNode) -> None:
    if output.output_type == "stream":
        output.text = without_machine(output.text)
    elif output.output_type == "error":
        output.traceback = [without_machine(line) for line in output.traceback]
        output.evalue = without_machine(output.evalue)
    else:
        if output.data.pop(WIDGET, None) and output.data.keys() <= {"text/plain"}:
            output.data.clear()  # the picture of these controls is the next output
        for mime, content in output.data.items():
            if isinstance(content, str) and not mime.startswith("image/png"):
                output.data[mime] = without_machine(content)
        if "image/svg+xml" in output.data and "image/png" not in output.data:
            output.data.pop("text/html", None)
            output.data["image/png"] = png_twin(output.data["image/svg+xml"])
            output.metadata["image/png"] = {"width": width(output.data["image/png"]) // PIXELS_PER_UNIT}


def without_machine(text: str) -> str:
    """Shorten paths to what they are on any machine.

    >>> without_machine(f"{PROJECT}/lessons_lib/mesh.py, /tmp/ipykernel_73/2917.py, {Path.home()}/data")
    'lessons_lib/mesh.py, <cell>, ~/data'
    """
    text = re.sub(r"[^\s\"'(\[]*/ipykernel_\d+/\d+\.py", "<cell>", text)
    python = {sys.prefix: "python/", sys.base_prefix: "python/"}
    for path, name in {str(PROJECT): "", **python, str(Path.home()): "~/"}.items():
        text = text.replace(f"{path}/", name)
    return text


def png_twin(svg: str) -> str:
    """Render ``svg`` with matplotlib's own copy of DejaVu, so that any machine draws the same pixels."""
    png = resvg_py.svg_to_bytes(
        svg_string=svg,
        zoom=PIXELS_PER_UNIT,
        font_files=fonts(),
        skip_system_fonts=True,
        font_family="DejaVu Sans",
        sans_serif_family="DejaVu Sans",
        serif_family="DejaVu Serif",
        monospace_family="DejaVu Sans Mono",
    )
    return base64.b64encode(bytes(png)).decode()


def width(png: str) -> int:
    """Pixels per row, which a PNG states in bytes 16 to 20."""
    return int.from_bytes(base64.b64decode(png[:40])[16:20], "big")


@cache
def fonts() -> list[str]:
    from matplotlib import get_data_path

    return sorted(str(path) for path in Path(get_data_path(), "fonts", "ttf").glob("DejaVu*.ttf"))
