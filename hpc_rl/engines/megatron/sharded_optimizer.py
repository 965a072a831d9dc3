"""Megatron's optimizers, with the same interface and the same steps as the FSDP engine's optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate
from torch import nn

from hpc_rl.config.options.megatron import MegatronConfig
from hpc_rl.config.options.training import OptimizerConfig
from hpc_rl.engines.megatron.weight_stream import RankParameter
from hpc_rl.engines.shared.model import DTYPES
from hpc_rl.engines.shared.optimizer import is_decayed
from hpc_rl.engines.shared.pieces import Kind, Piece, StatePiece, split_flat


@dataclass
class FlatShard:
    """The part of a parameter that this rank updates: values `start` to `start + len(main)`, in float32."""

    parameter: RankParameter
    main: torch.Tensor  # flat
    start: int
    owner: torch.Tensor  # the tensor in the inner optimizer
    counts: bool  # False for a replica; another rank saves it and counts its gradient


def wrap_chunks(chunks: list[Any], config: Any, options: MegatronConfig) -> list[DistributedDataParallel]:
    """Wrap the chunks with buffers for gradients and parameters that are divided among the data ranks."""
    ddp = options.ddp
    shared = DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        align_param_gather=ddp.align_param_gather,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        check_for_nan_in_grad=ddp.check_for_nan_in_grad,
        bucket_size=ddp.bucket_size,
    )
    # all chunks but the first have one bucket each, as in Megatron-LM
    made = [
        DistributedDataParallel(config, shared, one, disable_bucketing=i > 0) for i, one in enumerate(chunks)
    ]
    several = len(made) > 1
    if ddp.overlap_grad_reduce:
        functions = [one.no_sync for one in made]
        config.no_sync_func = functions if several else functions[0]
    if ddp.overlap_param_gather and ddp.align_param_gather:
        functions = [one.start_param_sync for one in made]
        config.param_sync_func = functions if several else functions[0]
    return made


class ShardedOptimizer:
    """Megatron's AdamW. As with FSDP, the same parameters are decayed and moments exist from the start."""

    def __init__(
        self,
        config: OptimizerConfig,
        options: MegatronConfig,
        dtype: str,
        chunks: list[DistributedDataParallel],
        parameters: list[RankParameter],
    ) -> None:
        self.config = config
        self.chunks = chunks
        self.is_distributed = options.ddp.use_distributed_optimizer
        compute = DTYPES[dtype]
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            bf16=compute == torch.bfloat16,
            fp16=compute == torch.float16,
            params_dtype=compute,
            loss_scale=1.0 if compute == torch.float16 else None,  # LossScale scales instead
            use_distributed_optimizer=self.is_distributed,
            overlap_param_gather=options.ddp.overlap_param_gather,
            clip_grad=0.0,
        )
        bare = {
            id(parameter.value)
            for parameter in parameters
            if parameter.rectangles and not is_decayed(config, parameter.rectangles[0].name)
        }
        without_decay = ParamPredicate(name="not_decayed", fn=lambda value: id(value) in bare)
        # replaces Megatron's overrides, which would never decay norms
        made = get_megatron_optimizer(
            settings,
            chunks,
            config_overrides={ParamKey(predicate=without_decay): {"wd_mult": 0.0}},
            use_gloo_process_groups=False,
        )
        self.megatron: Any = made
        for group in made.param_groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        self.parts: list[Any] = [one for one in made.chained_optimizers if not one.is_stub_optimizer]
        known = {one.value: one for one in parameters}
        self.shards = [
            FlatShard(
                known[value],
                main.detach().view(-1),
                start,
                main,
                known[value].is_first if self.is_distributed else known[value].is_owned,
            )
            for part in self.parts
            for value, main, start in _list_mains(part)
        ]
        self.restore_num_steps(0)

    def restore_num_steps(self, num_steps: int) -> None:
        """Set the number of steps that the moments have seen."""
        self.num_steps = num_steps
        for part in self.parts:
            adam = part.optimizer
            for group in adam.param_groups:
                if "step" in group or not isinstance(adam, torch.optim.AdamW):
                    group["step"] = num_steps
                for one in group["params"]:
                    state = adam.state[one]
                    state.setdefault("exp_avg", torch.zeros_like(one.detach()))
                    state.setdefault("exp_avg_sq", torch.zeros_like(one.detach()))
                    if isinstance(adam, torch.optim.AdamW):
                        state["step"] = torch.tensor(float(num_steps), dtype=torch.float32)

    def pieces(self) -> Iterator[StatePiece]:
        """Yield this rank's pieces of parameters and moments, by Hugging Face names."""
        states = {one: state for part in self.parts for one, state in part.optimizer.state.items()}
        for shard in self.shards:
            state = states[shard.owner]
            values: dict[Kind, torch.Tensor] = {
                "model": shard.main,
                "exp_avg": state["exp_avg"].view(-1),
                "exp_avg_sq": state["exp_avg_sq"].view(-1),
            }
            for kind, flat in values.items():
                for piece in _split_pieces(shard, flat):
                    yield StatePiece(kind, piece, shard.counts)

    def parameters_from_main(self) -> None:
        """Copy the float32 shards to the model. Collective."""
        for part in self.parts:
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        self.gather()

    def gather(self) -> None:
        """Gather updated parameters, or wait until they are gathered. Collective."""
        if self.is_distributed:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def prepare(self) -> None:
        """Copy gradients from the buffers to the shards."""
        self.megatron.prepare_grads()

    def compute_squared_norm(self) -> float:
        """Return the sum of squares of this rank's gradients, without replicas."""
        grads = [grad for shard in self.shards if shard.counts and (grad := shard.owner.grad) is not None]
        if not grads:
            return 0.0
        return torch.stack(torch._foreach_norm(grads)).double().square().sum().item()

    def step(self, lr: float, grad_norm: float, loss_scale: float = 1.0) -> None:
        """Clip to the configured norm, given the unscaled norm over all ranks, and update. Collective."""
        clip = self.config.gradient_clipping
        factor = clip / (grad_norm + 1e-6) if grad_norm > clip else 1.0
        grads = [shard.owner.grad for shard in self.shards if shard.owner.grad is not None]
        if grads and (factor != 1.0 or loss_scale != 1.0):
            torch._foreach_mul_(grads, factor / loss_scale)
        for group in self.megatron.param_groups:
            group["lr"] = lr
        self.megatron.step_with_ready_grads()
        self.num_steps += 1

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()


def _list_mains(part: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor, int]]:
    """Yield (parameter, float32 values, their start in the parameter) of a Megatron optimizer."""
    if hasattr(part, "model_fp32_groups"):  # distributed
        for models, mains in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for group, shards in zip(models, mains, strict=True):
                for value, main in zip(group, shards, strict=True):
                    yield value, main, part._get_model_param_range_map(value)["param"].start
        return
    if hasattr(part, "float16_groups"):
        for group, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((value, main, 0) for value, main in zip(group, mains, strict=True))
        for group in part.fp32_from_fp32_groups:
            yield from ((value, value, 0) for value in group)
        return
    for group in part.optimizer.param_groups:
        yield from ((value, value, 0) for value in group["params"])


def _split_pieces(shard: FlatShard, flat: torch.Tensor) -> Iterator[Piece]:
    end = shard.start + len(flat)
    for one in shard.parameter.rectangles:
        shape = torch.empty(one.sizes, device="meta")
        first, last = max(one.start, shard.start), min(one.start + shape.numel(), end)
        if first < last:
            whole = Piece(one.name, shape, one.offset, one.shape)
            yield from split_flat(whole, first - one.start, flat[first - shard.start : last - shard.start])
