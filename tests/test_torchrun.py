"""``run`` in a torchrun launch: the same records as thread and process ranks, every way a run can end,
and two hosts, which are network namespaces.

This file is also the script that torchrun starts: ``torchrun tests/test_torchrun.py FOLDER [PART ...]``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import Mesh, region, run
from lessons_lib.errors import LessonsError, RankError, RunError
from lessons_lib.mesh import copy_sum, sum_copy
from lessons_lib.spmd import network
from lessons_lib.spmd.result import Run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SIZE = 2  # ranks of every launch here


def me() -> int:
    return dist.get_rank()


# ---- programs whose records are compared on all transports ----


def every_collective() -> list[float]:
    x = torch.arange(6.0) + me()
    whole, part = torch.empty(12), torch.empty(3)
    dist.all_reduce(x)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.broadcast(x, src=1)
    dist.reduce(x.clone(), dst=1)  # which leaves nothing defined on the other ranks
    dist.all_gather_single(whole, x)
    dist.reduce_scatter_single(part, x)
    pieces = [torch.empty(3), torch.empty(3)]
    dist.all_to_all(pieces, list(x.chunk(2)))
    dist.gather(part, pieces if me() == 0 else None, dst=0)
    dist.scatter(part, pieces if me() == 0 else None, src=0)
    dist.barrier()
    alone = [dist.new_group([rank]) for rank in range(SIZE)]
    dist.all_reduce(part, group=alone[me()])
    return [float(x.sum()), float(whole.sum()), float(part.sum())]


def messages() -> float:
    other, x = 1 - me(), torch.full((5,), 1.0 + me())
    y = torch.empty(5)
    sent, received = dist.isend(x, other), dist.irecv(y, other)
    received.wait()
    sent.wait()
    if me() == 0:
        dist.send(y, 1, tag=3)
    else:
        dist.recv(x, 0, tag=3)
    pair = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return float(x.sum() + 10 * y.sum())


def from_anyone() -> float:
    x = torch.ones(2)
    for number in range(2):
        if me() == 1:
            dist.send(x * number, 0)
        elif number:
            dist.recv(x, 1)
        else:
            dist.recv(x)
    return float(x.sum())


def training(width: int) -> list[float]:
    torch.manual_seed(1)
    mesh = Mesh(tp=SIZE)
    x = torch.randn(4, 6, requires_grad=True)
    up, down = torch.randn(6, 8).chunk(SIZE, 1)[me()], torch.randn(8, 6).chunk(SIZE, 0)[me()]
    with region("forward"):
        y = sum_copy(torch.tanh(copy_sum(x, mesh["tp"]) @ up) @ down, mesh["tp"])
    with region("backward"):
        (dx,) = torch.autograd.grad(y.square().sum(), x)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1)))
    with region("replicas"):
        model(x.detach() + me()).square().sum().backward()
    return [float(dx.sum()), *(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)]


PROGRAMS: dict[str, Callable[[], Any]] = {
    "every_collective": every_collective,
    "messages": messages,
    "from_anyone": from_anyone,
    "training": partial(training, 5),
}


def record_of(result: Run) -> dict[str, Any]:
    """All of a run that must not depend on where it ran: everything but times."""
    return {
        "values": result.values,
        "events": [
            [
                [
                    *(e.kind, e.group, list(e.members), e.sequence, list(e.shape), e.dtype, e.n_elements),
                    *(e.bytes_sent, e.peer, e.region, str(e.where)),
                ]
                for e in result.trace.events
                if e.rank == rank
            ]
            for rank in range(result.ranks)
        ],
        "bytes": [result.trace.bytes_sent(rank) for rank in range(result.ranks)],
        "endings": list(result.endings),
    }


# ---- ways to end, and what a run leaves behind ----


class Unlucky(ValueError):
    """An error of the script's own."""


def rank_1_raises() -> None:
    dist.all_reduce(torch.ones(1))
    if me() == 1:
        raise Unlucky("lr is 0")
    dist.recv(torch.ones(1), 1)


def rank_0_raises_when_the_other_has_returned() -> None:
    if me() == 0:
        time.sleep(0.3)
        raise Unlucky("too late")


def catches_everything() -> None:
    if me() == 1:
        raise Unlucky("lr is 0")
    with contextlib.suppress(Exception):
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))


def different_shapes() -> None:
    dist.all_reduce(torch.ones(3 + me()))


def different_operations() -> None:
    dist.all_reduce(torch.ones(3)) if me() else dist.broadcast(torch.ones(3), src=0)


def different_roots() -> None:
    dist.broadcast(torch.ones(3), src=me())


def different_messages() -> None:
    dist.send(torch.ones(3), 1) if me() == 0 else dist.recv(torch.ones(4), 0)


def different_groups() -> None:
    dist.new_group([0] if me() else [0, 1])


def a_cycle() -> None:
    dist.recv(torch.ones(3), 1 - me())


def a_loop() -> None:
    if me() == 1:
        while True:
            pass
    dist.all_reduce(torch.ones(3))


def one_returns() -> None:
    if me() == 0:
        dist.barrier()


def exits() -> None:
    if me() == 1:
        sys.exit(3)
    dist.barrier()


def returns_what_cannot_travel() -> Any:
    return (each for each in [1]) if me() == 1 else None


WAYS_TO_END: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "raises": (rank_1_raises, {}),
    "raises late": (rank_0_raises_when_the_other_has_returned, {}),
    "catches": (catches_everything, {}),
    "shapes": (different_shapes, {}),
    "operations": (different_operations, {}),
    "roots": (different_roots, {}),
    "messages": (different_messages, {}),
    "groups": (different_groups, {}),
    "exits": (exits, {}),
    "cannot travel": (returns_what_cannot_travel, {}),
    "cycle": (a_cycle, {"timeout_s": 0.5}),
    "loop": (a_loop, {"timeout_s": 0.5}),
    "one returns": (one_returns, {"timeout_s": 0.5}),
    "other ranks": (me, {"ranks": 3}),
    "machine": (me, {"machine": "8xH100"}),
}

COUNTER = [0]


def changes_all_it_can(given: list[int]) -> tuple[Any, ...]:
    """What this rank finds, before it changes it for those that come after."""
    found = (
        torch.rand(1).item(),
        np.random.rand(),
        random.random(),
        str(torch.get_default_dtype()),
        os.environ["RANK"],
        os.environ["WORLD_SIZE"],
        COUNTER[0],
        len(given),
        dist.get_process_group_ranks(dist.new_group([0, 1])),
    )
    dist.irecv(torch.ones(1), 1 - me())  # left unfinished: it must not meet what a later run sends
    torch.set_default_dtype(torch.float64)
    os.environ["RANK"] = "99"
    COUNTER[0] += 1
    given.append(1)
    return found


def how_it_ended(fn: Callable[[], Any], options: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        run(fn, **options)
    except LessonsError as error:
        told: dict[str, Any] = {"error": [each.__name__ for each in type(error).__mro__], "text": str(error)}
        if isinstance(error, RankError):
            told |= {"rank": error.rank, "cause": type(error.cause).__name__}
        if isinstance(error, RunError):
            told["endings"] = list(error.run.endings)
            told["collectives"] = [len(error.run.trace.collectives(rank)) for rank in range(SIZE)]
        return told | {"seconds": time.perf_counter() - began}
    return {"error": [], "text": ""}


def main(folder: Path, parts: list[str]) -> None:
    told: dict[str, Any] = {"rank": int(os.environ["RANK"])}
    if "programs" in parts:
        results = {name: run(program, ranks=SIZE) for name, program in PROGRAMS.items()}
        told["programs"] = {name: record_of(result) for name, result in results.items()}
        told["transports"] = sorted({result.transport for result in results.values()})
        run(lambda: print(f"one line\nand another of {me()}"))
    if "endings" in parts:
        told["endings"] = {
            name: how_it_ended(fn, {"ranks": SIZE, **options}) for name, (fn, options) in WAYS_TO_END.items()
        }
        given: list[int] = []
        with warnings_off():
            told["found"] = [run(changes_all_it_can, given, seed=3).values for _ in range(3)]
        told["afterwards"] = run(messages).values
        told["left"] = [os.environ["RANK"], str(torch.get_default_dtype()), len(given), COUNTER[0]]
    if "two hosts" in parts:
        told["interface"] = network.interface()
        told["endings"] = {"raises": how_it_ended(rank_1_raises, {})}
    (folder / f"rank{told['rank']}.json").write_text(json.dumps(told))
    if "uncaught" in parts:
        run(rank_1_raises)


@contextlib.contextmanager
def warnings_off() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- one host ----


def torchrun_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def finished(*programs: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Exit status and output of programs that run side by side."""
    try:
        ended = [program.communicate(timeout=60) for program in programs]
        return [(program.returncode, *texts) for program, texts in zip(programs, ended, strict=True)]
    finally:
        for program in programs:
            program.terminate()  # and torchrun ends its processes
            program.wait(20)


def start(*line: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(line, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], tuple[int, str, str]]:
    """What every process of one launch told, and how the launch ended."""
    folder = tmp_path_factory.mktemp("torchrun")
    line = torchrun_line("--standalone", "--nproc-per-node", str(SIZE), "tests/test_torchrun.py")
    (end,) = finished(start(*line, str(folder), "programs", "endings", "uncaught"))
    files = sorted(folder.glob("rank*.json"))
    assert len(files) == SIZE, end[2]
    return [json.loads(file.read_text()) for file in files], end


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_records_are_those_of_threads_and_processes(launched: Any, name: str, transport: str) -> None:
    """Kinds, groups, members, order, shapes, bytes, regions and lines; values too; and on every process."""
    expected = json.loads(json.dumps(record_of(run(PROGRAMS[name], ranks=SIZE, transport=transport))))
    for told in launched[0]:
        found = told["programs"][name]
        assert found["events"] == expected["events"]
        assert found["bytes"] == expected["bytes"] and sum(found["bytes"]) > 0
        assert found["endings"] == expected["endings"]
        torch.testing.assert_close(torch.tensor(found["values"]), torch.tensor(expected["values"]))
        assert told["transports"] == ["torchrun"]


def test_prints_carry_the_number_of_the_rank(launched: Any) -> None:
    lines = launched[1][1].splitlines()
    for rank in range(SIZE):
        assert [line for line in lines if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] one line",
            f"[rank {rank}] and another of {rank}",
        ]


def test_every_process_raises_the_same_error(launched: Any) -> None:
    first, *others = [
        {name: {**ending, "seconds": 0} for name, ending in told["endings"].items()} for told in launched[0]
    ]
    assert all(other == first for other in others)
    assert max(ending.get("seconds", 0) for told in launched[0] for ending in told["endings"].values()) < 5


@pytest.mark.parametrize(
    "name, kind, message",
    [
        (
            "raises",
            "RankError",
            r"^rank 1 raised Unlucky: lr is 0\n .*test_torchrun\.py, line \d+, in rank_1_ra",
        ),
        ("raises late", "RankError", r"^rank 0 raised Unlucky: too late\n .*in rank_0_raises_when"),
        ("catches", "RankError", r"^rank 1 raised Unlucky: lr is 0"),
        (
            "shapes",
            "MismatchError",
            r"shape of collective #1 on world(?s:(?=.*float32\[3\])(?=.*float32\[4\]))",
        ),
        ("operations", "MismatchError", r"about the operation of collective #1 on world"),
        ("roots", "MismatchError", r"about the root of collective #1 on world"),
        ("messages", "MismatchError", r"another size(?s:.*)send\(float32\[3\]\)(?s:.*)recv\(float32\[4\]\)"),
        ("groups", "MismatchError", r"rank 0 creates the group of ranks 0 and 1\n(?s:.*)rank 1 creates the"),
        ("exits", "RankError", r"^rank 1 called sys.exit\(3\)"),
        ("cannot travel", "RankError", r"what the rank returned cannot travel .*generator"),
        (
            "cycle",
            "RunTimeoutError",
            r"rank 0 waits for rank 1 in recv(?s:.*)rank 1 waits for rank 0 in recv",
        ),
        (
            "loop",
            "RunTimeoutError",
            r"rank 1 was running\n .*line \d+, in a_loop(?s:.*)rank 0 waits for rank 1",
        ),
        ("one returns", "RunTimeoutError", r"rank 0 waits for rank 1 in barrier(?s:.*)rank 1 has returned"),
        ("other ranks", "RefusedError", r"^ranks=3, and torchrun started 2 processes(?s:.*)Try ranks=2"),
        (
            "machine",
            "RefusedError",
            r"^machine='8xH100' gives ranks a virtual clock.* run the script without",
        ),
    ],
)
def test_how_a_run_can_end(launched: Any, name: str, kind: str, message: str) -> None:
    for told in launched[0]:
        ending = told["endings"][name]
        assert kind in ending["error"]
        assert re.search(message, ending["text"]), ending["text"]


def test_the_error_is_also_of_the_script_s_own_type_and_carries_the_run(launched: Any) -> None:
    for told in launched[0]:
        ending = told["endings"]["raises"]
        assert "Unlucky" in ending["error"] and (ending["rank"], ending["cause"]) == (1, "Unlucky")
        assert ending["endings"] == ["stopped", "raised Unlucky"] and ending["collectives"] == [1, 1]


def test_every_run_starts_afresh(launched: Any) -> None:
    """Random states, default dtype, environment, script variables, arguments, and messages under way."""
    for told in launched[0]:
        first, *later = told["found"]
        assert later == [first, first]
        assert [found[4] for found in first] == ["0", "1"]
        assert first[0][:3] == first[1][:3] and first[0][6:8] == [0, 0]
        assert told["afterwards"] == told["programs"]["messages"]["values"]
        assert told["left"] == [str(told["rank"]), "torch.float32", 0, 0]


def test_an_uncaught_error_ends_the_launch_and_is_shown_once(launched: Any) -> None:
    status, _, errors = launched[1]
    assert status != 0
    assert errors.count("rank 1 raised Unlucky: lr is 0") == 1


def test_train_works_unchanged() -> None:
    arguments = [
        "--ranks",
        "2",
        "--tp",
        "2",
        "--steps",
        "3",
        "--layers",
        "2",
        "--heads",
        "2",
        "--width",
        "16",
    ]
    line = torchrun_line("--standalone", "--nproc-per-node", "2", "-m", "lessons_lib.train", *arguments)
    plain = [sys.executable, "-m", "lessons_lib.train", *arguments]
    ((status, out, errors), (_, expected, _)) = finished(start(*line), start(*plain))
    assert status == 0, errors
    for label in ("parameters", "loss", "bytes sent"):
        found = re.findall(rf"^{label} .*", out, re.MULTILINE)
        assert found == re.findall(rf"^{label} .*", expected, re.MULTILINE), "once, and the same"


# ---- two hosts ----


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces with a wire between them: their names and addresses."""
    if shutil.which("ip") is None:
        pytest.skip("no two hosts: the command ip is missing (Debian: apt install iproute2)")
    names = [f"host{end}-{os.getpid()}" for end in "AB"]
    wire = [f"wire{end}{os.getpid()}" for end in "AB"]
    addresses = ["10.231.77.1", "10.231.77.2"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", wire[0], "netns", names[0], "type", "veth", "peer", wire[1], "netns", names[1])
        except subprocess.CalledProcessError as refusal:
            pytest.skip(f"no two hosts: network namespaces cannot be made here: {refusal.stderr.strip()}")
        for name, end, address in zip(names, wire, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, wire, strict=True))
    finally:
        for name in names:  # and with them the wire
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_two_hosts(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    programs = []
    for number, (name, _) in enumerate(hosts):
        where = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "10.231.77.1"]
        line = torchrun_line(*where, "--master-port", "29517", "--nproc-per-node", "1")
        script = ["tests/test_torchrun.py", str(tmp_path), "programs", "two hosts"]
        programs.append(start("ip", "netns", "exec", name, *line, *script))
    ends = finished(*programs)
    assert [status for status, _, _ in ends] == [0, 0], ends
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(SIZE)]
    assert [each["interface"] for each in told] == [wire for _, wire in hosts]
    assert told[0]["programs"] == told[1]["programs"]
    for name, program in PROGRAMS.items():
        expected = json.loads(json.dumps(record_of(run(program, ranks=SIZE))))
        assert told[0]["programs"][name]["events"] == expected["events"]
        torch.testing.assert_close(
            torch.tensor(told[0]["programs"][name]["values"]), torch.tensor(expected["values"])
        )
    for each in told:
        assert each["endings"]["raises"]["text"].startswith("rank 1 raised Unlucky: lr is 0\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
