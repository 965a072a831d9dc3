"""One node's part of the doctor's visit: `python -m hpc_rl.doctor.node --dir D --count N`, as task SLURM_PROCID of one step.

The nodes meet in D, on the file system that is examined: each leaves files of its own there, and measures by its own clock
how long it takes until it sees what the others wrote. Nothing waits for longer than --patience_s.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl import net
from hpc_rl.doctor.facts import Facts, gather, own_address
from hpc_rl.trial import create_exclusive, read_json, write_json

POLL_S = 0.05
STALE_NAME_S = 5.0  # so long a node looks for a name without listing its folder
MAX_PEERS = 16  # that one node calls
BACKLOG = 128


@dataclass
class Seen:
    """What one node saw of the others.

    Args:
        rank: Number of the node in the step.
        missing: Ranks that it never saw.
        name_s: Seconds from rank 0's signal until it showed in a listing, there and back; None for never.
        stale_name_s: So long `exists` went on denying a name that a listing had shown; None for longer than STALE_NAME_S.
        stale_content_s: So long a replaced file still read as the old one; None for longer than the patience.
        won: Which exclusive creations it won: `open`, `link`, `mkdir`.
        lock: Whether it got a lock that rank 0 held; None where there are no locks.
        unreachable: Addresses of peers that did not answer.
        reached: How many did.
        skew_s: The file server's clock minus this node's.
    """

    rank: int = 0
    missing: list[int] = field(default_factory=list)
    name_s: float | None = None
    stale_name_s: float | None = 0.0
    stale_content_s: float | None = 0.0
    won: list[str] = field(default_factory=list)
    lock: bool | None = None
    unreachable: list[str] = field(default_factory=list)
    reached: int = 0
    skew_s: float = 0.0


class Visit:
    """One node among `count`, in the common folder."""

    def __init__(self, folder: Path, rank: int, count: int, patience_s: float) -> None:
        self.folder, self.rank, self.count = folder, rank, count
        self.patience_s = patience_s
        self.deadline = 0.0  # set when the meeting begins
        self.hello_at = 0.0
        self.seen = Seen(rank)

    def run(self, facts: Callable[[], Facts]) -> None:
        """Do everything, and leave `result-<rank>.json`."""
        listener = net.bind()
        listener.listen(BACKLOG)
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        url = [own_address()[0], listener.getsockname()[1]]
        mine = facts()  # before the meeting, so that it takes nobody's time
        self.deadline = time.monotonic() + self.patience_s
        if self.rank == 0:
            write_json(self.folder / "value", 1)
        os.path.exists(self.folder / "signal")  # from here on NFS may remember that it is absent
        self._tell("hello", {"address": url})
        peers = self._meet("hello")
        self.seen.missing = sorted(set(range(self.count)) - set(peers))
        self._exclusive()
        self._visibility()
        self._locks()
        self._call({rank: told["address"] for rank, told in peers.items() if rank != self.rank})
        self.seen.skew_s = (self.folder / f"hello-{self.rank}").stat().st_mtime - self.hello_at
        self._tell("result", {"facts": mine.to_json(), "seen": asdict(self.seen)})
        self._meet("result")  # the listener must live until everybody has called

    def _tell(self, what: str, value: Any = None) -> None:
        self.hello_at = time.time() if what == "hello" else self.hello_at
        write_json(self.folder / f"{what}-{self.rank}", value)

    def _meet(self, what: str, wanted: int | None = None) -> dict[int, Any]:
        """What every node told, by rank; those that did not in time are missing."""
        wanted = self.count - len(self.seen.missing) if wanted is None else wanted
        found: dict[int, Any] = {}
        while len(found) < wanted and time.monotonic() < self.deadline:
            for name in os.listdir(self.folder):
                prefix, _, rank = name.rpartition("-")
                if prefix == what and rank.isdigit() and int(rank) not in found:
                    told = read_json(self.folder / name)
                    if told is not None:
                        found[int(rank)] = told
            time.sleep(POLL_S)
        return found

    def _exclusive(self) -> None:
        """Everybody tries at once; each kind must have one winner."""
        for kind, attempt in (
            ("open", lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))),
            ("mkdir", os.mkdir),
        ):
            with contextlib.suppress(FileExistsError):
                attempt(self.folder / f"won.{kind}")
                self.seen.won.append(kind)
        if create_exclusive(self.folder / "won.link", f"{self.rank}\n"):
            self.seen.won.append("link")

    def _visibility(self) -> None:
        value, signal = self.folder / "value", self.folder / "signal"
        read_json(value)
        self._tell("ready", True)
        self._meet("ready")
        start = time.monotonic()
        if self.rank == 0:
            write_json(value, 2)
            write_json(signal, True)
        self._until(lambda: "signal" in os.listdir(self.folder))
        listed = time.monotonic()
        self.seen.stale_name_s = self._until(signal.exists, STALE_NAME_S)
        self.seen.stale_content_s = self._until(lambda: read_json(value) == 2)
        self._tell("saw", True)
        if self.rank == 0:
            self._meet("saw")
            self.seen.name_s = time.monotonic() - start
        else:
            self.seen.name_s = listed - start

    def _until(self, condition: Callable[[], bool], patience_s: float = float("inf")) -> float | None:
        """Seconds until it held; None where that took too long."""
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
                held = _lock(file.fileno())
                self._tell("locked", held)
                self._meet("tried", self.count - len(self.seen.missing) - 1)
            self.seen.lock = None if not held else False
            return
        if self._meet("locked", 1).get(0):
            with contextlib.suppress(OSError), path.open("r+b") as file:
                self.seen.lock = _lock(file.fileno())
        self._tell("tried", True)

    def _call(self, peers: dict[int, list[Any]]) -> None:
        """Exchange a word with the nodes that follow this one."""
        after = sorted(peers, key=lambda rank: (rank - self.rank) % self.count)[:MAX_PEERS]
        for rank in after:
            host, port = peers[rank]
            try:
                with socket.create_connection((host, port), timeout=5.0) as sock:
                    sock.sendall(b"hpc-rl?")
                    answered = sock.recv(64) == b"hpc-rl?"
            except OSError:
                answered = False
            if answered:
                self.seen.reached += 1
            else:
                self.seen.unreachable.append(f"{host}:{port} of node {rank}")


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _echo(listener: socket.socket) -> None:
    while True:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(5.0)
                connection.sendall(connection.recv(64))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.doctor.node", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--patience_s", type=float, default=90.0)
    parser.add_argument("--python", default="")
    parser.add_argument("--server_python", default="")
    args = parser.parse_args()
    rank = int(os.environ.get("SLURM_PROCID", 0))
    visit = Visit(args.dir, rank, args.count, args.patience_s)
    visit.run(lambda: gather(args.root, args.python, args.server_python))
    print(
        json.dumps({"rank": rank, "node": os.environ.get("SLURMD_NODENAME", socket.gethostname())}),
        flush=True,
    )
    os._exit(0)  # the echo's thread waits for callers


if __name__ == "__main__":
    main()
