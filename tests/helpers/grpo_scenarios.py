"""Nine scenarios of GRPO: by the recipe on an engine, and by the formulas of plain_grpo.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine_weights import whole_weights
from plain_grpo import DEFAULTS, PlainGRPO
from recipes import make_run
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.config.options.dataset import PromptDatasetConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.training import NormConfig, OptimizerConfig, PPOActorConfig, TrainEngineConfig
from hpc_rl.core.types import Batch, Trajectory, TrajectoryGroup, decode, encode
from hpc_rl.engines.base import Engine, Scorer
from hpc_rl.trainers.grpo_recipe import GRPO, place_schedule

NUM_STEPS = 10
SAVED_AFTER = 5  # steps
NUM_GROUPS, GROUP_SIZE = 4, 3
TOLERANCE = 1e-5  # of a weight after NUM_STEPS
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
COMMON: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 12}
OPTIMIZER = ("lr", "beta1", "beta2", "eps", "weight_decay", "gradient_clipping")
OF_GENERATION = ("temperature", "max_new_tokens")


@dataclass(frozen=True)
class Scenario:
    """Options of section `actor`, and one of them as it is in the control, with another value."""

    options: dict[str, Any]
    control: dict[str, Any]


GROUP = {"mean_level": "group", "std_level": "group", "eps": 0.5}
SCENARIOS = {
    "norms of groups": Scenario({"reward_norm": GROUP}, {"reward_norm": {**GROUP, "eps": 0.505}}),
    "norms of the batch": Scenario(
        {
            "reward_norm": {"mean_level": "group", "std_level": None, "mean_leave1out": True},
            "adv_norm": {"mean_level": "batch", "std_level": "batch", "std_unbiased": True},
            "reward_bias": -0.25,
            "reward_scaling": 2.0,
            "reward_clip": 1.25,
        },
        {"reward_clip": 1.2375},
    ),
    "mean of sequences": Scenario(
        {
            "reward_norm": {"mean_level": "batch", "std_level": "group"},
            "adv_norm": {"mean_level": None, "std_level": "group"},
            "loss_aggregation": "sequence_mean",
            "recompute_logprob": True,
        },
        {"weight_decay": 1.01 * DEFAULTS["weight_decay"], "lr": 1.01 * DEFAULTS["lr"]},
    ),
    "constant length": Scenario(
        {
            "reward_norm": {"mean_level": "group", "std_level": None},
            "loss_aggregation": "constant_length",
            "gradient_clipping": 1e3,
            "eps": 1e-2,  # of Adam: else the size of the gradient hardly matters
            "lr": 3e-3,
        },
        {"max_new_tokens": 12.12},
    ),
    "KL in the loss": Scenario({"reward_norm": GROUP, "beta": 0.3}, {"beta": 0.303}),
    "KL in the reward": Scenario(
        {"reward_norm": GROUP, "kl_ctl": 0.2, "kl_estimator": "k2", "discount": 0.97, "gae_lambda": 0.9},
        {"kl_ctl": 0.202},
    ),
    "decoupled, with a cap": Scenario(
        {"reward_norm": GROUP, "use_decoupled_loss": True, "behav_imp_weight_cap": 1.4},
        {"behav_imp_weight_cap": 1.386},
    ),
    "several minibatches, dual clip": Scenario(
        {"reward_norm": GROUP, "ppo_n_minibatches": 3, "recompute_logprob": True, "c_clip": 1.05, "lr": 2e-3},
        {"c_clip": 1.0605},
    ),
    "dynamic sampling, higher clip": Scenario(
        {
            "reward_norm": GROUP,
            "dynamic_sampling": True,
            "mask_no_eos_with_zero": True,
            "eps_clip_higher": 0.3,
            "overlong_tokens": 4,
            "overlong_penalty_factor": 0.5,
        },
        {"overlong_penalty_factor": 0.505},
    ),
}


def write_model(folder: Path) -> None:
    """Write a checkpoint with random weights, and norms that are not all 1."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def write_batches(model: Path, folder: Path) -> None:
    """Write the batches of all steps; their samplers' probabilities differ a little from the model's."""
    plain = PlainGRPO(model, COMMON)
    for step in range(1, NUM_STEPS + 1):
        random = np.random.default_rng(step)
        groups = []
        for number in range(NUM_GROUPS):
            prompt = random.integers(0, MODEL["vocab_size"], size=int(random.integers(1, 5)))
            rows = [make_row(plain, random, prompt, step) for _ in range(GROUP_SIZE)]
            if number == step % NUM_GROUPS:  # dynamic sampling drops it
                rows = [replace(row, reward=0.5) for row in rows]
            groups.append(TrajectoryGroup((step - 1) * NUM_GROUPS + number, rows))
        (folder / f"batch-{step}").write_bytes(encode(Batch(step, groups)))


def make_row(plain: PlainGRPO, random: np.random.Generator, prompt: np.ndarray, step: int) -> Trajectory:
    """Return a completion of 1 to 12 tokens; the longest are truncated, and some have a tool's output inside."""
    num_made = int(random.integers(1, COMMON["max_new_tokens"] + 1))
    mask = np.repeat([False, True], [len(prompt), num_made])
    if num_made > 5 and random.random() < 0.4:
        mask = np.insert(mask, len(prompt) + 3, [False, False])
    ids = np.concatenate([prompt, random.integers(0, MODEL["vocab_size"], size=len(mask) - len(prompt))])
    row = Trajectory(
        ids=ids.astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        lineages=np.where(mask, 0, -1).astype(np.int32),
        steps=np.where(mask, step - 1, -1).astype(np.int32),
        reward=float(random.normal()),
        finish_reason="length" if num_made == COMMON["max_new_tokens"] else "stop",
    )
    with torch.no_grad():
        row.logprobs[mask] = plain.compute_logprobs(plain.model, row).numpy()
    row.logprobs[mask] += 0.2 * random.normal(size=num_made)
    return row


def read_batch(folder: Path, step: int) -> Batch:
    return decode((folder / f"batch-{step}").read_bytes())


def compute(folder: Path, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights that the formulas give."""
    plain = PlainGRPO(folder / "model", {**COMMON, **options})
    for step in range(1, NUM_STEPS + 1):
        plain.train(read_batch(folder, step))
    return plain.weights


def measure_gap(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two sets of weights."""
    assert found.keys() == wanted.keys()
    return max(float((found[name].double() - one).abs().max()) for name, one in wanted.items())


# (section, name of the model, whether it is frozen) -> engine
MakeEngine = Callable[[TrainEngineConfig, str, bool], Engine]


def make_config(folder: Path, options: dict[str, Any]) -> GRPOConfig:
    """Return the configuration of a trial with these options."""
    values = {**COMMON, **options}
    optimizer = {name: values.pop(name, DEFAULTS[name]) for name in OPTIMIZER}
    generation = {name: values.pop(name) for name in OF_GENERATION}
    for name in ("reward_norm", "adv_norm"):
        if name in values:
            values[name] = NormConfig(**values[name])
    actor = PPOActorConfig(
        path=str(folder / "model"),
        attn_impl="sdpa",
        dtype="float32",
        gradient_checkpointing=False,
        optimizer=OptimizerConfig(**optimizer, lr_scheduler_type="constant", warmup_steps_proportion=0.0),
        **{
            "kl_ctl": 0.0,
            "ppo_n_minibatches": 1,
            "overlong_reward_penalty": "overlong_tokens" in values,
            **values,
        },
    )
    return GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=PromptDatasetConfig(path="x.jsonl", batch_size=NUM_GROUPS),
        gconfig=GenerationHyperparameters(n_samples=GROUP_SIZE, **generation),
        actor=actor,
    )


class Training:
    """A scenario by the recipe on engines of one kind. All methods are collective."""

    def __init__(self, folder: Path, name: str, make_engine: MakeEngine) -> None:
        self.folder = folder
        self.options = SCENARIOS[name].options
        self.make_engine = make_engine

    def run(self, out: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the weights of a training, and of one that goes on from the first one's state; on rank 0."""
        recipe = self._begin(out, step=0)
        for step in range(1, NUM_STEPS + 1):
            recipe.update(step, read_batch(self.folder, step))
            if step == SAVED_AFTER:
                recipe.run.engine.snapshot(copied=False).write(out)
        found = whole_weights(recipe.run.engine)
        recipe = self._begin(out, step=SAVED_AFTER)
        for step in range(SAVED_AFTER + 1, NUM_STEPS + 1):
            recipe.update(step, read_batch(self.folder, step))
        return found, whole_weights(recipe.run.engine)

    def _begin(self, out: Path, step: int) -> GRPO:
        out.mkdir(parents=True, exist_ok=True)
        config = make_config(self.folder, self.options)
        per_step = config.actor.ppo_n_minibatches
        engine = self.make_engine(config.actor, "actor", False)
        engine.initialize(NUM_STEPS * per_step, empty=step > 0)
        run = make_run(out, config, engine)
        if step:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # the others' files are there
            engine.load(out, engine.mesh.num_ranks)
        reference: Scorer | None = None
        if config.actor.kl_ctl or config.actor.beta:
            frozen = self.make_engine(config.actor, "ref", True)
            frozen.initialize(0)
            reference = frozen
        place_schedule(engine, step, per_step)
        transport: Any = SimpleNamespace(settle=lambda wait: None)
        rollout: Any = SimpleNamespace()
        return GRPO(run, rollout, transport, num_prompts=NUM_GROUPS, reference=reference)


def store(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: one.contiguous() for name, one in weights.items()}, path)


def check(
    found: dict[str, torch.Tensor], resumed: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> float:
    """Compare the two results of `Training.run` with the formulas. Returns the largest difference."""
    assert found.keys() == resumed.keys() and all(torch.equal(found[name], resumed[name]) for name in found)
    gap = measure_gap(found, wanted)
    assert gap <= TOLERANCE, f"a weight differs by {gap:.2g}"
    return gap
