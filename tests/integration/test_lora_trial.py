"""A trial that trains an adapter: resumed, publishing the adapter alone, it equals one with merged weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_trials import hpc_rl
from trainer_processes import Roles, make_digit_toy, make_started_trial
from transformers import AutoModelForCausalLM

from hpc_rl.core.trial import Trial, load_json, write_json
from hpc_rl.stats.read import load_history

NUM_STEPS = 4
OPTIONS = [
    f"total_train_steps={NUM_STEPS}",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=4",
    "actor.ppo_n_minibatches=1",
    "actor.optimizer.lr=2e-2",
    "actor.adv_norm.mean_level=batch",
    "actor.beta=0.1",
    "rollout.max_head_offpolicyness=0",
    "rollout.batch_order=in_order",
    "embedded.batch_invariant=true",
    "rollout.reward_fn=digits:count",
    *("actor.use_lora=true", "actor.lora_rank=4", "actor.lora_alpha=8"),
    *("recover.mode=auto", "recover.freq_steps=1"),
]


def run(trial: Trial, job: str = "1") -> None:
    with Roles(trial, f"{job}.0") as roles:
        roles.start("server")
        roles.start("rollout")
        assert roles.ended(roles.trainer(), timeout_s=300) == [0]


def make(toy: Path, publish: str, *options: str) -> Trial:
    return make_started_trial(toy, publish, [*OPTIONS, f"actor.lora_publish={publish}", *options])


@pytest.mark.timeout(900)
def test_an_adapter_alone_and_resumed_trains_as_a_merged_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toy = make_digit_toy(tmp_path)
    whole = make(toy, "merged")
    run(whole)
    alone = make(toy, "adapter", "total_train_steps=2")
    run(alone)
    write_json(alone.config_json, load_json(alone.config_json) | {"total_train_steps": NUM_STEPS})
    write_json(alone.job("2"), {"job_id": "2", "start_mode": "auto"})
    run(alone, "2")
    steps, others = ({row["step"]: row for row in load_history(one).steps} for one in (whole, alone))
    assert steps.keys() == others.keys() == set(range(1, NUM_STEPS + 1))
    for name in ("loss", "grad_norm", "reward", "kl_loss"):
        numbers = [[rows[step][name] for step in rows] for rows in (steps, others)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-6), name
    assert steps[1]["kl_loss"] == pytest.approx(0.0, abs=1e-6) and steps[NUM_STEPS]["kl_loss"] > 1e-5
    assert others[2]["publish_bytes"] < 0.7 * steps[2]["publish_bytes"]
    final = alone.exports / "final"
    adapter = load_file(final / "adapter_model.safetensors")
    assert not (final / "model.safetensors").exists()
    assert {name.split(".")[-2] for name in adapter} == {"lora_A", "lora_B"}
    hpc_rl("checkpoint", "export", alone.dir, "--merge", "--to", tmp_path / "merged", cwd=tmp_path)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(toy / "base", dtype=torch.float32).state_dict()
    layer = "model.layers.1.mlp.down_proj"
    factors = [adapter[f"base_model.model.{layer}.lora_{one}.weight"] for one in "BA"]
    torch.testing.assert_close(
        merged[f"{layer}.weight"], base[f"{layer}.weight"] + 2.0 * factors[0] @ factors[1]
    )
