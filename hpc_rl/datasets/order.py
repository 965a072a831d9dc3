"""The order in which rows are visited: a pure function of (seed, epoch, number of rows); and the cursor.

The cursor is one integer, the index that counts visited rows over all epochs from 0: nothing else needs
saving. Built on the raw stream of a bit generator, which NumPy promises to keep, so the order is the same on
every version.
"""

import functools

import numpy as np
import xxhash


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """int64 [num_rows], read-only: position within the epoch -> row."""
    key = xxhash.xxh64_intdigest(f"order/{seed}/{epoch}".encode())
    order = np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable")
    order.setflags(write=False)
    return order


def locate(index: int, seed: int, num_rows: int, shuffle: bool = True) -> tuple[int, int]:
    """(epoch, row) of the index-th visited row, counted over all epochs from 0."""
    epoch, position = divmod(index, num_rows)
    return epoch, int(permutation(seed, epoch, num_rows)[position]) if shuffle else position


def sample_seed(seed: int, epoch: int | str, row: int, sample: int | str) -> int:
    """Return the sampling seed of one sample, 63 bits: the same wherever and whenever it is made."""
    return xxhash.xxh64_intdigest(f"sample/{seed}/{epoch}/{row}/{sample}".encode()) >> 1
