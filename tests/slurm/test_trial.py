"""The main job on a real Slurm of four nodes: the README's command, a cancel, a recover, and what was
learnt.
"""

import os
import shutil
import time
from pathlib import Path

import pytest
from patience import extend
from toy_trials import ROOT, hpc_rl, logs_of, status, trial_of

from hpc_rl.stats.read import load_history

pytestmark = pytest.mark.timeout(900)
NUM_STEPS = 100


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A directory with `configs/` and the warm toy model, as it is after `hpc-rl quickstart
    --only_prepare`.
    """
    here = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "configs", here / "configs")
    hpc_rl("quickstart", "--only_prepare", cwd=here, timeout_s=300)
    return here


def wait_for(what: str, condition, trial, timeout_s: float = 400) -> None:
    deadline = time.monotonic() + extend(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}\n{logs_of(trial)}"
        time.sleep(1)


def last_step(trial) -> int:
    return load_history(trial).last_step


def commands_left(folder: Path) -> list[str]:
    """Processes that still run `hpc-rl` in a directory, whoever their parent is."""
    left = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command, where = Path(f"/proc/{pid}/cmdline").read_text(), os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        if "hpc_rl.cli" in command and where == str(folder):
            left.append(command.replace("\0", " "))
    return left


def test_the_readme_command_trains_and_goes_on_after_a_cancel(cluster, clone):
    trial = trial_of(clone, "grpo")
    said = hpc_rl(
        "submit",
        "--config",
        "configs/grpo.yaml",
        "--n_nodes",
        "4",
        f"total_train_steps={NUM_STEPS}",
        cwd=clone,
    )
    assert "embedded:d2+fsdp:d2" in said.stdout
    assert cluster.run("squeue", "--noheader", "--format=%D").split() == ["4"], "one job, of four nodes"
    assert not commands_left(clone)

    wait_for("step 20", lambda: last_step(trial) >= 20, trial)
    nodes = dict(
        line.split() for line in cluster.run("squeue", "--steps", "--noheader", "--format=%j %N").splitlines()
    )
    servers = {node for name, node in nodes.items() if name.startswith("serveragent-")}
    trainers = {node for name, node in nodes.items() if name.startswith("trainer-")}
    assert servers == {"n3", "n4"}
    assert trainers == {"n[1-2]"}

    hpc_rl("cancel", "grpo", cwd=clone)
    wait_for("the job's end", lambda: not cluster.run("squeue", "--noheader", "--format=%i").strip(), trial)
    cancelled = status(clone, "grpo")
    assert cancelled["state"] == "cancelled"
    stopped_at = last_step(trial)
    time.sleep(3)
    assert not cluster.run("squeue", "--noheader", "--format=%i").strip(), "a cancelled trial came back"

    again = hpc_rl("recover", "grpo", cwd=clone)
    assert "job " in again.stdout
    wait_for("the end of the trial", lambda: trial.done.exists(), trial, timeout_s=700)
    wait_for("the job's end", lambda: not cluster.run("squeue", "--noheader", "--format=%i").strip(), trial)

    story = hpc_rl("status", "grpo", "--offline", cwd=clone).stdout
    assert "cancelled by the user" in story
    assert f"from checkpoint {stopped_at}" in story
    finished = status(clone, "grpo", "--offline")
    assert finished["state"] == "done"
    assert len(finished["attempts"]) == 2

    history = load_history(trial)
    assert [row["step"] for row in history.steps] == list(range(1, NUM_STEPS + 1)), "each step once"
    first, last = history.evaluations[0]["eval_reward"], history.evaluations[-1]["eval_reward"]
    assert last > first + 0.1, f"held-out reward {first} -> {last}"
    assert (trial.exports / "final" / "model.safetensors").exists()
