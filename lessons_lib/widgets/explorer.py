"""The frame of all explorers: a picture, its sentence, at most four controls, a reset, settings to try."""

from __future__ import annotations

import html
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lessons_lib.errors import RefusedError
from lessons_lib.views import Figure
from lessons_lib.widgets.latest import Latest

MOST_CONTROLS = 4
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# Two things that ipywidgets cannot say, said by a picture of one pixel as soon as it is on the page: the name
# of a slider's handle and readout, and that keys typed into a control are not commands for JupyterLab, where
# an arrow goes to the next cell and an "r" makes the cell raw.
FOR_THE_KEYBOARD = (
    "<img alt='' src='data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==' "
    "onload=\"const box = this.closest('.explorer'); const say = () => { if (!box) return;"
    " box.querySelectorAll('select, [role=slider]').forEach(control =>"
    " control.setAttribute('data-lm-suppress-shortcuts', 'true'));"
    " box.querySelectorAll('.widget-slider').forEach(slider => {"
    " const words = slider.querySelector('label').textContent;"
    " slider.querySelector('[role=slider]').setAttribute('aria-label', words);"
    " const readout = slider.querySelector('.widget-readout');"
    " readout.setAttribute('role', 'textbox');"
    " readout.setAttribute('aria-label', words + ', as a number'); }); };"
    ' say(); setTimeout(say, 300)">'
)
HIDDEN = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap"


@dataclass(frozen=True)
class Slider:
    """Whole numbers from ``low`` to ``high``, moved by the arrow keys."""

    description: str
    low: int
    high: int


@dataclass(frozen=True)
class Choice:
    """One of a few values, each with the words that stand for it."""

    description: str
    options: Sequence[str]


@dataclass(frozen=True)
class Written:
    """A line of text. It counts when Enter is pressed or the field is left."""

    description: str


@dataclass(frozen=True)
class Toggle:
    """Something that is on or off, besides the controls."""

    description: str


Control = Slider | Choice | Written | Toggle
Values = dict[str, Any]


@dataclass
class Explorer:
    """A picture drawn from the values of a few controls. In a notebook it shows itself.

    ``draw`` takes the values by name and returns a Figure; ``start`` are the values to begin with, to
    which reset returns. ``settings`` are further values to try, by name. ``limits`` says how far sliders
    go, for given values.

    >>> explorer = Explorer(
    ...     draw=lambda step: Figure(f"Step {step}", f"This is step {step}."),
    ...     controls={"step": Slider("Step", 0, 4)},
    ...     start={"step": 1},
    ...     settings={"the end": {"step": 4}},
    ... )
    >>> explorer.set(step=3); explorer.figure.alt
    'This is step 3.'
    >>> explorer.set(step=9); explorer.values, explorer.figure.alt
    ({'step': 4}, 'This is step 4.')
    >>> explorer.reset(); explorer.values
    {'step': 1}

    Changes are drawn soon after the last of several; those in between are dropped. What goes wrong while
    drawing is shown below the controls until the next values that work. Without ipywidgets there is the
    picture, and a line that says so.
    """

    draw: Callable[..., Figure]
    controls: Mapping[str, Control]
    start: Values
    settings: Mapping[str, Values] = field(default_factory=dict)
    limits: Callable[[Values], Mapping[str, int]] = lambda values: {}

    def __post_init__(self) -> None:
        n_controls = sum(not isinstance(control, Toggle) for control in self.controls.values())
        if n_controls > MOST_CONTROLS:
            raise RefusedError(f"{n_controls} controls: an explorer has at most {MOST_CONTROLS}.")
        self.figure = self.draw(**self.start)  # what is wrong from the start is raised here
        self.error = ""
        self.values = dict(self.start)
        self._latest = Latest(self._update)
        self._drawing = False
        self.widgets: dict[str, Any] = {}
        ipywidgets = _ipywidgets()
        self.box = None if ipywidgets is None else self._build(ipywidgets)
        _replace_those_of_the_same_cell(self)

    # Values

    def set(self, **values: Any) -> None:
        """Give controls other values, several at once, and draw."""
        self.values |= values
        self._latest.ask()

    def reset(self) -> None:
        """Return to the values of the beginning."""
        self.set(**self.start)

    def _changed(self, name: str, value: Any) -> None:
        """A control has another value: remember that, and draw later."""
        if not self._drawing:
            self.set(**{name: value})

    def _update(self) -> None:
        self._drawing = True
        try:
            self._limit()
            for name, widget in self.widgets.items():
                if widget.value != self.values[name]:
                    widget.value = self.values[name]
            self.figure = self.draw(**self.values)
            self.error = ""
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._drawing = False
        if self.box is not None:
            self._show()

    def _limit(self) -> None:
        """Let sliders end where they must, and their values with them."""
        limits = self.limits(self.values)
        for name, control in self.controls.items():
            if isinstance(control, Slider):
                high = limits.get(name, control.high)
                self.values[name] = max(control.low, min(self.values[name], high))
                if name in self.widgets and self.widgets[name].max != high:
                    self.widgets[name].max = high

    # What it shows

    def _build(self, ipywidgets: Any) -> Any:
        wide = {"description_width": "initial"}
        for name, control in self.controls.items():
            shared = {"description": control.description, "style": wide}
            if isinstance(control, Slider):
                high = self.limits(self.values).get(name, control.high)
                widget = ipywidgets.IntSlider(
                    value=self.values[name], min=control.low, max=high, **shared, layout={"width": "340px"}
                )
            elif isinstance(control, Choice):
                widget = ipywidgets.Dropdown(
                    options=control.options,
                    value=self.values[name],
                    **shared,
                    layout={"width": "max-content"},
                )
            elif isinstance(control, Toggle):
                widget = ipywidgets.ToggleButton(
                    value=self.values[name],
                    description=control.description,
                    layout={"width": "max-content"},
                )
            else:
                widget = ipywidgets.Text(
                    value=self.values[name], continuous_update=False, **shared, layout={"width": "260px"}
                )
            widget.observe(lambda change, name=name: self._changed(name, change.new), names="value")
            self.widgets[name] = widget
        buttons = [self._button(ipywidgets, "Reset", self.start)]
        buttons += [
            self._button(ipywidgets, f"Try: {name}", values) for name, values in self.settings.items()
        ]
        row = {"flex_flow": "row wrap", "align_items": "center"}
        self._wrong, self._picture, self._sentence = (ipywidgets.HTML() for _ in range(3))
        box = ipywidgets.VBox(
            [
                ipywidgets.Box(self._rows(Slider | Choice | Written), layout=row),
                ipywidgets.Box([*self._rows(Toggle), *buttons], layout=row),
                self._wrong,
                self._picture,
                self._sentence,
            ]
        )
        box.add_class("explorer")
        box.add_class(f"explorer-{box.model_id}")
        self._show()
        return box

    def _rows(self, kind: Any) -> list[Any]:
        return [self.widgets[name] for name, control in self.controls.items() if isinstance(control, kind)]

    def _button(self, ipywidgets: Any, description: str, values: Values) -> Any:
        button = ipywidgets.Button(description=description, layout={"width": "max-content"})
        button.on_click(lambda _: self.set(**values))
        return button

    def _show(self) -> None:
        """Bring picture, sentence and error up to date; what has not changed is not sent."""
        wrong = f"<div role='alert' style='white-space:pre-wrap'>⚠ {html.escape(self.error)}</div>"
        self._wrong.value = wrong if self.error else ""
        self._wrong.layout.display = None if self.error else "none"
        self._picture.value = self.figure.html
        spoken = html.escape(self.figure.alt)
        said = f"<div role='status' aria-live='polite'>{spoken}</div>"
        self._sentence.value = f"<div style='{HIDDEN}'>{said}{FOR_THE_KEYBOARD}</div>"

    def close(self) -> None:
        """Take it off the page, and forget its controls."""
        self._latest.cancel()
        if self.box is not None:
            widgets = [self.box]
            while widgets:
                widget = widgets.pop()
                widgets += getattr(widget, "children", ())
                widget.unobserve_all()
                widget.close()
            self.box, self.widgets = None, {}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """The controls where they can live; anywhere else, and after the kernel's end, the picture."""
        bundle: dict[str, Any] = self.figure._repr_mimebundle_()
        note = MISSING.format(python=sys.executable) if self.box is None else NO_CONTROLS
        bundle["text/html"] += f"<p>{html.escape(note)}</p>"
        if self.box is None:
            bundle["text/plain"] += f"\n{note}"
        else:
            bundle[WIDGET_VIEW] = self.box._repr_mimebundle_()[WIDGET_VIEW]
        return bundle

    def _ipython_display_(self) -> None:
        """Show the controls; and behind them, for the day when no kernel brings them to life, the picture.

        A page that finds controls without a kernel shows an error in their place, and not the picture that
        comes with them. So it is an output of its own, which hides while the controls live.
        """
        from IPython.display import display

        bundle = self._repr_mimebundle_()
        if self.box is not None:
            live = {WIDGET_VIEW: bundle.pop(WIDGET_VIEW), "text/plain": self.figure.alt}
            display(live, raw=True)
            name = self.box.model_id
            bundle["text/html"] = f"{TWIN.replace('ID', name)}{bundle['text/html']}</div>"
        display(bundle, raw=True)


# The twin waits two seconds for the controls, as JupyterLab does.
TWIN = (
    "<style>@keyframes appear { from { max-height: 0 } to { max-height: 10000px } }"
    " .twin-ID { overflow: hidden; animation: appear 0s 2.5s both }"
    " :root:has(.explorer-ID) .twin-ID { display: none }</style><div class='twin-ID'>"
)
MISSING = (
    "A picture without controls: the package ipywidgets is missing in {python}, the Python of this notebook."
)
NO_CONTROLS = (
    "A picture without controls: these need a running kernel (run the cell), and the package "
    "jupyterlab_widgets in the Python that JupyterLab itself runs in."
)


def _ipywidgets() -> Any:
    try:
        return importlib.import_module("ipywidgets")
    except ImportError:
        return None


_of_cell: dict[str, tuple[Any, list[Explorer]]] = {}  # by cell: which execution, and what it made


def _replace_those_of_the_same_cell(explorer: Explorer) -> None:
    """Close what an earlier execution of this cell made: it is no longer on the page."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    header = getattr(shell, "parent_header", None) or {}
    cell = header.get("metadata", {}).get("cellId")
    if cell is None:
        return
    execution = header.get("header", {}).get("msg_id")
    before, made = _of_cell.get(cell, (execution, []))
    if before != execution:
        for each in made:
            each.close()
        made = []
    _of_cell[cell] = execution, [*made, explorer]
