"""Attention over packed rows and a norm for Megatron's layers, without Transformer Engine.

Without it, Megatron's attention refuses packed rows and context parallelism, and its norm refuses sequence
parallelism.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from hpc_rl.engines.megatron.packed import Chunk, RankRows
from hpc_rl.engines.shared import attention


class PackedAttention(MegatronModule):
    """Causal attention within each of the packed rows.

    With several context ranks, each rank gathers all keys and values, and attends from each of its chunks to
    the tokens from the beginning of the row.
    """

    def __init__(
        self, config: Any, *args: Any, kernel: str, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config=config)
        self.kernel = kernel
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.context_group = kwargs["pg_collection"].cp

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Take [t, 1, heads, d], and fewer heads of keys and values; return [t, 1, heads * d]."""
        rows: RankRows = kwargs["packed_seq_params"]
        if not rows.chunks:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [1, heads, t, d]
            assert rows.whole is not None
            out = attention.attend_packed(q, k, v, rows.whole, self.scale, kernel=self.kernel)
            return out.permute(2, 0, 1, 3).flatten(2)
        both = _Gathered.apply(torch.stack([key, value], dim=1), self.context_group)
        parts = [self._chunk(query, both, chunk) for chunk in rows.chunks]
        return (
            torch.zeros_like(query)
            .index_copy(0, torch.cat([chunk.own for chunk in rows.chunks]), torch.cat(parts))
            .flatten(2)
        )

    def _chunk(self, query: torch.Tensor, both: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        key, value = both[chunk.seen].unbind(1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query[chunk.own], key, value))
        rows, seen = chunk.own_rows, chunk.seen_rows
        out = attention.attend_packed(q, k, v, rows, self.scale, kernel=self.kernel, seen=seen)
        return out.permute(2, 0, 1, 3)


class _Gathered(torch.autograd.Function):
    """Gathers the tokens of all ranks (dimension 0); backwards, sums the gradients of each rank's tokens."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = mine.new_empty(len(mine) * group.size(), *mine.shape[1:])
        dist.all_gather_into_tensor(whole, mine.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        mine = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, grad, group=ctx.group)
        return mine, None


class AllTokens(torch.autograd.Function):
    """Sums the values of wanted tokens over context ranks; each rank passes zeros for the tokens of others.

    Every rank computes the same loss from the result, so backwards the gradient passes through unchanged.
    """

    @staticmethod
    def forward(ctx: Any, values_N: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        values_N = values_N.clone()
        dist.all_reduce(values_N, group=group)
        return values_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Norm(torch.nn.RMSNorm):
    """An RMS norm whose gradient is summed over the tensor ranks, which have different tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
