"""Copies on the nodes' own disks in a Slurm job: shared by the replicas of an agent, and removed after kills."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from toy_trials import ROOT, hpc_rl, logs_of, make_quickstart, trial_of

from hpc_rl.stats.read import load_history

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]
OPTIONS = ["experiment_name=sums", "trial_name=local", "total_train_steps=12", "valid_dataset=null"]
OPTIONS += ["allocation_mode=embedded:d2+fsdp:d1", "evaluator.freq_steps=null", "launcher.type=slurm"]
OPTIONS += [
    "train_dataset.batch_size=8",
    "gconfig.n_samples=2",
    "actor.ppo_n_minibatches=1",
    "recover.freq_steps=1",
]


def test_a_job_leaves_nothing_on_a_nodes_disk_after_a_kill(cluster, until, tmp_path):
    make_quickstart(tmp_path)
    disk = tmp_path / "disk"
    config = ROOT / "configs" / "quickstart" / "grpo.yaml"
    hpc_rl("submit", "--config", config, *OPTIONS, f"cluster.local_dir={disk}", cwd=tmp_path)
    trial = trial_of(tmp_path, "local")
    until(lambda: load_history(trial).last_step >= 2, 200)
    assert list(disk.iterdir()), "copies are there"
    killed = next(trial.attempts.glob("*/processes/server-1.0-rank0.json"))
    os.kill(json.loads(killed.read_text())["pid"], signal.SIGKILL)
    until(trial.done.exists, 200)
    until(lambda: not cluster.run("squeue", "--noheader", "--format=%i").strip())
    logs = "".join(Path(path).read_text() for path in trial.attempts.glob("*/logs/*.log"))
    base = re.escape(str(tmp_path / "quickstart" / "warm"))
    assert len(re.findall(f"copied {base} to", logs)) == 1, logs_of(trial)
    assert list(disk.iterdir()) == []
