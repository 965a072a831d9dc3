"""GRPO: what one step is made of. The batch comes from the rollout role, the weights go to the generation servers.

Everything that looks at the whole batch (shaping, advantages, the cut into mini-batches, loss weights) is computed on every
rank from the whole batch, before rows are shared out: nothing depends on the number of ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hpc_rl.algorithms import areal, grpo, kl
from hpc_rl.algorithms.advantages import overlong_penalty, uninformative_groups
from hpc_rl.algorithms.normalization import Levels
from hpc_rl.config.sections.experiment import GRPOConfig, total_steps
from hpc_rl.config.sections.training import NormConfig, PPOActorConfig
from hpc_rl.engines.base import Engine, MicroBatch, Sequences
from hpc_rl.engines.packing import balance
from hpc_rl.errors import DataUnusable
from hpc_rl.rollout.batch_client import RolloutClient
from hpc_rl.trainers import evaluate
from hpc_rl.trainers.run import Run
from hpc_rl.types import Batch, Trajectory, decode
from hpc_rl.weights import disk
from hpc_rl.weights.publish import Publisher

logger = logging.getLogger(__name__)
MAX_STEPS_WITHOUT_UPDATE = 20  # in a row; with float16 also as many as the loss scale may need to come down
ROUND_S = 10.0  # a rank that waits for another must not wait as long as a collective may last


class GRPO:
    """The recipe of a GRPO trial.

    Args:
        run: This incarnation.
        rollout: The rollout role.
        publisher: The generation servers; rank 0 only.
        num_prompts: Prompts of one epoch.
        reference: The frozen model of the KL terms; None where there are none.
    """

    def __init__(
        self,
        run: Run,
        rollout: RolloutClient,
        publisher: Publisher | None,
        num_prompts: int,
        reference: Engine | None = None,
    ) -> None:
        assert isinstance(run.config, GRPOConfig)
        self.run, self.rollout, self.publisher, self.num_prompts = run, rollout, publisher, num_prompts
        self.reference = reference
        self.config = run.config
        self.actor = run.config.actor
        self.total_steps = total_steps(run.config, num_prompts)
        temperature = (
            self.actor.temperature if self.actor.temperature is not None else self.config.gconfig.temperature
        )
        self.temperature = temperature or 1.0  # greedy: log-probabilities are those of the plain distribution
        self.group_size = self.actor.group_size or self.config.gconfig.n_samples
        self._frontier: dict[str, int] = {}
        self._told: set[str] = set()  # keys of agent stats that were missing
        self._steps_without_update = 0  # in a row
        self.areal = self.actor.compat == "areal"
        self.has_kl_rewards = self.actor.kl_ctl > 0 and (reference is not None or self.areal)

    def batch(self, step: int) -> Batch | None:
        """Rank 0 fetches it for all, in rounds: the others hear now and then that it is not there yet, or are told to stop."""
        run = self.run

        def fetch() -> bytes | None:
            try:
                return self.rollout.batch_bytes(step, run.lineage, run.stopping, within_s=ROUND_S)
            except TimeoutError:
                return b""

        while True:
            body = run.ranks.bytes_from_rank0(fetch)
            if body:
                batch: Batch = decode(body)
                newest = max((group.index for group in batch.groups), default=-1)
                self._frontier = {"sealed": step, "newest_prompt": newest}
                return batch
            if run.any_rank(body is None or run.stopping.is_set()):
                return None

    def update(self, step: int, batch: Batch) -> None:
        rows = [trajectory for group in batch.groups for trajectory in group.trajectories]
        sizes = torch.tensor([len(group.trajectories) for group in batch.groups])
        group_B = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self._describe(step, rows)
        rows, rewards_B, group_B = self._drop_uninformative(rows, self._rewards(rows), group_B)
        minibatches: list[Minibatch] = []
        known, advantages = None, []
        if rows:
            known = self._logprobs_of_all(rows) if self.has_kl_rewards else None
            advantages = self._advantages(rows, rewards_B, group_B, known)
            minibatches = self._minibatches(rows, advantages, rewards_B)
        num_successful = 0
        mine = [minibatch.rows[self.run.ranks.rank] for minibatch in minibatches]
        known = known or self._logprobs(rows, [row for part in mine for row in part])
        for minibatch, part in zip(minibatches, mine, strict=True):
            sequences = self._sequences(rows, advantages, known, part)
            sums = self.run.engine.train_batch(sequences, self._loss, minibatch.loss_weight, self.temperature)
            self._report(sums, minibatch)
            num_successful += int(sums["update_successful"])
        self._pass_updates(len(minibatches))
        self._check_progress(step, num_successful, len(minibatches))

    def publish(self, step: int) -> None:
        version = self.run.version(step)
        trial = self.run.trial
        first = self.run.ranks.rank == 0
        folder, begin, finish = (
            trial.published(str(version)),
            partial(disk.begin, trial, version),
            partial(disk.finish, trial, version),
        )
        if not self.run.writer.write(f"weights {version}", folder, begin, finish, durable=False):
            return  # told to stop while there was no room: whoever goes on publishes first of all
        if first and self.publisher is not None:
            result = self.publisher.publish(version, folder, self.run.stopping)
            self.run.stats.value("publish_servers", len(result.acknowledged))
            if step == self.run.step:
                logger.info(
                    "start: weights %s are published to %d servers", version, len(result.acknowledged)
                )

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        return evaluate.held_out_reward(self.run, self.rollout, step)

    def position(self, step: int) -> tuple[int, int]:
        return divmod(step * self.config.train_dataset.batch_size, self.num_prompts)

    def frontier(self, step: int) -> dict[str, int]:
        """The newest batch that went into the state, and the largest prompt index in it."""
        return self._frontier if self._frontier.get("sealed") == step else {"sealed": step}

    def retain(self, step: int) -> None:
        self.rollout.retain(step)

    def _rewards(self, rows: list[Trajectory]) -> torch.Tensor:
        rewards_B = torch.tensor([row.reward for row in rows], dtype=torch.float32)
        if not self.actor.overlong_reward_penalty:
            return rewards_B
        assert (
            self.actor.overlong_tokens is not None and self.actor.overlong_penalty_factor is not None
        )  # check.py says so
        lengths_B = torch.tensor([int(row.loss_mask.sum()) for row in rows])
        how = (
            self.config.gconfig.max_new_tokens,
            self.actor.overlong_tokens,
            self.actor.overlong_penalty_factor,
        )
        penalty_B = (areal.overlong_penalty if self.areal else overlong_penalty)(lengths_B, *how)
        self.run.stats.mean("overlong_penalty", float(penalty_B.sum()), len(rows))
        return rewards_B + penalty_B

    def _drop_uninformative(
        self, rows: list[Trajectory], rewards_B: torch.Tensor, group_B: torch.Tensor
    ) -> tuple[list[Trajectory], torch.Tensor, torch.Tensor]:
        """Dynamic sampling; AReaL's own comes after the normalization, see _minibatches."""
        if self.areal or not self.actor.dynamic_sampling:
            return rows, rewards_B, group_B
        dropped = set(uninformative_groups(rewards_B, group_B))
        self.run.stats.add("groups_dropped", len(dropped))
        kept = [i for i, group in enumerate(group_B.tolist()) if group not in dropped]
        return [rows[i] for i in kept], rewards_B[kept], group_B[kept]

    def _advantages(
        self,
        rows: list[Trajectory],
        rewards_B: torch.Tensor,
        group_B: torch.Tensor,
        known: Known | None,
    ) -> list[np.ndarray]:
        """float32 [L] per row, of the whole batch."""
        mask_BT = rectangle([row.loss_mask for row in rows])
        options: dict[str, Any] = {
            "reward_bias": self.actor.reward_bias,
            "reward_scaling": self.actor.reward_scaling,
            "reward_clip": self.actor.reward_clip,
            "reward_norm": levels(self.actor.reward_norm),
            "adv_norm": levels(self.actor.adv_norm),
            "discount": self.actor.discount,
            "gae_lambda": self.actor.gae_lambda,
            "token_rewards_BT": self._kl_rewards(rows, mask_BT, known),
        }
        if self.areal:
            lengths_B = torch.tensor([len(row.ids) for row in rows])
            zero = self.actor.mask_no_eos_with_zero
            advantages_BT = areal.advantages(
                rewards_B,
                mask_BT,
                lengths_B,
                group_size=self.group_size,
                mask_no_eos_with_zero=zero,
                **options,
            )
        else:
            advantages_BT = grpo.advantages(rewards_B, mask_BT, group_B=group_B, **options)
        return [advantages_BT[i, : len(row.ids)].numpy() for i, row in enumerate(rows)]

    def _minibatches(
        self, rows: list[Trajectory], advantages: list[np.ndarray], rewards_B: torch.Tensor
    ) -> list[Minibatch]:
        """The rows that are trained on, cut and shared out."""
        members = list(range(len(rows)))
        if self.areal and self.actor.dynamic_sampling:
            members = areal.useful_rows(rewards_B, self.group_size)
            self.run.stats.add("groups_dropped", (len(rows) - len(members)) // self.group_size)
        if self.actor.mask_no_eos_with_zero and not self.areal:
            members = [i for i in members if rows[i].finish_reason != "length"]
            self.run.stats.add("rows_masked", len(rows) - len(members))
        how = Cut(
            num_minibatches=self.actor.ppo_n_minibatches,
            num_ranks=self.run.ranks.num,
            keep_all=self.reference is not None and self.actor.beta > 0,
            weight_by_row=self.actor.loss_aggregation != "token_mean",
        )
        return shares(rows, advantages, members, how)

    def _pass_updates(self, done: int) -> None:
        """The schedule counts the updates of a whole batch, also where dynamic sampling or the mask left fewer rows, or none."""
        missing = updates_per_step(self.config) - done
        if missing > 0:
            self.run.engine.pass_updates(missing)
        if not done:
            self.run.stats.mean("update_successful", 0.0, 1)
            logger.warning("no update in this step: no row is left to train on")

    def _check_progress(self, step: int, num_successful: int, num_tried: int) -> None:
        """Raise DataUnusable after too many steps in a row in which the weights did not change."""
        self._steps_without_update = 0 if num_successful else self._steps_without_update + 1
        if self._steps_without_update < max_steps_without_update(self.actor):
            return
        why = "the loss or its gradient was not finite" if num_tried else "no row was left to train on"
        raise DataUnusable(
            f"{self._steps_without_update} steps in a row made no optimizer update, the last one step {step}: {why}"
        )

    def _kl_rewards(
        self, rows: list[Trajectory], mask_BT: torch.Tensor, known: Known | None
    ) -> torch.Tensor | None:
        if known is None or not self.has_kl_rewards:
            return None
        behav = [self._prox_and_behav(rows, known, i)[1] for i in range(len(rows))]
        none = np.zeros(1, np.float32)  # AReaL's idea of a reference model that is not there
        reference = [none if known.reference is None else known.reference[i] for i in range(len(rows))]
        rewards_BT = kl.kl_rewards(rectangle(behav), rectangle(reference), mask_BT, self.actor.kl_ctl)
        self.run.stats.mean("kl_rewards", float(rewards_BT.sum(dtype=torch.float64)), int(mask_BT.sum()))
        return rewards_BT

    def _logprobs_of_all(self, rows: list[Trajectory]) -> Known:
        """For all rows on every rank, each rank having made a share: the rewards of the whole batch want them."""
        lengths = [len(row.ids) for row in rows]
        ranks = self.run.ranks
        mine = self._logprobs(rows, balance(lengths, ranks.num)[ranks.rank])
        return Known(
            *(
                None if part is None else ranks.whole(part, lengths)
                for part in (mine.recomputed, mine.reference)
            )
        )

    def _logprobs(self, rows: list[Trajectory], mine: Iterable[int]) -> Known:
        """Of these rows, under the weights at the start of the step and under the reference model, where they are wanted."""
        numbers = list(mine)
        if not rows:
            return Known(None, None)
        sequences = Sequences(
            [rows[i].ids for i in numbers], {"loss_mask": [rows[i].loss_mask for i in numbers]}
        )
        temperature = 1.0 if self.areal else self.temperature
        recompute = self.actor.recompute_logprob or self.actor.use_decoupled_loss
        made = [
            None
            if engine is None
            else dict(zip(numbers, engine.logprobs(sequences, temperature), strict=True))
            for engine in (self.run.engine if recompute else None, self.reference)
        ]
        return Known(*made)

    def _prox_and_behav(self, rows: list[Trajectory], known: Known, i: int) -> tuple[np.ndarray, np.ndarray]:
        again = None if known.recomputed is None else known.recomputed[i]
        return grpo.reference_logprobs(rows[i].logprobs, again, self.actor.use_decoupled_loss)

    def _sequences(
        self, rows: list[Trajectory], advantages: list[np.ndarray], known: Known, part: list[int]
    ) -> Sequences:
        pairs = [self._prox_and_behav(rows, known, i) for i in part]
        columns = {
            "loss_mask": [rows[i].loss_mask for i in part],
            "advantages": [advantages[i] for i in part],
            "prox": [prox for prox, _ in pairs],
            "behav": [behav for _, behav in pairs],
        }
        if known.reference is not None and self.actor.beta:
            columns["ref"] = [known.reference[i] for i in part]
        if self.actor.loss_aggregation != "token_mean":
            how = (self.actor.loss_aggregation, self.config.gconfig.max_new_tokens)
            weights = [grpo.token_weights(int(rows[i].loss_mask.sum()), *how) for i in part]
            columns["weights"] = [
                np.full(len(rows[i].ids), w, np.float32) for i, w in zip(part, weights, strict=True)
            ]
        return Sequences([rows[i].ids for i in part], columns)

    def _loss(self, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        columns = batch.columns_T
        return grpo.policy_loss(
            batch.logprobs_T,
            columns["prox"],
            columns["behav"],
            columns["advantages"],
            columns["loss_mask"],
            batch.entropy_T,
            eps_clip=self.actor.eps_clip,
            eps_clip_higher=self.actor.eps_clip_higher,
            c_clip=self.actor.c_clip,
            behav_imp_weight_cap=self.actor.behav_imp_weight_cap,
            ref_T=columns.get("ref"),
            beta=self.actor.beta,
            weights_T=columns.get("weights"),
        )

    def _report(self, sums: dict[str, float], minibatch: Minibatch) -> None:
        """Means over tokens (entropy, ratios) are over the rows that were computed; the loss is over all."""
        stats = self.run.stats
        tokens = sums.get("num_tokens", 0.0)
        for name in (
            "entropy",
            "clip_ratio",
            "dual_clip_ratio",
            "importance_weight",
            "behave_imp_weight",
            "behave_approx_kl",
        ):
            stats.mean(name, sums.get(name, 0.0), tokens)
        if "kl_loss" in sums:
            stats.mean("kl_loss", sums["kl_loss"], tokens)
        stats.mean("loss", sums["loss"] * minibatch.loss_weight, minibatch.loss_weight)
        stats.mean("grad_norm", sums["grad_norm"], 1)
        stats.mean("update_successful", sums["update_successful"], 1)
        stats.value("lr", sums["lr"])
        stats.add("rows_skipped", minibatch.num_skipped)
        stats.add("behave_dropped", sums.get("behave_dropped", 0.0))

    def _describe(self, step: int, rows: list[Trajectory]) -> None:
        stats = self.run.stats
        staleness = [max(0, step - 1 - row.oldest_step()) for row in rows]
        for row, age in zip(rows, staleness, strict=True):
            stats.mean("reward", row.reward, 1)
            stats.mean("seq_len", len(row.ids), 1)
            stats.mean("truncated", float(row.finish_reason == "length"), 1)
            stats.mean("staleness_mean", age, 1)
            for name in self.actor.log_agent_stats_keys:
                if name in row.stats:
                    stats.mean(f"agent/{name}", row.stats[name], 1)
        self._warn_of_missing_agent_stats(rows)
        stats.value("staleness_max", max(staleness, default=0))
        stats.value("older_lineage", sum(self._is_of_older_lineage(row) for row in rows))
        stats.value("num_tokens", sum(len(row.ids) for row in rows))

    def _is_of_older_lineage(self, row: Trajectory) -> bool:
        """Whether a start before this one made tokens of it; their age counts by their step all the same."""
        return bool(row.loss_mask.any()) and int(row.lineages[row.loss_mask].min()) < self.run.lineage

    def _warn_of_missing_agent_stats(self, rows: list[Trajectory]) -> None:
        wanted = set(self.actor.log_agent_stats_keys) - self._told
        missing = sorted(name for name in wanted if not any(name in row.stats for row in rows))
        if missing:
            self._told |= set(missing)
            there = ", ".join(sorted({name for row in rows for name in row.stats})) or "none"
            logger.warning(
                "actor.log_agent_stats_keys: no trajectory has %s; the workflow gives: %s",
                ", ".join(missing),
                there,
            )


def num_updates(config: GRPOConfig, num_prompts: int) -> int:
    """Optimizer updates of the whole trial: what the learning-rate schedule runs over."""
    return total_steps(config, num_prompts) * updates_per_step(config)


def place_schedule(engine: Engine, step: int, config: GRPOConfig) -> None:
    """Put the learning-rate schedule where `step` lies now: it counts updates, and `ppo_n_minibatches` may have changed since."""
    engine.pass_updates(step * updates_per_step(config) - engine.counters()["updates"])


def max_steps_without_update(actor: PPOActorConfig) -> int:
    """Return after how many steps in a row without an optimizer update the trial ends."""
    scale = actor.optimizer if actor.dtype == "float16" else None
    if scale is None:
        return MAX_STEPS_WITHOUT_UPDATE
    halvings = math.ceil(math.log2(scale.initial_loss_scale / scale.min_loss_scale))
    return MAX_STEPS_WITHOUT_UPDATE + halvings + scale.hysteresis


def updates_per_step(config: GRPOConfig) -> int:
    return min(config.actor.ppo_n_minibatches, config.train_dataset.batch_size * config.gconfig.n_samples)


@dataclass(frozen=True)
class Known:
    """Log-probabilities that were made before the update, float32 [L] by row number; None where nobody wants them."""

    recomputed: dict[int, np.ndarray] | None
    reference: dict[int, np.ndarray] | None


@dataclass(frozen=True)
class Minibatch:
    """One optimizer update: rows[rank] are row numbers of the batch; the loss weight counts the tokens of all its rows."""

    rows: list[list[int]]
    loss_weight: float
    num_skipped: int


def is_useful(advantages: np.ndarray) -> bool:
    """Whether a row can change the weights."""
    return bool(advantages.any())


@dataclass(frozen=True)
class Cut:
    """How `shares` cuts. keep_all: the loss has a term besides the advantages, so every row is computed."""

    num_minibatches: int
    num_ranks: int
    keep_all: bool = False
    weight_by_row: bool = False


def shares(
    rows: list[Trajectory], advantages: list[np.ndarray], members: list[int], how: Cut
) -> list[Minibatch]:
    """Cut the `members` among the rows into mini-batches, then each over the ranks, both by length.

    A row whose advantages are all exactly 0 adds exactly nothing to the loss and the gradient: it is not computed. It
    still counts in the loss weight. Where that is true of all rows one stays, for the update happens (with gradient 0).
    """
    lengths = [len(row.ids) for row in rows]
    result = []
    for places in filter(None, balance([lengths[i] for i in members], how.num_minibatches)):
        part = [members[place] for place in places]
        weight = len(part) if how.weight_by_row else sum(int(rows[i].loss_mask.sum()) for i in part)
        useful = [i for i in part if how.keep_all or is_useful(advantages[i])] or [
            min(part, key=lambda i: lengths[i])
        ]
        per_rank = [
            [useful[j] for j in share] for share in balance([lengths[i] for i in useful], how.num_ranks)
        ]
        result.append(Minibatch(per_rank, float(max(1, weight)), len(part) - len(useful)))
    return result


def rectangle(rows: list[np.ndarray]) -> torch.Tensor:
    """Ragged rows as one tensor [B, T], filled up with 0 (false) on the right."""
    out_BT = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for i, row in enumerate(rows):
        out_BT[i, : len(row)] = row
    return torch.from_numpy(out_BT)


def levels(norm: NormConfig | None) -> Levels | None:
    """The section as the algorithms take it."""
    if norm is None:
        return None
    return Levels(norm.mean_level, norm.std_level, norm.eps, norm.mean_leave1out, norm.std_unbiased)
