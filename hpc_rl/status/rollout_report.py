"""What the rollout role of an attempt last wrote of itself (rollout/report.py), and what of it a person should know."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.status.formatting import format_duration
from hpc_rl.trial import Attempt, read_json

HANGING_S = 60.0  # a prompt that runs for longer is worth a word where nothing else has finished meanwhile
NO_SERVER_S = 20.0  # that a prompt may wait for the first server
WORRYING_IN_A_ROW = 4


@dataclass
class RolloutReport:
    """Counters of one incarnation of the rollout role.

    Args:
        time: When it wrote them, Unix seconds of its node.
        running: Prompts running now.
        ready: Finished groups that wait for a batch.
        sealed: Newest batch.
        accepted: Prompts that became groups.
        rejected: Prompts rejected, by reason.
        rejected_in_a_row: Since the last group.
        last_reason: Of the newest rejection.
        last_error: The newest exception's text, of a reward, a workflow or a request.
        oldest_running_s: For how long the oldest running prompt runs; None where none does.
        quiet_s: Seconds since the last group, rejection or exception; None before the first.
        servers: Generation servers that live.
        evaluating: Versions that are being evaluated.
    """

    time: float = 0.0
    running: int = 0
    ready: int = 0
    sealed: int = 0
    accepted: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    rejected_in_a_row: int = 0
    last_reason: str = ""
    last_error: str = ""
    oldest_running_s: float | None = None
    quiet_s: float | None = None
    servers: int | None = None
    evaluating: list[str] = field(default_factory=list)


def read_rollout(attempt: Attempt) -> RolloutReport | None:
    """The report of the newest incarnation that left one; None where there is none."""
    found: list[tuple[int, Any]] = []
    for path in attempt.dir.glob("rollout.*.json"):
        number = path.name.split(".")[1]
        data = read_json(path)
        if number.isdecimal() and isinstance(data, dict):
            found.append((int(number), data))
    if not found:
        return None
    data = max(found, key=lambda pair: pair[0])[1]
    names = RolloutReport.__dataclass_fields__
    fitting = {name: data[name] for name in names if name in data and _fits(name, data[name])}
    return RolloutReport(**fitting)


def _fits(name: str, value: Any) -> bool:
    default = getattr(RolloutReport(), name)
    if default is None:
        return value is None or isinstance(value, (int, float))
    return isinstance(value, (int, float) if isinstance(default, (int, float)) else type(default))


def summary(rollout: RolloutReport, live: bool) -> str:
    """One line: what is made and what waits; of one that is over, what it made."""
    parts = [f"{rollout.running} prompts running", f"{rollout.ready} groups ready"] if live else []
    parts += [f"{rollout.accepted} prompts accepted", f"{sum(rollout.rejected.values())} rejected"]
    if not live:
        return ", ".join(parts)
    if rollout.servers is not None:
        parts.append(f"{rollout.servers} server{'' if rollout.servers == 1 else 's'} alive")
    if rollout.evaluating:
        parts.append("evaluating version " + ", ".join(rollout.evaluating))
    return ", ".join(parts)


def problems(rollout: RolloutReport, live: bool) -> list[str]:
    """What a person should look at: rejections with their reason, the last exception, prompts that hang."""
    lines = []
    if rollout.rejected:
        by_reason = ", ".join(
            f"{reason} {count}"
            for reason, count in sorted(rollout.rejected.items(), key=lambda pair: -pair[1])
        )
        lines.append(f"rejected so far: {by_reason}")
    if rollout.rejected_in_a_row >= WORRYING_IN_A_ROW:
        lines.append(
            f"the last {rollout.rejected_in_a_row} prompts were rejected: {rollout.last_reason or 'no reason known'}"
        )
    if rollout.last_error:
        lines.append(f"last exception: {rollout.last_error}")
    if live and rollout.servers == 0 and (rollout.oldest_running_s or 0.0) > NO_SERVER_S:
        lines.append("no generation server is alive: nothing is generated until one is")
    oldest, quiet = rollout.oldest_running_s, rollout.quiet_s
    if live and oldest is not None and oldest > HANGING_S and (quiet is None or quiet > HANGING_S):
        since = f"nothing has finished for {format_duration(oldest if quiet is None else quiet)}"
        lines.append(
            f"{since}, the oldest prompt runs for {format_duration(oldest)}: does the reward function or the workflow hang?"
        )
    silent_s = time.time() - rollout.time
    if live and rollout.time and silent_s > HANGING_S:
        lines.append(f"the rollout role has not written for {format_duration(silent_s)}")
    return lines
