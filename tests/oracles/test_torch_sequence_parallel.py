"""Megatron's sequence parallelism of ours and of DTensor's styles: one block, the same numbers and bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lessons_lib import Mesh, region, run
from lessons_lib.models.gpt import GPT, Block, GPTConfig
from lessons_lib.sequence_parallel import SequenceColumnKept, SequenceParallelBlock
from lessons_lib.sequence_parallel.megatron import STREAM
from lessons_lib.timeline import ring_traffic
from tests.oracles.serial import Named, assert_every_rank_has, caught, full, randomised

pytestmark = pytest.mark.oracle

CONFIG = GPTConfig(L=1, H=4, D=24, S=12)
SEQUENCE = Shard(1)  # of [B S D]
STYLES: dict[str, ParallelStyle] = {
    "attention_norm": SequenceParallel(use_local_output=True),
    "attention.qkv": ColwiseParallel(input_layouts=SEQUENCE),
    "attention.proj": RowwiseParallel(output_layouts=SEQUENCE),
    "mlp_norm": SequenceParallel(use_local_output=True),
    "mlp.up": ColwiseParallel(input_layouts=SEQUENCE),
    "mlp.down": RowwiseParallel(output_layouts=SEQUENCE),
}


def serial_block() -> Block:
    return randomised(GPT(CONFIG)).blocks[0]


def data(seed: int) -> Tensor:
    shape = 3, CONFIG.S, CONFIG.D
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def serially() -> Named:
    block, X = serial_block(), data(1).requires_grad_()
    Y = block(X)
    Y.backward(data(2))
    return {"Y": Y.detach(), "dX": X.grad} | {name: p.grad for name, p in block.named_parameters()}


def step(block: Block, mesh: Mesh) -> Named:
    """Everything whole, and weights as nn.Linear has them."""
    x = STREAM.shard(data(1), mesh).requires_grad_()
    with region("forward"):
        y = block(x)
    with region("backward"):
        y.backward(STREAM.shard(data(2), mesh))
        gradients = {name: full(p.grad) for name, p in block.named_parameters() if "norm" in name}
    found = {"Y": STREAM.unshard(y.detach(), mesh), "dX": STREAM.unshard(x.grad, mesh)}
    return found | gradients


def by_hand() -> Named:
    mesh = Mesh(tp=dist.get_world_size())
    block = SequenceParallelBlock(serial_block(), CONFIG.S, mesh, SequenceColumnKept())
    found = step(block, mesh)
    for name, layer in block.named_modules():
        if hasattr(layer, "scheme"):
            found[f"{name}.weight"] = layer.scheme.W.unshard(layer.weight.grad, mesh).T
            found[f"{name}.bias"] = layer.scheme.Y.last().unshard(layer.bias.grad, mesh)
    return found


def by_styles(styles: dict[str, ParallelStyle] = STYLES) -> Named:
    mesh = Mesh(tp=dist.get_world_size())
    block = parallelize_module(serial_block(), mesh.device_mesh, styles)
    assert isinstance(block, Block)
    return step(block, mesh) | {name: full(p.grad) for name, p in block.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_are_the_serial_block(ranks: int, transport: str) -> None:
    for way in (by_hand, by_styles):
        assert_every_rank_has(serially(), run(way, ranks=ranks, transport=transport).values)


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_send_the_same(ranks: int) -> None:
    """But for the biases of row layers: DTensor takes their gradients from dY where it is gathered anyway."""
    biases = 2 * ring_traffic("all_reduce", CONFIG.D, ranks) * torch.float64.itemsize
    ours, theirs = (run(way, ranks=ranks).trace for way in (by_hand, by_styles))
    for rank in range(ranks):
        assert ours.bytes_sent(rank, "forward") == theirs.bytes_sent(rank, "forward") > 0
        assert ours.bytes_sent(rank, "backward") == theirs.bytes_sent(rank, "backward") + biases


def test_styles_without_the_norms_are_caught() -> None:
    without = {name: style for name, style in STYLES.items() if "norm" not in name}
    values = run(by_styles, without, ranks=2).values
    with caught():
        assert_every_rank_has(serially(), values)
