"""Estimate the bytes that a trial writes to its directory, and the bytes that stay there. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.options.operations import FrequencyConfig
from hpc_rl.config.rules.training_rules import find_trained_model
from hpc_rl.plan.model_shape import DTYPE_BYTES, ModelShape

TOKEN_BYTES = 17.5  # per token in the batch log: id, log-probability, mask, version
# The newest versions that weights/disk.py keeps, plus one during its write; a test compares them.
KEPT_VERSIONS = 3


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """Bytes per event, and the bytes that stay; 0 if the event never happens."""

    weights: float  # published after each step
    batch: float  # logged in each step, at most
    checkpoint: float  # each
    export: float  # each
    kept_weights: float
    kept_checkpoints: float
    kept_batches: float | None  # None if checkpoints are not counted in steps
    kept_exports: float | None  # None if their number is unknown
    checkpoint_period: str
    export_period: str

    @property
    def per_step(self) -> float:
        """Bytes of each step, without checkpoints and exports."""
        return self.weights + self.batch


def estimate_disk_use(config: Config, shape: ModelShape, steps: int | None, tokens_per_step: int) -> DiskUse:
    """Return the disk use of a trial; `tokens_per_step` is an upper bound."""
    weights = float(DTYPE_BYTES[find_trained_model(config)[1].dtype] * shape.num_params)
    generates, saves = isinstance(config, GRPOConfig), config.recover.mode != "disabled"
    checkpoint = 12.0 * shape.num_params if saves else 0.0
    batch = TOKEN_BYTES * tokens_per_step if generates else 0.0
    recover, saver = config.recover, config.saver
    num_kept = recover.keep + recover.keep_best + 1  # one more during its write
    if recover.keep_every_steps and steps:
        num_kept += steps // recover.keep_every_steps
    kept_batches = None
    if recover.freq_steps and saves:
        kept_batches = batch * recover.freq_steps * (recover.keep + 1)
    return DiskUse(
        weights=weights if generates else 0.0,
        batch=batch,
        checkpoint=checkpoint,
        export=weights,
        kept_weights=KEPT_VERSIONS * weights if generates else 0.0,
        kept_checkpoints=num_kept * checkpoint,
        kept_batches=kept_batches if generates else 0.0,
        kept_exports=_estimate_kept_exports(config, weights, steps),
        checkpoint_period=_describe_period(recover) if saves else "never",
        export_period=", ".join(filter(None, [_describe_period(saver), "at the end"])),
    )


def _estimate_kept_exports(config: Config, export: float, steps: int | None) -> float | None:
    saver = config.saver
    always = 1 + (saver.keep_best is not None)  # final, best
    if not (saver.freq_steps or saver.freq_epochs or saver.freq_secs):
        return export * always
    if saver.keep_last:
        return export * (always + saver.keep_last)
    if saver.freq_secs:
        return None
    number = 0
    if saver.freq_steps:
        if steps is None:
            return None
        number += steps // saver.freq_steps
    if saver.freq_epochs:
        if config.total_train_epochs is None:
            return None
        number += config.total_train_epochs // saver.freq_epochs
    return export * (always + number)


def _describe_period(options: FrequencyConfig) -> str:
    periods = (("epochs", options.freq_epochs), ("steps", options.freq_steps), ("s", options.freq_secs))
    return ", ".join(f"every {number} {unit}" for unit, number in periods if number)
