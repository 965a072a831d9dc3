"""Lineages: which start went on from which state.

`lineages/<NNNN>.json` is created exclusively, so that of two starters each has a number of its own.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Decision
from hpc_rl.trial import Attempt, Trial, create_exclusive, entries, fsync_dir, read_json

_NAME = re.compile(r"(\d{4,})\.json")
_LABEL = re.compile(r"(\d+)\.\d+")  # of published weights


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
        set_aside: Steps of the generations that a person's `--from` moved out of the way.
        time: Unix seconds of its host's clock, for people.
    """

    lineage: int
    from_step: int
    from_lineage: int | None = None
    attempt: str
    incarnation: int
    submission: str
    reason: str = ""
    set_aside: tuple[int, ...] = ()
    time: float = 0.0


def read_lineages(trial: Trial) -> list[LineageRecord]:
    """All records, oldest first. Unreadable ones are passed over."""
    records = []
    for path in _paths(trial):
        record = _read(path)
        records += [] if record is None else [record]
    return sorted(records, key=lambda record: record.lineage)


def _read(path: Path) -> LineageRecord | None:
    data: Any = read_json(path)
    try:
        record = LineageRecord(**{**data, "set_aside": tuple(data.get("set_aside", ()))})
    except (TypeError, AttributeError):
        return None
    numbers = (
        record.lineage,
        record.from_step,
        record.from_lineage or 0,
        record.incarnation,
        *record.set_aside,
    )
    words = (record.attempt, record.submission, record.reason)
    is_sound = all(isinstance(one, int) for one in numbers) and all(isinstance(one, str) for one in words)
    return record if is_sound and record.lineage == int(path.stem) else None


def next_lineage(trial: Trial, attempt: Attempt, incarnation: int, decision: Decision) -> LineageRecord:
    """Create the record of this start under the next number that nothing bears yet. Raises OSError."""
    trial.lineages.mkdir(exist_ok=True)
    number = max(_numbers(trial), default=-1) + 1
    while True:
        record = LineageRecord(
            lineage=number,
            from_step=decision.step or 0,
            from_lineage=decision.lineage,
            attempt=attempt.id,
            incarnation=incarnation,
            submission=submission_of(attempt.id),
            reason=decision.reason,
            set_aside=decision.set_aside,
            time=time.time(),
        )
        if create_exclusive(
            trial.lineages / f"{number:04d}.json", json.dumps(asdict(record), indent=2) + "\n"
        ):
            fsync_dir(trial.lineages)
            return record
        number += 1


def newest_number(trial: Trial) -> int:
    """The highest that a record bears, be it readable or not; -1 where there is none."""
    return max((int(path.stem) for path in _paths(trial)), default=-1)


def _numbers(trial: Trial) -> list[int]:
    """Of lineages that have a record, made a generation or published weights: who lost records must not use a label twice."""
    made = [found.manifest.lineage for found in generation.scan(trial) if found.manifest]
    published = [int(match[1]) for entry in entries(trial.weights) if (match := _LABEL.fullmatch(entry.name))]
    return [int(path.stem) for path in _paths(trial)] + made + published


def withdraw(trial: Trial, lineage: int) -> None:
    """Take back the record of a start that loaded nothing and labelled no version. Raises OSError."""
    (trial.lineages / f"{lineage:04d}.json").unlink(missing_ok=True)
    fsync_dir(trial.lineages)


def submission_of(attempt_id: str) -> str:
    """Job id of an attempt `<jobid>.<restart>`."""
    return attempt_id.rpartition(".")[0] or attempt_id


def _paths(trial: Trial) -> list[Path]:
    return [Path(entry.path) for entry in entries(trial.lineages) if _NAME.fullmatch(entry.name)]
