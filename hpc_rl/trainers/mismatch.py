"""Measures of how much the trainer's probabilities of sampled tokens differ from the servers'.

w = trainer / servers. Fresh tokens come from the newest weights. Their w differs from 1 only because two
programs compute the same probabilities, or because the servers sample from another distribution.
"""

from collections.abc import Mapping

import torch

PREFIX = "mismatch_"


class LargestValue:
    """The largest absolute value of tensors. It stays on their device until it is taken."""

    def __init__(self) -> None:
        self._value: torch.Tensor | None = None

    def see(self, values: torch.Tensor) -> None:
        if values.numel():
            largest = values.detach().abs().max()
            self._value = largest if self._value is None else torch.maximum(self._value, largest)

    def take(self) -> float:
        """Return the value, 0 without any, and begin again."""
        value, self._value = self._value, None
        return 0.0 if value is None else float(value)


def measure_mismatch(
    log_weight_T: torch.Tensor, mask_T: torch.Tensor, fresh_mask_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return sums over the masked tokens; `log_weight_T` is 0 elsewhere."""
    weight_T = torch.where(mask_T, log_weight_T.exp(), torch.zeros_like(log_weight_T))
    fresh_T = mask_T & fresh_mask_T
    return {
        f"{PREFIX}num_tokens": mask_T.sum(),
        f"{PREFIX}log_w": log_weight_T.abs().sum(),
        # k3: (w - 1) - log w, an estimate of the divergence of the servers' policy from the trainer's
        f"{PREFIX}kl": torch.where(mask_T, weight_T - 1 - log_weight_T, log_weight_T).sum(),
        f"{PREFIX}w": weight_T.sum(),
        f"{PREFIX}w_squared": weight_T.square().sum(),
        f"{PREFIX}num_fresh": fresh_T.sum(),
        f"{PREFIX}fresh": torch.where(fresh_T, log_weight_T.abs(), torch.zeros_like(log_weight_T)).sum(),
    }


def summarize_mismatch(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step from the sums of its mini-batches; {} without tokens.

    The effective sample size is a share of the tokens: (sum w)^2 / (n sum w^2).
    """
    num_tokens, num_fresh = sums.get(f"{PREFIX}num_tokens", 0.0), sums.get(f"{PREFIX}num_fresh", 0.0)
    if not num_tokens:
        return {}
    metrics = {
        f"{PREFIX}log_w_mean": sums[f"{PREFIX}log_w"] / num_tokens,
        f"{PREFIX}kl": sums[f"{PREFIX}kl"] / num_tokens,
        f"{PREFIX}ess": sums[f"{PREFIX}w"] ** 2 / (num_tokens * sums[f"{PREFIX}w_squared"]),
    }
    if num_fresh:
        metrics[f"{PREFIX}log_w_fresh"] = sums[f"{PREFIX}fresh"] / num_fresh
    return metrics
