"""One node's part of the doctor's visit: `python -m hpc_rl.doctor.node`, as task SLURM_PROCID of a step.

The nodes meet in a folder of --dir, on the file system that is examined: each writes files there, and
measures by its own clock the time until it sees the files of the others, for at most --patience_s.
"""

import argparse
import contextlib
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.core import net
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import create_exclusive, load_json, load_object, write_json
from hpc_rl.doctor.filesystem import try_lock
from hpc_rl.doctor.finding import Finding, Requirements, apply_checks, parse_finding
from hpc_rl.doctor.machine import MACHINE_CHECKS, find_address, find_version

POLL_S = 0.05
STALE_NAME_S = 5.0  # a node looks so long for a name without listing its folder
MAX_PEERS = 16  # called by one node
MEET, NEEDS = "meet", "needs.json"  # in --dir: reports of the nodes, and the requirements


@dataclass
class NodeObservations:
    """What one node saw of the others. None is never, or more than STALE_NAME_S."""

    rank: int = 0
    missing: list[int] = field(default_factory=list)  # ranks that it never saw
    name_s: float | None = None  # from rank 0's signal until it showed in a listing, there and back
    stale_name_s: float | None = 0.0  # how long `exists` denied a listed name
    stale_content_s: float | None = 0.0  # how long a replaced file read as the old one
    won: list[str] = field(default_factory=list)  # exclusive creations: `open`, `link`, `mkdir`
    lock: bool | None = None  # whether it got a lock that rank 0 held; None without locks
    unreachable: list[str] = field(default_factory=list)  # addresses of peers that did not answer
    reached: int = 0  # peers that did
    skew_s: float = 0.0  # the file server's clock minus this node's


@dataclass
class NodeReport:
    """What one node reports: name, software that must be alike, own findings, observations of the others."""

    node: str
    software: str
    findings: list[Finding]
    seen: NodeObservations

    @classmethod
    def from_json(cls, data: Any) -> "NodeReport":
        """Return a report as it was written. Raises TypeError, KeyError, ValueError for anything else."""
        findings = [parse_finding(row) for row in data["findings"]]
        return cls(data["node"], data["software"], findings, NodeObservations(**data["seen"]))


class Visit:
    """One node among `count`, in the common folder."""

    def __init__(self, folder: Path, rank: int, count: int, patience_s: float) -> None:
        self.folder, self.rank, self.count = folder, rank, count
        self.patience_s = patience_s
        self.deadline = 0.0  # set when the meeting begins
        self.seen = NodeObservations(rank)

    def run(self, needs: Requirements) -> None:
        """Do everything, and leave `result-<rank>.json`."""
        listener = net.bind()
        net.answer_callers(listener, str(self.rank))
        # before the meeting, which has a time limit
        findings = apply_checks(MACHINE_CHECKS, needs)
        self.deadline = time.monotonic() + self.patience_s
        if self.rank == 0:
            write_json(self.folder / "value", 1)
        os.path.exists(self.folder / "signal")  # from here on NFS may remember that it is absent
        hello_at = time.time()
        address = "127.0.0.1"
        with contextlib.suppress(ConfigError):  # one of the findings
            address = find_address(needs)
        self._write("hello", {"address": [address, listener.getsockname()[1]]})
        peers = self._meet("hello")
        self.seen.missing = sorted(set(range(self.count)) - set(peers))
        self._exclusive()
        self._visibility()
        self._locks()
        self._call({rank: hello["address"] for rank, hello in peers.items() if rank != self.rank})
        self.seen.skew_s = (self.folder / f"hello-{self.rank}").stat().st_mtime - hello_at
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._write("result", asdict(NodeReport(node, list_software(needs), findings, self.seen)))
        self._meet("result")  # the listener must live until every peer has called

    def _write(self, what: str, value: Any) -> None:
        write_json(self.folder / f"{what}-{self.rank}", value)

    def _meet(self, what: str, wanted: int | None = None) -> dict[int, Any]:
        """Return the report of every node, by rank; late nodes are left out."""
        wanted = self.count - len(self.seen.missing) if wanted is None else wanted
        found: dict[int, Any] = {}
        while len(found) < wanted and time.monotonic() < self.deadline:
            for name in os.listdir(self.folder):
                prefix, _, rank = name.rpartition("-")
                if prefix == what and rank.isdigit() and int(rank) not in found:
                    content = load_json(self.folder / name)
                    if content is not None:
                        found[int(rank)] = content
            time.sleep(POLL_S)
        return found

    def _exclusive(self) -> None:
        """Create the same names as all others at once; each kind must have one winner."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.folder / "won.open", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            self.seen.won.append("open")
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder / "won.mkdir")
            self.seen.won.append("mkdir")
        if create_exclusive(self.folder / "won.link", f"{self.rank}\n"):
            self.seen.won.append("link")

    def _visibility(self) -> None:
        value, signal = self.folder / "value", self.folder / "signal"
        load_json(value)
        self._write("ready", True)
        self._meet("ready")
        start = time.monotonic()
        if self.rank == 0:
            write_json(value, 2)
            write_json(signal, True)
        self._until(lambda: "signal" in os.listdir(self.folder))
        listed = time.monotonic()
        self.seen.stale_name_s = self._until(signal.exists, STALE_NAME_S)
        self.seen.stale_content_s = self._until(lambda: load_json(value) == 2)
        self._write("saw", True)
        if self.rank == 0:
            self._meet("saw")
            self.seen.name_s = time.monotonic() - start
        else:
            self.seen.name_s = listed - start

    def _until(self, condition: Callable[[], bool], patience_s: float = float("inf")) -> float | None:
        """Return the seconds until it held; None if that took too long."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() > min(self.deadline, start + patience_s):
                return None
            time.sleep(POLL_S)
        return time.monotonic() - start

    def _locks(self) -> None:
        path = self.folder / "lock"
        if self.rank == 0:
            path.touch()
            with path.open("r+b") as file:
                held = try_lock(file.fileno())
                self._write("locked", held)
                self._meet("tried", self.count - len(self.seen.missing) - 1)
            self.seen.lock = False if held else None
            return
        if self._meet("locked", 1).get(0):
            with contextlib.suppress(OSError), path.open("r+b") as file:
                self.seen.lock = try_lock(file.fileno())
        self._write("tried", True)

    def _call(self, peers: dict[int, list[Any]]) -> None:
        """Call the nodes that follow this one."""
        after = sorted(peers, key=lambda rank: (rank - self.rank) % self.count)[:MAX_PEERS]
        places = {str(rank): (str(peers[rank][0]), int(peers[rank][1])) for rank in after}
        unreached = net.find_unreached(places)
        self.seen.reached = len(places) - len(unreached)
        self.seen.unreachable = [f"{places[rank][0]}:{places[rank][1]} of node {rank}" for rank in unreached]


def list_software(needs: Requirements) -> str:
    """Return the versions that must be the same on all nodes of a job."""
    torch = find_version("torch", needs.python) or "missing"
    return f"Python {platform.python_version()}, torch {torch}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.doctor.node", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--patience_s", type=float, default=90.0)
    args = parser.parse_args()
    needs = Requirements(**load_object(args.dir / NEEDS))
    rank = int(os.environ.get("SLURM_PROCID", 0))
    Visit(args.dir / MEET, rank, needs.num_nodes, args.patience_s).run(needs)
    sys.stdout.flush()
    os._exit(0)  # a thread waits for callers


if __name__ == "__main__":
    main()
