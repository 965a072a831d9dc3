"""A run around an engine that records what a recipe asks of it."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_rl.config.options.experiment import Config
from hpc_rl.core.allocation import Train
from hpc_rl.core.trial import Trial
from hpc_rl.engines.base import LossFn, MicroBatch, Sequences
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.stats.sinks import Sinks
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.run import Run


class RecordingEngine:
    """Records the batches it is given, and runs the loss with log-probabilities of -1."""

    mesh = Mesh()

    def __init__(self, logprob: float = -1.0) -> None:
        self.logprob = logprob
        self.updates: list[tuple[Sequences, float, float]] = []
        self.passed = 0

    def pass_updates(self, count: int) -> None:
        self.passed += count

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        return [np.where(mask, self.logprob, 0.0).astype(np.float32) for mask in rows.columns["loss_mask"]]

    def train_batch(
        self, rows: Sequences, loss: LossFn, loss_weight: float, temperature: float
    ) -> dict[str, float]:
        self.updates.append((rows, loss_weight, temperature))
        columns = {name: torch.from_numpy(np.concatenate(values)) for name, values in rows.columns.items()}
        row_T = torch.from_numpy(np.repeat(np.arange(len(rows)), [len(ids) for ids in rows.ids]))
        batch = MicroBatch(torch.full((len(row_T),), -1.0), torch.ones(len(row_T)), columns, row_T)
        if "top_ids" in columns:
            batch.top_logprobs_TK = torch.full(columns["top_ids"].shape, -1.0)
        total, sums = loss(batch)
        numbers = {name: float(value) for name, value in sums.items()}
        return {
            **numbers,
            "loss": float(total) / loss_weight,
            "grad_norm": 1.0,
            "lr": 0.5,
            "update_successful": 1.0,
        }


def make_run(
    tmp_path: Path, config: Config, engine: Any = None, trial: Trial | None = None, sinks: Sinks | None = None
) -> Run:
    trial = trial or Trial(tmp_path / "trial")
    return Run(
        trial=trial,
        attempt=trial.attempt("1.0"),
        incarnation=0,
        config=config,
        tokens={},
        names=None,  # type: ignore[arg-type]
        train=Train("fsdp"),
        device="cpu",
        ranks=Ranks(),
        stopping=threading.Event(),
        engine=engine or RecordingEngine(),
        lineage=0,
        step=0,
        sinks=sinks or Sinks([]),
    )
