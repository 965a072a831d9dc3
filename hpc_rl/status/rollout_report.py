"""The last report of the rollout role (rollout/report.py), and what in it deserves attention."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpc_rl.core.records import BatchWait, BatchWaitRecord, JsonRecord
from hpc_rl.core.trial import Attempt
from hpc_rl.rollout.difficulty import DIFFICULTIES
from hpc_rl.status.formatting import format_duration

HANGING_S = 60.0  # a prompt that runs for longer is reported where nothing else has finished meanwhile
SILENT_ENVIRONMENT_S = 30  # an environment polls several times a second
STARTING_S = 60.0  # an environment may take so long to connect once the trainer has started
NO_SERVER_S = 20.0  # longest normal wait for the first server
MIN_REJECTED_IN_A_ROW = 4  # fewer are not reported


@dataclass
class EnvironmentReport(JsonRecord):
    """What one environment has sent to this incarnation of the rollout role, in groups."""

    name: str
    group_size: int
    queued: int = 0  # the trainer has not finished with them
    accepted: int = 0
    rejected: int = 0
    too_old: int = 0  # of those accepted
    last_reason: str = ""  # of the newest rejection
    ignored: list[str] = field(default_factory=list)  # fields of its groups that the trial does not use
    silent_s: int | None = None  # since its latest poll; None once it has disconnected


@dataclass
class RolloutReport(JsonRecord):
    """Counters of one incarnation of the rollout role."""

    time: float = 0.0  # when it wrote them, Unix seconds of its node
    progress: int | None = None  # of a trial without a trainer: grows with the results
    total: int | None = None  # prompts of such a trial
    url: str = ""  # of its endpoint
    running: int = 0  # prompts
    ready: int = 0  # finished groups that are not in a batch yet
    sealed: int = 0  # newest batch
    accepted: int = 0  # prompts that became groups
    rejected: dict[str, int] = field(default_factory=dict)  # prompts, by reason
    rejected_in_a_row: int = 0  # since the last group
    last_reason: str = ""  # of the newest rejection
    last_error: str = ""  # newest exception, of a reward, a workflow or a request
    # rows whose group was in a batch, by the mean reward of the latest one: range -> count
    difficulty: dict[str, int] = field(default_factory=dict)
    issued_again: int = 0  # prompts that earlier user code rejected
    oldest_running_s: float | None = None  # age of the oldest running prompt; None if none runs
    quiet_s: float | None = None  # since the last group, rejection or exception; None before the first
    servers: int | None = None  # live generation servers
    pools: dict[str, int] = field(default_factory=dict)  # theirs, by pool
    endpoints: dict[str, str] = field(default_factory=dict)  # problems of pools elsewhere, by pool
    # place in user code -> seconds that it has blocked the event loop of a worker
    blocked: dict[str, float] = field(default_factory=dict)
    evaluating: list[str] = field(default_factory=list)  # versions
    takes_groups: bool = False  # of environments
    environments: list[EnvironmentReport] = field(default_factory=list)
    trainer_s: float | None = None  # since the trainer first asked for a batch; None before that
    waits_for: BatchWaitRecord | None = None  # of the next batch of environments' groups


def load_rollout(attempt: Attempt) -> RolloutReport | None:
    """Return the report of the newest incarnation that left a sound one, or None."""
    found: dict[int, RolloutReport] = {}
    for path in attempt.dir.glob("rollout.*.json"):
        number, report = path.name.split(".")[1], RolloutReport.read(path)
        if number.isdecimal() and report is not None:
            found[int(number)] = report
    return found[max(found)] if found else None


def describe_reasons(rejected: Mapping[str, int]) -> str:
    """Return the reasons of rejected prompts with their counts, the most frequent first."""
    by_count = sorted(rejected.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{reason} {count}" for reason, count in by_count)


def describe_difficulty(difficulty: Mapping[str, int]) -> str:
    """Return the shares of rows by the mean reward of their latest group; "" before the first batch."""
    total = sum(difficulty.values())
    counts = ((name, difficulty.get(name, 0)) for name in DIFFICULTIES)
    shares = (f"{name}: {count / total:.0%}" for name, count in counts if count)
    return f"{', '.join(shares)} of {total} rows" if total else ""


def describe_rollout(report: RolloutReport, live: bool) -> str:
    """Return one line of counters; for a live rollout role also its activity."""
    if report.progress is not None:
        return _describe_alone(report, live)
    # groups of environments vary in size: `accepted` counts prompts
    made = f"{report.sealed} batches cut" if report.takes_groups else f"{report.accepted} prompts accepted"
    accepted = f"{made}, {sum(report.rejected.values())} rejected"
    if not live:
        return accepted
    running = [f"{report.running} prompts running"] if report.running or not report.takes_groups else []
    parts = [*running, f"{report.ready} groups ready", accepted]
    if report.servers is not None:
        by_pool = ", ".join(f"{pool} {count}" for pool, count in report.pools.items())
        several = f" ({by_pool})" if len(report.pools) > 1 else ""
        parts.append(f"{report.servers} server{'' if report.servers == 1 else 's'} alive{several}")
    if report.evaluating:
        parts.append("evaluating version " + ", ".join(map(str, report.evaluating)))
    return ", ".join(parts)


def _describe_alone(report: RolloutReport, live: bool) -> str:
    """Return the line of a trial without a trainer."""
    rejected = sum(report.rejected.values())
    parts = [f"{report.accepted} requests answered, {rejected} failed"]
    if report.total is not None:
        parts = [f"{report.accepted} of {report.total} prompts answered, {rejected} rejected"]
    if live:
        parts += [f"{report.running} running", f"{report.servers or 0} servers alive"]
    return ", ".join([*([f"endpoint {report.url}"] if report.url and live else []), *parts])


def describe_environments(report: RolloutReport, live: bool) -> list[str]:
    """Return a line for each environment: its counters, and whether it is connected."""
    lines = []
    for one in report.environments:
        line = f"{one.name}: groups of {one.group_size}, {one.accepted} accepted, {one.queued} queued, "
        line += f"{one.rejected} rejected" + (f" (the last: {one.last_reason})" if one.last_reason else "")
        line += f", {one.too_old} too old" if one.too_old else ""
        line += f"; not used: {', '.join(one.ignored)}" if one.ignored else ""
        if live:
            if one.silent_s is None:
                line += "; disconnected"
            elif one.silent_s > SILENT_ENVIRONMENT_S:
                line += f"; silent for {format_duration(one.silent_s)}"
        lines.append(line)
    if live and report.waits_for is not None:
        lines.append(describe_wait(report.waits_for))
    return lines


def describe_wait(wait: BatchWaitRecord) -> str:
    """Return the reason why the next batch waits."""
    sizes, parts = " and ".join(map(str, wait.sizes)), ""
    if wait.parts:
        parts = f"; {wait.parts} more sequences are of incomplete groups"
    match wait.kind:
        case BatchWait.SHARE:
            said = f"{wait.ready} of the {wait.needed} sequences reserved for {wait.environment} are ready"
        case BatchWait.COMBINATION:
            said = f"the groups of {sizes} that are ready do not add up to {wait.needed} sequences yet"
        case BatchWait.SIZES:
            said = (
                f"groups of {sizes} never add up to the {wait.needed} sequences of a batch: "
                "connect an environment with groups of another size"
            )
        case _:
            said = f"{wait.ready} of {wait.needed} sequences are ready"
    return f"next batch: {said}{parts}"


def list_problems(report: RolloutReport, live: bool) -> list[str]:
    """Return warnings: rejections, the last exception, prompts that hang."""
    lines = []
    if report.rejected:
        lines.append(f"rejected so far: {describe_reasons(report.rejected)}")
    if report.issued_again:
        what = "prompts that the earlier reward or workflow rejected are generated again"
        lines.append(f"{report.issued_again} {what}")
    if report.rejected_in_a_row >= MIN_REJECTED_IN_A_ROW:
        reason = report.last_reason or "no reason recorded"
        lines.append(f"the last {report.rejected_in_a_row} prompts were rejected: {reason}")
    if report.last_error:
        lines.append(f"last exception: {report.last_error}")
    if not live:
        return lines
    lines += list(report.endpoints.values())
    for place, since_s in report.blocked.items():
        lines.append(
            f"{place} has blocked the event loop of its worker for {format_duration(since_s)}: all "
            "prompts of the worker wait; await asyncio.sleep and async clients there, or asyncio.to_thread"
        )
    connected = [one for one in report.environments if one.silent_s is not None]
    if report.takes_groups and not connected and not report.running and report.trainer_s is not None:
        if report.trainer_s < STARTING_S and not report.environments:
            lines.append(
                "no environment has connected yet; environments connect once the trainer has started"
            )
        else:
            lines.append(
                "no environment is connected: look at the logs of the roles environment-0, …, or connect one"
                "; `hpc-rl env urls TRIAL` shows where"
            )
    oldest_s, quiet_s = report.oldest_running_s, report.quiet_s
    if report.servers is not None and (oldest_s or 0.0) > NO_SERVER_S:
        pools = report.pools if len(report.pools) > 1 else {"": report.servers}
        for pool in (pool for pool, count in pools.items() if not count):
            which = f"no server of pool {pool}" if pool else "no generation server"
            lines.append(f"{which} is alive; generation resumes with the next one")
    if oldest_s is not None and oldest_s > HANGING_S and (quiet_s is None or quiet_s > HANGING_S):
        quiet = format_duration(oldest_s if quiet_s is None else quiet_s)
        guess = "" if report.endpoints else ": does the reward function or the workflow hang?"
        lines.append(
            f"nothing has finished for {quiet}, and the oldest prompt has been running for "
            f"{format_duration(oldest_s)}{guess}"
        )
    silent_s = time.time() - report.time
    if report.time and silent_s > HANGING_S:
        lines.append(f"the rollout role has not reported for {format_duration(silent_s)}")
    return lines
