"""Sets of steps as ranges, for files and for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_RANGES = 8  # in one line


def join_steps(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Return steps as ranges, first and last, ascending."""
    ranges: list[tuple[int, int]] = []
    for step in sorted({*steps}):
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1] = ranges[-1][0], step
        else:
            ranges.append((step, step))
    return ranges


def format_ranges(ranges: Sequence[Sequence[int]]) -> str:
    """Return `12-60, 63`; of many ranges the newest."""
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    earlier = len(texts) - MAX_RANGES
    return ", ".join([f"({earlier} earlier ranges)", *texts[earlier:]] if earlier > 0 else texts)
