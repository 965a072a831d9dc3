"""Goodput: what every second of every device of a trial was used for.

A device is a GPU, or a process of a trainer or server if there are none. An attempt holds its devices from
the start of the job to its end; that stretch is cut into spans, so the buckets sum to the allocation. Time in
the queue stands beside it: no device was held.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from hpc_rl.core.errors import ExitCode, JobEvent
from hpc_rl.core.files import JsonLines, Row
from hpc_rl.core.records import EndedRecord, Event, EventKind, LineageRecord, load_events, load_job_state
from hpc_rl.core.trial import Attempt, AttemptId, Trial, list_entries, load_object
from hpc_rl.stats.read import is_evaluation, is_number
from hpc_rl.status.formatting import format_number
from hpc_rl.status.trial_status import TrialStatus


class Bucket(enum.StrEnum):
    """The use of a device, in the order of reports."""

    GENERATE = "generate"
    TRAIN = "train"
    PUBLISH = "publish"
    EVALUATE = "evaluate"
    SAVE = "save"
    WAIT = "wait"
    START = "start"
    STOP = "stop"
    LOST = "lost"
    UNUSED = "unused"


MEANINGS = {
    Bucket.GENERATE: "servers with requests, while the trainer makes steps",
    Bucket.TRAIN: "updates of the trainer",
    Bucket.PUBLISH: "new weights on their way to the servers",
    Bucket.EVALUATE: "evaluations on held-out prompts",
    Bucket.SAVE: "checkpoints, exports and records",
    Bucket.WAIT: "a trainer without a batch, servers without a request",
    Bucket.START: "from the start of a job or a process to its first step",
    Bucket.STOP: "from the last checkpoint to the end of the job",
    Bucket.LOST: "steps that a later start made again, and starts that ended before a step",
    Bucket.UNUSED: "GPUs of the allocation that the plan gives to no process",
}
USEFUL = (Bucket.GENERATE, Bucket.TRAIN)
PARTS = (  # of a step, in order: metric -> bucket; the rest is exports and records
    ("wait_s", Bucket.WAIT),
    ("train_s", Bucket.TRAIN),
    ("publish_s", Bucket.PUBLISH),
    ("evaluate_s", Bucket.EVALUATE),
    ("save_s", Bucket.SAVE),
)
# Activity of the trainer -> activity of its servers; otherwise both are the same.
OF_SERVERS = dict.fromkeys((Bucket.TRAIN, Bucket.WAIT, Bucket.SAVE, Bucket.LOST), Bucket.GENERATE)
SHOWN_S = 1e-3  # shorter evaluations had no rows
RECENT_STEPS = 20  # newest steps over which the seconds of a step are divided, for users
ORDERLY = (ExitCode.DONE, ExitCode.STOPPED)


@dataclass(frozen=True)
class Span:
    """A stretch of a trainer's time, in Unix seconds."""

    start: float
    end: float
    bucket: Bucket


@dataclass
class AttemptUse:
    """One attempt: when it held its devices, and device-seconds by bucket; `waited_s` in the queue before."""

    id: str
    start: float  # Unix seconds
    end: float
    num_devices: int
    waited_s: float = 0.0
    buckets: dict[Bucket, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)  # of the trainer, oldest first

    @property
    def allocation_s(self) -> float:
        """Device-seconds that it held."""
        return (self.end - self.start) * self.num_devices


@dataclass
class Goodput:
    """All attempts of a trial, servers of layout jobs included; times in device-seconds."""

    attempts: list[AttemptUse]
    on_gpus: bool
    queued_s: float  # seconds of wall time with a waiting job and nothing running

    @property
    def allocation_s(self) -> float:
        return sum(one.allocation_s for one in self.attempts)

    @property
    def buckets(self) -> dict[Bucket, float]:
        """Device-seconds by bucket; those without any are left out."""
        totals = {bucket: sum(one.buckets.get(bucket, 0.0) for one in self.attempts) for bucket in Bucket}
        return {bucket: total for bucket, total in totals.items() if total}

    @property
    def share(self) -> float | None:
        """Part of the allocation that generated or trained; None before any."""
        useful = sum(self.buckets.get(bucket, 0.0) for bucket in USEFUL)
        return useful / self.allocation_s if self.allocation_s else None


class Cursor:
    """Cuts a stretch of time into spans, from left to right."""

    def __init__(self, start: float, end: float) -> None:
        self.at, self.end = start, max(start, end)
        self.spans: list[Span] = []

    def to(self, when: float, bucket: Bucket) -> None:
        """Count the time until `when` as one span; time outside of the stretch does not count."""
        when = min(when, self.end)
        if when > self.at:
            self.spans.append(Span(self.at, when, bucket))
            self.at = when


def compute_goodput(status: TrialStatus, now: float) -> Goodput:
    """Return the use of a trial's devices until `now`, in Unix seconds."""
    trial, units = status.trial, status.plan.get("units") or []
    with_gpus = bool(status.plan.get("n_gpus_per_node"))
    devices = {role: sum(map(count_devices, filter(of(role), units))) for role in ("trainer", "server")}
    devices["trainer"] = max(1, devices["trainer"])  # a plan of an earlier version may not tell
    uses, every_span = [], []
    live = status.live.id if status.live else ""
    for one in status.attempts:
        attempt = trial.attempt(one.id)
        start, end = list_held(attempt, now if one.id == live else None)
        spans = list_trainer_spans(attempt, status.lineages, start, end, one.id == live)
        every_span += spans
        use = AttemptUse(one.id, start, end, devices["trainer"], spans=spans)
        _add(use, spans, devices["trainer"])
        if status.plan.get("layout") != "jobs":
            use.num_devices += devices["server"]
            _add_servers(use, spans, attempt, devices["server"])
            if (unused := _count_held(status.plan) - use.num_devices) > 0 and with_gpus:
                use.num_devices += unused
                use.buckets[Bucket.UNUSED] = (end - start) * unused
        uses.append(use)
    _count_queue(uses, {job.job_id: job.time for job in status.jobs})
    if status.plan.get("layout") == "jobs":
        uses += _list_server_tasks(trial, every_span, devices["server"], now)
    waits = max(0.0, now - (status.since or now)) if not live else 0.0  # of a job that is pending
    return Goodput(uses, with_gpus, sum(use.waited_s for use in uses) + waits)


def of(role: str) -> Any:
    """Return whether a unit of a plan has a role, as a function."""
    return lambda unit: unit.get("role") == role


def count_devices(unit: dict[str, Any]) -> int:
    """Return how many GPUs, or processes without one, a unit of a plan has."""
    tasks = len(unit.get("nodes") or [0]) * int(unit.get("tasks_per_node") or 1)
    return tasks * max(1, int(unit.get("gpus_per_task") or 0))


def _count_held(plan: dict[str, Any]) -> int:
    return int(plan.get("n_nodes") or 0) * int(plan.get("n_gpus_per_node") or 0)


def list_held(attempt: Attempt, now: float | None) -> tuple[float, float]:
    """Return from when to when an attempt held its nodes, in Unix seconds; `now` for one that runs.

    Without a record of its end, the last sign of it is the end.
    """
    known = AttemptId.parse(attempt.id)
    lines = load_job_state(attempt.trial, attempt.job_id)
    lines = [line for line in lines if known is None or line.restart == known.restart]
    begun = [line.time for line in lines if line.event is JobEvent.STARTED]
    over = [line.time for line in lines if line.event in (JobEvent.ENDED, JobEvent.REQUEUED)]
    signs = [event.time for event in load_events(attempt) if event.time is not None]
    ended = EndedRecord.read(attempt.ended)
    signs += [ended.time] if ended is not None and ended.time else []
    for _, rows in list_metric_files(attempt):
        signs += [row["time"] for row in rows]
    start = min([*begun, *signs], default=now or 0.0)
    return start, max(start, now if now is not None else max([*over, *signs], default=start))


def list_metric_files(attempt: Attempt) -> list[tuple[int, list[Row]]]:
    """Return the rows of steps that each incarnation of an attempt's trainer logged, by incarnation."""
    found = []
    for path in attempt.dir.glob("metrics.*.jsonl"):
        number, rows = path.name.split(".")[1], JsonLines(path).poll()
        known = [row for row in rows if is_number(row.get("time")) and not is_evaluation(row)]
        if number.isdecimal():
            found.append((int(number), [row for row in known if isinstance(row.get("step"), int)]))
    return sorted(found, key=lambda pair: pair[0])


def list_trainer_spans(
    attempt: Attempt, lineages: Sequence[LineageRecord], start: float, end: float, live: bool
) -> list[Span]:
    """Return the trainer's activities from `start` to `end`, in Unix seconds, without a gap."""
    cursor, events = Cursor(start, end), load_events(attempt)
    by_incarnation = dict(list_metric_files(attempt))
    own = [event for event in events if event.role == "trainer" and event.incarnation is not None]
    incarnations = sorted({event.incarnation or 0 for event in own} | set(by_incarnation))
    for number in incarnations:
        mine = [event for event in own if event.incarnation == number]
        begun = [event.time for event in mine if event.kind is EventKind.STARTED and event.time]
        ends = [event for event in mine if event.kind is EventKind.EXITED and event.time]
        cursor.to(min(begun, default=cursor.at), Bucket.START)
        rows = by_incarnation.get(number, [])
        _list_steps(cursor, rows, lineages)
        if ends:
            orderly = ends[-1].code in (ORDERLY if rows else ORDERLY[:1])
            _find_after_steps(cursor, ends[-1].time or end, events, bool(rows), orderly)
        elif number != incarnations[-1] or not live:
            cursor.to(end if number == incarnations[-1] else cursor.at, Bucket.LOST)
        else:
            cursor.to(end, _find_doing(attempt, number))
    cursor.to(end, Bucket.STOP if incarnations else Bucket.START)
    return cursor.spans


def _list_steps(cursor: Cursor, rows: Iterable[Row], lineages: Sequence[LineageRecord]) -> None:
    """Count the steps of an incarnation; before the first one it starts."""
    for number, row in enumerate(rows):
        parts = [(sum_seconds(row, name), bucket) for name, bucket in PARTS]
        if number == 0:  # its line counts from when the trainer was made
            cursor.to(row["time"] - sum(seconds for seconds, _ in parts), Bucket.START)
        else:
            cursor.to(row["time"] - sum_seconds(row, "step_s"), Bucket.SAVE)
        if is_lost(row, lineages):
            cursor.to(row["time"], Bucket.LOST)
        for seconds, bucket in parts:
            cursor.to(min(row["time"], cursor.at + seconds), bucket)
        cursor.to(row["time"], Bucket.SAVE)


def is_lost(row: Row, lineages: Sequence[LineageRecord]) -> bool:
    """Return whether a later start of training made a step again."""
    return any(line.lineage > row.get("lineage", 0) and line.from_step < row["step"] for line in lineages)


def _find_after_steps(
    cursor: Cursor, exit_at: float, events: Iterable[Event], has_steps: bool, orderly: bool
) -> None:
    """Count from the last step of an incarnation to its exit: a last checkpoint, or work that is lost."""
    if orderly and has_steps:
        saved = [event.time or 0.0 for event in events if event.kind is EventKind.PROGRESS]
        cursor.to(max((when for when in saved if when <= exit_at), default=0.0), Bucket.SAVE)
    cursor.to(exit_at, Bucket.STOP if orderly else Bucket.LOST)


def _find_doing(attempt: Attempt, incarnation: int) -> Bucket:
    """Return the activity of a running trainer by its own report."""
    doing = str(load_object(attempt.activity("trainer", 0, incarnation)).get("doing", "start")).split(" ")[0]
    return next((bucket for bucket in Bucket if bucket == doing), Bucket.START)


def sum_seconds(row: Row, name: str) -> float:
    """Return a duration of a row of metrics; 0 without one."""
    value = row.get(name)
    return max(0.0, float(value)) if is_number(value) else 0.0


def describe_steps(rows: Sequence[Row]) -> str:
    """Return the mean seconds of steps and how they are divided; '' if none is known.

    Evaluations and saves, which few steps have, stand apart.
    """
    names = ("evaluate_s", "save_s")
    apart = {name: [s for row in rows if (s := sum_seconds(row, name)) >= SHOWN_S] for name in names}
    total = sum(sum_seconds(row, "step_s") for row in rows) - sum(map(sum, apart.values()))
    if total <= 0:
        return ""
    shares = {name: sum(sum_seconds(row, name) for row in rows) / total for name, _ in PARTS}
    known = [f"{b} {shares[name]:.0%}" for name, b in PARTS if name not in apart and shares[name] >= 0.005]
    split = f": {', '.join(known)}" if known else ""
    more = [f"{dict(PARTS)[name]} {format_number(sum(s) / len(s))} s" for name, s in apart.items() if s]
    return "; ".join([f"{format_number(total / len(rows))} s{split}", *more])


def _add(use: AttemptUse, spans: Iterable[Span], number: int) -> None:
    for span in spans:
        seconds = (span.end - span.start) * number
        use.buckets[span.bucket] = use.buckets.get(span.bucket, 0.0) + seconds


def _add_servers(use: AttemptUse, spans: Iterable[Span], attempt: Attempt, number: int) -> None:
    """Add the time of servers: the trainer's, less the time that they report as idle."""
    if not number:
        return
    cursor = Cursor(use.start, use.end)
    for span in spans:
        cursor.to(span.start, Bucket.START)
        cursor.to(span.end, OF_SERVERS.get(span.bucket, span.bucket))
    cursor.to(use.end, Bucket.WAIT)
    own = AttemptUse(use.id, use.start, use.end, number)
    _add(own, cursor.spans, number)
    busy = [load_object(path).get("busy_s") for path in attempt.dir.glob("use/server-*.json")]
    if known := [float(one) for one in busy if is_number(one)]:
        # the mean of the replicas counts for all, less the requests of evaluations and those held meanwhile
        others = own.buckets.get(Bucket.EVALUATE, 0.0) + own.buckets.get(Bucket.PUBLISH, 0.0)
        incarnations = len({path.name.split(".")[0] for path in attempt.dir.glob("use/server-*.json")})
        had = sum(known) / incarnations * number - others
        idle = max(0.0, own.buckets.get(Bucket.GENERATE, 0.0) - max(0.0, had))
        own.buckets[Bucket.GENERATE] = own.buckets.get(Bucket.GENERATE, 0.0) - idle
        own.buckets[Bucket.WAIT] = own.buckets.get(Bucket.WAIT, 0.0) + idle
    for bucket, seconds in own.buckets.items():
        use.buckets[bucket] = use.buckets.get(bucket, 0.0) + seconds


def _list_server_tasks(trial: Trial, spans: list[Span], num_servers: int, now: float) -> list[AttemptUse]:
    """Return the attempts of server jobs, each with its part of the servers."""
    names = [entry.name for entry in list_entries(trial.server_attempts) if AttemptId.parse(entry.name)]
    tasks = {AttemptId.parse(name).job_id for name in names}  # type: ignore[union-attr]
    uses = []
    for name in sorted(names):
        attempt = trial.attempt(name)
        over = attempt.ended.exists() or name != str(attempt.trial.list_attempts(attempt.job_id)[-1].id)
        start, end = list_held(attempt, None if over else now)
        use = AttemptUse(name, start, end, max(1, num_servers // max(1, len(tasks))))
        own = [Span(max(one.start, start), min(one.end, end), one.bucket) for one in spans]
        _add_servers(use, [one for one in own if one.end > one.start], attempt, use.num_devices)
        uses.append(use)
    return uses


def _count_queue(uses: list[AttemptUse], submitted: dict[str, float]) -> None:
    """Set how long each attempt waited: since its submission, or since the attempt before it ended."""
    for job_id, found in groupby(uses, key=lambda use: use.id.rpartition(".")[0]):
        since = submitted.get(job_id) or 0.0
        for use in found:
            use.waited_s = max(0.0, use.start - since) if since else 0.0
            since = use.end
