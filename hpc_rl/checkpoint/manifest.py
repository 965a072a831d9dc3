"""The manifest of a generation: what it is, the position of the training, and every file with its checksums.

A generation without a valid manifest does not exist; generation.py commits and finds them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl import checked_file
from hpc_rl.checked_file import FileRecord
from hpc_rl.errors import Damaged

SCHEMA = 2
NAME = "manifest.json"
# attempt and submission of a generation that the user made of other weights
IMPORTED = "import"
IMPORTED_LINEAGE = -1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """State after `step` as `lineage` made it."""

    step: int  # the last finished one
    lineage: int
    attempt: str
    incarnation: int
    submission: str  # its job id
    version: str  # weight version label, `<lineage>.<step>`
    num_ranks: int  # that wrote files
    config_hash: str  # of the configuration in force, to detect changes
    epoch: int = 0  # finished passes over the data
    cursor: int = 0  # rows of the current pass that are used up
    # fingerprint of the rows trained on (datasets/rows.py); {} if none was taken
    data: dict[str, Any] = field(default_factory=dict)
    # position of the batch log, {"sealed": newest batch in this state}; {} without such a log
    ledger: dict[str, int] = field(default_factory=dict)
    # position of the engine's schedule and optimizer, compared after loading
    counters: dict[str, int] = field(default_factory=dict)
    timers: dict[str, Any] = field(default_factory=dict)  # what has elapsed of each, never the frequencies
    stats: dict[str, Any] = field(default_factory=dict)  # position of each sink
    # numbers of the evaluation of this very state, as `eval_reward`; {} if it was not evaluated
    metrics: dict[str, float] = field(default_factory=dict)
    # of this package, the libraries and Python; `commit` of a checkout
    versions: dict[str, str] = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)  # every other file of the folder
    schema: int = SCHEMA  # layout of this record

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Raise ValueError, with the reason, for anything that this version can't read."""
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}, this version reads {SCHEMA}")
        try:
            return cls(**{**data, "files": [FileRecord(**record) for record in data["files"]]})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a manifest: {error}") from error


def config_hash(config: dict[str, Any]) -> str:
    """Return a stable hash of a configuration as JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_sizes(folder: Path, files: list[FileRecord]) -> str:
    """Return what is wrong with the files as far as a listing shows, or ''."""
    try:
        found = checked_file.retry_once(lambda: {entry.name: entry.stat() for entry in os.scandir(folder)})
    except OSError as error:
        return f"can't be listed: {error}"
    for file in files:
        if file.name not in found:
            return f"{file.name} is missing"
        if not stat.S_ISREG(found[file.name].st_mode):
            return f"{file.name} is not a regular file"
        if found[file.name].st_size != file.size:
            return f"{file.name} has {found[file.name].st_size} bytes, {file.size} were written"
    return ""


def damages(folder: Path, files: list[FileRecord]) -> list[str]:
    """Return the problem of each damaged file, by reading every byte; [] if there is none."""
    return [problem for file in files if (problem := _damage(folder, file))]


def _damage(folder: Path, file: FileRecord) -> str:
    try:
        with checked_file.CheckedReader(folder / file.name, file) as reader:
            reader.check()
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} can't be read: {error.strerror or error}"
    except Damaged as error:
        return str(error)
    return ""
