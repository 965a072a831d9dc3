"""The credit of a train batch on ragged rows: no tensor has a column for each token of the longest row.

Of long rows, a rectangle of the whole batch is larger than the rows, and its credit takes many such
rectangles. Here the rows of a chunk are padded to their longest, or none at all: without rewards of tokens
and without a discount, all tokens of a row have the same credit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import torch

from hpc_rl.algorithms.normalization import normalize, normalize_rows
from hpc_rl.algorithms.rewards import spread_rewards
from hpc_rl.algorithms.token_batch import Options, RewardBatch

CHUNK_TOKENS = 1 << 20  # of a padded chunk; some ten tensors have this size for a while


@dataclass(frozen=True)
class ComputedRows(Sequence[np.ndarray]):
    """Arrays of rows that are computed each time they are read, and not kept."""

    num_rows: int
    compute: Callable[[int], np.ndarray]  # of a row number

    def __len__(self) -> int:
        return self.num_rows

    @overload
    def __getitem__(self, at: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, at: slice) -> list[np.ndarray]: ...
    def __getitem__(self, at: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(at, slice):
            return [self.compute(i) for i in range(self.num_rows)[at]]
        return self.compute(range(self.num_rows)[at])


def exclude_tokens(credit: Sequence[np.ndarray], kept: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Return the credit without the tokens that `kept` leaves out, bool [L] per row."""
    return ComputedRows(len(credit), lambda i: credit[i] * kept[i])


def spread_constant(shaped_B: torch.Tensor, batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return the credit that `spread_rewards` gives every masked token of a row, float32 [B].

    Without rewards of tokens, a critic and a discount it is one number.
    """
    if options.adv_norm is None:
        return shaped_B
    return normalize(shaped_B, options.adv_norm, batch.group_B, share_B=batch.count_tokens())


def cut_chunks(lengths: Sequence[int], num_tokens: int) -> Iterator[range]:
    """Yield consecutive rows of at most `num_tokens` when they are padded to their longest, at least one."""
    start = longest = 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if i > start and longest * (i + 1 - start) > num_tokens:
            yield range(start, i)
            start, longest = i, length
    if start < len(lengths):
        yield range(start, len(lengths))


def spread_rows(
    shaped_B: torch.Tensor,
    masks: Sequence[np.ndarray],
    group_B: torch.Tensor,
    options: Options,
    make_batch: Callable[[range], RewardBatch],
    check: Callable[[torch.Tensor, RewardBatch], None],
) -> list[np.ndarray]:
    """Return what `spread_rewards` gives, float32 [L] per row.

    `make_batch` returns the batch of some rows, with their rewards of tokens; `check` gets the credit of each
    such batch, float32 [b, t].
    """
    plain, found = replace(options, adv_norm=None), []
    for part in cut_chunks([len(mask) for mask in masks], CHUNK_TOKENS):
        batch = make_batch(part)
        credit_BT = spread_rewards(batch, shaped_B[part.start : part.stop], plain)
        check(credit_BT, batch)
        found += [credit_BT[j, : len(masks[i])].numpy().copy() for j, i in enumerate(part)]
    if options.adv_norm is not None:
        normalize_rows(found, masks, options.adv_norm, group_B)
    return found
