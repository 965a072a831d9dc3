"""`jobs/<job id>.state`: what the batch script itself wrote of a job, one JSON object a line.

Events: started (restart, host, pid, start_ticks), supervisor_killed (code), requeued (code), ended (code, reason).
A job that started and never ended was killed, or runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_rl.trial import Trial


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
