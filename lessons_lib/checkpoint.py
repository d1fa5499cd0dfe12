"""A training run on disk: saved by the ranks of one mesh, opened by those of another.

A state is a dict from names to pieces: this rank's block of a tensor, and the :class:`Layout` it is a block
by. Every rank writes its own blocks, a copy only once; opened on another mesh, or by another plan, each rank
reads the files that its new blocks overlap, and nobody gathers the whole. Ranks may have pieces of different
tensors, as those of a pipeline have: together they have all.

    folder/step-00000200/checkpoint.json      step, mesh, names, shapes, checksums, and what the caller adds
                         .metadata, *.distcp  the tensors, by torch's distributed checkpoint

A checkpoint is written beside its place, made durable, and then renamed: a folder ``step-N`` is whole, or
the disk has damaged it, which its checksums tell. The latest one is the one with the highest step, so
nothing points at it that could be half written. A run killed at any moment leaves the last whole one in its
place, and perhaps a folder ``step-N.writing`` or ``.removing``, which the next save clears away. One run at a
time saves in a folder; ranks on several hosts need one that all of them see.

Open only what you trust: ``.metadata`` is a pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.optim import Optimizer

from lessons_lib.data_parallel import Zero
from lessons_lib.data_parallel.unit import Stretch
from lessons_lib.errors import RefusedError
from lessons_lib.layout import Layout
from lessons_lib.mesh import Mesh
from lessons_lib.plan import Stored, stored, whole

RECORD = "checkpoint.json"
FORMAT = 1
WHOLE = re.compile(r"step-(\d{8,})")
UNFINISHED = re.compile(r"step-\d{8,}\.(writing|removing)")


class Piece(NamedTuple):
    """This rank's block of a tensor. Loading fills ``block`` in place; it may be a view."""

    block: Tensor
    layout: Layout
    n_padding: int = 0  # rows at the end of the whole that stand for nothing, and are not saved


class Part(NamedTuple):
    """A rectangle of a block, and where in the block it begins."""

    block: Tensor
    start: tuple[int, ...]


class Parts(NamedTuple):
    """What this rank has of a block that it shares with others: any number of rectangles, or none."""

    parts: tuple[Part, ...]
    shape: tuple[int, ...]  # of the block
    dtype: torch.dtype
    layout: Layout
    n_padding: int = 0


State = Mapping[str, Piece | Parts]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: what its record says, without its tensors."""

    path: Path
    step: int
    sizes: dict[str, int]  # the mesh it was saved on
    tensors: dict[str, tuple[tuple[int, ...], str]]  # name: global shape, dtype
    about: dict[str, Any]  # what the caller of save added
    save_id: int  # tells two checkpoints of the same step apart
    passed_over: tuple[str, ...] = ()  # newer ones that cannot be opened, and why


# ---- what is saved ----


def pieces(model: nn.Module, optimizer: Optimizer | Zero | None = None) -> dict[str, Piece | Parts]:
    """Name the parameters of ``model``, serial or a rank's part, and the moments of ``optimizer``.

    >>> model = nn.Linear(3, 2)
    >>> state = pieces(model, torch.optim.AdamW(model.parameters()))
    >>> [name for name in state if "weight" in name]
    ['model.weight', 'optimizer.weight.step', 'optimizer.weight.exp_avg', 'optimizer.weight.exp_avg_sq']

    Shapes are the serial model's, whatever the plan: the block of a tensor-parallel weight, which lies as a
    piece of W [D, F], is shown transposed, as ``nn.Linear`` has it, and words that pad a vocabulary are left
    out. A parameter with two names is saved once. An optimizer that has done no step has no
    moments yet; it is given those of a step by a gradient of 0, which changes no parameter.

    ZeRO shares out flat vectors. A stretch of one is up to three rectangles of a matrix, and is saved as
    those: the files are the same, whatever the stage and the number of ranks, and padding is in none.
    """
    how = stored(model)
    if isinstance(optimizer, Zero):
        return _pieces_of_zero(model, optimizer, how)
    state: dict[str, Piece | Parts] = {
        f"model.{name}": _piece(p, how[name]) for name, p in model.named_parameters()
    }
    if optimizer is None:
        return state
    _make_moments(optimizer)
    for name, parameter in model.named_parameters():
        for what, tensor in optimizer.state.get(parameter, {}).items():
            if isinstance(tensor, Tensor):
                alike = tensor.shape == parameter.shape
                piece = _piece(tensor, how[name]) if alike else Piece(tensor, whole(tensor))
                state[f"optimizer.{name}.{what}"] = piece
    return state


def _piece(tensor: Tensor, how: Stored) -> Piece:
    block = tensor.detach()
    return Piece(block.T if how.turned else block, how.serial_layout(), how.n_padding)


def _pieces_of_zero(model: nn.Module, zero: Zero, how: Mapping[str, Stored]) -> dict[str, Piece | Parts]:
    for unit in zero.units:
        _make_moments(unit.optimizer)
    shared = zero.state()
    state: dict[str, Piece | Parts] = {
        f"model.{name}": _piece(p, how[name])
        for name, p in model.named_parameters()
        if f"model.{name}" not in shared  # it is not trained
    }
    for name, part in shared.items():
        state[name] = _parts(part, how[part.name]) if isinstance(part, Stretch) else Piece(part, whole(part))
    return state


def _parts(stretch: Stretch, how: Stored) -> Parts:
    _, tensor, first, shape = stretch
    turned = -1 if how.turned else 1  # as _piece does
    found, at = [], 0
    for start, sizes in rectangles(shape, first, first + len(tensor)):
        block = tensor[at : at + prod(sizes)].view(sizes)
        found.append(Part(block.T if turned < 0 else block, start[::turned]))
        at += prod(sizes)
    return Parts(tuple(found), tuple(shape[::turned]), tensor.dtype, how.serial_layout(), how.n_padding)


def rectangles(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Where elements ``first`` to ``last`` of a flattened tensor lie: start and sizes of rectangles.

    >>> list(rectangles((4, 5), 3, 17))                # the rest of a row, whole rows, and the begin of one
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    >>> list(rectangles((4, 5), 6, 8))
    [((1, 1), (1, 2))]
    """
    row = prod(shape[1:])
    while first < last:
        if len(shape) < 2:
            yield (first,) * len(shape), (last - first,) * len(shape)
            return
        at, inside = divmod(first, row)
        n_rows = (last - first) // row
        if inside == 0 and n_rows:
            yield (at, *(0,) * len(shape[1:])), (n_rows, *shape[1:])
            first += n_rows * row
        else:
            until = min(last, (at + 1) * row)
            for start, sizes in rectangles(shape[1:], inside, until - at * row):
                yield (at, *start), (1, *sizes)
            first = until


def _make_moments(optimizer: Optimizer) -> None:
    """Let the optimizer make the state it lacks, at a learning rate of 0, as torch's own checkpoints do."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    new = {p: torch.zeros_like(p) for p in parameters if p.requires_grad and p not in optimizer.state}
    if not new:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [parameter.grad for parameter in parameters]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = new.get(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for parameter in new:
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"].zero_()


# ---- save ----


def save(
    state: State,
    folder: str | Path,
    mesh: Mesh,
    step: int,
    about: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Save ``state`` as ``folder/step-N``, and remove all but the newest ``keep``; return its path.

    All ranks of ``mesh`` call this, and return when the checkpoint is in its place, on the disk. ``about`` is
    what else shall be known of it, as JSON has it; that of rank 0 is written.

    Raises RefusedError for a step that is saved already and whole, a state that has no piece, or a block that
    its layout cannot have on this mesh; OSError, on every rank, if one cannot write. Earlier checkpoints are
    then as they were.
    """
    if step < 0 or keep < 1 or not state:
        raise RefusedError(
            f"save of {len(state)} pieces at step={step}, keep={keep}: a checkpoint has one piece or more, "
            "a step of 0 or more, and is itself the first of those kept"
        )
    folder = Path(folder)
    place = folder / f"step-{step:08d}"
    writing = place.with_name(f"{place.name}.writing")
    if place.is_dir():  # on all ranks or on none: a save ends together
        _refuse_saved(place)
    planner = _Save(state, mesh)
    dist.barrier()  # all have looked at the place
    if mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_away(folder)
        writing.mkdir()
        _make_durable(folder.parent)
    dist.barrier()  # nothing is left of a save that was broken off
    tensors = dict.fromkeys(state, torch.empty(0))  # whose data the planner looks up
    try:
        index = state_dict_saver.save(tensors, storage_writer=FileSystemWriter(writing), planner=planner)
    except CheckpointException as error:
        causes = [f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items()]
        raise OSError(f"step {step} cannot be saved in {str(folder)!r}. {'; '.join(causes)}") from None
    names = sorted({".metadata", *(stored.relative_path for stored in index.storage_data.values())})
    digests = _union({name: _digest(writing / name) for name in names[mesh.rank :: dist.get_world_size()]})
    described = _union({name: planner.description(name) for name in state})
    if mesh.rank == 0:
        record = {
            "format": FORMAT,
            "step": step,
            "mesh": mesh.sizes,
            "tensors": described,
            "files": digests,
            "about": dict(about or {}),
        }
        _write_durably(writing / RECORD, json.dumps(record, indent=1))
        _make_durable(writing)
        if place.is_dir():  # damaged: a whole one was refused
            _remove(place)
        writing.rename(place)
        _make_durable(folder)
        older = [path for number, path in _numbered(folder) if number < step]
        for path in older[keep - 1 :]:
            _remove(path)
    dist.barrier()
    return place


def _union(mine: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of all ranks, on every rank."""
    every: list[Mapping[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, dict(mine))
    return {name: entry for part in every for name, entry in part.items()}


class _Save(DefaultSavePlanner):
    """Tells torch which parts of the whole this rank has."""

    def __init__(self, state: State, mesh: Mesh) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {name: _as_parts(piece) for name, piece in state.items()}
        self._blocks = _blocks(state, mesh)
        self._shapes = _shapes(state, mesh)

    def description(self, name: str) -> dict[str, Any]:
        layout = str(self._pieces[name].layout)
        return {"shape": list(self._shapes[name]), "dtype": _dtype(self._pieces[name]), "layout": layout}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=offsets, sizes=block.shape),
                        properties=TensorProperties.create_from_tensor(block),
                        size=self._shapes[name],
                    ),
                )
                for (name, offsets), block in self._blocks.items()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._blocks[index.fqn, index.offset]


def _as_parts(piece: Piece | Parts) -> Parts:
    if isinstance(piece, Parts):
        return piece
    block, layout, n_padding = piece
    return Parts((Part(block, (0,) * block.ndim),), tuple(block.shape), block.dtype, layout, n_padding)


def _shapes(state: State, mesh: Mesh) -> dict[str, torch.Size]:
    """Of the whole tensors, without padding."""
    return {name: _shape(_as_parts(piece), mesh) for name, piece in state.items()}


def _shape(parts: Parts, mesh: Mesh) -> torch.Size:
    shape = parts.layout.global_shape(parts.shape, mesh.sizes)
    return torch.Size((shape[0] - parts.n_padding, *shape[1:])) if shape else torch.Size()


def _blocks(state: State, mesh: Mesh) -> dict[tuple[str, torch.Size], Tensor]:
    """What this rank has, by name and by where in the whole tensor it begins."""
    found: dict[tuple[str, torch.Size], Tensor] = {}
    for name, piece in state.items():
        parts = _as_parts(piece)
        begin = _begin(name, parts, mesh)
        for block, start in parts.parts:
            at = torch.Size(map(sum, zip(begin, start, strict=True)))
            if parts.n_padding:
                block = block[: max(0, _shape(parts, mesh)[0] - at[0])]
                if not len(block):
                    continue
            found[name, at] = block
    return found


def _begin(name: str, piece: Parts, mesh: Mesh) -> torch.Size:
    """Where in the whole tensor this rank's block begins."""
    layout = piece.layout
    try:
        if layout.partial:
            raise RefusedError(f"{layout!r} is a partial sum; a checkpoint holds what has been added up.")
        shape = layout.global_shape(piece.shape, mesh.sizes)
        slices = layout.slices(shape, mesh.sizes, mesh.coordinate)
    except RefusedError as refusal:
        raise RefusedError(f"{name}: {refusal}") from None
    return torch.Size(cut.start for cut in slices)


def _refuse_saved(place: Path) -> None:
    try:
        _open(place)
    except _DamagedError:
        return
    raise RefusedError(f"{str(place)!r} is saved already; save another step, or in another folder")


# ---- open ----


def latest(folder: str | Path) -> Checkpoint | None:
    """Find the newest whole checkpoint in ``folder``; None if there is none and never was one.

    Needs no ranks. Reads the files once, for their checksums. Those that are damaged are passed over, and
    ``passed_over`` says which and why. Raises RefusedError if there are checkpoints, and each is damaged.

    >>> latest("no such folder") is None
    True
    """
    passed_over: list[str] = []
    for _, path in _numbered(Path(folder)):
        try:
            return replace(_open(path), passed_over=tuple(passed_over))
        except _DamagedError as damage:
            passed_over.append(f"{path.name}: {damage}")
    if passed_over:
        raise RefusedError(
            f"no checkpoint in {str(folder)!r} can be opened. {'; '.join(passed_over)}. "
            "Use another folder, or remove these to begin anew."
        )
    return None


def load(state: State, checkpoint: Checkpoint, mesh: Mesh) -> None:
    """Fill the blocks of ``state`` from ``checkpoint``, whatever mesh and layouts it was saved by.

    All ranks of ``mesh`` call this. A part of a checkpoint, as the first word of its names says, may be left
    out: a state of ``model.`` names alone leaves the optimizer's unread.

    Raises RefusedError, before a block is changed, if names, shapes or dtypes are not those saved, or if
    ranks were given different checkpoints.
    """
    blocks, shapes = _blocks(state, mesh), _shapes(state, mesh)
    wanted = {name: (tuple(shapes[name]), _dtype(_as_parts(piece))) for name, piece in state.items()}
    check(_union(wanted), checkpoint)
    opened: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(opened, (checkpoint.step, checkpoint.save_id))
    if len(set(opened)) > 1:
        steps = ", ".join(f"rank {rank}: step {step}" for rank, (step, _) in enumerate(opened))
        raise RefusedError(f"ranks open different checkpoints ({steps}): do all hosts see one folder?")
    tensors = dict.fromkeys(state, torch.empty(0))  # whose memory the planner looks up
    reader = FileSystemReader(checkpoint.path)
    state_dict_loader.load(tensors, storage_reader=reader, planner=_Load(blocks))


class _Load(DefaultLoadPlanner):
    """Tells torch which parts of the whole this rank wants."""

    def __init__(self, blocks: Mapping[tuple[str, torch.Size], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = blocks

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None  # set_up_planner has been called
        saved = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for (name, offsets), block in self._blocks.items():
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=block.shape)
            items += create_read_items_for_chunk_list(name, saved[name], [chunk])  # type: ignore[arg-type]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._blocks[index.fqn, index.offset]


def check(wanted: Mapping[str, tuple[tuple[int, ...], str]], checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors have not the names, global shapes and dtypes of ``wanted``."""
    parts = {name.partition(".")[0] for name in wanted}
    saved = {name: t for name, t in checkpoint.tensors.items() if name.partition(".")[0] in parts}
    faults = [
        f"{name} is {_sized(saved[name])} there and {_sized(tensor)} here"
        for name, tensor in wanted.items()
        if name in saved and saved[name] != tensor
    ]
    faults += [f"{name} is not in it" for name in wanted if name not in saved]
    faults += [f"{name} is in it and not wanted" for name in saved if name not in wanted]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise RefusedError(
            f"{str(checkpoint.path)!r} holds another state: {'; '.join(faults[:3])}{more}. "
            f"Build the model and the optimizer that it was saved from."
        )


class _DamagedError(Exception):
    """A folder that is no whole checkpoint; says why."""


def _open(path: Path) -> Checkpoint:
    try:
        text = (path / RECORD).read_bytes()
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise _DamagedError(f"has format {record['format']}, and this library reads {FORMAT}")
        for name, (size, checksum) in record["files"].items():
            found = _digest(path / name)
            if found[0] != size:
                raise _DamagedError(f"{name} has {found[0]:,} bytes of {size:,}")
            if found[1] != checksum:
                raise _DamagedError(f"{name} is not as it was written (its checksum differs)")
        return Checkpoint(
            path=path,
            step=record["step"],
            sizes=record["mesh"],
            tensors={
                name: (tuple(tensor["shape"]), tensor["dtype"]) for name, tensor in record["tensors"].items()
            },
            about=record["about"],
            save_id=zlib.crc32(text),
        )
    except FileNotFoundError as error:
        raise _DamagedError(f"{Path(error.filename).name} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{RECORD} cannot be read ({error})") from None


def unfinished(folder: str | Path) -> list[str]:
    """Name what runs that were killed have left in ``folder``; the next save clears it away."""
    folder = Path(folder)
    return sorted(path.name for path in folder.glob("step-*") if UNFINISHED.fullmatch(path.name))


# ---- on disk ----


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder with their steps, the newest first."""
    found = [(WHOLE.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def _clear_away(folder: Path) -> None:
    for name in unfinished(folder):
        shutil.rmtree(folder / name)


def _remove(place: Path) -> None:
    """Remove a checkpoint: first from its place, so that a half removed one is not taken for damaged."""
    going = place.rename(place.with_name(f"{place.name}.removing"))
    shutil.rmtree(going)


def _digest(path: Path) -> list[int]:
    """The number of bytes of a file, and their checksum."""
    size = checksum = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return [size, checksum]


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _make_durable(folder: Path) -> None:
    """Bring the names in a folder to the disk, after the files they name."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dtype(piece: Parts) -> str:
    return str(piece.dtype).removeprefix("torch.")


def _sized(tensor: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = tensor
    return f"{dtype} {' x '.join(map(str, shape)) or 'scalar'}"
