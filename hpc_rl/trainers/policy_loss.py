"""The loss of a micro-batch: the components of the algorithm, corrected, weighed and added."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hpc_rl.algorithms import kl
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.correction import Correction, interpolate_proximal
from hpc_rl.algorithms.token_batch import TokenBatch
from hpc_rl.engines.base import MicroBatch
from hpc_rl.trainers import algorithm_checks
from hpc_rl.trainers.algorithm_checks import OutputChecks
from hpc_rl.trainers.mismatch import LargestValue, measure_mismatch

COMPONENTS = (*algorithm_checks.COMPONENTS, "entropy")
MEANS_OVER_TOKENS = (  # sums over tokens that are reported as means
    "entropy",
    "clip_ratio",
    "dual_clip_ratio",
    "importance_weight",
    "behave_imp_weight",
    "behave_approx_kl",
    "kl_loss",
    "teacher_kl",
    "teacher_forward_kl",
    "loglinear_error",
)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss function of an algorithm with its options, for any mini-batch."""

    algorithm: Algorithm
    options: Any  # of the algorithm
    correction: Correction = field(default_factory=Correction)
    beta: float = 0.0  # coefficient of the divergence from the reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coeff: float = 0.0
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = "recompute"
    largest_log_w: LargestValue = field(default_factory=LargestValue)
    checks: OutputChecks = field(default_factory=OutputChecks)

    def compute(
        self, divisors: Mapping[str, float], measures: bool, batch: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the token losses and sums to report.

        `divisors` has the divisor of each component, counted over the whole mini-batch. The engine divides
        the result by the one of `rl`. `measures`: report how much the servers' probabilities differ. Raises
        ConfigError if the algorithm returns no loss of these tokens.
        """
        columns, mask_T = batch.columns_T, batch.columns_T["loss_mask"]
        current_T = batch.logprobs_T.detach()
        # without columns the proximal policy is the current one, and sampled the tokens unless decoupled
        prox_T = columns.get("prox", current_T)
        behav_T, sums = columns.get("behav", prox_T), {}
        if self.prox_logp_method != "recompute":
            line_T = interpolate_proximal(current_T, behav_T, columns["version_share"])
            if self.prox_logp_method == "loglinear":
                prox_T = line_T
            else:
                error_T = torch.where(mask_T, line_T - prox_T, torch.zeros_like(prox_T))
                sums["loglinear_error"] = error_T.abs().sum()
        tokens = TokenBatch(
            logprobs_T=batch.logprobs_T,
            prox_T=prox_T,
            behav_T=behav_T,
            credit_T=columns["credit"],
            mask_T=mask_T,
            entropy_T=batch.entropy_T,
            row_T=batch.row_T,
            ref_T=columns.get("ref"),
            teacher_T=columns.get("teacher"),
            teacher_top_TK=columns.get("top_teacher"),
            policy_top_TK=batch.top_logprobs_TK,
            set_T=columns["data_set"].long() if "data_set" in columns else None,
        )
        loss = self.checks.check_loss(self.algorithm.compute_loss(tokens, self.options), tokens)
        components_T = dict(loss.components_T)
        weight_T, excluded_T = self.correction.compute_weights(prox_T - behav_T, mask_T, batch.row_T)
        if "kept_mask" in columns:
            excluded_T = mask_T & ~columns["kept_mask"]
            weight_T = weight_T.masked_fill(excluded_T, 0.0)
        if "rl" in components_T:
            components_T["rl"] = components_T["rl"] * weight_T
            if "kept_scale" in columns:
                components_T["rl"] = components_T["rl"] * columns["kept_scale"]
        sums |= {
            "num_tokens": mask_T.sum(),
            "entropy": tokens.mask_tokens(batch.entropy_T.detach()).sum(),
            "behave_imp_weight": tokens.mask_tokens(weight_T).sum(),
            "behave_dropped": tokens.mask_tokens(excluded_T).sum(),
            "behave_approx_kl": tokens.mask_tokens(behav_T - current_T).sum(),
            **loss.sums,
        }
        if measures and "rl" in components_T:  # else other models sampled the tokens
            known_T = columns.get("recomputed", current_T)
            log_weight_T = tokens.mask_tokens(known_T - columns.get("sampled", behav_T))
            self.largest_log_w.see(log_weight_T)
            sums |= measure_mismatch(log_weight_T, mask_T, columns["fresh_mask"])
        if tokens.ref_T is not None:
            term_T, kl_sums = kl.compute_reference_loss(tokens, self.beta, self.kl_estimator)
            components_T["ref_kl"] = components_T["ref_kl"] + term_T if "ref_kl" in components_T else term_T
            sums |= kl_sums
        if self.entropy_coeff:
            components_T["entropy"] = -self.entropy_coeff * tokens.mask_tokens(batch.entropy_T)
        loss_T = add_components(components_T, divisors)
        weights_T = columns.get("weights")
        return (loss_T if weights_T is None else loss_T * weights_T).sum(), sums


def add_components(components_T: Mapping[str, torch.Tensor], divisors: Mapping[str, float]) -> torch.Tensor:
    """Return the sum of the components, each scaled so that the divisor of `rl` fits all."""
    scaled = [
        term_T if divisors[name] == divisors["rl"] else term_T * (divisors["rl"] / divisors[name])
        for name, term_T in components_T.items()
    ]
    return sum(scaled[1:], scaled[0])
