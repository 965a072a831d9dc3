"""Chains of versions: which versions can be rebuilt, from which files, and which versions may be removed.

A published version is a directory: one file for each rank (rank_file.py), and `index.json`, which is written
last. A version that stores all values starts a chain. Any other version names the version before it, its
base, and is rebuilt from the chain up to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.errors import Damaged
from hpc_rl.core.trial import load_object, write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files import rank_file
from hpc_rl.weight_files.rank_file import StoredRectangle

INDEX_NAME = "index.json"
FORMAT = 1


@dataclass(frozen=True)
class VersionIndex:
    """The index of a published version. `files` are in the order of ranks."""

    version: WeightVersion
    base: WeightVersion | None  # None if all values are stored
    files: tuple[FileRecord, ...]
    whole_bytes: int  # of all values

    @property
    def stored_bytes(self) -> int:
        return sum(record.size for record in self.files)

    def write(self, folder: Path) -> None:
        """Write `index.json`, which completes the version. Raises OSError."""
        content = {
            "format": FORMAT,
            "version": str(self.version),
            "base": str(self.base) if self.base else None,
            "files": [dataclasses.asdict(record) for record in self.files],
            "whole_bytes": self.whole_bytes,
        }
        write_json(folder / INDEX_NAME, content)

    @classmethod
    def read(cls, folder: Path) -> VersionIndex | None:
        """Return the index of a version; None if it is missing, incomplete or of another format."""
        content = load_object(folder / INDEX_NAME)
        try:
            if content["format"] != FORMAT:
                return None
            return cls(
                version=WeightVersion.parse(content["version"]),
                base=WeightVersion.parse(content["base"]) if content["base"] else None,
                files=tuple(FileRecord(**record) for record in content["files"]),
                whole_bytes=int(content["whole_bytes"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


Indices = Mapping[WeightVersion, VersionIndex]


def trace_chain(version: WeightVersion, indices: Indices) -> list[VersionIndex]:
    """Return the versions to read in order to rebuild one, beginning with one that stores all values.

    Raises KeyError with the version that is missing, ValueError if the bases form a circle.
    """
    chain: list[VersionIndex] = []
    at: WeightVersion | None = version
    while at is not None:
        if at not in indices:
            raise KeyError(at)
        chain.append(indices[at])
        if len(chain) > len(indices):
            raise ValueError(f"the bases of version {version} form a circle")
        at = indices[at].base
    return chain[::-1]


def find_rebuildable(indices: Indices) -> set[WeightVersion]:
    """Return the versions whose whole chain exists."""
    rebuildable: set[WeightVersion] = set()
    for version in sorted(indices):
        try:
            rebuildable |= {index.version for index in trace_chain(version, indices)}
        except (KeyError, ValueError):
            continue
    return rebuildable


def choose_removable(
    indices: Indices, needed: Collection[WeightVersion], budget_bytes: float
) -> list[WeightVersion]:
    """Return the versions to remove so that the others fit the budget. Needed versions stay rebuildable.

    The oldest chains go first. The base of another version is removed only with or after that version, so a
    chain loses its newest versions first. If the needed versions exceed the budget, they stay.

    Args:
        indices: All complete versions.
        needed: Versions that servers, checkpoints or a running publication need.
        budget_bytes: For all versions that stay.
    """
    kept = {
        index.version
        for version in needed
        if version in indices
        for index in _trace_existing(version, indices)
    }
    total_bytes = sum(index.stored_bytes for index in indices.values())
    removable: list[WeightVersion] = []
    for chain in _split_chains(indices):
        for version in reversed(chain):
            if total_bytes <= budget_bytes:
                return removable
            if version in kept:
                break
            removable.append(version)
            total_bytes -= indices[version].stored_bytes
    return removable


def _trace_existing(version: WeightVersion, indices: Indices) -> list[VersionIndex]:
    try:
        return trace_chain(version, indices)
    except (KeyError, ValueError):
        return [indices[version]]


def _split_chains(indices: Indices) -> Iterator[list[WeightVersion]]:
    """Yield the versions of each chain in order, the chain with the oldest start first."""
    chains: dict[WeightVersion, list[WeightVersion]] = {}
    start_of: dict[WeightVersion, WeightVersion] = {}
    for version in sorted(indices):
        base = indices[version].base
        start = start_of.get(base, version) if base else version
        start_of[version] = start
        chains.setdefault(start, []).append(version)
    yield from (chains[start] for start in sorted(chains))


@dataclass
class Tensor:
    """A tensor in memory: its values as a flat unsigned array, and its form."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    values: np.ndarray


def rebuild(folder: Path, chain: Sequence[VersionIndex]) -> dict[str, Tensor]:
    """Return all tensors of the last version of a chain, by name. `folder` has a directory for each version.

    Verifies every file and every checksum. Raises Damaged, OSError.
    """
    tensors: dict[str, Tensor] = {}
    for index in chain:
        for stored in load_version(folder / str(index.version), index):
            place = stored.rectangle
            tensor = tensors.get(place.name)
            if tensor is None:
                tensor = Tensor(
                    place.dtype, place.whole_shape, np.zeros(_count_values(place.whole_shape), place.word)
                )
                tensors[place.name] = tensor
            if (tensor.dtype, tensor.shape) != (place.dtype, place.whole_shape):
                raise Damaged(f"{place.name} changes its form in version {index.version}")
            stored.apply(tensor.values)
    return tensors


def load_version(folder: Path, index: VersionIndex) -> Iterator[StoredRectangle]:
    """Yield the stored rectangles of a version, from all ranks. Raises Damaged, OSError."""
    for rank, record in enumerate(index.files):
        try:
            yield from rank_file.load(folder / record.name, rank, record)
        except FileNotFoundError as error:
            raise Damaged(f"{folder.name}/{record.name} is missing") from error


def _count_values(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
