"""The data of the policy's updates: from the trajectories of a batch to credit, mini-batches and columns.

Every rank computes credit, mini-batches and divisors from the whole batch before the rows are divided among
ranks, so nothing depends on the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.correction import Correction, choose_logprobs, compute_version_share
from hpc_rl.algorithms.rewards import SpreadCredit
from hpc_rl.algorithms.token_batch import Options, RewardBatch, RowMasks
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.rules.training_rules import needs_recompute
from hpc_rl.core.types import Batch, Trajectory
from hpc_rl.datasets.order import choose_set
from hpc_rl.engines.base import Scorer, Sequences
from hpc_rl.engines.shared.packing import balance
from hpc_rl.rollout.batch_log.ledger import FIRST_OUTSIDE
from hpc_rl.servers.wire import get_logprob_temperature, get_sampling_temperature
from hpc_rl.trainers.algorithm_checks import OutputChecks
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
from hpc_rl.trainers.mismatch import PREFIX
from hpc_rl.trainers.policy_loss import COMPONENTS
from hpc_rl.trainers.ragged_credit import ComputedRows, spread_constant, spread_rows
from hpc_rl.trainers.run import Run


class PolicyData:
    """Computes the data of a step for the recipe.

    `reference` is the frozen model of the KL terms, if any. Methods raise ConfigError if a function of the
    algorithm returns a value of another shape or type than its own.
    """

    def __init__(
        self,
        run: Run,
        algorithm: Algorithm,
        options: Options,
        correction: Correction,
        reference: Scorer | None,
        checks: OutputChecks | None = None,
    ) -> None:
        assert isinstance(run.config, GRPOConfig)
        self.run = run
        self.config = run.config
        self.actor = actor = run.config.actor
        self.algorithm = algorithm
        self.options = options
        self.correction = correction
        self.reference = reference
        self.checks = checks or OutputChecks(actor.algorithm)
        self.shares = run.config.train_dataset.shares
        self.has_sets = any(one.algorithm for one in run.config.train_dataset.mix.values())
        self.temperature = get_logprob_temperature(get_sampling_temperature(run.config.gconfig))
        section = actor.rollout_correction
        self.is_decoupled = actor.use_decoupled_loss or section is not None
        self.recomputes = actor.recompute_logprob or needs_recompute(actor)
        self.has_kl_rewards = actor.kl_ctl > 0
        self.has_teacher = "distillation" in algorithm.needs
        # a critic's values belong to a rectangle
        self.spreads_ragged = isinstance(algorithm.compute_credit, SpreadCredit) and run.config.critic is None
        self.top_k = run.config.distillation.top_k if run.config.distillation is not None else 0
        # tokens may leave the loss, so their number must be known before rows are divided among ranks
        self.excludes_tokens = algorithm.select_tokens is not None or (
            section is not None and section.mode != "truncate"
        )

    @property
    def needs_all_logprobs(self) -> bool:
        """Return whether the credit needs log-probabilities of the trainer's models."""
        return self.has_kl_rewards or self.excludes_tokens or (self.has_teacher and self.recomputes)

    def score(self, batch: Batch) -> ScoredRows:
        """Return the trajectories of a batch with their rewards, including the length penalties."""
        rows = [trajectory for group in batch.groups for trajectory in group.trajectories]
        sizes = torch.tensor([len(group.trajectories) for group in batch.groups])
        group_B = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        set_G = torch.tensor([self._find_set(group.index) for group in batch.groups], dtype=torch.long)
        rewards_B = torch.tensor([row.reward for row in rows], dtype=torch.float32)
        scored = ScoredRows(rows, rewards_B, rewards_B, group_B, set_G[group_B])
        if not rows:
            return scored
        penalty_B = self.algorithm.penalize_lengths(self.make_rewards(scored), self.options)
        self.checks.check_tensor("penalize_lengths", penalty_B, [len(rows)], "[B]")
        if self.actor.overlong_reward_penalty or self.actor.length_penalty:
            self.run.stats.mean("overlong_penalty", float(penalty_B.sum()), len(rows))
        return replace(scored, rewards_B=rewards_B + penalty_B)

    def _find_set(self, index: int) -> int:
        """Return the number of the data set of a prompt index; environments' groups count to the first."""
        return choose_set(index, self.shares)[0] if self.has_sets and index < FIRST_OUTSIDE else 0

    def select_groups(self, scored: ScoredRows) -> ScoredRows:
        """Return the rows that count in the baselines."""
        if not scored.rows:
            return scored
        kept = self.algorithm.select_groups(self.make_rewards(scored), self.options)
        self.checks.check_rows("select_groups", kept, len(scored.rows))
        if self.actor.dynamic_sampling:
            num_dropped = len(scored.group_B.unique()) - len(scored.group_B[kept].unique())
            self.run.stats.add("groups_dropped", num_dropped)
        return scored if len(kept) == len(scored.rows) else scored.select(kept)

    def make_rewards(
        self, scored: ScoredRows, known: Known | None = None, values_BT: torch.Tensor | None = None
    ) -> RewardBatch:
        """Return the rewards of trajectories, with the KL rewards if log-probabilities are `known`.

        Without the rewards of tokens if `compute_credit` needs no rectangle of them.
        """
        rows = scored.rows
        sizes_G = torch.unique(scored.group_B, return_counts=True)[1]
        size = self.config.gconfig.n_samples
        shares = [row.share for row in rows]
        masks = RowMasks([row.loss_mask for row in rows])
        mask_BT = None if self.spreads_ragged else masks.pad()
        return RewardBatch(
            rewards_B=scored.rewards_B,
            masks=masks if mask_BT is None else mask_BT,
            group_B=scored.group_B,
            given_B=scored.given_B,
            truncated_B=torch.tensor([row.finish_reason == "length" for row in rows]),
            lengths_B=torch.tensor([len(row.ids) for row in rows]),
            share_B=torch.tensor(shares) if any(one != 1.0 for one in shares) else None,
            group_size=size,
            mixed_sizes=self._may_mix_sizes() and bool((sizes_G != size).any()),
            token_rewards_BT=None if mask_BT is None else self._token_rewards(rows, mask_BT, known),
            values_BT=values_BT,
            set_B=scored.set_B if self.has_sets else None,
            **(self._teacher_columns(rows, known) if self.has_teacher else {}),
        )

    def _may_mix_sizes(self) -> bool:
        """Return whether groups may have other sizes: environments choose them, and agents branch."""
        return self.config.environments is not None or self.config.rollout.workflow == "agent"

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

    def _kl_rewards(self, rows: list[Trajectory], mask_BT: torch.Tensor, known: Known) -> torch.Tensor:
        behav_BT = pad_rows([self._prox_and_behav(rows, known, i)[1] for i in range(len(rows))])
        reference, ref_BT = known.reference, None
        if reference is not None:
            ref_BT = pad_rows([reference[i] for i in range(len(rows))])
        rewards_BT = self.algorithm.compute_kl_rewards(behav_BT, ref_BT, mask_BT, self.options)
        self.checks.check_tensor(
            "compute_kl_rewards", rewards_BT, mask_BT.shape, "[B, T]", inputs=[behav_BT, ref_BT]
        )
        self.run.stats.mean("kl_rewards", float(rewards_BT.sum(dtype=torch.float64)), int(mask_BT.sum()))
        return rewards_BT

    def compute_credit(
        self, rows: list[Trajectory], rewards: RewardBatch, known: Known | None
    ) -> Sequence[np.ndarray]:
        """Return the credit of the tokens, float32 [L] per row of the whole batch.

        If all tokens of a row have the same, its array is made each time it is read.
        """
        if isinstance(self.algorithm.compute_credit, SpreadCredit) and self.spreads_ragged:
            shaped_B = self.algorithm.compute_credit.shape(rewards, self.options)
            self.checks.check_tensor(
                "compute_credit.shape", shaped_B, [len(rows)], "[B]", inputs=[rewards.rewards_B]
            )
            return self._spread(rows, rewards, shaped_B, known)
        credit_BT = self.algorithm.compute_credit(rewards, self.options)
        shape, inputs = rewards.mask_BT.shape, rewards.list_inputs()
        self.checks.check_tensor("compute_credit", credit_BT, shape, "[B, T]", inputs=inputs)
        computed = (credit_BT[i, : len(row.ids)].numpy() for i, row in enumerate(rows))
        return [choose_credit(row, one) for row, one in zip(rows, computed, strict=True)]

    def _spread(
        self, rows: list[Trajectory], rewards: RewardBatch, shaped_B: torch.Tensor, known: Known | None
    ) -> Sequence[np.ndarray]:
        """Return the credit of the tokens for one number of each trajectory, float32 [L] per row."""
        options = self.options
        has_token_rewards = (known is not None and self.has_kl_rewards) or any(
            row.turn_rewards is not None for row in rows
        )
        if not has_token_rewards and options.discount * options.gae_lambda == 1.0:
            value_B = spread_constant(shaped_B, rewards, options).numpy()
            return ComputedRows(
                len(rows),
                lambda i: choose_credit(rows[i], np.where(rows[i].loss_mask, value_B[i], np.float32(0))),
            )

        masks = [row.loss_mask for row in rows]

        def make_token_rewards(part: range) -> torch.Tensor | None:
            if not has_token_rewards:
                return None
            own = rows[part.start : part.stop]
            own_known = None if known is None else known.select(part)
            return self._token_rewards(own, pad_rows([row.loss_mask for row in own]), own_known)

        def check(credit_BT: torch.Tensor, rewards_BT: torch.Tensor) -> None:
            inputs = [rewards.rewards_B, rewards_BT]
            self.checks.check_tensor("compute_credit", credit_BT, rewards_BT.shape, "[B, T]", inputs=inputs)

        assert rewards.group_B is not None
        found = spread_rows(shaped_B, masks, rewards.group_B, options, make_token_rewards, check)
        for i, row in enumerate(rows):
            if row.zero_advantage or row.advantages is not None:
                found[i] = choose_credit(row, found[i])
        return found

    def select_tokens(self, rows: list[Trajectory], known: Known) -> list[np.ndarray]:
        """Return the tokens that the correction and the algorithm keep in the loss, bool [L] per row."""
        pairs = [self._prox_and_behav(rows, known, i) for i in range(len(rows))]
        log_weight_N, mask_N = (
            torch.from_numpy(np.concatenate(columns))
            for columns in ([prox - behav for prox, behav in pairs], [row.loss_mask for row in rows])
        )
        row_N = torch.repeat_interleave(torch.tensor([len(row.ids) for row in rows]))
        kept_N = mask_N & ~self.correction.compute_weights(log_weight_N, mask_N, row_N)[1]
        if self.algorithm.select_tokens is not None:
            log_weight_K = log_weight_N[mask_N]
            own_K = self.algorithm.select_tokens(log_weight_K, self.options)
            self.checks.check_tensor("select_tokens", own_K, log_weight_K.shape, "[N]", torch.bool)
            kept_N[mask_N] &= own_K
        share = float((mask_N & ~kept_N).sum() / mask_N.sum().clamp(min=1))
        self.run.stats.value(f"{PREFIX}excluded", share)
        return split_rows(kept_N, rows)

    def cut_minibatches(
        self,
        rows: list[Trajectory],
        rewards: RewardBatch,
        credit: Sequence[np.ndarray],
        kept: list[np.ndarray] | None,
        has_entropy: bool,
    ) -> list[Minibatch]:
        """Select the rows to train on, cut them into mini-batches and divide them among the ranks.

        `has_entropy`: the loss has an entropy bonus, which rows without credit have, too.
        """
        members = self.algorithm.select_rows(rewards, self.options)
        self.checks.check_rows("select_rows", members, len(rows))
        if self.actor.mask_no_eos_with_zero:
            self.run.stats.add("rows_masked", len(rows) - len(members))
        masks = [row.loss_mask for row in rows]
        return divide_rows(
            rows,
            credit,
            members,
            self.actor.ppo_n_minibatches,
            self.run.engine.mesh.num_data_ranks,
            keep_all=has_entropy or self.top_k > 0 or (self.reference is not None and self.actor.beta > 0),
            weight_by_row=self.actor.loss_aggregation != "token_mean",
            masks=dict.fromkeys(COMPONENTS, masks) | ({} if kept is None else {"rl": kept}),
        )

    def compute_all_logprobs(self, rows: list[Trajectory]) -> Known:
        """Return the log-probabilities of all rows; each rank computes a share. Collective."""
        lengths = [len(row.ids) for row in rows]
        mesh = self.run.engine.mesh
        numbers = balance(lengths, mesh.num_data_ranks)[mesh.data_rank]
        mine = self.compute_logprobs(rows, numbers, numbers)
        parts = (mine.recomputed, mine.reference)
        counts = mesh.is_data_leader  # its peers have the same rows
        return Known(
            *(
                None if part is None else self.run.ranks.whole(part if counts else {}, lengths)
                for part in parts
            )
        )

    def can_reuse_logprobs(self, rows: list[Trajectory]) -> bool:
        """Return whether the forward pass of a step's first update gives the proximal log-probabilities.

        They are the ones of the step's start, so a pass before the update would compute the same numbers.
        """
        return (
            self.recomputes
            and not self.run.engine.has_dropout
            and self.actor.prox_logp_method == "recompute"
            and self.algorithm.logprob_temperature is None
            and all(row.has_logprobs for row in rows)
        )

    def compute_logprobs(
        self, rows: list[Trajectory], numbers: list[int], recomputed: list[int] | None
    ) -> Known:
        """Return the log-probabilities of some rows, if needed: `numbers` under the reference model.

        `recomputed` are the rows for the current model; None means no row on any rank. Collective.
        """
        if not rows:
            return Known(None, None)
        own = reference = None
        if recomputed is not None and (self.recomputes or not all(row.has_logprobs for row in rows)):
            own = self._compute_model(self.run.engine, rows, recomputed)
        if self.reference is not None:
            reference = self._compute_model(self.reference, rows, numbers)
        return Known(own, reference)

    def _compute_model(
        self, engine: Scorer, rows: list[Trajectory], numbers: list[int]
    ) -> dict[int, np.ndarray]:
        columns = {"loss_mask": [rows[i].loss_mask for i in numbers]}
        temperature = self.algorithm.logprob_temperature
        if temperature is None:
            columns |= make_temperature_column([rows[i] for i in numbers], self.temperature)
            temperature = self.temperature
        sequences = Sequences([rows[i].ids for i in numbers], columns)
        return dict(zip(numbers, engine.logprobs(sequences, temperature), strict=True))

    def _prox_and_behav(self, rows: list[Trajectory], known: Known, i: int) -> tuple[np.ndarray, np.ndarray]:
        recomputed = None if known.recomputed is None else known.recomputed[i]
        if recomputed is not None and not rows[i].has_logprobs:
            return recomputed, recomputed
        recomputed = recomputed if self.recomputes else None
        if recomputed is None:  # also with `loglinear`, which needs none
            return rows[i].logprobs, rows[i].logprobs
        return choose_logprobs(rows[i].logprobs, recomputed, self.is_decoupled)

    def make_sequences(
        self,
        step: int,
        scored: ScoredRows,
        credit: Sequence[np.ndarray],
        known: Known,
        part: list[int],
        kept: list[np.ndarray] | None,
        is_unknown: bool = False,
    ) -> Sequences:
        """Return the rows `part` of a mini-batch with their columns.

        `is_unknown`: the proximal log-probabilities are not `known`; they are the ones of the update's own
        forward pass, so the loss gets no column for them.
        """
        rows = scored.rows
        columns = {
            "loss_mask": [rows[i].loss_mask for i in part],
            "credit": [credit[i] for i in part],
            "fresh_mask": [rows[i].steps == step - 1 for i in part],
            **make_temperature_column([rows[i] for i in part], self.temperature),
        }
        if is_unknown:
            columns["sampled"] = [rows[i].logprobs for i in part]
            if self.is_decoupled:
                columns["behav"] = columns["sampled"]
        else:
            pairs = [self._prox_and_behav(rows, known, i) for i in part]
            columns["prox"], columns["behav"] = [prox for prox, _ in pairs], [behav for _, behav in pairs]
        if known.recomputed is not None and not is_unknown:
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
                columns["kept_scale"] = [self._compute_kept_scale(rows[i], kept[i]) for i in part]
        taught = [row.teacher_logprobs for row in rows if row.teacher_logprobs is not None]
        if self.has_teacher and len(taught) == len(rows):
            columns["teacher"] = [taught[i] for i in part]
        if self.top_k:
            columns["top_ids"] = [_require(rows[i].teacher_top_ids) for i in part]
            columns["top_teacher"] = [_require(rows[i].teacher_top_logprobs) for i in part]
        if self.has_sets:
            columns["data_set"] = [np.full(len(rows[i].ids), scored.set_B[i], np.float32) for i in part]
        if known.reference is not None and self.actor.beta:
            columns["ref"] = [choose_sent(rows[i].ref_logprobs, known.reference[i]) for i in part]
        if self.actor.loss_aggregation != "token_mean":
            columns["weights"] = [self._token_weights(rows[i]) for i in part]
        return Sequences([rows[i].ids for i in part], columns)

    def _compute_kept_scale(self, row: Trajectory, kept: np.ndarray) -> np.ndarray:
        """Return the factor by which fewer tokens weigh more in the mean of a completion."""
        return np.full(len(row.ids), row.loss_mask.sum() / max(1, kept.sum()), np.float32)

    def _token_weights(self, row: Trajectory) -> np.ndarray:
        num_tokens, most = int(row.loss_mask.sum()), self.config.gconfig.max_new_tokens
        weight = compute_token_weight(num_tokens, self.actor.loss_aggregation, most)
        return np.full(len(row.ids), weight, np.float32)


def _require(values: np.ndarray | None) -> np.ndarray:
    assert values is not None, "a teacher has scored all rows"
    return values
