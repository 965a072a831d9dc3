"""Gateway: the servers of a trial as one endpoint that holds requests where a server would fail them.

During a weight update, or while servers restart, a request waits; one that was interrupted resumes from its
tokens. The caller sees neither. Training and evaluation have limits of their own.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.gate import Gate
from hpc_rl.core.types import Turn
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.gateway.balance import BalancingRouter
from hpc_rl.gateway.completions import Completion
from hpc_rl.gateway.gateway_log import GatewayLog
from hpc_rl.gateway.requests import Bounds, Order, RequestReader
from hpc_rl.servers.client import GenerateRequest

logger = logging.getLogger(__name__)
FIRST_SLICE, LARGEST_SLICE = 16, 256  # tokens; slices double in between
LONGEST_PAUSE_S = 5.0  # between two tries of a request that is held


@dataclass(frozen=True)
class GatewaySettings:
    """Limits of the gateway.

    Args:
        max_n_per_request: Completions that one call to a server asks for; more are split into several calls.
        max_requests: Calls for training that each server has at once.
        max_eval_requests: Calls for evaluation that each server has at once, on top of those for training.
        hold_s: Time for which a request is held without any answer of a server before it is answered 503.
    """

    max_n_per_request: int = 8
    max_requests: int = 512
    max_eval_requests: int = 64
    hold_s: float = 3600.0


@dataclass
class GatewayCounters:
    """What the gateway has done since it started; `held_s` is the time that requests waited for servers."""

    requests: int = 0
    completions: int = 0
    tokens: int = 0
    refused: int = 0
    unanswered: int = 0
    abandoned: int = 0
    probes: int = 0
    held_s: float = 0.0
    held: int = field(default=0)  # now


class Gateway:
    """Makes the completions of orders.

    Args:
        router: The trial's servers; started and closed by the caller.
        tokenizer: That of the model.
        log: Where completions are logged.
        bounds: What the model takes.
        settings: Limits.
        model_name: Shown by /v1/models; requests may name any model.
    """

    def __init__(
        self,
        router: BalancingRouter,
        tokenizer: Tokenizer,
        log: GatewayLog,
        bounds: Bounds,
        settings: GatewaySettings | None = None,
        model_name: str = "default",
    ) -> None:
        self.router, self.tokenizer, self.log, self.model_name = router, tokenizer, log, model_name
        self.settings = settings or GatewaySettings()
        self.reader = RequestReader(tokenizer, bounds)
        self.counters = GatewayCounters()
        self.train = Gate(lambda: self.settings.max_requests * max(1, router.num_servers))
        self.eval = Gate(lambda: self.settings.max_eval_requests * max(1, router.num_servers))

    def status(self) -> dict[str, Any]:
        """Return counters, and what is known of each server."""
        gates = {"train": self.train, "eval": self.eval}
        return {
            **vars(self.counters),
            **{name: {"running": gate.running, "waiting": gate.waiting} for name, gate in gates.items()},
            "log": self.log.status(),
            "servers": self.router.servers(),
        }

    def completions(self, order: Order) -> list[Completion]:
        """Return the completions of an order, to be made by `make`."""
        made: list[Completion] = []
        for prompt in order.prompts:
            made += [Completion(prompt, len(made) + i, i, self.tokenizer) for i in range(prompt.n)]
        return made

    async def make(
        self,
        completions: Sequence[Completion],
        evaluation: bool = False,
        changed: asyncio.Event | None = None,
    ) -> None:
        """Make completions, and log them; with `changed` in slices, and it is set after each.

        Raises InputRefused, RequestRefused, RoleFailed.
        """
        self.counters.requests += 1
        gate = self.eval if evaluation else self.train
        pieces: list[list[Completion]] = []
        for one in completions:
            full = not pieces or len(pieces[-1]) >= self.settings.max_n_per_request
            if full or pieces[-1][0].order is not one.order:
                pieces.append([])
            pieces[-1].append(one)

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
            turns = await self._until_answered([one.request(size) for one in left])
            for one, turn in zip(left, turns, strict=True):
                one.absorb(turn)
            done = [one for one in left if one.done]
            if done:
                turns = [one.turn for one in done]
                await self.log.append(order.input_ids, turns, order.sampling.get("temperature", 1.0))
                self.counters.completions += len(done)
                self.counters.tokens += sum(len(turn.output_ids) for turn in turns)
            if changed:
                changed.set()
            left = [one for one in left if not one.done]
            size = min(2 * size, LARGEST_SLICE) if size else None

    async def _until_answered(self, requests: list[GenerateRequest]) -> list[Turn]:
        """Return the turns of requests once a server answers. Raises RoleFailed after `hold_s`."""
        begun, pause_s = time.monotonic(), 0.2
        while True:
            try:
                return await self.router.generate_many(requests)
            except RoleFailed as error:
                if time.monotonic() - begun > self.settings.hold_s:
                    raise
                if not self.counters.held:
                    logger.info("requests are held: %s", error)
            self.counters.held += 1
            try:
                await asyncio.sleep(pause_s)
            finally:
                self.counters.held -= 1
                self.counters.held_s += pause_s
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
