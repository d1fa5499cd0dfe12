"""The serial GPT against torch's own transformer layer, and the text it reads."""

import pytest
import torch
from torch import nn

from lessons_lib.errors import RefusedError
from lessons_lib.models import corpus
from lessons_lib.models.gpt import GPT, MLP, Attention, Block, GPTConfig

SMALL = GPTConfig(L=2, H=3, D=12, S=7, V=128)


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def scrambled(module, seed=1):
    """The module in float64, with parameters that are all different: no bias is 0, no norm is 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return module


def test_a_block_is_torch_s_pre_ln_layer_forward_and_in_every_gradient():
    torch.manual_seed(2)
    B, S, D, H, K, F = 5, 7, 12, 3, 4, 48
    block = scrambled(GPT(SMALL)).blocks[0]
    oracle = nn.TransformerEncoderLayer(
        D, H, F, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )

    def q_k_v(parameter):
        """Torch keeps all queries, then all keys, then all values: [q|k|v][head][K]."""
        return parameter.unflatten(0, (H, 3, K)).transpose(0, 1).flatten(0, 2)

    def beside(take):
        """What ``take`` finds on each parameter of the block, and on its counterpart of the oracle."""
        ours, theirs = block, oracle
        return {
            "qkv.weight": (q_k_v(take(ours.attention.qkv.weight)), take(theirs.self_attn.in_proj_weight)),
            "qkv.bias": (q_k_v(take(ours.attention.qkv.bias)), take(theirs.self_attn.in_proj_bias)),
            "proj.weight": (take(ours.attention.proj.weight), take(theirs.self_attn.out_proj.weight)),
            "proj.bias": (take(ours.attention.proj.bias), take(theirs.self_attn.out_proj.bias)),
            "up.weight": (take(ours.mlp.up.weight), take(theirs.linear1.weight)),
            "up.bias": (take(ours.mlp.up.bias), take(theirs.linear1.bias)),
            "down.weight": (take(ours.mlp.down.weight), take(theirs.linear2.weight)),
            "down.bias": (take(ours.mlp.down.bias), take(theirs.linear2.bias)),
            "attention_norm.weight": (take(ours.attention_norm.weight), take(theirs.norm1.weight)),
            "attention_norm.bias": (take(ours.attention_norm.bias), take(theirs.norm1.bias)),
            "mlp_norm.weight": (take(ours.mlp_norm.weight), take(theirs.norm2.weight)),
            "mlp_norm.bias": (take(ours.mlp_norm.bias), take(theirs.norm2.bias)),
        }

    with torch.no_grad():
        for ours, theirs in beside(lambda parameter: parameter.detach()).values():
            theirs.copy_(ours)
    x = torch.randn(B, S, D, dtype=torch.float64, requires_grad=True)
    x_oracle = x.detach().clone().requires_grad_()
    mask = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    y, y_oracle = block(x), oracle(x_oracle, src_mask=mask, is_causal=True)
    dy = torch.randn_like(y)
    y.backward(dy)
    y_oracle.backward(dy)

    pairs = beside(lambda parameter: parameter.grad)
    assert len(pairs) == len(list(block.parameters())) == len(list(oracle.parameters()))
    pairs |= {"y": (y, y_oracle), "x": (x.grad, x_oracle.grad)}
    assert {name for name, pair in pairs.items() if not relative_error(*pair) < 1e-10} == set()


def test_the_names_a_plan_can_rely_on():
    layers = [name for name, module in GPT(SMALL).named_modules() if isinstance(module, nn.Linear)]
    branches = ["attention.qkv", "attention.proj", "mlp.up", "mlp.down"]
    assert layers == [f"blocks.{at}.{layer}" for at in range(2) for layer in branches] + ["head"]


@pytest.mark.parametrize("n_heads", [1, 2])
def test_attention_has_as_many_heads_as_it_has_columns(n_heads):
    """Of three heads, n on one rank and the others on another add up to all."""
    whole = scrambled(Attention(SMALL))
    x = torch.randn(5, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def part(heads):
        columns, rows = slice(heads.start * 12, heads.stop * 12), slice(heads.start * 4, heads.stop * 4)
        attention = Attention(SMALL).double()
        attention.qkv.weight = nn.Parameter(whole.qkv.weight[columns])
        attention.qkv.bias = nn.Parameter(whole.qkv.bias[columns])
        attention.proj = nn.Linear(4 * len(heads), 12, bias=False)
        attention.proj.weight = nn.Parameter(whole.proj.weight[:, rows])
        return attention(x)

    parts = part(range(n_heads)) + part(range(n_heads, 3)) + whole.proj.bias
    assert relative_error(parts, whole(x)) < 1e-10


def test_no_token_sees_a_later_one():
    model = scrambled(GPT(SMALL))
    tokens = corpus.batch(0, 3, 7)[0]
    changed = tokens.clone()
    changed[:, 4] += 1
    before, after = model(tokens % 128), model(changed % 128)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(-1).any()


def test_the_loss_is_the_mean_over_all_tokens():
    model = scrambled(GPT(SMALL))
    tokens, targets = corpus.batch(0, 3, 7)
    log_p = model(tokens % 128).log_softmax(-1)
    terms = [-log_p[b, s, targets[b, s] % 128] for b in range(3) for s in range(7)]
    assert model.loss(tokens % 128, targets % 128).item() == pytest.approx(sum(terms).item() / 21, rel=1e-12)


def test_weights_depend_on_the_seed_and_on_nothing_else():
    torch.manual_seed(4)
    first = GPT(SMALL, seed=5).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(1), drawn), "building a model consumed global random numbers"
    second, other = GPT(SMALL, seed=5).state_dict(), GPT(SMALL, seed=6).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert torch.equal(weight, other[name]) == (weight.ndim == 1), name
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])
    one_layer = GPT(GPTConfig(L=1, H=3, D=12, S=7, V=128), seed=5).state_dict()
    assert torch.equal(first["blocks.0.mlp.up.weight"], one_layer["blocks.0.mlp.up.weight"])


def test_weights_are_drawn_as_gpt_2_draws_them():
    state = GPT(GPTConfig(L=2), seed=5).state_dict()
    for name, weight in state.items():
        if weight.ndim == 2:
            ends_a_branch = "proj" in name or "down" in name
            assert weight.std().item() == pytest.approx(0.01 if ends_a_branch else 0.02, rel=0.03), name
        else:
            assert torch.all(weight == (1.0 if name.endswith("norm.weight") else 0.0)), name


def test_dropout_acts_in_training_only():
    model = GPT(GPTConfig(L=1, H=3, D=12, S=7, V=128, dropout=0.5))
    tokens = corpus.batch(0, 3, 7)[0] % 128
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_generate_draws_from_the_model_s_own_prediction():
    """A model that was taught the alphabet recites it, beyond the length it can see at once."""
    model = GPT(GPTConfig(L=1, H=3, D=12, S=7, V=128))
    starts = torch.arange(10)[:, None] + torch.arange(8)  # every way to begin, 8 letters each
    sequences = torch.tensor(list(b"abcdefghijabcdefghij"))[starts]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(sequences[:, :-1], sequences[:, 1:]).backward()
        optimizer.step()
    assert model.generate(b"ab", 18, temperature=0) == b"cdefghijabcdefghij"
    assert model.training


def test_generate_is_decided_by_its_seed_and_leaves_the_global_generator_alone():
    model = GPT(SMALL)
    state = torch.get_rng_state()
    samples = [model.generate(b"x", 20, seed=seed) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    assert all(len(sample) == 20 for sample in samples)
    assert torch.equal(state, torch.get_rng_state())


def test_temperature_sharpens_and_flattens_the_prediction():
    """Near 0 every byte is the likeliest one; far above 1 all bytes are as likely as each other."""
    model = scrambled(GPT(SMALL))
    likeliest = model.generate(b"x", 20, temperature=0)
    assert model.generate(b"x", 20, temperature=1e-6, seed=1) == likeliest
    assert model.generate(b"x", 20, temperature=1.0, seed=1) != likeliest
    flat, sharp = (len(set(model.generate(b"x", 80, temperature=t, seed=1))) for t in (100.0, 0.2))
    assert flat > 50 and sharp < 25, "different bytes among 80"


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: GPTConfig(D=10, H=4), r"width D=10 cannot be shared out to H=4 heads; try H=1, 2, 5, 10"),
        (lambda: GPTConfig(L=0), r"GPTConfig\(L=0\): L is at least 1"),
        (lambda: GPT(SMALL)(torch.zeros(1, 8, dtype=torch.long)), r"8 tokens .* S=7 .* GPTConfig\(S=8\)"),
        (lambda: GPT(SMALL).generate(b"", 3), r"prompt b'' .* at least one byte"),
        (lambda: GPT(SMALL).generate(b"\xff", 3), r"prompt b'\\xff' .* vocabulary size V=128"),
        (lambda: corpus.batch(0, 0, 64), r"0 sequences of S=64 tokens"),
        (lambda: corpus.batch(0, 1, 10**6, split="held_out"), r"'held_out' .* sequences of 1 to \d+ tokens"),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(RefusedError, match=message):
        wrong()


def test_the_text_is_the_language_reference():
    text = corpus.text()
    assert len(text) > 400_000
    assert b'\n\nThe "with" statement' in text


def test_batches_are_places_in_the_text():
    tokens, targets = corpus.batch(3, n_sequences=5, S=9, seed=1)
    assert tokens.shape == targets.shape == (5, 9)
    training = bytes(corpus.part("train").tolist())
    assert corpus.text().startswith(training)
    for sequence, following in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert bytes([*sequence, following[-1]]) in training
        assert sequence[1:] == following[:-1]


def test_batches_are_decided_by_step_and_seed():
    same = [corpus.batch(3, 5, 9, seed=1)[0] for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], corpus.batch(4, 5, 9, seed=1)[0])
    assert not torch.equal(same[0], corpus.batch(3, 5, 9, seed=2)[0])
    same[0].zero_()  # a batch is a copy: nobody can change the corpus
    assert torch.equal(same[1], corpus.batch(3, 5, 9, seed=1)[0])


def test_training_never_sees_the_held_out_tail():
    train, held_out = corpus.part("train"), corpus.part("held_out")
    assert bytes(torch.cat([train, held_out]).tolist()) == corpus.text()
    assert 0.09 < len(held_out) / len(corpus.text()) < 0.11
    tokens, targets = corpus.batch(0, 4, 9, split="held_out")
    tail = bytes(held_out.tolist())
    for sequence in torch.cat([tokens, targets[:, -1:]], dim=1).tolist():
        assert bytes(sequence) in tail


def test_the_package_lists_its_names():
    import lessons_lib.models as package

    assert dir(package) == package.__all__ == ["GPT", "GPTConfig"]
    assert package.GPT is GPT
    with pytest.raises(AttributeError, match=r"has no attribute 'Gpt'; it has GPT, GPTConfig"):
        package.Gpt  # noqa: B018


def test_the_pieces_stand_alone():
    x = torch.randn(2, 7, 12)
    for module in (Block(SMALL), MLP(SMALL), Attention(SMALL)):
        assert module(x).shape == x.shape
