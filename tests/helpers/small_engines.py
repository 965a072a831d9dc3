"""Configurations of engines for models of a few thousand parameters, and comparisons of what they compute."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hpc_rl.config.options.training import OptimizerConfig, TrainEngineConfig


def optimizer_of(**changes) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.0, "warmup_steps_proportion": 0.0, **changes})


def config_of(path: Path, **changes) -> TrainEngineConfig:
    """In float32 on a CPU, with all activations kept."""
    options = {"attn_impl": "sdpa", "dtype": "float32", "gradient_checkpointing": False}
    return TrainEngineConfig(path=str(path), **{"optimizer": optimizer_of(), **options, **changes})


def assert_close(rows: Iterable[np.ndarray], wanted: Iterable[np.ndarray], atol: float) -> None:
    """Of lists of rows, which have as many."""
    for one, other in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)
