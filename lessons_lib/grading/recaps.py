"""``recap("08")``: three numbers from lessons 1, 3 and 7 back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lessons_lib.errors import RefusedError
from lessons_lib.grading import notebook
from lessons_lib.grading.exercise import Draw
from lessons_lib.grading.notebook import escape
from lessons_lib.grading.questions import QUESTIONS, Question, ask

BACK = (1, 3, 7)  # lessons

_CARD = (
    "max-width:900px;font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:14px;line-height:1.45;"
    "color:var(--jp-ui-font-color1,inherit);border-left:4px solid #009E73;padding:4px 0 4px 12px"
)


def recap(lesson: str, seed: int | None = None) -> Recap:
    """Ask three questions from lessons 1, 3 and 7 before ``lesson``, each with a number for an answer.

    >>> once_more = recap("01")
    >>> [question.lesson for question in once_more.questions]
    ['00', '00', '00']
    >>> once_more.check(*(question.answer for question in once_more.questions)).n_right
    3

    Where a lesson so far back does not exist, or has no questions, the nearest before it is asked about.
    Numbers are drawn from ``seed``; without one, a lesson always asks the same.
    """
    if not (isinstance(lesson, str) and len(lesson) == 2 and lesson.isdigit()):
        raise RefusedError(f'recap({lesson!r}): name a lesson by its two digits, like recap("03").')
    number = int(lesson)
    draw = Draw(number if seed is None else seed)
    asked: list[Question] = []
    for back in BACK:
        name = _pick(number, number - back, [question.name for question in asked], draw)
        if name:
            asked.append(ask(name, draw))
    if not asked:
        raise RefusedError(f'recap("{lesson}"): no lesson comes before it.')
    return Recap(lesson, tuple(asked))


def _pick(before: int, wanted: int, used: Sequence[str], draw: Draw) -> str:
    """A question not used yet, of the wanted lesson or the nearest before it; if there is none, after it."""
    left = [name for name in QUESTIONS if int(name[:2]) < before and name not in used]
    if not left:
        return ""
    nearest = min({int(name[:2]) for name in left}, key=lambda n: (n > wanted, abs(n - wanted)))
    return draw.random.choice([name for name in left if int(name[:2]) == nearest])


@dataclass(frozen=True, repr=False)
class Recap:
    """Questions; ``.check(1, 2, 3)`` looks at answers. In a notebook, each has a box for its answer."""

    lesson: str
    questions: tuple[Question, ...]

    def check(self, *answers: float) -> Answered:
        """Compare answers, in the order of the questions; to within half a percent."""
        if len(answers) != len(self.questions):
            raise RefusedError(f"there are {len(self.questions)} questions, and {len(answers)} answers came.")
        return Answered(self.questions, tuple(map(float, answers)))

    def __repr__(self) -> str:
        rows = [f"{n}. {question.text}" for n, question in enumerate(self.questions, 1)]
        places = ", ".join("..." for _ in self.questions)
        return "\n".join(
            ["Before you begin:", *rows, f'recap("{self.lesson}").check({places}) looks at answers.']
        )

    @property
    def html(self) -> str:
        rows = "".join(
            f"<li>{escape(question.text)}<details><summary>answer</summary>"
            f"{question.answer:g}: {escape(question.how)}</details></li>"
            for question in self.questions
        )
        return f'<div style="{_CARD}"><b>Before you begin</b><ol style="margin:4px 0">{rows}</ol></div>'

    def _ipython_display_(self) -> None:
        notebook.show(repr(self), self.html, self._boxes())

    def _boxes(self) -> Any:
        widgets = notebook.widgets()
        if widgets is None:
            return None
        rows: list[Any] = [widgets.HTML(value="<b>Before you begin</b>")]
        for number, question in enumerate(self.questions, 1):
            box = widgets.Text(
                placeholder="a number, then Enter",
                description=f"Answer {number}",
                layout=widgets.Layout(width="240px"),
                continuous_update=False,
            )
            said = widgets.HTML()

            def answered(change: Any, question: Question = question, said: Any = said) -> None:
                said.value = _verdict(question, change["new"])

            box.observe(answered, "value")
            rows += [widgets.HTML(value=f"{number}. {escape(question.text)}"), widgets.HBox([box, said])]
        return widgets.VBox(rows)


def _verdict(question: Question, typed: str) -> str:
    """What to say to something typed into a box.

    >>> question = ask("01-tree-rounds", Draw(1))
    >>> _verdict(question, "4"), _verdict(question, "four")
    ('✓ 4', 'a number, please')
    >>> _verdict(question, "3")
    '✗ not 3: every round doubles those that have it: the logarithm of p to base 2, rounded up'
    """
    if not typed.strip():
        return ""
    try:
        number = float(typed.replace(",", "").replace("_", ""))
    except ValueError:
        return "a number, please"
    if question.accepts(number):
        return f"✓ {question.answer:g}"
    return f"✗ not {number:g}: {escape(question.how)}"


@dataclass(frozen=True, repr=False)
class Answered:
    """Answers beside the right ones."""

    questions: tuple[Question, ...]
    answers: tuple[float, ...]

    @property
    def n_right(self) -> int:
        return sum(q.accepts(answer) for q, answer in zip(self.questions, self.answers, strict=True))

    def __repr__(self) -> str:
        rows = [f"{self.n_right} of {len(self.questions)} right"]
        for number, (question, answer) in enumerate(zip(self.questions, self.answers, strict=True), 1):
            if question.accepts(answer):
                rows.append(f"  {number}. ✓ {question.answer:g}")
            else:
                rows.append(f"  {number}. ✗ {answer:g}, and it is {question.answer:g}: {question.how}")
        return "\n".join(rows)
