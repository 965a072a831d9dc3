"""The trainer by a real mpiexec on this machine."""

from pathlib import Path

import pytest
from mpi_trials import by_mpiexec, kill_stop_and_continue, submit, wait_for, weights
from toy_trials import make_quickstart

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)])
def test_killed_stopped_and_continued_it_ends_like_an_unbroken_one(tmp_path: Path, name: str):
    make_quickstart(tmp_path)
    unbroken = submit(tmp_path, "unbroken", "launcher.type=local")
    wait_for("the end", unbroken.done.exists, unbroken)
    trial = submit(tmp_path, "killed", "launcher.type=local", *by_mpiexec(name))
    kill_stop_and_continue(tmp_path, trial, mpiexec_too=True)
    assert weights(trial) == weights(unbroken)
