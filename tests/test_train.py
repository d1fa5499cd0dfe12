"""The command that trains: what it prints, what it refuses, and that --check can fail."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lessons_lib import Mesh, run
from lessons_lib.data_parallel import zero
from lessons_lib.data_parallel.unit import Unit
from lessons_lib.errors import RefusedError
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.pipeline_parallel import SCHEDULES
from lessons_lib.plan import PLANS
from lessons_lib.sequence_parallel import ATTENTIONS
from lessons_lib.tensor_parallel import SCHEMES, Column, Row
from lessons_lib.train import Settings, Training, check, part_of_model, parts, report, train
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


@pytest.mark.parametrize(
    "arguments, mesh",
    [
        ("--scheme 1d-sp --ranks 2", "Mesh(tp=2), layers by 1d-sp"),
        ("--scheme 2d", "Mesh(row=2, col=2), layers by 2d"),
        pytest.param("--scheme 3d", "Mesh(i=2, j=2, k=2), layers by 3d", marks=pytest.mark.slow),
        pytest.param("--scheme 1d --ranks 3 --heads 3 --width 24", "Mesh(tp=3)", marks=pytest.mark.slow),
        pytest.param(
            "--scheme 2.5d --ranks 8 --depth 2",
            "Mesh(depth=2, row=2, col=2), layers by 2.5d",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--scheme 2d --dp 2 --tp 4 --zero 3",
            "Mesh(dp=2, row=2, col=2), ZeRO 3 over dp, layers by 2d",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_check_finds_no_difference_under_any_scheme(capsys, arguments, mesh):
    """On the real text; 3 ranks pad its 256 words."""
    status, out, _ = printed(capsys, "--batch", "8", "--check", "--steps", "2", *arguments.split())
    assert status == 0, out
    assert f", as {mesh}\n" in out
    assert f"2 steps: the loss and the gradients of all {len(list(GPT(GPTConfig(L=2)).parameters()))}" in out


@pytest.mark.parametrize(
    "arguments, name, sizes",
    [
        ("", "1d", {"tp": 4}),
        ("--tp 2", "1d", {"tp": 2}),
        ("--scheme 1d --ranks 2", "1d", {"tp": 2}),
        ("--scheme 2d", "2d", {"row": 2, "col": 2}),
        ("--scheme 3d", "3d", {"i": 2, "j": 2, "k": 2}),
        ("--scheme 2.5d --tp 4 --depth 4", "2.5d", {"depth": 4, "row": 1, "col": 1}),
        ("--scheme 2d --ranks 8 --dp 2", "2d", {"dp": 2, "row": 2, "col": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore:2.5d with depth=4 and q=1")
def test_a_scheme_and_a_number_of_ranks_make_a_mesh(monkeypatch, arguments, name, sizes):
    asked = []
    monkeypatch.setattr(report, "report_training", lambda settings, picture: asked.append(settings) or 0)
    command.main([*SMALL, "--batch", "8", *arguments.split()])
    assert [(settings.scheme, settings.sizes) for settings in asked] == [(name, sizes)]


def test_the_command_knows_every_plan_attention_and_schedule():
    """Save the schedules that update weights on the way, and so do not train the serial model."""
    assert tuple(PLANS) == command.PLANS
    assert tuple(ATTENTIONS) == command.ATTENTIONS
    whole = [
        name
        for name, schedule in SCHEDULES.items()
        if all(action.kind != "U" for row in schedule(2, 4).rows for action in row)
    ]
    assert tuple(whole) == command.SCHEDULES
    for name in SCHEDULES.keys() - set(whole):
        with pytest.raises(RefusedError, match=f"no schedule is called '{name}'; there are gpipe, 1f1b, "):
            Settings(schedule=name)


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
    wrong = re.findall(r"^    (\S+): rank [01, ]+, relative error up to \d\.\de[-+]\d\d$", out, re.MULTILINE)
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
    B, D, p = 3 * 8, 16, 4
    blocks, words, loss = 2 * 4 * B * D, 2 * B * D, 3 * B  # 4 all-reduces in each of 2; embedding, head; loss
    per_rank = 30 * N_BYTES * 2 * (p - 1) * (blocks + words + loss) // p
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
    """Nor does it stand in the picture."""
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


# ---- context parallelism and pipelines


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


ACROSS = [
    *(f"--cp 2 --attention {name}" for name in command.ATTENTIONS),
    *(slow(f"--cp 4 --attention {name}") for name in command.ATTENTIONS),
    slow("--cp 1"),
    "--cp 2 --dp 2",  # of three sequences: two, and one
    slow("--cp 2 --dp 2 --attention ulysses --zero 3"),
    slow("--cp 4 --zero 2"),
    slow("--cp 2 --tp 2"),
    slow("--cp 2 --tp 2 --scheme 1d-sp"),
    slow("--cp 2 --tp 4 --scheme 2d --attention ring --batch 4"),
    *(f"--pp 2 --schedule {name} --microbatches 4" for name in ("1f1b", "zb-v", "dualpipe")),
    *(
        slow(f"--pp 2 --schedule {name} --microbatches 4")
        for name in ("gpipe", "interleaved", "breadth-first", "zb-h1", "zb-h2", "dualpipe-v", "chimera")
    ),
    slow("--pp 1 --schedule zb-v --microbatches 3"),
    slow("--pp 4 --microbatches 5"),
    slow("--pp 4 --schedule zb-v --layers 6 --microbatches 8 --batch 9"),
    slow("--pp 4 --schedule dualpipe --batch 8"),
    "--pp 2 --tp 2 --microbatches 2",
    slow("--pp 2 --tp 2 --scheme 1d-sp --schedule zb-v"),
    "--pp 2 --dp 2 --microbatches 2",  # of five sequences: three, and two
    slow("--pp 2 --dp 2 --tp 2 --microbatches 2"),
    slow("--pp 2 --dp 2 --schedule chimera --microbatches 2 --tied"),
    slow("--pp 2 --dp 2 --cp 2 --microbatches 2"),
    slow("--pp 2 --cp 2 --tp 2 --attention ulysses --schedule interleaved --tied"),
    "--pp 2 --tied",
    *(slow(f"--pp 2 --tied --schedule {name}") for name in ("zb-v", "dualpipe", "interleaved")),
]


@pytest.mark.parametrize("arguments", ACROSS)
def test_check_finds_no_difference_across_sequences_and_stages(capsys, arguments):
    """Loss and every gradient, on every rank that has it: cut sequences, stages, and both with all else."""
    status, out, _ = printed(capsys, "--check", "--steps", "2", "--batch", "5", *arguments.split())
    assert status == 0, out
    n_parameters = len(list(GPT(GPTConfig(L=6 if "layers" in arguments else 2)).parameters()))
    n_parameters -= "--tied" in arguments
    assert f"2 steps: the loss and the gradients of all {n_parameters} parameters, on every rank, are" in out


CONFIG = GPTConfig(L=2, H=4, D=16, S=8)
SMALLER = Settings(CONFIG, tp=1, steps=3, n_sequences=5, n_sample=9, dtype=torch.float64)
SHARED_OUT = [
    dict(cp=2, attention="zigzag"),
    dict(pp=2, schedule="zb-v", n_microbatches=4),
    dict(pp=2, schedule="dualpipe", n_microbatches=4),
    dict(pp=2, schedule="1f1b", n_microbatches=2, dp=2, cp=2, attention="ring"),
]


@pytest.fixture(scope="module")
def serially():
    return run(train, SMALLER, ranks=1).values[0]


@pytest.mark.parametrize("how", [*SHARED_OUT[:2], *map(slow, SHARED_OUT[2:])])
def test_ranks_tell_the_serial_losses_and_sample_from_the_serial_model(serially, how):
    settings = replace(SMALLER, **how)
    outcomes = run(train, settings, ranks=settings.n_ranks).values
    assert len({outcome.losses for outcome in outcomes}) == 1, "the same, to the last bit"
    assert outcomes[0].losses == pytest.approx(serially.losses, rel=1e-12)
    assert {outcome.sample for outcome in outcomes} == {serially.sample}


@pytest.mark.slow
@pytest.mark.parametrize("how", SHARED_OUT)
def test_and_so_they_do_as_processes(how):
    settings = replace(SMALLER, **how)
    found = run(check, settings, ranks=settings.n_ranks, transport="processes").values
    assert not [comparison for rank in found for comparison in rank if comparison.differs]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--cp 2 --attention ulysses", "--pp 2 --schedule zb-v"])
def test_and_under_torchrun(arguments):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [*SMALL, "--batch", "5", "--check", "--steps", "2", *arguments.split()]
    line = [sys.executable, *launch, "-m", "lessons_lib.train", *options]
    program = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, timeout=200)
    assert program.returncode == 0, program.stderr
    assert program.stdout.count("on every rank, are the serial model's") == 1


@pytest.mark.parametrize("schedule", ["dualpipe", slow("chimera")])
def test_copies_of_a_stage_stay_copies(schedule):
    """Stage 0 and 3 lie on ranks 0 and 3, and both train them: the same parameters, bit for bit."""
    settings = replace(SMALLER, pp=4, schedule=schedule, n_microbatches=8, n_sequences=9)

    def step():
        training = Training(part_of_model(settings, Mesh(**settings.sizes)), settings)
        assert len(list(training.steps())) == settings.steps
        return training.parameters()

    parameters = run(step, ranks=4).values
    for one, other in ((0, 3), (1, 2)):
        assert parameters[one].keys() == parameters[other].keys()
        for name, parameter in parameters[one].items():
            assert torch.equal(parameter, parameters[other][name]), name
    names = [name for rank in (0, 1) for name in parameters[rank]]
    assert sorted(names) == sorted(name for name, _ in GPT(CONFIG).named_parameters()), "each in one place"


def test_bytes_sent_over_cp_are_the_attention_s_and_the_gradients():
    settings = replace(SMALLER, cp=2, attention="zigzag", n_sample=0)
    attention = sum(ATTENTIONS["zigzag"].traffic(B=5, S=8, H=4, K=4, P=2).values())
    gradients = sum(parameter.numel() for parameter in GPT(CONFIG).parameters())  # 2 (p-1)/p is 1
    trace = run(train, settings, ranks=2).trace
    expected = settings.steps * 8 * (CONFIG.L * attention + gradients + 1)  # float64; and the loss
    assert [trace.bytes_sent(rank, "train") for rank in range(2)] == [expected] * 2


def test_bytes_sent_over_pp_are_the_stream_s():
    """Besides 80 bytes for each shape of a micro-batch, of which there are two; the loss, and the times."""
    settings = replace(SMALLER, pp=2, schedule="gpipe", n_microbatches=4, n_sample=0)
    trace = run(train, settings, ranks=2).trace
    stream, times = 5 * CONFIG.S * CONFIG.D, 2 + 4 * (4 + 4)
    expected = [settings.steps * (8 * (stream + times) + shapes) for shapes in (2 * 80, 0)]
    assert [trace.bytes_sent(rank, "train") for rank in range(2)] == expected


def test_a_rank_of_a_pipeline_keeps_its_stages_alone(capsys):
    _, out, _ = printed(capsys, "--pp", "2", "--schedule", "zb-v", "--batch", "4", "--steps", "1")
    sizes = {name: p.numel() for name, p in GPT(CONFIG).named_parameters()}
    outer = sum(n for name, n in sizes.items() if not name.startswith("blocks"))
    inner = sum(sizes.values()) - outer
    assert f"{min(outer, inner):,} to {max(outer, inner):,} on each rank" in out
    assert "as Mesh(pp=2, tp=1), ZB-V with 4 micro-batches over pp\n" in out


def untied(stages):
    return []


def only_of_dp(mesh):
    return mesh["dp"] if "dp" in mesh.sizes else None


def one_copy(model, group):
    pass


def mean_of_the_replica(*given, n_tokens, right=parts.execute, **options):
    return right(*given, **options)


@pytest.mark.parametrize(
    "arguments, name, wrong, first",
    [
        ("--cp 2", "replicas_of", only_of_dp, r"loss"),
        ("--cp 2 --dp 2", "replicas_of", only_of_dp, r"loss"),
        ("--pp 2 --tied", "tied_places", untied, r"embedding\.weight"),
        ("--pp 2 --dp 2 --microbatches 2", "reduce_each", one_copy, r"embedding\.weight"),
        ("--pp 2 --dp 2 --microbatches 2", "execute", mean_of_the_replica, r"loss"),
    ],
)
def test_check_catches_what_was_not_summed(capsys, monkeypatch, arguments, name, wrong, first):
    monkeypatch.setattr(parts, name, wrong)
    status, out, _ = printed(capsys, "--check", "--steps", "1", "--batch", "5", *arguments.split())
    assert status == 1
    assert re.search(rf"^DIFFERENT .*\n    {first}: rank 0, ", out, re.MULTILINE), out


@pytest.mark.parametrize(
    "arguments, sizes, how",
    [
        ("--cp 4", {"cp": 4, "tp": 1}, ("zigzag", None, 1)),
        ("--cp 2 --attention rsa --ranks 4", {"cp": 2, "tp": 2}, ("rsa", None, 1)),
        ("--cp 2 --tp 1 --ranks 4", {"dp": 2, "cp": 2, "tp": 1}, ("zigzag", None, 1)),
        ("--cp 2 --zero 1 --ranks 4", {"dp": 2, "cp": 2, "tp": 1}, ("zigzag", None, 1)),
        ("--pp 2", {"pp": 2, "tp": 1}, (None, "1f1b", 4)),
        ("--pp 4 --schedule zb-v --microbatches 8", {"pp": 4, "tp": 1}, (None, "zb-v", 8)),
        ("--pp 2 --tp 2 --ranks 8", {"pp": 2, "dp": 2, "tp": 2}, (None, "1f1b", 4)),
        ("--pp 1 --microbatches 3", {"pp": 1, "tp": 1}, (None, "1f1b", 3)),
        ("--pp 2 --cp 2 --dp 2", {"pp": 2, "dp": 2, "cp": 2, "tp": 1}, ("zigzag", "1f1b", 4)),
    ],
)
def test_cp_and_pp_make_a_mesh_and_have_defaults(monkeypatch, arguments, sizes, how):
    asked = []
    monkeypatch.setattr(report, "report_training", lambda settings, picture: asked.append(settings) or 0)
    command.main([*SMALL, "--layers", "6", "--batch", "8", *arguments.split()])
    (settings,) = asked
    assert list(settings.sizes.items()) == list(sizes.items())
    assert (settings.attention, settings.schedule, settings.n_microbatches) == how


@pytest.mark.parametrize(
    "how, message",
    [
        (dict(cp=2), r"more than one rank of cp needs attention=; try ring, zigzag, striped, ulysses, rsa$"),
        (dict(pp=2), r"more than one rank of pp needs schedule=; try gpipe, 1f1b, "),
        (dict(cp=2, attention="rings"), r"no attention is called 'rings'; there are ring, zigzag"),
        (dict(pp=2, schedule="1f2b"), r"no schedule is called '1f2b'; there are gpipe, 1f1b"),
        (
            dict(config=replace(CONFIG, dropout=0.5), pp=2, schedule="1f1b"),
            r"dropout=0\.5 does not go with a pipeline: .* Try dropout=0$",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(how, message):
    with pytest.raises(RefusedError, match=message):
        Settings(**how)


def test_the_command_s_defaults_are_the_library_s(monkeypatch):
    asked = []
    monkeypatch.setattr(report, "report_training", lambda settings, picture: asked.append(settings) or 0)
    command.main([])
    assert asked == [Settings()]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_size_of_a_step_is_what_torch_counts(tp):
    """Exactly, scores that are made again on the way back included. Ranks share it."""
    config = GPTConfig(L=2, H=4, D=32, S=16)
    settings = Settings(config=config, tp=tp, steps=2, n_sequences=3, n_sample=0)
    trace = run(train, settings, ranks=tp, record="flops").trace
    expected = settings.steps * report.step_flops(config, 3) // tp
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
        ("--ranks 4 --pp 3", r"--pp 3 does not divide --ranks 4; try --pp 1, 2, 4$"),
        (
            "--ranks 4 --pp 2 --dp 4",
            r"--pp 2 --dp 4 are 8 ranks, and --ranks asks for 4; try --pp 2 --dp 2$",
        ),
        (
            "--ranks 6 --pp 2 --cp 3 --tp 2",
            r"--pp 2 --cp 3 --tp 2 are 12 ranks, and --ranks asks for 6; try --pp 2 --cp 3 --tp 1$",
        ),
        (
            "--attention ring",
            r"--attention ring says how to use the ranks of cp; give --cp, or leave it out$",
        ),
        ("--schedule zb-v", r"--schedule zb-v says how to use the ranks of pp; give --pp, or leave it out$"),
        ("--microbatches 4", r"--microbatches 4 says how to use the ranks of pp; give --pp, or leave"),
        ("--cp 4 --attention flash", r"argument --attention: invalid choice: 'flash' \(choose from '?ring"),
        ("--pp 2 --schedule pipedream", r"argument --schedule: invalid choice: 'pipedream' \(choose from"),
        (
            "--cp 4 --seq 12",
            r"S=12 tokens cannot be cut into 8 equal pieces, 2 for each of 4 ranks\. Try S=8",
        ),
        ("--cp 3 --attention ring", r"S=8 tokens cannot be cut into 3 equal pieces, 1 for each of 3"),
        ("--cp 8 --attention ulysses", r"H=4 heads .*8 ranks"),
        ("--cp 4 --tp 2 --attention ulysses", r"H=2 heads .*4 ranks"),
        ("--cp 2 --tp 2 --scheme 1d-sp --seq 6 --attention ring", r"dim S of size 3 cannot be cut evenly"),
        (
            "--pp 2 --microbatches 4",
            r"error: 3 sequences: 4 micro-batches cannot each have one\. Try a batch of 4 or more, or",
        ),
        (
            "--pp 2 --dp 2 --batch 5 --microbatches 3",
            r"5 sequences, shared out over dp=2, leave a rank 2: 3 micro-batches .* Try a batch of 6 or more",
        ),
        (
            "--pp 3 --schedule dualpipe",
            r"DualPipe: p=3 is not a multiple of 2, since micro-batches enter at both",
        ),
        ("--pp 2 --schedule dualpipe --microbatches 2", r"DualPipe needs m >= 2p .* m=2 < 4: try m=4"),
        ("--pp 2 --schedule zb-h2 --microbatches 2", r"ZB-H2 .*2p-1"),
        ("--pp 2 --schedule interleaved --microbatches 3", r"m=3 is not a multiple of p"),
        (
            "--pp 4 --schedule zb-v --microbatches 8 --batch 8",
            r"zb-v on 4 ranks has 8 stages, and the model 4 layers: the embedding, 2 blocks, and the head\. "
            r"Every stage needs one: try 6 blocks or more, or fewer ranks$",
        ),
        ("--pp 2 --dp 2 --zero 1", r"ZeRO 1 does not go with a pipeline: .* Try zero=0, or no pipeline$"),
        (
            "--pp 2 --tp 4 --scheme 2d",
            r"layers by 2d do not go with a pipeline: a stage hands on all rows of a micro-batch, and 2d sh",
        ),
        ("--ranks 4 --tp 4 --zero 1", r"--zero 1 shares out over .* leave dp 1; try --dp 4 --tp 1, or"),
        ("--scheme 4d", r"argument --scheme: invalid choice: '4d' \(choose from '?1d'?, .*3d'?\)$"),
        ("--scheme 2d --ranks 8", r"2d needs q x q ranks, and 8 is not that\. Nearest: 4 \(2 x 2\) or 9"),
        ("--scheme 3d --ranks 4", r"3d needs q x q x q ranks, and 4 is not that\. Nearest: 1 .* or 8"),
        (
            "--scheme 2.5d --ranks 8",
            r"8 is not 1 squares\. With 8 ranks: depth=2 \(q=2\), depth=8 \(q=1\)\.$",
        ),
        ("--scheme 2d --depth 2", r"depth=2 is the number of grids of 2\.5d, and 2d has none; leave it out"),
        (
            "--scheme 2d",
            r"dim B of size 3 cannot be cut evenly over row=2, .* Nearest sizes that can: 2, 4\.",
        ),
        ("--scheme 1d-sp --seq 6 --batch 1", r"dim S of size 6 cannot be cut evenly over tp=4"),
        ("--scheme 2d --dp 2 --ranks 8 --batch 6", r"dim B of size 3 cannot be cut evenly over row=2"),
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
