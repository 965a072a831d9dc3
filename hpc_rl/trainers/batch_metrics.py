"""Metrics of a training batch: rewards and their parts, lengths, staleness, stats of workflows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import pstdev

import numpy as np

from hpc_rl.checkpoint.lineage import find_ancestors
from hpc_rl.config.options.experiment import GRPOConfig, TeacherConfig
from hpc_rl.core.records import load_lineages
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import AGENT_STATS, REGENERATED, Trajectory, TrajectoryGroup
from hpc_rl.stats.tracker import Tracker
from hpc_rl.trainers.minibatches import is_useful

logger = logging.getLogger(__name__)
OF_REWARD = "reward/"  # prefix of the names of a reward's parts


@dataclass(frozen=True)
class MadeTokens:
    """The tokens that the model generated, of R rows one after another."""

    count_R: np.ndarray  # int64, tokens of each row
    oldest_R: np.ndarray  # int64, the smallest step of each row's tokens, 0 without any
    lineages_N: np.ndarray  # int32

    @classmethod
    def of(cls, rows: Sequence[Trajectory]) -> MadeTokens:
        count_R = np.zeros(len(rows), np.int64)
        if not rows:
            return cls(count_R, count_R, np.zeros(0, np.int32))
        mask_N, steps_N, lineages_N = (
            np.concatenate([getattr(row, name) for row in rows])
            for name in ("loss_mask", "steps", "lineages")
        )
        row_N = np.repeat(np.arange(len(rows)), [len(row.ids) for row in rows])
        count_R = np.bincount(row_N[mask_N], minlength=len(rows))
        oldest_R = np.zeros_like(count_R)
        first_R = np.cumsum(count_R) - count_R
        has_any = count_R > 0
        if has_any.any():
            oldest_R[has_any] = np.minimum.reduceat(steps_N[mask_N], first_R[has_any])
        return cls(count_R, oldest_R, lineages_N[mask_N])

    def is_of_other_lineage(self, lineage: int) -> bool:
        """Return whether weights of another lineage made a token."""
        return bool((self.lineages_N != lineage).any())


class BatchMetrics:
    """Reports batches to a tracker. Warns once about a configured name that no trajectory has."""

    def __init__(self, config: GRPOConfig, trial: Trial) -> None:
        chosen = config.actor.log_agent_stats_keys if config.actor.log_agent_stats else []
        own = AGENT_STATS if config.rollout.workflow == "agent" else ()
        self.agent_stats = list(dict.fromkeys([*chosen, *own]))
        self._all_stats = isinstance(config, TeacherConfig)  # report all stats of the workflow `teacher`
        self._reported_missing: set[str] = set()
        self._trial = trial
        self._reward_clip = config.actor.reward_clip
        self._reported_clipped = False
        self._ancestors: tuple[int, dict[int, int]] = (0, {})  # a lineage and its ancestors

    def __call__(self, stats: Tracker, step: int, lineage: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Report the batch of a step of `lineage`."""
        rows = [row for group in groups for row in group.trajectories]
        made = MadeTokens.of(rows)
        staleness = np.maximum(0, step - 1 - made.oldest_R)
        num_tokens = sum(len(row.ids) for row in rows)
        stats.mean("reward", sum(row.share * row.reward for row in rows), sum(row.share for row in rows))
        stats.mean("seq_len", num_tokens, len(rows))
        stats.mean("completion_len", int(made.count_R.sum()), len(rows))
        stats.mean("truncated", sum(row.finish_reason == "length" for row in rows), len(rows))
        stats.mean("staleness_mean", int(staleness.sum()), len(rows))
        for row in rows:
            self._own_stats(stats, row)
        self._warn_of_missing(rows)
        stats.value("reward_std", pstdev(row.reward for row in rows) if rows else 0.0)
        alike = sum(len({row.reward for row in group.trajectories}) == 1 for group in groups)
        stats.value("groups_alike", alike)
        stats.value("staleness_max", int(staleness.max(initial=0)))
        # their age still counts by their step
        older = made.is_of_other_lineage(lineage)
        given_up = sum(self._is_given_up(row, lineage) for row in rows) if older else 0
        stats.value("given_up", given_up)
        stats.value("num_tokens", num_tokens)
        stats.value(REGENERATED, sum(row.stats.get(REGENERATED, 0.0) for row in rows))

    def report_shaping(
        self,
        stats: Tracker,
        groups: Sequence[TrajectoryGroup],
        rows: Sequence[Trajectory],
        credit: Sequence[np.ndarray],
        clipped_share: float,
    ) -> None:
        """Report the effect of shaping: groups with zero advantages, and clipped rewards.

        `credit` belongs to `rows`, float32 [L]. Rows of groups that dynamic sampling dropped are missing.
        """
        useful = {id(row) for row, one in zip(rows, credit, strict=False) if is_useful(one)}
        idle = sum(not any(id(row) in useful for row in group.trajectories) for group in groups)
        stats.value("zero_advantage_groups", idle / len(groups) if groups else 0.0)
        stats.value("reward_clipped", clipped_share)
        if clipped_share and not self._reported_clipped:
            self._reported_clipped = True
            logger.warning(
                "%.0f %% of the rewards of this batch exceed actor.reward_clip %g and are cut to it; "
                "raise actor.reward_clip, or lower actor.reward_scaling",
                100 * clipped_share,
                self._reward_clip,
            )

    def _is_given_up(self, row: Trajectory, lineage: int) -> bool:
        """Return whether some of its tokens came from weights that are not ancestors of the trained ones."""
        older = {int(one) for one in row.lineages[row.loss_mask]} - {lineage}
        if older and self._ancestors[0] != lineage:
            self._ancestors = (lineage, find_ancestors(lineage, load_lineages(self._trial)))
        return any(
            (row.steps[row.loss_mask & (row.lineages == one)] > self._ancestors[1].get(one, -1)).any()
            for one in older
        )

    def _own_stats(self, stats: Tracker, row: Trajectory) -> None:
        for name, value in row.stats.items():
            if name in self.agent_stats:
                stats.mean(f"agent/{name}", value, 1)
            # rows without a known answer have no accuracies
            if (self._all_stats and name != REGENERATED) or name.startswith(OF_REWARD):
                stats.mean(name, value, 1)

    def _warn_of_missing(self, rows: list[Trajectory]) -> None:
        wanted = set(self.agent_stats) - self._reported_missing
        missing = sorted(name for name in wanted if not any(name in row.stats for row in rows))
        if missing:
            self._reported_missing |= set(missing)
            logger.warning(
                "actor.log_agent_stats_keys names %s, but the workflow gives only: %s",
                ", ".join(missing),
                ", ".join(sorted({name for row in rows for name in row.stats})) or "none",
            )
