"""Log-probabilities and entropies of given tokens from hidden states, without ever holding all logits.

Logits take tokens x vocabulary x 4 bytes, with a large vocabulary more than the model. They are computed for
one chunk of rows at a time, and again in the backward pass. If all rows fit into one chunk, the logits are
kept, which saves the second product. The ranks of a group may divide the vocabulary; then they sum their
partial results.
"""

from typing import Any

import torch
import torch.distributed as dist

CHUNK_ROWS = 128
CHUNK_LOGITS = 1 << 22  # 16 MiB of float32; a chunk has more rows if the vocabulary is small
# On a GPU 2208 rows of a vocabulary of 152k: few products, since each adds up a gradient as large as the head
CHUNK_LOGITS_ON_GPU = 320 << 20


def token_logprobs(
    hidden_NH: torch.Tensor,
    head_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    chunk_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    entropy_clamp: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(target) and the entropy of softmax(hidden @ head.T / temperature), float32 [N].

    hidden_NH: [tokens, width]. head_VH: [vocabulary, width]. targets_N: int64 token ids; or [N, K], then the
    log-probabilities are [N, K], too. temperature: one for all, or float32 [N]. `entropy_clamp`: the least
    probable share of the vocabulary, which the entropy leaves out; it is the entropy of the distribution over
    the others. It needs the whole vocabulary on this rank.

    With `group`, the ranks divide the vocabulary in equal parts, in the order of ranks: head_VH is this
    rank's part. All other inputs, and the gradients of the results, must be the same on all ranks. Each rank
    gets the gradient of its head_VH and the whole gradient of hidden_NH. Collective, forwards and backwards.
    """
    if group is not None and entropy_clamp:
        raise ValueError("a clamped entropy needs the whole vocabulary")
    if chunk_rows is None:
        chunk_rows = count_chunk_rows(head_VH.shape[0], hidden_NH.device.type)
    num_left_out = int(len(head_VH) * entropy_clamp)
    return _TokenLogprobs.apply(hidden_NH, head_VH, targets_N, temperature, chunk_rows, group, num_left_out)


def count_chunk_rows(vocabulary: int, device_type: str) -> int:
    """Return how many tokens have their logits in memory at once."""
    return max(CHUNK_ROWS, (CHUNK_LOGITS_ON_GPU if device_type == "cuda" else CHUNK_LOGITS) // vocabulary)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        head_VH: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float | torch.Tensor,
        chunk_rows: int,
        group: dist.ProcessGroup | None,
        num_left_out: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets_NK = targets_N if targets_N.ndim == 2 else targets_N[:, None]
        if group is not None:
            targets_NK = targets_NK - dist.get_rank(group) * len(head_VH)  # those of other ranks are outside
        # not a view of [N, K]: FSDP does not allow one as a result
        logprobs_N = torch.empty(targets_N.shape, dtype=torch.float32, device=hidden_NH.device)
        entropy_N, log_sum_N = (logprobs_N.new_empty(len(targets_N)) for _ in range(2))
        # of the tokens in the entropy: more than this log p, and the logarithm of their probability
        floor_N, log_kept_N = torch.full_like(entropy_N, -torch.inf), torch.zeros_like(entropy_N)
        one_chunk = len(targets_NK) <= chunk_rows
        kept: list[torch.Tensor] = []
        for start in range(0, len(targets_NK), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits_NV = _compute_logits(hidden_NH[rows], head_VH, _select_temperature(temperature, rows))
            logprobs_NK, entropy_N[rows], log_sum_N[rows] = _compute_statistics(
                logits_NV, targets_NK[rows], group
            )
            logprobs_N[rows] = logprobs_NK.view_as(logprobs_N[rows])
            if num_left_out:
                # halfway between two tokens, because the backward pass rounds differently
                below_N, above_N = (logits_NV.kthvalue(num_left_out + i, dim=1).values for i in (0, 1))
                floor_N[rows] = (below_N + above_N) / 2
                entropy_N[rows], log_kept_N[rows] = _compute_clamped_entropy(logits_NV, floor_N[rows])
            kept = [logits_NV] if one_chunk else []
            del logits_NV  # frees the memory for the next chunk
        of_entropy = (entropy_N, floor_N, log_kept_N)
        ctx.save_for_backward(hidden_NH, head_VH, targets_NK, log_sum_N, *of_entropy, *kept)
        ctx.temperature, ctx.chunk_rows, ctx.group = temperature, chunk_rows, group
        ctx.set_materialize_grads(False)  # the entropy rarely has a gradient
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None, None, None]:
        hidden_NH, head_VH, targets_NK, log_sum_N, entropy_N, floor_N, log_kept_N, *kept = ctx.saved_tensors
        if grad_N is None:
            grad_N = torch.zeros_like(targets_NK, dtype=torch.float32)
        grad_NK = grad_N.reshape(targets_NK.shape)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_head_VH = None
        if ctx.needs_input_grad[1]:  # not of a frozen head
            grad_head_VH = torch.zeros(head_VH.shape, dtype=torch.float32, device=head_VH.device)
        for start in range(0, len(targets_NK), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            temperature = _select_temperature(ctx.temperature, rows)
            more_NV = None
            if kept:
                logprobs_NV = kept[0]
            else:
                logits_NV = _compute_logits(hidden_NH[rows], head_VH, temperature)
                logprobs_NV = logits_NV.sub_(log_sum_N[rows, None])
            if grad_entropy_N is not None:
                more_NV = _compute_entropy_gradient(
                    logprobs_NV, entropy_N[rows], floor_N[rows], log_kept_N[rows]
                ).mul_((grad_entropy_N[rows] / temperature)[:, None])
            softmax_NV = logprobs_NV.exp() if kept else logprobs_NV.exp_()
            scale_NK = (grad_NK[rows].T / temperature).T
            # of each target (onehot - softmax) * grad
            grad_logits_NV = softmax_NV.mul_(-scale_NK.sum(1, keepdim=True))
            here_NK, place_NK = _find_own(targets_NK[rows], len(head_VH), ctx.group)
            grad_logits_NV.scatter_add_(1, place_NK, scale_NK * here_NK)
            if more_NV is not None:
                grad_logits_NV += more_NV
            del logprobs_NV, more_NV
            grad_logits_NV = grad_logits_NV.to(head_VH.dtype)
            del softmax_NV
            grad_hidden_NH[rows] = grad_logits_NV @ head_VH
            if grad_head_VH is None:
                continue
            if head_VH.dtype == torch.float32:
                grad_head_VH.addmm_(grad_logits_NV.T, hidden_NH[rows])
            else:
                grad_head_VH += grad_logits_NV.T @ hidden_NH[rows]
        if ctx.group is not None:
            dist.all_reduce(grad_hidden_NH, group=ctx.group)
        grad_head = None if grad_head_VH is None else grad_head_VH.to(head_VH.dtype)
        return grad_hidden_NH, grad_head, None, None, None, None, None


def _select_temperature(temperature: float | torch.Tensor, rows: slice) -> float | torch.Tensor:
    return temperature[rows] if isinstance(temperature, torch.Tensor) else temperature


def _compute_logits(
    hidden_NH: torch.Tensor, head_VH: torch.Tensor, temperature: float | torch.Tensor
) -> torch.Tensor:
    """Return logits in float32; on a GPU they are never rounded to a smaller compute type."""
    if hidden_NH.is_cuda and hidden_NH.dtype != torch.float32:
        logits_NV = torch.mm(hidden_NH, head_VH.T, out_dtype=torch.float32)
    else:
        logits_NV = (hidden_NH @ head_VH.T).float()
    if isinstance(temperature, torch.Tensor):
        return logits_NV.div_(temperature[:, None])
    return logits_NV if temperature == 1.0 else logits_NV.div_(temperature)


def _compute_statistics(
    logits_NV: torch.Tensor, targets_NK: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log p of the targets [N, K], entropies, and the logarithm of the sum of exp(logits), each [N].

    Replaces the logits by log-probabilities, in place.
    """
    max_N = logits_NV.amax(1)
    if group is not None:
        dist.all_reduce(max_N, dist.ReduceOp.MAX, group)
    logits_NV.sub_(max_N[:, None])
    here_NK, place_NK = _find_own(targets_NK, logits_NV.shape[1], group)
    targets_KN = (logits_NV.gather(1, place_NK) * here_NK).T
    exp_NV = logits_NV.exp()
    sum_N = exp_NV.sum(1)
    sums_N = torch.stack([sum_N, exp_NV.mul_(logits_NV).sum(1), *targets_KN])
    if group is not None:
        dist.all_reduce(sums_N, group=group)
    sum_N, product_N, *targets = sums_N
    log_sum_N = sum_N.log()
    logits_NV.sub_(log_sum_N[:, None])
    logprobs_NK = torch.stack(targets, 1) - log_sum_N[:, None]
    return logprobs_NK, log_sum_N - product_N / sum_N, max_N + log_sum_N


def _compute_clamped_entropy(
    logprobs_NV: torch.Tensor, floor_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entropy over the tokens above the floor, and the logarithm of their probability."""
    is_kept_NV = logprobs_NV > floor_N[:, None]
    log_kept_N = logprobs_NV.masked_fill(~is_kept_NV, -torch.inf).logsumexp(1)
    log_share_NV = (logprobs_NV - log_kept_N[:, None]).masked_fill_(~is_kept_NV, 0.0)
    return -(log_share_NV.exp().mul_(is_kept_NV).mul_(log_share_NV)).sum(1), log_kept_N


def _compute_entropy_gradient(
    logprobs_NV: torch.Tensor, entropy_N: torch.Tensor, floor_N: torch.Tensor, log_kept_N: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the entropy for the logits, -q (log q + H), with q = 0 up to the floor."""
    log_share_NV = logprobs_NV - log_kept_N[:, None]
    share_NV = log_share_NV.exp().mul_(logprobs_NV > floor_N[:, None])
    return share_NV.mul_(log_share_NV.add_(entropy_N[:, None])).neg_()


def _find_own(
    targets_N: torch.Tensor, num_rows: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1 if the head's row of a target is on this rank, else 0, and a valid row number, each [N]."""
    if group is None:
        return torch.ones_like(targets_N, dtype=torch.float32), targets_N
    return ((targets_N >= 0) & (targets_N < num_rows)).float(), targets_N.clamp(0, num_rows - 1)
