"""The router: reads the live servers of a pool from its roster, and chooses one for each request.

It picks the server with the fewest of its requests. It skips a server that can't be reached until that server
has a new epoch or answers /health again. If there is no server, it waits and logs why. It does not interpret
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from hpc_rl.core.allocation import DEFAULT_POOL
from hpc_rl.core.errors import HpcRlError, RoleFailed, ServerStale, ServerUnavailable
from hpc_rl.core.types import TokenLogprobs, Turn, WeightVersion
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.roster import RosterReader
from hpc_rl.name_resolve.shared_fs import LeaseView, NameResolve
from hpc_rl.servers.client import GenerateRequest, HttpServerClient, PartialTurn, open_session

logger = logging.getLogger(__name__)
MAX_PAUSE_S = 30.0
T = TypeVar("T")


def is_older(version: str, minimum: str) -> bool:
    """Return whether label `version` is older than label `minimum`; "" is older than any label."""
    if not minimum:
        return False
    if not version:
        return True
    return WeightVersion.parse(version) < WeightVersion.parse(minimum)


@dataclass
class Server:
    """One replica as this router sees it."""

    lease: LeaseView
    client: HttpServerClient
    suspect: bool = False  # a request could not reach it
    running: int = 0

    @property
    def state(self) -> str:
        return self.lease.value["state"]


@dataclass
class Router:
    """Use as `async with Router(...) as router`; it calls `names` from one thread at a time."""

    names: NameResolve
    data_token: str
    pool: str = DEFAULT_POOL
    setup_timeout_s: float = 600.0  # wait for a server if none is live
    request_timeout_s: float = 3600.0  # of one generation
    request_retries: int = 3  # after failures of servers without a new token; a stale server has not failed
    policy: Literal["least_loaded", "round_robin"] = "least_loaded"  # counts the requests of this router
    poll_s: float = 0.5  # between reads of the roster
    _servers: dict[str, Server] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _last_turn: int = 0  # of round_robin
    _said: float = -math.inf  # time of the last log line about a missing server

    async def __aenter__(self) -> Router:
        self._session = open_session()
        self._roster = RosterReader(self.names, keys.servers(self.pool))
        self._poller = asyncio.create_task(self._poll(), name="router-poll")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._poller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._poller
        await asyncio.gather(*(server.client.close() for server in self._servers.values()))
        await self._session.close()

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Turn]:
        """Generate several requests with the same `min_version` on one server, in one call.

        If the server fails or stops, another one continues with the tokens so far. Raises RequestRefused (a
        bug in a request), ServerUnavailable (every try failed), RoleFailed (no server came up).
        """
        partials = [PartialTurn(request) for request in requests]

        async def ask(server: Server) -> list[Turn]:
            begun = time.monotonic()
            turns = await server.client.finish(partials)
            self.observe(server, requests, turns, time.monotonic() - begun)
            return turns

        return await self._try_servers(
            requests, ask, lambda: sum(len(partial.turn.output_ids) for partial in partials)
        )

    async def score_many(self, requests: list[GenerateRequest]) -> list[float]:
        """Return the scores of inputs, all from one reward-model server. Raises as generate_many."""
        return await self._try_servers(requests, lambda server: server.client.score_many(requests))

    async def logprobs_many(
        self, requests: list[GenerateRequest], starts: list[int], top_k: int = 0
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities of given tokens, all from one server. Raises as generate_many."""
        return await self._try_servers(
            requests, lambda server: server.client.logprobs_many(requests, starts, top_k)
        )

    async def _try_servers(
        self,
        requests: Sequence[GenerateRequest],
        ask: Callable[[Server], Awaitable[T]],
        count_tokens: Callable[[], int] = lambda: 0,
    ) -> T:
        deadline = time.monotonic() + self.request_timeout_s
        failures, stale_s, num_tokens = 0, 0.05, 0
        while True:
            server = await self._pick(requests)
            server.running += len(requests)
            try:
                return await ask(server)
            except ServerStale:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(stale_s)
                stale_s = min(1.0, 2 * stale_s)
            except ServerUnavailable as error:
                self._suspect(server, error)
                # servers that are preempted one after the other must not use up the retries
                if (now := count_tokens()) > num_tokens:
                    failures, num_tokens = 0, now
                failures += 1
                if failures > self.request_retries:
                    raise
                # retry at once on another server; after that, all servers may be in trouble for a while
                await asyncio.sleep(min(MAX_PAUSE_S, 4.0 ** (failures - 1)) if failures > 1 else 0)
            finally:
                server.running -= len(requests)

    def _suspect(self, server: Server, error: Exception) -> None:
        if not server.suspect:
            form = "%s gets no requests until it answers again: %s"
            logger.warning(form, keys.describe_server(server.lease.key), error)
        server.suspect = True

    async def _pick(self, requests: Sequence[GenerateRequest]) -> Server:
        begun = time.monotonic()
        deadline = begun + self.setup_timeout_s
        while True:
            live = [s for s in self._servers.values() if s.state in keys.ROUTABLE and not s.suspect]
            least = requests[0].min_version
            if requests[0].exact:
                live = [s for s in live if s.lease.value.get("held") == least]
            if live:
                fresh = [s for s in live if not is_older(s.lease.value["version"], least)]
                return self.choose(fresh or live, requests)
            now = time.monotonic()
            if now > deadline:
                waited = f"had no server for {self.setup_timeout_s:.0f} s (rollout.setup_timeout)"
                raise RoleFailed(f"pool {self.pool} {waited}: {self._describe_servers()}")
            if now > max(begun + 5.0, self._said + 30.0):  # one line for all waiting requests
                logger.info("requests to pool %s wait for a server: %s", self.pool, self._describe_servers())
                self._said = now
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._changed.wait()

    def choose(self, servers: list[Server], requests: Sequence[GenerateRequest]) -> Server:
        """Return the server for these requests. Subclasses may override this."""
        if self.policy == "round_robin":
            self._last_turn += 1
            return sorted(servers, key=lambda s: s.lease.key)[self._last_turn % len(servers)]
        return min(servers, key=lambda s: (s.running, random.random()))

    def observe(
        self, server: Server, requests: Sequence[GenerateRequest], turns: Sequence[Turn], elapsed_s: float
    ) -> None:
        """Called after each answer. Subclasses may override this."""

    def _describe_servers(self) -> str:
        if not self._servers:
            return "no server has reported yet"
        known = [(key, "out of reach" if s.suspect else s.state) for key, s in self._servers.items()]
        return ", ".join(f"{keys.describe_server(key)} is {state}" for key, state in known)

    async def _poll(self) -> None:
        while True:
            try:
                seen = await asyncio.to_thread(self._roster.list_leases)
            # a shared file system may fail for a while; keep the known servers
            except (OSError, HpcRlError) as error:
                form = "the list of servers of pool %s can't be read, so requests go to the known ones: %s"
                logger.warning(form, self.pool, error)
            else:
                self._merge(seen)
                await asyncio.gather(*(self._probe(s) for s in self._servers.values() if s.suspect))
            self._changed.set()
            await asyncio.sleep(self.poll_s)

    def _merge(self, seen: dict[str, LeaseView]) -> None:
        alive = {key: lease for key, lease in seen.items() if lease.alive and lease.value.get("url")}
        for key in self._servers.keys() - alive.keys():
            form = "%s has ended or was lost; another server continues its requests"
            logger.info(form, keys.describe_server(key))
            del self._servers[key]
        for key, lease in alive.items():
            known = self._servers.get(key)
            if known is not None and known.lease.epoch == lease.epoch:
                known.lease = lease
                continue
            url, timeout_s = lease.value["url"], self.request_timeout_s
            client = HttpServerClient(self._session, url, self.data_token, timeout_s=timeout_s)
            self._servers[key] = Server(lease, client)
            logger.info(
                "the rollout role has found %s, whose state is %s",
                keys.describe_server(key),
                lease.value["state"],
            )

    async def _probe(self, server: Server) -> None:
        with contextlib.suppress(HpcRlError):
            health = await server.client.health(timeout_s=2.0)
            server.suspect = health.get("state") not in keys.ROUTABLE
