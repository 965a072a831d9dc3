"""Gateway: the servers of a trial as one endpoint that holds requests instead of failing them.

During a weight update, or while servers restart, a request waits; an interrupted one continues from its
tokens. The caller notices neither. Training and evaluation have separate limits.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.gate import Gate
from hpc_rl.core.types import Turn
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.gateway.completions import Completion
from hpc_rl.gateway.gateway_log import GatewayLog
from hpc_rl.gateway.requests import Bounds, Order, RequestReader
from hpc_rl.servers.client import GenerateRequest

logger = logging.getLogger(__name__)
FIRST_SLICE, LARGEST_SLICE = 16, 256  # tokens; each slice is twice the previous one, up to the second number
LONGEST_PAUSE_S = 5.0  # between two attempts of a held request


@dataclass(frozen=True)
class GatewaySettings:
    """Limits of the gateway.

    Args:
        max_n_per_request: Completions in one call to a server; more are split into several calls.
        max_requests: Training calls to each server at once.
        max_eval_requests: Evaluation calls to each server at once, in addition to the training calls.
        hold_s: Seconds that a request waits for a server before it is answered with 503.
    """

    max_n_per_request: int = 8
    max_requests: int = 512
    max_eval_requests: int = 64
    hold_s: float = 3600.0


@dataclass
class GatewayCounters:
    """Counters since the start of the gateway; `held_s` is the time that requests waited for servers."""

    requests: int = 0
    completions: int = 0
    tokens: int = 0
    tokens_regenerated: int = 0
    refused: int = 0
    unanswered: int = 0
    abandoned: int = 0
    probes: int = 0
    held_s: float = 0.0
    held: int = field(default=0)  # now


class Servers(Protocol):
    """The servers behind a gateway: BalancingRouter, or the servers of one prompt."""

    @property
    def num_servers(self) -> int: ...

    def describe_servers(self) -> list[dict[str, Any]]: ...

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Turn]: ...


class Gateway:
    """Makes the completions of orders.

    Args:
        router: The servers; the caller starts and closes it.
        tokenizer: The model's tokenizer.
        log: Log of completions; None for an endpoint whose completions are not trained on.
        bounds: Limits of the model.
        settings: Limits of the gateway.
        model_name: Shown by /v1/models; requests may name any model.
        reader: Reads the requests; None for one without a memory.
    """

    answers_probes = True  # with a fixed answer, as to atroposlib's clients

    def __init__(
        self,
        router: Servers,
        tokenizer: Tokenizer,
        log: GatewayLog | None,
        bounds: Bounds,
        settings: GatewaySettings | None = None,
        model_name: str = "default",
        reader: RequestReader | None = None,
    ) -> None:
        self.router, self.tokenizer, self.log, self.model_name = router, tokenizer, log, model_name
        self.settings = settings or GatewaySettings()
        self.reader = reader or RequestReader(tokenizer, bounds)
        self.counters = GatewayCounters()
        self.train = Gate(lambda: self.settings.max_requests * max(1, router.num_servers))
        self.eval = Gate(lambda: self.settings.max_eval_requests * max(1, router.num_servers))

    def get_status(self) -> dict[str, Any]:
        """Return counters, and the metrics of each server."""
        gates = {"train": self.train, "eval": self.eval}
        return {
            **vars(self.counters),
            **{name: {"running": gate.running, "waiting": gate.waiting} for name, gate in gates.items()},
            "log": self.log.get_status() if self.log else None,
            "servers": self.router.describe_servers(),
        }

    def make_completions(self, order: Order) -> list[Completion]:
        """Return the empty completions of an order, for `make`."""
        completions: list[Completion] = []
        for prompt in order.prompts:
            completions += [
                Completion(prompt, len(completions) + i, i, self.tokenizer) for i in range(prompt.n)
            ]
        return completions

    async def make(
        self,
        completions: Sequence[Completion],
        evaluation: bool = False,
        changed: asyncio.Event | None = None,
    ) -> None:
        """Make completions, and log them. With `changed` they are made in slices, and it is set after each.

        Raises InputRefused, RequestRefused, RoleFailed.
        """
        self.counters.requests += 1
        gate = self.eval if evaluation else self.train
        pieces: list[list[Completion]] = []
        for completion in completions:
            full = not pieces or len(pieces[-1]) >= self.settings.max_n_per_request
            if full or pieces[-1][0].order is not completion.order:
                pieces.append([])
            pieces[-1].append(completion)

        async def make_piece(piece: list[Completion]) -> None:
            async with gate:
                await self._make_piece(piece, changed)

        async with asyncio.TaskGroup() as group:
            for piece in pieces:
                group.create_task(make_piece(piece))

    async def _make_piece(self, piece: list[Completion], changed: asyncio.Event | None) -> None:
        order = piece[0].order
        in_slices = order.sliced and (changed is not None or bool(order.stops))
        size = FIRST_SLICE if in_slices else None
        left = piece
        while left:
            turns = await self._wait_for_answer([completion.request(size) for completion in left])
            for completion, turn in zip(left, turns, strict=True):
                completion.absorb(turn)
                self.counters.tokens_regenerated += turn.num_regenerated
            done = [completion for completion in left if completion.done]
            if done:
                turns = [completion.turn for completion in done]
                if self.log is not None:
                    await self.log.append(order.input_ids, turns, order.sampling.get("temperature", 1.0))
                self.counters.completions += len(done)
                self.counters.tokens += sum(len(turn.output_ids) for turn in turns)
            if changed:
                changed.set()
            left = [completion for completion in left if not completion.done]
            size = min(2 * size, LARGEST_SLICE) if size else None

    async def _wait_for_answer(self, requests: list[GenerateRequest]) -> list[Turn]:
        """Return the turns of requests once a server answers. Raises RoleFailed after `hold_s`."""
        begun, pause_s = time.monotonic(), 0.2
        while True:
            try:
                return await self.router.generate_many(requests)
            except RoleFailed as error:
                if time.monotonic() - begun > self.settings.hold_s:
                    raise
                if not self.counters.held:
                    logger.info("the gateway holds its requests until a server answers: %s", error)
            self.counters.held += 1
            try:
                await asyncio.sleep(pause_s)
            finally:
                self.counters.held -= 1
                self.counters.held_s += pause_s
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
