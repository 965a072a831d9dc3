"""Recover state on disk: one safetensors file per rank, readable at any number of ranks.

`rank-00000.safetensors` has this rank's rows of `model/<name>`, `exp_avg/<name>` and `exp_avg_sq/<name>`, and
`rng/cpu` (`rng/cuda`). The metadata in its header has `state`, JSON: {"format", "rank", "num_ranks",
"counters": {…}, "shards": {name: {"shape": global shape, "offset": first row}}, "rng": Python's and NumPy's}.
A rank that loads reads the rows that it needs from the files that have them, and checks the checksums of
those blocks.

A Snapshot is either views of the live tensors, to be written before the next update, or a copy of them
in a reused Buffer, to be written while training continues.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpc_rl.checked_file import CheckedReader, FileRecord
from hpc_rl.engines.base import Snapshot
from hpc_rl.engines.optimizer import Optimizer, Shard
from hpc_rl.errors import Damaged

FORMAT = 2
KINDS = ("model", "exp_avg", "exp_avg_sq")
ALIGN_BYTES = 4096  # of the first tensor in a file
GROUP_BYTES = 1 << 30  # read at once through CPU memory for a GPU
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


class Buffer:
    """Memory for one copy of a state, allocated by the first copy and reused by later ones."""

    def __init__(self, pin: bool = False) -> None:
        self.pin = pin
        self._data = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the same tensors in CPU memory; the previous copy is overwritten."""
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
    """What one rank has of a model and its optimizer; a frozen model has none, and only `load` works then."""

    rank: int
    num_ranks: int
    shards: list[Shard]
    optimizer: Optimizer | None

    def take(self, counters: dict[str, Any], buffer: Buffer | None) -> Snapshot:
        """Return this rank's state now; without a buffer, live tensors in CPU memory are not copied."""
        assert self.optimizer is not None
        named = {f"rng/{kind}": state for kind, state in _torch_rng().items()}
        named |= {name: tensor.detach() for _, name, tensor in self._tensors()}
        shards = {shard.name: {"shape": shard.global_shape, "offset": shard.offset} for shard in self.shards}
        state = {
            "format": FORMAT,
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "counters": {**counters, "adam_steps": self.optimizer.num_steps},
            "shards": shards,
            "rng": _python_rng(),
        }
        live = list(named.values())
        tensors = buffer.copy(live) if buffer else [tensor.cpu().contiguous() for tensor in live]
        parts = [_bytes_of(tensor).data for tensor in tensors if tensor.numel()]
        header = memoryview(_header(named, {"state": json.dumps(state)}))
        return Snapshot(file_name(self.rank), [header, *parts])

    def size_bytes(self) -> int:
        """Return about how large this rank's file is."""
        tensors = [tensor for _, _, tensor in self._tensors()]
        return sum(tensor.nbytes for tensor in tensors) + len(tensors) * 200 + 65536

    def load(
        self, folder: Path, saved_num_ranks: int, files: Mapping[str, FileRecord] | None = None
    ) -> dict[str, Any]:
        """Fill shards, moments and (at the same number of ranks) random states; return the counters.

        Without an optimizer only the shards are filled. What is read is checked against `files`. Raises
        Damaged with the file's name if it is missing, truncated or changed; OSError; ValueError for the state
        of another model.
        """
        targets = {
            name: Target(rows_of(tensor), shard.name, shard.offset) for shard, name, tensor in self._tensors()
        }
        missing = {name: len(target.rows) for name, target in targets.items()}
        shapes = {shard.name: list(shard.global_shape) for shard in self.shards}
        counters: dict[str, Any] = {}
        for saved_rank in range(saved_num_ranks):
            with _open(folder / file_name(saved_rank), files) as reader:
                header = Header.read(reader, saved_rank, saved_num_ranks)
                header.check_shapes(shapes, folder)
                counters = header.state["counters"]
                if self.optimizer and (saved_rank, saved_num_ranks) == (self.rank, self.num_ranks):
                    _restore_rng(reader, header)
                _fill(reader, header, targets, missing)
        if lacking := [name for name, rows in missing.items() if rows]:
            raise Damaged(f"{folder.name} lacks rows of {', '.join(lacking[:5])}")
        if self.optimizer:
            self.optimizer.set_num_steps(counters["adam_steps"])
        return counters

    def _tensors(self) -> Iterator[tuple[Shard, str, torch.Tensor]]:
        """Yield the tensors of the state with their names in the file."""
        for shard in self.shards:
            moments = self.optimizer.moments[shard.name] if self.optimizer else ()
            for kind, tensor in zip(KINDS, (shard.local, *moments), strict=False):
                yield shard, f"{kind}/{shard.name}", tensor


class Target(NamedTuple):
    """Memory for rows of a tensor: those of parameter `name` from row `offset` on."""

    rows: torch.Tensor
    name: str
    offset: int


def _open(path: Path, files: Mapping[str, FileRecord] | None) -> CheckedReader:
    try:
        return CheckedReader(path, files[path.name] if files is not None else None)
    except (FileNotFoundError, KeyError) as error:
        raise Damaged(f"{path.name} is missing") from error


@dataclass(frozen=True)
class Header:
    """The header of a rank's file: its state, and the position of each tensor's bytes."""

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
            raise Damaged(f"{name} is not a shard of a recover state: {error}") from error
        if found != (FORMAT, rank, num_ranks):
            what = f"rank {found[1]} of {found[2]} in format {found[0]}"
            raise Damaged(f"{name} is {what}, expected rank {rank} of {num_ranks} in format {FORMAT}")
        return cls(name, state, tensors, begin)

    def check_shapes(self, ours: dict[str, list[int]], folder: Path) -> None:
        """Raise ValueError if the state is of another model than `ours`, name -> shape."""
        theirs = {name: shard["shape"] for name, shard in self.state["shards"].items()}
        if ours != theirs:
            differ = (name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            odd = min(differ)
            raise ValueError(
                f"{folder / self.name} is of another model: {odd} has shape {theirs.get(odd)}, "
                f"the model's is {ours.get(odd)}"
            )

    def rows(self, name: str, first: int) -> tuple[int, torch.dtype]:
        """Return the offset in the file of row `first` of a tensor, and its type."""
        tensor = self.tensors[name]
        start, end = tensor["data_offsets"]
        num_rows = max(1, _num_rows(tensor))
        dtype = next(dtype for dtype, name in DTYPES.items() if name == tensor["dtype"])
        return self.begin + start + first * ((end - start) // num_rows), dtype


def _fill(
    reader: CheckedReader, header: Header, targets: Mapping[str, Target], missing: dict[str, int]
) -> None:
    """Copy the rows of the targets that one file has, and count them off in `missing`."""
    wanted: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for name, target in targets.items():
        saved_offset = header.state["shards"][target.name]["offset"]
        start = max(saved_offset, target.offset)
        end = min(saved_offset + _num_rows(header.tensors[name]), target.offset + len(target.rows))
        if end <= start:
            continue
        missing[name] -= end - start
        at, dtype = header.rows(name, start - saved_offset)
        rows = target.rows.detach()[start - target.offset : end - target.offset]
        direct = rows.device.type == "cpu" and rows.is_contiguous() and rows.dtype == dtype
        wanted.append((at, rows, rows if direct else torch.empty(rows.shape, dtype=dtype)))
    for group in _grouped(wanted):
        reader.fill([(at, _bytes_of(here)) for at, _, here in group])
        for _, rows, here in group:
            if here is not rows:
                rows.copy_(here)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory in rows: a scalar is one row."""
    return tensor if tensor.ndim else tensor.detach().reshape(1)


def _num_rows(entry: dict[str, Any]) -> int:
    return entry["shape"][0] if entry["shape"] else 1


def _grouped(
    wanted: list[tuple[int, torch.Tensor, torch.Tensor]],
) -> Iterator[list[tuple[int, torch.Tensor, torch.Tensor]]]:
    """Yield all that needs no copy, then the rest in groups that bound the memory for copies."""
    yield [one for one in wanted if one[1] is one[2]]
    group, size = list[tuple[int, torch.Tensor, torch.Tensor]](), 0
    for one in (one for one in wanted if one[1] is not one[2]):
        group.append(one)
        size += one[2].nbytes
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group


def _header(named: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
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


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a flat uint8 view of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _torch_rng() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _python_rng() -> dict[str, Any]:
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
