"""Megatron's sequence parallelism: its layers are serial ones, its block the serial block."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lessons_lib import Layout, Mesh, compute, region, run
from lessons_lib.cost.activations import kept_by_layer, published
from lessons_lib.cost.measured import FREE, live_bytes
from lessons_lib.errors import RefusedError
from lessons_lib.mesh import copy_sum, gather_reduce_scatter, gather_split, reduce_scatter_gather
from lessons_lib.models.dropout import Dropout
from lessons_lib.models.gpt import Block, GPTConfig
from lessons_lib.models.recompute import attend_by_scores
from lessons_lib.sequence_parallel import (
    SEQUENCE_SCHEMES,
    SequenceColumn,
    SequenceColumnKept,
    SequenceParallelBlock,
    SequenceRow,
)
from lessons_lib.sequence_parallel.megatron import STREAM
from lessons_lib.tensor_parallel import SCHEMES, TensorParallelLinear, tensor_parallel_linear
from lessons_lib.tensor_parallel.dropout import RandomStreams
from lessons_lib.tensor_parallel.scheme import PricedScheme, blocks
from tests.serial_layer import FLOAT64_BYTES, MESHES, assert_is_the_serial_layer, random, relative_error

# What the paper says, in other words than the library's: local shapes and elements sent per rank.
BY_HAND = {
    "sequence column": lambda B, D, F, p: {
        "x": (B // p, D),
        "w": (D, F // p),
        "y": (B, F // p),
        "forward": (p - 1) * B * D // p,
        "backward": 2 * (p - 1) * B * D // p,
    },
    "sequence column kept": lambda B, D, F, p: {
        "x": (B // p, D),
        "w": (D, F // p),
        "y": (B, F // p),
        "forward": (p - 1) * B * D // p,
        "backward": (p - 1) * B * D // p,
    },
    "sequence row": lambda B, D, F, p: {
        "x": (B, D // p),
        "w": (D // p, F),
        "y": (B // p, F),
        "forward": (p - 1) * B * F // p,
        "backward": (p - 1) * B * F // p,
    },
}
CASES = [(name, sizes) for name in SEQUENCE_SCHEMES for sizes in MESHES[("tp",)]]


@pytest.mark.parametrize("name, sizes", CASES)
def test_a_scheme_is_the_serial_layer(name, sizes):
    assert isinstance(SEQUENCE_SCHEMES[name], PricedScheme)
    assert_is_the_serial_layer(SEQUENCE_SCHEMES[name], sizes, by_hand=BY_HAND[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SEQUENCE_SCHEMES)
def test_a_scheme_is_the_serial_layer_on_processes(name):
    assert_is_the_serial_layer(SEQUENCE_SCHEMES[name], {"tp": 2}, transport="processes")


def peak_elements(step, p):
    """The peak of the fullest rank, in float64 elements, without the mesh's own list of ranks (int32)."""
    result = run(step, ranks=p, record=("memory",))
    return (max(map(result.trace.peak_bytes, range(p))) - 4 * p) / FLOAT64_BYTES


@pytest.mark.parametrize(
    "shape",
    [(72, 36, 144), *(pytest.param(s, marks=pytest.mark.slow) for s in ((144, 36, 72), (36, 144, 72)))],
)
@pytest.mark.parametrize("name, sizes", CASES)
def test_memory_is_the_formula_s(name, sizes, shape):
    scheme, p, (B, D, F) = SEQUENCE_SCHEMES[name], sizes["tp"], shape
    shapes = [
        layout.local_shape(shape, sizes)
        for layout, shape in ((scheme.X, (B, D)), (scheme.W, (D, F)), (scheme.Y, (B, F)))
    ]
    memory = scheme.memory(B, D, F, sizes)
    assert memory["rest"] == sum(blocks(scheme, B, D, F, sizes))

    def forward():
        mesh, x, w = Mesh(**sizes), *(torch.ones(shape, dtype=torch.float64) for shape in shapes[:2])
        y = scheme.forward(x, w, mesh)
        return y.shape

    def backward():
        mesh, x, w, dy = Mesh(**sizes), *(torch.ones(shape, dtype=torch.float64) for shape in shapes)
        dx, dw = scheme.backward(dy, x, w, mesh)
        return dx.shape, dw.shape

    def kept():
        mesh, x, w, dy = Mesh(**sizes), *(torch.ones(shape, dtype=torch.float64) for shape in shapes)
        y = tensor_parallel_linear(x.requires_grad_(), w.requires_grad_(), scheme, mesh)
        y.backward(dy)

    assert peak_elements(forward, p) == memory["forward"]
    if hasattr(scheme, "differentiable"):
        y = blocks(scheme, B, D, F, sizes)[2]
        assert peak_elements(kept, p) == memory["backward"] + y  # which autograd is called on
    else:
        assert peak_elements(backward, p) == memory["backward"]


# ---- a block of the GPT, its stream cut along S


CONFIG = GPTConfig(L=1, H=12, D=24, S=36)
N_SEQUENCES, DROPOUT = 5, 0.25
VARIANTS = {"again": SequenceColumn(), "kept": SequenceColumnKept()}
SENT = {"again": 10, "kept": 8}  # times (p - 1) / p B S D: Megatron's, and the paper's


def serial_block(dropout=0.0):
    """A block whose biases and norms are not those of the start, which would hide much."""
    block = Block(replace(CONFIG, dropout=dropout)).double()
    with torch.no_grad():
        for at, (name, parameter) in enumerate(block.named_parameters()):
            middle = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(middle + random(*parameter.shape, seed=at) / 3)
    return block


def stream(seed, n_sequences=N_SEQUENCES, S=CONFIG.S):
    return random(n_sequences, S, CONFIG.D, seed=seed)


def step_on_this_rank(make, X, dY, p, dropout):
    mesh = Mesh(tp=p)
    block = make(serial_block(dropout), mesh)
    torch.manual_seed(7)
    x = STREAM.shard(X, mesh).requires_grad_()
    with region("forward"):
        y = block(x)
    with region("backward"):
        y.backward(STREAM.shard(dY, mesh))
    found = {"Y": y.detach(), "dX": x.grad}
    return found | {f"d{name}": parameter.grad for name, parameter in block.named_parameters()}


def layout_of(name):
    """How a parameter of the block, or its gradient, lies; weights of linear layers as [D, F]."""
    module, kind = name.removeprefix("d").rsplit(".", 1)
    if "norm" in module:
        return Layout("D")
    first = module.endswith(("qkv", "up"))
    return {"weight": Layout("D F@tp" if first else "D@tp F"), "bias": Layout("F@tp" if first else "F")}[kind]


def assert_is_the_serial_block(make, p, transport="threads", dropout=0.0):
    """On every rank the output and every gradient are the serial block's, and copies agree to the bit."""
    serial, X, dY = serial_block(dropout), stream(101).requires_grad_(), stream(102)
    torch.manual_seed(7)
    Y = serial(X)
    Y.backward(dY)
    expected = {"Y": (STREAM, Y.detach()), "dX": (STREAM, X.grad)}
    for name, parameter in serial.named_parameters():
        whole = parameter.grad.T if parameter.grad.dim() == 2 else parameter.grad
        expected[f"d{name}"] = layout_of(name), whole
    result = run(step_on_this_rank, make, X.detach(), dY, p, dropout, ranks=p, transport=transport)
    for rank, found in enumerate(result.values):
        assert found.keys() == expected.keys()
        for name, (layout, whole) in expected.items():
            error = relative_error(found[name], layout.cut(whole, {"tp": p}, {"tp": rank}))
            assert error < 1e-10, f"{name} on rank {rank} is wrong by {error:.0e}"
            if not layout.axes:
                assert torch.equal(found[name], result.values[0][name]), f"{name} differs in a bit"
    return result


def sequence_parallel(variant="again"):
    """The maker of the right block; wrong versions change what it makes."""
    return lambda block, mesh: SequenceParallelBlock(block, CONFIG.S, mesh, VARIANTS[variant])


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_is_the_serial_block(variant, p):
    """S23, S71: norms and row biases see 1/p of the tokens, and their gradients are all the tokens'."""
    make = sequence_parallel(variant)
    trace = assert_is_the_serial_block(make, p).trace
    moved = N_SEQUENCES * CONFIG.S * CONFIG.D * (p - 1) // p
    vectors = 6 * 2 * (p - 1) * CONFIG.D // p  # of two norms and two row biases
    by_hand = {"forward": 4 * moved, "backward": (SENT[variant] - 4) * moved + vectors}
    formula = run(lambda: make(serial_block(), Mesh(tp=p)).traffic(N_SEQUENCES), ranks=p).values
    assert formula == [by_hand] * p
    for rank in range(p):
        assert {way: trace.bytes_sent(rank, way) / FLOAT64_BYTES for way in by_hand} == by_hand


@pytest.mark.parametrize("p", [2, 3])
def test_dropout_is_the_serial_block_s(p):
    """S32: each rank drops what one device would drop of its tokens."""
    assert_is_the_serial_block(sequence_parallel(), p, dropout=DROPOUT)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_is_the_serial_block_on_processes(variant):
    """S23"""
    assert_is_the_serial_block(sequence_parallel(variant), 2, "processes", DROPOUT)


# ---- memory: what is kept for backward, and what is alive between the branches


def kept_bytes(config, B, p, column, dtype=torch.float64, prepare=lambda block: None):
    """Bytes more on rank 0 after forward than before; x stays alive, and y is it for what comes next."""

    def step():
        mesh, block = Mesh(tp=p), Block(config).to(dtype)
        prepare(block)
        block = SequenceParallelBlock(block, config.S, mesh, column)
        x = torch.randn(B, config.S // p, config.D, dtype=dtype).requires_grad_()
        compute(1.0)
        y = block(x)
        compute(1.0)
        return y.shape

    curve = run(step, ranks=p, record=("memory",), machine=FREE).trace.live_bytes[0]
    return live_bytes(curve, 1)[-1] - live_bytes(curve, 0)[-1]


@pytest.mark.parametrize("attention", ["fused", "scores"])
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("variant, stream", [("again", "cut"), ("kept", "cut, gathered kept")])
def test_kept_activations_are_the_formula_s(variant, stream, p, attention):
    def by_scores(block):
        if attention == "scores":
            block.attention.attend = attend_by_scores

    formula = kept_by_layer(CONFIG, N_SEQUENCES, p, attention, stream=stream)
    mask_of_scores = CONFIG.S**2 if attention == "scores" else 0  # a byte for each pair of positions
    counted = kept_bytes(CONFIG, N_SEQUENCES, p, VARIANTS[variant], prepare=by_scores)
    assert counted == FLOAT64_BYTES * sum(formula.values()) + mask_of_scores


@pytest.mark.parametrize("p", [2, 4])
def test_kept_activations_are_34_bytes_over_p(p):
    """Korthikanti et al. 2022, equation 5: 34 S B D / p in 16 bits with dropout, attention's core apart."""
    config, unit = replace(CONFIG, dropout=0.1), N_SEQUENCES * CONFIG.S * CONFIG.D
    counted = kept_bytes(config, N_SEQUENCES, p, SequenceColumn(), torch.bfloat16)
    terms = kept_by_layer(config, N_SEQUENCES, p, stream="cut")
    apart = sum(n for name, n in terms.items() if "norms" in name and "puts" not in name)
    one_number_per_head_and_position = 4 * terms["inside attention"]
    assert counted - 2 * apart - one_number_per_head_and_position == 34 * unit // p
    assert published("tp + sp, selective", CONFIG.S, CONFIG.D, CONFIG.H, tp=p) * unit == 34 * unit / p


def step_in_phases(block, x, dy):
    """A step whose phases are numbered by virtual seconds: odd between branches, even in attention or MLP."""

    def turn(*_):
        compute(1.0)

    for branch in (block.attention, block.mlp):
        branch.register_forward_pre_hook(turn)
        branch.register_forward_hook(turn)
        branch.register_full_backward_pre_hook(turn)
        branch.register_full_backward_hook(turn)
    compute(1.0)
    block(x.requires_grad_()).backward(dy)


@pytest.mark.parametrize("variant", [*VARIANTS, "1d"])
def test_between_branches_nothing_is_larger_than_a_part_of_the_stream(variant):
    """Counted tensor by tensor, as they are made; where the stream is whole (1D), it shows."""
    p, whole = 4, N_SEQUENCES * CONFIG.S * CONFIG.D

    def step():
        mesh = Mesh(tp=p)
        if variant == "1d":
            block, S = serial_block(), CONFIG.S
            for branch in (block.attention, block.mlp):
                for name, scheme in zip(branch.branch, ("column", "row"), strict=True):
                    layer = TensorParallelLinear.from_linear(getattr(branch, name), SCHEMES[scheme], mesh)
                    setattr(branch, name, layer)
        else:
            block, S = sequence_parallel(variant)(serial_block(), mesh), CONFIG.S // p
        x, dy = stream(1)[:, :S].clone(), stream(2)[:, :S].clone()
        step_in_phases(block, x, dy)

    curve = run(step, ranks=p, record=("memory",), machine=FREE).trace.live_bytes[0]
    phases = range(1, 10, 2)
    made = [
        after - before
        for phase in phases
        for before, after in pairwise(live_bytes(curve, phase))
    ]  # fmt: skip
    assert len(made) > 20
    assert max(made) == FLOAT64_BYTES * (whole if variant == "1d" else whole // p)


# ---- refusals


@pytest.mark.parametrize("p", [2, 4])
def test_a_whole_stream_is_not_taken_for_a_part(p):
    """S77: never a sequence of p times its length."""

    def step():
        return sequence_parallel()(serial_block(), Mesh(tp=p))(stream(1))

    message = (
        rf"stream is cut along S=36 over tp={p} takes {36 // p} positions on each rank, "
        r'Layout\("B S@tp D"\); rank \d was given shape \(5, 36, 24\), which holds 36. Is it whole\?'
    )
    with pytest.raises(RefusedError, match=message):
        run(step, ranks=p)


@pytest.mark.parametrize(
    "config, S, p, message",
    [
        (
            CONFIG,
            10,
            4,
            r"dim S of size 10 cannot be cut evenly over tp=4.*Legal degrees for 10: 1, 2, 5, 10",
        ),
        (replace(CONFIG, H=6), 36, 4, r"dim heads of size 6 .*over tp=4.*Legal degrees for 6: 1, 2, 3, 6"),
        (replace(CONFIG, n_kv_heads=2), 36, 3, r"dim heads of size 2 .*over tp=3.*Legal degrees for 2: 1, 2"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_its_name(config, S, p, message):
    """S04"""
    with pytest.raises(RefusedError, match=message):
        run(lambda: SequenceParallelBlock(Block(config), S, Mesh(tp=p)), ranks=p)


def test_a_layer_that_cannot_cut_the_sequence_says_so():
    def step():
        layer = TensorParallelLinear.from_linear(torch.nn.Linear(4, 6), SequenceRow(), Mesh(tp=2))
        layer(torch.randn(2, 5, 2))  # 10 rows could be cut, 5 positions cannot

    with pytest.raises(RefusedError, match=r"size 5 cannot be cut evenly over tp=2"):
        run(step, ranks=2)


# ---- wrong versions: each is a bug that somebody shipped, and each is caught, for the reason given


def changed(change):
    """The right block, and ``change(block, mesh)`` done to it."""

    def make(block, mesh):
        parallel = sequence_parallel()(block, mesh)
        change(parallel, mesh)
        return parallel

    return make


def norms_not_summed(block, mesh):
    """Plain norms, as "they are the same on every rank anyway" (S23)."""
    for name in ("attention_norm", "mlp_norm"):
        norm = torch.nn.LayerNorm(CONFIG.D, dtype=torch.float64)
        norm.load_state_dict(getattr(block, name).state_dict())
        setattr(block, name, norm)


def norms_averaged(block, mesh):
    """A mean, as over the ranks of data parallelism (S23)."""
    for norm in (block.attention_norm, block.mlp_norm):
        for parameter in norm.parameters():
            parameter.register_hook(lambda gradient: gradient / mesh.sizes["tp"])


class BiasBeforeTheSum(TensorParallelLinear):
    """Added by every rank to its term: p times (S11)."""

    def forward(self, x):
        rows = x.transpose(0, 1)
        bias = copy_sum(self.bias, self.mesh["tp"])
        y = reduce_scatter_gather(rows.flatten(0, 1) @ self.weight + bias, self.mesh["tp"])
        return y.unflatten(0, (-1, len(x))).transpose(0, 1)


class BiasGradientNotSummed(TensorParallelLinear):
    """Each rank's bias learns from its own tokens: 1/p of the gradient."""

    def forward(self, x):
        bias, self.bias = self.bias, None
        y = super().forward(x)
        self.bias = bias
        return y + bias


def both_rows(cls):
    def change(block, mesh):
        block.attention.proj.__class__ = block.mlp.down.__class__ = cls

    return change


class PieceOfOwnGradient(SequenceColumn):
    """All-gather, undone by taking one's piece: the other ranks' terms of dX are lost."""

    def differentiable(self, x, w, mesh):
        return gather_split(x, mesh["tp"]) @ w


class WeightOfOwnTokens(SequenceColumn):
    """dW from the rank's own rows: nothing gathered, and terms lost."""

    def backward(self, dy, x, w, mesh):
        dx, _ = super().backward(dy, x, w, mesh)
        here = slice(mesh["tp"].rank * len(x), (mesh["tp"].rank + 1) * len(x))
        return dx, x.T @ dy[here]


def begins_with(scheme):
    def change(block, mesh):
        block.attention.qkv.scheme = block.mlp.up.scheme = scheme

    return change


WRONG = {
    "norms not summed": (norms_not_summed, "dattention_norm.weight on rank 0 is wrong"),
    "norms averaged": (norms_averaged, "dattention_norm.weight on rank 0 is wrong"),
    "bias before the sum": (both_rows(BiasBeforeTheSum), "Y on rank 0 is wrong"),
    "bias gradient not summed": (both_rows(BiasGradientNotSummed), "dattention.proj.bias on rank 0 is wrong"),
    "a piece of dX": (begins_with(PieceOfOwnGradient()), "dX on rank 0 is wrong"),
    "dW of own tokens": (begins_with(WeightOfOwnTokens()), "dattention.qkv.weight on rank 0 is wrong"),
}


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_blocks_are_caught(name, p):
    change, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        assert_is_the_serial_block(changed(change), p)


class AllReduceAndAPiece(SequenceRow):
    """1D with its sum cut afterwards: numbers right, memory right, and twice the bytes."""

    def forward(self, x, w, mesh):
        return mesh["tp"].piece(mesh["tp"].all_reduce(x @ w), 0)


class AllReduceOfDX(SequenceColumn):
    """The same backward."""

    def backward(self, dy, x, w, mesh):
        _, dw = super().backward(dy, x, w, mesh)
        return mesh["tp"].piece(mesh["tp"].all_reduce(dy @ w.T), 0), dw


class TheNextRanksRows(SequenceRow):
    """The right sum, dealt out by one place too far."""

    def forward(self, x, w, mesh):
        y = x @ w
        return mesh["tp"].reduce_scatter(y.roll(len(y) // mesh["tp"].size, 0), 0)


@pytest.mark.parametrize(
    "scheme, message",
    [
        (AllReduceAndAPiece(), "forward traffic is not the formula's"),
        (AllReduceOfDX(), "backward traffic is not the formula's"),
        (TheNextRanksRows(), "Y on rank 0 is wrong"),
    ],
)
def test_wrong_layers_are_caught(scheme, message):
    with pytest.raises(AssertionError, match=message):
        assert_is_the_serial_layer(scheme, {"tp": 2})


@pytest.mark.parametrize("pair, times", [(gather_split, 1), (gather_reduce_scatter, 3)])
def test_whole_again_for_one_loss(pair, times):
    """Where all ranks go on alike with the gathered stream, its gradient is complete: no sum."""
    serial, X, dY = serial_block(), stream(101), stream(102)
    serial(X).backward(dY)

    def step():
        mesh = Mesh(tp=3)
        block = sequence_parallel()(serial_block(), mesh)
        pair(block(STREAM.shard(X, mesh)), mesh["tp"], 1).backward(dY)
        return block.mlp_norm.weight.grad

    for gradient in run(step, ranks=3).values:
        assert relative_error(gradient, times * serial.mlp_norm.weight.grad) < 1e-10


def same_mask_everywhere(block, mesh):
    """Generators in step, and positions counted from 0 on every rank."""
    block.dropout = Dropout(DROPOUT)


def one_stream_each(block, mesh):
    """Each rank its own generator: other tokens are dropped than one device would drop."""
    block.dropout = torch.nn.Dropout(DROPOUT)

    def seeded(*_):
        torch.manual_seed(mesh.rank)

    block.dropout.register_forward_pre_hook(seeded)


@pytest.mark.parametrize("change", [same_mask_everywhere, one_stream_each])
def test_wrong_dropout_is_caught(change):
    with pytest.raises(AssertionError, match=r"Y on rank [01] is wrong"):
        assert_is_the_serial_block(changed(change), 2, dropout=DROPOUT)


def masks(draw, p=4):
    """What each rank drops of its part of a stream of ones."""

    def step():
        return draw(torch.ones(64, 8), Mesh(tp=p)["tp"].rank) == 0

    return run(step, ranks=p).values


def test_the_ranks_of_a_cut_stream_must_not_drop_alike():
    """S32: Megatron-LM forks its generator there; without the fork all parts of the sequence drop alike."""

    def forked(x, rank):
        with RandomStreams(seed=3, rank=rank).fork():
            return torch.nn.functional.dropout(x, 0.5)

    def not_forked(x, rank):
        RandomStreams(seed=3, rank=rank)
        return torch.nn.functional.dropout(x, 0.5)

    def alike(found):
        return [torch.equal(found[0], other) for other in found[1:]]

    assert alike(masks(forked)) == [False] * 3
    assert alike(masks(not_forked)) == [True] * 3
