"""Shared queries of a scheduler: one for all jobs of an account, kept in a file that every command reads.

All commands of an account together, on all login nodes with the same home directory, ask at most
CALLS_PER_MINUTE times a minute, and every PERIOD_S seconds while one of them watches. There is no lock: the
next query belongs to the process that creates its claim file, whose name follows from the last answer; a
process that dies before it answers loses its claim after RETRY_S. Where the state directory can't be written,
each process keeps to these limits by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from hpc_rl.core.errors import SchedulerError
from hpc_rl.core.records import JsonRecord
from hpc_rl.core.trial import create_exclusive, state_home, write_json
from hpc_rl.schedulers import slurm
from hpc_rl.schedulers.base import JobState, SchedulerAnswer, State
from hpc_rl.schedulers.slurm_states import sum_up

logger = logging.getLogger(__name__)

PERIOD_S = 20.0  # between two queries while a command watches
JITTER_S = 4.0
SOON_S = 5.0  # between two queries when a job is younger than the last one, or an end is to be confirmed
CALLS_PER_MINUTE = 4
RETRY_S = 30.0
MAX_BACKOFF_S = 300.0
ACCOUNTING_RETRY_S = 600.0  # between two queries of accounting about a job that it did not know
YOUNG_S = 5.0  # a query may miss a job that was submitted within this time before it
MAX_KEPT_ENDS = 2000
NOT_LISTED = "NOT_LISTED"  # native state of a job that neither queue nor accounting lists any more
CLOCK_SKEW_S = 60.0  # a time of the file that is further in the future came from a wrong clock
WAIT_POLL_S = 0.1


@dataclass
class SharedAnswer(JsonRecord):
    """Content of the shared file. Times are Unix seconds."""

    sequence: int = 0
    asked_at: float = 0.0  # of the last answer
    next_at: float = 0.0
    failures: int = 0
    complaint: str = ""
    calls: list[float] = field(default_factory=list)  # of the last minute
    accounts: dict[str, list[JobState]] = field(default_factory=dict)  # by uid
    ends: dict[str, JobState] = field(default_factory=dict)  # of jobs that have ended, by their ids
    unknown: dict[str, float] = field(default_factory=dict)  # job id -> when accounting did not know it

    def recent_calls(self, now: float) -> list[float]:
        return [when for when in self.calls if now - 60 < when <= now]

    def find(self, uid: int, job_id: str) -> JobState | None:
        parts = (f"{job_id}_", f"{job_id}+")
        for known in (self.accounts.get(str(uid), []), self.ends.values()):
            if found := [one for one in known if one.job_id == job_id or one.job_id.startswith(parts)]:
                return sum_up(found)[job_id]
        return None

    def note_ends(self, found: Mapping[str, JobState]) -> None:
        """Remember ends for longer than the scheduler does, until the job lives again."""
        for job_id, state in found.items():
            self.ends.pop(job_id, None)
            if not state.state.alive and state.state is not State.UNKNOWN:
                self.ends[job_id] = state
        self.ends = dict(list(self.ends.items())[-MAX_KEPT_ENDS:])


# Answers of this process, by the folder that can't be written.
_UNSHARED: dict[Path, SharedAnswer] = {}


class Poller:
    """The shared view of one scheduler, kept in a folder of the user's state directory."""

    def __init__(
        self,
        scheduler: slurm.SlurmScheduler,
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.scheduler = scheduler
        self.folder = folder or state_home() / "queries" / cluster_key()
        self._clock = clock

    def look(
        self, wanted: Mapping[str, float], uid: int, newer_than: float = 0.0, patience_s: float = 0.0
    ) -> SchedulerAnswer:
        """Return what is known of the jobs of an account, after a query where one is due.

        Args:
            wanted: Job id -> when it was submitted, Unix seconds (0 where that is not known).
            uid: The account.
            newer_than: An older answer is of little use: the next query may come soon, within the budget.
            patience_s: Time to wait for the query of another process where nothing is known of the jobs.
        """
        answer = self._answer()
        if self._is_time(answer, wanted, uid, newer_than):
            answer = self._ask(answer, wanted, uid)
        deadline = time.monotonic() + patience_s
        while not self._covers(answer, wanted, uid) and time.monotonic() < deadline:
            time.sleep(WAIT_POLL_S)
            answer = self._answer()
        return self._result(answer, wanted, uid)

    def _answer(self) -> SharedAnswer:
        shared = _UNSHARED.get(self.folder) or SharedAnswer.read(self.folder / "answer.json")
        return shared or SharedAnswer()

    def _covers(self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int) -> bool:
        if str(uid) not in answer.accounts:
            return False
        return all(
            when < answer.asked_at - YOUNG_S or answer.find(uid, job_id) for job_id, when in wanted.items()
        )

    def _is_time(
        self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int, newer_than: float
    ) -> bool:
        now = self._clock()
        recent = answer.recent_calls(now)
        if len(recent) >= CALLS_PER_MINUTE:
            return False
        if now >= answer.next_at or answer.asked_at > now + CLOCK_SKEW_S:
            return True
        is_urgent = answer.asked_at < newer_than or not self._covers(answer, wanted, uid)
        return is_urgent and not answer.failures and now >= max(recent, default=0.0) + SOON_S

    def _ask(self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int) -> SharedAnswer:
        """Make the next query if this process gets its claim; return what is known then."""
        now = self._clock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            num_lost = max(0, int((now - answer.next_at) // RETRY_S))
            claim = self.folder / f"claim-{answer.sequence + 1}.{num_lost}"
            if not create_exclusive(claim, f"{socket.gethostname()} {os.getpid()}\n"):
                return answer
            current = self._answer()
            if current.sequence != answer.sequence:  # answered between our read and our claim
                return current
            answer = self._query(answer, wanted, uid)
            write_json(self.folder / "answer.json", asdict(answer), mode=0o600)
            _UNSHARED.pop(self.folder, None)
            for path in self.folder.glob("claim-*"):  # of queries that were answered long ago
                number = re.match(r"claim-(\d+)\.", path.name)
                if number and int(number[1]) < answer.sequence - 2:
                    path.unlink(missing_ok=True)
        except OSError as error:
            logger.debug("the answer can't be shared (%s): this process asks by itself", error)
            if self._answer().sequence == answer.sequence:
                answer = self._query(answer, wanted, uid)
            _UNSHARED[self.folder] = answer
        return answer

    def _query(self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int) -> SharedAnswer:
        now = self._clock()
        calls = [*answer.recent_calls(now), now]
        pause_s = PERIOD_S + random.uniform(0, JITTER_S)
        made = replace(
            answer, sequence=answer.sequence + 1, calls=calls, next_at=now + pause_s, ends=dict(answer.ends)
        )
        try:
            found = self.scheduler.survey(uid)
        except SchedulerError as error:
            made.failures += 1
            made.complaint = str(error)
            made.next_at = now + min(MAX_BACKOFF_S, pause_s * 2**made.failures)
            return made
        made.failures, made.complaint, made.asked_at = 0, "", now
        made.accounts = answer.accounts | {str(uid): list(found.values())}
        made.note_ends(found)
        forgotten = [
            job_id
            for job_id, when in wanted.items()
            if when < now - YOUNG_S
            and not made.find(uid, job_id)
            and now - made.unknown.get(job_id, 0.0) > ACCOUNTING_RETRY_S
        ]
        if forgotten and len(calls) < CALLS_PER_MINUTE:
            made.calls = [*calls, now]
            past = self.scheduler.past(forgotten)
            made.note_ends(past)
            unknown = made.unknown | {job_id: now for job_id in forgotten if job_id not in past}
            made.unknown = {
                job_id: when for job_id, when in unknown.items() if now - when < ACCOUNTING_RETRY_S
            }
        return made

    def _result(self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int) -> SchedulerAnswer:
        states = {}
        for job_id, when in wanted.items():
            state = answer.find(uid, job_id)
            if state is None and str(uid) in answer.accounts and 0 < when < answer.asked_at - YOUNG_S:
                state = JobState(job_id, State.UNKNOWN, NOT_LISTED, "does not list the job any more")
            elif state is None and when >= max(answer.asked_at - YOUNG_S, self._clock() - RETRY_S):
                state = JobState(job_id, State.PENDING)  # submitted and accepted a moment ago
            states[job_id] = state or JobState(job_id, State.UNKNOWN)
        return SchedulerAnswer(states, answer.asked_at, answer.complaint)


# Where sites and packages keep slurm.conf; the second is that of a configless cluster.
CONF_PLACES = ("/etc/slurm", "/run/slurm/conf", "/etc/slurm-llnl", "/opt/slurm/etc", "/etc/opt/slurm")


def cluster_key() -> str:
    """Return a file name for the cluster that commands talk to; several may share a home directory."""
    where = cluster_name() or socket.gethostname()
    conf = os.environ.get("SLURM_CONF") or f"{CONF_PLACES[0]}/slurm.conf"
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', where)[:40]}-{hashlib.sha256(conf.encode()).hexdigest()[:8]}"


def cluster_name() -> str:
    """Return what Slurm calls the cluster that commands talk to; empty where neither files nor Slurm tell."""
    own = os.environ.get("SLURM_CONF")
    for path in [Path(own)] if own else [Path(place) / "slurm.conf" for place in CONF_PLACES]:
        with contextlib.suppress(OSError):
            if name := _cluster_name_in(path.read_text(errors="replace")):
                return name
    # A job's own environment; and of a login node without files, where slurmctld hands out the configuration.
    return os.environ.get("SLURM_CLUSTER_NAME", "").lower() or _asked_cluster_name(shutil.which("scontrol"))


@cache
def _asked_cluster_name(scontrol: str | None) -> str:
    """Return what slurmctld calls its cluster, asked once per process; empty where it can't be asked."""
    if scontrol is None:
        return ""
    try:
        return _cluster_name_in(slurm.output(["scontrol", "show", "config"]))
    except SchedulerError:
        return ""


def _cluster_name_in(text: str) -> str:
    named = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return named[1].lower() if named else ""
