"""Servers of an array are killed, drained and preempted at random, and join again, for a hundred steps."""

import time

import pytest
from cluster import Cluster, speak_to
from kill_anything import READY, Killed, Trials, make_workplace
from patience import extend
from server_churn import DRAIN, KILL, Churn, check_history

from hpc_rl.supervise.server_array import load_arrays

NUM_SERVERS = 6
JOBS = {
    **READY,
    "allocation_mode": f"embedded:d{NUM_SERVERS}+fsdp:d1",
    "cluster.n_nodes": NUM_SERVERS + 1,
    "launcher.slurm.layout": "jobs",
    "launcher.slurm.exclusive": True,
    "gconfig.max_new_tokens": 40,
    "recover.freq_steps": "null",
    "evaluator.freq_steps": "null",
}


def preempt(cluster: Cluster, trial: Killed, key: str) -> bool:
    """Take the node of a server for another job; give it back when the server's task is pending."""
    [array] = load_arrays(trial.trial)
    task = f"{array.job_id}_{key.rsplit('/', 1)[-1]}"

    def read(form: str) -> str:
        return cluster.run("squeue", "--noheader", f"--jobs={task}", f"--format={form}").strip()

    node = read("%N")
    if not node:
        return False
    asked = ("--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null")
    high = cluster.run("sbatch", "--parsable", *asked, "--wrap=sleep 600").strip()
    deadline = time.monotonic() + extend(60)
    while read("%T") != "PENDING" and time.monotonic() < deadline:
        time.sleep(0.2)
    cluster.run("scancel", high)
    cluster.hurry(task)
    return True


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["disk", "xccl"])
def test_a_hundred_steps_with_churn(running_cluster, tmp_path, monkeypatch, transport):
    with Cluster.private(running_cluster.slurm, NUM_SERVERS + 1) as cluster:
        speak_to(cluster, monkeypatch)
        trials = Trials(make_workplace(tmp_path), f"churn-{transport}")
        try:
            options = JOBS | {"actor.weight_update_mode": transport}
            trial = trials.start(options, scheduler="slurm", total_steps=100, held=True)
            ways = [KILL, DRAIN, lambda key, _pid: preempt(cluster, trial, key)]
            churn = Churn(trial.trial, ways, seed=7, every_s=3.0)
            churn.start()
            trial.until(lambda: trial.over or trial.num_rows() >= 95, timeout_s=3000)
            churn.ending.set()
            churn.join(extend(90))
            trial.finish().promises.check()
            check_history(churn, 100)
        finally:
            trials.end_all()
