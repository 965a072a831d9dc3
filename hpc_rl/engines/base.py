"""The Engine protocol: a sharded model with its optimizer. The implementations are in engines.ENGINES."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hpc_rl.core import checked_file
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.trial import fsync_dir
from hpc_rl.engines.shared.mesh import Mesh

BUCKET_BYTES = 1 << 30  # weights gathered at a time


@dataclass
class Snapshot:
    """One rank's recover state at one instant, as the parts of its file."""

    name: str
    parts: list[checked_file.Part]

    def write(self, folder: Path, cancel: threading.Event | None = None) -> list[FileRecord]:
        """Write the file durably into an existing folder; may be called on any thread.

        Raises OSError, and checked_file.Abandoned once `cancel` is set.
        """
        record = checked_file.write(folder / self.name, self.parts, cancel)
        fsync_dir(folder)
        return [record]


class PublishedPiece(NamedTuple):
    """A piece of a tensor as it is published: by its name in checkpoint files, in its type there."""

    name: str
    local: torch.Tensor  # live, of the rectangle's shape
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype

    @classmethod
    def of_whole(cls, name: str, tensor: torch.Tensor) -> PublishedPiece:
        return cls(name, tensor, (0,) * tensor.ndim, tuple(tensor.shape), tensor.dtype)


@dataclass
class Sequences:
    """This rank's rows, ragged: row i has ids[i] int32 [L_i] and per-token columns of the same length.

    A column is float32 or bool (then its name ends in `mask`); position t belongs to token ids[i][t]. With a
    column `loss_mask`, log-probabilities are computed only for the tokens it selects; with a column
    `temperature`, at the temperature of each token instead of the one of the call. A column whose name begins
    with `top_` is [L_i, K]: `top_ids` (int32) names K more tokens at each position, whose log-probabilities
    the loss of `train_batch` gets, too.
    """

    ids: list[np.ndarray]
    columns: dict[str, list[np.ndarray]]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class MicroBatch:
    """Packed rows: the T tokens of a micro-batch.

    logprobs[t] = log p(ids[t] | earlier ids of its row), 0 at the first token of a row. If there is a column
    `loss_mask`, logprobs and entropy are 0 outside of it.

    T is 0 on a rank without rows. The loss function runs there too and must report the same names. If the
    model returns one score per token (`is_critic`), logprobs[t] is the score at token t and entropy is 0.
    """

    logprobs_T: torch.Tensor  # float32 [T], with gradient
    entropy_T: torch.Tensor  # float32 [T], with gradient
    columns_T: dict[str, torch.Tensor]  # float32 or bool [T]
    row_T: torch.Tensor  # int64 [T], row index within the micro-batch
    top_logprobs_TK: torch.Tensor | None = None  # of the tokens of a column `top_ids`, as logprobs_T


# Returns the *sum* of the per-token losses of a micro-batch (a scalar) and sums to report. The engine divides
# by `loss_weight`, which the trainer counts over the whole train batch before it divides the rows among the
# ranks.
LossFn = Callable[[MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Engine(Protocol):
    """The interface of a model for trainers.

    The constructor takes `config` and `mesh`, and the keywords `device`, `seed`, `frozen` and `name`; it
    raises ConfigError. A `frozen` model supports `logprobs` and `weights` only. `name` distinguishes the
    files of two engines in one trial.

    Methods are collective unless noted: all ranks call them in the same order. Peers (ranks of the mesh with
    the same `data_rank`) get the same rows and return the same values.
    """

    name: str
    mesh: Mesh
    num_train_steps: int  # as given to `initialize`
    pin_memory: bool  # copy inputs to a GPU through page-locked memory
    entropy_clamp: float  # share of the vocabulary that the entropy leaves out; set it before `initialize`
    publishes_model: bool  # publish whole models; false publishes an adapter alone
    has_dropout: bool  # `train_batch` computes other log-probabilities than `logprobs`; set by `initialize`

    def initialize(self, num_train_steps: int, empty: bool = False) -> None:
        """Build and shard the model, the optimizer and a schedule of `num_train_steps` calls of train_batch.

        If `empty`, leave the weights undefined; the caller calls `load` next. Raises ConfigError, OSError.
        """

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        """Return float32 [L_i] per row under the current weights; 0 outside of a column `loss_mask`.

        Every peer returns all rows.
        """

    def base_logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        """Return the same under the frozen base, without the adapter that is trained."""

    def train_batch(
        self, rows: Sequences, loss: LossFn, loss_weight: float, temperature: float
    ) -> dict[str, float]:
        """Make one optimizer update over the rows of all data ranks.

        Returns the sums reported by the loss, over all data ranks, plus loss (divided by loss_weight),
        grad_norm, lr and update_successful. If the gradient is not finite, all ranks skip the update and
        update_successful is 0. Raises ValueError if no rank has rows.
        """

    def pass_updates(self, count: int) -> None:
        """Advance the schedule by updates that were skipped for lack of rows."""

    def snapshot(self, copied: bool) -> Snapshot:
        """Return this rank's shard of model, optimizer, schedule and random states, to be written to a file.

        If `copied`, the snapshot may be written while training continues; the next snapshot reuses its
        memory. Otherwise, write it before the next update. Not collective.
        """

    def state_bytes(self) -> int:
        """Return the approximate size of this rank's snapshot. Not collective."""

    def counters(self) -> dict[str, Any]:
        """Return the position of schedule and optimizer: {"updates", "adam_steps", …}. Not collective."""

    def load(self, folder: Path, saved_num_ranks: int, files: Mapping[str, FileRecord] | None = None) -> None:
        """Load the snapshots of `saved_num_ranks` ranks. Checks them against `files` while reading.

        Raises Damaged, OSError, and ValueError for the state of another model.
        """

    def weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield all parameters and saved buffers, whole, in CPU memory, on rank 0. An adapter is merged.

        Names are as in checkpoints. Buckets have about `bucket_bytes`; ranks above 0 get empty ones.
        Parameters have the configured type; tied parameters appear once. All ranks must take every bucket.
        """

    def list_published_pieces(self) -> list[PublishedPiece] | None:
        """Return this rank's part of the published tensors. Each value is in one part. Collective.

        Returns None on all ranks if parts have no names in checkpoint files; then use `weights`.
        """

    def write_model_files(self, folder: Path, tokenizer: Path | None = None) -> None:
        """Write the files that servers need in addition to the published tensors, into an existing folder.

        Not collective. Raises OSError.
        """

    def offload(self) -> None:
        """Move parameters and optimizer from the GPU to CPU memory, until `reload`; on a CPU, do nothing.

        Only `reload` may be called next. Gradients must be absent. Not collective.
        """

    def reload(self) -> None:
        """Undo `offload`. Not collective."""

    def export(self, folder: Path, tokenizer: Path | None = None) -> None:
        """Write and fsync a whole Hugging Face checkpoint: safetensors, config, tokenizer files.

        Of an adapter, write peft's and the tokenizer's files. Rank 0 writes.
        """


class Scorer(Protocol):
    """A model that computes log-probabilities; see Engine."""

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]: ...


@dataclass
class FrozenBase:
    """The frozen base of an engine that trains an adapter, as a separate model."""

    engine: Engine

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        return self.engine.base_logprobs(rows, temperature)


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sums of a few numbers over all ranks, in float64. Collective."""
    if not torch.distributed.is_initialized():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    if torch.distributed.get_backend() == "nccl":
        tensor = tensor.cuda()
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()


def sum_over_data_ranks(mesh: Mesh, values: Sequence[float]) -> list[float]:
    """Return the sums of a few numbers over all data ranks; peers pass the same numbers. Collective."""
    return sum_over_ranks(values if mesh.is_data_leader else [0.0] * len(values))
