"""Section `megatron` of a model in the trainer: options of megatron-core, with AReaL's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpc_rl.config.options.limits import PositiveInt


@dataclass(kw_only=True)
class MegatronDDPConfig:
    """How megatron-core sums gradients over data ranks."""

    grad_reduce_in_fp32: bool = True
    """Sum gradients in float32, otherwise in the type of the parameters."""
    overlap_grad_reduce: bool = False
    """Sum the gradients of a bucket during the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass; needs `overlap_grad_reduce` and
    `use_distributed_optimizer`."""
    align_param_gather: bool = False
    """Let all pipeline stages gather parameters at the same time; needs `overlap_param_gather`."""
    use_distributed_optimizer: bool = True
    """Divide float32 parameters and moments among the data ranks; false keeps them whole on each."""
    check_for_nan_in_grad: bool = False
    """End the trial at a gradient that is not a number, before it is summed."""
    bucket_size: PositiveInt | None = None
    """Parameters in a bucket; null derives the number from the data ranks; needs `overlap_grad_reduce`."""


@dataclass(kw_only=True)
class MegatronConfig:
    """Options of the megatron backend; `allocation_mode` sets its parallel sizes."""

    ddp: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    """How gradients are summed over data ranks."""
    virtual_pipeline_size: PositiveInt = 1
    """Parts of the layers on each pipeline stage, interleaved: shorter idle times, more messages. hpc-rl
    extension."""
    use_deterministic_algorithms: bool = False
    """Have PyTorch use deterministic algorithms only; slower."""
    recompute_granularity: Literal["full", "selective"] | None = "full"
    """Scope of `gradient_checkpointing`: whole layers (`full`), or the parts in `recompute_modules`
    (`selective`)."""
    recompute_method: Literal["uniform", "block"] | None = "uniform"
    """With `full`: `uniform` keeps one input per `recompute_num_layers` layers, which must divide the layers
    of a stage; `block` recomputes only the first `recompute_num_layers` layers of each stage. Null with
    `selective`."""
    recompute_num_layers: PositiveInt | None = 1
    """Number of layers for `recompute_method`. Null with `selective`."""
    recompute_modules: list[str] | None = None
    """With `selective`: the recomputed parts of a layer, from core_attn, layernorm, mlp and moe; null means
    core_attn."""
