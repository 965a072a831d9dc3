"""Slurm through submitit: its executor writes and submits the batch script; the rest is as with sbatch.

submitit's pickle is in the trial directory, which only its owner can read or write. Its job states are not
used: they need accounting, and the trial's files tell more.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator

from hpc_rl.core.errors import ConfigError, SchedulerError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.schedulers.base import JobSpec
from hpc_rl.schedulers.slurm import SlurmScheduler, clean_environment
from hpc_rl.schedulers.submitit_task import TrialTask

PARAMETERS = "submitit.json"  # next to the script: parameters of submitit's executor


class SubmititScheduler(SlurmScheduler):
    """A Slurm cluster; submitit calls sbatch."""

    def submit(self, spec: JobSpec) -> str:
        """Submit by submitit's executor. Raises ConfigError if submitit is missing, SchedulerError."""
        try:
            from submitit import SlurmExecutor
        except ImportError as error:
            why, use = ": the package is missing", "`pip install 'hpc-rl[submitit]'`"
            option, value = "launcher.slurm.backend", "submitit"
            raise ConfigError(
                Refusal(option=option, value=value, kind=Kind.MACHINE, why=why, use=use)
            ) from error
        try:
            parameters = json.loads((spec.script.parent / PARAMETERS).read_text())
            folder = spec.script.parent.parent / "submitit"
            folder.mkdir(exist_ok=True, mode=0o700)
            with _clean():
                # The trial decides how often it is requeued, not submitit.
                executor = SlurmExecutor(folder=folder, max_num_timeout=1_000_000, python=sys.executable)
                executor.update_parameters(**parameters)
                task = TrialTask(str(spec.script), str(spec.script.parent.parent / "jobs"))
                return str(executor.submit(task).job_id)
        except Exception as error:  # submitit raises many types
            raise SchedulerError(
                f"submitit could not submit the job: {' '.join(str(error).split())}"
            ) from error


@contextlib.contextmanager
def _clean() -> Iterator[None]:
    """Hide variables of a surrounding job: submitit passes the environment to sbatch."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(clean_environment(before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
