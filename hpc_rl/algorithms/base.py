"""What an algorithm is: pure functions of tensors and numbers. No config object, no process group.

Suffixes of names: B trajectories, T tokens (of a row, or of a packed micro-batch), P pairs, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class RewardBatch(NamedTuple):
    """The rewards of a whole train batch, one row per trajectory.

    Args:
        rewards_B: float32 [B], one scalar per trajectory.
        mask_BT: bool [B, T], true at the tokens that the model made.
        group_B: int64 [B], number of each row's group; None makes each row a group.
        lengths_B: int64 [B], tokens of each row, prompt included.
        group_size: Trajectories per prompt, as configured.
        token_rewards_BT: float32 [B, T], added as they are once the trajectory's reward is shaped and placed.
    """

    rewards_B: torch.Tensor
    mask_BT: torch.Tensor
    group_B: torch.Tensor | None = None
    lengths_B: torch.Tensor | None = None
    group_size: int = 1
    token_rewards_BT: torch.Tensor | None = None


class TokenBatch(NamedTuple):
    """The T tokens of a micro-batch of whole rows.

    Args:
        logprobs_T: float32 [T], of the current policy, with gradient.
        prox_T: float32 [T], of the proximal policy, around which the ratio is clipped.
        behav_T: float32 [T], of the behaviour policy that sampled the tokens.
        advantages_T: float32 [T].
        mask_T: bool [T], true at the tokens that are trained on.
        entropy_T: float32 [T], without gradient.
        row_T: int64 [T], the row of each token.
        ref_T: float32 [T], of the reference model; None without a KL loss.
        weights_T: float32 [T], weight of each token in the loss; None weighs all alike.
    """

    logprobs_T: torch.Tensor
    prox_T: torch.Tensor
    behav_T: torch.Tensor
    advantages_T: torch.Tensor
    mask_T: torch.Tensor
    entropy_T: torch.Tensor
    row_T: torch.Tensor | None = None
    ref_T: torch.Tensor | None = None
    weights_T: torch.Tensor | None = None


@dataclass(frozen=True)
class Algorithm:
    """One row of ALGORITHMS.

    Args:
        advantages: RewardBatch and the numbers of the configuration -> float32 [B, T], 0 outside of the mask.
        policy_loss: TokenBatch and numbers -> (sum of the token losses, sums to report).
        overlong_penalty: (lengths, max_new_tokens, overlong_tokens, factor) -> what is added to the rewards.
        informative_rows: (rewards, group_B, group_size) -> the rows that dynamic sampling keeps.
        drops_groups_first: Dynamic sampling comes before the normalization.
        zeroes_truncated: A truncated trajectory is trained on with reward 0; otherwise it is left out of the
            loss.
        zero_reference: A missing reference model has log-probability 0 in the KL rewards.
        recomputes_at_temperature: Recomputed log-probabilities are those at the sampling temperature, not at
            1.
    """

    advantages: Callable[..., torch.Tensor]
    policy_loss: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
    overlong_penalty: Callable[[torch.Tensor, int, int, float], torch.Tensor]
    informative_rows: Callable[[torch.Tensor, torch.Tensor, int], list[int]]
    drops_groups_first: bool = True
    zeroes_truncated: bool = False
    zero_reference: bool = False
    recomputes_at_temperature: bool = True
