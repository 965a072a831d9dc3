"""Watch which nodes of the job answer, and whether this node is cut off from them and from the scheduler.

A host is probed by a connection to an unused port: a live host refuses at once, a host without power or
network does not answer. A host that never answered, for example behind a firewall, is not judged.
"""

import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from hpc_rl.core.net import DISCARD_PORT

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 5.0
ANSWER_S = 3.0
SILENT_S = 10.0  # then a host counts as silent: a single look may fail
ISOLATED_S = 60.0  # then a supervisor that is cut off ends
ASK_EVERY_S = ISOLATED_S / 2  # of the scheduler, while all hosts are silent


class HostWatch:
    """The other nodes of a job, by name and address.

    If all are silent, `scheduler_answers` is called, at most every ASK_EVERY_S.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        scheduler_answers: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses, self._scheduler_answers, self._clock = dict(addresses), scheduler_answers, clock
        self._answered: set[str] = set()  # ever
        self._silent_since: dict[str, float] = {}
        self._isolated_since: float | None = None
        self._looked_at = self._asked_at = float("-inf")

    def start(self) -> None:
        """Look every LOOK_EVERY_S, in a thread."""

        def watch() -> None:
            while True:
                try:
                    self.look()
                # without looks, silence does not grow beyond the last look
                except Exception:
                    logger.warning(
                        "the supervisor can't check now whether the other nodes are alive; it tries again",
                        exc_info=True,
                    )
                time.sleep(LOOK_EVERY_S)

        threading.Thread(target=watch, daemon=True, name="host-watch").start()

    def look(self) -> None:
        begun = self._clock()
        found = find_answering(self._addresses)
        self._answered |= found
        silent = self._answered - found
        self._silent_since = {node: self._silent_since.get(node, begun) for node in sorted(silent)}
        if not silent or found:
            self._isolated_since = None
        elif begun - self._asked_at >= ASK_EVERY_S:
            self._asked_at = begun
            if self._scheduler_answers():
                self._isolated_since = None
            elif self._isolated_since is None:
                self._isolated_since = begun
        self._looked_at = self._clock()

    def measure_silence(self) -> dict[str, float]:
        """Return, for each silent host, how long it had been silent at the last look."""
        silence = {node: self._looked_at - since for node, since in self._silent_since.items()}
        return {node: seconds for node, seconds in silence.items() if seconds >= SILENT_S}

    @property
    def cut_off_s(self) -> float:
        """How long, at the last look, none of several hosts had answered: this host is cut off. Else 0.

        If only two hosts don't reach each other, neither can tell which one is to blame.
        """
        silent = self.measure_silence()
        return min(silent.values()) if len(self._answered) > 1 and self._answered == silent.keys() else 0.0

    @property
    def isolated_s(self) -> float:
        """How long, at the last look, neither hosts nor scheduler had answered; 0 if one answers."""
        since = self._isolated_since
        return 0.0 if since is None else self._looked_at - since


def find_answering(addresses: Mapping[str, str], timeout_s: float = ANSWER_S) -> set[str]:
    """Return the names of the hosts, among names with addresses, that answer in time."""
    found = set()
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for node, address in addresses.items():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setblocking(False)
            try:
                probe.connect((address, DISCARD_PORT))
            except BlockingIOError:
                selector.register(probe, selectors.EVENT_WRITE, node)
            except ConnectionRefusedError:
                found.add(node)
            except OSError:  # no route leads there
                continue
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                error = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if error in (0, errno.ECONNREFUSED):
                    found.add(key.data)
    return found
