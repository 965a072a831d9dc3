"""How long a trial is: the earliest of the ends that its configuration gives (`total_train_*`)."""

from __future__ import annotations

from hpc_rl.config.sections.experiment import Config, GRPOConfig
from hpc_rl.errors import ConfigError

ENDS = (
    "total_train_steps",
    "total_train_epochs",
    "total_train_n_seqs",
)  # what says when a trial is at its end


def total_steps(config: Config, num_rows: int) -> int:
    """The earliest of `total_train_steps`, `total_train_n_seqs` and the batches of `total_train_epochs` passes: whole ones, or
    with `drop_last` false one more for the rest. Raises ConfigError where the passes make none."""
    steps = latest_end(config, num_rows)
    assert steps is not None, "check.py wants one of ENDS"
    if steps < 1:
        size = config.train_dataset.batch_size
        raise ConfigError(
            f"train_dataset.batch_size {size}: {config.total_train_epochs} epoch(s) of {num_rows} rows make no whole batch. "
            "Lower it, raise total_train_epochs, or set total_train_steps."
        )
    return steps


def latest_end(config: Config, num_rows: int | None) -> int | None:
    """The step past which the trial can't go, where the dataset has so many rows, or fewer after `max_length`; None where only
    `total_train_epochs` is given and the rows are not known."""
    size = config.train_dataset.batch_size
    ends = [config.total_train_steps] if config.total_train_steps is not None else []
    if config.total_train_n_seqs is not None:
        num_samples = config.gconfig.n_samples if isinstance(config, GRPOConfig) else 1
        ends.append(-(-config.total_train_n_seqs // (size * num_samples)))
    if config.total_train_epochs is not None and num_rows is not None:
        rows = config.total_train_epochs * num_rows
        ends.append(rows // size if config.train_dataset.drop_last else -(-rows // size))
    return min(ends, default=None)
