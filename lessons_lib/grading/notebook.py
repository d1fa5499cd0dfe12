"""What a notebook can do here: show widgets, or only what stays without a kernel."""

from __future__ import annotations

import html
import sys
from typing import Any


def shell() -> Any:
    """The notebook's IPython, or ``None`` in a plain program."""
    ipython = sys.modules.get("IPython")
    here = ipython.get_ipython() if ipython else None
    return here if getattr(here, "kernel", None) is not None else None


def widgets() -> Any:
    """ipywidgets, or ``None`` where they are not installed or no notebook could show them."""
    if shell() is None:
        return None
    try:
        import ipywidgets
    except ImportError:
        return None
    return ipywidgets


def cell() -> int | None:
    """Which execution of a cell this is."""
    here = shell()
    return None if here is None else here.execution_count


def show(text: str, page: str, live: Any = None) -> None:
    """Display something live, or else its page; both are kept, so that a saved notebook shows the page."""
    from IPython.display import display

    bundle = {"text/plain": text, "text/html": page}
    if live is not None:
        bundle |= {kind: data for kind, data in live._repr_mimebundle_().items() if kind not in bundle}
    display(bundle, raw=True)


def escape(text: str) -> str:
    """Text for a page, with its line breaks.

    >>> escape("a < b" + chr(10) + "c")
    'a &lt; b<br>c'
    """
    return html.escape(text).replace("\n", "<br>")
