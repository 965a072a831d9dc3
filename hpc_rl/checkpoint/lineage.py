"""Lineages: which start went on from which state. Creates the record of the next one and gathers what decide.py needs to know.

`lineages/<NNNN>.json` is created exclusively, so that of two starters each has a number of its own. Reads files only.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Cause, Decision, GenerationInfo, Situation, decide
from hpc_rl.checkpoint.generation import Found
from hpc_rl.errors import ExitCode
from hpc_rl.stats.read import JsonLines, Row
from hpc_rl.trial import Attempt, Trial, create_exclusive, fsync_dir, read_json

_NAME = re.compile(r"(\d{4,})\.json")


@dataclass(frozen=True, kw_only=True)
class LineageRecord:
    """One start of training that came as far as having state.

    Args:
        lineage: Its number, from 0.
        from_step: Step of the state that it started from; 0 for a fresh start.
        from_lineage: Lineage that made this state; None for a fresh start.
        attempt: Attempt id.
        incarnation: Trainer incarnation.
        submission: Job id.
        reason: Why it started so.
        time: Unix seconds of its host's clock, for people.
    """

    lineage: int
    from_step: int
    from_lineage: int | None = None
    attempt: str
    incarnation: int
    submission: str
    reason: str = ""
    time: float = 0.0


def read_lineages(trial: Trial) -> list[LineageRecord]:
    """All records, oldest first. Unreadable ones are passed over."""
    records = []
    for path in _paths(trial):
        data: Any = read_json(path)
        try:
            records.append(LineageRecord(**data))
        except TypeError:
            continue
    return sorted(records, key=lambda record: record.lineage)


def next_lineage(trial: Trial, attempt: Attempt, incarnation: int, decision: Decision) -> LineageRecord:
    """Create the record of this start under the next free number. Raises OSError."""
    trial.lineages.mkdir(exist_ok=True)
    number = max((int(_NAME.fullmatch(path.name)[1]) for path in _paths(trial)), default=-1) + 1  # type: ignore[index]
    while True:
        record = LineageRecord(
            lineage=number,
            from_step=decision.step or 0,
            from_lineage=decision.lineage,
            attempt=attempt.id,
            incarnation=incarnation,
            submission=submission_of(attempt.id),
            reason=decision.reason,
            time=time.time(),
        )
        if create_exclusive(trial.lineages / f"{number:04d}.json", json.dumps(asdict(record), indent=2) + "\n"):
            fsync_dir(trial.lineages)
            return record
        number += 1


def decide_start(
    trial: Trial, attempt: Attempt, incarnation: int, mode: str, start_mode: str, retries: int
) -> tuple[Decision, list[Found]]:
    """The decision for a trainer that starts now, and the damaged generations that it passes over (to be set aside).

    Reads every byte of the generations that it considers, newest first, up to the first that is valid and eligible.
    """
    situation, damaged = gather(trial, attempt, incarnation, mode, start_mode, retries)
    decision = decide(situation)
    passed_over = damaged if decision.action in ("load", "fresh") else []
    return decision, passed_over


def gather(
    trial: Trial, attempt: Attempt, incarnation: int, mode: str, start_mode: str, retries: int
) -> tuple[Situation, list[Found]]:
    """What lies in the trial directory, as decide() wants it, and the generations that do not verify."""
    submission = submission_of(attempt.id)
    records = read_lineages(trial)
    own = [record for record in records if record.submission == submission]
    ancestry = frozenset({submission}) | _ancestors(records, own)
    only = ancestry if mode == "fault" and own else None
    generations, damaged = _verified(generation.scan(trial), only)
    events = _trainer_events(trial, submission)
    situation = Situation(
        mode=mode,
        start_mode=start_mode,
        first_start=not own,
        generations=tuple(generations),
        ancestry=ancestry,
        has_state=len(own) < len(records),
        cause=_cause(trial, attempt, incarnation, own),
        failures=failures_without_progress(events),
        retries=retries,
    )
    return situation, damaged


def submission_of(attempt_id: str) -> str:
    """Job id of an attempt `<jobid>.<restart>`."""
    return attempt_id.rpartition(".")[0] or attempt_id


def attempts_of(trial: Trial, submission: str) -> list[Attempt]:
    """The attempts of one job, oldest first."""
    try:
        names = [entry.name for entry in os.scandir(trial.attempts) if entry.is_dir()]
    except FileNotFoundError:
        return []
    own = [name for name in names if submission_of(name) == submission and name.rpartition(".")[2].isdigit()]
    return [trial.attempt(name) for name in sorted(own, key=lambda name: int(name.rpartition(".")[2]))]


def failures_without_progress(events: list[Row]) -> int:
    """Ends since the newest event of progress that use up the retries, by the supervisor's own words."""
    count = 0
    for row in events:
        if row.get("event") == "progress":
            count = 0
        elif row.get("event") == "exited" and row.get("failure"):
            count += 1
    return count


def _trainer_events(trial: Trial, submission: str) -> list[Row]:
    return [row for attempt in attempts_of(trial, submission) for row in JsonLines(attempt.events).poll()]


def _ancestors(records: list[LineageRecord], own: list[LineageRecord]) -> frozenset[str]:
    """Submissions whose lineages those of `own` go on from, step by step."""
    by_number = {record.lineage: record for record in records}
    found: set[int] = set()
    todo = [record.lineage for record in own]
    while todo:
        number = todo.pop()
        if number in by_number and number not in found:
            found.add(number)
            parent = by_number[number].from_lineage
            todo += [] if parent is None else [parent]
    return frozenset(by_number[number].submission for number in found)


def _verified(found: list[Found], only: frozenset[str] | None) -> tuple[list[GenerationInfo], list[Found]]:
    infos, damaged, wanted = [], [], True
    for one in found:
        submission = one.manifest.submission if one.manifest else ""
        eligible = only is None or submission in only
        if wanted and eligible:
            one = generation.verify(one)
            if one.problem:
                damaged.append(one)
        lineage = one.manifest.lineage if one.manifest else -1
        infos.append(GenerationInfo(one.step, lineage, submission, not one.problem, one.problem))
        wanted = wanted and not (eligible and not one.problem)
    return infos, damaged


def _cause(trial: Trial, attempt: Attempt, incarnation: int, own: list[LineageRecord]) -> Cause | None:
    """Why the last start of this submission that had a lineage ended."""
    before = [record for record in own if (record.attempt, record.incarnation) != (attempt.id, incarnation)]
    if not before:
        return None
    last = before[-1]
    code = _trainer_code(trial.attempt(last.attempt), last.incarnation)
    if code is not None:
        return Cause.STOPPED if code in (ExitCode.STOPPED, ExitCode.DONE) else Cause.FAILED
    if last.attempt == attempt.id:
        return Cause.SUPERVISOR
    ended: Any = read_json(trial.attempt(last.attempt).ended)
    if not isinstance(ended, dict):
        return Cause.NODE
    return Cause.STOPPED if ended.get("exit_code") in (ExitCode.STOPPED, ExitCode.DONE) else Cause.FAILED


def _trainer_code(attempt: Attempt, incarnation: int) -> int | None:
    """What the supervisor saw of one trainer incarnation; None where the supervisor did not see its end."""
    for row in reversed(JsonLines(attempt.events).poll()):
        if row.get("event") == "exited" and row.get("role") == "trainer" and row.get("incarnation") == incarnation:
            return int(row["code"]) if isinstance(row.get("code"), int) else int(ExitCode.FAILED)
    return None


def _paths(trial: Trial) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(trial.lineages) if _NAME.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
