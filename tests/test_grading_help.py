"""Hints, predictions, recaps, progress, a copy to work in: what stands around a check."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lessons_lib.__main__ import main
from lessons_lib.errors import RefusedError
from lessons_lib.grading import hint, notebook, predict, predictions, progress, recap, recaps, records, reveal
from lessons_lib.grading.catalogue import EXERCISES
from lessons_lib.grading.exercise import Draw
from lessons_lib.grading.questions import QUESTIONS, ask
from lessons_lib.grading.report import Line, Report
from lessons_lib.grading.work import reset, start
from lessons_lib.views.colours import contrast

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "kept" / "progress.json"))


# ---- exercises as data ----


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=list(EXERCISES))
def test_an_exercise_says_all_there_is_to_say(exercise):
    assert exercise.id.startswith(exercise.lesson + "-")
    assert exercise.title and exercise.objective.endswith(".")
    assert len(set(exercise.hints)) == 3
    keys = [claim.key for claim in exercise.claims]
    assert len(set(keys)) == len(keys)
    for seed in range(3):
        trials = exercise.trials(Draw(seed))
        judged = {output.claim for trial in trials for output in trial.outputs}
        assert judged == set(keys) - {"traffic", "memory", "time", "no deadlock"}
        assert any(trial.deadline for trial in trials) == ("time" in keys)
        assert {trial.function for trial in trials} == set(exercise.names)
        for trial in trials:
            assert all(len(output.expected) == trial.n_ranks for output in trial.outputs)


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=list(EXERCISES))
def test_the_starter_runs_and_has_no_solution(exercise):
    space = {}
    exec(
        "import torch, torch.distributed as dist\nfrom torch import Tensor\nGroup = object\n"
        + exercise.starter,
        space,
    )
    assert all(callable(space[name]) for name in exercise.names)
    for function in exercise.functions:
        assert (
            space[function.__name__].__code__.co_varnames[: function.__code__.co_argcount]
            == (function.__code__.co_varnames[: function.__code__.co_argcount])
        )


def test_no_two_sizes_of_a_trial_are_equal_where_a_mix_up_would_hide():
    for seed in range(8):
        for exercise in ("08-column", "08-row", "08-mlp"):
            for trial in EXERCISES[exercise].trials(Draw(seed)):
                sizes = dict(each.split("=") for each in trial.facts.split(", "))
                assert len({sizes["B"], sizes["D"], sizes["F"]}) == 3, trial.facts


# ---- hints ----


def test_hints_go_one_further_with_each_call():
    texts = [hint("01-broadcast") for _ in range(4)]
    assert [text[:11] for text in texts] == ["Hint 1 of 3", "Hint 2 of 3", "Hint 3 of 3", "Hint 1 of 3"]
    assert 'reveal("01-broadcast")' in texts[2] and "reveal" not in texts[0]
    assert repr(texts[0]) == texts[0]


def test_reveal_prints_the_librarys_own_source(capsys):
    reveal("01-all-reduce")
    printed = capsys.readouterr().out
    assert "# lessons_lib/rings.py, line " in printed and "def ring_all_reduce(x: Tensor" in printed
    reveal("08-column")
    printed = capsys.readouterr().out
    assert 'dx = mesh["tp"].all_reduce(dy @ w.T)' in printed
    reveal("02-repair-3")
    assert "# A solution" in capsys.readouterr().out
    for id in EXERCISES:
        reveal(id)
        printed = capsys.readouterr().out
        assert printed.count("\ndef ") + printed.count("\nclass ") >= 1, f"{id}: a source is indented"


def test_help_for_what_does_not_exist_is_refused():
    for ask_for in (hint, reveal):
        with pytest.raises(RefusedError, match=r"no exercise '08-rows'\. Did you mean '08-row'"):
            ask_for("08-rows")


# ---- predictions ----

ASKED = {"A": "20: they share it", "B": "that of rank 0", "C": "still 10"}
TRUTH = {"answer": "C", "A": "ranks share no variable", "B": "rank 0 is not special"}


def asked(question="What is x?"):
    return predict(question, **ASKED)


def test_a_wrong_guess_is_shown_beside_the_measurement_with_its_misconception():
    guess = asked("one")
    guess.choose("B")
    revealed = guess.reveal(10.0, **TRUTH)
    assert revealed.right is False
    assert "B: that of rank 0   <- your guess" in repr(revealed) and "C: still 10   <- right" in repr(
        revealed
    )
    assert "Measured: 10" in repr(revealed)
    assert "You chose B: rank 0 is not special" in repr(revealed)
    assert "ranks share no variable" not in repr(revealed)
    page = revealed._repr_mimebundle_()["text/html"]
    assert "rank 0 is not special" in page and ">right<" in page and ">your guess<" in page


def test_a_right_guess_and_none_at_all():
    guess = asked("two")
    assert guess.guess is None and guess.reveal(10, **TRUTH).right is None
    assert "No guess was made" in repr(guess.reveal(10, **TRUTH))
    guess.choose("C")
    assert guess.reveal(10, **TRUTH).right is True and "that is right" in repr(guess.reveal(10, **TRUTH))


def test_a_guess_is_kept_when_the_cell_runs_again_and_noted():
    asked("three").choose("A")
    assert asked("three").guess == "A"
    asked("three").choose("C")
    assert asked("three").guess == "C"
    assert records.read()["guesses"] == {"three": "C"}


def test_a_prediction_that_cannot_be_is_refused():
    with pytest.raises(RefusedError, match="two options or more"):
        predict("?", A="x")
    with pytest.raises(RefusedError, match="an option is a capital letter, which answer is not"):
        predict("?", A="x", B="y", answer="B")
    with pytest.raises(RefusedError, match="answer='D' is none of the options A, B"):
        predict("?", A="x", B="y").reveal(answer="D")
    with pytest.raises(RefusedError, match="explains B; explanations are for the wrong options: A"):
        predict("?", A="x", B="y").reveal(answer="B", B="?")
    with pytest.raises(RefusedError, match="'Z' is none of the options A, B, C"):
        asked().choose("Z")


class FakeShell:
    kernel, execution_count = object(), 1


@pytest.fixture
def displayed(monkeypatch):
    """A notebook that keeps what is displayed."""
    shown = []
    monkeypatch.setattr(notebook, "shell", lambda: FakeShell)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    return shown


def test_a_prediction_shows_itself_once_a_cell(displayed):
    FakeShell.execution_count = 1
    guess = asked("four")
    guess._ipython_display_()  # as the value of the cell's last line
    assert len(displayed) == 1
    FakeShell.execution_count = 2
    guess._ipython_display_()
    assert len(displayed) == 2
    for bundle in displayed:
        assert {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"} <= bundle.keys()
        assert "still 10" in bundle["text/html"] and "still 10" in bundle["text/plain"]


def test_a_button_records_a_guess(displayed):
    guess = asked("five")
    box = guess._buttons()
    *buttons, said = box.children[1].children
    assert [button.description for button in buttons] == ["A", "B", "C"]
    assert all(
        button.tooltip == f"Guess {letter}: {ASKED[letter]}"
        for button, letter in zip(buttons, ASKED, strict=True)
    )
    buttons[1].click()
    assert guess.guess == "B" and said.value == "You guess B."
    assert [button.button_style for button in buttons] == ["", "primary", ""]
    buttons[0].click()
    assert guess.guess == "A" and [button.button_style for button in buttons] == ["primary", "", ""]


def test_without_widgets_the_page_is_shown(displayed, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    asked("six")
    recap("02")._ipython_display_()
    assert [sorted(bundle) for bundle in displayed] == [["text/html", "text/plain"]] * 2


# ---- recaps ----


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_has_an_answer_a_reader_can_find(name):
    for seed in range(30):
        question = ask(name, Draw(seed))
        assert question.accepts(question.answer) and question.how
        assert not question.accepts(question.answer * 1.01 + 0.1)
        assert question.answer == question.answer and abs(question.answer) < 1e7


def test_answers_are_those_of_the_formulas():
    """Worked out a second time, from the numbers in the text."""
    import re

    for seed in range(20):
        p, n = map(int, re.findall(r"\d+", ask("00-all-reduce-bytes", Draw(seed)).text.replace(",", ""))[:2])
        assert ask("00-all-reduce-bytes", Draw(seed)).answer == 2 * (p - 1) / p * 4 * n
        (p,) = map(int, re.findall(r"\d+", ask("01-tree-rounds", Draw(seed)).text)[-1:])
        assert (
            2 ** ask("01-tree-rounds", Draw(seed)).answer
            >= p
            > 2 ** (ask("01-tree-rounds", Draw(seed)).answer - 1)
        )
        n0, m0, n1, m1 = map(
            int, re.findall(r"(?<!ank )\b\d+", ask("02-average-of-averages", Draw(seed)).text)
        )
        assert ask("02-average-of-averages", Draw(seed)).answer == pytest.approx(
            (n0 * m0 + n1 * m1) / (n0 + n1)
        )


@pytest.mark.parametrize(
    "lesson, expected",
    [("01", "00 00 00"), ("02", "01 00 00"), ("03", "02 00 00"), ("08", "07 05 01"), ("09", "08 06 02")],
)
def test_a_recap_asks_what_is_one_three_and_seven_lessons_back(lesson, expected):
    questions = recap(lesson).questions
    assert " ".join(question.lesson for question in questions) == expected
    assert len({question.name for question in questions}) == 3
    assert recap(lesson).questions == questions, "a lesson always asks the same"
    assert recap(lesson, seed=99).questions != questions


def test_answers_are_checked():
    once_more = recap("03")
    right = [question.answer for question in once_more.questions]
    assert once_more.check(*right).n_right == 3
    answered = once_more.check(right[0] * 2 + 1, *right[1:])
    assert answered.n_right == 2 and once_more.questions[0].how in repr(answered)
    with pytest.raises(RefusedError, match="3 questions, and 1 answers came"):
        once_more.check(1)
    for wrong in ("3", 3, "00"):
        with pytest.raises(RefusedError, match="recap"):
            recap(wrong)


def test_a_box_answers_what_is_typed(displayed):
    once_more = recap("02")
    box = once_more._boxes()
    entry, said = box.children[2].children
    entry.value = f"{once_more.questions[0].answer:,}"
    assert said.value.startswith("✓")
    entry.value = "-1"
    assert said.value.startswith("✗ not -1")
    entry.value = "many"
    assert said.value == "a number, please"


# ---- progress ----


def report(id="00-relay", points=5.0):
    lines = (Line("values", "right", points == 10, "", "", "", points, 10.0),)
    return Report(id, "A relay", lines, seed=1, seconds=0.1)


def test_progress_keeps_the_best_and_exports(tmp_path):
    for points in (3.0, 10.0, 5.0):
        records.note_check(report(points=points))
    first = progress().records[0]
    assert (first["points"], first["checks"], first["state"]) == (10, 3, "passed")
    progress().save(tmp_path / "progress.csv")
    header, row = (tmp_path / "progress.csv").read_text().splitlines()[:2]
    assert header.startswith("lesson,exercise,title,points") and row.startswith("00,00-relay,A relay,10")
    progress().save(tmp_path / "progress.json")
    assert json.loads((tmp_path / "progress.json").read_text())[0]["exercise"] == "00-relay"
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["progress.json"], "a draft is left"


def test_progress_survives_what_happens_to_its_file(monkeypatch, tmp_path):
    records.note_check(report())
    records.place().write_text("{ broken")
    assert progress().records[0]["state"] == "not begun"
    records.note_check(report())
    assert progress().records[0]["state"] == "begun"
    monkeypatch.setenv("LESSONS_PROGRESS", "/dev/null/nowhere/progress.json")
    records.note_check(report())  # cannot be written, and that is no reason to fail
    monkeypatch.setenv("LESSONS_PROGRESS", "off")
    records.note_check(report())
    assert "Nothing is kept" in str(progress())


# ---- the table ----


def test_the_table_is_one_well_formed_page():
    import xml.etree.ElementTree as ET

    lines = (
        Line("values", "x < y & so on", False, "with <b>: wrong", "0.5", "≤ 1e-10", 0.0, 2.0),
        Line("traffic", "bytes", None, "later", "a\nb", "c\nd", 0.0, 1.5),
        Line("memory", "memory", True, "", "1", "2", 1.0, 1.0),
    )
    shown = Report("00-relay", "A relay", lines, 7, 0.5, details="<script>", printed="hi\n")
    page = ET.fromstring(shown._repr_mimebundle_()["text/html"].replace("<br>", "<br/>"))
    assert len(page.findall(".//table")) == 1 and len(page.findall(".//tbody/tr")) == 4
    signs = [each.get("aria-label") for each in page.findall(".//tbody//span")]
    assert signs == ["does not hold", "not judged", "holds"]
    assert (shown.points, shown.possible, shown.passed) == (1.0, 4.5, False)
    text = str(shown)
    for part in (
        "✗ x < y & so on  [0/2]",
        "– bytes  [0/1.5]",
        "✓ memory  [1/1]",
        "| <script>",
        "| hi",
        "seed=7",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 110


def test_verdicts_can_be_read_on_their_ground():
    from lessons_lib.grading.report import _BADGES

    for ground, ink, *_ in _BADGES.values():
        assert contrast(ground, ink) >= 4.5
    for badge in predictions._BADGE.values():
        ground = badge.split("background:")[1][:7]
        assert contrast(ground, "#ffffff") >= 4.5
    assert "#" in recaps._CARD


# ---- a copy to work in ----


@pytest.fixture
def course(tmp_path):
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / "01_collectives.ipynb").write_text("version 1")
    return tmp_path


def test_start_copies_once_and_never_overwrites(course, capsys):
    mine = course / "my_work" / "01_collectives.ipynb"
    assert start(["01"], course) == 0 and mine.read_text() == "version 1"
    assert "Ready: open my_work/01_collectives.ipynb" in capsys.readouterr().out
    mine.write_text("my work")
    (course / "exercises" / "01_collectives.ipynb").write_text("version 2")
    assert start(["1"], course) == 0 and mine.read_text() == "my work"
    assert "is there already, and stays as it is" in capsys.readouterr().out


def test_reset_keeps_a_dated_copy(course, capsys):
    mine, today = course / "my_work" / "01_collectives.ipynb", time.strftime("%Y-%m-%d")
    start(["01"], course)
    for work in ("first", "second"):
        mine.write_text(work)
        assert reset(["01"], course) == 0 and mine.read_text() == "version 1"
    assert (course / "my_work" / f"01_collectives.{today}.ipynb").read_text() == "first"
    assert (course / "my_work" / f"01_collectives.{today}-2.ipynb").read_text() == "second"
    assert "What you had is kept as my_work/01_collectives." in capsys.readouterr().out


def test_an_exercise_that_does_not_exist_is_told_with_those_that_do(course, capsys):
    for command in (start, reset):
        assert command(["07"], course) == 2
        assert "There is no exercise '07'" in (said := capsys.readouterr().err) and "01  collectives" in said
        assert command([], course) == 2
        assert "where NN is one of" in capsys.readouterr().err
    assert start(["01"], course / "my_work") == 2
    assert "is this the whole course?" in capsys.readouterr().err


def test_the_commands_are_listed_and_need_no_torch(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert "start NN" in listed and "reset NN" in listed
    code = (
        "import sys; from lessons_lib.__main__ import main; main(['start', '77']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
