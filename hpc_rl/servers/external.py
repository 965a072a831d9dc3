"""A pool that is an endpoint elsewhere, with OpenAI's API: it answers chats, and nothing else of it is ours.

A request that fails for a reason that may pass is sent again, later and later, until the endpoint has failed
for `patience_s`. Errors name the pool, the URL and the status, and never show the key.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from hpc_rl.config.sections.pools import PoolConfig
from hpc_rl.errors import ConfigError, InputRefused, RequestRefused, ServerUnavailable
from hpc_rl.types import Reply

logger = logging.getLogger(__name__)
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
MAX_ANSWER_CHARS = 400  # of an error's answer, in messages
MAX_SEED = 0x7FFFFFFF  # some endpoints take 32 bits


class _WithoutModels(RequestRefused):
    """The endpoint does not serve the list of its models."""


@dataclass
class Endpoint:
    """Use as `async with Endpoint(...) as pool`, which finds its model. Raises ConfigError."""

    name: str
    pool: PoolConfig
    api_key: str = ""
    request_timeout_s: float = 3600.0  # of one request
    patience_s: float = 600.0
    model: str = ""  # found at the start where the configuration has none

    async def __aenter__(self) -> Endpoint:
        # a compute node may reach the outside through a proxy only, which variables of the environment name
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=True)
        self._slots = asyncio.Semaphore(self.pool.max_requests)
        self._is_down = False
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

        Raises InputRefused, RequestRefused, ServerUnavailable.
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
            replies += self._replies(await self._call("/chat/completions", body))
        return replies[:num] if chosen else [copy.copy(replies[0]) for _ in seeds]

    def _replies(self, answer: Any) -> list[Reply]:
        try:
            choices = answer["choices"]
            num_tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0) // len(choices)
            return [
                Reply(one["message"].get("content") or "", num_tokens, one.get("finish_reason") or "stop")
                for one in choices
            ]
        except (KeyError, TypeError, AttributeError, ZeroDivisionError):
            raise RequestRefused(f"{self._at('/chat/completions')} answered without choices") from None

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
        """POST `body`, or GET without one, until that succeeds or its failure won't pass."""
        failing_since, failures = 0.0, 0
        while True:
            async with self._slots:
                status, said, pause_s = await self._try(path, body)
            if status == 200:
                if self._is_down:
                    logger.info("%s answers again", self._at(path))
                self._is_down = False
                return said
            problem = f"{self._at(path)} {self._shown(status, said)}"
            if status and status < 500 and status not in (408, 429):
                raise _refusal(path, status)(problem)
            now = time.monotonic()
            failing_since = failing_since or now
            backoff_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**failures) * random.uniform(0.5, 1.0)
            left_s, failures = failing_since + self.patience_s - now, failures + 1
            pause_s = min(left_s, max(pause_s, backoff_s))  # it is tried a last time when patience ends
            if left_s <= 0:
                raise ServerUnavailable(f"{problem}; given up after {failures} tries")
            # of many requests at once, one says it
            if not self._is_down:
                logger.warning("%s; trying again in %.1f s", problem, pause_s)
            self._is_down = True
            await asyncio.sleep(pause_s)

    async def _try(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any, float]:
        """Return the status (0 without one), the answer or what is known of it, and how long to wait."""
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
                if response.status != 200:
                    wait_s = _seconds(response.headers.get("Retry-After", ""))
                    return response.status, await response.text(errors="replace"), wait_s
                return 200, await response.json(content_type=None), 0.0
        except TimeoutError:
            return 0, f"no answer within {self.request_timeout_s:g} s", 0.0
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return 0, f"{type(error).__name__}: {error}", 0.0

    def _at(self, path: str) -> str:
        return f"pool {self.name}: {self.pool.url.rstrip('/')}{path}"

    def _shown(self, status: int, said: str) -> str:
        text = said.replace(self.api_key, "***") if self.api_key else said
        return f"answered {status}: {text[:MAX_ANSWER_CHARS]}" if status else f"can't be reached: {text}"


def _refusal(path: str, status: int) -> type[RequestRefused]:
    if path == "/models" and status in (404, 405):
        return _WithoutModels
    return InputRefused if status in (400, 413, 422) else RequestRefused


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
