"""Sections `saver`, `evaluator`, `recover` and `stats_logger`: what happens every so often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpc_rl.config.limits import NonNegativeInt, PathText, PositiveInt


@dataclass(kw_only=True)
class FrequencyConfig:
    """How often: any of the three that is set. All null means never.

    Args:
        freq_epochs: Every so many epochs.
        freq_steps: Every so many steps.
        freq_secs: Every so many seconds.
    """

    freq_epochs: PositiveInt | None = None
    freq_steps: PositiveInt | None = None
    freq_secs: PositiveInt | None = None


@dataclass(kw_only=True)
class SaverConfig(FrequencyConfig):
    """Exports for people, in Hugging Face format, into `exports/`; one is always written at the end."""


@dataclass(kw_only=True)
class EvaluatorConfig(FrequencyConfig):
    """Evaluation on `valid_dataset`; one always runs before the first and after the last step if there is such a dataset."""


@dataclass(kw_only=True)
class RecoverConfig(FrequencyConfig):
    """Generations of recover state, and what a start does with them.

    Args:
        mode: `disabled` never saves nor loads; `auto` loads the newest valid generation if there is one; `fault` loads only
            what this submission wrote; `resume` loads or ends with exit code 3.
        retries: Restarts in a row without a new generation before the trial gives up.
        keep: Generations kept.
    """

    mode: Literal["disabled", "auto", "fault", "resume"] = "disabled"
    retries: NonNegativeInt = 3
    keep: PositiveInt = 2


@dataclass(kw_only=True)
class TensorBoardConfig:
    """TensorBoard files.

    Args:
        path: Directory; null means `tensorboard/` in the attempt's directory, which also holds `metrics.jsonl`, always written.
    """

    path: PathText | None = None


@dataclass(kw_only=True)
class StatsLoggerConfig:
    """Where numbers go.

    Args:
        tensorboard: TensorBoard files.
    """

    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
