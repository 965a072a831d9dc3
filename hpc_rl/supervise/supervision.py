"""What the supervisor of a trial (driver.py) and that of a server job (server_job.py) do the same way."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hpc_rl.errors import ExitCode
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.supervise import bad_nodes, ownership
from hpc_rl.supervise.processes import Handle, Steps
from hpc_rl.trial import Attempt, submission_of

logger = logging.getLogger(__name__)
SAME_TERM_S = 2.0  # the scheduler and the batch script both bring the same TERM


@contextmanager
def tolerant(doing: str) -> Iterator[None]:
    """A shared file system that fails for a moment must not end a trial: said loudly, and done without or tried again."""
    try:
        yield
    except OSError as error:
        logger.error("%s: %s", doing, error)


def obey_signals(wish: Callable[[str], None]) -> None:
    """TERM, INT and USR1 are wishes, told by name; a second TERM ends the process, and its roles by their pipes."""
    terms: list[float] = []

    def on_signal(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            terms.append(time.monotonic())
            if terms[-1] - terms[0] > SAME_TERM_S:
                os._exit(ExitCode.KILLED_BY_SYSTEM)
        wish(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)


class Events:
    """The events of an attempt: one line each, for people and for the next supervisor."""

    def __init__(self, attempt: Attempt) -> None:
        self.path = attempt.events
        self._wrote = False

    def write(self, event: str, details: dict[str, Any]) -> None:
        """Opened and closed each time so that readers on other nodes see it. Never ends the supervisor."""
        line = json.dumps({"time": time.time(), "event": event, **details}) + "\n"
        logger.info("%s %s", event, details)
        with tolerant("writing an event"), self.path.open("a+b") as file:
            if file.seek(0, os.SEEK_END) and not self._wrote:
                line = "\n" + line  # whatever a killed supervisor left of its last line
            self._wrote = True
            file.write(line.encode())

    def ended(self, code: int, reason: str) -> None:
        """The last line."""
        self.write("ended", {"role": "supervisor", "code": int(code), "reason": reason})


def start_unit(steps: Steps, plan: Plan, attempt: Attempt, unit: Unit, incarnation: int) -> Handle:
    """Start the processes of a unit, and leave on record who they are. Raises OSError where they can't be started."""
    flags = ["--trial_dir", str(attempt.trial.dir), "--attempt", attempt.id]
    flags += ["--index", str(unit.index), "--incarnation", str(incarnation)]
    handle = steps.start(unit, [plan.python, "-m", unit.module, *flags], attempt, incarnation)
    with tolerant("recording processes"):
        ownership.leave_client_records(attempt, unit, incarnation, handle.children)
    return handle


def avoid(attempt: Attempt, events: Events, nodes: Sequence[str], reason: str, hours: float) -> None:
    """The next start of the job is not to get these nodes. Where that can't be written, it may, and will tell of them again."""
    events.write("bad_nodes", {"nodes": list(nodes), "hours": hours, "reason": reason})
    with tolerant("recording bad nodes"):
        bad_nodes.add(attempt.trial, attempt.id, nodes, reason, time.time(), hours)
    tell_script(attempt)


def tell_script(attempt: Attempt) -> None:
    """The batch script reads which nodes to avoid: where an attempt begins, where it ends, and when that changes."""
    with tolerant("telling the script of bad nodes"):
        bad_nodes.tell_script(attempt.trial, submission_of(attempt.id), time.time())
