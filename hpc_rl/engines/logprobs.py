"""Log-probabilities and entropies of given tokens from hidden states, without ever holding all logits.

Logits take tokens x vocabulary x 4 bytes: with a large vocabulary more than the model. They are computed for
a chunk of rows at a time, and again in the backward pass. If all of them fit into one chunk they are kept,
which saves the second product.
"""

from typing import Any

import torch

CHUNK_ROWS = 128
CHUNK_LOGITS = 1 << 22  # 16 MiB of float32; a chunk has more rows if the vocabulary is small


def token_logprobs(
    hidden_NH: torch.Tensor,
    head_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(target) and the entropy of softmax(hidden @ head.T / temperature), float32 [N].

    hidden_NH: [tokens, width]. head_VH: [vocabulary, width]. targets_N: int64 token ids. Only log p has a
    gradient.
    """
    if chunk_rows is None:
        chunk_rows = max(CHUNK_ROWS, CHUNK_LOGITS // head_VH.shape[0])
    return _TokenLogprobs.apply(hidden_NH, head_VH, targets_N, temperature, chunk_rows)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        head_VH: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NH.device)
        entropy_N = torch.empty_like(logprobs_N)
        all_logprobs_NV = torch.empty(0, device=hidden_NH.device)
        for start in range(0, len(targets_N), chunk_rows):
            rows = slice(start, start + chunk_rows)
            all_logprobs_NV = _log_softmax(hidden_NH[rows], head_VH, temperature)
            logprobs_N[rows] = all_logprobs_NV.gather(1, targets_N[rows, None]).squeeze(1)
            entropy_N[rows] = -(all_logprobs_NV.exp() * all_logprobs_NV).sum(1)
        one_chunk = len(targets_N) <= chunk_rows
        ctx.save_for_backward(hidden_NH, head_VH, targets_N, *([all_logprobs_NV] if one_chunk else []))
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: torch.Tensor, _grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        hidden_NH, head_VH, targets_N, *kept = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_head_VH = torch.zeros(head_VH.shape, dtype=torch.float32, device=head_VH.device)
        for start in range(0, len(targets_N), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            all_logprobs_NV = kept[0] if kept else _log_softmax(hidden_NH[rows], head_VH, ctx.temperature)
            scale_N1 = (grad_N[rows] / ctx.temperature)[:, None]
            grad_logits_NV = all_logprobs_NV.exp().mul_(-scale_N1)  # (onehot - softmax) * grad
            grad_logits_NV.scatter_add_(1, targets_N[rows, None], scale_N1)
            grad_logits_NV = grad_logits_NV.to(head_VH.dtype)
            grad_hidden_NH[rows] = grad_logits_NV @ head_VH
            grad_head_VH += grad_logits_NV.T @ hidden_NH[rows]
        return grad_hidden_NH, grad_head_VH.to(head_VH.dtype), None, None, None


def _log_softmax(hidden_NH: torch.Tensor, head_VH: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_NV = (hidden_NH @ head_VH.T).float()
    return torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, dim=1)
