"""Bad nodes: which nodes failed this trial, and until when they are avoided. One file of the trial, written by its supervisor.

A requeued job is told by `scontrol update … ExcNodeList`, which the batch script does; a new submission by `--exclude`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpc_rl.trial import Trial, read_json, write_atomic, write_json

Record = dict[str, Any]


def current(trial: Trial, now: float) -> dict[str, Record]:
    """Nodes to avoid now (Unix seconds): name -> {"until", "since", "reason", "attempt"}."""
    found = read_json(trial.bad_nodes)
    nodes = found.get("nodes") if isinstance(found, dict) else None
    if not isinstance(nodes, dict):
        return {}
    return {
        name: record
        for name, record in sorted(nodes.items())
        if isinstance(record, dict) and isinstance(record.get("until"), int | float) and record["until"] > now
    }


def add(trial: Trial, attempt: str, nodes: Iterable[str], reason: str, now: float, hours: float) -> dict[str, Record]:
    """Avoid these too, for so many hours; those whose time is over go. Raises OSError."""
    record = {"until": now + hours * 3600, "since": now, "reason": reason, "attempt": attempt}
    known = current(trial, now) | dict.fromkeys(nodes, record)
    write_json(trial.bad_nodes, {"nodes": known})
    return known


def tell_script(trial: Trial, job_id: str, now: float) -> None:
    """Leave the list for the batch script, which uses it where enough other nodes are left. Raises OSError."""
    write_atomic(trial.exclude(job_id), ",".join(current(trial, now)) + "\n")


def merged(exclude: str | None, trial: Trial, now: float) -> str | None:
    """`--exclude` of the next submission: what the configuration says, and what failed lately."""
    names = [*([exclude] if exclude else []), *current(trial, now)]
    return ",".join(names) or None
