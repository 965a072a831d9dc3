"""Callbacks: classes of the user's that a trainer calls at a few points. Needs neither NumPy nor torch."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.core.trial import Trial, create_exclusive

POINTS = ("on_step", "on_evaluation", "on_checkpoint", "on_end")


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened, as a callback sees it.

    Args:
        step: The step after which it happened; 0 before training.
        metrics: Of the step, or of the evaluation, where their names begin with `eval_`.
        total_steps: The last step of the trial, if it is known.
        trial_dir: The directory of the trial.
        path: The folder of the checkpoint, for `on_checkpoint`.
        is_done: For `on_end`: whether the trial reached its last step; otherwise it stops and may continue.
        is_check: Whether `hpc-rl check` or `submit` tries the callback, once, with an example.
        job_id: The submission.
    """

    step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    trial_dir: Path
    path: Path | None = None
    is_done: bool = False
    is_check: bool = False
    job_id: str = ""

    def stop(self, reason: str) -> None:
        """Stop the trial for good, as `hpc-rl cancel` does: it saves its state, and `recover` continues it.

        `reason` is shown by `hpc-rl status`. Raises OSError if the request can't be written.
        """
        if self.is_check:
            return
        path = Trial(self.trial_dir).cancel_intent(self.job_id)
        os.makedirs(path.parent, exist_ok=True)
        create_exclusive(path, json.dumps({"reason": reason, "by": "callback"}))  # an earlier request stays


class Callback:
    """The base of callbacks. A callback may define some of these methods; the base class is optional.

    `callbacks: [package.module:Class]` names it. The trainer creates one object, without arguments, at each
    of its starts, and calls the methods one after the other on rank 0, while training waits. An exception is
    logged with its place and counted in `hpc-rl status`, and the training continues.
    """

    def on_step(self, event: Event) -> None:
        """Called after each step, with its metrics."""

    def on_evaluation(self, event: Event) -> None:
        """Called when the result of an evaluation is known; `event.step` is the evaluated step."""

    def on_checkpoint(self, event: Event) -> None:
        """Called when a checkpoint is complete; `event.path` is its folder."""

    def on_end(self, event: Event) -> None:
        """Called when the trainer ends: after the last step, or when it stops to be continued later."""
