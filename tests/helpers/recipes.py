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
from hpc_rl.stats.metrics_writers import MetricsWriters
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.run import Run


class RecordingEngine:
    """Records the batches it is given, and runs the loss with log-probabilities of -1."""

    mesh = Mesh()
    has_dropout = True  # its passes differ: log-probabilities are recomputed before the first update

    def __init__(self, logprob: float = -1.0) -> None:
        self.logprob = logprob
        self.updates: list[tuple[Sequences, float, float]] = []
        self.gradients: list[torch.Tensor] = []  # of the loss of each update by its log-probabilities
        self.passed = 0

    def pass_updates(self, count: int) -> None:
        self.passed += count

    def counters(self) -> dict[str, Any]:
        return {"updates": len(self.updates) + self.passed, "adam_steps": len(self.updates)}

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        return [np.where(mask, self.logprob, 0.0).astype(np.float32) for mask in rows.columns["loss_mask"]]

    def train_batch(
        self, rows: Sequences, loss: LossFn, loss_weight: float, temperature: float
    ) -> dict[str, float]:
        self.updates.append((rows, loss_weight, temperature))
        columns = {name: torch.from_numpy(np.concatenate(values)) for name, values in rows.columns.items()}
        row_T = torch.from_numpy(np.repeat(np.arange(len(rows)), [len(ids) for ids in rows.ids]))
        logprobs_T = torch.full((len(row_T),), -1.0, requires_grad=True)
        batch = MicroBatch(logprobs_T, torch.ones(len(row_T)), columns, row_T)
        if "top_ids" in columns:
            batch.top_logprobs_TK = torch.full(columns["top_ids"].shape, -1.0)
        total, sums = loss(batch)
        if total.requires_grad:
            self.gradients += torch.autograd.grad(total / loss_weight, logprobs_T, allow_unused=True)
        numbers = {name: float(value.detach()) for name, value in sums.items()}
        return {
            **numbers,
            "loss": float(total.detach()) / loss_weight,
            "grad_norm": 1.0,
            "lr": 0.5,
            "update_successful": 1.0,
        }


def make_micro_batch(
    lengths: list[int], trained: list[bool], logprobs: list[float], **columns: list[float]
) -> MicroBatch:
    """Return a micro-batch of rows with these lengths. Values outside of `trained` become 0 as in an engine."""
    mask_T = torch.tensor(trained)
    logprobs_T = torch.where(mask_T, torch.tensor(logprobs, dtype=torch.float32), 0.0).requires_grad_()
    made = {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}
    row_T = torch.repeat_interleave(torch.tensor(lengths))
    return MicroBatch(logprobs_T, torch.ones(len(trained)), {"loss_mask": mask_T, **made}, row_T)


def make_run(
    tmp_path: Path,
    config: Config,
    engine: Any = None,
    trial: Trial | None = None,
    writers: MetricsWriters | None = None,
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
        writers=writers or MetricsWriters([]),
    )
