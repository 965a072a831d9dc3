"""The definition of an algorithm: pure functions of tensors and numbers. No config object, no process group.

Suffixes of names: B trajectories, T tokens (of a row, or of a packed micro-batch), P pairs, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class RewardBatch(NamedTuple):
    """The rewards of a whole train batch, one row per trajectory."""

    rewards_B: torch.Tensor  # float32, one scalar per trajectory
    mask_BT: torch.Tensor  # bool, true at the tokens that the model generated
    group_B: torch.Tensor | None = None  # int64, number of each row's group; None makes each row a group
    lengths_B: torch.Tensor | None = None  # int64, tokens of each row, prompt included
    group_size: int = 1  # trajectories per prompt, as configured
    mixed_sizes: bool = False  # environments sent groups of other sizes
    # float32, added unchanged after the trajectory's reward is shaped and placed
    token_rewards_BT: torch.Tensor | None = None


class TokenBatch(NamedTuple):
    """The T tokens of a micro-batch of whole rows; float32 except mask and row."""

    logprobs_T: torch.Tensor  # of the current policy, with gradient
    prox_T: torch.Tensor  # of the proximal policy, around which the ratio is clipped
    behav_T: torch.Tensor  # of the behaviour policy that sampled the tokens
    advantages_T: torch.Tensor
    mask_T: torch.Tensor  # bool, true at the trained tokens
    entropy_T: torch.Tensor  # without gradient
    row_T: torch.Tensor | None = None  # int64, the row of each token
    ref_T: torch.Tensor | None = None  # log-probabilities of the reference model; None without a KL loss
    weights_T: torch.Tensor | None = None  # weight of each token in the loss; None for equal weights


@dataclass(frozen=True)
class Algorithm:
    """One row of ALGORITHMS."""

    # RewardBatch and the numbers of the configuration -> float32 [B, T], 0 outside of the mask
    advantages: Callable[..., torch.Tensor]
    # TokenBatch and numbers -> (sum of the token losses, sums to report)
    policy_loss: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
    # (lengths, max_new_tokens, overlong_tokens, factor) -> penalty to add to the rewards
    overlong_penalty: Callable[[torch.Tensor, int, int, float], torch.Tensor]
    # (rewards, group_B, group_size) -> the rows that dynamic sampling keeps
    informative_rows: Callable[[torch.Tensor, torch.Tensor, int], list[int]]
    drops_groups_first: bool = True  # dynamic sampling comes before the normalization
    # dynamic sampling compares the original rewards, without the overlong penalty
    compares_given_rewards: bool = True
    # truncated trajectories get reward 0; otherwise they are left out of the loss
    zeroes_truncated: bool = False
    zero_reference: bool = False  # a missing reference model has log-probability 0 in the KL rewards
    # log-probabilities are recomputed at the sampling temperature, not at 1
    recomputes_at_temperature: bool = True
