"""The whole GPT under a plan beside the serial one: every loss, norm and gradient, on every rank.

Which block of a parameter a rank should hold is said here once more, by hand: ``BY_HAND``.
"""

from __future__ import annotations

import torch

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.data_parallel import clip
from lessons_lib.layout import coordinates
from lessons_lib.models.gpt import GPT, IGNORED, GPTConfig
from lessons_lib.plan import PLANS, global_norm, parallelize, traffic

# Eleven words: nobody's ranks divide them. All else divides on every mesh below.
CONFIG = GPTConfig(L=2, H=18, D=36, S=6, V=11, n_kv_heads=6, tied=True, dropout=0.3)
PLAIN = GPTConfig(L=1, H=6, D=36, S=6, V=11)
B = 12
MAX_NORM = 0.5  # less than the gradients of any step have, so that all are clipped

MESHES = {
    "1d": [{"tp": 2}, {"tp": 3}],
    "1d-sp": [{"tp": 3}, {"tp": 2}],
    "2d": [{"row": 2, "col": 2}, {"row": 3, "col": 3}],
    "2.5d": [{"depth": 2, "row": 2, "col": 2}, {"depth": 3, "row": 2, "col": 2}],
    "3d": [{"i": 1, "j": 2, "k": 3}, {"i": 2, "j": 2, "k": 2}],
}

# Of weights, as W [D, F], of the two layers of a branch, and the first one's bias; of the table of words
# [V, D], that of positions [S, D], and vectors beside the stream.
BY_HAND = {
    "1d": "D F@tp, F@tp, D@tp F, V@tp D, S D, D",
    "1d-sp": "D F@tp, F@tp, D@tp F, V@tp D, S D, D",
    "2d": "D@row F@col, F@col, D@row F@col, V@row D@col, S D@col, D@col",
    "2.5d": "D@row F@col, F@col, D@row F@col, V@row D@col, S D@col, D@col",
    "3d": "D@k@i F@j, F@j, D@j@i F@k, V@j@i D@k, S D@k, D@k",
}


def block(scheme, name, whole, coordinate, sizes):
    """What the rank at ``coordinate`` should hold of a tensor shaped like the serial parameter ``name``."""
    first, first_bias, second, words, positions, vector = map(Layout, BY_HAND[scheme].split(", "))
    if name in ("embedding.weight", "head.weight"):
        n_blocks, _ = words.n_blocks(sizes)
        return words.cut(torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % n_blocks)), sizes, coordinate)
    if name == "position.weight":
        return positions.cut(whole, sizes, coordinate)
    begins = "qkv" in name or "up" in name
    if whole.dim() == 2:
        return (first if begins else second).cut(whole.T, sizes, coordinate)
    return (first_bias if begins else vector).cut(whole, sizes, coordinate)


def batch(step, config=CONFIG, n_sequences=B):
    """Random tokens; a few targets are left out, more in the first rows than in the last."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(config.V, (2, n_sequences, config.S), generator=generator).unbind()
    targets[: n_sequences // 3, : config.S // 2] = IGNORED
    return tokens, targets


def scrambled_gpt(config=CONFIG):
    """In float64, with parameters that are all different: no bias is 0, no norm is 1."""
    model, generator = GPT(config).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    return model


def train(model, n_steps, norm_of):
    """Yield, after each backward, the loss, the norm and all gradients; then clip and take the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    torch.manual_seed(5)
    for step in range(n_steps):
        optimizer.zero_grad()
        with region("forward"):
            loss = model.loss(*batch(step, model.config))
        with region("backward"):
            loss.backward()
        norm = norm_of(model)
        yield {"loss": loss.detach(), "norm": torch.tensor(norm, dtype=torch.float64)} | {
            name: p.grad.clone() for name, p in model.named_parameters()
        }
        factor = clip(norm, MAX_NORM)
        assert factor < 1
        for parameter in model.parameters():
            parameter.grad *= factor
        optimizer.step()


def serial_norm(model):
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


def serially_trained(config, n_steps):
    return list(train(scrambled_gpt(config), n_steps, serial_norm))


def assert_has_the_serial_numbers(
    scheme,
    sizes,
    config=CONFIG,
    n_steps=1,
    plan=None,
    make=scrambled_gpt,
    cut=parallelize,
    norm=global_norm,
    transport="threads",
):
    """Every loss, norm and gradient of every rank is the serial model's."""
    plan = plan or PLANS[scheme]

    def on_this_rank():
        mesh = Mesh(**sizes)
        model = cut(make(config), plan, mesh)
        steps = list(train(model, n_steps, lambda model: norm(model, mesh)))
        return steps, traffic(model, B * config.S, mesh)

    places, serial = coordinates(sizes), serially_trained(config, n_steps)
    result = run(on_this_rank, ranks=len(places), transport=transport)
    for at, (steps, _) in zip(places, result.values, strict=True):
        for step, (found, expected) in enumerate(zip(steps, serial, strict=True)):
            assert found.keys() == expected.keys()
            for name, whole in expected.items():
                wanted = block(scheme, name, whole, at, sizes) if whole.dim() else whole
                assert found[name].shape == wanted.shape, f"{name} at {at} has {tuple(found[name].shape)}"
                size = wanted.norm().item() or 1.0  # a rank may have padding alone
                error = (found[name] - wanted).norm().item() / size
                assert error < 1e-10, f"{name} at {at} at step {step} is wrong by {error:.0e}"
    return result


def assert_trains_like_the_serial_model(scheme, sizes, config=CONFIG, n_steps=1, **how):
    """The same, and the bytes are the formula's, exactly."""
    result = assert_has_the_serial_numbers(scheme, sizes, config, n_steps, **how)
    for direction in ("forward", "backward"):
        counted = sum(result.trace.bytes_sent(rank, direction) for rank in range(len(result.values)))
        formula = sum(bill[direction] for _, bill in result.values)
        assert counted == 8 * n_steps * formula, f"{direction} traffic is not the formula's"
    return result
