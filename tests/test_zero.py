"""ZeRO at every stage: the serial steps, the bytes and the memory of the formulas; and wrong versions."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lessons_lib import Mesh, compute, plan, region, run
from lessons_lib.cost.measured import FREE, live_bytes
from lessons_lib.data_parallel import (
    STAGES,
    LossScaler,
    Zero,
    clip,
    global_norm,
    rows_of_rank,
    stored,
    total,
    traffic,
    units_of,
    zero,
)
from lessons_lib.data_parallel.stages import COPY, CUT, TERMS, Stage, buffers, padded, send
from lessons_lib.data_parallel.unit import Unit
from lessons_lib.errors import MismatchError, RefusedError
from lessons_lib.machines import Link, Machine
from lessons_lib.models.corpus import batch as text
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.models.recompute import recompute
from tests.serial_training import (
    OPTIMIZERS,
    STEPS,
    Net,
    Sometimes,
    assert_same,
    batch,
    fast_or_slow,
    serially_trained,
    trained_by_zero,
)

FLOAT64_BYTES = 8
RANKS = (2, 3, 4, 8)
untied = partial(Net, tied=False)

EACH = [(stage,) for stage in STAGES]
ALL = list(product(STAGES, OPTIMIZERS, RANKS))
FEW = [
    (0, "sgd", 3),
    (0, "adamw", 2),
    (1, "momentum", 4),
    (1, "adam", 3),
    (2, "adamw", 8),
    (2, "sgd", 3),
    (3, "adam", 8),
    (3, "momentum", 2),
]


def n_padded(model, n_ranks):
    """The parameters with the padding of each unit, said once more: a unit is a module of the list."""
    seen, n = set(), 0
    for unit in units_of(model):
        mine = [p for p in unit.parameters() if p not in seen]
        seen.update(mine)
        n += -(-sum(p.numel() for p in mine) // n_ranks) * n_ranks
    return n


# ---- the serial steps


@pytest.mark.parametrize("stage, optimizer, ranks", fast_or_slow(ALL, FEW))
def test_the_steps_are_the_serial_ones(stage, optimizer, ranks):
    make = OPTIMIZERS[optimizer]
    assert_same(serially_trained(make), run(trained_by_zero, stage, make, ranks=ranks).values)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_processes_take_them_too(stage):
    make = OPTIMIZERS["adam"]
    values = run(trained_by_zero, stage, make, ranks=3, transport="processes").values
    assert_same(serially_trained(make), values)


@pytest.mark.parametrize("stage", fast_or_slow(EACH, [(1,), (3,)]))
def test_a_rank_without_tokens_takes_part(stage):
    """Two rows on three ranks: the last runs its step on an empty batch."""
    make = OPTIMIZERS["momentum"]
    values = run(partial(trained_by_zero, steps=3, n_rows=2), stage, make, ranks=3).values
    assert_same(serially_trained(make, steps=3, n_rows=2), values)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_where_parameters_are_copied_a_rank_may_leave_out_backward(stage):
    def step():
        group, model = Mesh(dp=3)["dp"], Net()
        sharded = Zero(model, stage, group, OPTIMIZERS["sgd"])
        if group.rank != 1:
            (model.losses(*batch(0)[:, group.rank :: 2]).sum() / 39).backward()
        sharded.reduce()
        return sharded.whole_gradients()

    model = Net()
    rows = torch.cat([batch(0)[:, 0::2], batch(0)[:, 2::2]], dim=1)
    (model.losses(*rows).sum() / 39).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert_same(expected, run(step, ranks=3).values)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_layer_that_some_ranks_do_not_use(stage):
    """All reduce in one order all the same; twice, since the first round ends with the second backward."""

    def step():
        group = Mesh(dp=2)["dp"]
        model = Sometimes(used=group.rank == 0)
        sharded = Zero(model, stage, group, OPTIMIZERS["sgd"])
        for x in (torch.ones(1, 3), torch.full((2, 3), -1.0)):
            model(x.double()).sum().backward()
        sharded.reduce()
        return sharded.whole_gradients()

    expected = {}
    for used in (True, False):
        model = Sometimes(used)
        for x in (torch.ones(1, 3), torch.full((2, 3), -1.0)):
            model(x.double()).sum().backward()
        for name, p in model.named_parameters():
            expected[name] = expected.get(name, 0) + (0 if p.grad is None else p.grad)
    assert_same(expected, run(step, ranks=2).values)


# ---- bytes


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_are_two_and_three_times_the_parameters(stage, ranks):
    """2, 2, 2 and 3 times (p-1)/p of the padded parameters: in integers, on every rank, as the ring sends."""
    result = run(partial(trained_by_zero, steps=2, make=untied), stage, OPTIMIZERS["sgd"], ranks=ranks)
    n = n_padded(untied(), ranks)
    times = 3 if stage == 3 else 2
    assert n * times * (ranks - 1) % ranks == 0
    assert sum(traffic(stage, n, ranks).values()) == n * times * (ranks - 1) // ranks
    for rank in range(ranks):
        sent = result.trace.bytes_sent(rank, "step")
        assert sent == 2 * FLOAT64_BYTES * n * times * (ranks - 1) // ranks


def test_a_tied_unit_is_gathered_once_more():
    """The head uses the embedding's weight, which has been freed in between; padded, 56 elements."""
    sent = [
        run(partial(trained_by_zero, steps=1, make=make), 3, OPTIMIZERS["sgd"], ranks=4).trace.bytes_sent(
            0, "step"
        )
        for make in (Net, untied)
    ]
    tied, ranks = padded(11 * 5, 4), 4
    as_if_untied = 3 * n_padded(untied(), ranks)
    assert sent[1] == FLOAT64_BYTES * as_if_untied * 3 // 4
    assert sent[0] == sent[1] - FLOAT64_BYTES * (3 - 1) * tied * 3 // 4 + 0


def in_microbatches(stage, n_microbatches=3, make=untied):
    def step():
        group, model = Mesh(dp=2)["dp"], make()
        sharded = Zero(model, stage, group, OPTIMIZERS["sgd"])
        tokens, targets = (rows_of_rank(x, group) for x in batch(0, 12))
        pieces = list(zip(tokens.chunk(n_microbatches), targets.chunk(n_microbatches), strict=True))
        with region("step"):
            for piece in pieces[:-1]:
                with sharded.accumulating():
                    (model.losses(*piece).sum() / 36).backward()
            (model.losses(*pieces[-1]).sum() / 36).backward()
            sharded.reduce()
        gradients = sharded.whole_gradients()
        with region("step"):
            sharded.update()
        return gradients

    return run(step, ranks=2)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation(stage):
    """Stages 0 and 1 have room to wait for the last micro-batch; 2 and 3 pay for each of them."""
    result, model = in_microbatches(stage), untied()
    model.losses(*batch(0, 12)).mean().backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, result.values)
    expected = sum(traffic(stage, n_padded(model, 2), 2, n_microbatches=3).values())
    assert [result.trace.bytes_sent(rank, "step") for rank in range(2)] == [FLOAT64_BYTES * expected] * 2


def test_reducing_early_is_right_and_dearer():
    """Without ``accumulating`` stage 1 reduces with every backward: the gradients are the same."""

    class Eager(Zero):
        def accumulating(self):
            return region("eager")

    def gradients(kind):
        return partial(trained_by_zero, steps=1, kind=kind)

    make = OPTIMIZERS["sgd"]
    lazy, eager = (run(gradients(kind), 1, make, ranks=2) for kind in (Zero, Eager))
    assert_same(lazy.values[0], eager.values, tolerance=0)


# ---- memory: a stack of equal layers, whose peak can be said to the element

N_LAYERS, WIDTH = 5, 12
LAYER = WIDTH * WIDTH


def in_phases(stage, make_optimizer, kind=Zero, n_layers=N_LAYERS):
    """Two steps; of the second, phase 1 is before it, 2 forward, 3 backward, 4 the update."""

    def body():
        group = Mesh(dp=torch.distributed.get_world_size())["dp"]
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n_layers))
        model = nn.Sequential(*layers).double()
        sharded = kind(model, stage, group, make_optimizer)
        x = torch.ones(1, WIDTH, dtype=torch.float64)
        model(x).sum().backward()
        sharded.step()
        sharded.zero_grad()
        compute(2.0)
        y = model(x).sum()
        compute(1.0)
        y.backward()
        del y
        sharded.reduce()
        held = sharded.stored_bytes()
        compute(1.0)
        sharded.update()
        compute(1.0)
        return held

    return body


ADAM = partial(Adam, lr=0.1, foreach=False)
STREAM = 2 * WIDTH + 2  # what backward works with besides: two rows, and two single numbers


def peaks(body, ranks):
    """Elements, per phase, above what is held before the step; and what was stored at the end of backward."""
    result = run(body, ranks=ranks, record="memory", machine=FREE)
    curve = result.trace.live_bytes[0]
    before = live_bytes(curve, 1)[-1]
    return [(max(live_bytes(curve, at)) - before) / FLOAT64_BYTES for at in (2, 3, 4)], result.values[0]


def allowed(stage, ranks):
    """The most that backward may hold besides parameters and state, in elements: the stage's gradients, less
    those of units that are still on their way, and the named buffers."""
    gradients = stored(stage, N_LAYERS * LAYER, ranks)["gradients"]
    row = STAGES[stage]
    on_their_way = {(COPY, COPY): 0, (COPY, CUT): 1, (CUT, CUT): 2}[row.parameters, row.gradients]
    return gradients - on_their_way * LAYER // ranks + sum(buffers(stage, LAYER, LAYER).values())


def assert_memory(body, stage, ranks):
    (forward, backward, _), held = peaks(body, ranks)
    n = N_LAYERS * LAYER
    expected = stored(stage, n, ranks)
    assert held["parameters"] == 8 * expected["parameters"], "parameters are not as the stage says"
    assert held["gradients"] == 8 * expected["gradients"], "gradients are not as the stage says"
    counters = 4 * N_LAYERS  # Adam's step
    assert held["state"] == 8 * 2 * expected["state"] + counters, "state is not as the stage says"
    gathered = 2 * LAYER if STAGES[stage].parameters == CUT else 0
    assert forward - gathered <= (N_LAYERS + 1) * WIDTH + 2, "forward holds more than it may"
    assert 0 <= backward - allowed(stage, ranks) <= STREAM, "backward holds more than it may"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_peak_is_the_formula_and_its_buffers(stage, ranks):
    assert_memory(in_phases(stage, ADAM), stage, ranks)


@pytest.mark.parametrize("stage", STAGES)
def test_the_update_works_with_two_pieces_more(stage):
    """Adam's square root and quotient, of one unit at a time."""
    (_, _, update), _ = peaks(in_phases(stage, ADAM), 4)
    row = stored(stage, LAYER, 4)
    assert update == N_LAYERS * row["gradients"] + 2 * row["state"]


def test_more_layers_need_no_more_buffers():
    """S82. On a small model buffers are most of it: stage 3 holds more than stage 1, and less of a layer."""

    def most(n_layers):
        return [max(peaks(in_phases(stage, ADAM, n_layers=n_layers), 4)[0][:2]) / LAYER for stage in (1, 3)]

    tiny, small, large = map(most, (2, 4, 14))
    assert tiny[1] > tiny[0] and large[1] < large[0]
    per_layer = [(more - less) / 10 for less, more in zip(small, large, strict=True)]
    assert per_layer[0] == pytest.approx(1, abs=0.1) and per_layer[1] == pytest.approx(1 / 4)


def test_parameters_keep_their_shape_and_show_nan():
    """S82: a rank counts all parameters, and stores its share of them."""

    def step():
        model = untied()
        sharded = Zero(model, 3, Mesh(dp=4)["dp"], OPTIMIZERS["sgd"])
        names = {name: tuple(p.shape) for name, p in model.named_parameters()}
        return (
            sum(p.numel() for p in model.parameters()),
            sum(unit.held.numel() for unit in sharded.units),
            names,
            all(p.isnan().all() for p in model.parameters()),
            sum(p.untyped_storage().nbytes() for p in model.parameters()),
        )

    n = sum(p.numel() for p in untied().parameters())
    shapes = {name: tuple(p.shape) for name, p in untied().named_parameters()}
    for counted, held, names, is_nan, _ in run(step, ranks=4).values:
        assert (counted, held, names, is_nan) == (n, n_padded(untied(), 4) // 4, shapes, True)


def test_frozen_parameters_stay_whole():
    def step():
        model = untied()
        model.embedding.weight.requires_grad_(False)
        sharded = Zero(model, 3, Mesh(dp=2)["dp"], OPTIMIZERS["sgd"])
        model.losses(*batch(0)).sum().backward()
        sharded.step()
        return torch.equal(model.embedding.weight, untied().embedding.weight), len(sharded.units)

    assert run(step, ranks=2).values == [(True, 4)] * 2


# ---- prefetch and overlap, on the virtual clock

MACHINE = Machine("slow", flops_per_s=1e6, in_node=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e6))


class WithoutPrefetch(Zero):
    def _gather(self, needs, ahead):
        super()._gather(needs, ahead=-1)


def timed(kind, stage):
    def step():
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_LAYERS))
        model = nn.Sequential(*layers).double()
        sharded = kind(model, stage, Mesh(dp=4)["dp"], OPTIMIZERS["sgd"])
        y = model(torch.ones(8, WIDTH, dtype=torch.float64)).sum()
        y.backward()
        sharded.step()

    return run(step, ranks=4, machine=MACHINE).trace


def test_prefetch_hides_the_gathers_behind_computing():
    gather_s = MACHINE.collective_s("all_gather", LAYER * FLOAT64_BYTES, (0, 1, 2, 3))
    product_s = 2 * LAYER * 8 / 1e6
    assert gather_s < product_s, "a gather fits behind a layer's forward"
    compute_s = (3 * N_LAYERS - 1) * product_s
    plain = timed(WithoutPrefetch, 3)
    # Without: every gather stands alone, forward and back, behind the reduction that was sent before it.
    assert plain.timeline.makespan == pytest.approx(compute_s + 3 * N_LAYERS * gather_s, rel=1e-12)
    # With: the first of forward and the first of backward, and the last reduction.
    assert timed(Zero, 3).timeline.makespan == pytest.approx(compute_s + 3 * gather_s, rel=1e-12)
    assert timed(Zero, 3).bytes_sent(0) == plain.bytes_sent(0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_reductions_are_hidden_behind_backward(stage):
    """All but the last; what brings the updated parameters back is not."""
    product_s = 2 * LAYER * 8 / 1e6
    kind, times = {0: ("all_reduce", 0), 1: ("reduce_scatter", 1), 2: ("reduce_scatter", 1)}[stage]
    each_s = MACHINE.collective_s(kind, LAYER * FLOAT64_BYTES, (0, 1, 2, 3))
    gather_s = MACHINE.collective_s("all_gather", LAYER * FLOAT64_BYTES, (0, 1, 2, 3))
    expected = (3 * N_LAYERS - 1) * product_s + each_s + times * N_LAYERS * gather_s
    assert timed(Zero, stage).timeline.makespan == pytest.approx(expected, rel=1e-12)


# ---- wrong versions


class Replicated(Zero):
    """Says that it shards, and does not: F2."""

    def __init__(self, model, stage, *rest):
        super().__init__(model, 0, *rest)


class GathersGradients(Unit):
    """A sharded sum of the gradients, which is then gathered: the bytes of stage 1, and nothing is saved."""

    def finish_reducing(self):
        if self._reducing is not None:
            self._reducing.wait()
            piece = self.gradient.new_empty(self.n_padded // self.group.size)
            work = send(TERMS, CUT, self.taken, piece, self.group)
            work.wait()
            send(CUT, COPY, piece, self._arriving, self.group).wait()
            self._reducing = self.taken
        self._reducing, reducing = None, self._reducing
        if reducing is not None:
            self.reduced, self.gradient, self._arriving = self._arriving, None, None

    def start_reducing(self):
        self.expect_all()
        self.taken, self._arriving = self.gradient, torch.empty_like(self.gradient)
        self._reducing = Done()


class Done:
    def wait(self):
        return True


class NeverFrees(Unit):
    """Parameters are gathered again and again, and their memory is never given back."""

    def free(self):
        if not self.is_cut or not self.is_gathered:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.is_gathered = self.in_backward = False


class AveragesAgain(Unit):
    def finish_reducing(self):
        if self._reducing is not None:
            self._reducing.wait()
            self._arriving /= self.group.size
        super().finish_reducing()


class KeepsTheTerms(Unit):
    """The optimizer gets this rank's own terms, not the sum."""

    def start_reducing(self):
        mine = self.gradient.clone()
        super().start_reducing()
        self._reducing.wait()
        self._arriving.copy_(mine[self.piece] if len(self._arriving) < len(mine) else mine)


class ForgetsToSpread(Unit):
    def spread(self):
        return None


@pytest.mark.parametrize("stage", [1, 3])
def test_replicated_instead_of_sharded(stage):
    """The numbers are right. What is held is not, and what backward needs; at stage 3 the bytes neither."""
    make = OPTIMIZERS["adam"]
    values = run(partial(trained_by_zero, kind=Replicated), stage, make, ranks=3).values
    assert_same(serially_trained(make), values)
    with pytest.raises(AssertionError, match="not as the stage says"):
        assert_memory(in_phases(stage, ADAM, kind=Replicated), stage, 4)


def test_gradients_gathered_where_parameters_belong(monkeypatch):
    """Numbers right, bytes right, memory red."""
    make = OPTIMIZERS["adam"]
    monkeypatch.setattr(zero, "Unit", GathersGradients)
    result = run(partial(trained_by_zero, kind=Replicated, steps=2, make=untied), 1, make, ranks=4)
    assert_same(serially_trained(make, steps=2, make=untied), result.values)
    right = sum(traffic(1, n_padded(untied(), 4), 4).values())
    assert result.trace.bytes_sent(0, "step") == 2 * FLOAT64_BYTES * right
    with pytest.raises(AssertionError, match="state is not as the stage says"):
        assert_memory(in_phases(1, ADAM, kind=Replicated), 1, 4)


def test_free_forgotten(monkeypatch):
    """Numbers right, bytes right, memory red."""
    make = OPTIMIZERS["adam"]
    monkeypatch.setattr(zero, "Unit", NeverFrees)
    result = run(partial(trained_by_zero, steps=2, make=untied), 3, make, ranks=4)
    assert_same(serially_trained(make, steps=2, make=untied), result.values)
    right = sum(traffic(3, n_padded(untied(), 4), 4).values())
    assert result.trace.bytes_sent(0, "step") == 2 * FLOAT64_BYTES * right
    with pytest.raises(AssertionError, match="parameters are not as the stage says"):
        assert_memory(in_phases(3, ADAM), 3, 4)


@pytest.mark.parametrize(
    "wrong, stages",
    [(AveragesAgain, [0, 1, 2, 3]), (KeepsTheTerms, [0, 1, 2, 3]), (ForgetsToSpread, [1, 2])],
)
def test_wrong_numbers_are_caught(monkeypatch, wrong, stages):
    monkeypatch.setattr(zero, "Unit", wrong)
    make = OPTIMIZERS["sgd"]
    for stage in stages:
        values = run(partial(trained_by_zero, steps=2, make=untied), stage, make, ranks=3).values
        with pytest.raises(AssertionError, match="relative error"):
            assert_same(serially_trained(make, steps=2, make=untied), values)


@pytest.mark.parametrize("stage", [1, 3])
def test_mean_of_means_and_a_loss_that_is_not_divided(stage):
    make = OPTIMIZERS["sgd"]

    def trained(divide):
        group, model = Mesh(dp=3)["dp"], Net()
        sharded = Zero(model, stage, group, make)
        tokens, targets = (rows_of_rank(x, group) for x in batch(0))
        losses = model.losses(tokens, targets)
        divide(losses, group).backward()
        sharded.step()
        return sharded.whole_parameters()

    expected = {n: p for n, p in serially_trained(make, steps=1).items() if not n.startswith("gradient")}
    right = lambda losses, group: losses.sum() / total(losses.numel(), group)
    assert_same(expected, run(trained, right, ranks=3).values)
    for wrong in (lambda losses, group: losses.mean() / group.size, lambda losses, group: losses.sum()):
        with pytest.raises(AssertionError, match="relative error"):
            assert_same(expected, run(trained, wrong, ranks=3).values)


# ---- on top of tensor parallelism: numbers, and one norm for all

CONFIG = GPTConfig(L=2, H=4, D=12, S=8)
BOTH = {"dp": 2, "tp": 2}


def gpt_gradients():
    model = GPT(CONFIG).double()
    model.loss(*text(0, 3, CONFIG.S)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def on_both(stage, look):
    """A step of the GPT on dp x tp; what ``look`` says of it."""

    def step():
        mesh = Mesh(**BOTH)
        model = plan.parallelize(GPT(CONFIG).double(), plan.GPT_1D, mesh)
        sharded = Zero(model, stage, mesh["dp"], OPTIMIZERS["sgd"])
        tokens, targets = (rows_of_rank(x, mesh["dp"]) for x in text(0, 3, CONFIG.S))
        (model.loss_sum(tokens, targets) / (3 * CONFIG.S)).backward()
        sharded.reduce()
        return look(sharded, model, mesh)

    return run(step, ranks=4).values


@pytest.mark.parametrize("stage", fast_or_slow(EACH, [(1,), (3,)]))
def test_gradients_on_top_of_tensor_parallelism(stage):
    def look(sharded, model, mesh):
        return plan.unshard_state(model, sharded.whole_gradients(), mesh)

    assert_same(gpt_gradients(), on_both(stage, look))


def norm(sharded, model, mesh):
    copies = plan.n_copies(model, {"tp": mesh.sizes["tp"]})
    over_dp = mesh.sizes["dp"] if sharded.stage.state == COPY else 1
    return global_norm(
        [(s.name, s.tensor) for s in sharded.gradients()],
        [mesh["dp"], mesh["tp"]],
        {name: n * over_dp for name, n in copies.items()},
    )


def norm_counting_copies_twice(sharded, model, mesh):
    return global_norm([(s.name, s.tensor) for s in sharded.gradients()], [mesh["dp"], mesh["tp"]])


def norm_of_this_rank(sharded, model, mesh):
    return global_norm([(s.name, s.tensor) for s in sharded.gradients()], [])


@pytest.mark.parametrize("stage", fast_or_slow(EACH, [(0,), (3,)]))
def test_the_norm_counts_every_element_once(stage):
    expected = torch.stack([g.norm() for g in gpt_gradients().values()]).norm().item()
    found = on_both(stage, norm)
    assert found == pytest.approx([expected] * 4, rel=1e-12) and len(set(found)) == 1
    for wrong in (norm_counting_copies_twice, norm_of_this_rank):
        assert all(abs(x / expected - 1) > 1e-3 for x in on_both(stage, wrong))


@pytest.mark.parametrize("stage", fast_or_slow(EACH, [(0,), (2,)]))
def test_clipping_is_serial_clipping(stage):
    most, make = 0.05, OPTIMIZERS["momentum"]

    def step():
        group, model = Mesh(dp=3)["dp"], Net()
        sharded = Zero(model, stage, group, make)
        for at in range(3):
            tokens, targets = (rows_of_rank(x, group) for x in batch(at))
            sharded.zero_grad()
            (model.losses(tokens, targets).sum() / 39).backward()
            sharded.reduce()
            copies = dict.fromkeys([s.name for s in sharded.gradients()], 3 if stage == 0 else 1)
            found = global_norm([(s.name, s.tensor) for s in sharded.gradients()], [group], copies)
            sharded.update(clip(found, most))
        return sharded.whole_parameters()

    model = Net()
    optimizer = make(model.parameters())
    for at in range(3):
        optimizer.zero_grad()
        model.losses(*batch(at)).mean().backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), most) > 2 * most
        optimizer.step()
    assert_same(dict(model.named_parameters()), run(step, ranks=3).values, tolerance=1e-5)  # theirs adds 1e-6


# ---- mixed precision


def mixed(stage, dtype, ranks, steps=5):
    def step():
        group, model = Mesh(dp=ranks)["dp"], untied().float()
        sharded = Zero(model, stage, group, partial(Adam, lr=0.02, eps=1e-2), compute_dtype=dtype)
        for at in range(steps):
            tokens, targets = (rows_of_rank(x, group) for x in batch(at, 12))
            sharded.zero_grad()
            (model.losses(tokens, targets).float().sum() / 36).backward()
            sharded.step()
        held = sharded.stored_bytes()
        dtypes = {p.dtype for p in model.parameters()}
        return sharded.whole_parameters(), held, dtypes

    return run(step, ranks=ranks).values


def serially_mixed(dtype, steps=5):
    """A model in ``dtype`` whose optimizer works on a float32 copy: the same recipe, written down plainly."""
    model, masters = untied().float(), untied().float()
    model.to(dtype)
    optimizer = Adam(masters.parameters(), lr=0.02, eps=1e-2)
    for at in range(steps):
        model.zero_grad()
        (model.losses(*batch(at, 12)).float().sum() / 36).backward()
        for p, master in zip(model.parameters(), masters.parameters(), strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                p.copy_(master)
    return {name: p.detach() for name, p in masters.named_parameters()}


@pytest.mark.parametrize(
    "stage, dtype",
    fast_or_slow(
        list(product(STAGES, (torch.bfloat16, torch.float16))),
        [(0, torch.bfloat16), (2, torch.float16), (3, torch.bfloat16)],
    ),
)
def test_mixed_precision(stage, dtype):
    """Parameters and gradients of 2 bytes, a master copy and two moments of 4; shared out by stage."""
    n = n_padded(untied(), 2)
    rounding = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]  # gradients are added up in another order
    for found, held, dtypes in mixed(stage, dtype, 2):
        assert_same(serially_mixed(dtype), [found], tolerance=rounding)
        expected = stored(stage, n, 2)
        assert held["parameters"] == 2 * expected["parameters"] and dtypes == {dtype}
        assert held["gradients"] == 2 * expected["gradients"]
        assert held["state"] == 12 * expected["state"] + 4 * len(units_of(untied()))


def test_the_master_copy_is_not_rounded():
    def step():
        model = untied().float()
        sharded = Zero(model, 2, Mesh(dp=2)["dp"], partial(SGD, lr=0.1), compute_dtype=torch.bfloat16)
        return sharded.whole_parameters()

    assert_same({n: p.detach() for n, p in untied().float().named_parameters()}, run(step, ranks=2).values, 0)


def scaled(the_norm_of, overflow_on=1):
    """Three steps in float16, of which one rank's second gradient overflows."""

    def step():
        group, model = Mesh(dp=2)["dp"], untied().float()
        sharded = Zero(model, 2, group, partial(SGD, lr=0.1), compute_dtype=torch.float16)
        scaler = LossScaler(scale=256.0, growth_interval=2)
        told = []
        for at in range(4):
            tokens, targets = (rows_of_rank(x, group) for x in batch(at, 12))
            sharded.zero_grad()
            too_much = 1e9 if at == 1 and group.rank == overflow_on else 1.0
            (model.losses(tokens, targets).float().sum() / 36 * scaler.scale * too_much).backward()
            sharded.reduce()
            found, scale = the_norm_of(sharded, group) / scaler.scale, scaler.scale
            taken = scaler.accepts(found)
            if taken:
                sharded.update(1 / scale)
            told.append((taken, scaler.scale))
        return told, sharded.whole_parameters()

    return run(step, ranks=2).values


def shared_norm(sharded, group):
    return global_norm([(s.name, s.tensor) for s in sharded.gradients()], [group])


def norm_here(sharded, group):
    """Of the pieces of this rank alone, with the overflow in the other's."""
    mine = [s.tensor.float().square().sum() for s in sharded.gradients()]
    return float("inf") if group.rank == 0 and not torch.stack(mine).isfinite().all() else 1.0


def test_all_ranks_skip_the_step_in_which_one_overflows():
    (told, found), (other, others) = scaled(shared_norm)
    assert told == other == [(True, 256.0), (False, 128.0), (True, 128.0), (True, 256.0)]
    assert all(x.isfinite().all() for x in found.values())
    assert_same(found, [others], tolerance=0)
    model = untied().float()  # the serial model that takes the first, third and fourth step
    optimizer = SGD(model.parameters(), lr=0.1)
    for at in (0, 2, 3):
        optimizer.zero_grad()
        model.losses(*batch(at, 12)).mean().backward()
        optimizer.step()
    assert_same(dict(model.named_parameters()), [found], tolerance=2e-3)


def test_ranks_that_decide_alone_part():
    """One takes the step and gathers what it has updated; the other begins the next."""
    with pytest.raises(MismatchError, match=r"rank 1 calls all_gather.*\n.*\n.*rank 0 calls reduce_scatter"):
        scaled(norm_here)


# ---- recomputation


@pytest.mark.parametrize(
    "stage, what",
    fast_or_slow(
        list(product(STAGES, ("selective", "full"))), [(1, "selective"), (3, "selective"), (3, "full")]
    ),
)
def test_with_recomputation(stage, what):
    """A block that runs again finds its parameters gathered, and they are gathered no third time."""

    def step():
        group = Mesh(dp=2)["dp"]
        model = recompute(GPT(CONFIG).double(), what)
        sharded = Zero(model, stage, group, OPTIMIZERS["sgd"])
        tokens, targets = (rows_of_rank(x, group) for x in text(0, 3, CONFIG.S))
        with region("step"):
            (model.loss_sum(tokens, targets) / (3 * CONFIG.S)).backward()
            sharded.reduce()
        gradients = sharded.whole_gradients()
        with region("step"):
            sharded.update()
        return gradients

    result = run(step, ranks=2)
    assert_same(gpt_gradients(), result.values)
    n = n_padded(GPT(CONFIG), 2)
    assert result.trace.bytes_sent(0, "step") == FLOAT64_BYTES * sum(traffic(stage, n, 2).values())


class RunsLayersAgain(Net):
    """Whose whole layers, hooks and all, run again: to the end, or until backward has what it needs."""

    def __init__(self, stops_early):
        super().__init__(tied=False)
        self.stops_early = stops_early

    def forward(self, tokens):
        x = self.embedding(tokens)
        with set_checkpoint_early_stop(self.stops_early):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


@pytest.mark.parametrize("stops_early", [True, False])
def test_modules_that_run_again_with_their_hooks(stops_early):
    """They are not gathered a third time, nor is what comes after them."""
    make = OPTIMIZERS["sgd"]
    model = partial(RunsLayersAgain, stops_early)
    result = run(partial(trained_by_zero, steps=2, make=model), 3, make, ranks=3)
    assert_same(serially_trained(make, steps=2, make=untied), result.values)
    expected = sum(traffic(3, n_padded(untied(), 3), 3).values())
    assert result.trace.bytes_sent(0, "step") == 2 * FLOAT64_BYTES * expected


# ---- what is refused


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), Two()

    def forward(self, x):
        return self.second(self.first(x))[0]


class Two(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        return super().forward(x), x


def make_zero(stage=1, model=None, **options):
    def body():
        sharded = Zero(model or nn.Linear(2, 2), stage, Mesh(dp=2)["dp"], OPTIMIZERS["sgd"], **options)
        sharded.update()

    return lambda: run(body, ranks=2)


def forward_of_a_pair():
    def body():
        model = Pair()
        Zero(model, 3, Mesh(dp=2)["dp"], OPTIMIZERS["sgd"])
        model(torch.ones(1, 2))

    run(body, ranks=2)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (make_zero(stage=4), r"stage=4: ZeRO has the stages 0 \(all copied\), 1, 2 and 3\."),
        (make_zero(), r"update\(\) without gradients: call loss\.backward\(\) and reduce\(\) before"),
        (make_zero(units=[]), r"no unit holds weight, bias; units are modules of the model that together"),
        (make_zero(model=nn.ReLU()), r"no unit holds a parameter that needs a gradient; units"),
        (forward_of_a_pair, r"Two is a unit whose parameters are cut, and its forward returns tuple: .* one"),
        (
            make_zero(model=nn.Bilinear(2, 2, 2).requires_grad_(True), units=[nn.Linear(1, 1)]),
            r"no unit holds weight, bias",
        ),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(RefusedError, match=message):
        wrong()


def test_a_unit_has_one_dtype():
    model = nn.Linear(2, 2)
    model.bias.data = model.bias.data.double()
    with pytest.raises(RefusedError, match=r"weight, bias have the dtypes .*; a unit is one vector, of one"):
        make_zero(model=model)()


def test_a_stage_of_your_own():
    """A row that nobody has named: parameters are cut, and gradients wait for the last micro-batch."""
    assert STAGES[1] == Stage(COPY, COPY, CUT)
    make = OPTIMIZERS["sgd"]
    values = run(partial(trained_by_zero, steps=1), Stage(CUT, COPY, CUT), make, ranks=2).values
    assert_same(serially_trained(make, steps=1), values)


def test_all_optimizers_of_the_units_have_one_rate():
    def step():
        sharded = Zero(untied(), 1, Mesh(dp=2)["dp"], partial(AdamW, lr=1.0))
        for group in sharded.param_groups:
            group["lr"] = 0.5
        return [unit.optimizer.param_groups[0]["lr"] for unit in sharded.units]

    assert run(step, ranks=2).values == [[0.5] * 5] * 2
    assert STEPS == 10
