"""Notebook 22: what its text says of the puzzles is what happens when they are played."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tooling.source import read
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from lessons_lib import Mesh, run
from lessons_lib.pipeline_parallel import (
    PUZZLES,
    Action,
    Attempt,
    Schedule,
    interleaved,
    legal_next,
    one_f_one_b,
    simulate,
    write_csv,
    zb_h1,
    zb_v,
)

SOURCE = Path(__file__).parent.parent / "notebooks" / "src" / "22_schedule_puzzles.py"
LESSON = read(SOURCE)
CODE = {cell.id: cell.source for cell in LESSON.cells if cell.cell_type == "code"}
SETUP = next(source for source in CODE.values() if "import" in source)


def says(*sentences: str) -> None:
    """The text has these words; a test that holds a number names the words it holds."""
    texts = [cell.source for cell in LESSON.cells if cell.cell_type == "markdown"]
    text = " ".join(re.sub(r"[*`]", "", " ".join(texts)).split())
    for sentence in sentences:
        assert sentence in text, sentence


def of_cell(name: str) -> Any:
    """What the last line of a cell gives, after the setup cell alone."""
    names: dict[str, Any] = {}
    lines = ast.parse(CODE[name]).body
    assert isinstance(lines[-1], ast.Expr)
    exec("\n".join([SETUP, *map(ast.unparse, lines[:-1])]), names)
    return eval(ast.unparse(lines[-1]), names)


def played(name: str) -> Attempt:
    attempt = of_cell(name)
    assert isinstance(attempt, Attempt)
    return attempt


def test_which_lessons_the_puzzles_need() -> None:
    says("Fourteen puzzles, from two ranks to four")
    assert len(PUZZLES) == 14
    assert {puzzle.p for puzzle in PUZZLES.values()} == {2, 3, 4} and PUZZLES[1].p == 2
    says("The first seven need lesson 17, the eighth lesson 18, the others lesson 19.")
    kinds = {number: (puzzle.kinds, puzzle.n_stages // puzzle.p) for number, puzzle in PUZZLES.items()}
    assert {kinds[number] for number in range(1, 8)} == {("FB", 1)} and kinds[8] == ("FB", 2)
    assert {kinds[number][0] for number in range(9, 15)} == {"FIW"}


def test_how_to_play(capsys: pytest.CaptureFixture[str]) -> None:
    says("1B0 is stage 1, backward, micro-batch 0", "Dots and spaces are only for your eyes")
    slow, again = played("slow"), played("mine-1")
    assert slow.schedule.rows == again.schedule.rows == PUZZLES[1].play(PUZZLES[1].start).schedule.rows
    assert slow.schedule.rows[1][1] == Action("B", 1, 0)
    says("Legal, and slow: each rank stands still half of the time.")
    assert slow.timeline is not None and slow.timeline.idle == [9, 9] and slow.timeline.makespan == 18
    says("The outlined actions follow each other to the very end", "The last line of the text names a pause")
    assert str(slow).splitlines()[-1].startswith("A pause to begin with: 3 on rank 0")
    assert "decides the end" in slow.picture(critical_path=True).svg  # type: ignore[union-attr]
    says("It is told the first action that is wrong, and what it waits for.")
    illegal = played("illegal")
    assert illegal.fault is not None and str(illegal.fault.action) == "1B0"
    assert "waits for the output of micro-batch 0 on stage 1" in str(illegal)
    of_cell("next")
    of_cell("why-not")
    assert capsys.readouterr().out == (
        "rank 0: 0F2\nrank 1: 1B0 1F1\n"
        "0B0 waits for the input gradient of micro-batch 0 on stage 1, which 1B0 makes.\n"
    )
    says('You have the best score when it says "the best that is known".')
    for puzzle in PUZZLES.values():
        assert "the best that is known" in str(puzzle.play(puzzle.solution))
    says("There are hint(1), hint(2) and hint(3), each saying more.")
    assert {len(puzzle.hints) for puzzle in PUZZLES.values()} == {3}


def test_what_is_shown_is_the_chain_that_decides_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    played("slow")._ipython_display_()
    played("illegal")._ipython_display_()
    (figure,) = shown
    assert "decides the end" in figure.svg


def test_however_bad_a_legal_schedule_is_its_gradients_are_right() -> None:
    says("However bad a legal schedule is, its gradients are right. It is only late.")
    says("Any legal order gives the same gradients.")
    rng, puzzle = random.Random(22), PUZZLES[9]
    rows: list[list[Action]] = [[] for _ in range(puzzle.p)]
    while any(choices := legal_next(rows, puzzle.stages, puzzle.m, puzzle.kinds)):
        rank = rng.choice([rank for rank, actions in enumerate(choices) if actions])
        rows[rank].append(rng.choice(choices[rank]))
    attempt = puzzle.play(Schedule.of("at random", rows))
    assert attempt.timeline is not None and attempt.timeline.makespan > puzzle.best_known
    assert attempt.execute().error < 1e-12


def test_two_easy_steps_and_a_wire() -> None:
    says("2 is there to be filled, 3 has little memory, 4 has slow messages.")
    assert not PUZZLES[2].cap and PUZZLES[3].cap == [3, 2, 1] and PUZZLES[4].times.send == 1
    says("The answers below are legal and slow.")
    for name in ("puzzle-2", "puzzle-3", "puzzle-4"):
        assert played(name).score == 2
    says("1F1B has the best score in 3. Has it in 4?")
    assert PUZZLES[3].play(one_f_one_b).score == 3


def test_where_1f1b_is_not_the_best() -> None:
    says(
        "A slow stage; slow wires with a small store; two places for four ranks; stages that go round twice."
    )
    for number in (5, 6, 7):
        assert PUZZLES[number].play(one_f_one_b).score < 3
    assert PUZZLES[8].play(lambda p, m: interleaved(p, m, 2)).score < 3
    assert PUZZLES[6].times.send and PUZZLES[7].cap == [2] * 4 and PUZZLES[8].stages[0] == [0, 2]
    says("PUZZLES[5].start", "a legal answer to begin with")
    assert PUZZLES[5].play(PUZZLES[5].start).score == 2


def test_place_the_w_and_in_a_v() -> None:
    says("A micro-batch is kept until its W is done.")
    says("ZB-H1 would be early enough for the next one. Guess: what speaks against it?")
    attempt = played("puzzle-11")
    assert attempt.timeline is not None and attempt.timeline.makespan <= PUZZLES[11].best_known
    assert attempt.too_much == [0, 1, 2, 3] and attempt.score == 1
    says("Rank 0 has the first stage and the last.")
    for number in (12, 13, 14):
        puzzle = PUZZLES[number]
        assert puzzle.stages[0] == [0, puzzle.n_stages - 1]
    says("The last one has 192 actions. ZB-V is a good beginning, and not the best")
    assert sum(map(len, PUZZLES[14].solution.rows)) == 192
    last = played("puzzle-14")
    assert last.score == 2 and last.timeline is not None
    assert last.schedule.rows == zb_v(4, 8).rows and last.timeline.makespan < 1.01 * PUZZLES[14].best_known


def test_where_you_stand(capsys: pytest.CaptureFixture[str]) -> None:
    says("1 star for a legal one, 2 within the memory, 3 for the best that is known")
    exec("\n".join([SETUP, CODE["scores"]]), {})
    lines = capsys.readouterr().out.splitlines()
    stars = {int(line[:2]): line.count("*") for line in lines}
    assert stars == dict.fromkeys(PUZZLES, 2) | {11: 1}
    says("Where it equals the best known, you cannot do better. Where it does not, nobody knows")
    open_ends = [n for n, puzzle in PUZZLES.items() if puzzle.at_least < puzzle.best_known]
    assert open_ends == [n for n, puzzle in PUZZLES.items() if "nobody can be earlier" not in repr(puzzle)]
    assert open_ends == [6, 7, 11, 13, 14]


def test_an_earlier_answer_than_the_best_known_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    says("yours may be earlier. It will say so.")
    puzzle = PUZZLES[2]
    best = puzzle.play(puzzle.solution)
    monkeypatch.setitem(puzzle.__dict__, "best_known", puzzle.best_known + 1)
    assert "earlier than any that was known" in str(puzzle.play(puzzle.solution)) and best.score == 3


def test_to_remember() -> None:
    says("A place in the memory is worth a round trip: who keeps more waits less.")
    less, more = (PUZZLES[6].play(answer).timeline for answer in (one_f_one_b, PUZZLES[6].solution))
    assert less is not None and more is not None and more.makespan < less.makespan
    assert less.peak_in_flight()[:3] == [4, 3, 2] and more.peak_in_flight()[:3] == [5, 4, 3]
    says("What nobody waits for, W, belongs where the rank would stand still.")
    assert simulate(zb_h1(3, 4)).makespan == PUZZLES[9].best_known


def test_pytorch_reads_what_write_csv_writes(tmp_path: Path) -> None:
    """Trained by such a table, in tests/oracles: the gradients are the serial ones."""
    says("PyTorch runs any such table: [write_csv]", "writes what its runtime reads")
    solution = PUZZLES[7].solution
    table = tmp_path / "schedule.csv"
    table.write_text(write_csv(solution))

    def read_by_torch() -> list[str]:
        rank = Mesh(pp=4)["pp"].rank
        stage = PipelineStage(torch.nn.Linear(2, 2), rank, 4, torch.device("cpu"))
        runtime: Any = _PipelineScheduleRuntime([stage], 6, loss_fn=torch.nn.functional.mse_loss)
        runtime._load_csv(str(table), format="compute_only")
        return [str(action) for action in runtime.pipeline_order[rank] if action]

    assert run(read_by_torch, ranks=4).values == [[str(a) for a in row] for row in solution.rows]
