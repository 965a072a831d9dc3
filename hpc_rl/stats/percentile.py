"""The 95th percentile: how long a thing usually takes at most."""

from __future__ import annotations

from collections.abc import Iterable


def p95(values: Iterable[float]) -> float:
    """The value that at least 95 of 100 do not exceed; 0 where there are none."""
    known = sorted(values)
    return known[-(-95 * len(known) // 100) - 1] if known else 0.0
