"""One attempt from its events: its roles, how often each was started, and why each incarnation exited."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_rl.core.records import Event, EventKind, LineageRecord, ProcessFile, TrialState
from hpc_rl.core.trial import Attempt
from hpc_rl.status.formatting import format_duration, format_time

ROLE_ORDER = {"supervisor": 0, "trainer": 1, "rollout": 2, "server": 3, "environment": 4}
STOPPING_EVENTS = (EventKind.STOPPING, EventKind.FAILING, EventKind.ABANDONING)
EXIT_EVENTS = (EventKind.EXITED, EventKind.ENDED)


@dataclass
class IncarnationExit:
    incarnation: int
    code: int | None
    reason: str
    time: float | None


@dataclass
class RoleStatus:
    """One replica of a role over an attempt. `incarnation` is the newest, counted from 0."""

    role: str
    index: int
    incarnation: int
    running: bool
    ends: list[IncarnationExit] = field(default_factory=list)
    gave_up: str = ""  # why it is not started again
    restarting: str = ""  # why it is about to be started again
    started: float | None = None  # newest incarnation, Unix seconds

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass
class NodeSilence:
    """When a node did not answer the supervisor, in Unix seconds; `until` is None while it lasts."""

    node: str
    since: float
    until: float | None = None
    cut_off: bool = False  # it is the node of the supervisor, which no other node answered

    def text(self, live: bool) -> str:
        """Return a sentence for people; `live`: the attempt still runs."""
        if self.until is not None:
            lasted = format_duration(self.until - self.since)
            did = "was cut off from the other nodes" if self.cut_off else "did not answer"
            return f"{self.node} {did} for {lasted}, from {format_time(self.since)}"
        lasts = f", for {format_duration(max(0.0, time.time() - self.since))} so far" if live else ""
        has = "has been cut off from the other nodes" if self.cut_off else "has not answered"
        return f"{self.node} {has} since {format_time(self.since)}{lasts}"


@dataclass
class AttemptStatus:
    """One start by the scheduler: running, pending, or how it ended."""

    id: str
    job_id: str
    state: TrialState
    cause: str  # why it ended; empty while it runs
    exit_code: int | None
    started: float | None  # Unix seconds
    ended: float | None
    lineages: list[LineageRecord]
    last_step: int | None  # newest logged step, whether or not a later lineage replaced it
    roles: list[RoleStatus]
    final_step: int | None = None  # where its last start of training ended
    saved_step: int | None = None  # newest checkpoint that it made or started from
    stopping: str = ""  # why it is about to stop
    silences: list[NodeSilence] = field(default_factory=list)  # of its nodes, oldest first


def list_roles(attempt: Attempt, events: Sequence[Event]) -> list[RoleStatus]:
    """Return the replicas that events name, or log files where events are missing; trainer first."""
    found: dict[tuple[str, int], RoleStatus] = {}
    for event in events:
        if event.role in ("", "supervisor"):
            continue
        if event.incarnation is not None:
            _find_role(found, event.unit, event.incarnation)
        if event.unit in found:
            _note_event(found[event.unit], event)
    for log in (log for log in list_log_files(attempt.dir) if log.role in ROLE_ORDER):
        _find_role(found, (log.role, log.index), log.incarnation)
    for role in found.values():
        role.running = all(end.incarnation != role.incarnation for end in role.ends)
    return sorted(found.values(), key=lambda role: (ROLE_ORDER.get(role.role, 9), role.role, role.index))


def list_silences(events: Sequence[Event]) -> list[NodeSilence]:
    """Return when nodes of an attempt did not answer, oldest first."""
    found: list[NodeSilence] = []
    for event in events:
        if event.time is None:
            continue
        if event.kind in (EventKind.NODE_SILENT, EventKind.NODE_CUT_OFF):
            cut_off = event.kind is EventKind.NODE_CUT_OFF
            found.append(NodeSilence(event.node, event.time - (event.silent_s or 0.0), cut_off=cut_off))
        elif event.kind is EventKind.NODE_ANSWERS:
            for one in found:
                if one.node == event.node and one.until is None:
                    one.until = event.time
    return found


def _find_role(
    found: dict[tuple[str, int], RoleStatus], unit: tuple[str, int], incarnation: int
) -> RoleStatus:
    role = found.setdefault(unit, RoleStatus(*unit, incarnation, running=True))
    role.incarnation = max(role.incarnation, incarnation)
    return role


def _note_event(role: RoleStatus, event: Event) -> None:
    if event.kind is EventKind.GAVE_UP:
        role.gave_up, role.restarting = event.reason or "it exited too often", ""
    elif event.kind is EventKind.RESTARTING:
        role.restarting = event.reason or "it exited"
    elif event.kind is EventKind.STARTED:
        role.started = event.time
        role.restarting = role.gave_up = ""
    elif event.kind in EXIT_EVENTS and (incarnation := event.incarnation) is not None:
        known = [end.incarnation for end in role.ends]
        if incarnation not in known:
            role.ends.append(IncarnationExit(incarnation, event.code, event.reason, event.time))


def list_log_files(attempt_dir: Path) -> list[ProcessFile]:
    """Return the role logs of an attempt, trainer first, older incarnations first."""
    found = [log for path in attempt_dir.glob("logs/*.log") if (log := ProcessFile.parse(path))]
    return sorted(
        found,
        key=lambda log: (ROLE_ORDER.get(log.role, 9), log.role, log.index, log.incarnation, log.rank or 0),
    )
