"""Nodes with two threads per core, where Slurm gives every step whole cores."""

import shutil
import time

import pytest
from cluster import Cluster, speak_to
from toy_trials import ROOT, hpc_rl, logs_of, make_quickstart, trial_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def hyper_threading(running_cluster, monkeypatch):
    with Cluster.private(running_cluster.slurm, 1, num_cpus=16, threads_per_core=2, num_gpus=0) as cluster:
        speak_to(cluster, monkeypatch)
        yield cluster


def test_the_readme_submit_on_one_node_starts_its_trainer(hyper_threading, tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    make_quickstart(tmp_path)
    hpc_rl("submit", "--config", "configs/grpo.yaml", "trial_name=first", "total_train_steps=1", cwd=tmp_path)
    trial = trial_of(tmp_path, "first")
    deadline = time.monotonic() + 200
    while not trial.done.exists():
        assert time.monotonic() < deadline, logs_of(trial)
        time.sleep(0.5)
    # three steps of one CPU each take a core of two, and the supervisor one more
    assert "NumCPUs=8" in hyper_threading.run("scontrol", "show", "job")
