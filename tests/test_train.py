"""The command that trains: what it prints, what it refuses, and that --check can fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lessons_lib import run
from lessons_lib.data_parallel import zero
from lessons_lib.data_parallel.unit import Unit
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.tensor_parallel import SCHEMES, Column, Row
from lessons_lib.train import Settings, report, train
from lessons_lib.train import __main__ as command

SMALL = ["--layers", "2", "--heads", "4", "--width", "16", "--seq", "8", "--batch", "3"]
N_BYTES = 4  # float32
PROJECT = Path(__file__).parents[1]


def printed(capsys, *arguments):
    """The exit status, what was printed, and what went to stderr."""
    status = command.main([*SMALL, *arguments])
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
    assert "[rank 1]" not in out + err


def test_the_progress_bar_leaves_one_whole_line(capsys):
    _, out, _ = printed(capsys, "--ranks", "2", "--steps", "3")
    ((*redrawn, last),) = (line.split("\r") for line in out.split("\n") if "[rank" in line)
    assert re.fullmatch(r"\[rank 0\] 100%\|█+\| 3/3 \[\S+, +\S+(step/s|s/step), loss=5\.\d+\]", last)
    assert redrawn and not redrawn[-1].removeprefix("[rank 0]").strip(), "the bar itself is wiped away"


@pytest.mark.parametrize(
    "arguments, n_sampled", [("--steps 49", 0), ("--steps 50", 200), ("--steps 1 --sample 7", 7)]
)
def test_noise_is_not_sampled_unasked(monkeypatch, arguments, n_sampled):
    """Nor does it stand in the picture: each byte costs a forward pass with all its all-reduces."""
    asked = []
    monkeypatch.setattr(report, "report_training", lambda settings, picture: asked.append(settings) or 0)
    assert command.main([*SMALL, *arguments.split()]) == 0
    assert [settings.n_sample for settings in asked] == [n_sampled]


def test_the_command_of_the_readme_makes_its_picture(capsys, monkeypatch, tmp_path):
    readme = (PROJECT / "README.md").read_text()
    (arguments,) = re.findall(r"`python -m lessons_lib\.train (.*--steps 1.*)`", readme)
    (n_all_reduces,) = map(int, re.findall(r"each of the (\d+) all-reduces of one training step", readme))
    (picture,) = re.findall(r"\]\((\S+/train\.svg)\)", readme)
    assert arguments.endswith(f"--picture {picture}")
    runs = []
    monkeypatch.setattr(report, "run", lambda *a, **k: runs.append(run(*a, **k)) or runs[0])
    found = tmp_path / "train.svg"
    assert command.main(arguments.replace(picture, str(found)).split()) == 0
    trace = runs[0].trace
    kinds = [[event.kind for event in trace.collectives(rank)] for rank in range(4)]
    assert kinds == [["all_reduce"] * n_all_reduces] * 4 and len(trace.events) == 4 * n_all_reduces
    assert found.read_text(encoding="utf-8").startswith("<svg")
    assert "sample" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, dp, tp, zero",
    [
        ("--tp 2", 1, 2, 0),
        ("--ranks 1", 1, 1, 0),
        ("", 1, 4, 0),
        ("--tp 1 --ranks 1", 1, 1, 0),
        ("--dp 4 --zero 3 --ranks 4", 4, 1, 3),
        ("--dp 2 --tp 2 --zero 1", 2, 2, 1),
        ("--dp 2", 2, 1, 0),
        ("--zero 2", 4, 1, 2),
        ("--ranks 8 --tp 4", 2, 4, 0),
        ("--ranks 6 --dp 3 --zero 1", 3, 2, 1),
    ],
)
def test_some_of_ranks_dp_and_tp_will_do(monkeypatch, arguments, dp, tp, zero):
    asked = []
    monkeypatch.setattr(report, "report_training", lambda settings, picture: asked.append(settings) or 0)
    command.main([*SMALL, *arguments.split()])
    assert [(settings.dp, settings.tp, settings.zero) for settings in asked] == [(dp, tp, zero)]


@pytest.mark.parametrize(
    "arguments, mesh",
    [
        ("--dp 4 --zero 3 --ranks 4", "Mesh(dp=4, tp=1), ZeRO 3 over dp"),  # of three sequences: one has none
        ("--dp 2 --tp 2 --zero 1", "Mesh(dp=2, tp=2), ZeRO 1 over dp"),
        pytest.param("--dp 2 --tp 2 --zero 3", "Mesh(dp=2, tp=2), ZeRO 3 over dp", marks=pytest.mark.slow),
        pytest.param("--dp 2", "Mesh(dp=2, tp=1)", marks=pytest.mark.slow),
    ],
)
def test_check_finds_no_difference_in_data_parallel_training(capsys, arguments, mesh):
    status, out, _ = printed(capsys, "--check", "--steps", "3", *arguments.split())
    assert status == 0, out
    assert out.count(f", as {mesh}\n") == 1
    n_parameters = len(list(GPT(GPTConfig(L=2)).parameters()))
    assert f"3 steps: the loss and the gradients of all {n_parameters} parameters, on every rank, are" in out


class DividesAgain(Unit):
    def finish_reducing(self):
        if self._reducing is not None:
            self._reducing.wait()
            self._arriving /= self.group.size
        super().finish_reducing()


def test_check_catches_a_mean_that_is_divided_again(capsys, monkeypatch):
    """Adam does not care about a factor, and the loss falls as before; the gradients tell."""
    monkeypatch.setattr(zero, "Unit", DividesAgain)
    status, out, _ = printed(capsys, "--check", "--steps", "2", "--dp", "2", "--zero", "2")
    assert status == 1 and "from step 1 on" in out
    assert re.search(r"^    head\.weight: rank 0, 1, relative error up to 5\.0e-01$", out, re.MULTILINE)
    assert "    loss" not in out


def test_data_parallel_training_reports_what_it_stores(capsys):
    """S82: stage 3 stores a fourth of the parameters, which are as many as ever."""
    _, out, _ = printed(capsys, "--dp", "4", "--zero", "3", "--steps", "3", "--sample", "5")
    serial = sum(p.numel() for p in GPT(GPTConfig(L=2, H=4, D=16, S=8)).parameters())
    held = int(re.search(r"parameters +([\d,]+) on each rank", out).group(1).replace(",", ""))
    assert f"the serial model has {serial:,}" in out and serial / 4 <= held < serial / 4 + 16


def test_the_command_s_defaults_are_the_library_s(monkeypatch):
    asked = []
    monkeypatch.setattr(report, "report_training", lambda settings, picture: asked.append(settings) or 0)
    command.main([])
    assert asked == [Settings()]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_size_of_a_step_is_what_torch_counts(tp):
    """Exactly, scores that are made again on the way back included. Ranks share it, but for the head, which
    the plan leaves whole on each."""
    config = GPTConfig(L=2, H=4, D=32, S=16)
    settings = Settings(config=config, tp=tp, steps=2, n_sequences=3, n_sample=0)
    trace = run(train, settings, ranks=tp, record="flops").trace
    head = 6 * config.D * config.V * 3 * config.S
    expected = settings.steps * ((report.step_flops(config, 3) - head) // tp + head)
    assert [trace.flops_of(rank, "train") for rank in range(tp)] == [expected] * tp


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
        ("--ranks 4 --dp 3", r"--dp 3 does not divide --ranks 4; try --dp 1, 2, 4$"),
        ("--ranks 8 --dp 2 --tp 2", r"--dp 2 --tp 2 are 4 ranks, and --ranks asks for 8; try --dp 2 --tp 4$"),
        ("--ranks 4 --tp 4 --zero 1", r"--zero 1 shares out over .* leave dp 1; try --dp 4 --tp 1, or"),
        ("--zero 4", r"argument --zero: invalid choice: 4 \(choose from 0, 1, 2, 3\)$"),
        ("--dp 2 --tp 3", r"4 heads cannot be shared out to 3 ranks"),
        (
            "--ranks 3 --width 24",
            r"4 heads cannot be shared out to 3 ranks, since a head stays whole: try tp=1, 2 or 4$",
        ),
        ("--heads 3", r"width D=16 cannot be shared out to H=3 heads; try H=1, 2, 4, 8, 16$"),
        ("--ranks 0", r"argument --ranks: must be at least 1, not 0$"),
        ("--steps -1", r"argument --steps: must be at least 1, not -1$"),
        ("--ranks four", r"argument --ranks: must be a whole number, not 'four'$"),
        ("--batch 1.5", r"argument --batch: must be a whole number, not '1\.5'$"),
        ("--batch 0", r"argument --batch: must be at least 1, not 0$"),
        ("--seq 0", r"argument --seq: must be at least 1, not 0$"),
        ("--layers 0", r"argument --layers: must be at least 1, not 0$"),
        ("--width -4", r"argument --width: must be at least 1, not -4$"),
        ("--heads 0", r"argument --heads: must be at least 1, not 0$"),
        ("--sample -1", r"argument --sample: must be at least 0, not -1$"),
        ("--seed -1", r"argument --seed: must be at least 0, not -1$"),
        ("--lr nan", r"argument --lr: must be a number above 0, not 'nan'$"),
        ("--lr inf", r"argument --lr: must be a number above 0, not 'inf'$"),
        ("--lr=-1e-3", r"argument --lr: must be a number above 0, not '-1e-3'$"),
        ("--lr 0", r"argument --lr: must be a number above 0, not '0'$"),
        ("--lr fast", r"argument --lr: must be a number above 0, not 'fast'$"),
        ("--seq 100000", r"3 sequences of 100000 tokens .* operations in a step, .*; try a smaller --seq"),
        ("--width 1000000", r"layers of width 1000000 are \de\+\d+ floating point operations in a step"),
        ("--picture x.png", r"argument --picture: 'x\.png': the picture is an SVG; try x\.svg$"),
        ("--picture x", r"argument --picture: 'x': the picture is an SVG; try x\.svg$"),
        ("--picture no/x.svg", r"argument --picture: 'no/x\.svg': there is no folder 'no'; make it first$"),
        ("--picture x.svg --check", r"--check draws no picture; leave out --check or --picture$"),
    ],
)
def test_what_is_refused_before_any_rank_starts(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(report, "run", None)
    with pytest.raises(SystemExit) as exit_:
        command.main([*SMALL, *arguments.split()])
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err.strip())


def test_the_module_runs_as_a_program():
    line = [sys.executable, "-m", "lessons_lib.train", *SMALL, "--ranks", "2", "--check", "--steps", "2"]
    program = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, timeout=100)
    assert program.returncode == 0, program.stderr
    assert "2 steps: the loss and the gradients" in program.stdout
    assert program.stderr == ""


@pytest.mark.parametrize("arguments", ["--help", "--ranks four", "--ranks 4 --tp 3"])
def test_help_and_typing_errors_do_not_wait_for_torch(arguments):
    program = (
        "import sys\nfrom lessons_lib.train.__main__ import main\n"
        f"try: main({arguments.split()})\nexcept SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.endswith("False\n"), done.stderr
