"""Rows for an engine, and what it makes of them."""

import numpy as np
import torch

from hpc_rl.engines.base import MicroBatch, Sequences
from hpc_rl.trainers.supervised import compute_sequence_loss


def some_rows(lengths=(9, 3, 30, 1, 12, 2, 30), seed: int = 0, mask: bool = True) -> Sequences:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 32, size=length).astype(np.int32) for length in lengths]
    return Sequences(ids, {"loss_mask": [np.arange(len(x)) >= 2 for x in ids]} if mask else {})


def plain_logprobs(engine, ids: np.ndarray, temperature: float) -> torch.Tensor:
    tokens = torch.from_numpy(ids).long()[None]
    logits = engine.model.hf(input_ids=tokens).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None]).squeeze(1)


def micro_batches_of(engine, rows: Sequences) -> list[list[int]]:
    """The lengths of the rows in each micro-batch of an update."""
    lengths: list[list[int]] = []

    def loss(batch: MicroBatch):
        lengths.append(torch.bincount(batch.row_T).tolist())
        return compute_sequence_loss(batch)

    engine.train_batch(rows, loss, 60.0, 1.0)
    return sorted(lengths)
