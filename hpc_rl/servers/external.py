"""A pool that is an endpoint elsewhere, with OpenAI's API: it answers chats, and nothing else of it is ours.

A request that fails is sent again, later and later, until the endpoint has failed for `patience_s`; only what
is the input's fault is refused at once. Errors name the pool, the URL and the status, and never show the key.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
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
from hpc_rl.core.types import Reply

logger = logging.getLogger(__name__)
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
MAX_ANSWER_CHARS = 400  # of an error's answer, in messages
CHATS = "/chat/completions"
OF_INPUT = (400, 413, 422)  # the statuses that tell of the input, and of nothing else
FIRST_PATIENCE_S = 30.0  # with a status such as 401 or 404 before the first answer
HANGS_S = 60.0  # a request without an answer for so long is told of in the log
REPEAT_S = 300.0  # what lasts is told again
MAX_SEED = 0x7FFFFFFF  # some endpoints take 32 bits


class _WithoutModels(RequestRefused):
    """The endpoint does not serve the list of its models."""


@dataclass(slots=True)
class _Answer:
    """What came of one try."""

    status: int  # 0 without one
    problem: str = ""  # what is known of a failure
    content: Any = None
    wait_s: float = 0.0  # what the endpoint asks for


@dataclass
class Endpoint:
    """Use as `async with Endpoint(...) as pool`, which finds its model. Raises ConfigError."""

    name: str
    pool: PoolConfig
    api_key: str = ""
    request_timeout_s: float = 3600.0  # of one request
    patience_s: float = 600.0
    trace: bool = False  # logs each chat when it is asked and when it is answered
    # gets the problem when one begins, and "" when the endpoint answers again
    on_change: Callable[[str], None] = lambda problem: None
    model: str = ""  # found at the start where the configuration has none

    async def __aenter__(self) -> Endpoint:
        # a compute node may reach the outside through a proxy only, which variables of the environment name
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=True)
        self._slots = asyncio.Semaphore(self.pool.max_requests)
        self._warned_at = 0.0  # of a failure that lasts; 0: none
        self._answered_at = 0.0  # the newest answer to a chat; 0: none
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
        """Return as many answers as there are seeds; the endpoint gets the first of those that are left.

        At temperature 0 all are one answer. Raises InputRefused, ServerUnavailable, EndpointUnavailable.
        """
        chosen = self.pool.temperature if temperature is None else temperature
        # without chance one answer stands for all: vLLM refuses to make several
        num = len(seeds) if chosen else min(1, len(seeds))
        replies: list[Reply] = []
        while len(replies) < num:  # some endpoints make one answer, whatever `n` is
            body = {
                "model": self.model,
                "messages": messages,
                "n": num - len(replies),
                "seed": seeds[len(replies)] & MAX_SEED,
                "max_tokens": max_new_tokens or self.pool.max_new_tokens,
                "temperature": chosen,
                "top_p": self.pool.top_p,
            }
            replies += await self._traced(body)
        return replies[:num] if chosen else [copy.copy(replies[0]) for _ in seeds]

    async def _traced(self, body: dict[str, Any]) -> list[Reply]:
        if self.trace:
            sizes = (body["n"], len(body["messages"]), body["max_tokens"], body["temperature"])
            form = "chat %d of pool %s: %d answers to %d messages, at most %d tokens out, temperature %g"
            logger.info(form, body["seed"], self.name, *sizes)
        replies: list[Reply] = await self._call(CHATS, body)
        if self.trace:
            said = ", ".join(f"{one.num_tokens} tokens ({one.finish_reason})" for one in replies)
            logger.info("chat %d of pool %s: answered, %s", body["seed"], self.name, said)
        return replies

    async def _find_model(self) -> str:
        """Return the name of the model: the configured one, or the only one that the endpoint lists."""
        option = f"pools.{self.name}.model"
        try:
            listed = await self._call("/models")
            names = [str(one["id"]) for one in listed["data"]]
        except _WithoutModels as error:
            if self.pool.model:
                return self.pool.model
            raise ConfigError(f"{error}. Set {option}.") from error
        except RequestRefused as error:
            key = self.pool.api_key_env
            hint = f"Is the key in {key} right?" if key else f"Does it need pools.{self.name}.api_key_env?"
            raise ConfigError(f"{error}. {hint}") from error
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{self._at('/models')} is not a list of OpenAI's API.") from error
        if self.pool.model:
            if self.pool.model not in names:
                logger.warning("%s does not list %s %r", self._at("/models"), option, self.pool.model)
            return self.pool.model
        if len(names) != 1:
            raise ConfigError(
                f"{self._at('/models')} lists {', '.join(names[:20]) or 'no model'}: set {option}."
            )
        return names[0]

    async def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST `body`, or GET without one, until that succeeds or its failure won't pass.

        Returns the replies of a chat, or the JSON of anything else.
        """
        failing_since, failures = 0.0, 0
        while True:
            async with self._slots:
                said = await self._watched(path, body)
            if not said.problem:
                self._has_answered(path)
                return said.content
            problem = f"{self._at(path)} {self._shown(said.problem)}"
            if said.status in OF_INPUT or (path != CHATS and not _may_pass(said.status)):
                raise _refusal(path, said.status)(problem)
            now = time.monotonic()
            failing_since, failures = failing_since or now, failures + 1
            backoff_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
            left_s = failing_since + self._patience(said.status) - now
            if left_s <= 0:
                raise self._gives_up(said.status, failing_since)(
                    f"{problem}; given up after {failures} tries"
                )
            pause_s = min(left_s, max(said.wait_s, backoff_s))  # it is tried a last time when patience ends
            self._warn(f"{problem}; trying again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)

    def _patience(self, status: int) -> float:
        """Return for how long a failure is borne: what never worked is likely to be configured wrongly."""
        first = not self._answered_at and not _may_pass(status)
        return min(self.patience_s, FIRST_PATIENCE_S) if first else self.patience_s

    def _gives_up(self, status: int, failing_since: float) -> type[ServerUnavailable]:
        """Return EndpointUnavailable, unless the request may be the cause: others succeed, or it is 500."""
        own = status == 500 or self._answered_at > failing_since
        return ServerUnavailable if own else EndpointUnavailable

    def _has_answered(self, path: str) -> None:
        if self._warned_at:
            logger.info("%s answers again", self._at(path))
            self.on_change("")
        self._warned_at = 0.0
        if path == CHATS:
            self._answered_at = time.monotonic()

    def _warn(self, problem: str) -> None:
        """Log a problem: of many at once one, and one again after a while."""
        now = time.monotonic()
        if not self._warned_at or now - self._warned_at >= REPEAT_S:
            logger.warning("%s", problem)
            self.on_change(problem)
            self._warned_at = now

    async def _watched(self, path: str, body: dict[str, Any] | None) -> _Answer:
        watch = asyncio.create_task(self._watch(path))
        try:
            return await self._try(path, body)
        finally:
            watch.cancel()

    async def _watch(self, path: str) -> None:
        """Say that a request waits, where no other one is answered either."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(HANGS_S)
            waited_s = time.monotonic() - max(began, self._answered_at)
            if waited_s >= 0.9 * HANGS_S:
                self._warn(f"{self._at(path)} has answered nothing for {waited_s:.0f} s; still waiting")

    async def _try(self, path: str, body: dict[str, Any] | None) -> _Answer:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=self.request_timeout_s)
        url = self.pool.url.rstrip("/") + path
        try:
            # the key goes where the configuration says, and to no other place
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
                    wait_s = _seconds(response.headers.get("Retry-After", ""))
                    return _Answer(response.status, f"answered {response.status}: {text}", wait_s=wait_s)
                return _read(path, text)
        except TimeoutError:
            return _Answer(0, f"can't be reached: no answer within {self.request_timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:  # LookupError: its charset
            return _Answer(0, f"can't be reached: {type(error).__name__}: {error}")

    def _at(self, path: str) -> str:
        return f"pool {self.name}: {self.pool.url.rstrip('/')}{path}"

    def _shown(self, problem: str) -> str:
        text = problem.replace(self.api_key, "***") if self.api_key else problem
        return text[:MAX_ANSWER_CHARS]


def _read(path: str, text: str) -> _Answer:
    """Return what an answer of status 200 says: its replies where it is to a chat."""
    try:
        content = json.loads(text)
    except ValueError:
        return _Answer(0, f"answered 200 without JSON: {text}")
    if path != CHATS:
        return _Answer(200, content=content)
    replies = _replies(content)
    if replies:
        return _Answer(200, content=replies)
    return _Answer(_status_in(content), f"answered without choices: {text}")


def _replies(answer: Any) -> list[Reply]:
    """Return the replies of an answer; none for anything else."""
    try:
        choices = answer["choices"]
        num_tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0) // len(choices)
        return [
            Reply(
                _as_utf8(one["message"].get("content") or ""), num_tokens, one.get("finish_reason") or "stop"
            )
            for one in choices
        ]
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        return []


def _status_in(content: Any) -> int:
    """Return the status that an error of status 200 has inside, as some gateways send it; else 200."""
    error = content.get("error") if isinstance(content, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 200


def _as_utf8(text: str) -> str:
    """Return a text with each half of a surrogate pair, which JSON may have alone, replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _may_pass(status: int) -> bool:
    return not status or status >= 500 or status in (408, 429)


def _refusal(path: str, status: int) -> type[RequestRefused]:
    if path == "/models" and status in (404, 405):
        return _WithoutModels
    return InputRefused if status in OF_INPUT else RequestRefused


def _seconds(retry_after: str) -> float:
    """Return the time that a Retry-After header asks for: seconds, or a date; 0 for anything else."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without a time zone
        return 0.0
