"""`jobs/<job id>.state`: what the batch script itself wrote of a job, one JSON object a line.

A submission that goes on by successors keeps its id and its file; `<job id>.next-<restart>` names each of them.

Events: started (restart, host, pid, start_ticks), supervisor_killed (code), requeued (code), ended (code, reason, cancelled:
whether for a signal), first_node_lost (by a step on another node, which then requeues or cancels the job).
A job that started and never ended was killed, or runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_rl.trial import Trial, read_json

FIRST_NODE_LOST = "first_node_lost"


def path(trial: Trial, job_id: str) -> Path:
    return trial.jobs / f"{job_id}.state"


def read(trial: Trial, job_id: str) -> list[dict[str, Any]]:
    """The events of a job so far, oldest first; a line that is torn or no object is left out."""
    try:
        lines = path(trial, job_id).read_text(errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
    return events


def followers(trial: Trial, job_id: str) -> dict[int, str]:
    """The scheduler's ids of the jobs that went on with a submission, oldest first, by the number of the start of each."""
    found = {}
    for path in sorted(trial.jobs.glob(f"{job_id}.next-*")):
        data, restart = read_json(path), path.name.rpartition("-")[2]
        if restart.isdecimal() and isinstance(data, dict) and data.get("job_id"):
            found[int(restart)] = str(data["job_id"])
    return found


def current(trial: Trial, job_id: str) -> str:
    """The scheduler's id of a submission's newest job: its own, or that of the last successor. Reads one directory."""
    newest = max(trial.jobs.glob(f"{job_id}.next-*"), default=None, key=lambda path: path.name)
    data = read_json(newest) if newest is not None else None
    return str(data["job_id"]) if isinstance(data, dict) and data.get("job_id") else job_id
