"""Both train engines on a real Slurm, on several meshes: they learn the same, and one continues where another was."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_anything import EXACT, Killed, Trials, make_workplace
from pytest import approx
from toy_trials import hpc_rl
from version_history import read_model, rebuild

from hpc_rl.core.errors import Damaged
from hpc_rl.core.trial import load_json
from hpc_rl.stats.read import load_history

pytestmark = pytest.mark.timeout(600)
MESHES = ("fsdp:d2", "fsdp:t2", "megatron:t2", "megatron:p2")
ON_THE_WAY = ("fsdp:d2", "megatron:t2", "fsdp:t2")  # of the trial that is killed and continued on the next
NUM_STEPS = 15
REWARD = """
import os, time

def score(prompt, completion, **columns):
    return completion.count("1") / 6

def slow_score(prompt, completion, **columns):
    while os.path.exists({stopped!r}):
        time.sleep(0.05)
    if os.path.exists({held!r}):
        time.sleep(0.05)
    return score(prompt, completion)
"""
LEARNS_FAST = {
    **EXACT,
    "actor.optimizer.lr": 4e-3,
    "actor.ppo_n_minibatches": 1,
    "gconfig.n_samples": 4,
    "gconfig.max_new_tokens": 6,
    "rollout.reward_fn": "ones:score",
    "recover.freq_steps": 1,
    "recover.retries": 0,
    "evaluator.freq_steps": "null",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = make_workplace(tmp_path_factory.mktemp("toy"))
    (folder / "ones.py").write_text(REWARD.format(held=str(folder / "held"), stopped=str(folder / "stopped")))
    return folder


@pytest.fixture
def start(cluster, folder) -> Iterator:
    trials = Trials(folder, "")

    def start(mesh: str, name: str = "", **more) -> Killed:
        options = LEARNS_FAST | {"allocation_mode": f"embedded:d1+{mesh}"} | more.pop("options", {})
        name = name or mesh.replace(":", "-")
        return trials.start(options, name, scheduler="slurm", batch_size=16, total_steps=NUM_STEPS, **more)

    yield start
    trials.end_all()


def rewards(one: Killed) -> list[float]:
    rows = load_history(one.trial).steps
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1)), "each step once"
    return [row["reward"] for row in rows]


def published(one: Killed, lineage: int) -> dict[str, dict[str, bytes]]:
    """Step -> weights of the versions on disk."""
    found = {}
    for folder in one.trial.weights.glob(f"{lineage}.*"):
        with contextlib.suppress(OSError, Damaged):  # an older one, which goes
            model = rebuild(one.trial, folder.name, one.folder / "rebuilt" / folder.name)
            found[folder.name.partition(".")[2]] = read_model(model)
    return found


def continued(one: Killed, lineage: int, mesh: str) -> None:
    """Kill a trainer rank after some steps, which ends the trial, and recover it on another mesh.

    The first weights of the new lineage are those of the same step before, bit by bit.
    """
    enough = one.num_rows() + 2
    one.until(lambda: one.num_rows() >= enough)
    os.kill(one.find("trainer")[-1].pid, signal.SIGKILL)
    one.until(lambda: one.over)
    before = published(one, lineage)
    said = hpc_rl("recover", one.trial.dir, "--json", f"allocation_mode=embedded:d1+{mesh}", cwd=one.folder)
    one.job_id = json.loads(said.stdout)["job_id"]
    assert load_json(one.trial.plan_json)["allocation"] == f"embedded:d1+{mesh}"
    stopped = one.folder / "stopped"  # only two versions are kept: no step may remove the first one
    stopped.touch()
    one.until(lambda: published(one, lineage + 1))
    after = published(one, lineage + 1)
    stopped.unlink()
    step, weights = min(after.items(), key=lambda item: int(item[0]))
    assert weights == before[step]


@pytest.mark.soak
def test_engines_and_meshes_learn_alike_and_continue_each_other(start):
    first, *rest = ON_THE_WAY
    slow = {"rollout.reward_fn": "ones:slow_score"}
    moved = start(first, "moved", held=True, options=slow)
    others = {mesh: start(mesh) for mesh in MESHES}
    for lineage, mesh in enumerate(rest):
        continued(moved, lineage, mesh)
    curves = {mesh: rewards(one.finish()) for mesh, one in others.items()}
    usual = curves["fsdp:d2"]
    assert usual[0] < 0.2 and usual[-1] > 0.8, "it has learnt"
    for mesh, curve in curves.items():
        assert curve == approx(usual, abs=0.05), mesh
    assert rewards(moved.finish()) == approx(usual, abs=0.05)
