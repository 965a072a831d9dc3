"""Bad nodes: which nodes failed this trial, and until when they are avoided.

One file of the trial, written by its supervisor; in layout `jobs` one more of each task of a server array, in its attempt. A
requeued job is told by `scontrol update … ExcNodeList`, which the batch script does; a new submission by `--exclude`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_rl.trial import Trial, read_json, write_atomic, write_json

Record = dict[str, Any]


def current(trial: Trial, now: float) -> dict[str, Record]:
    """Nodes to avoid now (Unix seconds): name -> {"until", "since", "reason", "attempt"}."""
    nodes: dict[str, Record] = {}
    for path in (trial.bad_nodes, *trial.server_attempts.glob(f"*/{trial.bad_nodes.name}")):
        for name, record in _read(path, now).items():
            if name not in nodes or record["until"] > nodes[name]["until"]:
                nodes[name] = record
    return dict(sorted(nodes.items()))


def _read(path: Path, now: float) -> dict[str, Record]:
    found = read_json(path)
    nodes = found.get("nodes") if isinstance(found, dict) else None
    return {
        name: record
        for name, record in (nodes.items() if isinstance(nodes, dict) else ())
        if isinstance(record, dict) and isinstance(record.get("until"), int | float) and record["until"] > now
    }


def add(trial: Trial, attempt: str, nodes: Iterable[str], reason: str, now: float, hours: float) -> None:
    """Avoid these too, for so many hours; those whose time is over go. Raises OSError."""
    path = trial.attempt(attempt).dir / trial.bad_nodes.name if "_" in attempt else trial.bad_nodes
    record = {"until": now + hours * 3600, "since": now, "reason": reason, "attempt": attempt}
    write_json(path, {"nodes": _read(path, now) | dict.fromkeys(nodes, record)})


def tell_script(trial: Trial, job_id: str, now: float) -> None:
    """Leave the list for the batch script, which uses it where enough other nodes are left, also one that is empty by now.

    To be done where an attempt begins and where it ends, too: meanwhile the time of some may be over. Raises OSError.
    """
    nodes = current(trial, now)
    if nodes or trial.exclude(job_id).exists():
        write_atomic(trial.exclude(job_id), ",".join(nodes) + "\n")
