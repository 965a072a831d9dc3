"""The roles of one attempt as its events tell them: how often each was started, and why each incarnation ended."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from hpc_rl.files import JsonLines, Row
from hpc_rl.trial import Attempt, Trial

LOG_NAME = re.compile(r"(?P<role>[a-z]+)-(?P<index>\d+)\.(?P<incarnation>\d+)(-rank(?P<rank>\d+))?\.log")
ROLE_ORDER = {"supervisor": 0, "trainer": 1, "rollout": 2, "server": 3}


@dataclass
class IncarnationExit:
    """Why one incarnation ended."""

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
    restarting: str = ""  # why it is about to be
    started: float | None = None  # of the newest incarnation, Unix seconds

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def num_restarts(self) -> int:
        return self.incarnation


class EventFiles:
    """The events of every attempt, read on as they grow."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._files: dict[str, JsonLines] = {}

    def rows(self, attempt: str) -> list[Row]:
        file = self._files.setdefault(attempt, JsonLines(self.trial.attempt(attempt).events))
        file.poll()
        return file.rows


def roles_of(attempt: Attempt, events: list[Row]) -> list[RoleStatus]:
    """The replicas that the events (and the log files, where events are missing) name, trainer first."""
    found: dict[tuple[str, int], RoleStatus] = {}
    for row in events:
        if not isinstance(row.get("role"), str) or row["role"] == "supervisor":
            continue
        _note_standing(found, row)
        if not isinstance(row.get("incarnation"), int):
            continue
        index = row["index"] if isinstance(row.get("index"), int) else 0
        story = found.setdefault(
            (row["role"], index), RoleStatus(row["role"], index, row["incarnation"], running=True)
        )
        story.incarnation = max(story.incarnation, row["incarnation"])
        if row.get("event") == "started":
            story.started = row["time"] if isinstance(row.get("time"), (int, float)) else None
            story.restarting = story.gave_up = ""
        if is_end(row):
            _note_end(story, row)
    for log in log_files(attempt.dir):
        story = found.setdefault(
            (log.role, log.index), RoleStatus(log.role, log.index, log.incarnation, running=True)
        )
        story.incarnation = max(story.incarnation, log.incarnation)
    for story in found.values():
        story.running = all(end.incarnation != story.incarnation for end in story.ends)
    return sorted(found.values(), key=lambda story: (ROLE_ORDER.get(story.role, 9), story.role, story.index))


def is_end(row: Row) -> bool:
    """Whether an event row tells the end of an incarnation."""
    return str(row.get("event", "")).startswith(("end", "exit"))


def _note_standing(found: dict[tuple[str, int], RoleStatus], row: Row) -> None:
    """That a replica is given up, or waits to be started again."""
    story = found.get((row["role"], row["index"] if isinstance(row.get("index"), int) else 0))
    if story is not None and row.get("event") == "gave_up":
        story.gave_up, story.restarting = str(row.get("reason") or "it ended too often"), ""
    elif story is not None and row.get("event") == "restarting":
        story.restarting = str(row.get("reason") or "it ended")


def _note_end(story: RoleStatus, row: Row) -> None:
    if any(end.incarnation == row["incarnation"] for end in story.ends):
        return
    code = row.get("code") if isinstance(row.get("code"), int) else None
    when = row.get("time") if isinstance(row.get("time"), (int, float)) else None
    story.ends.append(IncarnationExit(row["incarnation"], code, str(row.get("reason") or ""), when))


@dataclass(frozen=True)
class LogFile:
    """One log of a role; `rank` is None for what all ranks share."""

    path: Path
    role: str
    index: int
    incarnation: int
    rank: int | None


def log_files(attempt_dir: Path) -> list[LogFile]:
    """The role logs of an attempt, trainer first, older incarnations first."""
    found = []
    for path in attempt_dir.glob("logs/*.log"):
        match = LOG_NAME.fullmatch(path.name)
        if match:
            rank = int(match["rank"]) if match["rank"] else None
            found.append(LogFile(path, match["role"], int(match["index"]), int(match["incarnation"]), rank))
    return sorted(
        found,
        key=lambda log: (ROLE_ORDER.get(log.role, 9), log.role, log.index, log.incarnation, log.rank or 0),
    )
