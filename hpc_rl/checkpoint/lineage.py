"""Lineages: which start went on from which state.

`lineages/<NNNN>.json` is created exclusively, so that of two starters each has a number of its own.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Decision
from hpc_rl.records import LineageRecord, lineage_files
from hpc_rl.trial import Attempt, Trial, create_exclusive, entries, fsync_dir

_LABEL = re.compile(r"(\d+)\.\d+")  # of published weights


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
            submission=attempt.job_id,
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
    """Return the highest that a record, a generation or published weights bear; -1 where there is none."""
    return max(_numbers(trial), default=-1)


def _numbers(trial: Trial) -> list[int]:
    """Of lineages that have a record, made a generation or published weights: who lost records must not use a label twice."""
    made = [found.manifest.lineage for found in generation.scan(trial) if found.manifest]
    published = [int(match[1]) for entry in entries(trial.weights) if (match := _LABEL.fullmatch(entry.name))]
    return [*lineage_files(trial), *made, *published]


def withdraw(trial: Trial, lineage: int) -> None:
    """Take back the record of a start that loaded nothing and labelled no version. Raises OSError."""
    (trial.lineages / f"{lineage:04d}.json").unlink(missing_ok=True)
    fsync_dir(trial.lineages)
