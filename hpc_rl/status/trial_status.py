"""What happened to a trial, told from the files of its directory alone: state, attempts, roles, steps, generations.

Missing, stale and partial files are tolerated: what can't be known is left out. The scheduler is no part of this; a
caller that asked it passes the answer in, and it only decides between "still runs" and "died without a word".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc_rl.files import JsonLines, Row
from hpc_rl.records import LineageRecord
from hpc_rl.schedulers import record
from hpc_rl.schedulers.base import JobState
from hpc_rl.stats.read import History, MetricsReader, lineages
from hpc_rl.status.attempts import EventFiles, RoleStatus, roles_of
from hpc_rl.status.rollout_report import RolloutReport, read_rollout
from hpc_rl.status.trial_state import describe_exit, determine_state
from hpc_rl.supervise.server_array import KIND, ServerArray, read_arrays
from hpc_rl.trial import Trial, read_json

ENDING_EVENTS = ("stopping", "failing", "abandoning")  # after which an attempt only ends
TAKEN_BACK = "left no word: preempted, or killed together with its node; the scheduler starts the job again"
RATE_STEPS = 50  # steps over which the rate is taken


@dataclass
class TrialJob:
    """One submission, as `jobs/<jobid>.json` has it, and the last word of its script in `jobs/<jobid>.state`."""

    job_id: str
    time: float = 0.0
    scheduler: str = ""
    start_mode: str = ""
    cancelled: bool = False  # a person's intent lies there
    event: str = ""  # started | requeued | supervisor_killed | ended
    native_id: str = ""  # the scheduler's id of its newest job, where a successor went on; else job_id
    code: int | None = None  # of its end
    reason: str = ""  # of its end, in the script's words
    cluster: str = ""  # the Slurm cluster that it was handed to; empty where that is not known
    other_length: bool = False  # it asked for another total_train_* than the one before
    saves: bool = True  # before it stops: its recover.mode is not disabled
    by_signal: bool = (
        False  # it ended for a TERM, which a cancel, a preemption and an administrator's requeue send alike
    )

    @property
    def over(self) -> bool:
        """Its script has ended for good. After a TERM that no `hpc-rl cancel` asked for, only the scheduler knows that."""
        return self.event == "ended" and (self.cancelled or not self.by_signal)


@dataclass
class AttemptStatus:
    """One start by the scheduler. `state` is running | done | cancelled | stopped | failed | killed | pending."""

    id: str
    job_id: str
    state: str
    cause: str  # in words, why it ended; empty while it runs
    exit_code: int | None
    started: float | None
    ended: float | None
    lineages: list[LineageRecord]
    last_step: int | None  # the newest step it logged, cut off later or not
    roles: list[RoleStatus]
    stopping: str = ""  # why it is about to end, in the supervisor's words

    @property
    def num_restarts(self) -> int:
        return sum(role.num_restarts for role in self.roles)


@dataclass
class TrialStatus:
    """Everything that status and follow show. `state` is one of the attempts' words, or rendered | stopping | unknown."""

    trial: Trial
    state: str
    reason: str
    jobs: list[TrialJob]
    attempts: list[AttemptStatus]
    history: History
    lineages: list[LineageRecord]
    step: int
    total_steps: int | None
    rate: float | None  # steps per second
    generation: int | None  # newest committed
    exports: list[str]
    plan: dict[str, Any] = field(default_factory=dict)
    servers: list[ServerArray] = field(default_factory=list)  # of layout jobs, oldest first
    last_sign: float | None = None  # Unix seconds, by the file server's clock
    ends_at: float | None = None  # when the scheduler ends the newest job, Unix seconds
    rollout: RolloutReport | None = None  # of the newest attempt

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed", "cancelled", "stopped", "killed", "rendered")

    @property
    def eta_s(self) -> float | None:
        if not self.rate or self.total_steps is None:
            return None
        return max(0.0, (self.total_steps - self.step) / self.rate)

    @property
    def live(self) -> AttemptStatus | None:
        return self.attempts[-1] if self.attempts and self.attempts[-1].state == "running" else None

    @property
    def since(self) -> float | None:
        """Since when the newest attempt runs, or the newest job waits; Unix seconds."""
        if self.state in ("running", "stopping") and self.live is not None:
            return self.live.started
        return self.jobs[-1].time or None if self.state == "pending" and self.jobs else None

    @property
    def last_end(self) -> str:
        """Why the last attempt that is over ended, in words; empty where none is."""
        over = [attempt for attempt in self.attempts if attempt.state != "running"]
        return f"attempt {over[-1].id}: {over[-1].cause or over[-1].state}" if over else ""

    def to_json(self) -> dict[str, Any]:
        """What `status --json` prints."""
        return {
            "trial": str(self.trial),
            "dir": str(self.trial.dir),
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            "total_steps": self.total_steps,
            "steps_per_second": self.rate,
            "eta_s": self.eta_s,
            "since": self.since,
            "ends_at": self.ends_at,
            "last_sign": self.last_sign,
            "last_end": self.last_end,
            "rollout": asdict(self.rollout) if self.rollout else None,
            "generation": self.generation,
            "exports": self.exports,
            "lineages": [asdict(line) for line in self.lineages],
            "jobs": [asdict(job) for job in self.jobs],
            "servers": [asdict(array) for array in self.servers],
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "metrics": self.history.steps[-1] if self.history.steps else None,
            "evaluations": self.history.evaluations,
        }


class StatusReader:
    """Reads a trial's story again and again; files that grow are read on, not from the start."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._metrics = MetricsReader(trial)
        self._events = EventFiles(trial)

    def read(self, job_state: JobState | None = None, asked_at: float | None = None) -> TrialStatus:
        """The story now. `job_state` is what the scheduler says of the newest job, None where it was not asked; `asked_at` is
        when it said so (Unix seconds), None for just now."""
        jobs = read_jobs(self.trial)
        lines = lineages(self.trial)
        history = self._metrics.poll()
        attempts = self._attempts(jobs, lines)
        last_sign = _last_sign(self.trial, attempts)
        done = read_json(self.trial.done)
        job = jobs[-1] if jobs else None
        own = attempts[-1] if attempts and (job is None or attempts[-1].job_id == job.job_id) else None
        if isinstance(done, dict):
            state, reason = "done", _not_saved(self.trial)
        else:
            state, reason = determine_state(job, own, job_state, asked_at, last_sign)
        if attempts and attempts[-1].state == "running" and state not in ("running", "stopping", "unknown"):
            attempts[-1].state, attempts[-1].cause = (
                state if state in ("done", "cancelled") else "killed",
                reason,
            )
            if state == "pending":  # what it waits for now is no reason of that end
                attempts[-1].cause = TAKEN_BACK
        step = max(history.last_step, lines[-1].from_step if lines else 0)
        plan = read_json(self.trial.plan_json)
        return TrialStatus(
            trial=self.trial,
            state=state,
            reason=reason,
            jobs=jobs,
            attempts=attempts,
            history=history,
            lineages=lines,
            step=step,
            total_steps=_total_steps(
                self.trial, history, _logged_by(history, lines), jobs, step if state == "done" else None
            ),
            rate=_rate(history, lines[-1].from_step if lines else 0)
            if self._trains(attempts, lines)
            else None,
            generation=newest_generation(self.trial),
            exports=sorted(
                path.name
                for path in self.trial.exports.glob("*")
                if path.is_dir() and not path.name.startswith(".")
            ),
            plan=plan if isinstance(plan, dict) else {},
            servers=read_arrays(self.trial),
            last_sign=last_sign,
            ends_at=self._ends_at(attempts, job_state) if state in ("running", "stopping") else None,
            rollout=read_rollout(self.trial.attempt(attempts[-1].id)) if attempts else None,
        )

    def _trains(self, attempts: list[AttemptStatus], lines: list[LineageRecord]) -> bool:
        """Whether the newest steps are of a trainer that is still at work; of an attempt that is over, of any."""
        if not attempts or attempts[-1].last_step is None or attempts[-1].state != "running":
            return bool(attempts) and attempts[-1].last_step is not None
        newest = attempts[-1]
        trainer = next((role for role in newest.roles if role.role == "trainer"), None)
        if trainer is None or not trainer.running:
            return False
        starts = [
            row
            for row in self._events.rows(newest.id)
            if row.get("event") in ("started", "supervisor_started")
        ]
        whose = [row["role"] for row in starts if row.get("role") in ("trainer", "supervisor")]
        if whose[-1:] == ["supervisor"]:  # the trainer died with the supervisor before this one
            return False
        return not lines or (lines[-1].attempt, lines[-1].incarnation) == (newest.id, trainer.incarnation)

    def _ends_at(self, attempts: list[AttemptStatus], job_state: JobState | None) -> float | None:
        """By the scheduler where it was asked, else as the supervisor last heard."""
        if job_state is not None and job_state.end_time is not None:
            return job_state.end_time
        rows = self._events.rows(attempts[-1].id) if attempts else []
        told = [
            row["ends_at"]
            for row in rows
            if row.get("event") == "end_time" and isinstance(row.get("ends_at"), (int, float))
        ]
        return told[-1] if told else None

    def _attempts(self, jobs: list[TrialJob], lines: list[LineageRecord]) -> list[AttemptStatus]:
        submitted = {job.job_id: number for number, job in enumerate(jobs)}
        by_id = {job.job_id: job for job in jobs}
        last_steps = self._metrics.last_steps()
        found = []
        for folder in self.trial.attempts.glob("*"):
            job_id, _, restart = folder.name.rpartition(".")
            if folder.is_dir() and job_id and restart.isdecimal():
                events = self._events.rows(folder.name)
                own = [line for line in lines if line.attempt == folder.name]
                story = _attempt(self.trial, folder.name, events, own, by_id.get(job_id, TrialJob(job_id)))
                story.last_step = last_steps.get(folder.name)
                found.append(((submitted.get(job_id, len(jobs)), story.started or 0.0, int(restart)), story))
        stories = [story for _, story in sorted(found, key=lambda pair: pair[0])]
        ended = {job.job_id: job for job in jobs if job.event == "ended"}
        for earlier, later in pairwise(
            stories
        ):  # a later start means that these are over, whether they left a word or not
            job = ended.get(earlier.job_id) if later.job_id != earlier.job_id else None
            if earlier.state == "running" and job is not None:
                earlier.state, earlier.cause = describe_exit(
                    job.code, f"{job.reason} (code {job.code})", job.cancelled, job.saves
                )
            elif earlier.state == "running":
                earlier.state, earlier.cause = (
                    "killed",
                    "left no word: killed together with its node, or by the scheduler",
                )
        return stories


def read_status(
    trial: Trial, job_state: JobState | None = None, asked_at: float | None = None
) -> TrialStatus:
    """The story of a trial as its files stand now."""
    return StatusReader(trial).read(job_state, asked_at)


def read_jobs(trial: Trial) -> list[TrialJob]:
    """The submissions of a trial, oldest first."""
    jobs = []
    for path in trial.jobs.glob("*.json"):
        data = read_json(path)
        if isinstance(data, dict) and data.get("kind") != KIND and "_" not in path.stem:
            when = data.get("time")
            jobs.append(
                TrialJob(
                    job_id=path.stem,
                    time=float(when) if isinstance(when, (int, float)) else 0.0,
                    scheduler=str(data.get("scheduler") or ""),
                    cluster=str(data.get("cluster") or ""),
                    start_mode=str(data.get("start_mode") or ""),
                    saves=data.get("start_mode") != "disabled",
                    cancelled=trial.cancel_intent(path.stem).exists(),
                    native_id=record.current(trial, path.stem),
                    other_length=any(
                        str(change).startswith("total_train_") for change in _list(data.get("changed"))
                    ),
                    **_last_word(path.with_suffix(".state")),
                )
            )
    jobs.sort(key=lambda job: (job.time, job.job_id))
    plan = read_json(trial.plan_json)
    if (
        jobs and jobs[-1].start_mode == "resume" and isinstance(plan, dict)
    ):  # the mode that comes after is the plan's alone
        jobs[-1].saves = plan.get("recover_mode") != "disabled"
    return jobs


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _last_word(path: Path) -> dict[str, Any]:
    said = [row for row in JsonLines(path).poll() if isinstance(row.get("event"), str)]
    if not said:
        return {}
    last = said[-1]
    code = last["code"] if isinstance(last.get("code"), int) else None
    return {
        "event": last["event"],
        "code": code,
        "reason": str(last.get("reason") or ""),
        "by_signal": last.get("cancelled") is True,
    }


def newest_generation(trial: Trial) -> int | None:
    """Step of the newest committed generation (its manifest is there; whether it verifies is for decide to say)."""
    steps = [path.parent.name.removeprefix("gen-") for path in trial.recover.glob("gen-*/manifest.json")]
    return max((int(step) for step in steps if step.isdecimal()), default=None)


def _not_saved(trial: Trial) -> str:
    """Why the last state of a trial that is done is no generation, and which is the newest; '' where it is one."""
    record = read_json(trial.exports / "final" / "hpc_rl.json")
    words = record.get("not_saved") if isinstance(record, dict) else None
    return f"its last state is not saved: {words}; exports/final is whole" if words else ""


def _attempt(
    trial: Trial, name: str, events: list[Row], own: list[LineageRecord], job: TrialJob
) -> AttemptStatus:
    attempt = trial.attempt(name)
    ended = read_json(attempt.ended)
    times = [row["time"] for row in events if isinstance(row.get("time"), (int, float))]
    state, cause, code, end_time = "running", "", None, None
    if isinstance(ended, dict):
        code = ended.get("exit_code") if isinstance(ended.get("exit_code"), int) else None
        end_time = ended.get("time") if isinstance(ended.get("time"), (int, float)) else None
        state, cause = describe_exit(code, str(ended.get("reason") or ""), job.cancelled, job.saves)
    return AttemptStatus(
        id=name,
        job_id=job.job_id,
        state=state,
        cause=cause,
        exit_code=code,
        started=min(times, default=None),
        ended=end_time,
        lineages=own,
        last_step=None,
        roles=roles_of(attempt, events),
        stopping=next(
            (
                str(row.get("reason") or "it ends")
                for row in reversed(events)
                if row.get("event") in ENDING_EVENTS
            ),
            "",
        ),
    )


def _last_sign(trial: Trial, attempts: list[AttemptStatus]) -> float | None:
    if not attempts:
        return None
    attempt = trial.attempt(attempts[-1].id)
    growing = [*attempt.dir.glob("metrics.*.jsonl"), *attempt.dir.glob("logs/*"), *_lease_files(trial)]
    paths = [attempt.dir, attempt.events, attempt.ended, *growing]
    return max((stamp for stamp in map(_mtime, paths) if stamp is not None), default=None)


def _lease_files(trial: Trial) -> list[Path]:
    """The owner's lease, which the supervisor renews."""
    return [path for path in trial.names.glob("owner*") if path.is_file()] + list(
        trial.names.glob("owner*/*")
    )


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _logged_by(history: History, lines: list[LineageRecord]) -> str:
    """The submission whose trainer logged the newest step."""
    lineage = history.steps[-1].get("lineage") if history.steps else None
    return next((line.submission for line in reversed(lines) if line.lineage == lineage), "")


def _total_steps(
    trial: Trial, history: History, logged_by: str, jobs: list[TrialJob], reached: int | None
) -> int | None:
    """By the trainer's own word in the metrics, else by the configuration; epochs alone don't tell without the data.

    The word of an earlier submission's trainer does not count where a later one asked for another length.
    """
    since = next((number for number, job in enumerate(jobs) if job.job_id == logged_by), len(jobs))
    if not any(job.other_length for job in jobs[since + 1 :]):
        for row in reversed(history.steps):
            if isinstance(row.get("total_steps"), int):
                return row["total_steps"]
    config = read_json(trial.config_json)
    total = config.get("total_train_steps") if isinstance(config, dict) else None
    return total if isinstance(total, int) else reached


def _rate(history: History, from_step: int) -> float | None:
    """Steps per second over the newest steps since the last start of the trainer."""
    rows = [
        row
        for row in history.steps[-RATE_STEPS:]
        if row["step"] > from_step and isinstance(row.get("time"), (int, float))
    ]
    if len(rows) >= 2 and rows[-1]["time"] > rows[0]["time"]:
        return (rows[-1]["step"] - rows[0]["step"]) / (rows[-1]["time"] - rows[0]["time"])
    if rows and isinstance(rows[-1].get("step_s"), (int, float)) and rows[-1]["step_s"] > 0:
        return 1.0 / rows[-1]["step_s"]
    return None
