"""Durations of prompts, and whether a new prompt can finish before the trainer is stopped.

An interrupted prompt costs work, not data: the next attempt issues it again.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from hpc_rl.stats.tracker import compute_p95

logger = logging.getLogger(__name__)
LATEST = 200  # durations that count


class IssueClock:
    """Times of the running prompts. `left_s` returns the seconds until the trainer is stopped, if known."""

    def __init__(
        self, left_s: Callable[[], float | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._left_s, self._clock = left_s, clock
        self._begun: dict[int, float] = {}  # by ticket
        self._durations: deque[float] = deque(maxlen=LATEST)
        self._last_result: float | None = None
        self.holding = False  # nothing is issued any more

    def begin(self, ticket: int) -> None:
        self._begun[ticket] = self._clock()

    def finish(self, ticket: int) -> None:
        self._last_result = self._clock()
        if (start := self._begun.pop(ticket, None)) is not None:
            self._durations.append(self._last_result - start)

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop tickets that will not be answered."""
        for ticket in tickets:
            self._begun.pop(ticket, None)

    @property
    def usual_s(self) -> float:
        """95th percentile of the seconds from issue to result; 0 before the first."""
        return compute_p95(self._durations)

    @property
    def oldest_running_s(self) -> int | None:
        return round(self._clock() - min(self._begun.values())) if self._begun else None

    @property
    def quiet_s(self) -> int | None:
        """Seconds since the last result."""
        return None if self._last_result is None else round(self._clock() - self._last_result)

    def check_hold(self) -> bool:
        """Return whether to issue no prompts now."""
        left_s = self._left_s()
        holds = left_s is not None and left_s <= self.usual_s
        if holds != self.holding:
            left = "the job has no known end" if left_s is None else f"{left_s:.1f} s of the job are left"
            what = "no new prompts begin" if holds else "new prompts begin again"
            logger.info("%s, because a prompt takes %.1f s and %s", what, self.usual_s, left)
        self.holding = holds
        return holds

    def can_resume(self) -> bool:
        """Return whether issuing was paused and can continue, because the job's time was extended."""
        return self.holding and not self.check_hold()
