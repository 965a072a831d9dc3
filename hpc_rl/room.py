"""Room: what a process does that finds the disk full or its quota used up: it says so loudly, waits, and goes on.

Nothing is lost while it waits: what is to be written lies in memory, and who asks for it waits as well.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
FULL = (errno.ENOSPC, errno.EDQUOT)
PAUSE_S = (0.5, 10.0)  # between two tries: first, longest


def is_full(error: BaseException | None) -> bool:
    """Whether an error says that there is no room, which somebody may make."""
    return isinstance(error, OSError) and error.errno in FULL


def pauses() -> Iterator[float]:
    """Seconds to wait before each further try."""
    pause_s, longest_s = PAUSE_S
    while True:
        yield pause_s
        pause_s = min(longest_s, 2 * pause_s)


def tell_full(what: str, error: object, where: Path) -> None:
    logger.error("DISK FULL: %s can't be written (%s). Waiting; make room in %s", what, error, where)


def tell_room(what: str) -> None:
    logger.warning("there is room again: %s is written", what)


class Room:
    """The writes of one process below `where`. `closing` ends all waiting: what waits then fails."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.closing = threading.Event()
        self.waiting = False  # somebody waits now

    def write(self, what: str, work: Callable[[], Result]) -> Result:
        """Do it, again and again while the disk is full. For a thread that nobody waits for in vain. Raises OSError."""
        for pause_s in pauses():
            try:
                result = work()
            except OSError as error:
                if not is_full(error) or self.closing.is_set():
                    raise
                if not self.waiting:
                    tell_full(what, error, self.where)
                self.waiting = True
                self.closing.wait(pause_s)
                continue
            if self.waiting:
                tell_room(what)
            self.waiting = False
            return result
        raise AssertionError("pauses don't end")
