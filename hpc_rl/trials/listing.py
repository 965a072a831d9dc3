"""Trials of the index with the values that a list shows, from their files and at most one scheduler query."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import Trial
from hpc_rl.schedulers.base import SchedulerAnswer
from hpc_rl.stats.read import HELD_OUT
from hpc_rl.status.scheduler_view import query_all
from hpc_rl.status.submitted_jobs import load_jobs
from hpc_rl.status.trial_status import load_status
from hpc_rl.trials import trial_index

GONE = "gone"  # state of a trial whose directory is gone
REWARD_STEPS = 10  # newest steps over which the reward is a mean
LIVE = (TrialState.RUNNING, TrialState.PENDING, TrialState.STOPPING)


def list_rows(
    names: Sequence[str],
    experiment: str | None,
    wanted: Sequence[str],
    offline: bool = False,
    warn: Callable[[str], object] = lambda text: None,
) -> list[dict[str, Any]]:
    """Return the rows of trials that match, newest submission first, by at most one scheduler query.

    `warn` is called with a sentence if a scheduler does not answer.
    """
    entries = [entry for entry in trial_index.list_entries() if _is_match(entry.trial, names, experiment)]
    answers = {} if offline else query_all(entry.trial for entry in entries if not entry.gone)
    complaints: dict[str, list[str]] = {}
    for trial_dir, answer in answers.items():
        complaints.setdefault(answer.complaint, []).append(str(Trial(trial_dir)))
    for complaint, of in complaints.items():
        if not complaint:
            continue
        which = f"the scheduler of {of[0]}" + (f" and {len(of) - 1} more" if len(of) > 1 else "")
        warn(f"{which} does not answer, so only files are shown: {complaint}")
    rows = [make_row(entry, answers.get(entry.trial.dir, SchedulerAnswer())) for entry in entries]
    return [row for row in rows if row["state"] in wanted]


def parse_states(text: str | None) -> list[str]:
    """Return the states of an option. Raises ConfigError for one that is unknown."""
    known = [*map(str, TrialState), GONE]
    wanted = text.split(",") if text else known
    for state in wanted:
        if state not in known:
            raise ConfigError(f"--state {state} is unknown; allowed: {', '.join(known)}")
    return wanted


def _is_match(trial: Trial, wanted: Sequence[str], experiment: str | None) -> bool:
    named = not wanted or any(trial_index.is_named(trial, name) for name in wanted)
    return named and fnmatchcase(trial.experiment, experiment or "*")


def list_live_rows(offline: bool = False) -> list[dict[str, Any]]:
    """Return the rows of trials that run or wait, newest submission first, by at most one scheduler query."""
    entries = [entry for entry in trial_index.list_entries() if not entry.gone]
    entries = [entry for entry in entries if any(not job.over for job in load_jobs(entry.trial))]
    answers = {} if offline else query_all(entry.trial for entry in entries)
    rows = [make_row(entry, answers.get(entry.trial.dir, SchedulerAnswer())) for entry in entries]
    return [row for row in rows if row["state"] in LIVE]


def make_row(entry: trial_index.IndexEntry, answer: SchedulerAnswer) -> dict[str, Any]:
    """Return a trial's row of a list."""
    row: dict[str, Any] = {"trial": str(entry.trial), "dir": str(entry.trial.dir), "time": entry.time}
    unknown = ("job_id", "step", "total_steps", "eta_s", "reward", "held_out")
    row |= dict.fromkeys(unknown) | {"state": GONE, "reason": ""}
    if entry.gone:
        return row
    status = load_status(entry.trial, answer.newest, answer.asked_at or None)
    newest = [value for _, value in status.history.curve("reward")[-REWARD_STEPS:]]
    held_out = status.history.curve(HELD_OUT)
    return row | {
        "job_id": status.jobs[-1].job_id if status.jobs else None,
        "eta_s": status.eta_s if status.live else None,
        "state": status.state,
        "reason": status.reason,
        "step": status.step,
        "total_steps": status.total_steps,
        "reward": fmean(newest) if newest else None,
        "held_out": held_out[-1][1] if held_out else None,
    }
