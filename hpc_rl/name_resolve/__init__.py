"""How the roles of a trial find each other: records and leases under slash-separated keys. No daemon."""

from pathlib import Path
from typing import Any

from hpc_rl.core.trial import Trial, read_object
from hpc_rl.name_resolve.shared_fs import NameResolve


def open_names(trial: Trial, config: Any = None) -> NameResolve:
    """Open the records of a trial, where `config` has them."""
    return NameResolve(names_dir(trial, config))


def names_dir(trial: Trial, config: Any = None) -> Path:
    """Return the directory with the records of a trial."""
    return _names_dir(trial, config.cluster.name_resolve.nfs_record_root if config is not None else "")


def stored_names_dir(trial: Trial) -> Path:
    """Return the directory with the records of a trial, as its stored configuration names it."""
    place = (read_object(trial.config_json).get("cluster") or {}).get("name_resolve") or {}
    return _names_dir(trial, place.get("nfs_record_root") or "")


def _names_dir(trial: Trial, root: str) -> Path:
    if not root:
        return trial.names
    user, experiment, name = trial.dir.absolute().parts[-3:]
    return Path(root).expanduser().absolute() / user / experiment / name
