"""Servers and trainer that take turns on the same units: the same training, and no memory held in between."""

from pathlib import Path

import pytest
from toy_trials import make_toy
from trainer_processes import Roles, make_trial, write_plan

from hpc_rl.core.trial import Trial, write_json
from hpc_rl.stats.read import load_history

NUM_STEPS = 4
OPTIONS = [
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=4",
    "actor.ppo_n_minibatches=1",
    "actor.optimizer.lr=1e-2",
    "actor.adv_norm.mean_level=batch",
    "recover.freq_steps=1",
    "rollout.batch_order=in_order",
    "embedded.batch_invariant=true",
]
APART, SHARED = "embedded:d1+fsdp:d1", "embedded:d1|fsdp:d1"


def run_part(trial: Trial, attempt: str, allocation: str) -> list[str]:
    """Run an attempt to the end of its steps; return the lines of the server's log."""
    write_plan(trial, "grpo", 1, allocation)
    write_json(trial.job(attempt.split(".")[0]), {"job_id": attempt.split(".")[0], "start_mode": "auto"})
    with Roles(trial, attempt) as roles:
        roles.start("server")
        roles.start("rollout")
        assert roles.ended(roles.trainer(), timeout_s=300) == [0], roles.log("trainer").read_text()[-3000:]
        return roles.log("server").read_text().splitlines()


def make(folder: Path, name: str, num_steps: int) -> Trial:
    return make_trial(folder, name, "grpo", [*OPTIONS, f"total_train_steps={num_steps}"])


def list_numbers(trial: Trial) -> list[tuple[float, ...]]:
    return [
        tuple(row[name] for name in ("step", "loss", "grad_norm", "reward"))
        for row in load_history(trial).steps
    ]


@pytest.mark.timeout(900)
def test_units_in_turn_train_as_units_apart_and_continue_each_other(tmp_path):
    toy = make_toy(tmp_path, "base")
    whole = make(toy, "apart", NUM_STEPS)
    run_part(whole, "1.0", APART)
    parts = make(toy, "parts", 2)
    said = run_part(parts, "1.0", SHARED)
    assert sum("has released its memory" in line for line in said) >= 2
    for attempt, num_steps, allocation in (("2.0", 3, APART), ("3.0", NUM_STEPS, SHARED)):
        make(toy, "parts", num_steps)
        run_part(parts, attempt, allocation)
    assert len(list_numbers(whole)) == NUM_STEPS
    assert list_numbers(parts) == list_numbers(whole)
