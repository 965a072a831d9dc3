"""How the roles of a trial find each other: records and leases under slash-separated keys. No daemon."""

from pathlib import Path
from typing import Any

from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.trial import Trial


def open_names(where: Trial | str | Path, config: Any = None) -> NameResolve:
    """Open the records of one trial.

    Args:
        where: The trial, or its directory.
        config: The trial's configuration, for `cluster.name_resolve.nfs_record_root`.
    """
    return NameResolve(names_dir(where if isinstance(where, Trial) else Trial(Path(where)), config))


def names_dir(trial: Trial, config: Any = None) -> Path:
    """Return the directory with the records of a trial."""
    root = config.cluster.name_resolve.nfs_record_root if config is not None else ""
    if not root:
        return trial.names
    user, experiment, name = trial.dir.absolute().parts[-3:]
    return Path(root).expanduser().absolute() / user / experiment / name
