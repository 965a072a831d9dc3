"""LastCall: whether a prompt that is issued now can still be finished before the trainer is stopped.

What is cut off is lost work, not lost data: its prompt would be issued again by the next attempt.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from hpc_rl.stats.tracker import p95

logger = logging.getLogger(__name__)
LATEST = 200  # durations that count


class LastCall:
    """Args:
    left_s: Seconds until the trainer is stopped; None while nobody has said.
    """

    def __init__(
        self, left_s: Callable[[], float | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._left_s, self._clock = left_s, clock
        self._begun: dict[int, float] = {}  # by ticket
        self._durations: deque[float] = deque(maxlen=LATEST)
        self.holding = False  # nothing is issued any more

    def begun(self, ticket: int) -> None:
        self._begun[ticket] = self._clock()

    def finished(self, ticket: int) -> None:
        if (start := self._begun.pop(ticket, None)) is not None:
            self._durations.append(self._clock() - start)

    def forget(self, tickets: Iterable[int]) -> None:
        """These will not be answered."""
        for ticket in tickets:
            self._begun.pop(ticket, None)

    @property
    def usual_s(self) -> float:
        """95th percentile of what a prompt takes from issue to result; 0 before the first."""
        return p95(self._durations)

    def holds(self) -> bool:
        """Whether nothing is to be issued now."""
        left_s = self._left_s()
        holds = left_s is not None and left_s <= self.usual_s
        if holds != self.holding:
            words = (
                "nothing more is issued: a prompt takes %.1f s, and %.1f s are left"
                if holds
                else "issuing again: %.1f s, %.1f s"
            )
            logger.info(words, self.usual_s, left_s if left_s is not None else float("inf"))
        self.holding = holds
        return holds

    def taken_back(self) -> bool:
        """Whether issuing was held and may go on: the job's time was extended."""
        return self.holding and not self.holds()
