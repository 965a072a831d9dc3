"""Lineages: records of which start continued from which state.

`lineages/<NNNN>.json` is created exclusively, so that two starts never share a number.
"""

import json
import re
import time
from collections.abc import Sequence

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Decision
from hpc_rl.core.records import LineageRecord, find_lineage_files
from hpc_rl.core.trial import Attempt, Trial, create_exclusive, fsync_dir, list_entries

_LABEL = re.compile(r"(\d+)\.\d+")  # of published weights


def create_lineage(
    trial: Trial, attempt: Attempt, incarnation: int, decision: Decision, new_batches: bool = False
) -> LineageRecord:
    """Create the record of this start under the next free number. Raises OSError."""
    trial.lineages.mkdir(exist_ok=True)
    number = find_newest_number(trial) + 1
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
            new_batches=new_batches,
            time=time.time(),
        )
        if create_exclusive(trial.lineage(number), json.dumps(record.to_json(), indent=2) + "\n"):
            fsync_dir(trial.lineages)
            return record
        number += 1


def find_ancestors(lineage: int, records: Sequence[LineageRecord]) -> dict[int, int]:
    """Return the ancestors of a lineage: number -> its last step that led to this lineage."""
    by_number = {record.lineage: record for record in records}
    found: dict[int, int] = {}
    while (record := by_number.get(lineage)) and record.from_lineage is not None:
        until = min([record.from_step, *found.values()])
        lineage = record.from_lineage
        if lineage in found:  # no chain has a circle
            break
        found[lineage] = until
    return found


def find_newest_number(trial: Trial) -> int:
    """Return the highest lineage number of records, generations and published weights, or -1."""
    # includes generations and weights, so that no label is used twice even if records are lost
    made = [found.manifest.lineage for found in generation.scan(trial) if found.manifest]
    published = [
        int(match[1]) for entry in list_entries(trial.weights) if (match := _LABEL.fullmatch(entry.name))
    ]
    return max([*find_lineage_files(trial), *made, *published], default=-1)


def withdraw(trial: Trial, lineage: int) -> None:
    """Remove the record of a start that loaded no state and published no version. Raises OSError."""
    trial.lineage(lineage).unlink(missing_ok=True)
    fsync_dir(trial.lineages)
