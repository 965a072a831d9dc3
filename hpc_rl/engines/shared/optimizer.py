"""AdamW over this rank's shards, its learning-rate schedule, gradient clipping and loss scale.

Shards are plain tensors that share storage with the model's parameters: nothing here handles distributed
tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_rl.config.options.training import OptimizerConfig
from hpc_rl.engines.shared.pieces import Kind, Piece, StatePiece, find_cut_dimension, find_offset

# names of norms and biases, as in Hugging Face's Trainer
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def is_decayed(config: OptimizerConfig, name: str) -> bool:
    """Return whether the parameter with this Hugging Face name has weight decay."""
    return config.decay_norms_and_biases or not _NOT_DECAYED.search(name.lower())


@dataclass
class Shard:
    """This rank's rectangle of one parameter; all of it if there is one rank."""

    name: str  # the Hugging Face name
    parameter: nn.Parameter
    local: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the rectangle, one index per dimension
    is_saved: bool = True  # False for a replica; another rank saves it and counts its gradient

    def gradient(self) -> torch.Tensor | None:
        grad = self.parameter.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad

    def piece(self, tensor: torch.Tensor | None = None) -> Piece:
        """Return the rectangle with its memory, or with a tensor of the same shape as its memory."""
        return Piece(self.name, self.local if tensor is None else tensor, self.offset, self.global_shape)


def make_shards(
    parameters: dict[str, nn.Parameter], coordinates: Mapping[str, int] | None = None
) -> list[Shard]:
    """Return one Shard for each parameter.

    `coordinates` are this rank's coordinates by mesh dimension. If several ranks have the same part of a
    parameter, the first one saves it.
    """
    shards = []
    for name, parameter in parameters.items():
        whole, cut = parameter.data, set[str]()
        local = whole
        if isinstance(whole, DTensor):
            local = whole.to_local()
            dims = zip(whole.device_mesh.mesh_dim_names or (), whole.placements, strict=True)
            cut = {dim for dim, placement in dims if find_cut_dimension(placement) is not None}
        is_saved = not any(at for dim, at in (coordinates or {}).items() if dim not in cut)
        shards.append(Shard(name, parameter, local, tuple(whole.shape), find_offset(whole), is_saved))
    return shards


class Optimizer:
    """AdamW in float32.

    Its moments exist from the start, so there is only one form of state to save and load.
    """

    def __init__(self, config: OptimizerConfig, shards: list[Shard]) -> None:
        self.config = config
        self.all_shards = shards
        self.shards = [shard for shard in shards if shard.local.numel()]
        self.updated = {  # the tensors that AdamW updates: the shards, or copies of them in CPU memory
            shard.name: shard.local.to("cpu", copy=True) if config.offload else shard.local
            for shard in shards
        }
        by_decay: dict[float, list[torch.Tensor]] = {}
        for shard in self.shards:
            decay = config.weight_decay if is_decayed(config, shard.name) else 0.0
            by_decay.setdefault(decay, []).append(self.updated[shard.name])
        groups = [{"params": params, "weight_decay": decay} for decay, params in by_decay.items()]
        self.adam = torch.optim.AdamW(
            groups or [torch.zeros(1)],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for shard in shards:
            updated = self.updated[shard.name]
            self.moments[shard.name] = (torch.zeros_like(updated), torch.zeros_like(updated))
        self.restore_num_steps(0)

    def restore_num_steps(self, num_steps: int) -> None:
        """Set the number of steps that the moments have seen; refresh the copies in CPU memory."""
        self.num_steps = num_steps
        for shard in self.shards:
            first, second = self.moments[shard.name]
            updated = self.updated[shard.name]
            if updated is not shard.local:
                updated.copy_(shard.local)
            step = torch.tensor(float(num_steps), dtype=torch.float32, device=updated.device)
            self.adam.state[updated] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def pieces(self) -> list[StatePiece]:
        """Return the parameters and moments of all shards, to be saved and loaded."""
        pieces = []
        for shard in self.all_shards:
            first, second = self.moments[shard.name]
            for kind, tensor in (("model", shard.local), ("exp_avg", first), ("exp_avg_sq", second)):
                pieces.append(StatePiece(cast(Kind, kind), shard.piece(tensor), shard.is_saved))
        return pieces

    def compute_squared_norm(self) -> float:
        """Return the sum of squares of this rank's gradients, without replicas."""
        grads = [grad for shard in self.shards if shard.is_saved and (grad := shard.gradient()) is not None]
        if not grads:
            return 0.0
        return torch.stack(torch._foreach_norm(grads)).double().square().sum().item()

    def step(self, lr: float, grad_norm: float, loss_scale: float = 1.0) -> None:
        """Clip to the configured norm, given the unscaled norm over all ranks, and update."""
        clip = self.config.gradient_clipping
        factor = clip / (grad_norm + 1e-6) if grad_norm > clip else 1.0
        if factor != 1.0 or loss_scale != 1.0:
            torch._foreach_mul_(self._gradients(), factor / loss_scale)
        for shard in self.shards:
            updated, gradient = self.updated[shard.name], shard.gradient()
            updated.grad = None if gradient is None else gradient.to(updated.device)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        if self.config.offload:
            for shard in self.shards:
                shard.local.copy_(self.updated[shard.name])
        self.num_steps += 1

    def zero_grad(self) -> None:
        for shard in self.shards:
            self.updated[shard.name].grad = None
            shard.parameter.grad = None

    def _gradients(self) -> list[torch.Tensor]:
        return [grad for shard in self.shards if (grad := shard.gradient()) is not None]


class LossScale:
    """Dynamic factor on a float16 loss, because small gradients would become 0; 1 for other types.

    Halved after `hysteresis` overflows, doubled after `loss_scale_window` updates without one (Micikevicius
    et al., "Mixed Precision Training", 2018).
    """

    def __init__(self, config: OptimizerConfig, active: bool) -> None:
        self.config = config
        self.active = active
        self.value = config.initial_loss_scale if active else 1.0
        self._good = 0
        self._patience = config.hysteresis

    def update(self, overflow: bool) -> None:
        if not self.active:
            return
        if overflow:
            self._good = 0
            self._patience -= 1
            if self._patience <= 0:
                self.value = max(self.value / 2, self.config.min_loss_scale)
            return
        self._good += 1
        if self._good >= self.config.loss_scale_window:
            self._good, self._patience = 0, self.config.hysteresis
            self.value *= 2

    def state(self) -> dict[str, Any]:
        return {"loss_scale": [self.value, self._good, self._patience]} if self.active else {}

    def restore(self, counters: dict[str, Any]) -> None:
        if self.active and "loss_scale" in counters:
            self.value, self._good, self._patience = counters["loss_scale"]
