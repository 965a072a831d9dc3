"""Section `weights`: published weights."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.config.options.limits import NonNegativeFloat


@dataclass(kw_only=True)
class WeightsConfig:
    """Weights that the trainer publishes for the servers after each step. hpc-rl extension."""

    history_gb: NonNegativeFloat | None = None
    """Keep published versions up to this size in total, in GB, so that `hpc-rl checkpoint export` and
    `hpc-rl fork` can rebuild the weights of past steps; the oldest are removed first. null or 0 keeps only
    the versions that servers need, which stay in any case."""
