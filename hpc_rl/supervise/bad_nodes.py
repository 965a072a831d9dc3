"""Bad nodes: which nodes failed a trial, and until when they are avoided.

A node that was out of contact (Slurm lost it, or others did not reach it) may be back in a minute, and Slurm
itself gives no job a node that is down. So it is avoided for a 24th of the time, unless that happens again.

One file of the trial, written by its supervisor; in layout `jobs` one more of each task of a server array, in
its attempt. The job script of a requeued job runs `scontrol update … ExcNodeList`; a new submission uses
`--exclude`. Both exclude the worst nodes first, as many as they can spare.
"""

import enum
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_rl.core.trial import Attempt, Trial, read_object, write_atomic, write_json

OUT_OF_CONTACT_SHARE = 1 / 24  # of the time for which a node is avoided that failed
BadNode = dict[str, Any]  # until, since (Unix seconds), reason, attempt, trouble


class NodeTrouble(enum.StrEnum):
    """What was wrong with a node."""

    FAILED = "failed"  # a process on it reported the failure
    OUT_OF_CONTACT = "out_of_contact"


def current(trial: Trial, now: float) -> dict[str, BadNode]:
    """Return the nodes to avoid at `now` (Unix seconds), by name.

    Those that failed come before those out of contact, and the newest before the others.
    """
    nodes: dict[str, BadNode] = {}
    for path in (trial.bad_nodes, *trial.server_attempts.glob(f"*/{trial.bad_nodes.name}")):
        for name, bad in _read(path).items():
            if bad["until"] > now and (name not in nodes or bad["until"] > nodes[name]["until"]):
                nodes[name] = bad

    def badness(item: tuple[str, BadNode]) -> tuple[bool, float, str]:
        name, bad = item
        since = bad.get("since")
        newness = float(since) if isinstance(since, int | float) else 0.0
        return bad.get("trouble") == NodeTrouble.OUT_OF_CONTACT, -newness, name

    return dict(sorted(nodes.items(), key=badness))


def _read(path: Path) -> dict[str, BadNode]:
    nodes = read_object(path).get("nodes")
    return {
        name: bad
        for name, bad in (nodes.items() if isinstance(nodes, dict) else ())
        if isinstance(bad, dict) and isinstance(bad.get("until"), int | float)
    }


def add(
    trial: Trial,
    attempt: Attempt,
    nodes: Iterable[str],
    reason: str,
    now: float,
    hours: float,
    trouble: NodeTrouble = NodeTrouble.FAILED,
) -> None:
    """Avoid these nodes too. Raises OSError.

    For `hours`; a node that was out of contact, and not in the `hours` before, for a part of them.
    """
    path = attempt.dir / trial.bad_nodes.name if attempt.is_server_task else trial.bad_nodes
    # One whose time is over stays for as long as it may count as a repetition.
    known = {name: bad for name, bad in _read(path).items() if bad["until"] + hours * 3600 > now}
    for name in nodes:
        share = OUT_OF_CONTACT_SHARE if trouble is NodeTrouble.OUT_OF_CONTACT and name not in known else 1.0
        until = now + hours * 3600 * share
        bad = {
            "until": until,
            "since": now,
            "reason": reason,
            "attempt": attempt.id,
            "trouble": trouble.value,
        }
        known[name] = bad
    write_json(path, {"nodes": known})


def write_exclude_file(trial: Trial, job_id: str, now: float) -> None:
    """Write the list for the job script, the worst node first. Raises OSError.

    To be done when an attempt begins and when it ends, too: meanwhile the time of some may be over.
    """
    nodes = current(trial, now)
    if nodes or trial.exclude(job_id).exists():  # an empty list replaces an older one
        write_atomic(trial.exclude(job_id), ",".join(nodes) + "\n")
