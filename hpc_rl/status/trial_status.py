"""What happened to a trial, from the files of its directory: state, attempts, roles, steps, checkpoints.

Missing, stale and partial files are tolerated: unknown values are left out. A caller that queried the
scheduler passes its answer in; it only tells a running job from one that was killed without recording an end.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from hpc_rl.core.errors import JobEvent
from hpc_rl.core.files import Row
from hpc_rl.core.records import EndedRecord, Event, EventKind, EventLog, LineageRecord, TrialState
from hpc_rl.core.trial import SCORES, AttemptId, Trial, load_json, load_object
from hpc_rl.name_resolve import load_names_dir
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.stats.idle import IdleSteps, SkippedUpdates, count_idle, count_skipped
from hpc_rl.stats.read import History, MetricsReader, load_known_lineages
from hpc_rl.status.attempts import STOPPING_EVENTS, AttemptStatus, list_roles, list_silences
from hpc_rl.status.formatting import format_duration, format_number, format_rate, format_time
from hpc_rl.status.heartbeat import Heartbeat, SupervisorSilence
from hpc_rl.status.rollout_report import RolloutReport, load_rollout
from hpc_rl.status.state_reason import describe_exit, describe_job_exit, describe_state, determine_state
from hpc_rl.status.submitted_jobs import TrialJob, load_jobs
from hpc_rl.status.weight_history import WeightHistory, load_weight_history
from hpc_rl.supervise.server_array import ServerArray, load_arrays

SUSPENDED = "SUSPENDED"  # Slurm's name of the state of a job whose processes are stopped
KILLED_WITH_NODE = "ended without a record (its node failed, or the scheduler killed it)"
TAKEN_BACK = "ended without a record (preempted, or its node failed); the scheduler starts the job again"
RATE_STEPS = 50  # newest steps over which the rate is taken
# Activity of the trainer between steps: its name -> the name for users.
BETWEEN_STEPS = {
    "evaluate": "evaluating",
    "save": "saving",
    "export": "exporting",
    "wait for room": "disk full",
}
IN_CALLBACK = "callback "  # and its name: another activity
# What `status --json` prints of a trial under the names that it has here.
JSON_FIELDS = ("state", "reason", "step", "total_steps", "doing", "ends_at", "last_sign", "exports")
JSON_COMPUTED = ("silent_hosts", "eta_s", "since", "last_end")
JSON_RECORDS = ("lineages", "servers", "attempts")


@dataclass
class TrialStatus:
    """Everything that status and follow show."""

    trial: Trial
    state: TrialState
    reason: str
    jobs: list[TrialJob]
    attempts: list[AttemptStatus]
    history: History
    lineages: list[LineageRecord]
    step: int
    total_steps: int | None
    rate: float | None  # steps per second
    generation: int | None  # step of the newest checkpoint
    exports: list[str]
    plan: dict[str, Any] = field(default_factory=dict)
    servers: list[ServerArray] = field(default_factory=list)  # of layout jobs, oldest first
    last_sign: float | None = None  # newest change of a file, Unix seconds by the file server's clock
    ends_at: float | None = None  # when the scheduler ends the newest job, Unix seconds
    rollout: RolloutReport | None = None  # of the newest attempt
    last_rollout: RolloutReport | None = None  # the newest of all attempts
    doing: str = ""  # activity of the trainer, such as `train` or `evaluate`
    doing_step: int = 0
    supervisor_silence: SupervisorSilence | None = None  # of a live attempt
    weight_history: WeightHistory | None = None  # if weights.history_gb is set

    @property
    def silent_hosts(self) -> list[str]:
        """Sentences about the hosts of a live attempt without a heartbeat, the supervisor's first."""
        if self.live is None or self.over:
            return []
        lines = [one.text(True) for one in self.live.silences if one.until is None]
        if silence := self.supervisor_silence:
            lasts = format_duration(silence.silent_s)
            lines.insert(0, f"the supervisor on {silence.node} has sent no heartbeat for {lasts}")
        return lines

    @property
    def over(self) -> bool:
        return self.state.is_over

    @property
    def eta_s(self) -> float | None:
        if not self.rate or self.total_steps is None:
            return None
        return max(0.0, (self.total_steps - self.step) / self.rate)

    @property
    def idle(self) -> IdleSteps:
        """The steps that taught the model nothing."""
        return count_idle(self.history.steps)

    @property
    def learns_nothing(self) -> bool:
        """Whether `status` warns of steps that taught the model nothing."""
        return self.idle.is_notable(self.over)

    @property
    def skipped(self) -> SkippedUpdates:
        """The optimizer updates that were not finite."""
        return count_skipped(self.history.steps)

    @property
    def rejected(self) -> dict[str, int]:
        """How many prompts were rejected, by reason, the most frequent first."""
        counts = self.last_rollout.rejected if self.last_rollout else {}
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))

    def format_held_out(self, values: Sequence[tuple[int, float | None]]) -> str:
        """Return the first and the last value of a held-out measure, and over how many rows they are."""
        ends = values[:1] if len(values) == 1 else [values[0], values[-1]]
        rows = self.history.held_out_rows
        over = [f"over {counts[0]} of {sum(counts)} rows" if (counts := rows.get(step)) and counts[1] else ""
                for step, _ in ends]  # fmt: skip
        same = len(set(over)) == 1
        places = [f"step {step}" + ("" if same or not text else f", {text}")
                  for (step, _), text in zip(ends, over, strict=True)]  # fmt: skip
        curve = " -> ".join(
            f"{format_number(value)} ({place})" for (_, value), place in zip(ends, places, strict=True)
        )
        return f"{curve}, {over[0]}" if same and over[0] else curve

    @property
    def pace(self) -> str:
        """Training speed and time left, or the trainer's activity between steps.

        Empty while a host is silent: the past pace tells nothing about now.
        """
        if self.silent_hosts:
            return ""
        now = BETWEEN_STEPS.get(self.doing, "")
        if self.doing.startswith(IN_CALLBACK):
            now = f"in {self.doing}"
        parts = [f"{now} at step {self.doing_step}"] if now else []
        if self.rate:
            left = "" if self.eta_s is None else f", done in about {format_duration(self.eta_s)}"
            parts.append(format_rate(self.rate) + left)
        return "; then ".join(parts)

    @property
    def live(self) -> AttemptStatus | None:
        """The newest attempt while it runs."""
        return self.attempts[-1] if self.attempts and _is_running(self.attempts[-1]) else None

    @property
    def since(self) -> float | None:
        """Since when the newest attempt has been running, or the newest job pending; Unix seconds."""
        if self.state in (TrialState.RUNNING, TrialState.STOPPING) and self.live is not None:
            return self.live.started
        return self.jobs[-1].time or None if self.state is TrialState.PENDING and self.jobs else None

    @property
    def last_end(self) -> str:
        """Why the last attempt that is over ended; empty if none is."""
        over = [attempt for attempt in self.attempts if not _is_running(attempt)]
        return f"attempt {over[-1].id}: {describe_state(over[-1].state, over[-1].cause)}" if over else ""

    def to_json(self) -> dict[str, Any]:
        """Return what `status --json` prints."""
        values = {name: getattr(self, name) for name in JSON_FIELDS + JSON_COMPUTED}
        records = {name: [asdict(one) for one in getattr(self, name)] for name in JSON_RECORDS}
        evaluated = list(self.history.held_out_rows.values())
        scored, left_out = evaluated[-1] if evaluated else (None, None)
        return {
            **values,
            **records,
            "trial": str(self.trial),
            "dir": str(self.trial.dir),
            "checkpoint": self.generation,
            "weight_history": asdict(self.weight_history) if self.weight_history else None,
            "steps_per_second": self.rate,
            "rollout": asdict(self.rollout) if self.rollout else None,
            "jobs": [asdict(job) | {"event": job.event or ""} for job in self.jobs],
            "metrics": self.history.steps[-1] if self.history.steps else None,
            "evaluations": self.history.evaluations,
            "scores": load_object(self.trial.results / SCORES) or None,
            "rejected_prompts": {"total": sum(self.rejected.values()), "reasons": self.rejected},
            "held_out_rows": {"scored": scored, "left_out": left_out},
            "idle_steps": asdict(self.idle) | {"notable": self.learns_nothing},
            "skipped_updates": asdict(self.skipped),
        }


class StatusReader:
    """Reads the status of a trial repeatedly; files that grow are read incrementally."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._metrics = MetricsReader(trial)
        self._events: dict[str, EventLog] = {}
        self._heartbeat: Heartbeat | None = None

    def read(
        self,
        job_state: JobState | None = None,
        asked_at: float | None = None,
        patience_s: float = 0.0,
    ) -> TrialStatus:
        """Return the status now.

        Args:
            job_state: The scheduler's answer for the newest job; None if it was not queried.
            asked_at: When it was queried, Unix seconds; None for just now.
            patience_s: How long to wait for a heartbeat where files look old; 0 for a reader that stays.
        """
        jobs = load_jobs(self.trial)
        lines = load_known_lineages(self.trial)
        history = self._metrics.poll()
        newest = find_newest_generation(self.trial)
        attempts = self._attempts(jobs, lines)
        last_sign = _find_last_sign(self.trial, attempts)
        job, job_state = jobs[-1] if jobs else TrialJob(""), job_state or JobState("", State.UNKNOWN)
        own = attempts[-1] if attempts else None
        if own is not None and job.job_id and own.job_id != job.job_id:
            own = None
        if isinstance(load_json(self.trial.done), dict):
            state, reason = TrialState.DONE, _describe_unsaved(self.trial)
        else:
            state, reason = determine_state(job, own, job_state, asked_at, last_sign)
        _close_attempt(attempts, state, reason, job)
        from_step = lines[-1].from_step if lines else 0
        step = max(history.last_step, from_step)
        reached = step if state is TrialState.DONE else None
        alive = state in (TrialState.RUNNING, TrialState.STOPPING)
        doing = self._doing(attempts)
        rollout = load_rollout(self.trial.attempt(attempts[-1].id)) if attempts else None
        status = TrialStatus(
            trial=self.trial,
            state=state,
            reason=reason,
            jobs=jobs,
            attempts=attempts,
            history=history,
            lineages=lines,
            step=step,
            total_steps=_find_total_steps(self.trial, history, lines, jobs, reached) if job.trains else None,
            rate=_compute_rate(history, from_step) if self._trains(attempts, lines) else None,
            generation=newest,
            exports=sorted(path.name for path in self.trial.exports.glob("[!.]*") if path.is_dir()),
            plan=load_object(self.trial.plan_json),
            servers=load_arrays(self.trial),
            last_sign=last_sign,
            ends_at=self._ends_at(attempts, job_state) if alive else None,
            rollout=rollout,
            last_rollout=rollout or self._earlier_rollout(attempts),
            doing=str(doing.get("doing", "")),
            doing_step=at if isinstance(at := doing.get("step"), int) else 0,
            supervisor_silence=self._silence(attempts, job_state, patience_s) if alive else None,
            weight_history=load_weight_history(self.trial),
        )
        return replace(status, rate=None) if status.silent_hosts else status

    def _silence(
        self, attempts: list[AttemptStatus], job_state: JobState, patience_s: float
    ) -> SupervisorSilence | None:
        """Return whether the supervisor of a live attempt is silent; one that is suspended may be."""
        if not attempts or not _is_running(attempts[-1]) or job_state.native == SUSPENDED:
            return None
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(NameResolve(load_names_dir(self.trial)))
        return self._heartbeat.silence(attempts[-1].id, patience_s)

    def _earlier_rollout(self, attempts: list[AttemptStatus]) -> RolloutReport | None:
        reports = (load_rollout(self.trial.attempt(one.id)) for one in reversed(attempts[:-1]))
        return next(filter(None, reports), None)

    def _event_rows(self, attempt: str) -> list[Event]:
        return self._events.setdefault(attempt, EventLog(self.trial.attempt(attempt))).poll()

    def _trains(self, attempts: list[AttemptStatus], lines: list[LineageRecord]) -> bool:
        """Return whether the trainer of the newest steps is at work; True for an attempt that is over."""
        if not attempts or attempts[-1].last_step is None:
            return False
        newest = attempts[-1]
        if not _is_running(newest):
            return True
        trainer = next((role for role in newest.roles if role.role == "trainer"), None)
        if trainer is None or not trainer.running:
            return False
        starts = (EventKind.STARTED, EventKind.SUPERVISOR_STARTED)
        started = [event.role for event in self._event_rows(newest.id) if event.kind in starts]
        last = next((role for role in reversed(started) if role in ("trainer", "supervisor")), "")
        if last == "supervisor":  # the trainer died with the supervisor before this one
            return False
        return not lines or (lines[-1].attempt, lines[-1].incarnation) == (newest.id, trainer.incarnation)

    def _doing(self, attempts: list[AttemptStatus]) -> Row:
        """Return the report of a live attempt's trainer; {} without one."""
        if not attempts or not _is_running(attempts[-1]):
            return {}
        trainer = next((role for role in attempts[-1].roles if role.role == "trainer" and role.running), None)
        attempt = self.trial.attempt(attempts[-1].id)
        return load_object(attempt.activity("trainer", 0, trainer.incarnation)) if trainer else {}

    def _final_step(self, own: list[LineageRecord], last_step: int | None) -> int | None:
        """Return where the last start of training of an attempt ended; `last_step` without its record."""
        if not own:
            return last_step
        known = self._metrics.last_steps_of_starts()
        return known.get((own[-1].attempt, own[-1].incarnation), own[-1].from_step)

    def _ends_at(self, attempts: list[AttemptStatus], job_state: JobState) -> float | None:
        """Return when the job ends: by the scheduler's answer, else as the supervisor recorded it."""
        events = self._event_rows(attempts[-1].id) if attempts else []
        known = [event.ends_at for event in events if event.kind is EventKind.END_TIME]
        return job_state.end_time or next(filter(None, reversed(known)), None)

    def _attempts(self, jobs: list[TrialJob], lines: list[LineageRecord]) -> list[AttemptStatus]:
        """Return the attempts in the order of submission, then of restart."""
        submitted = {job.job_id: number for number, job in enumerate(jobs)}
        last_steps = self._metrics.last_steps()
        makers = find_generation_makers(self.trial)
        found = []
        for folder in self.trial.attempts.glob("*"):
            known = AttemptId.parse(folder.name)
            if known is not None and folder.is_dir():
                number = submitted.get(known.job_id, len(jobs))
                job = jobs[number] if number < len(jobs) else TrialJob(known.job_id)
                attempt = self._attempt(folder.name, job, last_steps.get(folder.name), lines, makers)
                found.append(((number, attempt.started or 0.0, known.restart), attempt, job))
        found.sort(key=lambda one: one[0])
        for (_, earlier, job), (_, later, _) in pairwise(found):
            lost = describe_lost_node(earlier, job, "")
            if lost or _is_running(earlier):  # a later start means that it is over
                earlier.state, earlier.cause = TrialState.KILLED, lost or KILLED_WITH_NODE
                if not lost and job.ended and later.job_id != job.job_id:
                    steps = earlier.final_step, earlier.saved_step
                    earlier.state, earlier.cause = describe_job_exit(job, *steps)
        return [attempt for _, attempt, _ in found]

    def _attempt(
        self,
        name: str,
        job: TrialJob,
        last_step: int | None,
        lines: list[LineageRecord],
        makers: dict[int, str],
    ) -> AttemptStatus:
        attempt, events = self.trial.attempt(name), self._event_rows(name)
        ended = EndedRecord.read(attempt.ended)
        own = [line for line in lines if line.attempt == name]
        final_step = self._final_step(own, last_step)
        saved_step = _find_saved_step(name, own, lines, events, makers)
        state, cause = TrialState.RUNNING, ""
        if ended is not None:
            state, cause = describe_exit(ended, job, final_step, saved_step)
        stopping = [event.reason or "it is stopping" for event in events if event.kind in STOPPING_EVENTS]
        return AttemptStatus(
            id=name,
            job_id=job.job_id,
            state=state,
            cause=cause,
            exit_code=ended.exit_code if ended else None,
            started=min((event.time for event in events if event.time is not None), default=None),
            ended=ended.time if ended else None,
            lineages=own,
            last_step=last_step,
            final_step=final_step,
            saved_step=saved_step,
            roles=list_roles(attempt, events),
            stopping=stopping[-1] if stopping else "",
            silences=list_silences(events),
        )


def load_status(
    trial: Trial, job_state: JobState | None = None, asked_at: float | None = None, patience_s: float = 0.0
) -> TrialStatus:
    """Return the status of a trial as its files are now; arguments as of `StatusReader.read`."""
    return StatusReader(trial).read(job_state, asked_at, patience_s)


def _is_running(attempt: AttemptStatus) -> bool:
    return attempt.state is TrialState.RUNNING


def describe_lost_node(attempt: AttemptStatus, job: TrialJob, otherwise: str) -> str:
    """Return that a watch gave an attempt back, and why, or `otherwise` if that is not known."""
    known = AttemptId.parse(attempt.id)
    lost = job.lost_starts.get(known.restart) if known and known.job_id == job.job_id else None
    if lost is None:
        return otherwise
    what = "job script was killed" if lost.event is JobEvent.SCRIPT_KILLED else "first node was lost"
    return f"its {what}; a watch process on another node ended this start at {format_time(lost.time)}"


def _close_attempt(attempts: list[AttemptStatus], state: TrialState, reason: str, job: TrialJob) -> None:
    """Mark the newest attempt as over where the trial is known not to run, although it recorded no end."""
    if not attempts or not _is_running(attempts[-1]):
        return
    if state is TrialState.PENDING:  # the current wait does not explain that end
        attempts[-1].state = TrialState.KILLED
        attempts[-1].cause = describe_lost_node(attempts[-1], job, TAKEN_BACK)
    elif state.is_over:
        closed = state if state in (TrialState.DONE, TrialState.CANCELLED) else TrialState.KILLED
        attempts[-1].state, attempts[-1].cause = closed, reason


def find_newest_generation(trial: Trial) -> int | None:
    """Return the step of the newest checkpoint that has a manifest; it is not verified."""
    steps = [path.parent.name.removeprefix("gen-") for path in trial.recover.glob("gen-*/manifest.json")]
    return max((int(step) for step in steps if step.isdecimal()), default=None)


def find_generation_makers(trial: Trial) -> dict[int, str]:
    """Return the attempts that made the checkpoints with a manifest, by step; '' if unknown."""
    makers = {}
    for path in trial.recover.glob("gen-*/manifest.json"):
        step = path.parent.name.removeprefix("gen-")
        if step.isdecimal():
            makers[int(step)] = str(load_object(path).get("attempt") or "")
    return makers


def _find_saved_step(
    attempt: str,
    own: list[LineageRecord],
    lines: list[LineageRecord],
    events: list[Event],
    makers: dict[int, str],
) -> int | None:
    """Return the newest checkpoint that an attempt made or started from, also one that is gone by now."""
    numbers = {line.lineage for line in own}
    steps = [event.step for event in events if event.kind is EventKind.PROGRESS and event.step is not None]
    steps += [line.from_step for line in own if line.from_lineage is not None]
    steps += [line.from_step for line in lines if line.from_lineage in numbers]
    steps += [step for step, maker in makers.items() if maker in ("", attempt)]
    return max(steps, default=None)


def _describe_unsaved(trial: Trial) -> str:
    """Return why the last step of a done trial has no checkpoint; '' if it has."""
    why = load_object(trial.exports / "final" / "hpc_rl.json").get("not_saved")
    return f"the last step was not saved: {why}; exports/final is complete" if why else ""


def _find_last_sign(trial: Trial, attempts: list[AttemptStatus]) -> float | None:
    """Return when a file of the newest attempt, or the supervisor's lease, last changed."""
    if not attempts:
        return None
    attempt = trial.attempt(attempts[-1].id)
    growing = [*attempt.dir.glob("metrics.*.jsonl"), *attempt.dir.glob("logs/*")]
    leases = [path for path in trial.names.glob("owner*") if path.is_file()]
    paths = [attempt.dir, attempt.events, attempt.ended, *growing, *leases, *trial.names.glob("owner*/*")]
    stamps = []
    for path in paths:
        with suppress(OSError):
            stamps.append(path.stat().st_mtime)
    return max(stamps, default=None)


def _find_total_steps(
    trial: Trial, history: History, lines: list[LineageRecord], jobs: list[TrialJob], reached: int | None
) -> int | None:
    """Return the length by the trainer's own metrics, else by the configuration.

    Epochs alone don't tell it without the data. What an earlier submission's trainer logged does not count
    where a later submission asked for another length.
    """
    lineage = history.steps[-1].get("lineage") if history.steps else None
    logged_by = next((line.submission for line in reversed(lines) if line.lineage == lineage), "")
    since = next((number for number, job in enumerate(jobs) if job.job_id == logged_by), len(jobs))
    if not any(job.other_length for job in jobs[since + 1 :]):
        logged = [row["total_steps"] for row in history.steps if isinstance(row.get("total_steps"), int)]
        if logged:
            return logged[-1]
    total = load_object(trial.config_json).get("total_train_steps")
    return total if isinstance(total, int) else reached


def find_replica_names(status: TrialStatus) -> dict[tuple[str, int], str]:
    """Return the names of environments and the pools of servers, by role and index."""
    section = load_object(status.trial.config_json).get("environments") or {}
    names = {("environment", index): name for index, name in enumerate(section.get("commands") or {})}
    units = status.plan.get("units") or []
    pools = {
        ("server", one.get("index")): str(one.get("pool") or "")
        for one in units
        if one.get("role") == "server"
    }
    return names | (pools if len(set(pools.values())) > 1 else {})


def _compute_rate(history: History, from_step: int) -> float | None:
    """Return steps per second over the newest steps since the last start of the trainer."""
    rows = [
        row for row in history.steps[-RATE_STEPS:] if row["step"] > from_step and _get_number(row, "time")
    ]
    if not rows:
        return None
    first, last = rows[0], rows[-1]
    if len(rows) >= 2 and last["time"] > first["time"]:
        return (last["step"] - first["step"]) / (last["time"] - first["time"])
    step_s = _get_number(last, "step_s")
    return 1.0 / step_s if step_s and step_s > 0 else None


def _get_number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return value if isinstance(value, (int, float)) else None
