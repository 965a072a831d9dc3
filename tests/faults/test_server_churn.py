"""Servers come and go during a trial: none of its requests is lost, and training does not restart."""

from pathlib import Path

import pytest
from patience import extend
from server_churn import DRAIN, KILL, Churn, check_history
from toy_trials import hpc_rl, logs_of, make_quickstart, trial_of

pytestmark = pytest.mark.timeout(1200)
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart" / "grpo.yaml"
SERVERS = 4


def run_with_churn(folder: Path, num_steps: int, every_s: float, transport: str = "disk") -> None:
    make_quickstart(folder)
    churn = Churn(trial_of(folder, "churn", "quickstart"), [KILL, DRAIN], num_steps, every_s)
    churn.start()
    options = [
        *("trial_name=churn", f"total_train_steps={num_steps}", "launcher.type=local", "valid_dataset=null"),
        *(f"allocation_mode=embedded:d{SERVERS}+fsdp:d1", "train_dataset.batch_size=8"),
        *("gconfig.max_new_tokens=40", "evaluator.freq_steps=null", "recover.freq_steps=null"),
        *("actor.ppo_n_minibatches=1", f"actor.weight_update_mode={transport}"),
    ]
    try:
        hpc_rl("submit", "--config", CONFIG, *options, "--follow", cwd=folder, timeout_s=900)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{logs_of(churn.trial)}") from error
    finally:
        churn.ending.set()
        churn.join(extend(10))
    check_history(churn, num_steps)


def test_servers_that_end_at_random_lose_nothing(tmp_path):
    run_with_churn(tmp_path, 40, 1.0)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["disk", "xccl"])
def test_a_hundred_steps_with_churn(tmp_path, transport):
    run_with_churn(tmp_path, 100, 0.5, transport)
