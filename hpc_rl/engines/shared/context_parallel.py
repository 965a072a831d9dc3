"""Context parallelism: ranks share the tokens of a micro-batch, and its heads within attention.

Before attention, ranks exchange data so that each has some heads of all tokens; after it, they exchange back
(Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509). All other layers work on the tokens of one rank.
"""

from typing import Any

import torch
import torch.distributed as dist


def exchange_for_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a part of the heads of all tokens, [1, heads / ranks, T, d], from all heads of a part of them.

    tensor: [1, heads, T / ranks, d], heads in equal parts. Collective, forwards and backwards.
    """
    return _Exchange.apply(tensor, 2, 1, group)


def exchange_for_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Invert `exchange_for_heads`."""
    return _Exchange.apply(tensor, 1, 2, group)


def repeat_heads(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return [1, heads, T, d]; repeat heads if `size` ranks can't divide them equally."""
    heads = tensor.shape[1]
    return tensor if heads % size == 0 else tensor.repeat_interleave(size // heads, dim=1)


def gather_whole(values_T: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum [T] over the ranks; each rank passes 0 at the tokens of other ranks. Collective.

    The gradient passes through unchanged, because each rank computes the same loss from the same values.
    """
    return _Whole.apply(values_T, group)


class _Exchange(torch.autograd.Function):
    """Gather the parts of all ranks along one dimension and cut another dimension into parts."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, gathered: int, cut: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.dimensions, ctx.group = (gathered, cut), group
        sent = torch.stack(tensor.chunk(group.size(), dim=cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=gathered)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gathered, cut = ctx.dimensions
        return _Exchange.apply(grad, cut, gathered, ctx.group), None, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_T: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        result_T = values_T.clone()
        dist.all_reduce(result_T, group=group)
        return result_T

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_T, None
