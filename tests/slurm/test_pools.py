"""A student is taught on Slurm: each pool has its own nodes, and servers and the rollout role are killed."""

import json
import os
import signal
from collections import Counter

import pytest
from toy_trials import ROOT, hpc_rl, pid_of, trial_of

from hpc_rl.examples import hints
from hpc_rl.rollout.batch_log.ledger import NoteRecord, list_segments, load_segment
from hpc_rl.rollout.batch_log.replay import load_state

pytestmark = pytest.mark.timeout(600)
STEPS = 200  # enough that `status` is asked while it runs
OPTIONS = {
    "experiment_name": "sums",
    "trial_name": "taught",
    "actor.path": "quickstart/hints/base",
    "pools.student.path": "quickstart/hints/base",
    "allocation_mode": "embedded[teacher]:d1+embedded[student]:d1+fsdp:d1",
    "cluster.n_nodes": 3,
    "evaluator.freq_steps": "null",
    "valid_dataset": "null",
    "gconfig.n_samples": 4,
    "launcher.type": "slurm",
    "rollout.max_head_offpolicyness": 2,
    "total_train_steps": STEPS,
    "train_dataset.batch_size": 8,
}


def records(trial, role: str, index: int) -> list[dict]:
    """Process records of one replica, by incarnation."""
    found = sorted(trial.attempts.glob(f"*/processes/{role}-{index}.*-rank0.json"))
    return [json.loads(path.read_text()) for path in found]


def num_batches(trial) -> int:
    return load_state(trial.rollout).top


def test_each_pool_has_its_nodes_and_kills_lose_no_probe_and_repeat_no_baseline(cluster, until, tmp_path):
    hints.make(tmp_path / "quickstart" / "hints", 1)
    given = [f"{name}={value}" for name, value in OPTIONS.items()]
    hpc_rl("submit", ROOT / "configs/quickstart/teacher.yaml", *given, cwd=tmp_path)
    trial = trial_of(tmp_path, "taught")
    until(lambda: num_batches(trial) >= 2, 200)
    nodes = {
        who: records(trial, *who)[0]["node"]
        for who in (("trainer", 0), ("rollout", 0), ("server", 0), ("server", 1))
    }
    assert nodes["trainer", 0] == nodes["rollout", 0]
    assert len(set(nodes.values())) == 3, nodes
    script = (trial.scripts / "trial.sbatch").read_text()
    assert "server 0 of pool teacher" in script and "server 1 of pool student" in script
    assert "server-1 (student)" in hpc_rl("status", "taught", cwd=tmp_path).stdout
    for role, index in (("server", 0), ("server", 1), ("rollout", 0)):
        before = num_batches(trial)
        os.kill(pid_of(records(trial, role, index)[0]), signal.SIGKILL)
        until(lambda before=before: num_batches(trial) >= before + 3, 200)
        until(lambda which=(role, index): len(records(trial, *which)) == 2, 200)

    def pools() -> dict:
        shown = json.loads(hpc_rl("status", "taught", "--json", cwd=tmp_path).stdout)
        return shown["rollout"]["pools"]

    until(lambda: pools() == {"student": 1, "teacher": 1})
    until(lambda: trial.done.exists(), 300)
    assert json.loads(hpc_rl("status", "taught", "--json", cwd=tmp_path).stdout)["state"] == "done"

    notes = [
        (record.index, record.key)
        for number in list_segments(trial.rollout)
        for _, record in load_segment(trial.rollout, number)
        if isinstance(record, NoteRecord)
    ]
    assert {key for _, key in notes} == {"baseline", "probe"}
    assert max(Counter(notes).values()) == 1, "a baseline or probe was made twice"
    used = {index for seal in load_state(trial.rollout).seals.values() for index in seal.places}
    assert used and {(index, key) for index in used for key in ("baseline", "probe")} <= set(notes)
    for log in trial.attempts.glob("*/logs/server-1.*.log"):
        assert "serving weights" not in log.read_text(), "the student takes no weights of the trainer"
    assert "serving weights" in "".join(p.read_text() for p in trial.attempts.glob("*/logs/server-0.*.log"))
