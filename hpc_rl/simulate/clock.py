"""A virtual clock: calls at later times, and activities, which are generators that wait."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import Any


class Event:
    """Something to wait for; it can be fired again and again."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def wait(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)

    def fire(self) -> None:
        """Continue everything that waits now."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()


Steps = Generator[float | Event, None, Any]  # yields seconds to let pass, or an event to wait for


class Activity:
    """A generator on a clock. `stop` ends it where it waits."""

    def __init__(self, clock: Clock, steps: Steps) -> None:
        self._clock, self._steps, self._turn = clock, steps, 0
        self.is_over = False
        clock.after(0.0, lambda: self._continue(0))

    def stop(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._steps.close()

    def _continue(self, turn: int) -> None:
        if self.is_over or turn != self._turn:  # stopped, or continued by something else meanwhile
            return
        self._turn = turn = turn + 1
        try:
            wanted = next(self._steps)
        except StopIteration:
            self.is_over = True
            return
        if isinstance(wanted, Event):
            wanted.wait(lambda: self._continue(turn))
        else:
            self._clock.after(wanted, lambda: self._continue(turn))


class Clock:
    """Seconds since the start of the simulation. Calls at equal times happen in the order of requests."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_calls = 0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now + max(0.0, delay_s), next(self._order), call))

    def begin(self, steps: Steps) -> Activity:
        return Activity(self, steps)

    def run(self, until: Callable[[], bool], limit_s: float = float("inf")) -> bool:
        """Make calls until `until()`; return False if the time limit or the last call came first."""
        while not until():
            if not self._calls or self._calls[0][0] > limit_s:
                return False
            self.now, _, call = heapq.heappop(self._calls)
            self.num_calls += 1
            call()
        return True
