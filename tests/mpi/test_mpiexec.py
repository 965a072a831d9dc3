"""The trainer by a real mpiexec on this machine."""

import os
import signal
from pathlib import Path

import pytest
from mpi_trials import by_mpiexec, events, kill_stop_and_continue, rank_of, submit, wait_for, weights
from toy_trials import make_quickstart

from hpc_rl.proc import is_alive
from hpc_rl.trial import read_json

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)])
def test_killed_stopped_and_continued_it_ends_like_an_unbroken_one(tmp_path: Path, name: str):
    make_quickstart(tmp_path)
    unbroken = submit(tmp_path, "unbroken", "launcher.type=local")
    wait_for("the end", unbroken.done.exists, unbroken)
    trial = submit(tmp_path, "killed", "launcher.type=local", *by_mpiexec(name))
    kill_stop_and_continue(tmp_path, trial)
    assert weights(trial) == weights(unbroken)


@pytest.mark.parametrize("name", ["mpich", pytest.param("openmpi", marks=pytest.mark.soak)])
def test_a_killed_mpiexec_leaves_no_rank_that_writes(tmp_path: Path, name: str):
    make_quickstart(tmp_path)
    trial = submit(tmp_path, "orphans", "launcher.type=local", *by_mpiexec(name))
    wait_for("a checkpoint", lambda: events(trial, "progress"), trial)
    ranks = [rank_of(trial, 0, rank) for rank in (0, 1)]
    (client,) = trial.attempts.glob("*/processes/client-trainer-0.0-rank0.json")
    os.kill(read_json(client)["pid"], signal.SIGKILL)
    wait_for("the restart", lambda: len(events(trial, "started")) == 2, trial)
    assert not any(is_alive(rank.pid, rank.start_ticks) for rank in ranks)
    wait_for("the end", trial.done.exists, trial)
