"""The trainer by MPI on two nodes of a real Slurm: by mpiexec, whose daemons srun starts, and by srun --mpi."""

from pathlib import Path

import pytest
from mpi_trials import by_mpiexec, kill_stop_and_continue, mpi_python, submit, wait_for, weights
from toy_trials import make_quickstart

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", ["mpich", pytest.param("openmpi", marks=pytest.mark.soak)])
def test_killed_stopped_and_continued_it_ends_like_an_unbroken_one_by_srun(
    cluster, tmp_path: Path, name: str
):
    make_quickstart(tmp_path)
    by_srun = ["launcher.slurm.srun_mpi=pmi2", f"launcher.python={mpi_python('mpich')}"]
    unbroken = submit(tmp_path, "unbroken", "--n_nodes=2", *by_srun)
    wait_for("the end", unbroken.done.exists, unbroken)
    trial = submit(tmp_path, "killed", "--n_nodes=2", *by_mpiexec(name))
    wait_for(
        "its processes", lambda: len(list(trial.attempts.glob("*/processes/trainer-*.json"))) == 2, trial
    )
    steps = cluster.run("squeue", "--steps", "--noheader", "--format=%j %N").split("\n")
    assert not any("trainer" in step for step in steps), "the daemons' step has mpiexec's own name"
    kill_stop_and_continue(tmp_path, trial)
    assert weights(trial) == weights(unbroken)
