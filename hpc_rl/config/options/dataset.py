"""Sections `train_dataset` and `valid_dataset`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpc_rl.config.options.limits import NonNegativeInt, PathText, PositiveInt


@dataclass(kw_only=True)
class DatasetConfig:
    """A dataset.

    Its rows have a `prompt` (text, or a list of chat messages under `messages`) and any columns that the
    reward function uses; `columns` maps columns with other names.
    """

    path: PathText
    """A .jsonl or .parquet file, or a directory with a saved Hugging Face dataset; empty in a trial on
    environments alone."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns with other names in the file, as needed name: column, such as {prompt: question, answer:
    solution}; `reward_model.ground_truth` is a part of a column. A text for `messages` becomes one turn of a
    user. The default is empty, except for rows of GSM8K (question, answer), MATH (problem, answer or
    solution), verl (reward_model) and AReaL-boba (solutions). hpc-rl extension."""
    type: Literal["rl", "sft", "rw", "dpo"] = "rl"
    """`rl` rows have a prompt, `sft` rows a prompt and a completion, `rw` and `dpo` rows `chosen` and
    `rejected` (a prompt is optional). The default follows the trainer."""
    batch_size: PositiveInt = 1
    """Prompts (rl), sequences (sft) or pairs (rw, dpo) per train batch."""
    sequences_per_rank: PositiveInt | None = None
    """Sequences (rw, dpo: pairs) per data rank in each train batch. They give batch_size its default:
    sequences_per_rank * data ranks / gconfig.n_samples. null means no such default. hpc-rl extension."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, by `seed`."""
    pin_memory: bool = False
    """Use page-locked memory for transfers to the GPU."""
    num_workers: NonNegativeInt = 0
    """Threads that tokenize all rows when the dataset is read. With 0, rows of type rl are tokenized when
    they are needed, other rows by the main thread."""
    drop_last: bool = True
    """Drop the last batch of the trial if the rows don't fill it; false fills it with rows of another pass.
    """
    max_length: PositiveInt | None = None
    """Largest number of tokens of a prompt (rl) or sequence (sft, rw, dpo); `too_long` decides about longer
    rows. null means no limit."""
    too_long: Literal["drop", "truncate_left"] = "drop"
    """`drop` leaves out rows above max_length; `truncate_left` keeps the last max_length tokens of a prompt
    (rl). hpc-rl extension."""
