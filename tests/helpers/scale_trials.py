"""A supervisor of thousands of nodes in this process: its units do nothing, its clock is set by the test.

Counted are calls that name a file or list a folder, the CPU time, and the memory of the supervisor itself.
"""

import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from patience import extend
from small_configs import stored
from toy_plans import toy_plan, toy_unit

from hpc_rl.core.errors import ExitCode, StopCause
from hpc_rl.core.trial import Attempt, Trial, write_json
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.roster import HEARTBEAT_S, RosterReader
from hpc_rl.plan.schema import Plan
from hpc_rl.supervise.bad_nodes import NodeTrouble
from hpc_rl.supervise.job_loop import hold_signals
from hpc_rl.supervise.job_policy import JobSettings
from hpc_rl.supervise.job_runner import JobRunner
from hpc_rl.supervise.runner import TrialRunner
from hpc_rl.supervise.state_machine import Avoid
from hpc_rl.supervise.unit_loop import POLL_ALL_S, TICK_S

ROOT = Path(__file__).resolve().parents[2]
NUM_BAD = 100  # nodes that have failed
# of a job script: the supervisor has stopped on request, and all other programs only answer
JOB_PROGRAMS = {
    "python": 'case "$*" in *roles.supervisor*) exit 75 ;; esac',
    "scontrol": 'case "$1" in show) echo "JobId=7 Restarts=0 " ;; esac',
    "sinfo": "cat nodes",
}
# events of Python's audit hooks that name a path: `open` also counts reading and writing
AUDITED = (
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"),
    *("os.symlink", "os.chmod", "os.truncate", "os.utime"),
)
ASKED = ("stat", "lstat", "access")  # of the module os; they raise no event
_counters: list[Counter[str]] = []
_hooked: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _counters and event in AUDITED and not isinstance(arguments[0], int):
        for counter in _counters:
            counter[event] += 1


@contextmanager
def count_file_calls() -> Iterator[Counter[str]]:
    """Count this process's calls that name a file, by their names."""
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked.append(True)
    counter: Counter[str] = Counter()
    originals = {name: getattr(os, name) for name in ASKED}

    def watch(name: str) -> Any:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int):
                counter[name] += 1
            return originals[name](path, *arguments, **options)

        return call

    for name in ASKED:
        setattr(os, name, watch(name))
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
        for name, original in originals.items():
            setattr(os, name, original)


class IdleHandle:
    """A unit that runs until it is told to stop."""

    def __init__(self) -> None:
        self.children: list[Any] = []
        self.launcher_log = None
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def explain_unplaced(self) -> str:
        return ""

    def send(self, line: str) -> None:
        if line == "stop":
            self.code = 75

    def kill(self) -> None:
        self.code = 137

    def hang_up(self) -> None:
        self.code = 143

    def dump_stacks(self) -> None:
        pass


@dataclass
class Load:
    """What something cost."""

    cpu_s: float = 0.0
    file_calls: Counter[str] = field(default_factory=Counter)
    memory_mb: float = 0.0

    @property
    def num_file_calls(self) -> int:
        return self.file_calls.total()

    def scale(self, factor: float) -> None:
        """Count the work `factor` times."""
        self.cpu_s *= factor
        self.file_calls = Counter({name: round(count * factor) for name, count in self.file_calls.items()})


@contextmanager
def measure_load(memory: bool = False) -> Iterator[Load]:
    """Measure CPU time and calls on files; with `memory` also what stays allocated (this is slow)."""
    load = Load()
    if memory:
        tracemalloc.start()
    begun = time.process_time()
    with count_file_calls() as counter:
        yield load
    load.cpu_s, load.file_calls = time.process_time() - begun, counter
    if memory:
        load.memory_mb = tracemalloc.get_traced_memory()[0] / 1e6
        tracemalloc.stop()


def make_plan(num_nodes: int) -> Plan:
    """Return a plan with a trainer on a quarter of the nodes, and one server on each other node."""
    first = max(1, num_nodes // 4)
    servers = [
        toy_unit("server", index=i, nodes=[first + i], module="none") for i in range(num_nodes - first)
    ]
    trainer = toy_unit("trainer", nodes=list(range(first)), module="none")
    units = [*servers, toy_unit("rollout", module="none"), trainer]
    allocation = f"embedded:d{len(servers)}+fsdp:d{first}"
    return toy_plan(units, sys.executable, n_nodes=num_nodes, allocation=allocation)


class BigTrial:
    """A trial of many nodes whose supervisor runs here, with leases of all its servers."""

    def __init__(self, root: Path, num_nodes: int) -> None:
        self.plan = make_plan(num_nodes)
        self.trial = Trial.of(root, "me", "exp", "big")
        self.trial.make_dirs()
        self.trial.make_secret()
        self.attempt: Attempt = self.trial.attempt("7.0")
        self.attempt.make_dirs()
        write_json(self.trial.plan_json, self.plan.to_json())
        self.now = 1000.0
        self.handles: list[IdleHandle] = []
        self.runner = TrialRunner(
            self.attempt, self.plan, stored(), SimpleNamespace(start=self._start), lambda: None
        )
        self.runner.clock = lambda: self.now
        self.runner.names.clock = lambda: self.now

    def _start(self, *_: Any) -> IdleHandle:
        self.handles.append(IdleHandle())
        return self.handles[-1]

    def begin(self) -> None:
        """Take over the trial and start all units."""
        assert self.runner.begin()
        self.runner.update_exclude_file()
        self.runner.execute(self.runner.machine.start(self.now))

    def write_leases(self) -> None:
        """Let every server register as serving. Copies, because each real start lists all leases."""
        value = {"attempt": "7.0", "incarnation": 0, "state": "serving", "url": "http://n0:1"}
        first = self.runner.names.lease(keys.server("rollout", 0), value, 1e9).path
        text, ending = first.read_text(), first.name.removeprefix("0")
        for number in range(1, self.num_servers):
            first.with_name(f"{number}{ending}").write_text(text.replace("n0:1", f"n{number}:1"))

    def pass_time(self, seconds: float) -> None:
        """Let the supervisor make its rounds."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.runner.do_round()

    @property
    def num_servers(self) -> int:
        return sum(unit.role == "server" for unit in self.plan.units)

    @property
    def num_serving(self) -> int:
        return sum(slot.served_at is not None for slot in self.runner.machine.slots.values())


def measure_supervisor(folder: Path, num_nodes: int, watch_s: float = 60.0) -> dict[str, dict[str, float]]:
    """Return what a supervisor costs: its start, a minute of watching, bad nodes, the roster, and its stop.

    The minute is counted over `watch_s` seconds of its clock, after all leases were read.
    """
    big, loads = BigTrial(folder, num_nodes), dict[str, Load]()
    with measure_load() as loads["start"]:
        big.begin()
    big.write_leases()
    big.pass_time(5)
    while big.num_serving < big.num_servers:
        big.pass_time(1)
    with measure_load() as loads["minute"]:
        big.pass_time(watch_s)
    loads["minute"].scale(60 / watch_s)
    bad = [f"n{number}" for number in range(NUM_BAD)]
    with measure_load() as loads["bad_nodes"]:
        for node in bad:
            big.runner.execute([Avoid((node,), "its disk is full", NodeTrouble.FAILED)])
    assert sorted(big.trial.exclude("7").read_text().strip().split(",")) == sorted(bad)
    reader = RosterReader(big.runner.names, keys.servers("rollout"))
    reader.list_leases()
    big.pass_time(2 * HEARTBEAT_S)
    with measure_load() as loads["roster"]:
        seen = reader.list_leases()
    assert len(seen) == big.num_servers
    roster = big.runner.names.load_record(keys.servers("rollout"))
    with measure_load() as loads["stop"]:
        big.runner.requests.add(StopCause.CANCELLED)
        big.pass_time(2 * POLL_ALL_S + 1)
    assert big.runner.finish is not None and big.runner.finish.code == ExitCode.STOPPED
    found = {name: {"cpu_s": load.cpu_s, "file_calls": load.num_file_calls} for name, load in loads.items()}
    return found | {"size": {"roster_mb": len(roster) / 1e6, "memory_mb": measure_peak_mb()}}


def measure_requeue(folder: Path, num_nodes: int) -> dict[str, Any]:
    """Return what a job script costs that stops, excludes NUM_BAD bad nodes and asks for another start."""
    os.chdir(folder)
    names = "\n".join(f"n{number}" for number in range(int(1.05 * num_nodes)))
    Path("nodes").write_text(f"{names}\n")
    for name, body in JOB_PROGRAMS.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {folder}/calls\n{body}\n')
        path.chmod(0o755)
    trial = Trial.of(folder, "me", "exp", "big")
    trial.make_dirs()
    trial.exclude("7").write_text(",".join(f"n{number}" for number in range(NUM_BAD)) + "\n")
    os.environ |= {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_JOB_PARTITION": "main",
        "SLURMD_NODENAME": "n7777",
        "SLURM_RESTART_COUNT": "0",
    }
    settings = JobSettings(
        trial_dir=str(trial.dir), python=f"{folder}/bin/python", workdir=str(folder), scheduler="slurm",
        script_name="trial.sbatch", attempts="attempts", recover_mode="auto", recover_retries=3,
        start_mode="auto", n_nodes=num_nodes,
    )  # fmt: skip
    hold_signals()
    with measure_load() as load:
        assert JobRunner(settings, []).run() == ExitCode.STOPPED
    calls = [line.split() for line in Path("calls").read_text().splitlines()]
    slurm = Counter(f"{name} {words[0]}" for name, *words in calls if name != "python")
    excluded = next(words[2] for name, *words in calls if words[0] == "update")
    return {
        "cpu_s": load.cpu_s,
        "file_calls": load.num_file_calls,
        "slurm": slurm,
        "excluded": len(excluded.split(",")),
        "memory_mb": measure_peak_mb(),
    }


def measure_peak_mb() -> float:
    """Return the largest memory that this process has had; getrusage counts that of its parent too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def measure_apart(what: str, folder: Path, num_nodes: int) -> dict[str, Any]:
    """Measure `supervisor` or `requeue` in a process of its own, whose memory is its own."""
    argv = [sys.executable, __file__, what, str(folder), str(num_nodes)]
    paths = [str(ROOT), str(Path(__file__).parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=extend(300), check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    measure = {"supervisor": measure_supervisor, "requeue": measure_requeue}[sys.argv[1]]
    print(json.dumps(measure(Path(sys.argv[2]), int(sys.argv[3]))))
