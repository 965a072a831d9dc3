"""Packed rows for Megatron's modules, and this rank's share of them with context parallelism.

With c context ranks, each row is padded to a multiple of 2c tokens and cut into 2c chunks. Rank r has chunks
r and 2c - 1 - r, so all ranks have an equal part of the causal triangle. Tensor ranks divide the tokens in
layers that are not divided (sequence parallelism), so a last row pads the number of tokens to a multiple.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from hpc_rl.engines.shared.attention import PackedRows
from hpc_rl.engines.shared.micro_batches import Inputs


@dataclass
class Chunk:
    """One chunk of each row."""

    own: torch.Tensor  # positions of its tokens among this rank's tokens
    seen: torch.Tensor  # positions of the tokens that they attend to, among the gathered tokens
    own_rows: PackedRows
    seen_rows: PackedRows


@dataclass
class RankRows(PackedSeqParams):
    """The rows for attention; with several context ranks, the chunks of this rank.

    `qkv_format` tells Megatron that rotary positions are given per token, not by `cu_seqlens`.
    """

    qkv_format: str = "sbhd"
    whole: PackedRows | None = None
    chunks: tuple[Chunk, ...] = ()


@dataclass
class RankBatch:
    """One rank's share of packed rows: t tokens, and n of the N predictions of all context ranks."""

    input_ids: torch.Tensor  # int64 [1, t]
    position_ids: torch.Tensor  # int64 [1, t]
    rows: RankRows
    source_n: torch.Tensor  # index into t
    targets_n: torch.Tensor
    place_n: torch.Tensor  # index into N
    num_wanted: int  # N
    temperature_n: torch.Tensor | None = None


def share(
    inputs: Inputs,
    tensor: int,
    context: int,
    rank: int,
    put: Callable[[np.ndarray], torch.Tensor],
    pad_to: int = 0,
) -> RankBatch:
    """Return the share of context rank `rank` of packed inputs in CPU memory.

    `put` copies an array to the device. Pads to at least `pad_to` tokens over all ranks.
    """
    assert inputs.rows is not None, "the rows are packed"
    chunks = 2 * context if context > 1 else 1
    multiple = math.lcm(chunks, context * tensor)
    lengths = np.array(inputs.rows.lengths)
    padded = -(-lengths // chunks) * chunks
    total = -(-max(int(padded.sum()), pad_to) // multiple) * multiple
    rest = total - int(padded.sum())
    layout = PaddedRows(np.append(padded, rest) if rest else padded, context)
    row_T = np.repeat(np.arange(len(lengths)), lengths)
    place_T = np.arange(len(row_T)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    new_T = layout.begins[row_T] + place_T  # the position of each token after padding
    ids = np.zeros(total, dtype=np.int64)
    ids[new_T] = inputs.input_ids[0].numpy()
    mine = layout.list_owned(rank)
    local = np.full(total, -1)
    local[mine] = np.arange(len(mine))
    source_N = local[new_T[inputs.source_N.numpy()]]
    place_n = np.flatnonzero(source_N >= 0)

    def rows_of(lengths: np.ndarray) -> PackedRows:
        ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
        return PackedRows(put(ends), int(lengths.max()), tuple(lengths.tolist()))

    rows = RankRows(whole=rows_of(layout.lengths))
    if context > 1:
        gathered = np.empty(total, dtype=np.int64)  # the position of token t among the gathered tokens
        gathered[np.concatenate([layout.list_owned(one) for one in range(context)])] = np.arange(total)
        sizes = layout.lengths // chunks
        rows.chunks = tuple(
            Chunk(
                put(local[layout.tokens(index, index + 1)]),
                put(gathered[layout.tokens(0, index + 1)]),
                rows_of(sizes),
                rows_of(sizes * (index + 1)),
            )
            for index in (rank, chunks - 1 - rank)
        )
    return RankBatch(
        put(ids[mine])[None],
        put(layout.positions[mine])[None],
        rows,
        put(source_N[place_n]),
        put(inputs.targets_N.numpy()[place_n]),
        put(place_n),
        len(source_N),
        None if inputs.temperature_N is None else put(inputs.temperature_N.numpy()[place_n]),
    )


@dataclass
class PaddedRows:
    """Padded rows, and their chunks."""

    lengths: np.ndarray
    context: int
    begins: np.ndarray = field(init=False)
    positions: np.ndarray = field(init=False)  # of all tokens, in their rows

    def __post_init__(self) -> None:
        self.begins = np.cumsum(self.lengths) - self.lengths
        self.positions = np.arange(int(self.lengths.sum())) - np.repeat(self.begins, self.lengths)

    def list_owned(self, rank: int) -> np.ndarray:
        """Return the tokens of a context rank, in its order."""
        if self.context == 1:
            return np.arange(len(self.positions))
        last = 2 * self.context - 1 - rank
        return np.concatenate([self.tokens(rank, rank + 1), self.tokens(last, last + 1)])

    def tokens(self, first: int, last: int) -> np.ndarray:
        """Return the tokens of chunks from `first` to before `last` of every row, row after row."""
        sizes = np.repeat(self.lengths // (2 * self.context), self.lengths)
        index = self.positions // sizes
        return np.flatnonzero((index >= first) & (index < last))
