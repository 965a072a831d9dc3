"""The disk use of the published weights that a trial keeps beyond its servers' needs (weights.history_gb)."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.core.steps import format_ranges
from hpc_rl.core.trial import Trial, load_object
from hpc_rl.status.formatting import format_size


@dataclass(frozen=True)
class WeightHistory:
    """The published versions of a trial, as its trainer last counted them."""

    budget_gb: float  # weights.history_gb
    num_versions: int
    bytes: int
    steps: list[list[int]]  # ranges of steps that can be exported, first and last

    def __str__(self) -> str:
        steps = f"; steps {format_ranges(self.steps)} can be exported" if self.steps else ""
        return f"{format_size(self.bytes)} of {self.budget_gb:g} GB (weights.history_gb){steps}"


def load_weight_history(trial: Trial) -> WeightHistory | None:
    """Return the history of a trial; None if weights.history_gb is not set."""
    section = load_object(trial.config_json).get("weights")
    budget_gb = section.get("history_gb") if isinstance(section, dict) else None
    if not budget_gb:
        return None
    summary = load_object(trial.weights_history)
    try:
        return WeightHistory(
            budget_gb, int(summary["num_versions"]), int(summary["bytes"]), list(summary["steps"])
        )
    except (KeyError, TypeError, ValueError):  # nothing was published yet
        return WeightHistory(budget_gb, 0, 0, [])
