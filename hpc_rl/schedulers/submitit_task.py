"""What submitit calls in the job: the rendered script, and around it submitit's way of saying stop and start again.

submitit's signal does not end anything by itself here. It is passed on to the script, whose supervisor saves and ends with code
75 as for any other stop; only then submitit's own handler is let through, and requeues. Imports nothing of ours: the pickle of
a submission names this module, and must be readable wherever submitit is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

POLL_S = 0.5


class TrialTask:
    """The callable of one submission.

    Args:
        script: The rendered script.
        jobs: Folder for its words.
    """

    def __init__(self, script: str, jobs: str) -> None:
        self.script, self.jobs = script, jobs
        self.code: int | None = None

    def __call__(self) -> int:
        """Run the script to its end. After code 75 submitit requeues and this never returns. Raises RuntimeError."""
        from submitit.core.job_environment import JobEnvironment

        number = getattr(signal, f"SIG{JobEnvironment.USR_SIG}")
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {number}
        )  # the handler requeues: not before the state is saved
        self.code = self._run(number)
        if self._goes_on():
            os.kill(os.getpid(), number)
            signal.pthread_sigmask(
                signal.SIG_UNBLOCK, {number}
            )  # here the handler runs: checkpoint(), requeue, exit
            time.sleep(60)
        if self.code:
            raise RuntimeError(f"the trial ended with code {self.code}; `hpc-rl status` says why")
        return self.code

    def checkpoint(self) -> Any:
        """submitit's hook: what to start again, or None where nothing was saved or a person wants it dead."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(TrialTask(self.script, self.jobs)) if self._goes_on() else None

    def _goes_on(self) -> bool:
        """Whether the script, which knows of a person's wish and of recover.mode, left its stop to be started again."""
        state = Path(self.jobs) / f"{os.environ.get('SLURM_JOB_ID')}.state"
        try:
            last = json.loads(state.read_text().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            return False
        return last.get("event") == "requeued"  # with code 75, or with any at the time limit

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
    """Slurm signals every process of the step, and the script and what it starts here would die of it."""
    signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
