"""Workers: make the groups of an environment concurrently, and deliver them."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

from hpc_rl.atropos.environment import Environment, NoRoom
from hpc_rl.atropos.groups import ScoredGroup
from hpc_rl.core.errors import ConfigError, RequestRefused
from hpc_rl.rollout.user_errors import Raised

logger = logging.getLogger(__name__)
MAX_FAILURES_IN_A_ROW = 64

Deliver = Callable[[list[ScoredGroup]], Awaitable[None]]


class Workers:
    """Makes groups of an environment's tasks, each in its own asyncio task.

    If a worker is cancelled, its task is played again. If it fails or takes too long, the task is dropped and
    counted.

    Args:
        environment: Makes the groups.
        deliver: Takes the groups.
    """

    def __init__(self, environment: Environment, deliver: Deliver) -> None:
        self.environment = environment
        self.counts: Counter[str] = Counter()  # sent, and dropped by reason
        self.scores: deque[float] = deque(maxlen=1000)
        self.exhausted = False
        self._deliver = deliver
        self._running: dict[asyncio.Task[None], tuple[Any, float]] = {}
        self._backlog: list[Any] = []
        self._failures = 0  # in a row
        self._logged: set[str] = set()  # places of exceptions

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing more will start."""
        return self.exhausted and not self._running and not self._backlog

    async def fill(self, limit: int) -> None:
        """Start workers up to `limit`; cancel slow ones. Raises the fatal error of a worker."""
        self._collect_finished()
        for task, (item, begun) in list(self._running.items()):
            if time.monotonic() - begun > self.environment.config.worker_timeout:
                logger.warning(
                    "an episode took longer than env.worker_timeout, so it is dropped; its item: %.200r", item
                )
                self.counts["timeout"] += 1
                await self._cancel(task)
        while len(self._running) < limit:
            item = self._backlog.pop() if self._backlog else await self.environment.next_item()
            if item is None:
                self.exhausted = True
                return
            self._running[asyncio.create_task(self._make(item))] = (item, time.monotonic())

    async def pause(self) -> None:
        """Cancel all workers; their tasks are played again later."""
        for task, (item, _) in list(self._running.items()):
            await self._cancel(task)
            self._backlog.append(item)

    async def drain(self) -> None:
        """Wait until all workers have finished."""
        if self._running:
            await asyncio.wait(self._running)
        self._collect_finished()

    async def _cancel(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        task.cancel()
        await asyncio.wait({task})

    def _collect_finished(self) -> None:
        for task in [task for task in self._running if task.done()]:
            del self._running[task]
            task.result()

    async def _make(self, item: Any) -> None:
        try:
            made = await self.environment.collect(item)
        except (ConfigError, NotImplementedError):
            raise
        except (Exception, BaseExceptionGroup) as error:
            self._count_failure(item, error)
            return
        self._failures = 0
        groups = [] if made is None else made if isinstance(made, list) else [made]
        kept = [group for group in groups if self._is_wanted(group)]
        self.counts["none"] += not groups
        if kept:
            await self._deliver(kept)
            self.counts["sent"] += len(kept)
            self.scores.extend(score for group in kept for score in group.scores)

    def _count_failure(self, item: Any, error: BaseException) -> None:
        causes = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
        if all(isinstance(cause, NoRoom) for cause in causes):
            self.counts["too_long"] += 1
            logger.warning("an episode is dropped, because %s; its item: %.200r", causes[0], item)
            return
        for cause in causes:
            if isinstance(cause, ConfigError | NotImplementedError):
                raise cause
        self.counts["exception"] += 1
        self._failures += 1
        raised = Raised.from_error(causes[0])
        trace = "" if raised.place in self._logged else f"\n{raised.trace}"
        self._logged.add(raised.place)
        logger.warning(
            "an episode is dropped, because it raised %s; its item: %.200r%s", raised.text, item, trace
        )
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            raise RequestRefused(
                f"{self._failures} episodes in a row failed, the last with {raised.text}; "
                "the environment stops"
            )

    def _is_wanted(self, group: ScoredGroup) -> bool:
        config = self.environment.config
        reason = ""
        if len(group.tokens) != config.group_size:
            reason = "wrong_size"
        elif config.ensure_scores_are_not_same and group.has_equal_scores:
            reason = "equal_scores"
        elif config.max_token_length > 0 and any(len(ids) > config.max_token_length for ids in group.tokens):
            reason = "too_long"
        self.counts[reason] += bool(reason)
        return not reason
