"""The order of rows: a pure function of (seed, epoch, number of rows); and the cursor.

The cursor is one integer, the number of visited rows over all epochs; nothing else needs saving. The order
comes from the raw stream of a bit generator, which NumPy keeps stable, so it is the same on every version.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import xxhash


@functools.lru_cache(maxsize=4)
def permute_rows(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """Return the row at each position of an epoch, int64 [num_rows], read-only."""
    key = xxhash.xxh64_intdigest(f"order/{seed}/{epoch}".encode())
    order = np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable")
    order.setflags(write=False)
    return order


def locate(index: int, seed: int, num_rows: int, shuffle: bool = True) -> tuple[int, int]:
    """Return (epoch, row) of the index-th visited row, counted over all epochs from 0."""
    epoch, position = divmod(index, num_rows)
    return epoch, int(permute_rows(seed, epoch, num_rows)[position]) if shuffle else position


def order_by_weight(seed: int, epoch: int, weights_N: np.ndarray, shuffle: bool = True) -> np.ndarray:
    """Return the rows of an epoch, int64 [N], where a row's share of the N visits is its share of the weight.

    Systematic sampling: each row is visited its expected number of times, rounded down or up. Example: of
    rows with the weights 1, 1, 2, the last has 1 or 2 of the 3 visits, and the others 0 or 1.
    """
    num_rows = len(weights_N)
    rows = permute_rows(seed, epoch, num_rows) if shuffle else np.arange(num_rows)
    rows = rows[weights_N[rows] > 0]
    key = xxhash.xxh64_intdigest(f"weights/{seed}/{epoch}".encode())
    raw = np.random.Philox(key=key).random_raw(num_rows + 1)
    edges = np.cumsum(weights_N[rows]) * (num_rows / weights_N.sum())
    points = raw[0] / 2.0**64 + np.arange(num_rows)
    # the last edge may be rounded to less than num_rows
    places = np.minimum(np.searchsorted(edges, points, side="right"), len(rows) - 1)
    visited = rows[places]
    return visited[np.argsort(raw[1:], kind="stable")] if shuffle else visited


def choose_set(index: int, shares: Sequence[Fraction]) -> tuple[int, int]:
    """Return the data set of a prompt index, and how many earlier indexes it has. The shares add up to 1.

    Of the first n indexes the first data set has its share, rounded; the others divide the rest likewise.
    Example: with the shares 1/2, 1/4, 1/4 the data sets of the indexes 0 to 7 are 0 1 0 2 0 1 0 2.
    """
    left = Fraction(1)
    for number, share in enumerate(shares[:-1]):
        before, after = (math.floor(share / left * count + Fraction(1, 2)) for count in (index, index + 1))
        if after > before:
            return number, before
        index -= before
        left -= share
    return len(shares) - 1, index


def is_drawn(share: float, seed: int, part: int, visit: int) -> bool:
    """Return the outcome of a coin that is true with probability `share`, by data set and visit."""
    return xxhash.xxh64_intdigest(f"coin/{seed}/{part}/{visit}".encode()) < share * 2.0**64


def make_sample_seed(seed: int, epoch: int | str, row: int, sample: int | str) -> int:
    """Return the sampling seed of one sample, 63 bits. It does not depend on time or place."""
    return xxhash.xxh64_intdigest(f"sample/{seed}/{epoch}/{row}/{sample}".encode()) >> 1
