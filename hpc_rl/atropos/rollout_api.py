"""The client of a rollout API in the protocol of Atropos: hpc-rl's, or atroposlib's `run-api`."""

import asyncio
import gzip
import json
import logging
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

import aiohttp

from hpc_rl.atropos.groups import ScoredGroup
from hpc_rl.atropos.settings import EnvConfig
from hpc_rl.core.errors import RequestRefused, RoleFailed
from hpc_rl.servers.client import open_session

logger = logging.getLogger(__name__)

GZIP_FROM_BYTES = 1024
POLL_S = 1.0  # while the trainer has not started, or the API is unreachable
AWAY_S = 600.0  # longest time that the API may be unreachable


@dataclass(frozen=True)
class Registration:
    """The API's answer to an environment that registers."""

    env_id: int
    name: str
    checkpoint_dir: str
    starting_step: int
    num_steps: int
    batch_size: int  # sequences
    temperature: float | None = None  # the trainer's; None: the API does not say


@dataclass(frozen=True)
class EnvStatus:
    """The API's answer to a poll; sizes count groups of the environment's size."""

    current_step: int
    queue_size: int
    self_queue_size: int
    unallocated_fraction: float
    env_weight: float


class RolloutApi:
    """One environment's connection. Use it as an async context manager.

    Every call waits for an unreachable API, at most AWAY_S seconds; then it raises RoleFailed. A group sent
    again after a failure has the same key: an API that knows keys takes it once.

    Args:
        url: Of the API; a trial's URL ends in `/t/<its data token>`.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.shown_url = re.sub(r"/t/[^/]+", "/t/***", self._url)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "RolloutApi":
        self._session = open_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def register(self, config: EnvConfig, name: str) -> Registration:
        """Register an environment; wait for the trainer to start."""
        body = {
            "max_token_length": config.max_token_length,
            "desired_name": name,
            "weight": config.inference_weight,
            "group_size": config.group_size,
            "min_batch_allocation": config.min_batch_allocation,
        }
        waiting = False
        while (answer := await self._call("POST", "/register-env", body))["status"] != "success":
            if not waiting:
                logger.info(
                    "the environment waits for the trainer; the rollout API says: %s", answer["status"]
                )
            waiting = True
            await asyncio.sleep(POLL_S)
        info = await self._call("GET", "/info")
        return Registration(
            env_id=answer["env_id"],
            name=answer["wandb_name"],
            checkpoint_dir=answer["checkpoint_dir"],
            starting_step=answer["starting_step"],
            num_steps=answer["num_steps"],
            batch_size=info["batch_size"],
            temperature=await self._fetch_temperature(),
        )

    async def _fetch_temperature(self) -> float | None:
        """Return the trainer's sampling temperature; None for `run-api`, which lacks this route."""
        try:
            return float((await self._call("GET", "/sampling"))["temperature"])
        except RequestRefused:
            return None

    async def status(self, env_id: int) -> EnvStatus:
        answer = await self._call("GET", "/status-env", {"env_id": env_id})
        return EnvStatus(
            current_step=answer["current_step"],
            queue_size=answer["queue_size"],
            self_queue_size=answer["self_queue_size"],
            unallocated_fraction=answer["unallocated_fraction"],
            env_weight=answer["env_weight"],
        )

    async def send(self, groups: list[ScoredGroup], env_id: int) -> None:
        """Send scored groups. Raises RequestRefused if the API finds them malformed."""
        payloads = [{**group.payload(), "env_id": env_id} for group in groups]
        path = "/scored_data" if len(payloads) == 1 else "/scored_data_list"
        body = payloads[0] if len(payloads) == 1 else payloads
        await self._call("POST", path, body, {"Idempotency-Key": uuid.uuid4().hex})

    async def disconnect(self, env_id: int) -> None:
        await self._call("POST", "/disconnect-env", {"env_id": env_id})

    async def fetch_wandb_info(self) -> tuple[str, str]:
        """Wait for a trainer; return its group and project."""
        while not (answer := await self._call("GET", "/wandb_info"))["project"]:
            await asyncio.sleep(POLL_S)
        return answer["group"], answer["project"]

    async def _call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Any:
        data, extra = _encode(body)
        away_since: float | None = None
        while True:
            try:
                return await self._request(method, path, data, {**extra, **(headers or {})})
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                now = time.monotonic()
                if away_since is None:
                    logger.warning(
                        "the rollout API %s does not answer (%s); the environment waits for it",
                        self.shown_url,
                        error,
                    )
                    away_since = now
                if now - away_since > AWAY_S:
                    raise RoleFailed(
                        f"the rollout API {self.shown_url} did not answer for {AWAY_S:.0f} s: {error}"
                    ) from error
                await asyncio.sleep(POLL_S)

    async def _request(self, method: str, path: str, data: bytes, headers: dict[str, str]) -> Any:
        assert self._session is not None, "use `async with`"
        limit = aiohttp.ClientTimeout(total=60.0)
        async with self._session.request(
            method, self._url + path, data=data or None, headers=headers, timeout=limit
        ) as response:
            if 400 <= response.status < 500 and response.status != 429:
                text = (await response.text())[:400]
                raise RequestRefused(
                    f"the rollout API refused {method} {path} with status {response.status}: {text}"
                )
            response.raise_for_status()
            return await response.json()


def _encode(body: Any) -> tuple[bytes, dict[str, str]]:
    """Return a JSON body, compressed if that is smaller, and its headers."""
    if body is None:
        return b"", {}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    if len(data) < GZIP_FROM_BYTES:
        return data, headers
    smaller = gzip.compress(data, compresslevel=1)
    return (smaller, {**headers, "Content-Encoding": "gzip"}) if len(smaller) < len(data) else (data, headers)
