"""A Hugging Face checkpoint that is built from published versions, and then follows them in place.

The weights are one file, `model.safetensors`, or `adapter_model.safetensors` of an adapter. A newer version
overwrites the changed values, so it costs reading the difference, not the model. Every value is verified by
the checksums of the version. Processes of one node share a copy: `bring_to` has it alone, and waits for the
loads that `hold` protects.

`state.json` names the version. It is removed during a change, so an interrupted change is repeated from a
version with all values.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpc_rl.core import adapters
from hpc_rl.core.errors import Damaged
from hpc_rl.core.node_copies import find_boot_id
from hpc_rl.core.trial import load_object, write_atomic
from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files import rank_file
from hpc_rl.weight_files.chain import MODEL_FOLDER, VersionIndex, load_chain, load_rank
from hpc_rl.weight_files.difference import DTYPE_BYTES, Rectangle

WEIGHTS_NAME = "model.safetensors"
ALIGN_BYTES = 64  # of the first tensor
NUM_APPLIERS = 4  # threads; each holds one rectangle of another rank


@dataclass(frozen=True)
class Place:
    """The place of a tensor in the file."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    begin: int  # offset of its first byte
    end: int


class ModelFile:
    """The tensors of a safetensors file in memory, to be changed in place."""

    def __init__(self, path: Path) -> None:
        """Map a file. Raises Damaged if it has no safetensors header, OSError."""
        with path.open("r+b") as file:
            self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        try:
            begin = 8 + int.from_bytes(self._bytes[:8].tobytes(), "little")
            header = json.loads(self._bytes[8:begin].tobytes())
            header.pop("__metadata__", None)
            self.places = {
                name: Place(one["dtype"], tuple(one["shape"]), *(begin + at for at in one["data_offsets"]))
                for name, one in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(
                f"{path} has no safetensors header, so it is damaged or another kind of file: {error!r}"
            ) from error

    def get_values(self, rectangle: Rectangle) -> np.ndarray:
        """Return the values of the rectangle's tensor, flat, as a view. Raises Damaged."""
        place = self.places.get(rectangle.name)
        if place is None or (place.dtype, place.shape) != (rectangle.dtype, rectangle.whole_shape):
            found = f"{place.dtype} of shape {list(place.shape)}" if place else "missing"
            expected = f"{rectangle.dtype} of shape {list(rectangle.whole_shape)}"
            raise Damaged(
                f"tensor {rectangle.name} is {found} in this node's copy of the weights, "
                f"but {expected} in the published ones"
            )
        return self._bytes[place.begin : place.end].view(rectangle.word)

    def apply(self, folder: Path, chain: Sequence[VersionIndex]) -> None:
        """Apply versions in order. `folder` has a directory for each version.

        Raises Damaged if a file or the result differs from the published version, OSError.
        """
        with ThreadPoolExecutor(NUM_APPLIERS) as pool:
            for index in chain:
                apply = partial(self._apply_rank, folder / str(index.version), index)
                list(pool.map(apply, range(len(index.files))))

    def _apply_rank(self, folder: Path, index: VersionIndex, rank: int) -> None:
        for stored in load_rank(folder, index, rank):
            stored.apply(self.get_values(stored.rectangle))


def build_model(target: Path, folder: Path, chain: Sequence[VersionIndex]) -> None:
    """Write the Hugging Face checkpoint of the last version of a chain into an existing directory.

    A checkpoint of the same tensors is overwritten in place. The first version of the chain has all values;
    `folder` has a directory for each version. Raises Damaged, OSError.
    """
    start = folder / str(chain[0].version)
    tensors = _find_tensors(start, chain[0])
    is_adapter = adapters.is_adapter(start / MODEL_FOLDER)
    path = target / (adapters.WEIGHTS_NAME if is_adapter else WEIGHTS_NAME)
    of_other_kind = [WEIGHTS_NAME] if is_adapter else [adapters.WEIGHTS_NAME, adapters.CONFIG_NAME]
    for name in of_other_kind:
        (target / name).unlink(missing_ok=True)
    if not _has_tensors(path, tensors):
        _create_file(path, tensors)
    ModelFile(path).apply(folder, chain)
    try:
        for source in sorted((start / MODEL_FOLDER).iterdir()):
            shutil.copyfile(source, target / source.name)
    except FileNotFoundError as error:
        raise Damaged(f"{start / MODEL_FOLDER} is missing, so its weights can't be loaded") from error


def find_weights_file(folder: Path) -> Path:
    """Return the file of the weights in a built checkpoint."""
    return folder / (adapters.WEIGHTS_NAME if adapters.is_adapter(folder) else WEIGHTS_NAME)


def _has_tensors(path: Path, tensors: dict[str, Rectangle]) -> bool:
    try:
        places = ModelFile(path).places
    except (Damaged, OSError, ValueError):  # an empty file can't be mapped
        return False
    return {name: (place.dtype, place.shape) for name, place in places.items()} == {
        name: (one.dtype, one.whole_shape) for name, one in tensors.items()
    }


def _find_tensors(folder: Path, start: VersionIndex) -> dict[str, Rectangle]:
    """Return a rectangle of each tensor. Raises Damaged if the version lacks values of a tensor."""
    known: dict[str, Rectangle] = {}
    stored: dict[str, int] = {}
    for rank, record in enumerate(start.files):
        for rectangle in rank_file.load_rectangles(folder / record.name, rank, record):
            known[rectangle.name] = rectangle
            stored[rectangle.name] = stored.get(rectangle.name, 0) + rectangle.num_values
    for name, rectangle in known.items():
        if stored[name] != math.prod(rectangle.whole_shape):
            raise Damaged(f"{folder}: weights {start.version} lack values of tensor {name}")
    return known


def _create_file(path: Path, tensors: dict[str, Rectangle]) -> None:
    """Create a safetensors file with room for the tensors. Raises OSError if there is no space."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, one in sorted(tensors.items(), key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[0])):
        size = math.prod(one.whole_shape) * DTYPE_BYTES[one.dtype]
        header[name] = {"dtype": one.dtype, "shape": list(one.whole_shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        # without space reserved, a write to mapped memory would kill the process
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + at)
        file.write(len(text).to_bytes(8, "little") + text)
    os.replace(temporary, path)


class ModelCopy:
    """The copy of a model on this node. Several processes may have one at the same place."""

    def __init__(self, folder: Path, versions: Path) -> None:
        """Keep the copy of the versions in the directory `versions` in `folder`, which is on this node."""
        self.folder = folder
        self.versions = versions
        self.model = folder / "model"
        self._state = folder / "state.json"

    def bring_to(self, version: WeightVersion) -> int:
        """Bring the copy to a version; return the number of bytes read, 0 if it was there.

        A damaged difference is replaced by the newest version with all values. Raises Damaged if the version
        can't be built from the published files, ValueError if the copy is newer, OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock(fcntl.LOCK_EX):
            at = self.find_version()
            if at == version:
                return 0
            if at is not None and at > version:
                raise ValueError(
                    f"the node's copy of the weights has version {at}, which is newer than {version}"
                )
            chain = load_chain(self.versions, version, at)
            self._state.unlink(missing_ok=True)
            if chain[0].base is not None:
                try:
                    ModelFile(find_weights_file(self.model)).apply(self.versions, chain)
                except (Damaged, FileNotFoundError):
                    chain = load_chain(self.versions, version)
            if chain[0].base is None:
                self.model.mkdir(exist_ok=True)
                build_model(self.model, self.versions, chain)
            write_atomic(
                self._state, json.dumps({"version": str(version), "boot": find_boot_id()}), durable=False
            )
            return sum(index.stored_bytes for index in chain)

    def find_version(self) -> WeightVersion | None:
        """Return the version of the copy; None if there is none, or if it was not finished."""
        state = load_object(self._state)
        # after a crash of the node, its disk may lack the last writes
        return WeightVersion.parse(state["version"]) if state.get("boot") == find_boot_id() else None

    @contextlib.contextmanager
    def hold(self, version: WeightVersion) -> Iterator[Path]:
        """Yield the directory of the checkpoint, which does not change meanwhile.

        Raises ValueError if the copy has another version.
        """
        with self._lock(fcntl.LOCK_SH):
            if (at := self.find_version()) != version:
                raise ValueError(f"the node's copy of the weights has version {at}, not {version}")
            yield self.model

    @contextlib.contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, kind)
            yield
        finally:
            os.close(fd)
