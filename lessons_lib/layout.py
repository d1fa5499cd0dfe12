"""Which rank owns what: ``Layout("B@row D@col")``.

A layout names the dims of a tensor, in order. Behind each dim stand the mesh axes it is cut over:
``B@row`` says that dim B is cut over axis ``row``. The order of axes counts, the first one cuts
first: rank (i, k) holds block ``i * k_size + k`` of ``B@i@k``, and block ``k * i_size + i`` of
``B@k@i``. ``+tp`` at the end says that the ranks along ``tp`` hold terms of a sum that nobody has
added up yet. Over every other axis of the mesh the tensor is a copy.

A capital ``X`` is the whole tensor, a lower case ``x`` the block of one rank. Tensors may be
torch's or numpy's; this module needs neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import isqrt, prod
from typing import Any, Protocol

from lessons_lib.errors import RefusedError

HOW_TO_WRITE = (
    "Write the dims in order, each followed by the mesh axes it is cut over, and at the end +axis for "
    'a partial sum: Layout("B@row D@col"), Layout("B@i@k F@j"), Layout("B F +tp").'
)


class GroupLike(Protocol):
    """What a layout asks of a group of ranks."""

    def all_gather(self, x: Any, dim: int) -> Any: ...


class MeshLike(Protocol):
    """What a layout asks of a mesh: sizes, this rank's coordinate, and a group per axis."""

    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def coordinate(self) -> Mapping[str, int]: ...
    def __getitem__(self, axis: str, /) -> GroupLike: ...


def coordinates(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """List the coordinate of every rank, in rank order: row-major, the last axis fastest.

    >>> coordinates({"row": 2, "col": 2})
    [{'row': 0, 'col': 0}, {'row': 0, 'col': 1}, {'row': 1, 'col': 0}, {'row': 1, 'col': 1}]
    """
    return [dict(zip(sizes, place, strict=True)) for place in product(*map(range, sizes.values()))]


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """How a tensor lies on a mesh.

    >>> layout = Layout("B@row D@col")
    >>> layout.dims, layout.axes, layout.dim("D")
    (('B', 'D'), ('row', 'col'), ('col',))
    >>> layout.local_shape((8, 6), {"row": 2, "col": 3})
    (4, 2)
    >>> print(layout, layout == Layout("B@row   D@col"))
    B@row D@col True

    Layouts are values: equal if they say the same, usable as keys. ``+`` marks have no order.
    A dim that an axis does not divide evenly is refused, with the sizes that would do.
    """

    dims: tuple[str, ...]
    cuts: tuple[tuple[str, ...], ...]  # for each dim the axes it is cut over, the first cuts first
    partial: tuple[str, ...]  # axes whose ranks hold terms of a sum

    def __init__(self, notation: str) -> None:
        dims, cuts, partial = _read(notation)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "cuts", cuts)
        object.__setattr__(self, "partial", partial)

    @classmethod
    def of(cls, cuts: Mapping[str, Iterable[str]], partial: Iterable[str] = ()) -> Layout:
        """Build a layout from its parts.

        >>> Layout.of({"B": ["i", "k"], "F": []}, partial=["j"])
        Layout("B@i@k F +j")
        """
        tokens = ["@".join([dim, *axes]) for dim, axes in cuts.items()]
        return cls(" ".join([*tokens, *(f"+{axis}" for axis in partial)]))

    def __str__(self) -> str:
        tokens = ["@".join([dim, *axes]) for dim, axes in zip(self.dims, self.cuts, strict=True)]
        return " ".join([*tokens, *(f"+{axis}" for axis in self.partial)])

    def __repr__(self) -> str:
        return f'Layout("{self}")'

    # What the notation says

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes the layout names, in the order they are written."""
        return tuple(axis for cut in self.cuts for axis in cut) + self.partial

    def dim(self, name: str) -> tuple[str, ...]:
        """The axes dim ``name`` is cut over, the first cuts first.

        >>> Layout("B@i@k F@j").dim("B")
        ('i', 'k')
        """
        return self.cuts[self._position(name)]

    def replicated(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes over which the tensor is a copy.

        >>> Layout("B@dp F +tp").replicated({"dp": 2, "cp": 2, "tp": 2})
        ('cp',)
        """
        self._check_mesh(sizes)
        return tuple(axis for axis in sizes if axis not in self.axes)

    # Layouts that follow from this one

    def drop(self, *names: str) -> Layout:
        """The layout without some dims.

        >>> Layout("B@row S D@col").drop("B", "S")
        Layout("D@col")
        """
        gone = {self._position(name) for name in names}
        kept = [at for at in range(len(self.dims)) if at not in gone]
        return Layout.of({self.dims[at]: self.cuts[at] for at in kept}, self.partial)

    def last(self) -> Layout:
        """The layout of the last dim alone: a bias takes it from Y.

        >>> Layout("B@i@k F@j").last()
        Layout("F@j")
        """
        return self.drop(*self.dims[:-1])

    def summed(self, *names: str) -> Layout:
        """The layout of the local sum over some dims: the axes that cut them become partial.

        A bias is added to every row of Y, so its gradient is the sum of dY over the rows, of
        which every rank can add up only its own:

        >>> Layout("B@i@k F@j").summed("B")
        Layout("F@j +i +k")
        """
        left = self.drop(*names)
        return Layout.of(
            dict(zip(left.dims, left.cuts, strict=True)),
            [*self.partial, *(axis for name in names for axis in self.dim(name))],
        )

    # Who owns what

    def n_blocks(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Into how many blocks each dim is cut.

        >>> Layout("B@i@k F@j D").n_blocks({"i": 2, "j": 3, "k": 2})
        (4, 3, 1)
        """
        self._check_mesh(sizes)
        return tuple(prod(sizes[axis] for axis in cut) for cut in self.cuts)

    def n_terms(self, sizes: Mapping[str, int]) -> int:
        """How many terms a block is the sum of: 1 unless the layout is a partial sum."""
        self._check_mesh(sizes)
        return prod(sizes[axis] for axis in self.partial)

    def n_copies(self, sizes: Mapping[str, int]) -> int:
        """On how many ranks the same numbers lie."""
        return prod(sizes[axis] for axis in self.replicated(sizes))

    def share(self, sizes: Mapping[str, int]) -> Fraction:
        """The part of the tensor's elements that one rank stores.

        >>> Layout("B@row D").share({"row": 2, "col": 3})
        Fraction(1, 2)
        """
        return Fraction(1, prod(self.n_blocks(sizes)))

    def block(self, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Which block of each dim the rank at ``coordinate`` holds, counted from 0.

        >>> sizes = {"i": 2, "k": 3}
        >>> Layout("B@i@k").block(sizes, {"i": 1, "k": 2}), Layout("B@k@i").block(sizes, {"i": 1, "k": 0})
        ((5,), (1,))
        """
        self._check_mesh(sizes)
        self._check_coordinate(sizes, coordinate)
        index = []
        for cut in self.cuts:
            at = 0
            for axis in cut:
                at = at * sizes[axis] + coordinate[axis]
            index.append(at)
        return tuple(index)

    def slices(
        self, shape: Sequence[int], sizes: Mapping[str, int], coordinate: Mapping[str, int]
    ) -> tuple[slice, ...]:
        """Where in the whole tensor the block of the rank at ``coordinate`` lies.

        >>> Layout("B@row D@col").slices((8, 6), {"row": 2, "col": 3}, {"row": 1, "col": 0})
        (slice(4, 8, None), slice(0, 2, None))
        """
        local = self.local_shape(shape, sizes)
        block = self.block(sizes, coordinate)
        return tuple(slice(at * size, (at + 1) * size) for at, size in zip(block, local, strict=True))

    def owners(self, sizes: Mapping[str, int]) -> dict[tuple[int, ...], tuple[int, ...]]:
        """For every block the ranks that hold it, or a term of it.

        >>> Layout("D@col").owners({"row": 2, "col": 2})
        {(0,): (0, 2), (1,): (1, 3)}
        """
        held: dict[tuple[int, ...], list[int]] = {
            index: [] for index in product(*map(range, self.n_blocks(sizes)))
        }
        for rank, coordinate in enumerate(coordinates(sizes)):
            held[self.block(sizes, coordinate)].append(rank)
        return {index: tuple(ranks) for index, ranks in held.items()}

    # Shapes

    def local_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of every rank's block of a tensor of ``shape``.

        >>> Layout("B hidden@tp").local_shape((3, 10), {"tp": 4})
        Traceback (most recent call last):
        ...
        lessons_lib.errors.RefusedError: Layout("B hidden@tp") on a mesh of tp=4: dim hidden of size 10 \
cannot be cut evenly over tp=4, so into 4 blocks. Nearest sizes that can: 8, 12. \
Legal degrees for 10: 1, 2, 5, 10.
        """
        self._check_dims(shape, "the tensor")
        n_blocks = self.n_blocks(sizes)
        for dim, cut, size, n in zip(self.dims, self.cuts, shape, n_blocks, strict=True):
            if size % n:
                below = size - size % n
                nearest = ", ".join(str(good) for good in (below, below + n) if good)
                over = " x ".join(f"{axis}={sizes[axis]}" for axis in cut)
                raise RefusedError(
                    f"{self!r} on a mesh of {_mesh(sizes)}: dim {dim} of size {size} cannot be cut evenly "
                    f"over {over}, so into {n} blocks. Nearest sizes that can: {nearest}. "
                    f"Legal degrees for {size}: {_divisors(size)}."
                )
        return tuple(size // n for size, n in zip(shape, n_blocks, strict=True))

    def n_local(self, shape: Sequence[int], sizes: Mapping[str, int]) -> int:
        """How many elements of a tensor of ``shape`` one rank stores.

        >>> Layout("B@row D@col").n_local((8, 6), {"row": 2, "col": 3})
        8
        """
        return prod(self.local_shape(shape, sizes))

    def global_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole tensor whose blocks have ``shape``.

        >>> Layout("B@row D@col").global_shape((4, 2), {"row": 2, "col": 3})
        (8, 6)
        """
        self._check_dims(shape, "the block")
        return tuple(size * n for size, n in zip(shape, self.n_blocks(sizes), strict=True))

    # Without ranks

    def cut(self, X: Any, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> Any:
        """Copy the block of the rank at ``coordinate`` out of the whole tensor.

        >>> import torch
        >>> X = torch.arange(8).reshape(4, 2)
        >>> Layout("B@a@b D").cut(X, {"a": 2, "b": 2}, {"a": 1, "b": 0})
        tensor([[4, 5]])
        """
        shape = _shape(X)
        self._refuse_partial(
            f"a partial sum is the result of a computation, it is not cut from a whole tensor. "
            f"Cut by {Layout.of(dict(zip(self.dims, self.cuts, strict=True)))!r}."
        )
        block = X[self.slices(shape, sizes, coordinate)]
        return block.clone() if hasattr(block, "clone") else block.copy()

    def join(self, blocks: Sequence[Any], sizes: Mapping[str, int]) -> Any:
        """Put the whole tensor together from the blocks of all ranks, given in rank order.

        >>> import torch
        >>> layout, sizes, X = Layout("B D@tp"), {"tp": 2}, torch.arange(8).reshape(2, 4)
        >>> blocks = [layout.cut(X, sizes, coordinate) for coordinate in coordinates(sizes)]
        >>> blocks[1]
        tensor([[2, 3],
                [6, 7]])
        >>> torch.equal(layout.join(blocks, sizes), X)
        True

        Where several ranks hold copies, the copy on the lowest rank is taken.
        """
        self._check_mesh(sizes)
        self._refuse_partial("only redistribute resolves a partial sum, joining its terms would lose it.")
        places = coordinates(sizes)
        if len(blocks) != len(places):
            raise RefusedError(
                f"{self!r} on a mesh of {_mesh(sizes)} joins {len(places)} blocks, one per rank in rank "
                f"order; got {len(blocks)}."
            )
        shapes = [_shape(block) for block in blocks]
        for rank, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise RefusedError(
                    f"{self!r} on a mesh of {_mesh(sizes)} joins blocks of one shape: rank 0 has "
                    f"{shapes[0]}, rank {rank} (at {_mesh(places[rank])}) has {shape}."
                )
        whole = self.global_shape(shapes[0], sizes)
        X = _new(blocks[0], whole)
        for ranks in self.owners(sizes).values():
            X[self.slices(whole, sizes, places[ranks[0]])] = blocks[ranks[0]]
        return X

    # Inside ranks

    def shard(self, X: Any, mesh: MeshLike) -> Any:
        """Copy this rank's block out of the whole tensor. No communication."""
        return self.cut(X, mesh.sizes, mesh.coordinate)

    def unshard(self, x: Any, mesh: MeshLike) -> Any:
        """Gather the whole tensor on every rank.

        One all-gather per cut and axis, the last axis of a dim first. Traffic per rank (ring):
        the elements of X less the elements of x, whatever the order.
        """
        self._check_dims(_shape(x), "the block")
        self._check_mesh(mesh.sizes)
        self._refuse_partial("only redistribute resolves a partial sum.")
        X = x
        for at, cut in enumerate(self.cuts):
            for axis in reversed(cut):
                X = mesh[axis].all_gather(X, at)
        if X is x:
            X = x.clone() if hasattr(x, "clone") else x.copy()
        return X

    # Refusals, the same on every rank

    def _position(self, name: str) -> int:
        if name not in self.dims:
            known = ", ".join(self.dims) or "none"
            raise RefusedError(f"{self!r} has no dim {name!r}: its dims are {known}.")
        return self.dims.index(name)

    def _check_mesh(self, sizes: Mapping[str, int]) -> None:
        for axis in self.axes:
            if axis not in sizes:
                raise RefusedError(
                    f"{self!r} names the axis {axis!r}, which the mesh does not have: its axes are "
                    f"{_mesh(sizes) or 'none'}."
                )
        for axis, size in sizes.items():
            if size < 1:
                raise RefusedError(f"{self!r} on a mesh of {_mesh(sizes)}: axis {axis!r} has no ranks.")

    def _check_coordinate(self, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> None:
        for cut in self.cuts:
            for axis in cut:
                if axis not in coordinate or not 0 <= coordinate[axis] < sizes[axis]:
                    raise RefusedError(
                        f"{self!r} on a mesh of {_mesh(sizes)}: the coordinate {_mesh(coordinate) or '()'} "
                        f"needs {axis} from 0 to {sizes[axis] - 1}."
                    )

    def _check_dims(self, shape: Sequence[int], what: str) -> None:
        if len(shape) != len(self.dims):
            raise RefusedError(
                f"{self!r} has {len(self.dims)} dims ({', '.join(self.dims)}), but {what} has {len(shape)}: "
                f"its shape is {tuple(shape)}."
            )

    def _refuse_partial(self, why: str) -> None:
        if self.partial:
            raise RefusedError(f"{self!r} is a partial sum over {', '.join(self.partial)}: {why}")


def _read(notation: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Dims, cuts and partial axes of a layout string."""
    if not isinstance(notation, str):
        raise RefusedError(f"Layout takes a string, not {notation!r}. {HOW_TO_WRITE}")
    dims: dict[str, tuple[str, ...]] = {}
    partial: list[str] = []
    seen: set[str] = set()

    def refuse(token: str, why: str) -> RefusedError:
        return RefusedError(f'Layout("{notation}"): cannot read {token!r}, {why}. {HOW_TO_WRITE}')

    for token in notation.split():
        axes: tuple[str, ...]
        if "," in token:
            raise refuse(token, "there is no comma, dims are parted by a blank")
        if token.startswith("@"):
            raise refuse(token, "there is no blank before @" if dims else "@ needs a dim before it")
        if token.startswith("+"):
            axes = (token[1:],)
            partial.append(token[1:])
        else:
            dim, *names = token.split("@")
            axes = tuple(names)
            if not dim.isidentifier():
                raise refuse(token, f"{dim!r} is no name for a dim")
            if partial:
                raise refuse(token, "a dim cannot follow a partial sum")
            if dim in dims:
                raise refuse(token, f"there is a dim {dim} already")
            dims[dim] = axes
        for axis in axes:
            if not axis:
                raise refuse(token, f"{'@' if '@' in token else '+'} needs an axis behind it")
            if not axis.isidentifier():
                raise refuse(token, f"{axis!r} is no name for an axis")
            if axis in seen:
                raise refuse(token, f"axis {axis} is used already, and each axis can be used once")
            seen.add(axis)
    return tuple(dims), tuple(dims.values()), tuple(sorted(partial))


def _shape(X: Any) -> tuple[int, ...]:
    if not hasattr(X, "shape"):
        raise RefusedError(f"A layout is about tensors (or numpy arrays), not {type(X).__name__}.")
    return tuple(X.shape)


def _new(like: Any, shape: tuple[int, ...]) -> Any:
    """An empty tensor or array of ``shape``, of the kind and dtype of another."""
    if hasattr(like, "new_empty"):
        return like.new_empty(shape)
    import numpy

    return numpy.empty(shape, like.dtype)


def _mesh(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def _divisors(size: int, most: int = 12) -> str:
    """The divisors of ``size`` in words, the middle left out where they are many."""
    low = [n for n in range(1, isqrt(size) + 1) if size % n == 0]
    every = sorted({*low, *(size // n for n in low)})
    words = [str(n) for n in every]
    return ", ".join(words if len(words) <= most else [*words[: most - 1], "...", words[-1]])
