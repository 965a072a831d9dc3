"""The task that submitit calls in the job: run the rendered script, and map submitit's requeue to ours.

submitit's signal is passed to the script, whose supervisor saves and exits with code 75, as for any other
stop. Only then submitit's own handler runs, and requeues. This module imports nothing from hpc_rl: the
pickle of a submission names it, and must load in any Python with submitit.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

POLL_S = 0.5


class TrialTask:
    """The callable of one submission: a rendered script, and the folder for its output."""

    def __init__(self, script: str, jobs: str) -> None:
        self.script, self.jobs = script, jobs
        self.code: int | None = None

    def __call__(self) -> int:
        """Run the script. After code 75 submitit requeues and this never returns. Raises RuntimeError."""
        from submitit.core.job_environment import JobEnvironment

        number = getattr(signal, f"SIG{JobEnvironment.USR_SIG}")
        # The handler requeues: it must not run before the state is saved.
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        self.code = self._run(number)
        if self._is_requeued():
            os.kill(os.getpid(), number)
            # Here the handler runs: checkpoint(), requeue, exit.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            time.sleep(60)
        if self.code:
            raise RuntimeError(f"the trial ended with code {self.code}; see `hpc-rl status`")
        return self.code

    def checkpoint(self) -> Any:
        """Return the task to requeue; None if nothing was saved, or the trial was cancelled."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(TrialTask(self.script, self.jobs)) if self._is_requeued() else None

    def _is_requeued(self) -> bool:
        """Return whether the script asks to be started again; it knows of a cancel and of recover.mode."""
        state = Path(self.jobs) / f"{os.environ.get('SLURM_JOB_ID')}.state"
        try:
            last = json.loads(state.read_text().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            return False
        return last.get("event") == "requeued"  # with code 75, or any code at the time limit

    def _run(self, number: int) -> int:
        job_id = os.environ.get("SLURM_JOB_ID", "local")
        with (Path(self.jobs) / f"{job_id}.out").open("ab") as output:
            child = subprocess.Popen(
                ["bash", self.script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: _ignore(number),
            )
        while child.poll() is None:
            if signal.sigtimedwait({number}, POLL_S) is not None:
                child.send_signal(signal.SIGUSR1)
        return child.returncode


def _ignore(number: int) -> None:
    """Ignore a signal: Slurm sends it to every process of the step, and it would kill the script."""
    signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
