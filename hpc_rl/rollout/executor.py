"""Executor: the sequencer's side of its worker processes: starts them, hands out prompts, notices deaths at once.

It knows tickets and frames (worker.py), nothing of what a prompt is worth: a dead worker's tickets are reported as lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.errors import ConfigError, ExitCode, RoleFailed
from hpc_rl.rollout import pipes

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
LONG_LIFE_S = 60.0
MAX_SHORT_LIVES = 5


@dataclass
class _Seat:
    """One worker's place: it outlives the processes that take it."""

    number: int
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    tickets: set[int] = field(default_factory=set)
    short_lives: int = 0
    last_words: str = ""  # of its newest process, why it ends


class Executor:
    """Use start, run, cancel, close.

    Args:
        argv: Command line of worker number i.
        num_workers: How many.
        on_frame: Called with each answer of a ticket that is still wanted.
        on_lost: Called with the tickets of a worker that ended.
    """

    def __init__(
        self,
        argv: Callable[[int], list[str]],
        num_workers: int,
        on_frame: Callable[[dict[str, Any]], None],
        on_lost: Callable[[list[int]], None],
    ) -> None:
        self._argv = argv
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._seats = [_Seat(number) for number in range(num_workers)]
        self._owner: dict[int, _Seat] = {}
        self._queue: list[dict[str, Any]] = []  # for the time when no worker is there
        self._keepers: list[asyncio.Task[None]] = []
        self.restarts = 0

    async def start(self) -> None:
        self._keepers = [
            asyncio.create_task(self._keep(seat), name=f"worker-{seat.number}") for seat in self._seats
        ]

    async def failure(self) -> None:
        """Returns never; raises what ended a seat for good (ConfigError, RoleFailed)."""
        await asyncio.gather(*self._keepers)

    def run(self, frame: dict[str, Any]) -> None:
        """Hand a prompt to the worker with the least to do."""
        live = [seat for seat in self._seats if seat.ready]
        if not live:
            self._queue.append(frame)
            return
        seat = min(live, key=lambda seat: len(seat.tickets))
        seat.tickets.add(frame["ticket"])
        self._owner[frame["ticket"]] = seat
        self._write(seat, frame)

    def cancel(self, ticket: int) -> None:
        """An answer is not wanted any more."""
        self._queue = [frame for frame in self._queue if frame["ticket"] != ticket]
        seat = self._owner.pop(ticket, None)
        if seat is not None:
            seat.tickets.discard(ticket)
            self._write(seat, {"op": "cancel", "ticket": ticket})

    async def close(self) -> None:
        """End the workers. The rest of their work is lost, which is what restarts are made for."""
        for keeper in self._keepers:
            keeper.cancel()
        for seat in self._seats:
            if seat.process is not None and seat.process.returncode is None:
                pipes.kill(seat.process)
                await seat.process.wait()

    @property
    def pids(self) -> list[int]:
        return [seat.process.pid for seat in self._seats if seat.ready and seat.process is not None]

    def _write(self, seat: _Seat, frame: dict[str, Any]) -> None:
        if (
            seat.process is not None
            and seat.process.stdin is not None
            and not seat.process.stdin.is_closing()
        ):
            seat.process.stdin.write(pipes.pack(frame))  # a worker that is gone is noticed by its other pipe

    async def _keep(self, seat: _Seat) -> None:
        while True:
            began = time.monotonic()
            pipe = asyncio.subprocess.PIPE
            seat.last_words = ""
            seat.process = await asyncio.create_subprocess_exec(
                *self._argv(seat.number), stdin=pipe, stdout=pipe
            )
            try:
                await self._listen(seat)
            finally:
                seat.ready = False
                lost, seat.tickets = list(seat.tickets), set()
                for ticket in lost:
                    self._owner.pop(ticket, None)
            code = await pipes.exit_code(seat.process)
            if code == ExitCode.BAD_CONFIG:
                raise ConfigError(
                    seat.last_words or "an executor worker refused the configuration and left no word"
                )
            self.restarts += 1
            seat.short_lives = 0 if time.monotonic() - began > LONG_LIFE_S else seat.short_lives + 1
            if seat.short_lives >= MAX_SHORT_LIVES:
                raise RoleFailed(
                    f"executor worker {seat.number} ended {seat.short_lives} times in a row, at last with code {code}"
                    + (f": {seat.last_words}" if seat.last_words else "")
                )
            pause_s = min(MAX_BACKOFF_S, 0.1 * 4 ** (seat.short_lives - 1)) if seat.short_lives else 0.0
            logger.warning(
                "executor worker %d ended with code %d: its %d prompts are issued again",
                seat.number,
                code,
                len(lost),
            )
            self._on_lost(lost)
            await asyncio.sleep(pause_s)

    async def _listen(self, seat: _Seat) -> None:
        assert seat.process is not None and seat.process.stdout is not None
        while (frame := await pipes.read(seat.process.stdout)) is not None:
            if frame["op"] == "ready":
                seat.ready = True
                queue, self._queue = self._queue, []
                for waiting in queue:
                    self.run(waiting)
            elif frame["op"] == "ends":
                seat.last_words = frame["error"]
            elif self._owner.get(frame["ticket"]) is seat:
                del self._owner[frame["ticket"]]
                seat.tickets.discard(frame["ticket"])
                self._on_frame(frame)
