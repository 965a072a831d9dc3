"""The data of algorithms: pure values of tensors and numbers. No config object, no process group.

Suffixes of names: B trajectories, T tokens (of a row, or of a packed micro-batch), P pairs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hpc_rl.algorithms.normalization import Levels


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that every algorithm has: options of section `actor` with the same names.

    An algorithm extends this class with its own. A field that section `actor` lacks is read from
    `actor.algorithm_args`.
    """

    reward_bias: float = 0.0
    reward_scaling: float = 1.0
    reward_clip: float = 20.0
    reward_norm: Levels | None = None
    adv_norm: Levels | None = None
    discount: float = 1.0
    gae_lambda: float = 1.0
    kl_ctl: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    length_penalty: float = 0.0
    overlong_reward_penalty: bool = False
    overlong_tokens: int | None = None
    overlong_penalty_factor: float | None = None
    max_new_tokens: int = 0
    dynamic_sampling: bool = False
    mask_no_eos_with_zero: bool = False


@dataclass(frozen=True)
class RowMasks:
    """The masks of ragged rows, bool [L] each; a rectangle of them is made when it is read, and not kept."""

    rows: Sequence[np.ndarray]

    def __getitem__(self, rows_N: torch.Tensor) -> RowMasks:
        return RowMasks([self.rows[i] for i in rows_N.tolist()])

    def pad(self) -> torch.Tensor:
        """Return a new bool [B, T], false behind the end of a row."""
        if not self.rows:
            return torch.zeros(0, 0, dtype=torch.bool)
        return pad_sequence([torch.from_numpy(row) for row in self.rows], batch_first=True)


class RewardBatch(NamedTuple):
    """The rewards of a whole train batch, one row per trajectory."""

    rewards_B: torch.Tensor  # float32, one scalar per trajectory, with the length penalties
    masks: torch.Tensor | RowMasks  # bool [B, T], true at the tokens that the model generated; see mask_BT
    group_B: torch.Tensor | None = None  # int64, number of each row's group; None makes each row a group
    given_B: torch.Tensor | None = None  # float32, rewards without the length penalties
    truncated_B: torch.Tensor | None = None  # bool, whether the completion reached its token limit
    lengths_B: torch.Tensor | None = None  # int64, tokens of each row, prompt included
    share_B: torch.Tensor | None = None  # float32, weight of each row in means of rewards; None means 1 each
    group_size: int = 1  # trajectories per prompt, as configured
    mixed_sizes: bool = False  # environments or agents made groups of other sizes
    # float32, added unchanged after the trajectory's reward is shaped and placed
    token_rewards_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None  # float32, estimates of a critic: of the return from this token on
    logprobs_BT: torch.Tensor | None = None  # float32, of the policy at the start of the step
    teacher_BT: torch.Tensor | None = None  # float32, log-probabilities of a teacher
    set_B: torch.Tensor | None = None  # int64, number of each row's data set, if these have own algorithms

    @property
    def mask_BT(self) -> torch.Tensor:
        """The tokens that the model generated, bool."""
        return self.masks.pad() if isinstance(self.masks, RowMasks) else self.masks

    def count_tokens(self) -> torch.Tensor:
        """Return the number of masked tokens of each row, int64 [B]."""
        rows = self.masks.rows if isinstance(self.masks, RowMasks) else self.masks.numpy()
        # a sum over the mask would first copy it to int64
        return torch.tensor([np.count_nonzero(row) for row in rows], dtype=torch.long)

    def select(self, rows_N: torch.Tensor) -> RewardBatch:
        """Return the batch of some rows, by their numbers."""
        changes: dict[str, Any] = {
            name: value[rows_N]
            for name, value in self._asdict().items()
            if isinstance(value, torch.Tensor | RowMasks)
        }
        return self._replace(**changes)

    def list_inputs(self) -> list[torch.Tensor | None]:
        """Return the inputs of credit."""
        return [self.rewards_B, self.token_rewards_BT, self.values_BT, self.teacher_BT]


class TokenBatch(NamedTuple):
    """The T tokens of a micro-batch of whole rows; float32 except masks and row."""

    logprobs_T: torch.Tensor  # of the current policy, with gradient
    prox_T: torch.Tensor  # of the proximal policy, around which the ratio is clipped
    behav_T: torch.Tensor  # of the behaviour policy that sampled the tokens
    credit_T: torch.Tensor  # from compute_credit
    mask_T: torch.Tensor  # bool, true at the trained tokens
    entropy_T: torch.Tensor  # of the current policy, with gradient
    row_T: torch.Tensor | None = None  # int64, the row of each token
    ref_T: torch.Tensor | None = None  # log-probabilities of the reference model; None without a KL loss
    teacher_T: torch.Tensor | None = None  # log-probabilities of a teacher; None without one
    # of the teacher's K likely tokens (-inf: none), the log-probabilities of teacher and current policy
    teacher_top_TK: torch.Tensor | None = None
    policy_top_TK: torch.Tensor | None = None
    set_T: torch.Tensor | None = None  # int64, number of the data set, if these have own algorithms

    def mask_tokens(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the values at the trained tokens, 0 elsewhere."""
        return torch.where(self.mask_T, values_T, torch.zeros_like(values_T))

    def average_rows(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return, at each trained token, the mean of the values at the trained tokens of its row."""
        return average_rows(values_T, self.mask_T, self.row_T)


def average_rows(values_T: torch.Tensor, mask_T: torch.Tensor, row_T: torch.Tensor | None) -> torch.Tensor:
    """Return, at each masked token, the mean of the values at the masked tokens of its row; 0 elsewhere."""
    assert row_T is not None, "a mean of rows needs the row of each token"
    masked_T = torch.where(mask_T, values_T, torch.zeros_like(values_T))
    # there are at most as many rows as tokens
    sum_R = torch.zeros_like(values_T).index_add(0, row_T, masked_T)
    count_R = torch.zeros_like(values_T).index_add(0, row_T, mask_T.to(values_T.dtype))
    mean_T = (sum_R / count_R.clamp(min=1))[row_T]
    return torch.where(mask_T, mean_T, torch.zeros_like(mean_T))


class Loss(NamedTuple):
    """The loss of each token by component, and sums over the tokens to report.

    Components: `rl` (from credit), `ce` (cross-entropy on given tokens), `ref_kl` (a divergence from another
    model). The trainer multiplies `rl` by the weight of the off-policy correction, divides each component by
    its own number of tokens in the mini-batch, and adds the components.
    """

    components_T: dict[str, torch.Tensor]  # float32, 0 outside of the mask
    sums: dict[str, torch.Tensor]
