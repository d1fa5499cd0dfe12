"""The GPT in stages: every layer on exactly one, the slowest as fast as can be, names as before."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lessons_lib.cost.flops import model_flops_per_token, weights
from lessons_lib.errors import RefusedError
from lessons_lib.models.corpus import batch
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.pipeline_parallel import cut_by_cost, cut_model, layer_costs, tied_places

CONFIG = GPTConfig(L=5, H=2, D=8, S=6, V=256)


@pytest.mark.parametrize("n_stages", range(1, 8))
def test_the_stages_one_after_the_other_are_the_model(n_stages):
    model = GPT(CONFIG).double()
    tokens, _ = batch(step=0, n_sequences=2, S=6)
    stages = cut_model(model, n_stages)
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, model(tokens))
    named = [pair for stage in stages for pair in stage.named_parameters()]
    assert [name for name, _ in named] == [name for name, _ in model.named_parameters()]
    assert all(p is q for (_, p), q in zip(named, model.parameters(), strict=True))
    assert len(stages) == n_stages


def dearest(costs, cut):
    return max(sum(costs[at] for at in layers) for layers in cut)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_cheaper_dearest_stage(costs, data):
    n = len(costs)
    n_stages = data.draw(st.integers(1, n))
    cut = cut_by_cost(costs, n_stages)
    assert [at for layers in cut for at in layers] == list(range(n))
    assert len(cut) == n_stages and all(map(len, cut))
    borders = itertools.combinations(range(1, n), n_stages - 1)
    every = [[range(a, b) for a, b in itertools.pairwise((0, *inner, n))] for inner in borders]
    assert dearest(costs, cut) == min(dearest(costs, other) for other in every)


def test_an_even_cut_of_the_default_model():
    """Eight blocks and a head that costs a sixth of one: two blocks on each of four stages."""
    cut = cut_model(GPT(GPTConfig(L=8, H=2, D=16, S=8, V=32)), 4)
    assert [list(stage.layers) for stage in cut] == [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]]


@pytest.mark.parametrize("config", [CONFIG, GPTConfig(L=3, H=4, D=32, S=16, V=50)], ids=str)
def test_costs_are_the_forward_flops_of_the_formula(config):
    """A third of the model's FLOPs, which are 6 N + 12 L D S per token."""
    costs = layer_costs(GPT(config))
    per_token = model_flops_per_token(weights(config), config.L, config.D, config.S)
    assert sum(costs) == per_token / 3 * config.S
    assert costs[0] == 0 and len(set(costs[1:-1])) == 1
    assert costs[-1] == 2 * config.D * config.V * config.S


LOST = [
    ([range(3), range(3, 6)], 2),  # the head
    ([range(1, 4), range(4, 7)], 2),  # the embedding
    ([range(3), range(4, 7)], 2),  # a block in the middle
    ([range(4), range(3, 7)], 2),  # a block twice
    ([range(3, 7), range(3)], 2),  # in another order
    ([range(7), range(7, 7)], 2),  # a stage without any
    ([range(3), range(3, 7)], 3),  # another number of stages
]


@pytest.mark.parametrize("layers, n_stages", LOST)
def test_a_cut_that_loses_a_layer_is_refused(layers, n_stages):
    message = (
        r"every stage needs a layer, and each of the layers 0 .embedding., 1 to 5 .blocks. and 6 .norm and"
    )
    with pytest.raises(RefusedError, match=message):
        cut_model(GPT(CONFIG), n_stages, layers=layers)


@pytest.mark.parametrize("n_stages", [0, 8])
def test_more_stages_than_layers_are_refused(n_stages):
    with pytest.raises(RefusedError, match=f"7 layers cannot be cut into {n_stages} stages: take 1 to 7"):
        cut_model(GPT(CONFIG), n_stages)


def test_costs_of_another_model_are_refused():
    with pytest.raises(RefusedError, match="each of the layers 0"):
        cut_model(GPT(CONFIG), 2, costs=[1] * 6)


def test_a_sequence_longer_than_the_model_is_refused_as_the_model_does():
    with pytest.raises(RefusedError, match=r"a sequence of 7 tokens .* S=6 learned positions"):
        cut_model(GPT(CONFIG), 2)[0](torch.zeros(1, 7, dtype=torch.int64))


def test_tied_places_are_found():
    tied = GPT(GPTConfig(L=2, H=2, D=8, S=6, V=16, tied=True))
    assert tied_places(cut_model(tied, 3)) == [[(0, "embedding.weight"), (2, "head.weight")]]
    assert tied_places(cut_model(tied, 1)) == []  # one graph sees both uses
    assert tied_places(cut_model(GPT(CONFIG), 3)) == []
