"""Manifest of a generation: what it is, where training stood, and every file with its size and checksum.

A generation without a valid manifest does not exist. How one is committed and found again is generation.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

SCHEMA = 1
NAME = "manifest.json"
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class FileRecord:
    """One file of a generation, by its name within the folder."""

    name: str
    size: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """State after `step` as `lineage` made it.

    Args:
        step: Last finished step.
        lineage: Lineage that wrote it.
        attempt: Attempt that wrote it.
        incarnation: Trainer incarnation within the attempt.
        submission: Job id of the submission.
        version: Weight version label `<lineage>.<step>`.
        num_ranks: Ranks that wrote files.
        config_hash: Of the configuration in force, to tell what changed since.
        epoch: Passes over the data that are finished.
        cursor: Rows of the current pass that are used up.
        timers: State of the timers: what has elapsed, never the frequencies.
        stats: Where the sinks stood.
        metrics: Numbers of the last evaluation before the save, as `eval_reward`.
        hpc_rl: Version of this package.
        files: Every other file of the folder.
        schema: Layout of this record.
    """

    step: int
    lineage: int
    attempt: str
    incarnation: int
    submission: str
    version: str
    num_ranks: int
    config_hash: str
    epoch: int = 0
    cursor: int = 0
    timers: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    hpc_rl: str = ""
    files: list[FileRecord] = field(default_factory=list)
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Raises ValueError, in words, for anything that this version can't read."""
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}, this version reads {SCHEMA}")
        try:
            return cls(**{**data, "files": [FileRecord(**record) for record in data["files"]]})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a manifest: {error}") from error


def config_hash(config: dict[str, Any]) -> str:
    """Stable hash of a configuration as JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def digest(path: Path) -> str:
    """xxh3 (128 bits) of a file's content, in hex. Raises OSError."""
    total = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(min(_CHUNK_BYTES, max(1, os.fstat(file.fileno()).st_size)))
        while count := file.readinto(buffer):
            total.update(memoryview(buffer)[:count])
    return total.hexdigest()


def record(folder: Path, names: list[str]) -> list[FileRecord]:
    """Records of files that lie in `folder`, hashed side by side. Raises OSError."""
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(lambda name: digest(folder / name), names))
    return [FileRecord(name, (folder / name).stat().st_size, xxh3) for name, xxh3 in zip(names, digests, strict=True)]


def check_sizes(folder: Path, files: list[FileRecord]) -> str:
    """What is wrong with the files as far as a listing shows, or ''."""
    try:
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    except OSError as error:
        return f"can't be listed: {error}"
    for file in files:
        if file.name not in sizes:
            return f"{file.name} is missing"
        if sizes[file.name] != file.size:
            return f"{file.name} has {sizes[file.name]} bytes, {file.size} were written"
    return ""


def check_content(folder: Path, files: list[FileRecord]) -> str:
    """Like check_sizes, and reads every byte."""
    if problem := check_sizes(folder, files):
        return problem
    try:
        found = record(folder, [file.name for file in files])
    except OSError as error:
        return f"can't be read: {error}"
    changed = [new.name for new, old in zip(found, files, strict=True) if new.xxh3 != old.xxh3]
    return f"{', '.join(changed)}: the content is not what was written (checksum)" if changed else ""
