"""The credit of a train batch on ragged rows: no tensor has a column for each token of the longest row.

Of long rows, a rectangle of the whole batch is larger than the rows, and its credit takes many such
rectangles. Here the trained tokens of a chunk of rows make a rectangle, or none at all: without rewards of
tokens and without a discount, all tokens of a row have the same credit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch

from hpc_rl.algorithms.normalization import normalize, normalize_rows
from hpc_rl.algorithms.rewards import sum_discounted
from hpc_rl.algorithms.token_batch import Options, RewardBatch

CHUNK_TOKENS = 1 << 20  # of a padded chunk; two tensors have this size for a while
BLOCK_TOKENS = 1 << 17  # of a padded block in a chunk, whose rewards of tokens take some ten tensors


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
    make_token_rewards: Callable[[range], torch.Tensor | None],
    check: Callable[[torch.Tensor, torch.Tensor], None],
) -> list[np.ndarray]:
    """Return what `spread_rewards` gives, float32 [L] per row.

    `make_token_rewards` returns the rewards of the tokens of some rows, float32 [b, t], None without any;
    `check` gets the credit and the rewards of the masked tokens of each chunk, float32 [b, t] both.
    """
    found: list[np.ndarray] = []
    for part in cut_chunks([len(mask) for mask in masks], CHUNK_TOKENS):
        rewards_BT = _place_rewards(shaped_B, masks, part, make_token_rewards)
        credit_BT = sum_discounted(rewards_BT, options.discount * options.gae_lambda)
        check(credit_BT, rewards_BT)
        for i, credit_T in zip(part, credit_BT.numpy(), strict=True):
            # one array for all rows would leave holes of the size of a chunk in the heap
            row = np.zeros(len(masks[i]), np.float32)
            row[masks[i]] = credit_T[len(credit_T) - np.count_nonzero(masks[i]) :]
            found.append(row)
    if options.adv_norm is not None:
        normalize_rows(found, masks, options.adv_norm, group_B)
    return found


def _place_rewards(
    shaped_B: torch.Tensor,
    masks: Sequence[np.ndarray],
    part: range,
    make_token_rewards: Callable[[range], torch.Tensor | None],
) -> torch.Tensor:
    """Return the rewards of the masked tokens of some rows, moved to the ends of these, float32 [b, t]."""
    counts = {i: int(np.count_nonzero(masks[i])) for i in part}
    placed_BT = np.zeros((len(part), max(counts.values())), np.float32)
    placed = dict(zip(part, placed_BT, strict=True))
    for block in cut_chunks([len(masks[i]) for i in part], BLOCK_TOKENS):
        own = part[block.start : block.stop]
        given_BT = make_token_rewards(own)
        for j, i in enumerate(own):
            if counts[i]:
                row = placed[i][-counts[i] :]
                row[-1] = shaped_B[i]
                if given_BT is not None:
                    row += given_BT[j, : len(masks[i])].numpy()[masks[i]]
    return torch.from_numpy(placed_BT)
