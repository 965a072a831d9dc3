"""The schedulers by name."""

import shutil
from collections.abc import Callable

from hpc_rl.core.errors import SchedulerError
from hpc_rl.core.trial import Trial
from hpc_rl.schedulers.base import Scheduler
from hpc_rl.schedulers.local import AllocationScheduler, LocalScheduler
from hpc_rl.schedulers.slurm import SlurmScheduler

SCHEDULERS: dict[str, Callable[[Trial], Scheduler]] = {
    "slurm": lambda trial: SlurmScheduler(),
    "local": LocalScheduler,
    "allocation": AllocationScheduler,
}


def pick(kind: str) -> str:
    """Return the scheduler's name for `launcher.type`: `auto` is Slurm if sbatch is on the PATH."""
    if kind == "auto":
        return "slurm" if shutil.which("sbatch") else "local"
    return kind


def make_scheduler(kind: str, trial: Trial) -> Scheduler:
    """Return the scheduler with that name (or `auto`) for the jobs of a trial. Raises SchedulerError."""
    name = pick(kind)
    if name not in SCHEDULERS:
        raise SchedulerError(f"unknown scheduler {name!r}; available: {', '.join(SCHEDULERS)}.")
    return SCHEDULERS[name](trial)
