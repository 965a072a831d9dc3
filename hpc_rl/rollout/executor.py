"""Executor: the rollout service's side of its worker processes.

Starts them, hands out prompts, notices deaths at once.

It knows tickets and messages (pipes.py), not what a prompt is worth: the tickets of a dead worker are
reported as lost.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hpc_rl.errors import ConfigError, ExitCode, RoleFailed
from hpc_rl.rollout import pipes
from hpc_rl.rollout.pipes import CancelPrompt, Outcome, Request, RunPrompt

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
LONG_LIFE_S = 60.0
MAX_SHORT_LIVES = 5


@dataclass
class _Seat:
    """One of the workers; it outlives the processes that run it."""

    number: int
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    tickets: set[int] = field(default_factory=set)
    short_lives: int = 0
    error: str = ""  # why its newest process can't work


class Executor:
    """Use start, run, cancel, close.

    Args:
        argv: Returns the command line of worker number i.
        num_workers: Number of workers.
        on_frame: Called with each answer to a ticket that is still wanted.
        on_lost: Called with the tickets of a worker that exited.
    """

    def __init__(
        self,
        argv: Callable[[int], list[str]],
        num_workers: int,
        on_frame: Callable[[Outcome], None],
        on_lost: Callable[[list[int]], None],
    ) -> None:
        self._argv = argv
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._seats = [_Seat(number) for number in range(num_workers)]
        self._owner: dict[int, _Seat] = {}
        self._queue: list[RunPrompt] = []  # while no worker is ready
        self._keepers: list[asyncio.Task[None]] = []
        self.restarts = 0

    async def start(self) -> None:
        self._keepers = [
            asyncio.create_task(self._keep(seat), name=f"worker-{seat.number}") for seat in self._seats
        ]

    async def failure(self) -> None:
        """Raise ConfigError or RoleFailed once a worker can't be started again; never returns."""
        await asyncio.gather(*self._keepers)

    def run(self, frame: RunPrompt) -> None:
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
        """Drop a ticket: its answer is not wanted any more."""
        self._queue = [frame for frame in self._queue if frame["ticket"] != ticket]
        seat = self._owner.pop(ticket, None)
        if seat is not None:
            seat.tickets.discard(ticket)
            self._write(seat, CancelPrompt(op="cancel", ticket=ticket))

    async def close(self) -> None:
        """Kill the workers; their unfinished prompts are issued again by the next incarnation."""
        for keeper in self._keepers:
            keeper.cancel()
        for seat in self._seats:
            if seat.process is not None and seat.process.returncode is None:
                pipes.kill(seat.process)
                await seat.process.wait()

    @property
    def pids(self) -> list[int]:
        return [seat.process.pid for seat in self._seats if seat.ready and seat.process is not None]

    def _write(self, seat: _Seat, frame: Request) -> None:
        stdin = seat.process.stdin if seat.process is not None else None
        # a worker that is gone is noticed by its other pipe
        if stdin is not None and not stdin.is_closing():
            stdin.write(pipes.pack(frame))

    async def _keep(self, seat: _Seat) -> None:
        while True:
            began = time.monotonic()
            pipe = asyncio.subprocess.PIPE
            seat.error = ""
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
                    seat.error or "an executor worker rejected the configuration without giving a reason"
                )
            self.restarts += 1
            seat.short_lives = 0 if time.monotonic() - began > LONG_LIFE_S else seat.short_lives + 1
            if seat.short_lives >= MAX_SHORT_LIVES:
                raise RoleFailed(
                    f"executor worker {seat.number} exited {seat.short_lives} times in a row, "
                    f"last with code {code}" + (f": {seat.error}" if seat.error else "")
                )
            pause_s = min(MAX_BACKOFF_S, 0.1 * 4 ** (seat.short_lives - 1)) if seat.short_lives else 0.0
            logger.warning(
                "executor worker %d exited with code %d: its %d prompts are issued again",
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
                seat.error = frame["error"]
            elif self._owner.get(frame["ticket"]) is seat:
                del self._owner[frame["ticket"]]
                seat.tickets.discard(frame["ticket"])
                self._on_frame(frame)
