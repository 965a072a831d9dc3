"""Discovery between the roles of a trial: records and leases under slash-separated keys. No daemon."""

from pathlib import Path
from typing import Any

from hpc_rl.core.trial import Trial, load_object
from hpc_rl.name_resolve.shared_fs import NameResolve


def open_names(trial: Trial, config: Any = None) -> NameResolve:
    """Open the records of a trial, at the place in `config`."""
    return NameResolve(find_names_dir(trial, config))


def find_names_dir(trial: Trial, config: Any = None) -> Path:
    """Return the directory with the records of a trial."""
    return _place_names(trial, config.cluster.name_resolve.nfs_record_root if config is not None else "")


def load_names_dir(trial: Trial) -> Path:
    """Return the directory with the records of a trial, from its stored configuration."""
    place = (load_object(trial.config_json).get("cluster") or {}).get("name_resolve") or {}
    return _place_names(trial, place.get("nfs_record_root") or "")


def _place_names(trial: Trial, root: str) -> Path:
    if not root:
        return trial.names
    user, experiment, name = trial.dir.absolute().parts[-3:]
    return Path(root).expanduser().absolute() / user / experiment / name
