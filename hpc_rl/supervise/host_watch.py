"""Which other nodes of the job answer, and whether this one is cut off from them and from the scheduler.

A host is asked by a connection to a port that no program listens on: one that lives refuses at once, one
that lost its power or its network says nothing. A host that never answered, behind a firewall, is not
judged.
"""

import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from hpc_rl.net import DISCARD_PORT

LOOK_EVERY_S = 5.0
ANSWER_S = 3.0
SILENT_S = 10.0  # from which on a host counts as silent: a single look may fail
ISOLATED_S = 60.0  # after which a supervisor that is cut off ends


class HostWatch:
    """The other nodes of a job, by name and address; `scheduler_answers` is asked where all are silent."""

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

    def start(self) -> None:
        """Look every LOOK_EVERY_S, in a thread."""

        def watch() -> None:
            while True:
                self.look()
                time.sleep(LOOK_EVERY_S)

        threading.Thread(target=watch, daemon=True, name="host-watch").start()

    def look(self) -> None:
        begun = self._clock()
        found = answering(self._addresses)
        self._answered |= found
        silent = self._answered - found
        self._silent_since = {node: self._silent_since.get(node, begun) for node in sorted(silent)}
        if not silent or found or self._scheduler_answers():
            self._isolated_since = None
        elif self._isolated_since is None:
            self._isolated_since = begun

    def silent_s(self) -> dict[str, float]:
        """Return for how long each host that does not answer any more has not."""
        now = self._clock()
        silence = {node: now - since for node, since in self._silent_since.items()}
        return {node: seconds for node, seconds in silence.items() if seconds >= SILENT_S}

    @property
    def isolated_s(self) -> float:
        """For how long neither a host nor the scheduler has answered; 0 where one does."""
        since = self._isolated_since
        return 0.0 if since is None else self._clock() - since


def answering(addresses: Mapping[str, str], timeout_s: float = ANSWER_S) -> set[str]:
    """Return the hosts, of names with addresses, that answer in time."""
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
