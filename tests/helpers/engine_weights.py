"""The weights of an engine as one mapping."""

import torch

from hpc_rl.engines.base import Engine


def whole_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Return all of `Engine.weights` at once; {} above rank 0. Collective."""
    return {name: tensor for bucket in engine.weights() for name, tensor in bucket}
