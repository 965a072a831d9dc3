"""Servers come and go during a trial: none of its requests is lost, and training does not restart."""

import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from patience import extend
from toy_trials import hpc_rl, logs_of, make_quickstart, trial_of

from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.stats.read import load_history

pytestmark = pytest.mark.timeout(1200)
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart" / "grpo.yaml"
LEAST_ALIVE, SERVERS = 2, 4
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


class Churn(threading.Thread):
    """Ends a server of the trial every now and then, by SIGKILL and SIGTERM in turn; it is started again."""

    def __init__(self, trial: Trial, seed: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self.trial, self.every_s = trial, every_s
        self.random = random.Random(seed)
        self.ended: list[tuple[str, int]] = []  # the key of the server, and the signal
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.wait(self.every_s * self.random.uniform(0.5, 1.5)):
            if not self.trial.names.is_dir():
                continue
            leases = open_names(self.trial).list_leases(keys.servers("rollout"))
            serving = [one for one in leases.values() if one.alive and one.value.get("state") == "serving"]
            if len(serving) > LEAST_ALIVE:
                lease, number = self.random.choice(serving), SIGNALS[len(self.ended) % 2]
                try:
                    os.kill(lease.value["pid"], number)
                except ProcessLookupError:
                    continue
                self.ended.append((lease.key, number))


def run_with_churn(folder: Path, num_steps: int, every_s: float) -> None:
    make_quickstart(folder)
    trial = trial_of(folder, "churn", "quickstart")
    churn = Churn(trial, seed=num_steps, every_s=every_s)
    churn.start()
    options = [
        *("trial_name=churn", f"total_train_steps={num_steps}", "launcher.type=local", "valid_dataset=null"),
        *(f"allocation_mode=embedded:d{SERVERS}+fsdp:d1", "train_dataset.batch_size=8"),
        *("gconfig.max_new_tokens=40", "evaluator.freq_steps=null", "recover.freq_steps=null"),
        "actor.ppo_n_minibatches=1",
    ]
    try:
        hpc_rl("submit", "--config", CONFIG, *options, "--follow", cwd=folder, timeout_s=900)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{logs_of(trial)}") from error
    finally:
        churn.ending.set()
        churn.join(extend(10))
    history = load_history(trial)
    assert [row["step"] for row in history.steps] == list(range(1, num_steps + 1))
    assert {row["lineage"] for row in history.steps} == {0}, "training never restarts"
    assert len(churn.ended) >= 2, "a kill and a drain"
    tokens = sum(row["num_tokens"] for row in history.steps)
    again = sum(row.get("tokens_regenerated", 0.0) for row in history.steps)
    print(json.dumps({"ended": len(churn.ended), "tokens": tokens, "regenerated": again}))
    kills = sum(number == signal.SIGKILL for _, number in churn.ended)
    assert again <= 0.01 * tokens + kills * tokens / sum(row["step_s"] for row in history.steps)


def test_servers_that_end_at_random_lose_nothing(tmp_path):
    run_with_churn(tmp_path, 40, 1.0)


@pytest.mark.soak
def test_a_hundred_steps_with_churn(tmp_path):
    run_with_churn(tmp_path, 100, 0.5)
