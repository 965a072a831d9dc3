"""Choose groups of different sizes for a batch with a given number of sequences. Pure."""

from collections.abc import Iterable, Sequence


def choose_sizes(sizes: Sequence[int], total: int) -> list[int] | None:
    """Return positions of sizes that add up to `total`, early ones first; None if no sizes do.

    An early size is skipped only if no sum contains it together with the sizes chosen before it. Example: for
    6, 4, 4, 4, 4, 6 the sum 16 takes 6, 4 and the last 6, not the four in the middle.
    """
    chosen, left = _take_prefix(sizes, total)
    if not left:
        return chosen
    # bit s of sums[i]: some of the sizes from position i on add up to s
    every = (1 << (total + 1)) - 1
    sums = [1]
    for size in reversed(sizes):
        sums.append(sums[-1] | (sums[-1] << size & every))
    sums.reverse()
    if not sums[0] >> total & 1:
        return None
    chosen, left = [], total
    for position, size in enumerate(sizes):
        if 0 < size <= left and sums[position + 1] >> (left - size) & 1:
            chosen.append(position)
            left -= size
    return chosen


def can_add_up(sizes: Iterable[int], total: int) -> bool:
    """Return whether sizes, each taken any number of times, add up to `total`."""
    reached = [True] + [False] * total
    for size in sizes:
        for at in range(size, total + 1):
            reached[at] |= reached[at - size]
    return reached[total]


def _take_prefix(sizes: Sequence[int], total: int) -> tuple[list[int], int]:
    """Return the first positions, as many as fit, and the rest of the total."""
    chosen, left = [], total
    for position, size in enumerate(sizes):
        if not left or size > left:
            break
        chosen.append(position)
        left -= size
    return chosen, left
