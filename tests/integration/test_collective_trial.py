"""A trial whose weights go over process groups trains exactly as one whose servers read files."""

from pathlib import Path

import numpy as np
import pytest
from promises import read_groups
from toy_trials import make_toy
from trainer_processes import Roles, make_started_trial

from hpc_rl.core.trial import Trial
from hpc_rl.rollout.batch_log.seals import load_seals
from hpc_rl.stats.read import load_history

NUM_STEPS, NUM_RANKS = 4, 2
OPTIONS = [
    f"total_train_steps={NUM_STEPS}",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=4",
    "actor.ppo_n_minibatches=1",
    "actor.optimizer.lr=1e-2",
    "actor.adv_norm.mean_level=batch",
    "rollout.max_head_offpolicyness=0",
    "rollout.batch_order=in_order",
    "embedded.batch_invariant=true",
]


def run(toy: Path, mode: str) -> Trial:
    trial = make_started_trial(toy, mode, [*OPTIONS, f"actor.weight_update_mode={mode}"], NUM_RANKS)
    with Roles(trial, "1.0") as roles:
        roles.start("server")
        roles.start("rollout")
        assert roles.ended(roles.trainer(NUM_RANKS), timeout_s=500) == [0] * NUM_RANKS
    return trial


@pytest.mark.timeout(1200)
def test_weights_over_process_groups_give_the_same_training(tmp_path):
    toy = make_toy(tmp_path, "base")
    disk, xccl = run(toy, "disk"), run(toy, "xccl")
    received = [row["publish_received"] for row in load_history(xccl).steps if "publish_received" in row]
    assert received and set(received[1:]) == {1.0}
    assert not any(row.get("publish_received") for row in load_history(disk).steps)
    seals, others = load_seals(disk.rollout), load_seals(xccl.rollout)
    assert seals.keys() == others.keys() and len(seals) >= NUM_STEPS - 1
    for step, seal in seals.items():
        groups = zip(read_groups(disk.rollout, seal), read_groups(xccl.rollout, others[step]), strict=True)
        for group, same in groups:
            for row, other in zip(group.trajectories, same.trajectories, strict=True):
                np.testing.assert_array_equal(row.ids, other.ids)
                np.testing.assert_array_equal(row.logprobs, other.logprobs)
    for name in ("loss", "grad_norm", "reward"):
        numbers = [[row[name] for row in load_history(trial).steps] for trial in (disk, xccl)]
        assert numbers[0] == numbers[1], name
