"""The learning-rate schedule: the rate of each optimizer update. Pure; used by engines and commands."""

import math

from hpc_rl.config.options.experiment import Config, GRPOConfig, find_last_step
from hpc_rl.config.options.training import OptimizerConfig


def compute_learning_rate(config: OptimizerConfig, update: int, num_updates: int) -> float:
    """Return the rate of an update: linear warm-up, then constant, linear or cosine to min_lr_ratio.

    A warm-up of two updates has half the rate, then the full rate; with `warmup_from_zero` 0, then half.
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


def count_updates_per_step(config: Config) -> int:
    """Return the number of optimizer updates that the schedule counts for a step."""
    if not isinstance(config, GRPOConfig):
        return 1
    return min(config.actor.ppo_n_minibatches, config.train_dataset.batch_size * config.gconfig.n_samples)


def count_critic_updates_per_step(config: GRPOConfig) -> int:
    """Return the number of updates of the critic that its schedule counts for a step; 0 without a critic."""
    num_rows = config.train_dataset.batch_size * config.gconfig.n_samples
    return min(config.critic.ppo_n_minibatches, num_rows) if config.critic is not None else 0


def compute_step_rate(config: Config, step: int, num_rows: int | None) -> float | None:
    """Return the learning rate of the first update of a step; steps count from 1.

    `num_rows` is the number of rows of the dataset, or None if unknown. Returns None if the length of the
    training is unknown, or the model has no optimizer.
    """
    optimizer = find_optimizer(config)
    end = find_last_step(config, num_rows)
    if optimizer is None or end is None:
        return None
    per_step = count_updates_per_step(config)
    return compute_learning_rate(optimizer, (step - 1) * per_step, end * per_step)


def find_highest_rate(config: Config, step: int, num_rows: int | None) -> float | None:
    """Return the highest learning rate from a step on; None as in `compute_step_rate`."""
    rate, optimizer, end = (
        compute_step_rate(config, step, num_rows),
        find_optimizer(config),
        find_last_step(config, num_rows),
    )
    if rate is None or optimizer is None or end is None:
        return None
    per_step = count_updates_per_step(config)
    warms_up = (step - 1) * per_step < count_warmup(optimizer, end * per_step)
    return optimizer.lr if warms_up else rate


def find_optimizer(config: Config) -> OptimizerConfig | None:
    """Return the optimizer of the trained model."""
    return (config.actor if isinstance(config, GRPOConfig) else config.model).optimizer


def is_length_exact(config: Config, num_rows: int | None) -> bool:
    """Return whether the number of steps is exact: `max_length` may drop rows of an epoch."""
    dataset = config.train_dataset
    cuts = isinstance(config, GRPOConfig) and dataset.too_long == "truncate_left"
    return (
        dataset.max_length is None or cuts or find_last_step(config, num_rows) == find_last_step(config, None)
    )
