"""Samples one token for each row of a batch: logits in, tokens and log-probabilities out.

A row's random number is a hash of (seed, position), and the token is found by inverting the cumulative
distribution, so equal logits give equal tokens regardless of the rest of the batch. Log-probabilities are
taken at the sampling temperature, before top_k and top_p, as in SGLang. Temperature 0 takes the most likely
token and its log-probability at T = 1.
"""

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


def draw_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return random numbers, float64 [N] in [0, 1), from seeds uint64 [N] and positions [N]."""
    x = _mix(_mix(seeds + _GOLDEN) ^ (positions.astype(np.uint64) * _GOLDEN))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits_NV: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    uniform: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample tokens, int64 [N]; return them with their log-probabilities, float32 [N].

    `top_k` 0 and `top_p` 1 mean all tokens; temperature 0 means greedy.
    """
    device = logits_NV.device
    greedy = temperature == 0.0
    scale = np.where(greedy, 1.0, temperature)
    if (scale != 1.0).any():
        logits_NV = logits_NV / torch.as_tensor(scale, dtype=torch.float32, device=device)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    tokens = _draw(logprobs_NV, top_k, top_p, uniform)
    if greedy.any():
        tokens = torch.where(torch.as_tensor(greedy, device=device), logprobs_NV.argmax(-1), tokens)
    chosen = logprobs_NV.gather(1, tokens[:, None])[:, 0]
    return tokens.cpu().numpy(), chosen.cpu().numpy()


def _draw(
    logprobs_NV: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, uniform: np.ndarray
) -> torch.Tensor:
    probs_NV = logprobs_NV.exp()
    filtered = (top_k > 0) | (top_p < 1.0)
    if not filtered.any():
        return _invert(probs_NV, uniform)
    if not filtered.all():
        tokens = _invert(probs_NV, uniform)
        at = torch.as_tensor(np.flatnonzero(filtered), device=probs_NV.device)
        tokens[at] = _draw(logprobs_NV[at], top_k[filtered], top_p[filtered], uniform[filtered])
        return tokens
    ordered, order = probs_NV.sort(dim=-1, descending=True, stable=True)
    k = torch.as_tensor(np.where(top_k > 0, top_k, ordered.shape[1]), device=ordered.device)[:, None]
    p = torch.as_tensor(top_p, dtype=torch.float32, device=ordered.device)[:, None]
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(ordered.shape[1], device=ordered.device)[None]
    ordered = ordered.masked_fill((ranks >= k) | ((before > p) & (p < 1.0)), 0.0)
    return order.gather(1, _invert(ordered, uniform)[:, None])[:, 0]


def _invert(weights_NV: torch.Tensor, uniform: np.ndarray) -> torch.Tensor:
    """Return the first index whose cumulative weight exceeds uniform x total; its weight is above 0."""
    total_NV = weights_NV.cumsum(-1, dtype=torch.float64)
    wanted = total_NV[:, -1:] * torch.as_tensor(uniform, device=weights_NV.device)[:, None]
    return torch.searchsorted(total_NV, wanted, right=True)[:, 0].clamp_(max=weights_NV.shape[1] - 1)
