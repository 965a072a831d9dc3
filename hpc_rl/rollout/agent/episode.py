"""One episode of an agent: OpenAI's API for this agent alone, and the record of its calls."""

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpc_rl.core.errors import ConfigError, RequestRefused
from hpc_rl.core.types import Turn
from hpc_rl.datasets.continuation import encode_continuation
from hpc_rl.gateway.answers import find_tool_calls
from hpc_rl.gateway.completions import Completion
from hpc_rl.gateway.gateway import Gateway, GatewaySettings
from hpc_rl.gateway.requests import Bounds, Chat, Order, RequestReader, Wire
from hpc_rl.rollout.agent.history import ChatHistory, has_reply
from hpc_rl.rollout.agent.joining import Call
from hpc_rl.rollout.rewards import Rejection, Score
from hpc_rl.rollout.workflow import Sampler
from hpc_rl.servers.client import GenerateRequest

MAX_OPEN_CALLS = 64  # of one episode; more wait
MAX_N = 64  # completions of one call


class EpisodeFailed(Exception):
    """An episode without a usable end; `output` is what the agent has written."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass
class EpisodeLimits:
    """Limits of each episode, and what all episodes of a worker share.

    Args:
        max_calls: Completions that an agent may get.
        keep_tokens: Whether a conversation continues with the tokens of its replies.
        ignored: Parameters of requests that were logged as ignored.
    """

    max_calls: int
    keep_tokens: bool
    ignored: set[str] = field(default_factory=set)


class _PromptServers:
    """The servers of a prompt's sampler, as a gateway wants them."""

    num_servers = 1

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def describe_servers(self) -> list[dict[str, Any]]:
        return []

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Turn]:
        try:
            return await self._sampler.send(requests)
        except Rejection as error:  # all tries at all servers failed: the agent may try again
            raise RequestRefused(error.message) from error


class EpisodeReader(RequestReader):
    """Reads the requests of an episode: with the trial's sampling, and the tokens of earlier replies."""

    def __init__(self, sampler: Sampler, label: str, limits: EpisodeLimits) -> None:
        pool = sampler.source
        bounds = Bounds(pool.max_new_tokens, pool.limit, pool.tokenizer.size, MAX_N)
        super().__init__(pool.tokenizer, bounds, limits.ignored)
        self.history = ChatHistory()
        self.num_rewritten = 0  # chats with replies whose tokens are not known
        self._sampling, self._keeps = pool.sampling, limits.keep_tokens
        self._sampler, self._label = sampler, label
        self._asked: Counter[str] = Counter()  # prompts, for the seeds of repeated ones

    def parse(self, wire: Wire, body: dict[str, Any]) -> Order:
        given = {name: value for name, value in body.items() if value is not None}
        order = super().parse(wire, {**self._sampling, **given})
        for prompt in order.prompts:
            if "sampling_seed" not in prompt.sampling:
                prompt.sampling["sampling_seed"] = self._make_seed(prompt.input_ids)
        return order

    def _make_seed(self, ids: Sequence[int]) -> int:
        """Return a seed that depends on the prompt, not on the order of an agent's concurrent calls."""
        digest = hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=8).hexdigest()
        self._asked[digest] += 1
        return (
            self._sampler.make_seed(f"{self._label}/{digest}", self._asked[digest]) >> 1
        )  # room for the numbers of further completions

    def _encode_chat(self, chat: Chat) -> list[int]:
        rendered = super()._encode_chat(chat)
        found = self.history.find(chat)
        if found is None:
            self.num_rewritten += self.history.is_used and has_reply(chat.messages)
            return rendered
        call, number = found
        if rendered[: len(call.ids)] == call.ids:
            return rendered
        if self._keeps:
            before, new = chat.messages[: number - 1], chat.messages[number:]
            try:
                added = encode_continuation(
                    self.tokenizer, before, new, call.turn.output_ids, **chat.variables
                )
                return call.ids + added
            except (ConfigError, TypeError):  # a template that refuses a text in place of a tool call
                pass
        self.num_rewritten += 1
        return rendered


class Episode(Gateway):
    """The gateway of one agent. `label` is the same for the same start of the agent after a restart.

    `key` is its secret; `calls` are its complete answers, in order; `reward` is the posted one, if any.
    `broken` gets an exception once the episode can't be used any more.
    """

    answers_probes = False

    def __init__(self, sampler: Sampler, label: str, limits: EpisodeLimits) -> None:
        self._own_reader = EpisodeReader(sampler, label, limits)
        super().__init__(
            _PromptServers(sampler),
            sampler.source.tokenizer,
            None,
            self._own_reader.bounds,
            GatewaySettings(max_requests=MAX_OPEN_CALLS),
            sampler.tokenizer.folder.name,
            self._own_reader,
        )
        self.key = secrets.token_urlsafe(32)
        self.calls: list[Call] = []
        self.reward: Score | None = None
        self.reward_problem = ""  # of a posted reward
        self.last_text = ""  # of the latest completion
        self.broken = asyncio.get_running_loop().create_future()
        self.broken.add_done_callback(lambda broken: broken.cancelled() or broken.exception())
        self._limits, self._num_asked = limits, 0

    @property
    def num_rewritten(self) -> int:
        """The number of chats whose earlier replies are not tokens of this episode."""
        return self._own_reader.num_rewritten

    def post_reward(self, reward: Score) -> None:
        """Take the reward that the agent has posted; the last one counts."""
        self.reward, self.reward_problem = reward, ""

    def refuse_reward(self, problem: str) -> None:
        """Note that the agent posted something else than a reward."""
        self.reward_problem = problem

    def fail(self, message: str) -> None:
        """End the episode without a use."""
        if not self.broken.done():
            self.broken.set_exception(EpisodeFailed(message))

    async def make(
        self,
        completions: Sequence[Completion],
        evaluation: bool = False,
        changed: asyncio.Event | None = None,
    ) -> None:
        """Make completions and record them, once all are there. Raises as a gateway does."""
        self._num_asked += len(completions)
        if self._num_asked > self._limits.max_calls:
            message = f"the agent asked for more than {self._limits.max_calls} completions (max_calls)"
            self.fail(message)
            raise RequestRefused(message)
        await super().make(completions, evaluation, changed)
        for one in completions:
            self._record(one)

    def _record(self, one: Completion) -> None:
        order = one.order
        call = Call(order.input_ids, one.turn, order.sampling.get("temperature", 1.0))
        self.calls.append(call)
        self.last_text = one.text
        if order.chat is not None:
            calls, content = find_tool_calls(one.text) if order.chat.variables["tools"] else ([], one.text)
            reply = {"role": "assistant", "content": content, "tool_calls": calls}
            self._own_reader.history.add(order.chat, reply, call)
