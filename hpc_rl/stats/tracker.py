"""Collects the numbers of a step (means, values, seconds) as plain scalars, without torch."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager


class Tracker:
    """The measurements of one step: means as total over count, plain values, and timings."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}
        self._values: dict[str, float] = {}

    def mean(self, name: str, total: float, count: float) -> None:
        """Add to a mean. A mean with count 0 is left out of the scalars."""
        old_total, old_count = self._totals.get(name, (0.0, 0.0))
        self._totals[name] = (old_total + total, old_count + count)

    def value(self, name: str, value: float) -> None:
        """Set a number; the last one counts."""
        self._values[name] = value

    def add(self, name: str, value: float) -> None:
        self._values[name] = self._values.get(name, 0.0) + value

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the duration of the block in seconds, even if it raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)

    def take(self) -> dict[str, float]:
        """Return the scalars so far and clear the tracker."""
        averages = {name: total / count for name, (total, count) in self._totals.items() if count}
        scalars = {**averages, **self._values}
        self._totals, self._values = {}, {}
        return scalars


def compute_means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the rows that have it."""
    tracker = Tracker()
    for row in rows:
        for name, value in row.items():
            tracker.mean(name, value, 1)
    return tracker.take()


def compute_p95(values: Iterable[float]) -> float:
    """Return the value that at least 95 of 100 do not exceed; 0 without values."""
    known = sorted(values)
    return known[-(-95 * len(known) // 100) - 1] if known else 0.0
