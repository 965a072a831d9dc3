"""Sections `train_dataset` and `valid_dataset`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, Any, Literal

from hpc_rl.config.options.limits import (
    Grammar,
    NonNegativeInt,
    PathText,
    PositiveInt,
    PositiveShare,
    ShareInside,
)

SetName = Annotated[str, Grammar(r"[A-Za-z][A-Za-z0-9_]*", "letters, digits and underscores, such as code")]


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


@dataclass(kw_only=True)
class MixedSetConfig:
    """A further data set for training. hpc-rl extension."""

    path: PathText
    """Its file or directory, as `train_dataset.path`."""
    share: ShareInside
    """Its share of all prompts."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns with other names in its file, as `train_dataset.columns`."""
    algorithm: str = ""
    """Algorithm of its rows, by a name or `package.module:name`, with the defaults of its paper; empty means
    `actor.algorithm`. Other options are the ones of section actor."""
    algorithm_args: dict[str, Any] = field(default_factory=dict)
    """Options of `algorithm` with other values for this data set: discount, gae_lambda, length_penalty,
    dynamic_sampling, eps_clip, eps_clip_higher, c_clip, sapo_tau_pos, sapo_tau_neg; and options of your
    algorithm that section actor lacks."""


@dataclass(kw_only=True)
class PromptDatasetConfig(DatasetConfig):
    """The prompts to train on: one data set or several, and how often each row is drawn."""

    mix: dict[SetName, MixedSetConfig] = field(default_factory=dict)
    """Further data sets by name. `path` has the rest of the prompts. Rows get their name in the column
    `data_set`; rows of `path` are `main`. hpc-rl extension."""
    curriculum: Literal["uniform", "band", "weights"] = "uniform"
    """`uniform` draws each row once in every epoch. `band` skips most of the visits to rows that are too easy
    or too hard now; see `pass_band`. `weights` draws rows in proportion to a column. hpc-rl extension."""
    pass_band: list[float] = field(default_factory=lambda: [0.1, 0.9])
    """Lowest and highest mean reward of a row's latest group in a batch for `curriculum: band`. Rows outside
    are drawn less often, new rows always. hpc-rl extension."""
    outside_share: PositiveShare = 0.2
    """Share of the visits that a row outside of `pass_band` keeps. hpc-rl extension."""
    weight_column: str = "weight"
    """Column with the weights of the rows for `curriculum: weights`, numbers of at least 0. hpc-rl extension.
    """

    @property
    def parts(self) -> dict[str, DatasetConfig]:
        """The data sets by the names of their sections below `train_dataset`; the first is ""."""
        more = {
            f"mix.{name}": replace(self, path=one.path, columns=one.columns, mix={})
            for name, one in self.mix.items()
        }
        return {"": self, **more}

    @property
    def shares(self) -> list[Fraction]:
        """The share of each of `parts`."""
        more = [Fraction(str(one.share)) for one in self.mix.values()]
        return [Fraction(1) - sum(more), *more]
