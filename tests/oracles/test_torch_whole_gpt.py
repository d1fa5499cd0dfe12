"""The whole GPT by DTensor's parallel styles, and by the plan "1d": both give the serial gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lessons_lib import Mesh, run
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.plan import PLANS, parallelize, serial_gradients

pytestmark = pytest.mark.oracle

CONFIG = GPTConfig(L=2, H=8, D=16, S=6, V=12, n_kv_heads=4)
Named = dict[str, Tensor]


def trained(model: GPT, gradients: Callable[[], Named]) -> list[Named]:
    """Losses and whole gradients of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(3):
        tokens, targets = torch.randint(
            CONFIG.V, (2, 3, CONFIG.S), generator=torch.Generator().manual_seed(step)
        )
        optimizer.zero_grad()
        loss = model.loss(tokens, targets)
        loss.backward()
        found.append({"loss": loss.detach(), **gradients()})
        optimizer.step()
    return found


def serially() -> list[Named]:
    model = GPT(CONFIG).double()
    return trained(model, lambda: {name: p.grad.clone() for name, p in model.named_parameters()})


def by_plan() -> list[Named]:
    model, mesh = GPT(CONFIG).double(), Mesh(tp=dist.get_world_size())
    parallelize(model, PLANS["1d"], mesh)
    return trained(model, lambda: serial_gradients(model, mesh))


def by_styles() -> list[Named]:
    styles = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.proj": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    model = GPT(CONFIG).double()
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles)

    def gradients() -> Named:
        found = {name: p.grad for name, p in model.named_parameters()}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in found.items()}

    return trained(model, gradients)


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_are_the_serial_gpt(ranks: int, transport: str) -> None:
    expected = serially()
    for make in (by_plan, by_styles):
        for rank, steps in enumerate(run(make, ranks=ranks, transport=transport).values):
            for step, (found, serial) in enumerate(zip(steps, expected, strict=True)):
                assert found.keys() == serial.keys()
                for name, tensor in serial.items():
                    error = ((found[name] - tensor).norm() / tensor.norm()).item()
                    assert error < 1e-10, (
                        f"{make.__name__}: {name} on rank {rank} at step {step}: {error:.0e}"
                    )
