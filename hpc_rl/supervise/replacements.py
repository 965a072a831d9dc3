"""Other nodes for lost servers of layout `allocation`.

Slurm takes a node that fails out of the job, and a healthy node never returns to it. So the servers of that
node become a job of their own, a task of servers.sbatch, which Slurm starts on a healthy node. It ends with
the attempt: the next start of the trial has all its nodes again.
"""

import logging
import subprocess
from collections.abc import Callable

from hpc_rl.core.errors import SchedulerError
from hpc_rl.core.records import JobRecord
from hpc_rl.core.trial import Attempt
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.schedulers.slurm import cancel_jobs
from hpc_rl.supervise.server_array import SCRIPT

logger = logging.getLogger(__name__)
AGAIN_S = 600.0  # after a failed submission


class Replacements:
    """The jobs that an attempt has submitted for its lost servers; `clock` is monotonic, in seconds."""

    def __init__(self, attempt: Attempt, plan: Plan, clock: Callable[[], float]) -> None:
        self._attempt, self._plan, self._clock = attempt, plan, clock
        self._tasks = plan.list_server_tasks()
        self._submitting: dict[int, subprocess.Popen[bytes]] = {}
        self._due: dict[int, float] = {}  # task -> time of its next submission
        self._known = {job.first_task for job in self._list_jobs()}  # an earlier supervisor was killed

    def add(self, unit: Unit) -> list[int]:
        """Submit the task of a lost server; return its nodes, [] if it has none or is known."""
        script = self._attempt.trial.scripts / SCRIPT
        if self._plan.layout != "allocation" or not script.is_file():
            return []
        numbers = [number for number, nodes in enumerate(self._tasks) if {*unit.nodes} <= {*nodes}]
        if not numbers or numbers[0] in self._known:
            return []
        self._known.add(numbers[0])
        self._due[numbers[0]] = self._clock()
        self.poll()
        return self._tasks[numbers[0]]

    def cancel(self) -> None:
        """Cancel the jobs at the end of the attempt: one that waits would stay in the queue."""
        for process in self._submitting.values():
            process.wait()
        for job in self._list_jobs():
            try:
                cancel_jobs(job.job_id)
            except SchedulerError as error:
                logger.warning(
                    "job %s, which replaces lost servers, can't be cancelled; it ends by itself: %s",
                    job.job_id,
                    error,
                )

    def _list_jobs(self) -> list[JobRecord]:
        records = map(JobRecord.read, self._attempt.trial.jobs.glob("*.json"))
        return [one for one in records if one is not None and one.replaces == self._attempt.id]

    def poll(self) -> None:
        """Start the submissions that are due; one that failed is repeated later."""
        for number, process in list(self._submitting.items()):
            if (code := process.poll()) is not None:
                del self._submitting[number]
                if code:
                    self._due[number] = self._clock() + AGAIN_S
        for number, at in list(self._due.items()):
            if self._clock() >= at:
                del self._due[number]
                self._submitting[number] = self._submit(number)

    def _submit(self, number: int) -> subprocess.Popen[bytes]:
        argv = [self._plan.python, "-m", "hpc_rl.roles.submit_again", "replacement"]
        argv += ["--trial_dir", str(self._attempt.trial.dir), "--job_id", self._attempt.job_id]
        argv += ["--attempt", self._attempt.id, "--task", str(number)]
        with (self._attempt.dir / "logs" / "replacements.log").open("ab") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
