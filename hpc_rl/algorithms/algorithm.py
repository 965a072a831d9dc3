"""The definition of an algorithm: pure functions of batches and of its options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpc_rl.algorithms import kl, rewards
from hpc_rl.algorithms.token_batch import Loss, Options, RewardBatch, TokenBatch


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The functions of an algorithm in the order in which a step calls them; `Any` is its options.

    Most algorithms define `compute_credit` and `compute_loss` only. Except for the last function, all get
    the whole train batch, before rows are divided among ranks.
    """

    options: type[Options] = Options
    needs: frozenset[str] = frozenset()  # sections of the configuration whose models it uses, as `critic`
    # lengths of the completions -> penalties to add to the rewards, float32 [B]
    penalize_lengths: Callable[[RewardBatch, Any], torch.Tensor] = rewards.penalize_lengths
    # -> the rows that count: the others have no credit, and leave every baseline
    select_groups: Callable[[RewardBatch, Any], list[int]] = rewards.select_informative_rows
    # (behaviour, reference or None, mask, options) -> rewards of tokens, float32 [B, T]
    compute_kl_rewards: Callable[..., torch.Tensor] = kl.compute_kl_rewards
    compute_credit: Callable[[RewardBatch, Any], torch.Tensor]  # -> float32 [B, T], 0 outside of the mask
    # -> the rows with a loss: the others stay in the baselines
    select_rows: Callable[[RewardBatch, Any], list[int]] = rewards.select_finished_rows
    # log proximal / behaviour of all trained tokens -> which of them stay, bool [N]; None: all
    select_tokens: Callable[[torch.Tensor, Any], torch.Tensor] | None = None
    # the temperature at which log-probabilities are recomputed; None means the one of sampling
    logprob_temperature: float | None = None
    compute_loss: Callable[[TokenBatch, Any], Loss]
