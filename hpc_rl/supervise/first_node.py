"""Detect the loss of a job's first node from another node, and give the job back to Slurm.

With --no-kill a job continues without its first node, and so without its script and its supervisor, and no
process is left to end it. A watch observes whether the supervisor renews its lease and whether the node
answers. If one of these stops it asks Slurm, otherwise rarely. Slurm alone decides that a node is lost: it is
no longer a node of the job, or it is down.

A dying node may also kill the script first, and live long enough to report that: Slurm then ends the job as
failed. A watch notices the TERM that Slurm sends to every step, asks for the reason, and requeues the job.
"""

import json
import logging
import signal
import threading
import time
from dataclasses import dataclass

from hpc_rl.core.errors import JobEvent, SchedulerError
from hpc_rl.core.records import GIVEN_BACK, load_job_state
from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import Lease, NameResolve
from hpc_rl.schedulers import slurm
from hpc_rl.supervise.host_watch import HostWatch

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 5.0
# The following numbers count looks, so that one number sets the pace.
SUSPICIOUS_LOOKS = 5  # without a renewed lease: twice the time between two heartbeats
ASK_EVERY_LOOKS = 3  # while the node is suspicious
ASK_ANYWAY_LOOKS = 60  # otherwise
PATIENCE_LOOKS = 6  # so that each watch gives the previous watch time to act
REQUEUE_TRIES = 3  # then the job is cancelled: it would do nothing until its end
REQUEUE_AGAIN_S = 1.0
PATIENCE_AFTER_TERM_S = 2.0  # instead of PATIENCE_LOOKS: Slurm kills the steps soon


class Suspicion:
    """Decides when to ask Slurm about the first node, and when to give the job back. Pure.

    `number`: the number of the watch; watches after the first wait longer.
    """

    def __init__(self, number: int = 0, look_every_s: float = LOOK_EVERY_S) -> None:
        self._look_every_s = look_every_s
        self._patience_s = number * PATIENCE_LOOKS * look_every_s
        self._since: float | None = None
        self._begun: float | None = None
        self._asked_at = float("-inf")
        self._lost_since: float | None = None

    def is_due(self, now: float, lease_age_s: float, silent_s: float) -> bool:
        """Return whether to ask Slurm now.

        Args:
            now: By any monotonic clock.
            lease_age_s: Time since the supervisor last renewed its lease.
            silent_s: Time since the first node last answered.
        """
        is_suspicious = silent_s > 0 or lease_age_s >= SUSPICIOUS_LOOKS * self._look_every_s
        if not is_suspicious:
            self._since = None
        elif self._since is None:
            self._since = now
        if self._begun is None:
            self._begun = now
        rests_since, num_looks = max(self._begun, self._asked_at), ASK_ANYWAY_LOOKS
        if self._lost_since is not None:
            num_looks = 1
        elif self._since is not None and now - self._since >= self._patience_s:
            rests_since, num_looks = self._asked_at, ASK_EVERY_LOOKS
        return now - rests_since >= num_looks * self._look_every_s

    def is_certain(self, now: float, is_lost: bool) -> bool:
        """Note Slurm's answer; return whether this answer and an earlier one say that the node is lost."""
        self._asked_at = now
        if not is_lost:
            self._lost_since = None
            return False
        if self._lost_since is None:
            self._lost_since = now
            return False
        return True


@dataclass(frozen=True)
class WatchedJob:
    """The job of a watch, and the way to give it back."""

    job_id: str  # Slurm's; of the first component of a heterogeneous job
    num_requeues: int  # requeues by Slurm before the watch began
    restart: int  # the number of this start of the submission
    first_node: str
    requeues: bool  # otherwise it is cancelled
    trial: Trial
    submission: str  # its id

    def is_lost(self) -> bool:
        """Return whether Slurm has lost the first node of this start. Raises SchedulerError."""
        facts = slurm.query_job_facts(self.job_id)
        if not facts.is_running or facts.num_requeues != self.num_requeues:
            return False
        # Slurm 22.05 may leave a dead node in the list of a requeued job.
        return self.first_node not in facts.nodes or slurm.is_dead(self.first_node)

    def has_lost_script(self) -> bool:
        """Return whether Slurm ends this start because its script was killed. Raises SchedulerError."""
        if not self.requeues or self.trial.cancel_intent(self.submission).exists():
            return False
        facts = slurm.query_job_facts(self.job_id)
        return facts.script_signal == signal.SIGKILL and facts.num_requeues == self.num_requeues

    def give_back(self, event: JobEvent) -> None:
        """Record the reason, and let Slurm restart or end the job. Raises SchedulerError, OSError."""
        lines = load_job_state(self.trial, self.submission)
        if not any(line.restart == self.restart and line.event in GIVEN_BACK for line in lines):
            record = {"event": event.value, "time": int(time.time()), "restart": self.restart}
            with self.trial.job_state(self.submission).open("a") as file:
                file.write(json.dumps(record) + "\n")
        for _ in range(REQUEUE_TRIES if self.requeues else 0):
            try:
                slurm.requeue(self.job_id, processes_live=True)
                return
            except SchedulerError as error:
                form = "Slurm did not requeue job %s (after %d failures the job is cancelled): %s"
                logger.error(form, self.job_id, REQUEUE_TRIES, error)
            time.sleep(REQUEUE_AGAIN_S)
            if slurm.query_job_facts(self.job_id).num_requeues != self.num_requeues:  # by another watch
                return
        slurm.cancel_jobs(self.job_id)


class Watch:
    """One watch, on another node. `number`: its number among the watches of the job."""

    def __init__(
        self,
        job: WatchedJob,
        names: NameResolve,
        own: Lease,
        hosts: HostWatch,
        number: int,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._job, self._names, self._own, self._hosts = job, names, own, hosts
        self._number, self._look_every_s = number, look_every_s
        self._suspicion = Suspicion(number, look_every_s)
        self._moved_at = time.monotonic()  # last observed renewal of the supervisor's lease

    def run(self) -> None:
        """Watch until the job is given back or ends. Raises Stale once another watch has taken over."""
        # Slurm sends TERM to every process of an ending job; a watch must live until the job is requeued.
        told_to_end = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
        while not told_to_end.wait(self._look_every_s):
            try:
                if self._look():
                    return
            except (SchedulerError, OSError) as error:
                logger.warning("%s", error)
        time.sleep(self._number * PATIENCE_AFTER_TERM_S)
        try:
            if self._job.has_lost_script():
                logger.warning("the job script was killed, so the job is requeued")
                self._job.give_back(JobEvent.SCRIPT_KILLED)
        except (SchedulerError, OSError) as error:
            logger.warning("%s", error)

    def _look(self) -> bool:
        """Return whether the job was given back. Raises Stale, SchedulerError, OSError."""
        now = self._observe_lease()
        self._hosts.look()
        lease_age_s = now - self._moved_at
        silent_s = self._hosts.measure_silence().get(self._job.first_node, 0.0)
        if not self._suspicion.is_due(now, lease_age_s, silent_s):
            return False
        is_lost = self._job.is_lost()
        what = "is lost" if is_lost else "is still a node of the job"
        form = "the first node %s %s; the supervisor on it sent its last heartbeat %.0f s ago"
        logger.info(form, self._job.first_node, what, lease_age_s)
        if not self._suspicion.is_certain(now, is_lost):
            return False
        self._job.give_back(JobEvent.FIRST_NODE_LOST)
        return True

    def _observe_lease(self) -> float:
        """Note renewals of the supervisor's lease; return the time of the last one. Raises Stale."""
        now = time.monotonic()
        try:
            self._own.check()
            owner = self._names.list_leases(keys.OWNER).get(keys.OWNER)
        except OSError as error:  # file system away
            logger.warning("the supervisor's heartbeat can't be read now; the watch tries again: %s", error)
        else:
            if owner is not None:
                self._moved_at = max(self._moved_at, now - owner.age_s)
        return now
