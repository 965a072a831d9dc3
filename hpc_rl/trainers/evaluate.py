"""Evaluation on held-out data: mean reward of what the servers make (GRPO), mean loss of what is written (SFT),
loss and accuracy over pairs (reward model)."""

from __future__ import annotations

import logging
import time

import torch

from hpc_rl.algorithms.losses import pairwise_loss
from hpc_rl.engines.base import Engine, Sequences, sum_over_ranks
from hpc_rl.rollout.batch_client import RolloutClient
from hpc_rl.trainers.run import Run

logger = logging.getLogger(__name__)


def held_out_reward(run: Run, rollout: RolloutClient, step: int) -> dict[str, float | int | str] | None:
    """Ask the rollout role to evaluate the weights after `step`, and log a line of its own; rank 0 asks.

    {} where there is no held-out data (and on other ranks), None when told to stop meanwhile.
    """
    if run.config.valid_dataset is None or run.ranks.rank != 0:
        return {}
    start = time.monotonic()
    result = rollout.evaluate(str(run.version(step)), run.stopping)
    if result is None:
        return None
    numbers: dict[str, float | int | str] = {
        "eval_reward": result.reward,
        "eval_num_prompts": result.num_prompts,
        "eval_version": result.version,
        **{f"eval_{name}": value for name, value in result.stats.items()},
        "eval_s": time.monotonic() - start,
    }
    run.sinks.log(step, {"time": time.time(), "lineage": run.lineage, **numbers})
    logger.info("step %d: held-out reward %.4f over %d prompts", step, result.reward, result.num_prompts)
    return numbers


def held_out_loss(engine: Engine, rows: Sequences) -> dict[str, float]:
    """Mean negative log-likelihood per completion token; `rows` is this rank's share."""
    total, count = 0.0, 0.0
    for logprobs, mask in zip(engine.logprobs(rows, 1.0), rows.columns["loss_mask"], strict=True):
        total -= float(logprobs[mask].sum(dtype="float64"))
        count += int(mask.sum())
    total, count = sum_over_ranks([total, count])
    return {"eval_loss": total / max(1.0, count)}


def held_out_preferences(engine: Engine, rows: Sequences) -> dict[str, float]:
    """Mean Bradley-Terry loss, and the share of pairs whose chosen sequence scores higher; `rows` is this rank's share."""
    made = zip(engine.logprobs(rows, 1.0), rows.columns["loss_mask"], strict=True)
    scores_P2 = torch.tensor([float(scores[mask].sum()) for scores, mask in made]).reshape(-1, 2)
    loss, sums = pairwise_loss(scores_P2[:, 0], scores_P2[:, 1])
    total, correct, count = sum_over_ranks([float(loss), float(sums["num_correct"]), float(len(scores_P2))])
    return {"eval_loss": total / max(1.0, count), "eval_accuracy": correct / max(1.0, count)}
