"""Executor: starts the rollout service's worker processes, hands out prompts, notices deaths.

It knows tickets and messages (pipes.py), but no rewards: the tickets of a dead worker are reported as lost.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hpc_rl.core.errors import ConfigError, EndpointUnavailable, ExitCode, RoleFailed
from hpc_rl.core.types import WeightVersion
from hpc_rl.datasets.encode import Prompt
from hpc_rl.rollout import pipes
from hpc_rl.rollout.pipes import CancelPrompt, NoteKept, NoteMade, Outcome, Request, RunPrompt

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
LONG_LIFE_S = 60.0
MAX_SHORT_LIVES = 5


def make_run_frame(
    ticket: int,
    index: int,
    prompt: Prompt,
    version: WeightVersion,
    evaluate: bool = False,
    notes: Mapping[str, bytes] | None = None,
    held_out_set: str = "",
) -> RunPrompt:
    return RunPrompt(
        op="run",
        ticket=ticket,
        index=index,
        epoch=prompt.epoch,
        row=prompt.row,
        columns=prompt.columns,
        input_ids=prompt.input_ids,
        version=str(version),
        evaluate=evaluate,
        held_out_set=held_out_set,
        notes=dict(notes or {}),
    )


@dataclass
class _WorkerSlot:
    """One of the workers; it outlives the processes that run it."""

    number: int
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    tickets: set[int] = field(default_factory=set)
    short_lives: int = 0
    error: str = ""  # why its newest process can't work
    endpoints: dict[str, str] = field(default_factory=dict)  # problem of each unreachable external pool
    blocked: str = ""  # place of the call that blocks its process
    blocked_since: float = 0.0


class Executor:
    """Use start, run, cancel, close.

    `on_outcome` is called with each answer to a ticket that is still wanted, `on_note` with each note,
    `on_lost` with the tickets of a worker that exited. `argv` returns the command line of worker number i.
    """

    def __init__(self, argv: Callable[[int], list[str]], num_workers: int) -> None:
        self.on_outcome: Callable[[Outcome], None] = lambda outcome: None
        self.on_note: Callable[[NoteMade], None] = lambda note: None
        self.on_lost: Callable[[list[int]], None] = lambda tickets: None
        self.restarts = 0
        self._argv = argv
        self._slots = [_WorkerSlot(number) for number in range(num_workers)]
        self._queue: list[RunPrompt] = []  # while no worker is ready
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(slot)) for slot in self._slots]

    async def wait_for_failure(self) -> None:
        """Raise ConfigError or RoleFailed once a worker can't be restarted, or can't work."""
        await asyncio.gather(*self._tasks)

    def run(self, frame: RunPrompt) -> None:
        """Send a prompt to the worker with the fewest tickets."""
        live = [slot for slot in self._slots if slot.ready]
        if not live:
            self._queue.append(frame)
            return
        slot = min(live, key=lambda slot: len(slot.tickets))
        slot.tickets.add(frame["ticket"])
        self._write(slot, frame)

    @property
    def endpoints(self) -> dict[str, str]:
        """The external pools that do not answer, as seen by a worker, and why."""
        return {pool: problem for slot in self._slots for pool, problem in slot.endpoints.items() if problem}

    @property
    def blocked(self) -> dict[str, float]:
        """The places of user code that block a worker's event loop, with the seconds of each."""
        now = time.monotonic()
        return {slot.blocked: round(now - slot.blocked_since, 1) for slot in self._slots if slot.blocked}

    def confirm_note(self, frame: NoteKept) -> None:
        """Let the workflow of a ticket continue, if it is still wanted."""
        for slot in self._slots:
            if frame["ticket"] in slot.tickets:
                self._write(slot, frame)

    def cancel(self, ticket: int) -> None:
        """Drop a ticket: its answer is not wanted any more."""
        self._queue = [frame for frame in self._queue if frame["ticket"] != ticket]
        for slot in self._slots:
            if ticket in slot.tickets:
                slot.tickets.remove(ticket)
                self._write(slot, CancelPrompt(op="cancel", ticket=ticket))

    async def close(self) -> None:
        """Kill the workers; the next incarnation issues their unfinished prompts again."""
        for task in self._tasks:
            task.cancel()
        for slot in self._slots:
            if slot.process is not None and slot.process.returncode is None:
                pipes.kill(slot.process)
                await slot.process.wait()

    def _write(self, slot: _WorkerSlot, frame: Request) -> None:
        stdin = slot.process.stdin if slot.process is not None else None
        # the other pipe reports a dead worker
        if stdin is not None and not stdin.is_closing():
            stdin.write(pipes.pack(frame))

    async def _keep(self, slot: _WorkerSlot) -> None:
        while True:
            began = time.monotonic()
            pipe = asyncio.subprocess.PIPE
            slot.error, slot.endpoints, slot.blocked = "", {}, ""
            slot.process = await asyncio.create_subprocess_exec(
                *self._argv(slot.number), stdin=pipe, stdout=pipe
            )
            try:
                await self._listen(slot)
            finally:
                slot.ready = False
                lost, slot.tickets, slot.blocked = list(slot.tickets), set(), ""
            code = await pipes.wait_for_exit(slot.process)
            if code == ExitCode.BAD_CONFIG:
                where = "see the log of the rollout role (`hpc-rl logs TRIAL --role rollout`)"
                unknown = f"rollout worker {slot.number} can't use the configuration; {where}"
                raise ConfigError(slot.error or unknown)
            self.restarts += 1
            slot.short_lives = 0 if time.monotonic() - began > LONG_LIFE_S else slot.short_lives + 1
            if slot.short_lives >= MAX_SHORT_LIVES:
                raise RoleFailed(
                    f"rollout worker {slot.number} ended {slot.short_lives} times in a row, "
                    f"last with exit code {code}" + (f": {slot.error}" if slot.error else "")
                )
            pause_s = min(MAX_BACKOFF_S, 0.1 * 4 ** (slot.short_lives - 1)) if slot.short_lives else 0.0
            form = "rollout worker %d ended with exit code %d and is started again, with its %d prompts"
            logger.warning(form, slot.number, code, len(lost))
            self.on_lost(lost)
            await asyncio.sleep(pause_s)

    async def _listen(self, slot: _WorkerSlot) -> None:
        assert slot.process is not None and slot.process.stdout is not None
        while (frame := await pipes.receive_frame(slot.process.stdout)) is not None:
            if frame["op"] == "ready":
                slot.ready = True
                queue, self._queue = self._queue, []
                for waiting in queue:
                    self.run(waiting)
            elif frame["op"] == "ends":
                slot.error = frame["error"]
            elif frame["op"] == "unavailable":
                raise EndpointUnavailable(frame["error"])
            elif frame["op"] == "endpoint":
                slot.endpoints[frame["pool"]] = frame["problem"]
            elif frame["op"] == "blocked":
                slot.blocked, slot.blocked_since = frame["place"], time.monotonic()
            elif frame["op"] == "note":
                self.on_note(frame)
            elif frame["ticket"] in slot.tickets:
                slot.tickets.remove(frame["ticket"])
                self.on_outcome(frame)
