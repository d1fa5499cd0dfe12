"""The command that trains: what it prints, what it refuses, and that --check can fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lessons_lib import train
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.tensor_parallel import SCHEMES, Column, Row

SMALL = ["--layers", "2", "--heads", "4", "--width", "16", "--seq", "8", "--batch", "3"]
N_BYTES = 4  # float32
PROJECT = Path(__file__).parents[1]


def printed(capsys, *arguments):
    """The exit status, what was printed, and what went to stderr."""
    status = train.main([*SMALL, *arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_check_finds_no_difference(capsys, tp):
    status, out, _ = printed(capsys, "--check", "--ranks", str(tp))
    assert status == 0
    n_parameters = len(list(GPT(GPTConfig(L=2)).parameters()))
    assert f"Mesh(tp={tp})" in out
    assert f"5 steps: the loss and the gradients of all {n_parameters} parameters, on every rank, are" in out
    error = float(re.search(r"relative error at most (\S+)\)", out).group(1))
    assert error < 1e-12


class NoAllReduceInBackward(Column):
    def backward(self, dy, x, w, mesh):
        return dy @ w.T, x.T @ dy


class NoAllReduceInForward(Row):
    def forward(self, x, w, mesh):
        return x @ w


class WrongOnTheLastRank(Column):
    def backward(self, dy, x, w, mesh):
        dx, dw = super().backward(dy, x, w, mesh)
        return dx, dw * (1 + 1e-8 * (mesh.rank == mesh.sizes["tp"] - 1))


def test_check_names_every_gradient_that_differs(capsys, monkeypatch):
    """Without the all-reduce of dX all that lies below the last column layer is wrong, and nothing above."""
    monkeypatch.setitem(SCHEMES, "column", NoAllReduceInBackward())
    status, out, _ = printed(capsys, "--check", "--ranks", "2")
    assert status == 1
    assert "DIFFERENT" in out and "from step 1 on" in out
    wrong = re.findall(r"^    (\S+): rank 0, 1, relative error up to \d\.\de[-+]\d\d$", out, re.MULTILINE)
    names = [name for name, _ in GPT(GPTConfig(L=2)).named_parameters()]
    right = {"norm.weight", "norm.bias", "head.weight"}
    right |= {f"blocks.1.mlp.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    assert wrong == [name for name in names if name not in right]


def test_check_names_the_loss_that_differs(capsys, monkeypatch):
    monkeypatch.setitem(SCHEMES, "row", NoAllReduceInForward())
    status, out, _ = printed(capsys, "--check", "--ranks", "2")
    assert status == 1
    assert re.search(r"^    loss: rank 0, 1, ", out, re.MULTILINE)


def test_check_sees_one_rank_and_the_eighth_digit(capsys, monkeypatch):
    monkeypatch.setitem(SCHEMES, "column", WrongOnTheLastRank())
    status, out, _ = printed(capsys, "--check", "--ranks", "4")
    assert status == 1
    assert "from step 1 on" in out
    assert re.search(
        r"^    blocks\.1\.mlp\.up\.weight: rank 3, relative error up to 1\.0e-08$", out, re.MULTILINE
    )


def test_check_takes_not_a_number_for_a_difference(capsys, monkeypatch):
    class NotANumber(Row):
        def forward(self, x, w, mesh):
            return super().forward(x, w, mesh) * float("nan")

    monkeypatch.setitem(SCHEMES, "row", NotANumber())
    assert printed(capsys, "--check", "--ranks", "2")[0] == 1


def test_training_reports_what_happened(capsys):
    status, out, err = printed(
        capsys, "--ranks", "4", "--tp", "4", "--steps", "30", "--lr", "1e-2", "--sample", "9"
    )
    assert status == 0
    first, last = map(float, re.search(r"loss +(\S+) at step 1, (\S+) at step 30", out).groups())
    assert 5.3 < first < 5.8, "log(256) is 5.5"
    assert last < first - 1
    per_rank = 30 * N_BYTES * 2 * 8 * 3 * (3 * 8 * 16) // 4  # steps, 2 layers, 8 (p-1)/p B D
    assert f"bytes sent    {per_rank:,} by each rank in training, {4 * per_rank:,} by all together" in out
    assert re.search(r"speed +[\d,]+ tokens per second on this machine, where ranks take turns", out)
    assert "sample        The " in out
    assert "30/30" in out, "a progress bar, from rank 0"
    assert "[rank 1]" not in err


def test_ranks_arrive_at_the_loss_of_the_serial_model(capsys):
    losses = [
        re.search(
            r"(\S+) at step 30", printed(capsys, "--ranks", ranks, "--steps", "30", "--sample", "0")[1]
        ).group(1)
        for ranks in ("1", "4")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--ranks 4 --tp 3", r"--tp 3 does not divide --ranks 4; try --tp 1, 2, 4$"),
        ("--ranks 8 --tp 4", r"leaves 2 groups of 4 ranks .* data parallelism, .*; try --ranks 4 --tp 4$"),
        (
            "--ranks 3 --width 24",
            r"blocks\.0\.attention has 4 heads.* over tp=3.* Legal degrees for 4: 1, 2, 4\.$",
        ),
        ("--heads 3", r"width D=16 cannot be shared out to H=3 heads; try H=1, 2, 4, 8, 16$"),
        ("--ranks 0", r"argument --ranks: must be at least 1, not 0$"),
        ("--steps -1", r"argument --steps: must be at least 1, not -1$"),
        ("--batch many", r"argument --batch: invalid"),
    ],
)
def test_what_is_refused_before_any_rank_starts(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(train, "run", None)
    with pytest.raises(SystemExit) as exit_:
        train.main([*SMALL, *arguments.split()])
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err.strip())


def test_the_module_runs_as_a_program():
    line = [sys.executable, "-m", "lessons_lib.train", *SMALL, "--ranks", "2", "--check", "--steps", "2"]
    program = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, timeout=100)
    assert program.returncode == 0, program.stderr
    assert "2 steps: the loss and the gradients" in program.stdout
    assert program.stderr == ""
