"""The preflight of an attempt: check that every node reaches every other one, before models are loaded.

One srun (one for each component of a heterogeneous job) runs network_node.py on all nodes. The nodes exchange
data through its standard input and output, which use Slurm's own connections: no file is written, and data
arrives even if the checked network does not work.
"""

import json
import logging
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from hpc_rl.core.errors import ExitCode
from hpc_rl.schedulers.hostlist import expand
from hpc_rl.supervise.failure_policy import UnitExit, classify
from hpc_rl.supervise.network_node import MARK

logger = logging.getLogger(__name__)
STEP = """
srun --job-name=preflight --overlap --mem=0 --ntasks-per-node=1 --cpus-per-task=1 --kill-on-bad-exit=0
--export=ALL --mpi=none --input=all
"""
POLL_S = 0.1
END_S = 5.0  # time for srun to end by itself
MAX_SHOWN = 4  # pairs of nodes in a reason


@dataclass(frozen=True)
class NetworkFindings:
    """Results of the check of a job's network."""

    addresses: dict[str, str] = field(default_factory=dict)  # published by the roles of each node
    problem: str = ""  # nodes that do not reach each other; empty if all do
    bad_nodes: tuple[str, ...] = ()  # without these, all others reach each other
    hopeless: bool = False  # the bad nodes would be most nodes of the job
    unchecked: str = ""  # why the check failed to run; then the other fields are empty


class Preflight:
    """The check of the nodes of one job, with a time limit of `limit_s`.

    `hosts` are the node names of the job, `components` the component of each in a heterogeneous job.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        components: Sequence[int] | None,
        num_hosts: int,
        interface: str,
        limit_s: float,
    ) -> None:
        self.hosts, self.limit_s = list(hosts), limit_s
        self._components = components
        self._program = [
            sys.executable,
            "-m",
            "hpc_rl.supervise.network_node",
            "--num_hosts",
            str(num_hosts),
        ]
        self._program += ["--interface", interface] if interface else []
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()

    def run(self, log: Path, interrupted: Callable[[], bool]) -> NetworkFindings | None:
        """Run the check and return its results; None once `interrupted` returns true. Raises OSError."""
        deadline = time.monotonic() + self.limit_s
        # If a node says nothing, the others still check each other in the remaining time.
        first_deadline = deadline - self.limit_s / 2
        steps: list[subprocess.Popen[bytes]] = []
        results: dict[str, dict[str, Any]] = {}
        try:
            with log.open("ab") as errors:
                log_begin = errors.tell()
                for argv in self._make_commands():
                    steps.append(self._start(argv, errors))
            hellos = self._gather("problem", "address", first_deadline, steps, self.hosts, interrupted)
            if hellos and not interrupted():
                peers = {
                    node: (said["address"], said["port"])
                    for node, said in hellos.items()
                    if "address" in said
                }
                for step in steps:
                    with suppress(OSError):  # the step has ended
                        _make_input(step).write(json.dumps(peers).encode() + b"\n")
                        _make_input(step).flush()
                results = self._gather("unreached", "", deadline, steps, list(hellos), interrupted)
            if interrupted():
                return None
            said_by_srun = log.read_bytes()[log_begin:].decode(errors="replace").splitlines()
            lost = self._find_lost(said_by_srun)
            has_ended = any(step.poll() is not None for step in steps)
            if not lost and (not hellos or (has_ended and len(results) < len(hellos))):
                why = "srun ended early" if has_ended else f"no node answered within {self.limit_s / 2:g} s"
                return NetworkFindings(unchecked=f"{why}: {(said_by_srun or ['no output'])[-1].strip()}")
            return judge(self.hosts, hellos, results, self.limit_s, lost)
        finally:
            for step in steps:
                _end(step)

    def _find_lost(self, said_by_srun: Sequence[str]) -> dict[str, str]:
        """Return the nodes on which srun can't launch its task, with srun's message."""
        found = classify(UnitExit(ExitCode.FAILED, ""), said_by_srun, ())
        names = {name for nodes in found.nodes for name in expand(nodes)}
        return {node: found.reason for node in self.hosts if node in names}

    def _make_commands(self) -> Iterable[list[str]]:
        components = self._components or [0] * len(self.hosts)
        for component in sorted(set(components)):
            nodes = [host for host, of in zip(self.hosts, components, strict=True) if of == component]
            size = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"]
            group = [f"--het-group={component}"] if self._components else []
            yield [*STEP.split(), *size, *group, *self._program]

    def _start(self, argv: list[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        step = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)
        threading.Thread(target=self._receive, args=(step,), daemon=True, name="preflight").start()
        return step

    def _receive(self, step: subprocess.Popen[bytes]) -> None:
        assert step.stdout is not None
        with step.stdout:
            for line in step.stdout:
                _, mark, text = line.decode(errors="replace").partition(MARK)
                with suppress(ValueError):  # a line of another program
                    if mark:
                        self._lines.put(json.loads(text))

    def _gather(
        self,
        key: str,
        other_key: str,
        deadline: float,
        steps: list[subprocess.Popen[bytes]],
        nodes: list[str],
        interrupted: Callable[[], bool],
    ) -> dict[str, dict[str, Any]]:
        """Return each node's line with one of these keys, if it came in time."""
        found: dict[str, dict[str, Any]] = {}
        while len(found) < len(nodes) and time.monotonic() < deadline and not interrupted():
            ended = all(step.poll() is not None for step in steps)
            try:
                said = self._lines.get(timeout=POLL_S)
            except queue.Empty:
                if ended:
                    break
                continue
            if said.get("node") in nodes and (key in said or other_key in said):
                found[said["node"]] = said
        return found


def judge(
    hosts: Sequence[str],
    hellos: dict[str, dict[str, Any]],
    results: dict[str, dict[str, Any]],
    limit_s: float,
    lost: Mapping[str, str] = MappingProxyType({}),
) -> NetworkFindings:
    """Combine the lines of all nodes: their addresses, and the nodes that each did not reach.

    `lost`: nodes on which srun could not start a task, with the reason. In that case the other tasks may have
    been ended before they said anything. A node without a hello also explains missing results of others.
    """
    silent = {node: f"it did not answer within {limit_s / 2:g} s" for node in hosts if node not in hellos}
    late = {node: f"it did not answer within {limit_s:g} s" for node in hosts if node not in results}
    alone = dict(lost) or silent or late
    alone |= {node: said["problem"] for node, said in hellos.items() if "problem" in said}
    failed = {
        (node, peer): reason
        for node in hosts
        if node in results and node not in alone
        for peer, reason in results[node]["unreached"].items()
        if peer not in alone
    }
    bad = [*(node for node in hosts if node in alone), *_find_cover(hosts, failed)]
    names = {
        node: f"{node} ({said['interface']} {said['address']})"
        for node, said in hellos.items()
        if "address" in said
    }
    texts = [f"{node}: {reason}" for node, reason in alone.items()]
    for (node, peer), reason in failed.items():
        if (peer, node) not in failed:
            texts.append(f"{names[node]} does not reach {names[peer]}: {reason}")
        elif hosts.index(node) < hosts.index(peer):
            texts.append(f"{names[node]} and {names[peer]} do not reach each other: {reason}")
    more = f"; and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
    return NetworkFindings(
        addresses={node: said["address"] for node, said in hellos.items() if "address" in said},
        problem="; ".join(texts[:MAX_SHOWN]) + more,
        bad_nodes=tuple(bad),
        hopeless=2 * len(bad) > len(hosts),
    )


def _find_cover(hosts: Sequence[str], failed: Iterable[tuple[str, str]]) -> list[str]:
    """Return a small set of nodes that covers all failed pairs; among equals, prefer later nodes."""
    pairs, cover = set(failed), []
    while pairs:
        counts = Counter(node for pair in pairs for node in pair)
        worst = max(counts, key=lambda node: (counts[node], hosts.index(node)))
        cover.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return cover


def _make_input(step: subprocess.Popen[bytes]) -> IO[bytes]:
    assert step.stdin is not None
    return step.stdin


def _end(step: subprocess.Popen[bytes]) -> None:
    """Close the tasks' input, so that they exit; end the rest."""
    with suppress(OSError):
        _make_input(step).close()
    for end in (step.terminate, step.kill):
        try:
            step.wait(END_S)
        except subprocess.TimeoutExpired:
            end()
    step.wait()
