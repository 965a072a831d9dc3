"""What happened to a trial, told from the files of its directory alone: state, attempts, roles, steps, generations.

Missing, stale and partial files are tolerated: what can't be known is left out. The scheduler is no part of this; a
caller that asked it passes the answer in, and it only decides between "still runs" and "died without a word".
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc_rl.errors import ExitCode
from hpc_rl.launch.incarnations import EventFiles, RoleStory, roles_of
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.schedulers.slurm_states import find, why_pending
from hpc_rl.stats.read import History, JsonLines, Lineage, MetricsReader, Row, lineages
from hpc_rl.trial import Trial, read_json

SILENCE_S = 120.0  # without a scheduler's word, a trial whose files rest for so long is no longer called running
RATE_STEPS = 50  # steps over which the rate is taken


@dataclass
class Job:
    """One submission, as `jobs/<jobid>.json` has it, and the last word of its script in `jobs/<jobid>.state`."""

    job_id: str
    time: float = 0.0
    scheduler: str = ""
    start_mode: str = ""
    cancelled: bool = False  # a person's intent lies there
    event: str = ""  # started | requeued | supervisor_killed | ended
    code: int | None = None  # of its end
    reason: str = ""  # of its end, in the script's words


@dataclass
class AttemptStory:
    """One start by the scheduler. `state` is running | done | cancelled | stopped | failed | killed | pending."""

    id: str
    job_id: str
    state: str
    cause: str  # in words, why it ended; empty while it runs
    exit_code: int | None
    started: float | None
    ended: float | None
    lineages: list[Lineage]
    last_step: int | None  # the newest step it logged, cut off later or not
    roles: list[RoleStory]
    stopping: str = ""  # why it is about to end, in the supervisor's words

    @property
    def num_restarts(self) -> int:
        return sum(role.num_restarts for role in self.roles)


@dataclass
class Story:
    """Everything that status and follow show. `state` is one of the attempts' words, or rendered | stopping | unknown."""

    trial: Trial
    state: str
    reason: str
    jobs: list[Job]
    attempts: list[AttemptStory]
    history: History
    lineages: list[Lineage]
    step: int
    total_steps: int | None
    rate: float | None  # steps per second
    generation: int | None  # newest committed
    exports: list[str]
    plan: dict[str, Any] = field(default_factory=dict)
    last_sign: float | None = None  # Unix seconds, by the file server's clock

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed", "cancelled", "stopped", "killed", "rendered")

    @property
    def eta_s(self) -> float | None:
        if not self.rate or self.total_steps is None:
            return None
        return max(0.0, (self.total_steps - self.step) / self.rate)

    @property
    def live(self) -> AttemptStory | None:
        return self.attempts[-1] if self.attempts and self.attempts[-1].state == "running" else None

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
            "generation": self.generation,
            "exports": self.exports,
            "lineages": [asdict(line) for line in self.lineages],
            "jobs": [asdict(job) for job in self.jobs],
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "metrics": self.history.steps[-1] if self.history.steps else None,
            "evaluations": self.history.evaluations,
        }


class Reader:
    """Reads a trial's story again and again; files that grow are read on, not from the start."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._metrics = MetricsReader(trial)
        self._events = EventFiles(trial)

    def read(self, job_state: JobState | None = None) -> Story:
        """The story now. `job_state` is what the scheduler says of the newest job, None where it was not asked."""
        jobs = read_jobs(self.trial)
        lines = lineages(self.trial)
        history = self._metrics.poll()
        attempts = self._attempts(jobs, lines)
        last_sign = _last_sign(self.trial, attempts)
        done = read_json(self.trial.done)
        state, reason = _state(jobs, attempts, job_state, last_sign, isinstance(done, dict))
        if attempts and attempts[-1].state == "running" and state not in ("running", "stopping", "unknown"):
            attempts[-1].state, attempts[-1].cause = ("done", "") if state == "done" else ("killed", reason)
        step = max(history.last_step, lines[-1].from_step if lines else 0)
        plan = read_json(self.trial.plan_json)
        return Story(
            trial=self.trial,
            state=state,
            reason=reason,
            jobs=jobs,
            attempts=attempts,
            history=history,
            lineages=lines,
            step=step,
            total_steps=_total_steps(self.trial, history, step if state == "done" else None),
            rate=_rate(history, lines[-1].from_step if lines else 0),
            generation=newest_generation(self.trial),
            exports=sorted(path.name for path in self.trial.exports.glob("*") if path.is_dir() and not path.name.startswith(".")),
            plan=plan if isinstance(plan, dict) else {},
            last_sign=last_sign,
        )

    def _attempts(self, jobs: list[Job], lines: list[Lineage]) -> list[AttemptStory]:
        submitted = {job.job_id: number for number, job in enumerate(jobs)}
        cancelled = {job.job_id for job in jobs if job.cancelled}
        last_steps = self._metrics.last_steps()
        found = []
        for folder in self.trial.attempts.glob("*"):
            job_id, _, restart = folder.name.rpartition(".")
            if folder.is_dir() and job_id and restart.isdigit():
                events = self._events.rows(folder.name)
                own = [line for line in lines if line.attempt == folder.name]
                story = _attempt(self.trial, folder.name, events, own, job_id in cancelled)
                story.last_step = last_steps.get(folder.name)
                found.append(((submitted.get(job_id, len(jobs)), story.started or 0.0, int(restart)), story))
        stories = [story for _, story in sorted(found, key=lambda pair: pair[0])]
        ended = {job.job_id: job for job in jobs if job.event == "ended"}
        for earlier, later in pairwise(stories):  # a later start means that these are over, whether they left a word or not
            job = ended.get(earlier.job_id) if later.job_id != earlier.job_id else None
            if earlier.state == "running" and job is not None:
                earlier.state, earlier.cause = describe_end(job.code, f"{job.reason} (code {job.code})", job.cancelled)
            elif earlier.state == "running":
                earlier.state, earlier.cause = "killed", "left no word: killed together with its node, or by the scheduler"
        return stories


def tell(trial: Trial, job_state: JobState | None = None) -> Story:
    """The story of a trial as its files stand now."""
    return Reader(trial).read(job_state)


def read_jobs(trial: Trial) -> list[Job]:
    """The submissions of a trial, oldest first."""
    jobs = []
    for path in trial.jobs.glob("*.json"):
        data = read_json(path)
        if isinstance(data, dict):
            when = data.get("time")
            jobs.append(
                Job(
                    job_id=path.stem,
                    time=float(when) if isinstance(when, (int, float)) else 0.0,
                    scheduler=str(data.get("scheduler") or ""),
                    start_mode=str(data.get("start_mode") or ""),
                    cancelled=trial.cancel_intent(path.stem).exists(),
                    **_last_word(path.with_suffix(".state")),
                )
            )
    return sorted(jobs, key=lambda job: (job.time, job.job_id))


def _last_word(path: Path) -> dict[str, Any]:
    said = [row for row in JsonLines(path).poll() if isinstance(row.get("event"), str)]
    if not said:
        return {}
    last = said[-1]
    code = last["code"] if isinstance(last.get("code"), int) else None
    return {"event": last["event"], "code": code, "reason": str(last.get("reason") or "")}


def newest_generation(trial: Trial) -> int | None:
    """Step of the newest committed generation (its manifest is there; whether it verifies is for decide to say)."""
    steps = [path.parent.name.removeprefix("gen-") for path in trial.recover.glob("gen-*/manifest.json")]
    return max((int(step) for step in steps if step.isdigit()), default=None)


def _attempt(trial: Trial, name: str, events: list[Row], own: list[Lineage], cancelled: bool) -> AttemptStory:
    attempt = trial.attempt(name)
    ended = read_json(attempt.ended)
    times = [row["time"] for row in events if isinstance(row.get("time"), (int, float))]
    state, cause, code, end_time = "running", "", None, None
    if isinstance(ended, dict):
        code = ended.get("exit_code") if isinstance(ended.get("exit_code"), int) else None
        end_time = ended.get("time") if isinstance(ended.get("time"), (int, float)) else None
        state, cause = describe_end(code, str(ended.get("reason") or ""), cancelled)
    return AttemptStory(
        id=name,
        job_id=name.rpartition(".")[0],
        state=state,
        cause=cause,
        exit_code=code,
        started=min(times, default=None),
        ended=end_time,
        lineages=own,
        last_step=None,
        roles=roles_of(attempt, events),
        stopping=next((str(row.get("reason") or "it ends") for row in reversed(events) if row.get("event") in ENDING_EVENTS), ""),
    )


ENDING_EVENTS = ("stopping", "failing", "abandoning")  # after which an attempt only ends


ENDS: dict[int, tuple[str, str]] = {
    ExitCode.DONE: ("done", "reached its end"),
    ExitCode.NOTHING_TO_RESUME: ("failed", "found nothing to resume"),
    ExitCode.REFUSED: ("failed", "refused its configuration"),
    ExitCode.BAD_CONFIG: ("failed", "refused its configuration"),
    ExitCode.STOPPED: ("stopped", "stopped on purpose, state saved"),
    ExitCode.FAILED: ("failed", "failed"),
    ExitCode.CANNOT_WRITE: ("failed", "could not write where it must"),
    ExitCode.KILLED_BY_PERSON: ("killed", "killed by a person"),
    ExitCode.KILLED_BY_SYSTEM: ("killed", "killed by the system"),
}


def describe_end(code: int | None, reason: str, cancelled: bool) -> tuple[str, str]:
    """State and words for an exit code with its recorded reason."""
    state, words = ENDS.get(code, ("failed", f"ended with exit code {code}")) if code is not None else ("failed", "ended")
    if cancelled and state in ("stopped", "killed"):
        state, words = "cancelled", "cancelled by a person" + (", state saved" if code == ExitCode.STOPPED else "")
    return state, f"{words}: {reason}" if reason and reason not in words else words


DEAD_JOBS = {
    State.CANCELLED: "cancelled",
    State.FAILED: "failed",
    State.TIMEOUT: "killed",
    State.NODE_FAIL: "killed",
    State.OUT_OF_MEMORY: "killed",
    State.PREEMPTED: "killed",
    State.DONE: "killed",  # without a word of the supervisor, that is
}


def _state(
    jobs: list[Job], attempts: list[AttemptStory], job_state: JobState | None, last_sign: float | None, done: bool
) -> tuple[str, str]:
    """State of the trial, and why. What files say for certain comes before the scheduler's word, that before their age."""
    if done:
        return "done", ""
    if not jobs and not attempts:
        return "rendered", "never submitted"
    job = jobs[-1] if jobs else Job("")
    own = attempts[-1] if attempts and (not jobs or attempts[-1].job_id == job.job_id) else None
    if job_state is not None and job_state.state is State.PENDING:
        waits = "to be started again" if own is not None else "to be started"
        return "pending", f"waits {waits}" + _pending_words(job_state.reason)
    if own is None:
        return _unstarted(job, job_state)
    if own.state == "running":
        return _unended(job, own, job_state, last_sign)
    dead = job.event == "ended" or (job_state is not None and not job_state.state.alive)
    if dead or own.state in ("done", "failed", "cancelled"):
        # A job that did not go on after a stop says why in its own last words.
        more = f" ({job.reason})" if own.state == "stopped" and job.event == "ended" and job.reason else ""
        return own.state, "" if own.state == "done" else own.cause + more
    return "pending", f"{own.cause}; it is being started again"


def _unstarted(job: Job, job_state: JobState | None) -> tuple[str, str]:
    """The newest job has made no attempt."""
    if job.event == "ended":
        words = f"ended before the supervisor wrote anything: {job.reason} (code {job.code})"
        return ("cancelled" if job.cancelled else "failed"), words
    if job_state is not None and job_state.state.alive:
        return "running", "the job has started, the supervisor has not written yet"
    if job_state is not None and job_state.state in DEAD_JOBS:
        return DEAD_JOBS[job_state.state], f"before it started anything; {_scheduler_words(job_state)}"
    return ("cancelled", "cancelled before it started") if job.cancelled else ("unknown", "submitted, has not written yet")


def _unended(job: Job, own: AttemptStory, job_state: JobState | None, last_sign: float | None) -> tuple[str, str]:
    """The newest attempt left no word of its end."""
    if job.event == "ended":
        return describe_end(job.code, f"{job.reason} (code {job.code})", job.cancelled)
    if job_state is not None and job_state.state in DEAD_JOBS:
        return DEAD_JOBS[job_state.state], _scheduler_words(job_state)
    silent_s = time.time() - last_sign if last_sign is not None else SILENCE_S
    if (job_state is not None and job_state.state.alive) or silent_s < SILENCE_S:  # the age decides only what is shown
        wish = "a person asked it to stop; it saves its state first" if job.cancelled else own.stopping
        return ("stopping", wish) if wish else ("running", "")
    return "unknown", f"no word of its end, and no sign of life for {silent_s / 60:.0f} min"


def _scheduler_words(job_state: JobState) -> str:
    said = " ".join(word for word in (job_state.native or job_state.state.value, job_state.reason) if word and word != "None")
    known = find(job_state.native)
    return f"the scheduler says {said}" + (f": it {known.meaning}" if known and known.failure else "")


def _pending_words(reason: str) -> str:
    if reason in ("", "None"):
        return ""
    words = why_pending(reason)[1]
    return f" ({reason})" if words == reason else f" ({reason}: {words})"


def _last_sign(trial: Trial, attempts: list[AttemptStory]) -> float | None:
    if not attempts:
        return None
    attempt = trial.attempt(attempts[-1].id)
    growing = [*attempt.dir.glob("metrics.*.jsonl"), *attempt.dir.glob("logs/*"), *_lease_files(trial)]
    paths = [attempt.dir, attempt.events, attempt.ended, *growing]
    return max((stamp for stamp in map(_mtime, paths) if stamp is not None), default=None)


def _lease_files(trial: Trial) -> list[Path]:
    """The owner's lease, which the supervisor renews."""
    return [path for path in trial.names.glob("owner*") if path.is_file()] + list(trial.names.glob("owner*/*"))


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _total_steps(trial: Trial, history: History, reached: int | None) -> int | None:
    """By the trainer's own word in the metrics, else by the configuration; epochs alone don't tell without the data."""
    for row in reversed(history.steps):
        if isinstance(row.get("total_steps"), int):
            return row["total_steps"]
    config = read_json(trial.config_json)
    total = config.get("total_train_steps") if isinstance(config, dict) else None
    return total if isinstance(total, int) else reached


def _rate(history: History, from_step: int) -> float | None:
    """Steps per second over the newest steps since the last start of the trainer."""
    rows = [row for row in history.steps[-RATE_STEPS:] if row["step"] > from_step and isinstance(row.get("time"), (int, float))]
    if len(rows) >= 2 and rows[-1]["time"] > rows[0]["time"]:
        return (rows[-1]["step"] - rows[0]["step"]) / (rows[-1]["time"] - rows[0]["time"])
    if rows and isinstance(rows[-1].get("step_s"), (int, float)) and rows[-1]["step_s"] > 0:
        return 1.0 / rows[-1]["step_s"]
    return None
