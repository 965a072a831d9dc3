"""The trainer by MPI on two nodes of a real Slurm: by mpiexec, whose daemons srun starts, and by srun --mpi."""

from pathlib import Path

import pytest
from mpi_trials import by_mpiexec, kill_stop_and_continue, mpi_python, submit, wait_for, weights
from toy_trials import ROOT, hpc_rl, make_quickstart, trial_of

from hpc_rl.core.trial import load_json
from hpc_rl.stats.read import load_history

pytestmark = pytest.mark.timeout(600)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["mpich", "openmpi"])
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


@pytest.mark.soak
@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_the_main_job_learns_with_two_ranks_on_each_of_two_nodes(cluster, tmp_path: Path, name: str):
    hpc_rl("quickstart", "--only_prepare", cwd=tmp_path, timeout_s=300)
    options = ["allocation_mode=embedded:d2+fsdp:d4", "total_train_steps=60", *by_mpiexec(name)]
    hpc_rl("submit", "--config", ROOT / "configs" / "grpo.yaml", "--n_nodes=4", *options, cwd=tmp_path)
    trial = trial_of(tmp_path, "grpo")
    wait_for("the end", trial.done.exists, trial, timeout_s=500)
    history = load_history(trial)
    first, last = history.evaluations[0]["eval_reward"], history.evaluations[-1]["eval_reward"]
    assert last > first + 0.1, f"held-out reward {first} -> {last}"
    records = map(load_json, trial.attempts.glob("*/processes/trainer-0.0-rank*.json"))
    assert sorted(record["node"] for record in records) == ["n1", "n1", "n2", "n2"]
