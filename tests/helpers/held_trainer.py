"""A callback of trials whose trainer a test ends in the middle of its steps: the trainer goes no further than one
of them, however late the test is. `Roles.trainer(stays_at=...)` names it.
"""

import os
import time
from pathlib import Path

from hpc_rl.core.callbacks import Event

VARIABLE = "HPC_RL_TEST_STAYS_AT"
CALLBACK = "held_trainer:Holds"


def find_permission(trial_dir: Path, job_id: str) -> Path:
    """Return the file that lets the trainer of a job go on."""
    return trial_dir / f"goes-on-{job_id}"


class Holds:
    """Holds the trainer once this step's line is written, and before its state is saved."""

    def on_step(self, event: Event) -> None:
        if str(event.step) == os.environ.get(VARIABLE):
            while not find_permission(event.trial_dir, event.job_id).exists():
                time.sleep(0.05)
