"""Ends a trial whose optimizer makes no updates, in place of training to the end without learning."""

import math

from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core.errors import DataUnusable
from hpc_rl.trainers.run import Run

MAX_STEPS_WITHOUT_UPDATE = 20  # in a row; float16 adds the steps that the loss scale may need to shrink


class UpdateWatch:
    """Counts the steps in a row without an optimizer update of a trial of `total_steps`."""

    def __init__(self, run: Run, config: TrainEngineConfig, total_steps: int) -> None:
        self.run = run
        self.config = config
        self.total_steps = total_steps
        self._steps_without_update = 0  # in a row

    def see(self, step: int, num_tried: int, num_successful: int) -> None:
        """Count a step. Raises DataUnusable after too many steps in a row without an update.

        Also raises it at the end of a trial if the loss or its gradient was not finite in all of its updates:
        such a trial is not done.
        """
        self._steps_without_update = 0 if num_successful else self._steps_without_update + 1
        if not self._steps_without_update:
            return
        why = "the loss or its gradient was not finite" if num_tried else "no row was left to train on"
        if num_tried and step == self.total_steps and not self.run.engine.counters()["adam_steps"]:
            raise DataUnusable(f"none of the {step} steps made an optimizer update: {why}")
        if self._steps_without_update >= count_allowed_idle_steps(self.config):
            raise DataUnusable(
                f"{self._steps_without_update} steps in a row made no optimizer update, "
                f"the last one step {step}: {why}"
            )


def count_allowed_idle_steps(config: TrainEngineConfig) -> int:
    """Return the number of steps in a row without an optimizer update after which the trial ends."""
    scale = config.optimizer if config.dtype == "float16" else None
    if scale is None:
        return MAX_STEPS_WITHOUT_UPDATE
    halvings = math.ceil(math.log2(scale.initial_loss_scale / scale.min_loss_scale))
    return MAX_STEPS_WITHOUT_UPDATE + halvings + scale.hysteresis
