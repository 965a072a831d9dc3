"""The trainer as real processes on a tiny model: it learns, and a resumed run equals an unbroken one."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_weights import whole_weights
from patience import wait_until
from recipes import make_run
from toy_trials import make_toy
from trainer_processes import Roles, make_trial, write_plan

from hpc_rl.checkpoint.generation import scan, verify
from hpc_rl.config.options.dataset import PromptDatasetConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.training import NormConfig, PPOActorConfig
from hpc_rl.core.trial import Trial, load_json, write_json
from hpc_rl.core.types import Batch, Trajectory, TrajectoryGroup, WeightVersion
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.tools import convert
from hpc_rl.trainers.grpo_recipe import GRPO

pytestmark = pytest.mark.timeout(240)

SFT_OPTIONS = [
    "total_train_steps=40",
    "train_dataset.batch_size=32",
    "model.optimizer.lr=2e-3",
    "model.optimizer.lr_scheduler_type=linear",
]
GRPO_OPTIONS = [
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=4",
    "actor.ppo_n_minibatches=2",
    "actor.optimizer.lr=1e-3",
    "actor.adv_norm.mean_level=batch",
    "rollout.max_head_offpolicyness=1",
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), "base")


def final_weights(trial: Trial) -> bytes:
    return (trial.exports / "final" / "model.safetensors").read_bytes()


def newest(trial: Trial) -> int:
    return next(found.step for found in map(verify, scan(trial)) if not found.problem)


def test_sft_learns_and_resumed_after_a_kill_equals_the_unbroken_run(toy):
    data = f"valid_dataset.path={toy / 'task' / 'sft.jsonl'}"
    whole = make_trial(toy, "whole", "sft", [*SFT_OPTIONS, data, "recover.mode=disabled"])
    write_plan(whole, "sft", 1)
    with Roles(whole, "1.0") as roles:
        assert roles.ended(roles.trainer()) == [0]
    unbroken = roles.rows()
    assert [row["step"] for row in unbroken] == list(range(1, 41))
    assert unbroken[-1]["loss"] < 0.6 * unbroken[0]["loss"]
    assert unbroken[-1]["eval_loss"] < 0.6 * unbroken[0]["loss"] and unbroken[-1]["eval_token_accuracy"] > 0.4

    broken = make_trial(
        toy, "broken", "sft", [*SFT_OPTIONS, data, "recover.mode=auto", "recover.freq_steps=7"]
    )
    write_plan(broken, "sft", 1)
    with Roles(broken, "1.0") as roles:
        first = roles.trainer(stays_at=30)
        roles.wait_for_step(16)
        Roles.kill(first)
        assert roles.ended(first) == [-signal.SIGKILL]
        saved = newest(broken)
        assert saved >= 14
        hidden = (toy / "base" / "model.safetensors").rename(toy / "hidden")  # of no use any more
        assert roles.ended(roles.trainer()) == [0]
        hidden.rename(toy / "base" / "model.safetensors")
    resumed = roles.rows(1)
    assert resumed[0]["step"] == saved + 1 and resumed[0]["version"] == f"1.{saved + 1}"
    assert [(row["loss"], row["lr"], row["grad_norm"]) for row in resumed] == [
        (row["loss"], row["lr"], row["grad_norm"]) for row in unbroken[saved:]
    ]
    assert final_weights(broken) == final_weights(whole)


def test_two_ranks_drain_together_and_one_rank_goes_on(toy):
    trial = make_trial(toy, "ranks", "sft", [*SFT_OPTIONS, "total_train_steps=400", "recover.mode=fault"])
    write_plan(trial, "sft", 2)
    with Roles(trial, "1.0") as roles:
        both = roles.trainer(2)
        roles.wait_for_step(5)
        both[1].send_signal(signal.SIGTERM)  # one of them hears it; all stop at the same boundary
        assert roles.ended(both) == [75, 75]
        stopped = newest(trial)
        assert stopped == roles.rows()[-1]["step"] < 400
        config = load_json(trial.config_json)
        config["total_train_steps"] = stopped + 5
        write_json(trial.config_json, config)
        write_plan(trial, "sft", 1)
        assert roles.ended(roles.trainer(1)) == [0]
    assert [row["step"] for row in roles.rows(1)] == list(range(stopped + 1, stopped + 6))
    assert load_json(trial.exports / "final" / "hpc_rl.json")["version"] == f"1.{stopped + 5}"


def test_what_forbids_a_start_ends_every_rank_with_the_same_code(toy):
    trial = make_trial(toy, "nothing", "sft", [*SFT_OPTIONS, "recover.mode=resume"])
    write_plan(trial, "sft", 2)
    with Roles(trial, "1.0") as roles:
        assert roles.ended(roles.trainer(2)) == [3, 3]
    assert (
        "no valid checkpoint to resume from"
        in load_json(trial.attempt("1.0").exit_record("trainer", 0, 0, 1))["reason"]
    )
    assert list(trial.lineages.iterdir()) == []


def test_rows_without_advantage_change_nothing(toy, tmp_path, monkeypatch):
    """The same update with those rows computed and with them skipped."""
    weights = []
    for skip in (True, False):
        config = GRPOConfig(
            experiment_name="e",
            trial_name="t",
            train_dataset=PromptDatasetConfig(path="x.jsonl", batch_size=3),
            gconfig=GenerationHyperparameters(n_samples=2),
            actor=PPOActorConfig(
                path=str(toy / "base"),
                attn_impl="sdpa",
                dtype="float32",
                gradient_checkpointing=False,
                ppo_n_minibatches=2,
                kl_ctl=0.0,
                adv_norm=NormConfig(mean_level="group", std_level="group"),
            ),
        )
        engine = FSDPEngine(config.actor)
        engine.initialize(2)
        run = make_run(tmp_path, config, engine)
        recipe = GRPO(run, None, None, num_prompts=3)
        if not skip:
            monkeypatch.setattr("hpc_rl.trainers.minibatches.is_useful", lambda advantages: True)
        recipe.update(1, toy_batch())
        numbers = run.stats.take()
        assert numbers["rows_skipped"] == (4 if skip else 0)
        assert numbers["grad_norm"] > 0
        weights.append({name: tensor.clone() for name, tensor in whole_weights(engine).items()})
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-5, atol=1e-7)


def toy_batch() -> Batch:
    """Three groups of two; only the middle one has rewards that differ."""
    random = np.random.default_rng(0)
    groups = []
    for index, rewards in enumerate(((1.0, 1.0), (1.0, 0.0), (0.0, 0.0))):
        rows = []
        for reward in rewards:
            length = int(random.integers(5, 9))
            mask = np.arange(length) >= 3
            logprobs = np.where(mask, -2.5, 0.0).astype(np.float32)
            version = np.where(mask, 0, -1).astype(np.int32)
            ids = random.integers(3, 15, length).astype(np.int32)
            rows.append(Trajectory(ids, mask, logprobs, version, version, reward, "stop"))
        groups.append(TrajectoryGroup(index, rows))
    return Batch(1, groups)


def damage(trial: Trial) -> int:
    """Break all generations but the oldest, each in another file and way; returns the step of the one that is
    whole.
    """
    *newer, oldest = scan(trial)
    flipped, cut = (
        newer[0].path / "actor-rank-00001.safetensors",
        newer[1].path / "actor-rank-00000.safetensors",
    )
    content = bytearray(flipped.read_bytes())
    content[-100] ^= 8
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-100])
    return oldest.step


def list_saves(trial: Trial) -> list[str]:
    return [path.name for path in trial.recover.iterdir() if "gen-" in path.name]


def are_saves_finished(trial: Trial, kept: int) -> bool:
    """Return whether a trainer that stays at a step writes and removes no generation any more."""
    names = list_saves(trial)
    return len(names) == kept and all(name.startswith("gen-") for name in names)


def test_grpo_walks_back_after_a_kill_and_gets_the_same_batches_again(
    toy,
):
    data = f"valid_dataset.path={toy / 'task' / 'heldout.jsonl'}"
    reference = [
        f"ref.path={toy / 'base'}",
        "ref.attn_impl=sdpa",
        "ref.dtype=float32",
        "actor.kl_ctl=0.05",
        "actor.beta=0.01",
    ]
    recover = [
        "total_train_steps=12",
        "recover.mode=auto",
        "recover.freq_steps=2",
        "recover.keep=3",
        "recover.async_save=true",
    ]
    trial = make_trial(toy, "grpo", "grpo", [*GRPO_OPTIONS, *reference, data, *recover])
    write_plan(trial, "grpo", 2)
    with Roles(trial, "1.0") as roles:
        roles.start("server")
        roles.start("rollout")
        first = roles.trainer(2, stays_at=9)
        roles.wait_for_step(9, timeout_s=150)
        wait_until(lambda: are_saves_finished(trial, 3), said=lambda: list_saves(trial))
        Roles.kill(first)
        assert roles.ended(first) == [-signal.SIGKILL] * 2
        saved = damage(trial)
        before = {row["step"]: row for row in roles.rows() if "loss" in row}
        assert roles.ended(roles.trainer(2), timeout_s=120) == [0, 0]
    rows = [row for row in roles.rows(1) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(saved + 1, 13))
    assert len(list((trial.recover / "set-aside").iterdir())) == 2
    assert scan(trial)[0].manifest.ledger["sealed"] == 12
    for row in rows:
        if row["step"] in before:  # the very same batch: nothing was generated twice
            again = before[row["step"]]
            assert (row["reward"], row["seq_len"], row["num_tokens"]) == (
                again["reward"],
                again["seq_len"],
                again["num_tokens"],
            )
    kl_loss = {row["step"]: row["kl_loss"] for row in roles.rows(0) + rows if "loss" in row}
    assert (
        0 < kl_loss[1] < kl_loss[12]
    )  # the policy leaves the reference model, which stays what it was after the restart
    assert all(np.isfinite(row["kl_rewards"]) for row in rows)
    evaluations = [row for row in roles.rows(0) + roles.rows(1) if "eval_reward" in row]
    assert [row["eval_version"] for row in evaluations] == ["0.0", "1.12"]
    assert all(row["eval_num_prompts"] == 200 for row in evaluations)
    assert load_json(trial.current_weights)["label"] == "1.12"
    left = [WeightVersion.parse(path.name) for path in trial.weights.iterdir() if path.is_dir()]
    assert sorted(left)[-2:] == [WeightVersion(1, 11), WeightVersion(1, 12)]


def test_dpo_learns_and_resumed_after_a_kill_equals_the_unbroken_run(toy):
    options = [
        "total_train_steps=40",
        "train_dataset.batch_size=32",
        "model.optimizer.lr=3e-3",
        "model.label_smoothing=0.05",
        "model.beta=0.5",
        f"valid_dataset.path={toy / 'task' / 'preferences.jsonl'}",
        "evaluator.freq_steps=20",
        "recover.freq_steps=5",
    ]
    whole = make_trial(toy, "dpo-whole", "dpo", [*options, "recover.mode=disabled"])
    write_plan(whole, "dpo", 2)
    with Roles(whole, "1.0") as roles:
        assert roles.ended(roles.trainer(2)) == [0, 0]
    unbroken = roles.rows()
    first, last = unbroken[0], unbroken[-1]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-4) and first["margin"] == pytest.approx(
        0, abs=1e-4
    )
    assert last["loss"] < 0.55 and last["accuracy"] > 0.75
    assert last["margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"], abs=1e-4)
    assert last["eval_accuracy"] > 0.75 and last["eval_loss"] < 0.55 and last["eval_margin"] > 0.5
    broken = make_trial(toy, "dpo", "dpo", [*options, "recover.mode=auto"])
    write_plan(broken, "dpo", 2)
    with Roles(broken, "1.0") as roles:
        both = roles.trainer(2, stays_at=19)
        roles.wait_for_step(11)
        Roles.kill(both)
        assert roles.ended(both) == [-signal.SIGKILL] * 2
        assert roles.ended(roles.trainer(2)) == [0, 0]
    resumed = roles.rows(1)
    assert 11 <= resumed[0]["step"] <= 16
    wanted = unbroken[resumed[0]["step"] - 1 :]
    for name in ("loss", "margin", "reward_chosen", "grad_norm"):
        assert [row[name] for row in resumed] == [row[name] for row in wanted]
    assert final_weights(broken) == final_weights(whole)


def test_ppo_resumed_after_a_kill_has_the_policy_and_the_critic_of_the_unbroken_run(toy):
    options = [
        *GRPO_OPTIONS,
        "total_train_steps=7",
        "rollout.max_head_offpolicyness=0",
        "rollout.batch_order=in_order",
        "embedded.batch_invariant=true",
        f"critic.path={toy / 'base'}",
        "rollout.reward_fn=contains",
        "critic.ppo_n_minibatches=3",
        "critic.gradient_checkpointing=false",
        "critic.optimizer.lr=2e-3",
        "critic.warmup_steps=2",
        "recover.freq_steps=2",
        "recover.async_save=true",
    ]
    trials, rows = [], []
    for name, mode in (("ppo-whole", "disabled"), ("ppo", "auto")):
        trial = make_trial(toy, name, "grpo", [*options, f"recover.mode={mode}"])
        write_plan(trial, "grpo", 2)
        with Roles(trial, "1.0") as roles:
            roles.start("server")
            roles.start("rollout")
            ranks = roles.trainer(2, stays_at=6 if mode == "auto" else None)
            if mode == "auto":
                roles.wait_for_step(5, timeout_s=150)
                wait_until(lambda trial=trial: scan(trial), said=lambda trial=trial: list_saves(trial))
                Roles.kill(ranks)
                assert roles.ended(ranks) == [-signal.SIGKILL] * 2
                ranks = roles.trainer(2)
            assert roles.ended(ranks, timeout_s=150) == [0, 0]
        trials.append(trial)
        rows.append([row for row in roles.rows(1 if mode == "auto" else 0) if "value_loss" in row])
    whole, resumed = rows
    assert ["loss" in row for row in whole] == [False] * 2 + [True] * 5  # the critic warms up
    assert len({row["reward"] for row in whole}) > 1 and all(row["value_loss"] > 0 for row in whole)
    assert resumed[0]["step"] > 2 and resumed[-1]["step"] == 7
    for name in ("reward", "loss", "value_loss", "returns", "critic_grad_norm", "critic_lr"):
        assert [row[name] for row in resumed] == [row[name] for row in whole[-len(resumed) :]]
    assert final_weights(trials[0]) == final_weights(trials[1])
    critics = [trial.exports / "final" / "critic" for trial in trials]
    assert (critics[0] / "model.safetensors").read_bytes() == (critics[1] / "model.safetensors").read_bytes()
    (toy / "offline").mkdir()
    convert.export(trials[1], 7, toy / "offline", merge=False)
    exported = toy / "offline" / "critic" / "model.safetensors"
    assert exported.read_bytes() == (critics[1] / "model.safetensors").read_bytes()
    config = load_json(critics[0] / "config.json")
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    newest_files = {path.name for path in scan(trials[1])[0].path.iterdir()}
    assert {
        f"{name}-rank-0000{rank}.safetensors" for name in ("actor", "critic") for rank in (0, 1)
    } <= newest_files


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ppo_learns_a_task_of_two_turns_with_a_reward_each(toy, seed):
    options = [
        *GRPO_OPTIONS,
        f"seed={seed}",
        "total_train_steps=40",
        "train_dataset.batch_size=8",
        "gconfig.max_new_tokens=1",
        "rollout.workflow=two_turns:play",
        "actor.algorithm=ppo",
        "actor.optimizer.lr=3e-3",
        f"critic.path={toy / 'base'}",
        "critic.ppo_n_minibatches=2",
        "critic.gradient_checkpointing=false",
        "critic.optimizer.lr=3e-3",
        "critic.warmup_steps=2",
        "recover.mode=disabled",
    ]
    trial = make_trial(toy, f"turns-{seed}", "grpo", options)
    write_plan(trial, "grpo", 1)
    with Roles(trial, "1.0") as roles:
        roles.start("server")
        roles.start("rollout")
        assert roles.ended(roles.trainer(), timeout_s=230) == [0]
    rows = [row for row in roles.rows() if "value_loss" in row]
    print([round(row["reward"], 2) for row in rows])
    assert np.mean([row["reward"] for row in rows[:3]]) < 0.6
    assert np.mean([row["reward"] for row in rows[-5:]]) > 0.9


@pytest.mark.soak
def test_a_reward_model_learns_and_continues_after_a_kill(toy):
    options = [
        "total_train_steps=60",
        "train_dataset.batch_size=32",
        "model.is_critic=true",
        "model.mb_spec.granularity=2",
        "model.optimizer.lr=2e-3",
        f"valid_dataset.path={toy / 'task' / 'preferences.jsonl'}",
        "evaluator.freq_steps=30",
        "recover.mode=auto",
        "recover.freq_steps=10",
    ]
    trial = make_trial(toy, "rw", "rw", options)
    write_plan(trial, "rw", 2)
    with Roles(trial, "1.0") as roles:
        first = roles.trainer(2, stays_at=50)
        roles.wait_for_step(12, timeout_s=120)
        Roles.kill(first)
        assert roles.ended(first) == [-signal.SIGKILL] * 2
        assert roles.ended(roles.trainer(2), timeout_s=180) == [0, 0]
    rows = roles.rows(0) + roles.rows(1)
    assert rows[-1]["step"] == 60 and rows[-1]["loss"] < 0.6 < 0.69 - 0.2 + rows[0]["loss"]
    assert rows[-1]["eval_accuracy"] > 0.8 and rows[-1]["eval_loss"] < 0.5
    config = load_json(trial.exports / "final" / "config.json")
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
