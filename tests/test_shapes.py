"""The shapes in signatures are checked while tests run: tests/conftest.py switches that on."""

import pytest
import torch
from jaxtyping import TypeCheckError

from lessons_lib.models.gpt import GPT, MLP, GPTConfig
from lessons_lib.tensor_parallel import SCHEMES

SMALL = GPTConfig(L=1, H=2, D=8)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: MLP(SMALL)(torch.zeros(3, 8)),  # B S D
        lambda: GPT(SMALL)(torch.zeros(3, 4)),  # tokens are whole numbers
        lambda: GPT(SMALL).loss(*torch.zeros(2, 3, 4, dtype=torch.long)[:, :, :, None].unbind()),
        lambda: SCHEMES["column"].forward(torch.zeros(3, 8), torch.zeros(9, 5), None),  # b d times d f
    ],
)
def test_a_wrong_shape_is_refused(wrong):
    with pytest.raises(TypeCheckError, match="Type-check error"):
        wrong()
