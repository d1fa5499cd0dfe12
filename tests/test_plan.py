"""A plan turns the serial GPT into a parallel one: same losses and gradients, and misuse refused in words."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from lessons_lib import Mesh, region, run
from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.models.gpt import GPT, Attention, GPTConfig
from lessons_lib.plan import (
    GPT_1D,
    assign,
    check,
    parallelize,
    serial_gradients,
    shard_state,
    traffic,
    unshard_state,
)
from lessons_lib.tensor_parallel import SCHEMES, Column, Row, TensorParallelLinear
from lessons_lib.tensor_parallel.linear import parameter_layouts

# Twelve heads: 1, 2, 3 and 4 ranks can share them. All sizes differ.
CONFIG = GPTConfig(L=2, H=12, D=24, S=5, V=29)
N_SEQUENCES = 3
FLOAT64_BYTES = 8


def relative_error(found, expected):
    assert found.shape == expected.shape
    return ((found - expected).norm() / expected.norm()).item()


def batch(step):
    """Random tokens: with a small vocabulary every row of the embedding has a gradient."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(CONFIG.V, (2, N_SEQUENCES, CONFIG.S), generator=generator).unbind()


def scrambled_gpt(config=CONFIG):
    """In float64, with parameters that are all different: no bias is 0, no norm is 1."""
    model, generator = GPT(config).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    return model


def train(model, n_steps):
    """Yield, after each backward, the loss and all gradients; then take the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(n_steps):
        optimizer.zero_grad()
        loss = model.loss(*batch(step))
        with region("backward"):
            loss.backward()
        yield {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()


def block(name, whole, schemes, coordinate, sizes):
    """What a rank at ``coordinate`` should hold of a tensor shaped like the serial parameter ``name``."""
    module, _, kind = name.rpartition(".")
    if module not in schemes:
        return whole
    whole = whole.T if kind == "weight" else whole
    return parameter_layouts(schemes[module])[kind].cut(whole, sizes, coordinate)


def assert_trains_like_the_serial_model(p, n_steps, make=scrambled_gpt, plan=GPT_1D):
    """Every loss, and every parameter's gradient on every rank, is the serial model's."""

    def on_this_rank():
        mesh = Mesh(tp=p)
        model = parallelize(make(), plan, mesh)
        with region("train"):
            steps = list(train(model, n_steps))
        return steps, serial_gradients(model, mesh)

    schemes, serial = assign(make(), plan), list(train(make(), n_steps))
    result = run(on_this_rank, ranks=p)
    for rank, (steps, gathered) in enumerate(result.values):
        for step, (found, expected) in enumerate(zip(steps, serial, strict=True)):
            assert found.keys() == expected.keys()
            for name, whole in expected.items():
                error = relative_error(found[name], block(name, whole, schemes, {"tp": rank}, {"tp": p}))
                assert error < 1e-10, f"{name} on rank {rank} at step {step} is wrong by {error:.0e}"
        assert {"loss", *gathered} == serial[-1].keys()
        for name, gradient in gathered.items():
            assert relative_error(gradient, serial[-1][name]) < 1e-10, f"{name} gathered on rank {rank}"
    return result


@pytest.mark.parametrize("p", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_the_whole_gpt_for_ten_steps(p):
    result = assert_trains_like_the_serial_model(p, n_steps=10)
    B, D, L = N_SEQUENCES * CONFIG.S, CONFIG.D, CONFIG.L
    assert (B * D) % p == 0
    for rank in range(p):
        sent = result.trace.bytes_sent(rank, "train")
        assert sent == 10 * FLOAT64_BYTES * L * 8 * (p - 1) * B * D // p  # two all-reduces each way and layer
        assert sent == 2 * result.trace.bytes_sent(rank, "backward")


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_traffic_of_a_model_is_what_is_counted(p):
    def step():
        mesh = Mesh(tp=p)
        model = parallelize(scrambled_gpt(), GPT_1D, mesh)
        with region("forward"):
            loss = model.loss(*batch(0))
        with region("backward"):
            loss.backward()
        return traffic(model, N_SEQUENCES * CONFIG.S, mesh)

    result = run(step, ranks=p)
    for direction in ("forward", "backward"):
        counted = [result.trace.bytes_sent(rank, direction) for rank in range(p)]
        assert counted == [FLOAT64_BYTES * formula[direction] for formula in result.values]


def test_each_rank_holds_its_share_of_the_planned_layers_and_all_of_the_others():
    def shapes():
        return {
            name: tuple(q.shape)
            for name, q in parallelize(GPT(CONFIG), GPT_1D, Mesh(tp=3)).named_parameters()
        }

    serial = {name: tuple(q.shape) for name, q in GPT(CONFIG).named_parameters()}
    D, F = CONFIG.D, CONFIG.F
    cut = {
        "attention.qkv.weight": (D, D),  # 3 D / 3
        "attention.qkv.bias": (D,),
        "attention.proj.weight": (D // 3, D),
        "mlp.up.weight": (D, F // 3),
        "mlp.up.bias": (F // 3,),
        "mlp.down.weight": (F // 3, D),
    }
    expected = serial | {f"blocks.{at}.{name}": shape for at in range(2) for name, shape in cut.items()}
    assert run(shapes, ranks=3).values == [expected] * 3


def test_shard_and_unshard_of_a_state_are_inverse():
    def there_and_back():
        mesh = Mesh(tp=4)
        whole = dict(scrambled_gpt().named_parameters())
        model = parallelize(scrambled_gpt(), GPT_1D, mesh)
        blocks = shard_state(model, whole, mesh)
        own = dict(model.named_parameters())
        assert all(torch.equal(own[name], block) for name, block in blocks.items())
        back = unshard_state(model, blocks, mesh)
        return back.keys() == whole.keys() and all(torch.equal(back[name], whole[name]) for name in whole)

    assert run(there_and_back, ranks=4).values == [True] * 4


def test_degree_1_sends_nothing():
    """S71."""
    assert assert_trains_like_the_serial_model(1, n_steps=2).trace.bytes_sent(0) == 0


def test_dropout_draws_the_same_mask_on_every_rank():
    """It acts on the residual stream, which is whole on every rank, and ranks start from one seed."""
    config = GPTConfig(L=2, H=12, D=24, S=5, V=29, dropout=0.4)

    def make():
        torch.manual_seed(7)
        return scrambled_gpt(config)

    assert_trains_like_the_serial_model(2, n_steps=2, make=make)


def test_attention_and_mlp_can_be_planned_one_after_the_other():
    attention = {pattern: scheme for pattern, scheme in GPT_1D.items() if "attention" in pattern}
    mlp = {pattern: scheme for pattern, scheme in GPT_1D.items() if "mlp" in pattern}

    def on_this_rank():
        model, mesh = scrambled_gpt(), Mesh(tp=2)
        parallelize(parallelize(model, attention, mesh), mlp, mesh)
        return next(train(model, 1))["loss"]

    for loss in run(on_this_rank, ranks=2).values:
        assert relative_error(loss, next(train(scrambled_gpt(), 1))["loss"]) < 1e-10


def test_ranks_generate_the_same_text():
    def on_this_rank():
        return parallelize(GPT(GPTConfig(L=1, H=4, D=16)), GPT_1D, Mesh(tp=2)).generate(b"abc", 12)

    assert run(on_this_rank, ranks=2).values == [GPT(GPTConfig(L=1, H=4, D=16)).generate(b"abc", 12)] * 2


# ---- wrong versions


class QKVMajor(Attention):
    """Attention whose columns are [q|k|v][head][K]: right serially, cut wrongly by columns."""

    def __init__(self, attention):
        nn.Module.__init__(self)
        self.K, self.qkv, self.proj = attention.K, attention.qkv, attention.proj
        self.n_sharing = attention.n_sharing

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.K)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


def test_the_order_q_k_v_is_caught():
    def make():
        model = scrambled_gpt()
        for block in model.blocks:
            block.attention = QKVMajor(block.attention)
        return model

    assert_trains_like_the_serial_model(1, n_steps=1, make=make)
    with pytest.raises(AssertionError, match="loss on rank 0 at step 0 is wrong"):
        assert_trains_like_the_serial_model(2, n_steps=1, make=make)


class NoAllReduceInBackward(Column):
    def backward(self, dy, x, w, mesh):
        return dy @ w.T, x.T @ dy


def test_a_missing_all_reduce_is_caught_although_the_loss_is_right():
    """The first loss is right, and so are the gradients above the first layer that should have reduced."""
    plan = {**GPT_1D, "blocks.*.attention.qkv": NoAllReduceInBackward()}
    with pytest.raises(AssertionError, match=r"(embedding|position)\.weight on rank 0 at step 0 is wrong"):
        assert_trains_like_the_serial_model(2, n_steps=1, plan=plan)


def test_ranks_that_start_from_different_weights_are_caught():
    def make():
        model = scrambled_gpt()
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            with torch.no_grad():
                model.blocks[1].mlp_norm.weight[3] += 1e-6
        return model

    with pytest.raises(AssertionError, match=r"on rank [01] at step 0 is wrong"):
        assert_trains_like_the_serial_model(2, n_steps=1, make=make)


# ---- refusals


class RowThatDoesNotAddUp(Row):
    Y = Layout("B F +tp")


def test_a_pattern_star_is_one_part_of_a_name():
    model = GPT(CONFIG)
    assert list(assign(model, {"blocks.*.mlp.up": "column"})) == ["blocks.0.mlp.up", "blocks.1.mlp.up"]
    assert list(assign(model, {"blocks.1.mlp.*": "row"})) == ["blocks.1.mlp.up", "blocks.1.mlp.down"]
    assert assign(model, {"head": SCHEMES["row"]}) == {"head": SCHEMES["row"]}
    with pytest.raises(RefusedError, match="no module of that name"):
        assign(model, {"*.up": "column"})


@pytest.mark.parametrize(
    "plan, message",
    [
        (
            {"blocks.*.atention.qkv": "column"},
            "the plan names 'blocks.*.atention.qkv', but the model has no module of that name. "
            "Did you mean 'blocks.*.attention.qkv' or 'blocks.*.attention.proj'? "
            "Linear layers of this model: blocks.*.attention.qkv, blocks.*.attention.proj, blocks.*.mlp.up, "
            "blocks.*.mlp.down, head. "
            "('*' stands for one part between dots.)",
        ),
        ({"blocks.2.mlp.up": "column"}, "no module of that name. Did you mean 'blocks.*.mlp.up'"),
        ({"encoder.fc1": "column"}, "no module of that name. Linear layers of this model"),
        (
            {"blocks.*.mlp.up": "colunm"},
            "scheme 'colunm', which does not exist. Did you mean 'column'? There",
        ),
        ({"blocks.*.mlp.up": "4d"}, "the scheme '4d', which does not exist. There are: column, row"),
        (
            {"blocks.*.mlp.up": Column},
            "column.Column'>, which does not exist. There are: column, row, 2d, 2.5d, 3d; an instance",
        ),
        (
            {"blocks.*.mlp": "column"},
            "the plan's 'blocks.*.mlp' matches 'blocks.0.mlp', which is of type MLP; a scheme takes "
            "the place of an nn.Linear. Inside it are: blocks.*.mlp.up, blocks.*.mlp.down.",
        ),
        (
            {"embedding": "row"},
            "'embedding', which is of type Embedding; a scheme takes the place of an nn.Lin",
        ),
        (
            {"blocks.*.mlp.up": "column", "blocks.0.mlp.*": "column"},
            "two patterns of the plan, 'blocks.*.mlp.up' and 'blocks.0.mlp.*', match the module 'blocks.0",
        ),
        (
            {"blocks.*.mlp.up": "column"},
            'the plan makes blocks.0.mlp.up leave its output as Layout("B F@tp"), but blocks.0.mlp.down '
            'takes its input as Layout("B D"). Plan both',
        ),
        (
            {"blocks.*.attention.proj": "row"},
            'blocks.0.attention.qkv leave its output as Layout("B F"), but blocks.0.attention.proj takes its '
            'input as Layout("B D@tp")',
        ),
        (  # it would train, each rank with a softmax over its own half of the vocabulary
            {"head": "column"},
            'head leaves its output as "B F@tp", but what follows takes it whole: leave head out of the plan'
            ", or take one of PLANS, which cut the loss, too.",
        ),
        (
            {**GPT_1D, "head": "row"},
            'head takes its input as "B D@tp", but what comes before leaves it whole: leave head out of the',
        ),
        (
            {"blocks.*.attention.qkv": "row", "blocks.*.attention.proj": "column"},
            'blocks.0.attention.qkv takes its input as "B D@tp", but what comes before leaves it whole: '
            "begin the branch with a 'column' layer.",
        ),
        (
            {"blocks.1.mlp.up": "row", "blocks.1.mlp.down": "column"},
            'blocks.1.mlp.up takes its input as "B D@tp"',
        ),
        (
            {"blocks.1.mlp.down": "column"},
            'blocks.1.mlp.down leaves its output as "B F@tp", but what follows takes it whole: '
            "end the branch with a 'row' layer.",
        ),
        (
            {"blocks.1.mlp.up": "column", "blocks.1.mlp.down": RowThatDoesNotAddUp()},
            'blocks.1.mlp.down leaves its output as "B F +tp", but what follows takes it whole',
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused_and_changes_nothing(plan, message):
    """F6 and its relatives. The same on every rank, before any communication."""

    def on_this_rank():
        model = GPT(CONFIG)
        parallelize(model, plan, Mesh(tp=2))

    with pytest.raises(RefusedError, match=re.escape(message)) as refused:
        run(on_this_rank, ranks=2)
    assert refused.value.run.trace.events == ()
    model = GPT(CONFIG)
    with pytest.raises(RefusedError, match=re.escape(message)):
        check(model, plan, {"tp": 2})


def test_a_refused_model_is_still_serial():
    def on_this_rank():
        model = GPT(CONFIG)
        with pytest.raises(
            RefusedError, match=r"blocks\.0\.mlp\.up: .* size 96 cannot be cut evenly over tp=5"
        ):
            parallelize(model, {name: GPT_1D[name] for name in GPT_1D if "mlp" in name}, Mesh(tp=5))
        with pytest.raises(RefusedError, match="head leaves its output"):
            parallelize(model, {**GPT_1D, "head": "column"}, Mesh(tp=5))
        return [name for name, module in model.named_modules() if isinstance(module, TensorParallelLinear)]

    assert run(on_this_rank, ranks=5).values == [[]] * 5


def test_a_mesh_without_the_plan_s_axis_is_refused_with_meshes_that_have_it():
    message = (
        "the plan cuts blocks.0.attention.qkv over the axis 'tp' (Column), which the mesh does not have: "
        "its axes are dp=2. Try Mesh(tp=2), or Mesh(dp=2, tp=1), where the layer stays whole."
    )
    with pytest.raises(RefusedError, match=re.escape(message)):
        run(lambda: parallelize(GPT(CONFIG), GPT_1D, Mesh(dp=2)), ranks=2)
    for sizes in ({"tp": 2}, {"dp": 2, "tp": 1}):
        run(lambda sizes=sizes: parallelize(GPT(CONFIG), GPT_1D, Mesh(**sizes)), ranks=2)


def test_of_a_model_that_declares_no_branches_sizes_alone_are_checked():
    plan = {"0": "column", "2": "row"}
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    assert list(check(model, plan, {"tp": 2})) == ["0", "2"]
    with pytest.raises(RefusedError, match=r"0: .* size 6 cannot be cut evenly over tp=4"):
        check(model, plan, {"tp": 4})


def test_a_model_is_not_cut_twice():
    def on_this_rank():
        mesh = Mesh(tp=2)
        parallelize(parallelize(GPT(CONFIG), GPT_1D, mesh), GPT_1D, mesh)

    with pytest.raises(RefusedError, match=r"'blocks\.0\.attention\.qkv', which is cut already \(Column\)"):
        run(on_this_rank, ranks=2)


def test_heads_that_do_not_divide_are_refused_with_the_legal_degrees():
    """S04: 28 heads on 8 ranks. The columns of qkv would divide; a head would be cut in two."""
    config = GPTConfig(L=1, H=28, D=448, S=8)
    assert (3 * config.D) % 8 == 0
    with torch.device("meta"):
        model = GPT(config)
    message = (
        r"^blocks\.0\.attention: 28 heads cannot be shared out to 8 ranks, since a head stays whole: "
        r"try tp=1, 2, 4, 7, 14 or 28$"
    )
    with pytest.raises(RefusedError, match=message):
        check(model, GPT_1D, {"tp": 8})
    for degree in (1, 2, 4, 7, 14, 28):
        assert len(check(model, GPT_1D, {"tp": degree})) == 4

    def on_this_rank():
        with torch.device("meta"):
            parallelize(GPT(config), GPT_1D, Mesh(tp=8))

    with pytest.raises(RefusedError, match="28 heads cannot be shared out to 8 ranks") as refused:
        run(on_this_rank, ranks=8)
    assert str(refused.value).count("28 heads") == 1
    assert refused.value.run.trace.events == ()


def test_one_head_has_one_degree():
    with pytest.raises(RefusedError, match=r"1 heads cannot .*: try tp=1$"), torch.device("meta"):
        check(GPT(GPTConfig(L=1, H=1, D=8)), GPT_1D, {"tp": 2})
