"""Pools for an executor worker: token ids for the trial's own servers; chats for any pool."""

import asyncio
import contextlib
import copy
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar

from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.core.errors import InputRefused, RoleFailed, ServerUnavailable
from hpc_rl.core.types import Reply, TokenLogprobs, Turn
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.servers.client import GenerateRequest
from hpc_rl.servers.router import Router
from hpc_rl.servers.wire import get_sampling_temperature

logger = logging.getLogger(__name__)
T = TypeVar("T")
Chat = list[dict[str, Any]]
# to a chat; the exception of one that can't be input of the model
Answers = list[Reply] | InputRefused | Rejection


class ChatPool(Protocol):
    """Answers chats: ServerPool, or servers.external.Endpoint."""

    async def ask(
        self,
        messages: Chat,
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Reply]:
        """Return an answer for each seed; None means the pool's own limit and temperature."""


async def ask_each(asked: Iterable[Awaitable[list[Reply]]]) -> list[Answers]:
    """Return the answers to several chats that are asked at once. Raises all but what Answers has."""

    async def catch(one: Awaitable[list[Reply]]) -> Answers:
        try:
            return await one
        except (InputRefused, Rejection) as error:
            return _keep_refusal(error)

    return await asyncio.gather(*map(catch, asked))


def _keep_refusal(error: InputRefused | Rejection) -> InputRefused | Rejection:
    """Return the exception of a chat that can't be input of the model; raise another one."""
    if isinstance(error, Rejection) and error.reason != RejectReason.TOO_LONG:
        raise error
    return error


class ServerPool:
    """A pool of the trial's servers, with its model's tokenizer and its own sampling settings.

    `context` is the servers' limit of input and output tokens, None if unknown; `max_requests` calls run at
    once, None for any number; `trace` logs each request.
    """

    def __init__(
        self,
        name: str,
        router: Router,
        tokenizer: Tokenizer,
        gconfig: GenerationHyperparameters,
        context: int | None = None,
        max_requests: int | None = None,
        trace: bool = False,
    ) -> None:
        self.name, self.tokenizer = name, tokenizer
        self._router, self._context, self._trace = router, context, trace
        self._slots = asyncio.Semaphore(max_requests) if max_requests else contextlib.nullcontext()
        prefix = uuid.uuid4().hex
        self._rids = (f"{prefix}-{number:08x}" for number in itertools.count())
        self._is_exact = False  # whether requests exclude weights newer than their minimum
        self._configure_sampling(gconfig, "gconfig")

    def _configure_sampling(self, gconfig: GenerationHyperparameters, section: str) -> None:
        self._gconfig = gconfig
        self._sampling = make_sampling(gconfig, self.tokenizer.eos_token_ids)
        self._limit, self._limited_by = gconfig.max_tokens, f"{section}.max_tokens is {gconfig.max_tokens}"
        if self._context is not None and self._context < self._limit:
            self._limit, self._limited_by = self._context, f"the model's context is {self._context}"

    def copy_with_sampling(
        self, gconfig: GenerationHyperparameters, section: str, is_exact: bool = False
    ) -> Self:
        """Return the same pool with the sampling settings of another section of the configuration.

        With `is_exact` its requests go only to servers that are held at their version.
        """
        other = copy.copy(self)
        other._is_exact = is_exact
        other._configure_sampling(gconfig, section)
        return other

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters common to all requests, under SGLang's names."""
        return {**self._sampling, "min_new_tokens": self._gconfig.min_new_tokens}

    @property
    def limit(self) -> int:
        """The largest number of tokens of input and output together."""
        return self._limit

    @property
    def max_new_tokens(self) -> int:
        return self._gconfig.max_new_tokens

    def bind(self, request: GenerateRequest, min_version: str) -> GenerateRequest:
        """Return a request with its own sampling, limited to servers with the right weights."""
        return replace(request, min_version=min_version, exact=self._is_exact)

    def request(
        self,
        input_ids: list[int],
        seed: int,
        min_version: str = "",
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> GenerateRequest:
        """Return the request for one sample. Raises InputRefused without a token, Rejection for too many.

        `max_tokens` limits input and output together, in addition to the pool's own limit.
        """
        if not input_ids:
            raise InputRefused("the prompt has no tokens")
        limit, limited_by = self._limit, self._limited_by
        if max_tokens is not None and max_tokens < limit:
            limit, limited_by = max_tokens, f"the workflow's limit is {max_tokens}"
        room = min(limit - len(input_ids), max_new_tokens or self._gconfig.max_new_tokens)
        if room <= 0:
            problem = f"{len(input_ids)} tokens, {limited_by} (pool {self.name})"
            raise Rejection(RejectReason.TOO_LONG, problem)
        own: dict[str, Any] = {
            "max_new_tokens": room,
            "min_new_tokens": min(self._gconfig.min_new_tokens, room),
            "sampling_seed": seed,
        }
        if temperature is not None:
            own["temperature"] = temperature
        sampling = {**self._sampling, **own}
        return GenerateRequest(input_ids, sampling, next(self._rids), min_version, self._is_exact)

    def encode_chat(self, messages: Chat) -> list[int]:
        """Return the tokens of a chat up to the model's reply. Raises ConfigError without a chat template."""
        return self.tokenizer.encode(self.tokenizer.chat(messages), add_special_tokens=False)

    async def ask(
        self,
        messages: Chat,
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        min_version: str = "",
    ) -> list[Reply]:
        """Return an answer for each seed, all from one server. Raises like request, encode_chat, generate."""
        ids = self.encode_chat(messages)
        turns = await self.generate(
            [self.request(ids, seed, min_version, max_new_tokens, temperature) for seed in seeds]
        )
        return self._decode(turns)

    async def ask_many(
        self,
        chats: Sequence[Chat],
        seeds: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        min_version: str = "",
    ) -> list[Answers]:
        """Return the answers to each chat, one for each of its seeds, by one request to one server.

        The server that has read the beginning of one chat need not read it again in the others. Servers stay
        balanced, because the router counts the samples of a request. Raises like ask, but for a chat that
        can't be input.
        """
        found: dict[int, Answers] = {}
        requests: dict[int, list[GenerateRequest]] = {}
        for number, (messages, own) in enumerate(zip(chats, seeds, strict=True)):
            try:
                ids = self.encode_chat(messages)
                requests[number] = [self.request(ids, seed, min_version, max_new_tokens) for seed in own]
            except (InputRefused, Rejection) as error:
                found[number] = _keep_refusal(error)
        joined = [one for several in requests.values() for one in several]
        try:
            turns = iter(await self.generate(joined) if joined else [])
        except InputRefused:  # the server does not name the chat, so ask each alone
            asks = [self.ask(chats[i], seeds[i], max_new_tokens, min_version=min_version) for i in requests]
            found |= zip(requests, await ask_each(asks), strict=True)
        else:
            found |= {i: self._decode(itertools.islice(turns, len(own))) for i, own in requests.items()}
        return [found[number] for number in range(len(chats))]

    def _decode(self, turns: Iterable[Turn]) -> list[Reply]:
        decode = self.tokenizer.decode
        return [Reply(decode(turn.output_ids), len(turn.output_ids), turn.finish_reason) for turn in turns]

    async def score(self, inputs: Sequence[list[int]]) -> list[float]:
        """Return the reward model's score of each input, all from one server.

        Raises Rejection for an input that is too long, and the same as generate.
        """
        longest = max(map(len, inputs))
        if self._context is not None and longest > self._context:
            problem = f"{longest} tokens, the context of its reward model is {self._context}"
            raise Rejection(RejectReason.TOO_LONG, f"{problem} (pool {self.name})")
        requests = [GenerateRequest(ids, {}, "") for ids in inputs]
        async with self._slots:
            return await self._retry(lambda: self._router.score_many(requests))

    async def compute_logprobs(
        self, inputs: Sequence[list[int]], starts: Sequence[int], top_k: int = 0, min_version: str = ""
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens of each input from its start (at least 1) on.

        They are at temperature 1, all from one server. `top_k` adds the likely tokens at each position.
        Raises Rejection for an input that is too long, and the same as generate.
        """
        longest = max(map(len, inputs))
        if self._context is not None and longest > self._context:
            problem = f"{longest} tokens, the model's context is {self._context}"
            raise Rejection(RejectReason.TOO_LONG, f"{problem} (pool {self.name})")
        requests = [GenerateRequest(ids, {}, "", min_version, self._is_exact) for ids in inputs]
        async with self._slots:
            return await self._retry(lambda: self._router.logprobs_many(requests, list(starts), top_k))

    async def generate(self, requests: list[GenerateRequest]) -> list[Turn]:
        """Return the turns of one prompt. Raises Rejection if every attempt failed, RequestRefused."""
        if self._trace:
            for request in requests:
                sizes = (len(request.input_ids), request.sampling["max_new_tokens"])
                form = "request %s goes to pool %s: %d tokens in, at most %d out, %s"
                least = request.min_version
                weights = f"weights {least} or newer" if least else "any weights"
                logger.info(form, request.rid, self.name, *sizes, weights)
        async with self._slots:
            turns = await self._retry(lambda: self._router.generate_many(requests))
        if self._trace:
            for request, turn in zip(requests, turns, strict=True):
                form = "request %s is answered: %d tokens out, finish reason %s, weights %s"
                logger.info(form, request.rid, len(turn.output_ids), turn.finish_reason, turn.versions)
        return turns

    async def _retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await ask()
            except ServerUnavailable as error:
                # rollout.request_retries bounds all tries: the prompt is not issued again
                problem = f"pool {self.name}: rollout.request_retries are used up: {error}"
                raise Rejection(RejectReason.EXCEPTION, problem) from error
            except RoleFailed as error:
                # no server is alive or has new enough weights: not the prompt's fault
                logger.warning("requests to pool %s wait: %s", self.name, error)
                await asyncio.sleep(1.0)


def make_sampling(gconfig: GenerationHyperparameters, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the sampling parameters common to all requests, under SGLang's names."""
    parameters = {
        "temperature": get_sampling_temperature(gconfig),
        "top_p": gconfig.top_p,
        "top_k": -1 if gconfig.top_k >= 100_000_000 else gconfig.top_k,
        "stop_token_ids": list(dict.fromkeys([*gconfig.stop_token_ids, *eos_token_ids])),
    }
    unusual: dict[str, tuple[Any, Any]] = {
        "stop": (gconfig.stop or None, None),
        "frequency_penalty": (gconfig.frequency_penalty, 0.0),
        "min_p": (gconfig.min_p, 0.0),
        "repetition_penalty": (gconfig.repetition_penalty, 1.0),
    }
    return parameters | {name: value for name, (value, neutral) in unusual.items() if value != neutral}
