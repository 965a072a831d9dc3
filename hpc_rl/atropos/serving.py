"""`serve`, `make_groups` and `evaluate`: the three ways to run an environment."""

import asyncio
import json
import logging
import math
from collections import deque
from pathlib import Path
from typing import Any

from hpc_rl.atropos.environment import Environment
from hpc_rl.atropos.groups import GroupFile, ScoredGroup
from hpc_rl.atropos.rollout_api import EnvStatus, Registration, RolloutApi
from hpc_rl.atropos.settings import EvalHandling
from hpc_rl.atropos.workers import Workers
from hpc_rl.core.errors import ConfigError
from hpc_rl.rollout.user_errors import Raised

logger = logging.getLogger(__name__)
POLL_S = 0.2


class Serving:
    """An environment that serves a trainer.

    Args:
        environment: Makes the groups.
        api: Takes the groups.
        stopping: Set to end early.
    """

    def __init__(self, environment: Environment, api: RolloutApi, stopping: asyncio.Event) -> None:
        self.environment = environment
        self.config = environment.config
        self.workers = Workers(environment, self._deliver)
        self.evaluations_failed = 0
        self._api = api
        self._stopping = stopping
        self._registration: Registration | None = None
        self._evaluation: asyncio.Task[dict[str, float]] | None = None
        self._step = 0
        self._sent_when_logged = 0
        self._wandb: Any = None
        self._rollouts: deque[tuple[str, float]] = deque(maxlen=self._count_rows_to_keep())
        path = self.config.data_path_to_save_groups
        self._file = GroupFile(Path(path), environment.tokenizer.decode) if path else None

    async def run(self) -> None:
        """Make groups until the trainer has made its steps, or the tasks end."""
        await self.environment.setup()
        if self.config.use_wandb:
            self._wandb = start_wandb(*await self._api.fetch_wandb_info(), self.environment.name)
        self._registration = await self._api.register(self.config, self.environment.name)
        self._step = self._registration.starting_step
        if self.config.group_size > self._registration.batch_size:
            raise ConfigError(
                f"env.group_size is {self.config.group_size}, but a batch of this trainer has "
                f"{self._registration.batch_size} sequences: lower env.group_size."
            )
        if self.config.batch_size not in (-1, self._registration.batch_size):
            form = "env.batch_size %d is ignored: the trainer decides, and its batch has %d sequences"
            logger.warning(form, self.config.batch_size, self._registration.batch_size)
        if self._registration.temperature is not None:
            self.environment.trainer_temperature = self._registration.temperature
        logger.info(
            "the environment has registered as %s; the trainer is at step %d",
            self._registration.name,
            self._step,
        )
        try:
            while not self._stopping.is_set() and not self.workers.idle:
                status = await self._api.status(self._registration.env_id)
                self.environment.servers.change_weight(status.env_weight)
                self._note_step(status.current_step)
                if self._is_finished(status):
                    break
                await self._work(status)
                await asyncio.sleep(POLL_S)
        finally:
            await self._close()

    async def _work(self, status: EnvStatus) -> None:
        limit = self._count_workers(status)
        handling = self.config.eval_handling
        if self._evaluation is not None and handling is not EvalHandling.NONE:
            if handling is EvalHandling.STOP_TRAIN:
                await self.workers.pause()
                limit = 0
            else:
                limit = min(limit, int(self.config.eval_limit_ratio * self._get_max_workers()))
        if self._is_far_ahead(status):
            await self.workers.pause()
            limit = 0
        await self.workers.fill(limit)
        if self._evaluation is not None and self._evaluation.done():
            self._finish_evaluation(self._evaluation)

    def _finish_evaluation(self, evaluation: asyncio.Task[dict[str, float]]) -> None:
        """Log a finished evaluation; count a failed one. Raises ConfigError."""
        self._evaluation = None
        try:
            self._log_evaluation(evaluation.result())
        except ConfigError:
            raise
        except (Exception, BaseExceptionGroup) as error:
            self.evaluations_failed += 1
            raised = Raised.from_error(error)
            form = "the evaluation at step %d failed; the environment continues: %s\n%s"
            logger.warning(form, self._step, raised.text, raised.trace)

    def _get_max_workers(self) -> int:
        own = self.config.max_num_workers
        return own if own > 0 else self.config.max_num_workers_per_node * max(1, len(self._servers))

    @property
    def _servers(self) -> list[Any]:
        return self.environment.servers.servers

    def _count_workers(self, status: EnvStatus) -> int:
        """Return how many workers may run: this environment's share of the queue limits them."""
        assert self._registration is not None
        share = status.unallocated_fraction + (self.config.min_batch_allocation or 0.0)
        wanted = self.config.max_batches_offpolicy * self._registration.batch_size * min(1.0, share)
        return max(0, min(self._get_max_workers(), int(wanted) // self.config.group_size - status.queue_size))

    def _is_far_ahead(self, status: EnvStatus) -> bool:
        assert self._registration is not None
        waiting = status.queue_size * self.config.group_size
        return waiting >= self.config.max_batches_offpolicy * self._registration.batch_size

    def _is_finished(self, status: EnvStatus) -> bool:
        assert self._registration is not None
        total = self.config.total_steps if self.config.total_steps >= 0 else self._registration.num_steps
        waiting = status.queue_size * self.config.group_size // self._registration.batch_size
        return status.current_step + waiting > total or status.current_step >= total

    def _note_step(self, step: int) -> None:
        if step == self._step:
            return
        every = self.config.steps_per_eval
        if every > 0 and step // every != self._step // every and self._evaluation is None:
            self._evaluation = asyncio.create_task(self.environment.evaluate())
        self._step = step
        sent = self.workers.counts["sent"]
        if sent - self._sent_when_logged >= self.config.min_items_sent_before_logging:
            self._log_training()
            self._sent_when_logged = sent

    async def _deliver(self, groups: list[ScoredGroup]) -> None:
        assert self._registration is not None
        await self._api.send(groups, self._registration.env_id)
        for group in groups:
            if self._file is not None:
                self._file.add(group, env_id=self._registration.env_id, step=self._step)
            shown = self.config.num_rollouts_per_group_for_logging
            rows = range(len(group.tokens) if shown < 0 else min(shown, len(group.tokens)))
            for i in rows:
                self._rollouts.append((self.environment.tokenizer.decode(group.tokens[i]), group.scores[i]))

    def _count_rows_to_keep(self) -> int:
        per_group = self.config.num_rollouts_per_group_for_logging
        return max(0, self.config.num_rollouts_to_keep) * (
            self.config.group_size if per_group < 0 else per_group
        )

    def _log_training(self) -> None:
        counts, scores = self.workers.counts, self.workers.scores
        mean = sum(scores) / len(scores) if scores else math.nan
        scores.clear()
        metrics = {f"groups_{name}": float(count) for name, count in sorted(counts.items()) if name}
        metrics["score"] = mean
        if self.evaluations_failed:
            metrics["evaluations_failed"] = float(self.evaluations_failed)
        for number, server in enumerate(self.environment.servers.metrics()):
            metrics[f"server_{number}_latency_s"] = server.median_latency_s
        logger.info("step %d: %s", self._step, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
        if self._wandb is not None:
            import wandb

            table = wandb.Table(columns=["text", "score"], data=[list(row) for row in self._rollouts])
            self._wandb.log({**metrics, "rollouts": table}, step=self._step)

    def _log_evaluation(self, metrics: dict[str, float]) -> None:
        logger.info("evaluation at step %d: %s", self._step, json.dumps(metrics))
        if self._wandb is not None:
            self._wandb.log(metrics, step=self._step)

    async def _close(self) -> None:
        await self.workers.pause()
        if self._evaluation is not None:
            await asyncio.wait({self._evaluation})
            self._finish_evaluation(self._evaluation)
        if self.workers.counts["sent"] > self._sent_when_logged or self.evaluations_failed:
            self._log_training()
        if self._registration is not None and self._stopping.is_set():
            await self._api.disconnect(self._registration.env_id)
        if self._file is not None:
            logger.info(
                "the groups are in %s; a page to read them is %s", self._file.path, self._file.close()
            )
        if self._wandb is not None:
            self._wandb.finish()


async def make_groups(environment: Environment, path: Path, stopping: asyncio.Event) -> tuple[int, Path]:
    """Make `total_steps` groups without a trainer; return the number of written groups, and the HTML page."""
    config = environment.config
    await environment.setup()
    file = GroupFile(path, environment.tokenizer.decode)
    written = 0

    async def keep(groups: list[ScoredGroup]) -> None:
        nonlocal written
        for group in groups[: config.total_steps - written]:
            file.add(group, step=0)
            written += 1
            logger.info(
                "group %d of %d is written; its scores are %s", written, config.total_steps, group.scores
            )

    workers = Workers(environment, keep)
    most = config.max_num_workers if config.max_num_workers > 0 else config.max_num_workers_per_node
    while written < config.total_steps and not workers.idle and not stopping.is_set():
        await workers.fill(min(most, config.total_steps - written))
        await asyncio.sleep(0.01)
    await workers.pause()
    return written, file.close()


def start_wandb(group: str, project: str, name: str) -> Any:
    """Begin a run in the trainer's project and group. Raises ConfigError if wandb is not installed."""
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            "env.use_wandb is true, but wandb is not installed: pip install 'hpc-rl[wandb]', "
            "or give --env.use_wandb false."
        ) from None
    return wandb.init(project=project, group=group or None, name=name)
