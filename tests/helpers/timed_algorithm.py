"""GRPO whose steps take longer: a trial names it as `actor.algorithm: timed_algorithm:TIMED`."""

import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hpc_rl.algorithms.grpo import GRPO, Options
from hpc_rl.algorithms.rewards import compute_credit
from hpc_rl.algorithms.token_batch import RewardBatch


@dataclass(frozen=True, kw_only=True)
class TimedOptions(Options):
    """GRPO's options, and the seconds of a step, whatever its tokens, and of each token on one rank."""

    step_s: float = 0.0
    token_s: float = 0.0


def compute_credit_slowly(batch: RewardBatch, options: TimedOptions) -> torch.Tensor:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    time.sleep(options.step_s + options.token_s * float(batch.mask_BT.sum()) / ranks)
    return compute_credit(batch, options)


TIMED = replace(GRPO, options=TimedOptions, compute_credit=compute_credit_slowly)
