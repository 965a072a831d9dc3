"""The published weights of a trial for commands: list the steps that can be rebuilt, and rebuild one."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_rl.core.errors import Damaged, NothingToResume
from hpc_rl.core.holds import APPEAR_S, hold_entry
from hpc_rl.core.steps import format_ranges, join_steps
from hpc_rl.core.trial import EXPORT_RECORD_NAME, Trial, fsync_dir, write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files.chain import VersionIndex, find_rebuildable, load_chain, load_indices


def list_versions(trial: Trial) -> list[VersionIndex]:
    """Return the published versions that can be rebuilt, oldest first. Reads every index, but no values."""
    indices = load_indices(trial.weights)
    return [indices[version] for version in sorted(find_rebuildable(indices))]


def format_steps(versions: Collection[VersionIndex]) -> str:
    """Return the steps of versions for people: `12-60, 63`."""
    return format_ranges(join_steps(index.version.step for index in versions))


def find_version(versions: Collection[VersionIndex], step: int | None) -> WeightVersion | None:
    """Return the version of a step in the newest lineage; None without one."""
    return max((index.version for index in versions if index.version.step == step), default=None)


def choose_version(trial: Trial, label: str) -> WeightVersion:
    """Return a version that can be rebuilt. Raises NothingToResume."""
    versions = list_versions(trial)
    for index in versions:
        if str(index.version) == label:
            return index.version
    raise NothingToResume(f"weights {label} of {trial} can't be rebuilt. {describe_versions(versions)}")


def describe_versions(versions: Collection[VersionIndex]) -> str:
    """Return which steps can be exported from published weights, as a sentence."""
    if not versions:
        return "No published weights are left to rebuild a step from."
    lineages = sorted({index.version.lineage for index in versions})
    parts = [format_steps([one for one in versions if one.version.lineage == lineage])
             + (f" of lineage {lineage}" if len(lineages) > 1 else "") for lineage in lineages]  # fmt: skip
    return f"Published weights can be exported of steps {'; '.join(parts)}."


@contextmanager
def hold_chain(trial: Trial, version: WeightVersion, why: str) -> Iterator[None]:
    """Keep the files that rebuild a version from removal. Raises Damaged if some are gone."""
    with hold_entry(trial.weights, str(version), why):
        deadline = time.monotonic() + APPEAR_S
        while True:
            try:
                load_chain(trial.weights, version)
                break
            except Damaged:  # the trainer may have begun a removal before the hold; it puts the files back
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)
        yield


def write_export(trial: Trial, version: WeightVersion, target: Path) -> None:
    """Rebuild a version, which the caller holds, as a Hugging Face checkpoint in an existing folder, durably.

    Every value is compared with its checksum. Raises Damaged if a file differs or is gone, OSError.
    """
    from hpc_rl.weight_files.model_copy import build_model

    build_model(target, trial.weights, load_chain(trial.weights, version))
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    record = {"step": version.step, "version": str(version), "trial": str(trial)}
    write_json(target / EXPORT_RECORD_NAME, record)
    fsync_dir(target)
