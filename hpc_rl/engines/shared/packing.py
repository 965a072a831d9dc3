"""Cuts rows into micro-batches, mini-batches and shares of ranks: pure functions of their lengths in tokens.

All results are lists of groups, equal on every rank; a group lists row indices in ascending order.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

Groups = list[list[int]]
MIN_SAVING = 0.05  # of the size of a padded group, by a split of it
# about what one more micro-batch costs, in tokens, with models of 0.1 to 1 million parameters on one thread
PASS_TOKENS = 64
# the same if several ranks gather the weights in each pass
PASS_TOKENS_OF_RANKS = 512


def pack(
    lengths: Sequence[int] | np.ndarray,
    capacity: int | None = None,
    min_groups: int = 1,
    max_rows: int | None = None,
) -> Groups:
    """Return at least `min_groups` groups of at most `capacity` tokens and `max_rows` rows.

    Uses as few groups as best-fit-decreasing does, and fills them evenly if that fits. Raises ValueError for
    a row above the capacity.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return []
    check_capacity(lengths, capacity)
    max_rows = max_rows or len(lengths)
    min_groups = max(min_groups, -(-len(lengths) // max_rows))
    if capacity is None:
        return balance(lengths, min(min_groups, len(lengths)), max_rows)
    groups = _pack_best_fit(lengths, capacity, max_rows)
    num_groups = min(max(len(groups), min_groups), len(lengths))
    if lengths.sum() <= 0.95 * num_groups * capacity:  # else too full to be evened out
        even = balance(lengths, num_groups, max_rows)
        if max(int(lengths[group].sum()) for group in even) <= capacity:
            return even
    return _split_largest(groups, lengths, num_groups)


def check_capacity(lengths: np.ndarray, capacity: int | None) -> None:
    """Raise ValueError that names the first row above the capacity."""
    if capacity is not None and len(lengths) and lengths.max() > capacity:
        row = int(np.argmax(lengths > capacity))
        raise ValueError(f"row {row} has {lengths[row]} tokens, more than max_tokens_per_mb {capacity}")


def balance(lengths: Sequence[int] | np.ndarray, num_groups: int, max_rows: int | None = None) -> Groups:
    """Return exactly `num_groups` groups of nearly equal sums, some empty if there are few rows.

    The longest row goes to the least loaded group (LPT; Graham, "Bounds on Multiprocessing Timing Anomalies",
    1969) with less than `max_rows` rows. `num_groups` times `max_rows` must be enough for all rows.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    groups: Groups = [[] for _ in range(num_groups)]
    loads = [(0, group) for group in range(num_groups)]
    for row, length in _sort_longest_first(lengths):
        load, group = heapq.heappop(loads)
        groups[group].append(row)
        if len(groups[group]) != max_rows:
            heapq.heappush(loads, (load + length + 1, group))  # + 1: rows of length 0 are spread as well
    return [sorted(group) for group in groups]


def make_length_buckets(
    lengths: Sequence[int] | np.ndarray,
    capacity: int | None = None,
    min_groups: int = 1,
    max_rows: int | None = None,
    pass_tokens: int = PASS_TOKENS,
) -> Groups:
    """Return groups of rows of similar length, for micro-batches that are padded to their longest row.

    Takes the longest rows first. Closes a group when it has `max_rows` rows, or when its padded size would
    exceed `capacity`. Then splits each group where that saves more padding than one more forward pass costs:
    `pass_tokens`, or MIN_SAVING of the group's size. Raises ValueError for a row above the capacity.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    check_capacity(lengths, capacity)
    groups: Groups = []
    for row, _ in _sort_longest_first(lengths):
        size = lengths[groups[-1][0]] * (len(groups[-1]) + 1) if groups else 0
        if not groups or len(groups[-1]) == max_rows or (capacity is not None and size > capacity):
            groups.append([])
        groups[-1].append(row)
    groups = [part for group in groups for part in _split_by_length(group, lengths, pass_tokens)]
    groups = _split_largest(groups, lengths, min(min_groups, len(lengths)))
    return [sorted(group) for group in groups]


def _split_by_length(group: list[int], lengths: np.ndarray, pass_tokens: int) -> Groups:
    """Split rows, the longest first, as long as one more group saves enough padding."""
    done: Groups = []
    waiting = [group]
    while waiting:
        rows = waiting.pop()
        longest = lengths[rows[0]]
        saved = np.arange(len(rows) - 1, 0, -1) * (longest - lengths[rows[1:]])  # by a split after each row
        if len(rows) < 2 or saved.max() <= max(pass_tokens, MIN_SAVING * longest * len(rows)):
            done.append(rows)
        else:
            at = int(saved.argmax()) + 1
            waiting += [rows[at:], rows[:at]]
    return done


def _sort_longest_first(lengths: np.ndarray) -> list[tuple[int, int]]:
    order = np.argsort(-lengths, kind="stable")
    return list(zip(order.tolist(), lengths[order].tolist(), strict=True))


def _pack_best_fit(lengths: np.ndarray, capacity: int, max_rows: int) -> Groups:
    """Return groups by best-fit-decreasing: each row goes into the group with the least room for it."""
    groups: Groups = []
    rooms: list[int] = []  # distinct free capacities of groups that take rows, ascending
    by_room: dict[int, list[int]] = {}  # the groups of each
    for row, length in _sort_longest_first(lengths):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, group = capacity, len(groups)
            groups.append([])
        else:
            room = rooms[at]
            group = by_room[room].pop()
            if not by_room[room]:
                del rooms[at]
        groups[group].append(row)
        if len(groups[group]) < max_rows:
            room -= length
            if same := by_room.get(room):
                same.append(group)
            else:
                by_room[room] = [group]
                insort(rooms, room)
    return [sorted(group) for group in groups]


def _split_largest(groups: Groups, lengths: np.ndarray, min_groups: int) -> Groups:
    """Halve the largest group of two or more rows until there are `min_groups`; rows keep their order."""
    if len(groups) >= min_groups:
        return sorted(groups)

    def entry(group: list[int]) -> tuple[int, list[int]]:
        # - 1: a group of empty rows must come before one that can't be halved
        return -int(lengths[group].sum()) - 1 if len(group) > 1 else 0, group

    heap = [entry(group) for group in groups]
    heapq.heapify(heap)
    while len(heap) < min_groups:
        _, group = heapq.heappop(heap)
        middle = (len(group) + 1) // 2
        heapq.heappush(heap, entry(group[:middle]))
        heapq.heappush(heap, entry(group[middle:]))
    return sorted(group for _, group in heap)
