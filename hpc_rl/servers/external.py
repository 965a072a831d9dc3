"""A pool at an external endpoint with OpenAI's chat API.

A failed request is retried with growing pauses until the endpoint has failed for `patience_s`. Errors caused
by the input are raised at once. Errors name the pool, the URL and the status, and never show the key.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from hpc_rl.config.options.pools import PoolConfig
from hpc_rl.core.errors import (
    ConfigError,
    EndpointUnavailable,
    InputRefused,
    RequestRefused,
    ServerUnavailable,
)
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.types import Reply, TokenLogprobs

logger = logging.getLogger(__name__)
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
MAX_ANSWER_CHARS = 400  # of the endpoint's answer, in error messages
CHATS = "/chat/completions"
COMPLETIONS = "/completions"
OF_INPUT = (400, 413, 422)  # statuses caused by the input
FIRST_PATIENCE_S = 30.0  # with a status such as 401 or 404 before the first answer
HANGS_S = 60.0  # log a request that has waited this long for an answer
REPEAT_S = 300.0  # log a lasting problem again after this time
MAX_SEED = 0x7FFFFFFF  # some endpoints take 32 bits


class _WithoutModels(RequestRefused):
    """The endpoint does not list its models."""


@dataclass(slots=True)
class _Answer:
    """The result of one try."""

    status: int  # 0 if there was no answer
    problem: str = ""  # of a failed try
    content: Any = None
    wait_s: float = 0.0  # pause that the endpoint asks for


@dataclass
class Endpoint:
    """Use as `async with Endpoint(...) as pool`, which finds the model. Raises ConfigError."""

    name: str
    pool: PoolConfig
    api_key: str = ""
    request_timeout_s: float = 3600.0  # of one request
    patience_s: float = 600.0
    trace: bool = False  # log each chat request and its answer
    # called with a new problem, and with "" when the endpoint answers again
    on_change: Callable[[str], None] = lambda problem: None
    model: str = ""  # set at the start

    async def __aenter__(self) -> Endpoint:
        # compute nodes may need a proxy from environment variables to reach the endpoint
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=True)
        self._slots = asyncio.Semaphore(self.pool.max_requests)
        self._warned_at = 0.0  # time of the last warning about a lasting failure; 0: no failure
        self._answered_at = 0.0  # time of the newest answer to a chat; 0: no answer yet
        try:
            self.model = await self._find_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._session.close()

    async def ask(
        self,
        messages: list[dict[str, Any]],
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Reply]:
        """Return one answer per seed. Each request sends the first seed that has no answer yet.

        At temperature 0, all answers are the same. Raises InputRefused, ServerUnavailable,
        EndpointUnavailable.
        """
        chosen = self.pool.temperature if temperature is None else temperature
        # greedy answers are all the same, and vLLM refuses n > 1 for them
        num = len(seeds) if chosen else min(1, len(seeds))
        replies: list[Reply] = []
        while len(replies) < num:  # some endpoints ignore `n` and return one answer
            body = {
                "model": self.model,
                "messages": messages,
                "n": num - len(replies),
                "seed": seeds[len(replies)] & MAX_SEED,
                "max_tokens": max_new_tokens or self.pool.max_new_tokens,
                "temperature": chosen,
                "top_p": self.pool.top_p,
            }
            replies += await self._call_traced(body)
        return replies[:num] if chosen else [copy.copy(replies[0]) for _ in seeds]

    async def compute_logprobs(
        self, inputs: list[list[int]], starts: list[int], top_k: int = 0, min_version: str = ""
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens of each input from its start on.

        The endpoint must take token ids as `prompt`, with `echo` and `logprobs`, as vLLM's does. Raises
        ConfigError for another one, and as ask.
        """
        assert not top_k, "the likely tokens come as texts, not as ids"
        try:
            answers = await asyncio.gather(*(self._call(COMPLETIONS, self._make_echo(ids)) for ids in inputs))
        except InputRefused:
            raise
        except RequestRefused as error:  # as 404
            raise self._refuse_scoring(f" ({error})") from error
        return [
            TokenLogprobs(self._take_echo(answer, len(ids), start))
            for answer, ids, start in zip(answers, inputs, starts, strict=True)
        ]

    def _make_echo(self, ids: list[int]) -> dict[str, Any]:
        return {"model": self.model, "prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1}

    def _take_echo(self, answer: Any, num_tokens: int, start: int) -> list[float]:
        try:
            values = answer["choices"][0]["logprobs"]["token_logprobs"][start:num_tokens]
            if len(values) == num_tokens - start and all(isinstance(one, int | float) for one in values):
                return [float(one) for one in values]
        except (KeyError, TypeError, IndexError):
            pass
        raise self._refuse_scoring()

    async def check_scoring(self) -> None:
        """Raise ConfigError if the endpoint returns no log-probabilities of given tokens."""
        try:
            await self.compute_logprobs([[0, 1]], [1])
        except InputRefused as error:
            raise self._refuse_scoring(f" ({error})") from error

    def _refuse_scoring(self, cause: str = "") -> ConfigError:
        why = f": {self._describe_path(COMPLETIONS)} returns no log-probabilities of given tokens{cause}"
        use = "a teacher needs an endpoint with `echo`, such as vLLM's, or servers of the trial"
        return ConfigError(Refusal(option=f"pools.{self.name}.url", kind=Kind.MACHINE, why=why, use=use))

    async def _call_traced(self, body: dict[str, Any]) -> list[Reply]:
        if self.trace:
            sizes = (body["n"], len(body["messages"]), body["max_tokens"], body["temperature"])
            form = (
                "chat %d asks pool %s for %d answers to %d messages, at most %d tokens each, temperature %g"
            )
            logger.info(form, body["seed"], self.name, *sizes)
        replies: list[Reply] = await self._call(CHATS, body)
        if self.trace:
            said = ", ".join(f"{one.num_tokens} tokens ({one.finish_reason})" for one in replies)
            logger.info("chat %d has answers from pool %s: %s", body["seed"], self.name, said)
        return replies

    async def _find_model(self) -> str:
        """Return the configured model, or the only model that the endpoint lists."""
        option, url = f"pools.{self.name}.model", f"pools.{self.name}.url"
        try:
            listed = await self._call("/models")
            names = [str(one["id"]) for one in listed["data"]]
        except _WithoutModels as error:
            if self.pool.model:
                return self.pool.model
            why = f": {error}"
            raise ConfigError(
                Refusal(option=option, kind=Kind.MISSING, why=why, use="set this option to the model's name")
            ) from error
        except RequestRefused as error:
            key = self.pool.api_key_env
            hint = f"Is the key in {key} right?" if key else f"Does it need pools.{self.name}.api_key_env?"
            raise ConfigError(Refusal(option=url, kind=Kind.MACHINE, why=f": {error}. {hint}")) from error
        except (KeyError, TypeError) as error:
            why = f": {self._describe_path('/models')} did not answer with a list of models"
            use = "give the base URL of an API like OpenAI's"
            raise ConfigError(Refusal(option=url, kind=Kind.MACHINE, why=why, use=use)) from error
        if self.pool.model:
            if self.pool.model not in names:
                form = "%s does not list the model %r of %s; requests for it may fail"
                logger.warning(form, self._describe_path("/models"), self.pool.model, option)
            return self.pool.model
        if len(names) != 1:
            why = f": {self._describe_path('/models')} lists {', '.join(names[:20]) or 'no model'}"
            use = "set this option to the name of the model to use"
            raise ConfigError(Refusal(option=option, kind=Kind.MISSING, why=why, use=use))
        return names[0]

    async def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST `body`, or GET without one; retry until it succeeds or fails permanently.

        Returns the replies for a chat, the JSON for other paths.
        """
        failing_since, failures = 0.0, 0
        while True:
            async with self._slots:
                said = await self._try_watched(path, body)
            if not said.problem:
                self._has_answered(path)
                return said.content
            problem = f"{self._describe_path(path)} {self._hide_key(said.problem)}"
            if said.status in OF_INPUT or (path != CHATS and not _is_temporary(said.status)):
                raise _choose_refusal(path, said.status)(problem)
            now = time.monotonic()
            failing_since, failures = failing_since or now, failures + 1
            backoff_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
            left_s = failing_since + self._patience(said.status) - now
            if left_s <= 0:
                raise self._choose_error(said.status, failing_since)(
                    f"{problem}; given up after {failures} tries"
                )
            pause_s = min(left_s, max(said.wait_s, backoff_s))  # the last try is at the end of the patience
            self._warn(problem, f"trying again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)

    def _patience(self, status: int) -> float:
        """Return how long to retry. It is short before the first success: likely a wrong configuration."""
        first = not self._answered_at and not _is_temporary(status)
        return min(self.patience_s, FIRST_PATIENCE_S) if first else self.patience_s

    def _choose_error(self, status: int, failing_since: float) -> type[ServerUnavailable]:
        """Return EndpointUnavailable, or ServerUnavailable if the request may be the cause.

        That is the case if other requests succeed or the status is 500.
        """
        own = status == 500 or self._answered_at > failing_since
        return ServerUnavailable if own else EndpointUnavailable

    def _has_answered(self, path: str) -> None:
        if self._warned_at:
            logger.info("%s answers again", self._describe_path(path))
            self.on_change("")
        self._warned_at = 0.0
        if path == CHATS:
            self._answered_at = time.monotonic()

    def _warn(self, problem: str, action: str) -> None:
        """Log a problem and what is done now, and report the problem, at most once per REPEAT_S."""
        now = time.monotonic()
        if not self._warned_at or now - self._warned_at >= REPEAT_S:
            logger.warning("%s; %s", problem, action)
            self.on_change(problem)
            self._warned_at = now

    async def _try_watched(self, path: str, body: dict[str, Any] | None) -> _Answer:
        watch = asyncio.create_task(self._watch(path))
        try:
            return await self._try(path, body)
        finally:
            watch.cancel()

    async def _watch(self, path: str) -> None:
        """Log that a request waits, unless the endpoint answers other requests."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(HANGS_S)
            waited_s = time.monotonic() - max(began, self._answered_at)
            if waited_s >= 0.9 * HANGS_S:
                self._warn(
                    f"{self._describe_path(path)} has answered nothing for {waited_s:.0f} s", "still waiting"
                )

    async def _try(self, path: str, body: dict[str, Any] | None) -> _Answer:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=self.request_timeout_s)
        url = self.pool.url.rstrip("/") + path
        try:
            # no redirects: the key must go only to the configured URL
            async with self._session.request(
                "GET" if body is None else "POST",
                url,
                json=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    wait_s = _parse_retry_after(response.headers.get("Retry-After", ""))
                    return _Answer(response.status, f"answered {response.status}: {text}", wait_s=wait_s)
                return _parse_answer(path, text)
        except TimeoutError:
            return _Answer(0, f"can't be reached: no answer within {self.request_timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:  # LookupError: its charset
            return _Answer(0, f"can't be reached: {_describe_failure(error)}")

    def _describe_path(self, path: str) -> str:
        return f"pool {self.name}: {self.pool.url.rstrip('/')}{path}"

    def _hide_key(self, problem: str) -> str:
        text = problem.replace(self.api_key, "***") if self.api_key else problem
        return text[:MAX_ANSWER_CHARS]


def _describe_failure(error: Exception) -> str:
    """Return the reason of a failed request; if nothing listens there, without the address."""
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return os.strerror(errno.ECONNREFUSED)
    return f"{type(error).__name__}: {error}"


def _parse_answer(path: str, text: str) -> _Answer:
    """Parse an answer with status 200; the content is the replies for a chat."""
    try:
        content = json.loads(text)
    except ValueError:
        return _Answer(0, f"answered 200 without JSON: {text}")
    if path != CHATS:
        return _Answer(200, content=content)
    replies = _parse_replies(content)
    if replies:
        return _Answer(200, content=replies)
    return _Answer(_find_status(content), f"answered without choices: {text}")


def _parse_replies(answer: Any) -> list[Reply]:
    """Return the replies in an answer; [] if it has another form."""
    try:
        choices = answer["choices"]
        num_tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0) // len(choices)
        return [
            Reply(
                _replace_surrogates(one["message"].get("content") or ""),
                num_tokens,
                one.get("finish_reason") or "stop",
            )
            for one in choices
        ]
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        return []


def _find_status(content: Any) -> int:
    """Return the error status inside an answer with status 200, as some gateways send it; else 200."""
    error = content.get("error") if isinstance(content, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 200


def _replace_surrogates(text: str) -> str:
    """Replace lone halves of surrogate pairs, which JSON may contain."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _is_temporary(status: int) -> bool:
    return not status or status >= 500 or status in (408, 429)


def _choose_refusal(path: str, status: int) -> type[RequestRefused]:
    if path == "/models" and status in (404, 405):
        return _WithoutModels
    return InputRefused if status in OF_INPUT else RequestRefused


def _parse_retry_after(retry_after: str) -> float:
    """Return the pause in a Retry-After header (seconds or a date), in seconds; 0 if it is invalid."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without a time zone
        return 0.0
