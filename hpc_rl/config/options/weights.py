"""Section `weights`: published weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpc_rl.config.options.limits import NonNegativeFloat, PositiveInt


@dataclass(kw_only=True)
class WeightsConfig:
    """Weights that the trainer publishes for the servers after each step. hpc-rl extension."""

    history_gb: NonNegativeFloat | None = None
    """Keep published versions up to this size in total, in GB, so that `hpc-rl checkpoint export` and
    `hpc-rl fork` can rebuild the weights of past steps; the oldest are removed first. null or 0 keeps only
    the versions that servers need, which stay in any case."""
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    """How a server holds its running requests while it loads new weights. retract: it computes their tokens
    so far again with the new weights, then continues. abort: it returns the tokens so far, and the rollout
    role sends the request again. in_place: it continues at once, with attention over what the old weights
    computed. Each token is labelled with the weights that sampled it."""
    max_paused: PositiveInt | None = None
    """Servers that load new weights at the same time, so that the others generate meanwhile; null means
    all. With actor.weight_update_mode xccl it counts only servers that load from disk."""
