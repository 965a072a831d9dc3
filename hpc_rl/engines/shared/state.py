"""Recover state on disk: one safetensors file per rank, readable by any layout of any engine.

`actor-rank-00000.safetensors` (a critic's begin with `critic`) has this rank's pieces of kinds `model`,
`exp_avg` and `exp_avg_sq`, all by Hugging Face names, and `rng/cpu` (`rng/cuda`). The metadata in its header
has `state`, JSON: {"format", "rank", "num_ranks", "counters": {…}, "shapes": {name: shape of the whole
tensor}, "pieces": {name in the file: {"kind", "name", "offset"}}, "rng": Python's and NumPy's}. The saved
pieces of all ranks together have each number once. A loading rank reads only the rows that it needs, and
verifies the checksums of their blocks.

A Snapshot has either views of the live tensors, which must be written before the next update, or copies in a
reused Buffer, which can be written while training continues. Live tensors on a GPU are copied block by block
while the file is written, so CPU memory never holds all of them.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_rl.core.checked_file import CheckedReader, FileRecord, Part
from hpc_rl.core.errors import Damaged
from hpc_rl.engines.base import Snapshot
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.pieces import Kind, Piece, StatePiece, find_overlap, shift_slices

FORMAT = 3
ALIGN_BYTES = 4096  # alignment of the first tensor in a file
GROUP_BYTES = 1 << 30  # read at a time through CPU memory
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


def make_file_name(rank: int, engine: str = "actor") -> str:
    return f"{engine}-rank-{rank:05d}.safetensors"


def has_state(engine: str, files: Iterable[str]) -> bool:
    """Return whether files of a generation have the state of an engine."""
    return make_file_name(0, engine) in files


class Buffer:
    """Memory for one copy of a state, allocated by the first copy and reused by later ones."""

    def __init__(self, pin: bool = False) -> None:
        self.pin = pin
        self._data = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the same tensors in CPU memory. Overwrites the previous copy."""
        size = sum(tensor.nbytes for tensor in tensors)
        if self._data.nbytes < size:
            self._data = torch.empty(size, dtype=torch.uint8, pin_memory=self.pin)
        copies, at = [], 0
        for tensor in tensors:
            copies.append(self._data[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor, non_blocking=True)
            at += tensor.nbytes
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return copies


@dataclass
class RankState:
    """One rank's part of a model and its optimizer, for saving and loading.

    A frozen model has only pieces of kind `model`, and supports only `load`.
    """

    mesh: Mesh
    pieces: Sequence[StatePiece]
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors that this rank knows, by name
    is_whole: bool = True  # `shapes` has all tensors of the model
    engine: str = "actor"  # name in file names

    def list_owned(self, kind: Kind) -> list[Piece]:
        """Return the pieces of a kind that this rank saves."""
        return [one.piece for one in self.pieces if one.kind == kind and one.is_saved]

    def take(self, counters: dict[str, Any], buffer: Buffer | None) -> Snapshot:
        """Return this rank's current state. Without a buffer, live tensors are not copied."""
        named = {f"rng/{kind}": state for kind, state in _get_torch_rng().items()}
        saved: dict[str, dict[str, Any]] = {}
        for kind, piece, is_saved in self.pieces:
            if is_saved and piece.local.numel():
                key = f"{kind}/{piece.name}"
                key += f"#{len(saved)}" if key in saved else ""
                saved[key] = {"kind": kind, "name": piece.name, "offset": piece.offset}
                named[key] = piece.local.detach()
        state = {
            "format": FORMAT,
            "rank": self.mesh.rank,
            "num_ranks": self.mesh.num_ranks,
            "counters": counters,
            "shapes": self.shapes,
            "pieces": saved,
            "rng": _get_python_rng(),
        }
        live = list(named.values())
        tensors = buffer.copy(live) if buffer else [tensor.contiguous() for tensor in live]
        parts = [_make_part(tensor) for tensor in tensors if tensor.numel()]
        header = memoryview(_make_header(named, {"state": json.dumps(state)}))
        return Snapshot(make_file_name(self.mesh.rank, self.engine), [header, *parts])

    def size_bytes(self) -> int:
        """Return about how large this rank's file is."""
        sizes = [one.piece.local.nbytes for one in self.pieces if one.is_saved]
        return sum(sizes) + len(sizes) * 200 + 65536

    def load(
        self,
        folder: Path,
        saved_num_ranks: int,
        files: Mapping[str, FileRecord] | None = None,
        with_random_state: bool = True,
    ) -> dict[str, Any]:
        """Load the pieces and (with the same number of ranks) random states; return the counters.

        Checks the files against `files`. Raises Damaged with the name of a file that is missing, truncated or
        changed; OSError; ValueError for the state of another model.
        """
        targets = defaultdict[tuple[str, str], list[int]](list)
        for i, one in enumerate(self.pieces):
            targets[one.key].append(i)
        missing = [one.piece.local.numel() for one in self.pieces]
        counters: dict[str, Any] = {}
        theirs: dict[str, list[int]] = {}
        for saved_rank in range(saved_num_ranks):
            path = folder / make_file_name(saved_rank, self.engine)
            with _open(path, files) as reader:
                header = Header.read(reader, saved_rank, saved_num_ranks)
                theirs |= header.state["shapes"]
                self._check_shapes(folder / header.name, theirs, last=saved_rank == saved_num_ranks - 1)
                counters = header.state["counters"]
                here = (self.mesh.rank, self.mesh.num_ranks)
                if with_random_state and here == (saved_rank, saved_num_ranks):
                    _restore_rng(reader, header)
                wanted = [
                    (at, key)
                    for key, saved in header.state["pieces"].items()
                    for at in targets.get((saved["kind"], saved["name"]), ())
                ]
                _fill(reader, header, self.pieces, wanted, missing)
        if any(missing):
            lacking = [one.piece.name for one, num in zip(self.pieces, missing, strict=True) if num]
            raise Damaged(f"{folder.name} lacks values of the tensors {', '.join(lacking[:5])}")
        return counters

    def _check_shapes(self, path: Path, theirs: Mapping[str, list[int]], last: bool) -> None:
        """Raise ValueError if the state belongs to another model."""
        ours = {name: list(shape) for name, shape in self.shapes.items()}
        names = ours.keys() & theirs.keys()
        if last:
            names = ours.keys() | (theirs.keys() if self.is_whole else set())
        differ = [name for name in names if ours.get(name) != theirs.get(name)]
        if differ:
            odd = min(differ)
            raise ValueError(
                f"{path} belongs to another model: {odd} has the shape {theirs.get(odd)}, "
                f"and {ours.get(odd)} in the model"
            )


def _open(path: Path, files: Mapping[str, FileRecord] | None) -> CheckedReader:
    try:
        return CheckedReader(path, files[path.name] if files is not None else None)
    except (FileNotFoundError, KeyError) as error:
        raise Damaged(f"{path.name} is missing") from error


@dataclass(frozen=True)
class Header:
    """The header of a rank's file: the state, and the position of each tensor's bytes."""

    name: str
    state: dict[str, Any]
    tensors: dict[str, Any]  # name -> {"dtype", "shape", "data_offsets"}
    begin: int  # offset of the tensors' bytes

    @classmethod
    def read(cls, reader: CheckedReader, rank: int, num_ranks: int) -> Header:
        name = reader.path.name
        try:
            begin = 8 + int.from_bytes(reader.read(0, 8), "little")
            tensors = json.loads(reader.read(8, begin))
            state = json.loads(tensors.pop("__metadata__")["state"])
            found = (state["format"], state["rank"], state["num_ranks"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{name} is not a file of a checkpoint: {error}") from error
        if found != (FORMAT, rank, num_ranks):
            what = f"rank {found[1]} of {found[2]} in format {found[0]}"
            raise Damaged(f"{name} is {what}, expected rank {rank} of {num_ranks} in format {FORMAT}")
        return cls(name, state, tensors, begin)

    def rows(self, name: str, first: int) -> tuple[int, torch.dtype]:
        """Return the offset in the file of row `first` of a tensor, and its type."""
        tensor = self.tensors[name]
        start, end = tensor["data_offsets"]
        num_rows = max(1, math.prod(tensor["shape"][:1]))
        dtype = next(dtype for dtype, name in DTYPES.items() if name == tensor["dtype"])
        return self.begin + start + first * ((end - start) // num_rows), dtype


@dataclass(frozen=True)
class Wanted:
    """Rows of a tensor in a file, and the memory for a part of them."""

    at: int  # offset of the rows in the file
    shape: tuple[int, ...]  # of the rows
    dtype: torch.dtype
    part: tuple[slice, ...]  # the wanted part of the rows
    target: torch.Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the rows can be read directly into the target."""
        like_file = self.target.shape == self.shape and self.target.dtype == self.dtype
        return like_file and self.target.device.type == "cpu" and self.target.is_contiguous()


def _fill(
    reader: CheckedReader,
    header: Header,
    pieces: Sequence[StatePiece],
    wanted: Sequence[tuple[int, str]],
    missing: list[int],
) -> None:
    """Copy the wanted (index of a piece, name in the file) from one file, and subtract from `missing`."""
    found: list[Wanted] = []
    for i, key in wanted:
        piece, saved = pieces[i].piece, header.state["pieces"][key]
        shape, offset = tuple(header.tensors[key]["shape"]), tuple(saved["offset"])
        part = find_overlap(piece, offset, shape)
        if part is None:
            continue
        target = piece.local.detach()[shift_slices(part, piece.offset)]
        missing[i] -= target.numel()
        first, *columns = shift_slices(part, offset) or (slice(0, 1),)
        at, dtype = header.rows(key, first.start)
        if shape:
            rows = (first.stop - first.start, *shape[1:])
            found.append(Wanted(at, rows, dtype, (slice(None), *columns), target))
        else:
            found.append(Wanted(at, (), dtype, (), target))
    for group in _group_rows(found):
        read = [one.target if one.is_direct else torch.empty(one.shape, dtype=one.dtype) for one in group]
        reader.fill([(one.at, _view_bytes(here)) for one, here in zip(group, read, strict=True)])
        for one, here in zip(group, read, strict=True):
            if here is not one.target:
                one.target.copy_(here[one.part])


def _group_rows(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Yield the rows that need no copy, then the others in groups that bound the memory for copies."""
    yield [one for one in wanted if one.is_direct]
    group, size = list[Wanted](), 0
    for one in (one for one in wanted if not one.is_direct):
        group.append(one)
        size += math.prod(one.shape) * one.dtype.itemsize
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group


def _make_header(named: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in named.items():
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes of a tensor on a device, as a part of a file."""

    flat: torch.Tensor  # uint8

    @classmethod
    def of(cls, tensor: torch.Tensor) -> DeviceBytes:
        return cls(tensor.detach().reshape(-1).view(torch.uint8))

    def __len__(self) -> int:
        return self.flat.numel()

    def __getitem__(self, place: slice) -> DeviceBytes:
        return DeviceBytes(self.flat[place])

    def copy_to(self, memory: memoryview) -> None:
        torch.frombuffer(memory, dtype=torch.uint8).copy_(self.flat)


def _make_part(tensor: torch.Tensor) -> Part:
    return _view_bytes(tensor).data if tensor.device.type == "cpu" else DeviceBytes.of(tensor)


def _view_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a flat uint8 view of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _get_torch_rng() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _get_python_rng() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {"python": [version, list(numbers), gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}


def _restore_rng(reader: CheckedReader, header: Header) -> None:
    saved = header.state["rng"]
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(saved["numpy"]))
    states = {}
    for kind in ("cpu", "cuda"):
        if f"rng/{kind}" in header.tensors:
            at, _ = header.rows(f"rng/{kind}", 0)
            size = header.tensors[f"rng/{kind}"]["shape"][0]
            states[kind] = torch.frombuffer(bytearray(reader.read(at, at + size)), dtype=torch.uint8)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
