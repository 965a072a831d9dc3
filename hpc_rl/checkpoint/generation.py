"""Generation: the state after one step, committed by all ranks together, and found again by a scan.

Commit: rank 0 makes `recover/.gen-<step>.<attempt>.<incarnation>.tmp`; every rank writes its files (the engine does that)
and then `rank_<k>.ok` with their sizes and checksums; rank 0 compares these with what lies there, writes manifest.json last
and renames the folder. A kill anywhere leaves the generations of before, or those and this one; never half of one.

The manifest carries a checksum of itself, so that every bit of a generation is covered. No torch here: collectives
(a barrier after `begin`, one before `commit`) are the caller's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpc_rl.checkpoint import manifest as manifests
from hpc_rl.checkpoint.manifest import FileRecord, Manifest
from hpc_rl.errors import RoleFailed
from hpc_rl.trial import Trial, fsync_dir, read_json, write_atomic, write_json

logger = logging.getLogger(__name__)
_FOLDER = re.compile(r"gen-(\d{8,})")
_LEFTOVER = re.compile(r"\.gen-.*\.(tmp|gone)")


class Commit:
    """One generation in the making. Every rank has one; `begin` and `commit` are rank 0's.

    Args:
        trial: The trial.
        step: The step whose state is written.
        attempt: Attempt id.
        incarnation: Trainer incarnation.
    """

    def __init__(self, trial: Trial, step: int, attempt: str, incarnation: int) -> None:
        self.step = step
        self.final = trial.generation(step)
        self.folder = trial.recover / f".{self.final.name}.{attempt}.{incarnation}.tmp"

    def begin(self) -> None:
        """Make the temporary folder, empty. Raises OSError."""
        if self.folder.exists():  # an earlier save of this very incarnation failed
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)

    def rank_done(self, rank: int, names: list[str]) -> None:
        """Say that this rank's files are written and synced, with sizes and checksums. Raises OSError."""
        files = [dataclasses.asdict(file) for file in manifests.record(self.folder, sorted(names))]
        write_json(self.folder / f"rank_{rank}.ok", {"rank": rank, "files": files})

    def commit(self, manifest: Manifest) -> Manifest:
        """Check what the ranks wrote, seal it and give it its name; returns the manifest with its files.

        Raises RoleFailed when a rank's files are not there as it said, OSError.
        """
        files = self._gather(manifest.num_ranks)
        if problem := manifests.check_sizes(self.folder, files):
            raise RoleFailed(f"generation {self.step} is not complete: {problem}")
        manifest = dataclasses.replace(manifest, files=files)
        write_atomic(self.folder / manifests.NAME, _sealed(manifest))
        fsync_dir(self.folder)
        self._rename(manifest)
        fsync_dir(self.final.parent)
        return manifest

    def _gather(self, num_ranks: int) -> list[FileRecord]:
        os.listdir(self.folder)  # a listing drops what NFS remembers of names that were not there
        files: list[FileRecord] = []
        for rank in range(num_ranks):
            data = read_json(self.folder / f"rank_{rank}.ok")
            if data is None:
                raise RoleFailed(f"generation {self.step} is not complete: rank {rank} left no rank_{rank}.ok")
            files += [FileRecord(**file) for file in data["files"]]
        files += manifests.record(self.folder, [f"rank_{rank}.ok" for rank in range(num_ranks)])
        return sorted(files, key=lambda file: file.name)

    def _rename(self, manifest: Manifest) -> None:
        try:
            os.rename(self.folder, self.final)
            return
        except OSError:
            found = check(self.final)
            if found.manifest == manifest:
                return  # the reply to a rename was lost, or it lies there from before
            if not self.final.exists():
                raise
            problem = found.problem or f"written by lineage {found.manifest.lineage if found.manifest else '?'}"
        set_aside(self.final, problem)
        os.rename(self.folder, self.final)


@dataclass(frozen=True)
class Found:
    """A generation as it lies on disk: `problem` is '' where nothing wrong was seen."""

    step: int
    path: Path
    manifest: Manifest | None
    problem: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        return self.manifest.metrics if self.manifest else {}


def scan(trial: Trial) -> list[Found]:
    """All generations, newest first, checked as far as manifests and listings show (`verify` reads the content)."""
    try:
        names = [entry.name for entry in os.scandir(trial.recover)]
    except FileNotFoundError:
        return []
    paths = [trial.recover / name for name in names if _FOLDER.fullmatch(name)]
    return sorted((check(path) for path in paths), key=lambda found: found.step, reverse=True)


def check(path: Path) -> Found:
    """One generation, by its manifest and the sizes of its files."""
    match = _FOLDER.fullmatch(path.name)
    step = int(match[1]) if match else -1
    try:
        manifest = _unsealed((path / manifests.NAME).read_bytes())
    except FileNotFoundError:
        return Found(step, path, None, "has no manifest")
    except (OSError, ValueError) as error:
        return Found(step, path, None, f"{manifests.NAME}: {error}")
    if manifest.step != step:
        return Found(step, path, None, f"{manifests.NAME} is of step {manifest.step}")
    return Found(step, path, manifest, manifests.check_sizes(path, manifest.files))


def verify(found: Found) -> Found:
    """The same generation after every byte of it was read."""
    if found.problem or found.manifest is None:
        return found
    return dataclasses.replace(found, problem=manifests.check_content(found.path, found.manifest.files))


def set_aside(path: Path, problem: str) -> Path:
    """Move a generation out of the way, whole, for a person to look at. Only the owner of the trial does this. Raises OSError."""
    folder = path.parent / "set-aside"
    folder.mkdir(exist_ok=True)
    there = folder / f"{path.name}.{uuid.uuid4().hex[:8]}"
    os.rename(path, there)
    fsync_dir(folder)
    logger.error("GENERATION SET ASIDE: %s %s; kept as %s", path.name, problem, there)
    return there


def clear_leftovers(trial: Trial) -> None:
    """Remove what killed incarnations left half written or half deleted. Only the owner of the trial does this."""
    for entry in os.scandir(trial.recover) if trial.recover.is_dir() else ():
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry.path, ignore_errors=True)


def _sealed(manifest: Manifest) -> str:
    data = manifest.to_json()
    return json.dumps({**data, "xxh3": _own_checksum(data)}, indent=2, sort_keys=True) + "\n"


def _unsealed(raw: bytes) -> Manifest:
    data = json.loads(raw)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    if data.pop("xxh3", None) != _own_checksum(data):
        raise ValueError("its content is not what was written (checksum)")
    return Manifest.from_json(data)


def _own_checksum(data: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(data, sort_keys=True).encode())
