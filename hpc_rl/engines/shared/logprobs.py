"""Log-probabilities and entropies of given tokens from hidden states, without ever holding all logits.

Logits take tokens x vocabulary x 4 bytes, with a large vocabulary more than the model. They are computed in
tiles of some rows (tokens) and columns (of the vocabulary), and again in the backward pass. On the CPU a tile
fits into a cache, and each part of the head's gradient is complete after the tiles of its columns. On a GPU a
tile has all columns. If all logits fit into one tile, it is kept, which saves the second product. The ranks
of a group may divide the vocabulary; then they sum their partial results.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

CHUNK_ROWS = 128
CHUNK_LOGITS = 1 << 22  # 16 MiB of float32; a chunk has more rows if the vocabulary is small
# On a GPU 2208 rows of a vocabulary of 152k: few products, since each adds up a gradient as large as the head
CHUNK_LOGITS_ON_GPU = 320 << 20
TILE_ROWS = 512  # on the CPU, if the vocabulary is large: 1 MiB, which fits into a cache
TILE_COLUMNS = 512
LOWEST = -1e30  # less than any logit; finite, so that 0 * LOWEST is 0


class Tile(NamedTuple):
    """The size of the logits that are in memory at once."""

    rows: int
    columns: int


def token_logprobs(
    hidden_NH: torch.Tensor,
    head_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    tile: Tile | None = None,
    group: dist.ProcessGroup | None = None,
    entropy_clamp: float = 0.0,
    needs_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(target) and the entropy of softmax(hidden @ head.T / temperature), float32 [N].

    hidden_NH: [tokens, width]. head_VH: [vocabulary, width]. targets_N: int64 token ids; or [N, K], then the
    log-probabilities are [N, K], too. temperature: one for all, or float32 [N]. `entropy_clamp`: the least
    probable share of the vocabulary, which the entropy leaves out; it is the entropy of the distribution over
    the others. It needs the whole vocabulary on this rank, and tiles of all columns. Without `needs_entropy`
    the entropies are 0, without gradient.

    With `group`, the ranks divide the vocabulary in equal parts, in the order of ranks: head_VH is this
    rank's part. All other inputs, and the gradients of the results, must be the same on all ranks. Each rank
    gets the gradient of its head_VH and the whole gradient of hidden_NH. Collective, forwards and backwards.
    """
    if group is not None and entropy_clamp:
        raise ValueError(
            "entropy_clamp needs the whole vocabulary on each rank: use it without tensor parallelism"
        )
    num_left_out = int(len(head_VH) * entropy_clamp) if needs_entropy else 0
    if tile is None:
        tile = choose_tile(len(head_VH), hidden_NH.device.type, bool(num_left_out))
    if num_left_out and tile.columns < len(head_VH):
        raise ValueError("entropy_clamp needs all columns of the vocabulary in each tile of the logits")
    return _TokenLogprobs.apply(
        hidden_NH, head_VH, targets_N, temperature, tile, group, num_left_out, needs_entropy
    )


def choose_tile(vocabulary: int, device_type: str, needs_all_columns: bool = False) -> Tile:
    """Return the size of the logits in memory at once."""
    whole = Tile(count_chunk_rows(vocabulary, device_type), vocabulary)
    if device_type == "cuda" or needs_all_columns or whole.rows >= TILE_ROWS:
        return whole
    return Tile(TILE_ROWS, TILE_COLUMNS)


def count_chunk_rows(vocabulary: int, device_type: str) -> int:
    """Return how many tokens have all their logits in memory at once."""
    return max(CHUNK_ROWS, (CHUNK_LOGITS_ON_GPU if device_type == "cuda" else CHUNK_LOGITS) // vocabulary)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        head_VH: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float | torch.Tensor,
        tile: Tile,
        group: dist.ProcessGroup | None,
        num_left_out: int,
        needs_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets_NK = targets_N if targets_N.ndim == 2 else targets_N[:, None]
        if group is not None:
            targets_NK = targets_NK - dist.get_rank(group) * len(
                head_VH
            )  # targets of other ranks are outside
        # not a view of [N, K]: FSDP does not allow one as a result
        logprobs_N = torch.empty(targets_N.shape, dtype=torch.float32, device=hidden_NH.device)
        entropy_N, log_sum_N = logprobs_N.new_zeros(len(targets_NK)), logprobs_N.new_empty(len(targets_NK))
        # of the tokens in the entropy: more than this log p, and the logarithm of their probability
        floor_N, log_kept_N = torch.full_like(entropy_N, -torch.inf), torch.zeros_like(entropy_N)
        is_one_tile = len(targets_NK) <= tile.rows and len(head_VH) <= tile.columns
        memory = _TileMemory(tile, hidden_NH, head_VH, in_place=not (needs_entropy or is_one_tile))
        # log-probabilities; on the CPU also exp(l - max) and the factor that makes them probabilities
        kept: list[torch.Tensor] = []
        for rows in _split(len(targets_NK), tile.rows):
            at = _select_temperature(temperature, rows)
            sums = _RowSums(targets_NK[rows], hidden_NH.device)
            for columns in _split(len(head_VH), tile.columns):
                logits_NV = memory.compute_logits(hidden_NH[rows], head_VH[columns], at)
                exp_NV = sums.add(logits_NV, columns.start, memory, needs_entropy, is_one_tile)
            shift_N = sums.max_N
            if group is not None:
                sums.reduce(group)
            log_sum_N[rows] = sums.max_N + sums.sum_N.log()
            logprobs_NK = sums.target_NK - sums.max_N[:, None] - sums.sum_N.log()[:, None]
            logprobs_N[rows] = logprobs_NK.view_as(logprobs_N[rows])
            if needs_entropy:
                entropy_N[rows] = sums.sum_N.log() - sums.product_N / sums.sum_N
            if is_one_tile or num_left_out:
                logits_NV.sub_((log_sum_N[rows] - shift_N)[:, None])  # log-probabilities
            if num_left_out:
                # halfway between two tokens, because the backward pass rounds differently
                below_N, above_N = (logits_NV.kthvalue(num_left_out + i, dim=1).values for i in (0, 1))
                floor_N[rows] = (below_N + above_N) / 2
                entropy_N[rows], log_kept_N[rows] = _compute_clamped_entropy(logits_NV, floor_N[rows])
            if is_one_tile:
                kept = [logits_NV]
                if exp_NV is not None:
                    kept += [exp_NV, (shift_N - log_sum_N[rows]).exp_()]
            del logits_NV, exp_NV  # frees the memory for the next tile
        of_entropy = (entropy_N, floor_N, log_kept_N)
        ctx.save_for_backward(hidden_NH, head_VH, targets_NK, log_sum_N, *of_entropy, *kept)
        ctx.temperature, ctx.tile, ctx.group = temperature, tile, group
        ctx.is_clamped = num_left_out > 0
        if not needs_entropy:
            ctx.mark_non_differentiable(entropy_N)
        ctx.set_materialize_grads(False)  # the entropy rarely has a gradient
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, head_VH, targets_NK, log_sum_N, entropy_N, floor_N, log_kept_N, *kept = ctx.saved_tensors
        if grad_N is None:
            grad_N = torch.zeros_like(targets_NK, dtype=torch.float32)
        grad_NK = grad_N.reshape(targets_NK.shape)
        # several tiles add up in float32
        is_tiled = ctx.tile.columns < len(head_VH)
        grad_hidden_NH = torch.empty_like(hidden_NH, dtype=torch.float32 if is_tiled else None)
        grad_head_VH = None
        if ctx.needs_input_grad[1]:  # not of a frozen head
            grad_head_VH = torch.empty(head_VH.shape, dtype=torch.float32, device=head_VH.device)
            if not len(targets_NK):
                grad_head_VH.zero_()
        memory = _TileMemory(ctx.tile, hidden_NH, head_VH, in_place=not kept)
        for rows in _split(len(targets_NK), ctx.tile.rows):
            temperature = _select_temperature(ctx.temperature, rows)
            scale_NK = (grad_NK[rows].T / temperature).T
            for columns in _split(len(head_VH), ctx.tile.columns):
                part_VH = head_VH[columns]
                if kept:
                    logprobs_NV = kept[0]
                else:
                    logprobs_NV = memory.compute_logits(hidden_NH[rows], part_VH, temperature)
                    logprobs_NV.sub_(log_sum_N[rows, None])
                more_NV = None
                if grad_entropy_N is not None:
                    more_NV = _compute_entropy_gradient(
                        logprobs_NV, entropy_N[rows], floor_N[rows], log_kept_N[rows], ctx.is_clamped
                    ).mul_((grad_entropy_N[rows] / temperature)[:, None])
                # of each target (onehot - softmax) * grad
                if len(kept) > 1:
                    grad_logits_NV = kept[1] * (kept[2] * -scale_NK.sum(1))[:, None]
                else:
                    grad_logits_NV = memory.exponentiate(logprobs_NV).mul_(-scale_NK.sum(1, keepdim=True))
                inside_NK, place_NK = _find_own(targets_NK[rows] - columns.start, len(part_VH))
                grad_logits_NV.scatter_add_(1, place_NK, scale_NK * inside_NK)
                if more_NV is not None:
                    grad_logits_NV += more_NV
                del logprobs_NV, more_NV
                grad_logits_NV = grad_logits_NV.to(head_VH.dtype)
                _add_product(grad_hidden_NH[rows], grad_logits_NV, part_VH, columns.start == 0)
                if grad_head_VH is not None:
                    _add_product(grad_head_VH[columns], grad_logits_NV.T, hidden_NH[rows], rows.start == 0)
                del grad_logits_NV
        if ctx.group is not None:
            dist.all_reduce(grad_hidden_NH, group=ctx.group)
        grad_head = None if grad_head_VH is None else grad_head_VH.to(head_VH.dtype)
        return grad_hidden_NH.to(hidden_NH.dtype), grad_head, *[None] * 6


class _TileMemory:
    """Memory for the logits of a tile and their exponentials, used again for each tile.

    On a GPU, and in 16-bit types, the operators allocate it. With `in_place`, exponentials replace logits.
    """

    def __init__(self, tile: Tile, hidden_NH: torch.Tensor, head_VH: torch.Tensor, in_place: bool) -> None:
        self.in_place = in_place
        self.tensors: list[torch.Tensor] = []
        if not hidden_NH.is_cuda and hidden_NH.dtype == torch.float32:
            size = min(tile.rows, len(hidden_NH)) * min(tile.columns, len(head_VH))
            self.tensors = [hidden_NH.new_empty(size) for _ in range(1 if in_place else 2)]

    def compute_logits(
        self, hidden_NH: torch.Tensor, head_VH: torch.Tensor, temperature: float | torch.Tensor
    ) -> torch.Tensor:
        """Return logits in float32; on a GPU they are never rounded to a smaller compute type."""
        if self.tensors:
            shape = len(hidden_NH), len(head_VH)
            logits_NV = self.tensors[0][: shape[0] * shape[1]].view(shape)
            torch.mm(hidden_NH, head_VH.T, out=logits_NV)
        elif hidden_NH.is_cuda and hidden_NH.dtype != torch.float32:
            logits_NV = torch.mm(hidden_NH, head_VH.T, out_dtype=torch.float32)
        else:
            logits_NV = (hidden_NH @ head_VH.T).float()
        if isinstance(temperature, torch.Tensor):
            return logits_NV.div_(temperature[:, None])
        return logits_NV if temperature == 1.0 else logits_NV.div_(temperature)

    def exponentiate(self, values_NV: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            return values_NV.exp_()
        if not self.tensors:
            return values_NV.exp()
        return torch.exp(values_NV, out=self.tensors[1][: values_NV.numel()].view_as(values_NV))


class _RowSums:
    """Sums over the columns that some rows have seen so far; l is a logit, max the largest one."""

    def __init__(self, targets_NK: torch.Tensor, device: torch.device) -> None:
        self.targets_NK = targets_NK
        self.target_NK = torch.zeros(targets_NK.shape, device=device)  # logits of the targets
        self.max_N = torch.full(targets_NK.shape[:1], LOWEST, device=device)
        self.sum_N = torch.zeros_like(self.max_N)  # of exp(l - max)
        self.product_N = torch.zeros_like(self.max_N)  # of exp(l - max) (l - max)

    def add(
        self, logits_NV: torch.Tensor, first: int, memory: _TileMemory, needs_product: bool, keep: bool
    ) -> torch.Tensor | None:
        """Add the columns from `first` on, and subtract the largest logit so far, max, from them, in place.

        Returns exp(l - max) on the CPU if it is to `keep`.
        """
        inside_NK, place_NK = _find_own(self.targets_NK - first, logits_NV.shape[1])
        self.target_NK += logits_NV.gather(1, place_NK) * inside_NK
        self._raise_max(torch.maximum(self.max_N, logits_NV.amax(1)))
        logits_NV.sub_(self.max_N[:, None])
        exp_NV = memory.exponentiate(logits_NV)
        self.sum_N += exp_NV.sum(1)
        if keep and memory.tensors:
            if needs_product:
                self.product_N += torch.bmm(exp_NV[:, None], logits_NV[:, :, None])[:, 0, 0]
            return exp_NV
        if needs_product:
            self.product_N += exp_NV.mul_(logits_NV).sum(1)
        return None

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Add the sums of the other ranks. Collective."""
        max_N = self.max_N.clone()
        dist.all_reduce(max_N, dist.ReduceOp.MAX, group)
        self._raise_max(max_N)
        sums = torch.stack([self.sum_N, self.product_N, *self.target_NK.T])
        dist.all_reduce(sums, group=group)
        self.sum_N, self.product_N = sums[:2]
        self.target_NK = sums[2:].T

    def _raise_max(self, max_N: torch.Tensor) -> None:
        shift_N = self.max_N - max_N
        scale_N = shift_N.exp()
        self.product_N = scale_N * (self.product_N + shift_N * self.sum_N)
        self.sum_N = scale_N * self.sum_N
        self.max_N = max_N


def _split(size: int, part: int) -> Iterator[slice]:
    return (slice(start, min(start + part, size)) for start in range(0, size, part))


def _select_temperature(temperature: float | torch.Tensor, rows: slice) -> float | torch.Tensor:
    return temperature[rows] if isinstance(temperature, torch.Tensor) else temperature


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, is_first: bool) -> None:
    """Add a product to a tensor; the first one overwrites it."""
    if left.dtype != into.dtype:
        product = left @ right
        into.copy_(product) if is_first else into.add_(product)
    elif is_first:
        torch.mm(left, right, out=into)
    else:
        into.addmm_(left, right)


def _compute_clamped_entropy(
    logprobs_NV: torch.Tensor, floor_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entropy over the tokens above the floor, and the logarithm of their probability."""
    is_kept_NV = logprobs_NV > floor_N[:, None]
    log_kept_N = logprobs_NV.masked_fill(~is_kept_NV, -torch.inf).logsumexp(1)
    log_share_NV = (logprobs_NV - log_kept_N[:, None]).masked_fill_(~is_kept_NV, 0.0)
    return -(log_share_NV.exp().mul_(is_kept_NV).mul_(log_share_NV)).sum(1), log_kept_N


def _compute_entropy_gradient(
    logprobs_NV: torch.Tensor,
    entropy_N: torch.Tensor,
    floor_N: torch.Tensor,
    log_kept_N: torch.Tensor,
    is_clamped: bool,
) -> torch.Tensor:
    """Return the gradient of the entropy for the logits, -q (log q + H), with q = 0 up to the floor."""
    log_share_NV = logprobs_NV - log_kept_N[:, None]
    share_NV = log_share_NV.exp()
    if is_clamped:
        share_NV.mul_(logprobs_NV > floor_N[:, None])
    return share_NV.mul_(log_share_NV.add_(entropy_N[:, None])).neg_()


def _find_own(targets_NK: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1 if the column of a target is among the first ones, else 0, and a valid column, each [N, K]."""
    inside_NK = (targets_NK >= 0) & (targets_NK < num_columns)
    return inside_NK.float(), targets_NK.clamp(0, num_columns - 1)
