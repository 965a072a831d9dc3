"""The part that all engines share: the optimizer update, its schedule, and recover state."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpc_rl.config.schedule import compute_learning_rate
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.engines.base import BUCKET_BYTES, PublishedPiece, Sequences, Snapshot, sum_over_ranks
from hpc_rl.engines.shared import lora, state
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.offload import Offload
from hpc_rl.engines.shared.optimizer import LossScale
from hpc_rl.engines.shared.pieces import Piece
from hpc_rl.engines.shared.trainable import Trainable


class TrainedEngine:
    """Part of an Engine. The engine's `initialize` sets all attributes except `_buffer`, `_offload`."""

    device: torch.device
    num_train_steps: int
    num_updates: int  # position of the schedule: calls of train_batch, including skipped updates
    optimizer: Any  # Optimizer or ShardedOptimizer
    scale: LossScale
    local: state.RankState
    trainable: Trainable
    mesh: Mesh
    publishes_model: bool = True  # False: `list_published_pieces` has an adapter alone
    _buffer: state.Buffer | None = None  # for snapshots that are written while training continues
    _offload: Offload | None = None

    def list_base(self) -> list[Piece]:
        """Return the pieces of untrained parameters that no other rank has."""
        raise NotImplementedError

    def list_trained(self) -> list[Piece]:
        """Return the pieces of trained parameters that no other rank has."""
        return self.local.list_owned("model")

    def list_modules(self) -> list[torch.nn.Module]:
        """Return this rank's parts of the model."""
        raise NotImplementedError

    def weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
        raise NotImplementedError

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        raise NotImplementedError

    def base_logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        with lora.disable(self.list_modules()):
            return self.logprobs(rows, temperature)

    def list_published_pieces(self) -> list[PublishedPiece] | None:
        return self.trainable.list_published_pieces(self, self.publishes_model)

    def write_model_files(self, folder: Path, tokenizer: Path | None = None) -> None:
        self.trainable.write_model_files(folder, tokenizer, self.publishes_model)

    def export(self, folder: Path, tokenizer: Path | None = None) -> None:
        self.trainable.export(self, folder, tokenizer)

    def pass_updates(self, count: int) -> None:
        self.num_updates += count

    def offload(self) -> None:
        if self.device.type != "cuda":
            return
        self._offload = self._offload or Offload(self.device)
        self._offload.move_out(one for one in self.list_tensors() if one.is_cuda)

    def reload(self) -> None:
        if self._offload is not None:
            self._offload.move_back()

    def list_tensors(self) -> Iterator[torch.Tensor]:
        """Yield this rank's parameters, buffers and moments; some share their memory."""
        for module in self.list_modules():
            for tensor in (*module.parameters(), *module.buffers()):
                whole = tensor.data
                yield whole.to_local() if isinstance(whole, DTensor) else whole
        for one in self.local.pieces:
            yield one.piece.local

    def _step(self) -> dict[str, float]:
        """Update the weights if the gradients are finite. Collective.

        Returns grad_norm, lr and update_successful.
        """
        squared_norm = sum_over_ranks([self.optimizer.compute_squared_norm()])[0]
        grad_norm = math.sqrt(squared_norm) / self.scale.value if squared_norm >= 0 else math.nan
        lr = compute_learning_rate(self.optimizer.config, self.num_updates, self.num_train_steps)
        successful = math.isfinite(grad_norm)
        if successful:
            self.optimizer.step(lr, grad_norm, self.scale.value)
        self.scale.update(not successful)
        self.num_updates += 1
        return {"grad_norm": grad_norm, "lr": lr, "update_successful": float(successful)}

    def snapshot(self, copied: bool) -> Snapshot:
        if copied and self._buffer is None:
            self._buffer = state.Buffer(pin=self.device.type == "cuda")
        counters = {**self.counters(), **self.scale.state()}
        return self.local.take(counters, self._buffer if copied else None)

    def save(self, folder: Path) -> list[FileRecord]:
        return self.snapshot(copied=False).write(folder)

    def state_bytes(self) -> int:
        return self.local.size_bytes()

    def counters(self) -> dict[str, Any]:
        return {"updates": self.num_updates, "adam_steps": self.optimizer.num_steps}

    def load(self, folder: Path, saved_num_ranks: int, files: Mapping[str, FileRecord] | None = None) -> None:
        counters = self.local.load(folder, saved_num_ranks, files)
        self.num_updates = counters["updates"]
        self.optimizer.restore_num_steps(counters["adam_steps"])
        self.scale.restore(counters)
