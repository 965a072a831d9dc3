"""Environment: the base class for tasks that people write.

A subclass gives tasks (`items`, or `next_item`) and plays one episode (`episode`). It may replace `collect`,
which makes a group of episodes, and `evaluate`.
"""

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any

from hpc_rl.atropos.groups import ScoredGroup, make_group
from hpc_rl.atropos.inference_servers import InferenceServers
from hpc_rl.atropos.settings import EnvConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.types import Turn
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.rollout.conversation import Conversation
from hpc_rl.rollout.user_errors import Raised

logger = logging.getLogger(__name__)
MIN_ROOM_TOKENS = 1  # for a reply


class NoRoom(Exception):
    """The conversation has reached `max_token_length`."""


class Environment:
    """Tasks, and how to play and score them.

    Args:
        config: Settings of the environment.
        servers: Source of replies.
        tokenizer: The model's tokenizer.
    """

    items: Sequence[Any] = ()  # training tasks, in an order that changes with each epoch
    eval_items: Sequence[Any] = ()  # held-out tasks
    # for training; without a temperature, the trainer's is used
    sampling: dict[str, Any] = {}  # noqa: RUF012 (a default that subclasses replace)
    eval_sampling: dict[str, Any] = {"temperature": 0.0}  # noqa: RUF012

    def __init__(self, config: EnvConfig, servers: InferenceServers, tokenizer: Tokenizer) -> None:
        self.config = config
        self.servers = servers
        self.tokenizer = tokenizer
        self.trainer_temperature = 1.0  # until the trainer tells it
        self._waiting: list[Any] = []
        self._epoch = 0
        self._evaluating = asyncio.Semaphore(config.max_eval_workers)

    @property
    def name(self) -> str:
        """Name in logs and at the rollout API."""
        return self.config.wandb_name or type(self).__name__

    async def setup(self) -> None:
        """Prepare once, before anything else: load data, start a simulator."""

    async def next_item(self) -> Any:
        """Return the next training task; None at the end."""
        if not self._waiting:
            self._waiting = list(self.items)
            if not self._waiting:
                raise ConfigError(
                    f"environment class {type(self).__name__} must define `items` or a method `next_item`."
                )
            random.Random(f"{self.config.seed}/{self._epoch}").shuffle(self._waiting)
            self._epoch += 1
        return self._waiting.pop()

    async def episode(self, item: Any, conversation: Conversation) -> float:
        """Play one task, replying with `await conversation.reply()`, and return its score."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `episode(item, conversation)`")

    def conversation(self, item: Any, evaluate: bool = False) -> Conversation:
        """Return an episode's conversation at its start, from `item["messages"]` or `item["prompt"]`."""

        async def sample(input_ids: list[int]) -> Turn:
            room = self.config.max_token_length - len(input_ids)
            if room < MIN_ROOM_TOKENS:
                limit = f"max_token_length {self.config.max_token_length}"
                raise NoRoom(
                    f"the conversation has {len(input_ids)} tokens, which leaves no room for a reply within "
                    f"{limit}"
                )
            given = self.eval_sampling if evaluate else self._training_sampling
            stops = [*given.get("stop_token_ids", ()), *self.tokenizer.eos_token_ids]
            most = min(room, int(given.get("max_new_tokens", room)))
            settings = {**given, "max_new_tokens": most, "stop_token_ids": list(dict.fromkeys(stops))}
            return (await self.servers.generate(input_ids, evaluate=evaluate, **settings))[0]

        if isinstance(item, dict) and isinstance(item.get("messages"), list):
            return Conversation(self.tokenizer, sample, messages=item["messages"])
        if isinstance(item, dict) and isinstance(item.get("prompt"), str):
            messages = [{"role": "user", "content": item["prompt"]}]
            ids = self.tokenizer.encode(item["prompt"])
            return Conversation(self.tokenizer, sample, messages=messages, input_ids=ids)
        raise ConfigError(
            f"an item needs `messages` (a list) or a `prompt` (text), got {item!r:.200}; "
            "or replace the method `conversation`."
        )

    async def collect(self, item: Any) -> ScoredGroup | list[ScoredGroup] | None:
        """Return the group of a task, or several groups; None drops the task."""

        async def one() -> tuple[Conversation, float]:
            conversation = self.conversation(item)
            return conversation, await self.episode(item, conversation)

        async with asyncio.TaskGroup() as tasks:
            episodes = [tasks.create_task(one()) for _ in range(self.config.group_size)]
        finished = [episode.result() for episode in episodes]
        if not all(conversation.turns for conversation, _ in finished):
            logger.warning(
                "an episode ended without any reply of the model, so its group is dropped: %.200r", item
            )
            return None
        return make_group(finished, self.config.include_messages, self._training_sampling)

    @property
    def _training_sampling(self) -> dict[str, Any]:
        return {"temperature": self.trainer_temperature, **self.sampling}

    async def evaluate(self) -> dict[str, float]:
        """Return metrics of the current model: by default the mean score over `eval_items`.

        If an item's episode fails, it is skipped, logged and counted in `eval_failed`. If all fail, the first
        exception is raised.
        """
        running = [asyncio.create_task(self._evaluate_item(item)) for item in self.eval_items]
        try:
            outcomes = await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
        scores = [task for task in outcomes if isinstance(task, float)]
        failures = [task for task in outcomes if isinstance(task, Exception)]
        by_place: dict[str, list[Raised]] = {}
        for raised in map(Raised.from_error, failures):
            by_place.setdefault(raised.place, []).append(raised)
        for same in by_place.values():
            form = "%d of %d evaluation episodes failed and are left out of the score: %s\n%s"
            logger.warning(form, len(same), len(outcomes), same[0].text, same[0].trace)
        if failures and not scores:
            raise failures[0]
        metrics = (
            {"eval_score": sum(scores) / len(scores), "eval_items": float(len(scores))} if scores else {}
        )
        return {**metrics, "eval_failed": float(len(failures))} if failures else metrics

    async def _evaluate_item(self, item: Any) -> float | Exception:
        """Return an item's score, or its episode's exception. Raises ConfigError, NotImplementedError."""
        async with self._evaluating:
            try:
                return float(await self.episode(item, self.conversation(item, evaluate=True)))
            except (ConfigError, NotImplementedError):
                raise
            except Exception as error:
                return error
