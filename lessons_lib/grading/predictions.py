"""``predict``: a guess before the measurement, and both side by side afterwards.

Every wrong option is one misconception, which is named to whoever chose it. Nothing waits for a guess, so
that all cells of a lesson can be run at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lessons_lib.errors import RefusedError
from lessons_lib.grading import notebook, records
from lessons_lib.grading.notebook import escape

_guesses: dict[str, str] = {}  # by question, as long as the kernel lives: a cell may be run again

_CARD = (
    "max-width:900px;font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:14px;line-height:1.45;"
    "color:var(--jp-ui-font-color1,inherit);border-left:4px solid #0072B2;padding:4px 0 4px 12px"
)


def predict(question: str, **options: Any) -> Prediction:
    """Ask for a guess, with a button for every option; ``.reveal(measured, ...)`` shows what became of it.

    >>> guess = predict("2 ranks add up 1 and 2. Who has 3?", A="rank 0", B="both")
    >>> guess
    Guess: 2 ranks add up 1 and 2. Who has 3?
      A: rank 0
      B: both
    >>> guess.choose("A")
    >>> guess.reveal([3, 3], answer="B", A="no rank is special: an all-reduce leaves the sum on all")
    2 ranks add up 1 and 2. Who has 3?
      A: rank 0   <- your guess
      B: both   <- right
    Measured: [3, 3]
    You chose A: no rank is special: an all-reduce leaves the sum on all

    The answer stands where it is revealed, and not above the buttons.
    """
    if len(options) < 2:
        raise RefusedError(
            f'predict: a question needs two options or more, like A="...", B="..."; got {options}.'
        )
    strange = [name for name in options if not (len(name) == 1 and name.isupper())]
    if strange:
        raise RefusedError(
            f"predict: an option is a capital letter, which {', '.join(strange)} is not. "
            "The answer, and why others are wrong, belong to reveal."
        )
    prediction = Prediction(question, {letter: str(text) for letter, text in options.items()})
    if notebook.shell() is not None:
        prediction._ipython_display_()
    return prediction


@dataclass(repr=False)
class Prediction:
    """A question with options, and the guess, if there was one."""

    question: str
    options: dict[str, str]
    _shown_in: int | None = field(default=None, init=False)

    @property
    def guess(self) -> str | None:
        return _guesses.get(self.question)

    def choose(self, letter: str) -> None:
        """Guess; a later guess replaces an earlier one."""
        if letter not in self.options:
            raise RefusedError(f"{letter!r} is none of the options {', '.join(self.options)}.")
        _guesses[self.question] = letter
        records.note_guess(self.question, letter)

    def reveal(self, measured: Any = None, *, answer: str, **why: str) -> Revealed:
        """Show the guess beside what was measured, and the right option.

        ``answer`` is its letter; ``A="..."`` names the misconception of whoever chose A.
        """
        if answer not in self.options:
            raise RefusedError(f"reveal: answer={answer!r} is none of the options {', '.join(self.options)}.")
        wrong = [letter for letter in self.options if letter != answer]
        strange = [letter for letter in why if letter not in wrong]
        if strange:
            raise RefusedError(
                f"reveal explains {', '.join(strange)}; explanations are for the wrong options: "
                f"{', '.join(wrong)}."
            )
        return Revealed(self, self.guess, answer, why, _short(measured))

    def __repr__(self) -> str:
        options = "\n".join(f"  {letter}: {text}" for letter, text in self.options.items())
        chosen = f"\nYour guess: {self.guess}" if self.guess else ""
        return f"Guess: {self.question}\n{options}{chosen}"

    @property
    def html(self) -> str:
        options = "".join(
            f"<li style='list-style:none'><b>{letter}</b>&ensp;{escape(text)}</li>"
            for letter, text in self.options.items()
        )
        return (
            f'<div style="{_CARD}"><b>Guess:</b> {escape(self.question)}'
            f'<ul style="margin:4px 0;padding:0">{options}</ul></div>'
        )

    def _ipython_display_(self) -> None:
        if self._shown_in is not None and self._shown_in == notebook.cell():
            return  # it has shown itself when it was made
        self._shown_in = notebook.cell()
        notebook.show(repr(self), self.html, self._buttons())

    def _buttons(self) -> Any:
        """The question with a button for every option; ``None`` without widgets."""
        widgets = notebook.widgets()
        if widgets is None:
            return None
        said = widgets.HTML(value=self._said())
        buttons = [
            widgets.Button(
                description=letter,
                tooltip=f"Guess {letter}: {text}",
                button_style="primary" if letter == self.guess else "",
                layout=widgets.Layout(width="56px"),
            )
            for letter, text in self.options.items()
        ]

        def clicked(button: Any) -> None:
            self.choose(button.description)
            said.value = self._said()
            for each in buttons:
                each.button_style = "primary" if each is button else ""

        for button in buttons:
            button.on_click(clicked)
        row = widgets.HBox([*buttons, said], layout=widgets.Layout(align_items="center"))
        return widgets.VBox([widgets.HTML(value=self.html), row])

    def _said(self) -> str:
        return f"You guess {self.guess}." if self.guess else "What is your guess?"


@dataclass(frozen=True, repr=False)
class Revealed:
    """A guess beside what was measured."""

    prediction: Prediction
    guess: str | None
    answer: str
    why: dict[str, str]
    measured: str

    @property
    def right(self) -> bool | None:
        """Whether the guess was right; ``None`` if there was none."""
        return None if self.guess is None else self.guess == self.answer

    @property
    def verdict(self) -> str:
        """One sentence for whoever guessed."""
        if self.guess is None:
            return "No guess was made. Choose one above and run this cell again."
        if self.right:
            return f"You chose {self.guess}, and that is right."
        why = self.why.get(self.guess)
        return f"You chose {self.guess}: {why}" if why else f"You chose {self.guess}; right is {self.answer}."

    def _marks(self, letter: str) -> list[str]:
        return ["your guess"] * (letter == self.guess) + ["right"] * (letter == self.answer)

    def __repr__(self) -> str:
        rows = [self.prediction.question]
        for letter, text in self.prediction.options.items():
            marks = self._marks(letter)
            rows.append(f"  {letter}: {text}{'   <- ' + ', '.join(marks) if marks else ''}")
        if self.measured:
            rows.append(f"Measured: {self.measured}")
        return "\n".join([*rows, self.verdict])

    @property
    def html(self) -> str:
        rows = ""
        for letter, text in self.prediction.options.items():
            marks = " ".join(_BADGE[mark] for mark in self._marks(letter))
            rows += f"<li style='list-style:none'><b>{letter}</b>&ensp;{escape(text)} {marks}</li>"
        measured = f"<div><b>Measured:</b> {escape(self.measured)}</div>" if self.measured else ""
        return (
            f'<div style="{_CARD}">{escape(self.prediction.question)}'
            f'<ul style="margin:4px 0;padding:0">{rows}</ul>{measured}<div>{escape(self.verdict)}</div></div>'
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.html}


_INK = "color:#ffffff;border-radius:4px;padding:0 6px;font-size:12px"
_BADGE = {
    name: f'<span style="background:{ground};{_INK}">{name}</span>'
    for name, ground in (("right", "#1a7f37"), ("your guess", "#0062a3"))
}


def _short(measured: Any) -> str:
    """A measurement as text: numbers with six digits.

    >>> _short(1.75), _short([0.1 + 0.2, 3]), _short(None)
    ('1.75', '[0.3, 3]', '')
    """
    if measured is None:
        return ""
    if isinstance(measured, float):
        return f"{measured:.6g}"
    if isinstance(measured, list | tuple):
        return f"[{', '.join(map(_short, measured))}]"
    return str(measured)
