"""CPU seconds of a training step of the decoupled loss, with and without the forward pass for log prox.

    python benchmarks/proximal.py [--pairs 7] [--out benchmarks/results/proximal.json]

Sides: `actor.prox_logp_method` recompute and loglinear, each a recipe with its own fsdp engine, from one random
checkpoint, on the same batches of stale tokens. They step in turn, in a new order each time, on one thread;
a ratio is taken within a pair, and the median over the pairs counts.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_record import describe_run, spread, write_record

sys.path.insert(0, str(Path(__file__).parent))

from learning_curves import make_recipe

from hpc_rl.config.options.dataset import PromptDatasetConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.training import MicroBatchSpec, NormConfig, OptimizerConfig, PPOActorConfig
from hpc_rl.core.types import Batch, Trajectory, TrajectoryGroup

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096}
SIDES = ("recompute", "loglinear")
NUM_MINIBATCHES = 4  # with one, its own forward pass has what recompute needs
NUM_GROUPS, GROUP_SIZE, LENGTHS, STALENESS = 8, 4, (64, 512), 2


def write_model(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        **SHAPE,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def make_batch(step: int) -> Batch:
    """Return random completions that are up to STALENESS versions old."""
    rng = np.random.default_rng(step)

    def make_row() -> Trajectory:
        length = int(rng.integers(*LENGTHS))
        mask = np.arange(length) >= length // 8
        age = int(rng.integers(0, STALENESS + 1))
        return Trajectory(
            ids=rng.integers(0, SHAPE["vocab_size"], length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -8.3, 0.0).astype(np.float32),
            lineages=np.where(mask, 0, -1).astype(np.int32),
            steps=np.where(mask, max(0, step - 1 - age), -1).astype(np.int32),
            reward=float(rng.integers(0, 2)),
            finish_reason="stop",
        )

    groups = [TrajectoryGroup(i, [make_row() for _ in range(GROUP_SIZE)]) for i in range(NUM_GROUPS)]
    return Batch(step, groups)


def make_config(model: Path, method: Any) -> GRPOConfig:
    """Return the options of a side."""
    actor = PPOActorConfig(
        path=str(model),
        dtype="float32",
        attn_impl="sdpa",
        gradient_checkpointing=False,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=2048),
        optimizer=OptimizerConfig(lr=1e-5),
        reward_norm=NormConfig(mean_level="group", std_level="group"),
        kl_ctl=0.0,
        ppo_n_minibatches=NUM_MINIBATCHES,
        use_decoupled_loss=True,
        prox_logp_method=method,
    )
    return GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=PromptDatasetConfig(path="rows.jsonl", batch_size=NUM_GROUPS),
        gconfig=GenerationHyperparameters(n_samples=GROUP_SIZE, max_new_tokens=LENGTHS[1]),
        actor=actor,
        total_train_steps=1000,
    )


def measure(pairs: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        config = partial(make_config, folder / "model")
        recipes = {side: make_recipe(config(side), folder / side, NUM_GROUPS) for side in SIDES}
        for step in range(1, pairs + 2):  # the first pair warms up
            batch = make_batch(step)
            for side in order.sample(SIDES, len(SIDES)):
                begin = time.process_time()
                recipes[side].update(step, batch)
                seconds[side].append(time.process_time() - begin)
    ratios = [a / b for a, b in zip(seconds["loglinear"][1:], seconds["recompute"][1:], strict=True)]
    return {
        "cpu_s": {side: spread(values[1:]) for side, values in seconds.items()},
        "loglinear_over_recompute": spread(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "proximal.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = describe_run("torch", "transformers")
    shape = {**SHAPE, "rows": NUM_GROUPS * GROUP_SIZE, "lengths": LENGTHS, "staleness": STALENESS}
    shape["minibatches"] = NUM_MINIBATCHES
    result = {**about, "pairs": options.pairs, "shape": shape, **measure(options.pairs)}
    write_record(options.out, result)
    print(json.dumps(result["cpu_s"]), json.dumps(result["loglinear_over_recompute"]))


if __name__ == "__main__":
    main()
