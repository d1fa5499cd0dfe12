"""The whole GPT under every plan: losses, norms, gradients and bytes; and wrong versions, each caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from lessons_lib import Layout, Mesh, run
from lessons_lib.data_parallel import Zero
from lessons_lib.data_parallel import global_norm as norm_over_ranks
from lessons_lib.errors import RefusedError
from lessons_lib.layout import coordinates
from lessons_lib.mesh import sum_copy
from lessons_lib.models.dropout import Dropout, keeps
from lessons_lib.models.gpt import GPT, IGNORED, Attention, GPTConfig
from lessons_lib.models.recompute import recompute
from lessons_lib.plan import (
    PLANS,
    GPTPlan,
    check,
    in_pairs,
    mesh_sizes,
    n_copies,
    parallelize,
    serial,
    stored,
)
from lessons_lib.sequence_parallel import SequenceColumn, SequenceRow
from lessons_lib.tensor_parallel import (
    VOCABULARIES,
    Cube,
    ParallelDropout,
    ParallelLayerNorm,
    RandomStreams,
    Row,
    VocabParallelCrossEntropy,
    Vocabulary,
)
from lessons_lib.tensor_parallel.cross_entropy import token_losses
from tests.whole_gpt import (
    CONFIG,
    MESHES,
    PLAIN,
    B,
    assert_has_the_serial_numbers,
    assert_trains_like_the_serial_model,
    batch,
    block,
    scrambled_gpt,
    serially_trained,
)

ONE_LAYER = replace(CONFIG, L=1)
ONE_OF_EACH = [(scheme, meshes[0]) for scheme, meshes in MESHES.items()]


def name_of(value):
    return value if isinstance(value, str) else ",".join(f"{axis}={n}" for axis, n in value.items())


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


# ---- the serial model's numbers


@pytest.mark.parametrize("scheme, sizes", ONE_OF_EACH, ids=name_of)
def test_two_steps(scheme, sizes):
    """Grouped heads, tied words, padded vocabulary, dropout, ignored targets and clipping, all at once.

    S11: biases are far from 0, and one that was added once per rank would show in the loss.
    """
    assert_trains_like_the_serial_model(scheme, sizes, ONE_LAYER, n_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("config, mesh", [(CONFIG, 0), (PLAIN, 1)], ids=["all at once", "plain"])
@pytest.mark.parametrize("scheme", MESHES)
def test_ten_steps(scheme, config, mesh):
    """On each scheme's two meshes: with dropout, tied and grouped, and without."""
    assert_trains_like_the_serial_model(scheme, MESHES[scheme][mesh], config, n_steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("scheme, sizes", ONE_OF_EACH, ids=name_of)
def test_one_step_on_processes(scheme, sizes):
    assert_trains_like_the_serial_model(scheme, sizes, ONE_LAYER, transport="processes")


@pytest.mark.parametrize("scheme", PLANS)
def test_degree_1_is_the_identity(scheme):
    """S71: the serial numbers, and nothing sent."""
    result = assert_trains_like_the_serial_model(scheme, mesh_sizes(scheme, 1), ONE_LAYER)
    assert result.trace.bytes_sent(0) == 0


@pytest.mark.parametrize(
    "scheme, sizes",
    [case if case[0] in ("1d", "2d") else slow(*case) for case in ONE_OF_EACH],
    ids=name_of,
)
def test_a_rank_begins_with_its_slices_of_the_serial_model(scheme, sizes):
    """Bit for bit, and the way back gives the serial model."""

    def on_this_rank():
        mesh = Mesh(**sizes)
        model = parallelize(GPT(ONE_LAYER, seed=3), PLANS[scheme], mesh)
        return {name: p.detach() for name, p in model.named_parameters()}, serial(model, mesh).state_dict()

    whole = GPT(ONE_LAYER, seed=3)
    places = coordinates(sizes)
    for at, (parts, back) in zip(places, run(on_this_rank, ranks=len(places)).values, strict=True):
        for name, parameter in whole.named_parameters():
            assert torch.equal(parts[name], block(scheme, name, parameter.detach(), at, sizes)), name
        assert back.keys() == whole.state_dict().keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in whole.state_dict().items())


def test_two_models_on_two_meshes_do_not_disturb_each_other():
    """S70: in one run, in turn; each has heads of its own number on each rank."""
    others = replace(ONE_LAYER, H=12, n_kv_heads=4)
    plans = [("1d", {"tp": 4}, others), ("2d", {"row": 2, "col": 2}, ONE_LAYER)]

    def gradients(*wanted):
        models = [
            parallelize(scrambled_gpt(config), PLANS[scheme], Mesh(**sizes))
            for scheme, sizes, config in wanted
        ]
        for model in models:
            torch.manual_seed(1)
            model.loss(*batch(1, model.config)).backward()
        return [{name: p.grad for name, p in model.named_parameters()} for model in models]

    together = run(gradients, *plans, ranks=4).values
    for at, plan in enumerate(plans):
        for alone, both in zip(run(gradients, plan, ranks=4).values, together, strict=True):
            assert all(torch.equal(both[at][name], gradient) for name, gradient in alone[0].items())


@pytest.mark.parametrize("scheme, sizes", [slow("1d", {"tp": 3}), ("2d", {"row": 2, "col": 2})], ids=name_of)
def test_generate_goes_on_as_the_serial_model_does(scheme, sizes):
    config = GPTConfig(L=1, H=6, D=12, S=8)

    def on_this_rank():
        return parallelize(GPT(config), PLANS[scheme], Mesh(**sizes)).generate(b"abc", 6, seed=2)

    found = run(on_this_rank, ranks=len(coordinates(sizes))).values
    assert found == [GPT(config).generate(b"abc", 6, seed=2)] * len(found)


@pytest.mark.parametrize(
    "scheme, sizes", [slow("2d", {"row": 2, "col": 2}), ("1d-sp", {"tp": 2})], ids=name_of
)
def test_recomputation_draws_the_same_masks(scheme, sizes):
    """S32."""

    def again(model, plan, mesh):
        return recompute(parallelize(model, plan, mesh), "full")

    assert_has_the_serial_numbers(scheme, sizes, ONE_LAYER, n_steps=2, cut=again)


# ---- heads


class QueriesFirst(Attention):
    """Columns in the order [H q][G k][G v]: right serially, cut wrongly by columns."""

    def forward(self, x):
        y = self.qkv(x)
        n_groups = y.shape[-1] // ((self.n_sharing + 2) * self.K)
        parts = y.split([n_groups * self.n_sharing * self.K, n_groups * self.K, n_groups * self.K], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.K)).transpose(1, 2) for part in parts)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(-2))


class TakingTurns(Attention):
    """Query head h looks at head h % G of keys and values: another h and another G on a rank."""

    def attend(self, q, k, v):
        k, v = (heads.repeat(1, self.n_sharing, 1, 1) for heads in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "scheme, sizes, wrong",
    [("1d", {"tp": 2}, QueriesFirst), ("2d", {"row": 2, "col": 2}, TakingTurns)],
    ids=["1d", "2d"],
)
def test_heads_that_are_split_wrongly_are_caught(scheme, sizes, wrong, monkeypatch):
    monkeypatch.setattr(Attention, "forward", wrong.forward)
    monkeypatch.setattr(Attention, "attend", wrong.attend)
    assert_trains_like_the_serial_model(scheme, dict.fromkeys(sizes, 1), ONE_LAYER)
    with pytest.raises(AssertionError, match=r"^loss at .* at step 0 is wrong"):
        assert_trains_like_the_serial_model(scheme, sizes, ONE_LAYER)


@pytest.mark.parametrize("n_heads, n_kv_heads, tp", [(32, 4, 8), (64, 2, 8), (24, 8, 3)])
def test_fewer_heads_of_keys_and_values_than_ranks_are_refused(n_heads, n_kv_heads, tp):
    """S29: as many columns as there are would divide, and half a head is no head."""
    with torch.device("meta"):
        model = GPT(GPTConfig(L=1, H=n_heads, n_kv_heads=n_kv_heads, D=n_heads * 128, S=8))
    legal = [n for n in range(1, n_kv_heads + 1) if n_kv_heads % n == 0]
    message = (
        rf"^blocks\.0\.attention: {n_kv_heads} heads of keys and values, for {n_heads} query heads, cannot "
        rf"be shared out to {tp} ranks, since a head stays whole: try tp="
    )
    with pytest.raises(RefusedError, match=message):
        check(model, PLANS["1d"], {"tp": tp})
    for degree in legal:
        check(model, PLANS["1d"], {"tp": degree})


def test_grouped_heads_are_counted_once_over_all_ranks():
    """S29: 4 heads of keys and values over 2 ranks are 2 on each, not 4."""

    def on_this_rank():
        attention = (
            parallelize(GPT(GPTConfig(L=1, H=8, n_kv_heads=4, D=16)), PLANS["1d"], Mesh(tp=2))
            .blocks[0]
            .attention
        )
        seen = []
        attention.attend = lambda q, k, v: seen.append((q.shape[1], k.shape[1], v.shape[1])) or q
        attention(torch.zeros(1, 3, 16))
        return seen

    assert run(on_this_rank, ranks=2).values == [[(4, 2, 2)]] * 2


def test_grouped_heads_are_heads_whose_keys_and_values_are_the_same():
    """The oracle of the serial model: with the weights of k and v copied for each query head of a group."""
    grouped = scrambled_gpt(replace(ONE_LAYER, H=6, n_kv_heads=2, dropout=0.0))
    full = scrambled_gpt(replace(ONE_LAYER, H=6, n_kv_heads=None, dropout=0.0))
    state = grouped.state_dict()
    for kind in ("weight", "bias"):
        name = f"blocks.0.attention.qkv.{kind}"
        q, k, v = state[name].unflatten(0, (2, 5, 6)).split([3, 1, 1], dim=1)
        state[name] = torch.stack([q, k.expand_as(q), v.expand_as(q)], dim=2).flatten(0, 3)
    full.load_state_dict(state)
    assert torch.allclose(grouped(batch(0)[0]), full(batch(0)[0]), rtol=1e-12)


# ---- dropout


def drops_as_if_its_part_were_all(model, plan, mesh):
    model = parallelize(model, plan, mesh)
    model.blocks[0].dropout = Dropout(model.config.dropout)
    return model


class KeyOfItsOwn(ParallelDropout):
    def forward(self, x):
        for _ in range(self.mesh.rank):  # as a data loader does that draws on one rank alone
            torch.rand(())
        return super().forward(x)


def draws_a_key_of_its_own(model, plan, mesh):
    model = parallelize(model, plan, mesh)
    model.blocks[0].dropout = KeyOfItsOwn(model.config.dropout, plan.stream, mesh)
    return model


@pytest.mark.parametrize(
    "scheme, sizes, wrong",
    [
        ("1d", {"tp": 2}, draws_a_key_of_its_own),
        ("1d-sp", {"tp": 2}, draws_a_key_of_its_own),
        ("1d-sp", {"tp": 2}, drops_as_if_its_part_were_all),
        ("2d", {"row": 2, "col": 2}, drops_as_if_its_part_were_all),
    ],
)
def test_wrong_masks_are_caught(scheme, sizes, wrong):
    """S32: the same where the stream is a copy, others where it is cut."""
    with pytest.raises(AssertionError, match=r"^loss at .* at step 0 is wrong"):
        assert_trains_like_the_serial_model(scheme, sizes, ONE_LAYER, cut=wrong)


def test_masks_of_a_replicated_a_cut_and_a_sequence_cut_tensor():
    """S32: equal on the ranks of tp where the tensor is a copy, the serial mask's pieces where it is cut."""
    layouts = [Layout("B S D"), Layout("B S D@tp"), Layout("B S@tp D"), Layout("B@dp S D")]

    def on_this_rank():
        mesh, X = Mesh(dp=2, tp=2), torch.ones(4, 6, 8)
        torch.manual_seed(11)
        return [ParallelDropout(0.5, layout, mesh)(layout.shard(X, mesh)) for layout in layouts]

    torch.manual_seed(11)
    serial_masks = [Dropout(0.5)(torch.ones(4, 6, 8)) for _ in layouts]
    sizes = {"dp": 2, "tp": 2}
    found = run(on_this_rank, ranks=4).values
    for at, masks in zip(coordinates(sizes), found, strict=True):
        for layout, mask, whole in zip(layouts, masks, serial_masks, strict=True):
            assert torch.equal(mask, layout.cut(whole, sizes, at))
    same = [torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True)]
    assert same == [True, False, False, True]


def test_a_mask_keeps_its_share_and_depends_on_the_key():
    """A quarter, to three standard deviations; neighbours, and other keys, have nothing in common."""
    masks = [keeps(key, torch.arange(20_000), 0.25) for key in (1, 2, 2**62 - 1)]
    for mask in masks:
        assert abs(mask.double().mean() - 0.75) < 3 * (0.25 * 0.75 / 20_000) ** 0.5
        assert abs((mask[1:] & mask[:-1]).double().mean() - 0.75**2) < 0.012
    assert abs((masks[0] & masks[1]).double().mean() - 0.75**2) < 0.012


def split_mix_64(seed, n):
    """The n-th number, as the paper's Java has it."""
    z = (seed + n * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_the_numbers_behind_a_mask_are_split_mix_64():
    assert split_mix_64(1234567, 1) == 6457827717110365317, "as published with the generator"
    for p in (0.1, 0.5):
        expected = [split_mix_64(99, n) >> 11 >= int(p * 2**53) for n in range(1, 501)]
        assert keeps(99, torch.arange(500), p).tolist() == expected


def test_two_streams_as_megatron_has_them():
    """S32: a region that is whole draws alike on all ranks, one that is cut draws otherwise on each; what one
    rank draws in a fork does not shift the common stream; and states can be put back for recomputation."""

    def on_this_rank():
        tp = Mesh(tp=3)["tp"]
        streams = RandomStreams(seed=1, rank=tp.rank)
        drawn = [torch.rand(4)]
        with streams.fork():
            drawn.append(torch.rand(4))
            if tp.rank == 1:
                torch.rand(7)
        before = streams.own
        drawn.append(torch.rand(4))
        with streams.fork():
            drawn.append(torch.rand(4))
        streams.own = before
        with streams.fork():
            drawn.append(torch.rand(4))
        return drawn

    ranks = run(on_this_rank, ranks=3).values
    for other in ranks[1:]:
        same = [torch.equal(a, b) for a, b in zip(ranks[0], other, strict=True)]
        assert same == [True, False, True, False, False]
    assert all(torch.equal(drawn[3], drawn[4]) and not torch.equal(drawn[1], drawn[3]) for drawn in ranks)


# ---- norm, clipping, loss


def counts_copies(model, mesh):
    gradients = [(name, p.grad) for name, p in model.named_parameters()]
    return norm_over_ranks(gradients, [mesh[axis] for axis in mesh.sizes])


def counts_the_tied_weight_twice(model, mesh):
    copies = n_copies(model, mesh.sizes)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    gradients = [(name, model.get_parameter(name).grad) for name in names]
    copies["head.weight"] = copies["embedding.weight"]
    return norm_over_ranks(gradients, [mesh[axis] for axis in mesh.sizes], copies)


def of_this_rank(model, mesh):
    return norm_over_ranks([(name, p.grad) for name, p in model.named_parameters()], [])


@pytest.mark.parametrize(
    "scheme, sizes, wrong",
    [
        ("1d", {"tp": 2}, counts_copies),
        ("1d", {"tp": 2}, counts_the_tied_weight_twice),
        ("2d", {"row": 2, "col": 2}, of_this_rank),
    ],
)
def test_a_wrong_norm_is_caught(scheme, sizes, wrong):
    with pytest.raises(AssertionError, match=r"^norm at .* at step 0 is wrong"):
        assert_trains_like_the_serial_model(scheme, sizes, ONE_LAYER, norm=wrong)


class MeanOfMeans(VocabParallelCrossEntropy):
    """The mean over ranks of the means over their targets, times what GPT.loss divides by."""

    def forward(self, logits, labels):
        own = self.vocabulary.rows(self.vocabulary.logits, 2).shard(labels, self.mesh)
        losses, rows = token_losses(logits, own, self.V, self.mesh["col"]), self.mesh["row"]
        return sum_copy(losses.sum() / (own != IGNORED).sum(), rows) / rows.size * (labels != IGNORED).sum()


class OwnRows(VocabParallelCrossEntropy):
    """The sum over this rank's rows only."""

    def forward(self, logits, labels):
        rows = self.vocabulary.rows(self.vocabulary.logits, 2)
        return token_losses(logits, rows.shard(labels, self.mesh), self.V, self.mesh["col"]).sum()


@pytest.mark.parametrize("wrong", [MeanOfMeans, OwnRows])
def test_a_loss_of_a_rank_s_own_rows_is_caught(wrong):
    """Ranks have different numbers of targets, so the mean of their means is not the mean."""

    def cut(model, plan, mesh):
        model = parallelize(model, plan, mesh)
        model.cross_entropy = wrong(model.config.V, plan.vocabulary, mesh)
        return model

    with pytest.raises(AssertionError, match=r"^loss at .* at step 0 is wrong"):
        assert_trains_like_the_serial_model("2d", {"row": 2, "col": 2}, ONE_LAYER, cut=cut)


# ---- what stands between the layers


def leaves_norms_alone(model, plan, mesh):
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    model = parallelize(model, plan, mesh)
    for name, norm in norms.items():
        model.set_submodule(name, norm)
    return model


def averages_norms(model, plan, mesh):
    model = parallelize(model, plan, mesh)
    for module in model.modules():
        if isinstance(module, ParallelLayerNorm):
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: gradient / mesh.sizes["tp"])
    return model


def loses_the_head_s_part(model, plan, mesh):
    """Of the two gradients of a tied weight."""
    model = parallelize(model, plan, mesh)
    model.head.forward = lambda x: plan.vocabulary.project(x, model.head.weight.detach(), mesh)
    return model


@pytest.mark.parametrize("wrong", [leaves_norms_alone, averages_norms, loses_the_head_s_part])
def test_parts_that_miss_a_gradient_are_caught(wrong):
    right = serially_trained(ONE_LAYER, 1)[0]["norm"].item()  # so that it is the gradient that is found
    with pytest.raises(AssertionError, match=r"^(blocks|embedding).* at step 0 is wrong"):
        assert_trains_like_the_serial_model(
            "1d-sp", {"tp": 2}, ONE_LAYER, cut=wrong, norm=lambda model, mesh: right
        )


class BiasOnEveryRank(Row):
    """S11: added to the term of each rank, and so p times to their sum."""

    def forward(self, x, w, mesh):
        return mesh["tp"].all_reduce(x @ w + 0.1)


def test_a_bias_that_is_added_once_per_rank_is_caught():
    wrong = GPTPlan(in_pairs("column", BiasOnEveryRank()), VOCABULARIES["1d"])
    with pytest.raises(AssertionError, match=r"^loss at .* is wrong"):
        assert_trains_like_the_serial_model("1d", {"tp": 2}, ONE_LAYER, plan=wrong)


# ---- refusals


@pytest.mark.parametrize(
    "plan, sizes, message",
    [
        (
            GPTPlan(in_pairs("3d", "3d"), VOCABULARIES["3d"]),
            {"i": 2, "j": 2, "k": 2},
            r"attention\.qkv leave its output as Layout\(\"B@i@k F@j\"\), but .* takes its input as "
            r"Layout\(\"B@i@j D@k\"\)",
        ),
        (
            GPTPlan(in_pairs("3d", Cube().exchanged()), VOCABULARIES["1d"]),
            {"i": 2, "j": 2, "k": 2},
            r"attention\.qkv takes its input as \"B@i@j D@k\", but what comes before leaves it whole",
        ),
        (
            GPTPlan(in_pairs("column", "row"), VOCABULARIES["1d-sp"]),
            {"tp": 2},
            r"attention\.qkv makes its branch begin as Layout\(\"B D\"\), and the plan's stream lies as "
            r"Layout\(\"B S@tp D\"\): take the layers and the vocabulary of one scheme, as PLANS has them",
        ),
        (
            GPTPlan(in_pairs("2d", "2d"), VOCABULARIES["1d-sp"]),
            {"tp": 2, "row": 1, "col": 2},
            r"branch begin as Layout\(\"B@row D@col\"\), and the plan's stream lies as Layout\(\"B S@tp ",
        ),
        (
            GPTPlan(
                in_pairs(SequenceColumn(), SequenceRow()),
                Vocabulary(Layout("B@tp D"), Layout("V@tp D"), Layout("B V@tp")),
            ),
            {"tp": 2},
            r"begin as Layout\(\"B@tp D\"\), its rows counted along S, and .* Layout\(\"B@tp S D\"\)",
        ),
        (PLANS["2d"], {"row": 2, "col": 3}, r"these must be equal\. Try row=2, col=2 or row=3, col=3"),
        (
            PLANS["2d"],
            {"row": 4, "col": 4},
            r"6 heads .* cannot be shared out to 4 ranks.*try col=1, 2, 3 or 6",
        ),
        (PLANS["3d"], {"i": 5, "j": 2, "k": 2}, r"dim D of size 36 cannot be cut evenly over k=2 x i=5"),
        (PLANS["1d"], {"row": 2}, r"over the axis 'tp' .* the mesh does not have: its axes are row=2"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_any_communication(plan, sizes, message):
    """S04, and what a mesh cannot share."""
    with torch.device("meta"):
        model = GPT(CONFIG)
    with pytest.raises(RefusedError, match=message):
        check(model, plan, sizes)


@pytest.mark.parametrize(
    "scheme, sizes, shape, message",
    [
        ("2d", {"row": 3, "col": 3}, (4, 6), r"dim B of size 4 cannot be cut evenly over row=3"),
        ("2.5d", {"depth": 2, "row": 3, "col": 3}, (3, 6), r"dim B of size 3 .* over depth=2 x row=3"),
        ("3d", {"i": 1, "j": 2, "k": 3}, (4, 6), r"dim B of size 4 cannot be cut evenly over i=1 x k=3"),
        ("1d-sp", {"tp": 3}, (4, 5), r"dim S of size 5 cannot be cut evenly over tp=3"),
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused(scheme, sizes, shape, message):
    with torch.device("meta"):
        model = GPT(CONFIG)
    with pytest.raises(RefusedError, match=message):
        check(model, PLANS[scheme], sizes, batch=shape)

    def on_this_rank():
        parallelize(GPT(CONFIG), PLANS[scheme], Mesh(**sizes)).loss(
            torch.zeros(shape).long(), torch.zeros(shape).long()
        )

    if scheme == "3d":
        return  # the ranks of i and j can share 4 sequences, and the first layer refuses them
    with pytest.raises(RefusedError, match=message) as refused:
        run(on_this_rank, ranks=len(coordinates(sizes)))
    assert refused.value.run.trace.events == ()


def test_a_whole_stream_taken_for_a_part_is_refused():
    """S77: in 2D a rank's part has D/q columns; who hands a block the whole is told how to cut it."""

    def on_this_rank():
        model = parallelize(GPT(CONFIG), PLANS["2d"], Mesh(row=2, col=2))
        model.blocks[0](torch.zeros(B, CONFIG.S, CONFIG.D))

    message = (
        r'lies as Layout\("B@row S D@col"\) has 18 columns of it on each rank of Mesh\(row=2, col=2\); '
        r"rank \d was given shape \(12, 6, 36\)\. "
        r'Is it whole\? Layout\("B@row S D@col"\)\.shard\(X, mesh\) cuts it'
    )
    with pytest.raises(RefusedError, match=message) as refused:
        run(on_this_rank, ranks=4)
    assert refused.value.run.trace.events == ()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("4d", 4), r"no plan is called '4d'; there are 1d, 1d-sp, 2d, 2\.5d, 3d"),
        (("2d", 8), r"2d needs q x q ranks, and 8 is not that\. Nearest: 4 \(2 x 2\) or 9 \(3 x 3\)"),
        (("3d", 9), r"3d needs q x q x q ranks, and 9 is not that\. Nearest: 8"),
        (("2d", 8, 2), r"depth=2 is the number of grids of 2\.5d, and 2d has none; leave it out"),
    ],
)
def test_numbers_of_ranks_that_no_mesh_has_are_refused(arguments, message):
    with pytest.raises(RefusedError, match=message):
        mesh_sizes(*arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(H=8, D=16, n_kv_heads=3),
            r"H=8 query heads cannot share n_kv_heads=3 evenly; try n_kv_heads=1, 2, 4, 8",
        ),
        (dict(n_kv_heads=0), r"n_kv_heads=0 evenly"),
    ],
)
def test_groups_that_are_not_even_are_refused(options, message):
    with pytest.raises(RefusedError, match=message):
        GPTConfig(**options)


def test_a_tied_weight_is_one_parameter_everywhere():
    """In the serial model, in a rank's part, and in what is said of how it is stored."""

    def on_this_rank():
        model = parallelize(GPT(CONFIG), PLANS["2d"], Mesh(row=2, col=2))
        return model.head.weight is model.embedding.weight, [name for name in stored(model) if "head" in name]

    model = GPT(CONFIG)
    assert model.head.weight is model.embedding.weight
    assert run(on_this_rank, ranks=4).values == [(True, [])] * 4


def test_parameters_that_zero_has_given_back_are_not_gathered_as_they_are():
    """ZeRO 3 keeps them elsewhere, and shows not a number; what it keeps is the serial model's."""
    config = GPTConfig(L=1, H=6, D=12, S=8)

    def on_this_rank():
        mesh = Mesh(dp=2, tp=2)
        model = parallelize(GPT(config), PLANS["1d"], mesh)
        zero = Zero(model, 3, mesh["dp"], torch.optim.AdamW)
        with pytest.raises(
            RefusedError, match=r"^embedding\.weight is not a number .* zero\.whole_parameters"
        ):
            model.generate(b"abc", 4)
        return serial(model, mesh, zero.whole_parameters()).generate(b"abc", 4)

    assert run(on_this_rank, ranks=4).values == [GPT(config).generate(b"abc", 4)] * 4
