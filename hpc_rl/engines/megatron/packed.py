"""Packed rows as Megatron's modules get them, and this rank's share of them under context parallelism.

With c context ranks each row is padded to a multiple of 2c tokens and cut into 2c chunks; rank r has chunks r
and 2c - 1 - r, so that all have as much of the causal triangle. With tensor ranks, which share out tokens
where a layer is not divided (sequence parallelism), a last row pads the number of tokens to a multiple.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from hpc_rl.engines.micro_batches import Inputs


@dataclass
class PackedRows(PackedSeqParams):
    """What attention needs to know of the rows; cut into chunks if there are several context ranks.

    `qkv_format` says that positions of rotary embeddings are given per token, and not by `cu_seqlens`.
    """

    qkv_format: str = "sbhd"
    lengths: tuple[int, ...] = ()  # of the rows, padded, in tokens of all context ranks
    cu_seqlens: torch.Tensor | None = None  # int32 [rows + 1]
    order: torch.Tensor | None = (
        None  # [T]: where token t is among what the context ranks have, in their order
    )


@dataclass
class RankBatch:
    """One rank's share of packed rows: t tokens, of which it predicts from n; of N wanted ones in all."""

    input_ids: torch.Tensor  # int64 [1, t]
    position_ids: torch.Tensor  # int64 [1, t]
    rows: PackedRows
    source_n: torch.Tensor  # index into t
    targets_n: torch.Tensor
    place_n: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # index into N
    num_wanted: int = 0  # N

    def to(self, device: torch.device) -> RankBatch:
        rows = replace(
            self.rows, cu_seqlens=_to(self.rows.cu_seqlens, device), order=_to(self.rows.order, device)
        )
        return RankBatch(
            self.input_ids.to(device),
            self.position_ids.to(device),
            rows,
            self.source_n.to(device),
            self.targets_n.to(device),
            self.place_n.to(device),
            self.num_wanted,
        )


def share(inputs: Inputs, tensor: int, context: int, context_rank: int, pad_to: int = 0) -> RankBatch:
    """Return one rank's share of packed inputs in CPU memory.

    The ranks together have at least `pad_to` tokens.
    """
    ids, positions = inputs.input_ids[0].numpy(), _positions(inputs)
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(np.append(starts, len(ids)))
    chunks = 2 * context if context > 1 else 1
    padded = -(-lengths // chunks) * chunks
    rest = -int(padded.sum()) % math.lcm(chunks, context * tensor)
    if pad_to > padded.sum() + rest:
        rest += -(-(pad_to - int(padded.sum()) - rest) // math.lcm(chunks, context * tensor)) * math.lcm(
            chunks, context * tensor
        )
    padded = np.append(padded, rest) if rest else padded
    begins = np.cumsum(padded) - padded
    row_T = np.repeat(np.arange(len(lengths)), lengths)
    new_T = begins[row_T] + positions  # where each token is after padding
    wide_ids = np.zeros(int(padded.sum()), dtype=np.int64)
    wide_ids[new_T] = ids
    wide_positions = np.arange(len(wide_ids)) - np.repeat(begins, padded)
    owned = [_owned(begins, padded, context, rank) for rank in range(context)]
    mine = owned[context_rank]
    local = np.full(len(wide_ids), -1)
    local[mine] = np.arange(len(mine))
    source_N = local[new_T[inputs.source_N.numpy()]]
    place_n = np.flatnonzero(source_N >= 0)
    order = np.empty(len(wide_ids), dtype=np.int64)
    order[np.concatenate(owned)] = np.arange(len(wide_ids))
    ends = np.cumsum(padded)
    rows = PackedRows(
        lengths=tuple(int(length) for length in padded),
        cu_seqlens=torch.from_numpy(np.append(0, ends).astype(np.int32)),
        order=torch.from_numpy(order),
    )
    return RankBatch(
        torch.from_numpy(wide_ids[mine])[None],
        torch.from_numpy(wide_positions[mine])[None],
        rows,
        torch.from_numpy(source_N[place_n]),
        inputs.targets_N[torch.from_numpy(place_n)],
        torch.from_numpy(place_n),
        len(source_N),
    )


def _positions(inputs: Inputs) -> np.ndarray:
    assert inputs.position_ids is not None, "the rows are packed"
    return inputs.position_ids[0].numpy()


def _owned(begins: np.ndarray, lengths: np.ndarray, context: int, rank: int) -> np.ndarray:
    """Return the tokens that a context rank has, in its order."""
    if context == 1:
        return np.arange(int(lengths.sum()))
    parts = []
    for begin, length in zip(begins, lengths, strict=True):
        chunk = length // (2 * context)
        for index in (rank, 2 * context - 1 - rank):
            parts.append(np.arange(begin + index * chunk, begin + (index + 1) * chunk))
    return np.concatenate(parts)


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
