"""Find the directories of a site, with cluster profiles, template overrides and hooks. The first wins."""

import os
from collections.abc import Mapping
from pathlib import Path

SITE_DIR = "HPC_RL_SITE_DIR"
SYSTEM = Path("/etc/hpc-rl")
_HERE = Path(__file__).resolve().parents[2]
SHIPPED_PROFILES = (
    _HERE / "_data" / "configs" / "cluster",
    _HERE.parent / "configs" / "cluster",
)  # in a wheel; in a checkout


def list_site_dirs(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the directories of a site; they need not exist.

    `HPC_RL_SITE_DIR` sets the whole list, separated by colons; empty means no directory. If it is not set,
    the user's `$XDG_CONFIG_HOME/hpc-rl` comes before the machine's /etc/hpc-rl.
    """
    if SITE_DIR in environ:
        return [
            Path(os.path.abspath(os.path.expanduser(part))) for part in environ[SITE_DIR].split(":") if part
        ]
    own = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [Path(own) / "hpc-rl", SYSTEM]


def list_profile_dirs() -> list[Path]:
    """Return the directories to search for a profile `<cluster name>.yaml`; the first match wins."""
    return [*(folder / "cluster" for folder in list_site_dirs()), *SHIPPED_PROFILES]


def find_profiles(folders: list[Path]) -> dict[str, Path]:
    """Return the profiles by name."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found
