"""The supervisor of one task of a server array: it keeps its replicas alive while the trial needs them.

It owns nothing of the trial: no lease, no lineage, no batch. It stops when the trial is over, was cancelled,
belongs to another submission, or has had no supervisor for `launcher.slurm.servers.idle_s`. A task for the
lost servers of an attempt stops with that attempt. When its time is nearly over, a task exits with code 75
and is restarted.
"""

import os
import sys
from collections.abc import Callable

from hpc_rl.config.options.experiment import Config
from hpc_rl.core.errors import ExitCode, JobEvent, StopCause
from hpc_rl.core.records import DoneRecord, EventKind, JobRecord, load_job_state
from hpc_rl.core.trial import Attempt, AttemptId, parse_submission
from hpc_rl.name_resolve import keys
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.supervise import ownership
from hpc_rl.supervise.failure_policy import STOPS
from hpc_rl.supervise.processes import Steps
from hpc_rl.supervise.state_machine import AttemptMachine, Finish
from hpc_rl.supervise.unit_loop import RateLimit, UnitLoop

OBSERVE_EVERY_S = 2.0
LEAD_S = 90.0  # a server saves nothing; Slurm may end a job a minute early
UNLIMITED = sys.maxsize  # no generation would reset the count; a task ends by exits in a row


class ServerRunner(UnitLoop):
    """The supervisor of the units of one server node.

    `serves`: the submission that these servers serve, empty if the script was submitted by hand; `end_time`:
    as in TrialRunner.
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: Plan,
        config: Config,
        steps: Steps,
        end_time: Callable[[], float | None],
        units: list[Unit],
        serves: str,
    ) -> None:
        machine = AttemptMachine(units, "auto", UNLIMITED)
        super().__init__(attempt, plan, config, steps, machine, end_time, LEAD_S)
        self.serves, self.idle_s = serves, config.launcher.slurm.servers.idle_s
        self._not_needed = ""  # why the trial no longer needs these servers
        own = AttemptId.parse(attempt.id)
        record = JobRecord.read(self.trial.job(own.array_id)) if own and own.array_id else None
        self._replaces = record.replaces if record else ""  # the attempt that has lost these servers
        self._owned_at = self.clock()
        self._observing = RateLimit(OBSERVE_EVERY_S)

    def begin(self) -> bool:
        details = {"role": "supervisor", "pid": os.getpid(), "serves": self.serves}
        self.write_event(EventKind.SUPERVISOR_STARTED, details)
        self.machine.restore(0, ownership.find_next_incarnations(self.attempt))
        self._not_needed = self._explain_not_needed()
        if self._not_needed:
            self.machine.stop_cause = StopCause.NOT_NEEDED
            self.finish = Finish(ExitCode.DONE, self._not_needed)
        return True

    def observe(self, now: float) -> None:
        """Check the trial, the leases and the wall time. Raises OSError."""
        if self.deadline.is_reached():
            self.requests.add(StopCause.TIME_LIMIT)
        if self._observing.is_due(now) or self.requests:  # a signal may announce an intent
            self.deadline.update()
            self._not_needed = self._not_needed or self._explain_not_needed()
            self.observe_servers(now)
            self.kill_hung(now)

    def grant_requests(self) -> None:
        """Stop if the trial needs no servers, or a request waits."""
        causes = self.requests.take()
        if self.machine.stop_cause is not None:
            return
        if self._not_needed:
            self.execute(self.machine.stop(self.clock(), StopCause.NOT_NEEDED, self._not_needed))
        elif causes:
            self.execute(self.machine.stop(self.clock(), causes[0]))

    def replace_unit(self, unit: Unit) -> None:
        """Do nothing: Slurm starts a task that has lost a node again elsewhere."""

    def leave(self, finish: Finish) -> int:
        """Record the end: 0 (trial over), 75 (time over) or 70 (no replica can be kept alive)."""
        code, reason = finish.code, finish.reason
        if code == ExitCode.STOPPED and self._not_needed:
            code, reason = ExitCode.DONE, self._not_needed
        elif code == ExitCode.STOPPED and self.machine.stop_cause is not None:
            reason, _ = STOPS[self.machine.stop_cause]
        self.write_ended(code, reason)
        return code

    def _explain_not_needed(self) -> str:
        """Return why the trial no longer needs this task's servers; "" while it does. Raises OSError."""
        done = DoneRecord.read(self.trial.done)
        if done is not None and self.serves in ("", done.job_id):
            return "the trial has reached its end"
        own = AttemptId.parse(self.attempt.id)
        jobs = (self.serves, own.array_id if own else "")
        if any(self.trial.cancel_intent(job).exists() for job in jobs if job):
            return "cancelled by the user"
        lines = load_job_state(self.trial, self.serves)[-1:] if self.serves else []
        if lines and lines[0].event is JobEvent.ENDED:
            return f"job {self.serves} has ended: {lines[0].reason or 'no reason recorded'}"
        if lines and self._replaces and lines[0].event is JobEvent.REQUEUED:
            return f"job {self.serves} starts again, with all its servers"
        owner = self.names.list_leases(keys.OWNER).get(keys.OWNER)
        if owner is None or not owner.alive:
            if self.clock() - self._owned_at < self.idle_s:
                return ""
            return f"the trial has had no supervisor for {self.idle_s:g} s (launcher.slurm.servers.idle_s)"
        self._owned_at = self.clock()
        attempt = str(owner.value.get("attempt") or "")
        if self._replaces and attempt != self._replaces:
            return f"attempt {attempt} runs the trial now, with all its servers"
        other = parse_submission(attempt)
        if self.serves in ("", other):
            return ""
        return f"job {other} runs the trial now, with its own servers"
