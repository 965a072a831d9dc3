"""Which groups make a batch of a given number of sequences, where groups have different sizes. Pure."""

from collections.abc import Sequence


def fill(sizes: Sequence[int], total: int) -> list[int] | None:
    """Return positions of sizes that add up to `total`, early ones first; None where none do.

    Takes each that still fits, in order; only where that misses the total, other combinations are looked at.
    """
    chosen, left = [], total
    for position, size in enumerate(sizes):
        if size <= left:
            chosen.append(position)
            left -= size
        if not left:
            return chosen
    return _any_sum(sizes, total)


def _any_sum(sizes: Sequence[int], total: int) -> list[int] | None:
    """Return positions that add up to `total`, by the earliest last position; see the subset-sum problem."""
    # for each sum that can be reached: the position added last, and the sum before it
    reached: dict[int, tuple[int, int]] = {0: (-1, 0)}
    for position, size in enumerate(sizes):
        for before in list(reached):
            if before + size <= total and size > 0:
                reached.setdefault(before + size, (position, before))
        if total in reached:
            break
    if total not in reached:
        return None
    chosen, at = [], total
    while at:
        position, at = reached[at]
        chosen.append(position)
    return chosen[::-1]
