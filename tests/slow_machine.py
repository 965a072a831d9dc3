"""Run a command on a machine that is made slower: each of its processes gets a share of one core.

    sudo python tests/slow_machine.py --share 0.33 make test

Each process, also a daemon, gets its own cgroup with a quota of CPU time. A new process begins in the cgroup of
its parent, so the two share one quota until this program moves it. Needs Linux, root, and
cgroups (v1; the code for v2 is not tested).
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

V1 = Path("/sys/fs/cgroup/cpu")
V2 = Path("/sys/fs/cgroup")
PERIOD_US = 50_000
LOOK_EVERY_S = 0.1


class SlowProcesses:
    """A cgroup with one cgroup per process, each with the quota `share` of one core."""

    def __init__(self, share: float) -> None:
        self._quota_us = int(share * PERIOD_US)
        self._is_v1 = (V1 / "cgroup.procs").exists()
        self._numbers = itertools.count()
        self._root = (V1 if self._is_v1 else V2) / f"hpc-rl-slow-{os.getpid()}"
        self._root.mkdir()
        if not self._is_v1:
            (V2 / "cgroup.subtree_control").write_text("+cpu")
            (self._root / "cgroup.subtree_control").write_text("+cpu")
        self._owners: dict[Path, int] = {}

    def start(self, argv: list[str]) -> subprocess.Popen[bytes]:
        """Start a command that enters its cgroup before it begins, so that no child of it escapes."""
        folder = self._make_group()
        command = subprocess.Popen(argv, preexec_fn=lambda: (folder / "cgroup.procs").write_text("0"))
        self._owners[folder] = command.pid
        return command

    def _make_group(self) -> Path:
        folder = self._root / str(next(self._numbers))
        folder.mkdir()
        if self._is_v1:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(self._quota_us))
        else:
            (folder / "cpu.max").write_text(f"{self._quota_us} {PERIOD_US}")
        return folder

    def _move(self, pid: int) -> None:
        folder = self._make_group()
        try:
            (folder / "cgroup.procs").write_text(str(pid))
            self._owners[folder] = pid
        except ProcessLookupError:
            folder.rmdir()

    def look(self) -> int:
        """Give new processes their own cgroups, remove empty ones; return the number of processes."""
        for folder, owner in list(self._owners.items()):
            pids = [int(line) for line in (folder / "cgroup.procs").read_text().split()]
            if owner not in pids and pids:
                self._owners[folder] = owner = pids[0]
            for pid in pids:
                if pid != owner:
                    self._move(pid)
            if not pids:
                with suppress(OSError):  # a process has just come
                    folder.rmdir()
                    del self._owners[folder]
        return len(self._owners)

    def end(self, signal_number: int) -> None:
        """Signal all processes, and wait until none is left."""
        while self.look():
            for folder in self._owners:
                for pid in (folder / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal_number)
            time.sleep(LOOK_EVERY_S)
        self._root.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--share", type=float, default=1 / 3, help="of one core, for each process (default: 1/3)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command or not 0 < args.share <= 1:
        parser.error("give a share above 0, at most 1, and a command")
    processes = SlowProcesses(args.share)
    command, most = processes.start(args.command), 0
    try:
        while command.poll() is None:
            most = max(most, processes.look())
            time.sleep(LOOK_EVERY_S)
    finally:
        processes.end(signal.SIGKILL)
    print(
        f"exit code {command.returncode}; at most {most} processes at a time, each with {args.share:.2f} of a core"
    )
    return command.returncode


if __name__ == "__main__":
    sys.exit(main())
