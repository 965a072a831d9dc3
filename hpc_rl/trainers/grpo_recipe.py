"""The recipe of RL trials: batches come from the rollout role, weights go to the generation servers.

The algorithm defines the computation of a step, and policy_data.py makes the data for it.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from hpc_rl.algorithms.rewards import compute_clipped_share
from hpc_rl.config.algorithm_defaults import refuse_warmup
from hpc_rl.config.options.experiment import GRPOConfig, count_steps
from hpc_rl.config.schedule import count_updates_per_step
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.types import Batch, EvalResult, decode
from hpc_rl.engines.base import Engine, Scorer
from hpc_rl.rollout.batch_client import RolloutClient
from hpc_rl.rollout.batch_log.ledger import FIRST_OUTSIDE
from hpc_rl.rollout.batch_prefetch import BatchPrefetch
from hpc_rl.stats.idle import SKIPPED
from hpc_rl.stats.kept_samples import SampleWriter
from hpc_rl.trainers.algorithm_checks import OutputChecks
from hpc_rl.trainers.algorithm_options import (
    find_entropy_coefficient,
    make_controller,
    make_correction,
)
from hpc_rl.trainers.batch_metrics import BatchMetrics
from hpc_rl.trainers.critic import Critic
from hpc_rl.trainers.evaluations import describe_results, make_numbers
from hpc_rl.trainers.minibatches import Minibatch
from hpc_rl.trainers.mismatch import PREFIX, summarize_mismatch
from hpc_rl.trainers.mixed_algorithms import load_mixed
from hpc_rl.trainers.policy_data import PolicyData
from hpc_rl.trainers.policy_loss import MEANS_OVER_TOKENS, PolicyLoss
from hpc_rl.trainers.ragged_credit import exclude_tokens
from hpc_rl.trainers.run import Run
from hpc_rl.trainers.shared_gpus import SharedGPUs
from hpc_rl.trainers.update_watch import UpdateWatch
from hpc_rl.weights.transport import Transport

logger = logging.getLogger(__name__)
ROUND_S = 10.0  # must be shorter than the time limit of a collective


class GRPO:
    """The recipe of GRPO and the other algorithms.

    `num_prompts` is the number of prompts in one epoch. `reference` is the frozen model of the KL terms, if
    any. `samples` keeps completions, on rank 0. `critic` is the value model of PPO. `shared_gpus` are the
    GPUs that trainer and servers share, if they do. `prefetch` fetches the next batch early, on rank 0.
    The constructor raises ConfigError.
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
        shared_gpus: SharedGPUs | None = None,
        prefetch: BatchPrefetch | None = None,
    ) -> None:
        assert isinstance(run.config, GRPOConfig)
        self.run = run
        self.rollout = rollout
        self.transport = transport
        self.num_prompts = num_prompts
        self.samples = samples
        self.critic = critic
        self.shared_gpus = shared_gpus
        self.prefetch = prefetch
        self.config = run.config
        self.actor = run.config.actor
        self.algorithm, self.options = load_mixed(run.config)
        self.loss = PolicyLoss(
            self.algorithm,
            self.options,
            make_correction(self.actor),
            self.actor.beta,
            self.actor.kl_loss_estimator,
            find_entropy_coefficient(self.actor),
            self.actor.prox_logp_method,
            checks=OutputChecks(self.actor.algorithm),
        )
        self.controller = make_controller(self.actor)
        if self.controller is not None and "entropy_coeff" in run.adapted:
            self.loss = replace(self.loss, entropy_coeff=run.adapted["entropy_coeff"])
        self.total_steps = count_steps(run.config, num_prompts)
        if refusal := refuse_warmup(run.config, self.total_steps):
            raise ConfigError(refusal)
        self.data = PolicyData(
            run, self.algorithm, self.options, self.loss.correction, reference, self.loss.checks
        )
        self._frontier: dict[str, int] = {}
        self._describe = BatchMetrics(run.config, run.trial)
        self._watch = UpdateWatch(run, self.actor, self.total_steps)
        self._has_published = False

    def batch(self, step: int) -> Batch | None:
        """Return the batch, or None after a stop. Collective.

        Rank 0 fetches it in rounds, so that other ranks learn about a delay or a stop.
        """
        with self._servers_have_gpus():
            return self._fetch_batch(step)

    def _fetch_batch(self, step: int) -> Batch | None:
        run, early = self.run, self.prefetch.take(step) if self.prefetch else None

        def fetch() -> bytes | None:
            if early is not None:
                return early.body
            try:
                return self.rollout.batch_bytes(step, run.lineage, run.stopping, within_s=ROUND_S)
            except TimeoutError:
                return b""

        while True:
            self._settle(wait=False)
            body = run.ranks.bytes_from_rank0(fetch)
            if body:
                batch: Batch = decode(body) if early is None else early.batch
                if self.prefetch is not None and step < self.total_steps:
                    self.prefetch.begin(step + 1, run.lineage)
                own = (group.index for group in batch.groups if group.index < FIRST_OUTSIDE)
                newest = max(own, default=-1)
                self._frontier = {"sealed": step, "newest_prompt": newest}
                return batch
            if run.ranks.any(body is None or run.stopping.is_set()):
                return None

    def update(self, step: int, batch: Batch) -> None:
        """Train on a batch. Raises DataUnusable as UpdateWatch does, and ConfigError as OutputChecks does."""
        is_first_rank = self.run.ranks.rank == 0  # the only one that logs metrics
        if is_first_rank:
            self._describe(self.run.stats, step, self.run.lineage, batch.groups)
        scored = self.data.score(batch)
        actor = self.actor
        clipped = compute_clipped_share(
            scored.rewards_B, actor.reward_bias, actor.reward_scaling, actor.reward_clip
        )
        scored = self.data.select_groups(scored)
        rows = scored.rows
        minibatches: list[Minibatch] = []
        known, kept, rewards = None, None, None
        credit: Sequence[np.ndarray] = []
        if rows:
            if self.data.needs_all_logprobs:
                known = self.data.compute_all_logprobs(rows)
            values_BT = None if self.critic is None else self.critic.compute_values(rows)
            rewards = self.data.make_rewards(scored, known, values_BT)
            credit = self.data.compute_credit(rows, rewards, known)
            kept = self.data.select_tokens(rows, known) if known and self.data.excludes_tokens else None
            if kept is not None:
                credit = exclude_tokens(credit, kept)
            if not self._warms_up(step):
                has_entropy = self.loss.entropy_coeff > 0
                minibatches = self.data.cut_minibatches(rows, rewards, credit, kept, has_entropy)
        # likely tokens of a teacher teach rows without credit, too
        taught: Sequence[np.ndarray] = [row.loss_mask for row in rows] if self.data.top_k else credit
        if is_first_rank:
            self._describe.report_shaping(self.run.stats, batch.groups, rows, taught, clipped)
        if self.samples is not None:
            self.samples.write_step(step, batch.groups, rows if credit else [], credit)
        mine = [minibatch.rows[self.run.engine.mesh.data_rank] for minibatch in minibatches]
        # the first update begins with the weights of the step's start
        num_unknown = int(known is None and self.data.can_reuse_logprobs(rows))
        if known is None:
            later = mine[num_unknown:]
            recomputed = [row for part in later for row in part] if later else None
            known = self.data.compute_logprobs(rows, [row for part in mine for row in part], recomputed)
        num_successful = 0
        totals: Counter[str] = Counter()
        for number, (minibatch, part) in enumerate(zip(minibatches, mine, strict=True)):
            is_unknown = number < num_unknown
            sequences = self.data.make_sequences(step, scored, credit, known, part, kept, is_unknown)
            # without recomputed log-probabilities, only the first update has the weights of the step's start
            measures = number == 0 or known.recomputed is not None
            loss = partial(self.loss.compute, minibatch.divisors, measures)
            sums = self.run.engine.train_batch(sequences, loss, minibatch.loss_weight, self.data.temperature)
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
            with self._servers_have_gpus():
                self._settle(wait=True)

    @contextmanager
    def _servers_have_gpus(self) -> Iterator[None]:
        """Lend shared GPUs to the servers for a block in which the trainer waits for them. Collective."""
        if self.shared_gpus is None:
            yield
        else:
            with self.shared_gpus.lend(lambda: self._settle(wait=True)):
                yield

    def _settle(self, wait: bool) -> bool:
        """Finish a publication in flight; return whether rank 0 has finished one. Collective."""
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
        return published is not None

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        """Let the rollout role evaluate the weights after `step`; log the result as a separate line.

        Returns {} without held-out data and on ranks above 0, None after a stop.
        """
        if self.config.valid_dataset is None:
            return {}
        with self._servers_have_gpus():
            return self._evaluate(step)

    def _evaluate(self, step: int) -> dict[str, float | int | str] | None:
        run = self.run
        self._settle(wait=True)
        if run.ranks.rank != 0:
            return {}
        start, version, results = time.monotonic(), str(run.version(step)), {}
        sets = run.choose_sets(step)
        for name in sets:
            result = self.rollout.evaluate(version, version, name, sets, run.stopping, run.make_progress)
            if result is None:
                return None
            results[name] = result
        return self.report_evaluation(step, version, results, time.monotonic() - start)

    def report_evaluation(
        self, step: int, version: str, results: Mapping[str, EvalResult], elapsed_s: float
    ) -> dict[str, float | int | str]:
        """Log the results of an evaluation by set as a separate line; return its metrics. Rank 0 only."""
        run = self.run
        numbers = make_numbers(version, results, elapsed_s)
        run.writers.log(step, {"time": time.time(), "lineage": run.lineage, **numbers})
        if self.samples is not None and "" in results:
            self.samples.write_evaluation(step, results[""].reward, results[""].groups)
        logger.info("step %d: %s", step, describe_results(results))
        return numbers

    def position(self, step: int) -> tuple[int, int]:
        consumed = step * self.config.train_dataset.batch_size
        return divmod(consumed, self.num_prompts) if self.num_prompts else (0, consumed)

    def frontier(self, step: int) -> dict[str, int]:
        """Return the newest batch in the state, and its largest prompt index."""
        return self._frontier if self._frontier.get("sealed") == step else {"sealed": step}

    def retain(self, step: int) -> None:
        self.rollout.retain(step)

    def _warms_up(self, step: int) -> bool:
        """Return whether a step trains the critic alone."""
        return self.critic is not None and step <= self.critic.config.warmup_steps

    def _finish_step(self, step: int, num_successful: int, num_tried: int) -> None:
        """Advance the schedule. Raises DataUnusable as UpdateWatch does."""
        # the schedule counts the updates of a whole batch, even if dynamic sampling or the mask dropped rows
        missing = count_updates_per_step(self.config) - num_tried
        if missing > 0:
            self.run.engine.pass_updates(missing)
        if not num_tried and not self._warms_up(step):
            self.run.stats.mean("update_successful", 0.0, 1)
            logger.warning("no update in this step: no row is left to train on")
        self._watch.see(step, num_tried, num_successful)

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
        if not sums["update_successful"]:
            stats.add(SKIPPED, 1)
        stats.value("lr", sums["lr"])
        stats.add("rows_skipped", minibatch.num_skipped)
        stats.add("behave_dropped", sums.get("behave_dropped", 0.0))


def place_schedule(engine: Engine, step: int, updates_per_step: int) -> None:
    """Move the learning-rate schedule to `step`; the number of updates per step may have changed."""
    engine.pass_updates(step * updates_per_step - engine.counters()["updates"])
