"""The exercises: what is built, what must not leak, and what nbgrader makes of it.

Every wrong exercise below must be named. `exercises/build.py --check` runs all of them, solved and unsolved;
here nbgrader itself grades a class of students.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbgrader.utils import determine_grade, is_grade, is_solution

from exercises.build import (
    FOLDER,
    instructor,
    leaks,
    main,
    student,
    too_long,
    wrong_as_run,
    wrong_as_saved,
    wrong_as_written,
)
from lessons_lib import Layout, Mesh, run
from lessons_lib.cost.activations import kept_by_layer
from lessons_lib.grading import check
from lessons_lib.grading.catalogue import EXERCISES
from notebooks.tooling.source import notebook_path, sources

SOURCES = sources(FOLDER)
each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)

SOUND = '''\
# %% [markdown] minutes=1 core=true
# # Exercise: a relay

# %% tags=["setup"]
import torch
import torch.distributed as dist

# %% nbgrader={"grade_id": "relay"}
def relay(x):
    """Return the sum of the numbers of ranks 0 to this one. ``x`` is this rank's, a tensor of one element.

    A number goes from rank to rank, and each adds its own: one message from every rank to the next.
    """
    ### BEGIN SOLUTION
    if dist.get_rank() > 0:
        before = torch.empty_like(x)
        dist.recv(before, src=dist.get_rank() - 1)
        x = before + x
    if dist.get_rank() + 1 < dist.get_world_size():
        dist.send(x, dst=dist.get_rank() + 1)
    return x
    ### END SOLUTION

# %% nbgrader={"grade_id": "00-relay", "grade": true}
from lessons_lib.grading import check

reports = [check("00-relay", relay)]
# 1 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("00-relay", relay, seed=77))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)
'''


def sound(tmp_path: Path, before: str = "", after: str = "") -> nbformat.NotebookNode:
    """The instructor's version of the sound exercise, in which ``before`` became ``after``."""
    assert before in SOUND
    (tmp_path / "src").mkdir()
    source = tmp_path / "src" / "00_sound.py"
    source.write_text(SOUND.replace(before, after))
    return instructor(source)


@each_source
def test_an_exercise_is_sound_and_its_notebook_up_to_date(source: Path) -> None:
    with_solutions = instructor(source)
    without = student(with_solutions)
    assert list(wrong_as_written(with_solutions)) == list(too_long(without)) == []
    assert list(wrong_as_saved(without, notebook_path(source))) == []
    assert list(leaks(with_solutions, without)) == []


@each_source
def test_a_submission_has_its_fixed_form(source: Path) -> None:
    notebook = json.loads(notebook_path(source).read_text())
    about = notebook["metadata"]["lessons"]
    assert about["exercise"] == source.stem and about["version"].count(".") == 2
    found = {cell["id"]: cell["metadata"].get("nbgrader") for cell in notebook["cells"]}
    marks = {id: mark for id, mark in found.items() if mark}
    graded = {id: mark for id, mark in marks.items() if mark["grade"]}
    assert about["functions"] == {id: EXERCISES[id].names for id in graded}
    for id, mark in marks.items():
        assert (mark["grade_id"], mark["schema_version"], mark["solution"]) == (id, 3, not mark["grade"])
        assert mark.get("points") == (EXERCISES[id].points if mark["grade"] else None)
        assert mark["locked"] == mark["grade"] and len(mark["checksum"]) == 32
    text = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert text.count("hidden checks will run later") == len(graded)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])


def test_every_exercise_of_the_engine_has_a_notebook() -> None:
    graded = [cell.id for source in SOURCES for cell in instructor(source).cells if is_grade(cell)]
    assert sorted(graded) == sorted(EXERCISES)


def solved(name: str) -> tuple[str, dict[str, Any]]:
    """What an exercise says, and the names that its cells define, solved."""
    notebook = instructor(FOLDER / "src" / f"{name}.py")
    names: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and not is_grade(cell):
            exec(compile(cell.source, f"<cell {cell.id}>", "exec"), names)
    text = " ".join(cell.source.replace("*", "") for cell in notebook.cells if cell.cell_type == "markdown")
    return " ".join(text.split()), names


def test_the_numbers_in_the_text_of_00() -> None:
    text, names = solved("00_start_here")
    relay = names["relay"]
    passed = run(lambda: relay(torch.tensor([dist.get_rank() + 1.0])).item(), ranks=4)
    assert "the values should be 1, 3, 6 and 10, and three arrows lead downwards" in text
    assert passed.values == [1, 3, 6, 10]
    assert [(event.rank, event.peer) for event in passed.trace.events if event.kind == "send"] == [
        (0, 1), (1, 2), (2, 3)
    ]  # fmt: skip


def test_the_numbers_in_the_text_of_01() -> None:
    text, names = solved("01_collectives")
    assert "eleven numbers on four ranks: 3, 3, 3 and 2" in text and "Every digit should be 1" in text
    chunks = [chunk.tolist() for chunk in run(names["try_reduce_scatter"], ranks=4).values]
    assert chunks == [[1111] * 3] * 3 + [[1111] * 2]
    assert "each rank should have 0 0 0 1 1 1 2 2 2 3 3" in text
    gathered = [whole.tolist() for whole in run(names["try_all_gather"], ranks=4).values]
    assert gathered == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]] * 4
    assert all(torch.equal(*both) for both in run(names["try_all_reduce"], ranks=4).values)
    assert "rank 2 of eight has a 42" in text
    assert [int(value) for value in run(names["try_broadcast"], ranks=8).values] == [42] * 8


def test_the_numbers_in_the_text_of_02() -> None:
    text, names = solved("02_waiting_and_deadlock")
    assert "it returns 6 on every rank" in text and "it returns 8 and 4000 on every rank" in text
    assert [int(value) for value in run(names["try_1"], ranks=4).values] == [6] * 4
    totals, from_the_left = names["totals"], names["from_the_left"]
    both = run(lambda: [float(x) for x in totals(torch.tensor([2.0]), torch.tensor([1000.0]))], ranks=4)
    assert both.values == [[8, 4000]] * 4
    assert "it returns 4, 0, 1, 2, 3" in text
    assert run(lambda: int(from_the_left(torch.tensor([dist.get_rank()]))), ranks=5).values == [4, 0, 1, 2, 3]
    assert "it returns 5 on every rank: the squares of 3 and 4 are 9 and 16" in text
    assert [float(value) for value in run(names["try_4"], ranks=4).values] == [5] * 4
    assert "it returns 21 / 15 = 1.4 on every rank" in text
    assert [float(value) for value in run(names["try_5"], ranks=4).values] == pytest.approx([1.4] * 4)


@pytest.mark.parametrize("id", [id for id in EXERCISES if id.startswith("02")])
def test_which_of_the_five_stop_and_which_is_wrong(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LESSONS_PROGRESS", "off")
    text, _ = solved("02_waiting_and_deadlock")
    assert "Four of them stop, one gives wrong numbers" in text
    assert "The one that gave wrong numbers was the second" in text
    (broken,) = EXERCISES[id].broken
    values, *_, ending = check(id, broken, seed=5).lines
    assert not values.passed
    assert ending.measured.startswith("0 of" if id != "02-repair-2" else "3 of 3"), ending


def test_the_numbers_in_the_text_of_03(capsys: pytest.CaptureFixture[str]) -> None:
    text, names = solved("03_memory_and_time")
    assert "by the meter 187200   by yours 187200" in capsys.readouterr().out
    assert "y should be 0, the gradient of x 2, and that of the weight 0. The block runs twice" in text
    assert (names["y"].item(), names["x"].grad.item(), names["w"].grad.item()) == (0, 2, 0)
    assert len(names["times"]) == 2
    assert "8 of 16 streams" in text
    terms = kept_by_layer(names["config"], names["B"])
    stream = terms["output of attention"]
    assert terms["around the activation"] == 8 * stream
    assert sum(terms.values()) == 16 * stream + terms["statistics of norms"] + terms["inside attention"]


def test_the_numbers_in_the_text_of_04() -> None:
    text, names = solved("04_data_parallel")
    assert "Every number should be 2.5, in the shapes 2 x 2, 3, 5 and 1, after three calls" in text
    shapes = [(2, 2), (3,), (5,), (1,)]
    assert all(
        torch.equal(gradient, torch.full(shape, 2.5))
        for values in names["tried"].values
        for gradient, shape in zip(values, shapes, strict=True)
    )
    assert [event.n_elements for event in names["tried"].trace.collectives(0)] == [1, 7, 6]
    assert "for gradients of 4, 3, 5 and 1 elements and buckets of 6 these are 4 + 3, and 5 + 1" in text


def test_the_numbers_in_the_text_of_05() -> None:
    text, names = solved("05_zero_1")
    assert "the peak should stay well below five vectors; plain data parallel training takes six" in text
    W, X, Y, serially = names["W"], names["X"], names["Y"], names["serially"]
    others = W.nbytes + X.nbytes + Y.nbytes
    assert (names["tried"].trace.peak_bytes(0) - others) / W.nbytes < 4
    assert all((w - serially(3)).norm() < 1e-12 * W.norm() for w in names["tried"].values)

    def replicated(w: torch.Tensor, x: Any, y: Any) -> None:
        dp = Mesh(dp=8)["dp"]
        w = torch.nn.Parameter(w.clone())
        optimizer = torch.optim.Adam([w], lr=0.1, eps=0.1)
        for _ in range(3):
            w.grad = dp.all_reduce(x[dp.rank].T @ (x[dp.rank] @ w.detach() - y[dp.rank]))
            optimizer.step()

    plain = run(replicated, W, X.split(3), Y.split(3), ranks=8, record=("memory",))
    assert round((plain.trace.peak_bytes(0) - others) / W.nbytes) == 6


def test_the_numbers_in_the_text_of_06() -> None:
    text, names = solved("06_zero_2_and_3")
    tried, L, X, W = names["tried"], names["L"], names["X"], names["WS"][0]
    assert "about 67 µs" in text and round(tried.trace.timeline.makespan * 1e6) == 67
    assert (torch.cat(tried.values) - names["Y"]).norm() < 1e-12 * names["Y"].norm()
    assert "Six quarters of its own and two whole layers: three and a half" in text
    layers = (tried.trace.peak_bytes(0) - X.nbytes) / W.nbytes - L
    assert 3.5 <= layers <= 3.5 + 3 * X.numel() / W.numel()


def test_the_numbers_in_the_text_of_08() -> None:
    text, names = solved("08_tensor_parallel_1d")
    assert "f gives 1, and backward 4; g gives 4, and backward 1" in text
    assert run(names["try_pair"], names["copy_sum"], ranks=4).values == [(1, 4)] * 4
    assert run(names["try_pair"], names["sum_copy"], ranks=4).values == [(4, 1)] * 4
    assert "every number of Y is 1 on any number of ranks" in text
    for ranks in (1, 2, 4):
        assert [y.tolist() for y in run(names["try_bias"], ranks, ranks=ranks).values] == [[[1] * 3]] * ranks
    assert "one upright line through all lanes, for the one sum forward" in text
    tried = run(names["try_mlp"], ranks=4)
    assert [event.kind for event in tried.trace.events if event.rank == 0] == ["all_reduce"]
    assert all(float(error) < 1e-12 for error in tried.values)
    assert "Five of the seven communicate" in text


def test_the_numbers_in_the_text_of_11() -> None:
    text, names = solved("11_attention_in_pieces")
    causal, places = names["causal"], torch.arange(24)
    Q, K, V = names["Q"], names["K"], names["V"]
    last = causal(Q, K, V, places)
    assert (names["tried"].values[0][0] - names["O"][:, :6]).norm() < 1e-12 * last.norm()
    assert "some queries see nothing in it" in text and (~names["visible"][0].any(-1)).sum() == 16
    assert "Rank 0 should send 3 messages forward and 7 backward" in text
    assert "One of the seven messages of the backward is the last hop home" in text
    sent = [event for event in names["tried"].trace.events if (event.rank, event.kind) == (0, "send")]
    assert len(sent) == 3 + 7
    gradients = zip(*(each for _, each in names["tried"].values), strict=True)
    for blocks, truth in zip(gradients, names["truths"], strict=True):
        assert (torch.cat(blocks, 1) - truth).norm() < 1e-12 * truth.norm()


def test_the_numbers_in_the_text_of_12() -> None:
    text, names = solved("12_who_works_who_talks")
    assert "the token at place i is 100 + i here. Every rank should have 34 pairs" in text
    for tokens, labels, at in run(names["try_deal"], ranks=4).values:
        assert tokens[0].tolist() == [100 + int(i) for i in at] == [int(i) - 1 for i in labels[0]]
        assert names["pairs"](at) == 34
    assert "four exchanges forward, four backward" in text
    tried = names["tried"]
    assert [event.kind for event in tried.trace.collectives(0)] == ["all_to_all"] * 8
    for blocks, truth in zip(zip(*tried.values, strict=True), names["truths"], strict=True):
        assert (torch.cat(blocks, 2) - truth).norm() < 1e-12 * truth.norm()


def test_the_numbers_in_the_text_of_07() -> None:
    text, names = solved("07_layouts")
    tried = {
        (source, target): run(names["try_redistribute"], Layout(source), Layout(target), ranks=4)
        for source in names["SOURCES"]
        for target in names["TARGETS"]
    }
    assert all(all(each.values) for each in tried.values())
    sent = {pair: each.trace.bytes_sent(0) // 8 for pair, each in tried.items()}
    assert "of 96. Your smallest bill from a cut should be 18, and the largest of all 144" in text
    assert names["X"].numel() == 96 and max(sent.values()) == 144
    assert min(n for (source, target), n in sent.items() if "@" in source and source != target) == 18
    assert "Of the twelve, five send nothing: three from a copy, and two from a cut to itself" in text
    free = [pair for pair, n in sent.items() if n == 0]
    assert len(free) == 5 and len([source for source, _ in free if source == "B D"]) == 3
    assert "Rank 0 holds 6 rows and all columns before, all rows and 6 columns after" in text
    assert run(names["try_grid"], ranks=4).values == [((12, 6), True)] * 4


def test_the_numbers_in_the_text_of_13() -> None:
    text, names = solved("13_tensor_parallel_2d")
    assert "Rank 0 should send 112 elements" in text
    assert run(names["try_summa"], ranks=9).trace.bytes_sent(0) == 112 * 8
    assert "twice what it sent forward, 224" in text
    assert run(names["try_backward"], ranks=9).trace.bytes_sent(0) == 224 * 8


def test_the_numbers_in_the_text_of_14() -> None:
    text, names = solved("14_tensor_parallel_25d")
    assert "every number of dgain and of dbias is the number of rows, 36" in text
    for dgain, dbias in run(names["try_norm"], ranks=12).values:
        assert dgain.tolist() == dbias.tolist() == [36] * 4
    dxs, dws, dbiases = zip(*run(names["try_linear"], ranks=12).values, strict=True)
    W, X, dY, error = (names[name] for name in ("W", "X", "dY", "error"))
    errors = [error(dxs, dY @ W.T, names["LAYOUTS"]["X"]), error(dws, X.T @ dY, names["LAYOUTS"]["W"])]
    errors.append(error(dbiases, dY.sum(0), Layout("F@col")))
    assert all(float(each) < 1e-12 for each in errors)


def test_the_numbers_in_the_text_of_15() -> None:
    text, names = solved("15_tensor_parallel_3d")
    assert "16 of the 128 elements of H, 12 of the 96 of Z" in text
    assert [(h.numel(), z.numel()) for h, z in run(names["try_pair"], ranks=8).values] == [(16, 12)] * 8
    assert (names["B"] * names["F"], names["B"] * names["D"]) == (128, 96)
    assert "Three collectives forward and five backward" in text
    assert len(run(names["try_cube"], ranks=8).trace.collectives(0)) == 3 + 5


@pytest.mark.parametrize(
    "before, after, complaint",
    [
        (
            '"00-relay", "grade"',
            '"00-reley", "grade"',
            "cell 00-reley: the grading engine has no exercise of this id",
        ),
        ("def relay(x)", "def my_relay(x)", "00-relay asks for relay, which no solution cell defines"),
        ("def relay(x)", "def relay(x, n)", "00-relay asks for relay(x)"),
        ("Return the sum", "Return a sum", "00-relay: relay has another docstring in the exercise:"),
        ("# 1 hidden", "# 5 hidden", "cell 00-relay: does not say # 1 hidden checks"),
        ('[check("00-relay", relay)]', '[check("00-relay", print)]', 'does not say check("00-relay", relay)'),
    ],
)
def test_what_is_wrong_as_written_is_named(tmp_path: Path, before: str, after: str, complaint: str) -> None:
    wrong = list(wrong_as_written(sound(tmp_path, before, after)))
    assert any(complaint in sentence for sentence in wrong), wrong


def test_a_program_to_repair_is_given_as_the_exercise_has_it(tmp_path: Path) -> None:
    source = next(path for path in SOURCES if path.name.startswith("02"))
    changed = tmp_path / source.name
    changed.write_text(source.read_text().replace("    if n_samples > 0:\n", "    if n_samples > 1:\n", 1))
    assert list(wrong_as_written(instructor(changed))) == [
        "02-repair-1: no cell gives sum_of_gradients to repair as the exercise has it"
    ]


def test_a_solution_cell_without_end_is_no_release(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no end solution statement found"):
        student(sound(tmp_path, "    ### END SOLUTION\n", ""))


@pytest.mark.parametrize(
    "line",
    [
        "x = before + x",
        'reports.append(check("00-relay", relay, seed=77))',
        "> **Instructor's copy: it holds solutions and hidden checks. Do not hand it out.**",
        "### BEGIN SOLUTION",
        "### END HIDDEN TESTS",
    ],
)
@pytest.mark.parametrize("where", ["a cell", "a cell's metadata", "the notebook's metadata", "an output"])
def test_a_leak_is_found_wherever_it_is(tmp_path: Path, line: str, where: str) -> None:
    with_solutions = sound(tmp_path)
    without = student(with_solutions)
    assert list(leaks(with_solutions, without)) == []
    if where == "a cell":
        without.cells[0].source += f"\n{line}"
    elif where == "a cell's metadata":
        without.cells[1].metadata["original"] = [{line: 1}]
    elif where == "the notebook's metadata":
        without.metadata["kept"] = {"of": f"    {line}\n"}
    else:
        without.cells[1].outputs = [nbformat.v4.new_output("stream", text=line)]
    assert any(sentence.startswith("leak: ") for sentence in leaks(with_solutions, without))


def test_a_stale_notebook_is_named(tmp_path: Path) -> None:
    without = student(sound(tmp_path))
    path = tmp_path / "00_sound.ipynb"
    (missing,) = wrong_as_saved(without, path)
    assert missing == "stale: 00_sound.ipynb is not what its source says; run python exercises/build.py"
    nbformat.write(without, path)
    assert list(wrong_as_saved(without, path)) == []
    without.cells[0].source += "!"
    assert list(wrong_as_saved(without, path)) == [missing]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound(tmp_path)
    assert main([], tmp_path) == 0
    assert "00_sound: built" in capsys.readouterr().out
    assert "x = before + x" not in (tmp_path / "00_sound.ipynb").read_text()
    assert main(["--instructor", str(tmp_path / "course")], tmp_path) == 0
    copied = tmp_path / "course" / "source" / "00_sound" / "00_sound.ipynb"
    assert "x = before + x" in copied.read_text() and "Do not hand it out" in copied.read_text()
    with pytest.raises(SystemExit):
        main(["17"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after, solved, complaint",
    [
        ("", "", True, ""),
        ("", "", False, ""),
        ("x = before + x", "x = x", True, "solved, 00-relay gives 0 of 10 points"),
        ("reports = [", "1 / 0\nreports = [", True, "cell 00-relay raised ZeroDivisionError"),
        ("min(report.points for report in reports)", "", False, "unsolved, 00-relay gives 10 of 10 points"),
    ],
)
def test_what_is_wrong_as_run_is_named(
    tmp_path: Path, before: str, after: str, solved: bool, complaint: str
) -> None:
    notebook = sound(tmp_path, before, after)
    wrong = list(wrong_as_run(notebook if solved else student(notebook), solved))
    assert any(complaint in sentence for sentence in wrong) if complaint else wrong == []


# ---- a class, graded by nbgrader ----

NAME = "01_collectives"
CELL_LIMIT_S = 15
STUDENTS = {  # name: what stands in a cell instead, or behind the solution (None: the stub in its place)
    "solved": {},
    "unsolved": {
        "ring-reduce-scatter": None,
        "ring-all-gather": None,
        "ring-all-reduce": None,
        "tree-broadcast": None,
    },
    "half": {
        "ring-reduce-scatter": """
def ring_reduce_scatter(x, ring):
    return ring.all_reduce(x).tensor_split(ring.size)[ring.rank]  # the right numbers, the wrong way
""",
        "ring-all-reduce": """
import sys, warnings
def ring_all_reduce(x, ring):
    print("noise", file=sys.stderr)
    warnings.warn("noise")
    return ring_all_gather(to_scatter(x, ring), ring, len(x))
def to_scatter(x, ring):
    chunks = [chunk.clone() for chunk in x.tensor_split(ring.size)]
    for step in range(1, ring.size):
        outgoing = (ring.rank - step) % ring.size
        chunks[outgoing - 1] += to_the_right(chunks[outgoing], chunks[outgoing - 1], ring)
    return chunks[ring.rank]
""",
        "tree-broadcast": "def tree_broadcast(:",
    },
    "hanging": {
        "ring-reduce-scatter": """
def ring_reduce_scatter(x, ring):
    while True:
        pass
""",
        "try-reduce-scatter": "while True:\n    pass",
        "tree-broadcast": """
import os
def tree_broadcast(x, tree, root):
    os._exit(1)
""",
        "try-broadcast": "'this would end the kernel, and with it nbgrader'",
    },
    "cheating": {"ring-reduce-scatter": None, "01-reduce-scatter": "10.0"},
}


def nbgrader(*command: str, course: Path) -> str:
    """Run nbgrader in ``course``, and return what it says."""
    words = [sys.executable, "-m", "nbgrader", *command]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # it calls alembic
    done = subprocess.run(words, cwd=course, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course whose students have handed in, made as exercises/README.md says."""
    course = tmp_path_factory.mktemp("course")
    assert main(["--instructor", str(course)]) == 0
    settings = course / "nbgrader_config.py"
    assert "c.Execute.timeout = 120\n" in settings.read_text()
    settings.write_text(settings.read_text().replace("timeout = 120", f"timeout = {CELL_LIMIT_S}"))
    for source in SOURCES:
        nbgrader("generate_assignment", source.stem, course=course)

    solutions = {cell.id: cell.source for cell in instructor(FOLDER / "src" / f"{NAME}.py").cells}
    for name, answers in STUDENTS.items():
        notebook = nbformat.read(FOLDER / f"{NAME}.ipynb", as_version=4)
        for cell in notebook.cells:
            answer = answers.get(cell.id, "")
            if is_solution(cell):
                cell.source = cell.source if answer is None else f"{solutions[cell.id]}\n{answer}"
            elif answer:
                cell.source = answer
        path = course / "submitted" / name / NAME / f"{NAME}.ipynb"
        path.parent.mkdir(parents=True)
        nbformat.write(notebook, path)
    nbgrader("autograde", NAME, course=course)
    return course


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nbgrader_releases_what_lies_in_exercises(course: Path) -> None:
    for source in SOURCES:
        released = nbformat.read(course / "release" / source.stem / f"{source.stem}.ipynb", as_version=4)
        assert released.cells == nbformat.read(notebook_path(source), as_version=4).cells


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nbgrader_validates_the_instructors_copy(course: Path) -> None:
    says = nbgrader("validate", f"source/{NAME}/{NAME}.ipynb", course=course)
    assert "Success! Your notebook passes all the tests." in says


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name, points",
    [
        ("solved", [10, 10, 10, 10]),
        ("unsolved", [0, 0, 0, 0]),
        ("half", [7, 10, 10, 0]),  # a collective: right numbers, but not the traffic; noise costs nothing
        ("hanging", [0, 10, 0, 0]),  # its all-reduce uses what hangs
        ("cheating", [0, 0, 0, 10]),  # the graded cell is put back; the next two need what the first defines
    ],
)
def test_nbgrader_gives_the_points_and_grades_what_comes_after(
    course: Path, name: str, points: list[float]
) -> None:
    notebook = nbformat.read(course / "autograded" / name / NAME / f"{NAME}.ipynb", as_version=4)
    graded = [cell for cell in notebook.cells if is_grade(cell)]
    assert [cell.metadata.nbgrader.grade_id for cell in graded] == [
        "01-reduce-scatter", "01-all-gather", "01-all-reduce", "01-broadcast"
    ]  # fmt: skip
    assert [determine_grade(cell) for cell in graded] == [(given, 10) for given in points]
    for cell in graded:
        assert "seed=" in cell.source
        kinds = [output.output_type for output in cell.outputs]
        if determine_grade(cell) == (10, 10):
            assert kinds.count("display_data") == 3  # the hidden checks ran, too
        elif "error" not in kinds:
            assert kinds.count("display_data") == 1
    if name == "hanging":
        (table,) = [output for output in graded[0].outputs if output.output_type == "display_data"]
        assert "did not end within" in table.data["text/plain"]
