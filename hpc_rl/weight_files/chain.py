"""Chains of versions: which versions can be rebuilt, from which files, and which versions may be removed.

A published version is a directory: one file for each rank (rank_file.py), and `index.json`, which is written
last. A version that stores all values starts a chain; its folder `model/` has the files of the model that are
not weights. Any other version names the version before it, its base, and is rebuilt from the chain up to it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.errors import Damaged
from hpc_rl.core.trial import load_object, write_atomic
from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files import rank_file
from hpc_rl.weight_files.rank_file import StoredRectangle

INDEX_NAME = "index.json"
MODEL_FOLDER = "model"  # of a version with all values: config.json and the tokenizer's files
FORMAT = 1
# Sizes of the model that differences may have together before a version with all values. Differences of 3.7 %
# then cost 4.9 % with these versions. A late server reads the size of four models at most.
MAX_CHAIN = 3


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
        write_atomic(folder / INDEX_NAME, json.dumps(content, indent=2) + "\n", durable=False)

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


def find_rebuildable(indices: Indices) -> set[WeightVersion]:
    """Return the versions whose whole chain exists."""
    known: dict[WeightVersion, bool] = {}
    for version in indices:
        path: dict[WeightVersion, bool] = {}
        at: WeightVersion | None = version
        while at is not None and at in indices and at not in known and at not in path:
            path[at] = True
            at = indices[at].base
        known |= dict.fromkeys(path, at is None or known.get(at, False))
    return {version for version, is_rebuildable in known.items() if is_rebuildable}


def choose_removable(
    indices: Indices, needed: Collection[WeightVersion], budget_bytes: float
) -> list[WeightVersion]:
    """Return the versions to remove so that the others fit the budget. Needed versions stay rebuildable.

    The oldest chains go first. The base of another version is removed only with or after that version, so a
    chain loses its newest versions first. If the needed versions exceed the budget, they stay. Of a needed
    version that can't be rebuilt, the versions that lead to it stay too: a copy of one of them can follow.

    Args:
        indices: All complete versions.
        needed: Versions that servers, checkpoints or a running publication need.
        budget_bytes: For all versions that stay.
    """
    total_bytes = sum(index.stored_bytes for index in indices.values())
    if total_bytes <= budget_bytes:
        return []
    kept = {
        index.version
        for version in needed
        if version in indices
        for index in _trace_existing(version, indices)
    }
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
    """Return a version and the versions that lead to it, as far as they exist."""
    chain: dict[WeightVersion, VersionIndex] = {}
    at: WeightVersion | None = version
    while at is not None and at in indices and at not in chain:
        chain[at] = indices[at]
        at = indices[at].base
    return list(chain.values())


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


def load_chain(
    folder: Path, version: WeightVersion, known: WeightVersion | None = None
) -> list[VersionIndex]:
    """Read the indices of the versions to apply in order to reach a version.

    The first has all values, or its base is `known`. `folder` has a directory for each version. Raises
    Damaged if one of them is missing.
    """
    chain: list[VersionIndex] = []
    at: WeightVersion | None = version
    while at is not None and at != known:
        index = VersionIndex.read(folder / str(at))
        if index is None or index.version != at or (index.base is not None and index.base >= at):
            needed = "" if at == version else f" (weights {version} need it)"
            raise Damaged(f"{folder / str(at)} is missing, incomplete or damaged{needed}")
        chain.append(index)
        at = index.base
    return chain[::-1]


def load_indices(folder: Path) -> dict[WeightVersion, VersionIndex]:
    """Read the index of every complete version in a directory."""
    indices: dict[WeightVersion, VersionIndex] = {}
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name[0].isdecimal() and (index := VersionIndex.read(folder / name)) and str(index.version) == name:
            indices[index.version] = index
    return indices


def load_rank(folder: Path, index: VersionIndex, rank: int) -> Iterator[StoredRectangle]:
    """Yield the rectangles that a rank stored in a version. Raises Damaged, OSError."""
    record = index.files[rank]
    try:
        yield from rank_file.load(folder / record.name, rank, record)
    except FileNotFoundError as error:
        raise Damaged(f"{folder / record.name} is missing") from error
