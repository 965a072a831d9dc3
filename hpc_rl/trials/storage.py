"""Checks of the directories that a trial writes to: they can be written, and have space for its state."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hpc_rl.checkpoint.generation import explain_lack_of_space
from hpc_rl.config.options.experiment import Config, get_value
from hpc_rl.core.files import format_size
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Trial
from hpc_rl.plan.estimate import DiskUse

PROBE_PREFIX = ".hpc-rl-probe-"
# Beside the directory of the trial. A trial without these options writes into that directory alone.
WRITTEN = (
    "cluster.name_resolve.nfs_record_root", "stats_logger.tensorboard.path", "stats_logger.swanlab.logdir",
    "stats_logger.mlflow.logdir", "stats_logger.trackio.logdir",
)  # fmt: skip


def find_write_problem(path: Path) -> str:
    """Return why a directory can't be made or written, or ''. Tries it, and leaves nothing.

    Permissions do not tell: the file system may be read-only or full, or refuse new files as /proc does.
    """
    there = find_existing_parent(path)
    try:
        with tempfile.TemporaryDirectory(prefix=PROBE_PREFIX, dir=there) as folder:
            Path(folder, "probe").write_bytes(b"x")
    except OSError as error:
        return f"no file can be created in {there}: {error.strerror or error}"
    return ""


def find_existing_parent(path: Path) -> Path:
    """Return the directory itself, or its nearest parent that exists."""
    for one in (path, *path.parents):
        with contextlib.suppress(OSError):
            if one.exists():
                return one
    return Path(path.anchor)


def check_places(config: Config) -> Iterator[Refusal]:
    """Yield other directories of the configuration that can't be written."""
    for option in WRITTEN:
        path = get_value(config, option)
        if path and (problem := find_write_problem(Path(path))):
            yield Refusal(
                option=option,
                value=path,
                kind=Kind.STORAGE,
                why=f": it can't be written: {problem}",
                use="name another directory",
            )


def measure_free_bytes(path: Path) -> int | None:
    """Return the free space that this account may use; None if the file system does not count it."""
    try:
        usage = os.statvfs(find_existing_parent(path))
    except OSError:
        return None
    return usage.f_bavail * usage.f_frsize if usage.f_blocks else None


def check_space(config: Config, trial: Trial, disk: DiskUse | None) -> Iterator[Refusal]:
    """Yield that no checkpoint would fit beside the space that a save leaves free, or not all that stay."""
    free = measure_free_bytes(trial.dir)
    saves = config.recover.mode != "disabled"
    if free is None:
        return
    about = partial(Refusal, option="cluster.fileroot", value=config.cluster.fileroot, kind=Kind.STORAGE)
    if saves and (problem := explain_lack_of_space(free, int(disk.checkpoint) if disk else 0)):
        yield about(
            why=f": no checkpoint could be saved: {problem}",
            use="free some space, or name another directory",
        )
    elif disk is not None:
        known = (disk.kept_weights, disk.kept_checkpoints, disk.kept_batches, disk.kept_exports)
        if (total := sum(size or 0 for size in known)) > free:
            why = f": the trial keeps up to {format_size(total)} there, and {format_size(free)} are free"
            yield about(why=why, is_note=True)
