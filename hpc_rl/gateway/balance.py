"""Chooses the server for a request of the gateway: the least loaded, or one that knows the prompt.

A server's load is the number of our open requests times its recent seconds per token. A conversation returns
to the server that has its earlier turns in its prefix cache, unless that server has much more load than the
others.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from hpc_rl.core.types import Turn
from hpc_rl.servers.client import GenerateRequest
from hpc_rl.servers.router import Router, Server

BLOCK_TOKENS = 32  # prefixes are compared at multiples of this length
MAX_REMEMBERED = 1 << 16  # conversations, with two entries each
BUSIER = 1.5  # highest additional load of a conversation's previous server


class ServerWindow:
    """The latest answers of one server."""

    def __init__(self, size: int) -> None:
        self._answers: deque[tuple[float, int]] = deque(maxlen=size)  # seconds, tokens of the longest turn
        self._elapsed_s, self._tokens = 0.0, 0

    def add(self, elapsed_s: float, num_tokens: int) -> None:
        if len(self._answers) == self._answers.maxlen:
            oldest_s, oldest_tokens = self._answers[0]
            self._elapsed_s -= oldest_s
            self._tokens -= oldest_tokens
        self._answers.append((elapsed_s, num_tokens))
        self._elapsed_s += elapsed_s
        self._tokens += num_tokens

    @property
    def s_per_token(self) -> float | None:
        return self._elapsed_s / self._tokens if self._tokens else None

    def summarize(self) -> dict[str, float]:
        """Return a server's row for status pages: mean and 99th percentile of answer times, s per token."""
        if not self._answers:
            return {}
        times = [elapsed_s for elapsed_s, _ in self._answers]
        mean, p99 = float(np.mean(times)), float(np.percentile(times, 99))
        return {"request_time_avg_s": mean, "request_time_99p_s": p99, "s_per_token": self.s_per_token or 0.0}


@dataclass
class BalancingRouter(Router):
    """A router with rolling metrics for each server, and affinity of conversations.

    Args:
        metrics_window: Number of answers of each server that count.
    """

    metrics_window: int = 1000
    _windows: dict[str, ServerWindow] = field(default_factory=dict)
    _places: OrderedDict[int, str] = field(default_factory=OrderedDict)  # prefix -> server

    def choose(self, servers: list[Server], requests: Sequence[GenerateRequest]) -> Server:
        if self.policy == "round_robin":
            return super().choose(servers, requests)
        speeds = [self._windows[s.lease.key].s_per_token for s in servers if s.lease.key in self._windows]
        known = [speed for speed in speeds if speed]
        typical = sum(known) / len(known) if known else 1.0

        def load(server: Server) -> float:
            window = self._windows.get(server.lease.key)
            return (server.running + 1) * ((window and window.s_per_token) or typical)

        least = min(servers, key=lambda server: (load(server), random.random()))
        own = self._find_server(requests[0].input_ids)
        for server in servers:
            if server.lease.key == own and load(server) <= BUSIER * load(least) + typical:
                return server
        return least

    def observe(
        self, server: Server, requests: Sequence[GenerateRequest], turns: Sequence[Turn], elapsed_s: float
    ) -> None:
        window = self._windows.setdefault(server.lease.key, ServerWindow(self.metrics_window))
        window.add(elapsed_s, max(len(turn.output_ids) for turn in turns))
        for request, turn in zip(requests, turns, strict=True):
            ids = request.input_ids
            self._remember(ids, server.lease.key)
            self._remember(ids + turn.output_ids, server.lease.key)

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    def describe_servers(self) -> list[dict[str, Any]]:
        """Return the metrics of each server, for status pages."""
        shown = []
        for key, server in self._servers.items():
            window, version = self._windows.get(key), server.lease.value["version"]
            state = {"key": key, "epoch": server.lease.epoch, "version": version, "state": server.state}
            state |= {"suspect": server.suspect, "running": server.running}
            shown.append({**state, **(window.summarize() if window else {})})
        return shown

    def _remember(self, ids: Sequence[int], key: str) -> None:
        """Note the server that caches the whole blocks of these tokens."""
        whole = len(ids) - len(ids) % BLOCK_TOKENS
        if not whole:
            return
        prefix = xxhash.xxh3_64_intdigest(np.asarray(ids[:whole], np.int32).tobytes())
        self._places[prefix] = key
        self._places.move_to_end(prefix)
        if len(self._places) > 2 * MAX_REMEMBERED:
            self._places.popitem(last=False)

    def _find_server(self, ids: Sequence[int]) -> str | None:
        """Return the server with the longest known prefix of these tokens, if that covers at least half."""
        server = None
        for length, prefix in _hash_prefixes(ids):
            if 2 * length >= len(ids):
                server = self._places.get(prefix, server)
        return server


def _hash_prefixes(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield length and hash of each prefix that consists of whole blocks, the shortest first."""
    hashed, array = xxhash.xxh3_64(), np.asarray(ids, np.int32)
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        hashed.update(array[end - BLOCK_TOKENS : end].tobytes())
        yield end, hashed.intdigest()
