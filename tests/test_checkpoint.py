"""Checkpoints: what is resumed is the unbroken run, on any number of ranks, whenever the run was killed."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lessons_lib import Layout, Mesh, checkpoint, plan, run
from lessons_lib.checkpoint import Piece, latest, load, save
from lessons_lib.data_parallel import Zero
from lessons_lib.errors import RankError, RefusedError
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.train import Saving, Settings, Training, report, steps, train
from lessons_lib.train import __main__ as command

PROJECT = Path(__file__).parents[1]
CONFIG = GPTConfig(L=1, H=4, D=16, S=8, dropout=0.1)
SMALL = Settings(CONFIG, tp=2, steps=4, n_sequences=3, n_sample=9)
OPTIONS = ["--layers", "1", "--heads", "4", "--width", "16", "--seq", "8", "--batch", "3"]


def trained(folder, settings, *, until=None, transport="threads", every=100):
    """Go on with the run in ``folder``, or begin it; what rank 0 tells."""
    saving = Saving(folder, every, latest(folder))
    settings = replace(settings, steps=until or settings.steps, saving=saving)
    return run(train, settings, ranks=settings.n_ranks, transport=transport).values[0]


def tensors_of(folder):
    """Every tensor of the latest checkpoint, whole, as torch opens it by itself."""
    dcp_to_torch_save(latest(folder).path, folder / "whole.pt")
    return torch.load(folder / "whole.pt")


def assert_same(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tolerance == 0 or not tensor.is_floating_point():
            assert torch.equal(found[name], tensor), name
        else:
            assert (found[name] - tensor).norm() <= tolerance * tensor.norm(), name


def assert_resumes(tmp_path, settings, degrees=None, tolerance=0.0, transport="threads"):
    """Broken off in equal parts, each on its own number of ranks."""
    degrees = degrees or [settings.tp] * 2
    unbroken = trained(tmp_path / "unbroken", replace(settings, tp=degrees[0]), transport=transport)
    for at, tp in enumerate(degrees):
        until = settings.steps * (at + 1) // len(degrees)
        resumed = trained(tmp_path / "broken", replace(settings, tp=tp), until=until, transport=transport)
    assert len(resumed.losses) == settings.steps and resumed.n_before > 0
    losses = torch.tensor([resumed.losses, unbroken.losses], dtype=torch.float64)
    assert_same({"loss": losses[0]}, {"loss": losses[1]}, tolerance)
    assert_same(tensors_of(tmp_path / "broken"), tensors_of(tmp_path / "unbroken"), tolerance)
    assert resumed.sample == unbroken.sample


@pytest.mark.parametrize(
    "tp, transport",
    [
        (1, "threads"),
        (2, "threads"),
        (4, "threads"),
        pytest.param(2, "processes", marks=pytest.mark.slow),
    ],
)
def test_resumed_is_unbroken_bit_for_bit(tmp_path, tp, transport):
    """Every loss, every parameter and moment, and what is drawn at the end; dropout included."""
    assert_resumes(tmp_path, replace(SMALL, tp=tp), transport=transport)


@pytest.mark.parametrize("degrees", [[1, 2, 4, 1], [4, 2]])
def test_resumed_on_another_number_of_ranks_is_unbroken(tmp_path, degrees):
    settings = replace(SMALL, dtype=torch.float64, steps=len(degrees))
    assert_resumes(tmp_path, settings, degrees, tolerance=1e-12)


MESHES = [
    dict(dp=1, tp=2, zero=0),
    dict(dp=4, tp=1, zero=3),
    dict(dp=2, tp=2, zero=1),
    dict(dp=3, tp=1, zero=2),
]


def test_resumed_on_other_meshes_and_stages_is_unbroken(tmp_path):
    """S19. Each part of the run on a mesh of its own: another dp, another tp, another stage of ZeRO."""
    plain = replace(SMALL, config=replace(CONFIG, dropout=0.0), dtype=torch.float64, steps=len(MESHES))
    unbroken = trained(tmp_path / "unbroken", plain)
    for at, mesh in enumerate(MESHES, start=1):
        resumed = trained(tmp_path / "broken", replace(plain, **mesh), until=at)
        assert resumed.n_before == at - 1
    losses = torch.tensor([resumed.losses, unbroken.losses], dtype=torch.float64)
    assert_same({"loss": losses[0]}, {"loss": losses[1]}, 1e-12)
    found, expected = (tensors_of(tmp_path / name) for name in ("broken", "unbroken"))
    for name in ("random",):  # each rank of dp has one of its own
        assert found.pop(name).shape == (3, *expected.pop(name).shape)
    assert_same(found, expected, 1e-12)


SCHEMES = [
    dict(scheme="2d", tp=4),
    dict(scheme="3d", tp=8),
    dict(scheme="1d-sp", tp=3),
    dict(dp=1, tp=1),
]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_one_scheme_saves_another_opens(tmp_path, tied):
    """S14, S19: words that pad the vocabulary are in no file, and a tied weight is there once.

    257 words are padded to 258, 260 and 258.
    """
    config = GPTConfig(L=1, H=6, D=12, S=6, V=257, dropout=0.1, tied=tied)
    settings = replace(SMALL, config=config, dtype=torch.float64, n_sequences=4, steps=4, n_sample=5)
    unbroken = trained(tmp_path / "unbroken", replace(settings, tp=1))
    for at, mesh in enumerate(SCHEMES, start=1):
        resumed = trained(tmp_path / "broken", replace(settings, **mesh), until=at)
        assert resumed.n_before == at - 1
        saved = latest(tmp_path / "broken").tensors
        assert saved["model.embedding.weight"][0] == (257, 12) and ("model.head.weight" in saved) != tied
    losses = torch.tensor([resumed.losses, unbroken.losses], dtype=torch.float64)
    assert_same({"loss": losses[0]}, {"loss": losses[1]}, 1e-12)
    assert_same(tensors_of(tmp_path / "broken"), tensors_of(tmp_path / "unbroken"), 1e-12)
    assert resumed.sample == unbroken.sample


PIPELINES = [
    dict(tp=1, pp=2, schedule="zb-v", n_microbatches=3),
    dict(tp=1),
    dict(tp=1, pp=2, schedule="dualpipe", n_microbatches=4),  # both ranks have all; each is saved once
    dict(tp=2, cp=2, attention="zigzag"),
    dict(tp=1, pp=4, schedule="1f1b", n_microbatches=2, dp=2),
]


@pytest.mark.parametrize(
    "tied, pipelines",
    [
        (True, PIPELINES[:2]),
        *(pytest.param(tied, PIPELINES, marks=pytest.mark.slow) for tied in (True, False)),
    ],
)
def test_what_stages_save_whole_models_open_and_the_other_way_round(tmp_path, tied, pipelines):
    config = GPTConfig(L=2, H=4, D=16, S=8, tied=tied)
    settings = replace(SMALL, config=config, dtype=torch.float64, n_sequences=4, steps=len(pipelines))
    unbroken = trained(tmp_path / "unbroken", replace(settings, tp=1))
    for at, how in enumerate(pipelines, start=1):
        resumed = trained(tmp_path / "broken", replace(settings, **how), until=at)
        assert resumed.n_before == at - 1
        found, expected = latest(tmp_path / "broken").tensors, latest(tmp_path / "unbroken").tensors
        assert {n: t for n, t in found.items() if n != "random"} == {
            n: t for n, t in expected.items() if n != "random"
        }
    assert resumed.losses == pytest.approx(unbroken.losses, rel=1e-12)
    found, expected = (tensors_of(tmp_path / name) for name in ("broken", "unbroken"))
    for tensors in (found, expected):
        del tensors["random"]
    assert_same(found, expected, 1e-12)
    assert resumed.sample == unbroken.sample


def described_alone(mine, right=checkpoint._union):
    return {name: entry for name, entry in right(mine).items() if name in mine or isinstance(entry, list)}


def test_stages_of_one_rank_saved_for_all_are_caught(tmp_path, monkeypatch):
    """Where the record names what the first rank has, and nothing else, no other model can be opened."""
    settings = replace(SMALL, config=replace(CONFIG, dropout=0.0), tp=1, n_sequences=4)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_union", described_alone)
        trained(tmp_path, replace(settings, pp=2, schedule="gpipe", n_microbatches=2), until=1)
    with pytest.raises(RefusedError, match=r"is not in it"):
        trained(tmp_path, settings)


def test_a_resumption_goes_on_by_the_pipeline_that_was_saved(tmp_path, monkeypatch):
    """Unless other ranks are asked for."""
    how = dict(tp=1, pp=2, schedule="zb-v", n_microbatches=3, cp=2, attention="ring")
    settings = replace(SMALL, config=GPTConfig(L=2, H=4, D=16, S=8, tied=True), **how)
    trained(tmp_path, settings, until=1)
    asked = []
    monkeypatch.setattr(report, "report_training", lambda settings, picture: asked.append(settings) or 0)
    for more in ("", "--ranks 1", "--pp 2 --microbatches 1"):
        command.main(["--checkpoint", str(tmp_path), "--steps", "4", *more.split()])
    same, alone, other = asked
    assert {name: getattr(same, name) for name in how} == how and same.config.tied
    assert alone.sizes == {"tp": 1} and alone.config.tied
    assert (other.sizes, other.schedule, other.n_microbatches) == ({"pp": 2, "tp": 1}, "1f1b", 1)


def test_a_resumption_goes_on_by_the_scheme_that_was_saved(tmp_path, monkeypatch):
    trained(
        tmp_path,
        replace(SMALL, config=replace(CONFIG, dropout=0.0), scheme="2d", tp=4, n_sequences=4),
        until=2,
    )
    asked = []
    monkeypatch.setattr(report, "report_training", lambda settings, picture: asked.append(settings) or 0)
    for more in ("", "--scheme 1d --ranks 2"):
        command.main(["--checkpoint", str(tmp_path), "--steps", "4", *more.split()])
    assert [(settings.scheme, settings.tp) for settings in asked] == [("2d", 4), ("1d", 2)]


@pytest.mark.parametrize(
    "mesh", [dict(dp=2, tp=1, zero=3), pytest.param(dict(dp=2, tp=2, zero=1), marks=pytest.mark.slow)]
)
def test_zero_resumed_is_unbroken_bit_for_bit(tmp_path, mesh):
    """Dropout included, of which every rank of dp draws its own."""
    assert_resumes(tmp_path, replace(SMALL, **mesh))


def test_ranks_of_dp_drop_numbers_of_their_own(tmp_path):
    """And those of tp the same ones."""
    trained(tmp_path, replace(SMALL, dp=2, tp=2, n_sequences=2), until=1)  # one row, so as many draws, each
    (found, other), whole = tensors_of(tmp_path)["random"], latest(tmp_path).tensors["random"]
    assert whole[0] == (2, len(found)) and not torch.equal(found, other)


def test_dropout_on_another_dp_is_refused_and_both_are_named(tmp_path):
    trained(tmp_path, replace(SMALL, dp=2, tp=1, zero=1), until=2)
    with pytest.raises(
        RefusedError, match=r"was saved with dp=2, and this run asks for dp=4: .* the same dp"
    ):
        trained(tmp_path, replace(SMALL, dp=4, tp=1, zero=1))


class Odd(nn.Module):
    """S19: 10 and 7 elements, on ranks that divide neither."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(10.0))
        self.b = nn.Parameter(torch.arange(7.0).reshape(7, 1) / 3)


def odd(stage, folder, start, steps):
    """Train from ``start`` on, save, and return all parameters."""

    def body():
        mesh = Mesh(dp=torch.distributed.get_world_size())
        model = Odd()
        sharded = Zero(model, stage, mesh["dp"], partial(torch.optim.Adam, lr=0.1))
        if start:
            load(checkpoint.pieces(model, sharded), start, mesh)
            sharded.loaded()
        n_done = start.step if start else 0
        for step in range(n_done, n_done + steps):
            loss = ((model.a**2).sum() * (step + 1) + (model.b**3).sum()) / mesh.sizes["dp"]
            sharded.zero_grad()
            loss.backward()
            sharded.step()
        save(checkpoint.pieces(model, sharded), folder, mesh, n_done + steps)
        return sharded.whole_parameters()

    return body


@pytest.mark.parametrize("ranks", [2, 3, 6, 1])
def test_saved_by_four_ranks_of_zero_opened_by_others(tmp_path, ranks):
    """The next step is the unbroken run's, and no padding is on the disk."""
    run(odd(1, tmp_path, None, 3), ranks=4)
    start = latest(tmp_path)
    assert {name: shape for name, (shape, _) in start.tensors.items() if "step" not in name} == {
        f"{kind}{name}{what}": shape
        for name, shape in (("a", (10,)), ("b", (7, 1)))
        for kind, what in (("model.", ""), ("optimizer.", ".exp_avg"), ("optimizer.", ".exp_avg_sq"))
    }
    unbroken = run(odd(0, tmp_path / "unbroken", None, 4), ranks=1).values[0]
    for found in run(odd(2, tmp_path / "other", start, 1), ranks=ranks).values:
        assert_same(found, unbroken, 1e-6)


def forgets_to_spread(self):
    pass


def test_opened_and_not_spread_is_caught(tmp_path, monkeypatch):
    run(odd(1, tmp_path, None, 3), ranks=4)
    unbroken = run(odd(0, tmp_path / "unbroken", None, 4), ranks=1).values[0]
    monkeypatch.setattr(Zero, "loaded", forgets_to_spread)
    found = run(odd(2, tmp_path / "other", latest(tmp_path), 1), ranks=3).values[0]
    with pytest.raises(AssertionError):
        assert_same(found, unbroken, 1e-6)


@given(
    shape=st.lists(st.integers(1, 5), max_size=4), ends=st.tuples(st.integers(0, 700), st.integers(0, 700))
)
def test_rectangles_are_the_stretch(shape, ends):
    """Each element once and in order, in few rectangles."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    first, last = sorted(min(end, whole.numel()) for end in ends)
    found = list(checkpoint.rectangles(tuple(shape), first, last))
    elements = [
        whole[tuple(slice(at, at + n) for at, n in zip(start, sizes, strict=True))].flatten()
        for start, sizes in found
    ]
    assert torch.equal(torch.cat(elements) if elements else whole.flatten()[:0], whole.flatten()[first:last])
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_what_threads_save_processes_open(tmp_path):
    trained(tmp_path / "a", SMALL, until=3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert (
        trained(tmp_path / "a", SMALL, transport="processes").losses == trained(tmp_path / "b", SMALL).losses
    )


# ---- wrong versions, which the comparison must catch ----


def without(ending):
    right = checkpoint.pieces
    return lambda *a: {name: piece for name, piece in right(*a).items() if not name.endswith(ending)}


def forgets(ending):
    def wrong(state, start, mesh, right=checkpoint.load):
        right(
            {
                name: Piece(p.block.clone() if name.endswith(ending) else p.block, p.layout)
                for name, p in state.items()
            },
            start,
            mesh,
        )

    return wrong


def other_coordinate(name, piece, mesh, right=checkpoint._begin):
    class Turned:
        sizes, coordinate = mesh.sizes, {"tp": mesh.sizes["tp"] - 1 - mesh.rank}

    return right(name, piece, Turned if "mlp.up.weight" in name else mesh)  # all turned would be right again


def forgets_the_step(self, mesh, start, right=Training.resume):
    right(self, mesh, start)
    self.losses = [0.0] * (start.step - 1)


def forgets_the_dropout(self, mesh, start, right=Training.resume):
    before = torch.get_rng_state()
    right(self, mesh, start)
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    "owner, name, wrong",
    [
        (checkpoint, "load", forgets(("exp_avg", "exp_avg_sq"))),
        (checkpoint, "load", forgets("exp_avg_sq")),
        (checkpoint, "load", forgets(".step")),
        (checkpoint, "_begin", other_coordinate),
        (checkpoint, "load", lambda state, start, mesh: None),
        (Training, "resume", forgets_the_step),
        (Training, "resume", forgets_the_dropout),
        (steps, "WARMUP", 1),
    ],
    ids=["moments", "second moment", "AdamW's step", "shards swapped", "nothing", "step", "dropout", "rate"],
)
def test_a_resumption_that_forgets_is_caught(begun, tmp_path, monkeypatch, owner, name, wrong):
    """Each is wrong in the second part alone; what was not saved would be refused by its name."""
    folder, unbroken = begun
    shutil.copytree(folder, tmp_path / "run")
    monkeypatch.setattr(owner, name, wrong)
    assert trained(tmp_path / "run", SMALL).losses != unbroken.losses


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run broken off after two steps, and what the unbroken one tells."""
    folder = tmp_path_factory.mktemp("begun")
    trained(folder / "run", SMALL, until=2)
    unbroken = trained(folder / "unbroken", SMALL)
    again = trained(shutil.copytree(folder / "run", folder / "again"), SMALL)
    assert again.losses == unbroken.losses
    return folder / "run", unbroken


def test_moments_that_were_not_saved_are_missed(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "pieces", without(("exp_avg", "exp_avg_sq")))
        trained(tmp_path, SMALL, until=2)
    with pytest.raises(RefusedError, match=r"optimizer\.embedding\.weight\.exp_avg is not in it"):
        trained(tmp_path, SMALL)


# ---- what lies on the disk, and who reads it ----


def saved_at_the_beginning(folder):
    mesh = Mesh(tp=4)
    model = plan.parallelize(GPT(CONFIG), plan.GPT_1D, mesh)
    save(checkpoint.pieces(model), folder, mesh, step=0)


def test_four_ranks_save_the_serial_model(tmp_path):
    """By names and shapes, too: a serial model can open it, and any plan."""
    run(saved_at_the_beginning, tmp_path, ranks=4)
    serial = {f"model.{name}": p.detach() for name, p in GPT(CONFIG).named_parameters()}
    assert_same(tensors_of(tmp_path), serial, 0)
    found = latest(tmp_path)
    assert found.tensors == {name: (tuple(tensor.shape), "float32") for name, tensor in serial.items()}
    assert (found.step, found.sizes, found.passed_over) == (0, {"tp": 4}, ())


def test_a_rank_reads_its_own_blocks_and_nothing_else(tmp_path, monkeypatch):
    trained(tmp_path, replace(SMALL, tp=4), until=1)
    read = []

    def spied(self, wanted, planner, right=FileSystemReader.read_data):
        rank = torch.distributed.get_rank()
        for item in wanted.items:
            stored, whole = self.storage_data[item.storage_index], planner.metadata.state_dict_metadata
            cut = list(item.lengths) != list(whole[item.storage_index.fqn].size)
            read.append((rank, stored.relative_path, cut))
        return right(self, wanted, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", spied)
    trained(tmp_path, replace(SMALL, tp=4), until=2)
    n_cut = 3 * (6 * CONFIG.L + 2)  # parameter and two moments; qkv, up and biases, proj, down; words twice
    for rank in range(4):
        mine = [path for reader, path, cut in read if reader == rank and cut]
        assert mine == [f"__{rank}_0.distcp"] * n_cut
        assert len([path for reader, path, cut in read if reader == rank]) == len(latest(tmp_path).tensors), (
            "each tensor is read once"
        )


def square(layout, fill):
    """Save a tensor of 12 x 12 by one layout, or open it by another."""

    def body(sizes, folder, start):
        mesh, whole = Mesh(**sizes), torch.arange(144.0).reshape(12, 12) + 1
        if start is None:
            save({"x": Piece(layout.shard(whole, mesh), layout)}, folder, mesh, step=3)
            return True
        block = fill(layout.shard(whole, mesh))
        load({"x": Piece(block, layout)}, start, mesh)
        return torch.equal(block, layout.shard(whole, mesh))

    return body


CUTS = [
    ("B@row D@col", dict(row=2, col=3)),
    ("B D@k@i", dict(i=2, k=2)),
    ("B D@i@k", dict(i=3, k=2)),
    ("B@k@i D@j", dict(i=2, j=3, k=1)),
    ("B D", dict(dp=2)),
    ("B D@tp", dict(dp=2, tp=2)),
]


@pytest.mark.parametrize("one, sizes", CUTS)
def test_saved_by_a_layout_opened_by_another(tmp_path, one, sizes):
    n = torch.Size(sizes.values()).numel()
    run(square(Layout(one), torch.zeros_like), sizes, tmp_path, None, ranks=n)
    for other, others in CUTS:
        n = torch.Size(others.values()).numel()
        opened = run(square(Layout(other), torch.zeros_like), others, tmp_path, latest(tmp_path), ranks=n)
        assert opened.values == [True] * n


def test_the_two_newest_are_kept(tmp_path):
    trained(tmp_path, SMALL, every=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_saving_is_no_training_traffic(tmp_path):
    saved = replace(SMALL, saving=Saving(tmp_path, 2))
    sent = [run(train, settings, ranks=2).trace.bytes_sent(0, "train") for settings in (SMALL, saved)]
    assert sent[0] == sent[1] > 0


# ---- killed at any moment ----

KILLED = """
import os, random, signal, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from lessons_lib import Layout, Mesh, checkpoint, run
from lessons_lib.models.gpt import GPTConfig
from lessons_lib.train import Saving, Settings, train

how, folder = sys.argv[1], Path(sys.argv[2])
settings = Settings(GPTConfig(L=1, H=2, D=8, S=4), tp=2, n_sequences=2, n_sample=0)

def go_on(until):
    saving = Saving(folder, 1, checkpoint.latest(folder))
    return run(train, replace(settings, steps=until, saving=saving), ranks=2).values[0]

def pieces(value):
    block = torch.full((3,), float(value))
    return {"cut": checkpoint.Piece(block, Layout("B@tp")), "whole": checkpoint.Piece(block + 1, Layout("B"))}

def save(step):
    run(lambda: checkpoint.save(pieces(step), folder, Mesh(tp=2), step) and None, ranks=2)

def opened(start):
    def body():
        state = pieces(-1)
        checkpoint.load(state, start, Mesh(tp=2))
        return {name: piece.block.tolist() for name, piece in state.items()}
    return run(body, ranks=2).values

def forked(task, *arguments):
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        task(*arguments)
        os._exit(0)
    return child

def save_and_die(step, at_event):
    n = 0
    def hook(event, arguments):
        nonlocal n
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            path = arguments[0]
            n += isinstance(path, (str, os.PathLike)) and (folder.name in str(path) or "distcp" in str(path))
            if n == at_event:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(step)

left_behind = set()
def look(before):
    found = checkpoint.latest(folder)
    assert not found.passed_over and found.step >= before, (found, before)
    left_behind.update(name.rpartition(".")[2] for name in checkpoint.unfinished(folder))
    return found.step

now = n_kills = 0
if how == "at random":
    random.seed(0)
    while n_kills < 10:
        child = forked(go_on, 10**6)
        while not any(int(path.name[5:13]) > now for path in folder.glob("step-????????")):
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        n_kills += 1
        now = look(now)
    losses = go_on(now + 3).losses
    same = losses == run(train, replace(settings, steps=len(losses)), ranks=2).values[0].losses
else:
    os.waitpid(forked(lambda: [save(step) for step in range(1, 4)]), 0)
    now = look(3)
    while True:
        child = forked(save_and_die, now + 1, n_kills + 1)
        if os.waitpid(child, 0)[1] == 0:
            break
        n_kills += 1
        now = look(now)
    now = look(now + 1)
    same = opened(checkpoint.latest(folder)) == [{"cut": [now] * 3, "whole": [now + 1] * 3}] * 2
print("\\n", n_kills, now, same, *sorted(left_behind))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at random", "at every event"])
def test_killed_while_saving_the_last_whole_one_opens(tmp_path, how):
    """At random ten times; and before each file operation of a save, one after the other."""
    line = [sys.executable, "-c", KILLED, how, tmp_path]
    done = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    n_kills, now, same, *left_behind = done.stdout.split("\n")[-2].split()
    assert int(n_kills) >= 10 and int(now) >= 4 and same == "True"
    assert "writing" in left_behind
    if how == "at every event":
        assert int(n_kills) > 20 and left_behind == ["removing", "writing"]


# ---- damaged, of another kind, or none ----


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = [
    ("__1_0.distcp", cut_off, r"__1_0\.distcp has [\d,]+ bytes of [\d,]+"),
    ("__1_0.distcp", flip, r"__1_0\.distcp is not as it was written \(its checksum differs\)"),
    ("__0_0.distcp", Path.unlink, r"__0_0\.distcp is missing"),
    (".metadata", flip, r"\.metadata is not as it was written"),
    ("checkpoint.json", cut_off, r"checkpoint\.json cannot be read \(.*\)"),
    ("checkpoint.json", Path.unlink, r"checkpoint\.json is missing"),
    ("checkpoint.json", lambda path: path.write_text("[]"), r"checkpoint\.json cannot be read \(.*\)"),
    ("checkpoint.json", lambda path: path.write_text('{"format": 2}'), r"has format 2, and .* reads 1"),
]


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    trained(folder, replace(SMALL, config=replace(CONFIG, dropout=0.0)), until=6, every=3)
    return folder


@pytest.fixture
def folder(two_saved, tmp_path):
    """A run saved after steps 3 and 6."""
    return shutil.copytree(two_saved, tmp_path / "run")


@pytest.mark.parametrize("file, damage, why", DAMAGE)
def test_a_damaged_one_is_passed_over_with_a_word(folder, file, damage, why):
    damage(folder / "step-00000006" / file)
    found = latest(folder)
    assert found.step == 3
    (word,) = found.passed_over
    assert re.match("step-00000006: " + why, word)
    damage(folder / "step-00000003" / file)
    with pytest.raises(
        RefusedError,
        match=rf"no checkpoint in .* step-0*6: {why}.*; step-0*3: {why}.*another folder, or remove",
    ):
        latest(folder)


def test_the_command_passes_over_what_is_damaged_and_saves_it_anew(folder, capsys):
    cut_off(folder / "step-00000006" / "__0_0.distcp")
    (folder / "step-00000009.writing").mkdir()
    assert command.main(["--checkpoint", str(folder), "--every", "3"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"checkpoint +goes on after step 3: .*step-00000003, saved by 2 ranks; damaged and passed over is "
        r"step-00000006: __0_0\.distcp has .* bytes of .*; step-00000009\.writing was never finished, and",
        out,
    )
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000006"]
    assert latest(folder).step == 6


def test_the_command_given_again_goes_on(tmp_path, capsys):
    arguments = [*OPTIONS, "--ranks", "2", "--checkpoint", str(tmp_path / "run")]
    unbroken = [*OPTIONS, "--ranks", "2", "--steps", "5"]
    outs = []
    for line in (
        [*arguments, "--steps", "3"],
        [*arguments, "--steps", "5", "--resume"],
        ["--checkpoint", str(tmp_path / "run")],
        unbroken,
    ):
        assert command.main(line) == 0
        outs.append(capsys.readouterr().out)
    losses = [re.search(r"loss +5\.\d+ at step 1, .*", out).group() for out in outs[1:]]
    assert losses[0] == losses[1] == losses[2]
    assert re.search(r"checkpoint +every 50 steps in .*run$", outs[0], re.MULTILINE)
    assert "Mesh(tp=2)" in outs[2] and "nothing left  all 5 steps were done before" in outs[2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "--width 32",
            r"step-00000006' was trained with width 16, and this run asks for width 32: ask for the",
        ),
        ("--layers 3 --heads 2", r"trained with layers 1, heads 4, and .* asks for layers 3, heads 2: ask"),
        (
            "--lr 1e-2 --seed 1",
            r"trained with lr 0\.001, seed 0, and this run asks for lr 0\.01, seed 1: ask",
        ),
        ("--steps 5", r"has done 6 steps, and this run asks for 5: ask for more, or save in another folder$"),
        ("--ranks 3", r"4 heads cannot be shared out to 3 ranks"),
        ("--check", r"--check saves nothing; leave out --check or --checkpoint$"),
    ],
)
def test_another_run_is_refused_before_any_rank_starts(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(report, "run", None)
    with pytest.raises(SystemExit) as exit_:
        command.main(["--checkpoint", str(folder), *arguments.split()])
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err.strip())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--resume", r"--resume needs --checkpoint DIR, the folder of the checkpoints$"),
        ("--every 3", r"--every needs --checkpoint DIR"),
        (
            "--resume --checkpoint none",
            r"--resume: 'none' holds no checkpoint \(there is no such folder\); leave",
        ),
        (
            "--resume --checkpoint empty",
            r"'empty' holds no checkpoint \(no step-N in it\); leave out --resume",
        ),
        ("--resume --checkpoint half", r"'half' holds no .*only step-00000003\.writing, never finished\)"),
        ("--checkpoint file", r"argument --checkpoint: 'file' is no folder; name one, which need not exist$"),
    ],
)
def test_where_nothing_can_be_resumed(tmp_path, capsys, monkeypatch, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "step-00000003.writing").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "run", None)
    with pytest.raises(SystemExit):
        command.main(arguments.split())
    assert re.search(message, capsys.readouterr().err.strip())


def opened(config, dtype, start, kind=lambda model: torch.optim.AdamW(model.parameters())):
    mesh = Mesh(tp=2)
    model = plan.parallelize(GPT(config, seed=9).to(dtype), plan.GPT_1D, mesh)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        load(checkpoint.pieces(model, kind(model)), start, mesh)
    finally:
        changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
        assert not changed


@pytest.mark.parametrize(
    "config, dtype, message",
    [
        (
            replace(CONFIG, D=32),
            torch.float32,
            r"embedding\.weight is float32 256 x 16 there and float32 256 x 32 here; .* more\. Build",
        ),
        (CONFIG, torch.float64, r"is float32 256 x 16 there and float64 256 x 16 here"),
        (replace(CONFIG, L=2), torch.float32, r"model\.blocks\.1\.\S+ is not in it; .* more\. Build"),
    ],
)
def test_another_model_is_refused_and_left_as_it_was(folder, config, dtype, message):
    with pytest.raises(RefusedError, match=message):
        run(opened, config, dtype, latest(folder), ranks=2)


def test_another_optimizer_is_refused(folder):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), momentum=0.9)

    with pytest.raises(RefusedError, match=r"optimizer\.\S+\.momentum_buffer is not in it"):
        run(opened, CONFIG, torch.float32, latest(folder), sgd, ranks=2)


def test_tensors_that_nobody_wants_are_named(folder):
    def body(start):
        state = checkpoint.pieces(plan.parallelize(GPT(CONFIG), plan.GPT_1D, Mesh(tp=2)))
        load(state, start, Mesh(tp=2))  # without an optimizer: a part of the checkpoint
        del state["model.norm.bias"]
        load(state, start, Mesh(tp=2))

    with pytest.raises(
        RefusedError, match=r"another state: model\.norm\.bias is in it and not wanted\. Build"
    ):
        run(body, latest(folder), ranks=2)


def test_ranks_that_open_different_checkpoints_are_refused(folder):
    newest = latest(folder)
    shutil.copytree(folder / "step-00000003", folder.parent / "other" / "step-00000003")
    older = latest(folder.parent / "other")

    def body():
        opened(CONFIG, torch.float32, [newest, older][Mesh(tp=2).rank])

    with pytest.raises(
        RefusedError, match=r"\(rank 0: step 6, rank 1: step 3\): do all hosts see one folder"
    ):
        run(body, ranks=2)


def test_a_step_is_saved_once(folder):
    def body():
        save({"x": Piece(torch.zeros(2), Layout("B"))}, folder, Mesh(tp=2), step=6)

    with pytest.raises(RefusedError, match=r"step-00000006' is saved already; save another step, or in ano"):
        run(body, ranks=2)
    assert latest(folder).tensors.keys() != {"x"}


@pytest.mark.parametrize(
    "state, step, message",
    [
        ({}, 1, r"save of 0 pieces at step=1, keep=2: a checkpoint has one piece or more"),
        ({"x": Piece(torch.zeros(2), Layout("B"))}, -1, r"at step=-1"),
        ({"x": Piece(torch.zeros(2), Layout("B D"))}, 1, r'x: Layout\("B D"\) has 2 dims .* the block has 1'),
        (
            {"x": Piece(torch.zeros(2), Layout("B@row"))},
            1,
            r"x: .* names the axis 'row', which the mesh does",
        ),
        (
            {"x": Piece(torch.zeros(2), Layout("B +tp"))},
            1,
            r"x: .* is a partial sum; a checkpoint holds what",
        ),
    ],
)
def test_what_cannot_be_saved(tmp_path, state, step, message):
    with pytest.raises(RefusedError, match=message):
        run(lambda: save(state, tmp_path / "run", Mesh(tp=2), step), ranks=2)
    assert not (tmp_path / "run").exists()


class FullDisk(FileSystemWriter):
    def write_data(self, plan, planner):
        if torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().write_data(plan, planner)


@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_a_rank_that_cannot_write_stops_all_and_spoils_nothing(folder, monkeypatch, transport):
    def body():
        checkpoint.FileSystemWriter = FullDisk
        save({"x": Piece(torch.zeros(2), Layout("B@tp"))}, folder, Mesh(tp=2), step=9)

    monkeypatch.setattr(checkpoint, "FileSystemWriter", FullDisk)
    with pytest.raises(
        OSError, match=r"step 9 cannot be saved in '.*run'\. rank 1: OSError\(28, 'No space"
    ) as e:
        run(body, ranks=2, transport=transport)
    assert isinstance(e.value, RankError)
    assert latest(folder).step == 6


def test_the_record_is_readable(folder):
    record = json.loads((folder / "step-00000006" / "checkpoint.json").read_text())
    assert record["step"] == 6 and record["mesh"] == {"tp": 2} and len(record["about"]["losses"]) == 6
    weight = record["tensors"]["model.blocks.0.mlp.up.weight"]
    assert weight == {"shape": [64, 16], "dtype": "float32", "layout": "F@tp D"}
