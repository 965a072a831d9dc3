"""Which tests share a process where several run at once: all with a Slurm, all with a SGLang, else those of a file.

No test sees or changes what the account that runs them keeps: its index of trials, its cluster profiles.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STARTED_ONCE = ("slurm", "sglang")
SPREAD = ("unit", "golden")  # short, and nothing is started for them

OWN = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OWN] = own = Path(tempfile.mkdtemp(prefix="hpc-rl-account-"))
    os.environ |= {"XDG_STATE_HOME": str(own / "state"), "XDG_CONFIG_HOME": str(own / "config")}


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[OWN], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind, *rest = item.path.relative_to(HERE).parts
        if kind not in SPREAD:
            item.add_marker(pytest.mark.xdist_group(kind if kind in STARTED_ONCE else "/".join([kind, *rest])))
