"""Sections `train_dataset` and `valid_dataset`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpc_rl.config.sections.limits import NonNegativeInt, PathText, PositiveInt


@dataclass(kw_only=True)
class DatasetConfig:
    """Rows with a `prompt` (text, or a list of chat messages under `messages`) and whatever columns the reward wants.

    Args:
        path: A .jsonl or .parquet file, or a directory with a saved Hugging Face dataset.
        type: `rl` rows have a prompt, `sft` rows a prompt and a completion, `rw` rows `chosen` and
            `rejected`, with a prompt or without; the default is what the trainer wants.
        batch_size: Prompts (rl), sequences (sft) or pairs (rw) per train batch.
        shuffle: A new order each epoch, from `seed`.
        pin_memory: Page-locked memory for what goes to a GPU.
        num_workers: Threads that tokenize rows when the dataset is read; 0 means the main one only.
        drop_last: Leave out the last batch of the trial if the rows don't fill it; false fills it up from one more pass.
        max_length: Rows whose prompt (rl) or sequence (sft, rw: either one) has more tokens are left out; null means no bound.
    """

    path: PathText
    type: Literal["rl", "sft", "rw"] = "rl"
    batch_size: PositiveInt = 1
    shuffle: bool = True
    pin_memory: bool = False
    num_workers: NonNegativeInt = 0
    drop_last: bool = True
    max_length: PositiveInt | None = None
