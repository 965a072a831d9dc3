"""Published weights on disk: one folder per version, a pointer to the newest, removal of old versions.

Nothing is fsynced: weights can be published again from a checkpoint, and a trainer publishes first when it
starts. Closing the files makes them visible to other nodes.
"""

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from hpc_rl.core.errors import Stale
from hpc_rl.core.records import check_newest_lineage
from hpc_rl.core.trial import Trial, list_entries, load_json
from hpc_rl.core.types import WeightVersion

logger = logging.getLogger(__name__)
KEEP = 2  # newest versions that are kept


def finish(trial: Trial, version: WeightVersion) -> Path:
    """Rename the weights in `.<version>.tmp` to their final name and update the pointer.

    Raises OSError, and Stale if newer weights are current or a later trainer has begun.
    """
    check_newest_lineage(trial, version.lineage)
    pointer = load_json(trial.current_weights)
    if pointer and (pointer["lineage"], pointer["step"]) > (version.lineage, version.step):
        newer = pointer["label"]
        raise Stale(f"weights {newer} are current: a later trainer than this one ({version}) has published")
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


def count_bytes(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())


def prune(trial: Trial, held: Iterable[str]) -> list[str]:
    """Remove all versions except the newest KEEP, `held` and the current one; return the removed ones."""
    versions = sorted(filter(None, map(_parse_version, os.listdir(trial.weights))), reverse=True)
    current = load_json(trial.current_weights) or {}
    staying = {*held, current.get("label")}
    going = [str(version) for version in versions[KEEP:] if str(version) not in staying]
    for label in going:
        shutil.rmtree(trial.published(label), ignore_errors=True)
    return going


def drop(trial: Trial) -> int:
    """Remove every published version of a finished trial; return the number of freed bytes.

    For its owner. Removes the pointer first, so a server that starts meanwhile waits for weights. A recover
    publishes the weights of its checkpoint. Raises OSError.
    """
    trial.current_weights.unlink(missing_ok=True)
    versions = filter(None, (_parse_version(entry.name) for entry in list_entries(trial.weights)))
    folders = [trial.published(str(version)) for version in versions]
    freed = sum(map(count_bytes, folders))
    for folder in folders:
        shutil.rmtree(folder)
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
