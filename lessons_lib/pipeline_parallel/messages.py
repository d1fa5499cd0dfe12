"""What goes over the borders between stages: outputs onward, input gradients back.

Every message is known by what it is, not by its turn: its tag is the number of the result that it carries.
So ranks may send and receive in whatever order their rows say. Sends do not wait: all that a rank has made is
under way before it waits for anything, and a legal schedule never comes to a standstill. Thread ranks and
gloo keep to tags. nccl has none: there, two ranks must exchange their messages in one order.

What is sent must stay as it is until it has arrived. The receiver does not say so; but what a rank sends back
tells: when it made that, all that its row needed until then was there. So a rank lets go of what it has sent
as soon as something comes back that was made later, and of the rest at the end.

A receiver must know how large a message is. An input gradient is as large as the output was. Outputs are
alike where the micro-batches are: the first of each shape is announced by a few numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lessons_lib.errors import RefusedError
from lessons_lib.mesh import Group
from lessons_lib.pipeline_parallel.program import Program
from lessons_lib.pipeline_parallel.rules import Result
from lessons_lib.spmd import region

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_DIMS = 8


class Like(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Like:
        return cls(tuple(x.shape), x.dtype)

    def __str__(self) -> str:
        return f"{_name(self.dtype)}{list(self.shape)}"


class Messages:
    """The messages of one rank. ``kinds`` says of each micro-batch which others are of the same shape."""

    def __init__(
        self, program: Program, group: Group, kinds: Sequence[Hashable], device: torch.device
    ) -> None:
        self.program, self.group, self.device = program, group, device
        self.under_way: defaultdict[int, list[tuple[int, dist.Work, Tensor]]] = defaultdict(list)
        self.bytes_sent = 0
        self._first: dict[
            Hashable, int
        ] = {}  # of a border and a kind: the micro-batch whose output is announced
        for result, (to, _) in program.takers.items():
            if result.what == "y":
                source, _ = program.makers[result]
                border = result.stage, source, to, kinds[result.microbatch]
                self._first[border] = min(result.microbatch, self._first.get(border, result.microbatch))
        self._kinds = kinds
        self._announced: dict[Hashable, Like] = {}  # by border and kind

    def home(self, result: Result) -> int:
        """The rank that makes a result."""
        return self.program.makers[result][0]

    def send(self, result: Result, x: Tensor) -> None:
        """Begin to send a result to the rank that needs it."""
        to, index = self.program.takers[result]
        x = x.detach().contiguous()
        if result.what == "y":
            self._announce(result, to, index, x)
        self._send(x, to, index, self.program.tag(result))
        self.bytes_sent += x.nbytes

    def _send(self, x: Tensor, to: int, index: int, tag: int) -> None:
        work = dist.isend(x, group=self.group.process_group, group_dst=to, tag=tag)
        assert work is not None
        self.under_way[to].append((index, work, x))

    def receive(self, result: Result, like: Like | None = None) -> Tensor:
        """Wait for a result of another rank; ``like`` has its shape, if that is known here."""
        source, index = self.program.makers[result]
        if like is None:
            like = self._hear(result, source)
        x = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        self._receive(x, source, self.program.tag(result))
        self._arrived(source, index)
        return x

    def _receive(self, x: Tensor, source: int, tag: int) -> None:
        work = dist.irecv(x, group=self.group.process_group, group_src=source, tag=tag)
        assert work is not None
        work.wait()

    def _arrived(self, source: int, index: int) -> None:
        """``source`` has come to its action ``index``: what it needed for it and before has arrived."""
        sent = self.under_way[source]
        self.under_way[source] = [message for message in sent if message[0] > index]
        for at, work, _ in sent:
            if at <= index:
                work.wait()

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for sent in self.under_way.values():
            for _, work, _ in sent:
                work.wait()
        self.under_way.clear()

    # ---- how large outputs are

    def _border(self, result: Result, source: int, to: int) -> tuple[Hashable, int]:
        """The border that an output goes over, with its kind, and the tag under which that is announced."""
        border = result.stage, source, to, self._kinds[result.microbatch]
        first = result._replace(microbatch=self._first[border])
        return border, self.program.n_tags + self.program.tag(first)

    def _announce(self, result: Result, to: int, index: int, y: Tensor) -> None:
        border, tag = self._border(result, self.group.rank, to)
        before, now = self._announced.get(border), Like.of(y)
        if before is not None:
            if before != now:
                raise RefusedError(
                    f"stage {result.stage} gave {now} for micro-batch {result.microbatch} and {before} for "
                    "another of the same shape. The next stage expects the same: let the shape of a stage's "
                    "output follow from that of its input."
                )
            return
        if y.dtype not in DTYPES or y.dim() > MOST_DIMS:
            raise RefusedError(
                f"stage {result.stage} gave {now}, which cannot go to the next stage: at most "
                f"{MOST_DIMS} dims, and one of {', '.join(map(_name, DTYPES))}."
            )
        self._announced[border] = now
        numbers = [DTYPES.index(y.dtype), y.dim(), *y.shape, *[0] * (MOST_DIMS - y.dim())]
        with region("shapes"):
            self._send(torch.tensor(numbers, device=self.device), to, index, tag)

    def _hear(self, result: Result, source: int) -> Like:
        border, tag = self._border(result, source, self.group.rank)
        if border not in self._announced:
            numbers = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=self.device)
            with region("shapes"):
                self._receive(numbers, source, tag)
            dtype, n_dims, *shape = numbers.tolist()
            self._announced[border] = Like(tuple(shape[:n_dims]), DTYPES[dtype])
        return self._announced[border]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
