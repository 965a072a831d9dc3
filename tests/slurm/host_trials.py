"""Trials on a Slurm whose nodes are hosts of their own."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import HostsCluster
from packages import NoSlurm, find_or_fetch
from patience import extend, look
from toy_trials import ROOT, logs_of

from hpc_rl.core.trial import Trial
from hpc_rl.stats.read import load_history


def started(**more: object):
    """Start a cluster of hosts; skipped where that is not possible, unless HPC_RL_TEST_REQUIRE names root."""
    required = os.environ.get("HPC_RL_TEST_REQUIRE", "")
    if os.geteuid() != 0:
        (pytest.fail if "root" in required else pytest.skip)("hosts of their own need root")
    try:
        return HostsCluster.started(find_or_fetch(), num_gpus=0, **more)
    except NoSlurm as error:
        (pytest.fail if "slurm" in required else pytest.skip)(f"no Slurm: {error}")


def shared_folder(cluster: HostsCluster, name: str) -> Path:
    here = cluster.dir / "work" / name
    shutil.copytree(ROOT / "configs", here / "configs")
    return here


def wait_for(condition: Callable[[], Any], trial: Trial, timeout_s: float = 200) -> Any:
    """Return what the condition gives once that is true."""
    deadline = time.monotonic() + extend(timeout_s)
    while not (found := look(condition, 0.2)):
        assert time.monotonic() < deadline, logs_of(trial)
    return found


def step_of(trial: Trial) -> int:
    return load_history(trial).last_step
