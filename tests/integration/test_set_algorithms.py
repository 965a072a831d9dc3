"""A trial whose data sets have algorithms of their own: each row has the credit of its algorithm, also after
the trainer was killed.
"""

import signal
from collections import defaultdict

import numpy as np
import pytest
from trainer_processes import Roles, make_digit_toy, make_started_trial

from hpc_rl.stats.kept_samples import load_samples
from hpc_rl.stats.read import load_history

NUM_STEPS = 3
GROUP = 4
OPTIONS = [
    f"total_train_steps={NUM_STEPS}",
    "train_dataset.batch_size=4",
    f"gconfig.n_samples={GROUP}",
    "gconfig.max_new_tokens=4",
    "actor.ppo_n_minibatches=1",
    "actor.optimizer.lr=1e-3",
    "rollout.max_head_offpolicyness=0",
    "rollout.reward_fn=digits:count",
    "rollout.keep_samples=4",
    *("train_dataset.mix.code.share=0.5", "train_dataset.mix.code.algorithm=cispo"),
    "train_dataset.mix.code.algorithm_args={eps_clip_higher: 3}",
    *("recover.mode=auto", "recover.freq_steps=1"),
]


@pytest.mark.timeout(300)
def test_each_data_set_has_the_credit_of_its_algorithm_also_after_a_kill(tmp_path, monkeypatch):
    """GRPO without normalization learns from the reward itself, CISPO from its place within the group."""
    monkeypatch.chdir(tmp_path)
    toy = make_digit_toy(tmp_path)
    (tmp_path / "code.jsonl").write_bytes((toy / "task/train.jsonl").read_bytes())
    trial = make_started_trial(toy, "mixed", [*OPTIONS, "train_dataset.mix.code.path=code.jsonl"])
    with Roles(trial, "1.0") as roles:
        roles.start("server")
        roles.start("rollout")
        first = roles.trainer(stays_at=NUM_STEPS - 1)
        roles.wait_for_step(2)
        Roles.kill(first)
        assert roles.ended(first) == [-signal.SIGKILL], roles.log("trainer").read_text()
        assert roles.ended(roles.trainer()) == [0]
    assert [row["step"] for row in load_history(trial).steps] == list(range(1, NUM_STEPS + 1))
    groups = defaultdict(list)
    for one in load_samples(trial):
        groups[one.step, one.columns["data_set"], one.prompt_index].append(one)
    expected, other = defaultdict(list), defaultdict(list)
    found = defaultdict(list)
    for (step, name, _), rows in groups.items():
        rewards = np.array([row.reward for row in rows])
        normalized = (rewards - rewards.mean()) / (rewards.std() + 1e-5)
        ways = [rewards, normalized]
        expected[step, name] += ways[name == "code"].tolist()
        other[step, name] += ways[name != "code"].tolist()
        found[step, name] += [row.advantage for row in rows]
    assert {*found} == {(step, name) for step in range(1, NUM_STEPS + 1) for name in ("main", "code")}
    assert {len(values) for values in found.values()} == {2 * GROUP}
    for key, values in found.items():
        assert values == pytest.approx(expected[key], abs=1e-4), key
        assert values != pytest.approx(other[key], abs=1e-2), key
