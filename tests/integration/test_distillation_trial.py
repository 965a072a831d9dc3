"""Distillation on the toys: students reach their teacher's reward, and no reward is in their loss."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from toy_trials import hpc_rl
from transformers import AutoModelForCausalLM

from hpc_rl.core.trial import Trial
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.stats.read import load_history

OF_TRIAL = [
    "experiment_name=toy",
    "cluster.fileroot=runs",
    "cluster.n_gpus_per_node=0",
    "launcher.type=local",
]
OF_TRIAL += [f"launcher.{role}_cpus_per_gpu=1" for role in ("trainer", "inference_server")]
SFT = ["model.gradient_checkpointing=false", "model.optimizer.lr=2e-3", "model.optimizer.weight_decay=0"]
SFT += ["model.optimizer.lr_scheduler_type=linear", "train_dataset.batch_size=64"]
RL = [
    "allocation_mode=embedded[rollout]:d1+embedded[teacher]:d1+fsdp:d1",
    "actor.gradient_checkpointing=false",
]
RL += ["actor.optimizer.weight_decay=0", "actor.optimizer.lr_scheduler_type=linear"]
RL += [
    "rollout.reward_fn=exact_match",
    "rollout.max_head_offpolicyness=1",
    "rollout.max_concurrent_rollouts=128",
]
NO_SIGNAL = ["distillation.rl_loss_weight=0"]


def train(here: Path, name: str, *options: str) -> float:
    """Run a trial to its end; return the mean reward of its last 20 steps, 0 without rewards."""
    hpc_rl("submit", "--follow", *OF_TRIAL, f"trial_name={name}", *options, cwd=here, timeout_s=1700)
    (place,) = here.glob(f"runs/*/toy/{name}")
    rewards = [value for _, value in load_history(Trial(place)).curve("reward")][-20:]
    return sum(rewards) / max(1, len(rewards))


def measure_reward(model: Path, rows: Path) -> float:
    """Return the share of right completions, sampled at temperature 1."""
    tokenizer, module = Tokenizer(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    asked = [json.loads(line) for line in rows.read_text().splitlines()]
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(row["prompt"]) for row in asked])
    made = module.generate(ids, max_new_tokens=6, do_sample=True, temperature=1.0, top_k=0)[:, ids.shape[1] :]
    texts = [tokenizer.decode(one.tolist()) for one in made]
    return sum(text == row["answer"] for text, row in zip(texts, asked, strict=True)) / len(asked)


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    """A warm student of the sums, and a teacher with five times its training."""
    here = tmp_path_factory.mktemp("sums")
    hpc_rl("quickstart", "--dir", "q", "--only_prepare", cwd=here, timeout_s=600)
    data = ["train_dataset.path=q/task/sft.jsonl", "total_train_steps=500", "saver.freq_steps=500"]
    train(here, "teacher", "model.path=q/base", *SFT, *data)
    (place,) = here.glob("runs/*/toy/teacher/exports/final")
    shutil.copytree(place, here / "teacher")
    return here


def list_options(algorithm: str, lr: float, steps: int) -> list[str]:
    data = [
        "train_dataset.path=q/task/train.jsonl",
        "train_dataset.batch_size=64",
        f"actor.optimizer.lr={lr}",
    ]
    sampling = ["gconfig.n_samples=8", "gconfig.max_new_tokens=6", "pools.teacher.path=teacher"]
    names = [f"actor.algorithm={algorithm}", f"total_train_steps={steps}", "actor.path=q/warm"]
    return [*RL, *data, *sampling, *names]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_student_reaches_the_reward_of_its_teacher_by_log_probabilities_alone(sums):
    wanted = measure_reward(sums / "teacher", sums / "q/task/train.jsonl")
    before = measure_reward(sums / "q/warm", sums / "q/task/train.jsonl")
    after = train(sums, "opd", *list_options("opd", 8e-4, 450), *NO_SIGNAL, "actor.ppo_n_minibatches=4")
    print(f"teacher {wanted:.3f}, student {before:.3f} -> {after:.3f}")
    assert before < 0.6 and wanted > 0.9
    assert after >= wanted - 0.05


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_student_learns_from_the_samples_of_its_teacher(sums):
    options = [*list_options("sft_distill", 2e-3, 80), "pools.teacher.max_new_tokens=6"]
    rewards = train(sums, "sft", *options, "distillation.pool=teacher")
    assert rewards > 0.9  # of the teacher's samples
    (place,) = sums.glob("runs/*/toy/sft/exports/final")
    after = measure_reward(place, sums / "q/task/train.jsonl")
    print(f"student after samples: {after:.3f}")
    assert after > 0.85


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_student_learns_what_a_demonstration_told_its_teacher(tmp_path):
    """The teacher is the student as it was, with the hint that answers the question in its prompt."""
    hpc_rl("quickstart", "--method", "teacher", "--dir", "q", "--only_prepare", cwd=tmp_path, timeout_s=600)
    lines = (tmp_path / "q/hints/task/train.jsonl").read_text().splitlines()
    rows = [
        {
            "prompt": f"|{row['prompt']}=",
            "answer": row["answer"],
            "hint": str((int(row["answer"]) - int(row["prompt"][1])) % 10),
        }
        for row in map(json.loads, lines)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = [
        "distillation.demonstration_column=hint",
        "distillation.demonstration_template={demonstration}{question}",
    ]
    models = [f"{name}.path=q/hints/student" for name in ("actor", "pools.teacher")]
    data = ["train_dataset.path=rows.jsonl", "train_dataset.batch_size=16", "gconfig.n_samples=32"]
    options = [*RL, *models, *data, *shown, "actor.algorithm=opsd", "actor.optimizer.lr=2e-3"]
    options += ["gconfig.max_new_tokens=3", "total_train_steps=150", "actor.ppo_n_minibatches=1"]
    assert train(tmp_path, "hints", *options) > 0.95
