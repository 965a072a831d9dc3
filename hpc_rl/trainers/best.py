"""Best: which evaluation was the best so far, and what `exports/best` is a model of. Writing it is the run's (run.py).

What stands on disk is the memory: a restart compares with it. A best model of steps that a recover threw away stays: it was
measured, and it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.config.loading.load import trainer_of
from hpc_rl.config.rules.consistency import METRICS
from hpc_rl.config.sections.experiment import Config
from hpc_rl.trial import read_json


@dataclass(frozen=True)
class Best:
    """By what the best is told.

    Args:
        metric: Name of a number of the evaluation.
        mode: `max`: larger is better; `min`: smaller.
        record: Of the model that stands as the best: {"step", "version", "metric", "mode", "value"}.
    """

    metric: str
    mode: str
    record: Path

    @classmethod
    def of(cls, config: Config, record: Path) -> Best | None:
        """None where nobody asked for it."""
        keep = config.saver.keep_best
        if keep is None:
            return None
        metric, higher = measured_by(config)
        return cls(metric, "max" if higher else "min", record)

    def improvement(self, numbers: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """What to note of an evaluation that beats what stands; None where it does not, or says nothing."""
        value = (numbers or {}).get(self.metric)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
        new = {"metric": self.metric, "mode": self.mode, "value": float(value)}
        old = read_json(self.record) or {}
        comparable = (old.get("metric"), old.get("mode")) == (
            self.metric,
            self.mode,
        )  # else another thing was asked for then
        return new if not comparable or is_better(float(value), float(old["value"]), self.mode) else None


def measured_by(config: Config) -> tuple[str, bool]:
    """(Name of the number that tells the best state, whether larger is better)."""
    keep = config.saver.keep_best
    metric = (keep.metric if keep else None) or METRICS[trainer_of(config)][0]
    mode = (keep.mode if keep else None) or ("min" if metric.endswith("loss") else "max")
    return metric, mode == "max"


def is_better(value: float, than: float, mode: str) -> bool:
    """Whether a value beats another; an equal one does not."""
    return value > than if mode == "max" else value < than
