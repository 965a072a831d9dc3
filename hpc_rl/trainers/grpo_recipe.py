"""The recipe of RL trials: batches come from the rollout role, weights go to the generation servers.

The algorithm defines the computation of a step. Every rank computes credit, mini-batches and divisors from
the whole batch before the rows are divided among ranks, so nothing depends on the number of ranks.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from hpc_rl.algorithms.base import RewardBatch
from hpc_rl.algorithms.correction import choose_logprobs, compute_version_share
from hpc_rl.algorithms.rewards import compute_clipped_share
from hpc_rl.config.options.experiment import GRPOConfig, count_steps
from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.config.rules.training_rules import needs_recompute
from hpc_rl.config.schedule import count_updates_per_step
from hpc_rl.core.errors import DataUnusable
from hpc_rl.core.types import Batch, Trajectory, decode
from hpc_rl.engines.base import Engine, Scorer, Sequences
from hpc_rl.engines.shared.packing import balance
from hpc_rl.rollout.batch_client import RolloutClient
from hpc_rl.rollout.batch_log.ledger import FIRST_OUTSIDE
from hpc_rl.servers.wire import get_logprob_temperature, get_sampling_temperature
from hpc_rl.stats.kept_samples import SampleWriter
from hpc_rl.trainers.algorithm_options import (
    find_entropy_coefficient,
    load_algorithm,
    make_controller,
    make_correction,
)
from hpc_rl.trainers.batch_metrics import BatchMetrics
from hpc_rl.trainers.critic import Critic
from hpc_rl.trainers.minibatches import (
    Known,
    Minibatch,
    ScoredRows,
    choose_credit,
    choose_sent,
    compute_token_weight,
    divide_rows,
    make_temperature_column,
    move_rewards_to_turns,
    pad_rows,
    split_rows,
)
from hpc_rl.trainers.mismatch import PREFIX, summarize_mismatch
from hpc_rl.trainers.policy_loss import COMPONENTS, MEANS_OVER_TOKENS, PolicyLoss
from hpc_rl.trainers.run import Run
from hpc_rl.weights.transport import Transport

logger = logging.getLogger(__name__)
MAX_STEPS_WITHOUT_UPDATE = 20  # in a row; float16 adds the steps that the loss scale may need to shrink
ROUND_S = 10.0  # must be shorter than the time limit of a collective


class GRPO:
    """The recipe of GRPO and the other algorithms.

    `num_prompts` is the number of prompts in one epoch. `reference` is the frozen model of the KL terms, if
    any. `samples` keeps completions, on rank 0. `critic` is the value model of PPO.
    """

    def __init__(
        self,
        run: Run,
        rollout: RolloutClient,
        transport: Transport,
        num_prompts: int,
        reference: Scorer | None = None,
        samples: SampleWriter | None = None,
        critic: Critic | None = None,
    ) -> None:
        assert isinstance(run.config, GRPOConfig)
        self.run = run
        self.rollout = rollout
        self.transport = transport
        self.num_prompts = num_prompts
        self.reference = reference
        self.samples = samples
        self.critic = critic
        self.config = run.config
        self.actor = run.config.actor
        self.algorithm, self.options = load_algorithm(run.config)
        self.loss = PolicyLoss(
            self.algorithm,
            self.options,
            make_correction(self.actor),
            self.actor.beta,
            self.actor.kl_loss_estimator,
            find_entropy_coefficient(self.actor),
            self.actor.prox_logp_method,
        )
        self.controller = make_controller(self.actor)
        if self.controller is not None and "entropy_coeff" in run.adapted:
            self.loss = replace(self.loss, entropy_coeff=run.adapted["entropy_coeff"])
        self.total_steps = count_steps(run.config, num_prompts)
        self.temperature = get_logprob_temperature(get_sampling_temperature(self.config.gconfig))
        correction = self.actor.rollout_correction
        self.is_decoupled = self.actor.use_decoupled_loss or correction is not None
        self.recomputes = self.actor.recompute_logprob or needs_recompute(self.actor)
        self.has_kl_rewards = self.actor.kl_ctl > 0
        self.has_teacher = "distillation" in self.algorithm.needs
        # tokens may leave the loss, so their number must be known before rows are divided among ranks
        self.excludes_tokens = self.algorithm.select_tokens is not None or (
            correction is not None and correction.mode != "truncate"
        )
        self._frontier: dict[str, int] = {}
        self._describe = BatchMetrics(run.config, run.trial)
        self._steps_without_update = 0  # in a row
        self._has_published = False

    def batch(self, step: int) -> Batch | None:
        """Return the batch, or None after a stop. Collective.

        Rank 0 fetches it in rounds, so that other ranks learn about a delay or a stop.
        """
        run = self.run

        def fetch() -> bytes | None:
            try:
                return self.rollout.batch_bytes(step, run.lineage, run.stopping, within_s=ROUND_S)
            except TimeoutError:
                return b""

        while True:
            self._settle(wait=False)
            body = run.ranks.bytes_from_rank0(fetch)
            if body:
                batch: Batch = decode(body)
                own = (group.index for group in batch.groups if group.index < FIRST_OUTSIDE)
                newest = max(own, default=-1)
                self._frontier = {"sealed": step, "newest_prompt": newest}
                return batch
            if run.ranks.any(body is None or run.stopping.is_set()):
                return None

    def update(self, step: int, batch: Batch) -> None:
        """Train on a batch. Raises DataUnusable after too many steps in a row without an optimizer update."""
        scored = self._score(step, batch)
        actor = self.actor
        clipped = compute_clipped_share(
            scored.rewards_B, actor.reward_bias, actor.reward_scaling, actor.reward_clip
        )
        scored = self._select_groups(scored)
        rows = scored.rows
        minibatches: list[Minibatch] = []
        known, kept, credit, rewards = None, None, [], None
        if rows:
            if self.has_kl_rewards or self.excludes_tokens or (self.has_teacher and self.recomputes):
                known = self._logprobs_of_all(rows)
            values_BT = None if self.critic is None else self.critic.compute_values(rows)
            rewards = self._rewards(scored, known, values_BT)
            credit = self._credit(rows, rewards)
            kept = self._select_tokens(rows, known) if known and self.excludes_tokens else None
            if kept is not None:
                credit = [one * mask for one, mask in zip(credit, kept, strict=True)]
            if not self._warms_up(step):
                minibatches = self._minibatches(rows, rewards, credit, kept)
        self._describe.report_shaping(self.run.stats, batch.groups, rows, credit, clipped)
        if self.samples is not None:
            self.samples.write_step(step, batch.groups, rows if credit else [], credit)
        mine = [minibatch.rows[self.run.engine.mesh.data_rank] for minibatch in minibatches]
        known = known or self._logprobs(rows, [row for part in mine for row in part])
        num_successful = 0
        totals: Counter[str] = Counter()
        for number, (minibatch, part) in enumerate(zip(minibatches, mine, strict=True)):
            sequences = self._sequences(step, rows, credit, known, part, kept)
            # without recomputed log-probabilities, only the first update has the weights of the step's start
            measures = number == 0 or known.recomputed is not None
            loss = partial(self.loss.compute, minibatch.divisors, measures)
            sums = self.run.engine.train_batch(sequences, loss, minibatch.loss_weight, self.temperature)
            self._report(sums, minibatch)
            totals.update(sums)
            num_successful += int(sums["update_successful"])
        self._report_mismatch(totals)
        if self.controller is not None and totals["num_tokens"]:
            self._adapt_entropy(step, totals["entropy"] / totals["num_tokens"])
        if self.critic is not None:
            of_critic = self.critic.update(rows, rewards, self.options, self.run.stats)
            num_successful += of_critic if self._warms_up(step) else 0
        self._finish_step(step, num_successful, len(minibatches))

    def publish(self, step: int) -> None:
        """Begin to publish, after the previous publication; after the last step, finish it."""
        self._settle(wait=True)
        self.transport.start(self.run.version(step))
        if step == self.total_steps:
            self._settle(wait=True)

    def _settle(self, wait: bool) -> None:
        published = self.transport.settle(wait)
        # None after a stop; the next start publishes first
        if published is not None and self.run.ranks.rank == 0:
            for name, value in published.to_metrics().items():
                self.run.stats.value(name, value)
            if not self._has_published:
                self._has_published = True
                logger.info(
                    "start: the first weights are published to %d servers", len(published.acknowledged)
                )

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        """Let the rollout role evaluate the weights after `step`; log the result as a separate line.

        Returns {} without held-out data and on ranks above 0, None after a stop.
        """
        run = self.run
        if self.config.valid_dataset is None:
            return {}
        self._settle(wait=True)
        if run.ranks.rank != 0:
            return {}
        start = time.monotonic()
        result = self.rollout.evaluate(str(run.version(step)), run.stopping)
        if result is None:
            return None
        numbers: dict[str, float | int | str] = {
            **{f"eval_{name}": value for name, value in result.stats.items()},
            "eval_reward": result.reward,
            "eval_num_prompts": result.num_prompts,
            "eval_version": result.version,
            "eval_s": time.monotonic() - start,
        }
        run.sinks.log(step, {"time": time.time(), "lineage": run.lineage, **numbers})
        if self.samples is not None:
            self.samples.write_evaluation(step, result.reward, result.groups)
        left_out = int(result.stats.get("left_out", 0))
        of = f" of {result.num_prompts + left_out}" if left_out else ""
        logger.info(
            "step %d: held-out reward %.4f over %d%s rows", step, result.reward, result.num_prompts, of
        )
        return numbers

    def position(self, step: int) -> tuple[int, int]:
        consumed = step * self.config.train_dataset.batch_size
        return divmod(consumed, self.num_prompts) if self.num_prompts else (0, consumed)

    def frontier(self, step: int) -> dict[str, int]:
        """Return the newest batch in the state, and its largest prompt index."""
        return self._frontier if self._frontier.get("sealed") == step else {"sealed": step}

    def retain(self, step: int) -> None:
        self.rollout.retain(step)

    def _score(self, step: int, batch: Batch) -> ScoredRows:
        """Return the trajectories of a batch with their rewards, including the length penalties."""
        rows = [trajectory for group in batch.groups for trajectory in group.trajectories]
        sizes = torch.tensor([len(group.trajectories) for group in batch.groups])
        group_B = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self._describe(self.run.stats, step, self.run.lineage, batch.groups)
        rewards_B = torch.tensor([row.reward for row in rows], dtype=torch.float32)
        scored = ScoredRows(rows, rewards_B, rewards_B, group_B)
        if not rows:
            return scored
        penalty_B = self.algorithm.penalize_lengths(self._rewards(scored), self.options)
        if self.actor.overlong_reward_penalty or self.actor.length_penalty:
            self.run.stats.mean("overlong_penalty", float(penalty_B.sum()), len(rows))
        return ScoredRows(rows, rewards_B, rewards_B + penalty_B, group_B)

    def _select_groups(self, scored: ScoredRows) -> ScoredRows:
        """Return the rows that count in the baselines."""
        if not scored.rows:
            return scored
        kept = self.algorithm.select_groups(self._rewards(scored), self.options)
        if self.actor.dynamic_sampling:
            num_dropped = len(scored.group_B.unique()) - len(scored.group_B[kept].unique())
            self.run.stats.add("groups_dropped", num_dropped)
        return scored if len(kept) == len(scored.rows) else scored.select(kept)

    def _warms_up(self, step: int) -> bool:
        """Return whether a step trains the critic alone."""
        return self.critic is not None and step <= self.critic.config.warmup_steps

    def _rewards(
        self, scored: ScoredRows, known: Known | None = None, values_BT: torch.Tensor | None = None
    ) -> RewardBatch:
        """Return the rewards of trajectories, with the KL rewards if log-probabilities are `known`."""
        rows = scored.rows
        sizes_G = torch.unique(scored.group_B, return_counts=True)[1]
        size = self.config.gconfig.n_samples
        mask_BT = pad_rows([row.loss_mask for row in rows])
        return RewardBatch(
            rewards_B=scored.rewards_B,
            mask_BT=mask_BT,
            group_B=scored.group_B,
            given_B=scored.given_B,
            truncated_B=torch.tensor([row.finish_reason == "length" for row in rows]),
            lengths_B=torch.tensor([len(row.ids) for row in rows]),
            group_size=size,
            mixed_sizes=self.config.environments is not None and bool((sizes_G != size).any()),
            token_rewards_BT=self._token_rewards(rows, mask_BT, known),
            values_BT=values_BT,
            **(self._teacher_columns(rows, known) if self.has_teacher else {}),
        )

    def _token_rewards(
        self, rows: list[Trajectory], mask_BT: torch.Tensor, known: Known | None
    ) -> torch.Tensor | None:
        """Return the KL rewards, and the rewards of turns at their tokens; None without any."""
        found = [self._kl_rewards(rows, mask_BT, known)] if known and self.has_kl_rewards else []
        if any(row.turn_rewards is not None for row in rows):
            found.append(self.actor.reward_scaling * move_rewards_to_turns(rows, mask_BT))
        return torch.stack(found).sum(0) if found else None

    def _teacher_columns(self, rows: list[Trajectory], known: Known | None) -> dict[str, torch.Tensor]:
        """Return the log-probabilities of teacher and policy; {} if a teacher sampled the rows."""
        scored = [row.teacher_logprobs for row in rows if row.teacher_logprobs is not None]
        if len(scored) < len(rows):
            return {}
        known = known or Known(None, None)
        own = [self._prox_and_behav(rows, known, i)[0] for i in range(len(rows))]
        return {"teacher_BT": pad_rows(scored), "logprobs_BT": pad_rows(own)}

    def _credit(self, rows: list[Trajectory], rewards: RewardBatch) -> list[np.ndarray]:
        """Return the credit of the tokens, float32 [L] per row of the whole batch."""
        credit_BT = self.algorithm.compute_credit(rewards, self.options)
        computed = (credit_BT[i, : len(row.ids)].numpy() for i, row in enumerate(rows))
        return [choose_credit(row, one) for row, one in zip(rows, computed, strict=True)]

    def _select_tokens(self, rows: list[Trajectory], known: Known) -> list[np.ndarray]:
        """Return the tokens that the correction and the algorithm keep in the loss, bool [L] per row."""
        pairs = [self._prox_and_behav(rows, known, i) for i in range(len(rows))]
        log_weight_N, mask_N = (
            torch.from_numpy(np.concatenate(columns))
            for columns in ([prox - behav for prox, behav in pairs], [row.loss_mask for row in rows])
        )
        row_N = torch.repeat_interleave(torch.tensor([len(row.ids) for row in rows]))
        kept_N = mask_N & ~self.loss.correction.compute_weights(log_weight_N, mask_N, row_N)[1]
        if self.algorithm.select_tokens is not None:
            kept_N[mask_N] &= self.algorithm.select_tokens(log_weight_N[mask_N], self.options)
        share = float((mask_N & ~kept_N).sum() / mask_N.sum().clamp(min=1))
        self.run.stats.value(f"{PREFIX}excluded", share)
        return split_rows(kept_N, rows)

    def _minibatches(
        self,
        rows: list[Trajectory],
        rewards: RewardBatch,
        credit: list[np.ndarray],
        kept: list[np.ndarray] | None,
    ) -> list[Minibatch]:
        """Select the rows to train on, cut them into mini-batches and divide them among the ranks."""
        members = self.algorithm.select_rows(rewards, self.options)
        if self.actor.mask_no_eos_with_zero:
            self.run.stats.add("rows_masked", len(rows) - len(members))
        masks = [row.loss_mask for row in rows]
        return divide_rows(
            rows,
            credit,
            members,
            self.actor.ppo_n_minibatches,
            self.run.engine.mesh.num_data_ranks,
            keep_all=(self.reference is not None and self.actor.beta > 0) or self.loss.entropy_coeff > 0,
            weight_by_row=self.actor.loss_aggregation != "token_mean",
            masks=dict.fromkeys(COMPONENTS, masks) | ({} if kept is None else {"rl": kept}),
        )

    def _finish_step(self, step: int, num_successful: int, num_tried: int) -> None:
        """Advance the schedule. Raises DataUnusable after too many steps in a row without an update."""
        # the schedule counts the updates of a whole batch, even if dynamic sampling or the mask dropped rows
        missing = count_updates_per_step(self.config) - num_tried
        if missing > 0:
            self.run.engine.pass_updates(missing)
        if not num_tried and not self._warms_up(step):
            self.run.stats.mean("update_successful", 0.0, 1)
            logger.warning("no update in this step: no row is left to train on")
        self._steps_without_update = 0 if num_successful else self._steps_without_update + 1
        if self._steps_without_update < count_allowed_idle_steps(self.actor):
            return
        why = "the loss or its gradient was not finite" if num_tried else "no row was left to train on"
        raise DataUnusable(
            f"{self._steps_without_update} steps in a row made no optimizer update, "
            f"the last one step {step}: {why}"
        )

    def _kl_rewards(self, rows: list[Trajectory], mask_BT: torch.Tensor, known: Known) -> torch.Tensor:
        behav_BT = pad_rows([self._prox_and_behav(rows, known, i)[1] for i in range(len(rows))])
        reference, ref_BT = known.reference, None
        if reference is not None:
            ref_BT = pad_rows([reference[i] for i in range(len(rows))])
        rewards_BT = self.algorithm.compute_kl_rewards(behav_BT, ref_BT, mask_BT, self.options)
        self.run.stats.mean("kl_rewards", float(rewards_BT.sum(dtype=torch.float64)), int(mask_BT.sum()))
        return rewards_BT

    def _logprobs_of_all(self, rows: list[Trajectory]) -> Known:
        """Return the log-probabilities of all rows; each rank computes a share. Collective."""
        lengths = [len(row.ids) for row in rows]
        mesh = self.run.engine.mesh
        mine = self._logprobs(rows, balance(lengths, mesh.num_data_ranks)[mesh.data_rank])
        parts = (mine.recomputed, mine.reference)
        counts = mesh.is_data_leader  # its peers have the same rows
        return Known(
            *(
                None if part is None else self.run.ranks.whole(part if counts else {}, lengths)
                for part in parts
            )
        )

    def _logprobs(self, rows: list[Trajectory], numbers: list[int]) -> Known:
        """Return the log-probabilities of some rows under the current and the reference model, if needed."""
        if not rows:
            return Known(None, None)
        masks = [rows[i].loss_mask for i in numbers]
        columns = {"loss_mask": masks}
        temperature = self.algorithm.logprob_temperature
        if temperature is None:
            columns |= make_temperature_column([rows[i] for i in numbers], self.temperature)
            temperature = self.temperature
        sequences = Sequences([rows[i].ids for i in numbers], columns)

        def by_row(engine: Scorer | None) -> dict[int, np.ndarray] | None:
            if engine is None:
                return None
            return dict(zip(numbers, engine.logprobs(sequences, temperature), strict=True))

        recompute = self.recomputes or not all(row.has_logprobs for row in rows)
        return Known(by_row(self.run.engine if recompute else None), by_row(self.reference))

    def _prox_and_behav(self, rows: list[Trajectory], known: Known, i: int) -> tuple[np.ndarray, np.ndarray]:
        recomputed = None if known.recomputed is None else known.recomputed[i]
        if recomputed is not None and not rows[i].has_logprobs:
            return recomputed, recomputed
        recomputed = recomputed if self.recomputes else None
        if recomputed is None:  # also with `loglinear`, which needs none
            return rows[i].logprobs, rows[i].logprobs
        return choose_logprobs(rows[i].logprobs, recomputed, self.is_decoupled)

    def _sequences(
        self,
        step: int,
        rows: list[Trajectory],
        credit: list[np.ndarray],
        known: Known,
        part: list[int],
        kept: list[np.ndarray] | None,
    ) -> Sequences:
        pairs = [self._prox_and_behav(rows, known, i) for i in part]
        columns = {
            "loss_mask": [rows[i].loss_mask for i in part],
            "credit": [credit[i] for i in part],
            "prox": [prox for prox, _ in pairs],
            "behav": [behav for _, behav in pairs],
            "fresh_mask": [rows[i].steps == step - 1 for i in part],
            **make_temperature_column([rows[i] for i in part], self.temperature),
        }
        if known.recomputed is not None:
            columns["recomputed"] = [known.recomputed[i] for i in part]
            columns["sampled"] = [
                rows[i].logprobs if rows[i].has_logprobs else known.recomputed[i] for i in part
            ]
        if self.actor.prox_logp_method != "recompute":
            staleness = [np.maximum(0, step - 1 - rows[i].steps).astype(np.float32) for i in part]
            columns["version_share"] = [compute_version_share(age) for age in staleness]
        if kept is not None:
            columns["kept_mask"] = [kept[i] for i in part]
            if self.actor.loss_aggregation == "sequence_mean":
                columns["kept_scale"] = [self._kept_scale(rows[i], kept[i]) for i in part]
        scored = [row.teacher_logprobs for row in rows if row.teacher_logprobs is not None]
        if self.has_teacher and len(scored) == len(rows):
            columns["teacher"] = [scored[i] for i in part]
        if known.reference is not None and self.actor.beta:
            columns["ref"] = [choose_sent(rows[i].ref_logprobs, known.reference[i]) for i in part]
        if self.actor.loss_aggregation != "token_mean":
            columns["weights"] = [self._token_weights(rows[i]) for i in part]
        return Sequences([rows[i].ids for i in part], columns)

    def _kept_scale(self, row: Trajectory, kept: np.ndarray) -> np.ndarray:
        """Return the factor by which fewer tokens weigh more in the mean of a completion."""
        return np.full(len(row.ids), row.loss_mask.sum() / max(1, kept.sum()), np.float32)

    def _token_weights(self, row: Trajectory) -> np.ndarray:
        num_tokens, most = int(row.loss_mask.sum()), self.config.gconfig.max_new_tokens
        weight = compute_token_weight(num_tokens, self.actor.loss_aggregation, most)
        return np.full(len(row.ids), weight, np.float32)

    def _adapt_entropy(self, step: int, entropy: float) -> None:
        """Adapt the coefficient of the entropy bonus; it is saved with the state."""
        assert self.controller is not None
        coefficient = self.controller.adapt(self.loss.entropy_coeff, entropy, step)
        self.run.stats.value("entropy_coeff", coefficient)
        self.run.adapted["entropy_coeff"] = coefficient
        self.loss = replace(self.loss, entropy_coeff=coefficient)

    def _report_mismatch(self, sums: Mapping[str, float]) -> None:
        largest = self.run.ranks.max(self.loss.largest_log_w.take())
        for name, value in summarize_mismatch(sums).items():
            self.run.stats.value(name, value)
            self.run.stats.value(f"{PREFIX}log_w_max", largest)

    def _report(self, sums: dict[str, float], minibatch: Minibatch) -> None:
        # token means (entropy, ratios) cover the computed rows; the loss covers all rows
        stats = self.run.stats
        tokens = sums.get("num_tokens", 0.0)
        for name in MEANS_OVER_TOKENS:
            if name in sums:
                stats.mean(name, sums[name], tokens)
        stats.mean("loss", sums["loss"] * minibatch.loss_weight, minibatch.loss_weight)
        stats.mean("grad_norm", sums["grad_norm"], 1)
        stats.mean("update_successful", sums["update_successful"], 1)
        stats.value("lr", sums["lr"])
        stats.add("rows_skipped", minibatch.num_skipped)
        stats.add("behave_dropped", sums.get("behave_dropped", 0.0))


def place_schedule(engine: Engine, step: int, updates_per_step: int) -> None:
    """Move the learning-rate schedule to `step`; the number of updates per step may have changed."""
    engine.pass_updates(step * updates_per_step - engine.counters()["updates"])


def count_allowed_idle_steps(actor: PPOActorConfig) -> int:
    """Return the number of steps in a row without an optimizer update after which the trial ends."""
    scale = actor.optimizer if actor.dtype == "float16" else None
    if scale is None:
        return MAX_STEPS_WITHOUT_UPDATE
    halvings = math.ceil(math.log2(scale.initial_loss_scale / scale.min_loss_scale))
    return MAX_STEPS_WITHOUT_UPDATE + halvings + scale.hysteresis
