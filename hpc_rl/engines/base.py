"""Engine: a sharded model with its optimizer, behind seven methods. Implementations: fsdp.py (megatron is not built yet)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hpc_rl.checked_file import FileRecord


class Snapshot(Protocol):
    """One rank's recover state at one instant."""

    @property
    def size(self) -> int:
        """Bytes."""

    def write(self, folder: Path, cancel: threading.Event | None = None) -> list[FileRecord]:
        """Write the state durably into an existing folder; may be called on any thread.

        Raises OSError, and checked_file.Abandoned once `cancel` is set.
        """


@dataclass
class Sequences:
    """Rows of this rank, ragged: row i has ids[i] int32 [L_i] and per-token columns of the same length.

    A column is float32 or bool; position t belongs to token ids[i][t]. Names of bool columns end in `mask`. With a column
    `loss_mask`, log-probabilities are made only where it is true.
    """

    ids: list[np.ndarray]
    columns: dict[str, list[np.ndarray]]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class MicroBatch:
    """Packed rows: T tokens of a micro-batch. logprobs[t] = log p(ids[t] | ids before it in its row), 0 at a row's first token.

    Where there is a column `loss_mask`, logprobs and entropy are 0 outside of it. T is 0 on a rank that has no rows (left): the
    loss is called all the same and must report the same names. Of a model that ends in one number (`is_critic`), logprobs[t] is
    that number at token t, and entropy is 0.
    """

    logprobs_T: torch.Tensor  # float32 [T], with gradient
    entropy_T: torch.Tensor  # float32 [T], without gradient
    columns_T: dict[str, torch.Tensor]  # float32 or bool [T]
    row_T: torch.Tensor  # int64 [T], row index within the micro-batch


# Returns the *sum* of per-token losses of a micro-batch (a scalar) and sums to report. The engine divides by
# `loss_weight`, which the trainer computed over the whole train batch and all ranks before sharding.
LossFn = Callable[[MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Engine(Protocol):
    """All methods are collective where they don't say otherwise: every rank calls them in the same order."""

    rank: int
    num_ranks: int
    num_train_steps: int  # of `initialize`

    def initialize(self, num_train_steps: int) -> None:
        """Build and shard the model, optimizer and schedule, which spans `num_train_steps` calls of train_batch.

        Raises ConfigError, OSError.
        """

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        """float32 [L_i] per row under the current weights, without gradient; 0 outside of a column `loss_mask`."""

    def train_batch(
        self, rows: Sequences, loss: LossFn, loss_weight: float, temperature: float
    ) -> dict[str, float]:
        """One optimizer update over the rows of all ranks.

        Returns the loss's sums over all ranks, plus loss (divided by loss_weight), grad_norm, lr and update_successful (1 or 0:
        an update with a gradient that is not finite is skipped everywhere). Raises ValueError where no rank has rows.
        """

    def pass_updates(self, count: int) -> None:
        """Move the schedule on over updates that did not happen, for want of rows."""

    def snapshot(self, copied: bool) -> Snapshot:
        """This rank's shard of model, optimizer, schedule and random states at this instant, to be written to one file.

        Copied: into memory that the next snapshot uses again, so that it may be written while training goes on. Else it must be
        written before the next update. Not collective.
        """

    def save(self, folder: Path) -> list[FileRecord]:
        """A snapshot, written at once. Raises OSError. Not collective."""

    def state_bytes(self) -> int:
        """About how many bytes this rank's snapshot takes. Not collective."""

    def counters(self) -> dict[str, Any]:
        """Where schedule and optimizer stand: {"updates", "adam_steps", …}. Not collective."""

    def load(self, folder: Path, saved_num_ranks: int, files: Mapping[str, FileRecord] | None = None) -> None:
        """Read what the ranks' snapshots wrote, at any number of ranks, checking it against `files` on the way.

        Raises Damaged, OSError, ValueError (the state of another model).
        """

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Full tensors under their Hugging Face names, on rank 0; other ranks take part and get nothing."""

    def export(self, folder: Path, tokenizer: Path | None = None, durable: bool = True) -> None:
        """A whole Hugging Face checkpoint: safetensors, config, tokenizer files. Written by rank 0; fsynced if durable."""


def sum_over_ranks(values: Sequence[float], group: Any = None) -> list[float]:
    """Sums of a few numbers over all ranks, in float64; the values themselves where there is one process."""
    if not torch.distributed.is_initialized():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    if torch.distributed.get_backend(group) == "nccl":
        tensor = tensor.cuda()
    torch.distributed.all_reduce(tensor, group=group)
    return tensor.tolist()
