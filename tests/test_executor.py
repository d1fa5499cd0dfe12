"""Pipelines train: losses and gradients as serial for every schedule, and what is wrong is caught."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
from torch import nn

from lessons_lib import Mesh, run
from lessons_lib.errors import RefusedError, RunError
from lessons_lib.machines import Machine
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.pipeline_parallel import (
    IllegalScheduleError,
    Schedule,
    breadth_first,
    chimera,
    cut_batch,
    cut_model,
    dualpipe,
    dualpipe_v,
    execute,
    gpipe,
    interleaved,
    legal_next,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    tied_places,
    weight_versions,
    zb_h1,
    zb_h2,
    zb_v,
)
from lessons_lib.pipeline_parallel.messages import Messages
from lessons_lib.pipeline_parallel.program import Program, program_of
from lessons_lib.pipeline_parallel.stage_passes import Stage
from lessons_lib.pipeline_parallel.stashed import StashedWeights
from tests.executed_stages import assert_as_serial, chain, data, serially_trained, squares, trained

FREE = Machine("free")

# m below p, m = p, m = 3p + 1 or the nearest that is legal; the longer ones among the slow tests
FAST = [
    *(gpipe(1, 1), gpipe(3, 2), gpipe(2, 7), one_f_one_b(4, 2), one_f_one_b(3, 3)),
    *(interleaved(2, 2, 3), breadth_first(3, 2, 2), zb_h1(4, 2), zb_h1(2, 7), zb_h2(2, 3), zb_v(2, 3)),
    *(dualpipe(2, 4), dualpipe(4, 8), dualpipe_v(2, 7), chimera(2, 2), chimera(4, 4)),
]
SLOW = [
    *(gpipe(4, 4), gpipe(4, 13), one_f_one_b(2, 7), one_f_one_b(4, 13), one_f_one_b(1, 4)),
    *(interleaved(3, 9, 2), interleaved(4, 12, 2), interleaved(1, 4, 2)),
    *(breadth_first(2, 7, 2), breadth_first(4, 13, 2), breadth_first(4, 4, 3)),
    *(zb_h1(1, 2), zb_h1(4, 13), zb_h1(3, 3), zb_h1(3, 10), zb_h2(2, 7), zb_h2(4, 13), zb_h2(3, 5)),
    *(zb_v(1, 1), zb_v(3, 10), zb_v(4, 13), zb_v(4, 7), dualpipe_v(4, 13), dualpipe_v(1, 2)),
    *(dualpipe(4, 14), dualpipe(8, 16), dualpipe(8, 26), chimera(4, 12), chimera(8, 8)),
]


def named(schedule):
    return f"{schedule.name} p={schedule.n_ranks} m={schedule.n_microbatches}"


def n_rows_of(schedule):
    """So many that some micro-batches have one row more than others."""
    return 2 * schedule.n_microbatches + (schedule.n_microbatches > 1)


@pytest.mark.parametrize(
    "schedule", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=named
)
def test_losses_and_gradients_are_the_serial_ones(schedule):
    """S86: two steps of accumulation; every parameter, every rank; micro-batches are uneven."""
    n_rows = n_rows_of(schedule)
    values = run(trained, schedule, n_rows, 2, ranks=schedule.n_ranks).values
    assert_as_serial(serially_trained(schedule.n_stages, n_rows, 2), schedule, values)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [one_f_one_b(4, 8), zb_v(2, 5), chimera(2, 4)], ids=named)
def test_on_processes_and_for_twenty_steps(schedule):
    """S50: all handles of gloo's messages are awaited, no hang, no lost connection."""
    n_rows = n_rows_of(schedule)
    values = run(trained, schedule, n_rows, 20, ranks=schedule.n_ranks, transport="processes").values
    assert_as_serial(serially_trained(schedule.n_stages, n_rows, 20), schedule, values)


def random_schedule(seed):
    """Any legal order: stages anywhere, backwards in one or in two, forwards and backwards as they come."""
    draw = random.Random(seed)
    n_ranks, m, n_stages = 3, 3, 5
    homes = draw.sample([0, 1, 2, draw.randrange(3), draw.randrange(3)], n_stages)
    stages = [[stage for stage in range(n_stages) if homes[stage] == rank] for rank in range(n_ranks)]
    split = {(stage, k): draw.random() < 0.5 for stage in range(n_stages) for k in range(m)}
    rows = [[] for _ in range(n_ranks)]
    while True:
        able = [
            (rank, action)
            for rank, actions in enumerate(legal_next(rows, stages, m, kinds="FBIW"))
            for action in actions
            if action.kind == "F" or split[action[1:]] == (action.kind != "B")
        ]
        if not able:
            return Schedule.of(f"random {seed}", rows)
        rank, action = draw.choice(able)
        rows[rank].append(action)


@pytest.mark.parametrize("seed", range(6))
def test_any_legal_order_runs_to_its_end_and_is_right(seed):
    schedule = random_schedule(seed)
    values = run(trained, schedule, 7, 1, ranks=3).values
    assert_as_serial(serially_trained(5, 7, 1), schedule, values)


# ---- wrong versions


def caught():
    """What is wrong must show in a number."""
    return pytest.raises(AssertionError, match=r"relative error|has no gradient|the loss is")


# On two ranks: the second takes micro-batches in another order than the first sends them.
CROSSED = Schedule.of(
    "crossed",
    [
        [("F", 0, 0), ("F", 0, 1), ("F", 0, 2), ("B", 0, 1), ("B", 0, 2), ("B", 0, 0)],
        [("F", 1, 2), ("B", 1, 2), ("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)],
    ],
)


def reused(receive):
    """Every message of a shape into one buffer, as if nothing held the last one."""
    buffers = {}

    def into_the_same(self, result, like=None):
        x = receive(self, result, like)
        buffer = buffers.setdefault((id(self), x.shape), x)
        buffer.data.copy_(x.data)
        return buffer.data

    return into_the_same


WRONG = {
    "loss not divided (F1)": (gpipe(2, 4), None, {"n_tokens": 1}),
    "loss divided twice": (gpipe(2, 4), None, {"loss": lambda Y, T: squares(Y, T) / T.numel()}),
    "W dropped": (zb_h1(2, 4), (Stage, "weight_gradients", lambda self, k: self.waiting.pop(k)), {}),
    "a stale activation": (gpipe(2, 4), (Messages, "receive", reused(Messages.receive)), {}),
    "messages matched by order alone": (CROSSED, (Program, "tag", lambda self, result: 0), {}),
    "copies not joined": (
        chimera(2, 4),
        ("lessons_lib.pipeline_parallel.joined.Joined", "_exchange", lambda self, own, ranks: own),
        {},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_version_is_caught(name):
    schedule, patched, options = WRONG[name]
    n_rows = 2 * schedule.n_microbatches  # even, so that all messages of a border have one shape
    expected = serially_trained(schedule.n_stages, n_rows, 1)

    def values(**options):
        return run(lambda: trained(schedule, n_rows, 1, **options), ranks=2).values

    assert_as_serial(expected, schedule, values())  # as it is, it is right
    with caught():
        if patched is None:
            assert_as_serial(expected, schedule, values(**options))
        else:
            owner, method, wrong = patched
            target = (
                f"{owner}.{method}"
                if isinstance(owner, str)
                else f"{owner.__module__}.{owner.__name__}.{method}"
            )
            with mock.patch(target, wrong):
                assert_as_serial(expected, schedule, values())


def test_an_earlier_gradient_wiped_is_caught():
    """S86: the loss looks fine; only the sum over both steps tells."""
    schedule = one_f_one_b(2, 3)

    def wiped():
        group = Mesh(pp=2)["pp"]
        stages = {group.rank: chain(2)[group.rank]}
        for step in range(2):
            for p in stages[group.rank].parameters():
                p.grad = None  # what a setup that starts anew does
            done = execute(schedule, stages, cut_batch(*data(2, 7, step), 3), squares, group)
        return [done.loss], {f"{group.rank}.{n}": p.grad for n, p in stages[group.rank].named_parameters()}

    losses, whole = serially_trained(2, 7, 2)
    values = run(wiped, ranks=2).values
    assert abs(values[0][0][0] - losses[1]) < 1e-12
    with caught():
        assert_as_serial((losses[1:], whole), schedule, values)


# ---- the GPT: tied, of uneven lengths, one loss


TIED = GPTConfig(L=3, H=2, D=8, S=8, V=11, tied=True)


def gpt(config=TIED):
    return GPT(config, seed=3).double()


def tokens(*lengths, n_rows=2):
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(11, (2, n_rows, S), generator=generator)) for S in lengths]


def serial_gpt(steps, config=TIED):
    """The last loss and the gradients; each step's loss is the mean over all of its tokens."""
    model = gpt(config)
    for step in steps:
        n = sum(targets.numel() for _, targets in step)
        loss = sum(model.loss_sum(*pair) for pair in step) / n
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def trained_gpt(schedule, steps, config=TIED, group=None, tie=tied_places, **options):
    group = group or Mesh(pp=schedule.n_ranks)["pp"]
    model = gpt(config)
    every = cut_model(model, schedule.n_stages, costs=[1] * (config.L + 2))
    stages = {number: every[number] for number in schedule.stages[group.rank]}
    for step in steps:
        done = execute(schedule, stages, step, model.cross_entropy, group, tied=tie(every), **options)
    # a tied weight is named after either of its places
    named = [pair for stage in stages.values() for pair in stage.named_parameters(remove_duplicate=False)]
    return done, {name: p.grad for name, p in named}


def assert_gpt(expected, values):
    loss, gradients = expected
    gradients = gradients | ({"head.weight": gradients["embedding.weight"]} if TIED.tied else {})
    seen = set()
    for rank, (done, own) in enumerate(values):
        assert done.loss == values[0][0].loss == pytest.approx(loss, rel=1e-12)
        for name, gradient in own.items():
            error = ((gradient - gradients[name]).norm() / gradients[name].norm()).item()
            assert error < 1e-10, f"rank {rank}: {name} has a relative error of {error:.0e}"
        seen |= own.keys()
    assert seen == gradients.keys()


@pytest.mark.parametrize(
    "schedule",
    [
        *(gpipe(1, 2), zb_v(2, 4), chimera(2, 4)),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (one_f_one_b(4, 4), zb_h1(2, 4), dualpipe(2, 4))
        ),
    ],
    ids=named,
)
def test_a_tied_embedding_gets_the_gradient_of_both_its_uses_once(schedule):
    """Also on one stage, where one graph uses it twice, and on copies in both directions."""
    steps = [tokens(*[5] * schedule.n_microbatches), tokens(*[6] * schedule.n_microbatches)]
    values = run(trained_gpt, schedule, steps, ranks=schedule.n_ranks).values
    assert_gpt(serial_gpt(steps), values)


def test_a_tied_embedding_that_is_not_joined_is_caught():
    steps = [tokens(5, 5)]
    values = run(lambda: trained_gpt(gpipe(2, 2), steps, tie=lambda stages: []), ranks=2).values
    with caught():
        assert_gpt(serial_gpt(steps), values)


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 4), zb_h1(2, 4), dualpipe_v(2, 4)], ids=named)
def test_every_loss_uses_its_own_labels_where_lengths_vary(schedule):
    """S91: micro-batches of lengths 4, 6, 8, 5. S86: a second step, of other lengths."""
    steps = [tokens(4, 6, 8, 5), tokens(6, 6, 4, 8)]
    values = run(trained_gpt, schedule, steps, ranks=2).values
    assert_gpt(serial_gpt(steps), values)


def test_accumulation_over_two_lengths():
    """S86: sequence lengths 8, then 6, on two ranks."""
    steps = [tokens(8, 8), tokens(6, 6)]
    assert_gpt(serial_gpt(steps), run(trained_gpt, one_f_one_b(2, 2), steps, ranks=2).values)


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("schedule", [one_f_one_b(2, 2), zb_v(2, 3)], ids=named)
def test_one_loss_on_every_rank_in_a_grid(axes, schedule):
    """S93: pipeline inside or outside of data parallel, the last stage on the last rank or on the first."""
    batches = [tokens(*[5] * schedule.n_microbatches), tokens(*[7] * schedule.n_microbatches)]
    n_tokens = sum(targets.numel() for batch in batches for _, targets in batch)

    def step():
        mesh = Mesh(**axes)
        mine = [batches[mesh.coordinate["dp"]]]
        done, gradients = trained_gpt(schedule, mine, group=mesh["pp"], n_tokens=n_tokens)
        loss = mesh["dp"].all_reduce(torch.tensor(done.loss, dtype=torch.float64)).item()
        has_loss = mesh["pp"].rank == program_of(schedule).homes[-1][0]
        assert bool(done.losses) == has_loss and len(done.losses) in (0, schedule.n_microbatches)
        return loss, {name: mesh["dp"].all_reduce(g) for name, g in gradients.items()}

    expected, whole = serial_gpt([[*batches[0], *batches[1]]])
    whole["head.weight"] = whole["embedding.weight"]
    for loss, gradients in run(step, ranks=4).values:
        assert loss == pytest.approx(expected, rel=1e-12)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, whole[name], rtol=1e-9, atol=1e-12), name


def test_targets_that_are_none_do_not_count():
    step = tokens(5, 5, 5)
    for _, targets in step:
        targets[0, 1:4] = -100
    model = gpt()
    X, T = (torch.cat(both) for both in zip(*step, strict=True))
    model.loss(X, T).backward()
    values = run(trained_gpt, gpipe(2, 3), [step], ranks=2).values
    assert_gpt((model.loss(X, T).item(), {name: p.grad for name, p in model.named_parameters()}), values)


# ---- micro-batches of one row, and stages that break the contract


class Squeezing(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        self.linear, self.wrong = nn.Linear(10, 10), wrong

    def forward(self, x):
        y = self.linear(x).unsqueeze(1)
        return y.squeeze() if self.wrong else y.squeeze(1)


def squeezed(wrong):
    group = Mesh(pp=2)["pp"]
    stages = {group.rank: Squeezing(wrong and group.rank == 1)}
    batch = cut_batch(torch.ones(4, 10), torch.zeros(4, 10), 4)
    return execute(gpipe(2, 4), stages, batch, squares, group).loss


def test_a_micro_batch_of_one_row_keeps_its_dimension():
    """S73"""
    assert run(squeezed, False, ranks=2).values[0] > 0
    message = (
        r"stage 1 gave shape \[10\] for micro-batch 0, which has 1 row; expected \[1, 10\]: .*y.squeeze\(1\)"
    )
    with pytest.raises(RefusedError, match=message):
        run(squeezed, True, ranks=2)


class Stage0(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.linear, self.output, self.calls = nn.Linear(3, 3), output, 0

    def forward(self, x):
        self.calls += 1
        return self.output(self.linear(x), self.calls)


@pytest.mark.parametrize(
    "output, message",
    [
        (
            lambda y, calls: (y, y),
            "stage 0 gave tuple for micro-batch 0: a stage takes one tensor and gives one",
        ),
        (
            lambda y, calls: y.sum(),
            r"stage 0 gave shape \[\] for micro-batch 0, which has 2 rows; expected \[2\]",
        ),
        (
            lambda y, calls: y[:, :calls],
            r"stage 0 gave float32\[2, 2\] for micro-batch 1 and float32\[2, 1\] for another",
        ),
        (lambda y, calls: y.to(torch.complex64), r"stage 0 gave complex64\[2, 3\], which cannot go"),
    ],
)
def test_an_output_that_cannot_go_on_is_refused(output, message):
    def step():
        group = Mesh(pp=2)["pp"]
        batch = cut_batch(torch.ones(4, 3), torch.zeros(4, 3), 2)
        execute(gpipe(2, 2), {group.rank: Stage0(output)}, batch, squares, group)

    with pytest.raises(RefusedError, match=message):
        run(step, ranks=2)


# ---- choices that are refused, before anything is sent


GPIPE = gpipe(2, 2)


def attempt(schedule=GPIPE, n_microbatches=2, stages=None, ranks=2, batch=None, **options):
    def step():
        group = Mesh(pp=ranks)["pp"]
        mine = {s: nn.Linear(3, 3) for s in ([group.rank] if stages is None else stages)}
        cut = batch or cut_batch(torch.ones(4, 3), torch.zeros(4, 3), n_microbatches)
        execute(schedule, mine, cut, squares, group, **options)

    run(step, ranks=ranks)


ILLEGAL = Schedule.of("mine", [[("F", 0, 0), ("B", 0, 0)], [("B", 1, 0), ("F", 1, 0)]])
REFUSED = [
    (
        {"ranks": 3},
        "<GPipe: p=2, m=2, 8 actions> is for 2 ranks and the group has 3: .*p=3, or the mesh with pp=2",
    ),
    ({"n_microbatches": 3}, "is for 2 micro-batches and 3 were given: cut the batch into 2, or .* m=3"),
    ({"stages": []}, r"rank 0 was given the stages \[\], and GPipe gives it \[0\]"),
    ({"stages": [0, 1]}, r"rank 0 was given the stages \[0, 1\], and GPipe gives it \[0\]"),
    ({"n_tokens": 0}, "n_tokens=0: the loss is divided by the number of all targets"),
    (
        {"batch": [(torch.ones(2, 3), torch.ones(1, 3))] * 2},
        r"micro-batch 0 has .*\[2, 3\] and .*\[1, 3\]: every",
    ),
    ({"schedule": pipedream(2, 2)}, "PipeDream updates weights on the way .U., and no optimizer .* stage 0"),
    (
        {"schedule": pipedream(2, 2), "tied": [[(0, "weight"), (1, "weight")]]},
        "would become different models",
    ),
    ({"tied": [[(0, "weight"), (2, "weight")]]}, "tied names stage 2, and there are stages 0 to 1"),
    ({"tied": [[(0, "wieght"), (1, "weight")]]}, "tied names 'wieght' on stage 0, whose .* weight, bias"),
    (
        {"schedule": ILLEGAL, "n_microbatches": 1},
        "Schedule 'mine' is not legal: rank 1, action 0, 1B0: it waits",
    ),
]


@pytest.mark.parametrize("given, message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_cannot_work_is_refused_before_anything_is_sent(given, message):
    with pytest.raises(RefusedError, match=message) as caught:
        attempt(**given)
    assert isinstance(caught.value, RunError)
    assert [event for event in caught.value.run.trace.events if event.kind != "new_group"] == []
    if given.get("schedule") is ILLEGAL:
        assert isinstance(caught.value, IllegalScheduleError)


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(
        RefusedError, match="3 rows of inputs and 3 of targets cannot be cut into 4 micro-batches"
    ):
        cut_batch(torch.ones(3, 1), torch.ones(3), 4)


# ---- weights that change on the way


def asynchronously(schedule, microbatches, lr=0.05):
    """The weights of this rank after all updates."""
    group = Mesh(pp=schedule.n_ranks)["pp"]
    stages = {group.rank: chain(schedule.n_stages)[group.rank]}
    optimizers = {number: torch.optim.SGD(stage.parameters(), lr) for number, stage in stages.items()}
    done = execute(schedule, stages, microbatches, squares, group, optimizers=optimizers)
    return [done.loss], {
        f"{number}.{name}": p.detach()
        for number, stage in stages.items()
        for name, p in stage.named_parameters()
    }


def by_hand(schedule, microbatches, used, lr=0.05):
    """W(t+1) = W(t) - lr x the gradient at the versions that each stage used, updates one after the other."""
    stages = chain(schedule.n_stages)
    versions = [[{name: p.detach() for name, p in stage.named_parameters()}] for stage in stages]
    for together in program_of(schedule).together:
        n = sum(microbatches[k][1].numel() for k in together)
        sums = [dict.fromkeys(own[-1], 0) for own in versions]
        for k in together:
            leaves = [
                {name: w.clone().requires_grad_() for name, w in own[used[stage][k]].items()}
                for stage, own in enumerate(versions)
            ]
            Y, T = microbatches[k]
            for stage, own in zip(stages, leaves, strict=True):
                Y = torch.func.functional_call(stage, own, (Y,))
            (squares(Y, T) / n).backward()
            for total, own in zip(sums, leaves, strict=True):
                total |= {name: total[name] + leaf.grad for name, leaf in own.items()}
        for own, total in zip(versions, sums, strict=True):
            own.append({name: w - lr * total[name] for name, w in own[-1].items()})
    return {f"{stage}.{name}": w for stage, own in enumerate(versions) for name, w in own[-1].items()}


ASYNCHRONOUS = [
    pipedream(1, 3),
    pipedream(3, 8),
    pipedream(4, 2),
    pipedream_2bw(2, 3, 3),
    pipedream_2bw(3, 3, 4),
]


def some_microbatches(schedule):
    return [data(schedule.n_stages, 1 + k % 3, k) for k in range(schedule.n_microbatches)]


@pytest.mark.parametrize("schedule", ASYNCHRONOUS, ids=named)
def test_every_micro_batch_meets_the_version_of_the_weights_that_the_method_states(schedule):
    """PipeDream: the newest, so gradients on rank r are p-1-r updates old. 2BW: one update old, on all."""
    microbatches, p = some_microbatches(schedule), schedule.n_ranks
    m = schedule.n_microbatches // len(program_of(schedule).together)
    if schedule.versions:
        used = [[max(k // m - 1, 0) for k in range(schedule.n_microbatches)]] * p
    else:
        used = [[max(k - (p - 1 - rank), 0) for k in range(schedule.n_microbatches)] for rank in range(p)]
    assert used == [list(rank.used) for rank in weight_versions(schedule)]
    expected = by_hand(schedule, microbatches, used)
    for found in run(asynchronously, schedule, microbatches, ranks=p).values:
        assert_weights(expected, found)


def assert_weights(expected, found):
    for name, weight in found[1].items():
        error = ((weight - expected[name]).norm() / expected[name].norm()).item()
        assert error < 1e-12, f"{name} has a relative error of {error:.0e}"


def test_a_backward_with_other_weights_than_its_forward_is_caught():
    """No stash: all use the newest weights, in place. autograd refuses, or the numbers are others."""
    schedule = pipedream(3, 8)
    microbatches = some_microbatches(schedule)
    expected = by_hand(schedule, microbatches, [list(rank.used) for rank in weight_versions(schedule)])

    def in_place(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def newest(self, k, x):
        return self.module(x)

    with (
        mock.patch.object(StashedWeights, "update", in_place),
        mock.patch.object(StashedWeights, "run", newest),
        mock.patch.object(StashedWeights, "made"),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        run(asynchronously, schedule, microbatches, ranks=3)
    synchronous = [[0] * 8 if rank == 0 else own.used for rank, own in enumerate(weight_versions(schedule))]
    with caught():
        for found in run(asynchronously, schedule, microbatches, ranks=3).values:
            assert_weights(by_hand(schedule, microbatches, synchronous), found)
    assert expected.keys()


@pytest.mark.parametrize("schedule", ASYNCHRONOUS, ids=named)
def test_as_many_versions_are_kept_as_stated(schedule):
    most = {}

    def counted(method):
        def do_and_count(self, *given):
            result = method(self, *given)
            every = [*self.versions.values(), dict(self.module.named_parameters())]
            memory = {own["linear.weight"].untyped_storage().data_ptr() for own in every}
            most[id(self)] = max(most.get(id(self), 0), len(memory))
            return result

        return do_and_count

    with (
        mock.patch.object(StashedWeights, "run", counted(StashedWeights.run)),
        mock.patch.object(StashedWeights, "update", counted(StashedWeights.update)),
    ):
        run(asynchronously, schedule, some_microbatches(schedule), ranks=schedule.n_ranks)
    assert sorted(most.values()) == sorted(rank.kept for rank in weight_versions(schedule))
