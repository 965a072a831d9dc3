"""The difficulty of rows: how many have a mean reward in each range."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

_BOUNDS = (0, 0.25, 0.5, 0.75)
DIFFICULTIES = ("0", "to 0.25", "to 0.5", "to 0.75", "below 1", "1")  # ranges; the next begins above


def count_by_difficulty(rates: Iterable[float]) -> dict[str, int]:
    """Return the number of mean rewards in each range, the hardest first."""
    counts = Counter(len(DIFFICULTIES) - 1 if rate >= 1 else bisect_left(_BOUNDS, rate) for rate in rates)
    return {name: counts[number] for number, name in enumerate(DIFFICULTIES)}
