"""Shared queries of a scheduler: one query for all jobs of an account, cached in a file for all commands.

All commands of an account together, on all login nodes with the same home directory, ask at most
CALLS_PER_MINUTE times a minute, and every PERIOD_S seconds while a command watches. No lock is needed: the
next query belongs to the process that creates its claim file, named after the last answer; a process that
dies before it answers loses its claim after RETRY_S. If the state directory is not writable, each process
keeps to these limits by itself.
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
from hpc_rl.core.trial import create_exclusive, find_state_home, write_json
from hpc_rl.schedulers import slurm
from hpc_rl.schedulers.base import JobState, SchedulerAnswer, State
from hpc_rl.schedulers.slurm_states import has_waiting_task, summarize_parts

logger = logging.getLogger(__name__)

PERIOD_S = 20.0  # between two queries while a command watches
JITTER_S = 4.0
SOON_S = 5.0  # between two queries if a job is younger than the last one, or to confirm an end
CALLS_PER_MINUTE = 4
RETRY_S = 30.0
MAX_BACKOFF_S = 300.0
ACCOUNTING_RETRY_S = 600.0  # between two queries of accounting about an unknown job
YOUNG_S = 5.0  # a query may miss a job that was submitted within this time before it
MAX_KEPT_ENDS = 2000
NOT_LISTED = "NOT_LISTED"  # native state of a job in neither queue nor accounting
CLOCK_SKEW_S = 60.0  # times further in the future come from a wrong clock
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
    ends: dict[str, JobState] = field(default_factory=dict)  # of ended jobs, by id
    unknown: dict[str, float] = field(default_factory=dict)  # job id -> time when accounting did not know it

    def list_recent_calls(self, now: float) -> list[float]:
        return [when for when in self.calls if now - 60 < when <= now]

    def find(self, uid: int, job_id: str) -> JobState | None:
        parts = (f"{job_id}_", f"{job_id}+")
        for known in (self.accounts.get(str(uid), []), list(self.ends.values())):
            if found := [one for one in known if one.job_id == job_id or one.job_id.startswith(parts)]:
                return summarize_parts(found)[job_id]
            for one in known:
                if has_waiting_task(one.job_id, job_id):
                    return replace(one, job_id=job_id)
        return None

    def note_ends(self, found: Mapping[str, JobState]) -> None:
        """Remember ends longer than the scheduler does, until the job lives again."""
        for job_id, state in found.items():
            self.ends.pop(job_id, None)
            if not state.state.alive and state.state is not State.UNKNOWN:
                self.ends[job_id] = state
        self.ends = dict(list(self.ends.items())[-MAX_KEPT_ENDS:])


# Answers of this process, by unwritable folder.
_UNSHARED: dict[Path, SharedAnswer] = {}


class Poller:
    """The shared view of one scheduler, stored in the user's state directory."""

    def __init__(
        self,
        scheduler: slurm.SlurmScheduler,
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.scheduler = scheduler
        self.folder = folder or find_state_home() / "queries" / make_cluster_key()
        self._clock = clock

    def look(
        self, wanted: Mapping[str, float], uid: int, newer_than: float = 0.0, patience_s: float = 0.0
    ) -> SchedulerAnswer:
        """Return the states of an account's jobs, after a query if one is due.

        Args:
            wanted: Job id -> time of submission, Unix seconds (0 if unknown).
            uid: The account.
            newer_than: If the answer is older, the next query may come soon, within the budget.
            patience_s: Time to wait for the query of another process if the jobs are unknown.
        """
        answer = self._wrap_answer()
        if self._is_time(answer, wanted, uid, newer_than):
            answer = self._ask(answer, wanted, uid)
        deadline = time.monotonic() + patience_s
        while not self._is_covered(answer, wanted, uid) and time.monotonic() < deadline:
            time.sleep(WAIT_POLL_S)
            answer = self._wrap_answer()
        return self._find_state(answer, wanted, uid)

    def _wrap_answer(self) -> SharedAnswer:
        shared = _UNSHARED.get(self.folder) or SharedAnswer.read(self.folder / "answer.json")
        return shared or SharedAnswer()

    def _is_covered(self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int) -> bool:
        if str(uid) not in answer.accounts:
            return False
        return all(
            when < answer.asked_at - YOUNG_S or answer.find(uid, job_id) for job_id, when in wanted.items()
        )

    def _is_time(
        self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int, newer_than: float
    ) -> bool:
        now = self._clock()
        recent = answer.list_recent_calls(now)
        if len(recent) >= CALLS_PER_MINUTE:
            return False
        if now >= answer.next_at or answer.asked_at > now + CLOCK_SKEW_S:
            return True
        is_urgent = answer.asked_at < newer_than or not self._is_covered(answer, wanted, uid)
        return is_urgent and not answer.failures and now >= max(recent, default=0.0) + SOON_S

    def _ask(self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int) -> SharedAnswer:
        """Make the next query if this process gets its claim; return the newest answer."""
        now = self._clock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            num_lost = max(0, int((now - answer.next_at) // RETRY_S))
            claim = self.folder / f"claim-{answer.sequence + 1}.{num_lost}"
            if not create_exclusive(claim, f"{socket.gethostname()} {os.getpid()}\n"):
                return answer
            current = self._wrap_answer()
            if current.sequence != answer.sequence:  # answered between our read and our claim
                return current
            answer = self._query(answer, wanted, uid)
            write_json(self.folder / "answer.json", asdict(answer), mode=0o600)
            _UNSHARED.pop(self.folder, None)
            for path in self.folder.glob("claim-*"):  # of old queries
                number = re.match(r"claim-(\d+)\.", path.name)
                if number and int(number[1]) < answer.sequence - 2:
                    path.unlink(missing_ok=True)
        except OSError as error:
            logger.debug("the answer can't be shared (%s): this process asks by itself", error)
            if self._wrap_answer().sequence == answer.sequence:
                answer = self._query(answer, wanted, uid)
            _UNSHARED[self.folder] = answer
        return answer

    def _query(self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int) -> SharedAnswer:
        now = self._clock()
        calls = [*answer.list_recent_calls(now), now]
        pause_s = PERIOD_S + random.uniform(0, JITTER_S)
        made = replace(
            answer, sequence=answer.sequence + 1, calls=calls, next_at=now + pause_s, ends=dict(answer.ends)
        )
        try:
            found = self.scheduler.query_account(uid)
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
            past = self.scheduler.query_past(forgotten)
            made.note_ends(past)
            unknown = made.unknown | {job_id: now for job_id in forgotten if job_id not in past}
            made.unknown = {
                job_id: when for job_id, when in unknown.items() if now - when < ACCOUNTING_RETRY_S
            }
        return made

    def _find_state(self, answer: SharedAnswer, wanted: Mapping[str, float], uid: int) -> SchedulerAnswer:
        states = {}
        for job_id, when in wanted.items():
            state = answer.find(uid, job_id)
            if state is None and str(uid) in answer.accounts and 0 < when < answer.asked_at - YOUNG_S:
                state = JobState(job_id, State.UNKNOWN, NOT_LISTED, "does not list the job any more")
            elif state is None and when >= max(answer.asked_at - YOUNG_S, self._clock() - RETRY_S):
                state = JobState(job_id, State.PENDING)  # just submitted
            states[job_id] = state or JobState(job_id, State.UNKNOWN)
        return SchedulerAnswer(states, answer.asked_at, answer.complaint)


# Places of slurm.conf at sites and in packages; the second is for a configless cluster.
CONF_PLACES = ("/etc/slurm", "/run/slurm/conf", "/etc/slurm-llnl", "/opt/slurm/etc", "/etc/opt/slurm")


def make_cluster_key() -> str:
    """Return a file name for the cluster of Slurm's commands; clusters may share a home directory."""
    where = find_cluster_name() or socket.gethostname()
    conf = os.environ.get("SLURM_CONF") or f"{CONF_PLACES[0]}/slurm.conf"
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', where)[:40]}-{hashlib.sha256(conf.encode()).hexdigest()[:8]}"


def find_cluster_name() -> str:
    """Return Slurm's name of the cluster of its commands; empty if neither files nor Slurm tell it."""
    own = os.environ.get("SLURM_CONF")
    for path in [Path(own)] if own else [Path(place) / "slurm.conf" for place in CONF_PLACES]:
        with contextlib.suppress(OSError):
            if name := _parse_cluster_name(path.read_text(errors="replace")):
                return name
    # From a job's environment; on a login node without files, from slurmctld.
    return os.environ.get("SLURM_CLUSTER_NAME", "").lower() or _query_cluster_name(shutil.which("scontrol"))


@cache
def _query_cluster_name(scontrol: str | None) -> str:
    """Return slurmctld's name of its cluster, queried once per process; empty if it does not answer."""
    if scontrol is None:
        return ""
    try:
        return _parse_cluster_name(slurm.query_output(["scontrol", "show", "config"]))
    except SchedulerError:
        return ""


def _parse_cluster_name(text: str) -> str:
    named = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return named[1].lower() if named else ""
