"""Directories of a site: cluster profiles, template overrides, hooks; highest precedence first."""

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


def site_dirs(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the directories of a site, whether they exist or not.

    `HPC_RL_SITE_DIR` (several separated by colons; empty for none) is the whole list; without it the user's
    `$XDG_CONFIG_HOME/hpc-rl` comes before the machine's /etc/hpc-rl.
    """
    if SITE_DIR in environ:
        return [
            Path(os.path.abspath(os.path.expanduser(part))) for part in environ[SITE_DIR].split(":") if part
        ]
    own = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [Path(own) / "hpc-rl", SYSTEM]


def profile_dirs() -> list[Path]:
    """Return the directories that may have a profile `<cluster name>.yaml`; the first that has it counts."""
    return [*(folder / "cluster" for folder in site_dirs()), *SHIPPED_PROFILES]


def known_profiles(folders: list[Path]) -> dict[str, Path]:
    """Return the profiles by name."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found
