"""The off-policy correction: weights of tokens that another policy sampled than the one that is improved.

w = proximal / behaviour (Hilton et al., "Batch size invariance for policy optimization", arXiv 2110.00641).
It differs from 1 for tokens of older weights, and also because trainer and servers compute the same
probabilities with other programs.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from hpc_rl.algorithms.token_batch import average_rows

T = TypeVar("T")


@dataclass(frozen=True)
class Correction:
    """The treatment of weights beyond bounds, for tokens or for whole sequences.

    The weight of a sequence is the geometric mean of the weights of its tokens. `truncate` moves weights to
    the nearest bound (truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training", 2025). `mask` leaves tokens or sequences beyond a bound out of the loss and
    its divisor (masked importance sampling; two-sided: IcePop, Ling team, 2025). None means no bound.
    """

    level: Literal["token", "sequence"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    lower: float | None = None
    upper: float | None = None

    def compute_weights(
        self, log_weight_T: torch.Tensor, mask_T: torch.Tensor, row_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of each token (0 if excluded), and whether it is excluded."""
        # masked before exp: no overflow at tokens that don't count
        log_weight_T = torch.where(mask_T, log_weight_T, torch.zeros_like(log_weight_T))
        if self.level == "sequence":
            log_weight_T = average_rows(log_weight_T, mask_T, row_T)
        weight_T = log_weight_T.exp()
        excluded_T = torch.zeros_like(mask_T)
        if self.mode == "truncate":
            if self.lower is not None or self.upper is not None:
                weight_T = weight_T.clamp(self.lower, self.upper)
            return weight_T, excluded_T
        if self.lower is not None:
            excluded_T = excluded_T | (mask_T & (weight_T < self.lower))
        if self.upper is not None:
            excluded_T = excluded_T | (mask_T & (weight_T > self.upper))
        return weight_T.masked_fill(excluded_T, 0.0), excluded_T


def choose_logprobs(inference: T, recomputed: T | None, decoupled: bool) -> tuple[T, T]:
    """Return (proximal, behaviour) log-probabilities.

    `inference` come from the servers, `recomputed` from the trainer at the start of the step. If `decoupled`,
    returns (recomputed, inference). Otherwise returns the recomputed ones twice, or the servers' if there are
    no recomputed ones. Raises ValueError if decoupled without recomputed ones.
    """
    if recomputed is None:
        if decoupled:
            raise ValueError(
                "the decoupled loss (actor.use_decoupled_loss) needs log-probabilities that the trainer "
                "recomputes: set actor.recompute_logprob true"
            )
        return inference, inference
    return recomputed, inference if decoupled else recomputed


def interpolate_proximal(
    logprobs_T: torch.Tensor, behav_T: torch.Tensor, share_T: torch.Tensor
) -> torch.Tensor:
    """Return log-probabilities of the proximal policy between the behaviour and the current policy.

    log prox = log behav + share (log current - log behav), without gradient, as AReaL's `loglinear`. `share`
    is (v_prox - v_behav) / (v_current - v_behav) for weight versions v: see `compute_version_share`.
    """
    return behav_T + share_T * (logprobs_T.detach() - behav_T)


def compute_version_share(staleness_T: np.ndarray) -> np.ndarray:
    """Return the place of the proximal policy between the behaviour policy (0) and the current one (1).

    `staleness_T` is v_prox - v_behav, float32 [T]; the current policy is one version after the proximal one.
    A token of the newest weights has share 0.
    """
    return staleness_T / (staleness_T + 1)
