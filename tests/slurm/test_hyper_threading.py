"""Nodes with two threads per core, where Slurm gives every step whole cores."""

import shutil
import time

import pytest
from cluster import Cluster, speak_to
from patience import extend
from toy_trials import ROOT, hpc_rl, logs_of, make_quickstart, trial_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def hyper_threading(running_cluster, monkeypatch):
    with Cluster.private(running_cluster.slurm, 1, num_cpus=16, threads_per_core=2, num_gpus=0) as cluster:
        speak_to(cluster, monkeypatch)
        yield cluster


# three steps of one CPU each take a core of two threads, and the supervisor one more
@pytest.mark.parametrize(
    ("options", "num_cpus"),
    [
        ([], 8),
        pytest.param(["launcher.slurm.extra_args=[--hint=nomultithread]"], 8, marks=pytest.mark.soak),
        pytest.param(  # make test runs the plain submission alone
            ["launcher.trainer_cpus_per_gpu=3", "launcher.slurm.srun_args.trainer=[--hint=nomultithread]"],
            12,
            marks=pytest.mark.soak,
        ),
    ],
    ids=["as it is", "a job of cores", "a step of three cores"],
)
def test_the_readme_submit_on_one_node_starts_its_trainer(hyper_threading, tmp_path, options, num_cpus):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    make_quickstart(tmp_path)
    hpc_rl(
        "submit",
        "--config",
        "configs/grpo.yaml",
        "trial_name=first",
        "total_train_steps=1",
        *options,
        cwd=tmp_path,
    )
    trial = trial_of(tmp_path, "first")
    deadline = time.monotonic() + extend(200)
    while not trial.done.exists():
        assert time.monotonic() < deadline, logs_of(trial)
        time.sleep(0.5)
    assert f"NumCPUs={num_cpus} " in hyper_threading.run("scontrol", "show", "job")
