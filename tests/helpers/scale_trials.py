"""A supervisor of thousands of nodes in this process: its units do nothing, its clock is set by the test.

Counted are calls that name a file or list a folder, the CPU time, and the memory of the supervisor itself.
"""

import os
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

from small_configs import stored
from toy_plans import toy_plan, toy_unit

from hpc_rl.core.trial import Attempt, Trial, write_json
from hpc_rl.name_resolve import keys
from hpc_rl.plan.schema import Plan
from hpc_rl.supervise.runner import TrialRunner
from hpc_rl.supervise.unit_loop import TICK_S

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
        """Let every server register as serving."""
        for unit in self.plan.units:
            if unit.role == "server":
                value = {
                    "attempt": "7.0",
                    "incarnation": 0,
                    "state": "serving",
                    "url": f"http://n{unit.index}:1",
                }
                self.runner.names.lease(keys.server("rollout", unit.index), value, 1e9)

    def pass_time(self, seconds: float) -> None:
        """Let the supervisor make its rounds."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.runner.do_round()

    @property
    def num_serving(self) -> int:
        return sum(slot.served_at is not None for slot in self.runner.machine.slots.values())
