"""The order of rows: a pure function of (seed, epoch, number of rows); and the cursor.

The cursor is one integer, the number of visited rows over all epochs; nothing else needs saving. The order
comes from the raw stream of a bit generator, which NumPy keeps stable, so it is the same on every version.
"""

import functools

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


def make_sample_seed(seed: int, epoch: int | str, row: int, sample: int | str) -> int:
    """Return the sampling seed of one sample, 63 bits. It does not depend on time or place."""
    return xxhash.xxh64_intdigest(f"sample/{seed}/{epoch}/{row}/{sample}".encode()) >> 1
