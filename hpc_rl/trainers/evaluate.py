"""Evaluation on held-out prompts: the mean reward of what the servers generate."""

from __future__ import annotations

import logging
import time

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
