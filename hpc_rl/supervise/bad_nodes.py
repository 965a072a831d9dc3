"""Bad nodes: nodes that failed a trial, each avoided for some time.

A node that was out of contact (Slurm lost it, or others did not reach it) may be back in a minute, and Slurm
never allocates a node that is down. So it is avoided for only a 24th of the time, unless that happens again.

The supervisor of the trial writes one file; in layout `jobs` each task of a server array has another file, in
its attempt. The job script of a requeued job runs `scontrol update … ExcNodeList`; a new submission uses
`--exclude`. Both exclude the worst nodes first, as many as they can spare.
"""

import enum
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_rl.core.trial import Attempt, Trial, load_object, write_atomic, write_json

OUT_OF_CONTACT_SHARE = 1 / 24  # of the time for which a failed node is avoided
BadNode = dict[str, Any]  # until, since (Unix seconds), reason, attempt, trouble


class NodeTrouble(enum.StrEnum):
    """Kind of trouble with a node."""

    FAILED = "failed"  # a process on it reported the failure
    OUT_OF_CONTACT = "out_of_contact"


def find_bad_nodes(trial: Trial, now: float) -> dict[str, BadNode]:
    """Return the nodes to avoid at `now` (Unix seconds), by name.

    Failed nodes come before nodes out of contact, newer ones before older ones.
    """
    nodes: dict[str, BadNode] = {}
    for path in (trial.bad_nodes, *trial.server_attempts.glob(f"*/{trial.bad_nodes.name}")):
        for name, bad in _load(path).items():
            if bad["until"] > now and (name not in nodes or bad["until"] > nodes[name]["until"]):
                nodes[name] = bad

    def badness(item: tuple[str, BadNode]) -> tuple[bool, float, str]:
        name, bad = item
        since = bad.get("since")
        newness = float(since) if isinstance(since, int | float) else 0.0
        return bad.get("trouble") == NodeTrouble.OUT_OF_CONTACT, -newness, name

    return dict(sorted(nodes.items(), key=badness))


def _load(path: Path) -> dict[str, BadNode]:
    nodes = load_object(path).get("nodes")
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

    They are avoided for `hours`; nodes out of contact for a part of this, unless they were listed in the
    last `hours` already.
    """
    path = attempt.dir / trial.bad_nodes.name if attempt.is_server_task else trial.bad_nodes
    # An expired entry stays for as long as it may count as a repetition.
    known = {name: bad for name, bad in _load(path).items() if bad["until"] + hours * 3600 > now}
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

    Call it also when an attempt begins and ends: entries may have expired meanwhile.
    """
    nodes = find_bad_nodes(trial, now)
    if nodes or trial.exclude(job_id).exists():  # an empty list replaces an older one
        write_atomic(trial.exclude(job_id), ",".join(nodes) + "\n")
