"""The log files of a trial, and the choice among them."""

from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from hpc_rl.core.errors import TrialStateError
from hpc_rl.core.records import find_successors
from hpc_rl.core.trial import Trial
from hpc_rl.status.attempts import list_log_files
from hpc_rl.status.formatting import format_time
from hpc_rl.status.scheduler_view import load_current_status
from hpc_rl.status.trial_status import TrialStatus
from hpc_rl.supervise.agents import make_agent_name

EVERY_RANK = "all"


@dataclass(frozen=True)
class Log:
    """One file that logs can show; role `job` is the output of the job script itself."""

    path: Path
    attempt: str
    role: str
    index: int | None = None
    incarnation: int | None = None
    rank: int | None = None

    def format_title(self, trial: Trial) -> str:
        return str(self.path.relative_to(trial.dir))


def describe_nothing(trial: Trial) -> str:
    """Describe the state of a trial without a log."""
    status = load_current_status(trial)
    since = f" since {format_time(status.since)}" if status.since else ""
    why = f" ({status.reason})" if status.reason else ""
    return f"no log yet: {trial} is {status.state}{since}{why}"


def collect(status: TrialStatus) -> list[Log]:
    """Return every log of a trial: the output of job scripts, then the logs of attempts in order."""
    trial = status.trial
    tasks = [(array, task) for array in status.servers for task in array.tasks]
    job_ids = [*(task.id for _, task in tasks), *(job.job_id for job in status.jobs)]
    found = [log for job_id in job_ids for log in _list_outputs(trial, job_id)]
    number = {job.job_id: number for number, job in enumerate(status.jobs)}
    attempts = []
    for array, task in tasks:
        rank = number.get(array.serves, -1)
        attempts += [(rank, attempt.id) for attempt in trial.list_attempts(task.id)]
    attempts += [(number.get(attempt.job_id, len(number)), attempt.id) for attempt in status.attempts]
    for _, name in sorted(attempts, key=itemgetter(0)):  # of one submission, servers come first
        logs = list_log_files(trial.attempt(name).dir)
        found += [Log(log.path, name, log.role, log.index, log.incarnation, log.rank) for log in logs]
    return found


def _list_outputs(trial: Trial, job_id: str) -> list[Log]:
    """Return the output of a job script, of a submission or of a server task; then of its successors."""
    _, underscore, task = job_id.partition("_")
    names = {job_id: job_id}
    for restart, successor in find_successors(trial, job_id).items():
        names[f"{job_id}.{restart}"] = f"{successor}{underscore}{task}"
    paths = {attempt: trial.job_output(name) for attempt, name in names.items()}
    return [Log(path, attempt, "job") for attempt, path in paths.items() if path.exists()]


def choose(trial: Trial, found: list[Log], wanted: dict[str, Any]) -> list[Log]:
    """Return the logs with the wanted role, index, incarnation, attempt and rank; else the leading ones.

    Raises TrialStateError if no log matches.
    """
    role = wanted.get("role")
    if not any(log.role == "supervisor" for log in found) and role != "job":
        # A supervisor without a log file writes to the output of the trial's job script.
        outputs = [log for log in found if log.role == "job" and "_" not in log.attempt]
        found = [replace(log, role="supervisor") if log in outputs else log for log in found]
    matching = [log for log in found if _is_match(log, wanted)]
    if not matching and role in ("server", "environment"):  # none was started: its agent says why
        agents: dict[str, Any] = {"role": make_agent_name(role)} | {
            key: wanted[key] for key in ("attempt",) if key in wanted
        }
        matching = [log for log in found if _is_match(log, agents)]
    if not found:
        raise TrialStateError(describe_nothing(trial))
    if not matching:
        given = " ".join(f"--{key} {value}" for key, value in wanted.items())
        advice = f"Run `hpc-rl logs {trial} --list` to see the available logs."
        raise TrialStateError(f"{trial} has no log for {given}. {advice}")
    if wanted.keys() <= {"attempt"}:
        roles = ("trainer", "rollout", "supervisor")
        of_role = {role: [log for log in matching if log.role == role] for role in roles}
        leading = of_role["trainer"] or of_role["rollout"]  # without a trainer
        default = _pick_newest(leading) + _pick_newest(of_role["supervisor"])
        return _pick_first_rank(default or _pick_newest(matching))
    return _pick_newest(matching) if "rank" in wanted else _pick_first_rank(_pick_newest(matching))


def _is_match(log: Log, wanted: dict[str, Any]) -> bool:
    for key, value in wanted.items():
        if key == "attempt":
            # An attempt also matches the output of its job, and a job id its attempts.
            of_job = value.rpartition(".")[0] == log.attempt
            same = of_job or value in (log.attempt, log.attempt.rpartition(".")[0])
        else:
            same = value in (getattr(log, key), EVERY_RANK)
        if not same:
            return False
    return True


def _pick_first_rank(logs: list[Log]) -> list[Log]:
    """Keep rank 0 of logs by rank, and the launcher's log if it is not empty."""
    ranked = {(log.role, log.index, log.incarnation) for log in logs if log.rank is not None}
    chosen = []
    for log in logs:
        by_rank = (log.role, log.index, log.incarnation) in ranked
        if not by_rank or log.rank == 0 or (log.rank is None and log.path.stat().st_size):
            chosen.append(log)
    return chosen or logs


def _pick_newest(logs: list[Log]) -> list[Log]:
    """Return, of the newest attempt, the newest incarnation of each role, index and rank.

    Tasks of one server array count as one attempt.
    """
    array = logs[-1].attempt.partition("_")[0] if logs else ""
    newest = {(log.role, log.index, log.rank): log for log in logs if log.attempt.partition("_")[0] == array}
    return list(newest.values())
