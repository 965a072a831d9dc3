"""Start the watches over the first node (first_node.py): steps on two other nodes, which outlive that node.

A client of srun has a helper process, which makes Slurm end the step if the client is killed. All clients of
a job are on its first node: when the processes there die one by one, helpers would end the watches too. So
the helpers of their clients are killed at the start. Without a helper, a step outlives its client, and a
client still exits with its step.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)
NUM_WATCHES = 2
AGAIN_S = 60.0  # before an ended watch is restarted on another node
POLL_S = 0.2
SRUN = "srun"
FLAGS = "--overlap --exact --nodes=1 --ntasks=1 --cpus-per-task=1 --mem=0 --mpi=none --export=ALL"


class WatchSteps:
    """The watches of a job, spread over `hosts`; `command` returns the command of a watch."""

    def __init__(
        self,
        hosts: Sequence[str],
        flags: Sequence[str],
        command: Callable[[int], list[str]],
        log: Path,
        again_s: float = AGAIN_S,
    ) -> None:
        self._hosts, self._flags, self._command, self._log = list(hosts), [*flags], command, log
        self._again_s = again_s
        numbers = range(min(NUM_WATCHES, len(hosts)))
        self._places = {number: number * (len(hosts) // 2) for number in numbers}
        self._clients: dict[int, subprocess.Popen[bytes]] = {}
        self._with_helper: set[int] = set()
        self._start_at = dict.fromkeys(numbers, 0.0)

    @property
    def running(self) -> set[int]:
        """Numbers of the watches with a running client."""
        return set(self._clients)

    def keep(self) -> None:
        """Start the watches, and restart each on another node when it ends, for ever."""
        while True:
            self.poll(time.monotonic())
            time.sleep(POLL_S)

    def poll(self, now: float) -> None:
        for number, client in list(self._clients.items()):
            if client.poll() is not None:
                del self._clients[number]
                self._with_helper.discard(number)
                self._start_at[number] = now + self._again_s
                self._places[number] = self._choose_next_place(number)
            elif number in self._with_helper and end_helper(client.pid):
                self._with_helper.discard(number)
        for number, start_at in self._start_at.items():
            if number not in self._clients and now >= start_at:
                self._start(number)

    def _choose_next_place(self, number: int) -> int:
        """Return the place of the next host, without hosts of other watches if there are enough hosts."""
        taken = {place % len(self._hosts) for other, place in self._places.items() if other != number}
        place = self._places[number] + 1
        while place % len(self._hosts) in taken and len(self._hosts) > len(self._places):
            place += 1
        return place

    def _start(self, number: int) -> None:
        host = self._hosts[self._places[number] % len(self._hosts)]
        argv = [SRUN, *FLAGS.split(), *self._flags, f"--nodelist={host}", f"--job-name=watch-{number}"]
        with self._log.open("ab") as log:
            self._clients[number] = subprocess.Popen(
                [*argv, *self._command(number)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._with_helper.add(number)


def end_helper(pid: int, proc: Path = Path("/proc")) -> bool:
    """Kill the helper of an srun, or of a wrapper's srun; return False if it does not exist yet."""
    names: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError):  # the process has exited
            name, _, fields = (folder / "stat").read_text().partition(" (")[2].rpartition(") ")
            names[int(folder.name)] = name
            children.setdefault(int(fields.split()[1]), []).append(int(folder.name))
    parents = [pid]
    for parent in parents:
        for child in children.get(parent, []):
            if names.get(parent) == names[child] == SRUN:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                return True
            parents.append(child)
    return False
