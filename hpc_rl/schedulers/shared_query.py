"""Polling a scheduler that many people share: one query for all jobs of an account, kept in a file that every command reads.

However many `status` and `--follow` run, on however many login nodes that share the home directory, they ask together at
most CALLS_PER_MINUTE times a minute, and every PERIOD_S seconds while somebody watches. No lock: the next query is the
right of whoever creates its claim file, whose name follows from the last answer; one that dies before it answers loses its
right after RETRY_S. Where the state directory can't be written, each process keeps to the same times by itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpc_rl.errors import SchedulerError
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.trial import create_exclusive, read_json, state_home, write_json

logger = logging.getLogger(__name__)

PERIOD_S = 20.0  # between two queries while somebody watches
JITTER_S = 4.0
SOON_S = 5.0  # between two queries when a job is younger than the last one, or a death is to be confirmed
CALLS_PER_MINUTE = 4
RETRY_S = 30.0
MAX_BACKOFF_S = 300.0
FORGOTTEN_AGAIN_S = 600.0  # between two questions to accounting about a job that it did not know
YOUNG_S = 5.0  # a job may be so much older than a query that does not list it
KEPT_ENDS = 2000
GONE = "GONE"  # native word of a job that is in nobody's list any more


class Pollable(Protocol):
    """A scheduler that can be asked for all jobs of an account at once."""

    def survey(self, uid: int) -> dict[str, JobState]: ...

    def past(self, job_ids: list[str]) -> dict[str, JobState]: ...


@dataclass(frozen=True)
class Seen:
    """What is known of some jobs. `asked_at` is Unix seconds, 0 for never; `complaint` is the scheduler's, of the last query."""

    states: dict[str, JobState]
    asked_at: float = 0.0
    complaint: str = ""


@dataclass
class Board:
    """What the last query found, as the file has it. Times are Unix seconds."""

    sequence: int = 0
    asked_at: float = 0.0  # of the last answer
    next_at: float = 0.0
    failures: int = 0
    complaint: str = ""
    calls: list[float] = field(default_factory=list)  # of the last minute
    accounts: dict[str, list[list[Any]]] = field(default_factory=dict)  # uid -> rows of JobState
    ends: dict[str, list[Any]] = field(
        default_factory=dict
    )  # job id -> its row, of jobs that were seen to be over
    unknown: dict[str, float] = field(default_factory=dict)  # job id -> when accounting did not know it

    @classmethod
    def read(cls, path: Path) -> Board:
        data = read_json(path)
        try:
            return cls(**data) if isinstance(data, dict) else cls()
        except TypeError:  # of another version
            return cls()


class Poller:
    """The shared view of one scheduler.

    Args:
        scheduler: Whom to ask.
        folder: Where the answer is shared; by default in the user's state directory, by cluster.
        clock: Unix seconds.
    """

    def __init__(
        self, scheduler: Pollable, folder: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.scheduler = scheduler
        self.folder = folder or state_home() / "polling" / cluster_key()
        self._clock = clock
        self._own: Board | None = None  # where the folder can't be written

    def look(
        self, wanted: Mapping[str, float], uid: int, newer_than: float = 0.0, patience_s: float = 0.0
    ) -> Seen:
        """What is known of these jobs, asking if it is time.

        Args:
            wanted: Job id -> when it was submitted, Unix seconds (0 where that is not known).
            uid: Account that they belong to.
            newer_than: An answer from before this moment is of little use (asked for again soon, within the budget).
            patience_s: So long wait for a query of another process where nothing at all is known of the jobs.
        """
        board = self._board()
        if self._is_time(board, wanted, uid, newer_than):
            board = self._ask(board, wanted, uid)
        deadline = time.monotonic() + patience_s
        while not self._covers(board, wanted, uid) and time.monotonic() < deadline:
            time.sleep(0.1)
            board = self._board()
        return self._seen(board, wanted, uid)

    def _board(self) -> Board:
        return self._own or Board.read(self.folder / "answer.json")

    def _covers(self, board: Board, wanted: Mapping[str, float], uid: int) -> bool:
        """Whether the last answer could know these jobs."""
        if str(uid) not in board.accounts:
            return False
        return all(
            when < board.asked_at - YOUNG_S or self._known(board, uid, job_id)
            for job_id, when in wanted.items()
        )

    def _is_time(self, board: Board, wanted: Mapping[str, float], uid: int, newer_than: float) -> bool:
        now = self._clock()
        recent = [when for when in board.calls if now - 60 < when <= now]
        if len(recent) >= CALLS_PER_MINUTE:
            return False
        if now >= board.next_at or board.asked_at > now + 60:  # or somebody's clock was far ahead
            return True
        urgent = board.asked_at < newer_than or not self._covers(board, wanted, uid)
        return urgent and not board.failures and now >= max(recent, default=0.0) + SOON_S

    def _ask(self, board: Board, wanted: Mapping[str, float], uid: int) -> Board:
        """Make the next query if it is ours to make; returns what is known then."""
        now = self._clock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            claim = (
                self.folder / f"claim-{board.sequence + 1}.{max(0, int((now - board.next_at) // RETRY_S))}"
            )
            if not create_exclusive(claim, f"{socket.gethostname()} {os.getpid()}\n"):
                return board
            current = self._board()
            if current.sequence != board.sequence:  # answered between our look and our claim
                return current
            board = self._query(board, wanted, uid)
            write_json(self.folder / "answer.json", asdict(board), mode=0o600)
            self._sweep(board.sequence)
        except OSError as error:
            logger.debug("the answer can't be shared (%s): asking for this process alone", error)
            if self._own is None or self._own.sequence == board.sequence:
                board = self._query(board, wanted, uid)
            self._own = board
        return board

    def _query(self, board: Board, wanted: Mapping[str, float], uid: int) -> Board:
        now = self._clock()
        calls = [when for when in board.calls if now - 60 < when <= now] + [now]
        pause_s = PERIOD_S + random.uniform(0, JITTER_S)
        made = Board(
            **asdict(board) | {"sequence": board.sequence + 1, "calls": calls, "next_at": now + pause_s}
        )
        try:
            found = self.scheduler.survey(uid)
        except SchedulerError as error:
            made.failures += 1
            made.complaint = str(error)
            made.next_at = now + min(MAX_BACKOFF_S, pause_s * 2**made.failures)
            return made
        made.failures, made.complaint, made.asked_at = 0, "", now
        made.accounts = board.accounts | {str(uid): [_row(state) for state in found.values()]}
        self._note_ends(made, found)
        forgotten = [
            job_id
            for job_id, when in wanted.items()
            if when < now - YOUNG_S
            and not self._known(made, uid, job_id)
            and now - made.unknown.get(job_id, 0.0) > FORGOTTEN_AGAIN_S
        ]
        if forgotten and len(calls) < CALLS_PER_MINUTE:
            made.calls = [*calls, now]
            known = self.scheduler.past(forgotten)
            self._note_ends(made, known)
            made.unknown |= dict.fromkeys((job_id for job_id in forgotten if job_id not in known), now)
            made.unknown = {
                job_id: when for job_id, when in made.unknown.items() if now - when < FORGOTTEN_AGAIN_S
            }
        return made

    @staticmethod
    def _note_ends(board: Board, found: Mapping[str, JobState]) -> None:
        """Remember ends beyond the time for which the scheduler does; one that lives (again) is no end."""
        for job_id, state in found.items():
            board.ends.pop(job_id, None)
            if not state.state.alive and state.state is not State.UNKNOWN:
                board.ends[job_id] = _row(state)
        board.ends = dict(list(board.ends.items())[-KEPT_ENDS:])

    @staticmethod
    def _known(board: Board, uid: int, job_id: str) -> JobState | None:
        return find({row[0]: row for row in board.accounts.get(str(uid), [])}, job_id) or find(
            board.ends, job_id
        )

    def _seen(self, board: Board, wanted: Mapping[str, float], uid: int) -> Seen:
        states = {}
        for job_id, when in wanted.items():
            state = self._known(board, uid, job_id)
            if state is None and str(uid) in board.accounts and 0 < when < board.asked_at - YOUNG_S:
                state = JobState(job_id, State.UNKNOWN, GONE, "does not list the job any more")
            elif state is None and when >= max(board.asked_at - YOUNG_S, self._clock() - RETRY_S):
                state = JobState(job_id, State.PENDING)  # handed in a moment ago, and accepted
            states[job_id] = state or JobState(job_id, State.UNKNOWN)
        return Seen(states, board.asked_at, board.complaint)

    def _sweep(self, sequence: int) -> None:
        """Remove the claims of queries that are long answered."""
        for path in self.folder.glob("claim-*"):
            number = re.match(r"claim-(\d+)\.", path.name)
            if number and int(number[1]) < sequence - 2:
                path.unlink(missing_ok=True)


def find(rows: Mapping[str, list[Any]], job_id: str) -> JobState | None:
    """The state of a job: its own row, that of a heterogeneous job's leader, or what the tasks of an array amount to."""
    for name in (job_id, f"{job_id}+0"):
        if name in rows:
            return _state(rows[name])
    tasks = [_state(row) for name, row in rows.items() if name.startswith(f"{job_id}_")]
    if not tasks:
        return None
    by_weight = [
        State.RUNNING,
        State.PENDING,
        State.FAILED,
        State.OUT_OF_MEMORY,
        State.NODE_FAIL,
        State.TIMEOUT,
    ]
    return min(
        tasks, key=lambda task: by_weight.index(task.state) if task.state in by_weight else len(by_weight)
    )


def _row(state: JobState) -> list[Any]:
    return [
        state.job_id,
        state.state.value,
        state.native,
        state.reason,
        state.end_time,
        state.nodes,
        state.start_time,
    ]


def _state(row: list[Any]) -> JobState:
    return JobState(row[0], State(row[1]), *row[2:])


def cluster_key() -> str:
    """A name for the cluster that commands here talk to: two clusters may share a home directory and number their jobs alike."""
    where = cluster_name() or socket.gethostname()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', where)[:40]}-{hashlib.sha256(_conf().encode()).hexdigest()[:8]}"


def cluster_name() -> str:
    """What Slurm calls the cluster that commands here talk to; empty where its configuration can't be read."""
    try:
        text = Path(_conf()).read_text(errors="replace")
    except OSError:
        return ""
    named = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return named[1].lower() if named else ""


def _conf() -> str:
    return os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf"
