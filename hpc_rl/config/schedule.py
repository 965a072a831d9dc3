"""The learning-rate schedule: the rate of each optimizer update. Pure; engines and commands share it."""

import math

from hpc_rl.config.options.experiment import Config, GRPOConfig, last_step
from hpc_rl.config.options.training import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, num_updates: int) -> float:
    """Return the rate of an update: linear warm-up, then constant, linear or cosine to min_lr_ratio.

    Two updates of warm-up have half of the rate and all of it; with `warmup_from_zero` 0 and half of it.
    """
    warmup = count_warmup(config, num_updates)
    if update < warmup:
        return config.lr * (update if config.warmup_from_zero else update + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    share = min((update - warmup) / max(num_updates - warmup, 1), 1.0)
    left = 1 - share if config.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * share))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def count_warmup(optimizer: OptimizerConfig, num_updates: int) -> int:
    """Return the number of updates of the warm-up."""
    length = optimizer.warmup_steps_proportion * num_updates
    return math.ceil(length) if optimizer.warmup_from_zero else int(length)


def updates_per_step(config: Config) -> int:
    """Return how many optimizer updates the schedule counts for a step."""
    if not isinstance(config, GRPOConfig):
        return 1
    return min(config.actor.ppo_n_minibatches, config.train_dataset.batch_size * config.gconfig.n_samples)


def rate_of_step(config: Config, step: int, num_rows: int | None) -> float | None:
    """Return the learning rate of the first update of a step, which counts from 1.

    `num_rows` are those of the dataset, where known. None where the length of the training is not known, and
    for a model without an optimizer.
    """
    optimizer = optimizer_of(config)
    end = last_step(config, num_rows)
    if optimizer is None or end is None:
        return None
    per_step = updates_per_step(config)
    return learning_rate(optimizer, (step - 1) * per_step, end * per_step)


def highest_rate(config: Config, step: int, num_rows: int | None) -> float | None:
    """Return the highest learning rate from a step on; None as `rate_of_step`."""
    rate, optimizer, end = (
        rate_of_step(config, step, num_rows),
        optimizer_of(config),
        last_step(config, num_rows),
    )
    if rate is None or optimizer is None or end is None:
        return None
    per_step = updates_per_step(config)
    warms_up = (step - 1) * per_step < count_warmup(optimizer, end * per_step)
    return optimizer.lr if warms_up else rate


def optimizer_of(config: Config) -> OptimizerConfig | None:
    """Return the optimizer of the model that is trained."""
    return (config.actor if isinstance(config, GRPOConfig) else config.model).optimizer


def is_length_exact(config: Config, num_rows: int | None) -> bool:
    """Return whether the length is known to the step: `max_length` may drop rows from each epoch."""
    dataset = config.train_dataset
    cuts = isinstance(config, GRPOConfig) and dataset.too_long == "truncate_left"
    return dataset.max_length is None or cuts or last_step(config, num_rows) == last_step(config, None)
