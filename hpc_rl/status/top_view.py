"""The live view of trials, for `hpc-rl top` and `--follow`: from files and the scheduler's answer."""

import shutil
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.core.log import escape_controls
from hpc_rl.core.records import ProcessFile, ProcessRecord, TrialState
from hpc_rl.core.trial import Trial, load_object
from hpc_rl.name_resolve import keys, load_names_dir
from hpc_rl.name_resolve.roster import RosterReader
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.stats.read import HELD_OUT, is_number
from hpc_rl.status.formatting import flatten_line, format_duration, format_number
from hpc_rl.status.goodput import RECENT_STEPS, describe_steps
from hpc_rl.status.rollout_report import describe_rollout, list_problems
from hpc_rl.status.scheduler_view import TrialWatch
from hpc_rl.status.trial_report import is_own
from hpc_rl.status.trial_status import TrialStatus, find_replica_names

BLOCKS = "▁▂▃▄▅▆▇█"
LABEL = 10  # columns of the first word of a line
MAX_UNITS = 12  # replicas with a line each; more are counted
MAX_CURVE = 120  # columns
MAX_WIDTH = 160  # columns
MAX_OWN = 8  # metrics of the user's reward and workflow
CURVES = ("reward", HELD_OUT, "loss")


@dataclass
class TrialView:
    """A trial as it is now."""

    status: TrialStatus
    saved_at: float | None = None  # newest checkpoint, Unix seconds
    config: dict[str, Any] = field(default_factory=dict)
    nodes: dict[tuple[str, int], list[str]] = field(default_factory=dict)  # of each unit
    versions: dict[int, tuple[str, str]] = field(default_factory=dict)  # of servers: weights, state


class TrialEye:
    """Reads the view of a trial repeatedly; constant parts are read once."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._watch = TrialWatch(trial)
        self._nodes: dict[Path, str] = {}
        self._config = load_object(trial.config_json)
        self._names = NameResolve(load_names_dir(trial))
        self._rosters: dict[str, RosterReader] = {}  # by pool

    def look(self) -> TrialView:
        """Return the view now; the scheduler is queried as rarely as by `status --follow`."""
        status = self._watch.poll()
        view = TrialView(status, config=self._config)
        if status.generation is not None:
            manifest = self.trial.generation(status.generation) / "manifest.json"
            view.saved_at = manifest.stat().st_mtime if manifest.exists() else None
        if status.live is not None:
            attempt = self.trial.attempt(status.live.id)
            newest = {(role.role, role.index): role.incarnation for role in status.live.roles}
            for path in attempt.processes.glob("*.json"):
                file = ProcessFile.parse(path)
                if file and not file.by_client and newest.get((file.role, file.index)) == file.incarnation:
                    view.nodes.setdefault((file.role, file.index), []).append(self._node(path))
            view.versions = self._servers()
        return view

    def _node(self, path: Path) -> str:
        if path not in self._nodes:
            record = ProcessRecord.read(path)
            if record is None:
                return "?"
            self._nodes[path] = record.node or record.host
        return self._nodes[path]

    def _servers(self) -> dict[int, tuple[str, str]]:
        units = load_object(self.trial.plan_json).get("units") or []
        pools = {str(unit.get("pool") or "") for unit in units if unit.get("role") == "server"}
        for pool in pools - self._rosters.keys():
            self._rosters[pool] = RosterReader(self._names, keys.servers(pool))
        leases = [one for pool in pools for one in self._rosters[pool].list_leases().values()]
        found = {}
        for one in leases:
            index = one.key.rpartition("/")[2]
            if one.alive and index.isdecimal():
                found[int(index)] = str(one.value.get("version", "")), str(one.value.get("state", ""))
        return found


def describe_frame(views: Sequence[TrialView]) -> str:
    """Return trials as text for a terminal; of a single trial also its roles."""
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    blocks = ["\n".join(describe_trial(view, width, details=len(views) == 1)) for view in views]
    return escape_controls("\n\n".join(blocks))


def describe_trial(view: TrialView, width: int, details: bool = True) -> list[str]:
    """Return a trial as lines of at most `width` columns; with `details` also its roles."""
    status = view.status
    found = [format_headline(status), *describe_times(view)]
    own = [name for name in status.history.metrics() if is_own(name)][:MAX_OWN] if details else []
    for metric in (*CURVES, *own):
        found += draw_curve_line(status, metric, width)
    found += describe_progress(view)
    if status.rollout is not None and status.live is not None:
        found.append(format_label("rollout", describe_rollout(status.rollout, live=True)))
        found += [format_label("", problem) for problem in list_problems(status.rollout, live=True)]
    if details and status.live is not None:
        found += describe_units(view)
    indent = " " * LABEL
    return [
        part for line in found for part in textwrap.wrap(flatten_line(line), width, subsequent_indent=indent)
    ]


def format_label(label: str, text: str) -> str:
    return f"{label:<{LABEL}}{text}"


def format_headline(status: TrialStatus) -> str:
    parts = [str(status.trial), str(status.state)]
    if status.step or status.total_steps:
        parts.append(f"step {status.step}" + (f"/{status.total_steps}" if status.total_steps else ""))
    if status.state is TrialState.RUNNING:
        parts += filter(None, [status.pace])
    return "  ".join(parts)


def describe_times(view: TrialView) -> Iterator[str]:
    """Yield why it is in its state, how long it waits, the time limit of the job, and the next save."""
    status, now = view.status, time.time()
    if status.reason:
        yield format_label("", status.reason)
    if status.state is TrialState.PENDING and status.since:
        yield format_label("queue", f"for {format_duration(now - status.since)}")
    parts = [] if status.ends_at is None else [f"wall time left {format_duration(status.ends_at - now)}"]
    parts += [] if status.generation is None else [f"checkpoint {status.generation}"]
    parts += describe_next_save(view, now)
    if parts and not status.over:
        yield format_label("time", ", ".join(parts))


def describe_next_save(view: TrialView, now: float) -> list[str]:
    """Return when the next checkpoint is due, by steps and by seconds."""
    status, recover = view.status, view.config.get("recover") or {}
    if recover.get("mode") == "disabled":
        return ["nothing is saved (recover.mode disabled)"]
    found = []
    if every := recover.get("freq_steps"):
        due = (status.step // every + 1) * every
        if status.total_steps:
            due = min(due, status.total_steps)
        left = f" in {format_duration((due - status.step) / status.rate)}" if status.rate else ""
        found.append(f"next save at step {due}{left}")
    if (seconds := recover.get("freq_secs")) and view.saved_at is not None:
        found.append(f"next save in {format_duration(max(0.0, view.saved_at + seconds - now))} at the latest")
    return found


def draw_curve_line(status: TrialStatus, metric: str, width: int) -> list[str]:
    """Return a metric as its newest value and a curve; nothing if it was not measured."""
    values = [value for _, value in status.history.curve(metric)]
    if not values:
        return []
    name = f"{metric} {status.history.held_out[0]}" if metric == HELD_OUT else metric
    if len(name) >= LABEL:
        name = metric
    label = format_label(f"{name} " if len(name) >= LABEL else name, f"{format_number(values[-1]):<9}")
    return [label + draw_sparkline(values, min(MAX_CURVE, width - len(label)))]


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Return values as at most `width` blocks of eight heights, each a mean."""
    per = -(-len(values) // max(1, width))
    parts = [values[start : start + per] for start in range(0, len(values), per)]
    means = [sum(part) / len(part) for part in parts]
    least, most = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (most - least) if most > least else 0.0
    return "".join(BLOCKS[round((mean - least) * scale)] for mean in means)


def describe_progress(view: TrialView) -> Iterator[str]:
    """Yield the division of the newest steps' seconds, and the staleness of their batches."""
    rows = view.status.history.steps[-RECENT_STEPS:]
    text = describe_steps(rows)
    if not text:
        return
    yield format_label("step", text)
    ages = [rows[-1].get(f"staleness_{kind}") for kind in ("mean", "max")]
    if all(map(is_number, ages)):
        mean, most = map(format_number, ages)
        yield format_label("staleness", f"{mean} (largest {most})")


def describe_units(view: TrialView) -> list[str]:
    """Return a line for each replica with its place and activity; many replicas are only counted."""
    attempt = view.status.live
    known = find_replica_names(view.status)
    rows = []
    for role in attempt.roles if attempt else []:
        unit = (role.role, role.index)
        state = "running" if role.running else "exited"
        if role.gave_up:
            state = f"not started again: {role.gave_up}"
        elif role.restarting and not role.running:
            state = f"about to be started again: {role.restarting}"
        elif role.role == "trainer":
            state = f"{view.status.doing or 'start'}, step {view.status.doing_step}"
        elif role.role == "server" and role.index in view.versions:
            version, doing = view.versions[role.index]
            state = f"{doing}, weights {version}" if version else doing
        again = f" (start {role.incarnation + 1})" if role.incarnation else ""
        name = role.name + (f" ({known[unit]})" if unit in known else "")
        rows.append((name, list_places(view.nodes.get(unit, [])), state + again))
    if len(rows) > MAX_UNITS:
        counts = Counter((name.split(" ")[0].rpartition("-")[0], state) for name, _, state in rows)
        rows = [(f"{count} {name}", "", state) for (name, state), count in counts.items()]
    names, nodes = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    return [f"{name:<{max(names, LABEL - 1)}} {node:<{nodes}}  {state}" for name, node, state in rows]


def list_places(nodes: list[str]) -> str:
    """Return the nodes of a unit: the first one, and how many more."""
    known = sorted(set(nodes))
    return "" if not known else known[0] + (f" +{len(known) - 1}" if len(known) > 1 else "")
