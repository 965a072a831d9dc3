"""The loss of a micro-batch: the components of the algorithm, corrected, weighed and added."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpc_rl.algorithms import correction, kl
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.base import TokenBatch
from hpc_rl.engines.base import MicroBatch

COMPONENTS = ("rl", "ce", "ref_kl")
MEANS_OVER_TOKENS = (  # sums over tokens that are reported as means
    "entropy",
    "clip_ratio",
    "dual_clip_ratio",
    "importance_weight",
    "behave_imp_weight",
    "behave_approx_kl",
    "kl_loss",
)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss function of an algorithm with its options, for any mini-batch."""

    algorithm: Algorithm
    options: Any  # of the algorithm
    beta: float = 0.0  # coefficient of the divergence from the reference model
    cap: float | None = None  # actor.behav_imp_weight_cap

    def compute(
        self, divisors: Mapping[str, float], batch: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the token losses and sums to report.

        `divisors` has the divisor of each component, counted over the whole mini-batch. The engine divides
        the result by the one of `rl`.
        """
        columns = batch.columns_T
        tokens = TokenBatch(
            logprobs_T=batch.logprobs_T,
            prox_T=columns["prox"],
            behav_T=columns["behav"],
            credit_T=columns["credit"],
            mask_T=columns["loss_mask"],
            entropy_T=batch.entropy_T,
            row_T=batch.row_T,
            ref_T=columns.get("ref"),
            teacher_T=columns.get("teacher"),
        )
        loss = self.algorithm.compute_loss(tokens, self.options)
        components_T = dict(loss.components_T)
        weight_T, dropped_T = correction.compute_weights(
            tokens.prox_T, tokens.behav_T, tokens.mask_T, self.cap
        )
        if "rl" in components_T:
            components_T["rl"] = components_T["rl"] * weight_T
        sums = {
            "num_tokens": tokens.mask_T.sum(),
            "entropy": tokens.mask_tokens(tokens.entropy_T).sum(),
            "behave_imp_weight": tokens.mask_tokens(weight_T).sum(),
            "behave_dropped": tokens.mask_tokens(dropped_T).sum(),
            "behave_approx_kl": tokens.mask_tokens(tokens.behav_T - tokens.logprobs_T.detach()).sum(),
            **loss.sums,
        }
        if tokens.ref_T is not None:
            term_T, kl_sums = kl.compute_reference_loss(tokens, self.beta)
            components_T["ref_kl"] = components_T["ref_kl"] + term_T if "ref_kl" in components_T else term_T
            sums |= kl_sums
        loss_T = add_components(components_T, divisors)
        weights_T = columns.get("weights")
        return (loss_T if weights_T is None else loss_T * weights_T).sum(), sums


def add_components(components_T: Mapping[str, torch.Tensor], divisors: Mapping[str, float]) -> torch.Tensor:
    """Return the sum of the components, each scaled so that the divisor of `rl` fits all."""
    scaled = [
        term_T if divisors[name] == divisors["rl"] else term_T * (divisors["rl"] / divisors[name])
        for name, term_T in components_T.items()
    ]
    return torch.stack(scaled).sum(0) if len(scaled) > 1 else scaled[0]
