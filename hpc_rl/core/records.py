"""Records: JSON files with events that the processes of a trial report.

Each record is a dataclass with one tolerant parser. Code decides by enums and numbers; `reason` is only for
people. Unknown fields, from later versions, are ignored; a field of the wrong type counts as missing.

    jobs/<job id>.json          JobRecord          submit, or the job script if it was submitted by hand
    jobs/<job id>.state         JobStateLine       the job script, one JSON object a line
    jobs/<job id>.next-<n>      SuccessorRecord    the job that continues a submission
    forked_from.json            ForkRecord         `hpc-rl fork`
    intent/drain-<attempt>.json DrainIntent        the job script or a supervisor
    lineages/<n>.json           LineageRecord      the trainer
    done.json                   DoneRecord         the supervisor
    attempts/<id>/
        events.jsonl            Event              the supervisor, one JSON object a line
        ended.json              EndedRecord        the supervisor
        exits/                  ExitRecord         every rank
        processes/              ProcessRecord      every rank, and the supervisor for its children
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import socket
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hpc_rl.core.errors import FailureClass, JobEvent, Stale, StopCause
from hpc_rl.core.files import JsonLines
from hpc_rl.core.log import redact
from hpc_rl.core.proc import find_start_ticks
from hpc_rl.core.trial import Attempt, Trial, list_entries, load_json


class TrialState(enum.StrEnum):
    """States of trials and attempts in `hpc-rl status`."""

    RENDERED = "rendered"
    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    FAILED = "failed"
    KILLED = "killed"
    UNKNOWN = "unknown"

    @property
    def is_over(self) -> bool:
        """Whether the trial has ended, or was never submitted."""
        return self not in (TrialState.PENDING, TrialState.RUNNING, TrialState.STOPPING, TrialState.UNKNOWN)


class BatchWait(enum.StrEnum):
    """Reasons why the ready groups of environments don't form a batch."""

    SEQUENCES = "sequences"  # too few sequences
    SHARE = "share"  # too few sequences of an environment with a share of each batch
    COMBINATION = "combination"  # the sizes of the groups don't add up to a batch
    SIZES = "sizes"  # groups of these sizes can never add up to a batch


GIVEN_BACK = (JobEvent.FIRST_NODE_LOST, JobEvent.SCRIPT_KILLED)


class EventKind(enum.StrEnum):
    """Events of the supervisor in `events.jsonl`."""

    SUPERVISOR_STARTED = "supervisor_started"
    LEFT_BEHIND = "left_behind"  # a process of an earlier start can't be killed
    END_TIME = "end_time"  # the scheduler has changed the end time of the job
    STARTED = "started"
    EXITED = "exited"
    RESTARTING = "restarting"
    GAVE_UP = "gave_up"
    REPLACING = "replacing"  # another job is submitted for the servers of a lost node
    PROGRESS = "progress"  # a new generation
    NETWORK_UNCHECKED = "network_unchecked"  # the network check between the nodes failed to run
    NODE_SILENT = "node_silent"  # a node of the job no longer answers
    NODE_CUT_OFF = "node_cut_off"  # the supervisor's node no longer reaches any other node
    NODE_ANSWERS = "node_answers"  # a silent node answers again
    HUNG = "hung"
    UNPLACED = "unplaced"  # the scheduler does not start the processes of a unit
    BAD_NODES = "bad_nodes"
    REMINDED = "reminded"  # a warning of the scheduler, too early to stop
    STOPPING = "stopping"
    STOP_REPEATED = "stop_repeated"
    FAILING = "failing"
    ABANDONING = "abandoning"
    KILLING = "killing"
    ENDED = "ended"


def _convert(value: Any, hint: Any) -> Any:
    """Return a JSON value as the type of a field. Raises ValueError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # <type> | None
        return None if value is None else _convert(value, arguments[0])
    if origin in (tuple, list) and isinstance(value, list):
        return origin(_convert(one, arguments[0]) for one in value)
    if origin is dict and isinstance(value, dict):
        return {key: _convert(one, arguments[1]) for key, one in value.items()}
    if isinstance(hint, enum.EnumType):
        return hint(value)
    if isinstance(hint, type) and issubclass(hint, JsonRecord):
        if (record := hint.parse(value)) is None:
            raise ValueError(f"expected {hint}, got {value!r}")
        return record
    if hint is Any:
        return value
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise ValueError(f"expected {hint}, got {value!r}")
    return value


class JsonRecord:
    """A dataclass that is stored as a JSON object."""

    STRICT: typing.ClassVar[bool] = False  # a field of the wrong type makes the whole record invalid

    @classmethod
    @functools.cache
    def _fields(cls) -> list[tuple[str, str, Any]]:
        hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)  # type: ignore[arg-type]
        return [(one.name, one.metadata.get("key", one.name), hints[one.name]) for one in fields]

    @classmethod
    def parse(cls, data: Any) -> Self | None:
        """Return the record in parsed JSON, or None if a required field is missing or of another type."""
        if not isinstance(data, dict):
            return None
        values = {}
        for name, key, hint in cls._fields():
            try:
                values[name] = _convert(data[key], hint)
            except (KeyError, ValueError, OverflowError):
                if cls.STRICT and key in data:
                    return None
        try:
            return cls(**values)
        except TypeError:  # a field without a default is missing
            return None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the record in a file, or None if it is missing, incomplete or invalid."""
        return cls.parse(load_json(path))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object. None fields are left out; secrets in `reason` are hidden."""
        pairs = [(key, _to_plain(getattr(self, name))) for name, key, _ in self._fields()]
        found = {key: value for key, value in pairs if value is not None}
        return found | {"reason": redact(found["reason"])} if "reason" in found else found


def _to_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_plain(one) for one in value]
    return value.to_json() if isinstance(value, JsonRecord) else value


@dataclass(frozen=True, kw_only=True)
class BatchWaitRecord(JsonRecord):
    """Reason why the next batch waits."""

    kind: BatchWait
    ready: int  # sequences
    needed: int  # sequences of a batch, or of an environment's share of it
    sizes: list[int] = field(default_factory=list)  # of the ready groups
    parts: int = 0  # sequences of incomplete groups
    environment: str = ""  # with the missing share


@dataclass(frozen=True, kw_only=True)
class JobRecord(JsonRecord):
    """One submission of a trial, or of the servers that serve one (`kind` is SERVERS then)."""

    SERVERS: typing.ClassVar[str] = "servers"

    job_id: str
    kind: str = ""
    scheduler: str = ""
    cluster: str = ""  # Slurm's name; empty if unknown
    time: float = 0.0  # Unix seconds
    command: tuple[str, ...] = ()
    tag: str = ""
    start_mode: str = ""  # recover.mode of its first start
    from_step: int | None = None  # `hpc-rl recover --from`
    new_batches: bool = False  # its first start sets later batches aside and issues their prompts again
    lineage_parent: str | None = None  # submission that `hpc-rl recover` continues
    changed: tuple[str, ...] = ()  # options that differ from the previous submission
    native_id: str = ""  # Slurm's id, where it differs: `7_3` of task 3 of an array of trials
    serves: str = ""  # the submission that these servers serve
    num_tasks: int = 0  # of servers
    first_task: int = 0  # number of the first one
    replaces: str = ""  # the attempt whose lost servers these are

    @classmethod
    def read(cls, path: Path) -> JobRecord | None:
        """Return the record, with the id from the file name."""
        data = load_json(path)
        return cls.parse(data | {"job_id": path.stem}) if isinstance(data, dict) else None


@dataclass(frozen=True, kw_only=True)
class JobStateLine(JsonRecord):
    """One line of a job script. A job with a start but no end was killed, or still runs."""

    event: JobEvent
    time: float = 0.0  # Unix seconds
    restart: int = 0
    code: int | None = None
    reason: str = ""
    cause: StopCause | None = None  # why the job is not started again, or why it is requeued
    cancelled: bool = False  # ended by a signal or a cancel: Slurm may still start the job again
    successor: str = ""  # id of the new job, if a requeue submitted one
    host: str = ""
    pid: int = 0
    start_ticks: int = 0


def load_job_state(trial: Trial, job_id: str) -> list[JobStateLine]:
    """Return the lines of a job's script, oldest first.

    Lines of an earlier start after lines of a later start are dropped: its node was cut off.
    """
    lines: list[JobStateLine] = []
    for line in map(JobStateLine.parse, JsonLines(trial.job_state(job_id)).poll()):
        if line is not None and (not lines or line.restart >= lines[-1].restart):
            lines.append(line)
    return lines


@dataclass(frozen=True, kw_only=True)
class SuccessorRecord(JsonRecord):
    """The job that continues a submission as one of its starts."""

    job_id: str
    after: str = ""
    time: float = 0.0


def find_successors(trial: Trial, job_id: str) -> dict[int, str]:
    """Return the jobs that continued a submission: number of the start -> job id."""
    found = {}
    for path in sorted(trial.jobs.glob(f"{job_id}.next-*")):
        restart, record = path.name.rpartition("-")[2], SuccessorRecord.read(path)
        if restart.isdecimal() and record is not None and record.job_id:
            found[int(restart)] = record.job_id
    return found


def find_newest_job(trial: Trial, job_id: str) -> str:
    """Return the newest job id of a submission: the id of its last successor, or its own."""
    found = find_successors(trial, job_id)
    return found[max(found)] if found else job_id


@dataclass(frozen=True, kw_only=True)
class DrainIntent(JsonRecord):
    """A request to save and stop an attempt; it outlives a killed supervisor."""

    cause: StopCause
    reason: str = ""
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ForkRecord(JsonRecord):
    """The origin of a forked trial: a checkpoint, or published weights."""

    trial: str
    dir: str
    step: int
    version: str = ""
    command: tuple[str, ...] = ()
    only_weights: bool = False  # published weights, without the state of training


@dataclass(frozen=True, kw_only=True)
class DoneRecord(JsonRecord):
    """The trial reached its last step."""

    job_id: str
    attempt: str = ""
    time: float = 0.0
    freed_bytes: int = 0  # by removing the published weights


@dataclass(frozen=True, kw_only=True)
class LineageRecord(JsonRecord):
    """One start of training that reached the state it trains from."""

    STRICT = True

    lineage: int  # its number, from 0
    from_step: int  # step of the state that it started from; 0 for a fresh start
    from_lineage: int | None = None  # lineage that wrote this state; None for a fresh start
    attempt: str
    incarnation: int  # of the trainer
    submission: str = ""  # job id
    reason: str = ""  # why it started from there
    set_aside: tuple[int, ...] = ()  # steps of the generations that `--from` moved out of the way
    new_batches: bool = False  # the batches after `from_step` are set aside and their prompts issued again
    time: float = 0.0  # Unix seconds by the clock of its host


_LINEAGE_FILE = re.compile(r"(\d{4,})\.json")


def find_lineage_files(trial: Trial) -> dict[int, Path]:
    """Return the lineage records of a trial by their numbers, valid or not."""
    found = (
        (_LINEAGE_FILE.fullmatch(entry.name), Path(entry.path)) for entry in list_entries(trial.lineages)
    )
    return {int(match[1]): path for match, path in found if match}


def check_newest_lineage(trial: Trial, lineage: int) -> None:
    """Raise Stale if a later start of the trainer has begun: this one must no longer commit."""
    newest = max(find_lineage_files(trial), default=lineage)
    if newest > lineage:
        raise Stale(
            f"a later start of the trainer (lineage {newest}) has taken the place of this one (lineage "
            f"{lineage}), which ends"
        )


def load_lineages(trial: Trial) -> list[LineageRecord]:
    """Return the lineages of a trial, oldest first. Unreadable records are skipped.

    Raises OSError or TrialStateError if the folder itself is unreadable.
    """
    records = [
        (number, LineageRecord.read(path)) for number, path in sorted(find_lineage_files(trial).items())
    ]
    return [record for number, record in records if record is not None and record.lineage == number]


@dataclass(frozen=True, kw_only=True)
class Event(JsonRecord):
    """One line of `events.jsonl`. Which fields are set depends on the kind."""

    kind: EventKind = field(metadata={"key": "event"})
    time: float | None = None  # Unix seconds
    role: str = ""
    index: int = 0
    incarnation: int | None = None
    code: int | None = None
    reason: str = ""
    failure: FailureClass = field(default=FailureClass.UNKNOWN, metadata={"key": "class"})
    uses_retry: bool = field(default=False, metadata={"key": "failure"})  # it counts against recover.retries
    cause: StopCause | None = None  # of STOPPING
    step: int | None = None  # of PROGRESS
    ends_at: float | None = None  # of END_TIME, Unix seconds
    pause_s: float | None = None  # of RESTARTING and GAVE_UP
    node: str = ""  # of NODE_SILENT, NODE_CUT_OFF and NODE_ANSWERS
    silent_s: float | None = None  # since the node last answered

    @property
    def unit(self) -> tuple[str, int]:
        return self.role, self.index


class EventLog:
    """The events of an attempt, read incrementally. Torn lines and unknown kinds are skipped."""

    def __init__(self, attempt: Attempt) -> None:
        self.events: list[Event] = []
        self._file = JsonLines(attempt.events)

    def poll(self) -> list[Event]:
        new = self._file.poll()
        if len(new) == len(self._file.rows):  # also if the file was replaced
            self.events = []
        self.events += [event for event in map(Event.parse, new) if event is not None]
        return self.events


def load_events(attempt: Attempt) -> list[Event]:
    return EventLog(attempt).poll()


@dataclass(frozen=True, kw_only=True)
class EndedRecord(JsonRecord):
    """Why an attempt ended; missing if the supervisor was killed."""

    exit_code: int | None = None
    reason: str = ""
    cause: StopCause | None = None  # if the attempt was asked to stop
    time: float | None = None  # Unix seconds


@dataclass(frozen=True, kw_only=True)
class ExitRecord(JsonRecord):
    """How one process of a role ended, written by the process; srun's exit code is only a fallback."""

    code: int
    reason: str = ""
    failure: FailureClass = field(default=FailureClass.UNKNOWN, metadata={"key": "class"})
    final: bool = False  # another start would end the same way
    nodes: list[str] | None = None  # nodes to blame
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProcessRecord(JsonRecord):
    """One process of a trial; pid, kernel start time and host identify it."""

    pid: int
    host: str
    role: str = ""
    start_ticks: int | None = None
    rank: int = 0
    step: str = ""  # Slurm's number of its step
    node: str = ""  # Slurm's name of its node
    job_id: str = ""  # Slurm's

    @classmethod
    def of(cls, role: str, pid: int, rank: int = 0, **of_slurm: str) -> ProcessRecord:
        """Return the record of a process on this host."""
        ticks, host = find_start_ticks(pid), socket.gethostname()
        return cls(pid=pid, start_ticks=ticks, host=host, role=role, rank=rank, **of_slurm)


@dataclass(frozen=True)
class ProcessFile:
    """A file named after one process: a log, an exit record or a process record."""

    path: Path
    role: str
    index: int
    incarnation: int
    rank: int | None  # None for a file of all ranks
    by_client: bool  # written by the supervisor about a child (a rank or an srun)

    @classmethod
    def parse(cls, path: Path) -> ProcessFile | None:
        """Parse the name of a file; return None for other files."""
        match = _PROCESS_FILE.fullmatch(path.name)
        if match is None:
            return None
        client, role, index, incarnation, rank = match.groups()
        return cls(path, role, int(index), int(incarnation), int(rank) if rank else None, bool(client))


_PROCESS_FILE = re.compile(r"(client-)?([a-z]+)-(\d+)\.(\d+)(?:-rank(\d+))?\.(?:json|log)")


def flatten(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested options by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        inner = isinstance(value, Mapping) and value
        found |= flatten(value, f"{above}{name}.") if inner else {f"{above}{name}": value}
    return found
