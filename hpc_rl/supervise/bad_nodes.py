"""Bad nodes: which nodes failed a trial, and until when they are avoided.

One file of the trial, written by its supervisor; in layout `jobs` one more of each task of a server array, in
its attempt. The job script of a requeued job runs `scontrol update … ExcNodeList`; a new submission uses
`--exclude`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_rl.trial import Attempt, Trial, read_object, write_atomic, write_json

BadNode = dict[str, Any]  # until, since (Unix seconds), reason, attempt


def current(trial: Trial, now: float) -> dict[str, BadNode]:
    """Return the nodes to avoid at `now` (Unix seconds), by name."""
    nodes: dict[str, BadNode] = {}
    for path in (trial.bad_nodes, *trial.server_attempts.glob(f"*/{trial.bad_nodes.name}")):
        for name, bad in _read(path, now).items():
            if name not in nodes or bad["until"] > nodes[name]["until"]:
                nodes[name] = bad
    return dict(sorted(nodes.items()))


def _read(path: Path, now: float) -> dict[str, BadNode]:
    nodes = read_object(path).get("nodes")
    return {
        name: bad
        for name, bad in (nodes.items() if isinstance(nodes, dict) else ())
        if isinstance(bad, dict) and isinstance(bad.get("until"), int | float) and bad["until"] > now
    }


def add(trial: Trial, attempt: Attempt, nodes: Iterable[str], reason: str, now: float, hours: float) -> None:
    """Avoid these nodes too, for `hours`; those whose time is over are dropped. Raises OSError."""
    path = attempt.dir / trial.bad_nodes.name if attempt.is_server_task else trial.bad_nodes
    bad = {"until": now + hours * 3600, "since": now, "reason": reason, "attempt": attempt.id}
    write_json(path, {"nodes": _read(path, now) | dict.fromkeys(nodes, bad)})


def write_exclude_file(trial: Trial, job_id: str, now: float) -> None:
    """Write the list for the job script, which uses it where enough other nodes are left. Raises OSError.

    To be done when an attempt begins and when it ends, too: meanwhile the time of some may be over.
    """
    nodes = current(trial, now)
    if nodes or trial.exclude(job_id).exists():  # an empty list replaces an older one
        write_atomic(trial.exclude(job_id), ",".join(nodes) + "\n")
