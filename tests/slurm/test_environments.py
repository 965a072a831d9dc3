"""An environment as a role of a trial on Slurm: on a node of its own, killed, and started again."""

import json
import os
import signal
import sys

import pytest
from toy_trials import ROOT, hpc_rl, logs_of, make_quickstart, pid_of, trial_of

pytestmark = pytest.mark.timeout(600)
OPTIONS = {
    "experiment_name": "sums",
    "trial_name": "fed",
    "actor.path": "quickstart/base",
    "actor.ppo_n_minibatches": 1,
    "allocation_mode": "embedded:d1+fsdp:d1",
    "cluster.n_nodes": 3,
    "environments.n_nodes": 1,
    "evaluator.freq_steps": "null",
    "gconfig.n_samples": 4,
    "launcher.type": "slurm",
    "rollout.max_head_offpolicyness": 4,
    "total_train_steps": 120,
    "train_dataset.batch_size": 8,
    "valid_dataset": "null",
}
SERVE = f"{sys.executable} -m hpc_rl.cli env serve arithmetic --env.ensure_scores_are_not_same false"


def records(trial, role):
    """Process records of a role, by incarnation."""
    found = sorted(trial.attempts.glob(f"*/processes/{role}-0.*-rank0.json"))
    return [json.loads(path.read_text()) for path in found]


def test_an_environment_on_its_own_node_is_started_again(cluster, until, tmp_path):
    make_quickstart(tmp_path)
    commands = json.dumps({"sums": SERVE})
    given = [f"{name}={value}" for name, value in OPTIONS.items()]
    config = ROOT / "configs/quickstart/grpo.yaml"
    hpc_rl("submit", config, *given, f"environments.commands={commands}", cwd=tmp_path)
    trial = trial_of(tmp_path, "fed")
    seals = trial.rollout / "batches"
    until(lambda: len(list(seals.glob("*.seal"))) >= 3, 200)
    nodes = {
        role: records(trial, role)[0]["node"] for role in ("trainer", "rollout", "server", "environment")
    }
    assert nodes["trainer"] == nodes["rollout"]
    assert len({nodes["trainer"], nodes["server"], nodes["environment"]}) == 3, nodes
    script = (trial.dir / "scripts" / "trial.sbatch").read_text()
    assert "node 2" in script and "environment" in script
    os.kill(pid_of(records(trial, "environment")[0]), signal.SIGKILL)
    until(lambda: trial.done.exists(), 300)
    shown = json.loads(hpc_rl("status", "fed", "--json", cwd=tmp_path).stdout)
    assert shown["state"] == "done", logs_of(trial)
    assert len(records(trial, "environment")) == 2, logs_of(trial)
    log = hpc_rl("logs", "fed", "--role", "environment", cwd=tmp_path).stdout
    assert "environment sums has finished" in log
