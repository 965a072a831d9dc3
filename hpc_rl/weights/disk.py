"""Published weights on disk: one folder per version, a pointer to the newest, removal of old versions.

The files of a version are durable. Its name and the pointer may be lost in a crash of the file server: a
trainer publishes first when it starts.
"""

import contextlib
import heapq
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.core.errors import Stale
from hpc_rl.core.holds import FolderHolds
from hpc_rl.core.records import check_newest_lineage
from hpc_rl.core.steps import join_steps
from hpc_rl.core.trial import Trial, list_entries, load_json, load_object, write_atomic
from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files.chain import (
    INDEX_NAME,
    Indices,
    VersionIndex,
    choose_removable,
    find_rebuildable,
)

logger = logging.getLogger(__name__)
KEEP = 2  # newest versions that are kept
GB = 1e9  # of weights.history_gb
GONE = ".gone.tmp"  # end of the name of a folder that is being removed


def finish(trial: Trial, version: WeightVersion) -> Path:
    """Rename the weights in `.<version>.tmp` to their final name and update the pointer.

    Raises OSError, and Stale if newer weights are current or a later trainer has begun.
    """
    check_newest_lineage(trial, version.lineage)
    pointer = load_json(trial.current_weights)
    if pointer and (pointer["lineage"], pointer["step"]) > (version.lineage, version.step):
        newer = pointer["label"]
        raise Stale(f"weights {version} are not published: a later trainer has published {newer} already")
    final = trial.published(str(version))
    if final.exists():
        shutil.rmtree(final)
    os.rename(trial.weights / f".{version}.tmp", final)
    # the time tells a version from the same one with damaged files
    record = {"label": str(version), "lineage": version.lineage, "step": version.step, "path": str(final)}
    record["written_at"] = time.time()
    temp = trial.weights / f".{trial.current_weights.name}.{uuid.uuid4().hex[:12]}.tmp"
    temp.write_text(json.dumps(record) + "\n")
    os.replace(temp, trial.current_weights)
    return final


def find_history_bytes(config: Config) -> float:
    """Return the size up to which a trial keeps versions; 0 for the ones that servers need."""
    return (config.weights.history_gb or 0.0) * GB if isinstance(config, GRPOConfig) else 0.0


def count_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder and its folders."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class History:
    """The published versions of a trial and their removal, for the owner of the trial.

    It stays, because it reads the index of each version once.
    """

    def __init__(
        self, trial: Trial, budget_bytes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep versions of `budget_bytes` in total; needed versions stay even if they are larger."""
        self.trial = trial
        self.budget_bytes = budget_bytes
        self._holds = FolderHolds(trial.weights, clock)
        self._known: dict[WeightVersion, tuple[int, VersionIndex]] = {}  # with the inode of its folder

    def prune(self, held: Iterable[str]) -> list[str]:
        """Remove versions beyond the budget; return them.

        The newest KEEP versions, `held`, the current one and versions that a process holds stay, each with
        the versions that rebuild it. Folders without an index that are older than the current one go.
        """
        current = _parse_version(load_object(self.trial.current_weights).get("label", ""))
        labels = {*held}

        def list_needed(found: Collection[WeightVersion], indices: Indices) -> set[WeightVersion]:
            newest = heapq.nlargest(KEEP, indices or found)
            used = filter(None, map(_parse_version, labels | self._holds.list_names()))
            return {*newest, *used, *filter(None, [current])}

        try:
            removed, _ = self._remove(list_needed, older_than=current)
        except OSError as error:  # nothing may go that could not be read; the next publication tries again
            form = "old published weights in %s can't be removed yet; the next publication tries again: %s"
            logger.warning(form, self.trial.weights, error)
            return []
        return removed

    def drop(self) -> int:
        """Remove versions of a finished trial beyond the budget; return the number of freed bytes.

        Only versions that a process holds stay in any case. Raises OSError.
        """

        def list_held(_found: Collection[WeightVersion], _indices: Indices) -> set[WeightVersion]:
            return {*filter(None, map(_parse_version, self._holds.list_names()))}

        return self._remove(list_held, older_than=WeightVersion(sys.maxsize, 0))[1]

    def _remove(
        self,
        list_needed: Callable[[Collection[WeightVersion], Indices], set[WeightVersion]],
        older_than: WeightVersion | None,
    ) -> tuple[list[str], int]:
        """Remove what neither `list_needed` names nor the budget keeps; return it, and the freed bytes."""
        found, indices = self._load()
        rebuildable = find_rebuildable(indices)
        broken = {version: index for version, index in indices.items() if version not in rebuildable}

        def choose() -> list[WeightVersion]:
            needed = list_needed(found, indices)
            lost = [version for version in found if version not in indices and version not in needed]
            going = [version for version in sorted(lost, reverse=True) if older_than and version < older_than]
            going += choose_removable(broken, needed, 0)
            gone = {*going}
            rest = {version: index for version, index in indices.items() if version not in gone}
            return going + choose_removable(rest, needed, self.budget_bytes)

        going = choose()
        # hidden first: a process may be about to read a version, and a kill must not leave parts of one
        hidden = {version: self._hide(version) for version in going}
        if hidden:
            still = {*choose()}
            for version in hidden.keys() - still:  # held since the choice
                os.rename(hidden.pop(version), self.trial.published(str(version)))
        freed = 0
        for version, folder in hidden.items():
            freed += count_bytes(folder)
            shutil.rmtree(folder, ignore_errors=True)
            self._known.pop(version, None)
        left = {version: index for version, index in indices.items() if version not in hidden}
        if self.budget_bytes:
            self._write_summary(left, rebuildable)
        return [str(version) for version in hidden], freed

    def _load(self) -> tuple[list[WeightVersion], dict[WeightVersion, VersionIndex]]:
        """Return the versions on disk and the indices of complete ones. Raises OSError."""
        found, known = [], {}
        for entry in list_entries(self.trial.weights):
            if entry.name.endswith(GONE):  # of an earlier removal: a server on another node had files open
                shutil.rmtree(entry.path, ignore_errors=True)
            version = _parse_version(entry.name)
            if version is None or not entry.is_dir():
                continue
            found.append(version)
            inode, index = self._known.get(version, (0, None))
            if index is None or inode != entry.inode():  # another folder: the version was published again
                index = _load_index(Path(entry.path))
            if index is not None and index.version == version:
                known[version] = entry.inode(), index
        self._known = known
        return found, {version: index for version, (_, index) in known.items()}

    def _hide(self, version: WeightVersion) -> Path:
        hidden = self.trial.weights / f".{version}.{uuid.uuid4().hex[:12]}{GONE}"
        os.rename(self.trial.published(str(version)), hidden)
        return hidden

    def _write_summary(self, indices: Indices, rebuildable: Collection[WeightVersion]) -> None:
        """Write the size and the steps of the history for `hpc-rl status`, which reads no index."""
        summary = {
            "num_versions": len(indices),
            "bytes": sum(index.stored_bytes for index in indices.values()),
            "steps": join_steps(version.step for version in indices if version in rebuildable),
        }
        write_atomic(self.trial.weights_history, json.dumps(summary) + "\n", durable=False)


def _load_index(folder: Path) -> VersionIndex | None:
    """Return the index of a version; None if it is missing or damaged. Raises OSError."""
    index = VersionIndex.read(folder)
    if index is None:  # a failed read must not look like a missing index
        with contextlib.suppress(FileNotFoundError):
            (folder / INDEX_NAME).read_bytes()
            index = VersionIndex.read(folder)
    return index


def prune(trial: Trial, held: Iterable[str], history_bytes: float = 0.0) -> list[str]:
    """Remove versions once, as `History.prune` does."""
    return History(trial, history_bytes).prune(held)


def drop(trial: Trial, history_bytes: float = 0.0) -> int:
    """Remove the published versions of a finished trial beyond the budget; return the number of freed bytes.

    For its owner. Removes the pointer first, so a server that starts meanwhile waits for weights. A recover
    publishes the weights of its checkpoint. Raises OSError.
    """
    trial.current_weights.unlink(missing_ok=True)
    trial.held_weights.unlink(missing_ok=True)
    freed = History(trial, history_bytes).drop()
    clear_leftovers(trial)
    return freed


def clear_leftovers(trial: Trial) -> None:
    """Remove half-written folders of killed trainers. For the owner of the trial only."""
    for entry in os.scandir(trial.weights) if trial.weights.is_dir() else ():
        if entry.name.startswith(".") and entry.name.endswith(".tmp"):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)


def _parse_version(name: str) -> WeightVersion | None:
    try:
        return WeightVersion.parse(name)
    except ValueError:
        return None
