"""Generations: the state after one step, committed by all ranks together and found by a scan.

Commit: rank 0 makes `recover/.gen-<step>.<attempt>.<incarnation>.tmp`. Every rank writes its files there
(with the engine), then `rank_<k>.ok` with their sizes and checksums. Rank 0 waits for these records, compares
them with the files, writes manifest.json last and renames the folder. A kill at any time leaves only complete
generations.

The manifest has a checksum of itself, so every bit of a generation is covered. A generation without a valid
manifest does not exist. No torch here; the caller needs a barrier after `begin`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hpc_rl.core import checked_file
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.errors import Damaged, RoleFailed
from hpc_rl.core.files import format_size
from hpc_rl.core.trial import (
    Trial,
    fsync_dir,
    list_entries,
    load_json,
    load_object,
    write_atomic,
    write_json,
)

logger = logging.getLogger(__name__)
MARGIN_BYTES = 64 << 20  # free space that a save leaves for logs, metrics and the batch log
# 1/3 of a generation is the model; a save leaves space to publish or export it
WEIGHTS_SHARE = 3
LIGHT_BYTES = 64 << 20  # files of this size are cheap to read twice
EVALUATIONS_KEPT = 8  # newest metrics without a generation
SCHEMA = 2
MANIFEST_NAME = "manifest.json"
CONFIG_NAME = "config.json"
# attempt and submission of a generation that the user imported from other weights
IMPORTED = "import"
IMPORTED_LINEAGE = -1
_FOLDER = re.compile(r"gen-(\d{8,})")
_LEFTOVER = re.compile(r"\.gen-.*\.(tmp|gone)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The state after a step of a lineage."""

    step: int  # the last finished step
    lineage: int
    attempt: str
    incarnation: int
    submission: str  # its job id
    version: str  # weight version label, `<lineage>.<step>`
    num_ranks: int  # ranks that wrote files
    config_hash: str  # of the configuration in force, to detect changes
    epoch: int = 0  # finished passes over the data
    cursor: int = 0  # used rows of the current pass
    # fingerprint of the training rows (datasets/rows.py); {} if none was taken
    data: dict[str, Any] = field(default_factory=dict)
    # position of the batch log, {"sealed": newest batch in this state}; {} without such a log
    ledger: dict[str, int] = field(default_factory=dict)
    # position of the engine's schedule and optimizer, compared after loading
    counters: dict[str, int] = field(default_factory=dict)
    timers: dict[str, Any] = field(default_factory=dict)  # elapsed counts of each, not the frequencies
    adapted: dict[str, float] = field(default_factory=dict)  # numbers that the recipe adapts after each step
    stats: dict[str, Any] = field(default_factory=dict)  # position of each writer
    # metrics of the evaluation of this state, as `eval_reward`; {} if it was not evaluated
    metrics: dict[str, float] = field(default_factory=dict)
    # of this package, the libraries and Python; `commit` of a checkout
    versions: dict[str, str] = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)  # every other file of the folder
    schema: int = SCHEMA  # layout of this record

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """Parse a manifest. Raises ValueError with the reason if this version can't read it."""
        if data.get("schema") != SCHEMA:
            schemas = f"schema {data.get('schema')!r}, this one reads {SCHEMA}"
            raise ValueError(f"it was written by another version of hpc-rl ({schemas})")
        try:
            return cls(**{**data, "files": [FileRecord(**record) for record in data["files"]]})
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"it is damaged: {MANIFEST_NAME} lacks a field or has another one: {error}"
            ) from error


def hash_config(config: dict[str, Any]) -> str:
    """Return a stable hash of a configuration as JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Commit:
    """A generation during its commit. Every rank has one; only rank 0 calls `begin` and `commit`."""

    def __init__(self, trial: Trial, step: int, attempt: str, incarnation: int) -> None:
        self.step = step
        self.final = trial.generation(step)
        self.config_json = trial.config_json
        self.folder = trial.recover / f".{self.final.name}.{attempt}.{incarnation}.tmp"

    def begin(self) -> None:
        """Make the temporary folder, empty. Raises OSError."""
        if self.folder.exists():  # an earlier save by this incarnation failed
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)

    def record_rank(self, rank: int, files: Sequence[FileRecord]) -> None:
        """Record this rank's files, which must be written and synced. Raises OSError."""
        record = {"rank": rank, "files": [dataclasses.asdict(file) for file in files]}
        write_json(self.folder / f"rank_{rank}.ok", record)

    def list_missing_ranks(self, num_ranks: int) -> list[int]:
        """Return the ranks that have not recorded their files yet. Raises OSError."""
        # a listing: NFS caches that a name does not exist
        names = {entry.name for entry in os.scandir(self.folder)}
        return [rank for rank in range(num_ranks) if f"rank_{rank}.ok" not in names]

    def abandon(self) -> None:
        """Remove the unfinished generation. No rank may be writing."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self, manifest: Manifest) -> Manifest:
        """Check the ranks' files, add the configuration in force, seal, rename; return the manifest.

        Raises RoleFailed if the files differ from the ranks' records, OSError.
        """
        files = self._gather(manifest.num_ranks)
        if problem := check_sizes(self.folder, files):
            raise RoleFailed(f"checkpoint {self.step} was not written completely ({self.folder}): {problem}")
        manifest = dataclasses.replace(manifest, files=files)
        write_atomic(self.folder / MANIFEST_NAME, seal(manifest.to_json()))
        fsync_dir(self.folder)
        self._rename(manifest)
        fsync_dir(self.final.parent)
        return manifest

    def _gather(self, num_ranks: int) -> list[FileRecord]:
        os.listdir(self.folder)  # a listing refreshes NFS's cache of missing names
        files: list[FileRecord] = []
        for rank in range(num_ranks):
            data = load_json(self.folder / f"rank_{rank}.ok")
            if data is None:
                raise RoleFailed(
                    f"checkpoint {self.step} was not written completely: {self.folder} has no rank_{rank}.ok"
                )
            files += [FileRecord(**file) for file in data["files"]]
        others = [f"rank_{rank}.ok" for rank in range(num_ranks)]
        if self.config_json.is_file():
            write_atomic(self.folder / CONFIG_NAME, self.config_json.read_bytes())
            others.append(CONFIG_NAME)
        files += [checked_file.record(self.folder / name) for name in others]
        return sorted(files, key=lambda file: file.name)

    def _rename(self, manifest: Manifest) -> None:
        try:
            os.rename(self.folder, self.final)
            return
        except OSError:
            found = check(self.final)
            if found.manifest == manifest and not self.folder.exists():
                return  # the rename succeeded, but its reply was lost
            found = verify(found)
            if found.manifest == manifest and not found.problem:
                return  # it was committed before
            if not self.final.exists():
                raise
            lineage = found.manifest.lineage if found.manifest else "?"
            problem = found.problem or f"another start of the trainer wrote it (lineage {lineage})"
        move_aside(self.final, problem)
        os.rename(self.folder, self.final)


@dataclass(frozen=True)
class Found:
    """A generation on disk. `problem` is '' if it is sound as far as it was checked."""

    step: int
    path: Path
    manifest: Manifest | None
    problem: str = ""
    evaluated: dict[str, float] = field(default_factory=dict)  # metrics that arrived after it was made

    @property
    def version(self) -> str:
        return self.manifest.version if self.manifest else ""

    @property
    def metrics(self) -> dict[str, float]:
        return {**(self.manifest.metrics if self.manifest else {}), **self.evaluated}


def scan(trial: Trial) -> list[Found]:
    """Return all generations, newest first, checked by manifest and listing. `verify` checks their content.

    Raises TrialStateError if `recover/` is not a folder: its content is unknown, so no start is possible.
    """
    paths = [
        trial.recover / entry.name for entry in list_entries(trial.recover) if _FOLDER.fullmatch(entry.name)
    ]
    evaluated = load_object(trial.evaluations)
    found = (check(path) for path in paths)
    known = (dataclasses.replace(one, evaluated=evaluated.get(one.version, {})) for one in found)
    return sorted(known, key=lambda one: one.step, reverse=True)


def record_evaluation(trial: Trial, version: str, metrics: dict[str, float]) -> None:
    """Record the metrics of a version whose generation may exist already. For the owner of the trial only."""
    evaluated = load_object(trial.evaluations) | {version: metrics}
    # an asynchronous save may not be found yet
    needed = {one.version for one in scan(trial)} | {*list(evaluated)[-EVALUATIONS_KEPT:]}
    trial.recover.mkdir(exist_ok=True)
    write_json(trial.evaluations, {label: one for label, one in evaluated.items() if label in needed})


def check(path: Path) -> Found:
    """Return one generation, checked by its manifest and the sizes of its files."""
    match = _FOLDER.fullmatch(path.name)
    step = int(match[1]) if match else -1
    try:
        manifest = checked_file.retry_once(path, lambda: _load_manifest(path / MANIFEST_NAME))
    except FileNotFoundError:
        return Found(step, path, None, "has no manifest")
    except (OSError, ValueError) as error:
        return Found(step, path, None, f"{MANIFEST_NAME}: {error}")
    if manifest.step != step:
        return Found(step, path, None, f"its {MANIFEST_NAME} belongs to step {manifest.step}")
    return Found(step, path, manifest, check_sizes(path, manifest.files))


def verify(found: Found, max_bytes: int | None = None) -> Found:
    """Read every byte of a generation, or of its files up to `max_bytes`; return it with the problem found.

    `LIGHT_BYTES` is enough for a start: larger files are checked during loading, so each is read once.
    """
    if found.problem or found.manifest is None:
        return found
    files = [file for file in found.manifest.files if max_bytes is None or file.size <= max_bytes]
    return dataclasses.replace(found, problem="; ".join(find_damage(found.path, files)))


def find_room_problem(trial: Trial, size: int) -> str:
    """Return why a generation of `size` bytes does not fit, or ''. Quotas are not checked."""
    there = os.statvfs(trial.recover)
    if there.f_blocks and (problem := explain_lack_of_space(there.f_bavail * there.f_frsize, size)):
        return problem
    if there.f_files and there.f_favail < 16:
        return "no inodes are left"
    return ""


def explain_lack_of_space(free: int, size: int) -> str:
    """Return why a generation of `size` bytes does not fit into `free` bytes, or ''."""
    margin = MARGIN_BYTES + size // WEIGHTS_SHARE
    if free >= size + margin:
        return ""
    kept = f"{format_size(margin)} must stay free for publishing, the batch log and metrics"
    return f"it needs {format_size(size)}, but only {format_size(free)} are free ({kept})"


def move_aside(path: Path, problem: str, asked: bool = False) -> Path:
    """Move a generation into `set-aside/`. `asked`: the user requested an older one.

    For the owner of the trial only. Raises OSError.
    """
    folder = path.parent / "set-aside"
    folder.mkdir(exist_ok=True)
    there = folder / f"{path.name}.{uuid.uuid4().hex[:8]}"
    os.rename(path, there)
    fsync_dir(folder)
    fsync_dir(path.parent)
    if asked:
        logger.info(
            "checkpoint %s is set aside, as you asked (%s); it is kept as %s", path.name, problem, there
        )
    else:
        form = "CHECKPOINT SET ASIDE: %s can't be used (%s); it is kept as %s"
        logger.error(form, path.name, problem, there)
    return there


def clear_leftovers(trial: Trial) -> None:
    """Remove the partial folders of killed incarnations. For the owner of the trial only."""
    for entry in os.scandir(trial.recover) if trial.recover.is_dir() else ():
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry.path, ignore_errors=True)


def seal(data: dict[str, Any]) -> str:
    """Return the text of a manifest with its own checksum."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(data, sort_keys=True).encode())
    return json.dumps({**data, "xxh3": checksum}, indent=2, sort_keys=True) + "\n"


def _load_manifest(path: Path) -> Manifest:
    """Load the manifest in a file. Raises OSError, and ValueError with the problem."""
    if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would never end
        raise ValueError("it is not a regular file")
    raw = path.read_bytes()
    try:
        data = json.loads(raw)
        if not isinstance(data, dict):
            raise ValueError("it is damaged: its content is not a JSON object")
        data.pop("xxh3", None)
        is_whole = raw == seal(data).encode()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError("it is damaged: its content is not JSON") from error
    except RecursionError as error:
        raise ValueError("it is damaged: its content is nested too deeply") from error
    if not is_whole:
        raise ValueError("it is damaged: its content does not match its checksum")
    return Manifest.from_json(data)


def check_sizes(folder: Path, files: list[FileRecord]) -> str:
    """Return a problem with the names, types or sizes of files, or ''."""
    try:
        found = checked_file.retry_once(folder, lambda: {path.name: path.stat() for path in folder.iterdir()})
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


def find_damage(folder: Path, files: list[FileRecord]) -> list[str]:
    """Read every byte of the files; return the problem of each damaged file."""
    return [problem for file in files if (problem := _check_file(folder, file))]


def _check_file(folder: Path, file: FileRecord) -> str:
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
