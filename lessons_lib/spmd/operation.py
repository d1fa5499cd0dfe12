"""A communication under way, as one rank issued it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lessons_lib.timeline import Event, Where, ranks_text

_ORDINALS = {"2": "second", "3": "third"}


@dataclass(slots=True)
class Operation:
    """What a rank asked for, and what has become of it; :meth:`event` is the lasting record."""

    rank: int
    kind: str
    group: str
    members: tuple[int, ...]
    sequence: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    n_elements: int
    n_bytes: int  # of all elements, the whole buffer
    bytes_sent: int
    issued_s: float
    where: Where
    region: str
    peer: int | None = None
    root: int | None = None  # index in the group
    detail: str = ""  # the reduction, the tag: what else ranks must agree on
    met: bool = False  # whether the other side came: before that, nothing is sent
    done_s: float = math.inf
    waited_s: float = 0.0

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the ranks of a collective must agree on. In an all-to-all each cuts as it likes."""
        if self.kind == "all_to_all":
            return self.kind, None, frozenset(self.dtypes), self.root, self.detail
        return self.kind, self.shapes, self.dtypes, self.root, self.detail

    def __str__(self) -> str:
        """``all_reduce(float32[3]), #2 on world``; ``send(float32[1]) to rank 4``."""
        tensors = ", ".join(
            f"{dtype}{list(shape)}" for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )
        root = f"root={self.members[self.root]}" if self.root is not None else ""
        call = f"{self.kind}({', '.join(part for part in (tensors, root, self.detail) if part)})"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        if self.kind == "send":
            return f"{call} to {peer}"
        if self.kind == "recv":
            return f"{call} from {peer}"
        return f"{call}, #{self.sequence} on {self.group_text}"

    @property
    def group_text(self) -> str:
        """``world``; ``group tp (ranks 0 and 1)``; ``the group of ranks 0 and 3``."""
        if self.group == "world":
            return "world"
        label, _, which = self.group.partition(", number ")
        nth = f"{_ORDINALS.get(which, which)} " if which else ""
        if label.startswith("ranks "):
            return f"the {nth}group of {ranks_text(self.members)}"
        return f"{nth}group {label} ({ranks_text(self.members)})"

    def event(self) -> Event:
        return Event(
            rank=self.rank,
            kind=self.kind,
            group=self.group,
            members=self.members,
            sequence=self.sequence,
            shape=self.shapes[0] if self.shapes else (),
            dtype=" ".join(dict.fromkeys(self.dtypes)),
            n_elements=self.n_elements,
            bytes_sent=self.bytes_sent if self.met else 0,
            issued_s=self.issued_s,
            done_s=self.done_s,
            waited_s=self.waited_s,
            where=self.where,
            peer=self.peer,
            region=self.region,
            pieces=self._pieces() if self.met else (),
        )

    def _pieces(self) -> tuple[int, ...]:
        """Bytes for each member, in the collectives that go straight there and not along the ring."""
        n = len(self.members)
        own = self.members.index(self.rank)
        if self.kind == "gather" and own != self.root:
            return tuple(self.bytes_sent if index == self.root else 0 for index in range(n))
        if self.kind == "scatter" and own == self.root:
            return tuple(0 if index == own else self.n_bytes // n for index in range(n))
        if self.kind == "all_to_all" and self.n_elements:
            each = self.n_bytes // self.n_elements
            return tuple(
                0 if index == own else each * math.prod(shape) for index, shape in enumerate(self.shapes)
            )
        return ()
